"""A job whose Redis, api processes and pods a test holds one by one, each pod behind a relay.

``mainstay local run`` starts again what ends; here nothing comes back before the test says
so, and what an api sends can be kept from some of the pods.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from tests.agent.conftest import Line
from tests.api.conftest import Redis
from tests.e2e.harness import GIVE_UP_S, POLL_S
from tests.e2e.relays import TOKEN, ApiProcess, Relay, Relays


class Cluster:
    """Redis, one api, a forge and pods. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.short = Path(tempfile.mkdtemp(prefix="ms-"))
        self.redis = Redis(self.short)
        self.api = ApiProcess(self.redis, directory / "api.log")
        self.relays: dict[str, Relay] = {}
        self.job = ""
        self._loop = Relays()
        self._forge: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._supervisors: dict[str, subprocess.Popen[bytes]] = {}
        self._deadline_s = time.monotonic() + GIVE_UP_S

    def __enter__(self) -> Cluster:
        self.redis.start()
        self.api.start()
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "mainstay_train.launcher.forge",
            "--fd",
            str(theirs.fileno()),
        ]
        with (self.directory / "forge.log").open("wb") as log:
            self._forge = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdout=log, stderr=log
            )
        theirs.close()
        self._line = Line(ours)
        self._line.expect("ready")
        return self

    def __exit__(self, *_: object) -> None:
        for supervisor in self._supervisors.values():
            supervisor.kill()
            supervisor.wait()
            assert supervisor.stdin is not None
            supervisor.stdin.close()
        if self._line is not None:
            self._line.socket.close()
        if self._forge is not None:
            self._forge.wait()
        self.api.kill()
        self.api.client.close()
        with contextlib.suppress(ProcessLookupError, AssertionError):
            self.redis.resume()
        self.redis.stop()
        self._loop.close()
        shutil.rmtree(self.short, ignore_errors=True)

    def start_job(self, spec: dict[str, Any], num_pods: int) -> None:
        """Create the job and its pods."""
        created = self.api.client.post("/v1/jobs", json={"manifest": spec})
        assert created.status_code == 201, created.text
        self.job = created.json()["uid"]
        network = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
        for number in range(num_pods):
            self._start_pod(f"pod-{number}", f"{network}.{number + 2}")

    def cut_off(self, member: dict[str, Any]) -> None:
        """Cut a rank's pod off from everybody: nothing ends, and nothing is heard of it."""
        self.relays[member["pod"]].silence()
        self._signal_pod(member, signal.SIGSTOP)

    def let_back(self, member: dict[str, Any]) -> None:
        """Undo that."""
        self._signal_pod(member, signal.SIGCONT)
        self.relays[member["pod"]].drop()

    def _signal_pod(self, member: dict[str, Any], number: signal.Signals) -> None:
        os.kill(int(member["pid"]), number)
        self._supervisors[member["pod"]].send_signal(number)

    def _start_pod(self, uid: str, address: str) -> None:
        directory = self.short / uid
        directory.mkdir()
        self.relays[uid] = Relay(self._loop, self.api.port)
        environment = os.environ | {
            "MAINSTAY_API_URL": self.relays[uid].url,
            "MAINSTAY_TOKEN": TOKEN,
            "MAINSTAY_JOB": self.job,
            "MAINSTAY_POD": uid,
            "MAINSTAY_ADDRESS": address,
            "MAINSTAY_POD_DIR": str(directory),
        }
        with (self.directory / f"{uid}.log").open("wb") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "mainstay_agent"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._supervisors[uid] = supervisor
        assert self._line is not None
        self._line.send(kind="launch", pod=uid, pod_dir=str(directory), address=address)
        self._line.expect("launched")

    # What is seen -------------------------------------------------------------

    def fetch(self, what: str = "") -> Any:
        """Return a part of the job; raises while the api is away or has no job."""
        path = f"/v1/jobs/{self.job}" + (f"/{what}" if what else "")
        response = self.api.client.get(path)
        response.raise_for_status()
        return response.json()

    def quorum(self) -> int:
        """Id of the newest plan."""
        plan = self.fetch("plan")["plan"]
        return int(plan["quorum"]["id"]) if plan else 0

    def members(self) -> list[dict[str, Any]]:
        """The ranks, without spares."""
        return [m for m in self.fetch("members") if m["rank"] != "spare"]

    def reasons(self) -> list[str]:
        """What happened, in words for machines."""
        return [event["reason"] for event in self.fetch("events")]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; what the api does not answer is not true yet."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return
            assert time.monotonic() < self._deadline_s, self.logs()
            time.sleep(POLL_S)

    def wait_for_members(self, num_members: int, *, or_joining: bool = False) -> None:
        """Wait until all places are taken by settled ranks with a known process.

        Args:
            num_members: ranks of a job that lacks nobody.
            or_joining: is content with one that joins at the end of this step.
        """

        def ready() -> bool:
            members = self.members()
            if or_joining and any(m["joining"] and not m["settled"] for m in members):
                return True
            return (
                len(members) == num_members
                # A pod's last heartbeat may speak of a former life.
                and all(
                    m["settled"] and Path(f"/proc/{m['pid'] or 'no'}").exists() for m in members
                )
                and self.fetch()["state"] == "running"
            )

        self.wait_until(ready)

    def report(self) -> dict[str, Any]:
        """Return the report of the job, which must complete."""
        self.wait_until(lambda: self.fetch()["state"] in ("complete", "failed", "stopped"))
        assert self.fetch()["state"] == "complete", self.logs()
        # The ledger's last entries come after the last trainer's goodbye.
        for supervisor in self._supervisors.values():
            supervisor.wait()
        return dict(self.fetch("report"))

    def logs(self, num_lines: int = 30) -> str:
        """Return the ends of all logs."""
        texts = []
        for log in (*sorted(self.directory.glob("*.log")), *sorted(self.short.glob("*/*.log"))):
            lines = log.read_text(errors="replace").splitlines()[-num_lines:]
            texts.append("\n".join([f"--- {log.name} ({log.parent.name})", *lines]))
        return "\n".join(texts)


def is_there(member: dict[str, Any]) -> bool:
    """Whether a rank's process is known and lives."""
    return bool(member["pid"]) and Path(f"/proc/{member['pid']}").exists()


def kill(member: dict[str, Any]) -> None:
    """Kill -9 the trainer of a rank."""
    os.kill(int(member["pid"]), signal.SIGKILL)


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Start Redis, an api and a forge in ``directory``; end everything at the end."""
    with Cluster(directory) as made:
        yield made
