"""Write the tables of the README from the committed results: python tools/readme_tables.py.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEYWORDS = ROOT / "results" / "paper" / "kws"
FILES = {
    "scoring": RESULTS / "scoring.json",
    "digits": RESULTS / "digits.json",
    "keywords": KEYWORDS / "table1.json",
    "files": KEYWORDS / "files.json",
}
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


def with_tables(text: str) -> str:
    """The text with every table made anew from its results file."""

    def table(match: re.Match[str]) -> str:
        found = json.loads(FILES[match[2]].read_text())
        return f"{match[1]}{globals()[match[2]](found)}\n{match[3]}"

    return TABLE.sub(table, text)


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(with_tables(page.read_text()))
