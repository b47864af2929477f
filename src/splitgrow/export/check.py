"""What every export shares: calls as feeds, a file beside PyTorch, differences and latencies.

An exported file is a function from named arrays to a list of arrays. It is trusted only after it
has answered real inputs as the model does.
"""

from __future__ import annotations

import contextlib
import copy
import io
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from splitgrow.capture import (
    Call,
    ExampleInputs,
    _first_line,
    _quiet,
    _Slot,
    _Structure,
    output_tensors,
)
from splitgrow.errors import ExportError, InputError
from splitgrow.files import write_file
from splitgrow.state import eval_mode, seeded

Feeds = dict[str, np.ndarray[Any, Any]]
Arrays = list[np.ndarray[Any, Any]]
TOLERANCE = 1e-4  # largest absolute difference of an output, float32
SIZES = (1, 3)  # batch sizes that are tried beside those of the batches
_WARM_UP, _RUNS, _SECONDS = 10, 300, 1.0


@dataclass(frozen=True)
class Exported:
    """A file that computes what the model does.

    Attributes:
        path: the file.
        bytes: its size.
        difference: largest absolute difference of an output from PyTorch's.
        seconds: median latency of one sample, on one thread.
        torch_seconds: median latency of the model in PyTorch, on one thread.
        batch_sizes: the batch sizes that were compared.
    """

    path: Path
    bytes: int
    difference: float
    seconds: float
    torch_seconds: float
    batch_sizes: tuple[int, ...]


class Runner(Protocol):
    """A file that can be run.

    Attributes:
        inputs: the names of what it takes, in order.
    """

    inputs: list[str]

    def run(self, feeds: Feeds) -> Arrays:
        """The outputs of one call."""


# --- calls --------------------------------------------------------------------------------


def calls_of(batches: Iterable[ExampleInputs | Call], model: nn.Module | None = None) -> list[Call]:
    """Inputs as calls in main memory; with a model, its arguments by name."""
    calls = [Call.from_example(batch).to(torch.device("cpu")) for batch in batches]
    return calls if model is None else [call.bound_to(model) for call in calls]


def check_like(example: Call, calls: Sequence[Call]) -> None:
    """Raise where a call differs from the example in more than the values of its tensors."""
    for index, call in enumerate(calls):
        if not example.like(call):
            raise InputError(
                f"batches[{index}] calls the model with ({call.describe()}), but the file is made "
                f"for ({example.describe()}). Give inputs of one form alone."
            )


def in_sizes(call: Call, sizes: Sequence[int] = SIZES) -> list[Call]:
    """The first samples of a call, in batches of these sizes, as far as there are so many."""
    return [first_samples(call, size) for size in sizes if size <= call.samples]


def first_samples(call: Call, size: int) -> Call:
    """The first samples alone; tensors without a batch dimension stay."""
    full = call.samples
    return call.with_tensors(
        [t[:size] if t.ndim and t.shape[0] == full else t for t in call.tensors()]
    )


def input_names(call: Call) -> list[str]:
    """A name for each tensor of a call: its argument's, with keys and indices inside of it."""
    leaves, _ = pytree.tree_flatten_with_path((call.args, call.kwargs))
    paths = [_keys(path) for path, leaf in leaves if isinstance(leaf, Tensor)]
    # (0, i, ...) is positional argument i; (1, name, ...) is the argument of that name.
    named = [f"input_{path[1]}" if path[0] == "0" else path[1] for path in paths]
    return [".".join([name, *path[2:]]) for name, path in zip(named, paths, strict=True)]


def _keys(path: tuple[Any, ...]) -> list[str]:
    """The keys, indices and attributes that lead to a leaf, each as a word."""
    return [str(_key(each)) for each in path]


def _key(entry: Any) -> Any:
    kinds = ("key", "idx", "name")  # of a dict, a sequence, a named tuple
    return next((getattr(entry, kind) for kind in kinds if hasattr(entry, kind)), entry)


def output_names(structure: _Structure) -> list[str]:
    """A name for each tensor of an output: the keys of a dict, the indices of a tuple."""
    found: dict[int, str] = {}

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, _Slot):
            found[value.index] = ".".join(path) or "output"
        for key, child in _children(value):
            walk(child, (*path, f"output_{key}" if isinstance(key, int) and not path else str(key)))

    walk(structure.skeleton, ())
    return [found[index] for index in sorted(found)]


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, _Slot | type):
        return []
    if isinstance(value, dict):
        return list(value.items())
    if is_dataclass(value):
        return list(vars(value).items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def feeds_of(call: Call, names: Sequence[str], place: str) -> Feeds:
    """The tensors of a call under a file's names: keywords by name, the others in order."""
    keyword = Call((), call.kwargs)
    tensors = dict(zip(input_names(keyword), keyword.tensors(), strict=True))
    free = [name for name in names if name not in tensors]
    tensors |= dict(zip(free, Call(call.args, {}).tensors(), strict=False))
    if set(tensors) != set(names) or len(call.tensors()) != len(names):
        raise InputError(
            f"batches: {place} takes {', '.join(names)}, but a batch is ({call.describe()}). Give "
            "the inputs alone, without targets: a tensor, a tuple, or a dict by name."
        )
    return {name: tensors[name].detach().cpu().numpy() for name in names}


# --- files --------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters print, log and warn about themselves; our messages say what matters."""
    with warnings.catch_warnings(), _quiet(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def write(path: Path, content: bytes) -> None:
    """A file, whole or not at all, in a folder that is made if need be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from error


# --- the model beside a file --------------------------------------------------------------


def in_main_memory(model: nn.Module) -> nn.Module:
    """The model, or a copy of it where it lies on another device."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return model
    return copy.deepcopy(model).cpu()


def answers(model: nn.Module, call: Call) -> Arrays:
    """The model's outputs in eval mode, flattened as in a file."""
    with eval_mode(model), seeded(), torch.no_grad():
        own = call.to(None)
        found = output_tensors(model(*own.args, **own.kwargs))
    return [_array(value) for value in found]


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def difference(ours: Arrays, theirs: Arrays) -> float:
    """The largest absolute difference of two answers; infinite where they cannot be compared."""
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        return float("inf")
    return max((_distance(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities too
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0.0))


@dataclass(frozen=True)
class Checked:
    """How far a file is from the model, and on which batch sizes that was looked at."""

    difference: float
    batch_sizes: tuple[int, ...]


def check_same(
    model: nn.Module,
    runner: Runner,
    calls: Sequence[Call],
    tolerance: float,
) -> Checked:
    """Run both on every call; raise where they differ by more than the tolerance."""
    worst = 0.0
    for call in calls:
        apart = difference(_answer(model, call), _run(runner, call))
        worst = max(worst, apart)
        if apart > tolerance:
            raise ExportError(
                f"the exported file differs from the model by {apart:.2g} on ({call.describe()}), "
                f"more than {tolerance:g}, so it was not written. Where the model's outputs are so "
                "large that this is rounding, allow it with tolerance= (--tolerance)."
            )
    return Checked(worst, tuple(sorted({call.samples for call in calls})))


def check_finite(model: nn.Module, runner: Runner, call: Call) -> None:
    """Raise where zeros, which no batch may have, give a number in PyTorch and none in the file.

    Only that: rounding may be large there, as in a norm of values that are all the same.
    """
    zeros = call.with_tensors(
        [torch.zeros_like(t) if t.is_floating_point() else t for t in call.tensors()]
    )
    try:
        ours = answers(model, zeros)
    except Exception:  # noqa: BLE001  (a model need not take zeros)
        return
    for mine, theirs in zip(ours, _run(runner, zeros), strict=True):
        lost = np.isfinite(mine) & ~np.isfinite(theirs)
        if lost.any():
            raise ExportError(
                f"the exported file gives {theirs[lost].flat[0]} where all inputs are zero, and "
                "the model a number, so it was not written. Something that keeps it from dividing "
                "by zero (a small constant that is added) was lost: make that constant larger."
            )


def _answer(model: nn.Module, call: Call) -> Arrays:
    try:
        return answers(model, call)
    except Exception as error:
        raise ExportError(
            f"the model itself does not run on ({call.describe()}), so that nothing was written: "
            f"{_first_line(error)}"
        ) from error


def _run(runner: Runner, call: Call) -> Arrays:
    feeds = feeds_of(call, runner.inputs, "the file")
    try:
        return runner.run(feeds)
    except Exception as error:
        raise ExportError(
            f"the exported file does not run on ({call.describe()}), on which the model does, so "
            f"it was not written: {_first_line(error)}"
        ) from error


def agreement(ours: Iterable[Arrays], theirs: Iterable[Arrays]) -> float | None:
    """The share of equal argmax over dimension 1, where cross-entropy has its classes.

    Of the first output that has one; None where there is none.
    """
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        index = next((i for i, out in enumerate(a) if out.ndim > 1 and out.shape[1] > 1), None)
        if index is None:
            return None
        equal = a[index].argmax(1) == b[index].argmax(1)
        same, total = same + int(equal.sum()), total + equal.size
    return same / total if total else None


# --- latency ------------------------------------------------------------------------------


def latency(action: Callable[[], object]) -> float:
    """Median seconds of many runs, after some that do not count."""
    for _ in range(_WARM_UP):
        action()
    spent: list[float] = []
    while len(spent) < _RUNS and (sum(spent) < _SECONDS or len(spent) < _WARM_UP):
        start = time.perf_counter()
        action()
        spent.append(time.perf_counter() - start)
    return median(spent)


def torch_latency(model: nn.Module, call: Call) -> float:
    """Median seconds of the model itself in eval mode, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with eval_mode(model), seeded(), torch.inference_mode():
            return latency(lambda: model(*call.args, **call.kwargs))
    finally:
        torch.set_num_threads(threads)


class OneByOne:
    """A file that takes one sample at a time, run on each sample of a batch."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.inputs = runner, runner.inputs

    def run(self, feeds: Feeds) -> Arrays:
        """The outputs of all samples. Inputs without a batch dimension go to each of them."""
        count = next(len(array) for array in feeds.values() if array.ndim)
        found = [
            self._runner.run({name: _sample(array, i, count) for name, array in feeds.items()})
            for i in range(count)
        ]
        return [np.concatenate(outputs) for outputs in zip(*found, strict=True)]


def _sample(array: np.ndarray[Any, Any], index: int, count: int) -> np.ndarray[Any, Any]:
    batch = array.ndim and len(array) == count
    return array[index : index + 1] if batch else array


class FileModule(nn.Module):
    """An exported file in the place of the model, so that ``evaluate`` can judge it."""

    def __init__(self, model: nn.Module, runner: Runner, structure: _Structure) -> None:
        super().__init__()
        self._held = (model, runner, structure)  # in a tuple: the model is no part of it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The file's outputs, in the form of the model's."""
        model, runner, structure = self._held
        call = Call(args, kwargs).to(torch.device("cpu")).bound_to(model)
        arrays = runner.run(feeds_of(call, runner.inputs, "the file"))
        return structure.unflatten([torch.from_numpy(array) for array in arrays])


def metrics_of(evaluate: Callable[[Any], Mapping[str, Any]], model: nn.Module) -> dict[str, float]:
    """What the experiment's evaluate says of a model; nothing where it needs more of it."""
    try:
        with eval_mode(model), seeded(), torch.no_grad():
            return {str(name): float(value) for name, value in evaluate(model).items()}
    except Exception:  # noqa: BLE001  (a user's code, which was written for the model itself)
        return {}
