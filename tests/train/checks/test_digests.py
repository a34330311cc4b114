"""Digests of a vote are made twice as a whole, and what is wrong there is repaired."""

from __future__ import annotations

import pytest
import torch
from tests.train.checks.step import TYPES, Step

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.rank.reports import Ballot
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.checks.checker import NOWHERE
from mainstay_train.checks.places import Phase
from mainstay_train.checks.sums import DIGESTS
from mainstay_train.compute.engine import Engine
from mainstay_train.kernels.calls import UnreliableDeviceError


def vote(engine: Engine, flip: Flip | None = None) -> Ballot:
    """Return the ballot of a step, with a flip in what it alone makes."""
    engine.drop_held()
    engine.compute(TYPES, 0, None)
    table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
    engine.reduce(None, table, [0], 0)
    if flip is not None:
        engine.checks.order("flip", 0, Phase.VOTE, flip)
    return engine.ballot(None, table, 0, NOWHERE, "")


@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
def test_a_wrong_bit_in_the_digest_of_the_state_is_found_and_repaired(execution: Execution) -> None:
    step = Step("llama bf16", recompute=False, micro_batches=1)
    step.run(Mode.FULL)
    (engine,) = step._engines[Mode.FULL]
    clean = vote(engine)
    assert clean.rest
    flip = Flip(in_pass=Pass.STEP, operator=6, element=1, bit=9, execution=execution)

    ballot = vote(engine, flip)

    assert engine.checks._orders.is_empty, "it found its kernel"
    told = [(finding.operator, finding.verdict, finding.remedy) for finding in step._findings]
    assert ballot == clean
    is_primary = execution is Execution.PRIMARY
    assert told == [
        (DIGESTS, Verdict.PRIMARY_HIT, Remedy.REPAIR)
        if is_primary
        else (DIGESTS, Verdict.CHECKER_HIT, Remedy.NOTHING)
    ]


def test_a_device_that_makes_three_digests_of_one_state_is_unreliable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step("llama bf16", recompute=False, micro_batches=1)
    step.run(Mode.FULL)
    (engine,) = step._engines[Mode.FULL]
    made = iter(range(3))
    sums = engine.state.rest_sums

    def differing(part: int) -> list[torch.Tensor]:
        return [each + next(made) if not number else each for number, each in enumerate(sums(part))]

    monkeypatch.setattr(engine.state, "rest_sums", differing)
    with pytest.raises(UnreliableDeviceError, match="three executions of digests"):
        vote(engine)
    assert [finding.verdict for finding in step._findings] == [Verdict.UNRELIABLE]


def test_without_checks_the_rest_of_the_state_has_no_digest() -> None:
    step = Step("llama", recompute=False, micro_batches=1)
    step.run(Mode.OFF)
    (engine,) = step._engines[Mode.OFF]
    assert vote(engine).rest == ""
