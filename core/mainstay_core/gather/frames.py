"""The messages between a member and its gather server, as values and as frames.

Bodies and plans are opaque here. On a socket a body is bytes, and a plan becomes JSON when it is
sent; the simulation carries the values themselves and never makes bytes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import Frame, pack, pack_head
from mainstay_core.base.ids import QuorumId

Body = TypeVar("Body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A member asks to be let into the room of its quorum."""

    quorum: str
    """Id and nonce as text, ``q{id}-{nonce}``."""
    index: int
    """Index of the member in the plan."""
    size: int
    """Number of members."""
    incarnation: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The quorum has ended: a member says so, and the server says so to all others."""

    why: str
    suspects: tuple[int, ...] = ()
    """Indices of members that seem gone. A hint, never a decision."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A member has moved on together with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Generic[Body]):
    """The bodies of all members for one key, in the order of their indices."""

    key: str
    bodies: tuple[Body, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Newer:
    """A plan for a member that has joined a quorum older than this plan's."""

    plan: Any


def encode(message: Join | Post[bytes] | Abort | Leave | Gathered[bytes] | Newer) -> bytes:
    """Return the frame of a message."""
    match message:
        case Join():
            head = {name: getattr(message, name) for name in Join.__dataclass_fields__}
            return pack({"kind": "join", **head})
        case Post():
            return pack({"kind": "post", "key": message.key}, message.body)
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
        RemoteProtocolError: a member says nothing of this kind.
        KeyError, TypeError, ValueError: a value is missing, or is of another type.
    """
    head = frame.head
    match frame.kind:
        case "join":
            return Join(
                quorum=str(head["quorum"]),
                index=int(head["index"]),
                size=int(head["size"]),
                incarnation=str(head["incarnation"]),
            )
        case "post":
            return Post(key=str(head["key"]), body=frame.body)
        case "abort":
            return _abort(head)
        case "leave":
            return Leave()
        case kind:
            raise RemoteProtocolError(f"unknown kind {kind!r}")


def decode_for_member(frame: Frame) -> Gathered[bytes] | Abort | Newer:
    """Return what a gather server says.

    Raises:
        RemoteProtocolError: a server says nothing of this kind.
        KeyError, TypeError, ValueError: a value is missing, or is of another type.
    """
    head = frame.head
    match frame.kind:
        case "gathered":
            bodies, offset = [], 0
            for size in head["sizes"]:
                bodies.append(frame.body[offset : offset + size])
                offset += size
            return Gathered(key=str(head["key"]), bodies=tuple(bodies))
        case "abort":
            return _abort(head)
        case "plan":
            return Newer(plan=head["plan"])
        case kind:
            raise RemoteProtocolError(f"unknown kind {kind!r}")


def _abort(head: dict[str, Any]) -> Abort:
    suspects = tuple(int(index) for index in head.get("suspects", ()))
    return Abort(why=str(head["why"]), suspects=suspects)
