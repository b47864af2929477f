"""Write docs/rules.md, the table of supported operations, from the registry of rules.

python tools/rules_table.py          write the page
python tools/rules_table.py --check  exit with 1 if the page is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from splitgrow.rules import RULES, Rule

PAGE = Path(__file__).parent.parent / "docs" / "rules.md"

INTRODUCTION = """\
# Supported operations

What `find_units` knows about each ATen operation, one line per rule. This page is written by
`python tools/rules_table.py` from the registry in `src/splitgrow/rules`; do not edit it.

A unit passes through an operation that *carries* its index, and ends where the index is
*contracted* with a parameter. An operation that is not in this table is never guessed: whatever
enters it is refused, and `units.skipped` names the operation and the module. To add one, register
a rule with `splitgrow.rule`.
"""


def render() -> str:
    """The whole page."""
    families: dict[str, dict[str, list[Rule]]] = {}
    for rule in RULES.values():
        if rule.name.startswith("aten::"):
            rows = families.setdefault(rule.family, {})
            rows.setdefault(rule.propagate.__qualname__, []).append(rule)
    return "\n".join([INTRODUCTION, *(_section(name, families[name]) for name in sorted(families))])


def _section(family: str, rows: dict[str, list[Rule]]) -> str:
    lines = [
        f"## {family.capitalize()}",
        "",
        "| operations | what they do to a unit |",
        "|---|---|",
    ]
    for rules in rows.values():
        names = sorted(rule.name.removeprefix("aten::") for rule in rules)
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {listed} | {rules[0].summary.replace('``', '`')} |")
    return "\n".join([*lines, ""])


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != render())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
