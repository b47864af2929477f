"""Checkpoints: a grown model and its optimizer come back bit for bit, or nothing changes."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize

import splitgrow as sg
from cases import CASES, Case
from helpers_split import ConvNet, Problem, Snapshot, hand_plan, mlp, mse, problem
from splitgrow import checkpoint, files, optimizer_file
from splitgrow.attributes import SIZES
from splitgrow.checkpoint import load, read_metadata, save
from splitgrow.errors import CheckpointError, InputError
from splitgrow.optimizer_file import load_optimizer, save_optimizer


def assert_same_tensors(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        assert torch.equal(ours[name], tensor), name


def grow(model: nn.Module, inputs: tuple[Tensor, ...], step: float = 1e-2) -> None:
    """Really split the first and the last neuron of every unit."""
    units = sg.find_units(model, inputs)
    sg.split(model, hand_plan(units, {u.name: [0, u.width - 1] for u in units}), step=step)


@cache
def _grown() -> Problem:
    torch.manual_seed(0)
    p = problem(ConvNet(), (6, 2, 5, 5))
    grow(p.model, p.example)
    return p


def grown() -> ConvNet:
    """Widths 6 and 7, where a new ConvNet has 4 and 5; float64."""
    model = copy.deepcopy(_grown().model)
    assert isinstance(model, ConvNet)
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a grown ConvNet."""
    save(grown(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


# --- round trips --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_model_comes_back_as_it_was(case: Case, tmp_path: Path) -> None:
    model, seed = case.build(), case.build()
    grow(model, case.inputs())
    assert [p.shape for p in model.parameters()] != [p.shape for p in seed.parameters()]
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.add_(1)
    objects = dict(seed.named_parameters())
    save(model, tmp_path / "model")
    assert load(seed, tmp_path / "model") is seed
    assert_same_tensors(seed, model)
    assert str(seed) == str(model)
    assert all(parameter is objects[name] for name, parameter in seed.named_parameters())
    assert torch.equal(seed(*case.inputs()), model(*case.inputs()))


def test_a_loaded_model_can_be_split_again(path: Path) -> None:
    results = []
    for model in (grown(), load(ConvNet().double(), path)):
        torch.manual_seed(1)
        grow(model, _grown().example)
        assert model.depthwise.groups == 8
        results.append(model)
    assert_same_tensors(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model, seed = grown().to(dtype), ConvNet().to(dtype)
    save(model, tmp_path / "model")
    assert_same_tensors(load(seed, tmp_path / "model"), model)
    assert seed.norm1.num_batches_tracked.dtype == torch.int64


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), float("inf"), -0.0], [1e-45, 3.4e38, 0]]))
    save(model, tmp_path / "model")
    loaded = load(nn.Linear(3, 2), tmp_path / "model")
    assert torch.equal(loaded.weight.view(torch.int32), model.weight.view(torch.int32))


def test_values_are_converted_to_the_seeds_floating_type(path: Path) -> None:
    loaded = load(ConvNet(), path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert_same_tensors(loaded, grown().float())


@pytest.mark.parametrize("formats", [(True, True), (True, False), (False, True)])
def test_memory_format_is_the_seeds(formats: tuple[bool, bool], tmp_path: Path) -> None:
    model, seed = grown(), ConvNet().double()
    for net, last in zip((model, seed), formats, strict=True):
        net.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    save(model, tmp_path / "model")
    load(seed, tmp_path / "model")
    assert_same_tensors(seed, model)
    assert seed.conv1.weight.is_contiguous() != formats[1]
    assert seed.conv1.weight.is_contiguous(memory_format=torch.channels_last) == formats[1]


def test_transposed_and_sliced_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False))
    model[0].weight = nn.Parameter(torch.randn(3, 4).t())
    model[1].weight = nn.Parameter(torch.randn(10, 8)[::2, ::2])
    save(model, tmp_path / "model")
    loaded = load(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5, bias=False)), tmp_path / "model")
    assert_same_tensors(loaded, model)


class Tied(nn.Module):
    """Two layers with one weight, and a buffer with two names."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(3, hidden)
        self.again = nn.Linear(3, hidden)
        self.again.weight = self.up.weight
        self.down = nn.Linear(hidden, 2)
        self.register_buffer("scale", torch.rand(hidden))
        self.register_buffer("factor", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x) + self.again(x)).tanh() * self.scale * self.factor)


def test_shared_tensors_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    model, seed = Tied(7), Tied(4)
    save(model, tmp_path / "model")
    with safe_open(tmp_path / "model", framework="np") as file:
        names = set(file.keys())
        aliases = json.loads(file.metadata()["model"])["aliases"]
    assert aliases == {"again.weight": "up.weight", "factor": "scale"}
    assert names == set(model.state_dict()) - set(aliases)
    weight = seed.up.weight
    load(seed, tmp_path / "model")
    assert_same_tensors(seed, model)
    assert seed.up.weight is seed.again.weight is weight
    assert seed.scale is seed.factor
    assert seed.again.out_features == seed.up.out_features == seed.down.in_features == 7


def test_two_parameters_on_the_same_numbers_stay_so(tmp_path: Path) -> None:
    def build(hidden: int) -> nn.Sequential:
        net = mlp(3, hidden, 3, hidden)
        net[4].weight.data = net[0].weight.data
        return net

    model, seed = build(6), build(4)
    save(model, tmp_path / "model")
    load(seed, tmp_path / "model")
    assert_same_tensors(seed, model)
    assert seed[0].weight is not seed[4].weight
    assert seed[0].weight.data_ptr() == seed[4].weight.data_ptr()


def test_a_module_used_twice(tmp_path: Path) -> None:
    def build(width: int) -> nn.Sequential:
        layer = nn.Linear(width, width)
        return nn.Sequential(layer, nn.Tanh(), layer)

    model, seed = build(5), build(3)
    save(model, tmp_path / "model")
    assert_same_tensors(load(seed, tmp_path / "model"), model)
    assert seed[0] is seed[2]
    assert (seed[0].in_features, seed[0].out_features) == (5, 5)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_a_normalisation_without_tensors(kind: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        norm = kind(3, affine=False, track_running_stats=False)
        return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.SiLU(), nn.Conv2d(3, 2, 1)).double()

    p = problem(build(), (4, 2, 5, 5))
    grow(p.model, p.example)
    save(p.model, tmp_path / "model")
    loaded = load(build(), tmp_path / "model")
    assert loaded[1].num_features == 5
    assert torch.equal(loaded(p.example[0]), p.model(p.example[0]))


class Masked(nn.Module):
    """Non-persistent buffers, one as wide as the net and one that is not."""

    def __init__(self, hidden: int = 3, fill: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, hidden), nn.Linear(hidden, 1)
        self.register_buffer("mask", torch.full((hidden,), fill), persistent=False)
        self.register_buffer("table", torch.full((4,), fill), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh() * self.mask) + self.table.sum()


def test_non_persistent_buffers_are_taken_only_where_they_grew(tmp_path: Path) -> None:
    model, seed = Masked(5, 2.0), Masked(3, 1.0)
    save(model, tmp_path / "model")
    load(seed, tmp_path / "model")
    assert torch.equal(seed.mask, torch.full((5,), 2.0))
    assert torch.equal(seed.table, torch.ones(4))
    assert seed.state_dict().keys() == model.state_dict().keys()
    del model.table, seed.mask  # caches come and go
    save(model, tmp_path / "model")
    load(seed, tmp_path / "model")


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_weights(norm: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """Reading a spectral norm's weight in training changes its buffers: it must not be read."""

    def build(hidden: int) -> nn.Module:
        return nn.Sequential(norm(nn.Linear(3, hidden)), nn.Tanh(), nn.Linear(hidden, 1)).train()

    torch.manual_seed(0)
    model, seed = build(6), build(4)
    snapshot = Snapshot(model)
    save(model, tmp_path / "model")
    snapshot.assert_same()
    load(seed, tmp_path / "model")
    assert_same_tensors(seed, model)
    assert seed[0].out_features == 6
    assert seed[0].training
    assert str(seed) == str(model)


def test_a_user_class_that_is_registered(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width, self.shape = width, (width, 1)
            self.weight = nn.Parameter(torch.randn(width))

    save(Layer(5), tmp_path / "unregistered")
    assert load(Layer(3), tmp_path / "unregistered").width == 3  # nothing can tell
    try:

        @sg.sizes_of(Layer)
        def _sizes(layer: Layer) -> dict[str, Any]:
            return {"width": len(layer.weight), "shape": (len(layer.weight), 1)}

        save(Layer(5), tmp_path / "model")
        loaded = load(Layer(3), tmp_path / "model")
        assert (loaded.width, loaded.shape) == (5, (5, 1))
    finally:
        SIZES.pop(Layer, None)
    seed = Layer(3)
    snapshot = Snapshot(seed)
    with pytest.raises(CheckpointError, match=r"width is 5 in the file.*splitgrow\.sizes_of"):
        load(seed, tmp_path / "model")
    snapshot.assert_same()


def test_a_smaller_model_than_the_seed(path: Path) -> None:
    seed = load(ConvNet().double(), path)
    grow(seed, _grown().example)
    assert seed.conv1.out_channels == 8
    load(seed, path)
    assert_same_tensors(seed, grown())
    assert str(seed) == str(grown())
    assert seed.depthwise.groups == 6


def test_gradients_go_and_the_next_backward_works(path: Path) -> None:
    seed = ConvNet().double()
    loss = mse(seed, _grown().batches[0])  # a live graph of the old shapes
    loss.backward(retain_graph=True)
    seed.conv2.bias.requires_grad_(False)
    load(seed, path)
    assert all(p.grad is None for p in seed.parameters())
    assert not seed.conv2.bias.requires_grad
    mse(seed, _grown().batches[0]).backward()
    assert seed.conv1.weight.grad.shape == (6, 2, 3, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_no_grad_and_inference_mode(mode: Callable[[], Any], tmp_path: Path) -> None:
    seed = ConvNet().double()
    with mode():
        save(grown(), tmp_path / "model")
        load(seed, tmp_path / "model")
    assert_same_tensors(seed, grown())
    mse(seed, _grown().batches[0]).backward()
    assert seed.head.weight.grad.any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    seed, model, x = mlp(3, 4, 2), mlp(3, 6, 2), torch.randn(5, 3)
    compiled = torch.compile(seed, backend=backend)
    compiled(x).sum().backward()
    save(torch.compile(model, backend=backend), tmp_path / "model")
    assert load(compiled, tmp_path / "model") is compiled
    out = compiled(x)  # the guards notice
    assert torch.equal(out, model(x))
    out.sum().backward()
    assert seed[0].weight.grad.shape == (6, 3)
    assert_same_tensors(seed, model)


def test_a_model_without_tensors(tmp_path: Path) -> None:
    save(nn.Tanh(), tmp_path / "model")
    load(nn.Tanh(), tmp_path / "model")
    with pytest.raises(CheckpointError, match="the model is Tanh in the file, and ReLU"):
        load(nn.ReLU(), tmp_path / "model")


# --- the file -----------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_saving_changes_nothing(training: bool, tmp_path: Path) -> None:
    model = grown().train(training)
    mse(model, _grown().batches[0]).backward()
    snapshot = Snapshot(model)
    save(model, tmp_path / "model")
    snapshot.assert_same()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_file_is_safetensors_and_json(path: Path) -> None:
    model = grown()
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        assert torch.equal(file.get_tensor("conv1.weight"), model.conv1.weight)
        described = json.loads(file.metadata()["model"])
    assert described["modules"]["depthwise"] == "Conv2d"
    assert described["modules"][""] == "ConvNet"
    assert described["sizes"]["depthwise"] == {"groups": 6, "in_channels": 6, "out_channels": 6}


def test_the_same_model_gives_the_same_bytes(path: Path, tmp_path: Path) -> None:
    save(load(ConvNet().double(), path), tmp_path / "again")
    assert path.read_bytes() == (tmp_path / "again").read_bytes()


def test_metadata(path: Path, tmp_path: Path) -> None:
    notes = {"phase": "3", "résumé": 'says "hello"\n'}
    save(grown(), str(tmp_path / "noted"), metadata=notes)
    assert read_metadata(tmp_path / "noted") == notes
    assert read_metadata(path) == {}
    assert_same_tensors(load(ConvNet().double(), tmp_path / "noted"), grown())
    bad: Any
    for bad in ({"phase": 3}, {3: "phase"}, {"sha256": "x"}, {"format": "x"}, {"a": "\ud800"}):
        with pytest.raises(InputError, match="metadata"):
            save(grown(), path, metadata=bad)
    assert_same_tensors(load(ConvNet().double(), path), grown())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "0.weight is not initialised yet"),
        (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (nn.Linear(2, 2, dtype=torch.complex128), "weight is complex128, which safetensors"),
    ],
)
def test_models_that_cannot_be_saved_or_filled(
    model: nn.Module, message: str, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(CheckpointError, match=message):
        load(model, path)


def test_what_beside_tensors_a_model_may_have(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return object()

    with pytest.raises(CheckpointError, match=r"0 \(Extra\) has extra state"):
        save(nn.Sequential(Extra(2, 2)), tmp_path / "model")
    odd = nn.Module()
    odd.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
    with pytest.raises(CheckpointError, match="__metadata__ is a name"):
        save(odd, tmp_path / "model")
    sparse = nn.Module()
    sparse.register_buffer("links", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"links has the layout torch\.sparse_coo"):
        save(sparse, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_arguments_of_other_kinds(path: Path) -> None:
    other: Any = [nn.Linear(2, 2)]
    for call in (save, load):
        with pytest.raises(InputError, match=r"expected a torch\.nn\.Module, got list"):
            call(other, path)
    for call in (save_optimizer, load_optimizer):
        with pytest.raises(InputError, match=r"expected a torch\.optim\.Optimizer, got list"):
            call(other, path)


KILLED_SAVER = r"""
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from splitgrow.checkpoint import load, save
from splitgrow.files import clean

torch.set_num_threads(1)
random.seed(0)
folder = Path(sys.argv[1])

def build(width):
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
    nn.init.constant_(model[0].weight, width)
    return model

models = [build(width) for width in range(20000, 20010)]
save(models[0], folder / "model")
seen, stale = set(), 0
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        try:
            while True:
                save(random.choice(models), folder / "model")
        finally:
            os._exit(1)
    random.random()
    time.sleep(random.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    loaded = load(build(8), folder / "model")
    width = loaded[0].out_features
    assert (loaded[0].weight == width).all() and loaded[2].in_features == width
    seen.add(width)
    stale += len(clean(folder))
    assert [p.name for p in folder.iterdir()] == ["model"]
print(json.dumps({"seen": len(seen), "stale": stale}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_saving(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_SAVER, str(tmp_path), "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seen"] > 1
    assert found["stale"] > 1


# --- files that cannot be read ------------------------------------------------------------


def assert_refused(path: Path, message: str | None = None, seed: nn.Module | None = None) -> str:
    """Loading fails with one error that names the file, and changes not one bit."""
    seed = ConvNet().double() if seed is None else seed
    snapshot = Snapshot(seed)
    with pytest.raises(CheckpointError, match=message) as error:
        load(seed, path)
    snapshot.assert_same()
    assert str(path) in str(error.value)
    return str(error.value)


def test_truncated_files(path: Path) -> None:
    data = path.read_bytes()
    for size in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        assert_refused(path, "damaged|cut off")
    path.write_bytes(data + b"more")
    assert_refused(path, "changed")


def test_files_with_changed_bytes(path: Path) -> None:
    data = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        at, bit = (int(torch.randint(n, (), generator=generator)) for n in (len(data), 8))
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        path.write_bytes(bytes(changed))
        assert_refused(path)
    path.write_bytes(data)
    load(ConvNet().double(), path)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    torch.save(Trap(), tmp_path / "trap")
    torch.save(grown().state_dict(), tmp_path / "weights")
    for name in ("trap", "weights"):
        assert_refused(tmp_path / name, "not a file that splitgrow wrote")
    assert not (tmp_path / "sprung").exists()


def test_other_files(path: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path / "missing", "cannot be read: No such file")
    assert_refused(tmp_path, "cannot be read: Is a directory")
    (tmp_path / "empty").touch()
    assert_refused(tmp_path / "empty", "not a file that splitgrow wrote")
    (tmp_path / "text").write_text("hello " * 100)
    assert_refused(tmp_path / "text", "not a file that splitgrow wrote")
    save_file(grown().state_dict(), tmp_path / "weights")
    assert_refused(tmp_path / "weights", "not a file that splitgrow wrote")
    save_optimizer(optim.SGD(grown().parameters()), tmp_path / "optimizer")
    assert_refused(tmp_path / "optimizer", "'splitgrow-optimizer-1', expected 'splitgrow-model-1'")
    hand_plan(_grown().units, {"conv1": [0]}).save(tmp_path / "plan")
    assert_refused(tmp_path / "plan", "'splitgrow-plan-1'")
    files.write_sealed(tmp_path / "later", {}, {"format": "splitgrow-model-2", "model": "{}"})
    assert_refused(tmp_path / "later", "of another version of splitgrow")


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> None:
    """Change a file's description and tensors, and seal it again."""
    metadata, tensors = files.read_sealed(path, "splitgrow-model-1")
    described = json.loads(metadata["model"])
    metadata["model"] = json.dumps(change(described, tensors) or described)
    files.write_sealed(path, tensors, metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda described, _: ["not", "a", "dict"],
        lambda described, _: 3,
        lambda described, _: described.pop("modules") and None,
        lambda described, _: described.update(aliases={"a": "missing"}),
        lambda described, _: described.update(modules=3),
        lambda described, _: described.update(sizes={"conv1": 3}),
        lambda described, _: described.update(sizes=[]),
        lambda described, _: described.update(transient=3),
    ],
)
def test_descriptions_that_make_no_sense(path: Path, change: Any) -> None:
    forge(path, change)
    assert_refused(path, "description of the model is not valid")


# --- files that do not fit ----------------------------------------------------------------


def test_other_module_classes(path: Path) -> None:
    seed = ConvNet(nn.ReLU).double()
    seed.norm1 = nn.InstanceNorm2d(4, affine=True, track_running_stats=True).double()
    text = assert_refused(path, "does not fit ConvNet, which was left as it was", seed)
    assert "- norm1 is BatchNorm2d in the file, and InstanceNorm2d in the model." in text
    assert "- act is SiLU in the file, and ReLU in the model." in text


def test_missing_and_extra_names(path: Path) -> None:
    seed = ConvNet().double()
    seed.head = nn.Linear(5, 3, bias=False).double()
    seed.gamma = nn.Parameter(torch.ones(2))
    seed.extra = nn.Linear(2, 2)
    del seed.norm2
    text = assert_refused(path, seed=seed)
    assert text.split("\n- ")[1:] == [
        "extra (Linear) is not in the file.",
        "norm2 (BatchNorm2d) is in the file, but not in the model.",
        "gamma of shape (2,) is not in the file.",
        "head.bias of shape (3,) is in the file, but not in the model.",
    ]


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save(mlp(*[3] * 20), tmp_path / "model")
    text = assert_refused(tmp_path / "model", seed=mlp(3, 3))
    assert text.count("\n- ") == 13
    assert text.endswith("- and 24 more.")


@pytest.mark.parametrize(
    ("kept", "own", "message"),
    [
        (torch.ones(4, 1), torch.ones(4), r"w is of shape \(4, 1\) in the file, and of .*\(4,\)"),
        (torch.ones(4), torch.ones(4, dtype=torch.int64), "w is float32 in the file, and int64"),
        (torch.ones(4, dtype=torch.int64), torch.ones(4), "w is int64 in the file, and float32"),
        (torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.uint8), "w is bool"),
        (torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.int32), "w is int64"),
        (torch.ones(4, dtype=torch.complex64), torch.ones(4), "w is complex64"),
        (torch.full((4,), float("inf"), dtype=torch.float64), torch.ones(4), None),  # inf stays inf
        (torch.full((4,), 1e200, dtype=torch.float64), torch.ones(4), "too large for float32"),
        (torch.full((4,), 1e6), torch.ones(4, dtype=torch.float16), "too large for float16"),
    ],
)
def test_other_dimensions_and_kinds(
    kept: Tensor, own: Tensor, message: str | None, tmp_path: Path
) -> None:
    models = []
    for tensor in (kept, own):
        model = nn.Module()
        model.register_buffer("w", tensor.clone())
        model.register_buffer("v", torch.ones(3))
        models.append(model)
    save(models[0], tmp_path / "model")
    if message is None:
        load(models[1], tmp_path / "model")
    else:
        assert_refused(tmp_path / "model", message, models[1])


def test_other_ties(tmp_path: Path) -> None:
    loose = Tied()
    loose.again.weight = nn.Parameter(torch.randn(4, 3))
    save(Tied(), tmp_path / "tied")
    save(loose, tmp_path / "loose")
    message = "again.weight and up.weight are one tensor in the {}, but not in the {}"
    assert_refused(tmp_path / "tied", message.format("file", "model"), loose)
    assert_refused(tmp_path / "loose", message.format("model", "file"), Tied())


def test_a_model_of_other_depth(path: Path) -> None:
    assert_refused(path, "ConvNet in the file, and Sequential", mlp(3, 4, 2))


# --- sizes that do not go together --------------------------------------------------------


def resize(model: nn.Module, name: str, *shape: int) -> None:
    tensor = model.get_parameter(name) if "running" not in name else model.get_buffer(name)
    tensor.data = torch.ones(shape, dtype=tensor.dtype)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("norm1.bias", (7,), r"norm1 \(BatchNorm2d\): .*weight 6, bias 7"),
        ("norm1.weight", (7,), r"norm1 \(BatchNorm2d\): .*weight 7, bias 6"),
        ("norm2.running_mean", (2,), r"norm2 \(BatchNorm2d\): .*running_mean 2, running_var 7"),
        ("conv1.bias", (5,), r"conv1 \(Conv2d\): .*weight 6, bias 5"),
        ("conv1.weight", (5, 2, 3, 3), r"conv1 \(Conv2d\): .*weight 5, bias 6"),
        ("conv1.weight", (6, 2, 5, 5), r"expected a kernel of \(3, 3\), got \(5, 5\)"),
        ("depthwise.weight", (6, 2, 3, 3), r"depthwise .*cannot be divided into groups"),
        ("head.bias", (4,), r"head \(Linear\): .*weight 3, bias 4"),
        ("head.weight", (4, 5), r"head \(Linear\): .*weight 4, bias 3"),
    ],
)
def test_sizes_that_disagree_within_a_module(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    model = grown()
    resize(model, name, *shape)
    save(model, tmp_path / "model")
    assert_refused(tmp_path / "model", message)


def test_all_disagreements_are_listed(tmp_path: Path) -> None:
    model = grown()
    for name in ("norm1.bias", "conv2.bias", "head.bias"):
        resize(model, name, 9)
    save(model, tmp_path / "model")
    text = assert_refused(tmp_path / "model")
    assert [line.split(" ")[0] for line in text.split("\n- ")[1:]] == ["norm1", "conv2", "head"]


def test_columns_that_the_modules_own_record_denies(path: Path) -> None:
    """A weight that was changed, in a file that was sealed again: the attributes still tell."""

    def change(described: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["head.weight"] = torch.ones(3, 9, dtype=torch.float64)

    forge(path, change)
    assert_refused(path, r"head \(Linear\): in_features is 7 in the file, but 9 here")


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (lambda n: nn.LayerNorm(n), (3, 4)),
        (lambda n: nn.GroupNorm(1, n), (3, 4)),
        (lambda n: nn.RMSNorm(n), (3, 4)),
        (lambda n: nn.LSTM(2, n), (3, 4)),
        (lambda n: nn.GRUCell(2, n), (3, 4)),
        (lambda n: nn.MultiheadAttention(n, 1), (3, 4)),
        (lambda n: nn.EmbeddingBag(n, 2), (3, 4)),
        (lambda n: nn.Embedding(n, 2), (3, 4)),
    ],
)
def test_modules_whose_size_cannot_change(build: Any, sizes: Any, tmp_path: Path) -> None:
    seed, model = (nn.Sequential(build(n)) for n in sizes)
    save(model, tmp_path / "model")
    assert_refused(tmp_path / "model", "has another size in the file|expected 3 rows", seed)
    load(nn.Sequential(build(sizes[1])), tmp_path / "model")


def test_lengths_that_are_not_of_the_weight(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)))

    model = build()
    model[0].parametrizations.weight.original0.data = torch.ones(5, 1)
    save(model, tmp_path / "model")
    message = r"lengths \(5, 1\) do not go with a weight \(4, 3\)"
    assert_refused(tmp_path / "model", message, build())


class LowRank(nn.Module):
    """A weight as the product of two matrices."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(len(weight), 2), torch.ones(2, weight.shape[1])


def test_parametrized_weights_that_cannot_be_computed(tmp_path: Path) -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 4)
        parametrize.register_parametrization(layer, "weight", LowRank())
        return nn.Sequential(layer)

    model = build()
    model[0].parametrizations.weight.original0.data = torch.ones(4, 3)
    save(model, tmp_path / "model")
    assert_refused(tmp_path / "model", "sizes in it do not fit together", build())


# --- all or nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (checkpoint, "_announce", 1),
        (checkpoint, "fix_attributes", 1),
        (checkpoint, "_like", 7),
        (checkpoint, "_misfits", 3),
        (checkpoint.Undo, "set_data", 5),
        (checkpoint.Undo, "set_attribute", 3),
    ],
)
def test_failure_anywhere(
    path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: Any
) -> None:
    seed = ConvNet().double().train()
    mse(seed, _grown().batches[0]).backward()
    function, calls = getattr(owner, name), []

    def failing(*args: Any, **keywords: Any) -> Any:
        calls.append(name)
        result = function(*args, **keywords)  # the change is made, and then it fails
        if len(calls) == call:
            raise error
        return result

    snapshot = Snapshot(seed)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises((error, CheckpointError)):
            load(seed, path)
    assert len(calls) == call
    snapshot.assert_same()
    assert_same_tensors(load(seed, path), grown())


# --- optimizers ---------------------------------------------------------------------------

Make = Callable[[Any], optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.01),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "tensor_lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64)),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "rmsprop_centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: optim.Adadelta(p),
    "adamax": lambda p: optim.Adamax(p),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "asgd": lambda p: optim.ASGD(p),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3),
}


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 4) -> list[float]:
    dtype = next(model.parameters()).dtype
    x, y = (tensor.to(dtype) for tensor in _grown().batches[0])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, (x, y))
        loss.backward()
        return loss.detach()

    return [float(optimizer.step(closure)) for _ in range(steps)]


def twins(make: Make, dtype: torch.dtype, folder: Path) -> list[tuple[ConvNet, optim.Optimizer]]:
    """A grown model with a trained optimizer, and what its files make of new ones."""
    model, seed = grown().to(dtype), ConvNet().to(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer)
    save(model, folder / "model")
    save_optimizer(optimizer, folder / "optimizer")
    load(seed, folder / "model")
    other = make(seed.parameters())
    load_optimizer(other, folder / "optimizer")
    return [(model, optimizer), (seed, other)]


def assert_same_state(ours: optim.Optimizer, theirs: optim.Optimizer) -> None:
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        for name, value in state.items():
            assert_same_value(found["state"][number][name], value)


def assert_same_value(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_value(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    (model, optimizer), (seed, other) = twins(MAKERS[name], dtype, tmp_path)
    assert_same_state(other, optimizer)
    assert len(set(train(copy.deepcopy(model), optim.SGD(model.parameters(), lr=0.1)))) == 1
    losses = train(model, optimizer)
    assert len(set(losses)) > 1
    assert train(seed, other) == losses
    assert_same_tensors(seed, model)
    assert_same_state(other, optimizer)


def test_without_the_state_it_would_not(tmp_path: Path) -> None:
    for name in ("momentum", "adam", "adamw", "rmsprop", "adagrad"):
        (model, optimizer), (seed, _) = twins(MAKERS[name], torch.float64, tmp_path)
        fresh = MAKERS[name](seed.parameters())
        assert train(model, optimizer) != train(seed, fresh)


def test_half_precision_with_counters_of_another_type(tmp_path: Path) -> None:
    """torch's own load_state_dict would turn float32 state of bfloat16 parameters to bfloat16."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"].float() + 1e-4
    save_optimizer(optimizer, tmp_path / "optimizer")
    other = optim.Adam(model.parameters())
    load_optimizer(other, tmp_path / "optimizer")
    assert_same_state(other, optimizer)
    found = other.state[model.weight]
    types = [found[name].dtype for name in ("step", "exp_avg", "exp_avg_sq")]
    assert types == [torch.float32, torch.float32, torch.bfloat16]


def test_after_a_real_split_with_the_optimizer(tmp_path: Path) -> None:
    p = problem(ConvNet(), (6, 2, 5, 5))
    optimizer = optim.AdamW(p.model.parameters(), lr=0.01)
    train(p.model, optimizer)
    plan = hand_plan(p.units, {"conv1": [1], "conv2": [0, 4]})
    sg.split(p.model, plan, step=1e-2, optimizer=optimizer)
    save(p.model, tmp_path / "model")
    save_optimizer(optimizer, tmp_path / "optimizer")
    seed = ConvNet().double()
    early = optim.AdamW(seed.parameters(), lr=0.5)  # made before the model has grown
    train(seed, early, 2)
    load(seed, tmp_path / "model")
    load_optimizer(early, tmp_path / "optimizer")
    assert train(seed, early) == train(p.model, optimizer)
    assert_same_tensors(seed, p.model)


def test_state_has_its_parameters_memory_format(tmp_path: Path) -> None:
    model, seed = (ConvNet().to(memory_format=torch.channels_last) for _ in range(2))
    optimizer, other = (optim.Adam(m.parameters(), fused=True) for m in (model, seed))
    train(model, optimizer)
    save_optimizer(optimizer, tmp_path / "optimizer")
    load_optimizer(other, tmp_path / "optimizer")
    assert other.state[seed.conv1.weight]["exp_avg"].stride() == seed.conv1.weight.stride()
    assert_same_state(other, optimizer)


@pytest.mark.cuda
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}])
def test_state_goes_to_the_device_of_its_parameters(settings: Any, tmp_path: Path) -> None:
    """Counters stay in main memory, unless the optimizer works on the device throughout."""
    home = "cuda" if settings else "cpu"
    x, y = (tensor.float().cuda() for tensor in _grown().batches[0])
    model, seed = grown().float().cuda(), ConvNet().cuda()
    optimizer = optim.Adam(model.parameters(), **settings)
    mse(model, (x, y)).backward()
    optimizer.step()
    save(model, tmp_path / "model")
    save_optimizer(optimizer, tmp_path / "optimizer")
    load(seed, tmp_path / "model")
    other = optim.Adam(seed.parameters(), **settings)
    load_optimizer(other, tmp_path / "optimizer")
    assert_same_tensors(seed, model)
    assert_same_state(other, optimizer)
    state = other.state[seed.conv1.weight]
    assert state["step"].device.type == home
    assert state["exp_avg"].device.type == "cuda"
    mse(seed, (x, y)).backward()
    other.step()
    on_cpu = load(ConvNet(), tmp_path / "model")
    if "capturable" not in settings:
        third = optim.Adam(on_cpu.parameters(), **settings)
        load_optimizer(third, tmp_path / "optimizer")
        assert third.state[on_cpu.conv1.weight]["exp_avg"].device.type == "cpu"


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.5, "note": "biases"},
    ]


def test_groups_schedules_and_settings(tmp_path: Path) -> None:
    model = grown()
    optimizer = optim.Adam(groups(model), lr=0.1)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.param_groups[0]["own"] = {
        "inf": float("inf"), "minus": -float("inf"), "tuple": (1, (2.5, None)), "list": [True, "x"],
        "third": 1 / 3, "dict": {"tensor": "text", "float": "x"}, "big": 10**30, "": torch.ones(2),
    }  # fmt: skip
    train(model, optimizer)
    schedule.step()
    save_optimizer(optimizer, tmp_path / "optimizer")
    other = optim.Adam(groups(model), lr=0.7)
    before, held = list(other.param_groups), other.state
    load_optimizer(other, tmp_path / "optimizer")
    assert all(a is b for a, b in zip(other.param_groups, before, strict=True))
    assert other.state is held
    assert [group["lr"] for group in other.param_groups] == schedule.get_last_lr()
    assert other.param_groups[1]["initial_lr"] == 0.5
    assert other.param_groups[1]["note"] == "biases"
    ours, theirs = (o.param_groups[0].pop("own") for o in (other, optimizer))
    assert torch.equal(ours.pop(""), theirs.pop(""))
    assert ours == theirs
    assert type(other.param_groups[0]["betas"]) is tuple
    assert_same_state(other, optimizer)


def test_not_a_number_is_a_setting_too(tmp_path: Path) -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = float("nan")
    save_optimizer(optimizer, tmp_path / "optimizer")
    optimizer.param_groups[0]["lr"] = 1.0
    load_optimizer(optimizer, tmp_path / "optimizer")
    assert math.isnan(optimizer.param_groups[0]["lr"])


def test_state_that_is_not_in_the_file_is_dropped(tmp_path: Path) -> None:
    model = grown()
    optimizer = optim.Adam(model.parameters())
    save_optimizer(optimizer, tmp_path / "optimizer")
    train(model, optimizer)
    load_optimizer(optimizer, tmp_path / "optimizer")
    assert len(optimizer.state) == 0


def test_saving_an_optimizer_changes_nothing(tmp_path: Path) -> None:
    model = grown()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 1)
    snapshot = Snapshot(model, optimizer)
    save_optimizer(optimizer, tmp_path / "a")
    snapshot.assert_same()
    save_optimizer(optimizer, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_settings_that_json_cannot_hold(tmp_path: Path) -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0].update(
        rule=lambda x: x,
        kind=torch.float32,
        deep=[{"a": {1}}, {2: "b"}],
        links=torch.eye(2).to_sparse(),
    )
    optimizer.state["global"] = {"count": 1}
    with pytest.raises(CheckpointError) as error:
        save_optimizer(optimizer, tmp_path / "optimizer")
    text = str(error.value)
    assert "param_groups[0]['rule'] is of type function, which JSON cannot hold" in text
    assert "param_groups[0]['kind'] is of type dtype" in text
    assert "param_groups[0]['deep'][0]['a'] is of type set" in text
    assert "param_groups[0]['deep'][1]: expected names that are text, got 2" in text
    assert "param_groups[0]['links'] has the layout" in text
    assert "state is kept for 1 thing that it does not train" in text
    assert list(tmp_path.iterdir()) == []


# --- optimizer files that do not fit ------------------------------------------------------


@pytest.fixture
def state_path(tmp_path: Path) -> Path:
    """The file of an Adam that has trained a grown ConvNet in two groups."""
    model = grown()
    optimizer = optim.Adam(groups(model))
    train(model, optimizer)
    save_optimizer(optimizer, tmp_path / "optimizer")
    return tmp_path / "optimizer"


def assert_optimizer_refused(
    path: Path,
    message: str | None,
    make: Callable[[nn.Module], optim.Optimizer],
    model: nn.Module,
) -> str:
    optimizer = make(model)
    train(model, optimizer, 1)
    snapshot = Snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=message) as error:
        load_optimizer(optimizer, path)
    snapshot.assert_same()
    assert str(path) in str(error.value)
    return str(error.value)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(groups(model))


def test_other_optimizers(state_path: Path) -> None:
    refuse = assert_optimizer_refused
    refuse(state_path, "this SGD.*\n- the file is of Adam", lambda m: optim.SGD(groups(m)), grown())
    refuse(state_path, "the file is of Adam", lambda m: optim.AdamW(groups(m)), grown())
    message = r"expected 1 parameter group, got 2 in the file\.\n.*expected 12 parameters, got 6"
    refuse(state_path, message, lambda m: optim.Adam(m.parameters()), grown())


def test_other_parameters(state_path: Path) -> None:
    text = assert_optimizer_refused(state_path, None, adam, ConvNet().double())
    line = "param_groups[0]: parameter 0 was float64 (6, 2, 3, 3) when saved, and is float64 (4, 2"
    assert line in text
    assert text.count("\n- ") == 11  # every one but the bias of the last layer
    message = r"param_groups\[1\]: parameter 0 was float64 \(6,\) when saved, and is float32 \(6,\)"
    assert_optimizer_refused(state_path, message, adam, grown().float())


def test_parameters_in_another_order(tmp_path: Path) -> None:
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    save_optimizer(optim.SGD([("a", a), ("b", b)]), tmp_path / "optimizer")
    load_optimizer(optim.SGD([("a", a), ("b", b)]), tmp_path / "optimizer")
    load_optimizer(optim.SGD([a, b]), tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match="other names, or another order"):
        load_optimizer(optim.SGD([("b", b), ("a", a)]), tmp_path / "optimizer")


def test_damaged_optimizer_files(state_path: Path, path: Path, tmp_path: Path) -> None:
    model = grown()
    optimizer = adam(model)
    train(model, optimizer, 1)
    snapshot = Snapshot(model, optimizer)
    data = state_path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    cuts = [data[:size] for size in range(0, len(data), 499)]
    for _ in range(50):
        at = int(torch.randint(len(data), (), generator=generator))
        cuts.append(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    (tmp_path / "folder").mkdir()
    torch.save(optimizer.state_dict(), tmp_path / "pickle")
    for changed in cuts:
        state_path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=re.escape(str(state_path))):
            load_optimizer(optimizer, state_path)
    for other in (path, tmp_path / "folder", tmp_path / "missing", tmp_path / "pickle"):
        with pytest.raises(CheckpointError, match=re.escape(str(other))):
            load_optimizer(optimizer, other)
    snapshot.assert_same()
    state_path.write_bytes(data)
    load_optimizer(optimizer, state_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept.pop("class"),
        lambda kept: kept.pop("groups"),
        lambda kept: kept.update(state=[]),
        lambda kept: kept.update({"class": 3}),
        lambda kept: kept["state"].update({"0": {"step": {"tensor": "missing", "stays": False}}}),
        lambda kept: kept["state"].update({"0": {"step": {"unknown": 1}}}),
        lambda kept: kept["state"].update({"0": 5}),
        lambda kept: kept["groups"][0]["settings"].update(params=[]),
        lambda kept: kept["groups"][0]["params"][0].pop("shape"),
    ],
)
def test_optimizer_descriptions_that_make_no_sense(change: Any, state_path: Path) -> None:
    metadata, tensors = files.read_sealed(state_path, "splitgrow-optimizer-1")
    kept = json.loads(metadata["optimizer"])
    change(kept)
    metadata["optimizer"] = json.dumps(kept)
    files.write_sealed(state_path, tensors, metadata)
    assert_optimizer_refused(state_path, "of the optimizer is not valid", adam, grown())


@pytest.mark.parametrize("call", [1, 2, 3])
def test_failure_while_an_optimizer_is_filled(
    state_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    model = grown()
    optimizer = optim.Adam(groups(model), lr=0.7)
    train(model, optimizer, 1)
    refill, calls = optimizer_file._refill, []

    def failing(*args: Any) -> None:
        calls.append(1)
        refill(*args)
        if len(calls) == call:
            raise KeyboardInterrupt

    snapshot = Snapshot(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_file, "_refill", failing)
        with pytest.raises(KeyboardInterrupt):
            load_optimizer(optimizer, state_path)
    snapshot.assert_same()
    load_optimizer(optimizer, state_path)
    assert optimizer.param_groups[0]["lr"] == 1e-3
