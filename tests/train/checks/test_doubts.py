"""What blocks raise where checks are on may come from a device: it is computed once more."""

from __future__ import annotations

import pytest
from tests.train.checks import bounded
from tests.train.checks.step import Spot, Step

from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.planning.program import Action, Op
from mainstay_train.checks import prices
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.compute.doubts import Doubts
from mainstay_train.compute.micro_batch import MicroBatch
from mainstay_train.exact.draws import Address
from mainstay_train.model.workload import WorkloadError

MUCH = 1 << 30


def spot_of(step: Step, mode: Mode, kernel: str, block: str, number: int = -1) -> Spot:
    """Return one of the kernels of a name in a block's forward of the first micro-batch."""
    spots = [
        s
        for s in step.list(mode)
        if (s.place.phase, s.place.in_pass, s.place.name) == (Phase.FORWARD, Pass.FORWARD, block)
        and s.kernel == kernel
        and (s.place.shard_type, s.place.micro_batch) == (0, 0)
    ]
    return spots[number]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_wrong_number_that_makes_a_block_raise_is_found_and_fails_nothing(stages: int) -> None:
    step = Step("bounded", recompute=False, stages=stages, waiting_bytes=MUCH)
    clean = step.run(Mode.OFF)
    spot = spot_of(step, Mode.OFF, "aten.add", "layers.0")
    flip = spot.flip(element=3, bit=30)
    with pytest.raises(WorkloadError, match=bounded.SAID):
        step.run(Mode.OFF, flip, spot)

    ended = step.run(Mode.FULL, flip, spot)

    assert ended.digests == clean.digests
    assert ended.num_refused == 1
    (finding,) = ended.findings
    assert (finding.operator, finding.ordinal) == (spot.kernel, spot.ordinal)
    assert (finding.verdict, finding.remedy) == (Verdict.PRIMARY_HIT, Remedy.VOID_TYPE)


@pytest.mark.parametrize("stages", [1, 2])
def test_with_piggyback_the_type_is_computed_again_and_somebody_tells_of_it(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is executed twice at once is repaired at once.
    monkeypatch.setattr(prices, "is_pointwise_cheaper", lambda *_: False)
    step = Step("bounded", recompute=True, stages=stages)
    clean = step.run(Mode.OFF)
    # In the first micro-batch all is executed twice at once; so it is one of the second.
    spots = [
        s
        for s in step.list(Mode.PIGGYBACK)
        if (s.stage, s.place.phase, s.kernel) == (0, Phase.FORWARD, "aten.add")
        and (s.place.name or "").startswith("layers")
    ]
    spot = max(spots, key=lambda s: (s.place.shard_type, s.place.block, s.ordinal))

    ended = step.run(Mode.PIGGYBACK, spot.flip(element=3, bit=30), spot)

    assert ended.digests == clean.digests
    assert ended.num_refused == 1
    told = [(finding.verdict, finding.remedy) for finding in ended.findings]
    wire = (Verdict.WIRE, Remedy.VOID_TYPE)
    hit = (Verdict.PRIMARY_HIT, Remedy.VOID_TYPE)
    # A stage that was wrong finds its kernel in the recompute; where its own blocks raised there is
    # none, nor does a later stage know who was wrong.
    assert sorted(told) == ([hit] if stages == 1 else [hit, wire])
    (raised,) = [finding for finding in ended.findings if finding.operator == "blocks"]
    assert bounded.SAID in raised.reason


@pytest.mark.parametrize(("mode", "recompute"), [(Mode.FULL, False), (Mode.PIGGYBACK, True)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (1, 2)])
def test_what_comes_back_is_the_users_mistake(
    mode: Mode,
    recompute: bool,
    stages: int,
    micro_batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step("bounded", recompute=recompute, stages=stages, micro_batches=micro_batches)
    monkeypatch.setattr(bounded, "MOST", 1e-9)

    with pytest.raises(WorkloadError, match=bounded.SAID):
        step.run(mode)

    monkeypatch.setattr(bounded, "MOST", 1e4)
    step = Step("bounded", recompute=recompute, stages=stages, micro_batches=1)
    assert step.run(mode).digests == step.run(Mode.OFF).digests


def test_without_checks_nothing_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("bounded", recompute=False, micro_batches=1)
    monkeypatch.setattr(bounded, "MOST", 1e-9)

    with pytest.raises(WorkloadError, match=bounded.SAID):
        step.run(Mode.OFF)
    (engine,) = step._engines[Mode.OFF]
    assert not engine.checks.void


def test_two_micro_batches_that_raise_at_once_are_doubted_once() -> None:
    """A table or a weight that is wrong for a while makes each of them raise."""
    doubts = Doubts(Checks(Mode.FULL), num_stages=1, num_inner=1)

    def raise_in(micro_batch: int) -> bool:
        action = Action(op=Op.FORWARD, stage=0, type=0, micro_batch=micro_batch)
        flow = MicroBatch(Address(0, 5, 0, micro_batch))
        with doubts.over(action, flow):
            raise ValueError("no such token")
        return flow.is_void

    doubts.begin(5, is_again=False)
    assert raise_in(0)
    assert raise_in(1)
    doubts.begin(5, is_again=False)
    with pytest.raises(ValueError, match="no such token"):
        raise_in(0)
