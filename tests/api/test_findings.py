"""Findings of checks at the api: told once, bounded, and shown to people."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import redis
from starlette.requests import Request
from tests.api.conftest import MANIFEST, Job
from tests.api.test_store_bounds import UID, driven
from tests.worlds.pods import PlayedPods, make_config

from mainstay_api import deps
from mainstay_api import store as store_module
from mainstay_api import transactions as transactions_module
from mainstay_api.findings import with_names
from mainstay_api.store import RedisStore
from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation, PodUid, RankId, Slot
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import PodRegistered
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.wire.facts import FactKind, PodRegistration
from mainstay_core.wire.findings import MAX_BATCH, MAX_UNTOLD, FindingsPage, ToldFinding

CHECKED = {
    **MANIFEST,
    "spec": {**MANIFEST["spec"], "detection": {"dmr": {"mode": "Full"}}},
}


def told(number: int, *, pod: str = "pod-0", step: int = 3, **fields: Any) -> dict[str, Any]:
    finding = Finding(
        step=step,
        slot=Slot(pod=PodUid(pod), index=0),
        rank=RankId(replica=0, stage=0),
        in_pass=Pass.WEIGHT,
        shard_type=1,
        micro_batch=0,
        block="layers.0",
        ordinal=4,
        operator="aten.mm",
        num_elements=2,
        verdict=fields.pop("verdict", Verdict.PRIMARY_HIT),
        remedy=fields.pop("remedy", Remedy.REPAIR),
        reason="the third execution equals the checker",
    )
    one = ToldFinding(
        finding=finding, incarnation=Incarnation("a"), number=number, at_s=5.0, **fields
    )
    return dict(codec.encode(one))


def put(job: Job, *numbers: int, **fields: Any) -> None:
    job.agent("findings", {"findings": [told(number, **fields) for number in numbers]})


SENTENCE = (
    "step 3 of r0.s0.i0 on pod-0/0: two executions of aten.mm (#4) in the weight pass of layers.0 "
    "differ in 2 elements; the third execution equals the checker; it was repaired before anybody "
    "read it"
)


@pytest.fixture
def checked(api: Any) -> Job:
    job = Job(api, CHECKED)
    job.start()
    return job


def test_a_finding_that_is_told_twice_is_kept_counted_and_announced_once(checked: Job) -> None:
    put(checked, 0)
    put(checked, 0, 1)

    page = checked.api.get(f"{checked.path}/findings")
    assert page["counts"] == {"primary": 2}
    assert [(f["place"], f["told"]["number"]) for f in page["findings"]] == [(1, 0), (2, 1)]
    events = checked.api.get(f"{checked.path}/events")
    said = [e["message"] for e in events if e["reason"] == "WrongResult"]
    assert said == 2 * [SENTENCE]
    text = checked.api.client.get("/metrics").text
    assert (
        f'mainstay_check_findings_total{{job="{checked.uid}",name="demo",namespace="",'
        'verdict="primary"} 2.0' in text
    )


def test_findings_of_different_trainers_and_verdicts_count_apart(checked: Job) -> None:
    put(checked, 0)
    put(checked, 0, pod="pod-1", verdict=Verdict.CHECKER_HIT, remedy=Remedy.NOTHING, untold=7)

    page = checked.api.get(f"{checked.path}/findings")
    assert page["counts"] == {"checker": 1, "primary": 1}
    assert page["untold"] == 7
    since = checked.api.get(f"{checked.path}/findings?since=2")
    assert [f["place"] for f in since["findings"]] == [2]


def test_the_newest_are_kept_and_all_are_counted(
    checked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_KEPT", 3)
    monkeypatch.setattr(transactions_module, "MAX_IN_HISTORY", 2)
    for number in range(5):
        put(checked, number)

    page = checked.api.get(f"{checked.path}/findings")
    assert page["counts"] == {"primary": 5}
    assert [f["place"] for f in page["findings"]] == [3, 4, 5]
    events = checked.api.get(f"{checked.path}/events")
    assert sum(e["reason"] == "WrongResult" for e in events) == 2


def test_the_page_and_the_report_of_a_job_with_checks_tell_what_they_found(checked: Job) -> None:
    put(checked, *range(7))

    page = checked.api.get(f"{checked.path}/summary")
    assert page["dmr_coverage"].startswith(
        "transient faults: naive 100 %; shares are of all that torch computes"
    )
    assert "not covered: faults that repeat themselves on a device, " in page["dmr_coverage"]
    assert page["findings"]["counts"] == {"primary": 7}
    assert [f["place"] for f in page["findings"]["findings"]] == [3, 4, 5, 6, 7]
    assert checked.api.get(f"{checked.path}/report")["findings"]["counts"] == {"primary": 7}


def test_a_job_with_a_witness_alone_tells_what_it_found_likewise(api: Any) -> None:
    """Operators make Events of what stands on the page."""
    witness = {"detection": {"witness": {"everySteps": 50}}}
    job = Job(api, {**MANIFEST, "spec": {**MANIFEST["spec"], **witness}})
    job.start()
    put(job, 0, verdict=Verdict.DETERMINISTIC, remedy=Remedy.HAND_OVER)

    page = job.api.get(f"{job.path}/summary")
    assert page["dmr_coverage"].startswith(
        "transient and deterministic faults: a witness computes a shard type again in one of 50 "
        "steps, 0 of 4 devices witnessed in the last round; not covered: "
        "all shard types that no witness compares, "
    )
    assert page["findings"]["counts"] == {"deterministic": 1}
    assert [f["place"] for f in page["findings"]["findings"]] == [1]


def test_the_counter_of_a_job_with_checks_begins_at_0(checked: Job) -> None:
    checked.commit(0)
    text = checked.api.client.get("/metrics").text
    assert f'mainstay_check_findings_total{{job="{checked.uid}"' in text
    assert 'verdict="unreliable"} 0.0' in text


def test_a_job_without_checks_says_nothing_of_them(job: Any) -> None:
    job.start()
    page = job.api.get(f"{job.path}/summary")
    assert not {"dmr_coverage", "findings"} & set(page)
    assert job.api.get(f"{job.path}/findings") == {"counts": {}, "untold": 0, "findings": []}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"step": 60}, "Finding.step: 60 is none of the job's 60"),
        ({"pod": "pod-9"}, "pod pod-9 is unknown or counts as gone"),
    ],
)
def test_a_finding_of_no_step_or_pod_of_the_job_is_refused_and_none_is_kept(
    checked: Job, bad: dict[str, Any], words: str
) -> None:
    body = {"findings": [told(0), told(1, **bad)]}
    reply = checked.api.client.post(f"{checked.path}/agent/findings", json=body)
    assert reply.status_code in (404, 409)
    assert words in reply.text
    assert checked.api.get(f"{checked.path}/findings")["findings"] == []


def test_a_finding_speaks_for_the_pod_of_its_slot() -> None:
    async def pods_of(findings: Any) -> frozenset[str]:
        text = json.dumps({"findings": findings}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": text, "more_body": False}

        return await deps._pods_named(Request({"type": "http", "method": "POST"}, receive))

    theirs = [told(0), told(1, pod="pod-1")]
    assert asyncio.run(pods_of(theirs)) == {"pod-0", "pod-1"}
    for nonsense in (None, 7, [None, 7, {}, {"finding": 7}, {"finding": {"slot": []}}]):
        assert asyncio.run(pods_of(nonsense)) == frozenset()


def test_more_than_a_batch_is_refused(checked: Job) -> None:
    body = {"findings": [told(number) for number in range(MAX_BATCH + 1)]}
    reply = checked.agent("findings", body, status=422)
    assert "findings" in str(reply)


def test_what_pods_have_only_counted_stays_readable_however_much_it_is(checked: Job) -> None:
    most = MAX_UNTOLD
    put(checked, *range(MAX_BATCH), untold=most)

    page = codec.decode(FindingsPage, checked.api.get(f"{checked.path}/findings"))
    assert page.untold == MAX_BATCH * most
    reply = checked.agent("findings", {"findings": [told(64, untold=2**53)]}, status=422)
    assert "untold" in str(reply)


def test_nothing_is_left_of_a_deleted_job(checked: Job, shared_redis: Any) -> None:
    put(checked, 0)
    checked.api.post(f"{checked.path}/stop")
    assert checked.api.client.delete(checked.path).status_code in (200, 204)
    with redis.Redis(unix_socket_path=str(shared_redis.path)) as client:
        left = {str(key, "utf-8").rpartition(":")[2] for key in client.keys(f"*{checked.uid}*")}
    assert left == {"forgotten"}


def test_any_order_of_telling_leaves_what_a_plain_model_says(
    own_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = 4
    monkeypatch.setattr(store_module, "MAX_KEPT", kept)
    rng = random.Random(7)
    known: dict[str, int] = {}
    counts: dict[str, int] = {}
    untold = total = 0

    async def drive(store: RedisStore, state: CoordinatorState) -> None:
        nonlocal known, total, untold
        del state
        for _ in range(300):
            batch = []
            for number in rng.sample(range(12), rng.randint(1, 3)):
                one = codec.decode(ToldFinding, told(number, untold=rng.randint(0, 2)))
                verdict = rng.choice(list(Verdict))
                batch.append(replace(one, finding=replace(one.finding, verdict=verdict)))
            outcome = await store.put_findings(UID, batch)
            fresh = [one for one in batch if one.id not in known]
            for one in fresh:
                total += 1
                untold += one.untold
                counts[one.finding.verdict.value] = counts.get(one.finding.verdict.value, 0) + 1
                known[one.id] = total
            known = dict(list(known.items())[-kept:])
            assert (outcome.fresh, outcome.total) == (tuple(fresh), total)
            first = rng.randint(0, total)
            page = await store.fetch_findings(UID, first, newest=kept)
            assert (page.counts, page.untold) == (counts, untold)
            places = {f.told.id: f.place for f in page.findings}
            assert list(places.items()) == [i for i in known.items() if i[1] >= first]

    driven(own_redis.url, drive)


def test_a_finding_names_pods_and_nodes_where_a_trainer_knows_uids_alone() -> None:
    state = machine.initial(make_config(), 0.0)
    for number, uid in enumerate(("1b4e28ba", "6fa459ea")):
        registration = PodRegistration(
            pod=PodUid(uid),
            name=f"llama-{number}",
            address="10.0.0.1",
            gather="10.0.0.1:1",
            num_slots=1,
            domain=f"worker-{number}",
        )
        state = machine.step(state, PodRegistered(registration=registration), 1.0, "n").state
    wrong, other = (Slot(pod=PodUid(uid), index=0) for uid in ("1b4e28ba", "6fa459ea"))
    one = codec.decode(ToldFinding, told(0, verdict=Verdict.TRANSIENT))
    reason = f"computed wrongly: {wrong} (transient), and not {other}"
    finding = replace(one.finding, slot=wrong, reason=reason)

    (named,) = with_names(state, [replace(one, finding=finding)])

    said = named.describe()
    assert "of r0.s0.i0 on llama-0/0 (node worker-0): " in said
    assert "computed wrongly: llama-0/0 (transient), and not llama-1/0" in said
    assert "1b4e28ba" not in said


def test_a_pod_that_leaves_as_its_device_is_wrong_is_told_with_its_node() -> None:
    world = PlayedPods(make_config(lanes=1, replicas=1, stages=1))
    world.register("pod-0", domain="worker-7")
    world.up("pod-0")
    member = world.member(0, 0)
    world.tell(world.about(FactKind.NAMED, member, evidence=f"{member.slot} was wrong", since=0))
    assert "the device of pod-0/0 (node worker-7) computes wrongly" in world.messages()
