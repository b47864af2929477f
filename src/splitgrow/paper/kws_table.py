"""Table 1 of the paper beside our own numbers, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from splitgrow.paper.curve_figures import LOOKS
from splitgrow.paper.curves import Jobs, group_of, name_of, std
from splitgrow.paper.jobs import FULL
from splitgrow.paper.kws_bench import GROWABLE

Row = dict[str, Any]
NUMBERS = ("accuracy", "params", "operations")

# As published: mean test accuracy of five rounds, parameters, operations.
PUBLISHED = {
    name: dict(zip(NUMBERS, numbers, strict=True))
    for name, numbers in {
        "DNN": (0.8694, 495_700, 1_000_000),
        "CNN": (0.9264, 476_700, 25_300_000),
        "BasicLSTM": (0.9362, 492_600, 47_900_000),
        "LSTM": (0.9411, 495_800, 48_400_000),
        "GRU": (0.9472, 498_000, 48_400_000),
        "CRNN": (0.9421, 485_000, 19_300_000),
        "DS-CNN": (0.9485, 413_700, 56_900_000),
        "splitting": (0.9536, 282_600, 39_200_000),
    }.items()
}
PLAIN = f"{GROWABLE}, finetune, relu"  # the group that the paper's row belongs to


def table1(jobs: Jobs, claims: Mapping[str, Any]) -> list[Row]:
    """The published rows, ours beside them, and below them what else was run.

    Args:
        jobs: of the study.
        claims: what ``kws_claims.claims`` found in them.
    """
    zoo = [
        {"net": name, "published": published, "ours": full_net(jobs, name)}
        for name, published in PUBLISHED.items()
        if name != "splitting"
    ]
    start = _mean_of([job for job in jobs if job["job"]["method"] == "bn" and _is_plain(job)])
    if start is not None:  # the same net, but for the gradient of sparsity
        zoo.append({"net": f"{GROWABLE}, before pruning", "published": None, "ours": start})
    within = [row for row in claims["reached"] if row["group"] == PLAIN]
    return [*zoo, *_grown(within, "paper"), *_grown(within, "small")]


def _is_plain(job: Mapping[str, Any]) -> bool:
    return name_of(group_of(job)) == PLAIN


def full_net(jobs: Jobs, arch: str) -> Row | None:
    """Mean over the seeds of a net of the zoo."""
    return _mean_of(
        [job for job in jobs if (job["job"]["arch"], job["job"]["method"]) == (arch, FULL)]
    )


def _mean_of(jobs: Jobs) -> Row | None:
    """Of the first net of each job."""
    nets = [job["points"][0] for job in jobs if job["points"]]
    if not nets:
        return None
    accuracies = [net["accuracy"] for net in nets]
    sizes = {name: mean(net[name] for net in nets) for name in NUMBERS[1:]}
    return {"accuracy": mean(accuracies), "deviation": std(accuracies), **sizes,
            "rounds": len(nets)}  # fmt: skip


def _grown(within: Sequence[Mapping[str, Any]], limit: str) -> list[Row]:
    """Of each method, the nets chosen within a size; the paper's row is there in any case."""
    rows = [
        {
            "net": f"{LOOKS[row['method']]['label']}, {row['size']}",
            "published": PUBLISHED["splitting"] if _is_published(row) else None,
            "ours": {name: row[name] for name in (*NUMBERS, "deviation", "rounds")},
        }
        for row in within
        if row["limit"] == limit
    ]
    if limit == "paper" and not any(row["published"] for row in rows):
        rows.insert(0, {"net": LOOKS["splitting"]["label"], "published": PUBLISHED["splitting"],
                        "ours": None})  # fmt: skip
    return rows


def _is_published(row: Mapping[str, Any]) -> bool:
    return (row["method"], row["limit"]) == ("splitting", "paper")


def to_markdown(rows: Sequence[Row]) -> str:
    """The table, and below it what its numbers are."""
    head = ["net", "published: test %", "params K", "ops M", "ours: test %", "params K", "ops M",
            "rounds"]  # fmt: skip
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for row in rows:
        ours = row["ours"]
        rounds = "" if ours is None else str(ours["rounds"])
        lines.append(_line([row["net"], *_cells(row["published"]), *_cells(ours), rounds]))
    note = (
        "Published: Table 1 of Liu et al. 2019. Ours: mean ± standard deviation over the rounds. "
        "Where a size is given, the net of each round is the one with the best validation accuracy "
        "among those of that size. Before pruning: the full net that pruning starts from, trained "
        "with its gradient of sparsity."
    )
    return "\n".join([*lines, "", note, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    deviation = found.get("deviation")
    spread = "" if deviation is None else f" ± {100 * deviation:.2f}"
    return [f"{100 * found['accuracy']:.2f}{spread}", f"{found['params'] / 1e3:.1f}",
            f"{found['operations'] / 1e6:.1f}"]  # fmt: skip
