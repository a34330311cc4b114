"""What cells compare of their states beside the masters."""

from __future__ import annotations

from tests.train.checks.step import Step

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.settings import Mode
from mainstay_core.rank.reports import Ballot
from mainstay_train.compute.engine import Engine
from mainstay_train.exact.optimizer import REST_PARTS
from mainstay_train.kernels import bits

SLOT = Slot(pod=PodUid("a"), index=0)


def vote(engine: Engine, step: int) -> Ballot:
    return engine.ballot(None, (), 0, SLOT, "", step)


def test_a_wrong_bit_beside_the_masters_is_in_one_vote_of_sixteen() -> None:
    step = Step("llama bf16", recompute=False)
    step.run(Mode.FULL)
    (engine,) = step._engines[Mode.FULL]
    before = [vote(engine, number) for number in range(2 * REST_PARTS)]
    moments = [flat.tensor for flat in engine.state.flats() if flat.kind == "exp_avg_sq"]
    for tensor in (moments[0], engine.state.blocks[-1].compute):
        bits.flip_bit(tensor, tensor.numel() // 3, 2)
        after = [vote(engine, number) for number in range(2 * REST_PARTS)]
        bits.flip_bit(tensor, tensor.numel() // 3, 2)
        differing = [n for n in range(2 * REST_PARTS) if after[n].rest != before[n].rest]
        assert len(differing) == 2
        assert differing[1] - differing[0] == REST_PARTS
    assert len({ballot.rest for ballot in before}) == REST_PARTS


def test_a_job_that_checks_nothing_compares_masters_alone() -> None:
    step = Step("llama", recompute=False)
    step.run(Mode.OFF)
    (engine,) = step._engines[Mode.OFF]
    assert vote(engine, 3).rest == ""
