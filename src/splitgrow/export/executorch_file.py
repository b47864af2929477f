"""A model as an ExecuTorch program for XNNPACK, PyTorch's runtime for phones and small boards."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitgrow.capture import Call, ExampleInputs, _explain, _first_line, _Structure, _Traced
from splitgrow.errors import CaptureError, ExportError, InputError
from splitgrow.export.check import (
    TOLERANCE,
    Arrays,
    Exported,
    Feeds,
    calls_of,
    check_finite,
    check_like,
    check_same,
    feeds_of,
    first_samples,
    in_main_memory,
    input_names,
    quiet,
    torch_latency,
    write,
)
from splitgrow.export.executorch_latency import executorch_latency
from splitgrow.state import eval_mode

CHECKED = 16  # samples that are compared, one by one, of each batch


def export_executorch(
    model: nn.Module,
    example_inputs: ExampleInputs | Call,
    path: str | Path,
    *,
    batches: Iterable[ExampleInputs | Call] | None = None,
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write a model in eval mode as an ExecuTorch program (``.pte``) for one sample at a time.

    ExecuTorch plans its memory ahead, for the largest batch; on the devices that it is for, that
    is one sample. Layers that XNNPACK knows run there, the others in ExecuTorch's own kernels.
    Arguments and errors are those of :func:`export_onnx`; the samples of ``batches`` are compared
    one by one, the first sixteen of each.
    """
    require_executorch()
    model = in_main_memory(model)
    (example,) = calls_of([example_inputs], model)
    calls = calls_of([] if batches is None else batches, model)
    check_like(example, calls)
    single = first_samples(example, 1)
    content = _program(model, single)
    runner = ExecutorchRunner(content, input_names(single))
    samples = [one for call in calls or [example] for one in _one_by_one(call)]
    checked = check_same(model, runner, samples, tolerance)
    check_finite(model, runner, single)
    feeds = feeds_of(single, runner.inputs, "the file")
    seconds, torch_seconds = executorch_latency(content, feeds), torch_latency(model, single)
    write(Path(path), content)
    return Exported(
        Path(path), len(content), checked.difference, seconds, torch_seconds, checked.batch_sizes
    )


def require_executorch() -> None:
    """Raise unless the optional package is there."""
    try:
        with quiet(), _no_output():
            import executorch.exir
            import executorch.runtime  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"a .pte file is made with the package executorch ({error}). Install it with: "
            'pip install "splitgrow[executorch]", in the version that was made for your torch '
            f"({torch.__version__})."
        ) from error


def _one_by_one(call: Call) -> list[Call]:
    full = call.samples
    return [
        call.with_tensors(
            [t[i : i + 1] if t.ndim and t.shape[0] == full else t for t in call.tensors()]
        )
        for i in range(min(full, CHECKED))
    ]


def _program(model: nn.Module, single: Call) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = _traced(model, single)
    try:
        with quiet(), _no_output():
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            content: bytes = bytes(lowered.to_executorch().buffer)
    except Exception as error:  # its own, and whatever it runs into
        raise ExportError(
            f"{type(model).__name__} cannot be written for ExecuTorch: {_first_line(error)}"
        ) from error
    return content


def _traced(model: nn.Module, single: Call) -> torch.export.ExportedProgram:
    """The model's program for exactly this call."""
    try:
        with quiet(), eval_mode(model), torch.no_grad():
            wrapped = _Traced(model, single, _Structure())
            wrapped.training = False
            return torch.export.export(wrapped, (single.tensors(),), strict=False)
    except Exception as error:  # whatever the model's code raises
        raise CaptureError(_explain(model, single, error)) from error


class ExecutorchRunner:
    """A program in ExecuTorch's runtime."""

    def __init__(self, content: bytes, inputs: list[str]) -> None:
        from executorch.runtime import Runtime

        self.inputs = inputs
        try:
            with quiet(), _no_output():
                self._program: Any = Runtime.get().load_program(content)
                self._method: Any = self._program.load_method("forward")
            self._content = content  # both point into it, so it goes last
        except Exception as error:  # its own
            raise ExportError(f"ExecuTorch cannot load the file: {_first_line(error)}") from error

    def run(self, feeds: Feeds) -> Arrays:
        """The outputs of one call."""
        found = self._method.execute([torch.from_numpy(feeds[name]) for name in self.inputs])
        return [value.numpy().copy() for value in found]


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Nothing on the terminal from C++ either, which writes past ``sys.stderr``."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number, _ in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
