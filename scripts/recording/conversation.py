"""A job told to the api by hand: no trainer runs, so every answer is the same each time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from recording.masks import mask, mask_metrics

TOKEN = "recorded"
QUIET_S = 0.25
"""The api looks at a job that waits for something every tenth of a second."""
STREAM = "/v1/jobs/{job}/agent/stream"
GIVE_UP_S = 300.0
JOB = "recorded-job"
MANIFEST: dict[str, Any] = {
    "apiVersion": "mainstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "recorded"},
    "spec": {
        "training": {"steps": 40, "seed": 1, "lanes": 2, "shardsPerLane": 2},
        "parallelism": {"replicas": 2, "stages": 2, "minReplicas": 1},
        "spares": {"replicas": 1},
        "checkpoint": {"everySteps": 10},
        "workload": {"entrypoint": "package.module:workload", "config": {"a": 1}},
    },
}


def record(tree: Path) -> dict[str, Any]:
    """Return every answer of the conversation, in order."""
    with (
        tempfile.TemporaryDirectory(prefix="rec-") as directory,
        _api(tree, Path(directory)) as api,
    ):
        talk = Conversation(api, _load_played(tree))
        talk.hold()
        return talk.heard


class Conversation:
    """Records a conversation with the api: requests and answers.

    Args:
        client: of the api.
        played: what supervisors tell, as the checkout's own tests put it.
    """

    def __init__(self, client: httpx.Client, played: ModuleType) -> None:
        self._client = client
        self._played = played
        self._lives: dict[str, str] = {}
        self._paths: list[str] = []
        self.heard: dict[str, Any] = {}

    def hold(self) -> None:
        """Say everything."""
        self._introduce()
        self._form()
        self._train_and_break()
        self._change()
        self._end()
        self.heard["stream"] = self._listen()

    def _introduce(self) -> None:
        document = self._client.get("/openapi.json").json()
        self.heard["openapi"] = _without_prose(document)
        self._paths = [path for path, methods in document["paths"].items() if "get" in methods]
        stranger = {"Authorization": "Bearer nobody"}
        self._say("a wrong token", "GET", "/v1/jobs", headers=stranger)
        self._say("no such job", "GET", "/v1/jobs/nothing")
        wrong = {**MANIFEST, "spec": {**MANIFEST["spec"], "training": {"steps": 0}}}
        self._say("a wrong job", "POST", "/v1/jobs", {"manifest": wrong})
        job = {"manifest": MANIFEST, "uid": JOB, "checkpoint_dir": "/checkpoints"}
        self._say("a wrong fault", "POST", "/v1/jobs", {**job, "faults": [{"id": "f"}]})
        self._say("a job", "POST", "/v1/jobs", job)
        self._say("the job again", "POST", "/v1/jobs", job)
        self._look("created")

    def _form(self) -> None:
        for number in range(5):
            self._register(f"pod-{number}")
        for number in range(5):
            self._up(f"pod-{number}")
        self._look("formed")
        self._settle("the first plan", 0)
        for number in range(5):
            self._beat(f"pod-{number}")
        self._commit(0, 4)
        self._look("running")

    def _train_and_break(self) -> None:
        old = self._plan()
        member = old["members"][1]
        pod, life = member["slot"]["pod"], member["incarnation"]
        down = self._fact("trainer-down", pod, life, evidence="killed", restarting=True)
        self._tell("a trainer is down", [down])
        self._look("recovering")
        stale = self._played.fact(
            "parked", pod, life, quorum=old["quorum"], step=4, evidence="a reset"
        )
        self._tell("a stale fact", [stale])
        self._settle("the plan after it", 4)
        self._up(pod)
        self._commit(4, 6)
        self._settle("the plan with all", 6)
        self._commit(6, 8)
        self._look("recovered")
        gone = self._played.fact("pod-gone", "pod-4", "", evidence="deleted")
        gone |= {"slot": None, "incarnation": None}
        self._agent("a pod is gone", "provider/facts", {"facts": [gone]}, agent=False)
        self._register("pod-5")
        self._up("pod-5")
        self._look("a pod instead")

    def _change(self) -> None:
        fault = {"target": {"replica": 0, "stage": 1}, "action": "kill-trainer", "at": {"step": 30}}
        self._agent("a fault", "faults", {"faults": [fault]}, agent=False)
        wrong = {**fault, "at": {"step": 300}}
        self._agent("a fault too late", "faults", {"faults": [wrong]}, agent=False)
        place = {"near": "rack-1", "apart": "zone-1"}
        self._agent("places", "provider/topology", {"nodes": {"node-1": place}}, agent=False)
        self._agent("too many replicas", "scale", {"replicas": 9}, agent=False)
        self._agent("one replica", "scale", {"replicas": 1}, agent=False)
        self._look("scaled")
        self._settle("the smaller plan", 8)
        self._commit(8, 10)
        self._agent("two replicas", "scale", {"replicas": 2}, agent=False)
        self._look("scaled up")
        self._settle("the larger plan", 10)
        self._commit(10, 12)
        self._agent("drain nobody", "drain", {"pod": "nobody"}, agent=False)
        self._agent(
            "drain", "drain", {"pod": self._plan()["members"][0]["slot"]["pod"]}, agent=False
        )
        self._look("drained")
        self._agent("suspend without a checkpoint", "suspend", None, agent=False)
        self._of_all("a checkpoint", "checkpoint", durable=8, complete=True)
        self._look("saved")
        self._agent("suspend", "suspend", None, agent=False)
        self._look("suspending")
        self._settle("the plan that pauses", 12)
        self._of_all("all have saved", "paused", durable=12, step=12)
        self._look("suspended")
        self._agent("resume", "resume", None, agent=False)
        self._look("resumed")

    def _end(self) -> None:
        config = self._agent("a pod again", "pods", self._registration("pod-1"))["config"]
        plan = self._plan()
        self._agent("stop", "stop", None, agent=False)
        self._look("stopped")
        restored = {"pod": "pod-1", "config": {**config, "job": "other-job"}, "plan": plan}
        path = "/v1/jobs/other-job/agent/restore"
        body = {**restored, "manifest": MANIFEST, "step": 9}
        body["plan"] = {**plan, "job": "other-job"}
        self._say("a lost job", "POST", path, body)
        self._say("the restored job", "GET", "/v1/jobs/other-job")
        self._say("forget it", "DELETE", "/v1/jobs/other-job")
        self._say("it is forgotten", "GET", "/v1/jobs/other-job")

    # --- what supervisors say ---

    @staticmethod
    def _registration(pod: str) -> dict[str, Any]:
        places = {"address": "127.0.0.1", "gather": f"{pod}:1", "store": f"{pod}:2"}
        return {"pod": pod, "name": pod, **places, "num_slots": 1, "pid": 1, "domain": "node-1"}

    def _register(self, pod: str) -> None:
        self._agent(f"{pod} registers", "pods", self._registration(pod))

    def _up(self, pod: str) -> None:
        self._lives[pod] = f"life-{len(self.heard)}"
        fact = self._fact("trainer-up", pod, self._lives[pod], fingerprint={"torch": "2"})
        self._tell(f"{pod} is up", [fact])

    def _beat(self, pod: str) -> None:
        slot = {"index": 0, "pid": 42, "phase": "computing", "step": 0}
        self._agent(f"{pod} beats", "heartbeats", {"pod": pod, "slots": [slot], "quorum": None})

    def _fact(self, kind: str, pod: str, life: str, **fields: Any) -> dict[str, Any]:
        return dict(self._played.fact(kind, pod, life, **fields))

    def _tell(self, name: str, facts: list[dict[str, Any]]) -> None:
        self._agent(name, "facts", {"facts": facts})

    def _of_all(self, name: str, kind: str, **fields: Any) -> None:
        """Let every member of the plan tell the same."""
        plan = self._plan()
        facts = [
            self._fact(kind, m["slot"]["pod"], m["incarnation"], quorum=plan["quorum"], **fields)
            for m in plan["members"]
        ]
        self._tell(name, facts)

    def _settle(self, name: str, step: int) -> None:
        self._tell(f"{name} is settled", self._played.settle_facts(self._plan(), step))

    def _commit(self, first: int, end: int) -> None:
        plan = self._plan()
        entries = [
            self._played.ledger_entry(step, stage, plan["quorum"], loss=3.0 - step / 16)
            for step in range(first, end)
            for stage in (0, 1)
        ]
        self._agent(f"steps {first} to {end}", "ledger", {"entries": entries})

    def _plan(self) -> dict[str, Any]:
        return dict(self._client.get(f"/v1/jobs/{JOB}/plan").json()["plan"])

    # --- the line ---

    def _agent(self, name: str, path: str, body: Any, *, agent: bool = True) -> Any:
        return self._say(name, "POST", f"/v1/jobs/{JOB}/{'agent/' if agent else ''}{path}", body)

    def _say(self, name: str, method: str, path: str, body: Any = None, headers: Any = None) -> Any:
        self._wait_until_quiet()
        reply = self._client.request(method, path, json=body, headers=headers)
        answer = reply.json() if reply.content else None
        self._note(name, {"status": reply.status_code, "body": mask(answer)})
        return answer

    def _look(self, name: str) -> None:
        """Ask every GET route."""
        self._wait_until_quiet()
        for path in self._paths:
            if path == STREAM:
                continue
            reply = self._client.get(path.replace("{job}", JOB))
            is_json = reply.headers["content-type"].startswith("application/json")
            body = mask(reply.json()) if is_json else mask_metrics(reply.text)
            self._note(f"{name}: GET {path}", {"status": reply.status_code, "body": body})

    def _note(self, name: str, heard: Any) -> None:
        self.heard[f"{len(self.heard):03d} {name}"] = heard

    def _wait_until_quiet(self) -> None:
        before: Any = None
        while (now := self._client.get(f"/v1/jobs/{JOB}/plan").text) != before:
            before = now
            time.sleep(QUIET_S)

    def _listen(self) -> list[Any]:
        """Return the stream from the job's beginning."""
        events, event = [], {"event": "", "data": ""}
        headers = {"Last-Event-ID": "0-0"}
        with self._client.stream("GET", STREAM.replace("{job}", JOB), headers=headers) as reply:
            for line in reply.iter_lines():
                name, _, value = line.partition(": ")
                event[name] = value
                if not line and event["data"]:
                    events.append([event["event"], mask(json.loads(event["data"]))])
                    if event["event"] == "stop":
                        break
                    event = {"event": "", "data": ""}
        return events


def _without_prose(document: Any) -> Any:
    """Return an OpenAPI document without descriptions of schemas: they are docstrings."""
    if isinstance(document, list):
        return [_without_prose(item) for item in document]
    if isinstance(document, dict):
        prose = [key for key in ("description", "summary") if isinstance(document.get(key), str)]
        return {k: _without_prose(v) for k, v in document.items() if k not in prose}
    return document


def _load_played(tree: Path) -> ModuleType:
    (path,) = tree.glob("tests/**/played.py")
    spec = importlib.util.spec_from_file_location("played", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _api(tree: Path, directory: Path) -> Iterator[httpx.Client]:
    """Run a Redis and the checkout's api; yield a client that may do everything."""
    binaries = tree / ".venv/bin"
    server = shutil.which("redis-server", path=f"{binaries}{os.pathsep}{os.environ['PATH']}")
    assert server is not None, "there is no redis-server"
    socket, port_file, log = directory / "r.sock", directory / "port", directory / "api.log"
    redis = [server, "--port", "0", "--unixsocket", str(socket), "--dir", str(directory)]
    environment = {
        **os.environ,
        "MAINSTAY_REDIS_URL": f"unix://{socket}",
        "MAINSTAY_TOKEN": TOKEN,
        "MAINSTAY_API_PORT": "0",
    }
    api = [str(binaries / "python"), "-m", "mainstay_api", "--port-file", str(port_file)]
    with contextlib.ExitStack() as stack:
        with log.open("w") as output:
            for command in (redis, api):
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                stack.callback(process.wait)
                stack.callback(process.kill)
        until_s = time.monotonic() + GIVE_UP_S
        while not port_file.exists():
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        client = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=GIVE_UP_S)
        yield stack.enter_context(client)
