"""The worker that builds the programs of the cluster gets the tests that need them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cluster.fixtures import FIRST_WORKER
from tests.lanes import Lanes

CLUSTER_TESTS = ["tests/cluster/test_a.py::test_1", "tests/operator/test_b.py::test_2"]
OTHERS = ["tests/e2e/test_c.py::test_3", "tests/core/test_d.py::test_4"]


class Worker:
    """A worker of xdist that remembers what it was handed."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.handed: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.handed.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("ready", [("gw0", "gw1", "gw2"), ("gw2", "gw1", "gw0")])
def test_whoever_builds_gets_the_clusters_tests_in_whatever_order_workers_are_ready(
    ready: Sequence[str],
) -> None:
    config: Any = SimpleNamespace(
        getvalue=lambda _: ["popen"] * len(ready), option=SimpleNamespace(loadscopereorder=False)
    )
    lanes = Lanes(config)
    workers: list[Any] = [Worker(name) for name in ready]
    collected = [*CLUSTER_TESTS, *OTHERS]
    for worker in workers:
        lanes.add_node(worker)
    for worker in workers:
        lanes.add_node_collection(worker, collected)
    lanes.schedule()
    handed = {worker.gateway.id: [collected[i] for i in worker.handed] for worker in workers}
    assert handed[FIRST_WORKER] == CLUSTER_TESTS
    assert sorted(test for tests in handed.values() for test in tests) == sorted(collected)
