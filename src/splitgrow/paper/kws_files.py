"""The nets that splitting grew in the keyword study, as files for a device.

Each is the last net of its run, written as ``splitgrow export`` writes it. Every file answers every
test clip, beside PyTorch; its size, latency and accuracy are told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from torch import Tensor, nn

from splitgrow.capture import Call
from splitgrow.errors import InputError
from splitgrow.export import Exported, Quantized
from splitgrow.export.check import Runner, answers, difference, feeds_of
from splitgrow.export.executorch_file import ExecutorchRunner
from splitgrow.export.run import export_run
from splitgrow.export.runner import OnnxRunner
from splitgrow.files import write_file
from splitgrow.paper.job_match import key_of_fields
from splitgrow.paper.job_runs import Result
from splitgrow.paper.jobs import Point
from splitgrow.paper.kws import Job
from splitgrow.paper.kws_claims import KINDS
from splitgrow.paper.kws_kept import last_net, test_clips
from splitgrow.paper.results import rounded
from splitgrow.runs import RunFolder

Row = dict[str, Any]
Net = tuple[str, str, int]  # method, after, seed
FILES = "files.json"
ROUNDING = 1e-3  # of an accuracy: some clips on an edge may fall to the other side in a file
ANSWERED = 256  # clips at a time, of files that take more than one
NAMES = {"onnx": "ONNX, float", "int8": "ONNX, int8", "pte": "ExecuTorch, float"}


def export_jobs(jobs: Sequence[Result], folder: Path) -> list[Row]:
    """Write the last net of every run of splitting that is there, and say what the files are like.

    The files are beside the run's checkpoints. ``files.json`` in the folder has a row for each; it
    is written anew.

    Args:
        jobs: results of the study.
        folder: of the study, with its runs.
    """
    runs = runs_of_jobs(jobs, folder)
    grown = [
        (Job(**job["job"]), job["points"][-1]) for job in jobs if job["job"]["method"] in KINDS
    ]
    there = [(job, last) for job, last in grown if RunFolder(runs / job.name).saved()]
    if not there:
        raise InputError(
            f"{folder}: no run of splitting is there to export; jobs alone are only numbers. "
            "Run the study here, and then once more with --export."
        )
    rows = [row for job, last in there for row in _exported(job, runs / job.name, last)]
    told = {"settings": jobs[0]["settings"], "files": rounded(rows)}
    write_file(folder / FILES, (json.dumps(told, indent=1, allow_nan=False) + "\n").encode())
    return rows


def runs_of_jobs(jobs: Sequence[Result], folder: Path) -> Path:
    """Where the runs of these jobs are, if they were made in this folder: one for each job."""
    return folder / "runs" / key_of_fields(jobs[0]["settings"])


def read_files(folder: Path, jobs: Sequence[Result]) -> list[Row]:
    """What ``export_jobs`` wrote of the last nets of these jobs; nothing where it never did."""
    file = folder / FILES
    if not file.exists():
        return []
    found: dict[str, Any] = json.loads(file.read_text())
    if key_of_fields(found["settings"]) != key_of_fields(jobs[0]["settings"]):
        return []
    nets = {_net_of(job["job"]): job["points"][-1] for job in jobs if job["points"]}
    theirs: dict[Net, list[Row]] = {}
    for row in found["files"]:
        theirs.setdefault(_net_of(row), []).append(row)
    return [
        row for net, rows in theirs.items() if net in nets and _are_of(nets[net], rows)
        for row in rows
    ]  # fmt: skip


def _net_of(told: Mapping[str, Any]) -> Net:
    return told["method"], told["after"], told["seed"]


def _are_of(last: Point, rows: Sequence[Row]) -> bool:
    """The same settings and seed give another net on another machine: is it this one?"""
    exact = [row["accuracy"] for row in rows if row["file"] != "int8"]
    sizes = {(row["params"], row["macs"]) for row in rows}
    return sizes == {(last["params"], last["macs"])} and all(
        abs(accuracy - last["accuracy"]) <= ROUNDING for accuracy in exact
    )


def _exported(job: Job, run: Path, last: Point) -> Iterator[Row]:
    """A row for each format that can be written here."""
    net, (clips, labels) = last_net(run), test_clips(run)
    made = export_run(run, "onnx", int8=True)
    if made.cost.params != last["params"]:
        raise InputError(
            f"{run}: its last net has {made.cost.params:,} parameters, that of the finished job "
            f"{last['params']:,}. The run is another one, or only a part of it: delete it, and "
            "run the study again."
        )
    files: dict[str, tuple[Exported | Quantized, Runner, int]] = {
        "onnx": (made.file, OnnxRunner(made.file.path), ANSWERED)
    }
    if made.int8 is not None:
        files["int8"] = (made.int8, OnnxRunner(made.int8.path), ANSWERED)
    if find_spec("executorch") is not None:
        program = export_run(run, "executorch").file
        inputs = files["onnx"][1].inputs
        files["pte"] = (program, ExecutorchRunner(program.path.read_bytes(), inputs), 1)
    for name, (file, runner, size) in files.items():
        yield {
            "method": job.method, "after": job.after, "seed": job.seed, "file": name,
            "params": made.cost.params, "macs": made.cost.macs, "bytes": file.bytes,
            "seconds": file.seconds, **answered(runner, net, clips, labels, size),
        }  # fmt: skip


def answered(
    runner: Runner, net: nn.Module, clips: Tensor, labels: Tensor, size: int
) -> dict[str, float]:
    """A file's accuracy, and how far its outputs are from the net's at most, over all clips."""
    worst, right = 0.0, 0
    for inputs, wanted in zip(clips.split(size), labels.split(size), strict=True):
        call = Call.from_example((inputs,)).bound_to(net)
        found = runner.run(feeds_of(call, runner.inputs, "the file"))
        worst = max(worst, difference(answers(net, call), found))
        right += int(np.sum(found[0].argmax(1) == wanted.numpy()))
    return {"accuracy": right / len(labels), "difference": worst, "clips": len(labels)}


# --- a table ---------------------------------------------------------------------------------


def to_markdown(rows: Sequence[Row]) -> str:
    """Means over the rounds: a line for each method and format."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["method"], row["after"], row["file"]), []).append(row)
    head = "| grown by | file | test % | params K | size kB | latency ms | largest difference | n |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|"]
    lines += [
        _line(method if after == "finetune" else f"{method}, {after}", name, nets)
        for (method, after, name), nets in found.items()
    ]
    return "\n".join([*lines, "", _NOTE, ""])


_NOTE = (
    "The last net of each round as a file: means over the rounds. Latency: one clip, on one thread "
    "of the CPU that wrote this. Largest difference of an output from PyTorch's, on all test clips "
    "of all rounds."
)


def _line(method: str, name: str, nets: Sequence[Mapping[str, Any]]) -> str:
    def average(key: str, factor: float) -> float:
        return factor * mean(net[key] for net in nets)

    worst = max(net["difference"] for net in nets)
    cells = [
        method, NAMES[name], f"{average('accuracy', 100):.2f}", f"{average('params', 1e-3):.1f}",
        f"{average('bytes', 1e-3):.0f}", f"{average('seconds', 1e3):.2f}", f"{worst:.1e}",
        str(len(nets)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"
