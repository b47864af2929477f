"""A model as one ONNX file for batches of any size, compared with it before it is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitgrow.capture import Call, ExampleInputs, _export, _first_line, _fixed, _Structure
from splitgrow.errors import ExportError
from splitgrow.export.check import (
    TOLERANCE,
    Exported,
    calls_of,
    check_finite,
    check_like,
    check_same,
    feeds_of,
    first_samples,
    in_main_memory,
    in_sizes,
    input_names,
    latency,
    output_names,
    quiet,
    torch_latency,
    write,
)
from splitgrow.export.runner import OnnxRunner, require_onnx
from splitgrow.state import eval_mode

LARGEST = 2**31 - 1  # bytes of one protobuf message
EXACT = (  # onnxscript's rules that leave the function as it is, whatever its constants are
    "fuse_batchnorm_into_conv", "fuse_batchnorm_into_conv_transpose", "fuse_batchnorm_into_gemm",
    "normalize_pad_format_conv", "fuse_pad_into_conv", "dropout_zero", "dropout_inference",
    "cast_cast", "no_op_cast", "no_op_expand", "no_op_transpose", "transpose_transpose",
    "reshape_reshape", "squeeze_reshape_1d", "unsqueeze_unsqueeze", "materialize_reshape_shape",
    "collapse_slice", "collapse_slice2", "successive_relu",
)  # fmt: skip


def export_onnx(
    model: nn.Module,
    example_inputs: ExampleInputs | Call,
    path: str | Path,
    *,
    batches: Iterable[ExampleInputs | Call] | None = None,
    tolerance: float = TOLERANCE,
    metadata: Mapping[str, str] | None = None,
) -> Exported:
    """Write a model in eval mode as one ONNX file that takes any batch size.

    The file holds its weights. Its inputs have the names of the arguments of ``forward``, its
    outputs the keys of the model's dict, or ``output``. The model is not changed.

    Args:
        model: any model that ``torch.export`` can trace, grown or not.
        example_inputs: as for :func:`splitgrow.find_units`.
        path: the file to write or replace.
        batches: real inputs to compare the file with PyTorch on, each as ``example_inputs`` are;
            without them, the example alone is compared. The first of them also in batches of one
            and three.
        tolerance: the largest absolute difference of an output that is accepted.
        metadata: texts by name for whoever runs the file: names of classes, how inputs are made.

    Raises:
        CaptureError: the model cannot be traced.
        ExportError: ONNX cannot express it, or the file does not compute the same; none is written.
        InputError: the packages of the extra ``export`` are missing, or an argument is not usable.
    """
    require_onnx()
    model = in_main_memory(model)
    (example,) = calls_of([example_inputs], model)
    calls = calls_of([] if batches is None else batches, model)
    check_like(example, calls)
    content = onnx_bytes(model, example, metadata or {})
    runner = OnnxRunner(content)
    varied = in_sizes((calls or [example.with_batch_of_two()])[0])
    checked = check_same(model, runner, [*(calls or [example]), *varied], tolerance)
    check_finite(model, runner, example)
    single = first_samples(example, 1)
    feeds = feeds_of(single, runner.inputs, "the file")
    seconds, torch_seconds = latency(lambda: runner.run(feeds)), torch_latency(model, single)
    write(Path(path), content)
    return Exported(
        Path(path), len(content), checked.difference, seconds, torch_seconds, checked.batch_sizes
    )


# --- the file -----------------------------------------------------------------------------


def onnx_bytes(model: nn.Module, example: Call, metadata: Mapping[str, str]) -> bytes:
    """The contents of the file."""
    _check_size(model)
    program, structure = traced(model, example)
    try:
        with quiet():
            exported = torch.onnx.export(
                program, dynamo=True, external_data=False, verbose=False, optimize=False
            )
            assert exported is not None
            _simplify(exported.model)
            message = exported.model_proto
    except Exception as error:  # the exporter's own, and whatever it runs into
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ExportError(
            f"{type(model).__name__} cannot be written as ONNX: {_first_line(cause)}. An operation "
            "that ONNX does not have must be written with others."
        ) from error
    _rename(message.graph, input_names(example), output_names(structure))
    _strip(message.graph)
    _name_batch(message.graph)
    set_metadata(message, metadata)
    content: bytes = message.SerializeToString()
    return content


def _simplify(model: Any) -> None:
    """What torch.onnx.export(optimize=True) does, without the rules that compare roughly.

    There x + 1e-8 counts as x + 0 and x * 1.000001 as x, so that x / (x.sum() + 1e-8) loses what
    keeps it from 0 / 0.
    """
    import onnx_ir.passes.common as tidying
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules import common

    names = [f"{name}_rule" for name in EXACT]
    rules = [getattr(common, name) for name in names if hasattr(common, name)]  # grows by version
    optimizer.inline(model)
    for _ in range(2):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        rewriter.rewrite(model, rules)
    tidying.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    tidying.DeduplicateInitializersPass()(model)
    tidying.CommonSubexpressionEliminationPass()(model)
    tidying.NameFixPass()(model)


def traced(model: nn.Module, example: Call) -> tuple[torch.export.ExportedProgram, _Structure]:
    """The model's program with a batch size that may vary."""
    with eval_mode(model):
        program, structure, samples = _export(model, example)
    inputs = set(program.graph_signature.user_inputs)
    sizes = [
        node.meta["val"].shape[0]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in inputs and node.meta["val"].ndim
    ]
    if sizes and all(_fixed(size) != "any" for size in sizes):
        raise ExportError(
            f"{type(model).__name__} takes batches of {samples} alone: its forward fixes that size "
            "(a reshape to a number, a loop over samples). Take it from the input: x.flatten(1), "
            "x.reshape(x.shape[0], -1)."
        )
    return program, structure


def _check_size(model: nn.Module) -> None:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > LARGEST:
        raise ExportError(
            f"{type(model).__name__} has {size / 1e9:.1f} GB of weights, and one ONNX file holds 2 "
            "at most. Export it in half precision, or with torch.onnx.export and external data."
        )


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Our names for inputs and outputs; whatever has such a name inside gets another one.

    torch.onnx.export(input_names=...) does not look whether a node has that name already.
    """
    _separate(graph)
    wanted: dict[str, str] = {}
    for value, name in zip([*graph.input, *graph.output], [*inputs, *outputs], strict=True):
        wanted[value.name] = _free(name, set(wanted.values()))
    taken = set(wanted.values())
    for node in _nodes(graph):
        for names in (node.input, node.output):
            names[:] = [_renamed(name, wanted, taken) for name in names]
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = _renamed(value.name, wanted, taken)


def _separate(graph: Any) -> None:
    """An output that is an input, a weight or another output gets a value of its own."""
    from onnx import helper

    seen = {value.name for value in (*graph.input, *graph.initializer)}
    for index, value in enumerate(graph.output):
        if value.name in seen:
            own = f"{value.name}.returned.{index}"
            graph.node.append(helper.make_node("Identity", [value.name], [own]))
            value.name = own
        seen.add(value.name)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_out"
    return name


def _renamed(name: str, wanted: dict[str, str], taken: set[str]) -> str:
    return wanted.get(name, f"{name}.inner" if name in taken else name)


def _nodes(graph: Any) -> list[Any]:
    """All nodes, those of branches and loops too."""
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for each in inner for node in _nodes(each))]


def _strip(graph: Any) -> None:
    """Leave out what torch notes about its own work: it is half of a small file, with paths."""
    nodes = _nodes(graph)
    for each in (*nodes, *graph.input, *graph.output, *graph.initializer, *graph.value_info):
        del each.metadata_props[:]
    for node in nodes:
        node.doc_string = ""
    del graph.metadata_props[:]


def set_metadata(message: Any, metadata: Mapping[str, str]) -> None:
    """These texts in the place of all others."""
    del message.metadata_props[:]
    for name, text in metadata.items():
        message.metadata_props.add(key=name, value=text)


def _name_batch(graph: Any) -> None:
    """The symbol of the varying size gets a name that says what it is."""
    values = [*graph.input, *graph.output, *graph.value_info]
    shapes = [value.type.tensor_type.shape for value in values]
    symbols = [d.dim_param for s in shapes[: len(graph.input)] for d in s.dim if d.dim_param]
    if not symbols:
        return
    for size in (size for shape in shapes for size in shape.dim if size.dim_param):
        size.dim_param = re.sub(rf"\b{re.escape(symbols[0])}\b", "batch", size.dim_param)
