"""What the report computes from the files of a run, and what it says when they are not there."""

import json
import math
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from fake_runs import FakeRun, Json, bare_history, write_history
from splitgrow.errors import InputError
from splitgrow.report import write_report
from splitgrow.report.curves import curve, loss_figure
from splitgrow.report.forecast import forecast_figure, is_close
from splitgrow.report.history import Run, read_run
from splitgrow.report.lineage import UnitTree, unit_tree, unit_trees
from splitgrow.report.page import figures, flat, page
from splitgrow.report.summary import headline, labels, lead, reason, rows
from splitgrow.report.tradeoff import LOSS, tradeoff_figure
from splitgrow.report.widths import width_figure
from splitgrow.report.words import brief, duration, short

EVIL = '</script><script>boom()</script><img src=x onerror="boom()">&amp;\u2028{{data}}'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(FakeRun().write(tmp_path))


def read(tmp_path: Path, **changes: object) -> Run:
    return read_run(write_history(tmp_path / "bare", bare_history(**changes)))


def phase(number: int = 0, **changes: object) -> Json:
    return {**bare_history()["phases"][0], "phase": number, **changes}


def split(**changes: object) -> Json:
    both = {"predicted": -0.1, "measured": -0.1, "loss_before": 1.0, "loss_after": 0.9}
    return {"step": 0.1, "relative": True, **both, "parity": 0.0, "neurons": [], **changes}


# --- reading ------------------------------------------------------------------------------


def test_the_newest_whole_phase_is_read(tmp_path: Path) -> None:
    run = FakeRun(phases=12).write(tmp_path)
    (run / "phase-0012.tmp").mkdir()
    (run / "phase-0012.tmp" / "history.json").write_text("half a fi")
    (run / "phase-0013").mkdir()  # no history in it
    assert [p.number for p in read_run(run).phases] == list(range(12))
    assert read_run(run).stopped == "params"


def test_what_a_split_made_is_newer_than_what_it_split(tmp_path: Path) -> None:
    run = FakeRun(phases=3).write(tmp_path)
    shutil.rmtree(run / "phase-0002")  # it was interrupted in the training of phase 2
    assert [len(read_run(run).phases), len(read_run(run).splits)] == [2, 2]
    shutil.rmtree(run / "phase-0001-grown")
    assert [len(read_run(run).phases), len(read_run(run).splits)] == [2, 1]


def test_phases_are_ordered_by_number_not_by_name(tmp_path: Path) -> None:
    run = write_history(tmp_path / "r", bare_history(name="old"), 9999)
    write_history(run, bare_history(name="new"), 10000)
    assert read_run(run).name == "new"


def test_numbers_that_are_none_of_the_kind_are_missing(tmp_path: Path) -> None:
    broken = phase(
        params=math.nan,
        macs="many",
        loss=math.inf,
        metrics={"accuracy": math.nan, "ok": True, "f1": 0.5},
        curve=[[0, 1.0], [1, math.nan], [2, None], [3, -math.inf]],
    )
    only = read(tmp_path, phases=[broken]).last
    assert (only.params, only.macs, only.loss) == (None, None, None)
    assert only.metrics == {"accuracy": None, "ok": None, "f1": 0.5}
    assert only.curve == ((0, 1.0), (1, None), (2, None), (3, None))


def test_a_history_may_leave_out_almost_everything(tmp_path: Path) -> None:
    sparse = {"format": "splitgrow-history-1", "phases": [{}, {"split": {}}, {}]}
    run = read_run(write_history(tmp_path / "sparse", sparse))
    assert (run.name, run.method, run.stopped) == ("sparse", "unknown", None)
    assert [p.number for p in run.phases] == [0, 1, 2]
    assert len(run.splits) == 1
    assert "How sparse grew" in page([run])


def message(runs: list[Path], target: Path) -> str:
    with pytest.raises(InputError) as caught:
        write_report(runs, target)
    assert not target.exists()
    return str(caught.value)


def test_a_directory_without_a_phase_is_named_with_the_way_out(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    said = message([empty], tmp_path / "r.html")
    assert str(empty) in said
    assert "no whole phase" in said
    assert "run_dir" in said


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = message([tmp_path / "gone"], tmp_path / "r.html")
    assert str(tmp_path / "gone") in said
    assert "no such directory" in said


def test_who_names_the_parent_of_runs_is_told_the_runs(tmp_path: Path) -> None:
    a, b = FakeRun(name="a").write(tmp_path / "runs"), FakeRun(name="b").write(tmp_path / "runs")
    assert f"Name the runs inside it: {a} {b}." in message([tmp_path / "runs"], tmp_path / "r.html")


def test_who_names_a_phase_is_told_the_run(tmp_path: Path) -> None:
    run = FakeRun().write(tmp_path)
    assert f"name {run}." in message([run / "phase-0000"], tmp_path / "r.html")


def test_all_directories_that_fail_are_named(tmp_path: Path) -> None:
    good = FakeRun().write(tmp_path)
    said = message([tmp_path / "x", good, tmp_path / "y"], tmp_path / "r.html")
    assert str(tmp_path / "x") in said
    assert str(tmp_path / "y") in said


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a history of the format 'splitgrow-history-1'"),
        ('{"format": "splitgrow-history-9"}', "Read the run with the version"),
        ('{"format": "splitgrow-history-1"}', "damaged"),
        ('{"format": "splitgrow-history-1", "phases": [7]}', "damaged"),
        ('{"format": "splitgrow-history-1", "phases": [{"curve": [[]]}]}', "damaged"),
        ('{"format": "splitgrow-history-1", "phases": []}', "no phase"),
    ],
)
def test_a_damaged_history_is_named(tmp_path: Path, text: str, cause: str) -> None:
    run = write_history(tmp_path / "r", {})
    (run / "phase-0000" / "history.json").write_text(text)
    said = message([run], tmp_path / "r.html")
    assert cause in said
    assert str(run) in said


def test_no_run_is_an_error(tmp_path: Path) -> None:
    assert "at least one run" in message([], tmp_path / "r.html")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = message([FakeRun().write(tmp_path)], tmp_path / "file" / "r.html")
    assert str(tmp_path / "file" / "r.html") in said


# --- the table ----------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_run(tmp_path: Path) -> None:
    phases = [
        phase(0, params=100, macs=2_000_000, loss=0.5, metrics={"accuracy": 0.5}),
        phase(1, params=250, macs=4_500_000, loss=0.25, metrics={"accuracy": 0.75}),
    ]
    grown = read(tmp_path, phases=phases, stopped="macs")
    (row,) = rows([grown])
    assert (row.label, row.method, row.phases) == ("bare", "splitting", "2")
    assert (row.params, row.macs, row.loss) == ("100 → 250", "2M → 4.5M", "0.5 → 0.25")
    assert (row.metrics, row.stopped) == (("0.5 → 0.75",), "no further split fits the MAC budget")
    assert headline([grown]) == "How bare grew"
    assert lead([grown]) == (
        "The network grew from 100 to 250 parameters (2.5 times as many) in 2 phases; "
        "accuracy went from 0.5 to 0.75. Why it stopped: no further split fits the MAC budget."
    )


def test_every_reason_has_words_and_an_unknown_one_is_shown(run: Run) -> None:
    known = ["phases", "params", "macs", "metric", "stable", "refused"]
    said = [reason(replace(run, stopped=word)) for word in known]
    assert len(set(said)) == 6
    assert not set(said) & set(known)
    assert reason(replace(run, stopped="earthquake")) == "earthquake"
    assert reason(replace(run, stopped=None, settings={})) == "not finished"
    assert reason(replace(run, stopped=None, settings={"status": "running"})) == (
        "not finished (running)"
    )


def test_runs_of_one_name_are_told_apart(run: Run) -> None:
    other = replace(run, directory=Path("elsewhere/b"))
    assert labels([run, replace(run, name="x")]) == ["mine", "x"]
    assert labels([run, other, other]) == ["mine (mine)", "mine (b)", "mine (b) #2"]


def test_metrics_of_different_runs_get_their_own_columns(tmp_path: Path) -> None:
    a = read(tmp_path, phases=[phase(metrics={"accuracy": 0.5})])
    b = read(tmp_path, phases=[phase(metrics={"f1": 0.25})])
    assert [row.metrics for row in rows([a, b])] == [("0.5", "–"), ("–", "0.25")]


def test_numbers_are_written_for_people() -> None:
    assert [brief(n) for n in (None, 7, 12_345, 14_472_000, 28_319_544_000)] == [
        "–", "7", "12,345", "14.5M", "28.3G",
    ]  # fmt: skip
    assert [short(x) for x in (None, 0.123456, -0.5, -1e-5)] == ["–", "0.1235", "−0.5", "−1e-05"]
    assert [duration(s) for s in (0.04, 42, 200, 7500)] == [
        "0.0 s",
        "42 s",
        "3 min 20 s",
        "2 h 05 min",
    ]


# --- figure 1: loss -----------------------------------------------------------------------


def test_a_short_curve_is_kept_point_by_point(tmp_path: Path) -> None:
    points = [[5, 3.0], [6, math.nan], [7, 1.0]]
    drawn = curve(read(tmp_path, phases=[phase(curve=points)]))
    assert (drawn.each, drawn.missing) == (1, 1)
    assert (drawn.segments[0].x, drawn.segments[0].mean) == ((5, 7), (3.0, 1.0))


def test_a_long_curve_keeps_its_mean_and_its_extremes(tmp_path: Path) -> None:
    first = [[k, float(k % 10)] for k in range(5_000)]
    second = [[5_000 + k, 100.0] for k in range(3)]
    run = read(tmp_path, phases=[phase(0, curve=first, split=split()), phase(1, curve=second)])
    drawn = curve(run, points=500)
    early, late = drawn.segments
    assert len(early.x) + len(late.x) <= 500
    assert (min(early.low), max(early.high)) == (0.0, 9.0)
    assert sum(early.mean) / len(early.mean) == pytest.approx(4.5, abs=0.05)
    assert late.mean == (100.0,), "no point may span a split"


def test_a_cliff_stands_at_the_end_of_its_phase(run: Run) -> None:
    cliffs = curve(run).cliffs
    assert [c.x for c in cliffs] == [299, 599, 899, 1199, 1499]
    assert [c.phase for c in cliffs] == [0, 1, 2, 3, 4]
    for cliff, (_, made) in zip(cliffs, run.splits, strict=True):
        assert (cliff.before, cliff.after) == (made.before, made.after)
        assert cliff.neurons == len(made.neurons)


def test_without_any_curve_a_cliff_has_no_place(tmp_path: Path) -> None:
    run = read(tmp_path, phases=[phase(split=split())])
    assert curve(run).segments == ()
    assert [c.x for c in curve(run).cliffs] == [None]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ([], "The training loss; no split has been made yet"),
        ([-0.1], "The loss fell at the split"),
        ([0.1], "The loss did not fall at the split"),
        ([-0.1, 0.0, -0.2], "The loss fell at 2 of 3 splits"),
        ([-0.1, None, -0.2], "The loss fell at 2 of 2 measured splits"),
        ([None], "The training loss and 1 split"),
    ],
)
def test_the_first_title_counts_the_splits(
    tmp_path: Path, changes: list[float | None], finding: str
) -> None:
    phases = [phase(k, split=split(measured=change)) for k, change in enumerate(changes)]
    assert loss_figure([read(tmp_path, phases=[*phases, phase(9)])]).finding == finding


def test_the_first_title_counts_the_splits_of_each_run(run: Run, tmp_path: Path) -> None:
    rose = read(tmp_path, phases=[phase(split=split(measured=0.1)), phase(1, split=split())])
    assert loss_figure([run, rose]).finding == (
        "Splits that lowered the loss: mine 5 of 5, bare 1 of 2"
    )
    assert loss_figure([run, rose] * 3).finding == "The loss fell at 18 of 21 splits"


# --- figure 2: widths ---------------------------------------------------------------------


def widths(tmp_path: Path, *steps: dict[str, int]) -> tuple[str, dict[str, tuple[int | None, ...]]]:
    phases = [phase(k, widths=step) for k, step in enumerate(steps)]
    figure = width_figure(read(tmp_path, phases=phases))
    return figure.finding, {layer.name: layer.widths for layer in figure.layers}


def test_every_layer_has_its_width_in_every_phase(tmp_path: Path) -> None:
    finding, layers = widths(tmp_path, {"b": 4, "a": 2}, {"b": 5, "a": 7, "late": 1})
    assert layers == {"b": (4, 5), "a": (2, 7), "late": (None, 1)}
    assert list(layers) == ["b", "a", "late"], "the order of the model, not of the alphabet"
    assert finding == "Layer a grew the most: from 2 to 7 neurons"


@pytest.mark.parametrize(
    ("steps", "finding"),
    [
        ([{}], "No layer can grow"),
        ([{"a": 2}, {"a": 2}], "No layer has grown yet"),
        ([{"a": 2}, {"a": 3}], "Layer a grew from 2 to 3 neurons"),
        (
            [{"a": 2, "b": 5, "c": 1}, {"a": 4, "b": 7, "c": 1}],
            "2 of 3 layers grew the most: by 2 neurons each",
        ),
        ([{"a": 2, "b": 5}, {"a": 3, "b": 6}], "All 2 layers grew by 1 neuron"),
    ],
)
def test_the_second_title_names_what_grew(
    tmp_path: Path, steps: list[dict[str, int]], finding: str
) -> None:
    assert widths(tmp_path, *steps)[0] == finding


# --- figure 3: lineage --------------------------------------------------------------------


def neuron(identity: int, parent: int | None, born: int, ended: int | None) -> Json:
    return {"id": identity, "parent": parent, "born": born, "ended": ended, "place": 0}


def one_tree(tmp_path: Path, neurons: list[Json], phases: list[Json] | None = None) -> UnitTree:
    (tree,) = unit_trees(read(tmp_path, neurons={"fc": neurons}, phases=phases or [phase()]))
    return tree


def test_children_lie_beside_each_other_and_parents_between_them(tmp_path: Path) -> None:
    neurons = [neuron(0, None, 0, 0), neuron(1, 0, 1, 1), neuron(2, 0, 1, None)]
    neurons += [neuron(3, 1, 2, None), neuron(4, 1, 2, None)]
    event = {"unit": "fc", "parent": 0, "children": [1, 2], "lambda": -3.0, "step": 0.1}
    phases = [phase(0, split=split(neurons=[{**event, "predicted": -0.2}])), phase(1), phase(2)]
    tree = one_tree(tmp_path, neurons, phases)
    (family,) = tree.families
    assert (family.founder, family.rows, tree.phases) == (0, 3, 3)
    placed = {node.id: node.row for node in family.nodes}
    assert placed == {3: 0.0, 4: 1.0, 2: 2.0, 1: 0.5, 0: 1.25}
    root = family.nodes[0]
    assert (root.children, root.lambda_, root.step, root.predicted) == ((1, 2), -3.0, 0.1, -0.2)
    assert tree.finding == "Layer fc: 1 neuron became 3"


def test_neurons_that_never_split_are_counted_by_their_phase(tmp_path: Path) -> None:
    neurons = [neuron(k, None, 0, None) for k in range(100)]
    neurons += [neuron(100 + k, None, 3, None) for k in range(2)]
    tree = one_tree(tmp_path, neurons)
    assert tree.families == ()
    assert [(q.born, q.count) for q in tree.quiet] == [(0, 100), (3, 2)]
    assert tree.finding == "Layer fc: 100 neurons became 102, 2 of them added anew"
    assert tree.phases == 4


def test_nothing_split_is_said(tmp_path: Path) -> None:
    assert (
        one_tree(tmp_path, [neuron(0, None, 0, None)]).finding
        == "Layer fc: 1 neuron, none split yet"
    )


def test_the_largest_families_come_first(run: Run) -> None:
    for tree in unit_trees(run):
        sizes = [family.rows for family in tree.families]
        assert sizes == sorted(sizes, reverse=True)


def test_every_neuron_is_in_one_place(run: Run) -> None:
    for tree in unit_trees(run):
        drawn = [node.id for family in tree.families for node in family.nodes]
        drawn += [identity for group in tree.quiet for identity in group.ids]
        assert sorted(drawn) == [n.id for n in run.neurons[tree.unit]]
        alive = sum(f.rows for f in tree.families) + sum(q.count for q in tree.quiet)
        assert alive == run.last.widths[tree.unit]


def test_a_lineage_that_bites_its_tail_ends(tmp_path: Path) -> None:
    neurons = [neuron(0, 1, 0, None), neuron(1, 0, 0, None), neuron(2, 99, 0, None)]
    tree = one_tree(tmp_path, [*neurons, neuron(2, 0, 0, None)])
    assert tree.families == ()
    assert [q.ids for q in tree.quiet] == [(2,)]


def test_a_very_deep_family_is_drawn() -> None:
    from splitgrow.report.history import Neuron

    depth = 5_000
    line = [Neuron(k, k - 1 if k else None, k, k) for k in range(depth)]
    tree = unit_tree("fc", line, {}, depth)
    assert len(tree.families[0].nodes) == depth


# --- figure 4: predicted and measured -----------------------------------------------------


def test_gains_are_minus_the_changes(run: Run) -> None:
    figure = forecast_figure([run])
    made = [(-s.predicted, -s.measured) for _, s in run.splits if s.predicted and s.measured]
    assert [(p.predicted, p.measured) for p in figure.points] == made
    assert figure.left_out == ""
    close = sum(is_close(point) for point in figure.points)
    assert figure.finding == f"The prediction was within a factor of 2 for {close} of 5 splits"


def test_splits_that_a_log_axis_cannot_show_are_named(tmp_path: Path) -> None:
    splits = [
        split(),
        split(measured=None),
        split(predicted=None),
        split(measured=0.1),
        split(measured=0.0),
        split(predicted=0.0),
        split(predicted=math.nan),
    ]
    phases = [phase(k, split=each) for k, each in enumerate(splits)]
    figure = forecast_figure([read(tmp_path, phases=phases)])
    assert len(figure.points) == 1
    assert figure.left_out == (
        "Not drawn: 6 splits (1 not measured, 2 without a prediction, "
        "2 did not lower the loss, 1 predicted no gain)."
    )


@pytest.mark.parametrize(("measured", "close"), [(-0.051, 1), (-0.049, 0), (-0.19, 1), (-0.21, 0)])
def test_close_is_within_a_factor_of_two(tmp_path: Path, measured: float, close: int) -> None:
    figure = forecast_figure([read(tmp_path, phases=[phase(split=split(measured=measured))])])
    assert figure.finding.endswith(f"for {close} of 1 split")


# --- figure 5: metric against size --------------------------------------------------------


def test_metrics_and_the_loss_can_be_chosen(run: Run, tmp_path: Path) -> None:
    other = read(tmp_path, phases=[phase(metrics={"f1": 0.5}, params=10)])
    figure = tradeoff_figure([run, other])
    assert [m.name for m in figure] == ["accuracy", "f1", LOSS]
    assert [len(points) for points in figure[0].runs] == [6, 0]
    assert [len(points) for points in figure[1].runs] == [0, 1]
    point = figure[1].runs[1][0]
    assert (point.phase, point.params, point.macs, point.value) == (0, 10, None, 0.5)
    assert figure[1].finding == "The f1 is 0.5"


def test_a_metric_that_was_never_a_number_is_left_out(tmp_path: Path) -> None:
    assert tradeoff_figure([read(tmp_path, phases=[phase(metrics={"f1": math.nan})])]) == ()


# --- the page -----------------------------------------------------------------------------


def embedded(text: str) -> Json:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_report_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    runs = [FakeRun(name="a").write(tmp_path), FakeRun(name="b").write(tmp_path)]
    file = write_report(runs, tmp_path / "new" / "r.html")
    assert file == tmp_path / "new" / "r.html"
    assert [p.name for p in file.parent.iterdir()] == ["r.html"], "no temporary file is left"
    text = file.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, not an address to fetch"
    assert "{{" not in text
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src|@import|url\(", text)


def test_a_directory_gets_a_report_html(tmp_path: Path) -> None:
    assert write_report([FakeRun().write(tmp_path)], tmp_path) == tmp_path / "report.html"


def test_a_report_replaces_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("old")
    write_report([FakeRun().write(tmp_path)], tmp_path / "r.html")
    assert "How mine grew" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_the_data_in_the_page_is_that_of_the_figures(run: Run) -> None:
    assert embedded(page([run])) == json.loads(json.dumps(figures([run])))


def test_text_of_others_is_never_markup(tmp_path: Path) -> None:
    history = FakeRun(name=EVIL, method=EVIL, units={EVIL: 4}, stopped=EVIL).history()
    for each in history["phases"]:
        each["metrics"] = {EVIL: 0.5}
    directory = write_history(tmp_path / "evil", history)
    (directory / "run.json").write_text(json.dumps({EVIL: {EVIL: EVIL}}))
    text = page([read_run(directory)])
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert "<img" not in text
    assert embedded(text)["runs"][0]["label"] == EVIL, "it is shown as it is"
    assert f"How {EVIL} grew" in unescape(text)


def test_settings_are_shown_flat(run: Run) -> None:
    pairs = dict(flat({"seed": 0, "policy": {"fraction": 0.3, "caps": {}}, "until": None}))
    assert pairs == {"seed": "0", "policy.fraction": "0.3", "policy.caps": "{}", "until": "null"}
    assert '<th scope="row">policy.fraction</th><td>0.3</td>' in page([run])
