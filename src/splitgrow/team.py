"""The ranks that work together: sums over all of them, and errors that all of them raise.

No rank waits for one that has failed. Every collective begins with a meeting: each rank says where
it is and whether it has failed. A rank that fails goes to the next meeting and says so, and all of
them raise.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from splitgrow import errors
from splitgrow.errors import InputError, RankError, SplitgrowError
from splitgrow.state import Undo

Group = Any  # torch.distributed.ProcessGroup, which not every build of torch has
Number = TypeVar("Number", int, float)

APART = (
    "Ranks that train apart cannot be split together. Train with DistributedDataParallel, or load "
    "the same weights on every rank; after a split of its model, splitgrow.rewrap() the wrapper."
)


def team_in(group: Group | None) -> Team:
    """The ranks of a group; this process alone where there is no other."""
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "Shard: this is one of several processes (WORLD_SIZE is set), but they do not know "
                "each other yet. Call torch.distributed.init_process_group() first."
            )
        return Team()
    if dist.get_rank(group) < 0:
        raise InputError("Shard: this process is not in the group. Call it on the group's alone.")
    return Team() if dist.get_world_size(group) == 1 else Ranks(group)


class Team:
    """The processes that work on one thing together; this class: one alone.

    ``what`` and ``place`` name what is being done, for errors and to check that all ranks do it.
    """

    rank, size = 0, 1

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Whatever is raised inside on one rank is raised on all of them."""
        yield

    def add_(self, tensor: Tensor, place: str) -> Tensor:
        """The sum over all ranks, in place."""
        return tensor

    def sum(self, number: Number, place: str) -> Number:
        """The sum of a number over all ranks."""
        return number

    def least(self, number: int, place: str) -> int:
        """The smallest of a number over all ranks."""
        return number

    def largest(self, number: float, place: str) -> float:
        """The largest of a number over all ranks."""
        return number

    def any(self, flag: bool, place: str) -> bool:  # noqa: FBT001  (a value, not a switch)
        """Is it so on some rank?"""
        return bool(self.largest(flag, place))

    def every(self, flag: bool, place: str) -> bool:  # noqa: FBT001  (the same)
        """Is it so on every rank?"""
        return bool(self.least(flag, place))

    def rows(self, tensor: Tensor, place: str) -> tuple[Tensor, int]:
        """The rows of all ranks' tensors, in their order, and where this rank's begin."""
        return tensor, 0

    def first_(self, tensors: Iterable[Tensor], place: str) -> None:
        """Rank 0's values for all ranks, in place."""

    def same(self, what: str, parts: Mapping[str, str], way_out: str) -> None:
        """Raise on all ranks unless all have the same parts."""

    def same_model(self, what: str, model: nn.Module, way_out: str) -> None:
        """Raise on all ranks unless all have the same parameters and buffers, bit for bit."""

    def share_buffers(self, model: nn.Module, undo: Undo) -> None:
        """Rank 0's buffers for all, as DistributedDataParallel does before a forward pass.

        In training, each rank's batch norm goes its own way.
        """


@dataclass(frozen=True)
class Ranks(Team):
    """Several processes."""

    group: Group | None

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The number of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:  # type: ignore[override]
        """How many there are."""
        return dist.get_world_size(self.group)

    # ---- meetings -----------------------------------------------------------------------------

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Whatever is raised inside on one rank is raised on all of them."""
        try:
            yield
        except Exception as error:
            if not _is_known(error):
                self._meet(what, error)
            raise
        self._meet(f"the end of {what}")

    def _meet(self, place: str, failure: Exception | None = None) -> None:
        """Return where all ranks are at this place and none has failed; raise on all otherwise."""
        own = [int(failure is not None), crc32(place.encode())]
        if failure is None:
            statuses = self._numbers(own)
        else:
            try:
                statuses = self._numbers(own)
            except RuntimeError:  # the others are gone, or the failure is one of communication
                raise failure from None
        if all(status == [0, own[1]] for status in statuses):
            return
        reports = [_Report(*json.loads(text)) for text in self._texts(_report(place, failure))]
        verdict = _known(_verdict(reports, failure))
        if verdict is failure:
            raise verdict
        raise verdict from failure

    def _numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Some numbers of each rank."""
        mine = torch.tensor(own, dtype=torch.int64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        return torch.stack(found).tolist()

    def _texts(self, own: str) -> list[str]:
        """A text of each rank, as bytes: nothing is pickled."""
        data = torch.tensor(bytearray(own.encode()), dtype=torch.uint8, device=self._device)
        lengths = [length for (length,) in self._numbers([len(data)])]
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(found, padded, group=self.group)
        pairs = zip(found, lengths, strict=True)
        return [text[:length].cpu().numpy().tobytes().decode() for text, length in pairs]

    # ---- sums ---------------------------------------------------------------------------------

    def add_(self, tensor: Tensor, place: str) -> Tensor:
        """The sum over all ranks, in place."""
        return self._reduce_(tensor, dist.ReduceOp.SUM, place)

    def _reduce_(self, tensor: Tensor, operation: Any, place: str) -> Tensor:
        self._meet(f"{place}, {tensor.dtype} {tuple(tensor.shape)}")
        sent = self._sent(tensor)
        dist.all_reduce(sent, operation, group=self.group)
        return tensor if sent is tensor else tensor.copy_(sent)

    def sum(self, number: Number, place: str) -> Number:
        """The sum of a number over all ranks."""
        return type(number)(self._reduced(number, dist.ReduceOp.SUM, place))

    def least(self, number: int, place: str) -> int:
        """The smallest of a number over all ranks."""
        return int(self._reduced(number, dist.ReduceOp.MIN, place))

    def largest(self, number: float, place: str) -> float:
        """The largest of a number over all ranks."""
        return self._reduced(number, dist.ReduceOp.MAX, place)

    def _reduced(self, number: float, operation: Any, place: str) -> float:
        tensor = torch.tensor(float(number), dtype=torch.float64, device=self._device)
        return self._reduce_(tensor, operation, place).item()

    def rows(self, tensor: Tensor, place: str) -> tuple[Tensor, int]:
        """The rows of all ranks' tensors, in their order, and where this rank's begin."""
        self._meet(f"{place}, {tensor.dtype} {tuple(tensor.shape[1:])}")
        counts = [count for (count,) in self._numbers([len(tensor)])]
        sent = self._sent(tensor)
        padded = sent.new_zeros(max(counts), *sent.shape[1:])
        padded[: len(sent)] = sent
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=self.group)
        whole = torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])
        return whole.to(tensor.device), sum(counts[: self.rank])

    # ---- agreement ----------------------------------------------------------------------------

    def first_(self, tensors: Iterable[Tensor], place: str) -> None:
        """Rank 0's values for all ranks, in place."""
        for tensor in tensors:
            self._meet(f"{place}, {tensor.dtype} {tuple(tensor.shape)}")
            sent = self._sent(tensor.detach())
            dist.broadcast(sent, group=self.group, group_src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(sent)

    def same(self, what: str, parts: Mapping[str, str], way_out: str) -> None:
        """Raise on all ranks unless all have the same parts."""
        self._meet(what)
        found = [json.loads(text) for text in self._texts(json.dumps(dict(parts)))]
        odd = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        if not odd:
            return
        names = dict.fromkeys(name for each in found for name in each)
        where = [n for n in names if any(each.get(n) != found[0].get(n) for each in found)]
        raise _known(
            RankError(
                f"{what}: {_ranks(odd)} not the same as rank 0 ({', '.join(where[:3])}"
                f"{', ...' if len(where) > 3 else ''}). {way_out}"
            )
        )

    def same_model(self, what: str, model: nn.Module, way_out: str) -> None:
        """Raise on all ranks unless all have the same parameters and buffers, bit for bit."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.same(what, {name: digest(tensor) for name, tensor in tensors}, way_out)

    def share_buffers(self, model: nn.Module, undo: Undo) -> None:
        """Rank 0's buffers for all, as DistributedDataParallel does before a forward pass."""
        buffers = list(model.buffers())
        for buffer in buffers:
            undo.later(partial(_copy, buffer.detach().clone(), buffer))
        self.first_(buffers, "buffers")

    # ---- devices ------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        """Where the group can talk: NCCL knows no CPU."""
        if "cpu" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _sent(self, tensor: Tensor) -> Tensor:
        known = tensor.device.type in dist.get_backend_config(self.group)
        return (tensor if known else tensor.to(self._device)).contiguous()


def _copy(source: Tensor, target: Tensor) -> None:
    target.data.copy_(source)


def digest(tensor: Tensor) -> str:
    """Tells a tensor from any other, bit for bit."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(flat.numpy().data)
    return found.hexdigest()[:16]


# ---- what failed, and where ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Report:
    """What a rank says at a meeting: where it is, and the class and text of its error, if any."""

    place: str
    kind: str
    text: str


def _report(place: str, failure: Exception | None) -> str:
    kind = "" if failure is None else type(failure).__name__
    return json.dumps([place, kind, "" if failure is None else str(failure)])


def _verdict(reports: Sequence[_Report], own: Exception | None) -> Exception:
    """The error that this rank raises; those of splitgrow are of one class on all ranks."""
    failed = [(rank, report) for rank, report in enumerate(reports) if report.kind]
    if not failed:
        return RankError(
            "the ranks are not at the same place: "
            + "; ".join(f"rank {rank} at {report.place}" for rank, report in enumerate(reports))
            + ". Call the same functions with the same arguments, in the same order, on every rank."
        )
    if own is not None and not isinstance(own, SplitgrowError):
        return own  # the user's own; the others say where it was
    if own is not None and len({(r.kind, r.text) for r in reports}) == 1:
        return own
    text = "\n".join(f"rank {rank}: {_told(report)}" for rank, report in failed)
    return _class_of({report.kind for _, report in failed})(text)


def _told(report: _Report) -> str:
    own = _class_of({report.kind}) is not RankError or report.kind == RankError.__name__
    return report.text if own else f"{report.kind} in {report.place}: {report.text}"


def _class_of(kinds: set[str]) -> type[SplitgrowError]:
    """The class of splitgrow's errors that all of them have; where there is none, RankError."""
    found = getattr(errors, min(kinds), None)
    ours = isinstance(found, type) and issubclass(found, SplitgrowError)
    return found if ours and len(kinds) == 1 else RankError  # type: ignore[return-value]


def _known(error: Exception) -> Exception:
    """An error that every rank raises: nobody need be told of it."""
    error.__dict__["_splitgrow_known"] = True
    return error


def _is_known(error: Exception) -> bool:
    return "_splitgrow_known" in error.__dict__


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed} is" if len(numbers) == 1 else f"ranks {listed} are"
