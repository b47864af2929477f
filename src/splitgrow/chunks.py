"""Work through a batch in pieces that fit the processor's cache.

S is a sum over samples, so a unit's product with it may be taken piece by piece: less memory for
intermediate results, and on a CPU less time, because a piece stays in the cache between one
operation and the next.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor, fx

from splitgrow.analysis import INPUT, OUTPUT, Analysis
from splitgrow.layout import Axis, resolve
from splitgrow.tap import Evidence
from splitgrow.units import Unit

CPU_PIECE = 2**22  # bytes of the largest activation of a piece
GPU_PIECE = 2**28


def chunks(evidence: Evidence, unit: Unit, analysis: Analysis) -> Iterator[Evidence]:
    """The evidence in pieces of some samples each; as it is where samples cannot be told apart."""
    fixed = analysis.graph.constants
    nodes = [*(n for n in evidence.inputs if n not in fixed),
             *(data for _, data in unit.subgraph.edges)]  # fmt: skip
    values = [*(evidence.inputs[n] for n in evidence.inputs if n not in fixed),
              *evidence.gradients]  # fmt: skip
    tensors = [v for v in values if isinstance(v, Tensor)]
    largest = max((t.numel() * t.element_size() for t in tensors), default=0)
    limit = GPU_PIECE if any(t.is_cuda for t in tensors) else CPU_PIECE
    count = -(-largest // limit)
    batch = _batch_axis(analysis)
    if count <= 1 or batch is None or not all(_has_samples(analysis, n, batch) for n in nodes):
        yield evidence
        return
    samples = max(t.shape[0] for t in tensors)
    size = -(-samples // count)
    for start in range(0, samples, size):
        yield _slice(evidence, fixed, start, min(start + size, samples))


def _batch_axis(analysis: Analysis) -> Axis | None:
    """The index of samples, if nothing in the model mixes them."""
    dims = [analysis.dims[n] for n in analysis.graph.inputs if analysis.dims.get(n)]
    axis = resolve(dims[0][0]) if dims else None
    if not isinstance(axis, Axis) or any(r is not INPUT and r is not OUTPUT for r in axis.blocks):
        return None
    return axis


def _has_samples(analysis: Analysis, node: fx.Node, batch: Axis) -> bool:
    """Is dimension 0 of this value the samples, or is it their number?"""
    if node in analysis.dims:
        dims = analysis.dims[node]
        return bool(dims) and resolve(dims[0]) is batch
    if node.target is not torch.ops.aten.sym_size.int or node.args[1] != 0:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and _has_samples(analysis, source, batch)


def _slice(evidence: Evidence, fixed: Container[fx.Node], start: int, end: int) -> Evidence:
    def cut(node: fx.Node, value: Tensor | int) -> Tensor | int:
        if node in fixed:
            return value
        return value[start:end] if isinstance(value, Tensor) else end - start

    return Evidence(
        inputs={node: cut(node, value) for node, value in evidence.inputs.items()},
        gradients=tuple(None if g is None else g[start:end] for g in evidence.gradients),
        samples=evidence.samples,
    )
