"""Two processes with a part of the data each do what one with all of it does."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distributed_worker as worker
import splitgrow as sg

TIMEOUT = 60  # seconds for one job, after which it hangs
WORKER = Path(worker.__file__)


class Process:
    """A worker; its answers are read in a thread, so that a test can give up waiting."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        command = [sys.executable, str(WORKER), str(rank), str(size), str(store)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, job: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([job, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> list[Any]:
        line = self._lines.get(timeout=TIMEOUT)
        assert line, "the process died"
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


class Pair:
    """Two processes that do jobs together; started anew after one that hung."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._processes: list[Process] = []

    def do(self, job: str, **arguments: Any) -> list[list[Any]]:
        """Each rank's answer."""
        if not self._processes:
            self._count += 1
            store = self._folder / f"store-{self._count}"
            self._processes = [Process(rank, 2, store) for rank in range(2)]
        try:
            for process in self._processes:
                process.ask(job, arguments)
            return [process.answer() for process in self._processes]
        except (queue.Empty, AssertionError, OSError) as error:
            self.end()
            pytest.fail(f"{job} hangs or died on two processes: {error!r}")

    def both(self, job: str, **arguments: Any) -> Any:
        """The result, which both ranks must have, bit for bit."""
        first, second = self.do(job, **arguments)
        assert first[0] == second[0] == "ok", (first[:3], second[:3])
        assert first == second
        return first[1]

    def errors(self, job: str, **arguments: Any) -> list[tuple[str, str]]:
        """Class and text of each rank's error."""
        found = self.do(job, **arguments)
        assert [answer[0] for answer in found] == ["error", "error"], found
        return [(answer[1], answer[2]) for answer in found]

    def end(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("store"))
    yield found
    found.end()


def assert_close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Nested lists and dicts with equal numbers, to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key], tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)
    else:
        assert found == expected


WAYS = [
    pytest.param({"kind": "mlp"}, {"dense"}, id="dense"),
    pytest.param({"kind": "conv"}, {"dense"}, id="dense-conv-batch-norm"),
    pytest.param({"kind": "affine"}, {"zero"}, id="zero"),
    pytest.param({"kind": "mlp", "steps": 3}, {"lanczos"}, id="lanczos"),
    pytest.param({"kind": "wide", "work": 0.0}, {"dense", "span"}, id="span"),
]


@pytest.mark.parametrize(("settings", "methods"), WAYS)
def test_scores_are_those_of_one_process(
    pair: Pair, settings: dict[str, Any], methods: set[str]
) -> None:
    """Of shards with one batch and with two, all of different sizes."""
    sizes, parts = [7, 3, 5], [1, 2]
    expected = worker.scores_of(batches=worker.data(sizes), **settings)
    assert {unit[0] for unit in expected["units"].values()} == methods
    assert_close(pair.both("score", sizes=sizes, parts=parts, **settings), expected)


def test_each_rank_takes_its_part_of_shared_batches(pair: Pair) -> None:
    expected = worker.scores_of("mlp", worker.data([4, 5, 6]))
    assert_close(pair.both("score", kind="mlp", sizes=[4, 5, 6], parts=None), expected)


def test_ranks_with_less_memory_make_all_take_more_passes(pair: Pair) -> None:
    expected = worker.scores_of("mlp", worker.data([6, 6]))
    found = pair.both("score", kind="mlp", sizes=[6, 6], parts=[1, 1], memory=[2**30, 1])
    assert_close(found, expected)


def test_one_rank_without_room_makes_all_of_them_stream(pair: Pair) -> None:
    settings: dict[str, Any] = {"kind": "mlp", "steps": 3, "most": 4}
    expected = worker.scores_of(batches=worker.data([7, 3, 5]), memory=1, **settings)
    assert {unit[0] for unit in expected["units"].values()} == {"stream"}
    sizes, parts, memory = [7, 3, 5], [1, 2], [2**30, 1]
    found = pair.both("score", sizes=sizes, parts=parts, memory=memory, **settings)
    assert_close(found, expected)


def test_ranks_that_would_start_apart_are_told(pair: Pair) -> None:
    for _, text in pair.errors("start_of_its_own"):
        assert "start" in text
        assert "Call it with the same units and settings" in text


def test_ranks_of_different_lengths_settle_together(pair: Pair) -> None:
    found = pair.both("settled", sizes=[4] * 21, parts=[1, 20])
    assert 0 < found["samples"] <= 84


@pytest.mark.parametrize("columns", ["halved", "parted"])
def test_split_of_a_wrapped_model(pair: Pair, columns: str) -> None:
    """DDP averages gradients over ranks, so one process with both batches in one does the same."""
    first, second = worker.data([8, 8])
    whole = (torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))
    model = worker.build("mlp")
    expected, _ = worker.grow_once(model, model, [whole], columns)
    found = pair.both("split", kind="mlp", sizes=[8, 8], parts=[1, 1], columns=columns)
    assert expected["params"][1] > expected["params"][0]
    assert_close(found, json.loads(json.dumps(expected)), 1e-7)


def test_a_wrapper_is_of_no_use_after_the_split(pair: Pair) -> None:
    stale, unused, bucket, _ = pair.both("wrapper_after_split")  # the same gradients on both
    assert "splitgrow.rewrap(model)" in stale
    assert unused is True
    assert bucket == 3 * 2**20


def test_buffers_are_those_of_the_first_rank(pair: Pair) -> None:
    found, grown = pair.both("buffers")
    expected = worker.scores_of("conv", worker.data([8, 8]))
    assert_close(found, expected)
    assert (
        grown["2.running_mean"][:4] == worker.build("conv").state_dict()["2.running_mean"].tolist()
    )


# ---- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ("no batches", "InputError", "rank 1: batches: there are none"),
        ("nan", "LossError", "rank 1: the loss of batches[0] is nan"),
        ("generator", "InputError", "rank 1: batches: a generator can be read only once"),
        ("weights", "RankError", "model: rank 1 is not the same as rank 0 (2.weight)"),
        ("units", "RankError", "score: rank 1 is not the same as rank 0 (2)"),
        ("order", "RankError", "the ranks are not at the same place: rank 0 at"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_both(
    pair: Pair, where: str, kind: str, words: str
) -> None:
    found = pair.errors("fails", where=where)
    assert [error for error, _ in found] == [kind, kind]
    assert all(words in text for _, text in found), found


def test_an_error_of_the_users_own(pair: Pair) -> None:
    (first, text), (second, own) = pair.errors("fails", where="own error")
    assert (first, second) == ("RankError", "ZeroDivisionError")
    assert "rank 1: ZeroDivisionError in" in text
    assert own == "in the user's code"


@pytest.mark.parametrize(
    ("where", "kinds", "words"),
    [
        ("plan", ["RankError", "RankError"], "plan: rank 1 is not the same as rank 0 (neurons)"),
        ("optimizer", ["OptimizerError", "OptimizerError"], "rank 1: the optimizer does not own"),
        ("late", ["RankError", "ZeroDivisionError"], "late"),
        ("end", ["RankError", "TypeError"], "'NoneType' object is not callable"),
    ],
)
def test_a_split_that_fails_on_one_rank_changes_none(
    pair: Pair, where: str, kinds: list[str], words: str
) -> None:
    found = pair.errors("split_fails", where=where)
    assert [kind for kind, _ in found] == kinds, found
    assert all(words in text for _, text in found), found


def test_a_step_too_large_for_one_rank_is_so_for_all(pair: Pair) -> None:
    step, searched, _ = pair.both("large_steps")
    assert any(change == float("inf") for _, change in searched)
    assert step < max(tried for tried, _ in searched)


def test_ranks_go_on_after_a_failure(pair: Pair) -> None:
    assert pair.both("recovers") == 2


# ---- whole runs --------------------------------------------------------------------------------


def test_grow_is_that_of_one_process_and_goes_on(pair: Pair, tmp_path: Path) -> None:
    first, second = worker.data([8, 8])
    whole = [(torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))]
    expected = worker.grown(whole, phases=3)
    assert expected["params"][-1] > expected["params"][0]
    folder = str(tmp_path / "run")
    pair.both("grow", phases=2, run_dir=folder)
    assert (tmp_path / "run" / "phase-0001" / "directions.safetensors").exists()
    assert_close(pair.both("grow", phases=3, run_dir=folder, resume=True), expected, 1e-6)


def test_grow_fails_on_both_ranks(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = pair.errors("grow", phases=2, run_dir=str(tmp_path / "file"))
    assert [kind for kind, _ in found] == ["InputError", "InputError"]
    assert all("cannot be made" in text for _, text in found)
    found = pair.errors("grow", phases=2, method="boosting")
    assert all("boosting fits its neurons in one process" in text for _, text in found)


def test_a_model_that_is_fully_sharded(pair: Pair) -> None:
    expected = worker.unsharded()
    found = pair.both("sharded")
    assert found["count"] > 2
    assert found["types"] == ["DTensor"]
    assert "splitgrow.gather(model, build, optimizer)" in found["refusal"]
    for part in ("state", "optimizer", "rate"):
        assert_close(found[part], json.loads(json.dumps(expected[part])), 1e-6)


# ---- one process -------------------------------------------------------------------------------


def test_a_shard_alone_is_the_batches_themselves() -> None:
    batches = worker.data([5, 6])
    assert worker.scores_of("mlp", sg.Shard(batches)) == worker.scores_of("mlp", batches)
    assert list(sg.Shard.of(batches)) == batches


def test_a_shard_needs_processes_that_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sg.InputError, match="init_process_group"):
        worker.scores_of("mlp", sg.Shard(worker.data([5])))


def test_what_is_inside_of_a_shard_is_checked() -> None:
    with pytest.raises(sg.InputError, match="can be read only once"):
        worker.scores_of("mlp", sg.Shard(iter(worker.data([5]))))


def test_plain_models_need_no_wrapper() -> None:
    with pytest.raises(sg.InputError, match="expected a DistributedDataParallel, got Linear"):
        sg.rewrap(nn.Linear(2, 2))
    with pytest.raises(sg.InputError, match="not sharded"):
        sg.gather(nn.Linear(2, 2), lambda: nn.Linear(2, 2))
    with pytest.raises(sg.InputError, match="Call fully_shard"):
        sg.scatter(nn.Linear(2, 2), lambda model: None)
