"""The messages between a member and its gather server, as values and as frames.

The values in a frame's head have the bounds of their types (:mod:`mainstay_core.base.bounds`), like
those of every message. Bodies and plans are opaque here. On a socket a body is bytes, and a plan
becomes JSON when it is sent; the simulation carries the values themselves and never makes bytes of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_MEMBERS, Index, Longest, Name, Sentence, cut_fields
from mainstay_core.base.errors import MalformedError, RemoteProtocolError
from mainstay_core.base.frames import Frame, pack, pack_head
from mainstay_core.base.ids import QuorumId

Body = TypeVar("Body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A member asks to be let into the room of its quorum."""

    quorum: Name
    """Id and nonce as text, ``q{id}-{nonce}``."""
    index: Index
    """Index of the member in the plan."""
    size: Index
    """Number of members."""
    incarnation: Name
    """This life of the trainer."""

    @property
    def number(self) -> int | None:
        """Id of the quorum; None if its text names none."""
        try:
            return QuorumId.parse(self.quorum).id
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Post(Generic[Body]):
    """A member's contribution to one key."""

    key: str
    body: Body
    of: int | None = None
    """How many members post this key; None: all of the quorum. Only they get what is gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The quorum has ended: a member says so, and the server says so to all others."""

    why: Sentence
    suspects: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)] = ()
    """Indices of members that seem gone. A hint, never a decision."""

    def __post_init__(self) -> None:
        cut_fields(self, "why")


@dataclass(frozen=True, slots=True)
class Leave:
    """A member has moved on together with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Generic[Body]):
    """The bodies of all who post one key, in the order of their indices."""

    key: str
    bodies: tuple[Body, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Newer:
    """A plan for a member that has joined a quorum older than this plan's."""

    plan: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keyed:
    """The head of a frame whose body is about one key."""

    key: Name
    of: Index | None = None


def encode(message: Join | Post[bytes] | Abort | Leave | Gathered[bytes] | Newer) -> bytes:
    """Return the frame of a message."""
    match message:
        case Join():
            head = {name: getattr(message, name) for name in Join.__dataclass_fields__}
            return pack({"kind": "join", **head})
        case Post():
            of = {} if message.of is None else {"of": message.of}
            return pack({"kind": "post", "key": message.key, **of}, message.body)
        case Abort():
            suspects = list(message.suspects)
            return pack({"kind": "abort", "why": message.why, "suspects": suspects})
        case Leave():
            return pack({"kind": "leave"})
        case Gathered():
            total = b"".join(message.bodies)
            sizes = [len(body) for body in message.bodies]
            head = {"kind": "gathered", "key": message.key, "sizes": sizes}
            return pack_head(head, len(total)) + total
        case Newer():
            return pack({"kind": "plan", "plan": codec.encode(message.plan)})


def decode_for_server(frame: Frame) -> Join | Post[bytes] | Abort | Leave:
    """Return what a member says.

    Raises:
        RemoteProtocolError: a member says nothing of this kind, or a value is missing, of another
            type or out of its bounds.
    """
    match frame.kind:
        case "join":
            return codec.decode(Join, frame.head)
        case "post":
            head = codec.decode(_Keyed, frame.head, "Post")
            return Post(key=head.key, body=frame.body, of=head.of)
        case "abort":
            return codec.decode(Abort, frame.head)
        case "leave":
            return Leave()
        case kind:
            raise RemoteProtocolError(f"unknown kind {kind!r}")


def decode_for_member(frame: Frame) -> Gathered[bytes] | Abort | Newer:
    """Return what a gather server says.

    Raises:
        RemoteProtocolError: a server says nothing of this kind, or a value is missing, of another
            type or out of its bounds.
    """
    match frame.kind:
        case "gathered":
            key = codec.decode(_Keyed, frame.head, "Gathered").key
            return Gathered(key=key, bodies=_bodies(frame))
        case "abort":
            return codec.decode(Abort, frame.head)
        case "plan":
            if "plan" not in frame.head:
                raise MalformedError("Newer.plan", "missing")
            return Newer(plan=frame.head["plan"])
        case kind:
            raise RemoteProtocolError(f"unknown kind {kind!r}")


def _bodies(frame: Frame) -> tuple[bytes, ...]:
    """Return the members' bodies, which lie one behind the other in the frame's."""
    sizes = frame.head.get("sizes")
    if not isinstance(sizes, list) or len(sizes) > MAX_MEMBERS:
        raise MalformedError("Gathered.sizes", f"is no list of at most {MAX_MEMBERS} sizes")
    if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != len(frame.body):
        raise MalformedError("Gathered.sizes", f"are not the sizes of {len(frame.body)} bytes")
    bodies, offset = [], 0
    for size in sizes:
        bodies.append(frame.body[offset : offset + size])
        offset += size
    return tuple(bodies)
