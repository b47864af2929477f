"""Exported graphs without in-place operations: as run_decompositions makes them."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from splitgrow.functional import functional


class Permuted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(1)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).mul_(2).flatten(1)


class TwoDimensions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().flatten(-2, -1)


class Unread(nn.Module):
    """A layer and a function whose results nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        self.unread(x).flatten(1)
        return x.relu()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.flatten()


MODELS: dict[str, tuple[nn.Module, bool]] = {  # of (B, 3, 4, 4), and whether it is traced again
    "a convolution with its norm": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                      nn.Linear(16, 2)), False),
    "a norm without scale and shift": (nn.BatchNorm2d(3, affine=False), False),
    "nothing to flatten": (nn.Sequential(nn.Flatten(), nn.Flatten(), nn.Linear(48, 2)), False),
    "dimensions in the middle": (TwoDimensions(), False),
    "flattened at the end": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), False),
    "results that nothing reads": (Unread(), False),
    "a norm at the end": (nn.BatchNorm2d(3), False),
    "a number": (Scalar(), True),
    "the batch as well": (nn.Flatten(0), True),
    "not in the order of memory": (Permuted(), True),
    "a norm by its batch": (nn.BatchNorm2d(3, track_running_stats=False), True),
    "in place": (InPlace(), True),
    "dropout": (nn.Sequential(nn.Dropout(), nn.Flatten()), True),
}  # fmt: skip


def exported(model: nn.Module) -> ExportedProgram:
    example = torch.rand(2, 3, 4, 4)
    with torch.no_grad():
        return torch.export.export(model.eval(), (example,), dynamic_shapes=({0: Dim.AUTO},))


def operations(program: ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_run_decompositions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, again = MODELS[name]
    expected = exported(model).run_decompositions({})
    traced: list[None] = []
    plain = ExportedProgram.run_decompositions

    def watched(program: ExportedProgram, table: object) -> ExportedProgram:
        traced.append(None)
        return plain(program, table)  # type: ignore[arg-type]

    monkeypatch.setattr(ExportedProgram, "run_decompositions", watched)
    found = functional(exported(model))
    assert bool(traced) == again
    assert operations(found) == operations(expected)
    found.graph.lint()
    found.validate()
    for mine, theirs in zip(*(outputs(p) for p in (found, expected)), strict=True):
        assert mine.target == theirs.target
        assert mine.meta["val"].shape[1:] == theirs.meta["val"].shape[1:]


def outputs(program: ExportedProgram) -> list[torch.fx.Node]:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    return list(output.args[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, (_, again) in MODELS.items() if not again])
def test_the_graph_computes_what_the_model_does(name: str) -> None:
    model = MODELS[name][0]
    if isinstance(model, nn.Sequential):  # statistics that are not those of the start
        model.train()(torch.rand(8, 3, 4, 4))
    program = functional(exported(model))
    x = torch.rand(5, 3, 4, 4)
    known = dict(model.named_parameters()) | dict(model.named_buffers())
    env: dict[torch.fx.Node, object] = {}
    for node, spec in zip(
        (n for n in program.graph.nodes if n.op == "placeholder"),
        program.graph_signature.input_specs, strict=True,
    ):  # fmt: skip
        env[node] = x if spec.target is None else known[spec.target]
    for node in program.graph.nodes:
        if node.op == "call_function":
            args = torch.fx.map_arg(node.args, lambda n: env[n])
            env[node] = node.target(*args)
    (result,) = (env[node] for node in outputs(program))
    torch.testing.assert_close(result, model(x))


def test_meta_of_new_nodes() -> None:
    program = functional(exported(MODELS["a convolution with its norm"][0]))
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta and "nn_module_stack" in node.meta for node in nodes)
    (norm,) = (node for node in nodes if "batch_norm" in str(node.target))
    (picked,) = (node for node in nodes if node.target is operator.getitem)
    assert norm.meta["val"][0] is picked.meta["val"]
