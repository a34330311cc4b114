"""Faults of a running job: asked for, pushed to its supervisors, listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ENTRY = {"target": {"replica": 1, "stage": 0}, "action": "kill-trainer"}


def ask(job: Any, *entries: dict[str, Any], status: int = 201) -> Any:
    return job.api.post(f"{job.path}/faults", {"faults": list(entries)}, status=status)


def test_a_fault_without_a_step_is_for_the_next_one_and_reaches_the_supervisors(
    job: Any, listen: Any
) -> None:
    job.start()
    job.commit(0)
    listener = listen(job)
    (fault,) = ask(job, ENTRY)
    assert (fault["step"], fault["soon"], fault["state"]) == (1, True, "waiting")
    listener.wait(lambda each: "faults" in each.kinds())
    (pushed,) = next(data for _, kind, data in listener.events if kind == "faults")
    assert (pushed["id"], pushed["replica"]) == (fault["id"], 1)
    # Who registers later gets it with the job.
    assert [f["id"] for f in job.register("late")["config"]["faults"]] == [fault["id"]]


def test_a_flip_reaches_the_supervisors_with_its_bit_and_a_bad_one_is_refused(job: Any) -> None:
    job.start()
    at, bit = {"phase": "forward"}, {"operator": "aten.mm", "element": 5, "bit": 30}
    (fault,) = ask(job, ENTRY | {"action": "flip", "at": at, "flip": bit})
    (told,) = job.register("late")["config"]["faults"]
    assert told["id"] == fault["id"]
    assert told["flip"]["in_pass"] == "forward"
    assert (told["flip"]["operator"], told["flip"]["bit"]) == ("aten.mm", 30)

    bad = ask(job, ENTRY | {"action": "flip", "at": at, "flip": bit | {"bit": 128}}, status=422)
    assert bad["field"] == "faults[0].flip.bit"


def test_what_fired_is_told_to_all_and_listed(job: Any, listen: Any) -> None:
    job.start()
    ask(job, ENTRY | {"id": "a"})
    listener = listen(job)
    job.agent("faults/a/fired", {"pod": "pod-1", "slot": 0, "rank": "r1.s0.i0", "at_s": 5.0})
    listener.wait(lambda each: "fired" in each.kinds())
    assert listener.events[-1][2] == {"fault": "a"}
    (fault,) = job.api.get(f"{job.path}/faults")
    assert fault["state"] == "fired"
    assert fault["fired"] == {"pod": "pod-1", "slot": 0, "rank": "r1.s0.i0", "at_s": 5.0}
    assert job.api.get(f"{job.path}/report")["faults"] == [fault]


def test_a_flip_that_changed_nothing_is_listed_with_the_reason(job: Any) -> None:
    job.start()
    bit = {"operator": "aten.mmm", "element": 5, "bit": 30}
    ask(job, ENTRY | {"id": "a", "action": "flip", "at": {"phase": "forward"}, "flip": bit})
    why = "the nearest names there are aten.mm"
    (member, *_) = job.plan()["members"]
    fired = {"pod": member["slot"]["pod"], "slot": member["slot"]["index"]}
    job.agent("faults/a/fired", fired | {"rank": "r0.s0.i0", "at_s": 5.0})

    job.fact("missed", member["slot"]["pod"], member["incarnation"], fault="a", evidence=why)

    (fault,) = job.api.get(f"{job.path}/faults")
    assert (fault["state"], fault["problem"]) == ("missed", why)
    report = job.api.get(f"{job.path}/report")
    assert report["faults"] == [fault]
    (event,) = [event for event in report["events"] if event["reason"] == "FaultMissed"]
    assert why in event["message"]


def test_a_fault_on_a_process_is_recorded_by_whoever_started_it(job: Any) -> None:
    job.start()
    ask(job, {"id": "p", "target": {"process": "redis"}, "action": "flush"})
    path = f"{job.path}/provider/faults/p/fired"
    job.api.post(path, {"process": "redis", "at_s": 5.0})
    (fault,) = job.api.get(f"{job.path}/faults")
    assert fault["fired"]["pod"] == "redis"
    job.api.post(path, {"process": "api", "at_s": 6.0}, status=409)


def test_what_can_never_fire_is_refused_with_the_reason(job: Any) -> None:
    job.start()
    job.commit(0)
    job.commit(1)
    over = ask(job, ENTRY | {"at": {"step": 0}}, status=422)
    assert over["field"] == "faults[0].at.step"
    assert "has committed 2 steps already" in over["detail"]
    nobody = ask(job, ENTRY | {"target": {"spare": 0}}, status=422)
    assert "the job has no spares" in nobody["detail"]
    ask(job, ENTRY | {"id": "a"})
    again = ask(job, ENTRY | {"id": "a"}, status=422)
    assert "which the job has already" in again["detail"]
    assert "is empty" in ask(job, status=422)["detail"]


def test_a_job_that_is_over_takes_no_faults(job: Any) -> None:
    job.start()
    job.api.post(f"{job.path}/stop")
    assert "stopped" in ask(job, ENTRY, status=409)["detail"]


def test_a_step_that_passes_makes_its_fault_a_missed_one(job: Any) -> None:
    job.start()
    ask(job, ENTRY | {"at": {"step": 1}})
    job.commit(0)
    job.commit(1)
    job.commit(2)
    assert [f["state"] for f in job.api.get(f"{job.path}/faults")] == ["missed"]


def test_a_fault_on_a_process_of_a_cluster_is_refused_by_name(
    new_api: Callable[..., Any], new_job: Callable[..., Any]
) -> None:
    api = new_api(auth="kubernetes", fault_injection=True)
    job = new_job(api, uid="uid-of-a-cluster", namespace="research")
    job.start()
    flush = {"target": {"process": "redis"}, "action": "flush"}
    refused = ask(job, flush, status=422)
    assert refused["field"] == "faults[0].target.process"
    assert "is for local runs" in refused["detail"]
    assert ask(job, ENTRY)[0]["state"] == "waiting"


def test_where_nobody_has_allowed_faults_none_is_taken_and_none_fires(
    new_api: Callable[..., Any], new_job: Callable[..., Any], own_redis: Any
) -> None:
    job = new_job(new_api(own_redis.url))
    job.start()
    ask(job, ENTRY | {"id": "of-before"})
    job.api = new_api(own_redis.url, fault_injection=False)

    refused = ask(job, ENTRY, status=403)
    assert refused["error"] == "fault-injection-off"
    assert "faultInjection.enabled" in refused["detail"]
    assert "--set faultInjection.enabled=true" in refused["what_to_do"]
    fired = {"pod": "pod-1", "slot": 0, "rank": None, "at_s": 5.0}
    job.agent("faults/of-before/fired", fired, status=403)
    assert [f["state"] for f in job.api.get(f"{job.path}/faults")] == ["waiting"]

    # Nor with a job that a store has lost: a pod may say what it likes of it.
    job.register("pod-0")
    config = job.config
    assert config["faults"]
    own_redis.lose()
    job.restore("pod-0", None)
    assert job.register("pod-0")["config"]["faults"] == []
