"""One of the processes of tests/test_distributed.py: does the jobs that it reads, line by line.

``python distributed_worker.py RANK SIZE STORE`` reads a line of JSON, ``[job, {argument: value}]``,
and answers with one: ``["ok", result]`` or ``["error", class, message]``. Tensors go as lists,
whose numbers JSON keeps exactly.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import splitgrow as sg

Batch = tuple[Tensor, Tensor]
Batches = list[Batch]
TIMEOUT = 20  # seconds that a collective waits for the others

# ---- models and data, the same in every process -------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(kind: str) -> nn.Module:
    """Nets for each of the ways in which a unit is solved."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        nets: dict[str, Callable[[], nn.Module]] = {
            "mlp": lambda: nn.Sequential(
                nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 1)
            ),
            "conv": lambda: nn.Sequential(
                nn.Unflatten(1, (1, 4)),
                nn.Conv1d(1, 4, 3, padding=1),
                nn.BatchNorm1d(4),
                nn.SiLU(),
                nn.Conv1d(4, 3, 3, padding=1),
                nn.Tanh(),
                nn.Flatten(),
                nn.Linear(12, 1),
            ),
            "affine": lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)),
            "wide": lambda: nn.Sequential(
                nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1)
            ),
        }
        model = nets[kind]().double()
        for parameter in model.parameters():  # away from the start: larger second derivatives
            parameter.data.mul_(1.5)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.uniform_(-0.3, 0.3)
                module.running_var.uniform_(0.5, 2)
    return model


def data(sizes: list[int]) -> Batches:
    x = torch.randn(sum(sizes), 4, generator=generator(1), dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) * x[:, 1:2] + x[:, 2:3].abs()
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def mse(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def my_part(batches: Batches, parts: list[int]) -> Batches:
    """``parts``: how many batches in turn each rank has."""
    start = sum(parts[: dist.get_rank()])
    return batches[start : start + parts[dist.get_rank()]]


def as_lists(scores: sg.Scores) -> dict[str, Any]:
    return {
        "loss": scores.loss,
        "samples": scores.samples,
        "units": {
            name: [
                s.method, s.values.tolist(), s.vectors.tolist(), s.residuals.tolist(),
                s.errors.tolist(),
            ]
            for name, s in scores.items()
        },
    }  # fmt: skip


def state(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        {k: v.tolist() if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]


# ---- jobs ---------------------------------------------------------------------------------------


def scores_of(
    kind: str,
    batches: Any,
    memory: int | None = None,
    steps: int | None = None,
    work: float = 2e7,
    most: float = inf,
) -> dict[str, Any]:
    """``work``: up to how many multiplications a unit is solved densely.

    ``most``: with more passes than these, units are streamed.
    """
    with (
        patch("splitgrow.solve.DENSE_WORK", work),
        patch("splitgrow.stream.pays", lambda passes, effort: passes > most),
    ):
        return as_lists(sg.score(build(kind), mse, batches, memory=memory, steps=steps))


def score(
    sizes: list[int], parts: list[int] | None, memory: list[int] | None = None, **settings: Any
) -> Any:
    whole = data(sizes)
    batches = sg.Shard.of(whole) if parts is None else sg.Shard(my_part(whole, parts))
    own = None if memory is None else memory[dist.get_rank()]
    return scores_of(batches=batches, memory=own, **settings)


def start_of_its_own() -> Any:
    """Each rank begins with scores that it made alone."""
    batches = my_part(data([6, 6]), [1, 1])
    own = sg.score(build("mlp"), mse, batches)
    return as_lists(sg.score(build("mlp"), mse, sg.Shard(batches), start=own, steps=3))


def settled(sizes: list[int], parts: list[int]) -> Any:
    """With shards of very different lengths."""
    batches = sg.Shard(my_part(data(sizes), parts))
    return as_lists(sg.score(build("mlp"), mse, batches, settle=sg.Settle(0.9, count=2)))


def grow_once(
    model: nn.Module, inner: nn.Module, batches: Any, columns: Any = "halved"
) -> tuple[Any, nn.Module]:
    """A step of training, a split, another step: on the model as it is given, wrapped or not."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step() -> None:
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
        schedule.step()

    step()
    units = sg.find_units(model, batches_of(batches)[0][0][:1])
    plan = sg.select(sg.score(model, mse, batches, units=units), fraction=0.4)
    receipt = sg.split(
        model, plan, columns=columns, optimizer=optimizer, loss_fn=mse, batches=batches
    )
    if isinstance(model, DistributedDataParallel):
        model = sg.rewrap(model)
    step()
    found = {
        "chosen": plan.chosen, "step": receipt.step, "loss": receipt.loss,
        "measured": receipt.measured, "state": state(inner), "params": receipt.params,
        "optimizer": optimizer_state(optimizer), "rate": schedule.get_last_lr(),
    }  # fmt: skip
    return found, model


def batches_of(batches: Any) -> Batches:
    return batches.batches if isinstance(batches, sg.Shard) else batches


def split(kind: str, sizes: list[int], parts: list[int], columns: str) -> Any:
    inner, batches = build(kind), sg.Shard(my_part(data(sizes), parts))
    return grow_once(DistributedDataParallel(inner), inner, batches, columns)[0]


def prepared(kind: str = "mlp") -> tuple[nn.Module, sg.Shard, sg.SplitPlan]:
    """A model, this rank's batches and a plan that all ranks have made together."""
    model, batches = build(kind), sg.Shard(my_part(data([8, 8]), [1, 1]))
    return model, batches, sg.select(sg.score(model, mse, batches), fraction=0.4)


def wrapper_after_split() -> Any:
    model, batches, plan = prepared()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=3)
    sg.split(wrapped, plan, loss_fn=mse, batches=batches)
    try:
        wrapped(batches.batches[0][0])
    except sg.InputError as error:
        stale = str(error)
    fresh = sg.rewrap(wrapped)
    mse(fresh, batches.batches[0]).backward()
    grads = [p.grad.tolist() for p in model.parameters()]
    return [stale, fresh.find_unused_parameters, fresh.bucket_bytes_cap, grads]


def buffers() -> Any:
    """Each rank's batch norm is its own, as after training; the scores are those of rank 0's."""
    model, batches = build("conv"), sg.Shard(my_part(data([8, 8]), [1, 1]))
    own = model[2].running_mean + dist.get_rank()
    model[2].running_mean.copy_(own)
    scores = sg.score(model, mse, batches)
    assert torch.equal(model[2].running_mean, own)  # score leaves the model as it was
    sg.split(model, sg.select(scores, count=2), step=1e-3, loss_fn=mse, batches=batches)
    return as_lists(scores), state(model)


# ---- jobs that fail on one rank -----------------------------------------------------------------


def is_second() -> bool:
    return dist.get_rank() == 1


def fails(where: str) -> Any:
    """Something goes wrong on rank 1 alone."""
    model, batches, _ = build("mlp"), my_part(data([8, 8]), [1, 1]), None
    if where == "no batches" and is_second():
        batches = []
    if where == "nan" and is_second():
        batches = [(batches[0][0], batches[0][1] * float("nan"))]
    if where == "generator" and is_second():
        batches = iter(batches)
    if where == "weights" and is_second():
        model[2].weight.data[0, 0] += 1e-12
    if where == "units":
        units = sg.find_units(model, batches[0][0], exclude=["2"] if is_second() else [])
        return as_lists(sg.score(model, mse, sg.Shard(batches), units=units))
    if where == "order" and is_second():
        return sg.grow(model, train=no_training, loss_fn=mse, batches=sg.Shard(batches)).stopped

    def loss_fn(model: Callable[..., Tensor], batch: Batch) -> Tensor:
        if where == "own error" and is_second():
            raise ZeroDivisionError("in the user's code")
        return mse(model, batch)

    return as_lists(sg.score(model, loss_fn, sg.Shard(batches)))


def no_training(model: nn.Module, phase: sg.Phase) -> None:
    """Leaves the model as it is."""


def split_fails(where: str) -> Any:
    """Rank 1 has another plan, optimizer or so; the model must be as before on both ranks."""
    model, batches, plan = prepared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state(model)
    if where == "plan" and is_second():
        plan = sg.SplitPlan(list(plan)[:1], plan.units)
    if where == "optimizer" and is_second():
        optimizer = torch.optim.SGD(build("mlp").parameters(), lr=0.1)
    calls = []

    def loss_fn(model: Callable[..., Tensor], batch: Batch) -> Tensor:
        calls.append(1)
        if where == "late" and is_second() and len(calls) == 4:
            raise ZeroDivisionError("late")
        return mse(model, batch)

    try:
        with broken_receipt() if where == "end" and is_second() else nullcontext():
            sg.split(model, plan, optimizer=optimizer, loss_fn=loss_fn, batches=batches)
    finally:
        assert state(model) == before, "the model was changed"


@contextmanager
def broken_receipt() -> Iterator[None]:
    """The last thing that a split does fails."""
    operation = sys.modules["splitgrow.split"]._Operation
    whole, operation._receipt = operation._receipt, None
    try:
        yield
    finally:
        operation._receipt = whole


def large_steps() -> Any:
    """Beyond some step the loss overflows, on rank 1 alone: both ranks take smaller ones."""
    model, batches, plan = prepared()
    start = mse(model, batches.batches[0]).item()

    def loss_fn(view: Any, batch: Batch) -> Tensor:
        loss = mse(view, batch)
        apart = abs(loss.item() - start) > 0.05 * start
        return loss * float("inf") if is_second() and apart else loss

    receipt = sg.split(model, plan, loss_fn=loss_fn, batches=batches)
    return [receipt.step, receipt.searched, state(model)]


def recovers() -> Any:
    """After a failure the ranks can go on."""
    try:
        fails("nan")
    except sg.LossError:
        return dist.get_world_size()
    return None


# ---- grow ---------------------------------------------------------------------------------------


def train(model: nn.Module, phase: sg.Phase, batches: Batches) -> None:
    """Full batches of all ranks, by DDP where there are several."""
    if phase.optimizer is None:
        phase.optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    for _ in range(2):
        for batch in batches:
            phase.optimizer.zero_grad()
            loss = mse(wrapped, batch)
            loss.backward()
            phase.optimizer.step()
        phase.log(loss)


def grown(
    batches: Any, phases: int, run_dir: str | None = None, resume: bool = False, **settings: Any
) -> Any:
    model, own = build("mlp"), batches_of(batches)
    result = sg.grow(
        model, train=lambda m, p: train(m, p, own), loss_fn=mse, batches=batches,
        evaluate=lambda m: {"error": mse(m, own[0])}, policy=sg.Policy(fraction=0.3),
        until=sg.Budget(phases=phases), run_dir=run_dir, resume=resume, **settings,
    )  # fmt: skip
    records = result.history.phases
    return {
        "state": state(model), "losses": [r.loss for r in records], "stopped": result.stopped,
        "errors": [r.metrics["error"] for r in records], "params": [r.params for r in records],
    }  # fmt: skip


def grow(**settings: Any) -> Any:
    return grown(sg.Shard(my_part(data([8, 8]), [1, 1])), **settings)


# ---- fully_shard --------------------------------------------------------------------------------


def shard(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sharded() -> Any:
    """As ``grow_once``, twice: the second time the sharded model has grown already."""
    model, batches = build("mlp"), sg.Shard(my_part(data([8, 8]), [1, 1]))
    shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    kept = {"count": 0}
    for _ in range(2):
        train_step(model, optimizer, batches.batches)
        schedule.step()
        with torch.no_grad():
            model(batches.batches[0][0])  # leaves the root's own parameters full
        try:
            sg.find_units(model, batches.batches[0][0])
        except sg.InputError as error:
            kept["refusal"] = str(error)
        whole = sg.gather(model, lambda: build("mlp"), optimizer)
        plan = sg.select(sg.score(whole, mse, batches), fraction=0.4)
        kept["count"] += len(plan)
        sg.split(whole, plan, optimizer=optimizer, loss_fn=mse, batches=batches)
        model = sg.scatter(whole, shard, optimizer)
    train_step(model, optimizer, batches.batches)
    types = sorted({type(p).__name__ for p in model.parameters()})
    whole = sg.gather(model, lambda: build("mlp"), optimizer)
    return {
        **kept, "state": state(whole), "optimizer": optimizer_state(optimizer),
        "rate": schedule.get_last_lr(), "types": types,
    }  # fmt: skip


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for batch in batches:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()


def unsharded() -> Any:
    """The same as ``sharded`` on one process."""
    (first, second), model = data([8, 8]), build("mlp")
    batches = [(torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        train_step(model, optimizer, batches)
        schedule.step()
        plan = sg.select(sg.score(model, mse, batches), fraction=0.4)
        sg.split(model, plan, optimizer=optimizer, loss_fn=mse, batches=batches)
    train_step(model, optimizer, batches)
    return {
        "state": state(model), "optimizer": optimizer_state(optimizer),
        "rate": schedule.get_last_lr(),
    }  # fmt: skip


JOBS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (score, start_of_its_own, settled, split, wrapper_after_split, buffers, fails,
                     split_fails, large_steps, recovers, grow, sharded)
}  # fmt: skip


def serve(rank: int, size: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = ["ok", JOBS[name](**arguments)]
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            answer = ["error", type(error).__name__, str(error)]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), str(Path(sys.argv[3])))
