"""Checks in the waits of a reduction, and sums that are executed again on their way to others."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.checks.step import TYPES, Spot, Step
from tests.train.compute.test_early import Cells
from tests.train.compute.test_engine import SLOT, table_of

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.checks.checker import Checks, UnreliableDeviceError
from mainstay_train.checks.places import Phase
from mainstay_train.checks.sums import SUM, sum_now
from mainstay_train.checks.waiting import Waiting, WaitingChecks
from mainstay_train.compute.arrivals import ReductionWaits
from mainstay_train.compute.engine import Engine
from mainstay_train.kernels import bits

MUCH = 1 << 30


class Exchanging:
    """A group with an exchange that is over once some checks were executed, or never."""

    def __init__(self, *, ends: bool) -> None:
        self.ended: str | None = None
        self.is_over = False
        self._ends = ends

    def go_on(self) -> None:
        if self._ends:
            self.ended = "a member is gone"
        else:
            self.is_over = True

    def finish_exchange(self, exchange: object) -> None:
        assert exchange is self
        if self.ended is not None:
            raise GroupEnded(self.ended)
        assert self.is_over


@pytest.mark.parametrize("ends", [False, True])
def test_checks_are_executed_until_an_exchange_is_over_or_the_group_ends(ends: bool) -> None:
    group, order = Exchanging(ends=ends), list[int]()
    waiting = WaitingChecks(100)

    def execute(number: int) -> None:
        order.append(number)
        if number == 2:
            group.go_on()

    for number in range(5):
        waiting.add(Waiting(0, frozenset(), 1, partial(execute, number)))
    waits = ReductionWaits(SimpleNamespace(waiting=waiting, now_s=lambda: 0.0))  # type: ignore[arg-type]
    if ends:
        with pytest.raises(GroupEnded, match="a member is gone"):
            waits.finish(group, group)  # type: ignore[arg-type]
    else:
        waits.finish(group, group)  # type: ignore[arg-type]

    assert order == [0, 1, 2]
    assert waiting, "what is left waits for the next wait"


def computed(flip: bool) -> tuple[Step, Engine, Spot]:
    """An engine that has computed its types, whose checks wait; with a wrong forward or without."""
    step = Step("llama", recompute=False, waiting_bytes=MUCH)
    step.run(Mode.FULL)
    spots = [s for s in step.list() if s.place.in_pass is Pass.FORWARD and s.kernel == "aten.mm"]
    spot = next(s for s in spots if s.place.shard_type == TYPES[1])
    (engine,) = step._engines[Mode.FULL]
    engine.drop_held()
    step._findings = []
    if flip:
        engine.checks.order("f", 0, Phase.FORWARD, spot.flip(element=3, bit=30))
    engine.compute(TYPES, 0, None)
    assert engine.checks.waiting
    return step, engine, spot


def test_checks_outlast_the_program_and_are_over_before_the_vote() -> None:
    _, engine, _ = computed(flip=False)
    cells = Cells()

    engine.reduce(cells, table_of(engine), (0, 1), 0)

    assert not engine.checks.waiting
    assert engine.ballot(cells, table_of(engine), 0, SLOT, "").bad == ()


def test_a_vote_calls_a_type_bad_whose_check_came_in_the_reduction() -> None:
    step, engine, spot = computed(flip=True)
    assert engine.types.bad() == ()
    cells = Cells()

    engine.reduce(cells, table_of(engine), (0, 1), 0)

    assert engine.ballot(cells, table_of(engine), 0, SLOT, "").bad == (TYPES[1],)
    (finding,) = step._findings
    assert (finding.operator, finding.ordinal) == (spot.kernel, spot.ordinal)
    assert finding.remedy is Remedy.VOID_TYPE


@pytest.mark.parametrize("begun", [False, True])
def test_a_group_that_ends_leaves_checks_waiting_until_a_report_tells_what_is_held(
    begun: bool,
) -> None:
    step, engine, _ = computed(flip=True)
    if begun:
        cells = Cells()
        cells.shutdown("a member is gone")
        with pytest.raises(GroupEnded):
            engine.reduce(cells, table_of(engine), (0, 1), 0)
    assert step._findings == []

    engine.judge_held()

    assert engine.types.bad() == (TYPES[1],)
    assert not engine.checks.waiting
    assert len(step._findings) == 1


def test_what_is_dropped_is_checked_no_more_and_another_program_begins_with_none() -> None:
    step, engine, _ = computed(flip=True)
    engine.drop_held()
    assert not engine.checks.waiting
    engine.compute(TYPES[:2], 0, None)
    assert engine.checks.waiting
    engine.compute(TYPES[2:], 0, None)
    engine.judge_held()
    assert step._findings == []
    assert engine.types.bad() == ()


def summed(checks: Checks, terms: list[torch.Tensor], scope: Any) -> torch.Tensor:
    def make(into: torch.Tensor) -> None:
        torch.add(terms[0], terms[1], out=into)
        into.add_(terms[2])

    total = torch.zeros(70)[3:67]
    with scope:
        check = sum_now(checks, scope, total, make)
    first = total.clone()
    check()
    assert bits.are_equal(first, total), "others have it already"
    with scope:
        torch.neg(total)
    return total


@pytest.mark.parametrize("kernel", [0, 1])
@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
def test_a_wrong_sum_is_found_when_it_is_on_its_way(kernel: int, execution: Execution) -> None:
    found: list[Finding] = []
    checks = Checks(Mode.FULL, tell=found.append)
    terms = [torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    right = summed(checks, terms, checks.over(Phase.REDUCE))
    assert found == []
    flip = Flip(in_pass=Pass.STEP, operator=kernel, element=7, bit=22, execution=execution)
    checks.order("f", 0, Phase.REDUCE, flip)
    checks.order("g", 0, Phase.REDUCE, Flip(in_pass=Pass.STEP, operator=2, element=1, bit=1))

    total = summed(checks, terms, checks.over(Phase.REDUCE))

    finding, other = found
    assert (finding.operator, finding.ordinal, finding.num_elements) == (SUM, 0, 1)
    assert (other.operator, other.remedy) == ("aten.neg", Remedy.REPAIR)
    is_wrong = execution is Execution.PRIMARY
    assert bool(checks.wrong_sum) == is_wrong
    assert bits.are_equal(total, right) == (not is_wrong)
    expected = (
        (Verdict.PRIMARY_HIT, Remedy.REDUCE_AGAIN)
        if is_wrong
        else (Verdict.CHECKER_HIT, Remedy.NOTHING)
    )
    assert (finding.verdict, finding.remedy) == expected


def test_a_sum_that_is_wrong_each_time_in_another_way_ends_the_trainer() -> None:
    checks = Checks(Mode.FULL)
    total, scope, numbers = torch.zeros(64), checks.over(Phase.REDUCE), iter(range(9))
    with scope:
        check = sum_now(checks, scope, total, lambda into: into.fill_(next(numbers)).neg_())  # type: ignore[arg-type,return-value]
    with pytest.raises(UnreliableDeviceError, match="three executions of sum"):
        check()


def test_who_waits_for_a_reduction_that_began_early_executes_checks() -> None:
    ended, order = threading.Event(), list[int]()
    waiting = WaitingChecks(100)

    def execute(number: int) -> None:
        order.append(number)
        if number == 1:
            ended.set()

    for number in range(3):
        waiting.add(Waiting(0, frozenset(), 1, partial(execute, number)))

    class Begun:
        @property
        def is_over(self) -> bool:
            return ended.is_set()

        def finish(self) -> None:
            assert ended.is_set()

    ReductionWaits(SimpleNamespace(waiting=waiting, now_s=lambda: 0.0)).finish_begun(Begun())  # type: ignore[arg-type]
    assert order == [0, 1]
