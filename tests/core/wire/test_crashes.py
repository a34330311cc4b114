"""What is the same failure, how it is said, and that nothing of it is without a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.frames import FIRST_HEAD_BYTES, pack_head
from mainstay_core.base.ids import QuorumId, RankId
from mainstay_core.wire.crashes import MAX_FRAME, MAX_FRAMES, MAX_MESSAGE, Crash

CRASH = Crash(
    type="RuntimeError",
    message="shapes do not fit\nand more of that",
    frames=("/job/train.py:9 in main", "/job/train.py:3 in loss"),
    rank=RankId(replica=1, stage=0),
    quorum=QuorumId(id=4, nonce="ab"),
    step=7,
)


def test_one_line_names_class_message_rank_step_and_innermost_frame() -> None:
    said = "RuntimeError: shapes do not fit (r1.s0.i0, step 7, /job/train.py:3 in loss)"
    assert CRASH.describe() == said
    assert Crash(type="MemoryError").describe() == "MemoryError"


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ({"message": "at address 0x7f00"}, True),
        ({"rank": RankId(replica=0, stage=0), "quorum": QuorumId(id=9, nonce="cd")}, True),
        ({"step": 8}, False),
        ({"type": "OSError"}, False),
        ({"frames": ("/job/train.py:4 in loss",)}, False),
    ],
)
def test_the_same_failure_is_the_same_class_lines_and_step(
    other: dict[str, object], alike: bool
) -> None:
    assert CRASH.is_like(replace(CRASH, **other)) is alike


def test_what_is_too_long_is_cut_where_it_is_made_and_refused_where_it_is_read() -> None:
    frames = ("\U0001f600" * 9999,) * MAX_FRAMES
    long = Crash(type="x" * 9999, message="\U0001f600" * 99_999, frames=frames, step=3)
    assert len(long.message) <= MAX_MESSAGE
    assert all(len(frame) <= MAX_FRAME for frame in long.frames)
    # A trainer tells it in its first frame if it has not said hello.
    assert len(pack_head({"kind": "crash", "crash": codec.encode(long)})) < FIRST_HEAD_BYTES
    data = codec.encode(CRASH)
    for field, value in (("frames", ["x"] * (MAX_FRAMES + 1)), ("message", "x" * 9999)):
        with pytest.raises(MalformedError, match=f"Crash.{field}"):
            codec.decode(Crash, {**data, field: value})
    assert Crash(type="\ud800").type == "?"
