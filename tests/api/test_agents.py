"""What supervisors and the api say to each other, over HTTP and a real Redis."""

from __future__ import annotations

from typing import Any

from tests.worlds import played

from mainstay_core.base.codec import decode
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.plan import Plan


def test_registration_answers_with_the_job_and_the_plan(job: Any) -> None:
    first = job.register("pod-0")
    config = decode(JobConfig, first["config"])
    assert (config.job, config.name, config.shape.lanes) == (job.uid, "demo", 2)
    assert first["plan"] is None
    job.start()
    again = job.register("pod-0")
    assert decode(Plan, again["plan"]).quorum.id == 1
    assert again["cursor"] != "0-0"


def test_a_fact_that_makes_a_plan_is_answered_with_it(job: Any) -> None:
    job.start()
    victim = job.plan()["members"][1]
    reply = job.fact("trainer-down", victim["slot"]["pod"], victim["incarnation"])
    plan = decode(Plan, reply["plan"])
    assert (plan.quorum.id, plan.method, len(plan.members)) == (2, "mask", 3)
    assert job.plan() == reply["plan"]


def test_a_stale_fact_is_refused_with_the_current_plan(job: Any) -> None:
    first = job.start()
    job.kill(1)
    job.settle()
    member = first["members"][0]
    reply = job.fact(
        "parked",
        member["slot"]["pod"],
        member["incarnation"],
        quorum=first["quorum"],
        status=409,
    )
    assert reply["error"] == "stale"
    assert reply["plan"]["quorum"]["id"] == 2
    assert "adopt the plan" in reply["what_to_do"]


def test_who_holds_the_current_plan_is_not_given_it_again(job: Any) -> None:
    first = job.start()
    job.kill(1)
    plan = job.plan()
    held = {"Mainstay-Quorum": "q{id}-{nonce}".format(**plan["quorum"])}
    about = [
        ({"facts": [played.fact("adopted", m["slot"]["pod"], m["incarnation"], quorum=q)]}, code)
        for m, q, code in (
            (plan["members"][0], plan["quorum"], 200),
            (first["members"][0], first["quorum"], 409),
        )
    ]
    for body, status in about:
        path = f"{job.path}/agent/facts"
        lacking = job.api.client.post(path, json=body)
        holding = job.api.client.post(path, json=body, headers=held)
        assert (lacking.status_code, holding.status_code) == (status, status)
        assert lacking.json()["plan"] == plan
        assert holding.json()["plan"] is None
    assert "plan that you hold" in holding.json()["what_to_do"]


def test_a_pod_has_to_register_before_it_says_anything(job: Any) -> None:
    for reply in (
        job.beat("stranger", status=409),
        job.fact("trainer-up", "stranger", "x", status=409),
    ):
        assert reply["error"] == "unregistered"
        assert "agent/pods" in reply["what_to_do"]


def test_a_pod_that_was_lost_has_to_register_again(job: Any) -> None:
    job.start()
    job.beat("pod-3")
    gone = {"kind": "pod-gone", "pod": "pod-3", "evidence": "killed"}
    shown = job.api.post(f"{job.path}/provider/facts", {"facts": [gone]})
    assert shown["quorum"]["id"] == 2
    job.beat("pod-3", status=409)
    job.register("pod-3")
    job.beat("pod-3")


def test_a_supervisor_of_the_version_before_tells_facts_in_format_1(job: Any) -> None:
    plan = job.start()
    words = "parameters of r1.s0.i0 on pod-2/0 differ from the rest of the stage"
    for member in plan["members"]:
        fact = {
            "kind": "parked",
            "pod": member["slot"]["pod"],
            "slot": 0,
            "incarnation": member["incarnation"],
            "quorum": plan["quorum"],
            "step": 0,
            "evidence": words,
            "suspects": [],
            "fingerprint": None,
            "final": None,
        }
        job.agent("facts", {"facts": [fact]})
    job.wait_for_plan(2)
    (recovery,) = job.api.get(f"{job.path}/recoveries")
    assert (recovery["format"], recovery["differing"]) == (2, [{"pod": "pod-2", "index": 0}])
    assert words in recovery["fault"]


def test_a_fact_of_a_format_that_is_not_known_is_refused_by_name(job: Any) -> None:
    member = job.start()["members"][0]
    reply = job.fact("parked", member["slot"]["pod"], member["incarnation"], format=3, status=422)
    # Unlike one that is malformed it is told again.
    assert reply["error"] == "unknown-format"
    assert "Fact comes in format 3, known here are 1 to 2" in reply["detail"]


def test_a_heartbeat_is_answered_with_the_newest_quorum_and_the_jobs_state(job: Any) -> None:
    job.register("pod-0")
    assert job.beat("pod-0")["quorum"] is None
    plan = job.start()
    reply = job.beat("pod-0")
    assert (reply["quorum"], reply["state"]) == (plan["quorum"], "running")
    job.api.post(f"{job.path}/stop")
    assert job.beat("pod-0")["state"] == "stopped"


def test_a_heartbeat_changes_no_decision(job: Any) -> None:
    job.start()
    before = job.api.get(f"{job.path}/events")
    for _ in range(5):
        job.beat("pod-0")
    assert job.api.get(f"{job.path}/events") == before


def test_a_step_is_committed_when_all_its_stages_are_in_the_ledger(job: Any) -> None:
    job.start()
    job.agent("ledger", {"entries": [job.entry(0, 0)]})
    assert job.api.get(job.path)["step"] == 0
    job.agent("ledger", {"entries": [job.entry(0, 1)]})
    assert job.api.get(job.path)["step"] == 1
    job.commit(1)
    assert job.api.get(job.path)["step"] == 2
    assert [e["step"] for e in job.api.get(f"{job.path}/ledger?since=1")] == [1, 1]


def test_a_replica_that_was_told_of_a_job_shows_it_by_name_before_a_step_is_whole(
    job: Any,
) -> None:
    job.start()
    job.agent("ledger", {"entries": [job.entry(0, 0)]})
    series = f'mainstay_job_step{{job="{job.uid}",name="demo",namespace=""}} 0.0'
    assert series in job.api.client.get("/metrics").text


def test_counters_of_a_job_begin_at_0_so_that_alerts_see_their_first_increase(job: Any) -> None:
    job.start()
    job.agent("ledger", {"entries": [job.entry(0, 0)]})
    text = job.api.client.get("/metrics").text
    named = f'job="{job.uid}",{{}}name="demo",namespace=""'
    assert f"mainstay_steps_lost_total{{{named.format('')}}} 0.0" in text
    for method in ("mask", "restart", "approximate", "hand-over"):
        labels = named.format(f'method="{method}",')
        assert f"mainstay_recoveries_total{{{labels}}} 0.0" in text


def test_telling_the_ledger_twice_changes_nothing(job: Any) -> None:
    job.start()
    entries = {"entries": [job.entry(0, 0), job.entry(0, 1)]}
    job.agent("ledger", entries)
    before = (job.api.get(job.path), job.api.get(f"{job.path}/ledger"))
    job.agent("ledger", entries)
    assert (job.api.get(job.path), job.api.get(f"{job.path}/ledger")) == before


def test_a_step_that_comes_out_differently_is_announced(job: Any) -> None:
    job.start()
    job.commit(0)
    job.agent("ledger", {"entries": [job.entry(0, 0, masters="f" * 32)]})
    events = job.api.get(f"{job.path}/events")
    mismatch = [e for e in events if e["reason"] == "LedgerMismatch"]
    assert len(mismatch) == 1
    assert "step 0 of stage 0" in mismatch[0]["message"]


def test_a_step_of_another_history_is_written_and_contradicts_nothing(job: Any) -> None:
    """A job forked meanwhile: the step is another one, and both come to the bits they should."""
    job.start()
    job.commit(0)
    forked = {"history": "e" * 32, "approximate_since": 0}
    told = [job.entry(0, 0, masters="f" * 32, **forked), job.entry(0, 1, **forked)]
    job.agent("ledger", {"entries": told})
    events = job.api.get(f"{job.path}/events")
    assert not [e for e in events if e["reason"] == "LedgerMismatch"]
    written = job.api.get(f"{job.path}/ledger")
    assert [(e["history"], e["masters"]) for e in written] == [
        (e["history"], e["masters"]) for e in told
    ]


def test_a_fault_fires_once(api: Any, new_job: Any) -> None:
    fault = {"id": "f0", "step": 3, "action": "kill-trainer", "replica": 0, "stage": 1}
    job = new_job(api, faults=[fault])
    job.start()
    where = {"pod": "pod-1", "slot": 0, "rank": "r0.s1.i0", "at_s": 1.0}
    job.agent("faults/f0/fired", where)
    job.agent("faults/f0/fired", {**where, "pod": "pod-2"}, status=409)
    job.agent("faults/f9/fired", where, status=409)
    job.kill(1)
    assert job.plan()["faults_fired"] == ["f0"]


def test_unknown_fields_are_accepted_and_missing_ones_are_named(job: Any) -> None:
    job.register("pod-0", colour="blue")
    reply = job.agent("pods", {"pod": "pod-1"}, status=422)
    assert reply["error"] == "malformed"
    assert "body.address" in reply["detail"]


def test_agents_may_not_do_what_people_may(job: Any) -> None:
    agent = job.api.new_client("agent-token")
    assert agent.get(f"{job.path}/agent/plan").status_code == 200
    refused = agent.post(f"{job.path}/stop")
    assert refused.status_code == 401
    assert "MAINSTAY_ADMIN_TOKEN" in refused.json()["what_to_do"]


def test_without_the_token_nobody_gets_in_and_is_told_what_to_do(job: Any) -> None:
    for token in ("", "wrong", "agent-token-and-more"):
        client = job.api.new_client(token)
        for path in (f"{job.path}/agent/plan", "/v1/jobs", f"{job.path}/agent/stream"):
            reply = client.get(path)
            assert reply.status_code == 401
            assert reply.json()["error"] == "unauthorized"
            assert "Authorization: Bearer" in reply.json()["what_to_do"]


def test_another_supervisor_of_the_same_pod_ends_what_the_first_had(job: Any) -> None:
    """In containers every supervisor has pid 1: its random name tells them apart."""
    for i in range(4):
        job.register(f"pod-{i}", supervisor=f"first-{i}")
        job.up(f"pod-{i}")
    job.settle()
    assert job.plan()["quorum"]["id"] == 1
    job.register("pod-3", supervisor="first-3")
    assert job.plan()["quorum"]["id"] == 1
    job.register("pod-3", supervisor="second-3")
    plan = job.plan()
    assert (plan["quorum"]["id"], plan["method"]) == (2, "mask")
    assert "pod-3" not in [m["slot"]["pod"] for m in plan["members"]]


def test_what_a_former_supervisor_told_last_does_not_count(job: Any) -> None:
    job.register("pod-0", supervisor="first")
    job.register("pod-0", supervisor="second")
    fact = {"kind": "trainer-up", "pod": "pod-0", "slot": 0, "incarnation": "old-life"}
    late = {"facts": [fact], "supervisor": "first"}
    assert job.agent("facts", late, status=409)["error"] == "unregistered"
    job.agent("facts", {**late, "supervisor": "second"})
