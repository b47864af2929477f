"""Units as values: names, sizes, order, what is skipped, and how they print."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import splitgrow as sg
from promises import check_model, check_refused
from splitgrow import trial
from splitgrow.units import named_tensors


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


# ---- a sequence, by number and by name -------------------------------------------------------


def test_units_are_a_sequence_in_order_of_execution() -> None:
    units = sg.find_units(mlp(), torch.randn(3, 5))
    assert [unit.name for unit in units] == ["0", "2"]
    assert len(units) == 2
    assert units[0] is units["0"]
    assert units[-1] is units["2"]
    assert [unit.name for unit in units[:1]] == ["0"]
    assert units["0"] in units


def test_an_unknown_name_lists_those_that_there_are() -> None:
    units = sg.find_units(mlp(), torch.randn(3, 5))
    with pytest.raises(KeyError, match=r"no unit 'fc'; there are: 0, 2"):
        units["fc"]


def test_width_and_size() -> None:
    units = sg.find_units(mlp(), torch.randn(3, 5))
    assert [(unit.width, unit.size) for unit in units] == [(4, 5 + 1), (3, 4 + 1)]
    assert units["0"].parameters == ("0.weight", "0.bias")
    assert units["0"].sizes == (5, 1)
    assert [units["0"].slot_size(slot) for slot in units["0"].theta] == [5, 1]


def test_order_is_that_of_execution_not_of_registration() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.Linear(3, 2), nn.Linear(4, 3), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x).tanh()).tanh())

    assert [u.name for u in sg.find_units(Net(), torch.randn(3, 5))] == ["first", "middle"]


def test_a_neurons_vector_is_its_slices_one_after_the_other() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    unit = sg.find_units(model, torch.randn(3, 2, 4, 4))["0"]
    vectors = unit.vectors(named_tensors(model))
    assert vectors.shape == (4, 19)
    for k in range(4):
        expected = torch.cat([model[0].weight[k].reshape(-1), model[0].bias[k : k + 1]])
        assert torch.equal(vectors[k], expected)


def test_printed_units_are_a_table_for_people() -> None:
    text = str(sg.find_units(mlp(), torch.randn(3, 5)))
    assert "2 units can be split" in text
    for word in ("0.weight, 0.bias", "2.weight", "own parameters", "its neurons are the model's"):
        assert word in text
    assert repr(sg.find_units(mlp(), torch.randn(3, 5))) == text


def test_skipped_prints_name_and_reason() -> None:
    (skipped,) = sg.find_units(mlp(), torch.randn(3, 5)).skipped
    assert str(skipped) == "4: its neurons are the model's output"


# ---- names -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Parameters of its own, which are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 5))
        self.w2 = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.w1.T).tanh() @ self.w2.T).tanh()


def test_several_units_of_one_module_are_named_after_their_parameters() -> None:
    model = nn.Sequential(Block(), nn.Linear(3, 2))
    check_model(model, torch.randn(3, 5), {"0.w1": 4, "0.w2": 3}, {"1": "output"})


def test_a_refused_parameter_beside_a_unit_is_named() -> None:
    model = nn.Sequential(Block(), nn.Softmax(-1), nn.Linear(3, 2))
    reason = "1 (Softmax): is normalised over (softmax)"
    check_model(model, torch.randn(3, 5), {"0": 4}, {"0.w2": reason, "2": "output"})


def test_parameters_of_the_root_are_named_themselves() -> None:
    check_model(Block(), torch.randn(3, 5), {"w1": 4}, {"w2": "output"})


class Parts(nn.Module):
    """One layer whose channels go different ways."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 7)
        self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        n = h.shape[1] - self.b.in_features
        first, second = h[:, :n].tanh(), h[:, n:]
        return self.a(first) + self.b(second.softmax(-1) if self.mixed else second.sigmoid())


def test_parts_of_one_layer_are_named_by_their_ranges() -> None:
    found = check_model(Parts(), torch.randn(3, 5), {"fc[0:3]": 3, "fc[3:7]": 4}, None)
    assert found["fc[3:7]"].theta[0].positions.tolist() == [[3], [4], [5], [6]]


def test_a_refused_part_of_a_layer_is_named_by_its_range() -> None:
    found = check_model(Parts(mixed=True), torch.randn(3, 5), {"fc": 3}, None)
    check_refused(found, {"fc[3:7]": "is normalised over (softmax)", "a": "output", "b": "output"})


def test_units_that_share_their_entries_have_names_of_their_own() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 6)
            self.mix = nn.Parameter(torch.randn(2, 2))
            self.heads = 2
            self.out = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x).tanh().unflatten(1, (self.mix.shape[0], -1))  # (batch, heads, channels)
            return self.out(h.flatten(1))

    found = sg.find_units(Heads(), torch.randn(3, 5))
    names = [unit.name for unit in found] + [skipped.name for skipped in found.skipped]
    assert len(set(names)) == len(names)


def test_reasons_leave_out_the_place_where_it_is_the_module_itself() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(16, 2))
    units = sg.find_units(model, torch.randn(3, 4, 2, 2))
    reasons = {skipped.name: skipped.reason for skipped in units.skipped}
    assert reasons["0"].startswith("a grouped convolution (groups=2)")


# ---- exclude ---------------------------------------------------------------------------------


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.first = self.net[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_a_module_with_two_names_is_called_by_the_first() -> None:
    check_model(Renamed(), torch.randn(2, 3), ["net.0"])


class Heard(nn.Module):
    """A layer of another kind, and a linear layer that reads it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        heard = self.layer(x)
        return self.head(heard[0] if isinstance(heard, tuple) else heard)


@pytest.mark.parametrize(
    ("layer", "x", "reason"),
    [
        (nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3), "recurrent layer"),
        (nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3), "recurrent layer"),
        (nn.EmbeddingBag(9, 4, mode="sum"), torch.zeros(2, 5, dtype=torch.int64), "has no rule"),
    ],
    ids=["lstm", "gru", "bag"],
)
def test_layers_that_no_unit_passes_through_are_skipped_by_name(
    layer: nn.Module, x: Tensor, reason: str
) -> None:
    units = sg.find_units(Heard(layer), x)
    assert not len(units)
    assert reason in {skipped.name: skipped.reason for skipped in units.skipped}["layer"]
    assert str(units).startswith("0 units can be split")


@pytest.mark.parametrize("exclude", ["0", ["0"], ("0",), {"0"}])
def test_excluded_units_are_skipped(exclude: Any) -> None:
    units = sg.find_units(mlp(), torch.randn(3, 5), exclude=exclude)
    assert [unit.name for unit in units] == ["2"]
    check_refused(units, {"0": "left out by exclude=", "4": "output"})


def test_excluding_what_is_not_there_is_an_error() -> None:
    with pytest.raises(sg.InputError, match=r"exclude: no unit is called 'fc'.*'0', '2', '4'"):
        sg.find_units(mlp(), torch.randn(3, 5), exclude=["fc"])


def test_excluding_what_cannot_be_split_anyway_is_fine() -> None:
    units = sg.find_units(mlp(), torch.randn(3, 5), exclude=["4"])
    assert [unit.name for unit in units] == ["0", "2"]


# ---- the model they belong to ----------------------------------------------------------------


def test_units_fit_any_model_of_the_same_shapes() -> None:
    units = sg.find_units(mlp(), torch.randn(3, 5))
    units.check(mlp())
    units.check(copy.deepcopy(mlp()))


def test_units_of_another_model_are_an_error() -> None:
    units = sg.find_units(mlp(), torch.randn(3, 5))
    wider = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))
    with pytest.raises(sg.PlanError, match=r"0.weight had shape \(4, 5\).*now has shape \(6, 5\)"):
        units.check(wider)
    with pytest.raises(sg.PlanError, match="is missing"):
        units.check(nn.Linear(5, 4))


def test_finding_units_leaves_no_trace() -> None:
    model = mlp()
    before = copy.deepcopy(model)
    sg.find_units(model, torch.randn(3, 5))
    assert str(model) == str(before)
    assert list(model.state_dict()) == list(before.state_dict())
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert vars(model).keys() == vars(before).keys()


# ---- slots -----------------------------------------------------------------------------------


@given(st.data())
def test_place_is_the_inverse_of_rows(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    entries = data.draw(st.permutations(range(shape[dim])))
    width = data.draw(st.sampled_from(list(range(1, shape[dim] + 1))))
    each = shape[dim] // width
    positions = torch.tensor(entries[: width * each]).reshape(width, each)
    slot = sg.Slot("w", dim, positions)
    tensor = torch.randn(shape)
    rows = slot.rows(tensor)
    assert rows.shape == (width, tensor.numel() // shape[dim] * each)
    for k in range(width):
        assert torch.equal(rows[k], tensor.movedim(dim, 0)[positions[k]].reshape(-1))
    placed = slot.place(rows, shape)
    kept = torch.zeros(shape[dim])
    kept[positions.reshape(-1)] = 1
    expected = tensor * kept.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    assert torch.equal(placed, expected)


class Alike(nn.Module):
    """Two branches whose code asks, where no graph shows it, that they be of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)
        self.out_a, self.out_b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.a.out_features != self.b.out_features:
            raise ValueError("one width, please")
        return self.out_a(torch.tanh(self.a(x))) + self.out_b(torch.tanh(self.b(x)))


def test_units_that_must_grow_together_are_found_out() -> None:
    units = sg.find_units(Alike(), torch.randn(5, 3))
    assert len(units) == 0
    assert {s.name for s in units.skipped if "one width, please" in s.reason} == {"a", "b"}


def test_a_deep_net_is_tried_with_few_passes() -> None:
    layers = [layer for _ in range(31) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(4, 1))
    calls: list[int] = []
    run = trial.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "run", lambda *given: calls.append(1) or run(*given))
        units = sg.find_units(model, torch.randn(2, 4))
    assert len(units) == 31
    assert len(calls) == 1 + 5  # as it is, and the bits of 31
