"""Conditions and state, from what the api says and what is seen of the pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.conditions import (
    Condition,
    ConditionType,
    JobSummary,
    ObservedJob,
    State,
    derive_conditions,
    derive_state,
    with_times,
)
from mainstay_core.pool.counts import PodCounts, count_pods, find_problems
from mainstay_core.pool.observed import ObservedPod, PodPhase
from mainstay_core.wire.plan import Method

RUNNING = JobSummary(state="running", steps=9, replicas=2, replicas_wanted=2)
PODS = PodCounts(wanted=5, ready=5, serving=4, spares_wanted=1)


def seen(**fields: Any) -> ObservedJob:
    base = {"initialized": True, "summary": RUNNING, "pods": PODS}
    return ObservedJob(**{**base, **fields})


def shown(job: ObservedJob) -> dict[str, tuple[bool | None, str]]:
    return {c.type.value: (c.status, c.reason) for c in derive_conditions(job)}


def test_all_conditions_are_there_from_the_beginning() -> None:
    conditions = derive_conditions(ObservedJob())

    assert [c.type for c in conditions] == list(ConditionType)
    assert shown(ObservedJob())["Ready"] == (None, "Starting")


def test_a_job_that_trains() -> None:
    conditions = shown(seen())

    assert conditions["Ready"] == (True, "Training")
    assert conditions["Degraded"] == (False, "AsAsked")
    assert conditions["Protected"] == (True, "Replicated")
    assert conditions["SparesAvailable"] == (True, "SparesReady")
    assert derive_state(seen())[0] is State.RUNNING


def test_what_a_newer_api_says_is_unknown_and_no_outage() -> None:
    conditions = shown(seen(api_problem="a phase that is not known", is_api_understood=False))

    assert conditions["Ready"] == (None, "ApiNotUnderstood")
    assert conditions["Recovering"] == (None, "ApiNotUnderstood")


def test_a_job_that_lost_a_replica_and_recovers() -> None:
    summary = JobSummary(
        state="running",
        replicas=1,
        replicas_wanted=2,
        recovering=("rank r1.s0 on demo-3/0 was killed",),
        method=Method.MASK,
    )
    job = seen(summary=summary, pods=PodCounts(wanted=5, ready=3, serving=3, spares_wanted=1))

    conditions = shown(job)

    assert conditions["Recovering"] == (True, "Mask")
    assert conditions["Degraded"] == (True, "ReplicasLost")
    assert conditions["Protected"] == (False, "Unprotected")
    assert conditions["SparesAvailable"] == (False, "NoSpareReady")
    assert derive_state(job) == (State.RECOVERING, "rank r1.s0 on demo-3/0 was killed")


@pytest.mark.parametrize(
    ("durable", "other"), [(0, "the seed's initial state"), (8, "the checkpoint of step 8")]
)
def test_with_snapshots_the_condition_says_which_losses_memory_survives(
    durable: int, other: str
) -> None:
    running = JobSummary(
        state="running", replicas=1, replicas_wanted=1, durable=durable, snapshots=True
    )
    covered = "the loss of any one pod is survived"
    for summary, made in (
        (running, "what the memory of pods survives is not told yet"),
        (replace(running, coverage=covered), covered),
    ):
        (told,) = (c for c in derive_conditions(seen(summary=summary)) if c.type == "Protected")
        assert (told.status, told.reason) == (False, "SnapshotsOnly")
        assert told.message == f"{made}; what it does not restarts from {other}"
    forming = JobSummary(state="forming", replicas_wanted=1, snapshots=True)
    assert shown(seen(summary=forming))["Protected"] == (False, "NotStarted")


def test_what_the_api_has_not_said_lately_is_unknown() -> None:
    conditions = shown(seen(api_problem="the api is not reached"))

    for kind in ("Ready", "Degraded", "Recovering", "Protected", "Exact", "SparesAvailable"):
        assert conditions[kind] == (None, "ApiUnreachable")


def test_a_job_of_which_a_stage_was_made_anew_is_not_exact_and_says_since_when() -> None:
    approximate = replace(RUNNING, approximate_since=8, made_anew="step 8: stage 1 is made anew")
    for summary in (approximate, replace(approximate, state="forming")):
        (told,) = (c for c in derive_conditions(seen(summary=summary)) if c.type == "Exact")
        assert (told.status, told.reason) == (False, "StageReinitialised")
        assert told.message == "approximate since step 8: step 8: stage 1 is made anew"
    over = replace(approximate, state="complete")
    assert shown(seen(summary=over, api_problem="away"))["Exact"] == (False, "StageReinitialised")
    assert shown(seen())["Exact"] == (True, "AsUndisturbed")
    forming = JobSummary(state="forming", replicas_wanted=1)
    assert shown(seen(summary=forming))["Exact"] == (None, "NotStarted")
    assert shown(seen(invalid="no lanes"))["Exact"] == (None, "NotStarted")


def test_an_end_stays_known_when_the_api_is_away() -> None:
    done = JobSummary(state="complete", steps=9)
    job = seen(summary=done, api_problem="the api is not reached")

    assert shown(job)["Complete"] == (True, "AllStepsCommitted")
    assert shown(job)["Ready"] == (False, "Complete")
    assert derive_state(job)[0] is State.COMPLETE


def test_what_keeps_pods_from_starting_degrades() -> None:
    job = seen(problems=(("ImagePullFailed", "2 pods, demo-0 among them"),))

    assert shown(job)["Degraded"] == (True, "ImagePullFailed")


def test_failures_have_their_reasons() -> None:
    def reason(**fields: Any) -> tuple[bool | None, str]:
        return shown(seen(**fields))["Failed"]

    assert reason(invalid="spec.training.lanes: is 0") == (True, "InvalidSpec")
    assert reason(deadline="late") == (True, "DeadlineExceeded")
    assert reason(summary=JobSummary(state="stopped")) == (True, "Stopped")
    assert reason(summary=JobSummary(state="failed", reason="no")) == (True, "Failed")
    assert reason() == (False, "NotFailed")


def test_of_a_refused_specification_everything_is_known() -> None:
    """It was said that the api is not reached, though it had never been asked."""
    job = seen(
        invalid="spec.training.lanes: is 0",
        api_problem="the api has not been asked yet",
        suspend=True,
        pods=PodCounts(wanted=5, spares_wanted=1),
    )

    conditions = shown(job)

    assert conditions.pop("Failed") == (True, "InvalidSpec")
    assert conditions.pop("Initialized") == conditions.pop("Ready") == (False, "InvalidSpec")
    assert conditions.pop("Complete") == (False, "NotEnded")
    assert conditions.pop("Exact") == (None, "NotStarted"), "False would claim a loss"
    assert set(conditions.values()) == {(False, "NotStarted")}


def test_suspension_is_asked_for_and_then_true() -> None:
    assert shown(seen(suspend=True))["Suspended"] == (False, "Suspending")
    suspended = seen(suspend=True, suspended=True, summary=JobSummary(state="suspended"))
    assert shown(suspended)["Suspended"] == (True, "Suspended")
    assert derive_state(suspended)[0] is State.SUSPENDED


def test_a_time_changes_with_the_status_alone() -> None:
    first = Condition(type=ConditionType.READY, status=True, reason="Training", message="2 of 2")
    old = with_times([first], [], 1, "then")

    same = Condition(type=ConditionType.READY, status=True, reason="Other", message="1 of 2")
    other = Condition(type=ConditionType.READY, status=None, reason="Other", message="")

    assert with_times([same], old, 2, "now")[0]["lastTransitionTime"] == "then"
    assert with_times([other], old, 2, "now")[0]["lastTransitionTime"] == "now"
    assert with_times([other], old, 2, "now")[0]["status"] == "Unknown"


@given(
    st.sampled_from(
        [
            "forming",
            "running",
            "recovering",
            "waiting",
            "suspended",
            "complete",
            "failed",
            "stopped",
        ]
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "not reached"]),
    st.sampled_from(["", "late"]),
)
def test_ends_exclude_each_other_and_training(
    state: str, suspend: bool, suspended: bool, problem: str, deadline: str
) -> None:
    summary = JobSummary(state=state, replicas=2, replicas_wanted=2)
    job = seen(
        summary=summary,
        suspend=suspend,
        suspended=suspended,
        api_problem=problem,
        deadline=deadline,
    )
    conditions = shown(job)

    assert not (conditions["Complete"][0] and conditions["Failed"][0])
    if summary.over:
        assert conditions["Ready"][0] is False
        assert conditions["Complete"][0] or conditions["Failed"][0]


def test_before_it_begins_nothing_is_claimed_about_a_state_or_a_spare() -> None:
    forming = JobSummary(state="forming", steps=9, replicas_wanted=2)
    counts = PodCounts(wanted=5, ready=1, spares_wanted=1)
    conditions = shown(seen(summary=forming, pods=counts))

    assert conditions["Protected"] == (False, "NotStarted")
    assert conditions["SparesAvailable"] == (False, "NoSpareReady")
    assert counts.spares_ready == 0, "the pod that is ready may get a rank"


def test_a_job_that_waits_for_pods_says_which_one_and_why() -> None:
    pod = ObservedPod(
        uid=PodUid("u"), name="j-0", index=0, phase=PodPhase.PENDING, unscheduled="full"
    )
    problems = find_problems([pod], None)
    forming = JobSummary(state="forming", steps=9, replicas_wanted=2)
    counts = count_pods([pod], None, 1, 0)
    job = seen(summary=forming, pods=counts, problems=problems)

    assert problems == (("Unschedulable", "pod j-0: full"),)
    assert derive_state(job) == (State.PENDING, "pods ready: 0 of 1: pod j-0: full")
    first, *rest = find_problems([pod], None, taken="Service n/j is not this job's own")
    assert first == ("NameTaken", "Service n/j is not this job's own")
    assert tuple(rest) == problems


@pytest.mark.parametrize("state", [State.COMPLETE, State.FAILED])
def test_a_new_operator_that_does_not_reach_the_api_does_not_take_back_an_end(
    state: State,
) -> None:
    job = seen(summary=None, api_problem="away", before=(state, "as it was"))

    assert derive_state(job) == (state, "as it was")
    assert shown(job)[state.value][0] is True


def test_a_new_operator_that_does_not_reach_the_api_does_not_call_a_running_job_pending() -> None:
    job = seen(summary=None, initialized=False, api_problem="away", before=(State.RUNNING, ""))

    assert derive_state(job) == (State.RUNNING, "away")
    assert shown(job)["Initialized"] == (None, "ApiUnreachable")
