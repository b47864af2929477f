"""What was heard, for people and for machines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from splitgrow.listen.spotter import Heard
from splitgrow.paper.speech import RATE

NAME = 32  # characters of a clip's name that stay in one line
NAMED = 3  # clips in a note about many
NAMES = {"_silence_": "(silence)", "_unknown_": "(another word)"}


def table(heard: Sequence[Heard], top: int) -> Table:
    """A line for each clip: the most probable words, and which second was listened to."""
    folder = _folder(heard)
    seconds = [_second(each) for each in heard]
    shown = Table(
        title=None if folder is None else f"clips in {folder}",
        caption=_caption(heard), title_justify="left", caption_justify="left", expand=True,
    )  # fmt: skip
    names = [_name(each, folder) for each in heard]
    shown.add_column("clip", overflow="fold", no_wrap=max(map(len, names)) <= NAME)
    shown.add_column("heard", no_wrap=True)
    if top > 1:
        shown.add_column("or")
    if any(seconds):
        shown.add_column("second")
    for name, each, second in zip(names, heard, seconds, strict=True):
        word, *others = (f"{NAMES.get(word, word)} {share:.0%}" for word, share in each.best(top))
        cells = [name, word, *([", ".join(others)] if top > 1 else []),
                 *([second] if any(seconds) else [])]  # fmt: skip
        shown.add_row(*map(Text, cells))  # as it is: a name may have brackets
    return shown


def _name(heard: Heard, folder: Path | None) -> str:
    path = heard.clip.path
    return str(path if folder is None else path.relative_to(folder))


def _folder(heard: Sequence[Heard]) -> Path | None:
    """The folder that several clips are in, so that their names can be short."""
    try:
        common = Path(os.path.commonpath({each.clip.path.parent for each in heard}))
    except ValueError:  # some from the root and some from here, or on several drives
        return None
    return None if len(heard) == 1 or common == Path() else common


def _second(heard: Heard) -> str:
    clip = heard.clip
    if clip.seconds > 1:
        return f"{clip.start:.2f} to {clip.start + 1:.2f} of {clip.seconds:.2f} s"
    return "" if clip.seconds == 1 else f"{clip.seconds:.2f} s"


def _caption(heard: Sequence[Heard]) -> str | None:
    said = {
        "of a longer clip the loudest one": any(each.clip.seconds > 1 for each in heard),
        "a shorter clip is filled up with silence": any(each.clip.seconds < 1 for each in heard),
    }
    parts = [words for words, needed in said.items() if needed]
    return f"The model hears one second: {', '.join(parts)}." if parts else None


def note(heard: Sequence[Heard]) -> str | None:
    """A line about clips that lack the upper part of what the model listens to."""
    low = [each.clip for each in heard if each.clip.rate < RATE]
    if not low:
        return None
    names = ", ".join(str(clip.path) for clip in low[:NAMED])
    more = f" and {len(low) - NAMED} more" if len(low) > NAMED else ""
    rates = " or ".join(f"{rate / 1000:g}" for rate in sorted({clip.rate for clip in low}))
    missing = f"{min(clip.rate for clip in low) / 2000:g}"
    return (
        f"{names}{more}: recorded at {rates} kHz, so what is above {missing} kHz is missing, and "
        f"words are often misheard. Record at {RATE // 1000} kHz or more."
    )


def to_json(heard: Sequence[Heard]) -> str:
    """A list with an object for each clip; all classes, the most probable one first."""
    rows = [
        {
            "clip": str(each.clip.path),
            "word": each.best(1)[0][0],
            "seconds": each.clip.seconds,
            "start": each.clip.start,
            "probabilities": dict(each.best(len(each.probabilities))),
        }
        for each in heard
    ]
    return json.dumps(rows, indent=1, allow_nan=False)
