"""Redis loses the job, falls back to an older state, or hangs; supervisors tell what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.api.conftest import AGENT_TOKEN, Api, Job, Redis


@pytest.fixture
def job(own_redis: Redis, new_api: Callable[..., Api]) -> Job:
    job = Job(new_api(own_redis.url, redis_timeout_s=0.5))
    job.start()
    return job


def held(plan: dict[str, Any]) -> dict[str, str]:
    return {"Mainstay-Quorum": f"q{plan['quorum']['id']}-{plan['quorum']['nonce']}"}


def tell(job: Job, plan: dict[str, Any], member: int, kind: str) -> httpx.Response:
    """Tell a fact as a supervisor that holds ``plan``."""
    told = plan["members"][member]
    fact = {
        "kind": kind,
        "pod": told["slot"]["pod"],
        "slot": 0,
        "incarnation": told["incarnation"],
        "quorum": plan["quorum"],
    }
    with job.api.new_client(AGENT_TOKEN) as client:
        path = f"{job.path}/agent/facts"
        return client.post(path, json={"facts": [fact]}, headers=held(plan))


def reasons(job: Job) -> list[str]:
    return [event["reason"] for event in job.api.get(f"{job.path}/events")]


def test_a_job_that_redis_lost_goes_on_where_its_supervisors_are(
    job: Job, own_redis: Redis
) -> None:
    plan = job.plan()
    own_redis.lose()
    assert job.beat("pod-0", status=404)["error"] == "unknown-job"
    assert job.restore("pod-0", plan, step=5)["plan"] == plan
    assert job.plan() == plan
    answer = job.register("pod-0", pid=7)
    assert answer["manifest"]["metadata"] == {"name": "demo"}
    assert answer["restored_at_s"] > 0
    beat = job.beat("pod-1", quorum=plan["quorum"])
    assert beat["restored_at_s"] == answer["restored_at_s"], "so pod-1 knows that it has to"
    assert reasons(job)[0] == "StoreRestored"
    assert job.api.get(job.path)["step"] == 5
    for i in range(1, 4):
        job.register(f"pod-{i}", pid=7)
    member = plan["members"][3]
    job.fact("trainer-down", member["slot"]["pod"], member["incarnation"])
    assert job.plan()["quorum"]["id"] == plan["quorum"]["id"] + 1


def test_a_job_that_was_lost_before_its_first_plan_forms_anew(
    own_redis: Redis, new_api: Callable[..., Api]
) -> None:
    job = Job(new_api(own_redis.url))
    job.register("pod-0")
    own_redis.lose()
    assert job.restore("pod-0", None) == {"plan": None}
    assert job.start()["quorum"]["id"] == 1


def test_a_restoration_of_another_job_is_refused(job: Job) -> None:
    plan = job.plan()
    job.config = {**job.config, "job": "another"}
    assert job.restore("pod-0", plan, status=422)["error"] == "malformed"


def test_a_store_that_fell_back_learns_nothing_before_it_was_told_the_newest_plan(
    job: Job, own_redis: Redis
) -> None:
    backup = own_redis.back_up()
    job.kill(3)
    newest = job.plan()
    own_redis.lose(backup)
    assert job.plan()["quorum"]["id"] == 1
    refused = tell(job, newest, 0, "adopted")
    assert (refused.status_code, refused.json()["error"]) == (409, "store-behind")
    assert "agent/restore" in refused.json()["what_to_do"]
    assert job.beat("pod-1", quorum=newest["quorum"], status=409)["error"] == "store-behind"
    assert job.plan()["quorum"]["id"] == 1, "nothing is derived from the older plan"
    job.restore("pod-1", newest)
    assert job.plan() == newest
    with job.beating(range(4)):
        tell(job, newest, 1, "trainer-down")
        assert job.wait_for_plan(3)["quorum"]["id"] == 3


def test_only_a_stale_supervisor_comes_first(job: Job, own_redis: Redis) -> None:
    stale = job.plan()
    backup = own_redis.back_up()
    job.kill(3)
    newest = job.plan()
    own_redis.lose(backup)
    # It is in the older quorum, cannot go on there, and is the first that is heard.
    for _ in range(3):
        assert tell(job, stale, 0, "parked").status_code == 200
        assert job.beat(stale["members"][0]["slot"]["pod"], quorum=stale["quorum"])
    assert job.plan() == stale, "one that was heard is not enough to make a plan"
    assert job.beat("pod-2", quorum=newest["quorum"], status=409)["error"] == "store-behind"
    job.restore("pod-2", newest)
    with job.beating(range(4)):
        tell(job, newest, 1, "trainer-down")
        plan = job.wait_for_plan(3)
    assert plan["quorum"]["id"] == 3
    places = {m["incarnation"]: m["rank"]["stage"] for m in newest["members"]}
    assert all(places[m["incarnation"]] == m["rank"]["stage"] for m in plan["members"])


def test_equal_ids_with_other_nonces_meet_in_a_plan_above_both(job: Job, own_redis: Redis) -> None:
    backup = own_redis.back_up()
    job.kill(3)
    theirs = job.plan()
    own_redis.lose(backup)
    with job.beating(range(4)):
        job.kill(1)
        ours = job.wait_for_plan(2)
    assert ours["quorum"]["nonce"] != theirs["quorum"]["nonce"]
    assert job.beat("pod-0", quorum=theirs["quorum"], status=409)["error"] == "store-behind"
    job.restore("pod-0", theirs)
    with job.beating(range(4)):
        plan = job.wait_for_plan(3)
    assert plan["quorum"]["id"] == 3
    assert plan["unplanned_id"] == 3


@pytest.mark.chaos
def test_a_redis_that_hangs_is_answered_for_in_bounded_time_and_nobody_waits_behind_it(
    job: Job, own_redis: Redis
) -> None:
    own_redis.pause()
    codes: list[int] = []

    def ask() -> None:
        with job.api.new_client(AGENT_TOKEN) as client:
            body = {"pod": "pod-0", "slots": []}
            codes.append(client.post(f"{job.path}/agent/heartbeats", json=body).status_code)
            facts = {"facts": []}
            codes.append(client.post(f"{job.path}/agent/facts", json=facts).status_code)

    try:
        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        job.api.get("/healthz")
        for thread in asking:
            thread.join()
    finally:
        own_redis.resume()
    assert codes == [503] * 16
    assert job.beat("pod-0")["state"] == "running"
    job.kill(3)
    assert job.plan()["quorum"]["id"] == 2, "the same process: there is nothing to wait for"


def test_ledger_entries_of_several_cells_of_a_stage_are_one(job: Job) -> None:
    job.commit(0)
    again = [job.entry(0, stage, step_s=9.0) for stage in range(2)]
    job.agent("ledger", {"entries": again})
    entries = job.api.get(f"{job.path}/ledger")
    assert [e["step_s"] for e in entries] == [pytest.approx(0.1)] * 2
    assert job.api.get(job.path)["step"] == 1
