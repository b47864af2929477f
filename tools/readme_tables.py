"""Write the tables of README and docs from the committed results: python tools/readme_tables.py.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import json
import re
from math import log
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEYWORDS = ROOT / "results" / "paper" / "kws"
CIFAR10 = ROOT / "results" / "paper" / "cifar10"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FILES = {
    "scoring": RESULTS / "scoring.json",
    "peers": RESULTS / "peers-cpu.json",
    "digits": RESULTS / "digits.json",
    "keywords": KEYWORDS / "table1.json",
    "files": KEYWORDS / "again" / "files.json",
    "cifar10": CIFAR10 / "claims.json",
    "macs": CIFAR10 / "claims.json",
    "targets": CIFAR10 / "claims.json",
    "ends": CIFAR10 / "sizes" / "claims.json",
    "trials": CIFAR10 / "trials",
    "levers": CIFAR10 / "levers.json",
    "norms": RESULTS / "batch-norm.json",
}
SHARES = {  # of the full net
    "params": (0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3),
    "macs": (0.01, 0.02, 0.05, 0.1, 0.2, 0.3),
}
TRIED = {"vgg19": (100_000, 200_000, 350_000), "mobilenet": (11_000, 17_000, 27_000)}
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def scoring(found: Any) -> str:
    used = found["settings"]
    return "\n".join([
        "| net | neurons | largest d | time | peak memory |",
        "|---|---|---|---|---|",
        *map(_scoring_row, found["rows"]),
        "",
        f"Batch of {used['batch']}, {used['steps']} Lanczos steps for every unit,",
        f"{used['threads']} CPU threads, PyTorch {used['torch'].partition('+')[0]}.",
    ])  # fmt: skip


def _scoring_row(row: dict[str, Any]) -> str:
    return (
        f"| {row['net']} | {row['neurons']:,} | {row['largest d']:,} "
        f"| {row['time ratio']:.1f} x a step | {row['memory ratio']:.2f} x a step |"
    )


def peers(found: Any) -> str:
    """Cost and quality of each method on each net, or why there is none."""
    lines = [
        "| net | method | time | memory | found | epochs |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        if row["status"] != "ok":
            lines.append(f"| {row['net']} | {row['method']} | {row['status']} | | | |")
            continue
        share = row.get("overlap over net")
        named = "" if share is None else f"{share:.1%}"
        lines.append(
            f"| {row['net']} | {row['method']} | {row['cost']:.1f} x | {row['memory']:.1f} x "
            f"| {named} | {row['epochs']:.1f} |"
        )
    return "\n".join(lines)


def digits(found: Any) -> str:
    budgets = found["settings"]["budgets"]
    head = [f"at most {b:,} parameters" for b in budgets]
    lines = [f"| net, {found['settings']['seeds']} seeds | " + " | ".join(head) + " |",
             "|---|" + "---|" * len(head)]  # fmt: skip
    for net in found[str(budgets[0])]["summary"]:
        cells = []
        for budget in budgets:
            row = found[str(budget)]["summary"][net]
            cells.append(f"{row['accuracy']:.2%} ± {row['spread']:.2%} ({row['params']:,.0f})")
        lines.append(f"| {net} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def keywords(found: Any) -> str:
    from splitgrow.paper.kws_table import to_markdown

    return to_markdown(found).strip()


def files(found: Any) -> str:
    from splitgrow.paper.kws_files import to_markdown

    return to_markdown(found["files"]).strip()


def cifar10(found: Any) -> str:
    return _accuracies(found, "params")


def macs(found: Any) -> str:
    return _accuracies(found, "macs")


def _accuracies(found: Any, axis: str) -> str:
    """A line for each net, way to train on, and method; a column for each size."""
    shares = SHARES[axis]
    at = [found["grid"].index(share) for share in shares]
    lines = ["| net | method | seeds | " + " | ".join(f"{100 * s:g}%" for s in shares) + " |",
             "|---|---|---|" + "---|" * len(shares)]  # fmt: skip
    for name, group in found["groups"].items():
        for method, cells in group["accuracy"][axis].items():
            seeds = max((cell["seeds"] for cell in cells if cell), default=0)
            shown = [f"{100 * cells[i]['mean']:.1f}" if cells[i] else "" for i in at]
            lines.append(f"| {name.removesuffix(', relu')} | {method} | {seeds} | "
                         + " | ".join(shown) + " |")  # fmt: skip
    return "\n".join(lines)


def targets(found: Any) -> str:
    lines = [
        "| net | target | verdict | smallest difference | sizes met |",
        "|---|---|---|---|---|",
    ]
    for row in found["targets"]:
        least = row["least"]
        number = f"{100 * least['mean']:+.1f} at {100 * least['size']:g}%" if least else ""
        met = sum(each["met"] for each in row["sizes"])
        net = row["group"].removesuffix(", relu")
        lines.append(f"| {net} | {row['target']} | {row['verdict']} | {number} "
                     f"| {met} of {len(row['sizes'])} |")  # fmt: skip
    return "\n".join(lines)


def ends(found: Any) -> str:
    """The nets that every method ends with, size by size."""
    lines = [
        "| size | net | method | seeds | test % | parameters K | MACs M | epochs | effort |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["ends"]:
        for net in row["nets"]:
            spread = "" if net["std"] is None else f" ± {100 * net['std']:.1f}"
            arch = net["group"].partition(",")[0]
            lines.append(
                f"| {100 * row['size']:g}% | {arch} | {net['method']} | {net['seeds']} "
                f"| {100 * net['mean']:.1f}{spread} | {net['params'] / 1e3:.1f} "
                f"| {net['macs'] / 1e6:.1f} | {net['epochs']:g} | {net['effort']:.2f} |"
            )
    return "\n".join(lines)


def trials(folder: Path) -> str:
    """Validation accuracy of each trial at some sizes."""
    lines = ["| trained on | net | method | step | " + " | ".join("abc") + " |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for path in sorted(folder.glob("*/*.json")):
        job = json.loads(path.read_text())
        arch, method = job["job"]["arch"], job["job"]["method"]
        points = {p["params"]: p["validation"] for p in job["points"]}
        logs = [log(size) for size in points]
        shown = [f"{100 * np.interp(log(size), logs, list(points.values())):.1f}"
                 if min(points) <= size <= max(points) else "" for size in TRIED[arch]]  # fmt: skip
        step = "" if method == "uniform" else job["settings"]["step"] or "searched"
        lines.append(f"| {path.parent.name.upper()} | {arch} | {method} | {step} | "
                     + " | ".join(shown) + " |")  # fmt: skip
    sizes = "; ".join(f"{arch} {', '.join(f'{s:,}' for s in each)}" for arch, each in TRIED.items())
    return "\n".join([*lines, "", f"At parameters a, b, c: {sizes}."])


def levers(found: Any) -> str:
    """Validation accuracy and training loss at some sizes, a line for each lever and method."""
    sizes = [f"{size / 1e3:g}K" for size in found["sizes"]]
    heads = [f"{what} {size}" for what in ("%", "loss") for size in sizes]
    lines = ["| lever | method | seeds | loss after a split | " + " | ".join(heads) + " | end |",
             "|---|---|---|---|" + "---|" * len(heads) + "---|"]  # fmt: skip
    for row in found["rows"]:
        cells = ["" if v is None else f"{100 * v:.1f}" for v in row["validation"]]
        cells += ["" if v is None else f"{v:.3f}" for v in row["loss"]]
        change, ends = row["change"], row["finished"]
        moved = f"{min(change):+.3f} to {max(change):+.3f}" if change else ""
        cells.append(_end(ends) if ends else "")
        lines.append(f"| {row['lever']} | {row['method']} | {len(row['seeds'])} | {moved} | "
                     + " | ".join(cells) + " |")  # fmt: skip
    return "\n".join(lines)


def _end(points: list[dict[str, float]]) -> str:
    validation, params = (np.mean([p[key] for p in points]) for key in ("validation", "params"))
    return f"{100 * validation:.1f} ({params / 1e3:.0f}K)"


def norms(found: Any) -> str:
    """Foretold and measured changes of the loss, a line for each direction and step."""
    losses = list(found["loss"])
    heads = ["along", "step", "predicted", *losses]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in found["rows"]:
        cells = [f"{row[name]:+.4f}" if name in row else "" for name in ("predicted", *losses)]
        lines.append(f"| {row['direction']} | {row['step']:g} | {' | '.join(cells)} |")
    before = ", ".join(f"{value:.3f} ({name})" for name, value in found["loss"].items())
    return "\n".join([*lines, "", f"Losses before: {before}."])


def with_tables(text: str) -> str:
    """The text with every table made anew from its results file."""

    def table(match: re.Match[str]) -> str:
        path = FILES[match[2]]
        found = path if path.is_dir() else json.loads(path.read_text())
        return f"{match[1]}{globals()[match[2]](found)}\n{match[3]}"

    return TABLE.sub(table, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
