"""Flips and findings as values: what travels, and what is refused."""

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.ids import PodUid, RankId, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.faults.points import FaultAction, FaultPoint

FOUND = Finding(
    step=4,
    slot=Slot(pod=PodUid("pod-a"), index=1),
    rank=RankId(replica=1, stage=0),
    in_pass=Pass.WEIGHT,
    shard_type=2,
    micro_batch=0,
    block="layers.3",
    ordinal=4,
    operator="aten.mm",
    num_elements=1,
    verdict=Verdict.PRIMARY_HIT,
    remedy=Remedy.REPAIR,
    reason="the third execution equals the checker",
)


@pytest.mark.parametrize("operator", [None, 7, "aten.mm"])
def test_a_flip_comes_back_as_it_was_sent(operator: int | str | None) -> None:
    flip = Flip(
        in_pass=Pass.FORWARD, operator=operator, element=9, bit=30, execution=Execution.BOTH
    )
    point = FaultPoint(id="a", step=3, action=FaultAction.FLIP, replica=0, stage=0, flip=flip)

    assert codec.loads(FaultPoint, codec.dumps(point)) == point


def test_a_fault_without_a_flip_has_the_bytes_of_before() -> None:
    assert "flip" not in codec.encode(FaultPoint(id="a", step=3, action=FaultAction.STOP))


@pytest.mark.parametrize(("field", "value"), [("bit", 128), ("operator", -1), ("element", -1)])
def test_a_flip_out_of_bounds_is_refused_by_its_field(field: str, value: int) -> None:
    data = codec.encode(Flip(in_pass=Pass.STEP, element=0, bit=0)) | {field: value}

    with pytest.raises(MalformedError, match=rf"Flip\.{field}"):
        codec.decode(Flip, data)


def test_a_finding_comes_back_and_says_where_it_was() -> None:
    assert codec.loads(Finding, codec.dumps(FOUND)) == FOUND
    assert FOUND.place == "aten.mm (#4) in the weight pass of layers.3"
