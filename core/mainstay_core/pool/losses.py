"""Finds the pods that are surely gone, with cause and evidence."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from mainstay_core.base.ids import PodUid
from mainstay_core.job.phase import TERMINAL, JobPhase
from mainstay_core.pool.observed import Disruption, EndCause, ObservedNode, ObservedPod
from mainstay_core.wire.facts import PodGone
from mainstay_core.wire.page import PodsPage


class LossCause(enum.StrEnum):
    """The causes of a pod's loss. The values are reasons of Events."""

    ENDED = "PodEnded"
    """The operator ended it, as the api or the job asked."""
    LEFT = "PodLeft"
    """It ended by itself, without a failure: its work was handed over, or the job is over."""
    DELETED = "PodDeleted"
    EVICTED = "PodEvicted"
    PREEMPTED = "PodPreempted"
    NODE_LOST = "NodeLost"
    NODE_SHUTDOWN = "NodeShutdown"
    OUT_OF_MEMORY = "PodOutOfMemory"
    FAILED = "PodFailed"
    IMAGE = "ImagePullFailed"


COUNTED = frozenset(
    {LossCause.NODE_LOST, LossCause.OUT_OF_MEMORY, LossCause.FAILED, LossCause.IMAGE}
)
"""What counts against the budget of repairs. Preemption, drain and deletion are somebody's will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A pod that is no more."""

    uid: PodUid
    name: str
    node: str
    cause: LossCause
    evidence: str
    at_s: float
    leaving: bool = False
    """Whether it was to leave anyway: another pod was asked for in its place before it was lost."""

    @property
    def counts(self) -> bool:
        """Whether it counts against the budget of repairs."""
        return self.cause in COUNTED and not self.leaving

    def fact(self) -> PodGone:
        """Return what the api is told."""
        return PodGone(pod=self.uid, evidence=self.evidence, observed_at_s=self.at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDemand:
    """The pods that the api wants and knows of a job."""

    over: bool = False
    """The job has ended."""
    suspended: bool = False
    """Nobody computes, and no pod is needed: all may end."""
    num_pods: int
    """Pods that should live and not leave."""
    leaving: frozenset[PodUid] = frozenset()
    ending: tuple[PodUid, ...] = ()
    """Pods to end now."""
    living: Mapping[PodUid, str] = field(default_factory=dict)
    """Names of the pods that the api takes for living."""
    serving: int = 0
    """Pods with a rank."""
    known: frozenset[PodUid] = frozenset()
    """Pods that it has ever taken for living, as far as is known."""


def demand_of(page: PodsPage) -> PodDemand:
    """Return what the api says about pods as a repair takes it."""
    return PodDemand(
        over=page.state in TERMINAL,
        suspended=page.state is JobPhase.SUSPENDED,
        num_pods=page.num_pods,
        leaving=frozenset(page.leaving),
        ending=page.ending,
        living={p.uid: p.name for p in page.pods},
        serving=sum(p.serving for p in page.pods),
    )


def find_losses(
    before: Mapping[PodUid, ObservedPod],
    pods: Iterable[ObservedPod],
    nodes: Mapping[str, ObservedNode] | None,
    demand: PodDemand,
    now_s: float,
    leaving: Set[PodUid] = frozenset(),
) -> tuple[Loss, ...]:
    """Return the pods that are surely gone, of those seen before and those the api counts on.

    Args:
        before: pods that lived at the last look.
        pods: pod objects that exist now.
        nodes: by name; None if nodes are not watched.
        demand: what the api says.
        now_s: wall clock: when a pod was lost that nobody saw end.
        leaving: pods that were to leave anyway.
    """
    now = {p.uid: p for p in pods}
    concerned = sorted({*before, *demand.living})
    losses = []
    for uid in concerned:
        pod = now.get(uid)
        if pod is not None and not is_lost(pod, nodes):
            continue
        known, at_s = pod or before.get(uid), now_s
        if known is None:
            name = demand.living[uid]
            evidence = f"there is no pod {name} with uid {uid}"
            cause, node = LossCause.DELETED, ""
        else:
            name, node = known.name, known.node
            cause, evidence = _why_lost(known, nodes, exists=pod is not None)
            evidence, at_s = known.evidence or evidence, known.ended_at_s or now_s
        losses.append(
            Loss(
                uid=uid,
                name=name,
                node=node,
                cause=cause,
                evidence=evidence,
                at_s=at_s,
                leaving=uid in leaving,
            )
        )
    return tuple(losses)


def is_lost(pod: ObservedPod, nodes: Mapping[str, ObservedNode] | None) -> bool:
    """Whether an existing pod is surely gone: it has ended, or its node is lost."""
    return pod.ended or has_lost_node(pod, nodes)


def has_lost_node(pod: ObservedPod, nodes: Mapping[str, ObservedNode] | None) -> bool:
    """Whether nothing runs any more where a pod is."""
    node = nodes.get(pod.node) if nodes is not None else None
    return node is not None and node.lost


def _why_lost(
    pod: ObservedPod, nodes: Mapping[str, ObservedNode] | None, *, exists: bool
) -> tuple[LossCause, str]:
    """Return the cause, and the evidence in one sentence."""
    node = nodes.get(pod.node) if nodes is not None else None
    if pod.ended_for:
        cause = LossCause.IMAGE if pod.ended_as is EndCause.IMAGE else LossCause.ENDED
        return cause, f"the operator ended pod {pod.name}: {pod.ended_for}"
    if node is not None and node.lost:
        what = "no more" if node.gone else "out of service"
        return LossCause.NODE_LOST, f"node {pod.node} of pod {pod.name} is {what}"
    if pod.disruption is not None:
        why = f"pod {pod.name} on node {pod.node or '(none)'} was {pod.disruption.value}"
        cause = {
            Disruption.PREEMPTED: LossCause.PREEMPTED,
            Disruption.EVICTED: LossCause.EVICTED,
            Disruption.TAINTED: LossCause.EVICTED if node and node.ready else LossCause.NODE_LOST,
            Disruption.NODE_SHUTDOWN: LossCause.NODE_SHUTDOWN,
            Disruption.OTHER: LossCause.EVICTED,
        }[pod.disruption]
        return cause, f"{why}: {pod.disruption_why}" if pod.disruption_why else why
    if exists and pod.failure:
        cause = LossCause.OUT_OF_MEMORY if pod.out_of_memory else LossCause.FAILED
        return cause, f"pod {pod.name} failed: {pod.failure}"
    if exists and not pod.terminating:
        return LossCause.LEFT, f"pod {pod.name} has ended by itself"
    if node is not None and not node.ready:
        return LossCause.NODE_LOST, f"pod {pod.name} was deleted from node {node.name}, not ready"
    return LossCause.DELETED, f"pod {pod.name} was deleted"
