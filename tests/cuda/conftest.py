"""Tests that need a CUDA device: without one the whole folder is skipped, here and nowhere else.

With ``MAINSTAY_TEST_DEVICE=cpu`` most of them run on the CPU, to see that the tests work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from mainstay_train.base import environment

environment.prepare()  # before anything imports torch: tests compute as trainers do

import pytest  # noqa: E402
import torch  # noqa: E402
from tests.train.crew import Crew, Nursery  # noqa: E402

from mainstay_train.exact import numerics  # noqa: E402

WANTED = os.environ.get("MAINSTAY_TEST_DEVICE", "cuda")


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The device under test, set up as a trainer sets it up."""
    if WANTED == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    return numerics.setup("cuda:0" if WANTED == "cuda" else WANTED)


@pytest.fixture
def needs_cuda(device: torch.device) -> torch.device:
    """The device, for tests of what a CPU does not have."""
    if device.type != "cuda":
        pytest.skip("it is about CUDA alone")
    return device


@pytest.fixture(scope="session")
def nursery(device: torch.device) -> Iterator[Nursery]:
    """Forks workers, in a program of its own that has not touched the device."""
    del device
    with Nursery() as started:
        yield started


@pytest.fixture
def crew(nursery: Nursery) -> Iterator[Crew]:
    workers = Crew(nursery)
    yield workers
    workers.end()
