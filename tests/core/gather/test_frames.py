"""The bytes of the gather's messages, which members and servers of other versions read as well."""

from __future__ import annotations

import pytest
from tests.core.plans import make_plan

from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_SENTENCE
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import PREFIX, Frame, FrameParser
from mainstay_core.gather.frames import (
    Abort,
    Gathered,
    Join,
    Leave,
    Newer,
    Post,
    decode_for_member,
    decode_for_server,
    encode,
)

JOIN = Join(quorum="q3-ab", index=1, size=4, incarnation="life")
BAD_JOIN = {"kind": "join", "quorum": "q", "index": 0, "size": 1, "incarnation": ""}
SAID = {
    JOIN: (
        b'{"kind":"join","quorum":"q3-ab","index":1,"size":4,"incarnation":"life"}',
        b"",
    ),
    Post(key="vote/7/0", body=b"yes"): (b'{"kind":"post","key":"vote/7/0"}', b"yes"),
    Post(key="meet", body=b"at", of=2): (b'{"kind":"post","key":"meet","of":2}', b"at"),
    Abort(why="a reset", suspects=(2, 0)): (
        b'{"kind":"abort","why":"a reset","suspects":[2,0]}',
        b"",
    ),
    Leave(): (b'{"kind":"leave"}', b""),
}
"""Head and body of everything that a member says."""
ANSWERED = {
    Gathered(key="settle", bodies=(b"", b"ab", b"c")): (
        b'{"kind":"gathered","key":"settle","sizes":[0,2,1]}',
        b"abc",
    ),
    Abort(why="all members have moved on"): (
        b'{"kind":"abort","why":"all members have moved on","suspects":[]}',
        b"",
    ),
}
"""Head and body of what a server answers."""
NEWER = Newer(plan={"quorum": {"id": 5, "nonce": "c"}})
NEWER_HEAD = b'{"kind":"plan","plan":{"quorum":{"id":5,"nonce":"c"}}}'


def parse(message: bytes) -> Frame:
    (frame,) = FrameParser().feed(message)
    return frame


@pytest.mark.parametrize("message", SAID, ids=lambda m: type(m).__name__)
def test_what_a_member_says_has_these_bytes(message: Join | Post[bytes] | Abort | Leave) -> None:
    head, body = SAID[message]

    assert encode(message) == PREFIX.pack(len(head), len(body)) + head + body
    assert decode_for_server(parse(encode(message))) == message


@pytest.mark.parametrize("message", ANSWERED, ids=lambda m: type(m).__name__)
def test_what_a_server_answers_has_these_bytes(message: Gathered[bytes] | Abort) -> None:
    head, body = ANSWERED[message]

    assert encode(message) == PREFIX.pack(len(head), len(body)) + head + body
    assert decode_for_member(parse(encode(message))) == message


def test_a_newer_plan_travels_as_it_was_given() -> None:
    assert encode(NEWER) == PREFIX.pack(len(NEWER_HEAD), 0) + NEWER_HEAD
    assert decode_for_member(parse(encode(NEWER))) == NEWER


def test_a_newer_plan_may_be_given_as_a_value_and_travels_as_json() -> None:
    plan = make_plan({0: ["a.1"]})
    (frame,) = FrameParser().feed(encode(Newer(plan=plan)))
    assert decode_for_member(frame) == Newer(plan=codec.encode(plan))


def test_suspects_may_be_left_out() -> None:
    assert decode_for_member(Frame({"kind": "abort", "why": "gone"})) == Abort(why="gone")


@pytest.mark.parametrize(
    ("quorum", "number"),
    [("q12-a", 12), ("q0-b", 0), ("7-x", 7), ("q0-", None), ("q-a", None), ("qa-1", None)],
)
def test_the_number_of_a_quorum_stands_before_its_nonce(quorum: str, number: int | None) -> None:
    assert Join(quorum=quorum, index=0, size=1, incarnation="life").number == number


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ({"kind": "gathered"}, "unknown kind 'gathered'"),
        ({}, "unknown kind ''"),
        ({"kind": "post"}, "Post.key: missing"),
        ({"kind": "post", "key": "x" * 513}, "Post.key: has a length of 513"),
        ({"kind": "join", "quorum": "q1-a"}, "Join.index: missing"),
        ({**BAD_JOIN, "index": "x"}, "Join.index: expected int"),
        ({**BAD_JOIN, "index": float("inf")}, "Join.index: expected int"),
        ({**BAD_JOIN, "size": 10**9}, "Join.size: 1000000000 is not between"),
        ({**BAD_JOIN, "incarnation": "\ud800"}, "Join.incarnation: is no text"),
        ({"kind": "abort", "why": "gone", "suspects": 1}, "Abort.suspects: expected a list"),
        ({"kind": "abort", "why": "gone", "suspects": [1e999]}, "Abort.suspects\\[0\\]"),
    ],
)
def test_what_no_member_says_is_an_error(head: dict[str, object], told: str) -> None:
    with pytest.raises(RemoteProtocolError, match=told):
        decode_for_server(Frame(head))


@pytest.mark.parametrize(
    ("head", "body", "told"),
    [
        ({"kind": "post", "key": "vote"}, b"", "unknown kind 'post'"),
        ({"kind": "plan"}, b"", "Newer.plan: missing"),
        ({"kind": "abort"}, b"", "Abort.why: missing"),
        ({"kind": "gathered", "sizes": []}, b"", "Gathered.key: missing"),
        ({"kind": "gathered", "key": "k"}, b"", "Gathered.sizes: is no list"),
        ({"kind": "gathered", "key": "k", "sizes": [1.0]}, b"a", "Gathered.sizes: are not"),
        ({"kind": "gathered", "key": "k", "sizes": [2, -1]}, b"a", "Gathered.sizes: are not"),
        ({"kind": "gathered", "key": "k", "sizes": [1]}, b"ab", "Gathered.sizes: are not"),
        ({"kind": "gathered", "key": "k", "sizes": [3]}, b"ab", "Gathered.sizes: are not"),
    ],
)
def test_what_no_server_says_is_an_error(head: dict[str, object], body: bytes, told: str) -> None:
    with pytest.raises(RemoteProtocolError, match=told):
        decode_for_member(Frame(head, body))


def test_an_abort_says_no_more_than_a_sentence() -> None:
    assert len(Abort(why="x" * 100_000).why) <= MAX_SENTENCE
