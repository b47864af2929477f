"""Random architectures: what is accepted keeps every promise, what is not is refused with a reason.

An architecture is a list of stages, each a small module that may do anything to its channels. The
rules know nothing of the stages; they see ATen operations.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import splitgrow as sg
from promises import check_unit, entry, lively, outputs_of, regression, strongest

SMOOTH: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus, "mish": nn.Mish, "identity": nn.Identity,
}  # fmt: skip
KINKED: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True), "relu6": nn.ReLU6, "hardswish": nn.Hardswish,
    "leaky": nn.LeakyReLU, "prelu": nn.PReLU,
    "softsign": nn.Softsign,  # its second derivative jumps from 2 to -2 at 0: no slope of 4 there
}  # fmt: skip

# ---- stages: (channels, options) -> module with .channels ------------------------------------


class Stage(nn.Module):
    """Maps (batch, in channels, places) to (batch, ``channels``, places)."""

    channels: int


class Plain(Stage):
    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer, self.channels = layer, channels

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Residual(Stage):
    def __init__(self, body: nn.Module, channels: int, *, project: int | None) -> None:
        super().__init__()
        self.body, self.channels = body, channels
        self.shortcut = nn.Identity() if project is None else nn.Conv1d(project, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


class Dense(Stage):
    def __init__(self, body: nn.Module, inputs: int, grown: int) -> None:
        super().__init__()
        self.body, self.channels = body, inputs + grown

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class Gate(Stage):
    """Squeeze and excitation."""

    def __init__(self, channels: int, inner: int, activation: nn.Module) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, inner), nn.Linear(inner, channels)
        self.activation, self.channels = activation, channels

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(self.activation(self.down(x.mean(2)))).sigmoid()
        return x * gate.unsqueeze(-1)


class Chunked(Stage):
    """A layer whose halves gate each other."""

    def __init__(self, inputs: int, channels: int, *, glu: bool) -> None:
        super().__init__()
        self.both, self.channels, self.glu = nn.Conv1d(inputs, 2 * channels, 1), channels, glu

    def forward(self, x: Tensor) -> Tensor:
        if self.glu:
            return F.glu(self.both(x), 1)
        value, gate = self.both(x).chunk(2, 1)
        return value * F.silu(gate)


class Twice(Stage):
    """One layer called twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer, self.channels = nn.Conv1d(channels, channels, 1), channels

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class ChannelsLast(Stage):
    """A linear layer over channels that are moved to the end, as in a transformer's MLP."""

    def __init__(self, inputs: int, inner: int, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, inner), nn.Linear(inner, inputs)
        self.activation, self.channels = activation, inputs

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        return (h + self.down(self.activation(self.up(h)))).mT


class Prototypes(Stage):
    """Distances of every place to some points."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.points, self.channels = nn.Parameter(torch.randn(channels, inputs)), channels

    def forward(self, x: Tensor) -> Tensor:
        distance = (x.mT.unsqueeze(2) - self.points).square().sum(-1)  # (batch, places, channels)
        return torch.exp(-0.1 * distance).mT


class HardCoded(Stage):
    """Code that fixes its width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.channels, x.shape[2])


@dataclass(frozen=True)
class Draw:
    """Hypothesis's draw with the choices that stages need."""

    draw: st.DrawFn
    activations: dict[str, Callable[[], nn.Module]]

    def width(self) -> int:
        return self.draw(st.sampled_from([1, 2, 3, 4, 5]))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def activation(self) -> nn.Module:
        return self.activations[self.draw(st.sampled_from(sorted(self.activations)))]()

    def convolution(self, inputs: int, channels: int, *, stride: int = 1) -> nn.Module:
        kernel = self.draw(st.sampled_from([1, 3]))
        dilation = self.draw(st.sampled_from([1, 2])) if kernel > 1 else 1
        mode = self.draw(st.sampled_from(["zeros", "zeros", "circular", "replicate"]))
        padding = dilation * (kernel // 2)
        return nn.Conv1d(inputs, channels, kernel, stride, padding, dilation, bias=self.flag(),
                         padding_mode=mode if padding else "zeros")  # fmt: skip

    def block(self, inputs: int, channels: int) -> nn.Module:
        """Convolution, perhaps batch norm, activation."""
        layers = [self.convolution(inputs, channels)]
        if self.flag():
            layers.append(nn.BatchNorm1d(channels, affine=self.flag()))
        return nn.Sequential(*layers, self.activation())


def convolution(d: Draw, c: int) -> Stage:
    n = d.width()
    layers = [d.convolution(c, n, stride=d.draw(st.sampled_from([1, 1, 2])))]
    if d.flag():
        layers.append(nn.BatchNorm1d(n, affine=d.flag(), track_running_stats=d.flag()))
    return Plain(nn.Sequential(*layers, d.activation()), n)


def depthwise(d: Draw, c: int) -> Stage:
    n = c * d.draw(st.sampled_from([1, 1, 2]))
    kind = nn.ConvTranspose1d if d.flag() else nn.Conv1d
    layer = kind(c, n, 3, padding=1, groups=c, bias=d.flag())
    return Plain(nn.Sequential(layer, d.activation()), n)


def transposed(d: Draw, c: int) -> Stage:
    n = d.width()
    return Plain(nn.Sequential(nn.ConvTranspose1d(c, n, 2, stride=2), d.activation()), n)


def residual(d: Draw, c: int) -> Stage:
    inner, n = d.width(), d.width()
    project = d.flag()
    body = nn.Sequential(d.block(c, inner), d.convolution(inner, n if project else c))
    return Residual(body, n if project else c, project=c if project else None)


def dense(d: Draw, c: int) -> Stage:
    n = d.width()
    return Dense(d.block(c, n), c, n)


def gate(d: Draw, c: int) -> Stage:
    return Gate(c, d.width(), d.activation())


def chunked(d: Draw, c: int) -> Stage:
    return Chunked(c, d.width(), glu=d.flag())


def pooling(d: Draw, c: int) -> Stage:
    pools: list[nn.Module] = [nn.MaxPool1d(2, ceil_mode=True), nn.AvgPool1d(2, ceil_mode=True),
                              nn.AdaptiveAvgPool1d(3), nn.Upsample(scale_factor=2), nn.Dropout(),
                              nn.ZeroPad1d(1), nn.BatchNorm1d(c)]  # fmt: skip
    return Plain(pools[d.draw(st.integers(0, len(pools) - 1))], c)


def channels_last(d: Draw, c: int) -> Stage:
    return ChannelsLast(c, d.width(), d.activation())


def prototypes(d: Draw, c: int) -> Stage:
    return Prototypes(c, d.width())


def mixing(d: Draw, c: int) -> Stage:
    """Something that no unit survives."""
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.GroupNorm(1, c), lambda: nn.Softmax(1), lambda: Twice(c), lambda: HardCoded(c),
        lambda: nn.Conv1d(2 * c, 2 * c, 1, groups=2) if c == 0 else nn.Identity(),
    ]  # fmt: skip
    return Plain(kinds[d.draw(st.integers(0, len(kinds) - 1))](), c)


def grouped(d: Draw, c: int) -> Stage:
    n = 2 * d.width()
    return Plain(nn.Sequential(nn.Conv1d(c, 2 * n, 1), nn.Conv1d(2 * n, n, 1, groups=2)), n)


STAGES = (convolution, convolution, depthwise, transposed, residual, dense, gate, chunked, pooling,
          channels_last, prototypes, mixing, grouped)  # fmt: skip


class Network(nn.Module):
    def __init__(self, stages: list[Stage], *, flat: bool, places: int) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self.flat = flat
        with torch.no_grad():
            features = self._features(torch.zeros(2, 2, places)).shape[1]
        self.head = nn.Linear(features, 2)

    def _features(self, x: Tensor) -> Tensor:
        h = self.stages(x)
        return h.flatten(1) if self.flat else h.mean(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._features(x))


PLACES = 6


@st.composite
def networks(draw: st.DrawFn, activations: dict[str, Callable[[], nn.Module]] = SMOOTH) -> Network:
    d = Draw(draw, activations)
    torch.manual_seed(draw(st.integers(0, 2**16)))
    stages: list[Stage] = []
    channels = 2
    for make in draw(st.lists(st.sampled_from(STAGES), min_size=1, max_size=4)):
        stages.append(make(d, channels))
        channels = stages[-1].channels
        event(make.__name__)
    return lively(Network(stages, flat=d.flag(), places=PLACES).eval())


def batch_for(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 2, PLACES, generator=generator, dtype=torch.float64)


relaxed = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# ---- accepted: every promise -----------------------------------------------------------------


@given(networks())
@relaxed
def test_accepted_units_keep_what_they_promise(model: Network) -> None:
    x = batch_for(model)
    units = sg.find_units(model, x[:1])
    check_refusals(model, units)
    event(f"{min(len(units), 3)} or more units")
    loss_fn, batches = regression(model, x)
    scores = sg.score(model, loss_fn, batches, units=units, stand_in=None, steps=10**9)
    for unit in units:
        found = scores[unit.name]
        scale = found.values.abs().max().item()
        if scale < 1e-9 or found.scales[strongest(scores, unit.name)] < 1e-6:
            continue
        check_fourth_order(model, scores, unit.name, loss_fn, batches)


def check_fourth_order(
    model: nn.Module, scores: sg.Scores, name: str, loss_fn: Any, batches: list[Any]
) -> None:
    """|measured - predicted| = O(eps^4): half the step, a sixteenth of the error.

    Max pooling is smooth only until another entry takes the lead, so a failure is final when it
    stays at smaller steps: there an error in lambda still shows, as the slope of eps^2.
    """
    found = []
    for step in (2e-2, 2e-3, 2e-4):
        errors = []
        for each in (step, step / 2):
            receipt = check_unit(model, scores, name, loss_fn, batches, each, float("inf"))
            errors.append(abs(receipt.measured - receipt.predicted))
        found.append(errors)
        if errors[1] < errors[0] / 8 + 1e-13 * max(1.0, abs(receipt.loss)):
            break
    else:
        raise AssertionError((name, found))
    check_unit(model, scores, name, loss_fn, batches, min(step / 2, 1e-3), tolerance=2e-2)


def check_refusals(model: nn.Module, units: sg.Units) -> None:
    """Each layer's neurons are in a unit, or refused by name with a reason."""
    names = [unit.name for unit in units] + [skipped.name for skipped in units.skipped]
    assert len(set(names)) == len(names), names
    assert all(skipped.reason.strip() for skipped in units.skipped)
    told = {slot.name.rpartition(".")[0] for unit in units for slot in unit.theta}
    told |= {skipped.name.partition("[")[0] for skipped in units.skipped}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d | Prototypes):
            assert path in told or any(name.startswith(f"{path}.") for name in told), (path, units)


# ---- accepted: many at once, training on, a second round -------------------------------------


@given(networks(SMOOTH | KINKED), st.data())
@relaxed
def test_any_plan_can_be_carried_out_and_lived_with(model: Network, data: st.DataObject) -> None:
    x = batch_for(model)
    units = sg.find_units(model, x)
    loss_fn, batches = regression(model, x)
    scores = sg.score(model, loss_fn, batches, units=units)
    entries = [
        entry(scores, unit.name, k)
        for unit in units
        for k in sorted(data.draw(st.sets(st.integers(0, unit.width - 1), max_size=3)))
    ]
    if not entries:
        return
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, optimizer, loss_fn, x)
    before = [t.clone() for t in outputs_of(model.eval(), x)]
    receipt = sg.split(model, sg.SplitPlan(entries, units), step=1e-9, optimizer=optimizer)
    assert receipt.parity < 1e-10 * max(1.0, *(t.abs().max().item() for t in before))
    for a, b in zip(before, outputs_of(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    check_attributes(model)
    train(model, optimizer, loss_fn, x)
    check_second_round(model, units, receipt, loss_fn, x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, x: Tensor) -> None:
    """One step in training mode."""
    model.train()
    optimizer.zero_grad()
    loss_fn(model, x).backward()
    optimizer.step()
    model.eval()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        assert all(v.shape in ((), parameter.shape) for v in state.values())


def check_attributes(model: nn.Module) -> None:
    """What print(model) says is true."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, nn.Conv1d):
            expected = (module.out_channels, module.in_channels // module.groups)
            assert module.weight.shape[:2] == expected
        if isinstance(module, nn.ConvTranspose1d):
            expected = (module.in_channels, module.out_channels // module.groups)
            assert module.weight.shape[:2] == expected
        if isinstance(module, nn.BatchNorm1d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is None or tensor.shape == (module.num_features,)


def check_second_round(
    model: nn.Module, units: sg.Units, receipt: sg.Receipt, loss_fn: Any, x: Tensor
) -> None:
    """The wider model has the same units, wider, and they can be scored and split again."""
    again = sg.find_units(copy.deepcopy(model), x)
    widths = {unit.name: receipt.widths.get(unit.name, (0, unit.width))[1] for unit in units}
    assert [unit.width for unit in again] == list(widths.values()), (str(units), str(again))
    scores = sg.score(model, loss_fn, [x], units=again)
    plan = sg.select(scores, count=2)
    if len(plan):
        with contextlib.suppress(sg.SplitRefused):  # no step may lower the loss
            second = sg.split(model, plan, loss_fn=loss_fn, batches=[x])
            assert second.measured < 0


# ---- everything else: refused, never an accident ---------------------------------------------


class Wild(nn.Module):
    """Two layers with any functions of tensors in between, sensible or not."""

    def __init__(self, width: int, functions: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.functions = functions
        with torch.no_grad():
            features = self._features(torch.zeros(2, 3)).flatten(1).shape[1]
        self.head = nn.Linear(features, 2)

    def _features(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for function in self.functions:
            h = function(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._features(x).flatten(1))


WILD: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "half": lambda h: h[:, : h.shape[1] // 2 + 1],
    "reverse half": lambda h: h[:, h.shape[1] // 2 :],
    "shift": lambda h: h[:, 1:] + h[:, :-1] if h.shape[1] > 1 else h,
    "every second": lambda h: h[:, ::2],
    "as many as samples": lambda h: h[:, : h.shape[0]],
    "after as many as samples": lambda h: h[:, h.shape[0] - 3 :],
    "last": lambda h: h[:, -1:] * h,
    "shuffle": lambda h: F.channel_shuffle(h.unsqueeze(-1), 2) if h.shape[1] % 2 == 0 else h,
    "cat": lambda h: torch.cat([h, h.sin()], 1),
    "cat with zeros": lambda h: torch.cat([h, torch.zeros_like(h)], 1),
    "cat with ones": lambda h: torch.cat([h, h.new_ones(h.shape[0], 2, *h.shape[2:])], 1),
    "swap": lambda h: h + torch.cat([h[:, 1:], h[:, :1]], 1),
    "outer": lambda h: (h.flatten(1)[:, :, None] * h.flatten(1)[:, None]).tanh(),
    "gram": lambda h: h.flatten(1)[:, :3, None] @ h.flatten(1)[:, None, :3],
    "pairs": lambda h: h.flatten(1).unflatten(1, (-1, 2)) if h[0].numel() % 2 == 0 else h,
    "rows": lambda h: h.flatten(1).unflatten(1, (2, -1)) if h[0].numel() % 2 == 0 else h,
    "transpose": lambda h: h.transpose(1, -1),
    "flatten": lambda h: h.flatten(1),
    "unsqueeze": lambda h: h.unsqueeze(1),
    "squeeze": lambda h: h.squeeze(1),
    "mean": lambda h: h.mean(-1, keepdim=True),
    "sum": lambda h: h.sum(1, keepdim=True),
    "softmax": lambda h: h.softmax(-1),
    "normalise": lambda h: h / (1 + h.square().sum(1, keepdim=True)),
    "max": lambda h: h.max(1, keepdim=True).values * h,
    "expand": lambda h: h.unsqueeze(1).expand(-1, 3, *h.shape[1:]),
    "expand one": lambda h: h[:, :1].expand(*h.shape) * h,
    "repeat": lambda h: h.repeat(1, 2, *(1,) * (h.ndim - 2)),
    "interleave": lambda h: h.repeat_interleave(2, 1),
    "chunk": lambda h: torch.mul(*h.chunk(2, 1)) if h.shape[1] % 2 == 0 else h,
    "chunk and swap": lambda h: torch.cat(h.chunk(2, 1)[::-1], 1),
    "split": lambda h: torch.cat(h.split([1, h.shape[1] - 1], 1)[::-1], 1).tanh(),
    "flip": lambda h: h.flip(1),
    "sort": lambda h: h.sort(1).values,
    "cumsum": lambda h: h.cumsum(1),
    "constant": lambda h: h + torch.ones(h.shape[-1], dtype=h.dtype),
    "numbers": lambda h: h * torch.arange(h.shape[-1], dtype=h.dtype),
    "pad": lambda h: F.pad(h, (1, 0)),
    "crop": lambda h: F.pad(h, (-1, 0)) if h.shape[-1] > 1 else h,
    "stack": lambda h: torch.stack([h, h.cos()], 1),
    "stack last": lambda h: torch.stack([h, h.cos()], -1),
    "einsum": lambda h: torch.einsum("bi,bj->bi", h.flatten(1), h.flatten(1).tanh()),
    "unbind": lambda h: torch.stack(h.unbind(1)[::-1], 1),
    "view": lambda h: h.reshape(h.shape[0], -1, 1),
    "glu": lambda h: F.glu(h, 1) if h.shape[1] % 2 == 0 else h,
    "where": lambda h: torch.where(h > h.mean(), h, h.tanh()),
}


@given(st.integers(1, 6), st.lists(st.sampled_from(sorted(WILD)), min_size=1, max_size=4))
@relaxed
def test_wild_code_is_split_exactly_or_refused(width: int, names: list[str]) -> None:
    event(f"{check_wild(width, names)} units")


def test_each_wild_function_by_itself() -> None:
    accepted = {name for name in WILD if check_wild(4, [name, "tanh"])}
    assert {"tanh", "cat", "chunk", "flatten", "stack", "repeat", "interleave"} <= accepted
    assert not accepted & {"outer", "gram", "softmax", "sum", "mean", "sort", "flip", "shift"}


def check_wild(width: int, names: list[str]) -> int:
    """How many units there are in a model with these functions; each keeps its promises."""
    torch.manual_seed(width)
    x = torch.randn(4, 3, dtype=torch.float64)
    try:
        model = lively(Wild(width, [WILD[name] for name in names]))
        if model(x).numel() == 0 or model.head.in_features > 400:
            return 0
    except (RuntimeError, IndexError):
        return 0  # not a model to begin with
    units = sg.find_units(model, x)
    check_refusals(model, units)
    loss_fn, batches = regression(model, x)
    if len(units):
        scores = sg.score(model, loss_fn, batches, units=units, stand_in=None, steps=10**9)
        for unit in units:
            check_unit(model, scores, unit.name, loss_fn, batches, step=1e-4, tolerance=1e-2)
    return len(units)
