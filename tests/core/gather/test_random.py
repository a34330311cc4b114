"""Many members in random order, against a twin that is a few dictionaries of posts.

Members and server are the machines of the product; between them are queues, and one seed
draws who speaks, what arrives when, and which connection breaks. After every event at the
server the twin says, from the whole of what it knows, what the server has to answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.worlds.gather import END, Line, PlayedGather

from mainstay_core.gather.client import ClientProtocol, QuorumAborted
from mainstay_core.gather.frames import Abort, Gathered, Join, Leave, Newer, Post
from mainstay_core.gather.server import Send, ServerProtocol

QUORUMS = {"q1-a": 3, "q2-a": 3, "q2-b": 2, "q3-a": 4}
"""Names of all quorums, and how many members each has."""
KEYS = ("settle", "vote/0/0", "vote/1/0")
MEET, MEETING = "meet", (0, 1)
"""A key that only these members post, by index."""
NUM_SEEDS, NUM_MOVES = 200, 250


class Member:
    """A trainer at its end of a line.

    Args:
        number: tells this member from all others.
        line: to the server.
    """

    def __init__(self, number: int, line: Line) -> None:
        self.number, self.line = number, line
        self.join, self.client = line.join, line.client
        self.posted: set[str] = set()
        self.taken: set[str] = set()
        self.told: list[QuorumAborted] = []
        self.ends_itself = False


class Twin:
    """The rules of the gather, applied to everything that is known after every event."""

    def __init__(self) -> None:
        self.posts: dict[tuple[str, str], dict[int, str]] = {}
        self.lives: dict[str, dict[int, Member]] = {}
        """By quorum: whoever was let in, by index."""
        self.gone: set[int] = set()
        self.left: set[int] = set()
        self.deaths: dict[str, Abort] = {}
        self.refused: set[int] = set()
        self.newest: tuple[int, object] = (-1, None)

    def answers(self, member: Member, message: object) -> list[tuple[int, object]]:
        """Return what has to be sent: (member's number, message)."""
        quorum, index = member.join.quorum, member.join.index
        seats = self.lives.setdefault(quorum, {})
        if member.number in self.refused:
            return []
        if isinstance(message, Join):
            number = int(quorum[1])
            given = [(member.number, Newer(plan=self.newest[1]))] * (number < self.newest[0])
            if quorum in self.deaths:
                return [*given, (member.number, self.deaths[quorum])]
            if index in seats:
                return [*given, (member.number, self._taken(seats[index], message))]
            seats[index] = member
            return given
        if seats.get(index) is not member:
            return self._refuse(member, message)
        if message is END:
            self.gone.add(member.number)
            return self._kill(quorum, self._find_death(quorum))
        if isinstance(message, Abort):
            return self._kill(quorum, message, but=member)
        if isinstance(message, Leave):
            self.left.add(member.number)
            return self._kill(quorum, self._find_death(quorum), but=member)
        assert isinstance(message, Post)
        if quorum in self.deaths:
            return [(member.number, self.deaths[quorum])]
        posts = self.posts.setdefault((quorum, message.key), {})
        posts[index] = message.body
        if message.of is not None:
            if len(posts) < message.of:
                return []
            whole = Gathered(key=MEET, bodies=tuple(posts[i] for i in MEETING))
            return [(m.number, whole) for m in self._present(quorum) if m.join.index in MEETING]
        if len(posts) == QUORUMS[quorum]:
            bodies = tuple(posts[i] for i in range(QUORUMS[quorum]))
            whole = Gathered(key=message.key, bodies=bodies)
            return [(m.number, whole) for m in self._present(quorum)]
        return self._kill(quorum, self._find_death(quorum))

    def _present(self, quorum: str) -> list[Member]:
        return [m for m in self.lives[quorum].values() if m.number not in self.gone]

    def _find_death(self, quorum: str) -> Abort | None:
        """Why nothing can complete any more, if that is so."""
        seats = self.lives[quorum]
        for index, member in seats.items():
            if member.number in self.gone and member.number not in self.left:
                return Abort(why=f"the connection of member {index} ended", suspects=(index,))
        moved = {i for i, m in seats.items() if m.number in self.left}
        for (name, key), posts in self.posts.items():
            missing = moved - posts.keys() if key != MEET else None
            if name == quorum and missing and len(posts) < QUORUMS[quorum]:
                return Abort(why=f"member {min(missing)} has moved on")
        if all(m.number in self.gone for m in seats.values()):
            return Abort(why="all members have moved on")
        return None

    def _kill(
        self, quorum: str, death: Abort | None, but: Member | None = None
    ) -> list[tuple[int, object]]:
        if death is None or quorum in self.deaths:
            return []
        self.deaths[quorum] = death
        return [(m.number, death) for m in self._present(quorum) if m is not but]

    @staticmethod
    def _taken(holder: Member, join: Join) -> Abort:
        ours = f"member {join.index} of {join.quorum}"
        life = holder.join.incarnation
        if life == join.incarnation:
            return Abort(why=f"{ours} has joined before")
        return Abort(why=f"{ours} is incarnation {life}, not {join.incarnation}")

    def _refuse(self, member: Member, message: object) -> list[tuple[int, object]]:
        if message is END:
            return []
        self.refused.add(member.number)
        name = type(message).__name__.lower()
        why = f"refused: RemoteProtocolError({f'{name!r} before join'!r})"
        return [(member.number, Abort(why=why)), (member.number, END)]


class Star:
    """A played gather, and somebody who draws what happens.

    Args:
        seed: draws everything.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gather = PlayedGather()
        self.twin = Twin()
        self.members: list[Member] = []
        self.happened: set[str] = set()

    def run(self, num_moves: int) -> None:
        moves: list[Callable[[], None]] = [self.begin, *[self.act] * 3]
        moves += [*[self.arrive] * 6, *[self.hear] * 4]
        for _ in range(num_moves):
            self.rng.choice(moves)()
            if self.rng.random() < 0.01:
                self.hold()
            if self.rng.random() < 0.01:
                self.reset()
        while any(m.line.to_server or m.line.to_member for m in self.members):
            self.arrive()
            self.hear()
        self.check_nobody_waits_in_vain()

    # What happens -----------------------------------------------------------

    def begin(self) -> None:
        """A trainer connects: mostly one that its quorum lacks, sometimes another life."""
        quorum = self.rng.choice(list(QUORUMS))
        index = self.rng.randrange(QUORUMS[quorum])
        known = {(m.join.quorum, m.join.index) for m in self.members}
        if (quorum, index) in known and self.rng.random() < 0.9:
            return
        life = self.rng.choice(["first", "first", "second"])
        join = Join(quorum=quorum, index=index, size=QUORUMS[quorum], incarnation=f"{life}{index}")
        self.members.append(Member(len(self.members), self.gather.enter(join)))

    def act(self) -> None:
        """A trainer posts, takes, or ends its side."""
        if not self.members:
            return
        member = self.rng.choice(self.members)
        client, roll = member.client, self.rng.random()
        if client.ended is not None:
            self.check_ended(member)
        elif roll < 0.9:
            key = self.rng.choice((*KEYS, MEET) if member.join.index in MEETING else KEYS)
            if key in member.posted:
                self.take(member, key)
            else:
                of = len(MEETING) if key == MEET else None
                member.line.post(key, f"{member.join.quorum}/{member.join.incarnation}/{key}", of)
                member.posted.add(key)
        else:
            member.ends_itself = True
            member.line.leave() if roll < 0.97 else member.line.abort("why", (1,))

    def take(self, member: Member, key: str) -> None:
        if key in member.taken or not member.client.may_take(key):
            return
        bodies = member.client.take(key)
        quorum, lives = member.join.quorum, self.twin.lives[member.join.quorum]
        expected = tuple(
            f"{quorum}/{lives[index].join.incarnation}/{key}" for index in self.parties(quorum, key)
        )
        assert bodies == expected, "every member's own words in this quorum, by index"
        self.happened.add("met" if key == MEET else "gathered")
        member.taken.add(key)

    @staticmethod
    def parties(quorum: str, key: str) -> range:
        return range(len(MEETING) if key == MEET else QUORUMS[quorum])

    def hold(self) -> None:
        number = self.rng.randrange(1, 5)
        self.gather.server.hold(number, f"plan {number}")
        self.twin.newest = (number, f"plan {number}")

    def reset(self) -> None:
        standing = [m for m in self.members if m.line.is_open]
        if standing:
            self.rng.choice(standing).line.reset()

    # What arrives -----------------------------------------------------------

    def arrive(self) -> None:
        """Something arrives at the server, and the twin knows what it answers."""
        waiting = [m for m in self.members if m.line.to_server]
        if not waiting:
            return
        member = self.rng.choice(waiting)
        message = member.line.to_server[0]
        numbers = {m.line: m.number for m in self.members}
        answered = [(numbers[line], answer) for line, answer in self.gather.serve(member.line)]
        expected = self.twin.answers(member, message)
        assert sorted(answered, key=lambda a: a[0]) == sorted(expected, key=lambda a: a[0])
        for _, answer in answered:
            if isinstance(answer, Abort):
                self.happened.add(answer.why.translate(str.maketrans("", "", "0123456789")))

    def hear(self) -> None:
        """Something arrives at a member."""
        waiting = [m for m in self.members if m.line.to_member]
        if not waiting:
            return
        member = self.rng.choice(waiting)
        told = self.gather.hear(member.line)
        if isinstance(told, QuorumAborted):
            assert not member.ends_itself
            member.told.append(told)
        elif told is not None:
            self.happened.add("newer plan")

    # What must hold ---------------------------------------------------------

    def check_ended(self, member: Member) -> None:
        assert len(member.told) == (not member.ends_itself), "told once, and never of its own doing"
        with pytest.raises(QuorumAborted):
            member.client.post("another key", "")

    def check_nobody_waits_in_vain(self) -> None:
        """Everything has arrived: who still waits does so for somebody who may still come."""
        for member in self.members:
            if member.client.ended is not None:
                self.check_ended(member)
                continue
            quorum = member.join.quorum
            assert quorum not in self.twin.deaths
            for key in member.posted - member.taken:
                if not member.client.may_take(key):
                    late = set(self.parties(quorum, key)) - self.twin.posts[quorum, key].keys()
                    present = {m.join.index for m in self.twin._present(quorum)}
                    if key == MEET:  # who has moved on meets elsewhere, as do the others soon
                        present |= late
                    absent = set(range(QUORUMS[quorum])) - self.twin.lives[quorum].keys()
                    assert late <= present | absent


def run_all() -> set[str]:
    """Run all seeds; returns what has happened in any of them."""
    happened: set[str] = set()
    for seed in range(NUM_SEEDS):
        star = Star(seed)
        star.run(NUM_MOVES)
        happened |= star.happened
    return happened


def test_every_member_gets_what_the_rules_say_whatever_the_order() -> None:
    assert run_all() >= {
        "gathered",
        "met",
        "newer plan",
        "why",
        "the connection of member  ended",
        "member  has moved on",
        "all members have moved on",
        "member  of q-a has joined before",
        "member  of q-a is incarnation first, not second",
    }


# Deliberate mistakes ----------------------------------------------------------

JOIN = vars(ServerProtocol)["_join"]
POST = vars(ServerProtocol)["_post"]
KILL = vars(ServerProtocol)["_kill"]
RECEIVED = vars(ClientProtocol)["received"]


def _join_any_room(server: Any, connection: object, join: Join) -> object:
    """Whoever comes is let into the newest room that has a place."""
    for quorum, room in reversed(server._rooms.items()):
        if join.index not in room.incarnations and room.size == join.size:
            return JOIN(server, connection, replace(join, quorum=quorum))
    return JOIN(server, connection, join)


def _post_to_the_dead(server: Any, connection: object, member: Any, post: Any) -> object:
    """A post counts although the room has ended."""
    dead, server._dead = server._dead, {}
    try:
        return POST(server, connection, member, post)
    finally:
        server._dead = dead


def _tell_nobody(server: Any, quorum: str, death: Abort, spare: object = None) -> object:
    """A room ends and its members are not told."""
    KILL(server, quorum, death, spare)
    return []


def _tell_all_but_the_last(server: Any, quorum: str, death: Abort, spare: object = None) -> object:
    """One member of a dead room is not told."""
    return [Send(send.to[:-1], death) for send in KILL(server, quorum, death, spare)]


def _leave_as_a_loss(server: Any, connection: object, member: Any) -> object:
    """Whoever moves on ends the room for those who have not."""
    return KILL(server, member.room.quorum, Abort(why="member has moved on"), connection)


def _hear_no_abort(client: Any, message: object) -> object:
    """A member does not listen to an abort."""
    return None if isinstance(message, Abort) else RECEIVED(client, message)


MUTANTS: dict[str, tuple[type, str, object]] = {
    "a vote of an old quorum is let in": (ServerProtocol, "_join", _join_any_room),
    "a late post counts": (ServerProtocol, "_post", _post_to_the_dead),
    "an abort is lost": (ServerProtocol, "_kill", _tell_nobody),
    "an abort is lost on the way to one": (ServerProtocol, "_kill", _tell_all_but_the_last),
    "an abort is not heard": (ClientProtocol, "received", _hear_no_abort),
    "whoever moves on is taken for lost": (ServerProtocol, "_leave", _leave_as_a_loss),
    "a restarted process gets in": (ServerProtocol, "_why_not", lambda *_: None),
}


@contextmanager
def mutated(owner: type, name: str, replacement: object) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name: str) -> None:
    with mutated(*MUTANTS[name]), pytest.raises(AssertionError):
        run_all()
