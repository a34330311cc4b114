"""The rooms of all quorums that meet at one pod, without sockets.

Every quorum has one *room*:

* Every member joins once and posts a body for each key. When all have posted a key,
  each gets all bodies in the order of the members' indices. A key may be for some of the
  members alone, as many as each of its posts says: so the ranks of a group meet.
* When a joined member's connection ends or a member says :class:`~.frames.Abort`, the
  room is dead: all others are told at once, and whoever comes later is told on arrival.
* A member that says :class:`~.frames.Leave` has moved on together with the others (a
  planned plan, the end of the job). Nobody is interrupted, but no key for all can complete
  that it has not posted: such a post is answered by an abort without suspects.

Every room ends with its first member's connection, so nothing has to be expired; the
names of dead rooms are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.gather.frames import Abort, Body, Gathered, Join, Leave, Newer, Post

Connection = TypeVar("Connection", bound=Hashable)
"""A connection as whoever drives the server names it."""

MAX_DEAD_ROOMS = 4096
"""How many dead rooms are remembered, so that a late member is told instead of left waiting."""


@dataclass(frozen=True, slots=True)
class Send(Generic[Connection, Body]):
    """Send one message to each of these connections that still stands."""

    to: tuple[Connection, ...]
    message: Gathered[Body] | Abort | Newer


@dataclass(frozen=True, slots=True)
class Close(Generic[Connection]):
    """Close a connection after what was sent to it."""

    connection: Connection


Actions: TypeAlias = list[Send[Connection, Body] | Close[Connection]]


@dataclass(slots=True)
class _Room(Generic[Connection, Body]):
    quorum: str
    size: int
    members: dict[int, Connection] = field(default_factory=dict)
    incarnations: dict[int, str] = field(default_factory=dict)
    """Every life that has ever joined, so that no other takes its place."""
    posts: dict[str, dict[int, Body]] = field(default_factory=dict)
    """Bodies by index of every key that is not complete."""
    parts: dict[str, int] = field(default_factory=dict)
    """How many members post a key that is not complete and not for all."""
    left: set[int] = field(default_factory=set)
    """Indices of the members that moved on: keys that they did not post can never complete."""


@dataclass(slots=True)
class _Member(Generic[Connection, Body]):
    """A member that has joined through one connection."""

    room: _Room[Connection, Body]
    index: int
    has_left: bool = False


class ServerProtocol(Generic[Connection, Body]):
    """The gather server: a machine without sockets.

    Whoever drives it reports what happens to connections and carries out the returned
    actions in order. The end of a connection is reported whoever has closed it. A connection
    whose peer has not proved the job's secret (:mod:`mainstay_core.base.proofs`) is not reported.
    """

    def __init__(self) -> None:
        self._number = -1
        self._plan: object = None
        self._rooms: dict[str, _Room[Connection, Body]] = {}
        self._dead: OrderedDict[str, Abort] = OrderedDict()
        self._connections: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._members: dict[Connection, _Member[Connection, Body]] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is connected: the quorums that met here have moved on."""
        return not self._connections

    def is_member(self, connection: Connection) -> bool:
        """Return whether a room was entered through this connection."""
        return connection in self._members

    def hold(self, number: int, plan: object) -> None:
        """Give this plan to whoever joins an older quorum from now on.

        Args:
            number: id of the plan's quorum.
            plan: the plan; few members ever need it, so it is made JSON for them alone.
        """
        self._number, self._plan = number, plan

    def opened(self, connection: Connection) -> None:
        """Take note of a connection that somebody has opened."""
        self._connections.add(connection)

    def received(
        self, connection: Connection, message: Join | Post[Body] | Abort | Leave
    ) -> Actions[Connection, Body]:
        """Take a message; whoever breaks the protocol by it is refused."""
        if connection in self._refused:
            return []
        try:
            if isinstance(message, Join):
                return self._join(connection, message)
            member = self._members.get(connection)
            if member is None:
                raise RemoteProtocolError(f"{type(message).__name__.lower()!r} before join")
        except RemoteProtocolError as error:
            return self.refuse(connection, error)
        if isinstance(message, Post):
            return self._post(connection, member, message)
        if isinstance(message, Leave):
            return self._leave(connection, member)
        return self._kill(member.room.quorum, message, spare=connection)

    def refuse(self, connection: Connection, error: Exception) -> Actions[Connection, Body]:
        """Turn away a peer that does not speak the protocol; the end of a member ends its room."""
        self._refused.add(connection)
        return [Send((connection,), Abort(why=f"refused: {error!r}")), Close(connection)]

    def ended(self, connection: Connection) -> Actions[Connection, Body]:
        """Take note that a connection has ended."""
        self._connections.discard(connection)
        self._refused.discard(connection)
        member = self._members.pop(connection, None)
        if member is None:
            return []
        room = member.room
        del room.members[member.index]
        if not member.has_left:
            why = f"the connection of member {member.index} ended"
            return self._kill(room.quorum, Abort(why=why, suspects=(member.index,)))
        if not room.members:
            return self._kill(room.quorum, Abort(why="all members have moved on"))
        return []

    def _join(self, connection: Connection, join: Join) -> Actions[Connection, Body]:
        if connection in self._members:
            raise RemoteProtocolError("joined twice on one connection")
        if not 0 <= join.index < join.size:
            raise RemoteProtocolError(f"index {join.index} is not below size {join.size}")
        actions: Actions[Connection, Body] = []
        if join.number is not None and join.number < self._number:
            # It may have missed the plan; it decides what that means.
            actions.append(Send((connection,), Newer(plan=self._plan)))
        refusal = self._dead.get(join.quorum) or self._why_not(join)
        if refusal is not None:
            return [*actions, Send((connection,), refusal)]
        room = self._rooms.setdefault(join.quorum, _Room(join.quorum, join.size))
        room.members[join.index] = connection
        room.incarnations[join.index] = join.incarnation
        self._members[connection] = _Member(room, join.index)
        return actions

    def _why_not(self, join: Join) -> Abort | None:
        """What a newcomer alone is told: a restarted process must not disturb a running quorum."""
        room = self._rooms.get(join.quorum)
        if room is None:
            return None
        taken = room.incarnations.get(join.index)
        if taken is None:
            if room.size == join.size:
                return None
            return Abort(why=f"{join.quorum} has {room.size} members, not {join.size}")
        member = f"member {join.index} of {join.quorum}"
        if taken == join.incarnation:
            return Abort(why=f"{member} has joined before")
        return Abort(why=f"{member} is incarnation {taken}, not {join.incarnation}")

    def _post(
        self, connection: Connection, member: _Member[Connection, Body], post: Post[Body]
    ) -> Actions[Connection, Body]:
        room = member.room
        death = self._dead.get(room.quorum)
        if death is not None:
            return [Send((connection,), death)]
        posts = room.posts.setdefault(post.key, {})
        wrong = _why_not_post(room, post)
        if wrong:
            return self.refuse(connection, RemoteProtocolError(wrong))
        posts[member.index] = post.body
        if len(posts) == (post.of or room.size):
            del room.posts[post.key]
            room.parts.pop(post.key, None)
            indices = sorted(posts)
            gathered = Gathered(key=post.key, bodies=tuple(posts[index] for index in indices))
            return [Send(tuple(room.members[i] for i in indices if i in room.members), gathered)]
        gone = room.left - posts.keys()
        if gone and post.of is None:
            return self._kill(room.quorum, Abort(why=f"member {min(gone)} has moved on"))
        return []

    def _leave(
        self, connection: Connection, member: _Member[Connection, Body]
    ) -> Actions[Connection, Body]:
        room = member.room
        member.has_left = True
        room.left.add(member.index)
        for_all = (posts for key, posts in room.posts.items() if key not in room.parts)
        if all(member.index in posts for posts in for_all):
            return []
        why = f"member {member.index} has moved on"
        return self._kill(room.quorum, Abort(why=why), spare=connection)

    def _kill(
        self, quorum: str, death: Abort, spare: Connection | None = None
    ) -> Actions[Connection, Body]:
        """End a room, and tell all its members but one. A room dies once."""
        if quorum in self._dead:
            return []
        self._dead[quorum] = death
        while len(self._dead) > MAX_DEAD_ROOMS:
            self._dead.popitem(last=False)
        room = self._rooms.pop(quorum, None)
        others = tuple(m for m in room.members.values() if m != spare) if room else ()
        return [Send(others, death)] if others else []


def _why_not_post(room: _Room[Connection, Body], post: Post[Body]) -> str:
    """Take note of how many members post the key; return why this one may not, or nothing."""
    if post.of is not None and not 1 <= post.of <= room.size:
        return f"{post.key} is for {post.of} of {room.size} members"
    begun = bool(room.posts[post.key])
    if begun and room.parts.get(post.key) != post.of:
        return f"{post.key} is for {room.parts.get(post.key, 'all')} members, not {post.of}"
    if post.of is not None:
        room.parts[post.key] = post.of
    return ""
