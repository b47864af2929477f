"""What the benchmarks make of their measurements."""

from __future__ import annotations

import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import splitgrow as sg

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import batch_norm
import cifar10_levers
import front_end
import samples
import scale

from fake_scores import fake_scores
from splitgrow.paper.speech_folder import official_part
from splitgrow.paper.speech_parts import CLASSES


def test_a_sample_is_compared_with_all_images() -> None:
    truth = fake_scores([-4.0, -1.0, 0.5, -3.0, 2.0, -2.0, 1.0, 0.0, 0.0, 0.0], samples=40)
    same = {"overlap": 1.0, "kept": 1.0, "error": 0.0, "expected": 1.0, "within": 1.0}
    assert samples.compared(truth, truth) == same
    # The best three are -4, -3 and -2; this sample takes -1 for -3, and is off by half.
    errors = [1.1, 1.0] + [0.2] * 8
    other = fake_scores([-2.0, -9.0, 0.5, 0.0, 2.0, -1.0, 1.0, 0.0, 0.0, 0.0], errors, samples=10)
    found = samples.compared(other, truth)
    assert found["overlap"] == pytest.approx(2 / 3)
    assert found["kept"] == pytest.approx(7 / 9)
    assert found["error"] == pytest.approx(0.5)
    assert found["within"] == pytest.approx(1 / 3)  # of -4, which is 2 away; not of -1 and -2
    assert found["expected"] == pytest.approx(other.overlap(3, shrink=0.75**0.5))


def test_neurons_that_should_not_be_split_count_for_nothing() -> None:
    truth = fake_scores([-1.0, 5.0, 1.0])
    assert samples.compared(fake_scores([0.0, -1.0, 1.0]), truth)["kept"] == 0.0


def test_the_law_of_growth_is_that_of_the_upper_half() -> None:
    rows = [{"width": w, "seconds": 1e-3 + 1e-6 * w**2} for w in (1, 2, 1000, 2000, 4000)]
    assert scale.slope(rows, "width", "seconds") == pytest.approx(2.0, abs=0.2)
    assert scale.slope([r | {"bytes": None} for r in rows], "width", "bytes") is None


def test_what_does_not_fit_ends_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(case: scale.Case, device: torch.device) -> scale.Row:
        if case.width > 32:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return {"width": case.width}

    monkeypatch.setattr(scale, "measured", measured)
    cases = {"width": scale.sweeps(scale.Case())["width"]}
    found = [row for _, row in scale.run(cases, torch.device("cpu"))]
    assert [row["width"] for row in found] == [16, 32, 64]
    assert found[-1]["failed"] == "CUDA out of memory."


def test_what_batch_norm_leaves_of_a_split() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 10),
    ).double()  # fmt: skip
    scored, others = (
        [(torch.randn(16, 3, 8, 8).double(), torch.randint(10, (16,))) for _ in range(2)]
        for _ in range(2)
    )

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    net.train()(scored[0][0])  # statistics of its own
    units = sg.find_units(net, scored[0][0])
    plan = sg.select(sg.score(net, loss_fn, scored, units=units), count=2)
    parts = {"scored": scored, "others": others}
    before = batch_norm.losses(net, parts)
    assert before["running, scored"] != before["batch, scored"]
    found = batch_norm.measured(net, plan, 0.01, parts, before)
    assert found.keys() == {"predicted", *before}
    assert found["predicted"] == pytest.approx(found["running, scored"], rel=0.3)
    assert batch_norm.losses(net, parts) == before  # the net is as it was
    net[1].reset_running_stats()
    again = batch_norm.losses(net, parts)
    assert again["running, scored"] != before["running, scored"]
    assert again["batch, others"] == before["batch, others"]
    turned = batch_norm.turned(plan)
    assert turned.chosen == plan.chosen
    assert all(float(e.direction.norm()) == pytest.approx(1) for e in turned)
    assert not torch.equal(turned[0].direction, plan[0].direction)


def test_levers_are_compared_at_equal_sizes() -> None:
    def job(seed: int, validation: list[float]) -> dict[str, Any]:
        sizes, split = (10_000, 60_000, 180_000), {"measured": 0.5}
        return {"job": {"seed": seed}, "points": [
            {"params": size, "validation": value, "loss": 1.0, "epochs": 4 * i,
             "split": split if i < 2 else None, "finished": False}
            for i, (size, value) in enumerate(zip(sizes, validation, strict=True))
        ]}  # fmt: skip

    one = job(0, [0.5, 0.6, 0.8])
    found = cifar10_levers.row("none", "splitting", [one, job(1, [0.5, 0.8, 1])])
    share = np.log(100 / 60) / np.log(180 / 60)
    assert found["validation"][:2] == [0.7, round(0.7 + 0.2 * share, 4)]
    assert found["seeds"] == [0, 1]
    assert found["change"] == [0.5] * 4
    assert found["finished"] == []
    assert cifar10_levers.at(one, "loss", 9_000) is None
    assert cifar10_levers.at(one, "validation", 182_000) == 0.8
    assert cifar10_levers.at(one, "validation", 190_000) is None
    end = one["points"][-1] | {"validation": 0.9, "epochs": 20, "finished": True}
    one["points"].append(end)
    found = cifar10_levers.row("none", "splitting", [one])
    assert found["finished"] == [{"params": 180_000, "epochs": 20, "validation": 0.9}]
    assert cifar10_levers.at(one, "validation", 180_000) == 0.8


def test_features_are_found_by_name_or_are_the_nearest_of_the_word(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    speakers = {"train": "026290a7", "test": "0c40e715"}  # by the official rule
    paths = []
    for word in ("yes", "no"):
        for speaker in speakers.values():
            path = tmp_path / word / f"{speaker}_nohash_1.wav"
            path.parent.mkdir(exist_ok=True)
            samples = 3000 * torch.randn(16_000, generator=generator)
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes(samples.to(torch.int16).numpy().tobytes())
            paths.append(path)
    parts = {
        speaker: str(official_part(f"{speaker}_nohash_1.wav")) for speaker in speakers.values()
    }
    by_name = [path for path in paths if parts[path.name[:8]] != "test"]
    tested = [path for path in paths if parts[path.name[:8]] == "test"]
    assert len(by_name) == len(tested) == 2
    words = ["no", "yes"]
    x = torch.stack([front_end.codes_of(path) for path in by_name]).numpy()
    x[0, 3, 4] += 2
    packed = {
        "x": x, "y": np.array([CLASSES.index(path.parent.name) for path in by_name]),
        "split": np.array([front_end.PARTS.index(parts[path.name[:8]]) for path in by_name]),
        "speaker": np.array([int(path.name[:8], 16) for path in by_name]),
        "utterance": np.array([1, 1]), "words": np.array(words),
        "word": np.array([words.index(path.parent.name) for path in by_name]),
        "x_test": torch.stack([front_end.codes_of(path) for path in tested]).numpy(),
        "y_test": np.array([CLASSES.index(path.parent.name) for path in tested]),
    }  # fmt: skip
    found = front_end.compare(packed, paths)
    codes = 2 * 49 * 40
    assert found == {
        "files": 4, "in the part of the official rule": 4,
        "found by name": {
            "clips": 2, "codes": codes, "equal": codes - 1, "largest difference": 2,
        },
        "test, the nearest": {
            "clips": 2, "codes": codes, "equal": codes, "largest difference": 0,
        },
    }  # fmt: skip
