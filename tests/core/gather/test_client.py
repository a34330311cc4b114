"""One member's side of the gather, on values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.gather.client import ClientProtocol, QuorumAborted
from mainstay_core.gather.frames import Abort, Gathered, Join, Leave, Newer, Post

JOIN = Join(quorum="q1-a", index=0, size=2, incarnation="life")


def joined() -> ClientProtocol[str]:
    member: ClientProtocol[str] = ClientProtocol(JOIN)
    assert member.opened() == JOIN
    return member


def test_a_member_joins_first_and_posts_then() -> None:
    member: ClientProtocol[str] = ClientProtocol(JOIN)
    assert not member.may_post
    with pytest.raises(LocalProtocolError, match="before the connection stands"):
        member.post("vote", "yes")

    assert member.opened() == JOIN
    assert member.may_post
    assert member.post("vote", "yes") == Post(key="vote", body="yes")


def test_posting_a_key_twice_is_a_bug_of_the_caller() -> None:
    member = joined()
    member.post("vote", "yes")

    with pytest.raises(LocalProtocolError, match="vote was posted before"):
        member.post("vote", "no")


def test_what_all_have_posted_is_taken_once() -> None:
    member = joined()
    assert not member.may_take("vote")
    with pytest.raises(LocalProtocolError, match="not all have posted vote"):
        member.take("vote")

    assert member.received(Gathered(key="vote", bodies=("yes", "no"))) is None
    assert member.may_take("vote")
    assert not member.may_take("settle")
    assert member.take("vote") == ("yes", "no")
    assert not member.may_take("vote")


ENDS: dict[str, Callable[[ClientProtocol[str]], object]] = {
    "abort": lambda member: member.received(Abort(why="the end", suspects=(1,))),
    "lost": lambda member: member.lost("the end", (1,)),
    "its own abort": lambda member: member.abort("the end", (1,)),
}


@pytest.mark.parametrize("end", ENDS)
def test_once_the_quorum_has_ended_nothing_is_posted_and_nothing_more_is_waited_for(
    end: str,
) -> None:
    member = joined()
    member.received(Gathered(key="settle", bodies=("a", "b")))
    ENDS[end](member)

    assert member.may_post
    assert member.may_take("vote")
    for act in (lambda: member.post("vote", "yes"), lambda: member.take("vote")):
        with pytest.raises(QuorumAborted, match="the end") as caught:
            act()
        assert caught.value.suspects == (1,)
    assert member.take("settle") == ("a", "b"), "what was gathered before is still returned"


def test_every_wait_that_ends_raises_an_exception_of_its_own() -> None:
    member = joined()
    member.lost("the end")
    raised = []
    for key in ("settle", "vote"):
        with pytest.raises(QuorumAborted) as caught:
            member.take(key)
        raised.append(caught.value)

    assert raised[0] is not raised[1]


def test_others_end_the_quorum_once_and_the_first_reason_counts() -> None:
    member = joined()

    told = member.received(Abort(why="a reset", suspects=(1,)))

    assert told is member.ended
    assert (told.why, told.suspects) == ("a reset", (1,)) if told else False
    assert member.lost("the connection ended") is None
    assert member.ended is told


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda member: member.abort("the stage group failed", (1,)),
         Abort(why="the stage group failed", suspects=(1,))),
        (lambda member: member.leave(), Leave()),
        (lambda member: member.shutdown("a newer plan is here"), None),
    ],
)  # fmt: skip
def test_who_ends_its_side_says_so_once_and_is_told_of_nothing(
    end: Callable[[ClientProtocol[str]], object], said: object
) -> None:
    member = joined()

    assert end(member) == said
    assert end(member) is None, "it is said once"
    assert member.received(Abort(why="of others")) is None
    assert member.ended is not None
    assert member.ended.why != "of others"


def test_who_ends_before_the_connection_stands_has_nobody_to_tell() -> None:
    for end in (ClientProtocol.leave, lambda member: member.abort("why")):
        member: ClientProtocol[str] = ClientProtocol(JOIN)
        assert end(member) is None
        assert member.opened() is None, "it does not join any more"


def test_a_newer_plan_ends_nothing() -> None:
    member = joined()

    assert member.received(Newer(plan="a plan")) == Newer(plan="a plan")
    assert member.ended is None


def test_nothing_is_heard_after_the_quorum_was_ended_by_others() -> None:
    member = joined()
    member.received(Abort(why="gone"))

    assert member.received(Newer(plan="a plan")) is None
    assert member.received(Gathered(key="vote", bodies=("yes", "yes"))) is None
    with pytest.raises(QuorumAborted):
        member.take("vote")
