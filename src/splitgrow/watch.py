"""Watching a run: what happens is told to watchers, which show it or write it down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitgrow.errors import InputError
from splitgrow.phase import Phase

if TYPE_CHECKING:
    from splitgrow.history import History, PhaseRecord


class Watcher:
    """Told of everything in a run; does nothing. Subclass it and override what you need."""

    def on_stage(self, phase: int, stage: str) -> None:
        """``train``, ``evaluate``, ``score`` (which includes the split) or ``save`` begins."""

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        """One training iteration was logged; ``iteration`` counts over the whole run."""

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        """This phase's training is at ``done`` of ``total``."""

    def on_trained(self, record: PhaseRecord, history: History) -> None:
        """A phase has been trained and evaluated."""

    def on_grown(self, record: PhaseRecord, history: History) -> None:
        """A phase's split is done; ``record.split`` tells what it did."""

    def on_end(self, history: History) -> None:
        """The run is over, for whatever reason."""


class Everyone(Watcher):
    """Passes everything on to several watchers."""

    def __init__(self, watchers: list[Watcher]) -> None:
        self.watchers = watchers

    def on_stage(self, phase: int, stage: str) -> None:
        """Pass it on."""
        for watcher in self.watchers:
            watcher.on_stage(phase, stage)

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        """Pass it on."""
        for watcher in self.watchers:
            watcher.on_iteration(phase, iteration, loss)

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        """Pass it on."""
        for watcher in self.watchers:
            watcher.on_progress(phase, done, total)

    def on_trained(self, record: PhaseRecord, history: History) -> None:
        """Pass it on."""
        for watcher in self.watchers:
            watcher.on_trained(record, history)

    def on_grown(self, record: PhaseRecord, history: History) -> None:
        """Pass it on."""
        for watcher in self.watchers:
            watcher.on_grown(record, history)

    def on_end(self, history: History) -> None:
        """Pass it on."""
        for watcher in self.watchers:
            watcher.on_end(history)


class TensorBoard(Watcher):
    """Writes scalars for TensorBoard: ``grow(..., watch=[sg.TensorBoard("runs/mine/tb")])``.

    Needs the package ``tensorboard``.
    """

    def __init__(self, folder: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "TensorBoard: the package tensorboard is not installed. Install it, or leave the "
                "watcher out."
            ) from error
        self._folder, self._make = str(folder), SummaryWriter
        self._made: Any = None

    @property
    def _writer(self) -> Any:
        """Made when there is something to write: a run that is refused leaves no files."""
        if self._made is None:
            self._made = self._make(self._folder)
        return self._made

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        """The training loss."""
        self._writer.add_scalar("loss/training", loss, iteration)

    def on_trained(self, record: PhaseRecord, history: History) -> None:
        """Size, loss, metrics and widths, at the iteration that training has reached."""
        at = history.iterations
        values = {
            "size/parameters": record.params, "size/macs": record.macs, "loss/scored": record.loss,
            **{f"metric/{name}": value for name, value in record.metrics.items()},
            **{f"width/{name}": width for name, width in record.widths.items()},
        }  # fmt: skip
        for name, value in values.items():
            self._writer.add_scalar(name, value, at)
        self._writer.flush()

    def on_grown(self, record: PhaseRecord, history: History) -> None:
        """Predicted and measured change of the loss."""
        if record.split is None:
            return
        for name in ("predicted", "measured"):
            value = getattr(record.split, name)
            if value is not None:
                self._writer.add_scalar(f"split/{name}", value, history.iterations)

    def on_end(self, history: History) -> None:
        """Close the file."""
        if self._made is not None:
            self._made.close()
            self._made = None
