"""Decides which pods to make and to end, and what to tell the api.

How the job goes on and how many pods it needs is the coordinator's to say
(:func:`mainstay_core.coordinator.scaling.plan_pods`); here the difference between that and
what is seen is worked out. Decisions are level-triggered: they depend on what
is, never on which event came first, so they are the same after an absence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.pool.losses import Loss, PodDemand, has_lost_node, is_lost
from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.observed import EndCause, ObservedNode, ObservedPod, Taint
from mainstay_core.wire.facts import Fact, Leaving

KEEP_FAILED = 3
"""Failed pods that are left for their logs."""
HINT_TAINTS = frozenset(
    {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/memory-pressure",
        "node.kubernetes.io/disk-pressure",
        "node.kubernetes.io/pid-pressure",
        "node.kubernetes.io/network-unavailable",
        "node.kubernetes.io/unschedulable",
    }
)
"""A node's own condition: a hint, as nodes recover. Heartbeats say who is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPolicy:
    """The bounds of a repair."""

    max_repairs: int = 10
    """Counted losses within the window that are made good; places beyond it stay empty until the
    window has moved on."""
    window_s: float = 3600.0
    """Infinite where there is one budget for the whole run, as in local mode."""
    stuck_image_s: float = 60.0
    """A pod whose image cannot be pulled on its node, while others have it, is replaced then."""
    stranded_s: float = 300.0
    """A pod that the api takes for gone, on a node that is not ready, is ended after so long. Until
    then it is replaced, and kept: a partition may heal, and the pod comes back."""
    force_delete_s: float = 0.0
    """So long after its deadline a pod on an unreachable node is removed by force; 0: never."""
    ignore_cordon: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnd:
    """A pod to delete."""

    uid: PodUid
    name: str
    why: str
    cause: EndCause = EndCause.OTHER
    force: bool = False
    """Without waiting for its kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairCounts:
    """The numbers of pods that a repair is about."""

    kept: int = 0
    wanted: int = 0
    made: int = 0
    ended: int = 0
    not_made: int = 0
    """Pods that are missing and not made, as the budget of repairs is used up."""
    spent: int = 0
    """Counted losses within the window; 0 while the budget is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The actions on a job's pods now. All of them may be done at once."""

    make: tuple[int, ...] = ()
    """Indexes of the pods to make."""
    end: tuple[PodEnd, ...] = ()
    tell: tuple[Fact, ...] = ()
    losses: tuple[Loss, ...] = ()
    """Of pods that were there at the last pass, or that the api takes for living."""
    counts: RepairCounts = RepairCounts()
    reason: str = ""


def plan_repair(
    *,
    memory: PoolMemory,
    pods: Iterable[ObservedPod],
    nodes: Mapping[str, ObservedNode] | None,
    demand: PodDemand,
    taken: Iterable[int] = (),
    policy: RepairPolicy,
    now_s: float,
) -> Repair:
    """Return what to do so that the cluster becomes what the api wants.

    Args:
        memory: what is remembered of the looks before; empty at the first.
        pods: pod objects that exist now.
        nodes: by name; None if nodes are not watched.
        demand: what the api says.
        taken: indexes that cannot be used, though no pod of the job has them.
        policy: what a repair may do.
        now_s: wall clock.
    """
    existing = sorted(pods, key=lambda p: (p.index, p.uid))
    living = [p for p in existing if not is_lost(p, nodes)]
    losses = memory.find_losses(existing, nodes, demand, now_s)
    leaves = {p.uid: why for p in living if (why := why_leaving(p, nodes, policy))}
    tell: list[Fact] = [loss.fact() for loss in losses if loss.uid in demand.living]
    tell += [
        _leaving(p, leaves[p.uid], now_s)
        for p in living
        if p.uid in leaves and p.uid in demand.living and p.uid not in demand.leaving
    ]
    kept, ending = _sort_out(living, leaves, nodes, demand, policy, now_s)
    ending += [] if demand.over else [*_swept(existing), *_left_behind(existing, nodes)]
    ending += _forced(existing, nodes, demand, policy, now_s)
    wanted = 0 if demand.over or demand.suspended else demand.num_pods
    missing = max(0, wanted - len(kept))
    counted = memory.account(losses)[0].counted
    spent = sum(at_s > now_s - policy.window_s for at_s in counted)
    not_made = min(missing, max(0, spent - policy.max_repairs))
    make = free_indexes([*(p.index for p in existing), *taken], missing - not_made)
    counts = RepairCounts(
        kept=len(kept),
        wanted=wanted,
        made=len(make),
        ended=len(ending),
        not_made=not_made,
        spent=spent if not_made else 0,
    )
    return Repair(
        make=make,
        end=tuple(ending),
        tell=tuple(tell),
        losses=losses,
        counts=counts,
        reason=_reason(counts, policy),
    )


def why_leaving(
    pod: ObservedPod, nodes: Mapping[str, ObservedNode] | None, policy: RepairPolicy
) -> str:
    """Return why a living pod will end or should, so that its work is handed over; else ''."""
    if pod.ended_for:
        return pod.ended_for
    if pod.disruption is not None:
        return f"it is {pod.disruption.value}: {pod.disruption_why}"
    if pod.terminating:
        return "it was deleted"
    node = nodes.get(pod.node) if nodes is not None else None
    if node is None:
        return ""
    if node.cordoned and not policy.ignore_cordon:
        return f"node {node.name} is cordoned"
    for taint in node.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and _drives_out(taint, pod):
            return f"node {node.name} has taint {taint.key}:{taint.effect}"
    return ""


def free_indexes(used: Iterable[int], num: int) -> tuple[int, ...]:
    """Return the ``num`` smallest indexes that are not used."""
    taken, index = set(used), 0
    found: list[int] = []
    while len(found) < num:
        if index not in taken:
            found.append(index)
        index += 1
    return tuple(found)


def _drives_out(taint: Taint, pod: ObservedPod) -> bool:
    return taint.key not in HINT_TAINTS and not any(t.bears(taint) for t in pod.tolerations)


def _sort_out(
    living: list[ObservedPod],
    leaves: Mapping[PodUid, str],
    nodes: Mapping[str, ObservedNode] | None,
    demand: PodDemand,
    policy: RepairPolicy,
    now_s: float,
) -> tuple[list[ObservedPod], list[PodEnd]]:
    """Return the pods that count as kept, and those to end."""
    if demand.over:
        return living, []
    if demand.suspended:
        return [], [
            _end(p, "the job is suspended", EndCause.SUSPENDED) for p in living if not p.terminating
        ]
    ending = dict.fromkeys(demand.ending, "the job does not need it")
    ending |= {uid: leaves[uid] for uid in demand.ending if uid in leaves}
    # What never registered has no work to hand over.
    ending |= {p.uid: leaves[p.uid] for p in living if p.uid in leaves and _unknown(p, demand)}
    stuck = {
        p.uid: f"its image cannot be pulled on node {p.node}, where others have theirs: {p.stuck}"
        for p in _stuck_on_image(living, policy, now_s)
    }
    stranded = {
        p.uid: node.not_ready_since_s
        for p in living
        if p.uid in demand.known
        and _unknown(p, demand)
        and (node := _silent_node(p, nodes)) is not None
    }
    late = {
        p.uid: f"its node {p.node} has not been ready for {policy.stranded_s:g} s, and the job "
        "goes on without it"
        for p in living
        if p.uid in stranded and stranded[p.uid] <= now_s - policy.stranded_s
    }
    ending |= stuck | late
    # Who was ended before is ended for the same again.
    causes = {p.uid: p.ended_as for p in living} | dict.fromkeys(stuck, EndCause.IMAGE)
    causes |= dict.fromkeys(late, EndCause.OTHER)
    kept = [
        p
        for p in living
        if not p.terminating
        and p.uid not in leaves
        and p.uid not in demand.leaving
        and p.uid not in ending
        and p.uid not in stranded
    ]
    surplus = [p for p in reversed(kept) if _unknown(p, demand)]
    surplus.sort(key=lambda p: (bool(p.node), p.ready))
    surplus = surplus[: max(0, len(kept) - demand.num_pods)]
    ending |= {p.uid: "the job does not need it" for p in surplus}
    kept = [p for p in kept if p.uid not in ending]
    ends = [
        _end(p, ending[p.uid], causes[p.uid])
        for p in living
        if p.uid in ending and not p.terminating
    ]
    return kept, ends


def _unknown(pod: ObservedPod, demand: PodDemand) -> bool:
    return pod.uid not in demand.living


def _silent_node(pod: ObservedPod, nodes: Mapping[str, ObservedNode] | None) -> ObservedNode | None:
    """Return a pod's node if it is silent. That alone is a hint: ask the api about the pod too."""
    node = nodes.get(pod.node) if nodes is not None else None
    return node if node is not None and not node.ready else None


def _end(pod: ObservedPod, why: str, cause: EndCause = EndCause.OTHER) -> PodEnd:
    return PodEnd(uid=pod.uid, name=pod.name, why=why, cause=cause)


def _stuck_on_image(
    living: list[ObservedPod], policy: RepairPolicy, now_s: float
) -> list[ObservedPod]:
    """Pods that cannot get their image where others could: their node is at fault.

    The others must have had it for as long: after an outage of the registry one is the first.
    """
    late_s = now_s - policy.stuck_image_s
    if not any(p.ready and p.ready_since_s < late_s for p in living):
        return []
    return [p for p in living if p.stuck_on_image and not p.ready and p.created_at_s < late_s]


def _swept(pods: list[ObservedPod]) -> list[PodEnd]:
    """Pods that have ended: a few that failed stay for their logs, the newest."""
    ended = [p for p in pods if p.ended and not p.terminating]
    failed = sorted((p for p in ended if p.failure), key=lambda p: (p.created_at_s, p.uid))
    kept = {p.uid for p in failed[-KEEP_FAILED:]}
    return [_end(p, "it has ended") for p in ended if p.uid not in kept]


def _left_behind(pods: list[ObservedPod], nodes: Mapping[str, ObservedNode] | None) -> list[PodEnd]:
    """Pods whose node is lost: once they are deleted, the cluster may remove them."""
    return [
        _end(p, f"its node {p.node} is lost")
        for p in pods
        if has_lost_node(p, nodes) and not p.ended and not p.terminating
    ]


def _forced(
    pods: list[ObservedPod],
    nodes: Mapping[str, ObservedNode] | None,
    demand: PodDemand,
    policy: RepairPolicy,
    now_s: float,
) -> list[PodEnd]:
    """Pods to remove by force: their node is unreachable, and the api takes them for gone."""
    if not policy.force_delete_s or nodes is None:
        return []
    late_s = now_s - policy.force_delete_s
    return [
        PodEnd(
            uid=p.uid,
            name=p.name,
            why=f"its node {p.node} does not end it, and the job goes on without it",
            force=True,
        )
        for p in pods
        if p.terminating
        and p.ends_by_s <= late_s
        and p.uid not in demand.living
        and p.node in nodes
        and (nodes[p.node].lost or not nodes[p.node].ready)
    ]


def _leaving(pod: ObservedPod, why: str, now_s: float) -> Leaving:
    # A deletion has a deadline; a cordon has none.
    grace_s = max(0.0, pod.ends_by_s - now_s) if pod.terminating else 0.0
    return Leaving(pod=pod.uid, evidence=why, observed_at_s=now_s, grace_s=grace_s)


def _reason(counts: RepairCounts, policy: RepairPolicy) -> str:
    parts = [f"there: {counts.kept} of {count(counts.wanted, 'pod')}"]
    if counts.made:
        parts.append(f"made: {counts.made}")
    if counts.ended:
        parts.append(f"ended: {counts.ended}")
    if counts.not_made:
        within, limit = "in this run", f"{policy.max_repairs} at most are made good"
        if math.isfinite(policy.window_s):
            within = f"within {policy.window_s:.0f} s"
            limit = f"recovery.window.maxRepairs is {policy.max_repairs}"
        losses = count(counts.spent, "loss", "losses")
        parts.append(f"not made: {counts.not_made}, as there were {losses} {within}, and {limit}")
    return ", ".join(parts)
