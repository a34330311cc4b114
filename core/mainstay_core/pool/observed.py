"""A job's pods and the nodes of a cluster as they are observed: plain values.

Whoever watches a cluster makes these of what it sees; decisions
(:mod:`mainstay_core.pool.repair`, :mod:`mainstay_core.pool.conditions`) take nothing
else. Times are wall clock, in seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from mainstay_core.base.ids import PodUid

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint that people, or what fences nodes for them, put on a node that is shut down."""


class PodPhase(enum.StrEnum):
    """The phases of a pod's life, as the cluster names them."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class Disruption(enum.StrEnum):
    """The reasons for which the cluster itself ends a pod."""

    PREEMPTED = "preempted"
    EVICTED = "evicted"
    """By the eviction interface: a drain, the descheduler."""
    TAINTED = "tainted"
    """By a taint of its node that it does not tolerate, an unreachable node's among them."""
    NODE_SHUTDOWN = "node-shutdown"
    """By its kubelet: the node shuts down, or is short of something."""
    OTHER = "other"


class EndCause(enum.StrEnum):
    """The reasons for which the operator ends a pod, as far as a decision depends on them."""

    OTHER = "other"
    IMAGE = "image"
    """The pod is stuck: its node cannot pull an image that others have."""
    SUSPENDED = "suspended"
    """The job stands still: the pod never works with one that is made later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """One pod object of a job.

    Invariant: ``ends_by_s`` is set exactly when ``terminating``.
    """

    uid: PodUid
    name: str
    index: int
    """From its name; the smallest that no existing pod uses is given to a new one."""
    node: str = ""
    """Empty until it is scheduled."""
    phase: PodPhase = PodPhase.PENDING
    ready: bool = False
    ready_since_s: float = 0.0
    terminating: bool = False
    """Somebody deleted it; it may work on until ``ends_by_s``."""
    ends_by_s: float = 0.0
    ended_for: str = ""
    """Why the operator itself deleted it; empty if it did not."""
    ended_as: EndCause = EndCause.OTHER
    """The same, as far as anything is decided by it."""
    disruption: Disruption | None = None
    disruption_why: str = ""
    failure: str = ""
    """Why its phase is Failed, with the container and its exit code."""
    evidence: str = ""
    """How it ended, in the words of whoever saw its processes; empty where only the cluster did."""
    ended_at_s: float = 0.0
    """When it ended, by whoever saw its processes; 0 where only the cluster did."""
    out_of_memory: bool = False
    """Whether it failed for want of memory."""
    stuck: str = ""
    """Why a container cannot start, e.g. its image is not there."""
    stuck_on_image: bool = False
    unscheduled: str = ""
    """Why no node takes it."""
    created_at_s: float = 0.0
    container_ends: tuple[ContainerEnd, ...] = ()
    """The last end of each container that ended and was started again."""
    tolerations: tuple[Toleration, ...] = ()
    """The template's, and those that the cluster's admission added, as for a device's nodes."""
    agent_image: str = ""
    """Image of its supervisor, which brings what its trainers run as well; empty if it has none."""

    @property
    def ended(self) -> bool:
        """Whether none of its containers will ever run again."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnd:
    """The end of a container that is started again in the same pod."""

    container: str
    restarts: int
    code: str
    """As the cluster names it: OOMKilled, Error, Completed."""
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Taint:
    """A taint, which keeps pods away from a node."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """One node of the cluster."""

    name: str
    gone: bool = False
    """Its object was seen and then deleted. A node that was never seen may just be new."""
    ready: bool = True
    not_ready_since_s: float = 0.0
    """Wall clock since when it is not ready; says nothing of one that is."""
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """Whether nothing runs there any more, for sure: it is no more, or somebody says that it is
        shut down. Being not ready alone is a hint.
        """
        return self.gone or (not self.ready and any(t.key == OUT_OF_SERVICE for t in self.taints))


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint that a pod bears."""

    key: str = ""
    """Empty with operator Exists: any."""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    """Empty: any."""
    for_a_while: bool = False
    """The cluster evicts the pod after some time (tolerationSeconds)."""

    def bears(self, taint: Taint) -> bool:
        """Return whether a pod with this toleration may stay on a node with the taint."""
        if self.for_a_while:
            return False
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


def agent_image_of(pods: Iterable[ObservedPod], newest: str) -> str:
    """Return the image of ours that a job's next pod gets: pods of one job run one version.

    What pods say to each other is one version's. So while a pod of the job is there, the next one
    is like it; a job whose pods have all gone, as by a suspension, goes on with the newest.

    Args:
        pods: of the job.
        newest: image that pods of new jobs get.
    """
    # One that is being ended works on until its successor has its state, unless nobody computes.
    alike = [
        p
        for p in pods
        if p.agent_image and not (p.ended or p.stuck or p.ended_as is EndCause.SUSPENDED)
    ]
    oldest = min(alike, key=lambda p: (p.created_at_s, p.index), default=None)
    return newest if oldest is None else oldest.agent_image
