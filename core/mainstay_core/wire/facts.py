"""Defines what pods tell the api: who they are, that they live, and which facts they report.

The messages are frozen values, encoded by :mod:`mainstay_core.base.codec` like all others
(:mod:`mainstay_core.wire.plan`). Facts have a class for each kind and a format of their own.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mainstay_core.base import codec
from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    MAX_SLOTS_PER_POD,
    Address,
    Count,
    Index,
    Instant,
    Labels,
    Longest,
    Name,
    Range,
    Seconds,
    Sentence,
    SlotIndex,
    cut_fields,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import Incarnation, PodUid, QuorumId, Slot
from mainstay_core.base.words import quote
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.formats import fact_of_format_1, format_of
from mainstay_core.wire.ledger import FinalDigests
from mainstay_core.wire.recoveries import Replayed
from mainstay_core.wire.reinitialisation import Outline, ToldHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRegistration:
    """The introduction of a pod by its supervisor. Repeating it is harmless."""

    pod: PodUid
    name: Name
    address: Address
    gather: Address
    """host:port of its gather server."""
    store: Address = ""
    """host:port where a launcher of the version before has the ranks of a group meet; else empty.
    It is passed on in plans, so that jobs of that version go on beside a newer api."""
    num_slots: Annotated[int, Range(1, MAX_SLOTS_PER_POD)]
    domain: Name = ""
    """Failure domain (node, rack)."""
    pid: Count = 0
    supervisor: Name = ""
    """Random name of the supervisor's process: in containers all of them have the same pid."""
    snapshots: Address = field(default="", metadata=OMITTED)
    """host:port of its store of segments; empty in a job without snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The location of a node, as the cluster's labels say; empty where they say nothing."""

    near: Name = ""
    """Nodes with the same value are near each other: a rack, a switch."""
    apart: Name = ""
    """Nodes with different values fail apart: racks, zones."""


FACT_FORMAT = 2
"""Format of facts. Format 1 had one shape for all kinds, and sentences said what fields say now."""


class FactKind(enum.StrEnum):
    """The kinds of facts."""

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
    NAMED = "named"
    CHECKS = "checks"
    MISSED = "missed"
    STATE_REFUSED = "state-refused"


MAX_SOURCES = 64
"""Sources of a fault that are named; a fault that comes from more is nobody's."""


class Cause(enum.StrEnum):
    """The kinds of causes for which a member gives up its quorum, the most telling ones first."""

    STATE = "state"
    """The states of some members differ from those of their stage's majority."""
    LOAD = "load"
    """It cannot read the checkpoint that the job goes on from, or copies to replay from."""
    HEAL = "heal"
    """No source has given it a state that is right."""
    RESULT = "result"
    """The votes on a step refuse it again and again."""
    REDUCTION = "reduction"
    """The connections within a stage ended."""
    CHAIN = "chain"
    """The connections within a replica ended."""
    MEETING = "meeting"
    """The gather of the quorum ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fact:
    """The fields that every fact has. A fact is idempotent: reporting it twice changes nothing."""

    pod: PodUid
    evidence: Sentence = ""
    """Why the reporter believes it: one sentence, for people."""
    observed_at_s: Instant = 0.0
    """When it happened, by the reporter's wall clock: for the five times, never to judge who lives.
    Of what was found out by waiting: when the wait began."""
    format: Count = FACT_FORMAT

    def __post_init__(self) -> None:
        cut_fields(self, "evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGone(_Fact):
    """A pod is gone. The provider reports it, so the evidence is sure."""

    kind: Literal[FactKind.POD_GONE] = FactKind.POD_GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(_Fact):
    """A pod will end, and works on until then. It is repeated."""

    kind: Literal[FactKind.LEAVING] = FactKind.LEAVING
    grace_s: Seconds = 0.0
    """How long the pod will stay at most; 0 when nobody has set a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerFact(_Fact):
    """The fields of facts about one life of a trainer."""

    slot: SlotIndex
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUp(_TrainerFact):
    """A trainer process is ready to be given a rank."""

    kind: Literal[FactKind.TRAINER_UP] = FactKind.TRAINER_UP
    fingerprint: Labels = field(default_factory=dict)
    """What fixes its arithmetic."""
    outline: Outline = field(default=(), metadata=OMITTED)
    """The blocks of every stage, in a job that may go on approximately: it says how a stage could
    be made anew from others."""
    accelerator: Name = field(default="", metadata=OMITTED)
    """UUID of its accelerator; empty on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDown(_TrainerFact):
    """A trainer process ended or was killed. The evidence is sure."""

    kind: Literal[FactKind.TRAINER_DOWN] = FactKind.TRAINER_DOWN
    restarting: bool = False
    """Whether another one will be forked."""
    handed_over: bool = False
    """Whether it had adopted the plan that drops it, and nobody met at its pod any more: it is
    missed by nobody."""
    crash: Crash | None = None
    """The exception that ended its program, if the trainer could tell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFact(_TrainerFact):
    """The fields of a trainer's facts about its own work."""

    quorum: QuorumId | None = None
    """The quorum of the plan that it has adopted; None before the first."""
    step: Count | None = None
    """Number of steps that its state contains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(_RankFact):
    """A member has applied the last step."""

    kind: Literal[FactKind.FINISHED] = FactKind.FINISHED
    final: FinalDigests | None = None
    """Digests of its position, if it reports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_RankFact):
    """A trainer cannot go on by itself (a bug or a user's mistake), so the job fails."""

    kind: Literal[FactKind.FAILED] = FactKind.FAILED
    crash: Crash | None = None
    """The exception that its program ended with, if it was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(_RankFact):
    """A checkpoint is durable (``complete``), or it is late or failed; ``evidence`` says why."""

    kind: Literal[FactKind.CHECKPOINT] = FactKind.CHECKPOINT
    complete: bool
    durable: Count | None = None
    """Newest durable version that the teller knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(_RankFact):
    """A member gave up its quorum and waits. It is repeated."""

    kind: Literal[FactKind.PARKED] = FactKind.PARKED
    suspects: Annotated[tuple[Slot, ...], Longest(MAX_MEMBERS)] = ()
    """Members that seem gone. This is a hint."""
    differing: Annotated[tuple[Slot, ...], Longest(MAX_MEMBERS)] = ()
    """Members whose state the quorum's votes found to differ from that of their stage's majority:
    evidence against the devices that hold it."""
    cause: Cause | None = None
    """Why it gave the quorum up; None from a pod of the version before."""
    sources: Annotated[tuple[Slot, ...], Longest(MAX_SOURCES)] = ()
    """Members from which the fault came, as far as the teller knows: those that it copied from,
    those whose state differs, those whose connections ended."""
    was_told: bool = False
    """Whether it learnt only from others that the quorum has ended."""
    doubted: Annotated[tuple[Slot, ...], Longest(MAX_SOURCES)] = field(default=(), metadata=OMITTED)
    """Devices that have computed a shard type differently, each time that they were asked: another
    one has to compute it, so that most of them can say which is wrong."""
    repeats: Count | None = field(default=None, metadata=OMITTED)
    """Number of the fork that is due in a job that repeats a lineage: nothing has failed."""
    unreached: bool = field(default=False, metadata=OMITTED)
    """Whether it asks what to do, as its plan says: no store brings a lost stage back."""
    unasked: bool = field(default=False, metadata=OMITTED)
    """Whether not all was known of some pod's store when it asked: that one may bring it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted(_RankFact):
    """A member took up the plan; ``observed_at_s`` is when it held all settle reports."""

    kind: Literal[FactKind.ADOPTED] = FactKind.ADOPTED
    reached: Count | None = None
    """Newest version that any member of the settle held before it."""
    loads: bool | None = field(default=None, metadata=OMITTED)
    """Whether all go on from a checkpoint, or the seed; None from a pod of the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(_RankFact):
    """A member goes on computing at ``step`` in the plan: it has its state and its table."""

    kind: Literal[FactKind.SETTLED] = FactKind.SETTLED
    durable: Count | None = None
    """Newest durable version that it knows."""
    replayed: Replayed | None = field(default=None, metadata=OMITTED)
    """How it made its state anew, if it did so from snapshots and logs."""
    history: ToldHistory | None = field(default=None, metadata=OMITTED)
    """Of the quorum's first member: the forks that all states contain; None: they are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(_RankFact):
    """A member of a pausing plan has written its checkpoint, or failed to, and computes no more."""

    kind: Literal[FactKind.PAUSED] = FactKind.PAUSED
    durable: Count | None = None
    """Newest durable version that it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(_RankFact):
    """Several devices have shown that one computes wrongly each time: its pod is to leave."""

    kind: Literal[FactKind.NAMED] = FactKind.NAMED
    since: Count | None = field(default=None, metadata=OMITTED)
    """First step that the device may have computed wrongly; None: that is not known."""
    device: Slot | None = field(default=None, metadata=OMITTED)
    """The device, if another than the teller's own: it may be gone by now."""

    @property
    def named(self) -> Slot:
        """The device that computes wrongly."""
        return self.device or Slot(pod=self.pod, index=self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks(_RankFact):
    """A trainer has a plan of checks for its stage, or goes on without; ``evidence`` says why."""

    kind: Literal[FactKind.CHECKS] = FactKind.CHECKS
    stage: Index
    plan: Name
    """The plan that is carried out: Auto, File, or Naive where none is."""
    shares: Sentence
    """How operator time is checked, by method."""

    def __post_init__(self) -> None:
        cut_fields(self, "evidence", "shares")


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed(_RankFact):
    """An injected flip was not put in: nothing came that it names; ``evidence`` says what did."""

    kind: Literal[FactKind.MISSED] = FactKind.MISSED
    fault: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRefused(_RankFact):
    """A rank has come back with a state of another lineage or course, which does not count.

    ``step`` is the state's version; ``evidence`` says why it does not.
    """

    kind: Literal[FactKind.STATE_REFUSED] = FactKind.STATE_REFUSED
    stage: Index
    """Whose state it is."""
    inner: Index


RankFact = (
    Finished
    | Failed
    | Checkpoint
    | Parked
    | Adopted
    | Settled
    | Paused
    | Named
    | Checks
    | Missed
    | StateRefused
)
TrainerFact = TrainerUp | TrainerDown | RankFact
PodFact = PodGone | Leaving
Fact = PodFact | TrainerFact
"""A fact: something that a pod noticed, with its evidence. There is one class for each kind."""

_BY_KIND: dict[str, type[Fact]] = {
    kind.__dataclass_fields__["kind"].default.value: kind for kind in typing.get_args(Fact)
}


def read_fact(data: Any) -> Fact:
    """Return a fact from its JSON, in this format or an older one.

    Raises:
        RemoteProtocolError: it is no fact, or one of a newer format; the message says which field.
    """
    data = modernized_fact(data)
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in _BY_KIND:
        raise RemoteProtocolError(f"Fact.kind: {quote(kind)} is no kind of fact")
    return codec.decode(_BY_KIND[kind], data)


def read_rank_fact(data: Any) -> RankFact:
    """Return a fact that a trainer may report, from its JSON.

    Raises:
        RemoteProtocolError: it is no such fact.
    """
    fact = read_fact(data)
    if not isinstance(fact, RankFact):
        raise RemoteProtocolError(f"a trainer cannot tell {fact.kind}")
    return fact


def modernized_fact(data: Any) -> Any:
    """Return the JSON of a fact as the newest format has it. JSON that is no object stays as it is.

    Raises:
        UnknownFormatError: its format is newer than this program.
    """
    told = format_of(data, FACT_FORMAT, "Fact")
    return fact_of_format_1(data) if told == 1 and isinstance(data, Mapping) else data


class Phase(enum.StrEnum):
    """The phases of a rank: the same words in heartbeats, faults, reports and status."""

    IDLE = "idle"
    PARKED = "parked"
    SETTLING = "settling"
    HEALING = "healing"
    COMPUTING = "computing"
    REDUCING = "reducing"
    VOTING = "voting"
    APPLYING = "applying"
    SAVING = "saving"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """The status of one slot, as a heartbeat reports it."""

    index: SlotIndex
    incarnation: Incarnation | None = None
    pid: Count = 0
    phase: Name = "starting"
    """Phase of the rank, as its trainer tells it; else what the slot does without one."""
    waiting: bool = False
    """Whether it is blocked on others, so that it cannot be blamed for a lack of progress."""
    step: Count = 0
    progress: Count = 0
    """Counter that grows with every action of the program."""
    quorum: QuorumId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The heartbeat of a pod, one per interval. The store writes it without a compare-and-set."""

    pod: PodUid
    slots: Annotated[tuple[SlotStatus, ...], Longest(MAX_SLOTS_PER_POD)]
    quorum: QuorumId | None = None
    """Quorum of the newest plan that the supervisor holds."""
