"""Try units before they are offered: duplicate a neuron of each on a copy, compare the outputs.

A model may fix a size in its code (``x.view(-1, 400)``, ``x[:, :16]``) where no graph can tell.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from splitgrow.capture import Call, output_tensors
from splitgrow.state import Undo, eval_mode, seeded
from splitgrow.surgery import plan_regrowth, regrow
from splitgrow.units import Skipped, Unit, Units


def run(model: nn.Module, call: Call) -> list[Tensor]:
    """The model's output tensors in eval mode, with a fixed random state."""
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    call = call.to(device)
    with eval_mode(model), seeded(), torch.no_grad():
        return output_tensors(model(*call.args, **call.kwargs))


def largest_change(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest absolute difference between two outputs of the same model.

    Infinities and NaNs (masked logits, say) that both have in the same places do not differ.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf")
    return max((_change(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def _change(before: Tensor, after: Tensor) -> float:
    a, b = _real(before), _real(after)
    same = (a == b) | (a.isnan() & b.isnan())
    change = torch.where(same, 0.0, (a - b).abs())
    change = torch.where(change.isnan(), float("inf"), change)
    return change.max().item() if change.numel() else 0.0


def tolerance(model: nn.Module, outputs: list[Tensor]) -> float:
    """What rounding alone may change in outputs of this size."""
    entries = [_real(t).abs().reshape(-1) for t in outputs]
    finite = torch.cat([e[e.isfinite()] for e in entries]) if entries else torch.zeros(0)
    scale = finite.max().item() if finite.numel() else 1.0
    kinds = {t.dtype for t in (*outputs, *model.parameters()) if t.dtype.is_floating_point}
    eps = max((torch.finfo(kind).eps for kind in kinds), default=1e-7)
    return min(1e3 * eps, 5e-2) * scale


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def try_units(model: nn.Module, units: Units) -> Units:
    """The units that pass; those that do not are skipped, with what happened."""
    if not len(units):
        return units
    try:
        trial = copy.deepcopy(model)
    except Exception:  # noqa: BLE001  (whatever a user's class raises: the split itself checks too)
        return units
    _fill_zeros(trial)
    before = run(trial, units.graph.example)
    if all(_fault(trial, units, group, before) is None for group in _groups(list(units))):
        return units
    good: list[Unit] = []
    bad: list[Skipped] = []
    for unit in units:
        fault = _fault(trial, units, [unit], before)
        if fault is None:
            good.append(unit)
        else:
            bad.append(Skipped(unit.name, fault))
    return Units(good, [*units.skipped, *bad], units.analysis)


def _groups(units: list[Unit]) -> list[list[Unit]]:
    """Few groups with every unit in one at least, and of any two units one without the other.

    The latter finds code that asks of two units only that they have the same width.
    """
    bits = range(len(units).bit_length())
    return [[unit for i, unit in enumerate(units, 1) if i >> bit & 1] for bit in bits]


def _fill_zeros(model: nn.Module) -> None:
    """Random numbers for parameters that are all 0: a branch that starts at 0 hides mistakes."""
    with seeded(), torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.uniform_(-0.1, 0.1)


def _fault(model: nn.Module, units: Units, tried: list[Unit], before: list[Tensor]) -> str | None:
    """What goes wrong when the last neuron of some units becomes two; the model is put back."""
    with Undo() as undo:
        try:
            parents = {unit.name: [unit.width - 1] for unit in tried}
            regrow(model, units, plan_regrowth(units, parents), undo)
            change = largest_change(before, run(model, units.graph.example))
        except Exception as error:  # noqa: BLE001  (the model's own code may raise anything)
            first = (str(error).strip().splitlines() or [""])[0]
            fault = f"forward does not run with one more neuron ({type(error).__name__}: {first}); "
            return fault + "does it fix the width in its code?"
        finally:
            undo.rollback()
    if change <= tolerance(model, before):
        return None
    return f"one neuron more changes the outputs by {change:.1e}; does forward fix the width?"
