"""Units that Lanczos solves side by side have the scores that each has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import splitgrow as sg
from splitgrow import solve, together, zoo

NETS = {
    "vgg": lambda: zoo.VGG([4, 6, "M", 5, "M", 7]),
    "mobilenet": lambda: zoo.MobileNetV1([(6, 1), (7, 2), (5, 1)], stem=5),
}
STEPS = 3


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(params=NETS.values(), ids=NETS)
def net(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = request.param().double().eval()
    return made


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The units of each call of Lanczos."""
    seen: list[list[str]] = []
    original = together.Together.smallest

    def smallest(self: together.Together, steps: int) -> Any:
        seen.append([member.products.unit.name for member in self._members])
        return original(self, steps)

    monkeypatch.setattr(together.Together, "smallest", smallest)
    return seen


def scored(net: nn.Module, units: sg.Units, **more: Any) -> sg.Scores:
    torch.manual_seed(1)
    batches = [(torch.randn(n, 3, 16, 16).double(), torch.randint(10, (n,))) for n in (3, 5)]
    return sg.score(net, loss_fn, batches, units=units, steps=STEPS, **more)


def test_side_by_side_as_alone(
    net: nn.Module, groups: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    units = sg.find_units(net, torch.randn(1, 3, 16, 16).double())
    joined = scored(net, units)
    (family,) = groups
    assert sorted(family) == sorted(n for n, s in joined.items() if s.method == "lanczos")
    assert len({units[name].size for name in family}) > 1  # vectors of several lengths
    groups.clear()
    monkeypatch.setattr(solve, "limit_of", lambda theta: 0)
    alone = scored(net, units)
    assert all(len(family) == 1 for family in groups)
    assert all(joined[name].vectors.is_contiguous() for name in units_of(joined))
    for name in units_of(joined):
        for found in ("values", "vectors", "residuals", "errors"):
            torch.testing.assert_close(
                getattr(joined[name], found), getattr(alone[name], found), rtol=1e-7, atol=1e-10
            )


class Beside(nn.Module):
    """A unit of few parameters beside one of many, each with an input of its own."""

    def __init__(self, few: int, many: int) -> None:
        super().__init__()
        self.many, self.few = nn.Linear(many, 2), nn.Linear(few, 32)
        self.ends = nn.ModuleList([nn.Linear(2, 1), nn.Linear(32, 1)])

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.ends[0](torch.tanh(self.many(x[0]))) + self.ends[1](torch.tanh(self.few(x[1])))


def test_small_indexes_are_found_beside_a_far_larger_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts as rounding of 0 goes by a neuron's own size, in float32."""
    monkeypatch.setattr(solve, "limit_of", lambda _: 1e9)  # else they are not put together
    monkeypatch.setattr(solve.span, "pays", lambda *_: False)
    torch.manual_seed(3)
    model, count, wide = Beside(20, 8000), 60, 30.0
    scale = torch.tensor([wide] + 19 * [0.1])  # indexes of very different sizes
    with torch.no_grad():
        model.few.weight[:, 0] *= 0.01
        model.few.bias.fill_(1.0)
    batch = ((torch.randn(count, 8000), torch.randn(count, 20) * scale), torch.randn(count, 1))
    values = {}
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        inputs = tuple(x.to(dtype) for x in batch[0])
        values[dtype] = sg.score(
            model, lambda m, b: F.mse_loss(m(b[0]), b[1]), [(inputs, batch[1].to(dtype))], steps=19,
            units=sg.find_units(model, (inputs,)),
        )["few"].values.double()  # fmt: skip
    exact = values[torch.float64]
    assert ((values[torch.float32] < 0) == (exact < 0)).all()
    torch.testing.assert_close(values[torch.float32], exact, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "families"),
    [((20, 30), [["few", "many"]]), ((20, 8000), [["few"], ["many"]])],
)
def test_units_of_other_sizes_do_not_wait_for_each_other(
    sizes: tuple[int, int], families: list[list[str]], groups: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Filled up to the size of a large one, small ones would take its time and memory."""
    monkeypatch.setattr(solve.span, "pays", lambda *_: False)
    torch.manual_seed(0)
    model = Beside(*sizes)
    inputs = (torch.randn(9, sizes[1]), torch.randn(9, sizes[0]))
    sg.score(
        model, lambda m, b: m(b[0]).square().mean(), [(inputs, None)], steps=8,
        units=sg.find_units(model, (inputs,)),
    )  # fmt: skip
    assert sorted(sorted(family) for family in groups) == families


def units_of(scores: sg.Scores) -> list[str]:
    return [name for name, found in scores.items() if found.method == "lanczos"]


def test_they_start_from_known_directions_too(net: nn.Module, groups: list[list[str]]) -> None:
    units = sg.find_units(net, torch.randn(1, 3, 16, 16).double())
    cold = scored(net, units)
    warm = scored(net, units, start=cold)
    assert len(groups) == 2
    for name in units_of(cold):
        assert (warm[name].values <= cold[name].values + 1e-9).all()
    assert any((warm[n].values < cold[n].values - 1e-9).any() for n in units_of(cold))


def test_units_of_another_dtype_stand_apart(groups: list[list[str]]) -> None:
    """A model may have several: its vectors cannot be in one tensor."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coarse = nn.Sequential(nn.Linear(30, 4), nn.Tanh(), nn.Linear(4, 30))
            self.fine = nn.Sequential(nn.Linear(30, 4), nn.Tanh(), nn.Linear(4, 2)).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.fine(self.coarse(x).double())

    torch.manual_seed(0)
    model, x, y = Mixed(), torch.randn(40, 30), torch.randint(2, (40,))
    scores = sg.score(model, loss_fn, [(x, y)], steps=STEPS)
    assert groups == [["fine.0"], ["coarse.0"]]
    assert {found.values.dtype for found in scores.values()} == {torch.float32, torch.float64}


class Operations(TorchDispatchMode):
    """Counts what is run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what joining them is for."""
    torch.manual_seed(0)
    net = zoo.VGG([4, "M", 4, 4, 4, 4, 4]).eval()
    batch = (torch.randn(16, 3, 8, 8), torch.randint(10, (16,)))
    units = sg.find_units(net, batch[0][:1])
    with Operations() as joined:
        sg.score(net, loss_fn, [batch], units=units, steps=8)
    monkeypatch.setattr(solve, "limit_of", lambda theta: 0)
    with Operations() as apart:
        sg.score(net, loss_fn, [batch], units=units, steps=8)
    assert joined.count < 0.6 * apart.count
