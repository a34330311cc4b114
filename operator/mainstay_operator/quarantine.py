"""Quarantine of nodes: reads recoveries and findings, plans with core, acts on nodes and status.

The functions at the top turn replies and the status into values and back; they are pure.
The class below them carries a plan out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mainstay_core.base.ids import PodUid
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.pool.observed import ObservedNode, ObservedPod
from mainstay_core.pool.quarantine import (
    Mismatch,
    Quarantined,
    QuarantineMode,
    QuarantinePlan,
    QuarantinePolicy,
    QuarantineState,
    plan_quarantine,
)
from mainstay_core.wire.findings import FindingsPage
from mainstay_core.wire.recoveries import Recovery
from mainstay_operator.actuator import Actuator
from mainstay_operator.events import Note
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.resources import JobView, parse_time, show_time

TAINT_KEY = "mainstay.dev/quarantine"
TAINT_EFFECT = "NoSchedule"


def policy_of(view: JobView) -> QuarantinePolicy:
    """Return what a job asks for."""
    assert view.job is not None
    asked = view.job.spec.recovery.quarantine
    return QuarantinePolicy(
        mode=QuarantineMode(asked.mode),
        after_mismatches=asked.after_mismatches,
        window_s=float(asked.window_seconds),
        max_nodes_percent=asked.max_nodes_percent,
        trusted=frozenset(asked.trusted_nodes),
    )


def read_mismatches(
    recoveries: Iterable[Recovery], pods: Mapping[PodUid, ObservedPod]
) -> list[Mismatch]:
    """Return the wrong results that recoveries name, of pods whose node is known."""
    found = []
    for recovery in recoveries:
        for uid in sorted({slot.pod for slot in recovery.differing}):
            pod = pods.get(uid)
            if pod is not None and pod.node:
                found.append(
                    Mismatch(
                        at_s=recovery.started_at_s,
                        node=pod.node,
                        pod=pod.name,
                        quorum=str(recovery.quorum),
                    )
                )
    return found


def read_findings(page: FindingsPage | None, pods: Mapping[PodUid, ObservedPod]) -> list[Mismatch]:
    """Return the wrong results that checks found on pods whose node is known."""
    found = []
    for kept in page.findings if page is not None else ():
        told, pod = kept.told, pods.get(kept.told.finding.slot.pod)
        # Which of a device's executions was wrong is all the same; bytes may change on a cable.
        computed = told.finding.verdict is not Verdict.WIRE
        if computed and pod is not None and pod.node:
            found.append(
                Mismatch(at_s=told.at_s, node=pod.node, pod=pod.name, step=told.finding.step)
            )
    return found


def of_status(status: Mapping[str, Any]) -> QuarantineState:
    """Return what a status remembers: a new operator goes on from there."""
    shown = status.get("quarantine") or {}
    return QuarantineState(
        mismatches=tuple(
            Mismatch(
                at_s=parse_time(m["time"]),
                node=m["node"],
                pod=m["pod"],
                quorum=m.get("quorum", ""),
                step=m.get("step"),
            )
            for m in shown.get("mismatches") or ()
        ),
        nodes=tuple(
            Quarantined(
                node=q["name"],
                since_s=parse_time(q["since"]),
                reason=q["reason"],
                dry_run=bool(q.get("dryRun", False)),
            )
            for q in shown.get("nodes") or ()
        ),
    )


def show(state: QuarantineState) -> dict[str, Any]:
    """Return the status' field; empty if there is nothing to show."""
    if not state.mismatches and not state.nodes:
        return {}
    return {
        "quarantine": {
            "nodes": [
                {
                    "name": q.node,
                    "reason": q.reason,
                    "since": show_time(q.since_s),
                    "dryRun": q.dry_run,
                }
                for q in state.nodes
            ],
            "mismatches": [
                {
                    "time": show_time(m.at_s),
                    "node": m.node,
                    "pod": m.pod,
                    **({"quorum": m.quorum} if m.step is None else {"step": m.step}),
                }
                for m in state.mismatches
            ],
        }
    }


def of_plan(plan: QuarantinePlan, mode: QuarantineMode) -> list[Note]:
    """Return what is told of a plan."""
    does = {
        QuarantineMode.DRY_RUN: "it would be put in quarantine (dry run)",
        QuarantineMode.AVOID: "the job stays off it",
        QuarantineMode.TAINT: f"it gets the taint {TAINT_KEY}:{TAINT_EFFECT}",
    }
    notes = [
        Note(
            reason="NodeWouldBeQuarantined" if q.dry_run else "NodeQuarantined",
            message=f"node {q.node}: {q.reason}: {does[mode]}",
            key=q.node,
            warning=True,
        )
        for q in plan.new
    ]
    notes += [
        Note(
            reason="NodeReleased",
            message=f"node {q.node} is out of quarantine: {why}; a taint {TAINT_KEY} stays until "
            f"somebody removes it: kubectl taint nodes {q.node} {TAINT_KEY}-",
            key=f"{q.node}/{q.since_s:.0f}",
        )
        for q, why in plan.released
        if not q.dry_run
    ]
    return notes + [
        Note(
            reason="QuarantineLimit",
            message=f"node {node} is left alone: {why}",
            key=node,
            warning=True,
        )
        for node, why in plan.spared
    ]


def without(
    nodes: Mapping[str, ObservedNode] | None, state: QuarantineState
) -> Mapping[str, ObservedNode] | None:
    """Return the nodes, those in quarantine cordoned: their pods' work is handed over."""
    if nodes is None or not state.avoided:
        return nodes
    return {
        **nodes,
        **{name: replace(nodes[name], cordoned=True) for name in state.avoided if name in nodes},
    }


MAX_KNOWN_PODS = 8192
"""Pods whose node is remembered, those that are gone among them."""


class NodeQuarantine:
    """Keeps the quarantine of one job's nodes: counts mismatches, and taints nodes if asked to.

    Args:
        status: of the job: what an operator before this one has learnt.
        pods: what is known of the job's pods.
        actuator: acts in the cluster.
    """

    def __init__(self, status: Mapping[str, Any], pods: PodCache, actuator: Actuator) -> None:
        self.state = of_status(status)
        self._pods = pods
        self._actuator = actuator
        self._known: dict[PodUid, ObservedPod] = {}
        self._untainted: tuple[str, ...] = ()
        self._spared: tuple[tuple[str, str], ...] = ()
        """Offenders beyond the limit, as they were told of."""

    def note_places(self) -> None:
        """Remember where pods run: the recovery that one causes is told when it may be gone."""
        self._known.update({p.uid: p for p in self._pods.list() if p.node})
        while len(self._known) > MAX_KNOWN_PODS:
            del self._known[next(iter(self._known))]

    def learn(self, findings: FindingsPage | None) -> None:
        """Count the newest findings of checks; the next review judges by them."""
        self.note_places()
        self.state = self.state.with_mismatches(read_findings(findings, self._known))

    async def judge(self, view: JobView, recoveries: Sequence[Recovery], now_s: float) -> None:
        """Learn from recoveries which nodes computed wrongly, and review them."""
        found = read_mismatches(recoveries, self._known)
        self.state = self.state.with_mismatches(found)
        await self.review(view, now_s)

    async def review(self, view: JobView, now_s: float) -> None:
        """Put nodes that computed wrongly again and again in quarantine, and take out those that
        the job's specification lets out.
        """
        self.note_places()
        if view.job is None or not (self.state.mismatches or self.state.nodes):
            return
        policy = policy_of(view)
        nodes = {p.node for p in self._pods.list() if p.node}
        plan = plan_quarantine(self.state, nodes, policy, now_s)
        self.state = plan.state
        out = {q.node for q, _ in plan.released}
        self._untainted = tuple(node for node in self._untainted if node not in out)
        if policy.mode is QuarantineMode.TAINT:
            self._untainted += tuple(q.node for q in plan.new)
        new_limits = tuple(spared for spared in plan.spared if spared not in self._spared)
        self._spared = plan.spared
        told = replace(plan, spared=new_limits)
        await self._actuator.tell(view, of_plan(told, policy.mode))

    async def taint(self) -> None:
        """Taint what came into quarantine; what does not succeed is tried again by the next pass.

        Raises:
            KubeError: the API server refused, or did not answer.
        """
        for node in self._untainted:
            await self._actuator.taint_node(node, TAINT_KEY, TAINT_EFFECT)
            self._untainted = tuple(n for n in self._untainted if n != node)
