"""What is said to a store of segments, as values and as the heads of frames."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.segments.keys import header_of, key_of, record_of

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import FrameParser
from mainstay_core.base.ids import PodUid
from mainstay_core.segments import frames
from mainstay_core.wire.segments import Holder, StoreReport
from mainstay_core.wire.unit_digests import MAX_TOLD_SEALS, UnitDigests, seal_digests

HEADER = header_of(key_of(3), 5)
HOLDERS = (Holder(pod=PodUid("b"), address="10.0.0.2:1"),)
DIGESTS = seal_digests(
    UnitDigests(lineage=1, position=2, step=3, gradients="0" * 64, masters="f" * 64)
)
FROM_TRAINER = [
    frames.Hello(slot=1, incarnation="life"),
    frames.TakeRoom(request=1, size=10),
    frames.GiveBack(request=1),
    frames.Written(request=1, header=HEADER, holders=HOLDERS, keep_from=2),
    frames.KeepRecord(record=record_of(3)),
    frames.KeepDigests(digests=DIGESTS, holders=HOLDERS),
    frames.KeepFrom(lineage=1, version=2),
    frames.AskReport(request=1, lineage=1),
    frames.AskDigests(request=1, lineage=1, position=2, step=3),
    frames.Read(request=1, key=key_of(3)),
    frames.ReadDone(request=1),
    frames.Discard(key=key_of(3)),
    frames.Discard(key=key_of(3), is_outdated=True),
]
TO_TRAINER = [
    frames.Arena(size=4096),
    frames.Room(request=1, offset=4096),
    frames.Full(request=1, why="full"),
    frames.Held(request=1, why_not=""),
    frames.Reported(request=1, report=StoreReport(pod=PodUid("a"), address="a:1", lineage=0)),
    frames.ToldDigests(request=1, digests=DIGESTS),
    frames.ToldDigests(request=1, digests=None),
    frames.Found(request=1, header=HEADER, offset=0),
    frames.NotFound(request=1),
]


def head_of(message: Any, body: bytes = b"") -> dict[str, Any]:
    (frame,) = FrameParser().feed(frames.encode(message, len(body)) + body)
    return frame.head


@pytest.mark.parametrize("message", FROM_TRAINER, ids=lambda m: type(m).__name__)
def test_what_a_trainer_says_arrives(message: frames.FromTrainer) -> None:
    assert frames.decode_from_trainer(head_of(message)) == message


@pytest.mark.parametrize("message", TO_TRAINER, ids=lambda m: type(m).__name__)
def test_what_a_trainer_hears_arrives(message: frames.ToTrainer) -> None:
    assert frames.decode_to_trainer(head_of(message)) == message


def test_what_pods_say_to_each_other_arrives() -> None:
    segment, fetch = frames.Segment(header=HEADER, keep_from=2), frames.Fetch(key=key_of(3))
    assert frames.decode_from_peer(head_of(segment, b"12345"), 5) == segment
    assert frames.decode_from_peer(head_of(fetch), 0) == fetch
    passed = frames.PassRecord(record=record_of(3))
    assert frames.decode_from_peer(head_of(passed), 0) == passed
    digests = frames.PassDigests(digests=DIGESTS)
    assert frames.decode_from_peer(head_of(digests), 0) == digests
    ask = frames.AskSeals(position=2)
    assert frames.decode_from_peer(head_of(ask), 0) == ask
    seals = frames.ToldSeals(position=2, seals=("a" * 32,))
    assert frames.decode_to_holder(head_of(seals), 0) == seals
    asked = frames.AskDigests(request=0, lineage=1, position=2, step=3)
    assert frames.decode_from_peer(head_of(asked), 0) == asked
    told = frames.ToldDigests(request=0, digests=DIGESTS)
    assert frames.decode_to_reader(head_of(told), 0) == told
    assert frames.decode_to_holder(head_of(frames.Stored()), 0) == frames.Stored()
    refused = frames.Refused(why="full")
    assert frames.decode_to_holder(head_of(refused), 0) == refused
    doubt = frames.Doubt(key=key_of(3), nonce="abc", digest="d")
    assert frames.decode_from_peer(head_of(doubt), 0) == doubt
    assert frames.decode_to_reader(head_of(frames.Noted()), 0) == frames.Noted()
    for answer, size in ((segment, 5), (frames.Header(header=HEADER), 0), (frames.Missing(), 0)):
        assert frames.decode_to_reader(head_of(answer), size) == answer


@pytest.mark.parametrize(
    ("decode", "head"),
    [
        (frames.decode_from_trainer, {"kind": "stored"}),
        (frames.decode_from_trainer, {}),
        (frames.decode_from_trainer, {"kind": ["room"]}),
        (frames.decode_from_trainer, {"kind": "room", "request": 1}),
        (frames.decode_from_trainer, {"kind": "room", "request": 1, "size": -1}),
        (frames.decode_from_trainer, {"kind": "room", "request": 1, "size": 1 << 41}),
        (frames.decode_to_trainer, {"kind": "hello", "slot": 0, "incarnation": ""}),
        (lambda head: frames.decode_from_peer(head, 0), head_of(frames.Segment(header=HEADER))),
        (lambda head: frames.decode_from_peer(head, 1), head_of(frames.Fetch(key=key_of(3)))),
        (lambda head: frames.decode_to_holder(head, 3), head_of(frames.Stored())),
        *(
            (
                lambda head: frames.decode_to_holder(head, 0),
                {"kind": "seals", "position": 2, "seals": seals},
            )
            for seals in (["a" * 33], ["a"] * (MAX_TOLD_SEALS + 1), "a")
        ),
    ],
)
def test_what_is_no_message_is_refused(decode: Any, head: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(head)


def test_a_reason_is_cut_to_the_length_of_a_sentence() -> None:
    full = frames.Full(request=1, why="x" * 100_000)

    assert frames.decode_to_trainer(head_of(full)) == full
