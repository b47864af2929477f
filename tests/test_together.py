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
    for name in units_of(joined):
        for found in ("values", "vectors", "residuals", "errors"):
            torch.testing.assert_close(
                getattr(joined[name], found), getattr(alone[name], found), rtol=1e-7, atol=1e-10
            )


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
