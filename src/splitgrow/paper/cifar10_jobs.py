"""The jobs of the CIFAR-10 study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, get_args

from splitgrow.paper import jobs as shared
from splitgrow.paper.cifar10_nets import ACTIVATIONS, ARCHS
from splitgrow.paper.jobs import GROWN, PRUNED, UNIFORM
from splitgrow.policy import After

METHODS = (*GROWN, *UNIFORM, *PRUNED)


@dataclass(frozen=True)
class Job(shared.Job):
    """One row of nets: ``"vgg19"`` or ``"mobilenet"``, with ``"relu"`` or ``"softplus"``."""

    ARCHS: ClassVar[Sequence[str]] = ARCHS
    METHODS: ClassVar[Sequence[str]] = METHODS
    ACTIVATIONS: ClassVar[Sequence[str]] = ACTIVATIONS


def jobs(
    archs: Iterable[str] = ARCHS,
    seeds: Iterable[int] = range(3),
    methods: Iterable[str] = METHODS,
    afters: Iterable[After] = get_args(After),
    activations: Iterable[str] = ("relu",),
) -> list[Job]:
    """Every combination that there is, seed by seed."""
    return [
        Job(arch, method, after, activation, seed)
        for seed, arch, activation, after, method in product(
            seeds, archs, activations, afters, methods
        )
        if not (method in UNIFORM and after == "retrain")
    ]


def study_of_ends(seeds: Iterable[int] = range(3), archs: Iterable[str] = ARCHS) -> list[Job]:
    """The jobs of the study of nets of given sizes: the longest ones of each seed first."""
    methods = ("l1", "bn", "uniform-long", *GROWN)
    return [Job(arch, method, seed=seed) for seed, method, arch in product(seeds, methods, archs)]


def study(seeds: Iterable[int] = range(3), archs: Iterable[str] = ARCHS) -> list[Job]:
    """The jobs of the whole study: the longest one, then the most important ones first.

    Nets of uniform width that are trained as long as growth, and the paper's softplus, once.
    """
    every = tuple(seeds)
    once = every[:1]
    rows: list[tuple[Sequence[str], After, str, Sequence[int]]] = [
        (("uniform-long",), "finetune", "relu", once),
        (("splitting", "l1", "bn", "random", "splitting-macs"), "finetune", "relu", every),
        (("uniform",), "finetune", "relu", every),
        (("splitting-params", "splitting-gain"), "finetune", "relu", every),
        (("splitting", "l1", "bn"), "retrain", "relu", every),
        (("splitting",), "finetune", "softplus", once),
    ]
    return [
        Job(arch, method, after, activation, seed)
        for methods, after, activation, taken in rows
        for seed, method, arch in product(taken, methods, archs)
    ]
