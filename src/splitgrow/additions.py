"""Growth by neurons that are not halves of a parent: new ones, noisy copies, fitted ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn

from splitgrow.distributed import team_of
from splitgrow.errors import InputError
from splitgrow.methods import Grown, Growth, Method, Site, random_entries, shuffled
from splitgrow.optimizer import carry_state, check_optimizer
from splitgrow.plan import SplitPlan
from splitgrow.select import Candidate
from splitgrow.state import Undo, eval_mode
from splitgrow.surgery import Regrowth, along, plan_regrowth, regrow
from splitgrow.team import APART
from splitgrow.trial import largest_change, run
from splitgrow.units import named_tensors
from splitgrow.view import mean_loss, passes

NOISE = 1e-2  # of net2net, relative to a tensor's root mean square
FITTING_PASSES = 20  # of boosting over the batches, at most
FITTING_RATE = 1e-2


@dataclass(frozen=True)
class Offspring:
    """The grown tensors of a model, and in each the entries of the neurons that are new."""

    model: nn.Module
    plans: Mapping[str, Regrowth]
    generator: torch.Generator

    def tensors(self) -> Iterator[tuple[str, Tensor, Regrowth]]:
        """Every tensor that grew."""
        named = named_tensors(self.model)
        for name, plan in self.plans.items():
            yield name, named[name].data, plan

    def renew(self) -> None:
        """New neurons get weights as their layer would at the start; their parents stay whole.

        Columns that read a new neuron are 0, so that it has no effect until it is trained.
        """
        for name, tensor, plan in self.tensors():
            for _, slot, sign in plan.readers:  # a parent's columns were halved
                tensor.mul_(along(torch.where(sign == 1, 2.0, 1.0), slot.dim, tensor))
            for _, slot, sign in plan.moves:
                fresh = self._fresh(name, tensor)
                tensor.copy_(torch.where(_at(sign == -1, slot.dim, tensor), fresh, tensor))
            for _, slot, sign in plan.readers:
                tensor.masked_fill_(_at(sign == -1, slot.dim, tensor), 0)

    def disturb(self, size: float) -> None:
        """The parameters of twins get noise, relative to the tensor's own scale."""
        for _, tensor, plan in self.tensors():
            for _, slot, sign in plan.moves:
                noise = self._normal(tensor) * (size * tensor.square().mean().sqrt())
                tensor.add_(noise * _at(sign == -1, slot.dim, tensor))

    def give_effect(self, size: float, among: Collection[str] | None = None) -> None:
        """Columns that read new neurons get noise, relative to the tensor's own scale."""
        for name, tensor, plan in self.tensors():
            for _, slot, sign in plan.readers if among is None or name in among else ():
                noise = self._normal(tensor) * (size * tensor.square().mean().sqrt())
                tensor.add_(noise * _at(sign == -1, slot.dim, tensor))

    def masks(self) -> dict[str, Tensor]:
        """By parameter, 1 for entries that are a new neuron's or read one, 0 for the others."""
        found: dict[str, Tensor] = {}
        for name, tensor, plan in self.tensors():
            mask = torch.zeros_like(tensor, dtype=torch.bool)
            for _, slot, sign in plan.moves + plan.readers:
                mask |= _at(sign == -1, slot.dim, tensor)
            found[name] = mask.to(tensor.dtype)
        return found

    def _fresh(self, name: str, like: Tensor) -> Tensor:
        """A tensor as its module would initialise it, or as spread out as it is now."""
        path, _, own = name.rpartition(".")
        layer = copy.deepcopy(self.model.get_submodule(path))
        if callable(getattr(layer, "reset_parameters", None)):
            seed = int(torch.randint(2**31, (), generator=self.generator))
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                layer.to("cpu").reset_parameters()  # type: ignore[operator]
            return dict(layer.named_parameters())[own].detach().to(like)
        return self._normal(like) * like.square().mean().sqrt()

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator).to(like)


def _at(which: Tensor, dim: int, like: Tensor) -> Tensor:
    """Entries along one dimension, shaped to broadcast."""
    return along(which.to(torch.uint8), dim, like).bool()


Inherit = Callable[[Mapping[str, Regrowth]], Mapping[str, Regrowth]]


def _halved(plans: Mapping[str, Regrowth]) -> Mapping[str, Regrowth]:
    """As after a split: parent and twin share the gradient."""
    return plans


def _afresh(plans: Mapping[str, Regrowth]) -> Mapping[str, Regrowth]:
    """The parent keeps its state, and a new neuron starts with none."""

    def factors(plan: Regrowth) -> list[tuple[int, Tensor]]:
        signs = [(slot.dim, sign) for _, slot, sign in plan.moves + plan.readers]
        return [(dim, torch.where(sign == -1, 0.0, 1.0)) for dim, sign in signs]

    return {name: replace(plan, offspring=factors(plan)) for name, plan in plans.items()}


def _grow_by(
    site: Site, plan: SplitPlan, change: Callable[[Offspring], None], inherit: Inherit
) -> Growth:
    """Duplicate the neurons of a plan and change the twins; everything or nothing."""
    model, example, team = site.model, plan.units.graph.example, team_of(site.batches)
    plans = plan_regrowth(plan.units, plan.chosen)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if site.optimizer is not None:
        check_optimizer(site.optimizer, parameters, plans)
    shapes = {name: tensor.shape for name, tensor in named_tensors(model).items() if name in plans}
    loss, outputs = mean_loss(model, site.loss_fn, site.batches), run(model, example)
    with Undo() as undo, torch.inference_mode(False), torch.no_grad(), team.guard("growth"):
        regrow(model, plan.units, plans, undo)
        change(Offspring(model, plans, site.generator))
        parity = largest_change(outputs, run(model, example))
        measured = mean_loss(model, site.loss_fn, site.batches) - loss
        if site.optimizer is not None:
            carry_state(site.optimizer, shapes, parameters, inherit(plans), undo)
        team.same_model("model", model, APART)
    return Growth(_twins(plan), measured, loss, parity)


def _twins(plan: SplitPlan) -> tuple[Grown, ...]:
    widths = {unit.name: unit.width for unit in plan.units}
    return tuple(
        Grown(entry.unit, None, widths[entry.unit] + plan.chosen[entry.unit].index(entry.neuron))
        for entry in plan
    )


class _Anywhere(Method):
    """Units chosen at random, in proportion to their widths."""

    def rank(self, site: Site) -> dict[str, list[Candidate]]:
        """At random."""
        return shuffled(random_entries(site), site.generator)


@dataclass(frozen=True)
class NewNeuron(_Anywhere):
    """New neurons with random weights, trained with the others.

    Args:
        effect: size of the columns that read them, relative to those that are there; with 0 (the
            method ``"new"``) they have no effect until they are trained.
    """

    effect: float = 0.0

    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        """Add them."""

        def change(offspring: Offspring) -> None:
            offspring.renew()
            offspring.give_effect(self.effect)

        return _grow_by(site, plan, change, _afresh)


class Net2Net(_Anywhere):
    """Random duplicates with a little noise (Chen et al. 2016)."""

    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        """Duplicate the neurons, halve the columns that read them, disturb the duplicates."""
        growth = _grow_by(site, plan, lambda offspring: offspring.disturb(NOISE), _halved)
        pairs = zip(growth.neurons, plan, strict=True)
        divided = tuple(Grown(g.unit, entry.neuron, g.twin) for g, entry in pairs)
        return Growth(divided, growth.measured, growth.loss, growth.parity)


class Boosting(_Anywhere):
    """New neurons fitted greedily while all others are frozen (Frank-Wolfe).

    The fit is done here, with Adam on the scoring batches and until it no longer helps; the
    training that follows sees the whole net.
    """

    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        """Add them, fit them."""
        if team_of(site.batches).size > 1:
            raise InputError(
                "method: boosting fits its neurons in one process. Give grow() the batches "
                "themselves in place of a Shard, and run it on one."
            )

        def change(offspring: Offspring) -> None:
            offspring.renew()
            _fit_alone(site, offspring)

        return _grow_by(site, plan, change, _afresh)


def _fit_alone(site: Site, offspring: Offspring) -> None:
    """Adam on the entries of new neurons, no other one moves; the best pass is kept.

    Where no pass is better than neurons without effect, they stay without.
    """
    named, masks = named_tensors(site.model), offspring.masks()
    leaves = {name: (named[name], mask) for name, mask in masks.items() if _is_trained(named[name])}
    best, kept = mean_loss(site.model, site.loss_fn, site.batches), _copies(leaves.values())
    offspring.give_effect(1e-3, leaves)  # at 0 the neurons themselves would have no gradient
    last = inf
    for loss in _fitting(site, list(leaves.values())):
        if loss < best:
            best, kept = loss, _copies(leaves.values())
        if last - loss < 1e-3 * abs(last):
            break
        last = loss
    for (parameter, _), value in zip(leaves.values(), kept, strict=True):
        parameter.data.copy_(value)


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _fitting(site: Site, leaves: list[tuple[Tensor, Tensor]]) -> Iterator[float]:
    """The mean loss after each pass over the batches."""
    moments = [(torch.zeros_like(m), torch.zeros_like(m)) for _, m in leaves]
    step = 0
    for _ in range(FITTING_PASSES):
        with eval_mode(site.model), torch.enable_grad():
            for batch in passes(site.batches):
                step += 1
                _step(site.loss_fn(site.model, batch), leaves, moments, step)
        yield mean_loss(site.model, site.loss_fn, site.batches)


def _copies(leaves: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter, _ in leaves]


def _step(
    loss: Tensor,
    leaves: list[tuple[Tensor, Tensor]],
    moments: list[tuple[Tensor, Tensor]],
    step: int,
) -> None:
    gradients = torch.autograd.grad(loss, [p for p, _ in leaves], allow_unused=True)
    with torch.no_grad():
        for (p, mask), (first, second), g in zip(leaves, moments, gradients, strict=True):
            if g is not None:
                first.mul_(0.9).add_(g * mask, alpha=0.1)
                second.mul_(0.99).add_((g * mask).square(), alpha=0.01)
                size = (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
                p.data.sub_(size * mask, alpha=FITTING_RATE)
