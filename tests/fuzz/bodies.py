"""Fuzzes the bodies of requests to the api: the application as it is, over a store in memory.

An input is a line with the route, and the body. Every input meets the same running job. The caller
may do everything that its token allows: it is a pod of the job, or the provider. After a request
that was accepted the job is read anew, from the text that was stored: every page of it must be
there still, whoever watches for silence must be able to look at it, and a pod that is lost must
lead to a decision.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from fastapi import FastAPI
from tests.api.test_hostile_bodies import READ
from tests.core.wire.test_messages import EXAMPLES
from tests.fuzz.specs import FAULTS, MANIFEST, SMALL
from tests.fuzz.text_store import TextStore
from tests.fuzz.texts import NamedTexts, split
from tests.worlds import played

from mainstay_api.app import create_app
from mainstay_api.auth import AgentAsk, Caller, JobName
from mainstay_api.metrics import Metrics
from mainstay_api.settings import Settings
from mainstay_api.transactions import Transactions
from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.wire.facts import Fact

UID, POD = JobUid("5eed"), "pod-0"
PAGES = (*READ, "/faults", "/topology", "/agent/plan")
MAX_ANSWER_BYTES = 65_536
"""Of a refusal. One about a stale fact carries the plan."""
LOSS = json.dumps({"facts": [{"kind": "pod-gone", "pod": "pod-1", "format": 2}]}).encode()
LOOKS = 3
"""Looks for silence after an input. All pods are heard in between, so that plans are made again."""
NOW_S = 1_700_000_000.0
SETTINGS = Settings(
    redis_url="",
    admin_token="a",
    agent_token="a",
    # Whoever is refused for asking too often is not looked at.
    pod_requests_per_s=1e9,
    job_requests_per_s=1e9,
    job_mib_per_s=1e9,
    person_requests_per_s=1e9,
)


class _PodOfTheJob:
    """Admits everybody: to routes for supervisors as one pod of the job."""

    async def admit_agent(self, ask: AgentAsk) -> Caller:
        del ask
        return Caller(username="pod", pod=POD, job=JobName(namespace="", name="demo"))

    async def admit_person(self, token: str, verb: str, job: JobName | None) -> Caller:
        del token, verb, job
        return Caller(username="person", sees_all=True)

    async def admit_operator(self, token: str) -> Caller:
        del token
        return Caller(username="operator", sees_all=True)

    async def may_list(self, caller: Caller, namespace: str) -> bool:
        del caller, namespace
        return True

    async def aclose(self) -> None: ...


class Bodies:
    """Bodies as whoever has a token may send them."""

    name = "bodies"

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._metrics = Metrics()
        self._store = TextStore()
        self._app = create_app(SETTINGS, self._store)
        self._app.state.auth = _PodOfTheJob()
        self._world = self._loop.run_until_complete(self._make_world())
        self._texts = NamedTexts(self._valid())
        self.examples, self.make = self._texts.examples, self._texts.make
        self.smaller = self._texts.smaller

    def judge(self, data: bytes) -> bool:
        return self._loop.run_until_complete(self._judge(data))

    async def _judge(self, data: bytes) -> bool:
        route, body = split(data)
        if not route.isascii() or not route.isprintable() or not route.startswith("/v1/jobs"):
            return False
        self._start_over(self._world.fork())
        status, answer = await _post(self._app, route, body)
        await self._transactions.aclose()
        if status >= 300:
            assert status in (400, 403, 404, 409, 410, 413, 422), f"status {status}: {answer!r}"
            assert answer["error"]
            assert answer["detail"]
            return False
        await self._read_all()
        return True

    async def _read_all(self) -> None:
        """Read every page, as another process of the api would, then have another pod be lost."""
        self._start_over(self._store.fork())
        for uid in await self._store.list_uids():
            for page in PAGES:
                status, answer = await _send(self._app, "GET", f"/v1/jobs/{uid}{page}", b"")
                assert status == 200, f"{page} answers {status}: {answer!r}"
            await self._watch(uid)
        status, _ = await _send(self._app, "GET", "/v1/jobs", b"")
        assert status == 200, f"the list of jobs answers {status}"
        status, answer = await _post(self._app, f"/v1/jobs/{UID}/provider/facts", LOSS)
        assert status in (200, 409), f"a loss is answered with {status}: {answer!r}"
        await self._watch(UID)
        await self._transactions.aclose()

    async def _watch(self, uid: JobUid) -> None:
        silence = HeartbeatLag()
        for _ in range(LOOKS):
            await self._transactions.look(uid, silence)
            await self._store.hear_all(uid)

    def _start_over(self, store: TextStore) -> None:
        """Go on with what a store holds, as another process of the api would."""
        self._store.become(store)
        for job in self._metrics.jobs:
            self._metrics.drop_job(job)
        nonces = (f"{number:08x}" for number in itertools.count())
        self._transactions = Transactions(
            self._store, SETTINGS, self._metrics, lambda: NOW_S, lambda: next(nonces)
        )
        self._app.state.transactions = self._transactions

    async def _make_world(self) -> TextStore:
        """Return a store with a running job of four pods, one of which is the caller's."""
        self._start_over(TextStore())
        app, agent = self._app, f"/v1/jobs/{UID}/agent"
        posts: list[tuple[str, Any]] = [("/v1/jobs", {"manifest": SMALL, "uid": UID})]
        self._app.state.auth.admit_agent = _admit_any_pod
        posts += [(f"{agent}/pods", _registration(f"pod-{i}")) for i in range(4)]
        posts += [(f"{agent}/facts", {"facts": [_up(f"pod-{i}")]}) for i in range(4)]
        posts += [(f"/v1/jobs/{UID}/faults", {"faults": [{**FAULTS[0], "at": {"step": 50}}]})]
        for path, body in posts:
            status, answer = await _post(app, path, json.dumps(body).encode())
            assert status < 300, answer
        _, answer = await _send(app, "GET", f"/v1/jobs/{UID}/plan", b"")
        self._plan = answer["plan"]
        settled = json.dumps({"facts": played.settle_facts(self._plan, 0)}).encode()
        status, answer = await _post(app, f"{agent}/facts", settled)
        assert status == 200, answer
        _, self._config = await _post(app, f"{agent}/pods", json.dumps(_registration(POD)).encode())
        await self._transactions.aclose()
        del self._app.state.auth.admit_agent
        return self._store.fork()

    def _valid(self) -> dict[str, list[Any]]:
        """Return valid bodies by route."""
        agent, job = f"/v1/jobs/{UID}/agent", f"/v1/jobs/{UID}"
        quorum = self._plan["quorum"]
        facts = [
            _adapted(codec.encode(example), quorum)
            for example in EXAMPLES.values()
            if isinstance(example, Fact) and example.kind not in ("failed", "pod-gone")
        ]
        entries = [played.ledger_entry(0, stage, quorum) for stage in (0, 1)]
        newer_id = quorum["id"] + 5
        newer = {**self._plan, "quorum": {"id": newer_id, "nonce": "n"}, "unplanned_id": newer_id}
        held = {"pod": POD, "config": self._config["config"], "manifest": SMALL, "step": 3}
        return {
            f"{agent}/pods": [{**_registration(POD), "domain": "node-1", "supervisor": "s"}],
            f"{agent}/heartbeats": [_adapted(codec.encode(EXAMPLES["heartbeat"]), quorum)],
            f"{agent}/facts": [{"facts": [fact], "supervisor": ""} for fact in facts],
            f"{agent}/ledger": [{"entries": entries}, {"entries": entries[:1]}],
            f"{agent}/findings": [
                {"findings": [_finding(POD, 0), _finding(POD, 1)]},
                {"findings": [_finding(POD, 1)]},
            ],
            f"{agent}/restore": [{**held, "plan": self._plan}, {**held, "plan": newer}],
            f"{agent}/faults/a/fired": [{"pod": POD, "slot": 0, "rank": "r0.s0.i0", "at_s": 1.0}],
            "/v1/jobs": [{"manifest": MANIFEST, "uid": "new"}, {"manifest": SMALL, "uid": UID}],
            f"{job}/faults": [{"faults": FAULTS[3:4]}, {"faults": FAULTS[2:3]}],
            f"{job}/provider/faults/a/fired": [{"process": "api", "at_s": 1.0}],
            f"{job}/provider/facts": [
                {"facts": [{"kind": "pod-gone", "pod": "pod-3", "evidence": "gone"}]},
                {"facts": [{"kind": "leaving", "pod": "pod-3", "grace_s": 5.0}]},
            ],
            f"{job}/provider/topology": [{"nodes": {"node-1": {"near": "a", "apart": "b"}}}],
            f"{job}/scale": [{"replicas": 1}, {"replicas": 2, "spares": 3}],
            f"{job}/drain": [{"pod": "pod-2"}],
        }


def _finding(pod: str, number: int) -> dict[str, Any]:
    told = dict(codec.encode(EXAMPLES["told-finding"]))
    found = {**told["finding"], "step": 0, "slot": {"pod": pod, "index": 0}}
    return {**told, "finding": found, "number": number}


async def _admit_any_pod(ask: AgentAsk) -> Caller:
    del ask
    return Caller(username="pod")


def _registration(pod: str) -> dict[str, Any]:
    return {
        "pod": pod,
        "name": pod,
        "address": "127.0.0.1",
        "gather": f"{pod}:1",
        "num_slots": 1,
        "pid": 1,
    }


def _up(pod: str) -> dict[str, Any]:
    return played.fact("trainer-up", pod, f"life-{pod}", fingerprint={"torch": "2"})


def _adapted(data: dict[str, Any], quorum: Any) -> dict[str, Any]:
    """Return a pod's message as one of the job's own pod, about the plan in force."""
    changes: dict[str, Any] = {"pod": POD}
    if "incarnation" in data:
        changes |= {"slot": 0, "incarnation": f"life-{POD}"}
    if "slots" in data:
        changes["slots"] = [{**data["slots"][0], "index": 0, "quorum": quorum}]
    if "quorum" in data:
        changes["quorum"] = quorum
    if data.get("device"):
        changes["device"] = {"pod": "pod-1", "index": 0}  # whom a pod names is one of the job
    if data.get("final"):
        digests = dict.fromkeys(("params", "masters", "optimizer", "data"), "5eed" * 8)
        changes["final"] = {**data["final"], **digests}
    return {**data, **changes}


async def _post(app: FastAPI, path: str, body: bytes) -> tuple[int, Any]:
    return await _send(app, "POST", path, body)


async def _send(app: FastAPI, method: str, path: str, body: bytes) -> tuple[int, Any]:
    """Return status and JSON of the answer to a request; whatever the app raises is raised."""
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer a")]
    headers.append((b"content-length", b"%d" % len(body)))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    status: int = sent[0]["status"]
    content = b"".join(message.get("body", b"") for message in sent[1:])
    if status >= 300:
        assert len(content) <= MAX_ANSWER_BYTES, f"a refusal of {len(content)} bytes"
    return status, json.loads(content, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"an answer contains {name}, which is no JSON")


TARGET = Bodies
