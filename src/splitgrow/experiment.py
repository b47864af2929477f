"""Experiment: everything that a run needs, in one object that the command line can load."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from splitgrow.capture import ExampleInputs
from splitgrow.errors import InputError, SplitgrowError
from splitgrow.grow import Evaluate, Result, Train, grow
from splitgrow.methods import Method
from splitgrow.policy import Budget, Policy
from splitgrow.state import seeded
from splitgrow.tap import LossFn
from splitgrow.watch import Watcher


@dataclass(frozen=True, eq=False)
class Experiment:
    """A growing run to be: ``splitgrow grow file.py:experiment`` performs it.

    ``model`` is the seed model or, better, a function that builds one: it is called with the
    run's seed set. ``metadata`` are texts that go into an ONNX file of the grown model, such as the
    names of its classes. The rest is as for :func:`splitgrow.grow`.
    """

    model: nn.Module | Callable[[], nn.Module]
    _: KW_ONLY
    train: Train
    loss_fn: LossFn
    batches: Iterable[Any]
    example_inputs: ExampleInputs | None = None
    evaluate: Evaluate | None = None
    policy: Policy = Policy()  # noqa: RUF009  (frozen)
    until: Budget = Budget()  # noqa: RUF009  (frozen)
    method: str | Method = "splitting"
    finish: Train | None = None
    exclude: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise InputError(
                "model: expected a torch.nn.Module or a function that builds one, got "
                f"{type(self.model).__name__}."
            )

    def __repr__(self) -> str:
        return f"Experiment({getattr(self.model, '__name__', type(self.model).__name__)})"

    def run(
        self,
        run_dir: str | Path | None = None,
        *,
        resume: bool = False,
        seed: int = 0,
        watch: Sequence[Watcher] = (),
        origin: str | None = None,
    ) -> Result:
        """Build the model and grow it; ``origin`` is where this experiment is, file.py:name."""
        return grow(
            build(self.model, seed), train=self.train, loss_fn=self.loss_fn, batches=self.batches,
            example_inputs=self.example_inputs, evaluate=self.evaluate, policy=self.policy,
            until=self.until, method=self.method, finish=self.finish, exclude=self.exclude,
            run_dir=run_dir, resume=resume, seed=seed, watch=watch, origin=origin,
        )  # fmt: skip


def build(model: Any, seed: int = 0, place: str = "model") -> nn.Module:
    """A model, or what a function of no arguments builds with this seed.

    Errors name the ``place`` where it was found.
    """
    if not isinstance(model, nn.Module) and callable(model):
        with seeded(seed):
            model = _call(place, model)
    if not isinstance(model, nn.Module):
        raise InputError(f"{place}: expected a torch.nn.Module, got {type(model).__name__}.")
    return model


def load_object(place: str) -> Any:
    """What ``file.py:name`` or ``package.module:name`` stands for."""
    file, colon, name = place.rpartition(":")
    if not colon or not file or not name:
        raise InputError(f"{place!r}: expected file.py:name, such as experiment.py:experiment.")
    module = _import_file(Path(file)) if file.endswith(".py") else _import_module(file)
    try:
        return getattr(module, name)
    except AttributeError:
        there = [n for n, v in vars(module).items() if not n.startswith("_")
                 and not isinstance(v, ModuleType)]  # fmt: skip
        raise InputError(
            f"{file} has no {name!r}; it defines {', '.join(there) or 'nothing'}."
        ) from None


def relative_place(place: str) -> str:
    """``file.py:name`` as seen from here: a run's folder should not tell of the machine."""
    file, _, name = place.rpartition(":")
    if not file.endswith(".py"):
        return place
    try:
        return f"{Path(os.path.relpath(file)).as_posix()}:{name}"
    except ValueError:  # another drive
        return place


def load_experiment(place: str) -> Experiment:
    """The experiment at ``file.py:name``: the object itself, or a function that makes it."""
    found = load_object(place)
    if not isinstance(found, Experiment) and callable(found):
        found = _call(place, found)
    if not isinstance(found, Experiment):
        raise InputError(
            f"{place}: expected a splitgrow.Experiment or a function that returns one, got "
            f"{type(found).__name__}."
        )
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))  # so that it can import its neighbours
    return _guarded(str(path), lambda: loader.exec_module(module)) or module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    module: ModuleType = _guarded(name, lambda: importlib.import_module(name))
    return module


def _call(place: str, function: Callable[[], Any]) -> Any:
    if needed := _needed(function):
        raise InputError(
            f"{place}: a function without arguments is needed, and this one takes "
            f"{', '.join(needed)}. Give {'it a default' if len(needed) == 1 else 'them defaults'}, "
            "or name a function that calls it."
        )
    return _guarded(place, function)


def _needed(function: Callable[[], Any]) -> list[str]:
    """The arguments without which a function cannot be called."""
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some that are written in C do not say
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in free]


def _guarded(place: str, action: Callable[[], Any]) -> Any:
    """Run a user's code; its error, and the line it came from, in one paragraph."""
    try:
        return action()
    except SplitgrowError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "<" not in f.filename]
        last = frames[-1] if frames and not isinstance(error, SyntaxError) else None
        where = f" ({Path(last.filename).name}, line {last.lineno}: {last.line})" if last else ""
        raise InputError(
            f"{place} cannot be run: {type(error).__name__}: {error}{where}"
        ) from error
