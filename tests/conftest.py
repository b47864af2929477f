"""Settings that every test shares: one thread, fixed seeds, Hypothesis profiles."""

import os
from collections.abc import Iterator

# Before torch is imported, because OpenMP reads it once. Workers share few cores, and one
# thread sums in one order, so a failure repeats.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "ci",  # the same examples every time; no deadline, because shared machines stall
    deadline=None,
    derandomize=True,
    max_examples=25,
    print_blob=True,
)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=10)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
)


class _TorchRandom:
    """torch's generator as Hypothesis wants it: every example starts from the same seed."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Tensor) -> None:
        torch.set_rng_state(state)


_torch_random = _TorchRandom()  # Hypothesis holds a weak reference only
hypothesis.register_random(_torch_random)


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Seed torch before each test, and put back what a test may leave set."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield 0
    torch.set_default_dtype(dtype)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked cuda where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
