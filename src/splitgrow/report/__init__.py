"""One self-contained HTML page about one or several runs: open it anywhere, send it to anyone.

``write_report`` reads the run directories (``history``), computes what each figure shows
(``summary``, ``curves``, ``widths``, ``lineage``, ``forecast``, ``tradeoff``) and puts it all into
one file (``page``). The figures are drawn in the browser by the scripts in ``assets``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitgrow.errors import InputError
from splitgrow.files import write_file
from splitgrow.report.history import Run, read_run
from splitgrow.report.page import page

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], target: Path) -> Path:
    """Write the report of some runs as one HTML file that needs nothing else.

    Args:
        runs: Run directories, in the order in which the report names them.
        target: The file to write. A directory gets a ``report.html``.

    Returns:
        The path of the file.

    Raises:
        InputError: A directory is not a run, has no whole phase or cannot be read, or the file
            cannot be written. All directories that fail are named.
    """
    if not runs:
        raise InputError("report: no run was given. Name at least one run directory.")
    text = page(_read_all([Path(run) for run in runs]))
    target = Path(target)
    file = target / "report.html" if target.is_dir() else target
    _write(file, text)
    return file


def _read_all(directories: Sequence[Path]) -> list[Run]:
    """Read every run; where several cannot be read, say so of all of them."""
    runs, problems = [], []
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    return runs


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text.encode())
    except OSError as error:
        raise InputError(
            f"{file}: the report cannot be written ({error.strerror}). Name another file."
        ) from error
