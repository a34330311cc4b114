"""What people see: jobs, members, recoveries, ledger, events, the report, and errors."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.api.conftest import AGENT_TOKEN

from mainstay_core.base.release import VERSION


def test_a_job_is_known_by_uid_and_by_name(job: Any) -> None:
    by_name = job.api.get("/v1/jobs/demo")
    assert by_name == job.api.get(job.path)
    assert (by_name["state"], by_name["steps"], by_name["replicas_wanted"]) == ("forming", 60, 2)
    assert by_name["manifest"]["metadata"]["name"] == "demo"
    assert job.uid in [each["uid"] for each in job.api.get("/v1/jobs")]


def test_a_name_is_the_newest_job_of_that_name(api: Any, new_job: Any) -> None:
    first = new_job(api)
    assert api.get("/v1/jobs/demo")["uid"] == first.uid
    second = new_job(api)
    assert api.get("/v1/jobs/demo")["uid"] == second.uid
    assert api.get(first.path)["uid"] == first.uid


def test_a_job_may_be_given_as_its_processes_see_it(api: Any, job: Any) -> None:
    config = job.register("pod-0")["config"]
    created = api.post("/v1/jobs", {"config": config, "uid": "given-uid-2"}, status=201)
    assert (created["uid"], created["steps"]) == ("given-uid-2", 60)


def test_forks_that_a_job_cannot_make_again_are_refused_whichever_way_it_is_given(
    api: Any, job: Any
) -> None:
    config = job.register("pod-0")["config"]
    manifest = api.get(job.path)["manifest"]
    unread = {"version": 1}
    too_late = {"version": 61, "chain": "c", "made": {"positions": [], "reason": "so"}}
    for fork, field, said in (
        (unread, "repeats[0].chain", "missing"),
        (too_late, "repeats[0]", "is of step 61, and the job has 60"),
    ):
        for path, body in (
            ("", {"manifest": manifest, "repeats": [fork]}),
            ("config.", {"config": config | {"repeats": [fork]}}),
        ):
            reply = api.post("/v1/jobs", body | {"uid": "repeating"}, status=422)
            assert (reply["error"], reply["field"]) == ("invalid-spec", path + field)
            assert said in reply["detail"]


def test_a_bad_manifest_is_refused_by_field(api: Any) -> None:
    manifest = {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "x"},
        "spec": {
            "training": {"steps": 1, "lanes": 2},
            "parallelism": {"replicas": 5},
            "workload": {"entrypoint": "a:b"},
        },
    }
    reply = api.post("/v1/jobs", {"manifest": manifest}, status=422)
    assert (reply["error"], reply["field"]) == ("invalid-spec", "spec.parallelism.replicas")
    unknown = copy.deepcopy(manifest)
    unknown["spec"]["colour"] = "blue"
    assert "colour" in api.post("/v1/jobs", {"manifest": unknown}, status=422)["detail"]
    manifest["spec"]["parallelism"] = {}
    lineage = {"manifest": manifest, "repeats": [{"version": 1}]}
    assert "repeats[0].chain" in api.post("/v1/jobs", lineage, status=422)["detail"]
    broken = {"manifest": manifest, "faults": [{"id": "f"}]}
    assert "faults[0].step" in api.post("/v1/jobs", broken, status=422)["detail"]


def test_an_unknown_job_or_path_is_404_with_a_way_out(api: Any) -> None:
    for path in ("/v1/jobs/nope", "/v1/jobs/nope/report", "/v1/jobs/nope/agent/plan"):
        reply = api.get(path, status=404)
        assert reply["error"] == "unknown-job"
        assert "GET /v1/jobs" in reply["what_to_do"]
    assert api.get("/nowhere", status=404)["what_to_do"]


def test_members_are_ranks_with_slots_and_pids_then_spares(job: Any) -> None:
    job.start(num_pods=5)
    for i in range(5):
        job.beat(f"pod-{i}")
    members = job.api.get(f"{job.path}/members")
    assert [m["rank"] for m in members] == [
        "r0.s0.i0",
        "r1.s0.i0",
        "r0.s1.i0",
        "r1.s1.i0",
        "spare",
    ]
    assert members[0]["slot"] == "pod-0/0"
    assert {(m["pid"], m["phase"], m["step"]) for m in members} == {(42, "computing", 7)}
    assert all(m["settled"] for m in members[:4])


def test_a_recovery_has_its_reason_and_five_times(job: Any) -> None:
    job.start(num_pods=5)
    job.commit(0)
    job.kill(1)
    job.settle(step=1)
    job.settle(step=1)
    job.commit(1)
    mask, join = job.api.get(f"{job.path}/recoveries")
    assert (mask["method"], mask["exact"], mask["done"], mask["from_step"]) == (
        "mask",
        True,
        True,
        1,
    )
    times = [mask[name] for name in ("detect_s", "decide_s", "fence_s", "load_s", "resume_s")]
    assert all(isinstance(t, float) and t >= 0 for t in times)
    assert mask["first_commit_after_s"] is not None
    assert "r1.s0.i0" in mask["fault"]
    assert (join["method"], join["lost_steps"]) == ("join", 0)
    entries = [job.entry(2, stage, copy_wait_s=0.25) for stage in (0, 1)]
    for _ in range(2):  # told again, it does not count again
        job.api.post(f"{job.path}/agent/ledger", {"entries": entries})
    metrics = job.api.client.get("/metrics").text
    # Labels are written in the order of their names.
    first, last = f'job="{job.uid}"', 'name="demo",namespace=""'
    assert f'mainstay_recoveries_total{{{first},method="mask",{last}}} 1.0' in metrics
    assert f"mainstay_steps_committed_total{{{first},{last}}} 3.0" in metrics
    assert f"mainstay_checkpoint_wait_seconds_total{{{first},{last}}} 0.5" in metrics
    assert f'mainstay_build_info{{name="mainstay-api",version="{VERSION}"}} 1.0' in metrics


def test_each_step_counts_in_one_replica_and_all_show_the_same_of_a_job(
    new_api: Callable[..., Any], new_job: Callable[..., Any]
) -> None:
    """Supervisors tell whichever replica they reach, several at once, and more than once."""
    replicas = [new_api() for _ in range(3)]
    job = new_job(replicas[0])
    job.start()
    num_steps = 12
    for step in range(num_steps):
        entries = [job.entry(step, stage, committed_at_s=time.time()) for stage in (0, 1)]
        together = threading.Barrier(len(replicas))

        def tell(replica: Any, entries: Any = entries, together: Any = together) -> None:
            together.wait()
            replica.post(f"{job.path}/agent/ledger", {"entries": entries})

        tellers = [threading.Thread(target=tell, args=(replica,)) for replica in replicas]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join()
    lines = [
        line.split()
        for replica in replicas
        for line in replica.client.get("/metrics").text.splitlines()
        if job.uid in line
    ]
    name = "mainstay_steps_committed_total"
    counted = [float(value) for series, value in lines if series.startswith(name)]
    assert sum(counted) == num_steps
    ettr = job.api.get(f"{job.path}/summary")["training"]["ettr"]
    for gauge, value in (("step", num_steps), ("replicas", 2), ("loss", 3.0 - 1.1), ("ettr", ettr)):
        shown = [float(v) for series, v in lines if series.startswith(f"mainstay_job_{gauge}{{")]
        assert shown == pytest.approx([value] * len(replicas)), gauge


def test_a_deleted_jobs_series_are_gone_from_every_replica(
    new_api: Callable[..., Any], new_job: Callable[..., Any], own_redis: Any
) -> None:
    asked, other = new_api(own_redis.url), new_api(own_redis.url)
    gone, stays = new_job(asked), new_job(asked)
    for job in (gone, stays):
        job.start()
        job.commit(0)
        job.kill(1)
        job.settle(step=1)
        job.commit(1)
        for replica in (asked, other):
            beat = {"pod": "pod-0", "slots": [], "quorum": None}
            replica.post(f"{job.path}/agent/heartbeats", beat)
    before = asked.client.get("/metrics").text
    assert before.count(gone.uid) == before.count(stays.uid) > 15
    assert gone.uid in other.client.get("/metrics").text
    own_redis.stop()
    # While nobody can say which jobs there are, all stay.
    assert gone.uid in other.client.get("/metrics").text
    own_redis.start()
    assert asked.client.delete(gone.path).status_code == 200
    for replica in (asked, other):
        text = replica.client.get("/metrics").text
        assert gone.uid not in text
        assert stays.uid in text


def test_a_step_that_the_ledger_lacks_keeps_its_place_in_the_report(job: Any) -> None:
    job.start()
    job.commit(0)
    job.agent("ledger", {"entries": [job.entry(1, 0)]})
    job.commit(2)

    report = job.api.get(f"{job.path}/report")

    assert report["digests"]["steps"] == [f"{1:032x}", None, f"{65:032x}"]
    assert report["losses"] == [3.0, None, 2.8]
    assert report["steps"]["committed"] == 3


def test_the_report_of_a_complete_job(job: Any) -> None:
    job.start()
    for step in range(3):
        job.commit(step)
    job.finish()
    report = job.api.get(f"{job.path}/report")
    assert (report["version"], report["job"], report["state"]) == (2, "demo", "complete")
    assert report["digests"]["final"] == {
        "params": f"{2:032x}",
        "masters": f"{4:032x}",
        "optimizer": f"{6:032x}",
        "data": f"{4:032x}",
    }
    assert report["digests"]["steps"] == [f"{1:032x}", f"{33:032x}", f"{65:032x}"]
    assert report["steps"] == {"first": 0, "committed": 3, "redone": 0, "lost": 0}
    assert report["losses"] == [3.0, 2.9, 2.8]
    assert report["step_seconds"] == pytest.approx({"p50": 0.101, "p99": 0.102})
    assert report["recoveries"] == []
    assert report["events"][-1]["reason"] == "Complete"


def test_stopping_twice_is_harmless(job: Any) -> None:
    job.start()
    assert job.api.post(f"{job.path}/stop")["state"] == "stopped"
    assert job.api.post(f"{job.path}/stop")["reason"] == "a user asked for it"


def test_a_running_job_is_scaled_within_its_bounds(job: Any) -> None:
    job.start()
    shown = job.api.post(f"{job.path}/scale", {"replicas": 1})
    assert (shown["replicas"], shown["replicas_wanted"]) == (1, 1)
    assert job.api.get(f"{job.path}/plan")["plan"]["planned"] is True
    reply = job.api.post(f"{job.path}/scale", {"replicas": 9}, status=422)
    assert (reply["error"], reply["field"]) == ("invalid-spec", "replicas")
    assert "minReplicas..lanes" in reply["detail"]
    wanted = job.api.get(f"{job.path}/pods")
    assert (wanted["state"], wanted["num_pods"]) == ("running", 2)
    # Until the others go on without them they may be needed again.
    assert wanted["ending"] == []
    job.settle(step=1)
    assert len(job.api.get(f"{job.path}/pods")["ending"]) == 2
    job.api.post(f"{job.path}/scale", {"spares": 2})
    assert job.api.get(f"{job.path}/pods")["num_pods"] == 4


def test_a_pod_is_drained_by_uid_or_name(job: Any) -> None:
    job.start(num_pods=5)
    shown = job.api.post(f"{job.path}/drain", {"pod": "pod-1"})
    (leaving,) = shown["leaving"]
    assert (leaving["pod"], leaving["reason"]) == ("pod-1", "a user asked for it")
    assert leaving["left_s"] is None
    plan = job.api.get(f"{job.path}/plan")["plan"]
    assert (plan["method"], plan["planned"], len(plan["members"])) == ("hand-over", True, 5)
    assert job.api.get(f"{job.path}/pods")["leaving"] == ["pod-1"]
    assert job.api.post(f"{job.path}/drain", {"pod": "pod-1"})["leaving"] == shown["leaving"]
    reply = job.api.post(f"{job.path}/drain", {"pod": "nothing"}, status=404)
    assert reply["error"] == "unknown-pod"
    assert "pod-0, pod-1" in reply["what_to_do"]


def test_who_makes_the_pods_may_tell_that_one_leaves(job: Any) -> None:
    job.start()
    fact = {"kind": "leaving", "pod": "pod-1", "evidence": "node is drained", "grace_s": 60.0}
    shown = job.api.post(f"{job.path}/provider/facts", {"facts": [fact]})
    assert shown["replicas"] == 1, "no spare: its chain ends between steps"
    assert shown["leaving"] == [], "it serves no longer"
    assert job.api.get(f"{job.path}/pods")["ending"] == ["pod-1"]


def test_a_provider_tells_of_pods_only(job: Any) -> None:
    fact = {"kind": "trainer-down", "pod": "pod-0", "slot": 0, "incarnation": "x"}
    reply = job.api.post(f"{job.path}/provider/facts", {"facts": [fact]}, status=422)
    assert "pod-gone or leaving only" in reply["what_to_do"]


def test_openapi_has_examples_and_the_error_form(api: Any) -> None:
    document = api.get("/openapi.json")
    facts = document["paths"]["/v1/jobs/{job}/agent/facts"]["post"]["responses"]
    assert facts["409"]["content"]["application/json"]["example"]["plan"]["suppliers"]
    job = document["paths"]["/v1/jobs/{job}"]["get"]["responses"]
    assert job["200"]["content"]["application/json"]["example"]["name"] == "demo"
    assert {"401", "404", "422", "503"} <= set(job)


def test_probes_need_no_token(api: Any) -> None:
    nobody = api.new_client("")
    assert nobody.get("/healthz").status_code == 200
    assert nobody.get("/readyz").status_code == 200


def test_metrics_need_a_token_or_have_a_port_of_their_own(
    api: Any, new_api: Callable[..., Any]
) -> None:
    assert api.new_client("").get("/metrics").status_code == 401
    assert api.new_client(AGENT_TOKEN).get("/metrics").status_code == 401, "pods of jobs"
    assert "mainstay_api_request_seconds" in api.client.get("/metrics").text

    elsewhere = new_api(metrics_port=0)
    assert elsewhere.client.get("/metrics").status_code == 404
    scraper = httpx.Client(base_url=elsewhere.metrics_url, trust_env=False)
    answer = scraper.get("/metrics")
    assert "mainstay_api_request_seconds" in answer.text
    assert answer.headers["connection"] == "close"
    for path in ("/v1/jobs", "/healthz", "/openapi.json", "/docs"):
        assert scraper.get(path).status_code == 404
    scraper.close()
