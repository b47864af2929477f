"""The page itself: the parts in ``assets``, the table, and the data of the figures, in one file.

Names of runs, units and metrics are text of others. In the table they are escaped; the figures
get them as JSON in a block that the browser does not run, and put them in place as text nodes. The
content policy of the page lets no other script run, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from splitgrow.report import summary
from splitgrow.report.curves import loss_figure
from splitgrow.report.forecast import forecast_figure
from splitgrow.report.history import Run
from splitgrow.report.lineage import unit_trees
from splitgrow.report.tradeoff import tradeoff_figure
from splitgrow.report.widths import width_figure
from splitgrow.report.words import MISSING

SCRIPTS = ("basics.js", "chart.js", "loss.js", "widths.js", "lineage.js", "plots.js", "main.js")


def page(runs: Sequence[Run]) -> str:
    """The report of some runs as HTML."""
    style = _asset("style.css")
    script = "(() => {\n" + "\n".join(_asset(name) for name in SCRIPTS) + "})();\n"
    parts = {
        "policy": _policy(script, style),
        "style": style,
        "script": script,
        "title": escape(summary.headline(runs)),
        "lead": escape(summary.lead(runs)),
        "table": _table(runs),
        "settings": _settings(runs),
        "data": _embedded(figures(runs)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """What the scripts draw, as plain JSON values."""
    return {
        "runs": [
            {"label": label, "method": run.method}
            for run, label in zip(runs, summary.labels(runs), strict=True)
        ],
        "loss": asdict(loss_figure(runs)),
        "widths": [asdict(width_figure(run)) for run in runs],
        "trees": [[asdict(tree) for tree in unit_trees(run)] for run in runs],
        "forecast": asdict(forecast_figure(runs)),
        "tradeoff": [asdict(metric) for metric in tradeoff_figure(runs)],
    }


def _asset(name: str) -> str:
    return files("splitgrow.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """A content policy by which our script and our style are used, and nothing else."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; "
        f"style-src 'sha256-{digest(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _embedded(value: object) -> str:
    """JSON that cannot end the block it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(runs: Sequence[Run]) -> str:
    """The summary; each cell knows its heading, for the phone."""
    metrics = summary.metric_names(runs)
    headings = ["Run", "Method", "Phases", "Parameters", "MACs", "Loss", *metrics]
    headings += ["Time", "Why it stopped"]
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(_line(i, row, headings) for i, row in enumerate(summary.rows(runs)))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _line(index: int, row: summary.Row, headings: Sequence[str]) -> str:
    key = f'<span class="key" data-run="{index}"></span>'
    name = f'<th scope="row">{key}{escape(row.label)}</th>'
    values = [row.method, row.phases, row.params, row.macs, row.loss, *row.metrics, row.time]
    cells = "".join(
        f'<td data-label="{escape(heading)}">{escape(value)}</td>'
        for heading, value in zip(headings[1:], [*values, row.stopped], strict=True)
    )
    return f"<tr>{name}{cells}</tr>"


def _settings(runs: Sequence[Run]) -> str:
    """What each run.json says, side by side, folded away."""
    columns = [dict(flat(run.settings)) for run in runs]
    keys = dict.fromkeys(key for column in columns for key in column)
    if not keys:
        return ""
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in summary.labels(runs))
    lines = "".join(_setting(key, [column.get(key, MISSING) for column in columns]) for key in keys)
    return (
        '<details><summary>Settings</summary><div class="scroll"><table class="plain">'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{lines}</tbody></table></div></details>"
    )


def _setting(key: str, values: Sequence[str]) -> str:
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>'


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as pairs: ``policy.fraction``, ``0.3``."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
