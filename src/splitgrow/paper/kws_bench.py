"""Speech Commands on the device: its three parts, the keyword spotters, training and accuracies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.paper import bench
from splitgrow.paper.bench import Batch, Change, batches, share_right
from splitgrow.paper.depthwise_kernels import depthwise_kernels, layout_for
from splitgrow.paper.jobs import WIDTH, Job, Size, channels
from splitgrow.paper.speech import (
    HOP,
    LogMel,
    decibels,
    fit_mfcc,
    mix_features,
    mix_waves,
    scaled,
    shift_frames,
    shift_waves,
)
from splitgrow.paper.speech_parts import SpeechData, SpeechPart, official_shares, row_weights
from splitgrow.paper.training import Course, adamw
from splitgrow.phase import Phase
from splitgrow.zoo.kws import DS_CNN_WIDTHS, DSCNN, HELLO_EDGE, LSTM, SHAPE, operations

GROWABLE = "DS-CNN"
PICKED_BY = 12  # the seed that draws some of the clips: the same ones in every run
EVALUATED = 1024  # clips at a time
# At 1e-2 the LSTM with peepholes learns for a thousand steps, and in a longer run falls to chance
# and stays there. In runs of 1,000 steps this rate was the best of four on validation.
BEARABLE: dict[type[nn.Module], float] = {LSTM: 5e-3}


@dataclass(frozen=True, kw_only=True)
class Setting(bench.Setting):
    """What the keyword study adds to the fields of every study, and its values of some.

    Args:
        steps: of an epoch. Clips are drawn for it so that silence and unknown words each have
            their ``share`` of it; it should be long enough for every clip.
        full_phases: for how many phases nets of full size are trained: those of the zoo, and the
            one that pruning starts from.
        rate: the highest learning rate.
        smoothing: of the labels, in training and where neurons are scored.
        shift: frames of 20 ms by which a clip is moved at most, either way.
        chance: of noise in a clip, with up to ``volume`` times its amplitude.
        clips: how many to train with; None: all.
        tested: how many to report on, in the test and in the validation part each; None: all.
    """

    epochs: int = 4
    steps: int = 500
    full_phases: int = 4
    rate: float = 1e-2
    warm_up: float = 0.2
    weight_decay: float = 0.05
    smoothing: float = 0.1
    share: float = 0.08
    shift: int = 5
    chance: float = 0.8
    volume: float = 0.1
    clips: int | None = None
    tested: int | None = None
    scored_batch: int = 256
    largest: float = 0.6

    def paper(self) -> Setting:
        """Nearly that of "Hello Edge" in every phase: Adam, 30,000 steps in batches of 100."""
        return replace(
            self, epochs=30, steps=1000, full_phases=1, batch=100, rate=5e-4, shape="steps",
            warm_up=0.0, weight_decay=0.0, smoothing=0.0,
        )  # fmt: skip

    def quick(self) -> Setting:
        """The same in minutes on a CPU: a glimpse of each method, far from any optimum."""
        return replace(
            self, epochs=1, steps=20, full_phases=1, batch=32, clips=1000, tested=256, scored=128,
            scored_batch=64, phases=3,
        )  # fmt: skip


def build(arch: str, size: Size, width: int = WIDTH) -> nn.Module:
    """An untrained net for MFCCs (B, 1, 49, 10).

    Args:
        arch: a name of ``splitgrow.zoo.kws.HELLO_EDGE``.
        size: ``"full"``: as published; of DS-CNN also ``"seed"``: ``width`` channels everywhere, or
            a number: so many times these.
        width: channels of the seed.
    """
    if arch not in HELLO_EDGE:
        raise InputError(f"arch: expected one of {', '.join(HELLO_EDGE)}, got {arch!r}.")
    if arch == GROWABLE:
        return DSCNN([channels(full, width, size) for full in DS_CNN_WIDTHS])
    if size != "full":
        raise InputError(f'size: {arch} is there at full size only. Take "full", or {GROWABLE}.')
    return HELLO_EDGE[arch]()


class Bench(bench.Bench[Batch]):
    """The clips of a setting on one device, and what is done with them.

    Attributes:
        train_part: what nets are trained and scored on.
        validation, test: what they are judged by: MFCCs and labels. Validation has the official
            shares of silence and unknown words, as the test has.
        scored: batches of the training part, in the shares of training and as they are.
    """

    setting: Setting

    def __init__(self, setting: Setting, data: SpeechData, device: torch.device) -> None:
        super().__init__(setting, device)
        self.full_phases = setting.full_phases
        self.train_part = _moved(_some(data.train, setting.clips), device)
        self.mfcc = fit_mfcc(self.train_part.codes)
        self.noise = decibels(data.silence.to(device))
        self.recordings = None if data.noise is None else data.noise.to(device)
        self.log_mel = LogMel().to(device)
        self._reached = row_weights(self.train_part.labels, setting.share).double().cumsum(0)
        self.validation = self._inputs(_some(official_shares(data.val), setting.tested))
        self.test = self._inputs(_some(data.test, setting.tested))
        self.scored = self._scored()

    def _inputs(self, part: SpeechPart) -> Batch:
        moved = _moved(part, self.device)
        return self.mfcc(decibels(moved.codes)), moved.labels

    def _scored(self) -> list[Batch]:
        count, size = self.setting.scored, self.setting.scored_batch
        generator = torch.Generator().manual_seed(PICKED_BY)
        rows = self._drawn(count, 0.5)[torch.randperm(count, generator=generator).to(self.device)]
        return list(batches(*self._inputs(self.train_part.rows(rows)), size))

    def _drawn(self, count: int, offset: Tensor | float) -> Tensor:
        """(count,) clips by their weights, each as often as it should be, rounded up or down.

        Independent draws would leave out a third of the clips in an epoch of as many.
        """
        place = torch.arange(count, dtype=torch.float64, device=self.device) + offset
        found = torch.searchsorted(self._reached, place / count * self._reached[-1])
        return found.clamp_max(len(self._reached) - 1)

    # ---- nets ---------------------------------------------------------------------------------

    def build(self, job: Job, size: Size) -> nn.Module:
        """An untrained net of a job."""
        return build(job.arch, size, self.setting.width)

    def example(self) -> tuple[Tensor]:
        """Inputs to trace a net with."""
        return (torch.zeros(2, 1, *SHAPE, device=self.device),)

    def loss_fn(self, model: Any, batch: Batch) -> Tensor:
        """The loss that nets are trained with, and neurons scored by."""
        return self._loss(model(batch[0]), batch[1])

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, label_smoothing=self.setting.smoothing)

    # ---- training -----------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """As many as the steps of an epoch take, however many clips there are."""
        return self.setting.steps * self.setting.batch

    def highest_rate(self, net: nn.Module) -> float:
        """The same for all nets, but for one that does not bear it."""
        return min(self.setting.rate, BEARABLE.get(type(net), self.setting.rate))

    def _train(self, net: nn.Module, phase: Phase, course: Course, change: Change | None) -> None:
        # In float32 and without an aligned twin, unlike CIFAR-10: these nets are small.
        offset = torch.rand((), dtype=torch.float64, device=self.device)
        rows, labels = self._drawn(course.samples, offset), self.train_part.labels
        layout = layout_for(net, self.device)
        net.to(memory_format=layout)  # type: ignore[call-overload]

        def loss_of(index: Tensor) -> Tensor:
            chosen = rows[index]
            # contiguous() would leave the one channel of the inputs first, which is slower.
            inputs = self.changed(chosen).to(memory_format=layout)
            with depthwise_kernels():
                return self._loss(net(inputs), labels[chosen])

        optimizer = partial(adamw, weight_decay=self.setting.weight_decay)
        course.train(
            net, loss_of, optimizer, phase, None if change is None else partial(change, net)
        )

    def changed(self, rows: Tensor) -> Tensor:
        """MFCCs (B, 1, 49, 10) of clips of the training part, moved in time and with noise.

        That is done to waveforms where there are any, and to their features otherwise.
        """
        waves, setting = self.train_part.waves, self.setting
        mixed: dict[str, Any] = {"chance": setting.chance, "volume": setting.volume}
        if waves is None or self.recordings is None:
            codes = shift_frames(self.train_part.codes[rows], setting.shift)
            return self.mfcc(mix_features(decibels(codes), self.noise, **mixed))
        moved = scaled(shift_waves(waves[rows], HOP * setting.shift))
        return self.mfcc(self.log_mel(mix_waves(moved, self.recordings, **mixed)))

    # ---- evaluation ---------------------------------------------------------------------------

    def metrics(self, net: nn.Module) -> dict[str, float]:
        """Accuracies of a net in eval mode, in the test and validation parts, and operations."""
        return {**super().metrics(net), "operations": operations(net, *self.example())}

    def accuracy(self, net: nn.Module, part: Batch) -> float:
        """The share of the clips that a net in eval mode gets right."""
        return accuracy(net, *part)


def accuracy(net: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """The share of the clips that a net in eval mode gets right."""
    return share_right(net, batches(inputs, labels, EVALUATED))


def _some(part: SpeechPart, count: int | None) -> SpeechPart:
    """So many of the clips, drawn once for all runs; all without a number."""
    if count is None:
        return part
    if count < 1:
        raise InputError(
            f"kws: expected at least one clip, got {count}. Choose clips=, tested= so."
        )
    order = torch.randperm(len(part.labels), generator=torch.Generator().manual_seed(PICKED_BY))
    return part.rows(order[:count])


def _moved(part: SpeechPart, device: torch.device) -> SpeechPart:
    waves = None if part.waves is None else part.waves.to(device)
    return SpeechPart(part.codes.to(device), part.labels.to(device), waves)
