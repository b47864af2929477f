"""An exported graph without in-place operations.

``run_decompositions({})`` traces the whole graph a second time, which takes longer than the export
itself. Most graphs have nothing in them that it changes but batch norms and ``flatten``, and these
two are rewritten here.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

aten = torch.ops.aten

# What stays as it is. Whatever is not listed here is left to run_decompositions, which knows all.
UNCHANGED = {
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv_transpose1d.default,
    aten.conv_transpose2d.input, aten.conv_transpose3d.input, aten.linear.default,
    aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
    aten.embedding.default, aten.layer_norm.default, aten.group_norm.default,
    aten.scaled_dot_product_attention.default, aten.softmax.int, aten.log_softmax.int,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
    aten.rsub.Scalar, aten.pow.Tensor_Scalar, aten.square.default, aten.sqrt.default,
    aten.exp.default, aten.log.default, aten.abs.default, aten.sin.default, aten.cos.default,
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default,
    aten.tanh.default, aten.softplus.default, aten.hardtanh.default, aten.hardswish.default,
    aten.hardsigmoid.default, aten.leaky_relu.default, aten.elu.default, aten.mish.default,
    aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default,
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default, aten.mean.dim, aten.sum.dim_IntList, aten.cat.default,
    aten.pad.default, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.permute.default, aten.transpose.int, aten.view.default, aten.sym_size.int,
}  # fmt: skip


def functional(program: ExportedProgram) -> ExportedProgram:
    """The same program with no operation that writes into its inputs; the given one may change."""
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    flat = [node for node in calls if node.target is aten.flatten.using_ints]
    norms = [node for node in calls if node.target is aten.batch_norm.default]
    rest = set(calls) - set(flat) - set(norms)
    known = (
        all(node.target in UNCHANGED for node in rest)
        and all(map(_is_view, flat))
        and all(map(_has_statistics, norms))
    )
    if not known:
        return program.run_decompositions({})
    for node in flat:
        _replace(program, node, _view(node))
    for node in norms:
        _replace(program, node, _affine(node))
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _replace(program: ExportedProgram, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(old.name, new.name)
    program.graph.erase_node(old)


# --- flatten ------------------------------------------------------------------------------------


def _is_view(node: fx.Node) -> bool:
    """Is it a view of its input, with sizes that are numbers or those of the input?"""
    before, after = cast("fx.Node", node.args[0]).meta["val"], node.meta["val"]
    if before.ndim == 0 or not before.is_contiguous():
        return False
    return all(isinstance(size, int) for size in after.shape[_first(node) :])


def _first(node: fx.Node) -> int:
    """The first of the dimensions that become one."""
    given = cast("int", node.args[1]) if len(node.args) > 1 else 0
    return given % cast("fx.Node", node.args[0]).meta["val"].ndim


def _view(node: fx.Node) -> fx.Node:
    source = cast("fx.Node", node.args[0])
    after = node.meta["val"]
    if after.shape == source.meta["val"].shape:
        return source
    with node.graph.inserting_before(node):
        sizes = [
            size if isinstance(size, int) else _size(node, source, dim, size)
            for dim, size in enumerate(after.shape)
        ]
        view = node.graph.call_function(aten.view.default, (source, sizes))
    view.meta = dict(node.meta)
    return view


def _size(node: fx.Node, source: fx.Node, dim: int, size: Any) -> fx.Node:
    found = node.graph.call_function(aten.sym_size.int, (source, dim))
    found.meta = {**node.meta, "val": size}
    return found


# --- batch norm in eval mode --------------------------------------------------------------------


def _has_statistics(node: fx.Node) -> bool:
    """Does it use running mean and variance, which it does not change?"""
    if len(node.args) != 9 or node.kwargs:
        return False
    _, _, _, mean, variance, training, *_ = node.args
    return mean is not None and variance is not None and training is False


def _affine(node: fx.Node) -> fx.Node:
    x, weight, bias, mean, variance, _, momentum, eps, _ = node.args
    value = node.meta["val"]
    with node.graph.inserting_before(node):
        norm = node.graph.call_function(
            aten._native_batch_norm_legit_no_training.default,
            (x, weight, bias, mean, variance, momentum, eps),
        )
        norm.meta = {**node.meta, "val": (value, value.new_empty(0), value.new_empty(0))}
        first = node.graph.call_function(operator.getitem, (norm, 0))
    first.meta = dict(node.meta)
    return first
