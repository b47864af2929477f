"""Tables for people: what a value looks like when it is printed."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from splitgrow.cost import CostModel

if TYPE_CHECKING:
    from splitgrow.history import History
    from splitgrow.plan import SplitPlan
    from splitgrow.scores import Scores
    from splitgrow.split import Receipt
    from splitgrow.units import Units


def render(*renderables: object, width: int = 100) -> str:
    """Rich tables as plain text."""
    console = Console(width=width, record=False, force_terminal=False, color_system=None)
    with console.capture() as captured:
        for item in renderables:
            console.print(item)
    return captured.get().rstrip()


def count(number: int, noun: str, nouns: str | None = None) -> str:
    """``1 split``, ``2 splits``."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def units_table(units: Units) -> str:
    """What can be split, by how many parameters per neuron; what cannot, and why."""
    table = Table(title=f"{count(len(units), 'unit')} can be split", title_justify="left")
    table.add_column("unit")
    table.add_column("neurons", justify="right")
    table.add_column("own parameters", justify="right")
    table.add_column("a split adds", justify="right")
    table.add_column("made of")
    table.add_column("read by")
    costs = CostModel(units)
    for unit in units:
        adds = f"{costs.added(unit, {}).params:,}"
        read_by = ", ".join(dict.fromkeys(s.name for s in unit.consumers))
        made_of = ", ".join(unit.parameters)
        table.add_row(unit.name, str(unit.width), str(unit.size), adds, made_of, read_by)
    if not units.skipped:
        return render(table)
    shown = [table] if len(units) else [table.title]
    other = Table(title=f"{len(units.skipped)} cannot", title_justify="left")
    other.add_column("where")
    other.add_column("why")
    for skipped in units.skipped:
        other.add_row(skipped.name, skipped.reason)
    return render(*shown, other)


def scores_table(scores: Scores, most: int = 10) -> str:
    """The neurons with the most negative splitting index, and a line for each unit."""
    samples = count(scores.samples, "sample")
    table = Table(
        title=f"splitting indexes on {samples}, mean loss {scores.loss:.4g}", title_justify="left"
    )
    for header in ("unit", "neurons", "lambda < 0", "smallest lambda", "its neuron"):
        table.add_column(header, justify="left" if header == "unit" else "right")
    for name, found in scores.items():
        best = int(found.values.argmin())
        table.add_row(
            name,
            str(len(found.values)),
            str(int((found.values < 0).sum())),
            f"{found.values[best].item():.3e}",
            str(best),
        )
    ranked = sorted(
        (value, name, k)
        for name, found in scores.items()
        for k, value in enumerate(found.values.tolist())
        if value < 0
    )
    top = Table(title="most promising neurons", title_justify="left")
    for header in ("unit", "neuron", "lambda", "standard error", "residual"):
        top.add_column(header, justify="left" if header == "unit" else "right")
    for value, name, k in ranked[:most]:
        error, residual = (t[k].item() for t in (scores[name].errors, scores[name].residuals))
        top.add_row(
            name, str(k), f"{value:.3e}", "-" if isnan(error) else f"{error:.1e}", f"{residual:.1e}"
        )
    return render(table, top) if ranked else render(table)


def plan_table(plan: SplitPlan) -> str:
    """How many neurons of which units, and the strongest of each."""
    table = Table(title=f"plan: split {count(len(plan), 'neuron')}", title_justify="left")
    for header in ("unit", "split", "of", "smallest lambda", "neurons"):
        table.add_column(header, justify="left" if header in ("unit", "neurons") else "right")
    for name, neurons in plan.chosen.items():
        listed = ", ".join(map(str, neurons[:12])) + (", ..." if len(neurons) > 12 else "")
        smallest = min(e.lambda_ for e in plan if e.unit == name)
        width = str(plan.units[name].width)
        table.add_row(name, str(len(neurons)), width, f"{smallest:.3e}", listed)
    return render(table)


def receipt_table(receipt: Receipt) -> str:
    """Widths before and after, and the change of loss that was predicted and measured."""
    table = Table(title=f"split {count(len(receipt.offspring), 'neuron')}", title_justify="left")
    for header in ("unit", "before", "after"):
        table.add_column(header, justify="left" if header == "unit" else "right")
    for name, (before, after) in receipt.widths.items():
        table.add_row(name, str(before), str(after))
    facts = Table(show_header=False, box=None)
    facts.add_row("parameters", f"{receipt.params[0]:,} -> {receipt.params[1]:,}")
    facts.add_row("parity", f"{receipt.parity:.1e}  (largest change of an output at step 0)")
    kind = "of each neuron's length" if receipt.relative else "absolute"
    facts.add_row("step", f"{receipt.step:.3g}  ({kind})")
    facts.add_row("predicted change of loss", f"{receipt.predicted:+.3e}")
    if receipt.measured is not None and receipt.loss is not None:
        now = receipt.loss + receipt.measured
        facts.add_row(
            "measured change of loss",
            f"{receipt.measured:+.3e}  ({receipt.loss:.6g} -> {now:.6g})",
        )
    return render(table, facts)


STOPPED = {
    "phases": "as many phases as asked for",
    "params": "no further split fits the budget of parameters",
    "macs": "no further split fits the budget of MACs",
    "metric": "the metric is reached",
    "stable": "splitting stable: no neuron is left whose splitting index is low enough",
    "refused": "no step of a split lowers the loss",
    "policy": "the policy lets no neuron grow (round_to, count, max_per_unit or max_growth)",
}


def history_table(history: History) -> str:
    """A line for each phase, and why the run ended."""
    table = Table(title=f"{history.name}: {history.method}, seed {history.seed}",
                  title_justify="left")  # fmt: skip
    metrics = list(dict.fromkeys(name for p in history.phases for name in p.metrics))
    for header in ("phase", "parameters", "MACs", "loss", *metrics, "then split", "predicted",
                   "measured"):  # fmt: skip
        table.add_column(header, justify="right")
    for p in history.phases:
        values = [f"{p.metrics[name]:.4g}" if name in p.metrics else "" for name in metrics]
        after = ["", "", ""]
        if p.split is not None:
            changes = [p.split.predicted, p.split.measured]
            shown = ["" if change is None else f"{change:+.2e}" for change in changes]
            after = [str(len(p.split.neurons)), *shown]
        table.add_row(
            str(p.phase), f"{p.params:,}", f"{p.macs:,}", f"{p.loss:.4g}", *values, *after
        )
    why = STOPPED.get(history.stopped or "", history.stopped)
    return render(table, *([f"ended: {why}"] if why else []), width=120)
