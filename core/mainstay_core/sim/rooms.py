"""The gather: the star through which a quorum settles and votes.

The server is that of ``mainstay_agent.gather`` and the client that of
``mainstay_train.comm.gather_client``, rule by rule; only bytes are values here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.base.ids import QuorumId
from mainstay_core.sim.checks import Checks
from mainstay_core.sim.engine import Process, Signal, Steps, Violation
from mainstay_core.sim.network import End, Listener, Network
from mainstay_core.wire.plan import Plan


class QuorumAborted(Exception):  # noqa: N818 - as in the trainer
    """The quorum has ended."""

    def __init__(self, why: str, suspects: tuple[int, ...] = ()) -> None:
        super().__init__(why)
        self.why, self.suspects = why, suspects


@dataclass(frozen=True, slots=True)
class Join:
    """A member enters."""

    quorum: str
    index: int
    size: int
    incarnation: str
    number: int
    """Id of the quorum."""


@dataclass(frozen=True, slots=True)
class Post:
    """A member's contribution to a key."""

    key: str
    body: Any


@dataclass(frozen=True, slots=True)
class Abort:
    """The quorum ends: from a member, or to all others."""

    why: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """A member has moved on together with the others."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """All bodies of a key, by index."""

    key: str
    bodies: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Holds:
    """A supervisor names the plan that it holds."""

    quorum: QuorumId


@dataclass(frozen=True, slots=True)
class Passed:
    """A plan from a supervisor; the answer to one is None."""

    plan: Plan | None


@dataclass(slots=True)
class _Room:
    quorum: str
    size: int
    members: dict[int, _Connection] = field(default_factory=dict)
    incarnations: dict[int, str] = field(default_factory=dict)
    posts: dict[str, dict[int, Any]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


class GatherServer:
    """Rooms of all quorums that meet at a pod; lives in its supervisor."""

    def __init__(
        self,
        process: Process,
        network: Network,
        address: str,
        checks: Checks,
        on_plan: Callable[[Plan], None],
    ) -> None:
        self._rooms: dict[str, _Room] = {}
        self._dead: dict[str, Abort] = {}
        self._checks = checks
        self._on_plan = on_plan
        self._plan: Plan | None = None
        self._connections: set[_Connection] = set()
        self.quiet = Signal()
        """Fired when nobody is connected any more."""
        network.listen(address, Listener(process, accept=self._accept))

    def _accept(self, end: End) -> None:
        self._connections.add(_Connection(self, end))

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is connected."""
        return not self._connections

    def hold(self, plan: Plan) -> None:
        """Give this plan to whoever joins an older quorum from now on."""
        self._plan = plan

    def _answer(self, message: Holds | Passed) -> Passed | Holds:
        if isinstance(message, Passed):
            if message.plan is not None:
                self._on_plan(message.plan)
            return Passed(None)
        ours = self._plan
        if ours is None or message.quorum.id > ours.quorum.id:
            return message  # wanted
        return Passed(ours if message.quorum.id < ours.quorum.id else None)

    def detach(self, connection: _Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        if not self._connections:
            self.quiet.fire()
        room = connection.room
        if room is None or room.members.get(connection.index) is not connection:
            return
        del room.members[connection.index]
        if connection.has_left:
            if not room.members:
                self._kill(room.quorum, Abort("all members have moved on"), None)
            return
        why = f"the connection of member {connection.index} ended"
        self._kill(room.quorum, Abort(why, (connection.index,)), None)

    def _kill(self, quorum: str, death: Abort, spare: _Connection | None) -> None:
        if quorum in self._dead:
            return
        self._dead[quorum] = death
        room = self._rooms.pop(quorum, None)
        if room is None:
            return
        for member in room.members.values():
            if member is not spare:
                member.end.send(death)

    def handle(self, connection: _Connection, message: Any) -> None:
        """Handle a message of a member."""
        if isinstance(message, Join):
            if self._plan is not None and message.number < self._plan.quorum.id:
                connection.end.send(Passed(self._plan))
            self._join(connection, message)
            return
        if isinstance(message, Holds | Passed):
            connection.end.send(self._answer(message))
            return
        room = connection.room
        if room is None:
            connection.end.send(Abort("refused"))
            connection.end.close()
        elif isinstance(message, Post):
            self._post(connection, room, message)
        elif isinstance(message, Abort):
            self._kill(room.quorum, message, connection)
        else:
            self._leave(connection, room)

    def _join(self, connection: _Connection, join: Join) -> None:
        death = self._dead.get(join.quorum)
        if death is not None:
            connection.end.send(death)
            return
        room = self._rooms.setdefault(join.quorum, _Room(join.quorum, join.size))
        taken = room.incarnations.get(join.index)
        if taken is not None or room.size != join.size:
            connection.end.send(Abort(f"member {join.index} of {join.quorum} has joined before"))
            return
        self._checks.joined(join.quorum, join.index, join.incarnation)
        room.members[join.index] = connection
        room.incarnations[join.index] = join.incarnation
        connection.room, connection.index = room, join.index

    def _post(self, connection: _Connection, room: _Room, post: Post) -> None:
        death = self._dead.get(room.quorum)
        if death is not None:
            connection.end.send(death)
            return
        posts = room.posts.setdefault(post.key, {})
        posts[connection.index] = post.body
        if len(posts) == room.size:
            del room.posts[post.key]
            message = Gathered(post.key, tuple(posts[index] for index in range(room.size)))
            for member in room.members.values():
                member.end.send(message)
        elif room.left - posts.keys():
            why = f"member {min(room.left - posts.keys())} has moved on"
            self._kill(room.quorum, Abort(why), None)

    def _leave(self, connection: _Connection, room: _Room) -> None:
        connection.has_left = True
        room.left.add(connection.index)
        if any(connection.index not in posts for posts in room.posts.values()):
            why = f"member {connection.index} has moved on"
            self._kill(room.quorum, Abort(why), connection)


class _Connection:
    """One member's connection, at the server."""

    __slots__ = ("end", "has_left", "index", "room")

    def __init__(self, server: GatherServer, end: End) -> None:
        self.end = end
        self.room: _Room | None = None
        self.index = -1
        self.has_left = False
        end.on_message = lambda message: server.handle(self, message)
        end.on_end = lambda _: server.detach(self)


class GatherClient:
    """One member of one quorum's gather.

    Args:
        process: the trainer.
        network: how it reaches the server.
        address: of the gather server.
        join: who it is.
        changed: fired with everything that may end a wait.
        on_abort: called when the quorum ends by others' doing.
        on_plan: called with a newer plan that the server's supervisor holds.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        address: str,
        join: Join,
        changed: Signal,
        on_abort: Any,
        on_plan: Any,
    ) -> None:
        self._join, self._changed = join, changed
        self._on_abort, self._on_plan = on_abort, on_plan
        self._end: End | None = None
        self._posted: set[str] = set()
        self._gathered: dict[str, tuple[Any, ...]] = {}
        self.ended: QuorumAborted | None = None
        network.connect(process, address, self._opened, self._failed)

    def post(self, key: str, body: object) -> Steps[None]:
        """Give this member's body for ``key``.

        Raises:
            QuorumAborted: the quorum has ended.
        """
        while self._end is None and self.ended is None:
            yield self._changed
        if self.ended is not None:
            raise QuorumAborted(self.ended.why, self.ended.suspects)
        if key in self._posted:
            raise Violation(f"I4: {key} of {self._join.quorum} is posted twice")
        self._posted.add(key)
        assert self._end is not None
        self._end.send(Post(key, body))

    def wait(self, key: str) -> Steps[tuple[Any, ...]]:
        """Return all bodies by index.

        Raises:
            QuorumAborted: the quorum ended before all had posted.
        """
        while key not in self._gathered and self.ended is None:
            yield self._changed
        if key in self._gathered:
            return self._gathered.pop(key)
        assert self.ended is not None
        raise QuorumAborted(self.ended.why, self.ended.suspects)

    def abort(self, why: str) -> None:
        """End the quorum for everybody."""
        self._say_and_end(Abort(why), QuorumAborted(why))

    def leave(self) -> None:
        """Shut this side without disturbing the others."""
        self._say_and_end(Leave(), QuorumAborted("this member has moved on"))

    def _say_and_end(self, last: object, ended: QuorumAborted) -> None:
        first = self.ended is None
        if first:
            self.ended = ended
        if self._end is not None:
            if first:
                self._end.send(last)
            self._end.close()
        self._changed.fire()

    def _opened(self, end: End) -> None:
        if self.ended is not None:
            end.close()
            return
        self._end = end
        end.on_message, end.on_end = self._on_message, self._on_end
        end.send(self._join)
        self._changed.fire()

    def _failed(self, why: str) -> None:
        self._lost(QuorumAborted(f"gather server: {why}"))

    def _on_end(self, why: str) -> None:
        del why
        self._lost(QuorumAborted("the gather server's connection ended"))

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Passed):
            self._on_plan(message.plan)
            return
        if isinstance(message, Abort):
            assert self._end is not None
            self._end.close()
            self._lost(QuorumAborted(message.why, message.suspects))
            return
        assert isinstance(message, Gathered)
        self._gathered[message.key] = message.bodies
        self._changed.fire()

    def _lost(self, ended: QuorumAborted) -> None:
        told = self.ended is None
        if told:
            self.ended = ended
        self._changed.fire()
        if told:
            self._on_abort(ended.why)
