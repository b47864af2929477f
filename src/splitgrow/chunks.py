"""Work through the batches in pieces that suit the processor.

S is a sum over samples, so a unit's product with it may be taken piece by piece. Large batches are
divided: less memory for intermediate results, and on a CPU less time, because a piece stays in the
cache between one operation and the next. Small ones are put together: each operation has a price of
its own, which on a GPU is most of the time that small nets take.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from splitgrow.analysis import INPUT, OUTPUT, Analysis
from splitgrow.layout import Axis, resolve
from splitgrow.tap import Evidence
from splitgrow.units import Unit

CPU_PIECE = 2**22  # bytes of the largest activation of a piece
GPU_PIECE = 2**28


def pieces(evidence: list[Evidence], unit: Unit, analysis: Analysis) -> Iterator[Evidence]:
    """What all batches say about a unit, divided anew; as it is where samples are not told apart.

    The batches are taken out of the list, so that nobody holds them any longer than needed.
    """
    fixed = analysis.graph.constants
    divisible = _is_divisible(evidence, unit, analysis)
    while evidence:
        together = [evidence.pop(0)]
        if not divisible:
            yield together.pop()
            continue
        limit = max(map(limit_of, together[0].tensors()), default=CPU_PIECE)
        size = _largest(together[0].tensors())
        while evidence and _alike([together[0], evidence[0]], fixed):
            size += _largest(evidence[0].tensors())
            if size > limit:
                break
            together.append(evidence.pop(0))
        yield from _divided(_joined(together, fixed), fixed, limit)


def _is_divisible(evidence: Sequence[Evidence], unit: Unit, analysis: Analysis) -> bool:
    """Is dimension 0 of everything the samples, which nothing mixes?"""
    batch = _batch_axis(analysis)
    varying = {n for e in evidence for n in e.inputs} - set(analysis.graph.constants)
    nodes = [*varying, *(data for _, data in unit.subgraph.edges)]
    return batch is not None and all(_has_samples(analysis, n, batch) for n in nodes)


def _tensors(evidence: Evidence, fixed: Container[fx.Node]) -> list[Tensor]:
    inputs = [value for node, value in evidence.inputs.items() if node not in fixed]
    return [t for t in (*inputs, *evidence.gradients) if isinstance(t, Tensor)]


def _largest(tensors: Sequence[Tensor]) -> int:
    return max((t.numel() * t.element_size() for t in tensors), default=0)


def _rows(tensors: Sequence[Tensor]) -> int:
    return max(t.shape[0] for t in tensors)


def limit_of(tensor: Tensor) -> int:
    """How large a piece may be where a tensor is."""
    return GPU_PIECE if tensor.is_cuda else CPU_PIECE


def _alike(evidence: Sequence[Evidence], fixed: Container[fx.Node]) -> bool:
    """Do they differ in nothing but their samples, so that they can be joined?"""

    def shape(e: Evidence) -> Any:
        seen = [g is None for g in e.gradients]
        return list(e.inputs), seen, [(t.shape[1:], t.dtype) for t in _tensors(e, fixed)]

    return all(shape(e) == shape(evidence[0]) for e in evidence)


def _joined(batches: Sequence[Evidence], fixed: Container[fx.Node]) -> Evidence:
    """One batch of several: each one's g, a mean over its samples, has its share of them all."""
    if len(batches) == 1:
        return batches[0]
    samples = sum(batch.samples for batch in batches)

    def join(node: fx.Node) -> Any:
        values = [batch.inputs[node] for batch in batches]
        if node in fixed:
            return values[0]
        return torch.cat(values) if isinstance(values[0], Tensor) else sum(values)

    def gradient(parts: Sequence[Tensor | None]) -> Tensor | None:
        shares = [
            g * (batch.samples / samples)
            for g, batch in zip(parts, batches, strict=True)
            if g is not None
        ]
        return torch.cat(shares) if shares else None

    return Evidence(
        inputs={node: join(node) for node in batches[0].inputs},
        gradients=tuple(map(gradient, zip(*(b.gradients for b in batches), strict=True))),
        samples=samples,
        groups=tuple(replace(b.groups[0], rows=_rows(_tensors(b, fixed))) for b in batches),
    )


def groups_of(evidence: Evidence, fixed: Container[fx.Node]) -> Iterator[Evidence]:
    """What each of the batches says that were put together."""
    start = 0
    for group in evidence.groups:
        part = _slice(evidence, fixed, start, start + group.rows)
        yield replace(part, groups=(group,))
        start += group.rows


def _divided(evidence: Evidence, fixed: Container[fx.Node], limit: int) -> Iterator[Evidence]:
    tensors = _tensors(evidence, fixed)
    count = -(-_largest(tensors) // limit)
    if count <= 1:
        yield evidence
        return
    samples = _rows(tensors)
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
        groups=(evidence.groups[0].part(start, end),),
    )
