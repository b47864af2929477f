"""Static post-training quantisation of an ONNX file: 8-bit weights and activations."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitgrow.capture import Call, ExampleInputs, _first_line
from splitgrow.errors import ExportError, InputError
from splitgrow.export.check import (
    Feeds,
    agreement,
    calls_of,
    difference,
    feeds_of,
    first_samples,
    latency,
    quiet,
    write,
)
from splitgrow.export.onnx_file import set_metadata
from splitgrow.export.runner import OnnxRunner, require_onnx


@dataclass(frozen=True)
class Quantized:
    """A file with 8-bit weights and activations, beside the one that it was made from.

    Attributes:
        path: the file.
        bytes: its size.
        difference: largest absolute difference of an output from the float file's.
        agreement: share of samples (or pixels) with the same argmax over dimension 1; None where
            no output has classes there.
        seconds: median latency of one sample on one thread.
    """

    path: Path
    bytes: int
    difference: float
    agreement: float | None
    seconds: float


def quantize_onnx(
    source: str | Path,
    path: str | Path | None = None,
    *,
    batches: Iterable[ExampleInputs | Call],
) -> Quantized:
    """Write an ONNX file with 8-bit weights (one scale per channel) and activations (QDQ).

    The ranges of the activations are the smallest and largest values on the batches. What it costs
    in accuracy depends on the model: look at ``difference`` and ``agreement``, which are measured
    on the same batches, on this machine's CPU.

    Args:
        source: a float ONNX file, as :func:`export_onnx` writes it.
        path: the file to write or replace; left out, ``source`` with ``.int8.onnx``.
        batches: inputs of the model, without targets: a tensor, a tuple, or a dict by name each.

    Raises:
        ExportError: onnxruntime cannot quantise it, or cannot run what came out.
        InputError: the packages of the extra ``export`` are missing, or an argument is not usable.
    """
    require_onnx()
    source = Path(source)
    if not source.is_file():
        raise InputError(f"source: {source} is not there. Write it with export_onnx first.")
    calls = calls_of(batches)
    if not calls:
        raise InputError("batches: there are none, and the ranges are taken from them.")
    exact = OnnxRunner(source)
    feeds = [feeds_of(call, exact.inputs, str(source)) for call in calls]
    content = _quantized(source, feeds, exact.metadata)
    rough = OnnxRunner(content)
    ours, theirs = [exact.run(each) for each in feeds], [rough.run(each) for each in feeds]
    single = feeds_of(first_samples(calls[0], 1), rough.inputs, str(source))
    seconds = latency(lambda: rough.run(single))
    target = source.with_suffix(".int8.onnx") if path is None else Path(path)
    write(target, content)
    worst = max(map(difference, ours, theirs))
    return Quantized(target, len(content), worst, agreement(ours, theirs), seconds)


def _quantized(source: Path, feeds: Sequence[Feeds], metadata: Mapping[str, str]) -> bytes:
    """The contents of the file; onnxruntime's tools work on files, in a folder of their own."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory(prefix="splitgrow-") as folder, quiet():
        prepared, target = Path(folder, "prepared.onnx"), Path(folder, "int8.onnx")
        try:
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared), str(target), _reader(feeds), quant_format=QuantFormat.QDQ,
                per_channel=True, weight_type=QuantType.QInt8, activation_type=QuantType.QInt8,
            )  # fmt: skip
            message = onnx.load(target)
        except Exception as error:  # its own, and whatever it runs into
            raise ExportError(f"{source} cannot be quantised: {_first_line(error)}") from error
    set_metadata(message, metadata)  # the tools note their own work there
    content: bytes = message.SerializeToString()
    return content


def _reader(feeds: Sequence[Feeds]) -> Any:
    """The inputs in the form that onnxruntime's calibration reads."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # no annotations
        def __init__(self) -> None:
            self._left = iter(feeds)

        def get_next(self) -> Feeds | None:
            return next(self._left, None)

    return Reader()
