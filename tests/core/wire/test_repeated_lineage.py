"""The lineage that a job repeats: what no job can make is refused before it begins, by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from tests.worlds.pods import make_config

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import QuorumId
from mainstay_core.wire.reinitialisation import (
    BlockOutline,
    BlockSource,
    Fork,
    ForkOutcome,
    MadeBlock,
    MadePosition,
    PlaceDigest,
    Reinitialisation,
    SourceKind,
    ToldFork,
)
from mainstay_core.wire.repeated_lineage import problem_with_blocks, read_outcomes, read_repeats

NEIGHBOURS = tuple(
    BlockSource(kind=SourceKind.NEIGHBOUR, stage=stage, block=f"layers.{stage}", weight=weight)
    for stage, weight in ((0, 0.25), (2, 0.75))
)
STALE = BlockSource(kind=SourceKind.STALE_COPY, stage=1, block="layers.1", version=6)
GUARD = BlockSource(kind=SourceKind.GUARD, stage=2, block="layers.1")


def place(*sources: BlockSource, stage: int = 1) -> MadePosition:
    return MadePosition(stage=stage, blocks=(MadeBlock(block=f"layers.{stage}", sources=sources),))


def fork(*places: MadePosition) -> Fork:
    return Fork(version=8, chain="c", made=Reinitialisation(positions=places, reason="so"))


def config(repeats: Fork, **fields: Any) -> Any:
    made = make_config(replicas=1, stages=3, lanes=1, steps=20)
    return replace(made, repeats=(codec.encode(repeats),), **fields)


def with_norms(made: MadePosition, *norms_sq: float) -> MadePosition:
    return replace(made, blocks=tuple(replace(b, norms_sq=norms_sq) for b in made.blocks))


def told(made: Fork, *states: PlaceDigest) -> ToldFork:
    outcome = ForkOutcome(quorum=QuorumId(id=3, nonce="n"), states=states)
    known = {field.name: getattr(made, field.name) for field in fields(Fork)}
    return ToldFork(**known, outcome=outcome)


@pytest.mark.parametrize(
    ("sources", "guards"),
    [
        pytest.param(NEIGHBOURS, 0, id="neighbours"),
        pytest.param((STALE,), 0, id="its own copy"),
        pytest.param((GUARD,), 1, id="a guard"),
    ],
)
def test_what_a_run_makes_can_be_made_again(sources: Any, guards: int) -> None:
    repeats = fork(place(*sources))
    assert read_repeats(config(repeats, guards=guards)) == (repeats,)


def test_what_came_of_a_fork_is_read_beside_it_and_is_no_part_of_it() -> None:
    made = fork(with_norms(place(*NEIGHBOURS), 1.0, 3.0))
    one = told(made, PlaceDigest(stage=1, masters="m"))
    assert read_repeats(config(one)) == (made,)
    assert read_outcomes(config(one)) == (one.outcome,)
    assert read_outcomes(config(made)) == (None,), "a report of an older release"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        pytest.param(
            fork(place(replace(STALE, block="layers.2"))),
            "has the block layers.2",
            id="no likeness",
        ),
        pytest.param(fork(place()), "names no source", id="nothing"),
        pytest.param(
            fork(place(NEIGHBOURS[0])), "weights must add up to 1, not 0.25", id="too little"
        ),
        pytest.param(
            fork(place(*NEIGHBOURS, GUARD)), "weights must add up to 1, not 2", id="too much"
        ),
        pytest.param(
            fork(place(STALE), place(STALE)), "makes rank 0 of stage 1 more than once", id="twice"
        ),
        pytest.param(
            fork(place(STALE), place(replace(NEIGHBOURS[0], stage=1, weight=1), stage=2)),
            "stage 2, layers.2: is made of stage 1, which is made anew itself",
            id="of what is lost",
        ),
        pytest.param(
            fork(place(replace(STALE, version=8))), "copy of step 8 is not older", id="not older"
        ),
        pytest.param(fork(place(replace(STALE, stage=2))), "is not its own", id="another's"),
        pytest.param(
            fork(place(replace(STALE, version=None))), "a stale copy of step None", id="no step"
        ),
        pytest.param(fork(place(GUARD)), "and this job has none; set spec.recovery", id="guards"),
        pytest.param(
            fork(with_norms(place(*NEIGHBOURS), 2.0)), "has the norm of one stage", id="one norm"
        ),
        pytest.param(
            told(fork(place(*NEIGHBOURS)), PlaceDigest(stage=3, masters="m")),
            "has a digest of rank 0 of stage 3, and the job has 3 stages of 1",
            id="digests of another job",
        ),
    ],
)
def test_a_record_that_no_job_can_make_is_refused(made: Fork, said: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"repeats\[0\]") as caught:
        read_repeats(config(made))
    assert said in str(caught.value)


def test_blocks_are_compared_with_those_that_trainers_tell() -> None:
    made = fork(place(*NEIGHBOURS))
    outline = tuple((BlockOutline(name=f"layers.{i}", kind="layer"),) for i in range(3))
    renamed = (BlockOutline(name="mine", kind="layer"),)

    assert problem_with_blocks(made, outline) == ""
    assert problem_with_blocks(made, ()) == ""
    assert problem_with_blocks(fork(place(GUARD)), outline) == ""
    own = problem_with_blocks(made, (outline[0], renamed, outline[2]))
    assert own == "stage 1 has the blocks mine here, the lineage makes layers.1"
    assert problem_with_blocks(made, (*outline[:2], renamed)) == "stage 2 has no block layers.2"
