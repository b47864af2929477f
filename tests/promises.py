"""What every unit that is offered must keep, checked end to end on any model.

Found: the units and refusals that a test states. Parity: a split with step 0 changes no output.
Prediction: eps^2 lambda / 2 is the change of loss that a split with step eps is measured to make.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import splitgrow as sg
from splitgrow.capture import Call, output_tensors

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]
LossFn = Callable[[Callable[..., Any], Any], Tensor]

STEP = 1e-3
FLAT = 1e-9  # lambdas below this are zeros with rounding in them


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Double precision and eval mode, with weights and statistics that hide no mistake."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(7)

    def draw(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator).double() * (high - low) + low)

    for parameter in model.parameters():
        parameter.mul_(1.5)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            if module.affine:
                draw(module.weight, 0.5, 1.5)
                draw(module.bias, -0.5, 0.5)
            if module.track_running_stats:
                draw(module.running_mean, -0.5, 0.5)
                draw(module.running_var, 0.5, 1.5)
        if isinstance(module, nn.PReLU):
            draw(module.weight, 0.1, 0.6)
    return model


def double(inputs: Any) -> Any:
    """Inputs with every floating tensor in double precision."""
    return torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, inputs
    )


def outputs_of(model: Callable[..., Any], inputs: Any) -> list[Tensor]:
    call = Call.from_example(inputs)
    return output_tensors(model(*call.args, **call.kwargs))


def regression(model: nn.Module, inputs: Any) -> tuple[LossFn, list[Any]]:
    """A smooth loss of all outputs against fixed random targets, and its one batch."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        outputs = outputs_of(model, inputs)
    targets = [torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() else None
               for t in outputs]  # fmt: skip

    def loss_fn(callee: Callable[..., Any], batch: Any) -> Tensor:
        found = outputs_of(callee, batch)
        terms = [(o - t).square().mean() + (o * t).sin().mean()
                 for o, t in zip(found, targets, strict=True) if t is not None]  # fmt: skip
        return torch.stack(terms).sum()

    return loss_fn, [inputs]


def entry(scores: sg.Scores, name: str, neuron: int) -> sg.Entry:
    """The part of a plan that splits one neuron, whatever the sign of its lambda."""
    found = scores[name]
    value, vector = found.values[neuron].item(), found.vectors[neuron]
    return sg.Entry(name, neuron, value, vector, found.scales[neuron].item())


def strongest(scores: sg.Scores, name: str) -> int:
    """The neuron with the largest |lambda|."""
    return int(scores[name].values.abs().argmax())


def check_unit(
    model: nn.Module, scores: sg.Scores, name: str, loss_fn: LossFn, batches: Sequence[Any],
    step: float = STEP, tolerance: float = 1e-3,
) -> sg.Receipt:  # fmt: skip
    """Split the unit's strongest neuron on a copy: parity, and prediction = measurement."""
    plan = sg.SplitPlan([entry(scores, name, strongest(scores, name))], scores.units)
    grown = copy.deepcopy(model)
    receipt = sg.split(grown, plan, step=step, loss_fn=loss_fn, batches=batches)
    assert receipt.parity < 1e-11
    assert receipt.measured is not None
    assert receipt.loss is not None
    rounding = 1e-14 * max(1.0, abs(receipt.loss))
    if abs(plan[0].lambda_) < FLAT:
        assert abs(receipt.measured) < FLAT * step**2 + 10 * rounding, (name, receipt.measured)
    else:
        off = abs(receipt.measured - receipt.predicted)
        assert off < tolerance * abs(receipt.predicted) + rounding, (
            f"{name}: predicted {receipt.predicted:.6e}, measured {receipt.measured:.6e}"
        )
    return receipt


def check_model(
    model: nn.Module,
    inputs: Inputs,
    units: Mapping[str, int] | Sequence[str] | None = None,
    refused: Mapping[str, str] | None = None,
    *,
    curved: bool = True,
    step: float = STEP,
) -> sg.Units:
    """Find the units of a model and check each of them.

    Args:
        model: any model; it is made double and lively.
        inputs: example inputs, which are the data of the loss too.
        units: the names that must be found, perhaps with their widths; None: any.
        refused: the names that must be refused, with a part of the reason; None: any.
        curved: some lambda must not be zero, or the comparison would be of zeros.
        step: the paper's eps.
    """
    model, inputs = lively(model), double(inputs)
    found = sg.find_units(model, inputs)
    if units is not None:
        assert [unit.name for unit in found] == list(units), found
        for name, width in units.items() if isinstance(units, Mapping) else ():
            assert found[name].width == width
    if refused is not None:
        check_refused(found, refused)
    if len(found):
        loss_fn, batches = regression(model, inputs)
        scores = sg.score(model, loss_fn, batches, units=found, stand_in=None, steps=10**9)
        for unit in found:
            check_unit(model, scores, unit.name, loss_fn, batches, step)
        if curved:
            assert max(s.values.abs().max().item() for s in scores.values()) > 1e-6
    return found


def check_refused(units: sg.Units, refused: Mapping[str, str]) -> None:
    """The refusals are these, each with its reason."""
    reasons = {skipped.name: skipped.reason for skipped in units.skipped}
    assert list(reasons) == list(refused) or set(reasons) == set(refused), units
    for name, part in refused.items():
        assert part in reasons[name], f"{name}: {reasons[name]}"
