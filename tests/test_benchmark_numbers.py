"""What the benchmarks make of their measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import samples
import scale

from fake_scores import fake_scores


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
