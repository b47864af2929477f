"""A run on the terminal, live: which phase, how far, what loss, how large, how long still."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from splitgrow.phase import Phase
from splitgrow.show import STOPPED, count
from splitgrow.watch import Watcher

if TYPE_CHECKING:
    from splitgrow.history import History, PhaseRecord

STAGES = {"train": "training", "evaluate": "evaluating", "score": "scoring and splitting",
          "save": "saving"}  # fmt: skip
EVERY = 0.1  # seconds between two updates of the loss


class Live(Watcher):
    """A progress bar for the phase at hand, and a line for each that is done."""

    def __init__(self, console: Console | None = None, title: str = "") -> None:
        self._console = console or Console()
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(min_width=28)),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[loss]}", table_column=Column(min_width=12)),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._shown = 0.0

    def on_stage(self, phase: int, stage: str) -> None:
        """Say what is being done."""
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", loss="", total=None)
        label = f"{self._title}phase {phase}: {STAGES.get(stage, stage)}"
        self._progress.reset(self._task, description=label, total=None, loss="")

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        """Show the loss, not more often than one can read it."""
        now = time.monotonic()
        if self._task is not None and now - self._shown > EVERY:
            self._progress.update(self._task, loss=f"loss {loss:.4g}")
            self._shown = now

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def on_trained(self, record: PhaseRecord, history: History) -> None:
        """A line for the trained net."""
        metrics = "".join(f"  {name} {value:.4g}" for name, value in record.metrics.items())
        self._line(
            f"{self._title}phase {record.phase}: {record.params:,} parameters, "
            f"{record.macs:,} MACs, loss {record.loss:.4g}{metrics}"
        )

    def on_grown(self, record: PhaseRecord, history: History) -> None:
        """A line for the split."""
        split = record.split
        if split is None:
            return
        text = f"{self._title}         grew by {count(len(split.neurons), 'neuron')}"
        if split.measured is not None:
            text += f", loss changed by {split.measured:+.2e}"
        if split.predicted is not None:
            text += f" (predicted {split.predicted:+.2e})"
        self._line(text)

    def on_end(self, history: History) -> None:
        """Take the bar away and say why it is over."""
        self.close()
        if history.stopped:
            self._line(f"{self._title}ended: {STOPPED.get(history.stopped, history.stopped)}")

    def close(self) -> None:
        """Take the bar away; safe to call twice."""
        if self._task is not None:
            self._progress.stop()
            self._task = None

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)
