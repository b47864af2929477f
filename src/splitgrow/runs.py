"""The folder of a growing run: settings, and a checkpoint after every training and every split.

    RUN_DIR/
      run.json              settings and versions
      phase-0000/           the net as phase 0 trained it
        model.safetensors
        optimizer.safetensors   where train() has handed one over
        directions.safetensors  of the last scoring, where the next one starts; if there was one
        history.json            everything up to here
      phase-0000-grown/     the same after its split: where phase 1 begins
      phase-0001/ ...

Each of these folders is made under a temporary name and renamed, so it is there whole or not at
all.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from splitgrow.checkpoint import read_metadata, save
from splitgrow.directions import Directions
from splitgrow.errors import CheckpointError, InputError
from splitgrow.files import (
    _temporary_beside,
    atomic_directory,
    clean,
    read_sealed,
    write_file,
    write_sealed,
)
from splitgrow.history import History
from splitgrow.optimizer_file import OPTIMIZER_FORMAT, save_optimizer
from splitgrow.policy import Policy

_PHASE = re.compile(r"phase-(\d{4,})(-grown)?")
MODEL, OPTIMIZER, DIRECTIONS, HISTORY, SETTINGS = (
    "model.safetensors", "optimizer.safetensors", "directions.safetensors", "history.json",
    "run.json",
)  # fmt: skip
DIRECTIONS_FORMAT = "splitgrow-directions-1"


@dataclass(frozen=True, order=True)
class Saved:
    """One checkpoint of a run."""

    phase: int
    grown: bool
    path: Path

    @property
    def model(self) -> Path:
        """The file of the model."""
        return self.path / MODEL

    @property
    def optimizer(self) -> Path | None:
        """The file of the optimizer's state, if one was carried."""
        file = self.path / OPTIMIZER
        return file if file.exists() else None

    def directions(self) -> Directions | None:
        """Of the model's neurons, if they were scored."""
        file = self.path / DIRECTIONS
        if not file.exists():
            return None
        with self._undamaged():
            return Directions(read_sealed(file, DIRECTIONS_FORMAT)[1])

    def history(self) -> History:
        """The run up to here."""
        file = self.path / HISTORY
        with self._undamaged():
            try:
                return History.from_json(file.read_text(), str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}.") from error

    def check(self) -> None:
        """Raise unless its files are as they were written."""
        with self._undamaged():
            read_metadata(self.model)
            if self.optimizer is not None:
                read_sealed(self.optimizer, OPTIMIZER_FORMAT)

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        """To what is wrong with a file, add what to do about it."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Delete the folder {self.path} to go on from the checkpoint before it."
            ) from error


class RunFolder:
    """Reads and writes a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.same_until = False  # as the run that was found here
        self._unwritten: bytes | None = None

    def begin(self, settings: Mapping[str, Any], *, resume: bool) -> list[Saved]:
        """Open the folder for a run with these settings; its checkpoints, if that goes on.

        ``until`` may differ from what it was: a run that has ended can be taken further. Settings
        that are new are written with the first checkpoint made under them, so that an end that a
        checkpoint tells of is always the end under the settings beside it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"run_dir: {self.path} cannot be made: {error}") from error
        clean(self.path)
        saved = self.saved()
        if saved and not resume:
            raise InputError(
                f"run_dir: {self.path} holds a run already. Go on with it (resume=True, or "
                "--resume), or name another folder."
            )
        own = {"splitgrow": _version(), "torch": torch.__version__,
               "python": platform.python_version()}  # fmt: skip
        old = self.settings() if saved else {}
        kept = {name: old[name] for name in _KEPT if name in old}
        text = json.dumps({**kept, **settings, "versions": own}, indent=1, sort_keys=True)
        self._unwritten = text.encode()
        if saved:
            new = json.loads(text)
            _check_same(self.path, old, new)
            self.same_until = old.get("until") == new["until"]
        else:
            self._write_settings()
        return saved

    def _write_settings(self) -> None:
        if self._unwritten is not None:
            write_file(self.path / SETTINGS, self._unwritten)
            self._unwritten = None

    def settings(self) -> dict[str, Any]:
        """What the run was started with."""
        file = self.path / SETTINGS
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{file} does not hold a run's settings.")
        return found

    def name_origin(self, place: str) -> None:
        """Say where the run's experiment is, ``package.module:name``, if it was started without."""
        file = self.path / SETTINGS
        if file.exists() and "origin" not in (found := self.settings()):
            text = json.dumps({**found, "origin": place}, indent=1, sort_keys=True)
            write_file(file, text.encode())

    def saved(self) -> list[Saved]:
        """The checkpoints, the oldest first."""
        found = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _PHASE.fullmatch(path.name)
            if match is not None and (path / HISTORY).exists():
                found.append(Saved(int(match[1]), match[2] is not None, path))
        return sorted(found)

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        history: History,
        directions: Directions | None = None,
        *,
        grown: bool,
    ) -> None:
        """Write the checkpoint of the history's last phase; one that is there is replaced."""
        number = history.phases[-1].phase
        target = self.path / (f"phase-{number:04}" + ("-grown" if grown else ""))
        with _out_of_the_way(target), atomic_directory(target) as folder:
            save(model, folder / MODEL)
            if optimizer is not None:
                save_optimizer(optimizer, folder / OPTIMIZER)
            if directions is not None:
                write_sealed(folder / DIRECTIONS, directions.tensors, {"format": DIRECTIONS_FORMAT})
            (folder / HISTORY).write_text(history.to_json())
        self._write_settings()


@contextmanager
def _out_of_the_way(target: Path) -> Iterator[None]:
    """Inside, nothing is at the target; what was there is removed, or comes back on an error.

    It is renamed first: a process killed while it removes files leaves no half of a checkpoint.
    """
    if not target.exists():
        yield
        return
    away = _temporary_beside(target)
    target.rename(away)
    try:
        yield
    except BaseException:
        away.rename(target)
        raise
    shutil.rmtree(away, ignore_errors=True)


# May differ when a run is resumed; a folder may be renamed.
_FREE = ("name", "origin", "until", "versions")
_KEPT = ("origin",)  # stays where a resumed run does not say it


def _check_same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    # A policy from before a field was there had what is now the default.
    there, now = {**_flat({"policy": asdict(Policy())}), **_flat(old)}, _flat(new)
    differing = [
        f"{key}: {there.get(key)} there, {value} now"
        for key, value in now.items()
        if key.partition(".")[0] not in _FREE and there.get(key) != value
    ]
    if differing:
        raise InputError(
            f"run_dir: {path} holds a run with other settings, so it cannot be resumed with "
            f"these ({'; '.join(differing)}). Use the same ones, or another folder."
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings within settings by their full names: ``policy.count``."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = value if isinstance(value, dict) else {"": value}
        found |= {f"{key}.{name}".rstrip("."): each for name, each in inner.items()}
    return found


def _version() -> str:
    import splitgrow

    return splitgrow.__version__
