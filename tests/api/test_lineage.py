"""The lineage of a job at the api, and a person's permission for one approximate recovery."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.conftest import MANIFEST, Job
from tests.worlds import played

from mainstay_api.routes.lineage import _name
from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_NAME
from mainstay_core.wire.reinitialisation import BlockOutline

STAGES = 3
LINE = [[codec.encode(BlockOutline(name=f"layers.{i}", kind="layer"))] for i in range(STAGES)]
FORK = {
    "version": 2,
    "chain": "",
    "made": {
        "positions": [{"stage": 1, "blocks": []}],
        "reason": "stage 1 is made anew from 0.5 of stage 0, 0.5 of stage 2",
    },
    "lr_boost": 1.1,
    "boost_steps": None,
}
TOLD = {"since": 2, "num_forks": 1, "newest": [FORK], "made": True}


def manifest(**recovery: Any) -> dict[str, Any]:
    spec = {**MANIFEST["spec"], "parallelism": {"stages": STAGES, "replicas": 1}}
    return {**MANIFEST, "spec": {**spec, "recovery": recovery}}


def start(api: Any, **recovery: Any) -> Job:
    """A job of one replica that has committed two steps."""
    job = Job(api, manifest(**recovery))
    for i in range(STAGES):
        job.register(f"pod-{i}")
        outline = {"outline": LINE} if i == 0 else {}
        job.fact("trainer-up", f"pod-{i}", f"life-{i}", fingerprint={"torch": "2"}, **outline)
    job.settle()
    for step in range(2):
        commit(job, step)
    return job


def commit(job: Job, step: int, **fields: Any) -> None:
    job.agent("ledger", {"entries": [job.entry(step, stage, **fields) for stage in range(STAGES)]})


def settle(job: Job, step: int, history: Any) -> None:
    """All go on; the first member tells the history of their states."""
    facts = played.settle_facts(job.plan(), step)
    first = job.plan()["members"][0]["incarnation"]
    for fact in facts:
        if fact["kind"] == "settled" and fact["incarnation"] == first:
            fact["history"] = history
    job.agent("facts", {"facts": facts})


def join(job: Job, pod: str = "spare") -> None:
    job.register(pod)
    job.up(pod)


@pytest.fixture
def waiting(api: Any) -> Job:
    """A job without the policy that has lost stage 1, and nobody takes its place."""
    job = start(api)
    job.kill(1)
    assert job.api.get(job.path)["state"] == "waiting"
    return job


def test_an_exact_job_says_what_each_stage_could_be_made_anew_from(api: Any) -> None:
    job = start(api, allowApproximate=True)
    page = api.get(f"{job.path}/lineage")
    assert (page["exact"], page["course"], page["forks"]) == (True, "exact", [])
    assert page["allowed"]
    assert [stage["possible"] for stage in page["stages"]] == [False, True, False]
    assert page["stages"][1]["reason"].startswith("stages 0 and 2, weighed by")


def test_a_fork_is_told_by_every_answer_of_the_api(api: Any) -> None:
    job = start(api, allowApproximate=True, approximateAfterLostSteps=0)
    join(job)
    job.kill(1)
    settle(job, 2, TOLD)
    commit(job, 2, history="f" * 32, approximate_since=2)

    page = api.get(f"{job.path}/lineage")
    assert (page["exact"], page["course"]) == (False, "approximate since step 2")
    assert page["forks"][0]["made"]["reason"] == FORK["made"]["reason"]
    assert api.get(job.path)["approximate_since"] == 2
    summary = api.get(f"{job.path}/summary")
    assert summary["training"]["approximate_since"] == 2
    assert summary["recovery"]["last"]["approximate_since"] == 2
    assert summary["made_anew"].startswith("step 2: stage 1 is made anew")
    (recovery,) = api.get(f"{job.path}/recoveries")
    assert (recovery["exact"], recovery["approximate_since"]) == (False, 2)
    report = api.get(f"{job.path}/report")
    assert (report["exact"], report["approximate_since"]) == (False, 2)
    assert report["lineage"]["forks"] == page["forks"]
    assert api.get(f"{job.path}/ledger?since=2")[0]["approximate_since"] == 2
    (event,) = (e for e in api.get(f"{job.path}/events") if e["reason"] == "StageReinitialised")
    assert event["type"] == "Warning"
    assert event["message"].startswith("approximate since step 2: ")
    shown = 'mainstay_job_approximate_since_step{job="' + job.uid
    assert f'{shown}",name="demo",namespace=""}} 2.0' in api.client.get("/metrics").text


def test_the_metric_of_a_job_that_went_back_before_its_fork_is_gone(api: Any) -> None:
    job = start(api, allowApproximate=True, approximateAfterLostSteps=0)
    join(job)
    job.kill(1)
    settle(job, 2, TOLD)
    commit(job, 2, history="f" * 32, approximate_since=2)
    shown = 'mainstay_job_approximate_since_step{job="' + job.uid
    assert shown in api.client.get("/metrics").text
    for pod in ("other", "another"):
        join(job, pod)
    members = job.plan()["members"]
    for stage in (0, 1):
        lost = members[stage]
        job.fact("trainer-down", lost["slot"]["pod"], lost["incarnation"], evidence="killed")
    settle(job, 0, None)
    commit(job, 0)
    assert shown not in api.client.get("/metrics").text
    assert api.get(f"{job.path}/lineage")["exact"]


def test_a_permission_is_tried_first_and_changes_nothing_then(waiting: Job) -> None:
    told = waiting.api.post(f"{waiting.path}/approximate", {"dry_run": True})
    assert told["stages"] == [1]
    assert told["would"].startswith("stage 1 is made anew from stages 0 and 2, weighed by")
    assert told["why_not"][0].startswith("row 0 (hand_over)")
    join(waiting)
    assert waiting.plan()["method"] == "restart"


def test_a_permission_is_for_one_recovery_and_recorded_with_the_name(waiting: Job) -> None:
    told = waiting.api.post(f"{waiting.path}/approximate", {"stages": [1]})
    assert told["allowed"].startswith("token allows one approximate recovery: stage 1 is made")
    assert waiting.api.get(f"{waiting.path}/lineage")["permitted_by"] == "token"
    join(waiting)
    assert waiting.plan()["method"] == "approximate"
    (recovery,) = waiting.api.get(f"{waiting.path}/recoveries")
    assert recovery["allowed_by"] == "token"
    assert recovery["reason"].endswith("token allowed it")
    settle(waiting, 2, TOLD)
    assert waiting.api.get(f"{waiting.path}/lineage")["permitted_by"] == ""
    assert waiting.api.get(waiting.path)["approximate_since"] == 2


def test_a_permission_without_effect_is_refused_with_the_ladders_sentences(
    waiting: Job, api: Any
) -> None:
    path = f"{waiting.path}/approximate"
    for body in ({"stages": [2]}, {"stages": [2], "dry_run": True}):
        reply = api.post(path, body, status=409)
        assert reply["error"] == "not-approximate"
        assert reply["detail"] == (
            "the permission is for stage 2, and lost is stage 1: name just that"
        )
    assert "lineage" in reply["what_to_do"]
    waiting.kill(2)
    reply = api.post(path, {}, status=409)
    assert "are lost together" in reply["detail"] or "an end of the pipeline" in reply["detail"]
    assert any(line.startswith("row 5 (approximate)") for line in reply["why_not"])
    whole = start(api)
    assert "is whole" in api.post(f"{whole.path}/approximate", {}, status=409)["detail"]
    api.post(f"{whole.path}/stop", {})
    assert "is stopped" in api.post(f"{whole.path}/approximate", {}, status=409)["detail"]
    assert api.post("/v1/jobs/nobody/approximate", {}, status=404)["error"] == "unknown-job"
    for body in ({"stages": [-1]}, {"stages": "all"}, {"dry_run": "perhaps"}):
        assert api.post(path, body, status=422)["error"] == "malformed"


AHEAD = {"after_lost_steps": 1}


def test_a_permission_is_given_ahead_shown_and_used_once(api: Any) -> None:
    job = start(api)
    path = f"{job.path}/approximate"
    tried = api.post(f"{path}/ahead", AHEAD | {"dry_run": True})
    assert tried["would"].startswith(
        "a permission ahead of the loss, for one recovery of stages 0 to 2 that would lose more "
        "than 1 step otherwise"
    )
    assert tried["stages"] == [0, 1, 2]
    assert tried["why_not"][0].startswith("stage 0 is an end of the pipeline")
    assert api.get(job.path)["ahead"] is None
    given = api.post(f"{path}/ahead", AHEAD)["allowed"]
    assert given.startswith("token gives a permission ahead of the loss")
    commit(job, 2)
    for shown in (api.get(job.path), api.get(f"{job.path}/lineage")):
        assert (shown["ahead"]["who"], shown["ahead"]["after_lost_steps"]) == ("token", 1)
    join(job)
    job.kill(1)

    plan = job.plan()
    assert (plan["method"], plan["fork"]["how"]["after_lost_steps"]) == ("approximate", 1)
    assert api.get(job.path)["ahead"] is None
    (recovery,) = api.get(f"{job.path}/recoveries")
    assert recovery["allowed_by"] == "token"
    reply = api.post(f"{path}/withdraw", {}, status=409)
    assert "is carried out already, as token has allowed it" in reply["detail"]


def test_a_permission_given_ahead_is_taken_back(api: Any) -> None:
    job = start(api)
    path = f"{job.path}/approximate"
    assert "nobody has given" in api.post(f"{path}/withdraw", {}, status=409)["detail"]
    api.post(f"{path}/ahead", AHEAD)
    told = api.post(f"{path}/withdraw", {})
    assert told["withdrawn"].startswith("token takes back what token has allowed for one recovery")
    assert told["ahead"] is None
    join(job)
    job.kill(1)
    assert job.plan()["method"] == "restart"


def test_a_permission_ahead_without_its_limit_is_refused_by_name(api: Any) -> None:
    job = start(api)
    path = f"{job.path}/approximate/ahead"
    for body in ({}, {"after_lost_steps": -1}, {"after_lost_steps": None}):
        reply = api.post(path, body, status=422)
        assert (reply["error"], "after_lost_steps" in reply["detail"]) == ("malformed", True)
    refused = api.post(path, AHEAD | {"stages": [9]}, status=409)
    assert refused["detail"] == "the job has stages 0 to 2, and no stage 9"


def test_a_restriction_that_is_not_understood_is_never_left_out(waiting: Job) -> None:
    """A permission without its limit would allow more than its giver does."""
    path = f"{waiting.path}/approximate"
    for body in (AHEAD, AHEAD | {"ahead": True}, {"until": 9}):
        reply = waiting.api.post(path, body, status=422)
        assert (reply["error"], next(iter(body)) in reply["detail"]) == ("malformed", True)
    assert waiting.api.post(f"{path}/ahead", AHEAD | {"until": 9}, status=422)
    assert waiting.api.get(f"{waiting.path}/lineage")["permitted_by"] == ""


def test_the_policy_may_change_in_a_running_job(api: Any) -> None:
    job = start(api)
    changed = manifest(allowApproximate=True, approximateAfterLostSteps=0)
    api.post("/v1/jobs", {"manifest": changed, "uid": job.uid})
    assert api.get(f"{job.path}/lineage")["allowed"]
    join(job)
    job.kill(1)
    plan = job.plan()
    assert (plan["method"], plan["fork"]["how"]["after_lost_steps"]) == ("approximate", 0)


def test_names_have_no_control_characters() -> None:
    """They come with requests, and are printed in terminals."""
    assert _name("alice") == "alice"
    hostile = _name("a\x1b]0;x\x07\n2026-11-26 a line" + "b" * 9000)
    assert hostile.isprintable()
    assert len(hostile) <= MAX_NAME
