"""Real supervisors, a real api and a real Redis that goes away; the trainers are played.

No bits are compared here: what is tested is who decides what, and who hears of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.agent.conftest import ADDRESS, JOB, Pod
from tests.api.conftest import MANIFEST, Redis
from tests.e2e.relays import TOKEN, ApiProcess, Relay, Relays

pytestmark = pytest.mark.slow

TIMEOUT_S = 3
SPEC = MANIFEST | {
    "spec": {
        "training": {"steps": 60, "seed": 1, "lanes": 2, "shardsPerLane": 1},
        "parallelism": {"stages": 1},
        "spares": {"replicas": 1},
        "detection": {"heartbeatTimeoutSeconds": TIMEOUT_S},
        "workload": {"entrypoint": "package.module:workload", "config": {}},
    }
}


class PlayedPod:
    """A supervisor with one trainer, which takes every plan up and settles in it at once."""

    def __init__(self, root: Path, relays: Relays, api: ApiProcess) -> None:
        self.relay = Relay(relays, api.port)
        uid = f"pod-{secrets.token_hex(3)}"
        directory = root / uid
        directory.mkdir()
        environment = {
            **os.environ,
            "MAINSTAY_API_URL": self.relay.url,
            "MAINSTAY_TOKEN": TOKEN,
            "MAINSTAY_JOB": JOB,
            "MAINSTAY_POD": uid,
            "MAINSTAY_ADDRESS": ADDRESS,
            "MAINSTAY_POD_DIR": str(directory),
        }
        with (directory / "supervisor.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "mainstay_agent"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self.pod = Pod(process, directory, uid)
        self.launcher = self.pod.launcher()
        self.plans: list[dict[str, Any]] = []
        self.start_trainer()

    def start_trainer(self) -> None:
        """Be the trainer that the launcher is told to fork next."""
        # It is told to kill as well: what is played here is dead already, or does not care.
        while (frame := self.launcher.receive()) is not None and frame.kind != "fork":
            pass
        assert frame is not None
        self.life = str(frame.head["incarnation"])
        self.launcher.send(kind="forked", slot=0, pid=7, incarnation=self.life)
        self.trainer = self.pod.connect()
        hello = {"slot": 0, "incarnation": self.life, "pid": 7, "fingerprint": {"torch": "2"}}
        self.trainer.send(kind="hello", **hello)
        self._thread = threading.Thread(target=self._play, args=(self.trainer, self.life))
        self._thread.daemon = True
        self._thread.start()

    def kill_trainer(self, *, restart: bool = False) -> None:
        """End it as ``kill -9`` would: its launcher reaps it."""
        life = self.life
        self.trainer.socket.shutdown(2)
        self._thread.join()
        self.trainer.socket.close()
        code = None if restart else 0
        self.launcher.send(
            kind="exited", slot=0, pid=7, incarnation=life, code=code, signal=9 if restart else None
        )
        if restart:
            self.start_trainer()

    def quorum(self) -> int:
        """Id of the newest plan that the trainer was given."""
        return int(self.plans[-1]["quorum"]["id"]) if self.plans else 0

    def _play(self, trainer: Any, life: str) -> None:
        with contextlib.suppress(OSError, ConnectionError):
            trainer.socket.settimeout(None)
            while (frame := trainer.receive()) is not None:
                if frame.kind == "plan":
                    self._take(trainer, life, frame.head["plan"])

    def _take(self, trainer: Any, life: str, plan: dict[str, Any]) -> None:
        self.plans.append(plan)
        if life not in {m["incarnation"] for m in plan["members"]}:
            return
        for kind in ("adopted", "settled"):
            fact = {
                "kind": kind,
                "pod": self.pod.uid,
                "slot": 0,
                "incarnation": life,
                "quorum": plan["quorum"],
                "step": 0,
            }
            trainer.send(kind="fact", fact=fact)
        entry = {
            "step": plan["quorum"]["id"],
            "stage": 0,
            "quorum": plan["quorum"],
            "gradient": "0" * 32,
            "masters": f"{plan['quorum']['id']:032x}",
            "data": "0" * 32,
            "loss": 1.0,
            "norm": 1.0,
            "tokens": 8,
            "step_s": 0.1,
            "replicas": 2,
        }
        trainer.send(kind="ledger", entry=entry, post=True)

    def close(self) -> None:
        self.trainer.socket.close()
        self.launcher.socket.close()
        self.pod.process.kill()
        self.pod.process.wait()
        assert self.pod.process.stdin is not None
        self.pod.process.stdin.close()


class ThreePods:
    """The control plane and three pods, one of them a spare."""

    def __init__(self, root: Path) -> None:
        self.redis = Redis(root)
        self.redis.start()
        self.api = ApiProcess(self.redis, root / "api.log")
        self.api.start()
        created = self.api.client.post("/v1/jobs", json={"manifest": SPEC, "uid": JOB})
        assert created.status_code == 201, created.text
        self.relays = Relays()
        self.pods = [PlayedPod(root, self.relays, self.api) for _ in range(3)]
        self.wait_for(1)

    def fetch(self, what: str = "") -> Any:
        reply = self.api.client.get(f"/v1/jobs/{JOB}" + (f"/{what}" if what else ""))
        return reply.json() if reply.is_success else None

    def plan(self) -> dict[str, Any] | None:
        reply = self.fetch("plan")
        return reply["plan"] if reply else None

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.fetch("events")]

    def wait_for(self, quorum: int, *, pods: list[PlayedPod] | None = None) -> None:
        """Wait until the api, unless pods are named, and all these pods have a plan."""
        while pods is None and (self.plan() or {"quorum": {"id": 0}})["quorum"]["id"] < quorum:
            time.sleep(0.02)
        for pod in self.pods if pods is None else pods:
            while pod.quorum() < quorum:
                assert pod.pod.process.poll() is None, pod.pod.log
                time.sleep(0.02)

    def wait_restored(self, quorum: int) -> None:
        self.wait_for(quorum)
        while "StoreRestored" not in self.reasons():
            time.sleep(0.02)

    def members(self) -> list[PlayedPod]:
        plan = self.plan()
        assert plan is not None
        lives = {m["incarnation"] for m in plan["members"]}
        return [pod for pod in self.pods if pod.life in lives]

    def close(self) -> None:
        for pod in self.pods:
            pod.close()
        self.relays.close()
        self.api.kill()
        self.api.client.close()
        self.redis.stop()


@pytest.fixture
def world() -> Iterator[ThreePods]:
    # Not tmp_path: a Unix socket's path must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="mainstay-") as root:
        made = ThreePods(Path(root))
        yield made
        made.close()


def test_redis_loses_everything_then_falls_back(world: ThreePods) -> None:
    first = world.plan()
    world.redis.lose()
    world.wait_restored(1)
    assert world.plan() == first
    # A death after the restore is recovered, and its place taken.
    victim, survivor = world.members()
    victim.kill_trainer()
    world.wait_for(2, pods=[survivor])
    backup = world.redis.back_up()
    world.wait_for(3, pods=[survivor])
    newest = world.plan()
    assert newest is not None
    # The older copy knows less than the supervisors do.
    world.redis.lose(backup)
    while world.plan() != newest:
        time.sleep(0.02)
    top = newest["quorum"]["id"]
    while top not in {entry["step"] for entry in world.fetch("ledger?since=1")}:
        time.sleep(0.02)


@pytest.mark.chaos
def test_what_died_while_nobody_decided_is_recovered_and_nobody_else_evicted(
    world: ThreePods,
) -> None:
    victim, survivor = world.members()
    world.api.kill()
    world.redis.stop()
    victim.kill_trainer(restart=True)
    # An outage has a length: this one is longer than any pod may be silent.
    time.sleep(TIMEOUT_S + 0.5)
    world.redis.start()
    world.api.start()
    world.wait_for(2, pods=[survivor])
    assert "PodGone" not in world.reasons()
    # A Redis that hangs is another kind of outage: nothing is lost in it either.
    world.wait_for(3, pods=[survivor])
    now = world.plan()
    assert now is not None
    world.redis.pause()
    survivor.kill_trainer(restart=True)
    time.sleep(TIMEOUT_S + 0.5)
    world.redis.resume()
    world.wait_for(now["quorum"]["id"] + 1)
    assert "PodGone" not in world.reasons()


def test_a_plan_that_one_pod_got_reaches_all_when_the_api_dies(world: ThreePods) -> None:
    victim, survivor = world.members()
    for pod in world.pods:
        if pod is not survivor:
            pod.relay.hold()
    victim.kill_trainer()
    world.wait_for(2, pods=[survivor])
    world.api.kill()
    for pod in world.pods:
        pod.relay.drop()
    others = [pod for pod in world.pods if pod not in (victim, survivor)]
    world.wait_for(2, pods=others)
    world.api.start()
    world.wait_for(3, pods=others)


@pytest.mark.chaos
def test_a_durable_plan_that_nobody_got_is_there_when_the_api_is_back(world: ThreePods) -> None:
    victim, survivor = world.members()
    for pod in world.pods:
        pod.relay.hold()
    victim.kill_trainer()
    while (world.plan() or {"quorum": {"id": 0}})["quorum"]["id"] < 2:
        time.sleep(0.02)
    world.api.kill()
    for pod in world.pods:
        pod.relay.drop()
    world.api.start()
    world.wait_for(2, pods=[survivor])
    plans = [e for e in world.fetch("events") if e["reason"] == "PlanPublished"]
    assert len({e["message"].split()[0] for e in plans}) == len(plans), "no id was used twice"
