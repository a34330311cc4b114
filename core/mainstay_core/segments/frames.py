"""The messages between trainers, other pods and a store of segments.

On a socket a message is the head of a frame (:mod:`mainstay_core.base.frames`). A trainer numbers
its requests; an answer carries the number of what it answers. Another pod's store and a reader get
their answers in the order of their requests, and only a segment has a body. The bytes of segments
never pass between a trainer and its own pod's store: both have the arena mapped. A holder confirms
in one message all segments that have come when it has time to answer, and a store tells its trainer
in one message of all that are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from mainstay_core.base import codec
from mainstay_core.base.bounds import (
    MAX_TYPES,
    Count,
    Digest,
    Index,
    Longest,
    Name,
    Range,
    Sentence,
    SlotIndex,
    TypeIndex,
    cut_fields,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import pack_head
from mainstay_core.base.words import quote
from mainstay_core.wire.segments import (
    MAX_HOLDERS,
    MAX_MICRO_BATCHES,
    MAX_SEGMENT_BYTES,
    Holder,
    Holders,
    SegmentHeader,
    SegmentKey,
    SegmentKind,
    StoreReport,
)
from mainstay_core.wire.unit_digests import MAX_TOLD_SEALS, SealText, UnitDigests
from mainstay_core.wire.votes import CommitRecord

SOCKET_NAME = "snapshots.sock"
"""Unix socket of a pod's store, in the pod's directory."""

MAX_CONFIRMED = 1 << 20
"""Segments that one message confirms: more than a holder reads before it answers."""
MAX_PEER_HEAD_BYTES = 1 << 20
"""Of a head that another pod sends, which has proved itself: a commit of many thousand experts."""

T = TypeVar("T")
SizeBytes = Annotated[int, Range(0, MAX_SEGMENT_BYTES)]

# From a trainer to the store of its pod.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A trainer says who it is; the store gives it the arena."""

    slot: SlotIndex
    incarnation: Name
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRoom:
    """A trainer wants to write a segment; its number names the room from now on."""

    request: Count
    size: SizeBytes
    window: Count = field(default=0, metadata=OMITTED)
    """First version of the window in flight, if it needs the segment; 0: it does not."""
    kind: Literal["room"] = "room"


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """A trainer writes nothing into a room after all."""

    request: Count
    kind: Literal["give-back"] = "give-back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The bytes of a segment are all in its room; they are to be sent to its holders."""

    request: Count
    """The room's."""
    header: SegmentHeader
    holders: Holders
    keep_from: Count
    """Holders keep what is as old as this version, and drop what is older."""
    kind: Literal["written"] = "written"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRecord:
    """A commit is to be kept beside the segments."""

    record: CommitRecord
    kind: Literal["record"] = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepDigests:
    """The digests of a committed step's units are to be kept beside its commit. No answer."""

    digests: UnitDigests
    holders: Holders = ()
    """Pods that are to keep them too: those that keep the trainer's copies."""
    kind: Literal["keep-digests"] = "keep-digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFrom:
    """States of older versions, gradients and records of older steps are needed no more."""

    lineage: Count
    version: Count
    may_go_back: bool = False
    """Whether the job goes on from this version, which may be an older one."""
    drops_later: bool = True
    """Whether nothing later counts, where it does."""
    kind: Literal["keep-from"] = "keep-from"


@dataclass(frozen=True, slots=True, kw_only=True)
class VotedLogs:
    """A trainer is about to vote on a step to which it gives these types; their logs count.

    The answer is :class:`Held`. It says what is lacking; then none of them counts.
    """

    request: Count
    lineage: Count
    position: Index
    """The trainer's own."""
    step: Count
    quorum: Name
    """In which it votes, as text."""
    kinds: Annotated[tuple[SegmentKind, ...], Longest(len(SegmentKind))]
    """What it sends: nothing crosses the ends of the pipeline. Without any there is nothing to
    note."""
    types: Annotated[tuple[TypeIndex, ...], Longest(MAX_TYPES)]
    micro_batches: Annotated[int, Range(1, MAX_MICRO_BATCHES)]
    """Of each type."""
    kind: Literal["voted-logs"] = "voted-logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskReport:
    """A trainer, of this pod or of another one, wants to know what is kept of a lineage."""

    request: Count
    lineage: Count
    kind: Literal["report"] = "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDigests:
    """A trainer, of this pod or of another one, wants the digests of a step's units."""

    request: Count
    lineage: Count
    position: Index
    step: Count
    kind: Literal["digests"] = "digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A trainer wants to read a segment; it stays where it is until the trainer is done."""

    request: Count
    key: SegmentKey
    kind: Literal["read"] = "read"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDone:
    """A trainer reads a segment no more."""

    request: Count
    """The one that it was asked for with."""
    kind: Literal["read-done"] = "read-done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """A segment is to be kept no more."""

    key: SegmentKey
    is_outdated: bool = field(default=False, metadata=OMITTED)
    """Whether its writer has other bytes now, for which there was no room; else they are bad."""
    kind: Literal["discard"] = "discard"


FromTrainer = (
    Hello | TakeRoom | GiveBack | Written | KeepRecord | KeepDigests | KeepFrom | VotedLogs
    | AskReport | AskDigests | Read | ReadDone | Discard
)  # fmt: skip

# From a store to a trainer of its pod.


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """The memory of the store, whose descriptor comes with this message."""

    size: Annotated[int, Range(0, MAX_SEGMENT_BYTES)]
    kind: Literal["arena"] = "arena"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A trainer has room to write."""

    request: Count
    offset: Count
    kind: Literal["room"] = "room"


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """A trainer gets no room."""

    request: Count
    why: Sentence
    kind: Literal["full"] = "full"

    def __post_init__(self) -> None:
        cut_fields(self, "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """All holders of a segment have answered, or are gone."""

    request: Count
    """The one with which it was written, or sent again."""
    why_not: Sentence
    """Why it is not at all of them; empty if it is."""
    also: Annotated[tuple[Count, ...], Longest(MAX_CONFIRMED)] = field(default=(), metadata=OMITTED)
    """Other requests with the same answer."""
    kind: Literal["held"] = "held"

    def __post_init__(self) -> None:
        cut_fields(self, "why_not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The store says what it keeps."""

    request: Count
    report: StoreReport
    kind: Literal["report"] = "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldDigests:
    """The store says what it knows of a step's units."""

    request: Count
    digests: UnitDigests | None
    """None if it does not know them."""
    kind: Literal["digests"] = "digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A segment that a trainer wants to read lies here."""

    request: Count
    header: SegmentHeader
    offset: Count
    kind: Literal["found"] = "found"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFound:
    """A segment that a trainer wants to read is not kept."""

    request: Count
    kind: Literal["not-found"] = "not-found"


ToTrainer = Arena | Room | Full | Held | Reported | ToldDigests | Found | NotFound

# Between stores, and between a reader and another pod's store.


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A segment, whose bytes are the frame's body: to be kept, or as it was asked for."""

    header: SegmentHeader
    keep_from: Count = 0
    """Of one that is to be kept: what is older goes."""
    holders: Annotated[tuple[Holder, ...], Longest(1 + MAX_HOLDERS)] = field(
        default=(), metadata=OMITTED
    )
    """Of one that is to be kept: all stores that are to keep it, the writer's first."""
    is_again: bool = field(default=False, metadata=OMITTED)
    """Whether others have gone that kept it. The holder may have a newer one, which stays."""
    kind: Literal["segment"] = "segment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A reader wants a segment, or only its header."""

    key: SegmentKey
    header_only: bool = False
    nonce: Name = field(default="", metadata=codec.OMITTED)
    """If it is not empty, only a segment that was written in the quorum of this nonce is wanted,
    and the answer comes once there is one."""
    kind: Literal["fetch"] = "fetch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A holder keeps the segments that were sent, the oldest ones it has not answered."""

    number: Annotated[int, Range(1, MAX_CONFIRMED)] = field(default=1, metadata=OMITTED)
    """How many."""
    kind: Literal["stored"] = "stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A holder does not keep the segment that was sent."""

    why: Sentence
    kind: Literal["refused"] = "refused"

    def __post_init__(self) -> None:
        cut_fields(self, "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a segment that is kept."""

    header: SegmentHeader
    kind: Literal["header"] = "header"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A segment that a reader wants is not kept."""

    kind: Literal["missing"] = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A reader got a segment whose bytes have not the digest that its header names.

    Or something wrong was made of it and of others, and nobody can tell which of them is wrong.
    """

    key: SegmentKey
    nonce: Name
    """In the header that it got."""
    digest: Digest
    """In the same header."""
    kind: Literal["doubt"] = "doubt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A store has taken note of a doubt."""

    kind: Literal["noted"] = "noted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """A store passes a commit on, to a pod whose trainers hear of none. There is no answer."""

    record: CommitRecord
    kind: Literal["record"] = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDigests:
    """A store passes the digests of a step's units on to a pod that keeps copies. No answer."""

    digests: UnitDigests
    kind: Literal["pass-digests"] = "pass-digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSeals:
    """A store wants to know of which steps of a position a pod has the digests of units."""

    position: Index
    kind: Literal["ask-seals"] = "ask-seals"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldSeals:
    """A pod says which digests of a position's units it has: others are to be passed on to it."""

    position: Index
    seals: Annotated[tuple[SealText, ...], Longest(MAX_TOLD_SEALS)]
    """Of the newest steps."""
    kind: Literal["seals"] = "seals"


FromPeer = Segment | Fetch | AskReport | AskDigests | Doubt | PassRecord | PassDigests | AskSeals
ToHolder = Stored | Refused | ToldSeals
ToReader = Segment | Header | Missing | Reported | ToldDigests | Noted
Message = FromTrainer | ToTrainer | FromPeer | ToHolder | ToReader

_FROM_TRAINER: Mapping[str, type[FromTrainer]] = {
    "hello": Hello, "room": TakeRoom, "give-back": GiveBack, "written": Written,
    "record": KeepRecord, "keep-digests": KeepDigests, "keep-from": KeepFrom,
    "voted-logs": VotedLogs, "report": AskReport, "digests": AskDigests, "read": Read,
    "read-done": ReadDone, "discard": Discard,
}  # fmt: skip
_TO_TRAINER: Mapping[str, type[ToTrainer]] = {
    "arena": Arena, "room": Room, "full": Full, "held": Held, "report": Reported,
    "digests": ToldDigests, "found": Found, "not-found": NotFound,
}  # fmt: skip
_FROM_PEER: Mapping[str, type[FromPeer]] = {
    "segment": Segment, "fetch": Fetch, "report": AskReport, "digests": AskDigests,
    "doubt": Doubt, "record": PassRecord, "pass-digests": PassDigests,
    "ask-seals": AskSeals,
}  # fmt: skip
_TO_HOLDER: Mapping[str, type[ToHolder]] = {
    "stored": Stored, "refused": Refused, "seals": ToldSeals,
}  # fmt: skip
_TO_READER: Mapping[str, type[ToReader]] = {
    "segment": Segment, "header": Header, "missing": Missing, "report": Reported,
    "digests": ToldDigests, "noted": Noted,
}  # fmt: skip


def encode(message: Message, body_size: int = 0) -> bytes:
    """Return the frame of a message up to its body, which has ``body_size`` bytes."""
    return pack_head(codec.encode(message), body_size)


def decode_from_trainer(head: Mapping[str, Any]) -> FromTrainer:
    """Return what a trainer says to its store.

    Raises:
        RemoteProtocolError: it says nothing of this kind, or a value is missing, of another type or
            out of its bounds. So do the other functions that decode.
    """
    return _decode(_FROM_TRAINER, head)


def decode_to_trainer(head: Mapping[str, Any]) -> ToTrainer:
    """Return what a store says to a trainer of its pod."""
    return _decode(_TO_TRAINER, head)


def decode_from_peer(head: Mapping[str, Any], body_size: int) -> FromPeer:
    """Return what another pod's store, or a reader, says to a store; also by its body's size."""
    message = _decode(_FROM_PEER, head)
    _check_body(message, body_size)
    return message


def decode_to_holder(head: Mapping[str, Any], body_size: int) -> ToHolder:
    """Return what a holder answers to a store."""
    message = _decode(_TO_HOLDER, head)
    _check_body(message, body_size)
    return message


def decode_to_reader(head: Mapping[str, Any], body_size: int) -> ToReader:
    """Return what a store answers to a reader."""
    message = _decode(_TO_READER, head)
    _check_body(message, body_size)
    return message


def _decode(kinds: Mapping[str, type[T]], head: Mapping[str, Any]) -> T:
    kind = head.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise RemoteProtocolError(f"unknown kind {quote(kind)}")
    return codec.decode(kinds[kind], head)


def _check_body(message: object, size: int) -> None:
    expected = message.header.size_bytes if isinstance(message, Segment) else 0
    if size != expected:
        raise RemoteProtocolError(f"a body of {size} bytes, not of {expected}")
