"""Training on the device, and the random changes of images."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.paper import training
from splitgrow.paper.augment import elastic, mirror_and_shift
from splitgrow.paper.training import Course, Rate, adam, adamw, half_precision, sgd
from splitgrow.phase import Phase

COURSE = Course(samples=50, batch=8, epochs=3, rate=Rate(0.1))


def problem(device: str = "cpu") -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(50, 4)
    y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + 0.3
    return nn.Linear(4, 1).to(device), x.to(device), y.unsqueeze(1).to(device)


def train(
    course: Course = COURSE, device: str = "cpu", make=sgd, phase: Phase | None = None, **more
):
    net, x, y = problem(device)
    phase = Phase() if phase is None else phase
    torch.manual_seed(2)
    course.train(net, lambda i: F.mse_loss(net(x[i]), y[i]), make, phase, **more)
    return net, phase


def by_hand(course: Course, make) -> tuple[nn.Linear, list[float]]:
    """The same training as anyone would write it."""
    net, x, y = problem()
    torch.manual_seed(2)
    optimizer, losses, step = make(net.parameters(), torch.tensor(0.1)), [], 0
    steps = course.samples // course.batch
    for _ in range(course.epochs):
        order, losses_of_epoch = torch.randperm(course.samples), []
        for k in range(steps):
            at = (step + 0.5) / (steps * course.epochs)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(course.rate.at(at))
            index = order[k * course.batch : (k + 1) * course.batch]
            loss = F.mse_loss(net(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses_of_epoch.append(loss.item())
            step += 1
        losses.append(sum(losses_of_epoch) / steps)
    return net, losses


@pytest.mark.parametrize("make", [sgd, adam, adamw])
@pytest.mark.parametrize("shape", ["steps", "cosine", "linear", "constant"])
def test_a_course_is_the_plain_loop(make, shape: str) -> None:
    course = replace(COURSE, rate=Rate(0.05, shape, warm_up=0.2))
    net, phase = train(course, make=make)
    expected, losses = by_hand(course, make)
    torch.testing.assert_close(net.weight, expected.weight, rtol=1e-5, atol=1e-6)
    assert [loss for _, loss in phase.curve] == pytest.approx(losses, rel=1e-4)
    assert net.training


@pytest.mark.cuda
@pytest.mark.parametrize("make", [sgd, adam, adamw])
def test_a_recorded_course_is_the_plain_loop(make) -> None:
    course = replace(COURSE, samples=48, batch=48, epochs=12)  # any order of a whole batch
    net, phase = train(course, "cuda", make)
    expected, losses = by_hand(course, make)
    torch.testing.assert_close(net.weight.cpu(), expected.weight, rtol=1e-3, atol=1e-4)
    assert [loss for _, loss in phase.curve] == pytest.approx(losses, rel=1e-2)


def test_rates_follow_their_rules() -> None:
    steps = Rate(0.1, "steps")
    assert [steps.at(t) for t in (0, 0.49, 0.5, 0.74, 0.75, 1)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )
    assert Rate(2, "linear", warm_up=0.5).at(0.25) == 1
    assert Rate(2, "linear", warm_up=0.5).at(0.75) == 1
    assert Rate(2, "cosine").at(0.5) == pytest.approx(1)
    assert Rate(2, "cosine").table(1000)[-1] == pytest.approx(0, abs=1e-5)
    assert Rate(2, "constant").table(3).tolist() == [2, 2, 2]


def test_gradients_can_be_changed_before_the_step() -> None:
    net, x, y = problem()
    start = net.weight.detach().clone()

    def nothing() -> None:
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()

    still = replace(COURSE, rate=Rate(0.1, "constant"))
    make = lambda p, rate: sgd(p, rate, weight_decay=0)  # noqa: E731
    still.train(net, lambda i: F.mse_loss(net(x[i]), y[i]), make, Phase(), nothing)
    assert torch.equal(net.weight, start)


def test_every_epoch_sees_each_sample_at_most_once() -> None:
    seen: list[list[int]] = []
    net, x, y = problem()

    def loss_of(index: Tensor) -> Tensor:
        seen.append(index.tolist())
        return F.mse_loss(net(x[index]), y[index])

    COURSE.train(net, loss_of, sgd, Phase())
    epochs = [list(itertools.chain(*seen[i : i + 6])) for i in (0, 6, 12)]
    assert len(seen) == 18
    assert all(len(set(epoch)) == 48 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_course_stops_when_asked() -> None:
    class Asked:
        def is_set(self) -> bool:
            return True

    _, phase = train(phase=Phase(stop=Asked()))
    assert len(phase.curve) == 1


@pytest.mark.parametrize("wrong", [{"batch": 51}, {"batch": 0}, {"epochs": 0}])
def test_a_course_needs_a_batch_and_an_epoch(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least one epoch of at least one batch"):
        replace(COURSE, **wrong)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(InputError, match="expected one of steps, cosine, linear, constant, got 's"):
        Rate(0.1, "stairs")


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_cpu_computes_in_half_precision_where_that_is_faster(
    able: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_multiplies_bf16", lambda: able)
    net = nn.Conv2d(4, 4, 3, groups=groups)
    with half_precision(net, torch.device("cpu")):
        found = net(torch.ones(1, 4, 5, 5)).dtype
    assert found == (torch.bfloat16 if able and groups == 1 else torch.float32)


# --- images ----------------------------------------------------------------------------------


def test_mirrored_and_shifted_images_are_just_that() -> None:
    images = torch.rand(40, 2, 6, 5)
    found = mirror_and_shift(images, most=1)
    assert found.shape == images.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    kinds = set()
    for image, made in zip(images, found, strict=True):
        wide = F.pad(image, (1,) * 4)
        options = {
            (down, right, mirrored): wide[:, down : down + 6, right : right + 5].flip(
                [2] if mirrored else []
            )
            for down, right, mirrored in itertools.product(range(3), range(3), (False, True))
        }
        same = [key for key, option in options.items() if torch.equal(option, made)]
        assert len(same) == 1
        kinds |= set(same)
    assert len(kinds) > 12  # of 18


def test_an_elastic_field_of_size_0_changes_nothing() -> None:
    images = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(elastic(images, size=0), images, rtol=0, atol=1e-5)


def test_elastic_pixels_move_by_less_than_a_pixel_or_so() -> None:
    ramp = torch.arange(28.0).expand(28, 28).expand(200, 1, 28, 28)  # the value is the place
    moved = (elastic(ramp) - ramp)[:, 0, 5:-5, 5:-5]
    assert 0.6 < moved.std() < 1.0
    assert moved.mean().abs() < 0.1
    assert (moved[:, 1:] - moved[:, :-1]).std() < 0.3  # smooth
    assert not torch.equal(moved[0], moved[1])
