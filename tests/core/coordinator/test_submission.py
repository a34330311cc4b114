"""A job's definition that comes again, from another version of what submits it."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from tests.worlds.pods import PlayedPods

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.shape import Cut, Order
from mainstay_core.coordinator import submission
from mainstay_core.coordinator.events import JobSubmitted, PlanReported
from mainstay_core.dmr.settings import CheckRules, Mode, PlanName
from mainstay_core.job import crd
from mainstay_core.job.config import ApproximateConfig, JobConfig, SnapshotConfig
from mainstay_core.job.protections import ENTRY_KEY, LOOP
from mainstay_core.wire.plan import Method

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


def test_checks_change_with_a_planned_plan_of_the_same_members(start: Start) -> None:
    world = start()
    before = world.plan
    assert before.checks == CheckRules(), "the first plan tells it as well"
    asked = replace(world.state.config, dmr=Mode.FULL, witness_every_steps=5)

    world.send(JobSubmitted(config=asked))

    plan = world.plan
    assert (plan.planned, plan.method) == (True, Method.REFORM)
    assert plan.checks == CheckRules(mode=Mode.FULL, witness_every_steps=5)
    assert [(m.slot, m.rank) for m in plan.members] == [(m.slot, m.rank) for m in before.members]
    assert world.state.checks_in_force == plan.checks
    assert "checks detection.dmr Off, no witness -> detection.dmr Full" in world.messages()
    world.stored()

    world.settle()
    quorum = world.plan.quorum
    world.send(JobSubmitted(config=asked))
    world.tick()
    assert world.plan.quorum == quorum, "it is the same again"
    world.send(JobSubmitted(config=replace(asked, dmr=Mode.OFF, witness_every_steps=0)))
    assert world.plan.checks == CheckRules(), "said, as newer trainers were started with others"


def test_what_is_in_force_is_what_the_plan_says_while_no_other_can_be_made(start: Start) -> None:
    world = start()
    world.down(world.member(0, 0))
    assert not world.plan.planned
    asked = replace(world.state.config, dmr=Mode.FULL)

    world.send(JobSubmitted(config=asked))

    assert world.plan.checks == CheckRules()
    assert world.state.checks_in_force == CheckRules()
    world.down(world.member(1, 0))
    assert world.plan.checks == CheckRules(mode=Mode.FULL), "any later plan tells it"
    assert world.state.checks_in_force.mode is Mode.FULL


def test_a_store_that_lost_the_job_takes_the_checks_from_the_plan(start: Start) -> None:
    world = start()
    world.send(JobSubmitted(config=replace(world.state.config, dmr=Mode.FULL)))
    plan = world.plan
    fresh = PlayedPods(replace(world.state.config, dmr=Mode.OFF))
    fresh.register("pod-0")
    fresh.send(PlanReported(pod=PodUid("pod-0"), plan=plan))
    assert fresh.state.config.dmr is Mode.FULL
    assert fresh.state.wanted_checks == plan.checks


def test_what_is_submitted_after_a_store_loss_is_not_taken_for_what_is_in_force(
    start: Start,
) -> None:
    world = start()
    fresh = PlayedPods(replace(world.state.config, dmr=Mode.FULL, witness_every_steps=1))
    fresh.register("pod-0")
    fresh.send(PlanReported(pod=PodUid("pod-0"), plan=world.plan))
    assert fresh.state.checks_in_force == CheckRules()
    assert fresh.state.wanted_checks == CheckRules(), "until it is submitted again"


def test_a_plan_of_an_older_release_that_says_nothing_of_checks_is_followed(start: Start) -> None:
    world = start()
    old = replace(world.plan, checks=None)
    fresh = PlayedPods(world.state.config)
    fresh.register("pod-0")
    fresh.send(PlanReported(pod=PodUid("pod-0"), plan=old))
    assert fresh.state.plan is not None
    assert fresh.state.plan.checks is None
    assert fresh.state.checks_in_force == CheckRules()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dmr": Mode.PIGGYBACK}, r"spec\.detection\.dmr\.mode: is Piggyback, but the passes"),
        (
            {"dmr": Mode.FULL, "dmr_plan": PlanName.DYNAMIC},
            r"spec\.detection\.dmr\.plan: is Dynamic, but an own loop waits",
        ),
    ],
)
def test_checks_that_a_loop_of_ones_own_cannot_have_are_refused(
    start: Start, change: dict[str, Any], told: str
) -> None:
    world = start(stages=1)
    known = {"pod-0/0": {ENTRY_KEY: LOOP}}
    world.state = replace(world.state, fingerprints=known)
    with pytest.raises(InvalidSpecError, match=told):
        world.send(JobSubmitted(config=replace(world.state.config, **change)))


def test_who_asks_for_another_kind_of_log_is_refused(start: Start) -> None:
    world = start()
    stored = SnapshotConfig(memory_bytes=1 << 20)
    world.state = replace(world.state, config=replace(world.state.config, snapshots=stored))
    asked = replace(world.state.config, snapshots=replace(stored, boundary=True))
    with pytest.raises(InvalidSpecError, match="cannot change in a job that exists"):
        world.send(JobSubmitted(config=asked))


NOT_IN_A_DEFINITION = {"unblock_s", "probe_s", "snapshots.ask_s"}
"""Fields that have their defaults in every job."""


def changes_of(config: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """Each field of a job that cannot change, by name, and the job with another value of it."""
    assert config.snapshots is not None
    free = (*submission.MUTABLE, *submission._NOT_SUBMITTED, "shape", "snapshots")
    for f in fields(JobConfig):
        if f.name not in free:
            yield f.name, replace(config, **{f.name: another(getattr(config, f.name))})
    for f in fields(config.shape):
        if f.name not in submission.MUTABLE_SHAPE:
            value = another(getattr(config.shape, f.name))
            yield f"shape.{f.name}", replace(config, shape=replace(config.shape, **{f.name: value}))
    for f in fields(SnapshotConfig):
        if f.name not in ("auto_log", "log_reason"):
            value = another(getattr(config.snapshots, f.name))
            kept = replace(config.snapshots, **{f.name: value})
            yield f"snapshots.{f.name}", replace(config, snapshots=kept)


def another(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return next(each for each in type(value) if each is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, "x")
    return {**value, "x": 1} if isinstance(value, dict) else 1 + (value or 0)


def paths_of(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """The path of each field of a TrainingJob."""
    for name, child in node.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here
        yield from paths_of(child, here)


def test_whatever_cannot_change_is_refused_by_its_path_in_the_definition(start: Start) -> None:
    world = start()
    stored = replace(world.state.config, snapshots=SnapshotConfig(memory_bytes=1 << 20))
    world.state = replace(world.state, config=stored)
    known = {*paths_of(crd.build_schema()), "metadata.name", "metadata.namespace"}
    refused = {}
    for name, changed in changes_of(stored):
        with pytest.raises(InvalidSpecError, match="cannot change in a job that exists") as caught:
            world.send(JobSubmitted(config=changed))
        refused[name] = caught.value.field

    assert len(refused) > 40
    assert {n for n, path in refused.items() if path not in known} == NOT_IN_A_DEFINITION


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bucket_bytes": 8 << 20}, "spec.runtime.bucketMebibytes: is 8, was 4:"),
        (
            {"snapshots": {"boundary": True}},
            "spec.snapshots.replay: is 'Boundary', was 'Gradients'",
        ),
        ({"snapshots": {"num_instalments": 3}}, "spec.snapshots.window: is 3, was 'Auto'"),
        ({"snapshots": {"memory_bytes": 8 << 30}}, "spec.snapshots.memory: is '8Gi', was '1Mi':"),
        ({"shape": {"order": Order.SWAPPED}}, "spec.pipeline.order: is 'Swapped', was 'InOrder'"),
        (
            {"guards": 2, "shape": {"order": Order.SWAPPED, "cut": Cut.EQUAL}},
            "spec.pipeline.order: is 'Swapped', was 'InOrder'",
        ),
    ],
)
def test_what_cannot_change_is_told_as_a_definition_says_it(
    start: Start, change: dict[str, Any], said: str
) -> None:
    world = start()
    stored = replace(world.state.config, snapshots=SnapshotConfig(memory_bytes=1 << 20))
    world.state = replace(world.state, config=stored)
    parts = {
        name: replace(getattr(stored, name), **value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    with pytest.raises(InvalidSpecError) as caught:
        world.send(JobSubmitted(config=replace(stored, **parts)))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("is_allowed", [True, False])
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"after_lost_steps": 3}, "recovery.approximateAfterLostSteps None -> 3"),
        ({"weights": "Uniform"}, "recovery.approximate.weights GradientNorm -> Uniform"),
        ({"lr_boost": 1.2}, "recovery.approximate.lrBoostPercent 110 -> 120"),
        ({"boost_steps": 7}, "recovery.approximate.boostSteps None -> 7"),
        ({"stale_steps": 4}, "recovery.approximate.staleSteps 0 -> 4"),
        ({"wait_s": 60.0}, "recovery.approximate.waitSeconds 0 -> 60"),
        ({"optimizer_state": "Average"}, "recovery.approximate.optimizerState Zero -> Average"),
    ],
)
def test_what_changes_of_approximate_recovery_is_announced_by_its_path(
    start: Start, rule: dict[str, Any], said: str, is_allowed: bool
) -> None:
    name = "approximate" if is_allowed else "permitted"
    world = start(**{name: ApproximateConfig()})
    changed = replace(world.state.config, **{name: ApproximateConfig(**rule)})
    world.send(JobSubmitted(config=changed))
    assert f"the job's definition has changed: {said}" in world.messages()
