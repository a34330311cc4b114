"""The simulation holds a job to what its supervisors have told of devices that were named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.sim.engine import Violation
from mainstay_core.sim.invariants.named import NamedDevices
from mainstay_core.wire.facts import FactKind


def test_a_word_of_a_device_that_ended_before_it_told_of_itself_counts(
    start: Callable[..., Any],
) -> None:
    world, seen = start(replicas=3, stages=1), Counter[str]()
    other = Slot(pod=PodUid("pod-1"), index=0)
    told = world.about(FactKind.NAMED, world.member(0, 0), since=3, step=5, device=other)
    with pytest.raises(Violation, match="pod-1/0 was named in step 5, and it tainted nothing"):
        NamedDevices().check(world.state, [told], 60, seen)
    world.tell(told)
    NamedDevices().check(world.state, [told], 60, seen)
    assert seen["named by another at the end"] == 2
