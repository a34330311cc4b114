"""The rooms of a gather server, on values: connections are letters."""

from __future__ import annotations

import pytest

from mainstay_core.gather import server as gather_server
from mainstay_core.gather.frames import Abort, Gathered, Join, Leave, Newer, Post
from mainstay_core.gather.server import Close, Send, ServerProtocol

Server = ServerProtocol[str, str]
QUORUM = "q3-x"


def join(index: int, size: int = 3, quorum: str = QUORUM, life: str = "") -> Join:
    life = life or f"life-{index}"
    return Join(quorum=quorum, index=index, size=size, incarnation=life)


def post(key: str, body: str) -> Post[str]:
    return Post(key=key, body=body)


def enter(server: Server, connection: str, message: Join) -> list[object]:
    server.opened(connection)
    return list(server.received(connection, message))


def make_room(members: str = "abc", quorum: str = QUORUM, server: Server | None = None) -> Server:
    """A room in which everybody has joined, one connection for each letter."""
    server = server or ServerProtocol()
    for index, connection in enumerate(members):
        assert enter(server, connection, join(index, len(members), quorum)) == []
        assert server.is_member(connection)
    return server


def test_all_get_all_bodies_in_index_order_once_the_last_has_posted() -> None:
    server = make_room()

    assert server.received("c", post("vote", "2")) == []
    assert server.received("a", post("vote", "0")) == []
    assert server.received("b", post("vote", "1")) == [
        Send(("a", "b", "c"), Gathered(key="vote", bodies=("0", "1", "2")))
    ]


def test_a_key_for_some_is_gathered_from_them_and_told_to_them() -> None:
    server = make_room()

    assert server.received("c", Post(key="meet", body="2", of=2)) == []
    assert server.received("a", Post(key="meet", body="0", of=2)) == [
        Send(("a", "c"), Gathered(key="meet", bodies=("0", "2")))
    ]


def test_who_moves_on_does_not_end_a_key_for_some() -> None:
    server = make_room()
    server.received("a", Post(key="meet", body="0", of=2))

    assert server.received("b", Leave()) == []
    assert server.received("c", Post(key="meet", body="2", of=2)) == [
        Send(("a", "c"), Gathered(key="meet", bodies=("0", "2")))
    ]


@pytest.mark.parametrize("of", [0, 4, 3, None])
def test_posts_of_a_key_agree_for_how_many_it_is(of: int | None) -> None:
    server = make_room()
    server.received("a", Post(key="meet", body="0", of=2))

    (told, closed) = server.received("b", Post(key="meet", body="1", of=of))

    assert isinstance(told, Send)
    assert isinstance(told.message, Abort)
    assert "meet is for" in told.message.why
    assert closed == Close("b")


def test_keys_do_not_wait_for_each_other() -> None:
    server = make_room("ab")
    server.received("a", post("one", "1"))
    server.received("a", post("two", "2"))

    assert server.received("b", post("two", "3")) == [
        Send(("a", "b"), Gathered(key="two", bodies=("2", "3")))
    ]
    assert server.received("b", post("one", "4")) == [
        Send(("a", "b"), Gathered(key="one", bodies=("1", "4")))
    ]


def test_a_member_whose_connection_ends_takes_the_quorum_with_it_and_is_suspected() -> None:
    server = make_room()

    assert server.ended("b") == [
        Send(("a", "c"), Abort(why="the connection of member 1 ended", suspects=(1,)))
    ]
    assert server.ended("c") == [], "a room dies once"


def test_an_abort_is_told_to_all_others() -> None:
    server = make_room()
    why = Abort(why="the stage group failed", suspects=(2,))

    assert server.received("a", why) == [Send(("b", "c"), why)]
    assert server.received("b", Abort(why="another reason")) == []
    assert server.ended("a") == []


def test_what_comes_late_is_answered_by_the_death_of_the_room_and_counts_for_nothing() -> None:
    server = make_room()
    server.received("a", post("vote", "0"))
    server.received("b", post("vote", "1"))
    why = Abort(why="a reset", suspects=(1,))
    server.received("a", why)

    assert server.received("c", post("vote", "2")) == [Send(("c",), why)]
    assert server.received("c", Leave()) == []


def test_who_joins_after_the_end_is_told_and_not_let_in() -> None:
    server = make_room("ab")
    server.received("a", Abort(why="no heal source", suspects=(1,)))

    assert enter(server, "late", join(2)) == [
        Send(("late",), Abort(why="no heal source", suspects=(1,)))
    ]
    assert not server.is_member("late")


def test_a_restarted_process_does_not_enter_and_disturbs_nobody() -> None:
    server = make_room("ab")

    told = enter(server, "newcomer", join(1, 2, life="another"))
    again = enter(server, "again", join(1, 2))

    why = "member 1 of q3-x is incarnation life-1, not another"
    assert told == [Send(("newcomer",), Abort(why=why))]
    assert again == [Send(("again",), Abort(why="member 1 of q3-x has joined before"))]
    assert server.ended("newcomer") == server.ended("again") == []
    server.received("a", post("vote", "0"))
    assert server.received("b", post("vote", "1")) == [
        Send(("a", "b"), Gathered(key="vote", bodies=("0", "1")))
    ]


def test_who_left_is_not_replaced_by_another_life() -> None:
    server = make_room()
    server.received("a", Leave())
    server.ended("a")

    (told,) = enter(server, "newcomer", join(0, life="another"))

    assert told == Send(
        ("newcomer",), Abort(why="member 0 of q3-x is incarnation life-0, not another")
    )


def test_a_member_with_another_size_is_refused() -> None:
    server = make_room("ab")

    assert enter(server, "c", join(2, 3)) == [Send(("c",), Abort(why="q3-x has 2 members, not 3"))]


def test_members_that_move_on_together_do_not_disturb_each_other() -> None:
    server = make_room()
    for connection in "ab":
        assert server.received(connection, Leave()) == []
        assert server.ended(connection) == []

    assert server.received("c", post("vote", "2")) == [
        Send(("c",), Abort(why="member 0 has moved on"))
    ]


def test_who_waits_for_a_member_that_leaves_is_told_and_suspects_nobody() -> None:
    server = make_room()
    server.received("a", post("vote", "0"))

    assert server.received("b", Leave()) == [Send(("a", "c"), Abort(why="member 1 has moved on"))]


def test_a_key_completes_although_a_member_that_posted_it_has_left() -> None:
    server = make_room("ab")
    server.received("a", post("vote", "0"))
    assert server.received("a", Leave()) == []
    server.ended("a")

    assert server.received("b", post("vote", "1")) == [
        Send(("b",), Gathered(key="vote", bodies=("0", "1")))
    ]


def test_a_room_that_all_have_left_stays_closed() -> None:
    server = make_room("ab")
    for connection in "ab":
        server.received(connection, Leave())
        assert server.ended(connection) == []

    assert enter(server, "late", join(0, 2)) == [
        Send(("late",), Abort(why="all members have moved on"))
    ]


def test_quorums_with_one_id_and_two_nonces_never_mix() -> None:
    server = make_room("ab", "q5-a")
    make_room("cd", "q5-b", server)
    server.received("a", post("vote", "0"))

    assert server.received("d", post("vote", "1")) == []
    assert server.received("c", Abort(why="gone")) == [Send(("d",), Abort(why="gone"))]
    assert server.received("b", post("vote", "1")) == [
        Send(("a", "b"), Gathered(key="vote", bodies=("0", "1")))
    ]


def test_a_member_of_an_older_quorum_is_given_the_plan_and_then_let_in() -> None:
    server: Server = ServerProtocol()
    server.hold(4, "plan 4")

    assert enter(server, "a", join(0)) == [Send(("a",), Newer(plan="plan 4"))]
    assert server.is_member("a")
    assert enter(server, "b", join(0, quorum="q4-y")) == []
    assert enter(server, "c", join(0, quorum="another-name")) == []


def test_a_member_of_an_older_quorum_that_has_ended_is_given_the_plan_first() -> None:
    server = make_room("ab")
    server.received("a", Abort(why="gone"))
    server.hold(4, "plan 4")

    assert enter(server, "late", join(1, 2)) == [
        Send(("late",), Newer(plan="plan 4")),
        Send(("late",), Abort(why="gone")),
    ]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (post("vote", ""), "'post' before join"),
        (Leave(), "'leave' before join"),
        (Abort(why="gone"), "'abort' before join"),
        (join(3), "index 3 is not below size 3"),
        (join(-1), "index -1 is not below size 3"),
    ],
)
def test_who_breaks_the_protocol_is_refused(
    message: Join | Post[str] | Abort | Leave, why: str
) -> None:
    server: Server = ServerProtocol()
    server.opened("a")

    assert server.received("a", message) == [
        Send(("a",), Abort(why=f"refused: RemoteProtocolError({why!r})")),
        Close("a"),
    ]


def test_a_refused_member_ends_its_room_when_its_connection_has_ended() -> None:
    server = make_room()

    refused = server.received("b", join(1))
    assert refused[1:] == [Close("b")]
    assert server.received("b", post("vote", "1")) == []
    assert server.ended("b") == [
        Send(("a", "c"), Abort(why="the connection of member 1 ended", suspects=(1,)))
    ]


def test_bytes_that_are_no_message_are_refused_as_well() -> None:
    server: Server = ServerProtocol()
    server.opened("a")

    assert server.refuse("a", KeyError("quorum")) == [
        Send(("a",), Abort(why="refused: KeyError('quorum')")),
        Close("a"),
    ]


def test_it_is_quiet_when_nobody_is_connected_any_more() -> None:
    server: Server = ServerProtocol()
    assert server.is_quiet
    server.opened("supervisor")
    make_room("ab", server=server)
    for connection in ("a", "b", "supervisor"):
        assert not server.is_quiet
        server.ended(connection)
    assert server.is_quiet


def test_only_the_names_of_the_last_dead_rooms_are_remembered() -> None:
    server: Server = ServerProtocol()
    for number in range(gather_server.MAX_DEAD_ROOMS + 1):
        enter(server, "a", join(0, 2, f"q{number}-x"))
        server.ended("a")

    assert enter(server, "a", join(0, 2, "q1-x")) != []
    assert enter(server, "b", join(0, 2, "q0-x")) == [], "it may only wait in vain"
