"""Training of small nets on data that is on the device: nothing waits for the host.

A step (draw a batch, augment it, forward, backward, update) is recorded once for each phase as a
CUDA graph and replayed; on a CPU the same step is simply called.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.errors import InputError
from splitgrow.paper.depthwise_kernels import has_depthwise
from splitgrow.phase import Phase

LossOf = Callable[[Tensor], Tensor]  # of the samples with these indexes
MakeOptimizer = Callable[[Iterable[nn.Parameter], Tensor], Optimizer]  # parameters, learning rate
WARM_UP = 3  # steps before a recording: libraries choose their kernels, buffers are made


@dataclass(frozen=True)
class Rate:
    """A learning rate over a training: up to ``highest`` at ``warm_up``, then by a rule.

    Args:
        shape: ``"steps"``, a tenth at 50% and again at 75% as in the paper; ``"cosine"`` or
            ``"linear"`` down to 0; or ``"constant"``.
        warm_up: the share of the training in which the rate rises from 0.
    """

    highest: float
    shape: str = "steps"
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise InputError(f"rate: expected one of {', '.join(_SHAPES)}, got {self.shape!r}.")

    def at(self, progress: float) -> float:
        """The rate at a point of the training, from 0 to 1."""
        if progress < self.warm_up:
            return self.highest * progress / self.warm_up
        return self.highest * _SHAPES[self.shape]((progress - self.warm_up) / (1 - self.warm_up))

    def table(self, steps: int) -> Tensor:
        """(steps,) the rate of each step."""
        return torch.tensor([self.at((i + 0.5) / steps) for i in range(steps)])


_SHAPES: dict[str, Callable[[float], float]] = {
    "steps": lambda t: 0.1 ** ((t >= 0.5) + (t >= 0.75)),
    "cosine": lambda t: (1 + cos(pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "constant": lambda _: 1.0,
}


@dataclass(frozen=True)
class Course:
    """How long and how fast to train.

    Args:
        samples: size of the data set; every epoch sees it in another order.
        batch: samples in a step; what does not fill one is left out of the epoch.
    """

    samples: int
    batch: int
    epochs: int
    rate: Rate

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= self.samples or self.epochs < 1:
            raise InputError(
                f"course: expected at least one epoch of at least one batch, got {self.epochs} "
                f"epochs, {self.samples} samples and batches of {self.batch}."
            )

    @property
    def steps(self) -> int:
        """Of one epoch."""
        return self.samples // self.batch

    def train(
        self,
        model: nn.Module,
        loss_of: LossOf,
        make_optimizer: MakeOptimizer,
        phase: Phase,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        """Train in place. The phase's curve gets the mean loss of every epoch.

        Args:
            model: on the device of the data, in train mode when this returns.
            loss_of: the mean loss of the samples with the indexes it is given.
            make_optimizer: called with the parameters and a rate that follows the course.
            phase: whose ``log`` and ``should_stop`` are used.
            before_step: called between backward and update: a change of the gradients.
        """
        device = next(model.parameters()).device
        step = _Step(self, device, loss_of, model, make_optimizer, before_step)
        model.train()
        repeat = _Repeat(step, device)
        for epoch in range(self.epochs):
            step.begin_epoch()
            for _ in range(self.steps):
                repeat()
            phase.log(step.mean_loss())
            phase.progress(epoch + 1, self.epochs)
            if phase.should_stop:
                return


class _Step:
    """One step of training. All that changes from one to the next is in tensors."""

    def __init__(
        self,
        course: Course,
        device: torch.device,
        loss_of: LossOf,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        before_step: Callable[[], None] | None,
    ) -> None:
        self._course = course
        self._loss_of = loss_of
        self._before_step = before_step
        self._rates = course.rate.table(course.steps * course.epochs).to(device)
        self._rate = self._rates[0].clone()
        self._optimizer = make_optimizer(model.parameters(), self._rate)
        self._order = torch.zeros(course.samples, dtype=torch.long, device=device)
        self._within = torch.arange(course.batch, device=device)
        self._start = torch.zeros((), dtype=torch.long, device=device)  # of the batch in the order
        self._count = torch.zeros((), dtype=torch.long, device=device)  # of steps so far
        self._sum = torch.zeros((), device=device)

    def begin_epoch(self) -> None:
        """Shuffle."""
        self._order.copy_(torch.randperm(len(self._order), device=self._order.device))
        self._start.zero_()
        self._sum.zero_()

    def mean_loss(self) -> float:
        """Of the epoch so far."""
        return float(self._sum) / self._course.steps

    def __call__(self) -> None:
        """Draw, compute, update."""
        self._rate.copy_(self._rates.index_select(0, self._count.view(1)).squeeze(0))
        index = self._order.index_select(0, self._start + self._within)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss_of(index)
        loss.backward()
        if self._before_step is not None:
            self._before_step()
        self._optimizer.step()
        self._sum += loss.detach()
        self._start += self._course.batch
        self._count += 1


class _Repeat:
    """Call a step again and again, on a GPU from a recording."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step = step
        self._records = device.type == "cuda"
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device) if self._records else None
        if self._records:
            # What is left in reference cycles of an earlier forward pass (a tracer's, say) keeps
            # the parameters' gradient nodes on the stream of that pass, which spoils a recording.
            gc.collect()

    def __call__(self) -> None:
        """One step."""
        self._calls += 1
        if self._graph is not None:
            self._graph.replay()
        elif not self._records or self._stream is None:
            self._step()
        elif self._calls <= WARM_UP:
            self._aside(self._stream)
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._step()
            self._graph.replay()

    def _aside(self, stream: torch.cuda.Stream) -> None:
        """On a stream of its own, as recordings want it."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*AccumulateGrad.*stream.*")
            self._step()
        torch.cuda.current_stream().wait_stream(stream)


def adam(parameters: Iterable[nn.Parameter], rate: Tensor) -> Optimizer:
    """Adam whose learning rate is a tensor."""
    return torch.optim.Adam(parameters, lr=rate, capturable=rate.is_cuda, fused=True)


def adamw(
    parameters: Iterable[nn.Parameter], rate: Tensor, *, weight_decay: float = 0.01
) -> Optimizer:
    """Adam with decoupled weight decay, whose learning rate is a tensor."""
    return torch.optim.AdamW(
        parameters, lr=rate, weight_decay=weight_decay, capturable=rate.is_cuda, fused=True
    )


def sgd(
    parameters: Iterable[nn.Parameter], rate: Tensor, *, weight_decay: float = 1e-4
) -> Optimizer:
    """SGD with Nesterov momentum, as in the paper."""
    return torch.optim.SGD(
        parameters, lr=rate, momentum=0.9, nesterov=True, weight_decay=weight_decay, fused=True
    )


def half_precision(net: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """bf16 matrix products and convolutions where they are faster; nothing elsewhere.

    That is on a GPU, and on a CPU with instructions for them, where VGG19 trains in 0.6 of the
    time. oneDNN's depthwise convolutions are slower in bf16, and MobileNet with them.
    """
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
    if device.type == "cpu" and _multiplies_bf16() and not has_depthwise(net):
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    return nullcontext()


def _multiplies_bf16() -> bool:
    able: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


@contextmanager
def full_precision() -> Iterator[None]:
    """Convolutions of float32 in float32: by default a GPU rounds their inputs to TF32.

    Splitting indexes decide by small differences. Training in bf16 is not affected.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
