"""What a keyword model must bring along: its classes, and how sound becomes its input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from splitgrow.errors import InputError
from splitgrow.paper.speech import COEFFICIENTS, SETTINGS, LogMel, Mfcc, decibels, encode

KEY = "splitgrow.keywords"  # in the metadata of an ONNX file
FRONT_END: dict[str, Any] = {**SETTINGS, "coefficients": COEFFICIENTS}
WAY_OUT = (
    "Export a run of splitgrow paper kws with this version: splitgrow export RUN_DIR --format onnx"
)


@dataclass(frozen=True)
class Keywords:
    """Classes, and the mean and deviation of each MFCC in the clips that were learnt from.

    In a file it is JSON under ``splitgrow.keywords``, together with the settings of the front end.
    """

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @torch.no_grad()
    def inputs(self, waves: Tensor) -> Tensor:
        """Waveforms (B, 16000) within [-1, 1] as MFCCs (B, 1, 49, 10), as in training.

        There decibels were kept in steps of 0.5, so they are rounded to these here too.
        """
        mfcc = Mfcc(torch.tensor(self.mean), torch.tensor(self.std))
        return mfcc(decibels(encode(LogMel()(waves))))

    def to_metadata(self) -> dict[str, str]:
        """For ``export_onnx(metadata=...)``."""
        return {KEY: json.dumps({**asdict(self), "front end": FRONT_END})}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], place: str) -> Keywords:
        """What a file says, whose name is ``place``.

        Raises:
            InputError: it says nothing, something else, or it was made with another front end.
        """
        if KEY not in metadata:
            raise InputError(
                f"{place} is not a keyword model: its metadata has no {KEY}, which tells its "
                f"classes and how sound becomes its input. {WAY_OUT}"
            )
        try:
            found = json.loads(metadata[KEY])
            front_end, named = found["front end"], [found[f.name] for f in fields(cls)]
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"{place}: {KEY} in its metadata cannot be read ({type(error).__name__}: {error}). "
                f"{WAY_OUT}"
            ) from error
        _check_front_end(front_end, place)
        _check(place, *named)
        return cls(*map(tuple, named))


def _check_front_end(found: Any, place: str) -> None:
    if not isinstance(found, dict):
        found = {}
    names = [name for name, value in FRONT_END.items() if found.get(name) != value]
    if names:
        listed = "; ".join(f"{n}: {found.get(n)} there, {FRONT_END[n]} here" for n in names)
        raise InputError(f"{place} was made with another front end ({listed}). {WAY_OUT}")


def _check(place: str, classes: Any, mean: Any, std: Any) -> None:
    words = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    numbers = all(
        isinstance(values, list)
        and len(values) == COEFFICIENTS
        and all(isinstance(value, int | float) and isfinite(value) for value in values)
        for values in (mean, std)
    )
    if not words or not classes or not numbers or min(std) <= 0:
        raise InputError(
            f"{place}: {KEY} in its metadata should have names of classes and {COEFFICIENTS} means "
            f"and deviations, got {classes}, {mean}, {std}. {WAY_OUT}"
        )
