"""A run's folder: what is in it, whole checkpoints alone, settings that belong to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitgrow as sg
from grow_worker import grow, net
from splitgrow import runs
from splitgrow.errors import CheckpointError, InputError
from splitgrow.history import History, PhaseRecord
from splitgrow.runs import RunFolder, Saved

SETTINGS: dict[str, Any] = {
    "name": "run", "method": "splitting", "seed": 0, "policy": {"count": 1, "step": None},
    "until": {"params": None, "phases": 2}, "exclude": [],
}  # fmt: skip


def history(phases: int, stopped: str | None = None) -> History:
    told = History("run", "splitting", 0, stopped)
    told.phases = [PhaseRecord(i, 1, 1, {}, 0.5, {}, {}, ()) for i in range(phases)]
    return told


def begun(path: Path, *, resume: bool = False, **changes: Any) -> tuple[RunFolder, list[Saved]]:
    folder = RunFolder(path)
    return folder, folder.begin(SETTINGS | changes, resume=resume)


def files_in(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# --- what is written ----------------------------------------------------------------------


def test_a_run_leaves_a_checkpoint_after_every_training_and_every_split(tmp_path: Path) -> None:
    result = grow(tmp_path / "run", until=sg.Budget(phases=2))
    parts = ("history.json", "model.safetensors", "optimizer.safetensors")
    folders = ("phase-0000", "phase-0000-grown", "phase-0001")
    scored = {f"{folder}/directions.safetensors" for folder in folders[1:]}
    assert files_in(tmp_path / "run") == {"run.json"} | scored | {
        f"{folder}/{part}" for folder in folders for part in parts
    }
    loaded = sg.load(net(), tmp_path / "run" / "phase-0001" / "model.safetensors")
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    kept = Saved(1, False, tmp_path / "run" / "phase-0001").history()
    assert kept.to_json() == result.history.to_json()


def test_each_checkpoint_holds_the_net_of_its_moment(tmp_path: Path) -> None:
    grow(tmp_path / "run", until=sg.Budget(phases=2))
    widths = {}
    for folder in sorted((tmp_path / "run").glob("phase*")):
        model = sg.load(net(), folder / "model.safetensors")
        widths[folder.name] = model[0].out_features
    assert widths == {"phase-0000": 3, "phase-0000-grown": 4, "phase-0001": 4}
    records = [saved.history().phases[-1] for saved in RunFolder(tmp_path / "run").saved()]
    assert [record.split is not None for record in records] == [False, True, False]


def test_without_an_optimizer_handed_over_there_is_no_file_of_one(tmp_path: Path) -> None:
    grow(tmp_path / "run", "private", until=sg.Budget(phases=1))
    assert files_in(tmp_path / "run") == {
        "run.json", "phase-0000/history.json", "phase-0000/model.safetensors",
    }  # fmt: skip
    assert Saved(0, False, tmp_path / "run" / "phase-0000").optimizer is None


def test_settings_and_versions_are_kept(tmp_path: Path) -> None:
    policy = sg.Policy(count=1, threshold=-1e-9)
    grow(tmp_path / "run", until=sg.Budget(phases=1, metric=("-error", 3)), policy=policy)
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["versions"]["splitgrow"] == sg.__version__
    assert told["versions"]["torch"] == torch.__version__
    assert (told["name"], told["method"], told["seed"]) == ("run", "splitting", 3)
    assert told["policy"]["threshold"] == -1e-9
    assert told["until"] == {"params": None, "macs": None, "phases": 1, "metric": ["-error", 3.0]}


def test_the_run_has_the_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert grow(Path(), until=sg.Budget(phases=1)).history.name == "mine"


# --- opening ------------------------------------------------------------------------------


def test_folders_are_made_as_needed(tmp_path: Path) -> None:
    assert begun(tmp_path / "a" / "b")[1] == []
    assert (tmp_path / "a" / "b" / "run.json").exists()


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match=r"run_dir: .*run cannot be made"):
        begun(tmp_path / "run")


def test_checkpoints_are_listed_from_the_oldest_on(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    for number, grown in ((1, False), (0, True), (0, False), (1, True)):
        folder.save(net(), None, history(number + 1), grown=grown)
    for number in (9_999, 10_000):
        told = history(1)
        told.phases = [PhaseRecord(number, 1, 1, {}, 0.5, {}, {}, ())]
        folder.save(net(), None, told, grown=False)
    expected = [(0, False), (0, True), (1, False), (1, True), (9_999, False), (10_000, False)]
    assert [(saved.phase, saved.grown) for saved in folder.saved()] == expected


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "phase-0001-final").mkdir()
    (tmp_path / "phase-0002").mkdir()  # without a history it is no checkpoint
    assert folder.saved() == []
    assert begun(tmp_path)[1] == []
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "phase-0001-final").is_dir()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".splitgrow-tmp-999999999-00000000-00000000"
    stale.mkdir()
    (stale / "model.safetensors").write_text("")
    begun(tmp_path)
    assert not stale.exists()


def test_a_run_is_only_gone_on_with_when_that_is_asked_for(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    begun(tmp_path)  # nothing was saved yet: nothing to lose
    folder.save(net(), None, history(1), grown=False)
    with pytest.raises(InputError, match=r"holds a run already\. Go on with it \(resume=True, or"):
        begun(tmp_path)
    assert len(begun(tmp_path, resume=True)[1]) == 1


def test_all_settings_that_differ_are_named(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    folder.save(net(), None, history(1), grown=False)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(InputError) as caught:
        begun(tmp_path, resume=True, seed=5, policy={"count": 1, "step": 0.5}, exclude=["a"])
    message = str(caught.value)
    assert "['a'] now; policy.step: None there, 0.5 now; seed: 0 there, 5 now)" in message
    assert "Use the same ones, or another folder." in message
    assert "policy.count" not in message
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_policy_from_before_a_field_was_there_had_its_default(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    folder.save(net(), None, history(1), grown=False)
    policy = {"count": 1, "columns": "halved", "stand_in": {"beta": 3.0}}
    assert len(begun(tmp_path, resume=True, policy=policy)[1]) == 1
    with pytest.raises(InputError, match=r"policy\.columns: halved there, parted now"):
        begun(tmp_path, resume=True, policy={"count": 1, "columns": "parted"})


def test_settings_that_are_not_a_table_are_an_error(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    folder.save(net(), None, history(1), grown=False)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"run\.json does not hold a run's settings"):
        begun(tmp_path, resume=True)


def test_a_new_end_is_written_with_the_first_checkpoint_made_for_it(tmp_path: Path) -> None:
    """Until then the old one is what the checkpoints tell of."""
    until = {"params": 99, "phases": 2}
    begun(tmp_path)[0].save(net(), None, history(1, "params"), grown=False)
    again, _ = begun(tmp_path, resume=True)
    assert again.same_until
    further, _ = begun(tmp_path, resume=True, until=until)
    assert not further.same_until
    assert json.loads((tmp_path / "run.json").read_text())["until"] == SETTINGS["until"]
    further.save(net(), None, history(1), grown=True)
    assert json.loads((tmp_path / "run.json").read_text())["until"] == until


# --- replacing a checkpoint ---------------------------------------------------------------


def test_a_checkpoint_of_the_same_phase_is_replaced(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    folder.save(net(), torch.optim.Adam(net().parameters()), history(1), grown=False)
    folder.save(net(), None, history(1, "stable"), grown=False)
    (saved,) = folder.saved()
    assert saved.history().stopped == "stable"
    assert saved.optimizer is None
    assert files_in(tmp_path) == {
        "run.json", "phase-0000/history.json", "phase-0000/model.safetensors",
    }  # fmt: skip


def test_where_a_checkpoint_cannot_be_written_the_old_one_stays(tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    folder.save(net(), None, history(1), grown=False)
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}

    class Sparse(nn.Module):
        """Cannot be saved."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2).to_sparse())

    with pytest.raises(CheckpointError):
        folder.save(Sparse(), None, history(1, "stable"), grown=False)
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before


def test_an_old_checkpoint_is_never_seen_half_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renamed before the first of its files goes."""
    folder, _ = begun(tmp_path)
    folder.save(net(), None, history(1), grown=False)
    seen: list[set[str]] = []
    remove = runs.shutil.rmtree

    def spy(path: Any, **options: Any) -> None:
        whole = {f"{saved.path.name}/{f.name}" for saved in folder.saved()
                 for f in saved.path.iterdir()}  # fmt: skip
        seen.append(whole)
        remove(path, **options)

    monkeypatch.setattr(runs.shutil, "rmtree", spy)
    folder.save(net(), None, history(1, "stable"), grown=False)
    assert seen == [{"phase-0000/history.json", "phase-0000/model.safetensors"}]
    assert [saved.history().stopped for saved in folder.saved()] == ["stable"]


# --- damage -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "history.json"])
def test_damage_names_the_file_and_the_folder_to_delete(name: str, tmp_path: Path) -> None:
    folder, _ = begun(tmp_path)
    model = net()
    folder.save(model, torch.optim.Adam(model.parameters()), history(1), grown=True)
    (saved,) = folder.saved()
    saved.check()
    (saved.path / name).write_bytes(b"\xff\xfe garbage")
    read = saved.history if name == "history.json" else saved.check
    with pytest.raises(CheckpointError) as caught:
        read()
    assert str(caught.value).startswith(f"{saved.path / name} ")
    assert str(caught.value).endswith(
        f"Delete the folder {saved.path} to go on from the checkpoint before it."
    )


def test_a_run_is_told_its_origin_only_where_it_has_none(tmp_path: Path) -> None:
    folder = runs.RunFolder(tmp_path)
    folder.name_origin("package.module:name")
    assert not list(tmp_path.iterdir())  # no run, nothing to tell
    (tmp_path / runs.SETTINGS).write_text('{"seed": 3}')
    for place in ("package.module:name", "other:name"):
        folder.name_origin(place)
        assert folder.settings() == {"seed": 3, "origin": "package.module:name"}
