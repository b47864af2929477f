"""A run that is killed or interrupted at any moment goes on to the same net and history."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitgrow as sg
from grow_worker import INTERRUPTED, Server, carried, data, grow, mse, server, start
from splitgrow.errors import CheckpointError, InputError, Interrupted

KINDS = ("carried", "renewed", "private", "trainer")
KILLS = 8


def timeless(history: sg.History) -> dict[str, Any]:
    """A history as JSON, without what depends on the clock, and on the folder's name."""
    told = json.loads(history.to_json())
    for record in told["phases"]:
        del record["seconds"]
    return told | {"name": ""}


def saved_history(run_dir: Path) -> sg.History:
    file = max(run_dir.glob("phase-????/history.json"))
    return sg.History.from_json(file.read_text(), str(file))


def last_files(run_dir: Path) -> dict[str, bytes]:
    """The model and the optimizer of the last phase, as bytes."""
    folder = max(run_dir.glob("phase-????"))
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def assert_same_run(one: Path, other: Path) -> None:
    assert timeless(saved_history(one)) == timeless(saved_history(other))
    assert last_files(one) == last_files(other)
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())


def state_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], sg.Result]:
    """By kind of training, the run that nothing came in the way of."""
    done: dict[str, sg.Result] = {}

    def find(kind: str) -> sg.Result:
        if kind not in done:
            done[kind] = grow(tmp_path_factory.mktemp("whole") / "run", kind)
        return done[kind]

    return find


def folder_of(result: sg.Result) -> Path:
    assert result.run_dir is not None
    return result.run_dir


def copy_up_to(source: Path, target: Path, number: int, *, grown: bool) -> None:
    """A run as it would be, had it been killed just after a checkpoint."""
    shutil.copytree(source, target)
    for folder in target.glob("phase-*"):
        _, phase, *more = folder.name.split("-")
        if (int(phase), bool(more)) > (number, grown):
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def workers() -> Iterator[Server]:
    with server() as started:
        yield started


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal: a test run in the background may have it switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- killed -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL and fork")
@pytest.mark.parametrize("kind", ["carried", "private"])
def test_killed_at_random_moments_a_run_ends_the_same(
    kind: str, workers: Server, tmp_path: Path
) -> None:
    moments = random.Random(kind)
    begin = time.perf_counter()
    assert workers.run(tmp_path / "whole", kind=kind) == 0
    whole = time.perf_counter() - begin
    kills = round_ = 0
    while kills < KILLS:
        run_dir = tmp_path / f"killed-{round_}"
        delays = [moments.uniform(0.0, 0.8 * whole) for _ in range(KILLS - kills)]
        kills += killed_again_and_again(workers, run_dir, kind, delays)
        assert_same_run(tmp_path / "whole", run_dir)
        round_ += 1


def killed_again_and_again(workers: Server, run_dir: Path, kind: str, delays: list[float]) -> int:
    """One run, killed after each of these delays unless it is done before; how often it was."""
    for kills, delay in enumerate(delays):
        if workers.run(run_dir, kind=kind, kill_after=delay) == 0:
            return kills
    assert workers.run(run_dir, kind=kind) == 0
    return len(delays)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL and fork")
@pytest.mark.parametrize("kind", ["carried", "private"])
def test_killed_at_a_change_on_disk_a_run_ends_the_same(
    kind: str, workers: Server, tmp_path: Path
) -> None:
    moments = random.Random(kind)
    assert workers.run(tmp_path / "whole", kind=kind) == 0
    for number in moments.sample(range(1, 26), 3):
        run_dir = tmp_path / f"killed-{number}"
        assert workers.run(run_dir, kind=kind, crash_at=number) == -signal.SIGKILL
        # What a resumed run does over again replaces what is there: kill it at that, too.
        again = moments.randint(1, 12)
        assert workers.run(run_dir, kind=kind, crash_at=again) in (0, -signal.SIGKILL)
        assert workers.run(run_dir, kind=kind) == 0
        assert_same_run(tmp_path / "whole", run_dir)


# --- resumed from every checkpoint --------------------------------------------------------


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_can_be_resumed_after_a_training_and_after_a_split(
    kind: str, grown: bool, whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    expected = whole(kind)
    copy_up_to(folder_of(expected), tmp_path / "cut", 0 if grown else 1, grown=grown)
    result = grow(tmp_path / "cut", kind, resume=True)
    assert_same_run(folder_of(expected), tmp_path / "cut")
    assert state_of(result.model) == state_of(expected.model)
    assert timeless(result.history) == timeless(expected.history)


def test_a_carried_optimizer_is_as_if_it_had_never_been_away(tmp_path: Path) -> None:
    """Adam's moments and step count are those of the uninterrupted run, and not zeros."""
    seen: list[dict[str, Any]] = []

    def watched(model: nn.Module, phase: sg.Phase) -> None:
        if phase.optimizer is None:
            phase.optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        state = phase.optimizer.state
        seen.append({f"{i}.{key}": value.tolist() for i, p in enumerate(model.parameters())
                     for key, value in state.get(p, {}).items()})  # fmt: skip
        carried(model, phase)

    whole = grow(tmp_path / "whole", train=watched)
    first = list(seen)
    assert not first[0]
    assert [s["0.step"] for s in first[1:]] == [6.0, 12.0]
    copy_up_to(folder_of(whole), tmp_path / "cut", 0, grown=True)
    seen.clear()
    grow(tmp_path / "cut", train=watched, resume=True)
    assert seen == first[1:]


# --- finished -----------------------------------------------------------------------------


def forbidden(model: nn.Module, phase: sg.Phase) -> None:
    raise AssertionError("this run is over, and trains again")


BUDGETS = {
    "phases": sg.Budget(phases=2),
    "params": sg.Budget(params=25, phases=None),
    "macs": sg.Budget(macs=15, phases=None),
    "metric": sg.Budget(metric=("-error", -1e9)),
}


@pytest.mark.parametrize(
    ("kind", "why"),
    [("carried", "params"), ("carried", "metric"), ("private", "macs"), ("private", "phases")],
)
def test_a_finished_run_returns_at_once(kind: str, why: str, tmp_path: Path) -> None:
    before = grow(tmp_path / "run", kind, until=BUDGETS[why])
    assert before.stopped == why
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = grow(tmp_path / "run", train=forbidden, until=BUDGETS[why], resume=True)
    assert again.stopped == why
    assert timeless(again.history) == timeless(before.history)
    assert state_of(again.model) == state_of(before.model)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "small"),
    [
        ("carried", sg.Budget(phases=2)),
        ("carried", sg.Budget(params=30)),
        ("carried", sg.Budget(macs=14)),
        ("private", sg.Budget(params=30)),
    ],
)
def test_a_finished_run_goes_on_with_a_larger_budget(
    kind: str, small: sg.Budget, whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    at_once = whole(kind)
    first = grow(tmp_path / "run", kind, until=small)
    assert len(first.history.phases) == 2
    further = grow(tmp_path / "run", kind, resume=True)
    assert timeless(further.history) == timeless(at_once.history)
    assert state_of(further.model) == state_of(at_once.model)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["until"]["phases"] == 3


@pytest.mark.parametrize("kind", ["carried", "private"])
def test_killed_just_after_the_budget_was_raised_a_run_goes_on(
    kind: str, whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    """The old end, with the new budget already asked for once."""
    grow(tmp_path / "run", kind, until=sg.Budget(params=30))

    class Killed(Exception):
        pass

    class Killer(sg.Watcher):
        def on_stage(self, phase: int, stage: str) -> None:
            raise Killed

    with pytest.raises(Killed):
        grow(tmp_path / "run", kind, resume=True, watch=[Killer()])
    further = grow(tmp_path / "run", kind, resume=True)
    assert timeless(further.history) == timeless(whole(kind).history)
    assert state_of(further.model) == state_of(whole(kind).model)


def test_a_smaller_number_of_phases_ends_a_run_where_it_is(
    whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    copy_up_to(folder_of(whole("carried")), tmp_path / "run", 2, grown=False)
    again = grow(tmp_path / "run", train=forbidden, until=sg.Budget(phases=1), resume=True)
    assert again.stopped == "phases"
    assert len(again.history.phases) == 3


# --- refused ------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    grow(tmp_path / "run", until=sg.Budget(phases=1))
    with pytest.raises(InputError, match=r"run holds a run already\. .*resume=True"):
        grow(tmp_path / "run", train=forbidden, until=sg.Budget(phases=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, r"seed: 3 there, 4 now"),
        ({"method": "new"}, r"method: splitting there, new now"),
        ({"policy": sg.Policy(count=2)}, r"policy\.count: 1 there, 2 now"),
        ({"policy": sg.Policy(fraction=0.5)}, r"policy\.fraction: None there, 0\.5 now"),
        ({"exclude": ["0"]}, r"exclude: \[\] there, \['0'\] now"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(
    changes: dict[str, Any], words: str, whole: Callable[[str], sg.Result]
) -> None:
    with pytest.raises(InputError, match=rf"other settings.*[(; ]{words}.*another folder"):
        grow(folder_of(whole("carried")), train=forbidden, resume=True, **changes)


def test_a_run_does_not_go_on_in_another_model(whole: Callable[[str], sg.Result]) -> None:
    other = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    before = state_of(other)
    with pytest.raises(CheckpointError, match="does not fit Sequential") as caught:
        sg.grow(
            other, train=forbidden, loss_fn=mse, batches=data(), policy=sg.Policy(count=1),
            run_dir=whole("carried").run_dir, resume=True, seed=3, until=sg.Budget(phases=3),
        )  # fmt: skip
    assert "Delete" not in str(caught.value)  # the checkpoint is not to blame
    assert state_of(other) == before


def test_there_is_nothing_to_resume_without_a_folder() -> None:
    with pytest.raises(InputError, match=r"resume: .*without run_dir="):
        grow(None, resume=True)


def test_resuming_where_nothing_was_saved_begins(tmp_path: Path) -> None:
    result = grow(tmp_path / "run", until=sg.Budget(phases=1), resume=True)
    assert len(result.history.phases) == 1


def test_a_renamed_folder_can_be_resumed(tmp_path: Path) -> None:
    grow(tmp_path / "run", until=sg.Budget(phases=1))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert len(grow(tmp_path / "moved", until=sg.Budget(phases=2), resume=True).history.phases) == 2


# --- damaged ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "history.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_checkpoint_says_what_to_delete(
    name: str, damage: str, whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    copy_up_to(folder_of(whole("carried")), tmp_path / "run", 2, grown=False)
    folder = tmp_path / "run" / "phase-0002"
    file = folder / name
    old = file.read_bytes()
    middle = len(old) // 2
    new = {"cut": old[:middle], "changed": old[:middle] + b"\xff" + old[middle + 1 :],
           "emptied": b""}[damage]  # fmt: skip
    file.write_bytes(new)
    with pytest.raises(CheckpointError) as caught:
        grow(tmp_path / "run", train=forbidden, resume=True)
    message = str(caught.value)
    assert str(file) in message
    assert f"Delete the folder {folder} to go on from the checkpoint before it." in message
    shutil.rmtree(folder)
    grow(tmp_path / "run", resume=True)
    assert_same_run(folder_of(whole("carried")), tmp_path / "run")


def test_a_checkpoint_without_its_model_says_so(
    whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    copy_up_to(folder_of(whole("carried")), tmp_path / "run", 2, grown=False)
    (tmp_path / "run" / "phase-0002" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read.*Delete the fol"):
        grow(tmp_path / "run", train=forbidden, resume=True)


def test_settings_that_cannot_be_read_say_so(
    whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    copy_up_to(folder_of(whole("carried")), tmp_path / "run", 2, grown=False)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        grow(tmp_path / "run", train=forbidden, resume=True)


# --- interrupted --------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_in_a_process_ends_after_the_batch_and_the_run_can_be_resumed(
    whole: Callable[[str], sg.Result], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with start(str(run_dir), "slow", GROW_WORKER_WAITS="1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        wait_for(run_dir / "phase-0000-grown")
        process.send_signal(signal.SIGINT)
        told = process.stdout.read()
    assert process.returncode == INTERRUPTED
    assert told.startswith(f"interrupted: stopped. {run_dir} holds the run up to its last whole")
    assert "resume=True" in told
    assert sorted(p.name for p in run_dir.glob("phase*")) == ["phase-0000", "phase-0000-grown"]
    grow(run_dir, "slow", resume=True)
    assert_same_run(folder_of(whole("carried")), run_dir)


@pytest.mark.slow
def test_ctrl_c_ends_a_training_that_never_looks(tmp_path: Path) -> None:
    with start(str(tmp_path / "run"), "deaf") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        wait_for(tmp_path / "run" / "run.json")
        time.sleep(1.0)  # it is training by now, or about to
        process.send_signal(signal.SIGINT)
        told = process.stdout.read()
    assert process.returncode == INTERRUPTED
    assert "resume=True" in told


def wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


class Interrupter(sg.Watcher):
    """Presses Ctrl-C when a stage of a phase begins, or at an iteration."""

    def __init__(self, moment: tuple[int, str | int], times: int = 1) -> None:
        self.moment, self.times = moment, times
        self.iterations: list[int] = []

    def _press(self, moment: tuple[int, str | int]) -> None:
        if moment == self.moment and self.times:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)

    def on_stage(self, phase: int, stage: str) -> None:
        self._press((phase, stage))

    def on_iteration(self, phase: sg.Phase, iteration: int, loss: float) -> None:
        self.iterations.append(iteration)
        self._press((phase.number, iteration))


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ((0, "train"), []),
        ((1, 8), ["phase-0000", "phase-0000-grown"]),
        ((1, "evaluate"), ["phase-0000", "phase-0000-grown", "phase-0001"]),
        ((0, "score"), ["phase-0000", "phase-0000-grown"]),
        ((0, "save"), ["phase-0000"]),
    ],
)
def test_ctrl_c_keeps_all_that_is_whole(
    moment: tuple[int, str | int],
    left: list[str],
    whole: Callable[[str], sg.Result],
    tmp_path: Path,
) -> None:
    watcher = Interrupter(moment)
    with pytest.raises(
        Interrupted, match=r"holds (the run up to its last whole|no whole phase yet).*resume"
    ) as caught:
        grow(tmp_path / "run", watch=[watcher])
    assert caught.value.run_dir == tmp_path / "run"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sorted(p.name for p in (tmp_path / "run").glob("phase*")) == left
    if isinstance(moment[1], int):
        assert watcher.iterations[-1] == moment[1]  # not one batch more
    grow(tmp_path / "run", resume=True)
    assert_same_run(folder_of(whole("carried")), tmp_path / "run")


@pytest.mark.usefixtures("ctrl_c")
def test_without_a_folder_ctrl_c_says_that_nothing_was_kept() -> None:
    with pytest.raises(Interrupted, match="nothing was kept") as caught:
        grow(None, watch=[Interrupter((0, 2))])
    assert caught.value.run_dir is None


@pytest.mark.usefixtures("ctrl_c")
def test_a_training_that_never_looks_ends_with_its_next_report(tmp_path: Path) -> None:
    def stubborn(model: nn.Module, phase: sg.Phase) -> None:
        for _ in range(1000):
            phase.log(0.0)

    watcher = Interrupter((0, 5))
    with pytest.raises(Interrupted, match="resume=True"):
        grow(tmp_path / "run", train=stubborn, watch=[watcher])
    assert watcher.iterations[-1] <= 7


@pytest.mark.usefixtures("ctrl_c")
def test_pressed_twice_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    def silent(model: nn.Module, phase: sg.Phase) -> None:
        signal.raise_signal(signal.SIGINT)
        assert phase.should_stop
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still here")

    with pytest.raises(Interrupted, match="resume=True"):
        grow(tmp_path / "run", train=silent)


@pytest.mark.usefixtures("ctrl_c")
def test_a_handler_of_ones_own_stays(tmp_path: Path) -> None:
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    result = grow(None, until=sg.Budget(phases=1), watch=[Interrupter((0, 2))])
    assert pressed == [1]
    assert result.stopped == "phases"


def test_outside_the_main_thread_nothing_is_done_about_signals() -> None:
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(grow(None, until=sg.Budget(phases=1)).stopped)
    )
    thread.start()
    thread.join()
    assert found == ["phases"]


def test_should_stop_is_false_while_nobody_asks() -> None:
    asked: list[bool] = []

    def look(model: nn.Module, phase: sg.Phase) -> None:
        asked.append(phase.should_stop)
        carried(model, phase)

    grow(None, train=look, until=sg.Budget(phases=2))
    assert asked == [False, False]
