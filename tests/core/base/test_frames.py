"""Frames: whatever the pieces in which bytes come, the same messages come out."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    PREFIX,
    Frame,
    FrameParser,
    pack,
    pack_head,
    parse_head,
    parse_prefix,
)

FRAMES = [
    Frame({"kind": "join", "quorum": "q1-n", "index": 0}),
    Frame({"kind": "post", "key": "vote/0/0"}, b"\x00\xff" * 100),
    Frame({"kind": "text", "text": "line\n\u00e9"}, b""),
    Frame({}, b"only a body"),
]


def test_frames_survive_arbitrary_splits() -> None:
    stream = b"".join(pack(f.head, f.body) for f in FRAMES)
    rng = random.Random(1)
    for _ in range(300):
        cuts = sorted(rng.choices(range(len(stream) + 1), k=rng.randint(0, 20)))
        parser, received = FrameParser(), []
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            received += parser.feed(stream[start:stop])

        assert received == FRAMES


def test_byte_by_byte_a_frame_is_complete_with_its_last_byte() -> None:
    parser, stream = FrameParser(), pack(FRAMES[1].head, FRAMES[1].body)

    assert all(parser.feed(stream[i : i + 1]) == [] for i in range(len(stream) - 1))
    assert parser.feed(stream[-1:]) == [FRAMES[1]]


def test_the_head_may_be_sent_before_its_body() -> None:
    assert pack_head({"kind": "a"}, 3) + b"xyz" == pack({"kind": "a"}, b"xyz")


def test_the_kind_of_a_frame_is_in_its_head() -> None:
    assert [f.kind for f in FRAMES] == ["join", "post", "text", ""]


@pytest.mark.parametrize(
    ("head_size", "body_size"), [(MAX_HEAD_BYTES + 1, 0), (1, MAX_BODY_BYTES + 1)]
)
def test_oversize_is_refused_before_anything_is_read(head_size: int, body_size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="refused"):
        FrameParser().feed(PREFIX.pack(head_size, body_size))


def test_bounds_may_change_with_what_a_frame_has_told() -> None:
    parser, frames = FrameParser(max_head=40, max_body=0), []
    for frame in parser.drain(
        pack({"kind": "hello"}) + pack({"kind": "a", "b": "c" * 60}, b"body")
    ):
        frames.append(frame.kind)
        parser.max_head, parser.max_body = MAX_HEAD_BYTES, MAX_BODY_BYTES

    assert frames == ["hello", "a"]


@pytest.mark.parametrize(("head_size", "body_size"), [(41, 0), (1, 1)])
def test_a_parser_may_have_bounds_of_its_own(head_size: int, body_size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="refused"):
        FrameParser(max_head=40, max_body=0).feed(PREFIX.pack(head_size, body_size))


def test_the_largest_allowed_sizes_are_taken() -> None:
    prefix = PREFIX.pack(MAX_HEAD_BYTES, MAX_BODY_BYTES)

    assert parse_prefix(prefix) == (MAX_HEAD_BYTES, MAX_BODY_BYTES)


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"1", b"null", b"\xff", b"[" * 99_999])
def test_a_head_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="frame head is not"):
        parse_head(raw)


def test_a_peer_that_speaks_http_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="refused"):
        FrameParser().feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
