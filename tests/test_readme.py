"""The documents are true: their Python examples run, their relative links lead somewhere.

The examples of one file run in order in one namespace, as a reader would type them. A block that
must not run (it needs a GPU, or hours) has the line `<!-- no-run: reason -->` before it and is
only compiled.
"""

import re
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
REQUIRED = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]

FENCE = re.compile(r"^\s*(?P<mark>`{3,}|~{3,})\s*(?P<language>[\w+-]*)(?P<rest>.*)$")
NO_RUN = re.compile(r"^\s*<!--\s*no-run\b:?(?P<reason>.*?)-->\s*$")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?(?P<inline>[^)\s>]+)|\b(?:src|href)=\"(?P<html>[^\"]+)\"")
DEFINITION = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(?P<target>[^\s>]+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, code, and the line its code starts at (from 1)."""

    language: str
    code: str
    line: int
    no_run: str | None  # the reason, where there is such a comment

    @property
    def is_python(self) -> bool:
        return self.language in {"python", "py", "python3"}


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a markdown text; a fence inside a block is part of its code."""
    found: list[Block] = []
    lines = text.splitlines()
    start, mark, language = 0, "", ""
    for number, line in enumerate(lines, start=1):
        fence = FENCE.match(line)
        if not fence:
            continue
        if not mark:
            start, mark, language = number, fence["mark"], fence["language"].lower()
        elif fence["mark"].startswith(mark) and not (fence["language"] or fence["rest"].strip()):
            code = textwrap.dedent("\n".join(lines[start : number - 1])) + "\n"
            found.append(Block(language, code, start + 1, _reason(lines[: start - 1])))
            mark = ""
    if mark:
        raise ValueError(f"line {start}: this block is never closed")
    return found


def _reason(before: list[str]) -> str | None:
    """The reason in the no-run comment that ends these lines, if one does."""
    last = next((line for line in reversed(before) if line.strip()), "")
    comment = NO_RUN.match(last)
    return comment["reason"].strip() if comment else None


def prose(text: str) -> str:
    """The text without code, where a bracket is not a link."""
    kept, mark = [], ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if fence and not mark:
            mark = fence["mark"]
        elif fence and fence["mark"].startswith(mark) and not fence["language"]:
            mark = ""
        elif not mark:
            kept.append(line)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", "\n".join(kept))


def links(text: str) -> Iterator[str]:
    """The targets of all links and images, in the order of their kind."""
    text = prose(text)
    for link in LINK.finditer(text):
        yield link["inline"] or link["html"]
    for definition in DEFINITION.finditer(text):
        yield definition["target"]


def anchors(text: str) -> set[str]:
    """The anchors of a text's headings, as they are made from their words."""
    unfenced = re.sub(r"^\s*(`{3,}|~{3,}).*?^\s*\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", unfenced, flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        twins = sum(1 for other in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
        found.add(f"{slug}-{twins}" if twins else slug)
    return found


def broken(document: Path, root: Path) -> list[str]:
    """The relative links of a document that lead nowhere, or out of the repository."""
    wrong = []
    for link in links(document.read_text(encoding="utf-8")):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link, flags=re.IGNORECASE):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (document.parent / path).resolve() if path else document
        if not (target.exists() and target.is_relative_to(root)) or (
            anchor
            and target.suffix == ".md"
            and anchor.lower() not in anchors(target.read_text(encoding="utf-8"))
        ):
            wrong.append(link)
    return wrong


def documents() -> list[Path]:
    """Every markdown file of the project; not what running or installing has left there."""
    skipped = {"build", "dist", "runs", "data", "node_modules", "venv"}
    return sorted(
        path
        for path in ROOT.rglob("*.md")
        if not any(
            part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts[:-1]
        )
    )


def run_examples(document: Path, module: types.ModuleType, folder: Path) -> int:
    """Run a document's Python blocks in order in the module; returns how many ran.

    The blocks are also written to a file in which every line has the number that it has in the
    document: tracebacks, and whatever reads its own source, then find the right line.
    """
    examples = [block for block in blocks(document.read_text(encoding="utf-8")) if block.is_python]
    script = folder / f"{document.stem}.py"
    script.write_text(_aligned(examples), encoding="utf-8")
    module.__file__ = str(script)
    ran = 0
    for block in examples:
        where = f"{document.name}:{block.line}"
        if block.no_run == "":
            pytest.fail(f"{where}: a no-run comment needs a reason: <!-- no-run: reason -->")
        try:
            code = compile("\n" * (block.line - 1) + block.code, str(script), "exec")
            if block.no_run is None:
                exec(code, module.__dict__)
                ran += 1
        except Exception as error:
            line = _line_of(error, script) or block.line
            message = f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"the example at {where} fails at {document.name}:{line}: {message}"
            ) from error
    return ran


def _aligned(examples: list[Block]) -> str:
    """The code of all blocks, each line at its own number."""
    source = ""
    for block in examples:
        source += "\n" * (block.line - 1 - source.count("\n")) + block.code
    return source


def _line_of(error: Exception, script: Path) -> int | None:
    """The last line of the script that an error passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(script):
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An empty importable module, and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    made = types.ModuleType("document_example")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.mark.parametrize("name", REQUIRED)
def test_document_exists(name: str) -> None:
    assert (ROOT / name).is_file(), f"{name} is missing"


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, module: types.ModuleType, tmp_path: Path) -> None:
    document = ROOT / name
    if not document.is_file():
        pytest.fail(f"{name} is missing, so its examples cannot be run")
    ran = run_examples(document, module, tmp_path)
    if name == "README.md":
        assert ran, "README.md has no Python example that runs"


def test_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from readme_tables import FILES, PAGES, TABLE, with_tables

    texts = [page.read_text() for page in PAGES]
    shown = [name for text in texts for _, name, _ in TABLE.findall(text)]
    assert sorted(shown) == sorted(name for name, path in FILES.items() if path.exists())
    assert [with_tables(text) for text in texts] == texts, "run python tools/readme_tables.py"


def test_constraints_tell_the_torch_of_all_results() -> None:
    files = [
        path for name in ("results", "benchmarks/results") for path in (ROOT / name).rglob("*.json")
    ]
    made_with = {v for path in files for v in re.findall(r'"torch": "(\d+\.\d+)', path.read_text())}
    told = set(re.findall(r"torch(?:==| )(\d+\.\d+)", (ROOT / "constraints.txt").read_text()))
    assert made_with == told


def test_relative_links_lead_somewhere() -> None:
    wrong = {str(path.relative_to(ROOT)): broken(path, ROOT) for path in documents()}
    assert {name: targets for name, targets in wrong.items() if targets} == {}


# --- the checks themselves, seen failing ----------------------------------------------------


def write(folder: Path, text: str) -> Path:
    document = folder / "DOC.md"
    document.write_text(textwrap.dedent(text), encoding="utf-8")
    return document


def test_blocks_share_a_namespace(module: types.ModuleType, tmp_path: Path) -> None:
    text = """\
        # A title
        ```python
        x = 1
        ```
        ```bash
        not python
        ```
        - in a list:
          ```py
          x += 1
          ```
        """
    assert run_examples(write(tmp_path, text), module, tmp_path) == 2
    assert module.x == 2


def test_failure_names_the_line(module: types.ModuleType, tmp_path: Path) -> None:
    text = """\
        # A title

        ```python
        x = 1
        x / 0
        ```
        """
    with pytest.raises(AssertionError, match=r"example at DOC\.md:4 fails at DOC\.md:5: ZeroDiv"):
        run_examples(write(tmp_path, text), module, tmp_path)


def test_no_run_is_compiled_only(module: types.ModuleType, tmp_path: Path) -> None:
    text = """\
        <!-- no-run: needs a GPU -->

        ```python
        raise SystemExit
        ```
        """
    assert run_examples(write(tmp_path, text), module, tmp_path) == 0
    bad = text.replace("raise SystemExit", "raise raise")
    with pytest.raises(AssertionError, match=r"DOC\.md:4: SyntaxError"):
        run_examples(write(tmp_path, bad), module, tmp_path)
    unexplained = text.replace(" needs a GPU", "")
    with pytest.raises(pytest.fail.Exception, match="needs a reason"):
        run_examples(write(tmp_path, unexplained), module, tmp_path)


def test_unclosed_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: this block is never closed"):
        blocks("text\n```python\nx = 1\n")


def test_broken_links_are_found(tmp_path: Path) -> None:
    text = """\
        # A title, twice
        [good](DOC.md) [good](#a-title-twice) [web](https://example.org) `[code](nowhere)`
        [bad](nowhere.md) [bad](#no-such-title) [out](../) ![bad](picture.png "title") [ref]

        [ref]: elsewhere.md
        ```python
        table[0](x)
        ```
        """
    found = broken(write(tmp_path, text), tmp_path.resolve())
    assert found == ["nowhere.md", "#no-such-title", "../", "picture.png", "elsewhere.md"]
