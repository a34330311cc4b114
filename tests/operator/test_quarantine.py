"""Quarantine: what the operator makes of recoveries that name who computed wrongly."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.operator.test_builders import view
from tests.worlds.served_namespace import Job, ServedNamespace, manifest, serve_namespace, wait

from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation, PodUid, QuorumId, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.job.status import TrainingJobStatus
from mainstay_core.pool.observed import ObservedNode, ObservedPod
from mainstay_core.pool.quarantine import QuarantineMode, plan_quarantine
from mainstay_core.wire.findings import FindingsPage, KeptFinding, ToldFinding
from mainstay_core.wire.plan import Method
from mainstay_core.wire.recoveries import Recovery, read_recovery
from mainstay_operator import quarantine
from mainstay_operator.quarantine import TAINT_KEY

PODS = {PodUid("u1"): ObservedPod(uid=PodUid("u1"), name="demo-1", index=1, node="n1")}
U1 = Slot(pod=PodUid("u1"), index=0)


def recovery(number: int, *differing: Slot) -> Recovery:
    return Recovery(
        fault="a collective failed",
        method=Method.REFORM,
        exact=True,
        reason="no loss is known",
        quorum=QuorumId(id=number, nonce="ab"),
        from_step=0,
        started_at_s=1000.0 + number,
        differing=differing,
    )


def test_what_is_known_of_nodes_outlives_the_operator() -> None:
    asked = view(recovery={"quarantine": {"mode": "Avoid"}})
    policy = quarantine.policy_of(asked)
    found = quarantine.read_mismatches([recovery(2, U1), recovery(3, U1), recovery(4)], PODS)
    assert [(m.node, m.pod, m.quorum) for m in found] == [
        ("n1", "demo-1", "q2-ab"),
        ("n1", "demo-1", "q3-ab"),
    ]
    plan = plan_quarantine(quarantine.of_status({}).with_mismatches(found), ["n1"], policy, 1010)
    shown = quarantine.show(plan.state)
    TrainingJobStatus.model_validate_json(json.dumps(shown))
    assert quarantine.of_status(shown) == plan.state
    assert quarantine.show(quarantine.of_status({})) == {}
    (note,) = quarantine.of_plan(plan, policy.mode)
    assert note.message == "node n1: 2 mismatches within 86400 s: the job stays off it"


def test_a_mismatch_that_an_api_of_the_version_before_tells_in_words_counts_too() -> None:
    told = codec.encode(recovery(2))
    del told["differing"], told["format"]
    told |= told.pop("times")
    told["fault"] = "parameters of r1.s0.i0 on u1/0 differ from the rest of the stage"
    (found,) = quarantine.read_mismatches([read_recovery(told)], PODS)
    assert (found.node, found.quorum) == ("n1", "q2-ab")


def finding(number: int, step: int, verdict: Verdict, pod: str = "u1") -> KeptFinding:
    found = Finding(
        step=step,
        slot=Slot(pod=PodUid(pod), index=0),
        in_pass=Pass.WEIGHT,
        ordinal=number,
        operator="aten.mm",
        num_elements=1,
        verdict=verdict,
        remedy=Remedy.REPAIR,
        reason="two of three agree",
    )
    told = ToldFinding(
        finding=found, incarnation=Incarnation("life"), number=number, at_s=1000.0 + number
    )
    return KeptFinding(place=number + 1, told=told)


def test_what_checks_find_on_a_pod_in_a_step_counts_once() -> None:
    drawn = (
        (3, Verdict.PRIMARY_HIT, "u1"),
        (3, Verdict.CHECKER_HIT, "u1"),
        (4, Verdict.WIRE, "u1"),
        (5, Verdict.UNRELIABLE, "u1"),
        (5, Verdict.PRIMARY_HIT, "of an unknown node"),
    )
    page = FindingsPage(findings=tuple(finding(n, *one) for n, one in enumerate(drawn)))
    found = quarantine.read_findings(page, PODS)
    assert quarantine.read_findings(None, PODS) == []
    state = quarantine.of_status({}).with_mismatches(found).with_mismatches(found)
    assert [(m.node, m.pod, m.step) for m in state.mismatches] == [
        ("n1", "demo-1", 3),
        ("n1", "demo-1", 5),
    ]
    shown = quarantine.show(state)
    TrainingJobStatus.model_validate_json(json.dumps(shown))
    assert quarantine.of_status(shown) == state
    policy = quarantine.policy_of(view(recovery={"quarantine": {"mode": "Avoid"}}))
    assert plan_quarantine(state, ["n1"], policy, 1010).state.avoided == ("n1",)


def test_pods_on_a_node_in_quarantine_hand_their_work_over() -> None:
    nodes = {name: ObservedNode(name=name) for name in ("n1", "n2")}
    shown = {
        "quarantine": {
            "nodes": [
                {"name": "n1", "reason": "r", "since": "2026-01-02T03:04:05Z"},
                {"name": "n2", "reason": "r", "since": "2026-01-02T03:04:05Z", "dryRun": True},
            ]
        }
    }
    seen = quarantine.without(nodes, quarantine.of_status(shown))
    assert seen is not None
    assert [node.cordoned for node in seen.values()] == [True, False]
    assert quarantine.without(None, quarantine.of_status(shown)) is None


def test_a_dry_run_says_what_would_be_done() -> None:
    policy = quarantine.policy_of(view(recovery={"quarantine": {"mode": "DryRun"}}))
    found = quarantine.read_mismatches([recovery(2, U1), recovery(3, U1)], PODS)
    plan = plan_quarantine(quarantine.of_status({}).with_mismatches(found), ["n1"], policy, 1010)
    (note,) = quarantine.of_plan(plan, QuarantineMode.DRY_RUN)
    assert note.reason == "NodeWouldBeQuarantined"
    assert note.message.endswith("it would be put in quarantine (dry run)")


@pytest.fixture
def served(control_plane: Any, tmp_path: Path) -> Iterator[ServedNamespace]:
    environment = {"MAINSTAY_QUARANTINE_NODES": "true", "MAINSTAY_RESYNC_S": "0.5"}
    with serve_namespace(control_plane, tmp_path, **environment) as made:
        yield made


def differ(job: Job, pod: str, **told: Any) -> None:
    """The vote of a step finds that a pod's state is not that of the others; they all park."""
    plan = job.plan()
    (bad,) = [m for m in plan["members"] if m["slot"]["pod"] == pod]
    words = f"parameters of r1.s0.i0 on {pod}/0 differ from the rest of the stage"
    told = told or {"differing": [bad["slot"]]}
    for member in plan["members"]:
        job.fact(
            "parked",
            member["slot"]["pod"],
            member["incarnation"],
            quorum=plan["quorum"],
            evidence=words,
            **told,
        )
    wait(lambda: job.plan()["quorum"]["id"] > plan["quorum"]["id"], "a new plan")
    job.settle()
    assert bad["slot"]["index"] == 0


def test_a_node_that_computes_wrongly_again_is_tainted_and_left(
    served: ServedNamespace,
) -> None:
    body = manifest(
        "wrong",
        training={"steps": 60, "seed": 1, "lanes": 3, "shardsPerLane": 1},
        parallelism={"stages": 1},
        spares={"replicas": 0},
        recovery={"quarantine": {"mode": "Taint", "afterMismatches": 3}},
        detection={"dmr": {"mode": "Full"}},
    )
    job = served.submit(body)
    names = [f"wrong-{i}" for i in range(3)]
    pods = job.wait_pods(*names)
    for i, pod in enumerate(pods):
        served.make_node(f"quarantine-{i}")
        job.bind(pod, f"quarantine-{i}")
    pods = job.run(*names)
    bad = pods[1]["metadata"]["uid"]
    differ(job, bad, format=1)
    once = job.wait_status(
        lambda s: (s.get("quarantine") or {}).get("mismatches"), "the first mismatch"
    )
    assert once["quarantine"]["nodes"] == []
    found = finding(0, 7, Verdict.PRIMARY_HIT, bad).told
    found = replace(found, at_s=time.time())
    job.agent("findings", {"findings": [codec.encode(found)]})
    (told,) = wait(lambda: served.events("WrongResult"), "the Event of the finding")
    assert "two executions of aten.mm (#0) in the weight pass differ" in told["message"]
    differ(job, bad)
    status = job.wait_status(
        lambda s: (s.get("quarantine") or {}).get("nodes"), "a node in quarantine"
    )
    (node,) = status["quarantine"]["nodes"]
    assert (node["name"], node["reason"]) == ("quarantine-1", "3 mismatches within 86400 s")

    def tainted(node: dict[str, Any] | None) -> bool:
        taints = (node or {}).get("spec", {}).get("taints") or ()
        return any(t["key"] == TAINT_KEY and t["effect"] == "NoSchedule" for t in taints)

    served.kube.wait("/api/v1/nodes/quarantine-1", tainted, "the taint")
    wait(lambda: served.events("NodeQuarantined"), "the Event")
    # Its work is to be handed over, and whoever takes its place is kept off the node.
    wait(lambda: bad in job.wanted()["leaving"], "the pod leaves")
    made = wait(
        lambda: [p for p in job.pods() if p["metadata"]["name"] not in names], "another pod"
    )
    affinity = made[0]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (avoided,) = term["matchExpressions"]
    assert avoided == {
        "key": "kubernetes.io/hostname",
        "operator": "NotIn",
        "values": ["quarantine-1"],
    }
    # Somebody has looked at it.
    job.patch(recovery={"quarantine": {"trustedNodes": ["quarantine-1"]}})
    job.wait_status(
        lambda s: (s.get("quarantine") or {}).get("nodes") == [], "no node in quarantine"
    )
    (released,) = wait(lambda: served.events("NodeReleased"), "the Event")
    assert "kubectl taint nodes quarantine-1 mainstay.dev/quarantine-" in released["message"]
    for i in range(3):
        served.kube.delete(f"/api/v1/nodes/quarantine-{i}")
