"""What a unit computes behind its heads, as a function of z: its gradient, and its curvature.

F(z) = sum_x < g(x), body(z) >. Where the body is activations and linear maps in a row, its Hessian
is diagonal, and jets carry value, slope and curvature along the row.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from splitgrow.capture import shape_of
from splitgrow.convolution import as_convolution
from splitgrow.curvature import (
    Bend,
    Jet,
    Quadratic,
    Softplus,
    apply_to_jet,
    kink_curvature,
    kinks_of,
)
from splitgrow.execute import BATCH_NORM, batch_norm_affine, function_of
from splitgrow.rules import Trait, elementwise, find_rule
from splitgrow.tap import Evidence
from splitgrow.units import Unit


class Body:
    """F as a function of z and of the parameters that the body reads directly."""

    def __init__(
        self,
        unit: Unit,
        constants: dict[fx.Node, Any],
        evidence: Evidence,
        stand_in: Softplus | None,
    ) -> None:
        self._graph = unit.subgraph
        self._constants = constants
        self._evidence = evidence
        self._stand_in = stand_in
        self._edge_set = set(self._graph.edges)
        self._members = set(self._graph.body)

    def gradient(self, leaves: dict[fx.Node, Tensor]) -> tuple[Tensor | None, ...]:
        """dF/dleaf for each leaf, itself differentiable; None where F does not depend on it."""
        live: dict[fx.Node, Any] = dict(leaves)
        for chain in self._chains(live):
            live[chain[-1]] = self._run_chain(chain, live)
        ends = [(live[data], g) for (_, data), g in
                zip(self._graph.edges, self._evidence.gradients, strict=True)
                if g is not None]  # fmt: skip
        if not ends:
            return (None,) * len(leaves)
        return torch.autograd.grad(
            [end for end, _ in ends],
            list(leaves.values()),
            [g for _, g in ends],
            create_graph=True,
            allow_unused=True,
        )

    def diagonal(self, z: fx.Node, value: Tensor) -> Tensor | None:
        """C, the Hessian of F over z, where each entry of z goes its own way.

        For one activation y = f(z) followed by linear maps, C = f''(z) * dF/dy. In any other
        case C is the product of the Hessian with a vector of ones.
        """
        chains = self._chains({z: value})
        rest = [node for chain in chains[1:] for node in chain]
        if not (chains and self._only_input(chains[0][0], {z: value}) is z
                and all(z not in n.all_input_nodes for n in rest)
                and all(_is_linear(n) for n in rest)):  # fmt: skip
            return self._diagonal_by_ones(z, value)
        jet = self._jet(chains[0], z, value)
        if jet.curvature is None:
            return None
        end = chains[0][-1]
        y = jet.value.requires_grad_()
        live: dict[fx.Node, Any] = {end: y}
        if not rest and len(self._graph.edges) == 1:
            (g,) = self._evidence.gradients
            return None if g is None else jet.curvature.mul_(g)
        for node in rest:
            live[node] = self._run(node, live)
        ends = [live[data] for _, data in self._graph.edges]
        pairs = [(t, g) for t, g in zip(ends, self._evidence.gradients, strict=True)
                 if g is not None]  # fmt: skip
        if not pairs:
            return None
        found = torch.autograd.grad([t for t, _ in pairs], y, [g for _, g in pairs])
        return jet.curvature.mul_(found[0])

    def _diagonal_by_ones(self, z: fx.Node, value: Tensor) -> Tensor | None:
        leaf = value.requires_grad_()
        (gradient,) = self.gradient({z: leaf})
        if gradient is None or not gradient.requires_grad:
            return None
        return torch.autograd.grad(gradient, leaf, torch.ones_like(leaf), allow_unused=True)[0]

    def _chains(self, leaves: dict[fx.Node, Tensor]) -> list[list[fx.Node]]:
        """The body's nodes, with runs of unary pointwise functions put together."""
        seen = set(leaves)
        ends = {data for _, data in self._graph.edges}
        chains: list[list[fx.Node]] = []
        for node in self._graph.body:
            before = [n for n in node.all_input_nodes
                      if n in seen and (node, n) not in self._edge_set]  # fmt: skip
            seen.add(node)
            last = chains[-1][-1] if chains else None
            joins = (
                last is not None
                and before == [last]
                and last not in ends
                and _is_pointwise(node)
                and _is_pointwise(last)
                and sum(user in self._members for user in last.users) == 1
            )
            if joins:
                chains[-1].append(node)
            else:
                chains.append([node])
        return chains

    def _run_chain(self, chain: list[fx.Node], live: dict[fx.Node, Any]) -> Any:
        """A unary pointwise function by its value, slope and curvature; anything else as it is."""
        source = self._only_input(chain[0], live)
        if source is not None:
            x = live[source]
            jet = self._jet(chain, source, x.detach())
            if jet.curvature is not None:
                # Past the last activation only derivatives count: any tensor will do as value.
                value = jet.value if self._is_read(chain[-1]) else x.detach()
                return Quadratic.apply(x, value, Bend(x, jet.slope, jet.curvature))
        env = dict(live)
        for node in chain:
            env[node] = self._run(node, env)
        return env[chain[-1]]

    def _is_read(self, node: fx.Node) -> bool:
        """Does another node of the body use this one's value?"""
        return any(n in self._members and (n, node) not in self._edge_set for n in node.users)

    def _only_input(self, node: fx.Node, live: dict[fx.Node, Any]) -> fx.Node | None:
        """The live tensor that a unary pointwise operation works on, its shape kept."""
        inputs = [n for n in node.all_input_nodes if n in live and (node, n) not in self._edge_set]
        if len(inputs) != 1 or not _is_pointwise(node) or not isinstance(live[inputs[0]], Tensor):
            return None
        value = node.meta["val"]
        shape = shape_of(value[0] if isinstance(value, list | tuple) else value)
        return inputs[0] if shape == shape_of(inputs[0].meta["val"]) else None

    def _jet(self, chain: list[fx.Node], source: fx.Node, x: Tensor) -> Jet:
        jet = Jet(x, x.new_ones(()), None)
        with torch.no_grad():
            for node in chain:
                jet = self._jet_step(node, source, jet)
                source = node
        return jet

    def _jet_step(self, node: fx.Node, source: fx.Node, jet: Jet) -> Jet:
        if node.target is operator.getitem:
            return jet
        args = fx.map_arg(node.args, lambda n: jet.value if n is source else self._constants[n])
        if node.target is BATCH_NORM:
            scale, shift = batch_norm_affine(*cast("Any", args))
            return jet.then(torch.addcmul(shift, jet.value, scale), scale, None)
        if _is_copy(node):
            return jet
        kwargs = fx.map_arg(node.kwargs, lambda n: self._constants[n])
        function = partial(_function_of(node), **kwargs)
        return apply_to_jet(node, function, args, jet, self._stand_in)

    def _run(self, node: fx.Node, live: dict[fx.Node, Any]) -> Any:
        """A node's value, with the stand-in's curvature where it has a kink."""

        def lookup(n: fx.Node) -> Any:
            held = n not in live or (node, n) in self._edge_set
            return self._constants[n] if held else live[n]

        args = fx.map_arg(node.args, lookup)
        kwargs = fx.map_arg(node.kwargs, lookup)
        y = _function_of(node)(*args, **kwargs)
        if not (args and isinstance(args[0], Tensor) and args[0].requires_grad):
            return y
        with torch.no_grad():
            bent = kink_curvature(args[0], kinks_of(node, args), self._stand_in)
        if bent is None:
            return y
        flat = torch.zeros_like(bent)
        return y + Quadratic.apply(args[0], flat, Bend(args[0], flat, bent))


def _function_of(node: fx.Node) -> Any:
    return as_convolution(node) or function_of(node)


def _is_copy(node: fx.Node) -> bool:
    found = find_rule(node)
    return found is not None and found.propagate is elementwise.copy


def _is_linear(node: fx.Node) -> bool:
    found = find_rule(node)
    return found is not None and (
        bool(found.traits & Trait.LINEAR) or found.name == "aten::getitem"
    )


def _is_pointwise(node: fx.Node) -> bool:
    found = find_rule(node)
    if found is None:
        return False
    return bool(found.traits & Trait.POINTWISE) or found.name == "aten::getitem"
