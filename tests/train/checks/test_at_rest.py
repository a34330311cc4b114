"""Wrong bits in the state in memory: where they are put, and what the vote makes of them."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.train.checks.step import Step
from tests.train.checks.test_rest import vote

from mainstay_core.dmr.flips import Flip, StatePart, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_train.checks.places import Phase
from mainstay_train.compute import at_rest
from mainstay_train.compute.engine import Engine
from mainstay_train.exact.optimizer import REST_PARTS
from mainstay_train.kernels import bits


def engine_of(model: str) -> Engine:
    step = Step(model, recompute=False)
    step.run(Mode.FULL)
    (engine,) = step._engines[Mode.FULL]
    return engine


def put(engine: Engine, part: StatePart, *, output: int = 0, block: int | None = None) -> None:
    flip = Flip(
        in_pass=Pass.STEP,
        where=Where.STATE,
        part=part,
        output=output,
        block=block,
        element=5,
        bit=2,
    )
    engine.checks.order("f", engine.checks.step, Phase.FORWARD, flip)
    at_rest.put_flips(engine.checks, engine.state)


def tensors(engine: Engine) -> dict[str, torch.Tensor]:
    computed = {f"compute:{b.name}": b.compute.clone() for b in engine.state.blocks}
    return {flat.id: flat.tensor.clone() for flat in engine.state.flats()} | computed


@pytest.mark.parametrize(
    ("part", "output", "changed"),
    [
        (StatePart.MASTERS, 0, "master:layers.0"),
        (StatePart.MOMENTS, 1, "exp_avg_sq:layers.0"),
        (StatePart.COMPUTE, 0, "compute:layers.0"),
    ],
)
def test_one_bit_of_the_named_part_changes_and_nothing_else(
    part: StatePart, output: int, changed: str
) -> None:
    engine = engine_of("llama bf16")
    before = tensors(engine)
    names = [block.name for block in engine.state.blocks]

    put(engine, part, output=output, block=names.index("layers.0"))

    after = tensors(engine)
    assert [n for n in before if not bits.are_equal(before[n], after[n])] == [changed]
    assert bits.count_differing(before[changed], after[changed]) == 1


def test_masters_are_in_the_next_digest_and_what_lies_beside_them_in_a_sixteenth() -> None:
    engine = engine_of("llama bf16")
    masters = engine.state.masters_digest()
    put(engine, StatePart.MASTERS)
    assert engine.state.masters_digest() != masters

    for part in (StatePart.MOMENTS, StatePart.COMPUTE):
        before = [vote(engine, number).rest for number in range(REST_PARTS)]
        put(engine, part)
        after = [vote(engine, number).rest for number in range(REST_PARTS)]
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1, part


def test_a_block_that_the_stage_does_not_have_is_told_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of("llama")
    with caplog.at_level(logging.WARNING):
        put(engine, StatePart.MASTERS, block=7)
        engine.checks.begin_step(engine.checks.step + 1)
    assert "flip f was not put in: the stage has no block 7; it has block 0 to 3" in caplog.text
