"""Printed tables: one of a thing is not told as several."""

from __future__ import annotations

import pytest

import splitgrow as sg
from fake_scores import fake_scores
from splitgrow.show import count


def test_counts_agree_with_their_nouns() -> None:
    found = [
        count(0, "split"),
        count(1, "split"),
        count(1_200, "split"),
        count(2, "loss", "losses"),
    ]
    assert found == ["0 splits", "1 split", "1,200 splits", "2 losses"]


@pytest.mark.parametrize(("samples", "words"), [(1, "on 1 sample, "), (2, "on 2 samples, ")])
def test_scores_tell_their_samples(samples: int, words: str) -> None:
    assert words in str(fake_scores([-1.0, -2.0], samples=samples))


@pytest.mark.parametrize(("chosen", "words"), [(1, "split 1 neuron\n"), (2, "split 2 neurons\n")])
def test_plans_tell_their_neurons(chosen: int, words: str) -> None:
    first = str(sg.select(fake_scores([-1.0, -2.0]), count=chosen)).splitlines()[0]
    assert first.strip().endswith(words.strip())
