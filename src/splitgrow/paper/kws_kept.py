"""What is kept beside the runs of the keyword study, so that their nets can be exported.

A net is of use only with its classes and the mean and deviation of its MFCCs; and a file of it is
compared, calibrated and judged on clips. All that is in ``clips.safetensors`` in the folder of the
runs, so that ``splitgrow export`` needs the data set no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.checkpoint import load
from splitgrow.errors import CheckpointError, InputError
from splitgrow.experiment import Experiment
from splitgrow.files import read_sealed, write_sealed
from splitgrow.fit import Trainer
from splitgrow.listen.keywords import Keywords
from splitgrow.paper.job_runs import runs_of
from splitgrow.paper.kws_bench import GROWABLE, Bench, Setting, accuracy, build
from splitgrow.paper.speech_parts import CLASSES, SpeechData
from splitgrow.runs import RunFolder

ORIGIN = "splitgrow.paper.kws_kept:experiment"  # of every grown net of the study
FILE = "clips.safetensors"
FORMAT = "splitgrow-kws-clips-1"


def kept_bench(folder: Path, setting: Setting, data: SpeechData, device: torch.device) -> Bench:
    """The bench of a setting; what exports need is kept in the folder of its runs."""
    bench = Bench(setting, data, device)
    keep(bench, runs_of(setting, folder))
    return bench


def keep(bench: Bench, runs: Path) -> None:
    """Write the file of a bench. Several jobs have the same one.

    Raises:
        InputError: it is there, of other clips, which the nets beside it were grown on.
    """
    inputs, labels = (torch.cat(each) for each in zip(*bench.scored, strict=True))
    clips = {"inputs": inputs, "labels": labels, "test_inputs": bench.test[0],
             "test_labels": bench.test[1]}  # fmt: skip
    if (runs / FILE).exists() and _kept_already(clips, runs / FILE):
        return
    runs.mkdir(parents=True, exist_ok=True)
    keywords = Keywords(CLASSES, *(tuple(t.tolist()) for t in (bench.mfcc.mean, bench.mfcc.std)))
    write_sealed(
        runs / FILE,
        clips,
        {"format": FORMAT, "keywords": json.dumps(asdict(keywords)),
         "width": str(bench.setting.width), "batch": str(bench.setting.scored_batch)},
    )  # fmt: skip


def _kept_already(clips: Mapping[str, Tensor], file: Path) -> bool:
    """Is the file whole? Raise where it has other clips."""
    try:
        _, found = read_sealed(file, FORMAT)
    except CheckpointError:
        return False
    if not all(_alike(found[name], values.cpu()) for name, values in clips.items()):
        raise InputError(
            f"{file} has other clips: the nets beside it were grown on another data set. Choose "
            f"another --folder, or delete {file.parent}."
        )
    return True


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of another device."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-3)


def experiment(run_dir: Path) -> Experiment:
    """The experiment of a grown net of the study, for ``splitgrow export``.

    Its batches are those that neurons were scored on, its metric the accuracy on the test clips.

    Raises:
        InputError: what was kept beside the run is not there, or damaged.
    """
    metadata, tensors = _read(run_dir)
    size = int(metadata["batch"])
    batches = list(zip(tensors["inputs"].split(size), tensors["labels"].split(size), strict=True))
    fields = {name: tuple(values) for name, values in json.loads(metadata["keywords"]).items()}
    return Experiment(
        partial(build, GROWABLE, "seed", int(metadata["width"])),
        train=Trainer(batches, _loss),
        loss_fn=_loss,
        batches=batches,
        evaluate=partial(_judge, inputs=tensors["test_inputs"], labels=tensors["test_labels"]),
        metadata=Keywords(**fields).to_metadata(),
    )


def last_net(run_dir: Path) -> nn.Module:
    """The last net of a run of the study."""
    metadata, _ = _read(run_dir)
    seed = build(GROWABLE, "seed", int(metadata["width"]))
    return load(seed, RunFolder(run_dir).saved()[-1].model)


def test_clips(run_dir: Path) -> tuple[Tensor, Tensor]:
    """MFCCs and labels of the test part, as they were when the run was made."""
    _, tensors = _read(run_dir)
    return tensors["test_inputs"], tensors["test_labels"]


def _read(run_dir: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    file = run_dir.resolve().parent / FILE
    try:
        return read_sealed(file, FORMAT)
    except CheckpointError as error:
        raise InputError(
            f"{run_dir} is a run of splitgrow paper kws, whose clips are kept beside it: "
            f"{error} Leave the run where it was made, or copy {FILE} along."
        ) from error


def _loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _judge(model: Any, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    return {"test accuracy": accuracy(model, inputs, labels)}
