"""What a run holds a window to that is called complete, where one before it was given up."""

from __future__ import annotations

import pytest
from tests.core.plans import make_plan
from tests.core.segments.keys import key_of

from mainstay_core.rank.events import PlacedUnit, Snapshot
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Violation
from mainstay_core.sim.invariants.kept import Kept
from mainstay_core.sim.invariants.kept_boundaries import KeptBoundaries
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import SegmentKey, SegmentKind

GIVEN_UP, COMPLETE = Window(first=1, length=2), Window(first=2, length=2)
HERE, THERE = "store-a", "store-b"
UNIT = 0
BEFORE, TURN = 2, 3
"""The versions at which the two windows copy the unit. The first is one of both windows."""


def truth(version: int) -> str:
    return terms.term("state", version)


class Run:
    """One position of one unit: a window is given up at version 2, where the next one begins."""

    def __init__(self, *, with_compute: bool = False) -> None:
        boundaries = KeptBoundaries(1, promises=True) if with_compute else None
        self.kept = Kept(lambda _: 1, lambda _, version: [(truth(version),)], boundaries)
        self.plans = [make_plan({0: ["a.1"]}, quorum=number) for number in (1, 2)]
        self._copy(self.plans[0], GIVEN_UP, BEFORE)
        self._copy(self.plans[1], COMPLETE, TURN)
        for version in (BEFORE, TURN):
            self.hold(key_of(version, UNIT, "gradient"))
            if with_compute:
                self.hold(key_of(version, UNIT, "compute"))

    def _copy(self, plan: Plan, window: Window, turn: int) -> None:
        for version in range(window.first, window.last + 1):
            units = (PlacedUnit(f"0.{UNIT}", 0),) if version == turn else ()
            self.kept.copies(plan, 0, Snapshot(version, window, units))

    def hold(self, key: SegmentKey) -> None:
        content = terms.unit_of(key.unit, truth(key.version))
        if key.kind is SegmentKind.COMPUTE:
            content = terms.compute_weights(content)
        self.kept.held(key, content, frozenset({HERE, THERE}))

    def complete(self) -> None:
        self.kept.needless("a", self.plans[1], 0, COMPLETE.first, TURN, by_votes=True)


@pytest.mark.parametrize("with_compute", [False, True])
def test_a_copy_of_a_window_that_was_given_up_may_give_room_to_the_complete_one(
    with_compute: bool,
) -> None:
    run = Run(with_compute=with_compute)
    for version in (BEFORE, TURN):
        run.hold(key_of(version, UNIT))
    run.kept.evicted(HERE, [key_of(BEFORE, UNIT)])
    if with_compute:  # by then the unit is there in full
        run.kept.evicted(HERE, [key_of(TURN, UNIT, "compute")])
    run.complete()


@pytest.mark.parametrize(
    ("gone", "with_compute"),
    [
        (key_of(TURN, UNIT), False),
        (key_of(TURN, UNIT), True),
        (key_of(BEFORE, UNIT, "compute"), True),
        (key_of(BEFORE, UNIT, "gradient"), False),
        (key_of(TURN, UNIT, "gradient"), False),
    ],
    ids=str,
)
def test_nothing_of_the_complete_window_may(gone: SegmentKey, with_compute: bool) -> None:
    run = Run(with_compute=with_compute)
    for version in (BEFORE, TURN):
        run.hold(key_of(version, UNIT))
    run.kept.evicted(HERE, [gone])
    with pytest.raises(Violation, match=f"at 2 complete, but {gone} had to give room"):
        run.complete()


def test_a_copy_of_a_window_that_was_given_up_completes_no_other() -> None:
    run = Run()
    run.hold(key_of(BEFORE, UNIT))
    with pytest.raises(Violation, match="no good state of unit 0 of position 0 was at its holders"):
        run.complete()


def test_of_a_window_of_a_quorum_before_any_copy_may_be_needed() -> None:
    run = Run()
    for version in (BEFORE, TURN):
        run.hold(key_of(version, UNIT))
    run.plans[1] = make_plan({0: ["a.1"]}, quorum=3)
    run.kept.evicted(HERE, [key_of(BEFORE, UNIT)])
    with pytest.raises(Violation, match="had to give room"):
        run.complete()
