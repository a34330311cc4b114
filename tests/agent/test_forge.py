"""The forge of supervisors with real processes; the test is the run that asks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mainstay_core.base.frames import Frame, FrameParser, pack

pytestmark = pytest.mark.slow


class Run:
    """Who asks the forge."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._parser = FrameParser()
        self._frames: list[Frame] = []

    def ask(self, **head: Any) -> dict[str, Any]:
        self.line.sendall(pack({"kind": "launch", **head}))
        return self.hear()

    def hear(self) -> dict[str, Any]:
        while not self._frames:
            data = self.line.recv(65536)
            assert data, "the forge ended"
            self._frames.extend(self._parser.feed(data))
        return self._frames.pop(0).head


@contextmanager
def forge(directory: Path) -> Iterator[Run]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "mainstay_agent.forge", "--fd", str(theirs.fileno())]
    with ours, (directory / "forge.log").open("wb") as log:
        with theirs:
            process = subprocess.Popen(command, stderr=log, pass_fds=[theirs.fileno()])
        try:
            run = Run(ours)
            assert run.hear()["kind"] == "ready"
            yield run
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            assert process.wait(30) == 0


def environment_of(directory: Path) -> dict[str, str]:
    """Make a pod's directory; return what its supervisor finds in its environment."""
    (directory / "pod").mkdir()
    return {
        "MAINSTAY_API_URL": "http://127.0.0.1:9",
        "MAINSTAY_TOKEN": "none",
        "MAINSTAY_JOB": "job",
        "MAINSTAY_POD": "a",
        "MAINSTAY_ADDRESS": "127.0.0.1",
        "MAINSTAY_POD_DIR": str(directory / "pod"),
    }


FIRST_REQUEST = """
import asyncio, os, sys
import mainstay_agent.forge
from mainstay_agent import api_client
from mainstay_agent.settings import parse
from mainstay_core.wire.api import ApiUnavailable
api_client.warm_up()
threads, before = len(os.listdir("/proc/self/task")), set(sys.modules)
async def ask():
    client = api_client.ApiClient(parse([], os.environ))
    try:
        await client.fetch_plan()
    except ApiUnavailable:
        pass
    await client.close()
asyncio.run(ask())
print(threads, sorted(set(sys.modules) - before))
"""


def test_what_a_forked_supervisor_needs_for_its_requests_is_imported_before(tmp_path: Path) -> None:
    """By one thread: a process with more than one cannot fork."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_REQUEST],
        env=os.environ | environment_of(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1 []\n"


def test_what_cannot_be_a_supervisor_is_refused_or_ends_with_the_reason(tmp_path: Path) -> None:
    with forge(tmp_path) as run:
        assert run.ask(pod="a", log=str(tmp_path / "a.log"))["kind"] == "refused"
        log = tmp_path / "b.log"
        head = run.ask(pod="b", log=str(log), environment={"MAINSTAY_API_URL": "http://127.0.0.1"})
        assert (head["kind"], head["pod"]) == ("launched", "b")
        end = run.hear()
        assert (end["kind"], end["pid"], end["code"]) == ("exited", head["pid"], 2)
        assert "--job" in log.read_text()


def test_supervisors_lead_sessions_and_end_with_the_forge(tmp_path: Path) -> None:
    with forge(tmp_path) as run:
        environment = environment_of(tmp_path)
        head = run.ask(pod="a", log=str(tmp_path / "a.log"), environment=environment)
        pid = int(head["pid"])
        end = os.pidfd_open(pid)
        while not (tmp_path / "pod" / "supervisor.sock").exists():
            assert Path(f"/proc/{pid}").exists(), (tmp_path / "a.log").read_text()
        assert os.getsid(pid) == pid
    with os.fdopen(end), pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
