"""Which worker runs which tests (`make test`), and which tests `make quick` leaves out.

One lane runs what needs a cluster: one control plane serves all of it, and its nodes have names and
addresses of which the machine has one each. The other lane runs everything else, a file at a time,
the longest kinds first; whoever is done helps with the rest.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from tests.cluster.fixtures import FIRST_WORKER, needs_cluster
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

CLUSTER = ("tests/chart/", "tests/cluster/", "tests/operator/", "tests/api/test_kube_auth.py")
"""Where tests may ask for a cluster: who hands out the work sees paths alone."""
CLUSTER_SCOPE = "cluster"
KINDS = ("e2e", "train", "agent", "api", "core")
"""Folders in the order in which the second lane takes them; others come last."""
STARTERS = frozenset({"crew", "forge", "make_pod", "pod"})
"""Fixtures that start trainers, or whatever plays them, as processes."""
JOBS = ("tests/chaos/", "tests/e2e/")
"""Tests of whole jobs."""
TRAINERS = ("mainstay_train", "mainstay_agent", "mainstay_cli.commands.main")
"""Modules that nothing runs as a process during quick tests."""


class Lanes(LoadScopeScheduling):
    """Hands out files, and all that needs a cluster as if it were one of them."""

    def _split_scope(self, nodeid: str) -> str:
        return CLUSTER_SCOPE if nodeid.startswith(CLUSTER) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give the worker that builds the cluster's programs the tests that need them.

        On a busy machine it may be ready later than the others. Each of them would build the
        programs in a test's own time.
        """
        builds = node.gateway.id == FIRST_WORKER
        fit = (scope for scope in self.workqueue if (scope == CLUSTER_SCOPE) == builds)
        if (first := next(fit, None)) is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out what needs a cluster, starts trainers or is slow (make quick)"
    parser.addoption("--quick", action="store_true", help=text)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    config.option.loadscopereorder = False  # keeps the order of `arrange`
    return Lanes(config, log)


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what is not quick, where that is asked for; order the rest for the lanes.

    Raises:
        UsageError: a test needs a cluster in a place where none is expected.
    """
    for item in items:
        if needs_cluster(item) and not item.nodeid.startswith(CLUSTER):
            raise pytest.UsageError(f"{item.nodeid} needs a cluster: it belongs in tests/cluster")
    if config.getoption("--quick"):
        left_out = [item for item in items if not is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_quick(item)]
        sys.addaudithook(_refuse_trainers)
    if hasattr(config, "workerinput"):
        items.sort(key=_lane)


def is_quick(item: pytest.Item) -> bool:
    """Return whether a test belongs to the edit loop: seen by its folder, fixtures and markers."""
    names = set(getattr(item, "fixturenames", ()))
    is_heavy = needs_cluster(item) or STARTERS & names or item.nodeid.startswith(JOBS)
    return not is_heavy and item.get_closest_marker("slow") is None


def _lane(item: pytest.Item) -> tuple[bool, int]:
    kind = item.nodeid.split("/")[1]
    return not item.nodeid.startswith(CLUSTER), KINDS.index(kind) if kind in KINDS else len(KINDS)


def _refuse_trainers(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        command = [os.fsdecode(word) for word in args[1]]
        started = next((word for word in command if word.startswith(TRAINERS)), None)
        if started is not None:
            raise RuntimeError(f"a quick test starts {started}: take a fixture of tests/lanes.py")
