"""What pods tell the api: who they are, that they live, and what they have learnt.

Frozen values, encoded by :mod:`mainstay_core.base.codec` like the other messages
(:mod:`mainstay_core.wire.plan`), whose format they share.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mainstay_core.base.ids import Incarnation, PodUid, QuorumId, Slot
from mainstay_core.wire.ledger import FinalDigests


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRegistration:
    """A pod's supervisor introduces itself. Repeating it is harmless."""

    pod: PodUid
    name: str
    address: str
    gather: str
    """host:port of its gather server."""
    store: str
    """host:port of its launcher's rendezvous store."""
    num_slots: int
    domain: str = ""
    """Failure domain (node, rack)."""
    pid: int = 0
    supervisor: str = ""
    """Random name of the supervisor's process: in containers all have the same pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node is, as the cluster's labels say; empty where they say nothing."""

    near: str = ""
    """Nodes with the same value are near each other: a rack, a switch."""
    apart: str = ""
    """Nodes with different values fail apart: racks, zones."""


class FactKind(enum.StrEnum):
    """What the api can learn."""

    TRAINER_UP = "trainer-up"
    TRAINER_DOWN = "trainer-down"
    POD_GONE = "pod-gone"
    PARKED = "parked"
    ADOPTED = "adopted"
    SETTLED = "settled"
    FINISHED = "finished"
    LEAVING = "leaving"
    FAILED = "failed"
    CHECKPOINT = "checkpoint"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that was learnt, with its evidence. Idempotent: telling it twice changes nothing.

    TRAINER_UP    a trainer process is ready to be given a rank (incarnation, fingerprint)
    TRAINER_DOWN  it ended or was killed (sure evidence; ``restarting``: another will be forked)
    POD_GONE      the pod is gone (sure evidence, from the operator or the local provider)
    PARKED        a member gave up its quorum and waits (suspects named: a hint); repeated
    ADOPTED       a member took up the plan; ``observed_at_s`` is when it held all settle reports
    SETTLED       a member goes on computing at ``step`` in the plan: state and table ready
    FINISHED      a member has applied the last step; ``final`` holds its digests
    LEAVING       the pod will end (``evidence``: why) and works on meanwhile; repeated
    CHECKPOINT    version ``durable`` is complete; with ``evidence``, why one is late or failed
    PAUSED        a member of a pausing plan has saved what it can (``durable``), computes no more
    FAILED        the trainer cannot go on by itself and says why (a bug or a user error), job fails
    """

    kind: FactKind
    pod: PodUid
    slot: int | None = None
    incarnation: Incarnation | None = None
    quorum: QuorumId | None = None
    step: int | None = None
    suspects: tuple[Slot, ...] = ()
    restarting: bool = False
    evidence: str = ""
    fingerprint: dict[str, str] | None = None
    final: FinalDigests | None = None
    durable: int | None = None
    """Newest complete durable version that the teller knows (SETTLED, CHECKPOINT, PAUSED)."""
    reached: int | None = None
    """Newest version that any member of the settle held before it (ADOPTED)."""
    observed_at_s: float = 0.0
    """Wall clock of the reporter, for the five times; never used to judge who lives."""
    grace_s: float = 0.0
    """Of LEAVING: how long the pod will stay at most; 0 when nobody has set a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """One slot's line in a heartbeat."""

    index: int
    incarnation: Incarnation | None = None
    pid: int = 0
    phase: str = "starting"
    waiting: bool = False
    """Blocked on others: cannot be blamed for a lack of progress."""
    step: int = 0
    progress: int = 0
    """Counter that grows with every action of the program."""
    quorum: QuorumId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One per pod and interval: a last-seen write, never a compare-and-set."""

    pod: PodUid
    slots: tuple[SlotStatus, ...]
    quorum: QuorumId | None = None
    """Newest plan the supervisor holds."""
