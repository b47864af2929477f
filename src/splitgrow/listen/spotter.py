"""A keyword model from an ONNX file, and what it hears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from splitgrow.errors import ExportError, InputError
from splitgrow.export.runner import OnnxRunner, require_onnxruntime
from splitgrow.listen.clip import Clip
from splitgrow.listen.keywords import WAY_OUT, Keywords
from splitgrow.paper.speech import CLIP

_CHUNK = 256  # clips at a time


@dataclass(frozen=True, eq=False)
class Heard:
    """A clip, and the probability of each class."""

    clip: Clip
    probabilities: dict[str, float]

    def best(self, count: int) -> list[tuple[str, float]]:
        """The most probable classes, the first one first."""
        ranked = sorted(self.probabilities.items(), key=lambda item: -item[1])
        return ranked[:count]


def _runner(path: Path) -> OnnxRunner:
    """Raise with a cause of ours for what is given in the place of an ONNX file."""
    if path.is_dir():
        raise InputError(f"{path} is a folder. Name the ONNX file in it: {path / 'model.onnx'}.")
    if not path.is_file():
        raise InputError(f"{path}: there is no such file. {WAY_OUT}")
    try:
        return OnnxRunner(path)
    except ExportError as error:
        if _is_executorch(path):
            raise InputError(
                f"{path} is an ExecuTorch program, and this command runs ONNX files. {WAY_OUT}"
            ) from error
        # No protobuf message at all: onnxruntime's words say no more than that.
        cause = "" if "InvalidProtobuf" in str(error) else f" that runs ({error})"
        raise InputError(f"{path} is not an ONNX file{cause}. {WAY_OUT}") from error


def _is_executorch(path: Path) -> bool:
    """By the mark that its files have behind the first four bytes."""
    with path.open("rb") as file:
        return file.read(6)[4:] == b"ET"


class Spotter:
    """An ONNX file of a keyword model, on one thread.

    Attributes:
        keywords: its classes, and how sound becomes its input.

    Raises:
        InputError: onnxruntime is missing, the file is not there, or not a keyword model.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        require_onnxruntime()
        self._runner = _runner(path)
        self.keywords = Keywords.from_metadata(self._runner.metadata, str(path))
        self._check(path)

    def _check(self, path: Path) -> None:
        """One second of silence must give a number for each class."""
        inputs = self.keywords.inputs(torch.zeros(1, CLIP)).numpy()
        try:
            shapes: Any = [found.shape for found in self._answers(inputs)]
        except Exception as error:  # onnxruntime's own classes, which it does not promise
            raise InputError(
                f"{path} does not run on MFCCs of shape {inputs.shape}: {error}. {WAY_OUT}"
            ) from error
        wanted = [(1, len(self.keywords.classes))]
        if shapes != wanted:
            raise InputError(
                f"{path}: expected outputs of shape {wanted} for its classes, got {shapes}. "
                f"{WAY_OUT}"
            )

    def _answers(self, inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return self._runner.run(dict.fromkeys(self._runner.inputs, inputs))

    def hear(self, clips: Sequence[Clip]) -> list[Heard]:
        """What is said in each clip."""
        found: list[Heard] = []
        for first in range(0, len(clips), _CHUNK):
            some = clips[first : first + _CHUNK]
            inputs = self.keywords.inputs(torch.stack([clip.wave for clip in some]))
            (logits,) = self._answers(inputs.numpy())
            shares = torch.from_numpy(logits).double().softmax(1).tolist()
            found += [
                Heard(clip, dict(zip(self.keywords.classes, row, strict=True)))
                for clip, row in zip(some, shares, strict=True)
            ]
        return found
