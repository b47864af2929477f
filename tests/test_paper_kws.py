"""The study on Speech Commands: what each job trains, counts and keeps, on tiny nets and noise."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from helpers_jobs import Killed, column, killed_at, remembered, timeless
from splitgrow.errors import InputError
from splitgrow.paper import (
    job_claims,
    job_runs,
    job_study,
    kws,
    kws_bench,
    kws_cli,
    kws_files,
    kws_kept,
)
from splitgrow.paper.jobs import GROWN, METHODS
from splitgrow.paper.kws import Job, best, order, study, summary, tables
from splitgrow.paper.kws_bench import Bench, Setting, accuracy, build
from splitgrow.paper.results import rounded
from splitgrow.paper.screen import screen
from splitgrow.paper.speech import (
    BANDS,
    CLIP,
    FRAMES,
    LogMel,
    encode,
    recordings,
    scaled,
    shift_waves,
)
from splitgrow.paper.speech_parts import (
    SILENCE,
    UNKNOWN,
    SpeechData,
    SpeechPart,
    digest,
    official_shares,
)
from splitgrow.phase import Phase
from splitgrow.zoo.kws import HELLO_EDGE, operations

TINY = Setting(
    epochs=2, steps=3, full_phases=2, batch=16, rate=0.01, scored=32, scored_batch=16, width=4,
    phases=2, largest=0.9,
)  # fmt: skip
CPU = torch.device("cpu")
needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs the extra export",
)
COMMITTED = Path(__file__).parent.parent / "results" / "paper" / "kws"
TINY_BUT_LONGER = asdict(TINY) | {"epochs": 9}
POINT = {"params", "macs", "operations", "accuracy", "validation", "loss", "epochs", "widths",
         "seconds", "split", "finished"}  # fmt: skip
DSCNN = "DS-CNN"


def clips(folder: Path | None = None) -> SpeechData:
    """Noise around a band of each class; no two clips are the same. Unknown words abound."""
    generator = torch.Generator().manual_seed(3)

    def part(count: int, unknown: int) -> SpeechPart:
        labels = torch.cat([torch.arange(count) % 12, torch.full((unknown,), UNKNOWN)])
        codes = torch.randint(0, 60, (len(labels), FRAMES, BANDS), generator=generator)
        loud = torch.arange(BANDS) // 3 == labels.view(-1, 1)
        codes += 100 * loud.unsqueeze(1)
        return SpeechPart(codes.to(torch.uint8), labels)

    return SpeechData(part(96, 40), part(48, 30), part(36, 0))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DS-CNN that is full at 8 channels."""
    monkeypatch.setattr(kws_bench, "DS_CNN_WIDTHS", (8,) * 6)
    monkeypatch.setattr(job_study, "measured", remembered)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose jobs are done once for several tests."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(TINY, clips(), CPU)


def done(job: Job, folder: Path, setting: Setting = TINY) -> dict[str, Any]:
    made = order(setting, data=folder, folder=folder, device="cpu", read=clips)
    return job_runs.run_job(job, made)


# --- nets ---------------------------------------------------------------------------------------


def widths(net: nn.Module) -> set[int]:
    return {m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)}


def test_sizes() -> None:
    assert widths(build(DSCNN, "seed")) == {16}
    assert widths(build(DSCNN, 1.3**2)) == {27}
    full = build(DSCNN, "full")
    assert widths(full) == {276}
    assert sum(p.numel() for p in full.parameters()) == 413_736
    assert isinstance(build("DNN", "full"), HELLO_EDGE["DNN"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet", "seed"), "DNN, CNN"),
        (("GRU", "seed"), "GRU is there at full size only"),
        ((DSCNN, "large"), "a number"),
        ((DSCNN, 0.01), "leaves none"),
    ],
)
def test_wrong_nets(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(*arguments)


# --- data and training --------------------------------------------------------------------------


def rows(codes: Tensor) -> set[bytes]:
    return {clip.numpy().tobytes() for clip in codes}


def test_clips_are_drawn_in_their_shares(bench: Bench) -> None:
    labels = bench.train_part.labels
    drawn = bench._drawn(1000, torch.rand((), dtype=torch.float64))
    found = torch.bincount(labels[drawn], minlength=12)
    assert abs(int(found[SILENCE]) - 80) <= 1
    assert abs(int(found[UNKNOWN]) - 80) <= 1
    times = torch.bincount(drawn, minlength=len(labels))
    assert int(times.min()) > 0  # none is left out
    for label in range(12):
        each = times[labels == label]
        assert int(each.max() - each.min()) <= 1
    ends = (bench._drawn(7, offset) for offset in (0.0, 1.0))
    assert all(0 <= int(index) < len(labels) for index in torch.cat(list(ends)))


def test_only_the_training_part_is_trained_and_scored_on(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[bytes] = set()

    def recorded(codes: Tensor, most: int) -> Tensor:
        assert most == TINY.shift
        seen.update(rows(codes))
        return codes

    data = clips()
    monkeypatch.setattr(kws_bench, "shift_frames", recorded)
    bench = Bench(replace(TINY, steps=40), data, CPU)
    bench.train(build(DSCNN, "seed", 4), Phase())
    assert seen == rows(data.train.codes)
    everything, _ = bench._inputs(data.train)
    scored = torch.cat([batch for batch, _ in bench.scored])
    assert len(scored) == TINY.scored
    nearest = torch.cdist(scored.flatten(1), everything.flatten(1)).min(1).values
    assert nearest.max() < 0.05  # other batches round differently; other clips are far away
    others = torch.cat([bench.test[0], bench.validation[0]]).flatten(1)
    assert torch.cdist(scored.flatten(1), others).min() > 1


def test_noise_is_the_silence_to_learn_from(bench: Bench) -> None:
    assert len(bench.noise) == 8
    assert rows(bench.noise.add(80).mul(2).to(torch.uint8)) == rows(clips().silence)


def test_inputs_are_changed_each_time(bench: Bench) -> None:
    index = torch.arange(16)
    first, second = bench.changed(index), bench.changed(index)
    assert first.shape == (16, 1, FRAMES, 10)
    assert not torch.equal(first, second)
    still = Bench(replace(TINY, shift=0, chance=0.0), clips(), CPU)
    plain, _ = still._inputs(still.train_part.rows(index))
    torch.testing.assert_close(still.changed(index), plain, atol=1e-3, rtol=1e-3)


def spoken() -> SpeechData:
    """Clips with waveforms: a tone for each class, and noise between them."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(36) % 12
    tones = torch.sin(torch.arange(CLIP) * (0.05 + 0.1 * labels.view(-1, 1)))
    hiss = 0.01 * torch.randn(len(labels), CLIP, generator=generator)
    waves = ((0.3 * tones + hiss) * 32_767).to(torch.int16)
    part = SpeechPart(encode(LogMel()(scaled(waves))), labels, waves)
    noise = (3000 * torch.randn(40_000, generator=generator)).to(torch.int16)
    return SpeechData(part, part, part, recordings([noise]))


def test_waveforms_are_changed_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.arange(16)
    still = Bench(replace(TINY, shift=0, chance=0.0), spoken(), CPU)
    plain, _ = still._inputs(still.train_part.rows(index))
    assert (still.changed(index) - plain).abs().max() < 0.2  # which are rounded to 0.5 dB
    bench = Bench(replace(TINY, chance=1.0, volume=1.0), spoken(), CPU)
    for name in ("shift_frames", "mix_features"):
        monkeypatch.setattr(kws_bench, name, None)
    shifted: list[int] = []

    def recorded(waves: Tensor, most: int) -> Tensor:
        shifted.append(most)
        return shift_waves(waves, most)

    monkeypatch.setattr(kws_bench, "shift_waves", recorded)
    first, second = bench.changed(index), bench.changed(index)
    assert shifted == [TINY.shift * 320] * 2
    assert first.shape == (16, 1, FRAMES, 10)
    assert (first - second).abs().mean() > 0.1
    assert (first - plain).abs().mean() > 0.1
    torch.manual_seed(0)
    net = build(DSCNN, "seed", 4)
    bench.train(net, Phase())
    assert all(p.isfinite().all() for p in net.parameters())


def test_validation_has_the_official_shares(bench: Bench) -> None:
    _, labels = bench.validation
    assert len(labels) == len(official_shares(clips().val).labels)
    assert (labels == UNKNOWN).sum() == (labels == SILENCE).sum() == 4
    assert len(bench.test[1]) == 36


def test_accuracy_is_the_share_that_is_right(bench: Bench) -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.eye(12)[[3] * len(x)]

    assert accuracy(Always(), *bench.test) == pytest.approx(3 / 36)


def test_some_of_the_clips() -> None:
    few = Bench(replace(TINY, clips=50, tested=20), clips(), CPU)
    assert [len(few.train_part.labels), len(few.test[1]), len(few.validation[1])] == [50, 20, 20]
    with pytest.raises(InputError, match="at least one clip"):
        Bench(replace(TINY, tested=0), clips(), CPU)


def test_a_net_that_does_not_bear_the_rate_has_a_lower_one() -> None:
    fast, slow = (Bench(replace(TINY, rate=rate), clips(), CPU) for rate in (1e-2, 1e-3))
    rates = {arch: fast.highest_rate(build(arch, "full")) for arch in HELLO_EDGE}
    assert {arch for arch, rate in rates.items() if rate < 1e-2} == {"LSTM"}
    assert slow.highest_rate(build("LSTM", "full")) == 1e-3


def test_it_learns(bench: Bench) -> None:
    longer = Bench(replace(TINY, steps=60), clips(), CPU)
    torch.manual_seed(0)
    net = build(DSCNN, "seed", 8)
    longer.train(net, Phase())
    assert longer.metrics(net.eval())["accuracy"] > 0.5  # by chance: 1 / 12


@pytest.mark.cuda
@pytest.mark.parametrize("arch", list(HELLO_EDGE))
def test_every_net_is_trained_from_a_recording(arch: str) -> None:
    """Nothing in a step waits for the host, or recording it as a CUDA graph would fail."""
    bench = Bench(replace(TINY, steps=30, rate=2e-3), clips(), torch.device("cuda"))
    torch.manual_seed(0)
    net, phase = build(arch, "full").cuda(), Phase()
    bench.train(net, phase)
    (_, first), (_, last) = phase.curve
    assert last < first


def test_settings() -> None:
    paper = Setting().paper()
    assert (paper.epochs * paper.steps, paper.batch, paper.weight_decay) == (30_000, 100, 0.0)
    full = Setting()
    assert full.full_phases * full.epochs * full.steps == 8000
    assert Setting().quick().steps < 100


# --- jobs ---------------------------------------------------------------------------------------


def test_the_whole_study() -> None:
    found = study(range(5))
    assert len({job.name for job in found}) == len(found) == 5 * (6 + 7)
    assert Job(DSCNN, "splitting").name == "DS-CNN-splitting-finetune-relu-0"
    for seed in range(5):
        mine = {(job.arch, job.method) for job in found if job.seed == seed}
        assert {(arch, "full") for arch in HELLO_EDGE} <= mine
        for method in ("splitting", "splitting-macs", "random", "uniform", "uniform-long", "bn"):
            assert (DSCNN, method) in mine


def test_wrong_jobs() -> None:
    with pytest.raises(InputError, match=r"arch: .*method: .*after: "):
        Job("resnet", "magic", "later")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="GRU is there at full size only"):
        Job("GRU", "splitting")
    with pytest.raises(InputError, match="from scratch anyway"):
        Job(DSCNN, "full", "retrain")


def check_schema(found: dict[str, Any], job: Job, folder: Path) -> None:
    assert json.loads((folder / "jobs" / f"{job.name}.json").read_text()) == found
    assert list(found) == [
        "experiment", "job", "settings", "hardware", "versions", "full", "points"
    ]  # fmt: skip
    assert found["experiment"] == "kws"
    assert found["job"] == asdict(job)
    assert found["settings"] == asdict(TINY)
    for point in found["points"]:
        assert set(point) == POINT
        assert all(isinstance(point[name], int) for name in ("params", "macs", "operations"))
        assert 2 * point["macs"] < point["operations"] < 2.6 * point["macs"]
        assert 0 <= point["accuracy"] <= 1
        assert 0 <= point["validation"] <= 1


@pytest.mark.parametrize("method", ["splitting", "splitting-macs", "random", "uniform", "bn"])
def test_every_method(method: str, small: None, shared: Path) -> None:
    job = Job(DSCNN, method)
    found = done(job, shared)
    check_schema(found, job, shared)
    sizes = [column(found, name) for name in ("params", "macs", "operations")]
    assert all(len(size) == 2 for size in sizes)
    assert all(size == sorted(set(size), reverse=method == "bn") for size in sizes)
    phases = {"uniform": [1, 1], "bn": [TINY.full_phases, TINY.full_phases + 1]}.get(method, [1, 2])
    assert column(found, "epochs") == [TINY.epochs * k for k in phases]
    assert (found["points"][0]["split"] is not None) == (method in GROWN)
    if method == "bn":
        assert found["points"][0]["params"] == found["full"]["params"]


def test_all_start_from_the_same_trained_net(small: None, shared: Path) -> None:
    found = [
        timeless(done(Job(DSCNN, method), shared)["points"])[0] | {"split": None}
        for method in ("splitting", "splitting-macs", "random", "uniform")
    ]
    assert all(point == found[0] for point in found)


@pytest.mark.parametrize("arch", [DSCNN, "DNN"])
def test_nets_of_the_zoo_are_trained_at_full_size(arch: str, small: None, shared: Path) -> None:
    job = Job(arch, "full")
    found = done(job, shared)
    check_schema(found, job, shared)
    assert column(found, "params") == [found["full"]["params"]]
    assert column(found, "epochs") == [TINY.epochs * TINY.full_phases]
    net = build(arch, "full")
    assert column(found, "operations") == [operations(net, torch.zeros(1, 1, 49, 10))]


@pytest.mark.parametrize("arch", ["CNN", "BasicLSTM", "LSTM", "GRU", "CRNN"])
def test_the_other_nets_take_a_step(arch: str) -> None:
    bench = Bench(replace(TINY, epochs=1, steps=1, batch=4), clips(), CPU)
    net, phase = build(arch, "full"), Phase()
    before = [p.detach().clone() for p in net.parameters()]
    bench.train(net, phase)
    assert len(phase.curve) == 1
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("method", ["random", "bn"])
def test_a_killed_job_goes_on_from_its_last_net(
    method: str, small: None, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(DSCNN, method)
    whole = done(job, shared)
    train = Bench._train
    trained: list[int] = []
    monkeypatch.setattr(Bench, "_train", killed_at(1, train, trained))
    with pytest.raises(Killed):
        done(job, tmp_path)
    monkeypatch.setattr(Bench, "_train", killed_at(99, train, trained))
    assert timeless(done(job, tmp_path)["points"]) == timeless(whole["points"])
    assert trained == [0, 1]


def test_jobs_in_processes(tmp_path: Path) -> None:
    setting = replace(TINY, phases=1, epochs=1)
    made = order(setting, data=tmp_path, folder=tmp_path, device="cpu", read=clips)
    said = io.StringIO()
    job = Job(DSCNN, "uniform")
    found = job_runs.run_jobs([job], made, 1, Console(file=said, width=200))
    assert [result["job"] for result in found] == [asdict(job)]
    assert f"{job.name}: done" in said.getvalue()


def test_jobs_of_another_setting_are_neither_run_over_nor_run_beside(
    small: None, tmp_path: Path
) -> None:
    done(Job(DSCNN, "random"), tmp_path)
    (file,) = (tmp_path / "jobs").iterdir()
    before, said = file.read_bytes(), Console(file=io.StringIO(), width=200)
    other = order(replace(TINY, batch=8), data=tmp_path, folder=tmp_path, device="cpu", read=clips)
    for job in (Job(DSCNN, "random"), Job("DNN", "full")):
        with pytest.raises(InputError, match=r"random.*batch: 16 there, 8 now.*another --folder"):
            job_runs.run_jobs([job], other, 1, said)
    assert file.read_bytes() == before
    assert list((tmp_path / "jobs").iterdir()) == [file]
    kept = replace(TINY, floor=0.5)  # which random splits do not look at
    same = order(kept, data=tmp_path, folder=tmp_path, device="cpu", read=clips)
    assert len(job_runs.run_jobs([Job(DSCNN, "random")], same, 1, said)) == 1
    assert "1 of 1 jobs are done already; there is nothing to run." in said.file.getvalue()


def test_a_later_field_has_its_value_in_older_jobs(small: None, tmp_path: Path) -> None:
    older = done(Job(DSCNN, "random"), tmp_path)
    del older["settings"]["max_growth"]
    (tmp_path / "jobs" / "DS-CNN-random-finetune-relu-0.json").write_text(json.dumps(older))
    now = replace(TINY, max_growth=0.5)
    other = order(now, data=tmp_path, folder=tmp_path, device="cpu", read=clips)
    with pytest.raises(InputError, match=r"max_growth: None there, 0\.5 now"):
        job_runs.run_jobs([Job(DSCNN, "splitting")], other, 1)


def test_jobs_on_other_clips_are_not_taken_for_these(small: None, tmp_path: Path) -> None:
    def on(contents: str | None) -> job_runs.Order:
        return order(
            TINY, data=tmp_path, folder=tmp_path, device="cpu", read=clips, contents=contents
        )

    one, job = digest(clips()), Job(DSCNN, "random")
    assert job_runs.run_job(job, on(one))["data"] == one
    other = replace(clips(), train=clips().test)
    assert one == digest(clips()) != digest(other)
    assert one != digest(replace(clips(), noise=recordings([torch.ones(CLIP, dtype=torch.int16)])))
    with pytest.raises(InputError, match=f"data set: {one} there, {digest(other)} now"):
        job_runs.run_jobs([job], on(digest(other)), 1)
    said = Console(file=io.StringIO(), width=200)
    assert len(job_runs.run_jobs([job], on(None), 1, said)) == 1  # as jobs had none before


def test_what_nets_were_grown_on_is_not_written_over(small: None, tmp_path: Path) -> None:
    kws_kept.kept_bench(tmp_path, TINY, clips(), CPU)
    (file,) = tmp_path.glob("runs/*/clips.safetensors")
    before = file.read_bytes()
    kws_kept.kept_bench(tmp_path, TINY, clips(), CPU)
    moved = replace(clips().train, codes=clips().train.codes // 2)
    with pytest.raises(InputError, match="grown on another data set"):
        kws_kept.kept_bench(tmp_path, TINY, replace(clips(), train=moved), CPU)
    assert file.read_bytes() == before
    file.write_bytes(b"damaged")
    kws_kept.kept_bench(tmp_path, TINY, clips(), CPU)
    assert file.read_bytes() == before


def test_nets_are_scored_by_the_loss_that_they_are_trained_with() -> None:
    smooth = Bench(replace(TINY, smoothing=0.5), clips(), CPU)
    batch = smooth.scored[0]
    logits = 9 * nn.functional.one_hot(batch[1], 12).float()
    found = smooth.loss_fn(lambda _: logits, batch)
    plain = nn.functional.cross_entropy(logits, batch[1])
    spread = -logits.log_softmax(1).mean()
    torch.testing.assert_close(found, 0.5 * plain + 0.5 * spread)


# --- files for a device -------------------------------------------------------------------------


@needs_onnx
def test_grown_nets_become_files_that_are_judged_on_all_test_clips(
    small: None, shared: Path
) -> None:
    job = Job(DSCNN, "splitting")
    found = done(job, shared)
    assert kws_files.read_files(shared, [found]) == []
    rows = {row["file"]: row for row in kws_files.export_jobs([found], shared)}
    last = found["points"][-1]
    assert {"onnx", "int8"} <= set(rows) <= set(kws_files.NAMES)
    for row in rows.values():
        assert (row["method"], row["seed"], row["clips"]) == ("splitting", 0, 36)
        assert (row["params"], row["macs"]) == (last["params"], last["macs"])
    assert rows["onnx"]["accuracy"] == pytest.approx(last["accuracy"])
    assert rows["onnx"]["difference"] <= 1e-4 < rows["int8"]["difference"]
    assert kws_files.read_files(shared, [found]) == rounded(list(rows.values()))
    assert kws_files.read_files(shared, [{**found, "settings": TINY_BUT_LONGER}]) == []
    table = kws_files.to_markdown(list(rows.values()))
    assert f"| splitting | ONNX, int8 | {100 * rows['int8']['accuracy']:.2f} |" in table


def test_files_stand_beside_their_own_nets_alone(tmp_path: Path) -> None:
    last = TWO[0]["points"][-1]
    row = {"method": "splitting", "after": "finetune", "seed": 0, "file": "onnx",
           "params": 20, "macs": 200, "accuracy": last["accuracy"] + 5e-4}  # fmt: skip
    rows = [row, row | {"file": "int8", "accuracy": 0.1}]
    told = {"settings": TWO[0]["settings"], "files": rows}
    (tmp_path / kws_files.FILES).write_text(json.dumps(told))
    assert kws_files.read_files(tmp_path, TWO) == rows
    for change in ({"params": 21}, {"macs": 1}, {"accuracy": 0.69}):  # the same seed elsewhere
        other = result(0, [point(0.9, 0.7, 20) | change])
        assert kws_files.read_files(tmp_path, [other, TWO[1]]) == []


def test_committed_files_are_of_the_jobs_beside_them() -> None:
    for file in COMMITTED.rglob(kws_files.FILES):
        jobs = job_runs.finished(file.parent, "kws")
        assert kws_files.read_files(file.parent, jobs) == json.loads(file.read_text())["files"]


def test_a_file_that_answers_otherwise_is_seen() -> None:
    net, part = nn.Sequential(nn.Flatten(), nn.Linear(490, 12)), torch.randn(5, 1, 49, 10)
    labels = net(part).argmax(1)

    class Wrong:
        inputs = ["input"]  # noqa: RUF012  (as a runner has it)

        def run(self, feeds: dict[str, Any]) -> list[Any]:
            answer = net(torch.from_numpy(feeds["input"])).detach()
            return [(answer * (1 if len(answer) == 2 else -1)).numpy()]

    seen = kws_files.answered(Wrong(), net, part, labels, 2)  # the last clip stands alone
    assert seen["accuracy"] == pytest.approx(0.8)
    assert seen["difference"] == pytest.approx(2 * float(net(part[4:]).detach().abs().max()))


def test_without_runs_there_is_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="once more with --export"):
        kws_files.export_jobs([result(0, TWO[0]["points"])], tmp_path)


@needs_onnx
def test_a_run_that_is_not_the_jobs_own_is_not_exported(small: None, shared: Path) -> None:
    found = done(Job(DSCNN, "splitting"), shared)
    other = {**found, "points": found["points"][:1]}
    with pytest.raises(InputError, match=r"parameters, that of the finished job .* delete it"):
        kws_files.export_jobs([other], shared)


# --- what came of it ----------------------------------------------------------------------------


def point(validation: float, accuracy: float, params: int) -> dict[str, Any]:
    return {"validation": validation, "accuracy": accuracy, "params": params, "macs": 10 * params,
            "operations": 21 * params, "widths": {"features.0": 4}, "split": None,
            "seconds": {"train": 1.0}}  # fmt: skip


def result(seed: int, points: list[dict[str, Any]], settings: int = 0) -> dict[str, Any]:
    job = asdict(Job(DSCNN, "splitting", seed=seed))
    return {"experiment": "kws", "job": job, "points": points, "settings": {"epochs": settings}}


TWO = [
    result(0, [point(0.8, 0.95, 10), point(0.9, 0.7, 20)]),
    result(1, [point(0.9, 0.8, 10), point(0.9, 0.99, 20), point(0.7, 1.0, 30)]),
]


def test_nets_are_chosen_by_validation_never_by_test() -> None:
    assert [best(job["points"])["accuracy"] for job in TWO] == [0.7, 0.8]
    (row,) = summary(TWO)["chosen"]
    assert (row["arch"], row["method"], row["seeds"]) == (DSCNN, "splitting", 2)
    assert row["accuracy"] == pytest.approx(0.75)
    assert row["deviation"] == pytest.approx(0.1 / 2**0.5)
    assert (row["params"], row["operations"]) == (15, 315)


def test_every_net_has_its_row() -> None:
    nets = summary(TWO)["nets"]
    assert [(row["net"], row["seeds"], row["deviation"] is None) for row in nets] == [
        (0, 2, False), (1, 2, False), (2, 1, True),
    ]  # fmt: skip
    assert [table.row_count for table in tables(summary(TWO))] == [1, 3]


def test_finished_nets_have_a_row_of_their_own() -> None:
    ended = [dict(point(0.9, accuracy, 30), finished=True) for accuracy in (0.95, 0.97)]
    rows = [dict(job, points=[*job["points"], last]) for job, last in zip(TWO, ended, strict=True)]
    nets = summary(rows)["nets"]
    assert [(row["net"], row["seeds"]) for row in nets] == [(0, 2), (1, 2), (2, 1), ("finished", 2)]
    assert nets[-1]["accuracy"] == pytest.approx(0.96)


def test_tables_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long = [dict(row, method="splitting-params", after="retrain", params=413_736, macs=28_327_812,
                 operations=56_904_036) for row in summary(TWO)["chosen"]]  # fmt: skip
    Console(width=80).print(tables({"chosen": long, "nets": []})[0])
    text = capsys.readouterr().out
    assert "splitting-params" in text
    for number in ("75.00 ± 7.07", "413.74", "28.33", "56.90"):
        assert number in text


ONE = {"std": None, "seeds": 1}


def test_names_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"mean": 0.945, "std": 0.0, "seeds": 2}
    many = {
        name: [cell | {"seeds": n}] for name, n in zip(METHODS, (5, 2, 5, 5, 5, 5, 5), strict=False)
    }
    table = job_claims.accuracy_table("accuracy", "parameters", ["10K"], many)
    narrow, piped = Console(file=io.StringIO(), width=60), screen()
    narrow.print(table)
    assert "…" not in narrow.file.getvalue()
    piped.file = io.StringIO()
    piped.print(table)
    text = piped.file.getvalue()
    assert all(f" {name} " in text for name in many)
    assert "94.5 ± 0.0 [2]" in text
    assert text.count("94.5 ± 0.0 ") == len(many)
    assert "over 5 seeds; [n]: over n seeds alone" in text
    alone = job_claims.accuracy_table("accuracy", "parameters", ["10K"], {"bn": [cell | ONE]})
    assert alone.caption == "of 1 seed"


# --- the command --------------------------------------------------------------------------------


def invoke(*words: str) -> Any:
    app = typer.Typer()
    app.command()(kws_cli.kws)
    return CliRunner().invoke(app, words)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would run."""
    found: list[Any] = []
    monkeypatch.setattr(kws, "speech_commands", lambda folder, cache: clips())
    monkeypatch.setattr(kws_cli, "show", lambda *_: None)
    monkeypatch.setattr(
        job_runs, "run_jobs", lambda todo, order, *_: found.extend([todo, order.setting])
    )
    return found


def test_the_command_runs_the_study(ordered: list[Any]) -> None:
    assert invoke().exit_code == 0
    assert ordered == [study(range(5)), Setting()]


@needs_onnx
def test_nets_are_exported_when_the_tables_are_there(
    ordered: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(kws_cli, "show", lambda *_: said.append("tables"))
    monkeypatch.setattr(job_runs, "finished", lambda *_: TWO)
    monkeypatch.setattr(kws_files, "export_jobs", lambda jobs, place: said.append((jobs, place)))
    assert invoke("--export", "--folder", str(tmp_path)).exit_code == 0
    assert said == ["tables", (TWO, tmp_path / "kws")]


def test_exported_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runs, "finished", lambda *_: TWO)
    run = kws_files.runs_of_jobs(TWO, tmp_path) / "DS-CNN-splitting-finetune-relu-0"
    run.mkdir(parents=True)
    (run / "model.onnx").touch()
    said = Console(file=io.StringIO(), width=40)
    kws_cli.say_where_files_are(tmp_path, said)
    assert f"wrote {run / 'model.onnx'}" in said.file.getvalue()
    assert f"splitgrow listen {run / 'model.onnx'} clip.wav" in said.file.getvalue()


def test_a_quick_run_ends_with_what_its_nets_are_worth(ordered: list[Any]) -> None:
    last = invoke("--quick", "--epochs", "2").output.splitlines()[-1]
    assert last.startswith(
        "--quick: these nets were trained for 40 steps a phase and judged by 256 test clips. They "
        "are not usable, "
    )
    assert "not usable" not in invoke().output
    assert "not usable" not in invoke("--quick", "--redraw").output


def test_help_names_all_nets_and_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(kws_cli.ARCHS) == sorted({job.arch for job in study()})
    assert sorted(kws_cli.METHODS) == sorted({job.method for job in study()})
    monkeypatch.setenv("COLUMNS", "400")
    text = " ".join(invoke("--help").output.split())
    assert ", ".join(kws_cli.ARCHS) in text
    assert ", ".join(kws_cli.METHODS) in text


def test_nets_methods_and_schedule_can_be_chosen(ordered: list[Any]) -> None:
    words = ("--arch", DSCNN, "--method", "bn", "--seeds", "2", "--paper-schedule")
    assert invoke(*words).exit_code == 0
    assert ordered == [[Job(DSCNN, "bn", seed=seed) for seed in (0, 1)], Setting().paper()]
    assert invoke("--quick", "--epochs", "3", "--batch", "16", "--finish", "2").exit_code == 0
    changed = replace(Setting().quick(), epochs=3, batch=16, finish=2)
    assert ordered[2:] == [study(range(1)), changed]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "resnet"], "--arch: expected"),
        (["--method", "magic"], "--method: expected"),
        (["--paper-schedule", "--quick"], "leave out --quick and --epochs"),
        (
            ["--arch", "GRU", "--method", "splitting"],
            "there is no job of both. There is full of that net, and that method of DS-CNN.",
        ),
    ],
)
def test_wrong_choices_are_refused(ordered: list[Any], words: list[str], message: str) -> None:
    assert message in str(invoke(*words).exception)
    assert not ordered


def test_missing_data_is_said_before_any_work(tmp_path: Path) -> None:
    outcome = invoke("--data", str(tmp_path / "none"), "--folder", str(tmp_path))
    assert isinstance(outcome.exception, InputError)
    assert str(tmp_path / "none") in str(outcome.exception)


def test_files_become_tables(tmp_path: Path) -> None:
    place = tmp_path / "kws" / "jobs"
    assert "Run: splitgrow paper kws" in str(
        invoke("--redraw", "--folder", str(tmp_path)).exception
    )
    place.mkdir(parents=True)
    for job in TWO:
        (place / f"{job['job']['seed']}.json").write_text(json.dumps(job))
    outcome = invoke("--redraw", "--folder", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((tmp_path / "kws" / "summary.json").read_text())
    assert [row["accuracy"] for row in found["chosen"]] == [0.75]
    (place / "2.json").write_text(json.dumps(result(2, TWO[0]["points"], settings=1)))
    mixed = invoke("--redraw", "--folder", str(tmp_path)).exception
    assert "--folder of its own" in str(mixed)
