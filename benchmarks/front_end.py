"""The speech front end against packed features that another program made of the same clips.

Clips of the packed training and validation parts are found by word, speaker and utterance, and the
official rule must put them into the same part. Test clips have no names there: each is compared
with the nearest of its word. Codes are steps of 0.5 dB.

    python benchmarks/front_end.py --data DIR    # with speech_commands/logmel.npz and its wav files
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from splitgrow.files import write_file
from splitgrow.paper.speech import CLIP, LogMel, encode, scaled
from splitgrow.paper.speech_data import read_wav
from splitgrow.paper.speech_folder import official_part
from splitgrow.paper.speech_parts import CLASSES

RESULTS = Path(__file__).parent / "results" / "front-end.json"
PARTS = ("train", "val")  # as the packed split numbers them


def codes_of(path: Path) -> Tensor:
    """(49, 40) uint8 of a wav file."""
    samples = read_wav(path)[:CLIP]
    with torch.no_grad():
        return encode(LogMel()(scaled(F.pad(samples, (0, CLIP - len(samples)))[None])))[0]


def places(packed: Any) -> dict[tuple[str, str, int], int]:
    """Where a clip is, by its word, speaker and utterance."""
    names = zip(packed["word"], packed["speaker"], packed["utterance"], strict=True)
    words = packed["words"]
    return {
        (str(words[word]), f"{speaker:08x}", int(utterance)): i
        for i, (word, speaker, utterance) in enumerate(names)
        if packed["y"][i] != 0  # silence
    }


def nearest(codes: Tensor, clips: Tensor) -> Tensor:
    """Of the clips, that with the smallest sum of differences."""
    off = (clips.int() - codes.int()).abs().sum((1, 2))
    return clips[off.argmin()]


def differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How our codes of some clips differ from the packed ones."""
    off = torch.stack([(mine.int() - theirs.int()).abs() for mine, theirs in pairs])
    return {"clips": len(pairs), "codes": off.numel(), "equal": int((off == 0).sum()),
            "largest difference": int(off.max())}  # fmt: skip


def compare(packed: Any, files: Sequence[Path]) -> dict[str, Any]:
    """All files of ``<word>/<speaker>_nohash_<n>.wav``."""
    known, x, split = places(packed), torch.from_numpy(packed["x"]), packed["split"]
    x_test, y_test = torch.from_numpy(packed["x_test"]), torch.from_numpy(packed["y_test"])
    named, tested, parts = [], [], 0
    for path in files:
        speaker, _, number = path.stem.partition("_nohash_")
        place = known.get((path.parent.name, speaker, int(number)))
        part, codes = str(official_part(path.name)), codes_of(path)
        if place is not None:
            named.append((codes, x[place]))
            parts += part == PARTS[split[place]]
        else:
            clips = x_test[y_test == CLASSES.index(path.parent.name)]
            tested.append((codes, nearest(codes, clips)))
            parts += part == "test"
    return {
        "files": len(files), "in the part of the official rule": parts,
        "found by name": differences(named), "test, the nearest": differences(tested),
    }  # fmt: skip


def main() -> None:
    """Compare, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    folder = parser.parse_args().data / "speech_commands"
    with np.load(folder / "logmel.npz", allow_pickle=False) as archive:
        packed = dict(archive)
    found = compare(packed, sorted((folder / "wav").glob("*/*.wav")))
    text = json.dumps(found, indent=1)
    print(text)
    write_file(RESULTS, f"{text}\n".encode())


if __name__ == "__main__":
    main()
