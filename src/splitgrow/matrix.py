r"""The splitting matrices of a unit, applied but never built.

    S_k = Hessian over theta_k of  F(theta) = sum_x < g(x), sigma(theta; h(x)) >,

with g and h held constant (Eq. 8 of Liu et al. 2019, for any sigma). F is a sum over neurons, so
its Hessian is block diagonal and one product with it applies the S_k of *all* neurons of the unit
to one vector each.

With sigma = body(head(theta)) and a head that is linear in theta,

    S v = head^T  H_body  head v.

H_body is diagonal where the body is an activation followed by linear maps (closed form: one
product with a stored tensor C); elsewhere it is applied by differentiating a retained graph of
the body's gradient, which costs no further forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitgrow.body import Body
from splitgrow.capture import shape_of
from splitgrow.curvature import (
    Softplus,
)
from splitgrow.execute import run_node, run_nodes
from splitgrow.subgraph import Head
from splitgrow.tap import Evidence
from splitgrow.units import Unit


class SplittingMatrix:
    """S of every neuron of a unit on one batch: maps (width, size) to (width, size)."""

    def __init__(
        self,
        unit: Unit,
        evidence: Evidence,
        constants: dict[fx.Node, Tensor],  # the model's tensors, by placeholder
        stand_in: Softplus | None,
        *,
        closed_form: bool = True,
    ) -> None:
        self._unit = unit
        self._constants = constants | evidence.inputs
        graph = unit.subgraph
        self._shape = torch.Size()  # of z, where there is one head
        self._diagonal: Tensor | None = None
        self._gradient: tuple[GradientEdge | None, ...] = ()
        self._variables: tuple[GradientEdge, ...] = ()
        with torch.enable_grad():
            self._theta = {p: constants[p].detach().requires_grad_() for p in graph.theta}
            z = {head.node: self._run_head(head, self._theta) for head in graph.heads}
            # Edges of the autograd graph, not tensors: the values need not be kept.
            self._heads = [(head, get_gradient_edge(z[head.node])) for head in graph.heads]
            leaves = {node: value.detach() for node, value in z.items()}
            places = [leaf.numel() for leaf in leaves.values()]
            if len(z) == 1:
                (self._shape,) = (leaf.shape for leaf in leaves.values())
            del z
            body = Body(unit, self._constants, evidence, stand_in)
            if graph.diagonal and closed_form:
                (node,) = leaves
                self._diagonal = body.diagonal(node, leaves[node])
            else:
                leaves = {node: leaf.requires_grad_() for node, leaf in leaves.items()}
                leaves |= {p: self._theta[p] for p in graph.direct}
                self._variables = tuple(get_gradient_edge(leaf) for leaf in leaves.values())
                self._gradient = tuple(map(_edge, body.gradient(leaves)))
        # Multiplications of one product, roughly: parameters of a neuron times its places.
        self.work = unit.size * max([*places, *(g.numel() for g in evidence.gradients
                                                if g is not None)], default=0)  # fmt: skip

    @property
    def is_zero(self) -> bool:
        """Is sigma affine in theta, so that no split can help?"""
        return self._diagonal is None and not any(self._gradient)

    def __call__(self, vectors: Tensor) -> Tensor:
        """S_k v_k for every neuron k; ``vectors`` is (width, size)."""
        if self.is_zero:
            return torch.zeros_like(vectors)
        tangents = self._split(vectors)
        with torch.no_grad():
            moved = [self._run_head(head, tangents) for head, _ in self._heads]
            direct = [tangents[p] for p in self._unit.subgraph.direct]
        return self._join(self._pull(self._bend([*moved, *direct])))

    def _bend(self, tangents: list[Tensor]) -> Sequence[Tensor | None]:
        """The body's Hessian."""
        if self._diagonal is not None:
            return [tangents[0].mul_(self._diagonal)]
        return self._hessian(tangents)

    # ---- one head whose filters all see the same: z = X v -------------------------------------

    @property
    def has_rows(self) -> bool:
        """Is there one dense layer in front, of the unit's own neurons and no others?"""
        if len(self._heads) != 1 or self.is_zero:
            return False
        head = self._heads[0][0]
        slots = dict(zip(self._unit.subgraph.theta, self._unit.theta, strict=True))
        return _is_dense_layer(head, self._constants) and all(
            slots[p].dim == 0 and slots[p].positions.shape[1] == 1
            and slots[p].is_whole(self._theta[p].shape[0])
            for p in head.parameters
        )  # fmt: skip

    @property
    def places(self) -> int:
        """How many times each filter is applied."""
        return self._shape.numel() // self._unit.width

    def head_input(self, head: Head) -> tuple[Tensor, dict[str, Any] | None]:
        """What the layer reads, and for a convolution the arguments of ``unfold``."""
        x, weight = (self._constants[n] for n in head.node.args[:2])
        return x, None if weight.ndim == 2 else _unfolding(head.node, weight)

    def bend_rows(self, z: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """The body's Hessian on (width, places) and on the parameters that it reads itself."""
        if self._diagonal is not None:
            return z * self._to_rows(self._diagonal), torch.zeros_like(beside)
        graph, start, tangents = self._unit.subgraph, 0, [self._from_rows(z)]
        slots = dict(zip(graph.theta, self._unit.theta, strict=True))
        for p in graph.direct:
            end = start + self._unit.slot_size(slots[p])
            tangents.append(slots[p].place(beside[:, start:end], self._theta[p].shape))
            start = end
        moved, *direct = self._hessian(tangents)
        rows = [
            torch.zeros_like(self._theta[p]) if t is None else t
            for p, t in zip(graph.direct, direct, strict=True)
        ]
        joined = [slots[p].rows(t) for p, t in zip(graph.direct, rows, strict=True)]
        return (
            torch.zeros_like(z) if moved is None else self._to_rows(moved),
            torch.cat(joined, dim=1) if joined else torch.zeros_like(beside),
        )

    def from_head_order(self, vectors: Tensor) -> Tensor:
        """Vectors with the head's parameters first, in the order of the unit's own."""
        graph = self._unit.subgraph
        order = [*self._heads[0][0].parameters, *graph.direct]
        sizes = dict(zip(graph.theta, self._unit.sizes, strict=True))
        parts = dict(zip(order, vectors.split([sizes[p] for p in order], dim=1), strict=True))
        return torch.cat([parts[p] for p in graph.theta], dim=1)

    @property
    def _channel(self) -> int:
        """The dimension of z that counts the neurons."""
        weight = self._theta[self._heads[0][0].parameters[0]]
        return len(self._shape) - 1 if weight.ndim == 2 else 1

    def _to_rows(self, z: Tensor) -> Tensor:
        return z.movedim(self._channel, 0).reshape(self._unit.width, -1)

    def _from_rows(self, rows: Tensor) -> Tensor:
        shape = [size for i, size in enumerate(self._shape) if i != self._channel]
        return rows.reshape(self._unit.width, *shape).movedim(0, self._channel)

    @property
    def has_forms(self) -> bool:
        """Is v^T S v of each sample known from z = X v alone?"""
        return self._diagonal is not None and self.has_rows

    def forms(self, vectors: Tensor, rows: Sequence[int] | None) -> Tensor:
        """(groups, width) v_k^T S_k v_k of so many rows of dimension 0 each: half a product.

        S = X^T C X with a diagonal C, so it is the sum of C z^2 over the places of a group.
        """
        with torch.no_grad():
            z = self._run_head(self._heads[0][0], self._split(vectors))
        assert self._diagonal is not None
        bent = z.square_().mul_(self._diagonal).movedim(self._channel, -1)
        parts = [bent] if rows is None else bent.split(list(rows))
        return torch.stack([part.flatten(0, -2).sum(dim=0) for part in parts])

    # ---- parts of a product -------------------------------------------------------------------

    def _hessian(self, tangents: list[Tensor]) -> Sequence[Tensor | None]:
        pairs = [(g, t) for g, t in zip(self._gradient, tangents, strict=True) if g is not None]
        return torch.autograd.grad(
            [g for g, _ in pairs],
            self._variables,
            [t for _, t in pairs],
            retain_graph=True,
            allow_unused=True,
        )

    def _pull(self, pushed: Sequence[Tensor | None]) -> dict[fx.Node, Tensor | None]:
        """Back through the heads to the parameters."""
        out: dict[fx.Node, Tensor | None] = {}
        for (head, edge), cotangent in zip(self._heads, pushed, strict=False):
            leaves = [self._theta[p] for p in head.parameters]
            if cotangent is None:
                out |= dict.fromkeys(head.parameters)
            else:
                found = torch.autograd.grad(edge, leaves, cotangent, retain_graph=True)
                out |= dict(zip(head.parameters, found, strict=True))
        direct = self._unit.subgraph.direct
        return out | dict(zip(direct, pushed[len(self._heads) :], strict=True))

    def _run_head(self, head: Head, parameters: dict[fx.Node, Tensor]) -> Tensor:
        """The head as a linear map of its own parameters; any other bias is left out."""
        mine = set(head.parameters) | set(head.prelude)
        values = run_nodes(head.prelude, self._constants | parameters)
        is_value = parameters is self._theta

        def lookup(n: fx.Node) -> Any:
            bias = len(head.node.args) > 2 and head.node.args[2] is n
            if bias and n not in mine and not is_value:
                return None
            return values[n] if n in mine else self._constants[n]

        result: Tensor = run_node(head.node, lookup)
        return result

    def _split(self, vectors: Tensor) -> dict[fx.Node, Tensor]:
        """Rows of (width, size) as tensors of the parameters' shapes."""
        out, start = {}, 0
        for placeholder, slot in zip(self._unit.subgraph.theta, self._unit.theta, strict=True):
            end = start + self._unit.slot_size(slot)
            out[placeholder] = slot.place(vectors[:, start:end], self._theta[placeholder].shape)
            start = end
        return out

    def _join(self, tensors: dict[fx.Node, Tensor | None]) -> Tensor:
        rows = []
        for placeholder, slot in zip(self._unit.subgraph.theta, self._unit.theta, strict=True):
            found = tensors[placeholder]
            if found is None:
                found = torch.zeros_like(self._theta[placeholder])
            rows.append(slot.rows(found))
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def _is_dense_layer(head: Head, constants: dict[fx.Node, Any]) -> bool:
    """A linear layer or an ordinary 2-d convolution, its weight (and bias) as they are."""
    if head.prelude or head.node.args[1] is not head.parameters[0]:
        return False
    x = constants.get(cast("fx.Node", head.node.args[0]))
    if not isinstance(x, Tensor) or head.node.kwargs:
        return False
    if head.node.target is torch.ops.aten.linear.default:
        return True
    if head.node.target is not torch.ops.aten.conv2d.default or x.ndim != 4:
        return False
    return head.node.args[6:] in ((), (1,))


def _unfolding(node: fx.Node, weight: Tensor) -> dict[str, Any]:
    names = ("stride", "padding", "dilation")
    given = dict(zip(names, node.args[3:6], strict=False))
    return {"stride": 1, "padding": 0, "dilation": 1, "kernel_size": weight.shape[2:]} | given


def _edge(gradient: Tensor | None) -> GradientEdge | None:
    """Where to start differentiating a gradient; its value itself need not be kept."""
    if gradient is None or not gradient.requires_grad:
        return None
    return get_gradient_edge(gradient)


def arranged(evidence: Evidence, unit: Unit) -> Evidence:
    """Images with their channels last, in which CPU convolutions take half the time.

    Not where the weights are larger than the images: rearranging them would cost more. And not in
    front of a convolution whose weight gradient oneDNN gets wrong in this order.
    """
    order = torch.channels_last
    if any(map(_is_corrupted_by_channels_last, [h.node for h in unit.subgraph.heads])):
        order = torch.contiguous_format
    tensors = [*evidence.inputs.values(), *evidence.gradients]
    images = [t for t in tensors if isinstance(t, Tensor) and t.ndim == 4 and not t.is_cuda]
    large = max((t.numel() for t in images), default=0) >= unit.width * unit.size
    if order is torch.channels_last and not large:
        return evidence

    def arrange(value: Any) -> Any:
        image = isinstance(value, Tensor) and value.ndim == 4 and not value.is_cuda
        # Not contiguous(), which leaves images of one channel as they are: they have both orders,
        # and convolutions of them are taken for channels first, the slower way.
        return value.to(memory_format=order) if image else value

    return replace(
        evidence,
        inputs={node: arrange(value) for node, value in evidence.inputs.items()},
        gradients=tuple(arrange(g) for g in evidence.gradients),
    )


def _is_corrupted_by_channels_last(node: fx.Node) -> bool:
    """1x1, strided, of few channels: oneDNN (issue 6035) writes past the end of its workspace.

    It takes that of a whole block of channels, 8 or 16, where there are fewer.
    """
    if node.target is not torch.ops.aten.conv2d.default:
        return False
    _, channels, *kernel = shape_of(cast("fx.Node", node.args[1]).meta["val"])
    stride = cast("Sequence[int]", node.args[3]) if len(node.args) > 3 else (1, 1)
    return all(k == 1 for k in kernel) and max(stride) > 1 and channels < 16
