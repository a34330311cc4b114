"""What all tests share: the fixtures of a real Kubernetes (tests/cluster/README.md), and lanes."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings
from tests import lanes
from tests.cluster.fixtures import (
    cluster,
    control_plane,
    put_last,
    pytest_collection_finish,
    pytest_runtest_protocol,
    pytest_sessionfinish,
)
from tests.lanes import pytest_addoption, pytest_xdist_make_scheduler

__all__ = [
    "cluster",
    "control_plane",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_xdist_make_scheduler",
]

# No test asserts on time: on a machine with other work an example may take any time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    put_last(items)
    lanes.arrange(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave what collecting tests has made, a gigabyte, out of every later garbage collection.

    Each of them would look at all of it, for seconds: simulated jobs ask for one at their end.
    """
    _freeze()


@pytest.fixture(scope="module", autouse=True)
def _heap_of_a_module() -> None:
    """Leave out what earlier modules have imported and cached, too."""
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
