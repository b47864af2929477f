"""Grow: Algorithm 1 of the paper. Train, split the neurons that are stuck, and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from splitgrow.capture import Call, ExampleInputs
from splitgrow.checkpoint import load
from splitgrow.cost import CostModel
from splitgrow.directions import Directions
from splitgrow.distributed import team_of
from splitgrow.errors import InputError, Interrupted, SplitgrowError
from splitgrow.fit import Trainer
from splitgrow.fresh import check_resettable, reset
from splitgrow.history import Event, History, PhaseRecord, Split, lasting_names
from splitgrow.interrupt import Told, flag_on_interrupt
from splitgrow.methods import Growth, Method, Nothing, Site, method_named
from splitgrow.optimizer_file import load_optimizer
from splitgrow.phase import Phase, check_seed
from splitgrow.policy import Budget, Policy
from splitgrow.runs import RunFolder, Saved
from splitgrow.stages import Clock, seed_of
from splitgrow.state import Undo, eval_mode, seeded
from splitgrow.tap import LossFn
from splitgrow.team import APART, Team
from splitgrow.units import Units, _without, find_units
from splitgrow.view import check_batches, check_call, check_loss_fn, first_call, mean_loss
from splitgrow.watch import Everyone, Watcher
from splitgrow.wrapped import check_bare

Train = Callable[[nn.Module, Phase], object]
Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class Result:
    """A grown model and how it came about.

    Attributes:
        model: the model that was given, grown in place and trained.
        history: every phase, every split, every neuron's descent.
        run_dir: where the checkpoints are, if anywhere.
    """

    model: nn.Module
    history: History
    run_dir: Path | None

    @property
    def stopped(self) -> str:
        """Why the run ended; see :class:`splitgrow.History`."""
        return self.history.stopped or ""

    def __str__(self) -> str:
        from splitgrow.show import history_table

        return history_table(self.history)


def grow(
    model: nn.Module,
    *,
    train: Train,
    loss_fn: LossFn,
    batches: Iterable[Any],
    example_inputs: ExampleInputs | None = None,
    evaluate: Evaluate | None = None,
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    until: Budget = Budget(),  # noqa: B008  (frozen)
    method: str | Method = "splitting",
    finish: Train | None = None,
    exclude: Iterable[str] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    watch: Sequence[Watcher] = (),
    origin: str | None = None,
) -> Result:
    """Train and split in turn, in place, until the budget is spent or nothing is left to split.

    Every phase trains, evaluates and splits; the last one does not split. The same seed gives the
    same net, bit for bit on one machine, whether or not the run was interrupted in between.

    Args:
        model: the seed, a small net. On an error it is left as the last completed step made it.
        train: ``train(model, phase)`` trains the model as you like, :class:`splitgrow.Trainer` for
            those who have nothing of their own. An optimizer assigned to ``phase.optimizer`` is
            carried along. What it reports with ``phase.log(loss)`` becomes the curve. Random
            numbers come from the global generators, which are seeded for each phase; a generator
            of your own should be seeded with ``phase.seed``, or a resumed run differs.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        batches: what to score neurons and to search the step on: a list or a loader. On several
            processes, this one's part of it: ``splitgrow.Shard(batches)``. ``train`` then wraps
            the model in DistributedDataParallel anew in each phase; metrics are averaged over the
            processes; the first one writes ``run_dir``, which all must be able to read, and tells
            ``watch``.
        example_inputs: as for :func:`splitgrow.find_units`; left out, they are taken from the
            first batch.
        evaluate: ``evaluate(model)`` gives metrics by name, in eval mode and without gradients.
        policy: how much is split in a phase, and which neurons come first.
        until: when to end. Budgets of parameters and MACs are never exceeded.
        method: ``"splitting"``, or one of the baselines ``"random"``, ``"random-neuron"``,
            ``"new"``, ``"net2net"``, ``"boosting"``; or a :class:`Method` of your own.
        finish: trains once more, in a phase of its own, when growing is over: longer, say, or with
            a falling learning rate. A run that is finished cannot be grown further.
        exclude: names of units to leave alone.
        run_dir: keep a checkpoint after every training and every split here.
        resume: go on with the run that is in ``run_dir``, if there is one.
        seed: of everything random in the run.
        watch: told what happens, as it happens.
        origin: where the experiment or its seed model is, ``file.py:name``: kept in ``run_dir``,
            so that ``splitgrow export`` can build the model again.

    Raises:
        Interrupted: Ctrl-C was pressed. The run ends after the current batch, and what is in
            ``run_dir`` goes up to the last whole phase.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    check_bare(model)
    for name, function in (("train", train), ("finish", finish or train)):
        if not callable(function):
            raise InputError(f"{name}: expected a function, got {type(function).__name__}.")
        check_call(name, function, "model, phase")
    check_loss_fn(loss_fn)
    check_batches(batches)
    _check_settings(policy, until, method, evaluate)
    if resume and run_dir is None:
        raise InputError("resume: there is nothing to resume from without run_dir=.")
    if policy.after == "retrain":
        check_resettable(model)
    example: ExampleInputs | Call
    example = first_call(model, loss_fn, batches) if example_inputs is None else example_inputs
    folder = None if run_dir is None else RunFolder(Path(run_dir))
    run = _Run(
        model, train, loss_fn, batches, Call.from_example(example), evaluate,
        policy, until, method_named(method) if isinstance(method, str) else method,
        (exclude,) if isinstance(exclude, str) else tuple(exclude), folder,
        check_seed(seed), Everyone(list(watch) if team_of(batches).rank == 0 else []),
        method if isinstance(method, str) else type(method).__name__, finish, origin,
    )  # fmt: skip
    return run.perform(resume=resume)


def _check_settings(policy: Any, until: Any, method: Any, evaluate: Any) -> None:
    """What would otherwise show only after the first training."""
    for name, value, kind in (("policy", policy, Policy), ("until", until, Budget)):
        if not isinstance(value, kind):
            raise InputError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}.")
    if not isinstance(method, str | Method):
        raise InputError(f"method: expected a name or a Method, got {type(method).__name__}.")
    if evaluate is not None and not callable(evaluate):
        raise InputError(f"evaluate: expected a function, got {type(evaluate).__name__}.")
    if until.metric is not None and evaluate is None:
        raise InputError(
            f"until: to end when {until.metric[0]} is reached, give evaluate=, a function from the "
            "model to a dict of metrics."
        )


@dataclass
class _Run:
    """One call of grow: its arguments, and where it stands."""

    model: nn.Module
    train: Train
    loss_fn: LossFn
    batches: Iterable[Any]
    example: Call
    evaluate: Evaluate | None
    policy: Policy
    until: Budget
    method: Method
    exclude: tuple[str, ...]
    folder: RunFolder | None
    seed: int
    watcher: Watcher
    method_name: str
    finish: Train | None = None
    origin: str | None = None
    history: History = field(init=False)
    optimizer: Optimizer | None = None
    restore: Callable[[Optimizer], None] | None = None
    directions: Directions | None = None  # of the model's neurons, from their last scoring
    stop: threading.Event = field(default_factory=threading.Event)
    left_out: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        name = "run" if self.folder is None else self.folder.path.resolve().name
        self.history = History(name, self.method_name, self.seed)

    @property
    def team(self) -> Team:
        """The processes that grow the same model."""
        return team_of(self.batches)

    # ---- the loop -----------------------------------------------------------------------------

    def perform(self, *, resume: bool) -> Result:
        """All phases that are still to be done."""
        with flag_on_interrupt(self.stop):
            try:
                with self.team.guard("the start of the run"):
                    self._resolve_exclude()
                    last = self._open(resume=resume)
                self._go_on_from(last)
            except Interrupted:
                raise
            except KeyboardInterrupt as interrupt:
                raise self._interrupted() from interrupt
            finally:
                self.watcher.on_end(self.history)
        return Result(self.model, self.history, None if self.folder is None else self.folder.path)

    def _go_on_from(self, last: Saved | None) -> None:
        if last is None or not self._ends_at(last):
            self._grow_from(last)
        elif not self.history.phases[-1].finish:
            self._is_over(otherwise=self.history.stopped)
        if self.finish is not None and not self.history.phases[-1].finish:
            self._train_to_the_end(self.finish)

    def _grow_from(self, last: Saved | None) -> None:
        units = self._find_units()
        self.until.check_seed(CostModel(units).total())
        self._begin_lines(units)
        self._check_stop()
        if last is None or last.grown:
            units = self._train_and_save()
        while not self._is_over() and self._grow_and_save(units):
            units = self._train_and_save()

    def _is_over(self, otherwise: str | None = None) -> bool:
        record = self.history.phases[-1]
        self.history.stopped = self.until.reached(record.phase, record.metrics) or otherwise
        return self.history.stopped is not None

    def _train_and_save(self) -> Units:
        """A phase up to its split; the units of the trained net."""
        record, units = self._train_phase(self.train)
        self.history.phases.append(record)
        self.history.stopped = self.until.reached(record.phase, record.metrics)
        self._save(grown=False)
        self.watcher.on_trained(record, self.history)
        self._check_stop()
        return units

    def _train_to_the_end(self, finish: Train) -> None:
        record, _ = self._train_phase(finish)
        self.history.phases.append(replace(record, finish=True))
        self._save(grown=False)
        self.watcher.on_trained(self.history.phases[-1], self.history)
        self._check_stop()

    def _grow_and_save(self, units: Units) -> bool:
        """The split of the last phase; False where there is nothing to split."""
        number = self.history.phases[-1].phase
        self.watcher.on_stage(number, "score")
        with seeded(seed_of(self.seed, number, "split")):
            growth = self.method.grow(self._site(units, number))
        if isinstance(growth, Nothing):
            self._note_end(growth)
            return False
        self._note(growth, units)
        self.directions = growth.directions
        self._start_afresh(number)
        self._save(grown=True)
        self.watcher.on_grown(self.history.phases[-1], self.history)
        self._check_stop()
        return True

    def _site(self, units: Units, number: int) -> Site:
        count = self.policy.how_many(sum(unit.width for unit in units))
        generator = torch.Generator().manual_seed(seed_of(self.seed, number, "method"))
        return Site(
            self.model, units, self.loss_fn, self.batches, self.policy,
            self.until.left(CostModel(units).total(), count), self.optimizer, generator,
            self._known_directions(units),
        )  # fmt: skip

    def _known_directions(self, units: Units) -> Directions | None:
        """Where the scoring can start; not at all where train() has changed the net's shapes."""
        known = self.directions
        return None if known is None or known.misfit(units) else known

    # ---- one phase ----------------------------------------------------------------------------

    def _train_phase(self, train: Train) -> tuple[PhaseRecord, Units]:
        number = len(self.history.phases)
        phase = Phase(
            number, seed=seed_of(self.seed, number, "train"),
            first_iteration=self.history.iterations, optimizer=self.optimizer,
            restore=self.restore, listener=Told(self.watcher, self.stop), stop=self.stop,
        )  # fmt: skip
        clock = Clock()
        self.watcher.on_stage(number, "train")
        with seeded(phase.seed), clock.time("train"), _hint_at_optimizer(phase):
            train(self.model, phase)
        self.optimizer, self.restore = phase.optimizer, None
        self._check_stop()
        self._check_trained()
        self.watcher.on_stage(number, "evaluate")
        with clock.time("evaluate"), self.team.guard("evaluate"):
            loss = mean_loss(self.model, self.loss_fn, self.batches)
            metrics = self._metrics(number)
        units = self._find_units()
        cost, names = CostModel(units).total(), lasting_names(units)
        record = PhaseRecord(
            number, cost.params, cost.macs, {names[unit.name]: unit.width for unit in units},
            loss, metrics, dict(clock.seconds), tuple(phase.curve), phase.iterations,
        )  # fmt: skip
        return record, units

    def _check_trained(self) -> None:
        """All ranks go on from the same model: rank 0's buffers, parameters that are equal."""
        self.team.share_buffers(self.model, Undo())
        self.team.same_model("model", self.model, APART)

    def _metrics(self, number: int) -> dict[str, float]:
        if self.evaluate is None:
            return {}
        seed = seed_of(self.seed, number, "evaluate")
        with eval_mode(self.model), seeded(seed), torch.no_grad():
            found = self.evaluate(self.model)
        metrics = _checked_metrics(found)
        mean = {n: self.team.sum(v, f"metric {n}") / self.team.size for n, v in metrics.items()}
        return _checked_metrics(mean)

    def _find_units(self) -> Units:
        with self.team.guard("find_units"):
            found = find_units(self.model, self.example)
            names = lasting_names(found)
            units = _without(found, [name for name in names if names[name] in self.left_out])
            if not len(units):
                raise InputError(f"model: nothing in it can be split.\n{units}")
            return units

    def _resolve_exclude(self) -> None:
        """Excluded units by names that stay: a part's own name moves as its neighbours grow."""
        if self.exclude:
            found = find_units(self.model, self.example)
            names = lasting_names(found)
            _without(found, self.exclude)  # raises where a name is wrong
            self.left_out = {names[name] for name in self.exclude if name in names}

    def _start_afresh(self, number: int) -> None:
        """Fresh weights for the grown net, where the policy says so."""
        if self.policy.after == "retrain":
            with seeded(seed_of(self.seed, number, "retrain")), torch.no_grad():
                reset(self.model)
            self.directions = None
            if self.optimizer is not None:
                self.optimizer.state.clear()

    # ---- the record ---------------------------------------------------------------------------

    def _begin_lines(self, units: Units) -> None:
        names = lasting_names(units)
        for unit in units:
            self.history.begin(names[unit.name], unit.width, len(self.history.phases))

    def _note(self, growth: Growth, units: Units) -> None:
        """Write a growth into the last phase's record and into the neurons' lines."""
        record, names = self.history.phases[-1], lasting_names(units)
        self._begin_lines(units)
        events = []
        for grown in growth.neurons:
            unit, parent = names[grown.unit], None
            if grown.neuron is None:
                children: tuple[int, ...] = (self.history.add(unit, grown.twin, record.phase),)
            else:
                parent, children = self.history.divide(unit, grown.neuron, grown.twin, record.phase)
            events.append(Event(unit, parent, children, grown.lambda_, grown.step, grown.predicted))
        known = growth.loss is not None and growth.measured is not None
        after = growth.loss + growth.measured if known else None  # type: ignore[operator]
        split = Split(
            growth.step, growth.relative, growth.predicted, growth.measured, growth.loss, after,
            growth.parity, tuple(events),
        )  # fmt: skip
        seconds = {**record.seconds, "score": growth.score_seconds, "split": growth.split_seconds}
        self.history.phases[-1] = replace(record, split=split, seconds=seconds)

    def _note_end(self, nothing: Nothing) -> None:
        record = self.history.phases[-1]
        self.history.stopped = nothing.reason
        seconds = {**record.seconds, "score": nothing.score_seconds}
        self.history.phases[-1] = replace(record, seconds=seconds)
        self._save(grown=False)

    # ---- the folder ---------------------------------------------------------------------------

    def _open(self, *, resume: bool) -> Saved | None:
        """Load the checkpoint that a run in the folder is to go on from."""
        settings = {"name": self.history.name, "method": self.method_name, "seed": self.seed,
                    "policy": asdict(self.policy), "until": asdict(self.until),
                    "exclude": list(self.exclude), "train": _described(self.train),
                    "finish": _described(self.finish)}  # fmt: skip
        self._check_settings_alike(settings, resume=resume)
        if self.folder is None:
            return None
        origin = {} if self.origin is None else {"origin": self.origin}
        saved = self._begin(self.folder, settings | origin, resume=resume)
        last = self._newest_usable(saved)
        if last is not None:
            last.check()
            self.directions = last.directions()
            self.history = last.history()
            load(self.model, last.model)
            if last.optimizer is not None:
                self.restore = partial(load_optimizer, path=last.optimizer)
        return last

    def _check_settings_alike(self, settings: Mapping[str, Any], *, resume: bool) -> None:
        """All ranks are in the same run."""
        folder = "none" if self.folder is None else str(self.folder.path)
        # Trainings may hold functions, whose names differ from process to process.
        named = {k: repr(v) for k, v in settings.items() if k not in ("train", "finish")}
        told = named | {"run_dir": folder, "resume": repr(resume)}
        self.team.same("grow", told, "Call it with the same arguments on every rank.")

    def _begin(
        self, folder: RunFolder, settings: Mapping[str, Any], *, resume: bool
    ) -> list[Saved]:
        """Rank 0 opens the folder, the others look into it afterwards."""
        with self.team.guard("run_dir"):
            saved = folder.begin(settings, resume=resume) if self.team.rank == 0 else []
        folder.same_until = self.team.any(folder.same_until, "run_dir")
        found = saved if self.team.rank == 0 else folder.saved()
        listed = {"checkpoints": repr([(each.phase, each.grown) for each in found])}
        way_out = "Name a folder that every rank can read."
        self.team.same(f"run_dir: {folder.path}", listed, way_out)
        return found

    def _newest_usable(self, saved: list[Saved]) -> Saved | None:
        """The checkpoint to go on from.

        A trained net whose optimizer is yet to be carried through a split cannot be: only train()
        can make that optimizer. Its phase is trained once more, unless the run is over there.
        """
        for candidate in reversed(saved):
            if candidate.grown or candidate.optimizer is None or self._ends_at(candidate):
                return candidate
        return None

    def _ends_at(self, saved: Saved) -> bool:
        """Is the run over at a checkpoint, within the budget of today?"""
        assert self.folder is not None
        if saved.grown:
            return False
        history = saved.history()
        record = history.phases[-1]
        if record.finish:
            return True
        reached = self.until.reached(record.phase, record.metrics)
        return reached is not None or (history.stopped is not None and self.folder.same_until)

    def _save(self, *, grown: bool) -> None:
        if self.folder is not None:
            self.watcher.on_stage(self.history.phases[-1].phase, "save")
            with self.team.guard("save"):
                if self.team.rank == 0:
                    self.folder.save(
                        self.model, self.optimizer, self.history, self.directions, grown=grown
                    )

    def _check_stop(self) -> None:
        if self.team.any(self.stop.is_set(), "stop"):
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        if self.folder is None:
            return Interrupted("stopped. Without run_dir= nothing was kept to resume from.", None)
        where = self.folder.path
        kept = "the run up to its last whole phase" if self.folder.saved() else "no whole phase yet"
        return Interrupted(
            f"stopped. {where} holds {kept}; resume=True, or --resume on the command line, goes on "
            "from there.",
            where,
        )


def _described(train: Train | None) -> str:
    """Settings of a training that a resumed run must share, as far as they can be known."""
    return train.describe() if isinstance(train, Trainer) else ""


@contextmanager
def _hint_at_optimizer(phase: Phase) -> Iterator[None]:
    """An optimizer that was not handed over knows the old shapes; torch's error does not say so."""
    try:
        yield
    except RuntimeError as error:
        if phase.number and phase.optimizer is None and not isinstance(error, SplitgrowError):
            error.add_note(
                f"phase {phase.number} trains a net that was split. If train() keeps an optimizer "
                "from an earlier phase, hand it over once, phase.optimizer = optimizer, so that "
                "its state follows the neurons; or make a new one in each phase."
            )
        raise


def _checked_metrics(found: Any) -> dict[str, float]:
    try:
        metrics = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"evaluate: expected a dict of numbers by name, got {found!r}. Return for example "
            '{"accuracy": 0.93}.'
        ) from error
    # Infinity would be lost in a checkpoint, and a resumed run differ.
    return {name: value if isfinite(value) else nan for name, value in metrics.items()}
