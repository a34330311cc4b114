"""A job's definition that comes again, from another version of what submits it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.coordinator.events import JobSubmitted
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.config import SnapshotConfig

Start = Callable[..., Any]


def test_another_version_may_choose_another_kind_of_log_and_the_job_keeps_its_own(
    start: Start,
) -> None:
    world = start()
    stored = SnapshotConfig(memory_bytes=1 << 20)
    world.state = replace(world.state, config=replace(world.state.config, snapshots=stored))
    chosen = replace(stored, memory_bytes=1 << 30, boundary=True, log_reason="new", auto_log=True)

    world.send(JobSubmitted(config=replace(world.state.config, snapshots=chosen, spares=2)))

    kept = world.state.config
    assert kept.spares == 2
    assert kept.snapshots == replace(stored, auto_log=True)


def test_checks_are_switched_on_or_off_in_another_job_only(start: Start) -> None:
    world = start()
    asked = replace(world.state.config, dmr=Mode.FULL)
    with pytest.raises(InvalidSpecError, match=r"spec\.detection\.dmr\.mode: .*Full.*cannot"):
        world.send(JobSubmitted(config=asked))


def test_who_asks_for_another_kind_of_log_is_refused(start: Start) -> None:
    world = start()
    stored = SnapshotConfig(memory_bytes=1 << 20)
    world.state = replace(world.state, config=replace(world.state.config, snapshots=stored))
    asked = replace(world.state.config, snapshots=replace(stored, boundary=True))
    with pytest.raises(InvalidSpecError, match="cannot change in a job that exists"):
        world.send(JobSubmitted(config=asked))
