"""The calls of programs reach the routes of the api, and do there what their names say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest
from tests.api.conftest import MANIFEST

from mainstay_core.base.ids import PodUid
from mainstay_core.wire.api import ApiError, Failure, failure_of
from mainstay_core.wire.facts import Location, PodGone
from mainstay_core.wire.routes import JobApi, RecoveryList, Request, explain, read_answer


class Calls(JobApi):
    """Carries requests to the api of a test."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def send(self, request: Request) -> Any:
        reply = self._client.request(request.method, request.path, json=request.body)
        if reply.is_success:
            return read_answer(reply.content)
        raise ApiError(explain(reply.content), failure_of(reply.status_code))


def done(call: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await call

    return asyncio.run(wait())


def test_a_job_is_created_looked_at_stopped_and_deleted(api: Any) -> None:
    calls = Calls(api.client)
    uid = done(calls.create_job({"manifest": MANIFEST}))["uid"]

    assert done(calls.fetch(uid))["state"] == "forming"
    assert done(calls.fetch(uid, "members")) == []
    assert done(calls.fetch_recoveries(uid)) == RecoveryList(read=())
    done(calls.stop_job(uid))
    assert done(calls.fetch(uid))["state"] == "stopped"
    done(calls.delete_job(uid))
    with pytest.raises(ApiError) as refused:
        done(calls.fetch(uid))
    assert refused.value.failure in (Failure.UNKNOWN, Failure.DELETED)
    done(calls.delete_job("never-was"))


def test_a_job_is_submitted_under_its_uid_as_often_as_somebody_likes(api: Any) -> None:
    calls = Calls(api.client)
    for _ in range(2):
        done(calls.submit_job("submitted-1", "research", MANIFEST))

    assert done(calls.fetch("submitted-1"))["namespace"] == "research"


def test_a_running_job_is_changed(job: Any) -> None:
    calls = Calls(job.api.client)
    job.start()

    assert done(calls.scale_job(job.uid, 1))["replicas_wanted"] == 1
    assert [p["pod"] for p in done(calls.drain_pod(job.uid, "pod-0"))["leaving"]] == ["pod-0"]
    flush = {"id": "p", "target": {"process": "redis"}, "action": "flush"}
    assert [f["id"] for f in done(calls.inject_faults(job.uid, [flush]))] == ["p"]
    done(calls.fire_process_fault(job.uid, "p", "redis", 5.0))
    assert done(calls.fetch(job.uid, "faults"))[0]["fired"]["pod"] == "redis"
    done(calls.report_topology(job.uid, {"node-1": Location(near="rack-1")}))
    assert list(done(calls.fetch(job.uid, "topology"))["nodes"]) == ["node-1"]


def test_a_job_is_suspended_and_goes_on(job: Any) -> None:
    calls = Calls(job.api.client)

    assert done(calls.suspend_job(job.uid, suspend=True))["suspend"]
    assert not done(calls.suspend_job(job.uid, suspend=False))["suspend"]


def test_the_provider_tells_that_a_pod_is_gone(job: Any) -> None:
    job.start()
    gone = PodGone(pod=PodUid("pod-3"), evidence="killed", observed_at_s=time.time())
    done(Calls(job.api.client).post_facts(job.uid, [gone]))

    assert "pod-3" not in [
        p["uid"] for p in done(Calls(job.api.client).fetch(job.uid, "pods"))["pods"]
    ]


def test_a_permission_with_a_limit_is_asked_for_at_a_route_of_its_own() -> None:
    """An api of a version before has none there, and does not grant it without the limit."""
    sent: list[Request] = []

    class Heard(JobApi):
        async def send(self, request: Request) -> Any:
            sent.append(request)
            return {}

    done(Heard().allow_approximation("demo", None, dry_run=False, after_lost_steps=5))
    done(Heard().allow_approximation("demo", [1], dry_run=True))
    assert [(r.path, r.body) for r in sent] == [
        ("/v1/jobs/demo/approximate/ahead", {"dry_run": False, "after_lost_steps": 5}),
        ("/v1/jobs/demo/approximate", {"dry_run": True, "stages": [1]}),
    ]
