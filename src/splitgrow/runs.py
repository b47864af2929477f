"""The folder of a growing run: settings, and a checkpoint after every training and every split.

    RUN_DIR/
      run.json              settings and versions
      phase-0000/           the net as phase 0 trained it
        model.safetensors
        optimizer.safetensors   where train() has handed one over
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from splitgrow.checkpoint import save, save_optimizer
from splitgrow.errors import CheckpointError, InputError
from splitgrow.files import atomic_directory, clean, write_file
from splitgrow.history import History

_PHASE = re.compile(r"phase-(\d{4,})(-grown)?")
MODEL, OPTIMIZER, HISTORY, SETTINGS = (
    "model.safetensors", "optimizer.safetensors", "history.json", "run.json"
)  # fmt: skip


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

    def history(self) -> History:
        """The run up to here."""
        file = self.path / HISTORY
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        return History.from_json(text, str(file))


class RunFolder:
    """Reads and writes a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: Mapping[str, Any], *, resume: bool) -> list[Saved]:
        """Open the folder for a run with these settings; its checkpoints, if that goes on.

        ``until`` may differ from what it was: a run that has ended can be taken further.
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
        if saved:
            _check_same(self.path, self.settings(), settings)
        own = {"splitgrow": _version(), "torch": torch.__version__,
               "python": platform.python_version()}  # fmt: skip
        text = json.dumps({**settings, "versions": own}, indent=1, sort_keys=True)
        write_file(self.path / SETTINGS, text.encode())
        return saved

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

    def saved(self) -> list[Saved]:
        """The checkpoints, the oldest first."""
        found = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _PHASE.fullmatch(path.name)
            if match is not None and (path / HISTORY).exists():
                found.append(Saved(int(match[1]), match[2] is not None, path))
        return sorted(found)

    def save(
        self, model: nn.Module, optimizer: Optimizer | None, history: History, *, grown: bool
    ) -> None:
        """Write the checkpoint of the history's last phase; one that is there is replaced."""
        number = history.phases[-1].phase
        target = self.path / (f"phase-{number:04}" + ("-grown" if grown else ""))
        if target.exists():  # of a phase that is done once more, with the same result
            shutil.rmtree(target)
        with atomic_directory(target) as folder:
            save(model, folder / MODEL)
            if optimizer is not None:
                save_optimizer(optimizer, folder / OPTIMIZER)
            (folder / HISTORY).write_text(history.to_json())


def _check_same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    plain = json.loads(json.dumps(new))
    differing = [
        f"{key}: {old.get(key)} there, {plain[key]} now"
        for key in plain
        if key != "until" and old.get(key) != plain[key]
    ]
    if differing:
        raise InputError(
            f"run_dir: {path} holds a run with other settings, so it cannot be resumed with "
            f"these ({'; '.join(differing)}). Use the same ones, or another folder."
        )


def _version() -> str:
    import splitgrow

    return splitgrow.__version__
