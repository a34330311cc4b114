"""Pytest fixtures over a real Kubernetes: `control_plane`, and `cluster` with nodes.

Both last until the last test that asks for them is over. Their programs are built in the background
from the session's start, while other tests run; tests that need a cluster come last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import toolbox
from tests.cluster.cluster import Cluster, run_cluster, run_control_plane
from tests.cluster.control_plane import ControlPlane

FIXTURES = {"cluster", "control_plane"}
ROOT = Path(__file__).parents[2]
PREPARE = [sys.executable, "-m", "tests.cluster", "prepare"]
FIRST_WORKER = "gw0"
"""It gets the tests that need the programs (tests/lanes.py)."""
_BUILD = pytest.StashKey["subprocess.Popen[str]"]()
_RUNNING = pytest.StashKey[dict[str, contextlib.ExitStack]]()


def needs_cluster(item: pytest.Item) -> bool:
    return bool(FIXTURES & set(getattr(item, "fixturenames", ())))


def put_last(items: list[pytest.Item]) -> None:
    """Sort: cluster tests last, those of the control plane before those of nodes.

    Of these the release's come first: Helm takes over nothing that others have made.
    """

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        names = getattr(item, "fixturenames", ())
        return needs_cluster(item), "cluster" in names, "platform" not in names

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build, beside the tests that come first: those of a cluster wait for it."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    images = "platform" in wanted and os.getuid() == 0
    tools = bool(FIXTURES & wanted) and not os.environ.get("KUBEBUILDER_ASSETS")
    if session.config.option.collectonly or not (images or (tools and not toolbox.are_built())):
        return
    if os.environ.get("PYTEST_XDIST_WORKER", FIRST_WORKER) != FIRST_WORKER:
        return
    session.config.stash[_BUILD] = subprocess.Popen(
        [*PREPARE, *(["images"] if images else [])],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait for the build outside of the first test's own time, and show how far it is."""
    build = item.config.stash.get(_BUILD, None)
    if build is not None and needs_cluster(item):
        del item.config.stash[_BUILD]
        writer: Any = item.config.get_terminal_writer()
        writer.line()
        assert build.stdout is not None
        for line in build.stdout:
            writer.line(line.rstrip())
        build.wait()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Stop a cluster after the last test that needs it: its idle programs take half a processor."""
    yield
    for name, stack in item.config.stash.get(_RUNNING, {}).items():
        if name in getattr(item, "fixturenames", ()) and item is _last(item.session, name):
            stack.close()


def _last(session: pytest.Session, fixture: str) -> pytest.Item:
    users = (i for i in reversed(session.items) if fixture in getattr(i, "fixturenames", ()))
    return next(users)


def pytest_sessionfinish(session: pytest.Session) -> None:
    build = session.config.stash.get(_BUILD, None)
    if build is not None:
        os.killpg(build.pid, signal.SIGTERM)
        build.wait()


@contextlib.contextmanager
def reason_told() -> Iterator[None]:
    """Skip with the reason where no cluster can run; fail with it where one is demanded."""
    try:
        yield
    except toolbox.CannotRunError as error:
        if os.environ.get("MAINSTAY_REQUIRE_CLUSTER"):
            raise
        pytest.skip(f"no cluster here: {error}")


@contextlib.contextmanager
def _stack(config: pytest.Config, fixture: str) -> Iterator[contextlib.ExitStack]:
    """Yield what a fixture starts: closed after its last test, or else with the session."""
    with contextlib.ExitStack() as stack:
        config.stash.setdefault(_RUNNING, {})[fixture] = stack
        yield stack


@pytest.fixture(scope="session")
def control_plane(pytestconfig: pytest.Config) -> Iterator[ControlPlane]:
    """An API server with etcd, controllers and scheduler, on loopback; needs no root."""
    with _stack(pytestconfig, "control_plane") as stack:
        with reason_told():
            plane = stack.enter_context(run_control_plane(toolbox.say_to_stdout))
        yield plane


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Callable[[int], Cluster]]:
    """``cluster(n)``: the session's cluster, with at least n living and ready nodes."""
    with _stack(pytestconfig, "cluster") as stack:
        made: list[Cluster] = []

        def ensure(nodes: int) -> Cluster:
            if made:
                return made[0].scale(nodes)
            with reason_told():
                made.append(stack.enter_context(run_cluster(nodes, toolbox.say_to_stdout)))
            return made[0]

        yield ensure
