"""An api that a test plays by hand, and pods made of real processes."""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from mainstay_core.base import codec
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.facts import Fact, read_fact

ADDRESS = "127.0.0.1"
JOB = "job-1"
WAIT_S = 60.0


def config(*args: str, heartbeat_s: float = 0.05, **more: Any) -> JobConfig:
    shape = JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=1, steps=1, seed=0
    )
    return JobConfig(
        job=JobUid(JOB),
        name="demo",
        shape=shape,
        entrypoint="none:none",
        workload={},
        args=args,
        heartbeat_s=heartbeat_s,
        **more,
    )


class PlayedApi:
    """The agent routes over a real socket; the test reads what came and says what to answer."""

    def __init__(self) -> None:
        self.config = config("wait")
        self.plan: dict[str, Any] | None = None
        self.heartbeat: dict[str, Any] = {"quorum": None, "state": "running", "now_s": 0.0}
        self.answers: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        """Answers to the next requests by route, instead of 200 and an empty object."""
        self.rules: dict[str, Callable[[Any], tuple[int, dict[str, Any]]]] = {}
        """Answers by route as functions of the request's body; they come first."""
        self.seen: dict[str, queue.Queue[Any]] = {}
        self._facts: list[Fact] = []
        self.stream: queue.Queue[str | None] = queue.Queue()
        """Raw text for the stream; None ends the connection."""
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), host=ADDRESS, port=0, log_level="critical", lifespan="off")
        )
        self._socket = socket.create_server((ADDRESS, 0))
        self.url = f"http://{ADDRESS}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self.stream.put(None)
        self._thread.join()

    def inbox(self, route: str) -> queue.Queue[Any]:
        return self.seen.setdefault(route, queue.Queue())

    def next(self, route: str) -> Any:
        """Return the body of the next request to a route; wait for it."""
        return self.inbox(route).get(timeout=WAIT_S)

    def next_fact(self, kind: str) -> Fact:
        """Return the next fact of a kind; skip others."""
        while True:
            while self._facts:
                fact = self._facts.pop(0)
                if fact.kind == kind:
                    return fact
            self._facts = self.next_facts()

    def next_facts(self) -> list[Fact]:
        return [read_fact(data) for data in self.next("facts")["facts"]]

    def push(self, event: str, data: Any, event_id: str = "1-0") -> None:
        self.stream.put(f"id: {event_id}\nevent: {event}\ndata: {json.dumps(data)}\n\n")

    def _answer(self, route: str, body: Any, default: dict[str, Any]) -> Response:
        rule = self.rules.get(route)
        waiting = self.answers.get(route)
        if rule is not None:
            status, answer = rule(body)
        else:
            status, answer = waiting.pop(0) if waiting else (200, default)
        # Last: whoever has read the request may rely on what its rule did.
        self.inbox(route).put(body)
        return JSONResponse(answer, status)

    def _app(self) -> FastAPI:
        app = FastAPI()
        base = f"/v1/jobs/{JOB}/agent"

        @app.post(base + "/{route:path}")
        async def post(route: str, request: Request) -> Response:
            body = await request.json()
            defaults = {
                "pods": {"config": codec.encode(self.config), "plan": self.plan, "cursor": "0-7"},
                "heartbeats": self.heartbeat,
                "facts": {"plan": None},
            }
            return self._answer(route, body, defaults.get(route, {}))

        @app.get(base + "/plan")
        async def plan() -> Response:
            return self._answer("plan", None, {"plan": self.plan})

        @app.get(base + "/stream")
        def stream(request: Request) -> StreamingResponse:
            self.inbox("stream").put(dict(request.headers))

            def events() -> Iterator[str]:
                yield ": hello\n\n"
                while (text := self.stream.get()) is not None:
                    yield text

            return StreamingResponse(events(), media_type="text/event-stream")

        return app


class Line:
    """Blocking frames over a Unix socket: the test as launcher or trainer."""

    def __init__(self, line: socket.socket) -> None:
        self.socket = line
        self.socket.settimeout(WAIT_S)
        self._parser = FrameParser()
        self._frames: list[Frame] = []

    def send(self, **head: Any) -> None:
        self.socket.sendall(pack(head))

    def receive(self) -> Frame | None:
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                return None
            self._frames += self._parser.feed(data)
        return self._frames.pop(0)

    def expect(self, kind: str) -> dict[str, Any]:
        frame = self.receive()
        assert frame is not None, f"the supervisor closed instead of {kind}"
        assert frame.kind == kind, frame.head
        return frame.head

    def at_end(self) -> bool:
        """Wait for the end of the stream; False if a frame comes instead."""
        try:
            return self.receive() is None
        except ConnectionResetError:
            return True


@dataclass
class Pod:
    """A supervisor process; its launcher is the test or the forge's."""

    process: subprocess.Popen[bytes]
    dir: Path
    uid: str
    lines: list[Line] = field(default_factory=list)

    @property
    def socket(self) -> str:
        return str(self.dir / "supervisor.sock")

    @property
    def log(self) -> str:
        return (self.dir / "supervisor.log").read_text()

    def connect(self) -> Line:
        """Connect to the supervisor, which may still be starting."""
        waiting = threading.Event()
        while True:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                line.connect(self.socket)
            except (FileNotFoundError, ConnectionRefusedError):
                assert self.process.poll() is None, self.log
                waiting.wait(0.01)
                continue
            self.lines.append(Line(line))
            return self.lines[-1]

    def launcher(self) -> Line:
        line = self.connect()
        line.send(kind="launcher-hello", pid=os.getpid())
        return line

    def trainer(self, launcher: Line, slot: int = 0) -> tuple[Line, str]:
        """Be the trainer that the supervisor has asked the launcher to fork."""
        fork = launcher.expect("fork")
        life = fork["incarnation"]
        launcher.send(kind="forked", slot=slot, pid=7, incarnation=life)
        line = self.connect()
        line.send(kind="hello", slot=slot, incarnation=life, pid=7, fingerprint={"torch": "2"})
        return line, life


@pytest.fixture
def api() -> Iterator[PlayedApi]:
    made = PlayedApi()
    yield made
    made.close()


@pytest.fixture
def make_pod(api: PlayedApi) -> Iterator[Any]:
    pods: list[Pod] = []
    # Not tmp_path: a Unix socket's path must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="mainstay-") as root:

        def make(
            num_slots: int = 1,
            url: str = api.url,
            uid: str = "",
            directory: Path | None = None,
            mode: int = 0o700,
            **more: str,
        ) -> Pod:
            uid = uid or f"pod-{len(pods)}-{secrets.token_hex(2)}"
            if directory is None:
                directory = Path(root) / uid
                directory.mkdir()
                directory.chmod(mode)
            environ = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "MAINSTAY_API_URL": url,
                "MAINSTAY_TOKEN": "secret",
                "MAINSTAY_JOB": JOB,
                "MAINSTAY_POD": uid,
                "MAINSTAY_ADDRESS": ADDRESS,
                "MAINSTAY_POD_DIR": str(directory),
                "MAINSTAY_NUM_SLOTS": str(num_slots),
                **more,
            }
            with (directory / "supervisor.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "mainstay_agent"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    start_new_session=True,
                )
            pods.append(Pod(process, directory, uid))
            return pods[-1]

        yield make
        for pod in pods:
            for line in pod.lines:
                line.socket.close()
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()
            if pod.process.stdin is not None:
                pod.process.stdin.close()


class Forge:
    """A forge whose trainers are fake."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        fakes = Path(__file__).parents[1] / "train" / "launcher"
        self.process = subprocess.Popen(
            [
                *[
                    sys.executable,
                    "-m",
                    "mainstay_train.launcher.forge",
                    "--fd",
                    str(theirs.fileno()),
                ],
                *["--trainer", "fake_trainers:run"],
            ],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(fakes), *sys.path])},
        )
        theirs.close()
        self.line = Line(ours)
        self.line.expect("ready")

    def launch(self, pod: Pod) -> int:
        """Launch the pod's launcher; return its pid."""
        self.line.send(kind="launch", pod=pod.uid, pod_dir=str(pod.dir))
        return int(self.line.expect("launched")["pid"])

    def close(self) -> None:
        self.line.socket.close()
        self.process.wait()


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    pytest.importorskip("torch")
    made = Forge()
    yield made
    made.close()
