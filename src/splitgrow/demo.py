"""The demonstration: grow a small CNN on handwritten digits, and compare it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from splitgrow.digits import LARGE_WIDTHS, Row, Setting, Study, cnn, load_digits
from splitgrow.live import Live
from splitgrow.report import write_report
from splitgrow.units import find_units

ONE_SEED = (
    "One seed ({seed}), on which random splitting may be ahead: README.md has the means of ten."
)


def run(
    seed: int = 0,
    epochs: int = Setting.epochs,
    params: int = Setting.params,
    run_dir: Path = Path("runs/demo"),
) -> list[Row]:
    """Grow, compare, and write the report."""
    console = Console()
    torch.set_num_threads(1)  # nets this small only wait for a second thread
    setting = Setting(params=params, epochs=epochs, total=15 * epochs)
    study = Study(load_digits(), setting, seed)
    console.rule("What can be split in a small CNN")
    console.print(str(find_units(cnn(seed=seed), study.data.test[0][:1])), highlight=False)

    console.rule(f"Growing it to at most {params} parameters")
    folders = [run_dir / name for name in ("splitting", "random")]
    rows = [_grown(study, "splitting", "splitting", folders[0], console)]
    console.rule("The same with random neurons and random directions")
    rows.append(_grown(study, "random splitting", "random", folders[1], console))
    console.rule("From scratch, with as many epochs in all")
    with console.status("training the same net and a large one from scratch"):
        rows.append(study.from_scratch("same, from scratch", rows[0].widths))
        rows.append(study.from_scratch("large, from scratch", LARGE_WIDTHS))
    console.print(_table(rows))
    console.print(ONE_SEED.format(seed=seed), soft_wrap=True, highlight=False)
    console.print(f"report: {write_report(folders, run_dir / 'report.html')}", soft_wrap=True)
    return rows


def _grown(study: Study, name: str, method: str, folder: Path, console: Console) -> Row:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demonstration
    with Live(console) as live:
        row, _ = study.grown(name, method, run_dir=folder, watch=[live])
    return row


def _table(rows: list[Row]) -> Table:
    table = Table(title="scikit-learn's digits, 1,347 to train and 450 to test",
                  title_justify="left")  # fmt: skip
    for header in ("net", "channels", "parameters", "train loss", "test acc."):
        table.add_column(header, justify="left" if header == "net" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.net, "-".join(map(str, row.widths)), f"{row.params:,}", f"{row.loss:.4f}",
            f"{row.accuracy:.1%}",
        )  # fmt: skip
    return table
