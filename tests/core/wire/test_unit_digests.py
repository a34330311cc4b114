"""Digests of a position's units count where they add up to what votes told, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from tests.core.segments.keys import record_of

from mainstay_core.base import codec
from mainstay_core.base.digest import Digest, total
from mainstay_core.base.errors import MalformedError
from mainstay_core.segments.frames import MAX_PEER_HEAD_BYTES, PassDigests, encode
from mainstay_core.wire.unit_digests import (
    DIGEST_CHARS,
    MAX_DIGESTED_UNITS,
    UnitDigests,
    are_sealed,
    seal_digests,
    unpack,
    why_void,
)
from mainstay_core.wire.votes import CommitRecord

STEP, POSITION, NUM_UNITS = 7, 1, 5


def drawn(seed: int, number: int = NUM_UNITS) -> list[Digest]:
    rng = Random(seed)
    return [Digest(rng.getrandbits(64), rng.getrandbits(64)) for _ in range(number)]


def pack(digests: list[Digest]) -> str:
    return "".join(digest.hex() for digest in digests)


GRADIENTS, MASTERS = drawn(1), drawn(2)
RECORD: CommitRecord = record_of(
    STEP,
    gradients=("0", total(GRADIENTS).hex()),
    states=("0", total(MASTERS).hex()),
)
TOLD = seal_digests(
    UnitDigests(
        lineage=RECORD.lineage,
        position=POSITION,
        step=STEP,
        gradients=pack(GRADIENTS),
        masters=pack(MASTERS),
    )
)


def test_those_of_a_step_count() -> None:
    assert why_void(TOLD, RECORD, POSITION, NUM_UNITS) == ""
    assert list(unpack(TOLD.gradients)) == GRADIENTS
    assert codec.loads(UnitDigests, codec.dumps(TOLD)) == TOLD


@pytest.mark.parametrize("at", [0, 15, 16, 31, 32, 159])
@pytest.mark.parametrize("what", ["gradients", "masters"])
def test_one_wrong_digit_is_found_by_the_seal_and_else_by_the_sum(what: str, at: int) -> None:
    text = getattr(TOLD, what)
    wrong = replace(TOLD, **{what: f"{text[:at]}{int(text[at], 16) ^ 1:x}{text[at + 1 :]}"})

    assert not are_sealed(wrong)
    assert "the seal" in why_void(wrong, RECORD, POSITION, NUM_UNITS)
    why = why_void(seal_digests(wrong), RECORD, POSITION, NUM_UNITS)
    assert why == f"those of the {what} do not add up to what the votes told of the position"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step": STEP + 1}, "they are of step 8 of position 1"),
        ({"position": 0}, "they are of step 7 of position 0"),
        ({"lineage": 9}, "they are of step 7 of position 1"),
        ({"masters": "0" * 33}, "33 digits are no whole number of digests of 32"),
        ({"masters": "x" * 160}, "a digest is 32 hexadecimal digits"),
        ({"masters": pack(drawn(2, 4))}, "masters of 4 units, the position has 5"),
    ],
)
def test_what_is_of_another_step_or_of_no_unit_counts_for_nothing(
    changes: dict[str, object], why: str
) -> None:
    told = seal_digests(replace(TOLD, **changes))  # type: ignore[arg-type]
    assert why in why_void(told, RECORD, POSITION, NUM_UNITS)


def test_without_what_votes_told_none_count() -> None:
    unknown = replace(RECORD, gradients=(), states=())
    assert why_void(TOLD, unknown, POSITION, NUM_UNITS) == "what votes told of step 7 is not known"


def test_as_many_as_may_be_told_fit_between_pods() -> None:
    packed = "f" * (DIGEST_CHARS * MAX_DIGESTED_UNITS)
    most = seal_digests(
        UnitDigests(lineage=2**53, position=65_536, step=2**53, gradients=packed, masters=packed)
    )
    assert len(encode(PassDigests(digests=most))) < MAX_PEER_HEAD_BYTES
    with pytest.raises(MalformedError, match="gradients"):
        codec.loads(UnitDigests, codec.dumps(replace(most, gradients=f"{packed}f")))
