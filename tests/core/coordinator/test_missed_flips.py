"""What the coordinator knows of injected flips that changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.events import FaultFired
from mainstay_core.coordinator.injection import list_faults
from mainstay_core.coordinator.intake.missed_flips import MAX_PROBLEM
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.dmr.flips import Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.wire.facts import FactKind

Start = Callable[..., Any]
FLIP = Flip(in_pass=Pass.FORWARD, element=0, bit=0)


def fault(name: str, **fields: Any) -> FaultPoint:
    return FaultPoint(id=name, step=0, replica=1, stage=0, **fields)


def test_a_flip_that_was_not_put_in_is_missed_once_it_has_fired_there(start: Start) -> None:
    flips = tuple(fault(name, action=FaultAction.FLIP, flip=FLIP) for name in ("a", "b", "c"))
    world = start(faults=flips)
    member = world.member(1, 0)

    def fire(name: str) -> None:
        pod = PodUid(member.slot.pod)
        world.send(FaultFired(fault=name, pod=pod, slot=0, rank="r1.s0.i0", at_s=1.0))

    def miss(name: str, why: str, replica: int = 1) -> None:
        teller = world.member(replica, 0)
        world.tell(world.about(FactKind.MISSED, teller, fault=name, evidence=why))

    fire("a")
    miss("a", "there is no operator aten.mmm")
    miss("b", "there is no block 7")
    fire("b")
    fire("c")
    miss("c", "it has fired elsewhere", replica=0)
    miss("a", "again")
    miss("of another job", "nothing")

    known = {status.fault.id: status for status in list_faults(world.state)}
    assert {name: (status.state, status.problem) for name, status in known.items()} == {
        "a": ("missed", "there is no operator aten.mmm"),
        "b": ("fired", ""),
        "c": ("fired", ""),
    }
    assert all(status.fired for status in known.values())
    assert world.announced().count("FaultMissed") == 1
    assert codec.loads(CoordinatorState, codec.dumps(world.state)) == world.state


def test_only_a_flip_can_be_told_as_missed(start: Start) -> None:
    world = start(faults=(fault("k", action=FaultAction.KILL_POD),))
    world.tell(world.about(FactKind.MISSED, world.member(1, 0), fault="k", evidence="nothing"))

    assert world.state.missed == ()
    assert "FaultMissed" not in world.announced()


def test_of_what_is_said_of_a_missed_flip_the_state_keeps_a_few_lines(start: Start) -> None:
    world = start(faults=(fault("a", action=FaultAction.FLIP, flip=FLIP),))
    member = world.member(1, 0)
    pod = PodUid(member.slot.pod)
    world.send(FaultFired(fault="a", pod=pod, slot=0, rank="r1.s0.i0", at_s=1.0))
    long = f"there is no type 7, only type {', '.join(map(str, range(2000)))}"
    world.tell(world.about(FactKind.MISSED, member, fault="a", evidence=long))

    ((name, problem),) = world.state.missed
    assert name == "a"
    assert problem.startswith("there is no type 7, only type 0, 1, 2")
    assert len(problem) <= MAX_PROBLEM == 500
