"""The report in a real browser: it draws, it answers, it can be read, wherever it is opened."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chromium
from fake_runs import FakeRun, Json, bare_history, write_history
from splitgrow.report import write_report

pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason="needs Chromium (Debian: apt-get install chromium)"
)

FIGURES = ("fig-loss", "fig-widths", "fig-lineage", "fig-forecast", "fig-tradeoff")
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740, "touch": True}
EVIL = '<img src=x onerror="boom()"></script><script>boom()</script>&lt;b&gt;'

# Marks that each figure of a run with splits must have.
MARKS = {
    "fig-loss": [".curve", ".split", ".before", ".after"],
    "fig-widths": [".bar", ".seed"],
    "fig-lineage": [".life", ".fork"],
    "fig-forecast": [".marker", ".ideal", ".close"],
    "fig-tradeoff": [".marker", ".joint"],
}

PROBES = Path(__file__).with_name("report_probes.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    with chromium.browser(tmp_path_factory.mktemp("profile")) as browser:
        yield chromium.Page(browser)


def report(root: Path, *runs: FakeRun) -> Path:
    return write_report([run.write(root) for run in runs], root / "report.html")


def one(root: Path) -> Path:
    return report(root, FakeRun())


def several(root: Path) -> Path:
    names = ["splitting", "random", "new", "net2net"]
    runs = [FakeRun(name=n, method=n, seed=k, quality=1 - k / 9) for k, n in enumerate(names)]
    return report(root, *runs)


def wide(root: Path) -> Path:
    """A net of sixteen layers with hundreds of neurons each, and long names."""
    units = {f"backbone.stages.{k}.blocks.0.conv_with_a_long_name": 32 for k in range(16)}
    return report(root, FakeRun(name="a rather long name of a run " * 3, units=units, phases=9))


def bare(root: Path) -> Path:
    return write_report([write_history(root / "bare", bare_history())], root / "report.html")


def single_phase(root: Path) -> Path:
    return report(root, FakeRun(phases=1, stopped="stable"))


def odd(root: Path) -> Path:
    """Nothing is as it should be: NaN, nulls, splits that raised the loss, one point of a curve."""
    history = FakeRun(phases=4, iterations=1).history()
    first, second, third, _ = history["phases"]
    first["split"] |= {"measured": None, "loss_after": None, "loss_before": None}
    second["split"] |= {"measured": 0.5, "predicted": float("nan"), "step": None}
    second |= {"params": None, "metrics": {"accuracy": float("nan")}, "curve": [[1, None]]}
    third["split"]["neurons"] = [
        {**event, "lambda": None, "predicted": None, "step": None}
        for event in third["split"]["neurons"]
    ]
    return write_report([write_history(root / "odd", history)], root / "report.html")


def added(root: Path) -> Path:
    """A method that adds neurons without a parent."""
    history = FakeRun(method="new", phases=1).history()
    for lineage in history["neurons"].values():
        last = len(lineage)
        lineage += [
            {"id": last + k, "parent": None, "born": k + 1, "ended": None, "place": last + k}
            for k in range(5)
        ]
    return write_report([write_history(root / "new", history)], root / "report.html")


def many(root: Path) -> Path:
    """More runs than there are colours."""
    return report(root, *(FakeRun(name=f"run {k}", seed=k, phases=3) for k in range(11)))


PAGES = [one, several, wide, bare, single_phase, odd, added, many]


def show(tab: chromium.Page, file: Path, window: Json, scheme: str = "light") -> None:
    tab.open(file, **window, scheme=scheme)
    tab.value(f"{PROBES}; globalThis.probes = probes; 0")


def ask(tab: chromium.Page, probe: str, *arguments: str) -> Any:
    """The answer of one of the probes in report_probes.js."""
    return tab.value(f"probes.{probe}({', '.join(map(json.dumps, arguments))})")


def count(tab: chromium.Page, selector: str) -> int:
    return tab.value(f"document.querySelectorAll({json.dumps(selector)}).length")


def press_button(tab: chromium.Page, selector: str, index: int = 0) -> None:
    tab.value(f"document.querySelectorAll({json.dumps(selector)})[{index}].click()")


def heading(tab: chromium.Page, figure: str) -> str:
    return ask(tab, "texts", f"#{figure} h2")[0]


def assert_quiet(tab: chromium.Page, file: Path) -> None:
    """No error, no warning, nothing asked for but the file itself."""
    assert tab.complaints() == []
    assert tab.requests() == [file.as_uri()]


@pytest.mark.parametrize("make", PAGES)
@pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_is_drawn_without_a_complaint(
    tab: chromium.Page, tmp_path: Path, make: Any, window: Json
) -> None:
    file = make(tmp_path)
    show(tab, file, window)
    for figure in FIGURES:
        assert heading(tab, figure), "a title"
        assert count(tab, f"#{figure} .caption") == 1
        assert count(tab, f"#{figure} svg, #{figure} .empty") >= 1, (
            "a drawing, or why there is none"
        )
    assert "NaN" not in tab.value("document.body.outerHTML.replace(/<script[^]*?<.script>/g, '')")
    assert "undefined" not in tab.value("document.body.innerText")
    assert_quiet(tab, file)


@pytest.mark.parametrize("make", PAGES)
def test_nothing_is_wider_than_a_phone(tab: chromium.Page, tmp_path: Path, make: Any) -> None:
    show(tab, make(tmp_path), PHONE)
    assert tab.value("document.documentElement.scrollWidth") == 360
    assert tab.value("innerWidth") == 360, "the browser did not zoom out to make room"
    assert ask(tab, "beyond") == []


@pytest.mark.parametrize("make", [several, wide, odd, added, many])
@pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_no_letter_is_cut_off_or_covered(
    tab: chromium.Page, tmp_path: Path, make: Any, window: Json
) -> None:
    show(tab, make(tmp_path), window)
    assert ask(tab, "cut") == []
    assert ask(tab, "clashes") == []


def test_long_names_of_layers_are_told_apart_on_a_phone(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, wide(tmp_path), PHONE)
    names = ask(tab, "texts", "#fig-widths text.name[text-anchor=end]")
    assert len(names) == 16
    assert names[3] == "…3…"
    assert len(set(names)) == 16


@pytest.mark.parametrize("make", [several, bare, many])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_both_schemes(
    tab: chromium.Page, tmp_path: Path, make: Any, scheme: str
) -> None:
    show(tab, make(tmp_path), DESKTOP, scheme)
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    found = ask(tab, "contrast")
    least = {"text": 4.5, "mark": 3.0}  # WCAG AA
    assert len(found) > (30 if make is bare else 200)
    assert [entry for entry in found if entry[1] < least[entry[0]]] == []
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, ground.strip("rgb()").split(","))) < 3 * 64
    assert dark == (scheme == "dark")


def test_every_figure_has_its_marks_and_named_axes(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, one(tmp_path), DESKTOP)
    for figure, selectors in MARKS.items():
        for selector in selectors:
            assert count(tab, f"#{figure} {selector}") > 0, f"{figure} {selector}"
        assert count(tab, f"#{figure} .x-name") >= 1
    assert count(tab, "#fig-loss .split") == 5
    assert count(tab, "#fig-loss .curve") == 6
    assert count(tab, "#fig-widths .seed") == 1 + 4, "in the key, and one for each layer"
    assert count(tab, "#fig-widths .bar") == 4 * 6
    assert count(tab, "#fig-forecast .plot .marker") == 5
    assert count(tab, "#fig-tradeoff .plot .marker") == 2 * 6
    assert count(tab, ".legend") == 0, "one run needs no legend"


def test_the_diagonal_is_where_both_axes_say_the_same(tab: chromium.Page, tmp_path: Path) -> None:
    """A tick of one axis and the same tick of the other meet on the line."""
    show(tab, one(tmp_path), DESKTOP)
    off = ask(tab, "diagonal")
    assert len(off) >= 2
    assert max(off) < 0.5


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("#fig-loss .after", ["split after phase 0", "loss before", "loss after", "measured"]),
        ("#fig-widths .bar:not(.seed)", ["features.0", "neurons added", "8 → "]),
        ("#fig-lineage .fork", ["Neuron #", "λ (lambda)", "step", "gain predicted", "became"]),
        ("#fig-forecast .plot .marker", ["split after phase 0", "predicted gain", "measured gain"]),
        ("#fig-tradeoff .plot .marker", ["mine, phase 0", "accuracy", "parameters", "MACs"]),
    ],
)
@pytest.mark.parametrize("how", ["mouse", "tap"])
def test_pointing_at_a_mark_tells_about_it(
    tab: chromium.Page, tmp_path: Path, selector: str, words: list[str], how: str
) -> None:
    file = one(tmp_path)
    show(tab, file, DESKTOP if how == "mouse" else PHONE)
    assert ask(tab, "tip") is None
    place = ask(tab, "middle", selector)
    (tab.point if how == "mouse" else tab.tap)(*place)
    said = ask(tab, "tip")
    assert said is not None
    assert [word for word in words if word not in said] == []
    assert ask(tab, "tipIsInside")
    (tab.point if how == "mouse" else tab.tap)(3, 3)
    assert ask(tab, "tip") is None
    assert_quiet(tab, file)


def test_what_is_shown_is_what_the_history_says(tab: chromium.Page, tmp_path: Path) -> None:
    run = FakeRun(units={"fc": 1}, phases=2, fraction=1.0)
    event = run.history()["phases"][0]["split"]["neurons"][0]
    show(tab, report(tmp_path, run), DESKTOP)
    tab.point(*ask(tab, "middle", "#fig-lineage .fork"))
    said = (ask(tab, "tip") or "").replace("−", "-")
    shown = dict(zip(said.split("\n")[1::2], said.split("\n")[2::2], strict=True))
    assert shown["became"] == "#1, #2"
    assert float(shown["λ (lambda)"]) == pytest.approx(event["lambda"], rel=1e-2)
    assert float(shown["step"]) == pytest.approx(event["step"], rel=1e-2)
    assert float(shown["gain predicted"]) == pytest.approx(-event["predicted"], rel=1e-2)


def test_the_keyboard_steps_through_the_marks(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, one(tmp_path), DESKTOP)
    ask(tab, "middle", "#fig-lineage svg[tabindex]")
    tab.value("document.querySelector('#fig-lineage svg[tabindex]').focus()")
    seen = []
    for _ in range(3):
        tab.press("ArrowRight")
        ask(tab, "frames")
        seen.append(ask(tab, "tip"))
    assert None not in seen
    assert len(set(seen)) == 3
    tab.press("Escape")
    assert ask(tab, "tip") is None


def test_pointing_at_a_neuron_shows_its_kin(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, one(tmp_path), DESKTOP)
    tab.point(*ask(tab, "middle", "#fig-lineage .fork"))
    ask(tab, "tip")
    assert count(tab, "#fig-lineage .kin") >= 3, "itself and two children at least"
    tab.point(3, 3)
    ask(tab, "tip")
    assert count(tab, ".kin, .hot") == 0


def test_any_layer_can_be_chosen(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, one(tmp_path), DESKTOP)
    for unit in ("features.0", "features.6"):
        ask(tab, "choose", "fig-lineage", "Layer", unit)
        assert heading(tab, "fig-lineage").startswith(f"Layer {unit}: ")


def test_hundreds_of_neurons_stay_legible(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, report(tmp_path, FakeRun(units={"fc": 200}, phases=8)), DESKTOP)
    few = count(tab, "#fig-lineage .fork")
    assert ask(tab, "rowGap") >= 13, "a line of text fits"
    press_button(tab, "#fig-lineage button")
    assert count(tab, "#fig-lineage .fork") > 10 * few
    assert ask(tab, "height", "#fig-lineage .tree") <= 700, "it scrolls within its frame"
    assert tab.value("document.querySelector('#fig-lineage .tree').scrollHeight") > 3000
    assert tab.complaints() == []


def test_a_split_can_be_looked_at_closely(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, one(tmp_path), DESKTOP)
    far = ask(tab, "height", "#fig-loss .drop")
    ask(tab, "choose", "fig-loss", "Show", "split after phase 2")
    assert count(tab, "#fig-loss .split") == 1
    assert ask(tab, "height", "#fig-loss .drop") > 2 * far


def test_a_run_can_be_hidden_in_all_figures(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, several(tmp_path), DESKTOP)
    assert count(tab, ".legend button") == 3 * 4
    before = [
        count(tab, f"#{f} .plot .run-1") for f in ("fig-loss", "fig-forecast", "fig-tradeoff")
    ]
    assert min(before) > 0
    press_button(tab, "#fig-tradeoff .legend button", 1)
    assert count(tab, ".plot .run-1") == 0
    assert count(tab, ".legend button[aria-pressed=false]") == 3
    for k in (0, 2, 3):
        press_button(tab, "#fig-loss .legend button", k)
    assert count(tab, ".plot .marker") == 0
    press_button(tab, "#fig-loss .legend button", 1)
    assert count(tab, ".plot .run-1") > 0
    assert tab.complaints() == []


def test_eleven_runs_have_eleven_looks(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, many(tmp_path), DESKTOP)
    looks = ask(tab, "looks", "#summary .key .marker")
    assert len(looks) == 11
    assert len(set(looks)) == 11


def test_the_metric_can_be_chosen(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, one(tmp_path), DESKTOP)
    names = "#fig-tradeoff .y-name"
    assert ask(tab, "texts", names) == ["accuracy", "accuracy"]
    ask(tab, "choose", "fig-tradeoff", "Metric", "loss on the scoring batches")
    assert [name.startswith("loss on the scoring") for name in ask(tab, "texts", names)] == [
        True,
        True,
    ]


def test_a_wide_range_gets_a_log_axis_and_a_narrow_one_does_not(
    tab: chromium.Page, tmp_path: Path
) -> None:
    names = "#fig-tradeoff .x-name"
    show(tab, report(tmp_path / "a", FakeRun(phases=8)), DESKTOP)
    assert ask(tab, "texts", names) == ["parameters (log scale)", "MACs (log scale)"]
    show(tab, report(tmp_path / "b", FakeRun(phases=2)), DESKTOP)
    assert ask(tab, "texts", names) == ["parameters", "MACs"]


def test_the_figures_follow_the_width_of_the_window(tab: chromium.Page, tmp_path: Path) -> None:
    show(tab, one(tmp_path), DESKTOP)
    metrics = {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    tab.send("Emulation.setDeviceMetricsOverride", **metrics)
    ask(tab, "frames")
    ask(tab, "frames")
    assert tab.value("document.documentElement.scrollWidth") == 500
    assert tab.value("document.querySelector('#fig-loss svg').clientWidth") < 500


def test_text_of_others_does_not_run(tab: chromium.Page, tmp_path: Path) -> None:
    history = FakeRun(name=EVIL, method=EVIL, units={EVIL: 4}, stopped=EVIL).history()
    for phase in history["phases"]:
        phase["metrics"] = {EVIL: phase["metrics"]["accuracy"]}
    run = write_history(tmp_path / "evil", history)
    (run / "run.json").write_text(json.dumps({EVIL: EVIL}))
    file = write_report([run, run], tmp_path / "report.html")
    show(tab, file, DESKTOP)
    tab.point(*ask(tab, "middle", "#fig-lineage .fork"))
    assert EVIL in (ask(tab, "tip") or "").replace("\n", "")
    assert count(tab, "img") == 0
    assert count(tab, "script") == 2
    assert_quiet(tab, file)


def test_a_script_that_is_not_ours_is_not_run(tab: chromium.Page, tmp_path: Path) -> None:
    """The content policy is a second wall: it would stop what the escaping let through."""
    file = one(tmp_path)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("</main>", "<script>window.boom = 1</script></main>"))
    show(tab, file, DESKTOP)
    assert tab.value("window.boom") is None
    assert any("Content Security Policy" in complaint for complaint in tab.complaints())
