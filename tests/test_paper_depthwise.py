"""MobileNet's neuron runs through the depthwise layer: its index predicts, a shorter one's not."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import splitgrow as sg
from splitgrow.digits import load_digits
from splitgrow.paper import depthwise

SMALL = replace(
    depthwise.Setting(), blocks=((6, 2), (6, 1), (6, 2)), stem=6, scored=192, neurons=3,
    epochs=6, batch=32,
)  # fmt: skip
UNIT = "blocks.0.pointwise.0"


@pytest.fixture(scope="module")
def data() -> depthwise.Batch:
    images, labels = load_digits().train
    return F.interpolate(images[:600], size=(12, 12), mode="bilinear"), labels[:600]


@pytest.fixture(scope="module")
def found(data: depthwise.Batch) -> dict[str, Any]:
    return depthwise.run(SMALL, *data)


@pytest.fixture(scope="module")
def model(data: depthwise.Batch) -> torch.nn.Module:
    return depthwise.trained(SMALL, *data)


def test_the_whole_neuron_predicts_every_split_and_the_truncated_one_does_not(
    found: dict[str, Any],
) -> None:
    assert [(n["unit"], n["neuron"]) for n in found["neurons"]] == [
        (f"blocks.{block}.pointwise.0", k) for block in (0, 1) for k in range(3)
    ]
    errors = {name: [] for name in depthwise.NEURONS}
    for neuron in found["neurons"]:
        for name, error in errors.items():
            error.append(abs(neuron[name]["measured"] / neuron[name]["predicted"] - 1))
    assert max(errors["whole"]) < 0.01
    assert median(errors["truncated"]) > 0.3


def test_a_split_along_the_whole_direction_gains_more(found: dict[str, Any]) -> None:
    for neuron in found["neurons"]:
        assert neuron["whole"]["measured"] < 0
        assert neuron["whole"]["measured"] < neuron["truncated"]["measured"]


def test_relu_is_predicted_up_to_its_stand_in(data: depthwise.Batch) -> None:
    # Few images have few kinks: a step must be long to cross some.
    setting = replace(SMALL, activation="relu", step=0.1, neurons=6)
    answers = depthwise.claims(depthwise.run(setting, *data))
    whole, truncated = answers["whole"], answers["truncated"]
    assert whole["r"] > 0.8
    assert truncated["r"] < 0.6
    assert whole["median |ratio - 1|"] < 0.7
    assert truncated["median |ratio - 1|"] > 0.9
    assert whole["share that rose"] < truncated["share that rose"]


@pytest.mark.parametrize("activation", ["silu", "softplus", "relu"])
def test_the_truncated_matrix_is_the_hessian_by_the_filter(
    data: depthwise.Batch, activation: str
) -> None:
    model = depthwise.trained(replace(SMALL, activation=activation), *data)
    batch = data[0][:16].double(), data[1][:16]
    S = depthwise.truncated_matrix(model, UNIT, batch)
    h = model.blocks[0].depthwise(model.stem(batch[0])).detach()
    pointwise = model.blocks[0].pointwise
    # ReLU's curvature is that of softplus with beta 3, the library's stand-in.
    bent = torch.nn.Softplus(beta=3, threshold=1000) if activation == "relu" else pointwise[2]
    a = pointwise(h).detach().requires_grad_()
    out = model.classifier(model.blocks[2](model.blocks[1](a)).mean((2, 3)))
    (delta,) = torch.autograd.grad(F.cross_entropy(out, batch[1]), a)

    def filtered(w: Tensor, k: int) -> Tensor:
        weight = pointwise[0].weight.detach().clone()
        weight = torch.cat([weight[:k], w.view(1, -1, 1, 1), weight[k + 1 :]])
        return (delta * bent(pointwise[1](F.conv2d(h, weight)))).sum()

    for k in (0, 4):
        w = pointwise[0].weight[k].detach().flatten()
        expected = torch.func.hessian(filtered)(w, k)
        torch.testing.assert_close(S[k], expected, rtol=1e-8, atol=1e-12)


def test_the_truncated_split_is_that_of_the_public_codes(
    data: depthwise.Batch, model: torch.nn.Module
) -> None:
    """Filter +- eps v', the depthwise filter twice, the next pointwise columns halved: by hand."""
    setting, batch = replace(SMALL, scored=64, neurons=1), (data[0][:64].double(), data[1][:64])
    units = sg.find_units(model, (batch[0][:2],))
    scores = sg.score(model, depthwise.loss_fn, [batch], units=units)
    (row,) = depthwise._of_unit(setting, model, scores, units[UNIT], batch)
    v = torch.linalg.eigh(depthwise.truncated_matrix(model, UNIT, batch)[0]).eigenvectors[:, 0]
    before = depthwise.loss_fn(model, batch)
    h = model.blocks[0].depthwise(model.stem(batch[0]))
    outputs = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        moved.blocks[0].pointwise[0].weight.data[0] += sign * row["step"] * v.view(-1, 1, 1)
        outputs.append(moved.blocks[1].depthwise(moved.blocks[0].pointwise(h)))
    pooled = model.blocks[2](model.blocks[1].pointwise((outputs[0] + outputs[1]) / 2))
    after = F.cross_entropy(model.classifier(pooled.mean((2, 3))), batch[1])
    assert row["truncated"]["measured"] == pytest.approx((after - before).item(), rel=1e-4)


def test_training_repeats_and_leaves_the_random_state_alone(data: depthwise.Batch) -> None:
    state, setting = torch.get_rng_state(), replace(SMALL, epochs=1)
    first, again = (depthwise.trained(setting, *data).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)
    other = depthwise.trained(replace(setting, seed=1), *data).state_dict()
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_claims_count_what_was_promised_and_did_not_come() -> None:
    def neuron(predicted: float, measured: float) -> dict[str, Any]:
        short = {"lambda": predicted * 2, "predicted": predicted, "measured": measured}
        return {"whole": {"lambda": -2.0, "predicted": -1.0, "measured": -1.0}, "truncated": short}

    made = {"neurons": [neuron(-1.0, 0.5), neuron(-2.0, -1.0), neuron(-4.0, -4.0), neuron(1, 1)]}
    answers = depthwise.claims(made)
    assert answers["truncated"]["neurons"] == 4
    assert answers["truncated"]["promised a fall"] == 3
    assert answers["truncated"]["rose"] == 1
    assert answers["truncated"]["share that rose"] == pytest.approx(1 / 3)
    assert answers["truncated"]["median |ratio - 1|"] == 0.5
    assert answers["truncated"]["median share of the whole's fall"] == 0.25
    assert answers["whole"]["share that rose"] == 0
    assert answers["whole"]["r"] is None  # all alike


def test_the_figure_has_a_row_for_each_activation(found: dict[str, Any], tmp_path: Path) -> None:
    paths = depthwise.draw([found, found], tmp_path)
    json.dumps(found, allow_nan=False)
    assert [path.name for path in paths] == ["depthwise.png", "depthwise.svg"]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_what_cannot_be_used_is_refused(data: depthwise.Batch) -> None:
    with pytest.raises(sg.InputError, match="expected one of silu, softplus, relu, got 'tanh'"):
        depthwise.Setting(activation="tanh")
    with pytest.raises(sg.InputError, match=r"expected images .* and n labels, got .* and"):
        depthwise.run(SMALL, data[0], data[1][:4])
