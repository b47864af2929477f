"""Where MobileNet's neuron ends: behind the depthwise layer, not before it.

A channel of a pointwise convolution is read by one filter of the depthwise convolution, and only
the next pointwise convolution adds channels up. So a neuron is the pointwise filter w *and* the
depthwise filter u, sigma(w, u; x) = act(norm(u * act(norm(w . x)))), and the offspring share its
outgoing weights there. The index of that neuron is ``splitgrow.score``'s.

The truncated index takes the neuron as w alone and the depthwise layer as what reads it, as the
public codes of splitting for MobileNet do::

    S' = Hessian by w of  E[ sum_p <dL/da_p, act(norm(w . x_p))> ],   a the output of act

It lacks the curvature of the second activation and all of u. Both are held against the loss that
a split of each neuron alone really gives, in float64, along either direction.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.curvature import Softplus
from splitgrow.errors import InputError
from splitgrow.paper.figures import PAGE, both, sheet
from splitgrow.paper.results import Results, Run, rounded
from splitgrow.paper.stats import pearson
from splitgrow.plan import Entry, SplitPlan
from splitgrow.score import score
from splitgrow.scores import Scores
from splitgrow.split import split
from splitgrow.state import eval_mode, seeded
from splitgrow.units import Unit, Units, find_units
from splitgrow.zoo.mobilenet import MobileNetV1

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Batch = tuple[Tensor, Tensor]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "silu": nn.SiLU, "softplus": nn.Softplus, "relu": nn.ReLU,
}  # fmt: skip
SHOWN = {"silu": "SiLU", "softplus": "Softplus", "relu": "ReLU"}
NEURONS = {"whole": "through the depthwise layer", "truncated": "cut before the depthwise layer"}
COLORS = {"whole": "#D55E00", "truncated": "#0072B2"}


@dataclass(frozen=True)
class Setting:
    """A small MobileNet, its training, and the splits that are measured.

    ``step`` is relative to the neuron's length; both directions of a neuron get the same. ReLU
    needs a longer one than a smooth activation: it bends only where an input crosses zero.
    """

    activation: str = "silu"
    blocks: tuple[tuple[int, int], ...] = ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1))
    stem: int = 16
    epochs: int = 2
    batch: int = 128
    learning_rate: float = 3e-3
    scored: int = 512  # images that the indexes and the losses are of
    neurons: int = 16  # of each unit, the first ones
    step: float | None = None  # left out, 0.001, and 0.03 for ReLU
    seed: int = 0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise InputError(
                f"activation: expected one of {', '.join(ACTIVATIONS)}, got {self.activation!r}."
            )

    @property
    def relative_step(self) -> float:
        """The given one, or what suits the activation."""
        if self.step is not None:
            return self.step
        return 0.03 if self.activation == "relu" else 0.001

    def quick(self) -> Setting:
        """The same in seconds."""
        return replace(self, blocks=((8, 2), (8, 1), (8, 2)), stem=8, scored=128, neurons=4)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def run(setting: Setting, images: Tensor, labels: Tensor) -> Results:
    """Train, then predict and measure the split of each neuron, taken whole and truncated.

    Args:
        setting: of the net, its training and the splits.
        images: (n, channels, height, width), in float32 and of the order of 1.
        labels: (n,) class numbers.
    """
    _check(images, labels)
    model = trained(setting, images, labels)
    batch = images[: setting.scored].double(), labels[: setting.scored]
    units = find_units(model, (batch[0][:2],))
    scores = score(model, loss_fn, [batch], units=units)
    found: list[Run] = []
    for unit in units_with_depthwise(units):
        found += _of_unit(setting, model, scores, unit, batch)
    return {
        "experiment": "depthwise",
        "settings": asdict(setting) | {"step": setting.relative_step},
        "loss": scores.loss,
        "neurons": rounded(found),
    }


def _check(images: Tensor, labels: Tensor) -> None:
    if images.ndim != 4 or len(images) != len(labels):
        raise InputError(
            "depthwise: expected images (n, channels, height, width) and n labels, "
            f"got {tuple(images.shape)} and {tuple(labels.shape)}."
        )


def trained(setting: Setting, images: Tensor, labels: Tensor) -> MobileNetV1:
    """The net after a few epochs of Adam, in float64 and eval mode."""
    with seeded(setting.seed):
        model = MobileNetV1(
            setting.blocks, setting.stem, images.shape[1], int(labels.max()) + 1,
            ACTIVATIONS[setting.activation],
        ).to(images)  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
        for _ in range(setting.epochs):
            for rows in torch.randperm(len(labels)).to(labels.device).split(setting.batch):
                optimizer.zero_grad()
                loss_fn(model, (images[rows], labels[rows])).backward()
                optimizer.step()
    return model.double().eval()


def units_with_depthwise(units: Units) -> list[Unit]:
    """Those of a pointwise filter and a depthwise one: not the stem, not the last block."""
    return [u for u in units if u.name.endswith(".pointwise.0") and len(u.theta) == 2]


def _of_unit(
    setting: Setting, model: nn.Module, scores: Scores, unit: Unit, batch: Batch
) -> list[Run]:
    """Both predictions and both measurements for the first neurons of a unit."""
    whole = scores[unit.name]
    values, vectors = torch.linalg.eigh(truncated_matrix(model, unit.name, batch))
    found = []
    for k in range(min(setting.neurons, unit.width)):
        scale = float(whole.scales[k])
        short = F.pad(vectors[k, :, 0], (0, unit.size - unit.sizes[0]))  # u is copied as it is
        entries = {
            "whole": Entry(unit.name, k, float(whole.values[k]), whole.vectors[k], scale),
            "truncated": Entry(unit.name, k, float(values[k, 0]), short, scale),
        }
        step = setting.relative_step * scale
        taken = {n: _measure(model, scores.units, e, step, batch) for n, e in entries.items()}
        found.append({"unit": unit.name, "neuron": k, "step": step, **taken})
    return found


def _measure(model: nn.Module, units: Units, entry: Entry, step: float, batch: Batch) -> Run:
    """Split one neuron of a copy: step^2 lambda / 2, and what the loss did."""
    plan = SplitPlan([entry], units)
    receipt = split(copy.deepcopy(model), plan, step=step, loss_fn=loss_fn, batches=[batch])
    assert receipt.measured is not None
    return {"lambda": entry.lambda_, "predicted": receipt.predicted, "measured": receipt.measured}


# --- the neuron that ends too early ----------------------------------------------------------


def truncated_matrix(model: nn.Module, name: str, batch: Batch) -> Tensor:
    """S' (width, d, d) of the pointwise convolution ``name``, followed by norm and activation.

    With z = g (w . x) + b what the norm gives, S'_k = E[ sum_p dL/da_kp act''(z_kp) g_k^2 x_p x_p^T
    ]. Activations with a kink get the curvature of the library's stand-in.
    """
    block = model.get_submodule(name.removesuffix(".0"))
    assert isinstance(block, nn.Sequential)
    conv, norm, act = block
    x, z, delta = _seen(model, conv, act, batch)
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_var is not None
    gain = norm.weight / (norm.running_var + norm.eps).sqrt()  # (width,)
    bent = delta * _curvature(act, z) * gain.square()[:, None, None]  # (n, width, h, w)
    x, bent = x.flatten(2), bent.detach().flatten(2)
    return torch.stack(
        [torch.einsum("np,nip,njp->ij", bent[:, k], x, x) for k in range(bent.shape[1])]
    )


def _seen(
    model: nn.Module, conv: nn.Module, act: nn.Module, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """What enters the convolution, what enters its activation, and dL/da behind that."""
    seen: dict[str, Tensor] = {}
    hooks = [
        conv.register_forward_hook(lambda _, args, __: seen.update(x=args[0].detach())),
        act.register_forward_hook(lambda _, args, out: seen.update(z=args[0].detach(), a=out)),
    ]
    try:
        with eval_mode(model), torch.enable_grad():
            loss = loss_fn(model, batch)
            (delta,) = torch.autograd.grad(loss, seen["a"])
    finally:
        for hook in hooks:
            hook.remove()
    return seen["x"], seen["z"], delta


def _curvature(act: nn.Module, z: Tensor) -> Tensor:
    """act''(z), of the stand-in where act has a kink and is straight elsewhere."""
    if isinstance(act, nn.ReLU):
        return Softplus()(z)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(act(z).sum(), z, create_graph=True)
        (bent,) = torch.autograd.grad(slope.sum(), z)
    return bent


# --- what it shows, from the results alone ---------------------------------------------------


def claims(results: Results) -> dict[str, Any]:
    """For either neuron, how well the index predicts what a split does to the loss.

    The truncated one gets its share of the fall that a split of the whole neuron gives, too.
    """
    neurons = results["neurons"]
    found = {name: _answers([n[name] for n in neurons]) for name in NEURONS}
    shares = [n["truncated"]["measured"] / n["whole"]["measured"] for n in neurons
              if n["whole"]["measured"] < 0]  # fmt: skip
    found["truncated"]["median share of the whole's fall"] = median(shares) if shares else None
    return found


def _answers(splits: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """All over the neurons; "rose" counts those whose index had promised a fall."""
    promised = [s for s in splits if s["predicted"] < 0]
    ratios = [s["measured"] / s["predicted"] for s in promised]
    rose = sum(s["measured"] > 0 for s in promised)
    x, y = [curvatures(splits, key) for key in ("predicted", "measured")]
    return {
        "neurons": len(splits),
        "promised a fall": len(promised),
        "r": pearson(x, y),
        "median |ratio - 1|": median(abs(r - 1) for r in ratios) if ratios else None,
        "rose": rose,
        "share that rose": rose / len(promised) if promised else None,
    }


def curvatures(splits: Sequence[Mapping[str, float]], key: str) -> list[float]:
    """2 / step^2 of the predicted or the measured change: lambda, and what it should have been."""
    return [s["lambda"] * s[key] / s["predicted"] for s in splits if s["predicted"]]


def draw(results: Sequence[Results], folder: Path) -> list[Path]:
    """Promised against measured, a row for each result: the whole neuron left, truncated right."""
    path = folder / "depthwise"
    with sheet(path, (PAGE, 3.1 * len(results)), (len(results), 2)) as (_, axes):
        for row, found in zip(axes, results, strict=True):
            edges = _edges(found)
            for ax, name in zip(row, NEURONS, strict=True):
                _panel(ax, found, name, edges)
    return both(path)


def _edges(results: Results) -> tuple[float, float]:
    """The smallest and the largest promise of either neuron, or the largest change measured."""
    splits = [n[name] for n in results["neurons"] for name in NEURONS]
    promised = [-v for v in curvatures(splits, "predicted") if v < 0] or [1.0]
    largest = max(*promised, *(abs(v) for v in curvatures(splits, "measured")))
    return min(promised) / 1.6, largest * 1.6


def _panel(ax: Axes, results: Results, name: str, edges: tuple[float, float]) -> None:
    """-lambda against -2 dL / step^2; neurons without a promise are counted, not drawn."""
    splits = [n[name] for n in results["neurons"] if n[name]["predicted"] < 0]
    x, y = ([-v for v in curvatures(splits, key)] for key in ("predicted", "measured"))
    low, high = edges
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=low, linscale=0.4)
    ax.axhspan(-12 * high, 0, color="#ECECEC", lw=0)
    ax.plot([low, high], [low, high], color="#444444", lw=0.8, ls="--")
    ax.scatter(x, y, s=12, color=COLORS[name], alpha=0.7, linewidths=0)
    ax.set(xlim=(low, high), ylim=(-12 * high, high))  # room for a note below the points
    decades = [10.0**i for i in range(ceil(log10(low)), floor(log10(high)) + 1)]
    ax.set_yticks([*(-v for v in decades), 0, *decades])
    ax.tick_params(axis="y", which="minor", length=0)
    ax.set_xlabel(r"predicted fall of the loss, $-\lambda$")
    ax.set_ylabel(r"measured fall, $-2\,\Delta L\,/\,\epsilon^2$")
    ax.set_title(_words(results, name))
    left_out = len(results["neurons"]) - len(splits)
    note = "grey: the loss rose; dashed: as predicted"
    note += f"\n{left_out} with $\\lambda \\geq 0$ not drawn" if left_out else ""
    ax.text(0.98, 0.02, note, transform=ax.transAxes, ha="right", va="bottom", fontsize=7)


def _words(results: Results, name: str) -> str:
    found, act = claims(results)[name], SHOWN[results["settings"]["activation"]]
    r, error = found["r"], found["median |ratio - 1|"]
    numbers = [] if r is None else [f"r = {r:.2f}"]
    numbers += [] if error is None else [f"median error {_percent(error)}"]
    numbers += [f"{found['rose']} of {found['promised a fall']} rose"]
    return f"{act}, neuron {NEURONS[name]}\n" + ", ".join(numbers)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"
