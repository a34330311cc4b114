"""What comes from other cells in a reduction: what a vote says of it, and flips in it."""

from __future__ import annotations

import pytest
import torch
from tests.train.checks.step import Step

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Flip, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Judgement, Remedy, Verdict
from mainstay_train.checks.checker import MAX_TOLD, Checks, UnreliableDeviceError
from mainstay_train.checks.places import Phase, Place

SLOT = Slot(pod=PodUid("a"), index=0)


def test_a_vote_names_the_members_whose_partials_came_otherwise_and_a_finding_is_told() -> None:
    step = Step("llama", recompute=False)
    step.run(Mode.FULL)
    (engine,) = step._engines[Mode.FULL]
    engine._members = (0, 3, 5)
    engine.reducer.differing = (torch.tensor([0, 2, 1]),)

    ballot = engine.ballot(None, (), 0, SLOT, "", 4)

    assert ballot.problem == (
        "what came from member 3, member 5 into the reduction is not what was sent"
    )
    (finding,) = step._findings
    assert (finding.verdict, finding.remedy) == (Verdict.WIRE, Remedy.REDUCE_AGAIN)
    assert finding.describe("pod-1/0") == (
        f"step 4 of pod-1/0: {ballot.problem}; all cells reduce the gradient again"
    )
    engine.reducer.differing = (torch.tensor([0, 0, 0]),)
    assert engine.ballot(None, (), 0, SLOT, "", 4).problem == ""
    assert len(step._findings) == 1


def test_a_flip_of_an_exchange_is_put_into_what_comes_and_into_no_kernel() -> None:
    found: list[Finding] = []
    checks = Checks(Mode.OFF, tell=found.append)
    checks.order("f", 0, Phase.REDUCE, Flip(in_pass=Pass.STEP, where=Where.WIRE, element=2, bit=0))
    with checks.over(Phase.REDUCE):
        total = torch.ones(4) + torch.ones(4)
    assert total.tolist() == [2.0] * 4

    received = torch.zeros(4)
    checks.arrive(received)
    checks.arrive(received)

    assert received.view(torch.int32).tolist() == [0, 0, 1, 0]


def test_a_device_that_is_wrong_everywhere_tells_so_many_findings_of_a_step() -> None:
    found: list[Finding] = []
    checks = Checks(Mode.FULL, tell=found.append)

    def tell(step: int, verdict: Verdict) -> None:
        judgement = Judgement(verdict=verdict, remedy=Remedy.REPAIR, reason="r")
        checks.tell(
            Place(step, Phase.REDUCE),
            ordinal=0,
            operator="aten.mm",
            output=0,
            num_elements=1,
            judgement=judgement,
        )

    for step in (3, 4):
        for _ in range(MAX_TOLD + 20):
            tell(step, Verdict.PRIMARY_HIT)
    assert [finding.step for finding in found] == [3] * MAX_TOLD + [4] * MAX_TOLD

    with pytest.raises(UnreliableDeviceError):
        tell(4, Verdict.UNRELIABLE)
    assert found[-1].verdict is Verdict.UNRELIABLE
