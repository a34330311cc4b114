"""Status, Events and settings, from values."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.core.wire.test_messages import FOUND
from tests.operator.test_builders import view

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.job.model_sizes import LLAMA
from mainstay_core.job.spec import TrainingJob, parse_training_job
from mainstay_core.job.status import TrainingJobStatus
from mainstay_core.pool.conditions import ObservedJob
from mainstay_core.pool.losses import Loss, LossCause
from mainstay_core.pool.observed import ContainerEnd, ObservedPod
from mainstay_core.pool.repair import Repair, RepairCounts
from mainstay_core.wire.findings import FindingsPage, KeptFinding
from mainstay_core.wire.page import JobPage
from mainstay_core.wire.recoveries import read_recovery
from mainstay_operator import narrator
from mainstay_operator.events import MAX_MESSAGE, Note, build_event
from mainstay_operator.kube import Bucket
from mainstay_operator.ownership import TakenName
from mainstay_operator.settings import parse
from mainstay_operator.status import PodRecord, build_status, is_urgent, read_state, summary_of

RECOVERY: dict[str, Any] = {
    "quorum": "q2-ab",
    "method": "mask",
    "exact": True,
    "fault": "rank r1.s0 on demo-3/0: killed",
    "reason": "every stage has another cell",
    "from_step": 7,
    "lost_steps": 0,
    "started_at_s": 1000.0,
    "first_commit_after_s": 0.5,
    "done": True,
    "detect_s": 0.1,
}
SUMMARY: dict[str, Any] = {
    "state": "running",
    "reason": "",
    "quorum": {"id": 2, "nonce": "ab"},
    "all_reduce_stack": 2,
    "replicas": {"whole": 1, "wanted": 2, "min": 1, "lanes": 2, "followers": 1},
    "training": {"step": 8, "steps": 60, "loss": 2.5, "step_seconds": 0.1234, "ettr": 0.9},
    "recovery": {"active": [], "last": RECOVERY, "counts": {"mask": 1}},
    "checkpoint": {"step": 0, "problem": ""},
    "entry": "blocks",
    "protections": [{"name": "mask", "given": True, "why": "others go on"}],
}


def loss(index: int, cause: LossCause = LossCause.FAILED, node: str = "n1") -> Loss:
    return Loss(
        uid=PodUid(f"u{index}"),
        name=f"demo-{index}",
        node=node,
        cause=cause,
        evidence=f"pod demo-{index} failed: code 1",
        at_s=1000.0,
    )


def test_the_status_is_what_the_schema_says() -> None:
    seen = ObservedJob(initialized=True, summary=summary_of(codec.decode(JobPage, SUMMARY)))
    record = PodRecord(made=6).with_losses([loss(3)])

    status = build_status(view(), seen, codec.decode(JobPage, SUMMARY), record, 2000.0)

    TrainingJobStatus.model_validate_json(json.dumps(status))
    assert status["state"] == "Running"
    assert status["training"]["stepSeconds"] == "0.123"
    assert status["recovery"]["total"] == 1
    assert status["recovery"]["last"]["seconds"] == {"detect": "0.1"}
    assert PodRecord.of_status(status) == record


STORES: dict[str, Any] = {
    "window": {"first": 8, "length": 4},
    "lag": 3,
    "kinds": [{"kind": "state", "num_segments": 2, "size_bytes": 3 << 20}],
    "memory_bytes": 64 << 20,
    "used_bytes": 3 << 20,
    "num_positions": 2,
    "num_covered": 2,
    "num_survive_pod": 1,
    "num_survive_domain": 0,
    "replay_steps": 5,
    "coverage": "the loss of 1 pod is not survived: demo-1 (s1)",
    "log": "boundary",
    "ordering": "Popularity",
}


def test_the_status_says_which_losses_are_survived_by_what_pods_hold() -> None:
    page = codec.decode(JobPage, SUMMARY | {"snapshots": True, "stores": STORES})
    status = build_status(view(), ObservedJob(initialized=True), page, PodRecord(), 2000.0)

    TrainingJobStatus.model_validate_json(json.dumps(status))
    shown = status["protection"]
    assert shown["snapshotLagSteps"] == 3
    assert shown["snapshots"] == {
        "window": "8 to 11",
        "ordering": "Popularity",
        "log": "boundary",
        "memory": "3.0 MiB of 64.0 MiB",
        "kinds": [{"kind": "state", "size": "3.0 MiB"}],
        "positions": 2,
        "covered": 2,
        "survivePod": 1,
        "surviveDomain": 0,
        "replaySteps": 5,
        "coverage": "the loss of 1 pod is not survived: demo-1 (s1)",
    }


def test_the_status_of_a_job_without_snapshots_has_no_word_of_them() -> None:
    page = codec.decode(JobPage, SUMMARY)
    status = build_status(view(), ObservedJob(initialized=True), page, PodRecord(), 2000.0)
    assert "snapshot" not in json.dumps(status).lower()


def test_wrong_results_are_one_event_for_each_trainer_and_verdict_and_coverage_is_said() -> None:
    page = codec.decode(JobPage, SUMMARY | {"entry": "blocks", "dmr_coverage": "naive 100 %"})
    told = replace(FOUND, trainer="demo-1/1", at_s=1000.0)
    again = replace(told, number=told.number + 1)
    other = replace(told, incarnation=Incarnation("b"), number=0)
    kept = tuple(KeptFinding(place=n, told=t) for n, t in enumerate((told, again, other), 1))
    page = replace(page, findings=FindingsPage(counts={"primary": 3}, findings=kept))

    status = build_status(view(), ObservedJob(initialized=True), page, PodRecord(), 2000.0)
    notes = narrator.of_findings(page.findings, 0.0)

    TrainingJobStatus.model_validate_json(json.dumps(status))
    assert status["protection"]["dmrCoverage"] == "naive 100 %"
    assert [note.reason for note in notes] == ["WrongResult"] * 3
    assert notes[0].key == notes[1].key != notes[2].key
    assert notes[0].message.startswith("step 4 of r1.s0.i0 on demo-1/1: two executions of aten.mm")
    assert narrator.of_findings(page.findings, 1001.0) == narrator.of_findings(None, 0.0) == []


def test_a_state_that_came_back_after_a_fork_is_one_normal_event() -> None:
    back = {
        "trainer": "demo-1/0",
        "incarnation": "a",
        "place": "stage 1",
        "step": 7,
        "reason": "it is of lineage 0, and others have begun lineage 1 since",
        "at_s": 1000.0,
    }
    page = codec.decode(JobPage, SUMMARY | {"refused_states": [back, back | {"step": 9}]})

    one, other = narrator.of_page(page, 0.0)

    assert (one.reason, one.warning, one.key) == ("StateRefused", False, "a/stage 1/7")
    assert one.key != other.key
    assert one.message == (
        "trainer demo-1/0 has come back with the state of stage 1 after 7 steps, which is refused, "
        "and of which no bit is used: it is of lineage 0, and others have begun lineage 1 since"
    )
    assert narrator.of_page(page, 1001.0) == []


CRASH: dict[str, Any] = {
    "crash": {
        "type": "OSError",
        "message": "no such file\nlook at the mount",
        "frames": ["train.py:9 in main", "data.py:3 in read"],
        "rank": {"replica": 1, "stage": 0},
        "quorum": {"id": 2, "nonce": "ab"},
        "step": 4,
    },
    "trainer": "demo-1/0",
    "at_s": 1000.0,
    "times": 2,
}


def test_the_exception_that_ends_trainers_is_in_the_status_and_in_one_event() -> None:
    page = codec.decode(JobPage, SUMMARY | {"crash": CRASH})
    seen = ObservedJob(initialized=True, summary=summary_of(page))

    status = build_status(view(), seen, page, PodRecord(), 2000.0)
    (note,) = narrator.of_crash(page.crash, 0.0)
    again = codec.decode(JobPage, SUMMARY | {"crash": {**CRASH, "times": 3, "at_s": 1010.0}})

    TrainingJobStatus.model_validate_json(json.dumps(status))
    assert status["crash"] == {
        "type": "OSError",
        "message": "no such file\nlook at the mount",
        "frames": ["train.py:9 in main", "data.py:3 in read"],
        "rank": "r1.s0.i0",
        "step": 4,
        "trainer": "demo-1/0",
        "time": "1970-01-01T00:16:40Z",
        "times": 2,
    }
    assert note.message.splitlines() == [
        "trainer demo-1/0: OSError: no such file (r1.s0.i0, step 4, data.py:3 in read)",
        "no such file",
        "look at the mount",
        "train.py:9 in main",
        "data.py:3 in read",
    ]
    assert narrator.of_crash(again.crash, 0.0)[0].key == note.key
    assert narrator.of_crash(page.crash, 2000.0) == narrator.of_crash(None, 0.0) == []


def test_what_the_operator_ended_is_no_loss() -> None:
    record = PodRecord().with_losses([loss(1, LossCause.ENDED), loss(2, LossCause.EVICTED)])

    assert (record.counted, record.uncounted) == (0, 1)


def test_only_conditions_and_state_are_urgent() -> None:
    base = {"state": "Running", "conditions": [{"type": "Ready", "status": "True"}]}

    assert not is_urgent({**base, "training": {"step": 1}}, {**base, "training": {"step": 2}})
    assert is_urgent({**base, "state": "Recovering"}, base)


def test_a_restarted_container_is_told_unless_it_was_told_to_end() -> None:
    def seen(container: str, code: int, reason: str) -> ObservedPod:
        end = ContainerEnd(container=container, restarts=1, code=reason, exit_code=code)
        return ObservedPod(uid=PodUid("u"), name="j-0", index=0, node="n", container_ends=(end,))

    (note,) = narrator.of_container_ends([seen("trainer", 137, "OOMKilled")], {})
    assert note.reason == "OOMKilled"
    assert note.message.endswith("ended with code 137 (OOMKilled) and is started again (restart 1)")
    assert narrator.of_container_ends([seen("supervisor", 0, "Completed")], {}) == []
    assert len(narrator.of_container_ends([seen("supervisor", 1, "Error")], {})) == 1


def test_a_recovery_is_told_with_rank_method_reason_and_times() -> None:
    recovery = read_recovery(RECOVERY | {"quorum": {"id": 2, "nonce": "ab"}})
    began, ended = narrator.of_recoveries([recovery], 0.0)

    assert began.reason == "RecoveryMask"
    assert "rank r1.s0 on demo-3/0" in began.message
    assert "every stage has another cell" in began.message
    assert ended.reason == "Recovered"
    assert "detect 0.100 s" in ended.message
    assert narrator.of_recoveries([recovery], 2000.0) == []


def test_a_replay_is_told_in_the_sentence_of_the_status_and_the_timeline() -> None:
    replay = {
        "stage": 1, "inner": 0, "kind": "gradients", "first": 8, "last": 11, "version": 14,
        "planned_steps": 6, "steps": 6, "seconds": 0.4125,
    }  # fmt: skip
    reason = (
        "stage 1 has no living cell with a state; s1 made anew from gradients and the states of "
        "versions 8 to 11: 6 steps replayed (6 planned) in 0.412 s"
    )
    told = RECOVERY | {
        "quorum": {"id": 2, "nonce": "ab"},
        "method": "replay",
        "reason": reason,
        "replays": [replay],
    }
    _, ended = narrator.of_recoveries([read_recovery(told)], 0.0)
    assert ended.message.endswith(f"steps lost: 0; {reason}")


def test_a_rack_s_loss_is_one_event_per_cause_and_node() -> None:
    notes = narrator.of_losses([*(loss(i) for i in range(12)), loss(20, LossCause.PREEMPTED, "n2")])

    assert [n.reason for n in notes] == ["PodFailed", "PodPreempted"]
    assert "12 pods on node n1" in notes[0].message
    assert "and 4 more" in notes[0].message


def test_a_name_that_others_have_is_told_once() -> None:
    taken = TakenName(kind="Service", namespace="n", name="mtj-demo-u-1")

    (note,) = narrator.of_taken_names([taken], ())
    assert note.warning
    assert note.message.startswith("Service n/mtj-demo-u-1 is not this job's own")
    assert narrator.of_taken_names([taken], (taken,)) == []


def status_of(state: str, code: str = "", message: str = "", **fields: Any) -> dict[str, Any]:
    """A status as it is written."""
    failed = {"type": "Failed", "status": str(state == "Failed")}
    failed |= {"reason": code or "NotFailed", "message": message}
    return {"state": state, "reason": message, "ready": "4/4", "conditions": [failed], **fields}


def progress(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    return [(note.reason, note.message) for note in narrator.of_progress(before, after)]


def test_the_way_of_a_job_is_told() -> None:
    running = status_of("Running", quorum={"replicas": 2, "replicasWanted": 2}, startTime="t")
    started = ("Started", "it trains: replicas 2 of 2, pods ready 4/4")
    for before in ({}, status_of("Pending"), status_of("Suspended")):
        assert progress(before, running) == [started]
    assert progress(status_of("Recovering"), running) == []
    assert progress(running, status_of("Waiting")) == progress(running, running) == []
    # A job that a fault meets in its first second has started all the same.
    assert progress({}, running | {"state": "Recovering"}) == [started]

    complete = status_of("Complete", message="all 60 steps are committed")
    assert progress(running, complete) == [("Complete", "all 60 steps are committed")]
    assert progress(complete, complete) == []

    late = status_of("Failed", "DeadlineExceeded", "too late")
    assert progress(running, late) == [("Failed", "DeadlineExceeded: too late")]
    assert progress(late, status_of("Failed", "Stopped", "it was stopped")) == []


def test_the_sizes_of_a_job_s_ranks_are_told() -> None:
    spec = {
        "training": {"steps": 1, "lanes": 2},
        "parallelism": {"stages": 3},
        "workload": {"entrypoint": LLAMA, "config": {}},
    }
    job = {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "sized"},
        "spec": spec,
    }
    (note,), ranks = narrator.of_sizes(parse_training_job(job))
    assert (note.reason, note.warning, len(ranks)) == ("Sizes", False, 3)
    assert note.message.startswith("of the 3 ranks of a replica the one that holds the most: ")
    assert len(note.message) < MAX_MESSAGE

    assert "snapshots" not in note.message
    assert "checks" not in note.message

    beside = {
        **spec,
        "spares": {"replicas": 1},
        "snapshots": {"enabled": True},
        "runtime": {"recompute": True},
        "detection": {"dmr": {"mode": "Full", "plan": "Dynamic", "memory": "64Mi"}},
    }
    (note,), _ = narrator.of_sizes(parse_training_job({**job, "spec": beside}))
    assert "; of snapshots all pods together send each other " in note.message
    assert note.message.endswith("; checks that wait keep up to 64.0 MiB more in each rank")
    assert len(note.message) < MAX_MESSAGE

    spec["parallelism"] = {"stages": 11}
    (note,), ranks = narrator.of_sizes(parse_training_job(job))
    assert (note.warning, ranks) == (True, ())
    assert "spec.parallelism.stages" in note.message


def test_a_job_that_is_scaled_down_below_its_snapshots_is_told_of_and_goes_on() -> None:
    def job(replicas: int, **snapshots: Any) -> TrainingJob:
        spec = {
            "training": {"steps": 1, "lanes": 8},
            "parallelism": {"replicas": replicas},
            "workload": {"entrypoint": LLAMA, "config": {"layers": 24}},
            "spares": {"replicas": 2},
            "snapshots": {"enabled": True, **snapshots},
        }
        head = {"apiVersion": "mainstay.dev/v1alpha1", "kind": "TrainingJob"}
        return parse_training_job({**head, "metadata": {"name": "short"}, "spec": spec})

    kept = job(8).plan_snapshots()
    assert kept is not None
    memory = str(kept.memory_bytes)
    assert narrator.of_memory(job(8, memory=memory)) == narrator.of_memory(job(2)) == []
    (note,) = narrator.of_memory(job(2, memory=memory))
    assert (note.reason, note.warning) == ("SnapshotMemory", True)
    assert "with 2 replicas a pod keeps" in note.message
    assert narrator.of_sizes(job(2, memory=memory), has_begun=True) == ([note], ())
    assert note in narrator.of_sizes(job(2, memory=memory))[0]


def test_each_refusal_of_a_specification_is_told() -> None:
    first = status_of("Failed", "InvalidSpec", "spec.training.lanes: is 0")
    assert progress({}, first) == [("InvalidSpec", "spec.training.lanes: is 0")]
    second = status_of("Failed", "InvalidSpec", "spec.workload: is missing")
    assert progress(first, second) == [("InvalidSpec", "spec.workload: is missing")]
    keys = {note.key for at in (first, second) for note in narrator.of_progress({}, at)}
    assert len(keys) == 2
    assert progress(first, status_of("Running"))[0][0] == "Started"

    (note,) = narrator.of_refusal("spec.spares: is -1", 3)
    assert (note.reason, note.warning) == ("ChangeRefused", True)
    assert note.message == "spec.spares: is -1; the job goes on as it was"
    assert narrator.of_refusal("", 3) == []


def test_a_refused_specification_is_no_end_that_lasts() -> None:
    """Mended while the api is away, the job was Failed still, and its TTL could have deleted it."""
    failed = status_of("Failed", "InvalidSpec", "spec.training.lanes: is 0", completionTime="t")
    assert read_state(failed) is None
    late = status_of("Failed", "DeadlineExceeded", "too late")
    assert read_state(late) == ("Failed", "too late")

    seen = ObservedJob(api_problem="the api is not reached", before=read_state(failed))
    status = build_status(replace(view(), status=failed), seen, None, PodRecord(), 2000.0)
    assert (status["state"], status.get("completionTime")) == ("Pending", None)


@pytest.mark.parametrize(
    "change",
    [
        {"recovery": {"allowApproximate": False, "approximateAfterLostSteps": 3}},
        {
            "pipeline": {"order": "Swapped", "microBatches": 2},
            "parallelism": {"stages": 2, "replicas": 1},
            "recovery": {"approximate": {"guards": 2}},
        },
    ],
    ids=["the permission is switched off", "it has fewer replicas than guards"],
)
def test_what_an_api_server_lets_change_in_a_running_job_can_be_used(
    change: dict[str, Any],
) -> None:
    """An operator that starts then still knows the job, and repairs its pods."""
    assert view(**change).job is not None


def test_a_change_that_cannot_be_used_changes_nothing() -> None:
    good = view()
    bad = replace(good, generation=2, manifest={"spec": {}}, job=None, invalid="no")

    kept = bad.after(good)
    assert (kept.job, kept.manifest, kept.spec) == (good.job, good.manifest, good.spec)
    assert (kept.generation, kept.invalid) == (2, "no")
    assert replace(bad, generation=3).after(kept).job is good.job
    # Never seen before the change: nothing is known of it.
    assert bad.after(bad) is bad
    mended = replace(good, generation=4)
    assert mended.after(kept) is mended


def test_the_same_note_is_the_same_event() -> None:
    note = Note(reason="PodsMade", message="5 pods", key="u1")
    first, second = (build_event(view(), note, at_s, "a") for at_s in (1.0, 2.0))

    assert first["metadata"]["name"] == second["metadata"]["name"]
    other = build_event(view(), Note(reason="PodsMade", message="5 pods", key="u2"), 1.0, "a")
    assert other["metadata"]["name"] != first["metadata"]["name"]


def test_requests_are_bounded_in_the_long_run() -> None:
    bucket = Bucket(qps=10.0, burst=5)

    waits = [bucket.take(100.0) for _ in range(7)]

    assert waits[:5] == [0.0] * 5
    assert waits[5:] == pytest.approx([0.1, 0.2])
    assert bucket.take(200.0) == 0.0


def test_settings_name_what_is_wrong() -> None:
    enough = {
        "MAINSTAY_API_URL": "http://a",
        "MAINSTAY_AGENT_IMAGE": "x",
        "MAINSTAY_TOKEN": "t",
    }
    settings = parse([], {**enough, "MAINSTAY_NAMESPACES": "a, b", "MAINSTAY_WATCH_NODES": "false"})
    assert settings.namespace_list == ("a", "b")
    assert settings.watch_nodes is False
    for wrong, name in (
        ({**enough, "MAINSTAY_QPS": "many"}, "MAINSTAY_QPS"),
        ({**enough, "MAINSTAY_WATCH_NODES": "maybe"}, "MAINSTAY_WATCH_NODES"),
        ({**enough, "MAINSTAY_TOKEN": ""}, "MAINSTAY_TOKEN_FILE"),
        ({**enough, "MAINSTAY_RESYNC_S": "0"}, "MAINSTAY_RESYNC_S"),
        ({**enough, "MAINSTAY_RESYNC_S": "200"}, "MAINSTAY_MAX_IDLE_S"),
        ({**enough, "MAINSTAY_LEASE": "no-namespace"}, "MAINSTAY_LEASE"),
        ({**enough, "MAINSTAY_LEASE_RENEW_S": "15"}, "MAINSTAY_LEASE_DURATION_S"),
        ({**enough, "MAINSTAY_LEASE_DURATION_S": "601"}, "MAINSTAY_LEASE_DURATION_S"),
        ({**enough, "MAINSTAY_LEASE_RETRY_S": "6"}, "MAINSTAY_LEASE_RETRY_S"),
        ({}, "MAINSTAY_API_URL"),
    ):
        with pytest.raises(InvalidSpecError, match=name):
            parse([], wrong)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})

    shown = capsys.readouterr().out
    assert "MAINSTAY_FORCE_DELETE_S" in shown
    assert "MAINSTAY_RESYNC_S" in shown


def test_a_budget_of_repairs_that_is_used_up_is_told_of_once() -> None:
    enough = Repair()
    used_up = Repair(counts=RepairCounts(not_made=2), reason="8 repairs in 600 s")

    def told(repair: Repair, before: Repair | None) -> list[str]:
        notes = narrator.of_repair(repair, [], [], before=before, told=())
        return [note.reason for note in notes]

    assert told(used_up, None) == told(used_up, enough) == ["ReplacementsExhausted"]
    assert told(used_up, used_up) == told(enough, used_up) == []


def test_an_approximate_job_says_so_in_status_condition_and_event() -> None:
    last = RECOVERY | {"method": "approximate", "exact": False, "approximate_since": 7}
    training = SUMMARY["training"] | {"approximate_since": 7}
    made = "step 7: stage 1 is made anew from 0.5 of stage 0, 0.5 of stage 2"
    recovery = {"active": [], "last": last, "counts": {"approximate": 1}}
    told = SUMMARY | {"training": training, "recovery": recovery, "made_anew": made}
    page = codec.decode(JobPage, told)
    seen = ObservedJob(initialized=True, summary=summary_of(page))

    status = build_status(view(), seen, page, PodRecord(), 2000.0)

    TrainingJobStatus.model_validate_json(json.dumps(status))
    assert status["training"]["approximateSince"] == 7
    assert status["recovery"]["last"]["approximateSince"] == 7
    (exact,) = (c for c in status["conditions"] if c["type"] == "Exact")
    assert (exact["status"], exact["reason"]) == ("False", "StageReinitialised")
    assert exact["message"] == f"approximate since step 7: {made}"
    quorum = {"quorum": {"id": 2, "nonce": "ab"}}
    record = read_recovery(last | quorum | {"reason": made})
    begun, anew, over = narrator.of_recoveries([record], 0.0)
    assert (begun.reason, anew.reason, over.reason) == (
        "RecoveryApproximate",
        "StageReinitialised",
        "Recovered",
    )
    assert anew.warning
    assert anew.message == f"approximate since step 7: {RECOVERY['fault']}: {made}"


def test_an_exact_job_has_no_word_of_an_approximate_one() -> None:
    page = codec.decode(JobPage, SUMMARY)
    seen = ObservedJob(initialized=True, summary=summary_of(page))
    status = build_status(view(), seen, page, PodRecord(), 2000.0)
    assert "approximate" not in json.dumps(status).lower()
