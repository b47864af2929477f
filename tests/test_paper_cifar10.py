"""The study on CIFAR-10: what each job trains, counts and keeps, on tiny nets and random images."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from helpers_jobs import Killed, column, killed_at, remembered, timeless
from splitgrow.errors import InputError
from splitgrow.paper import cifar10 as study
from splitgrow.paper import cifar10_bench, cifar10_nets, job_runs, job_study
from splitgrow.paper.cifar10 import Job, Setting, build, jobs, run_job, run_jobs
from splitgrow.paper.cifar10_bench import Bench, parted
from splitgrow.paper.cifar10_jobs import METHODS
from splitgrow.paper.data import DataSet, ImageData
from splitgrow.paper.job_match import key_of_fields
from splitgrow.paper.job_runs import Order, finished
from splitgrow.paper.job_study import NET, Study
from splitgrow.paper.jobs import GROWN, UNIFORM
from splitgrow.paper.training import Course, Rate
from splitgrow.phase import Phase

TINY = Setting(
    epochs=2, batch=16, rate_mobilenet=0.05, images=48, validation=16, tested=24, scored=32,
    scored_batch=16, width=4, phases=2, largest=0.9,
)  # fmt: skip
CPU = torch.device("cpu")
POINT = {"params", "macs", "accuracy", "validation", "loss", "epochs", "widths", "seconds", "split",
         "finished"}  # fmt: skip
every_pruning = pytest.mark.parametrize("method", ["l1", "bn"])


def images(folder: Path | None = None) -> DataSet:
    """Noise around a colour of each class; no two images are the same."""
    generator = torch.Generator().manual_seed(3)

    def part(count: int) -> ImageData:
        labels = torch.arange(count) % 10
        colours = torch.stack([labels * 20, 200 - labels * 15, labels * 7], 1).view(-1, 3, 1, 1)
        noise = torch.randint(0, 50, (count, 3, 32, 32), generator=generator)
        return ImageData((colours + noise).clamp(0, 255).to(torch.uint8), labels)

    return DataSet(part(80), part(24))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nets of two layers, which are full at 8 to 12 channels."""
    monkeypatch.setattr(cifar10_nets, "VGG19", (8, "M", 12, "M"))
    monkeypatch.setattr(cifar10_nets, "MOBILENET_V1", ((12, 2),))
    monkeypatch.setattr(job_study, "measured", remembered)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose jobs are done once for several tests."""
    return tmp_path_factory.mktemp("shared")


def done(job: Job, folder: Path, setting: Setting = TINY) -> dict[str, Any]:
    return run_job(job, setting, data=folder, folder=folder, device="cpu", read=images)


# --- nets ---------------------------------------------------------------------------------------


def convolutions(net: nn.Module) -> list[nn.Conv2d]:
    return [m for m in net.modules() if isinstance(m, nn.Conv2d)]


def test_seeds_have_the_papers_widths() -> None:
    assert [c.out_channels for c in convolutions(build("vgg19", "relu", "seed"))] == [16] * 16
    widths = [c.out_channels for c in convolutions(build("mobilenet", "relu", "seed"))]
    assert widths == [32, 32] + [16] * 25


def test_other_sizes() -> None:
    full = [c.out_channels for c in convolutions(build("vgg19", "relu", "full"))]
    assert full[:3] == [64, 64, 128]
    assert full[-8:] == [512] * 8
    assert convolutions(build("mobilenet", "relu", "full"))[-1].out_channels == 1024
    assert [c.out_channels for c in convolutions(build("vgg19", "relu", 1.3**2))] == [27] * 16
    double = [c.out_channels for c in convolutions(build("mobilenet", "relu", 2.0))]
    assert double[0] == 64
    assert set(double[2:]) == {32}


def test_thin_seeds_have_the_shape_of_the_full_net() -> None:
    for arch in ("vgg19", "mobilenet"):
        full, thin, double = (
            [c.out_channels for c in convolutions(build(arch, "relu", size, thin=1 / 8))]
            for size in ("full", "seed", 2.0)
        )
        assert [8 * width for width in thin] == full
        assert [4 * width for width in double] == full
    assert convolutions(build("vgg19", "relu", "seed", thin=0.001))[0].out_channels == 1


@pytest.mark.parametrize("method", ["splitting-macs", "uniform"])
def test_growth_from_a_thin_seed(method: str, small: None, tmp_path: Path) -> None:
    points = done(Job("vgg19", method), tmp_path, replace(TINY, thin=0.5))["points"]
    assert list(points[0]["widths"].values()) == [4, 6]
    assert points[-1]["params"] > points[0]["params"]


def test_activation() -> None:
    net = build("vgg19", "softplus", "seed", beta=3.0)
    assert [m.beta for m in net.modules() if isinstance(m, nn.Softplus)] == [3.0] * 16
    assert not any(isinstance(m, nn.Softplus) for m in build("vgg19", "relu", "seed").modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet", "relu", "seed"), "vgg19, mobilenet"),
        (("vgg19", "tanh", "seed"), "relu, softplus"),
        (("vgg19", "relu", "large"), "a number"),
        (("vgg19", "relu", 0.01), "leaves none"),
    ],
)
def test_wrong_nets(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(*arguments)


# --- data and training --------------------------------------------------------------------------


def rows(pictures: Tensor) -> set[bytes]:
    return {picture.numpy().tobytes() for picture in pictures}


def test_parts_are_disjoint_and_always_the_same() -> None:
    data = images().train
    training, held_out = parted(data, TINY)
    assert len(rows(training.images)) == 48
    assert len(rows(held_out.images)) == 16
    assert not rows(training.images) & rows(held_out.images)
    assert rows(parted(data, replace(TINY, images=20))[1].images) == rows(held_out.images)
    with pytest.raises(InputError, match="validation="):
        parted(data, replace(TINY, validation=80))


def test_validation_images_are_never_trained_or_scored_on(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[bytes] = set()

    def recorded(batch: Tensor) -> Tensor:
        seen.update(rows(batch))
        return batch

    monkeypatch.setattr(cifar10_bench, "mirror_and_shift", recorded)
    bench = Bench(TINY, images(), CPU)
    bench.train(build("vgg19", "relu", "seed", width=4), Phase())
    assert seen == rows(bench.train_part.images)
    assert not seen & (rows(bench.validation.images) | rows(bench.test.images))
    scored = torch.cat([batch for batch, _ in bench.scored])
    assert rows(scored) <= rows(bench.normalised(bench.train_part.images))


def test_normalised_by_the_training_part() -> None:
    bench = Bench(TINY, images(), CPU)
    std, mean = torch.std_mean(bench.normalised(bench.train_part.images), (0, 2, 3))
    torch.testing.assert_close(mean, torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(std, torch.ones(3), atol=1e-4, rtol=0)


def test_accuracy_is_the_share_that_is_right() -> None:
    bench = Bench(TINY, images(), CPU)

    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.eye(10)[[3] * len(x)]

    assert bench.metrics(Always())["accuracy"] == pytest.approx(3 / 24)


def test_settings() -> None:
    paper = Setting().paper()
    assert (paper.epochs, paper.batch, paper.shape, paper.warm_up) == (160, 64, "steps", 0.0)
    assert paper.rate_vgg19 == paper.rate_mobilenet == 0.1
    assert Setting().quick().images < 1000


# --- jobs ---------------------------------------------------------------------------------------


def test_names_and_combinations() -> None:
    assert Job("vgg19", "splitting").name == "vgg19-splitting-finetune-relu-0"
    found = jobs(seeds=range(3))
    assert len({job.name for job in found}) == len(found) == 2 * 3 * (9 + 7)
    assert [job.seed for job in found] == sorted(job.seed for job in found)


def test_wrong_jobs_are_told_all_at_once() -> None:
    with pytest.raises(InputError, match=r"arch: .*method: .*after: "):
        Job("resnet", "magic", "later")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from scratch anyway"):
        Job("vgg19", "uniform", "retrain")


def check_schema(found: dict[str, Any], job: Job, folder: Path) -> None:
    assert json.loads((folder / "jobs" / f"{job.name}.json").read_text()) == found
    assert list(found) == [
        "experiment", "job", "settings", "hardware", "versions", "full", "points"
    ]  # fmt: skip
    assert found["experiment"] == "cifar10"
    assert found["job"] == asdict(job)
    assert found["settings"] == asdict(TINY)
    assert set(found["full"]) == {"params", "macs"}
    for point in found["points"]:
        assert set(point) == POINT
        assert set(point["seconds"]) == {"train", "score", "split"}
        assert point["seconds"]["train"] > 0
        assert 0 <= point["accuracy"] <= 1
        assert 0 <= point["validation"] <= 1
        assert isinstance(point["params"], int)
        assert isinstance(point["macs"], int)
        if point["split"] is not None:
            assert set(point["split"]) == {"predicted", "measured", "step", "neurons"}


@pytest.mark.parametrize(
    ("arch", "method"),
    [
        *(("vgg19", m) for m in METHODS if m != "uniform-long"),
        ("mobilenet", "splitting-macs"),
        ("mobilenet", "bn"),
    ],
)
def test_every_method(arch: str, method: str, small: None, shared: Path) -> None:
    job = Job(arch, method)
    found = done(job, shared)
    check_schema(found, job, shared)
    params, macs = column(found, "params"), column(found, "macs")
    falls = method in ("l1", "bn")
    assert len(params) > 1
    assert params == sorted(set(params), reverse=falls)
    assert macs == sorted(set(macs), reverse=falls)
    if falls:
        assert found["points"][0]["params"] == found["full"]["params"]
    scratch = method in UNIFORM
    longer = [1] * len(params) if method == "uniform" else range(1, len(params) + 1)
    assert column(found, "epochs") == [TINY.epochs * k for k in longer]
    splits = [split is not None for split in column(found, "split")]
    assert splits == [method in GROWN and k < len(params) - 1 for k in range(len(params))]
    assert scratch or found["points"][0]["seconds"]["split"] > 0


def test_long_training_is_as_long_as_growth_to_that_width(small: None, tmp_path: Path) -> None:
    setting = replace(TINY, phases=None, largest=0.5, growth=0.2, epochs=1, finish=4)
    long = done(Job("vgg19", "uniform-long"), tmp_path, setting)
    short = done(Job("vgg19", "uniform"), tmp_path, setting)
    widths = column(short, "widths")
    assert column(long, "widths") == widths[::-3][::-1]  # the last one too
    grown = list(range(1, len(widths) + 1))[::-3][::-1]
    assert column(long, "epochs") == [*grown[:-1], grown[-1] + setting.finish]
    assert column(short, "epochs") == [1] * len(widths)
    assert column(long, "finished") == [False] * (len(grown) - 1) + [True]
    assert not any(column(short, "finished"))


@pytest.mark.parametrize("method", ["splitting", "random"])
def test_the_last_net_of_growth_is_finished(method: str, small: None, tmp_path: Path) -> None:
    found = done(Job("vgg19", method), tmp_path, replace(TINY, finish=3))
    *grown, last, finished = found["points"]
    assert len(grown) + 1 == TINY.phases
    assert finished["widths"] == last["widths"]
    assert [point["finished"] for point in found["points"]] == [False] * TINY.phases + [True]
    assert finished["epochs"] == last["epochs"] + 3 * TINY.epochs
    assert last["split"] is None


@every_pruning
def test_the_last_net_of_pruning_is_finished(
    method: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(TINY, phases=None, finish=3, size=0.6)
    sparse: list[int] = []
    gradient = job_study.add_sparsity_gradient
    monkeypatch.setattr(
        job_study, "add_sparsity_gradient", lambda net, **rest: sparse.append(gradient(net, **rest))
    )
    found = done(Job("vgg19", method), tmp_path, setting)
    *pruned, last, finished = found["points"]
    assert finished["widths"] == last["widths"]
    assert column(found, "finished") == [False] * (len(pruned) + 1) + [True]
    assert finished["epochs"] == last["epochs"] + 3 * TINY.epochs
    steps = last["epochs"] * 3  # not at the end
    assert len(sparse) == (steps if method == "bn" else 0)
    plain = done(Job("vgg19", method), tmp_path, replace(setting, size=None))
    assert not any(column(plain, "finished"))


def test_a_job_killed_at_its_end_finishes_its_last_net(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, setting = Job("vgg19", "l1"), replace(TINY, finish=1, size=0.6, keep=0.5)
    trained: list[int] = []
    train = Bench._train
    monkeypatch.setattr(Bench, "_train", killed_at(2, train, trained))
    with pytest.raises(Killed):
        done(job, tmp_path, setting)
    monkeypatch.setattr(Bench, "_train", killed_at(99, train, trained))
    assert column(done(job, tmp_path, setting), "finished") == [False, False, True]
    assert trained == [0, 1, 2]


@pytest.mark.parametrize("method", ["splitting", "random", "uniform-long", "l1", "bn"])
def test_every_method_ends_with_a_net_of_the_size(method: str, small: None, tmp_path: Path) -> None:
    setting = replace(TINY, phases=None, size=0.6, growth=0.5, epochs=1, floor=0.0, finish=1)
    found = done(Job("vgg19", method), tmp_path, setting)
    most = 0.6 * found["full"]["params"]
    *others, last = found["points"]
    assert last["finished"]
    assert 0.85 * most < last["params"] <= most  # these nets have few channels
    if method in ("l1", "bn"):
        assert all(point["params"] > most for point in others[:-1])
    else:
        assert all(point["params"] <= most for point in others)
    assert method != "uniform-long" or not others


@pytest.mark.parametrize(
    ("method", "after", "parts"),
    [
        ("splitting", "finetune", [1, 0.2, 1]),
        ("l1", "finetune", [1, 0.2]),
        ("bn", "finetune", [1, 0.2]),
        ("random", "retrain", [1, 1, 1]),
        ("uniform", "finetune", [1, 1]),
    ],
)
def test_the_rate_after_a_split_or_a_cut(
    method: str, after: Any, parts: list[float], small: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = rates_of(monkeypatch)
    done(Job("vgg19", method, after), tmp_path, replace(TINY, restart=0.2, finish=1))
    assert [r.highest for r in found] == pytest.approx([TINY.rate_vgg19 * part for part in parts])


@pytest.mark.parametrize(
    ("method", "shapes"),
    [("splitting", ["constant", "constant", "cosine"]), ("l1", ["cosine"] * 2)],
)
def test_growth_at_a_rate_that_does_not_fall(
    method: str, shapes: list[str], small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rates_of(monkeypatch)
    done(Job("vgg19", method), tmp_path, replace(TINY, growing="constant", finish=1))
    assert [rate.shape for rate in found] == shapes


def rates_of(monkeypatch: pytest.MonkeyPatch) -> list[Rate]:
    """What every training of a job will take."""
    found: list[Rate] = []
    train = Bench._train

    def recorded(bench: Bench, net: nn.Module, phase: Phase, course: Course, *rest: Any) -> None:
        found.append(course.rate)
        train(bench, net, phase, course, *rest)

    monkeypatch.setattr(Bench, "_train", recorded)
    return found


@pytest.mark.parametrize("method", ["splitting", "uniform-long", "l1"])
def test_a_size_below_the_seed(method: str, small: None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"size: 0\.1 of .*vgg19 has .* at least 0\.\d+") as caught:
        done(Job("vgg19", method), tmp_path, replace(TINY, size=0.1))
    least = float(str(caught.value).rpartition("least ")[2].rstrip("."))
    found = done(Job("vgg19", "uniform"), tmp_path, replace(TINY, size=least))
    assert len(found["points"]) == 1


def test_results_from_before_a_field_of_the_setting_was_there(small: None, tmp_path: Path) -> None:
    job, setting = Job("vgg19", "uniform"), replace(TINY, phases=1, floor=0.0)
    first = done(job, tmp_path, setting)
    key = study.key_of(setting)
    path = tmp_path / "jobs" / f"{job.name}.json"
    older = json.loads(path.read_text())
    for name in ("size", "floor", "max_growth", "restart"):
        del older["settings"][name]
    path.write_text(json.dumps(older))
    assert done(job, tmp_path, setting) == first | {"settings": older["settings"]}  # as it was
    assert key_of_fields(older["settings"]) == key
    assert study.key_of(replace(setting, size=0.5)) != key
    later = replace(setting, floor=0.5)  # which uniform widths do not look at
    assert done(job, tmp_path, later)["settings"] == older["settings"]
    assert done(job, tmp_path, replace(later, size=0.5))["settings"]["size"] == 0.5  # anew


def test_jobs_compare_in_what_both_depend_on(small: None, tmp_path: Path) -> None:
    setting = replace(TINY, phases=1, epochs=1)
    done(Job("vgg19", "uniform"), tmp_path, setting)
    done(Job("vgg19", "bn"), tmp_path, replace(setting, floor=0.6))
    assert len(finished(tmp_path, "cifar10")) == 2
    done(Job("vgg19", "bn", seed=1), tmp_path, setting)
    with pytest.raises(InputError, match="different settings"):
        finished(tmp_path, "cifar10")


@pytest.mark.parametrize("method", ["splitting-macs", "random"])
def test_no_layer_grows_by_more_than_its_share(method: str, small: None, tmp_path: Path) -> None:
    points = done(Job("vgg19", method), tmp_path, replace(TINY, max_growth=0.5))["points"]
    widths = [list(point["widths"].values()) for point in points]
    assert len(widths) > 1
    for before, after in pairwise(widths):
        assert before != after
        assert all(new - old <= round(0.5 * old) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("method", ["random", "uniform"])
def test_growth_ends_at_its_share(method: str, small: None, tmp_path: Path) -> None:
    setting = replace(TINY, phases=None, largest=0.5, growth=0.5, epochs=1)
    found = done(Job("vgg19", method), tmp_path, setting)
    enough = [p >= 0.5 * found["full"]["params"] for p in column(found, "params")]
    assert enough == [False] * (len(enough) - 1) + [True]
    neurons = [sum(widths.values()) for widths in column(found, "widths")]
    assert neurons == [8, 12, 18][: len(neurons)]


def test_all_start_from_the_same_trained_net(small: None, shared: Path) -> None:
    found = [
        timeless(done(Job("vgg19", method), shared)["points"])[0] | {"split": None}
        for method in (*GROWN, "uniform")
    ]
    assert all(point == found[0] for point in found)


@every_pruning
def test_pruning_goes_down_to_the_seed(method: str, small: None, tmp_path: Path) -> None:
    found = done(Job("vgg19", method), tmp_path, replace(TINY, phases=None, epochs=1, keep=0.6))
    seed = sum(p.numel() for p in build("vgg19", "relu", "seed", width=4).parameters())
    assert [p <= seed for p in column(found, "params")].count(True) == 1


def test_pruning_ends_where_nothing_can_be_cut(small: None, tmp_path: Path) -> None:
    setting = replace(TINY, phases=None, epochs=1, width=1, keep=0.4, floor=0.0)
    found = done(Job("vgg19", "l1"), tmp_path, setting)
    assert set(found["points"][-1]["widths"].values()) == {2}


def test_sparsity_is_for_bn_alone(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def recorded(net: nn.Module, sparsity: float) -> None:
        assert all(p.grad is not None for p in net.parameters())
        calls.append(sparsity)

    monkeypatch.setattr(job_study, "add_sparsity_gradient", recorded)
    done(Job("vgg19", "l1"), tmp_path, replace(TINY, phases=2))
    assert not calls
    done(Job("vgg19", "bn"), tmp_path, replace(TINY, phases=2))
    assert calls == [1e-4] * (2 * TINY.epochs * 3)


@pytest.mark.parametrize(("after", "steps"), [("finetune", [0, 6]), ("retrain", [0, 0])])
def test_retraining_begins_with_fresh_weights(
    after: Any, steps: list[int], small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    train = Bench.train

    def recorded(bench: Bench, net: nn.Module, phase: Phase, **rest: Any) -> None:
        found.append(int(net.state_dict()["features.1.num_batches_tracked"]))
        train(bench, net, phase, **rest)

    monkeypatch.setattr(Bench, "train", recorded)
    done(Job("vgg19", "random", after), tmp_path)
    assert found == steps


def test_retraining_finds_fresh_weights_each_time(small: None) -> None:
    bench = Bench(TINY, images(), CPU)
    job = Job("mobilenet", "l1", "retrain")
    made = Study(job, bench, Path("unused"))
    net = made.net("full")
    first, again, other = (made._cut(net, number).state_dict() for number in (1, 1, 2))
    kept = Study(replace(job, after="finetune"), bench, Path("unused"))._cut(net, 1).state_dict()
    name = "blocks.0.pointwise.0.weight"
    assert first[name].shape == kept[name].shape
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.isin(first[name], net.state_dict()[name]).any()
    assert torch.isin(kept[name], net.state_dict()[name]).all()


# --- interruptions and files --------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [
        Job("vgg19", "splitting"),
        Job("mobilenet", "random", "retrain"),
        Job("vgg19", "uniform"),
        Job("vgg19", "l1"),
        Job("mobilenet", "bn", "retrain"),
    ],
    ids=lambda job: job.name,
)
def test_a_killed_job_goes_on_from_its_last_net(
    job: Job, small: None, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = done(job, shared)
    trained: list[int] = []
    train = Bench._train
    monkeypatch.setattr(Bench, "_train", killed_at(1, train, trained))
    with pytest.raises(Killed):
        done(job, tmp_path)
    assert not list(tmp_path.glob("jobs/*"))
    monkeypatch.setattr(Bench, "_train", killed_at(99, train, trained))
    assert timeless(done(job, tmp_path)["points"]) == timeless(whole["points"])
    assert trained == [0, 1]


def test_a_job_that_is_done_is_read(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("vgg19", "uniform")
    setting = replace(TINY, phases=1)
    first = done(job, tmp_path, setting)
    with monkeypatch.context() as patch:
        patch.setattr(study, "Bench", None)
        assert done(job, tmp_path, setting) == first
    other = done(job, tmp_path, replace(setting, epochs=1))
    assert column(other, "epochs") == [1]
    (tmp_path / "jobs" / f"{job.name}.json").write_text("{")
    assert timeless(done(job, tmp_path, setting)["points"]) == timeless(first["points"])


@pytest.mark.parametrize("method", ["splitting", "l1", "uniform"])
def test_each_net_is_told_of(method: str, small: None, tmp_path: Path) -> None:
    told = []
    order = Order("cifar10", TINY, tmp_path, tmp_path, "cpu", images, Bench)
    found = job_runs.run_job(
        Job("vgg19", method), order, lambda *net: told.append((*net[:2], net[2]["validation"]))
    )
    points = [(p["params"], pytest.approx(p["validation"], rel=1e-5)) for p in found["points"]]
    assert told == [(i, *point) for i, point in enumerate(points)]


def test_an_interrupted_study_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_runs, "wait", interrupted)
    said = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(
            [Job("vgg19", "uniform")], TINY, data=tmp_path, folder=tmp_path, device="cpu",
            workers=1, read=images, console=Console(file=said, width=200),
        )  # fmt: skip
    assert "Stopped. The same command goes on from the last net" in said.getvalue()


def test_jobs_in_processes_and_one_that_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The nets in processes are the real ones, at the width of 1."""
    setting = replace(TINY, phases=1, epochs=1, width=1)
    wrong = Job("vgg19", "bn", seed=1)
    # What this one goes on from is damaged.
    place = tmp_path / "runs" / study.key_of(setting) / wrong.name / NET
    place.parent.mkdir(parents=True)
    place.write_text("not a net")
    listed = [wrong, Job("mobilenet", "uniform")]
    said = io.StringIO()
    found = run_jobs(
        listed, setting, data=tmp_path, folder=tmp_path, device="cpu", workers=2, read=images,
        console=Console(file=said, width=200),
    )  # fmt: skip
    assert [result["job"] for result in found] == [asdict(job) for job in listed[1:]]
    assert f"{wrong.name}: failed with exit code 1" in said.getvalue()
    assert f"{listed[1].name}: done" in said.getvalue()
    assert "s (1 of 2)" in said.getvalue()
    assert "s (2 of 2)" in said.getvalue()
    assert f"{listed[1].name}: net 1, " in capfd.readouterr().err


def test_jobs_end_with_a_study_that_is_killed(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from helpers_jobs import never_read
from splitgrow.paper.cifar10 import Job, Setting, run_jobs
place = Path({str(tmp_path)!r})
if __name__ == "__main__":
    run_jobs([Job("vgg19", "l1")], Setting(), data=place, folder=place, device="cpu", workers=1,
             read=never_read)
"""
    (tmp_path / "killed.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    running = subprocess.Popen([sys.executable, tmp_path / "killed.py"], env=environment)
    try:
        assert until((tmp_path / "pid").exists)
        job = int((tmp_path / "pid").read_text())
        assert is_running(job)
    finally:
        running.kill()
        running.wait()
    assert until(lambda: not is_running(job))


def until(happened: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120
    while not happened() and time.monotonic() < end:
        time.sleep(0.1)
    return happened()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # not Linux, or it has just ended
        return not Path("/proc/self").exists()
    return state != "Z"  # which nobody may be there to collect


def test_wrong_runs(tmp_path: Path) -> None:
    job = Job("vgg19", "uniform")
    given: dict[str, Any] = {"data": tmp_path, "folder": tmp_path, "device": "cpu"}
    with pytest.raises(InputError, match="run twice"):
        run_jobs([job, job], TINY, workers=1, **given)
    with pytest.raises(InputError, match="workers"):
        run_jobs([job], TINY, workers=0, **given)
