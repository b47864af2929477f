"""The paper's prototypes: the network, its splitting matrices, and the study on small digits."""

from __future__ import annotations

import struct
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from typer.testing import CliRunner

from splitgrow import Policy, find_units, score, split
from splitgrow.methods import Site
from splitgrow.paper import data, prototype_claims, prototypes, results
from splitgrow.paper.cli import app
from splitgrow.paper.data import DataSet, ImageData
from splitgrow.paper.growth import entries_of
from splitgrow.paper.prototype_bench import Bench
from splitgrow.paper.prototype_figures import positions
from splitgrow.paper.prototype_net import SMALLEST_SQUARE, Objective, PrototypeClassifier
from splitgrow.paper.prototype_study import (
    MATRICES,
    METHODS,
    LowestIndex,
    Study,
    packed,
    unpacked,
)
from splitgrow.paper.training import Course
from splitgrow.plan import Entry, SplitPlan
from splitgrow.select import Limits
from splitgrow.zoo.prototypes import PrototypeNet, squared_distances

OBJECTIVE = Objective()
SMALL = replace(
    prototypes.Setting(), batch=50, prototypes=3, epochs=1, images=300, scored=150, fifth=2,
    judge_epochs=1,
)  # fmt: skip


def digits() -> DataSet:
    """The 8x8 digits of scikit-learn, as large as MNIST's."""
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16 * 255
    images = F.interpolate(images, size=(28, 28), mode="bilinear").round().to(torch.uint8)
    labels = torch.from_numpy(found.target).long()
    return DataSet(
        train=ImageData(images[:400], labels[:400]),
        test=ImageData(images[400:600], labels[400:600]),
    )


@pytest.fixture
def net() -> PrototypeClassifier:
    """Three prototypes, in float64, at places of their own."""
    made = PrototypeClassifier(3, temperature=2.0).double()
    codes = made.encoder(batch()[0]).detach()
    made.prototypes.theta.data = codes[:3] + 0.5 * torch.rand(3, 40, dtype=torch.float64)
    made.classifier.weight.data *= 3
    return made


def batch(count: int = 60) -> tuple[Tensor, Tensor]:
    found = digits().train
    return found.images[:count].double() / 255, found.labels[:count]


def units_of(net: PrototypeClassifier):
    example = (batch(2)[0].to(next(net.parameters()).dtype),)
    others = [u.name for u in find_units(net, example) if u.name != "prototypes"]
    return find_units(net, example, exclude=others)


# --- the network -----------------------------------------------------------------------------


def test_the_network_is_the_published_one() -> None:
    net = PrototypeClassifier(7)
    found = net(torch.rand(4, 1, 28, 28))
    assert found.logits.shape == (4, 10)
    assert found.pictures.shape == (4, 1, 28, 28)
    assert net.encoder(torch.rand(4, 1, 28, 28)).shape == (4, 40)
    assert net.decoded().shape == (7, 28, 28)
    strides = [m.stride for m in net.encoder if isinstance(m, torch.nn.Conv2d)]
    assert strides == [(2, 2)] * 4
    assert net.classifier.bias is None


def test_a_prototype_is_a_neuron_like_any_other(net: PrototypeClassifier) -> None:
    (unit,) = units_of(net)
    assert (unit.name, unit.width, unit.size) == ("prototypes", 3, 40)
    text = str(units_of(net))
    assert all(name in text for name in ("classifier.weight", "cover_mass", "near_mass"))


def test_the_published_loss_by_its_formula(net: PrototypeClassifier) -> None:
    images, labels = batch()
    codes = net.encoder(images)
    squares = torch.cdist(codes, net.prototypes.theta).square()
    expected = (
        20 * F.cross_entropy((squares + SMALLEST_SQUARE).sqrt() @ net.classifier.weight.T, labels)
        + (net.decoder(codes) - images).square().sum() / len(images)
        + squares.min(0).values.mean()
        + squares.min(1).values.mean()
    )
    torch.testing.assert_close(OBJECTIVE.published(net, (images, labels)), expected)


def test_the_smooth_loss_tends_to_the_published_one(net: PrototypeClassifier) -> None:
    published = OBJECTIVE.published(net, batch()).item()
    gaps = []
    for temperature in (0.5, 0.05, 0.005):
        net.temperature.fill_(temperature)
        gaps.append(abs(OBJECTIVE.full(net, batch()).item() - published))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.01


def test_both_matrices_predict_the_change_of_their_loss(net: PrototypeClassifier) -> None:
    """Exact: the change of the loss is eps^2 / 2 lambda, for every prototype."""
    for loss_fn in (OBJECTIVE.classifying, OBJECTIVE.full):
        units = units_of(net)
        entries = entries_of(score(net, loss_fn, [batch()], units=units))
        assert len(entries) == 3
        for entry in entries:
            clone = PrototypeClassifier(3, temperature=2.0).double()
            clone.load_state_dict(net.state_dict())
            plan = SplitPlan([entry], units_of(clone))
            receipt = split(clone, plan, step=1e-3, loss_fn=loss_fn, batches=[batch()])
            assert receipt.measured == pytest.approx(receipt.predicted, rel=1e-3)
            assert clone.cover_mass.tolist() == clone.near_mass.tolist()
            assert sorted(clone.cover_mass.tolist()) == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])


def test_the_matrix_of_the_full_loss_by_hand(net: PrototypeClassifier) -> None:
    """S = S_classification + 2 m_k I + 2 E[r (I - 2 / tau u u^T)], u = theta - e, r its share."""
    units = units_of(net)
    regular = lambda model, b: (  # noqa: E731
        (found := model(b[0])).near + found.cover.mean()
    )
    codes = net.encoder(batch()[0]).detach()
    away = net.prototypes.theta.detach() - codes.unsqueeze(1)  # (B, K, D)
    shares = torch.softmax(-away.square().sum(-1) / net.temperature, 1)  # masses are even
    eye = torch.eye(40, dtype=torch.float64)
    for k, value in enumerate(score(net, regular, [batch()], units=units)["prototypes"].values):
        outer = torch.einsum("b,bi,bj->ij", shares[:, k], away[:, k], away[:, k]) / len(codes)
        S = 2 * net.near_mass[k] * eye + 2 * shares[:, k].mean() * eye - 4 / net.temperature * outer
        torch.testing.assert_close(value, torch.linalg.eigvalsh(S)[0], rtol=1e-8, atol=1e-10)


def test_squared_distances_know_no_direction() -> None:
    """Why the distances are not squared, as in Li et al.: S is 2 E[g] times the identity."""
    net = PrototypeNet([5, 4], 3, distances=squared_distances).double()
    images, labels = torch.randn(30, 5, dtype=torch.float64), torch.arange(30) % 10
    loss_fn = lambda model, b: F.cross_entropy(model(b[0]), b[1])  # noqa: E731
    distances = squared_distances(net.encoder(images), net.prototypes).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(net.classifier(distances), labels), distances)
    name = next(u.name for u in find_units(net, (images[:2],)) if "prototypes" in str(u))
    found = score(net, loss_fn, [(images, labels)])[name]
    torch.testing.assert_close(found.values, 2 * g.sum(0), rtol=1e-8, atol=1e-12)
    changes = []
    for direction in torch.eye(4, dtype=torch.float64):
        clone = PrototypeNet([5, 4], 3, distances=squared_distances).double()
        clone.load_state_dict(net.state_dict())
        entry = Entry(name, 0, float(found.values[0]), direction, 1.0)
        plan = SplitPlan([entry], find_units(clone, (images[:2],)))
        receipt = split(clone, plan, step=1e-2, loss_fn=loss_fn, batches=[(images, labels)])
        changes.append(receipt.measured)
    assert changes == pytest.approx([changes[0]] * 4, rel=1e-3)


# --- the study -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")

    def run_seed(setting: prototypes.Setting, seed: int) -> dict[str, Any]:
        bench = Bench(setting, seed, digits(), torch.device("cpu"))
        return Study(bench, folder).run()

    made = results.collect("prototypes", run_seed, SMALL, [0, 1], workers=1)
    return made | {"folder": folder}


def test_every_method_grows_from_one_and_the_same_prototype(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        assert set(run["methods"]) == set(METHODS)
        firsts = [method["phases"][0] for method in run["methods"].values()]
        assert all(first["loss"] == firsts[0]["loss"] for first in firsts)
        assert all(first["pictures"] == firsts[0]["pictures"] for first in firsts)
        for name, method in run["methods"].items():
            sizes = [phase["prototypes"] for phase in method["phases"]]
            assert sizes == list(range(1, len(sizes) + 1))
            assert len(sizes) == 3 or (name == "splitting" and method["stopped"] != "phases")
            for phase in method["phases"]:
                assert unpacked(phase["pictures"]).shape == (phase["prototypes"], 28, 28)
                for measure in prototype_claims.MEASURES:
                    assert len(phase["ambiguity"][measure]) == phase["prototypes"]
                    assert all(-1e-6 <= v <= 3.33 for v in phase["ambiguity"][measure])


def test_the_fifth_step_splits_each_prototype_in_turn(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        fifth = run["fifth"]
        for matrix in MATRICES:
            phase = run["methods"]["splitting"]["phases"][SMALL.fifth - 1]
            assert [one["lambda"] for one in fifth[matrix]] == pytest.approx(
                phase["lambda"][matrix], rel=1e-4, abs=1e-6
            )
        assert fifth["before"] == pytest.approx(phase["loss"], rel=1e-5)


def test_a_study_goes_on_where_it_was(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grown runs are read back from their folders: nothing is trained for them again."""
    bench = Bench(SMALL, 1, digits(), torch.device("cpu"))
    study = Study(bench, found["folder"])
    monkeypatch.setattr(Course, "train", lambda *_: pytest.fail("trained again"))
    again = {name: results.rounded(study._grow(name)) for name in METHODS}
    assert again == found["runs"][1]["methods"]


def test_claims_tables_and_figures(found: dict[str, Any], tmp_path: Path) -> None:
    claims = prototypes.claims(found)
    assert claims["splitting has the lowest final loss"]["seeds"] == 2
    kept = {key: value for key, value in found.items() if key != "folder"}
    results.save(kept, tmp_path / "prototypes.json")
    outcome = CliRunner().invoke(app, ["prototypes", "--redraw", "--folder", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert "Claim: the least interpretable prototypes are split first" in outcome.output
    made = {path.name for path in tmp_path.iterdir()}
    for figure in ("figure2", "trees", "growth"):
        assert {f"prototypes-{figure}.png", f"prototypes-{figure}.svg"} <= made


def test_the_page_says_what_was_committed() -> None:
    root = Path(__file__).parents[1]
    kept = results.read(root / "results" / "paper" / "prototypes.json", "prototypes")
    claims = prototypes.claims(kept)
    assert kept["claims"] == results.rounded(claims)
    text = " ".join((root / "docs" / "experiments.md").read_text().split())
    lowest = claims["splitting has the lowest final loss"]["methods"]
    best, new, random, paper = (
        f"{100 * lowest[name]['accuracy'][1]:.1f}"
        for name in ("splitting", "new", "random", "classification")
    )
    wins = [lowest[name]["wins"] for name in ("new", "random", "classification")]
    assert wins == [5, 4, 4]
    assert f"Median test accuracy {best}%, against {new}, {random} and {paper}%." in text
    first = claims["the least interpretable prototypes are split first"]
    assert f"than {first['images']['splitting']['standing']:.0%} of the others" in text
    assert f"than {first['picture']['splitting']['standing']:.0%} by an" in text
    fifth = claims["eigenvalue and loss decrease correlate"]
    assert f"median {fifth['full']['r'][1]:.2f}" in text
    assert f"median {fifth['classification']['r'][1]:.2f}" in text
    assert kept["hardware"] == "NVIDIA H200"


def phase(count: int, ambiguity: list[float], parent: int | None) -> dict[str, Any]:
    return {"prototypes": count, "ambiguity": {"picture": ambiguity},
            "split": None if parent is None else {"parent": parent}}  # fmt: skip


def test_the_standing_of_what_is_split() -> None:
    tree = [{"id": i, "place": p} for i, p in enumerate([0, 0, 1, 0, 2])]
    method = {"tree": tree, "phases": [
        phase(1, [1.0], 0), phase(2, [3.0, 1.0], 1), phase(3, [2.0, 0.5, 1.0], 3),
        phase(4, [], None),
    ]}  # fmt: skip
    run = {"methods": {"splitting": method}}
    found = prototype_claims._ambiguous_first([run], "splitting", "picture")
    assert (found["splits"], found["standing"]) == (2, 1.0)
    assert found["p"] == pytest.approx(1 / 6, abs=0.01)
    method["phases"][2]["split"]["parent"] = 2
    assert prototype_claims._ambiguous_first([run], "splitting", "picture")["standing"] == 0.5
    assert prototype_claims._standings([1.0, 1.0, 2.0]) == [0.25, 0.25, 1.0]


def test_a_tree_keeps_children_below_their_parents() -> None:
    parents = [None, 0, 0, 2, 2, None]
    across = positions([{"id": i, "parent": p} for i, p in enumerate(parents)])
    assert across == {1: 0.0, 3: 1.0, 4: 2.0, 2: 1.5, 0: 0.75, 5: 3.0}


def test_pictures_are_kept_as_text() -> None:
    pictures = torch.rand(3, 28, 28)
    back = unpacked(packed(pictures))
    assert np.abs(back / 255 - pictures.numpy()).max() <= 0.5 / 255 + 1e-6


def test_the_lowest_index_is_split_whatever_its_sign(net: PrototypeClassifier) -> None:
    units = units_of(net)
    scores = score(net, OBJECTIVE.classifying, [batch()], units=units)
    site = Site(
        net, units, OBJECTIVE.classifying, [batch()], Policy(count=1), Limits(1, None, None)
    )
    growth = LowestIndex().grow(site)
    assert growth.neurons[0].neuron == int(scores["prototypes"].values.argmin())
    assert len(net.prototypes.theta) == 4


def write_mnist(folder: Path, found: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, sums = folder / "MNIST" / "raw", {}
    raw.mkdir(parents=True)
    for name, part in (("train", found.train), ("t10k", found.test)):
        x, y = part.images.numpy(), part.labels.numpy().astype(np.uint8)
        files = {
            f"{name}-images-idx3-ubyte": struct.pack(">4i", 2051, len(x), 28, 28) + x.tobytes(),
            f"{name}-labels-idx1-ubyte": struct.pack(">2i", 2049, len(y)) + y.tobytes(),
        }
        for file, content in files.items():
            (raw / file).write_bytes(content)
            sums[file] = md5(content).hexdigest()
    monkeypatch.setattr(data, "MNIST_MD5", sums)


@pytest.mark.slow
def test_the_command_runs_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "data", digits(), monkeypatch)
    monkeypatch.setattr(prototypes.Setting, "quick", lambda _: replace(SMALL, prototypes=2))
    command = ["prototypes", "--quick", "--data", str(tmp_path / "data"), "--device", "cpu",
               "--folder", str(tmp_path / "out")]  # fmt: skip
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    kept = results.read(tmp_path / "out" / "prototypes.json", "prototypes")
    assert kept["hardware"]
    assert str(tmp_path) not in (tmp_path / "out" / "prototypes.json").read_text()


def test_the_command_says_where_it_looked(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["prototypes", "--quick", "--data", str(tmp_path)])
    assert outcome.exit_code != 0
    assert "--download" in str(outcome.exception)
