"""Every family of operations: a tiny model, its units and refusals, and what its units promise."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from promises import check_model, check_refused, double, lively
from splitgrow.rules import RULES

OUTPUT = "its neurons are the model's output"


class Net(nn.Module):
    """A model written as one function of its parts and the input."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            own = part if isinstance(part, nn.Module) else nn.Parameter(part)
            setattr(self, name, own)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Headed(nn.Module):
    """A body, flattened into a linear head of the size that it needs."""

    def __init__(self, body: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.body = body
        with torch.no_grad():
            features = body.eval()(x).flatten(1).shape[1]
        self.head = nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def image(*shape: int) -> Tensor:
    return torch.randn(3, *shape)


def after_conv(layer: nn.Module | Callable[[Tensor], Tensor], places: int = 2, width: int = 4,
               size: int = 6) -> tuple[nn.Module, Tensor]:  # fmt: skip
    """conv -> tanh -> layer -> head, and an input for it."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[places - 1](2, width, 3, padding=1)
    x = image(2, *(size,) * places)
    module = layer if isinstance(layer, nn.Module) else Apply(layer)
    return Headed(nn.Sequential(conv, nn.Tanh(), module), x), x


def after_linear(function: Callable[[Tensor], Tensor], width: int = 6) -> tuple[nn.Module, Tensor]:
    """linear -> tanh -> function -> head, and an input for it."""
    x = torch.randn(3, 5)
    return Headed(nn.Sequential(nn.Linear(5, width), nn.Tanh(), Apply(function)), x), x


class SideBySide(nn.Module):
    """Several models, each with its own input and output: captured once, it saves time."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.of = nn.ModuleDict(models)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: model(inputs[name]) for name, model in self.of.items()}


def side_by_side(
    kinds: Sequence[str],
    make: Callable[[str], tuple[nn.Module, Tensor]],
    width: Callable[[str], int] = lambda kind: 4,
    step: float = 1e-3,
) -> None:
    """Check models whose only unit is body.0, and whose head is the output."""
    slugs = {kind: re.sub(r"\W", "_", kind) for kind in kinds}
    made = {slugs[kind]: make(kind) for kind in kinds}
    check_model(
        SideBySide({slug: model for slug, (model, _) in made.items()}),
        ({slug: x for slug, (_, x) in made.items()},),
        {f"of.{slugs[kind]}.body.0": width(kind) for kind in kinds},
        {f"of.{slugs[kind]}.head": OUTPUT for kind in kinds},
        step=step,
    )


def in_groups(kinds: Mapping[str, Any] | Sequence[str], size: int = 8) -> Any:
    """Parametrize a test by some of the kinds at a time."""
    listed = list(kinds)
    groups = [listed[i : i + size] for i in range(0, len(listed), size)]
    return pytest.mark.parametrize("kinds", groups, ids=", ".join)


# ---- linear layers, matrix products ----------------------------------------------------------

W = torch.randn(6, 5)
OUT = torch.randn(2, 6)

PRODUCTS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "linear": lambda s, x: F.linear(F.linear(x, s.w).tanh(), s.out),
    "matmul": lambda s, x: (x @ s.w.T).tanh() @ s.out.T,
    "matmul mT": lambda s, x: (x @ s.w.mT).tanh() @ s.out.mT,
    "mm": lambda s, x: torch.mm(torch.mm(x, s.w.t()).tanh(), s.out.t()),
    "weight on the left": lambda s, x: (s.out @ (s.w @ x.T).tanh()).T,
    "transposed": lambda s, x: (x @ s.w.transpose(0, 1)).tanh() @ s.out.permute(1, 0),
    "scaled weight": lambda s, x: (x @ (s.w * 0.5).T).tanh() @ (2 * s.out / 3).T,
    "negative weight": lambda s, x: (x @ (-s.w).T).tanh() @ (-s.out).T,
    "reshaped weight": lambda s, x: (x @ s.w.flatten().view(-1, 5).T).tanh() @ s.out.view(2, -1).T,
    "bmm": lambda s, x: torch.bmm(
        torch.bmm(x[None], s.w.T[None]).tanh(), s.out.T.unsqueeze(0)
    ).squeeze(0),
    "matmul 3d": lambda s, x: (((x[:, None] @ s.w.T).tanh()) @ s.out.T).squeeze(1),
    "expanded weight": lambda s, x: torch.bmm(
        (x @ s.w.T).tanh()[:, None], s.out.T.expand(x.shape[0], -1, -1)
    )[:, 0],
    "einsum": lambda s, x: torch.einsum(
        "bh,oh->bo", torch.einsum("bi,hi->bh", x, s.w).tanh(), s.out
    ),
    "einsum spaces": lambda s, x: torch.einsum(
        "b h, o h -> b o", torch.einsum("h i, b i -> b h", s.w, x).tanh(), s.out
    ),
    "einsum implicit": lambda s, x: torch.einsum(
        "bh,oh", torch.einsum("bi,hi", x, s.w).tanh(), s.out
    ),
    "einsum ellipsis": lambda s, x: torch.einsum(
        "...h,oh->...o", torch.einsum("...i,hi->...h", x, s.w).tanh(), s.out
    ),
    "einsum ellipsis implicit": lambda s, x: torch.einsum(
        "...h,oh", torch.einsum("...i,hi", x, s.w).tanh(), s.out
    ),
    "einsum ellipsis in front": lambda s, x: torch.einsum(
        "h...,oh->...o", torch.einsum("hi,...i->h...", s.w, x).tanh(), s.out
    ),
    "einsum transposed": lambda s, x: torch.einsum(
        "hb,ho->bo", torch.einsum("bi,ih->hb", x, s.w.T).tanh(), s.out.T
    ),
    "einsum with three": lambda s, x: torch.einsum(
        "bh,oh,o->bo", torch.einsum("bi,hi->bh", x, s.w).tanh(), s.out, torch.ones(2, dtype=x.dtype)
    ),
    "einsum weighted sum": lambda s, x: torch.einsum("bi,hi,oh->bo", x, s.w.tanh(), s.out),
    "inner": lambda s, x: torch.inner(torch.inner(x, s.w).tanh(), s.out),
    "tensordot": lambda s, x: torch.tensordot(
        torch.tensordot(x, s.w, dims=([1], [1])).tanh(), s.out.T, dims=1
    ),
    "addmm": lambda s, x: torch.addmm(x[:, :2], torch.addmm(x[:, :1], x, s.w.T).tanh(), s.out.T),
    "mv": lambda s, x: (x @ s.w.T).tanh() @ s.out.T @ torch.ones(2, 1, dtype=x.dtype),
    "weighted sum": lambda s, x: ((x @ s.w.T).tanh()[:, None] * s.out).sum(-1),
    "weighted sum of a copy": lambda s, x: (
        ((x @ s.w.T).tanh()[:, None] * s.out).contiguous().sum(dim=[2])
    ),
    "linear by broadcasting": lambda s, x: (s.out * (s.w * x[:, None]).sum(-1).tanh()[:, None]).sum(
        -1
    ),
}


@pytest.mark.parametrize("spelling", PRODUCTS)
def test_a_product_with_a_weight_begins_and_ends_a_unit(spelling: str) -> None:
    net = Net(PRODUCTS[spelling], w=W.clone(), out=OUT.clone())
    found = check_model(net, torch.randn(4, 5), {"w": 6}, {"out": ""})
    assert [slot.name for slot in found["w"].theta] == ["w"]
    assert [slot.name for slot in found["w"].consumers] == ["out"]


def test_a_vector_of_weights_ends_a_unit() -> None:
    net = Net(lambda s, x: (x @ s.w.T).tanh() @ s.v, w=W.clone(), v=torch.randn(6))
    check_model(net, torch.randn(4, 5), {"w": 6}, {})


def test_baddbmm() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        n = x.shape[0]
        h = torch.baddbmm(s.b.expand(n, 1, -1), x[:, None], s.w.T.expand(n, 5, -1)).tanh()
        return torch.baddbmm(h.new_zeros(n, 1, 2), h, s.out.T.expand(n, -1, 2))

    net = Net(forward, w=W.clone(), b=torch.randn(6), out=OUT.clone())
    check_model(net, torch.randn(4, 5), {"b": 6}, {"out": OUTPUT})


def test_bilinear_forms_read_both_of_their_inputs() -> None:
    net = Net(
        lambda s, x: s.form(s.a(x).tanh(), s.b(x).sigmoid()),
        a=nn.Linear(5, 4), b=nn.Linear(5, 3), form=nn.Bilinear(4, 3, 2),
    )  # fmt: skip
    check_model(net, torch.randn(4, 5), {"a": 4, "b": 3}, {"form": OUTPUT})


def test_a_bilinear_form_of_two_functions_of_one_unit() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        z = s.a(x)
        return torch.einsum("bi,bj,oij->bo", z.tanh(), z.sigmoid(), s.form)

    net = Net(forward, a=nn.Linear(5, 4), form=torch.randn(2, 4, 4))
    check_model(net, torch.randn(4, 5), {"a": 4}, {"form": OUTPUT})


def test_outer_product_with_a_parameter() -> None:
    net = Net(
        lambda s, x: s.head((torch.outer(x[:, 0], s.p) + s.b).tanh()),
        p=torch.randn(4), b=torch.randn(4), head=nn.Linear(4, 2),
    )  # fmt: skip
    check_model(net, torch.randn(6, 5), {"p": 4}, {"head": OUTPUT})


def test_weights_that_are_chunks_of_one_parameter() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        first, second = s.w.chunk(2)
        return s.head(torch.cat([(x @ first.T).tanh(), (x @ second.T).sigmoid()], 1))

    net = Net(forward, w=torch.randn(6, 5), head=nn.Linear(6, 2))
    check_model(net, torch.randn(4, 5), {"w": 3}, {"head": OUTPUT})


def test_weights_that_are_concatenated_parameters() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        h = (x @ torch.cat([s.u, s.v]).T).tanh()
        return h @ torch.cat([s.p, s.q]).T

    net = Net(
        forward, u=torch.randn(3, 5), v=torch.randn(4, 5), p=torch.randn(1, 7), q=torch.randn(2, 7)
    )
    found = check_model(net, torch.randn(4, 5), {"u": 3, "v": 4}, {"p": OUTPUT, "q": OUTPUT})
    assert [slot.name for slot in found["u"].consumers] == ["p", "q"]


def test_columns_cut_from_one_parameter() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        left, right = s.out.split([4, 3], 1)
        return s.a(x).tanh() @ left.T + s.b(x).sigmoid() @ right.T

    net = Net(forward, a=nn.Linear(5, 4), b=nn.Linear(5, 3), out=torch.randn(2, 7))
    check_model(
        net,
        torch.randn(4, 5),
        None,
        {"a": "fix the width", "b": "fix the width", "out": OUTPUT},
        curved=False,
    )


# ---- convolutions ----------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[int, Callable[..., nn.Module], dict[str, Any]]] = {
    "conv1d": (1, nn.Conv1d, {}),
    "conv2d": (2, nn.Conv2d, {}),
    "conv3d": (3, nn.Conv3d, {}),
    "stride": (2, nn.Conv2d, {"stride": 2}),
    "stride by dimension": (2, nn.Conv2d, {"stride": (1, 2), "padding": (1, 0)}),
    "padding": (2, nn.Conv2d, {"padding": 2}),
    "same": (2, nn.Conv2d, {"padding": "same"}),
    "valid": (2, nn.Conv2d, {"padding": "valid"}),
    "dilation": (2, nn.Conv2d, {"dilation": 2}),
    "dilated same": (1, nn.Conv1d, {"dilation": 2, "padding": "same"}),
    "circular": (2, nn.Conv2d, {"padding": 1, "padding_mode": "circular"}),
    "reflect": (2, nn.Conv2d, {"padding": 1, "padding_mode": "reflect"}),
    "replicate": (2, nn.Conv2d, {"padding": 1, "padding_mode": "replicate"}),
    "circular 1d": (1, nn.Conv1d, {"padding": 1, "padding_mode": "circular"}),
    "circular 3d": (3, nn.Conv3d, {"padding": 1, "padding_mode": "circular"}),
    "without bias": (2, nn.Conv2d, {"bias": False}),
    "transposed 1d": (1, nn.ConvTranspose1d, {}),
    "transposed 2d": (2, nn.ConvTranspose2d, {}),
    "transposed 3d": (3, nn.ConvTranspose3d, {}),
    "transposed stride": (2, nn.ConvTranspose2d, {"stride": 2, "padding": 1, "output_padding": 1}),
    "transposed dilation": (2, nn.ConvTranspose2d, {"dilation": 2}),
    "transposed without bias": (2, nn.ConvTranspose2d, {"bias": False}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_reads_channels_and_makes_channels(kind: str) -> None:
    places, make, options = CONVOLUTIONS[kind]
    size = 6 if places < 3 else 4
    model, x = after_conv(nn.Sequential(make(4, 3, 3, **options), nn.Tanh()), places, size=size)
    found = check_model(model, x, {"body.0": 4, "body.2.0": 3}, {"head": OUTPUT})
    assert [slot.name for slot in found["body.0"].consumers] == ["body.2.0.weight"]
    assert found["body.2.0"].size == 4 * 3**places + options.get("bias", True)


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_depthwise_filter_belongs_to_its_channels_neuron(places: int, transposed: bool) -> None:
    make = getattr(nn, f"Conv{'Transpose' if transposed else ''}{places}d")
    models, inputs = {}, {}
    for multiplier in (1, 2):
        for bias in (True, False):
            name = f"{multiplier}{bias}"
            layer = make(4, 4 * multiplier, 3, groups=4, bias=bias)
            stage = nn.Sequential(layer, nn.Tanh())
            models[name], inputs[name] = after_conv(stage, places, size=5 if places < 3 else 3)
    found = check_model(SideBySide(models), (inputs,), {f"of.{name}.body.0": 4 for name in models})
    for unit in found:
        path = unit.name.removesuffix(".body.0")
        multiplier, bias = int(path[3]), path[4:] == "True"
        assert unit.parameters[:3] == tuple(
            f"{path}.{name}" for name in ("body.0.weight", "body.0.bias", "body.2.0.weight")
        )
        assert unit.size == 2 * 3**places + 1 + multiplier * (3**places + bias)


def test_a_depthwise_convolution_of_one_channel_is_a_convolution() -> None:
    model, x = after_conv(nn.Sequential(nn.Conv2d(1, 1, 3, groups=1), nn.Tanh()), width=1)
    check_model(model, x, {"body.0": 1, "body.2.0": 1}, {"head": OUTPUT})


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_grouped_convolution_is_refused(make: type[nn.Module]) -> None:
    model, x = after_conv(nn.Sequential(make(4, 6, 3, groups=2), nn.Tanh()))
    reason = "a grouped convolution (groups=2) mixes the channels of one group"
    check_model(model, x, {}, {"body.0": f"body.2.0 ({make.__name__}): {reason}",
                               "body.2.0": reason, "head": OUTPUT})  # fmt: skip


def test_a_convolution_of_one_image_without_batch() -> None:
    net = Net(
        lambda s, x: s.b(s.a(x[0]).tanh()).mean((-1, -2)),
        a=nn.Conv2d(2, 4, 3), b=nn.Conv2d(4, 3, 3),
    )  # fmt: skip
    check_model(net, image(2, 6, 6), {"a": 4}, {"b": OUTPUT})


# ---- normalisation ---------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False},
                {"affine": False, "track_running_stats": False}],
    ids=["plain", "not affine", "batch statistics", "neither"],
)  # fmt: skip
def test_batch_norm_is_copied_with_its_channel(places: int, options: dict[str, Any]) -> None:
    norm = getattr(nn, f"BatchNorm{places}d")(4, **options)
    model, x = after_conv(nn.Sequential(norm, nn.Tanh()), places, size=5 if places < 3 else 3)
    found = check_model(model, x, {"body.0": 4}, {"head": OUTPUT})
    copied = {slot.name.rpartition(".")[2] for slot in found["body.0"].copies}
    affine = {"weight", "bias"} if norm.affine else set()
    statistics = {"running_mean", "running_var"} if norm.track_running_stats else set()
    assert copied == affine | statistics
    assert found["body.0"].size == 2 * 3**places + 1


def test_batch_norm_of_features() -> None:
    x = torch.randn(4, 5)
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.GELU())
    check_model(Headed(body, x), x, {"body.0": 6}, {"head": OUTPUT})


@pytest.mark.parametrize("options", [{}, {"affine": True}, {"track_running_stats": True}])
def test_instance_norm_is_per_channel(options: dict[str, Any]) -> None:
    model, x = after_conv(nn.Sequential(nn.InstanceNorm2d(4, **options), nn.Tanh()))
    check_model(model, x, {"body.0": 4}, {"head": OUTPUT})


class HandWrittenRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


MIXERS: dict[str, tuple[nn.Module, str]] = {
    "layer norm": (nn.LayerNorm(6), "is normalised over (layer_norm)"),
    "layer norm without affine": (nn.LayerNorm(6, elementwise_affine=False), "(layer_norm)"),
    "rms norm": (nn.RMSNorm(6), "is normalised over (rms_norm)"),
    "rms norm by hand": (HandWrittenRMSNorm(6), "is averaged over"),
    "group norm": (nn.GroupNorm(2, 6), "is normalised over (group_norm)"),
    "local response norm": (
        Apply(lambda x: F.local_response_norm(x[..., None], 3)[..., 0]), "aten.avg_pool2d"),
    "softmax": (nn.Softmax(-1), "is normalised over (softmax)"),
    "log softmax": (nn.LogSoftmax(-1), "is normalised over (log_softmax)"),
    "softmin": (nn.Softmin(-1), "is normalised over (softmax)"),
    "cosine": (Apply(lambda x: x / x.norm(dim=-1, keepdim=True)), "is reduced over by"),
    "normalize": (Apply(lambda x: F.normalize(x)), "is reduced over by aten.linalg_vector_norm"),
    "mean": (Apply(lambda x: x.mean(-1, keepdim=True)), "is averaged over, so the result would"),
    "centred": (Apply(lambda x: x - x.mean(-1, keepdim=True)), "is averaged over"),
    "sum": (Apply(lambda x: x.sum(-1, keepdim=True)), "is summed over without a parameter"),
    "sum of all": (Apply(lambda x: x + x.sum()), "is summed over without a parameter"),
    "max": (Apply(lambda x: x.max(-1, keepdim=True)[0]), "is reduced over by aten.max"),
    "max of all": (Apply(lambda x: x / x.max()), "is reduced over by aten.max"),
    "amax": (Apply(lambda x: x.amax(-1, keepdim=True)), "is reduced over by aten.amax"),
    "logsumexp": (Apply(lambda x: x.logsumexp(-1, keepdim=True)), "is reduced over"),
    "std": (Apply(lambda x: x / x.std(-1, keepdim=True)), "is reduced over by aten.std"),
    "var_mean": (Apply(lambda x: torch.var_mean(x, -1, keepdim=True)[0]), "is reduced over"),
    "product": (Apply(lambda x: x.prod(-1, keepdim=True)), "is reduced over by aten.prod"),
    "cumsum": (Apply(lambda x: x.cumsum(-1)), "is accumulated over (cumsum)"),
    "cumprod": (Apply(lambda x: x.cumprod(-1)), "is accumulated over (cumprod)"),
    "sort": (Apply(lambda x: x.sort(-1)[0]), "enters aten.sort, which has no rule"),
    "topk": (Apply(lambda x: x.topk(3)[0]), "enters aten.topk, which has no rule"),
    "fft": (Apply(lambda x: torch.fft.rfft(x).abs()), "enters aten.fft_rfft, which has no rule"),
    "gather": (Apply(lambda x: x[:, [0, 2]]), "enters aten.index, which has no rule"),
    "flip": (Apply(lambda x: x.flip(1)), "has its entries put in another order"),
    "roll": (Apply(lambda x: x.roll(1, 1)), "has its entries put in another order"),
    "matrix square": (
        Apply(lambda x: (y := x[:, None].expand(-1, 6, -1)) @ y), "is multiplied with itself"),
    "one entry": (Apply(lambda x: x[:, 0, None]), "has one entry picked out by number"),
    "every second": (Apply(lambda x: x[:, ::2]), "has every 2th entry picked out"),
    "unbind": (Apply(lambda x: torch.stack(x.unbind(1)[:2], 1)), "is taken apart by number"),
    "gram": (Apply(lambda x: x[:, :, None] @ x[:, None]), "is paired with itself"),
    "outer product": (Apply(lambda x: x[:, :, None] * x.tanh()[:, None]), "is paired with itself"),
    "dot product": (Apply(lambda x: (x[:, None] @ x.tanh()[..., None])[..., 0]),
                    "is contracted with another activation"),
    "einsum square": (Apply(lambda x: torch.einsum("bi,bj->bij", x, x)), "multiplies itself"),
    "einsum sum": (Apply(lambda x: torch.einsum("bi->b", x)[:, None]), "is summed over in aten"),
    "one parameter": (Apply(lambda x: x @ x.T), "is contracted with another activation"),
    "bincount": (Apply(lambda x: x + torch.arange(6)), "the result of aten.arange"),
    "constant": (Apply(lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6])), "which cannot grow"),
    "view to a number": (Apply(lambda x: x.view(-1, 6)), "fix the width"),
    "slice to a number": (Apply(lambda x: x[:, :6]), "fix the width"),
    "expanded to a number": (Apply(lambda x: x + x.new_zeros(1, 1).expand(1, 6)), "fix the width"),
    "zeros of a number": (Apply(lambda x: x + torch.zeros(6)), "fix the width"),
}  # fmt: skip


@in_groups(MIXERS, 12)
def test_what_mixes_neurons_is_refused_with_the_reason(kinds: Sequence[str]) -> None:
    models, inputs, refused = {}, {}, {}
    for kind in kinds:
        layer, reason = MIXERS[kind]
        slug, x = re.sub(r"\W", "_", kind), torch.randn(3, 5)
        models[slug] = Headed(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), layer), x)
        inputs[slug] = x
        refused |= {f"of.{slug}.body.0": reason, f"of.{slug}.head": ""}
        if isinstance(layer, HandWrittenRMSNorm):
            refused[f"of.{slug}.body.2"] = reason
    found = sg.find_units(SideBySide(models), (inputs,))
    assert not len(found), found
    check_refused(found, refused)


def test_a_reshape_across_the_channels_is_refused() -> None:
    model, x = after_conv(lambda h: h.reshape(-1, 3, 8).tanh(), places=1)
    reason = "is reshaped across the boundaries of the channels"
    check_model(model, x, {}, {"body.0": reason, "head": OUTPUT})


# ---- elementwise: activations are in test_activations.py -------------------------------------


@pytest.mark.parametrize(
    ("dropout", "places"),
    [(nn.Dropout(), 2), (nn.Dropout1d(), 1), (nn.Dropout2d(), 2), (nn.Dropout3d(), 3),
     (nn.AlphaDropout(), 2), (nn.FeatureAlphaDropout(), 2), (nn.Dropout(inplace=True), 2)],
    ids=str,
)  # fmt: skip
def test_dropout_is_a_copy_when_scoring(dropout: nn.Module, places: int) -> None:
    model, x = after_conv(dropout, places, size=4)
    check_model(model.train(), x, {"body.0": 4}, {"head": OUTPUT})


ARITHMETIC: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "add": lambda s, x: (s.a(x) + s.b(x)).tanh(),
    "add with alpha": lambda s, x: torch.add(s.a(x), s.b(x), alpha=0.3).tanh(),
    "sub": lambda s, x: s.a(x).tanh() - s.b(x).tanh(),
    "rsub": lambda s, x: 1 - s.a(x).tanh() * s.b(x),
    "mul": lambda s, x: s.a(x) * s.b(x),
    "gate": lambda s, x: F.silu(s.a(x)) * s.b(x),
    "div": lambda s, x: s.a(x) / (1 + s.b(x).exp()),
    "pow": lambda s, x: s.a(x) ** 2 + s.b(x) ** 3,
    "scalar factors": lambda s, x: (2 * s.a(x) / 3 + 1).tanh() * s.b(x) * 0.5,
    "in place": lambda s, x: s.a(x).mul_(s.b(x)).add_(1),
    "augmented": lambda s, x: _augmented(s, x),
    "addcmul": lambda s, x: torch.addcmul(s.a(x).tanh(), s.b(x), s.c, value=0.5),
    "lerp": lambda s, x: torch.lerp(s.a(x).tanh(), s.b(x).sin(), 0.3),
    "where": lambda s, x: torch.where(x[:, :1] > 0, s.a(x).tanh(), s.b(x).sigmoid()),
    "masked_fill": lambda s, x: (s.a(x).tanh() * s.b(x)).masked_fill(x[:, :1] > 0, 0.5),
    "maximum": lambda s, x: torch.maximum(s.a(x).tanh(), s.b(x).tanh()),
    "max of two": lambda s, x: torch.max(s.a(x).tanh(), s.b(x).tanh()),
    "atan2": lambda s, x: torch.atan2(s.a(x), s.b(x)),
    "hypot": lambda s, x: torch.hypot(s.a(x), s.b(x)),
    "logaddexp": lambda s, x: torch.logaddexp(s.a(x), s.b(x)),
    "zeros like": lambda s, x: torch.zeros_like(h := s.a(x)) + s.b(x).tanh() * h,
    "zeros of its shape": lambda s, x: _zeros_of_its_shape(s, x),
    "scale of each": lambda s, x: (s.a(x).tanh() * s.c + s.b(x)).sigmoid(),
    "casts": lambda s, x: (s.a(x).tanh().to(torch.float64).type_as(x) * s.b(x)).double(),
    "detach": lambda s, x: s.a(x).tanh().detach() + s.b(x).sin(),
    "clone": lambda s, x: s.a(x).clone().contiguous().tanh() * +s.b(x),
    "neg": lambda s, x: (-s.a(x)).exp() + s.b(x).neg(),
}  # fmt: skip


def _augmented(s: Net, x: Tensor) -> Tensor:
    h = s.a(x)
    h += s.b(x)
    h *= h.tanh()
    return h


def _zeros_of_its_shape(s: Net, x: Tensor) -> Tensor:
    h = s.a(x).tanh()
    return torch.zeros(h.shape, dtype=h.dtype) + h.new_ones(h.shape[1]) * s.b(x) + h


@pytest.mark.parametrize("spelling", ARITHMETIC)
def test_operands_of_arithmetic_are_one_unit(spelling: str) -> None:
    uses_c = spelling in ("addcmul", "scale of each")
    net = Net(
        lambda s, x: s.head(ARITHMETIC[spelling](s, x)),
        a=nn.Linear(5, 4), b=nn.Linear(5, 4), head=nn.Linear(4, 2),
        **{"c": torch.randn(4)} if uses_c else {},
    )  # fmt: skip
    found = check_model(net, torch.randn(7, 5), {"a": 4}, {"head": OUTPUT})
    made_of = {slot.name for slot in found["a"].theta}
    assert made_of == {"a.weight", "a.bias", "b.weight", "b.bias"} | ({"c"} if uses_c else set())


def test_a_residual_stream_is_one_unit() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        h = s.stem(x)
        h = h + s.up(s.down(h).tanh())
        return s.head(h.sigmoid())

    net = Net(
        forward,
        stem=nn.Linear(5, 4),
        down=nn.Linear(4, 3),
        up=nn.Linear(3, 4),
        head=nn.Linear(4, 2),
    )
    found = check_model(net, torch.randn(7, 5), {"stem": 4, "down": 3}, {"head": OUTPUT})
    assert [slot.name for slot in found["stem"].consumers] == ["down.weight", "head.weight"]


def test_a_square_layer_in_a_residual_stream_makes_and_reads_it() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.head((h + s.block(h).tanh()).sigmoid())

    net = Net(forward, stem=nn.Linear(5, 4), block=nn.Linear(4, 4), head=nn.Linear(4, 2))
    found = check_model(net, torch.randn(7, 5), {"stem": 4}, {"head": OUTPUT})
    assert ("block.weight", 0) in {(slot.name, slot.dim) for slot in found["stem"].theta}
    assert ("block.weight", 1) in {(slot.name, slot.dim) for slot in found["stem"].consumers}


def test_a_product_that_adds_its_own_input_is_refused() -> None:
    net = Net(
        lambda s, x: s.head(torch.addmm(h := s.stem(x).tanh(), h, s.w).sigmoid()),
        stem=nn.Linear(5, 4), w=torch.randn(4, 4), head=nn.Linear(4, 2),
    )  # fmt: skip
    reason = "enters the same operation twice"
    check_model(net, torch.randn(7, 5), {}, {"stem": reason, "w": reason, "head": OUTPUT})


def test_squeeze_and_excitation() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        h = s.conv(x).tanh()
        gate = s.up(s.down(h.mean((2, 3))).tanh()).sigmoid()
        return s.head((h * gate[:, :, None, None]).mean((2, 3)))

    net = Net(
        forward,
        conv=nn.Conv2d(2, 4, 3),
        down=nn.Linear(4, 3),
        up=nn.Linear(3, 4),
        head=nn.Linear(4, 2),
    )
    found = check_model(net, image(2, 5, 5), {"conv": 4, "down": 3}, {"head": OUTPUT})
    assert [slot.name for slot in found["conv"].consumers] == ["down.weight", "head.weight"]


def test_a_gate_for_all_channels_is_carried_by_none() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        h = s.conv(x).tanh()
        gate = s.gate(x).sigmoid()  # (N, 1, H, W)
        return s.head((h * gate.expand_as(h)).mean((2, 3)) * 2)

    net = Net(forward, conv=nn.Conv2d(2, 4, 3), gate=nn.Conv2d(2, 1, 3), head=nn.Linear(4, 2))
    reason = "is expanded, which only a width of 1 allows"
    check_model(net, image(2, 5, 5), {"conv": 4}, {"gate": reason, "head": OUTPUT})


def test_a_scale_for_all_channels_is_no_neuron() -> None:
    net = Net(
        lambda s, x: s.head((s.a(x) * s.scale).tanh()),
        a=nn.Linear(5, 4), scale=torch.randn(1), head=nn.Linear(4, 2),
    )  # fmt: skip
    check_model(net, torch.randn(7, 5), {"a": 4}, {"head": OUTPUT})


@pytest.mark.parametrize("slopes", [1, 4])
@pytest.mark.parametrize("places", [0, 2])
def test_prelu_with_one_slope_or_many(slopes: int, places: int) -> None:
    layer = nn.Sequential(nn.PReLU(slopes), nn.Tanh())
    if places:
        model, x = after_conv(layer)
    else:
        x = torch.randn(7, 5)
        model = Headed(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), layer), x)
    found = check_model(model, x, {"body.0": 4}, {"head": OUTPUT})
    assert ("body.2.0.weight" in found["body.0"].parameters) == (slopes == 4)


def test_prelu_with_one_slope_and_one_channel() -> None:
    model, x = after_conv(nn.Sequential(nn.PReLU(), nn.Tanh()), width=1)
    check_model(model, x, {"body.0": 1}, {"head": OUTPUT})


@pytest.mark.parametrize("dim", [1, -1])
def test_glu_halves_are_one_unit(dim: int) -> None:
    x = torch.randn(7, 5)
    model = Headed(nn.Sequential(nn.Linear(5, 8), nn.GLU(dim)), x)
    found = check_model(model, x, {"body.0": 4}, {"head": OUTPUT})
    assert found["body.0"].size == 2 * 6
    assert found["body.0"].theta[0].positions.tolist() == [[k, 4 + k] for k in range(4)]


def test_glu_across_two_units_is_refused() -> None:
    net = Net(
        lambda s, x: s.head(F.glu(torch.cat([s.a(x), s.b(x)[:, :3].mean(1, keepdim=True)], 1))),
        a=nn.Linear(5, 3), b=nn.Linear(5, 3), head=nn.Linear(2, 2),
    )  # fmt: skip
    check_model(net, torch.randn(7, 5), None, None, curved=False)


# ---- pooling, padding, upsampling ------------------------------------------------------------


def with_indices(pool: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: pool(x)[0] * 2


def _poolings() -> dict[str, tuple[int, Callable[[Tensor], Tensor]]]:
    found: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {}
    for places in (1, 2, 3):
        for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
            found[f"{kind}{places}d"] = (places, getattr(nn, f"{kind}{places}d")(2))
        for kind in ("MaxPool", "AdaptiveMaxPool"):
            pool = getattr(nn, f"{kind}{places}d")(2, return_indices=True)
            found[f"{kind}{places}d with indices"] = (places, with_indices(pool))
        found[f"LPPool{places}d"] = (places, getattr(nn, f"LPPool{places}d")(2, 2))
    found["max, stride and padding"] = (2, nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True))
    found["average, stride and padding"] = (2, nn.AvgPool2d(3, stride=2, padding=1))
    found["to one place"] = (2, nn.AdaptiveAvgPool2d(1))
    found["max unequal"] = (2, nn.AdaptiveMaxPool2d((1, 3)))
    return found


POOLINGS = _poolings()


@in_groups(POOLINGS)
def test_pooling_carries_channels(kinds: Sequence[str]) -> None:
    def make(kind: str) -> tuple[nn.Module, Tensor]:
        places, pool = POOLINGS[kind]
        return after_conv(lambda h: pool(h).sin(), places, size=5 if places < 3 else 4)

    side_by_side(kinds, make, step=1e-5)  # so small that the place of no maximum changes


def test_pooling_over_channels_is_refused() -> None:
    model, x = after_conv(lambda h: F.max_pool1d(h.flatten(2).mT, 2).mT, width=4)
    check_model(model, x, {}, {"body.0": "is mixed by aten.max_pool1d", "head": OUTPUT})


RESIZES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "nearest 1d": (1, lambda h: F.interpolate(h, scale_factor=2)),
    "linear": (1, lambda h: F.interpolate(h, scale_factor=2, mode="linear")),
    "nearest 2d": (2, lambda h: F.interpolate(h, scale_factor=2)),
    "nearest exact": (2, lambda h: F.interpolate(h, size=(5, 7), mode="nearest-exact")),
    "bilinear": (2, lambda h: F.interpolate(h, scale_factor=1.5, mode="bilinear")),
    "bilinear aligned": (2, nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True)),
    "bilinear antialiased": (
        2, lambda h: F.interpolate(h, scale_factor=0.5, mode="bilinear", antialias=True)),
    "bicubic": (2, lambda h: F.interpolate(h, scale_factor=2, mode="bicubic")),
    "area": (2, lambda h: F.interpolate(h, scale_factor=0.5, mode="area")),
    "nearest 3d": (3, lambda h: F.interpolate(h, scale_factor=2)),
    "trilinear": (3, lambda h: F.interpolate(h, scale_factor=2, mode="trilinear")),
    "to the size of the input": (2, lambda h: F.interpolate(h[:, :, ::2], size=h.shape[2:])),
    "pad 1d": (1, lambda h: F.pad(h, (1, 2))),
    "pad 2d": (2, lambda h: F.pad(h, (1, 2, 0, 1), value=0.5)),
    "pad rows only": (2, lambda h: F.pad(h, (0, 0, 1, 1))),
    "crop": (2, lambda h: F.pad(h, (-1, 0, 0, -1))),
    "reflect 1d": (1, lambda h: F.pad(h, (1, 1), mode="reflect")),
    "reflect 2d": (2, nn.ReflectionPad2d(1)),
    "reflect 3d": (3, nn.ReflectionPad3d(1)),
    "replicate 1d": (1, nn.ReplicationPad1d(2)),
    "replicate 2d": (2, nn.ReplicationPad2d(2)),
    "replicate 3d": (3, nn.ReplicationPad3d(1)),
    "circular 1d": (1, nn.CircularPad1d(1)),
    "circular 2d": (2, nn.CircularPad2d(1)),
    "circular 3d": (3, nn.CircularPad3d(1)),
    "zero 2d": (2, nn.ZeroPad2d(1)),
    "constant 3d": (3, nn.ConstantPad3d(1, 0.5)),
    "pixel shuffle": (2, lambda h: F.pixel_shuffle(h, 2)),
    "channel shuffle": (2, lambda h: F.channel_shuffle(h, 2)),
    "pixel unshuffle": (2, lambda h: F.pixel_unshuffle(h, 2)),
    "unfold": (2, lambda h: F.unfold(h, 2)),
    "fold": (2, lambda h: F.fold(F.unfold(h, 2), (4, 4), 2)),
    "windows": (1, lambda h: h.unfold(2, 3, 1)),
    "shift": (1, lambda h: h[:, :, 1:] - h[:, :, :-1]),
    "grid sample": (2, lambda h: F.grid_sample(
        h, torch.linspace(-1, 1, 12, dtype=h.dtype).view(1, 2, 3, 2).expand(len(h), -1, -1, -1),
        align_corners=False)),
}  # fmt: skip


@in_groups(RESIZES)
def test_padding_and_upsampling_carry_channels(kinds: Sequence[str]) -> None:
    def make(kind: str) -> tuple[nn.Module, Tensor]:
        places, resize = RESIZES[kind]
        return after_conv(lambda h: resize(h).sin(), places, size=4 if places < 3 else 3)

    side_by_side(kinds, make, lambda kind: {"pixel shuffle": 1, "channel shuffle": 2}.get(kind, 4))


def test_padded_channels_keep_their_place_between_the_zeros() -> None:
    """The shortcut of the first residual networks: new channels are zeros."""

    def forward(s: Net, x: Tensor) -> Tensor:
        h = s.stem(x).tanh()
        h = F.pad(h, (0, 0, 0, 0, 1, 2)) + s.block(h).tanh()
        return s.head(h.sin().mean((2, 3)))

    net = Net(
        forward, stem=nn.Conv2d(2, 4, 3), block=nn.Conv2d(4, 7, 3, padding=1), head=nn.Linear(7, 2)
    )
    found = check_model(net, image(2, 5, 5), {"stem": 4}, None)
    assert found["stem"].consumers[-1].positions.tolist() == [[1], [2], [3], [4]]
    check_refused(found, {
        "block[0:1]": "meets padding, which cannot grow along",
        "block[5:7]": "meets padding, which cannot grow along",
        "head": OUTPUT,
    })  # fmt: skip


# ---- reductions ------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean((2, 3)),
    "mean keepdim": lambda h: h.mean((2, 3), keepdim=True),
    "mean of one": lambda h: h.mean(-1),
    "sum": lambda h: h.sum((2, 3)) / 9,
    "amax": lambda h: h.amax((2, 3)),
    "max": lambda h: h.flatten(2).max(-1)[0],
    "max and place": lambda h: (m := h.flatten(2).max(-1, keepdim=True))[0] + 0 * m[1],
    "min": lambda h: h.flatten(2).min(-1).values,
    "median": lambda h: h.flatten(2).median(-1).values,
    "logsumexp": lambda h: h.logsumexp((2, 3)),
    "norm": lambda h: h.flatten(2).norm(dim=-1),
    "vector norm": lambda h: torch.linalg.vector_norm(h, dim=(2, 3)),
    "std": lambda h: h.std((2, 3)),
    "var": lambda h: h.var((2, 3), correction=0),
    "var and mean": lambda h: torch.add(*torch.var_mean(h, (2, 3))),
    "product": lambda h: h.flatten(2)[:, :, :3].prod(-1),
    "softmax over places": lambda h: h.flatten(2).softmax(-1),
    "cumsum over places": lambda h: h.flatten(2).cumsum(-1),
    "attention pooling": lambda h: (h.flatten(2) * h.flatten(2).softmax(-1)).sum(-1),
    "normalised over places": lambda h: F.normalize(h.flatten(2), dim=-1),
}


@in_groups(REDUCTIONS)
def test_reductions_over_other_dimensions_carry_channels(kinds: Sequence[str]) -> None:
    def make(kind: str) -> tuple[nn.Module, Tensor]:
        return after_conv(lambda h: REDUCTIONS[kind](h).sin(), size=4)

    side_by_side(kinds, make, step=1e-5)  # so small that the place of no maximum changes


def test_a_weighted_sum_needs_a_weight_for_each_neuron() -> None:
    net = Net(
        lambda s, x: (s.a(x).tanh() * s.w).sum(-1, keepdim=True),
        a=nn.Linear(5, 4), w=torch.randn(1),
    )  # fmt: skip
    reason = "is summed over without a parameter that weighs each neuron"
    check_model(net, torch.randn(7, 5), {}, {"a": reason})


def test_a_weighted_sum_with_its_own_square_is_refused() -> None:
    net = Net(
        lambda s, x: (s.a(x).tanh() * (s.w * s.w)).sum(-1), a=nn.Linear(5, 4), w=torch.randn(4)
    )
    reason = "w is shared: the model (Net) uses it 2 times"
    check_model(net, torch.randn(7, 5), {}, {"a": reason, "w": reason})


# ---- shapes ----------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda h: h.flatten(1),
    "flatten all but channels": lambda h: h.flatten(2),
    "view": lambda h: h.view(h.shape[0], -1),
    "reshape": lambda h: h.reshape(h.size(0), h.size(1), -1),
    "unflatten": lambda h: h.flatten(1).unflatten(1, (-1, 6, 6)),
    "permute": lambda h: h.permute(0, 2, 3, 1),
    "channels last and flat": lambda h: h.permute(0, 2, 3, 1).flatten(1),
    "transpose": lambda h: h.transpose(1, 3),
    "swapaxes": lambda h: h.swapaxes(1, 2),
    "movedim": lambda h: h.movedim(1, -1).movedim((1, 2), (2, 1)),
    "mT": lambda h: h.flatten(2).mT,
    "squeeze": lambda h: h.mean((2, 3), keepdim=True).squeeze(-1).squeeze(2),
    "squeeze several": lambda h: h.mean((2, 3), keepdim=True).squeeze((2, 3)),
    "squeeze all": lambda h: h.mean((2, 3), keepdim=True).squeeze(),
    "unsqueeze": lambda h: h.unsqueeze(1).unsqueeze(-1),
    "index with None": lambda h: h[:, None, ..., None],
    "expand": lambda h: h.mean((2, 3), keepdim=True).expand(-1, -1, 2, 3),
    "expand as": lambda h: h.mean((2, 3), keepdim=True).expand_as(h) * h,
    "repeat": lambda h: h.repeat(1, 1, 2, 1),
    "repeat channels": lambda h: h.repeat(1, 2, 1, 1),
    "repeat with a new dimension": lambda h: h.repeat(2, 1, 1, 1, 1).transpose(0, 1),
    "tile": lambda h: h.tile(2, 1, 1),
    "repeat interleave": lambda h: h.repeat_interleave(2, 1),
    "repeat interleave places": lambda h: h.repeat_interleave(2, dim=-1),
    "slice of places": lambda h: h[:, :, 1:-1, ::2],
    "narrow": lambda h: h.narrow(2, 1, 3),
    "select a place": lambda h: h[:, :, 0],
    "last place": lambda h: h[..., -1],
    "split of places": lambda h: torch.cat(h.split(2, 3)[1:], 2),
    "chunk of places": lambda h: h.chunk(2, -1)[1],
    "unbind places": lambda h: h.unbind(2)[3],
    "chunk": lambda h: torch.mul(*h.chunk(2, 1)),
    "chunk one half": lambda h: h.chunk(2, 1)[1],
    "chunk two ways": lambda h: (c := h.chunk(2, 1))[0].sin() + c[1].cos().mean((2, 3), True),
    "split in halves": lambda h: torch.mul(*h.split(h.shape[1] // 2, 1)),
    "stack": lambda h: torch.stack([h, h.tanh()], 1),
    "stack last": lambda h: torch.stack([h, h.tanh()], -1),
    "cat with itself": lambda h: torch.cat([h, -h], 1),
    "cat of places": lambda h: torch.cat([h, h.tanh()], 2),
    "hstack": lambda h: torch.hstack([h, h.tanh()]),
    "dstack": lambda h: torch.dstack([h, h.tanh()]),
    "cat, flatten": lambda h: torch.cat([h, h.tanh()], 1).flatten(1),
    "cat, flatten, unflatten": lambda h: (
        torch.cat([h, h.tanh()], 1).flatten(1).unflatten(1, (-1, 36))),
    "cat, chunk": lambda h: torch.mul(*torch.cat([h, h.tanh()], 1).chunk(2, 1)),
    "flip of places": lambda h: h.flip(-1),
    "roll of places": lambda h: h.roll(1, 2),
    "contiguous": lambda h: h.permute(0, 2, 3, 1).contiguous(),
    "T of a matrix": lambda h: h.mean((2, 3)).T.mT,
}  # fmt: skip


# A neuron is entry i of both halves.
HALVES = {"chunk", "chunk one half", "chunk two ways", "split in halves"}


@in_groups(SHAPES)
def test_the_same_entries_in_another_shape(kinds: Sequence[str]) -> None:
    side_by_side(
        kinds,
        lambda kind: after_conv(lambda h: SHAPES[kind](h).sin()),
        lambda kind: 2 if kind in HALVES else 4,
    )


def test_heads_of_a_fixed_number_can_only_grow_larger() -> None:
    model, x = after_conv(lambda h: h.view(h.shape[0], 2, -1, 6, 6).transpose(1, 2).sin())
    found = check_model(model, x, {"body.0.weight[0:4:2]": 2}, None)
    check_refused(found, {"body.0.weight[0:4:1]": "fix the width", "head": OUTPUT})


def test_concatenated_channels_keep_their_own_units() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        h = torch.cat([s.a(x).tanh(), x, s.b(x).sigmoid()], 1)
        return s.head(s.c(h).tanh().flatten(1))

    net = Net(
        forward,
        a=nn.Conv2d(2, 3, 1),
        b=nn.Conv2d(2, 4, 1),
        c=nn.Conv2d(9, 5, 3),
        head=nn.Linear(20, 2),
    )
    found = check_model(net, image(2, 4, 4), {"a": 3, "b": 4, "c": 5}, {"head": OUTPUT})
    assert found["a"].consumers[0].positions.tolist() == [[0], [1], [2]]
    assert found["b"].consumers[0].positions.tolist() == [[5], [6], [7], [8]]


def test_concatenated_and_added_channels_are_taken_apart() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        return s.head((torch.cat([s.a(x), s.b(x)], 1) + s.c(x)).tanh())

    net = Net(
        forward, a=nn.Linear(5, 3), b=nn.Linear(5, 4), c=nn.Linear(5, 7), head=nn.Linear(7, 2)
    )
    found = check_model(net, torch.randn(6, 5), {"a": 3, "b": 4}, {"head": OUTPUT})
    assert found["b"].theta[-1].name == "c.bias"
    assert found["b"].theta[-1].positions.tolist() == [[3], [4], [5], [6]]


def test_a_slice_that_follows_the_width_is_split() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        h = torch.cat([s.a(x).tanh(), s.b(x).sigmoid()], 1)
        n = s.a.out_features
        return s.p(h[:, :n]) + s.q(h[:, n:]).sin()

    net = Net(forward, a=nn.Linear(5, 3), b=nn.Linear(5, 4), p=nn.Linear(3, 2), q=nn.Linear(4, 2))
    found = check_model(net, torch.randn(6, 5), {"a": 3, "b": 4}, None)
    assert [slot.name for slot in found["a"].consumers] == ["p.weight"]
    assert [slot.name for slot in found["b"].consumers] == ["q.weight"]


@pytest.mark.parametrize(
    "function",
    [lambda h: h[:, :4].sin() * h[:, 4:5], lambda h: h.split([4, 2], 1)[0].sin(),
     lambda h: h.view(-1, 6).sin(), lambda h: h.sin()[:, -2:], lambda h: h.narrow(1, 0, 4).sin(),
     lambda h: h.view(h.shape[0], 3, 2)[:, :, 0].sin()],
    ids=["slices", "split", "view", "end", "narrow", "grid"],
)  # fmt: skip
def test_a_width_in_the_code_is_refused_or_never_wrong(
    function: Callable[[Tensor], Tensor],
) -> None:
    model, x = after_linear(function)
    found = check_model(model, x, None, None, curved=False)
    assert len(found) + len(found.skipped) > 1


def test_parts_of_unequal_size_are_refused() -> None:
    model, x = after_linear(lambda h: h.chunk(4, 1)[0].sin(), width=7)
    reason = "is cut into parts whose sizes are computed from its width"
    check_model(model, x, {}, {"body.0": reason, "head": OUTPUT})


# ---- width 1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason"),
    [(lambda h: h.tanh(), None),
     (lambda h: h.flatten(1).tanh(), None),
     (lambda h: h.unsqueeze(1).squeeze(1).tanh(), None),
     (lambda h: torch.cat([h.tanh(), h.sin()], 1), None),
     (lambda h: h.repeat(1, 3).tanh(), None),
     (lambda h: h.chunk(1, 1)[0].tanh(), None),
        (lambda h: h[:, :1].tanh(), "fix the width"),
        (lambda h: h[:, -1:].tanh(), "fix the width"),
        (lambda h: h[:, :1].expand(*h.shape) * h, "two neurons do not act on their own"),
        (lambda h: h[:, -1:] * h, "two neurons do not act on their own"),
        (lambda h: h[:, :].tanh(), None),
     (lambda h: h.squeeze(1)[:, None].tanh(), "is squeezed away, which only a width of 1 allows"),
     (lambda h: h.squeeze()[:, None].tanh(), "is squeezed away"),
     (lambda h: h.view(-1)[:, None].tanh(), ""),
     (lambda h: h.expand(-1, 3).tanh(), "is expanded, which only a width of 1 allows"),
     (lambda h: h * torch.ones(3, 4), "is broadcast, which only a width of 1 allows"),
     (lambda h: torch.cat([h.tanh(), torch.ones(3, 1)], 0)[:3], "meets a dimension of size 1"),
     (lambda h: h.sum(1, keepdim=True).tanh(), "is summed over without a parameter"),
     (lambda h: h[:, 0].tanh()[:, None], "has one entry picked out by number")],
)  # fmt: skip
def test_a_unit_of_one_neuron(function: Callable[[Tensor], Tensor], reason: str | None) -> None:
    x = torch.randn(3, 5)
    model = Headed(nn.Sequential(nn.Linear(5, 1), Apply(function)), x)
    torch.set_default_dtype(torch.float64)
    refused = {"head": ""} if reason is None else {"body.0": reason, "head": ""}
    check_model(model, x, {"body.0": 1} if reason is None else {}, refused)


# ---- parameters that carry a unit by broadcasting --------------------------------------------

PROTOTYPES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "squared distance": lambda s, x: (x[:, None] - s.p).square().sum(-1),
    "distance": lambda s, x: (x[:, None] - s.p).norm(dim=-1),
    "pairwise distance": lambda s, x: F.pairwise_distance(x[:, None], s.p),
    "cdist": lambda s, x: torch.cdist(x, s.p),
    "cdist from the left": lambda s, x: torch.cdist(s.p, x).mT,
    "cosine": lambda s, x: F.cosine_similarity(x[:, None], s.p, dim=-1),
    "log activation": lambda s, x: (
        ((d := torch.cdist(x, s.p).square()) + 1).log() - (d + 1e-4).log()),
    "rbf": lambda s, x: torch.exp(-s.g.exp() * (x[:, None] - s.p).square().sum(-1)),
    "rbf by einsum": lambda s, x: torch.exp(
        -torch.einsum("bnd,bnd->bn", d := x[:, None] - s.p, d * 1.0)),
    "expanded": lambda s, x: (
        (x[:, None].expand(-1, s.p.shape[0], -1) - s.p[None]).square().mean(-1)),
    "maximum": lambda s, x: torch.maximum(x[:, None], s.p).sum(-1).tanh(),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROTOTYPES)
def test_a_prototype_is_a_neuron(kind: str) -> None:
    parts = {"g": torch.randn(4)} if kind == "rbf" else {}
    net = Net(
        lambda s, x: s.head(PROTOTYPES[kind](s, x)),
        p=torch.randn(4, 5), head=nn.Linear(4, 2), **parts,
    )  # fmt: skip
    first = "g" if kind == "rbf" else "p"
    if kind == "rbf by einsum":
        check_model(net, torch.randn(7, 5), {"p": 4}, {"head": OUTPUT})
        return
    check_model(net, torch.randn(7, 5), {first: 4}, {"head": OUTPUT})


def test_what_is_measured_by_a_distance_is_refused() -> None:
    net = Net(
        lambda s, x: s.head(torch.cdist(s.embed(x).tanh(), s.p)),
        embed=nn.Linear(5, 3), p=torch.randn(4, 3), head=nn.Linear(4, 2),
    )  # fmt: skip
    check_model(
        net, torch.randn(7, 5), {"p": 4}, {"embed": "is measured by a distance", "head": ""}
    )


def test_an_embedding_makes_a_unit_of_its_columns() -> None:
    net = Net(
        lambda s, x: s.head((s.words(x) + s.places).tanh().mean(1)),
        words=nn.Embedding(9, 4), places=torch.randn(3, 4), head=nn.Linear(4, 2),
    )  # fmt: skip
    found = check_model(net, torch.randint(9, (7, 3)), {"words": 4}, {"head": OUTPUT})
    assert found["words"].size == 9 + 3


# ---- what cannot be split --------------------------------------------------------------------


def test_a_layer_that_is_called_twice_is_refused() -> None:
    net = Net(
        lambda s, x: s.head(s.a(s.a(x).tanh()).tanh()), a=nn.Linear(5, 5), head=nn.Linear(5, 2)
    )
    reason = "a.weight is shared: a (Linear) uses it 2 times"
    check_model(net, torch.randn(7, 5), {}, {"a": reason, "head": OUTPUT})


def test_a_layer_under_two_names_is_refused() -> None:
    net = Net(
        lambda s, x: s.head(s.b(s.a(x).tanh()).tanh()), a=nn.Linear(5, 5), head=nn.Linear(5, 2)
    )
    net.b = net.a
    check_model(net, torch.randn(7, 5), {}, {"a": "is shared", "head": OUTPUT})


@pytest.mark.parametrize("tie", ["same parameter", "transposed view"])
def test_tied_parameters_are_refused(tie: str) -> None:
    net = Net(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(5, 5), b=nn.Linear(5, 5))
    lively(net)
    weight = net.a.weight
    net.b.weight = weight if tie == "same parameter" else nn.Parameter(weight.data.T)
    found = sg.find_units(net, double(torch.randn(7, 5)))
    assert not len(found)
    check_refused(
        found, {"a": "a.weight = b.weight is shared: it is used in a (Linear), b (Linear)", "b": ""}
    )


def test_a_weight_that_is_computed_once_and_used_twice_is_refused() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        w = s.w * 0.5
        return s.head((x @ w.T).tanh() + (x.sin() @ w.T).tanh())

    net = Net(forward, w=torch.randn(4, 5), head=nn.Linear(4, 2))
    check_model(net, torch.randn(7, 5), {}, {"w": "w is shared", "head": OUTPUT})


def test_parameters_next_to_each_other_in_memory_are_not_tied() -> None:
    net = Net(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(5, 4), b=nn.Linear(4, 2)).double()
    flat = torch.randn(28, dtype=torch.float64)
    net.a.weight = nn.Parameter(flat[:20].view(4, 5))
    net.b.weight = nn.Parameter(flat[20:].view(2, 4))
    assert [unit.name for unit in sg.find_units(net, double(torch.randn(7, 5)))] == ["a"]


def test_the_models_outputs_are_refused_wherever_they_leave() -> None:
    net = Net(
        lambda s, x: {"features": (h := s.a(x).tanh()), "logits": s.head(h)},
        a=nn.Linear(5, 4), head=nn.Linear(4, 2),
    )  # fmt: skip
    check_model(net, torch.randn(7, 5), {}, {"a": OUTPUT, "head": OUTPUT})


def test_neurons_that_nothing_reads_are_refused() -> None:
    net = Net(
        lambda s, x: s.head(x) + (0 * s.a(x)).new_zeros(2), a=nn.Linear(5, 4), head=nn.Linear(5, 2)
    )
    check_model(net, torch.randn(7, 5), {}, {"a": "no weight reads its neurons", "head": OUTPUT})


def test_the_inputs_index_is_refused() -> None:
    net = Net(lambda s, x: s.head((x + s.a(x)).tanh()), a=nn.Linear(5, 5), head=nn.Linear(5, 2))
    check_model(
        net, torch.randn(7, 5), {}, {"a": "its index is that of the model's input", "head": OUTPUT}
    )


def test_frozen_neurons_are_refused() -> None:
    net = Net(
        lambda s, x: s.head(s.b(s.a(x).tanh()).tanh()),
        a=nn.Linear(5, 4),
        b=nn.Linear(4, 3),
        head=nn.Linear(3, 2),
    )
    net.a.requires_grad_(False)
    check_model(
        net, torch.randn(7, 5), {"b": 3}, {"a": "its parameters are frozen", "head": OUTPUT}
    )


def test_a_frozen_weight_with_a_trainable_bias_is_split_along_the_bias() -> None:
    net = Net(lambda s, x: s.head(s.a(x).tanh()), a=nn.Linear(5, 4), head=nn.Linear(4, 2))
    net.a.weight.requires_grad_(False)
    found = check_model(net, torch.randn(7, 5), {"a": 4}, {"head": OUTPUT})
    assert found["a"].parameters == ("a.bias",)
    assert [slot.name for slot in found["a"].copies] == ["a.weight"]


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_are_refused(make: type[nn.Module]) -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        out = s.rnn(s.a(x).tanh())
        return s.head(out[0] if isinstance(out, tuple) else out)

    cell = make is nn.LSTMCell or make is nn.GRUCell
    net = Net(forward, a=nn.Linear(5, 4), rnn=make(4, 3), head=nn.Linear(3, 2))
    found = sg.find_units(net, torch.randn(7, 5) if cell else torch.randn(6, 7, 5))
    assert not len(found)
    reason = "a recurrent layer uses its weights at every time step"
    check_refused(found, {"a": reason, "rnn": reason, "head": OUTPUT})


def test_attention_is_refused_with_its_own_reason() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (s.q, s.k, s.v))
        return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    net = Net(forward, q=nn.Linear(5, 4), k=nn.Linear(5, 4), v=nn.Linear(5, 4), out=nn.Linear(4, 2))
    found = sg.find_units(net, torch.randn(3, 6, 5))
    assert not len(found)
    reason = "attention mixes the channels of a head"
    check_refused(found, {"q": reason, "k": reason, "v": reason, "out": OUTPUT})


def test_multi_head_attention_leaves_the_mlp_beside_it() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, activation=F.gelu, batch_first=True)
    net = Net(
        lambda s, x: s.head(s.layer(s.embed(x))),
        embed=nn.Linear(5, 4),
        layer=layer,
        head=nn.Linear(4, 2),
    )
    found = check_model(net, torch.randn(3, 6, 5), {"layer.linear1": 6}, None)
    reasons = {skipped.name: skipped.reason for skipped in found.skipped}
    assert {"embed", "layer.self_attn", "layer.linear2", "head"} <= set(reasons)


WEIGHTS_THAT_ARE_COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum of two": lambda w, u: w + u,
    "product of two": lambda w, u: w * u,
    "square": lambda w, _: w * w,
    "quotient": lambda w, _: w / w.detach().clone(),
    "standardised": lambda w, _: (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-3),
    "with a constant": lambda w, _: w + 1.0,
    "masked": lambda w, _: w.masked_fill(w > 1, 0.0),
}


@pytest.mark.parametrize("kind", WEIGHTS_THAT_ARE_COMPUTED)
def test_columns_that_forward_computes_are_never_halved(kind: str) -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        return F.linear(s.a(x).tanh(), WEIGHTS_THAT_ARE_COMPUTED[kind](s.w, s.u)) + 0 * s.u.sum()

    net = Net(forward, a=nn.Linear(5, 4), w=torch.randn(2, 4), u=torch.randn(2, 4))
    found = check_model(net, torch.randn(7, 5), {}, None)
    assert "a" in {skipped.name for skipped in found.skipped}


def test_a_computed_weight_is_named_in_the_reason() -> None:
    net = Net(
        lambda s, x: F.linear(s.a(x).tanh(), s.w + s.u),
        a=nn.Linear(5, 4),
        w=torch.randn(2, 4),
        u=torch.randn(2, 4),
    )
    found = sg.find_units(net, torch.randn(7, 5))
    reasons = {skipped.name: skipped.reason for skipped in found.skipped}
    assert "is read by a weight that forward computes (add" in reasons["a"]


def test_rows_of_a_computed_weight_are_neurons() -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        w = (s.w - s.w.mean(1, keepdim=True)) / (s.w.std(1, keepdim=True) + 1e-3)
        return s.head((x @ w.T + s.b).tanh())

    net = Net(forward, w=torch.randn(4, 5), b=torch.randn(4), head=nn.Linear(4, 2))
    found = sg.find_units(lively(net), double(torch.randn(7, 5)))
    assert not len(found)  # w is read three times
    check_refused(found, {"w": "w is shared", "b": "w is shared", "head": OUTPUT})


def test_weight_norm_rows_are_neurons_and_columns_are_not() -> None:
    norm = nn.utils.parametrizations.weight_norm
    net = Net(
        lambda s, x: s.head(s.b(s.a(x).tanh()).tanh()),
        a=norm(nn.Linear(5, 4)), b=norm(nn.Linear(4, 3)), head=nn.Linear(3, 2),
    )  # fmt: skip
    found = check_model(net, torch.randn(7, 5), None, None)
    assert [unit.width for unit in found] == [3]
    reasons = {skipped.name: skipped.reason for skipped in found.skipped}
    assert "is normalised over (weight norm)" in reasons["a.parametrizations.weight"]


# ---- the registry ----------------------------------------------------------------------------


@torch.library.custom_op("splitgrow_tests::softer", mutates_args=())
def softer(x: Tensor) -> Tensor:
    return x / (1 + x * x)


@softer.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


softer.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2) / (1 + ctx.saved_tensors[0] ** 2) ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.fixture
def registry() -> Any:
    before = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(before)


def test_a_custom_operation_is_refused_until_it_has_a_rule(registry: Any) -> None:
    model, x = after_linear(lambda h: torch.ops.splitgrow_tests.softer(h))
    check_model(
        model, x, {}, {"body.0": "enters splitgrow_tests.softer, which has no rule", "head": OUTPUT}
    )

    @sg.rule("splitgrow_tests::softer", traits=sg.Trait.POINTWISE)
    def _softer(op: sg.Op) -> Any:
        """x / (1 + x^2)."""
        return op.dims("x")

    check_model(model, x, {"body.0": 6}, {"head": OUTPUT})


def test_a_rule_that_does_not_fit_its_operation_is_not_believed(registry: Any) -> None:
    @sg.rule("splitgrow_tests::softer")
    def _softer(op: sg.Op) -> Any:
        return op.dims("x")[:1]

    model, x = after_linear(softer)
    reason = "whose rule expects results of shape [(3,)], not [(3, 6)]"
    check_model(model, x, {}, {"body.0": reason, "head": OUTPUT})


def test_an_operation_has_one_rule() -> None:
    with pytest.raises(ValueError, match=r"aten::relu has a rule already: activation"):
        sg.rule("relu")(lambda op: op.dims("self"))


# Names that some version of PyTorch has and another has not, and what is no ATen operation.
ELSEWHERE = {"_upsample_lanczos2d_aa", "rrelu_with_noise_functional", "_fused_rms_norm", "getitem"}


def test_every_rule_has_a_docstring_and_names_an_operation() -> None:
    for name, rule in RULES.items():
        assert rule.summary.endswith("."), name
        own = name.removeprefix("aten::")
        assert own in ELSEWHERE or hasattr(torch.ops.aten, own), name


def _table_tool() -> Any:
    path = Path(__file__).parent.parent / "tools" / "rules_table.py"
    spec = importlib.util.spec_from_file_location("rules_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_rules_is_up_to_date() -> None:
    tool = _table_tool()
    assert tool.PAGE.read_text() == tool.render(), "run: python tools/rules_table.py"


def test_the_table_lists_every_operation() -> None:
    table = _table_tool().render()
    for name in RULES:
        assert f"`{name.removeprefix('aten::')}`" in table
