"""A store that lost the job, or fell back to an older state, and what supervisors tell it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import PodUid, QuorumId, RankId
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    FaultFired,
    PlanReported,
    ScaleRequested,
    StoreReopened,
    SuspendRequested,
    Tick,
)
from mainstay_core.coordinator.intake.store_recovery import is_behind
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method, Plan

ALONE = {"lanes": 1, "replicas": 1, "stages": 1, "shards_per_lane": 1}
SAVES = {"checkpoint_every_steps": 10, "checkpoint_dir": "/ckpt"}
SMALL = {"lanes": 2, "replicas": 2, "stages": 2, "shards_per_lane": 2}


def report(world: Any, plan: Plan, pod: str = "pod-0", **fields: Any) -> Any:
    return world.send(PlanReported(pod=PodUid(pod), plan=plan, **fields))


def flush(world: Any) -> Plan:
    """The store loses the job; somebody has made it anew. Return the plan that was in force."""
    plan: Plan = world.plan
    world.state = machine.initial(world.state.config, world.now_s)
    return plan


def everybody_heard(world: Any) -> Any:
    return world.send(Tick(heard=world.state.unheard))


def silent(world: Any, *pods: str) -> dict[str, float]:
    others = {p.registration.pod: 0.0 for p in world.state.pods}
    return others | dict.fromkeys(pods, 3 * world.state.config.heartbeat_s)


def test_a_lost_job_goes_on_in_the_plan_that_its_supervisors_hold(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    plan = flush(world)
    fired = report(world, plan, step=7, fingerprint={"torch": "2"})
    assert fired.plan == plan, "those that missed it get it"
    assert world.announced()[-1] == "StoreRestored"
    assert (world.state.last_id, world.state.step) == (plan.quorum.id, 7)
    assert world.state.fingerprint == {"torch": "2"}
    everybody_heard(world)
    assert world.plan == plan, "nobody counts as lost because he has not registered yet"
    for _ in range(3):
        world.commit()
    assert world.state.phase is JobPhase.RUNNING, "commits prove that all have settled"
    world.stored()


WRONG: dict[str, Callable[[Plan], Plan]] = {
    "no members": lambda p: replace(p, members=()),
    "members out of order": lambda p: replace(p, members=p.members[::-1]),
    "one slot for all": lambda p: replace(
        p, members=tuple(replace(m, slot=p.members[0].slot) for m in p.members)
    ),
    "a stage that the job does not have": lambda p: replace(
        p, members=(replace(p.members[0], rank=RankId(replica=0, stage=60_000, inner=60_000)),)
    ),
    "the same in those that it drops": lambda p: replace(
        p, outgoing=(replace(p.members[0], rank=RankId(replica=0, stage=60_000, inner=60_000)),)
    ),
    "a meeting place without a member": lambda p: replace(
        p, rendezvous=replace(p.rendezvous, pod=PodUid("nobody"))
    ),
    "no chain": lambda p: replace(p, chains=()),
    "a chain twice": lambda p: replace(p, chains=(*p.chains, p.chains[0])),
    "a cell that is no member": lambda p: replace(
        p, chains=(replace(p.chains[0], cells=(0, 60_000)), *p.chains[1:])
    ),
    "half a chain": lambda p: replace(
        p, chains=(replace(p.chains[0], cells=p.chains[0].cells[:1]), *p.chains[1:])
    ),
    "another replica's cells": lambda p: replace(
        p, chains=(replace(p.chains[0], cells=p.chains[1].cells), *p.chains[1:])
    ),
    "a replica without its chain": lambda p: replace(p, chains=p.chains[:1]),
    "too few suppliers": lambda p: replace(p, suppliers=p.suppliers[1:]),
    "a supplier that is no replica": lambda p: replace(p, suppliers=(9, *p.suppliers[1:])),
    "more replicas than lanes": lambda p: replace(p, replicas_wanted=60_000),
    "an interruption in the future": lambda p: replace(p, unplanned_id=p.quorum.id + 1),
    "a member of the future": lambda p: replace(
        p, members=(replace(p.members[0], since=p.quorum.id + 1), *p.members[1:])
    ),
    "planned in one way and unplanned in the other": lambda p: replace(p, planned=not p.planned),
    "the last quorum of all": lambda p: replace(
        p, quorum=QuorumId(id=2**53, nonce="x"), unplanned_id=2**53
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_no_coordinator_has_made_is_refused(
    name: str, start: Callable[..., Any]
) -> None:
    world = start(**SMALL)
    plan = flush(world)
    before = world.state
    with pytest.raises(RemoteProtocolError, match=r"HeldJob\.plan"):
        report(world, WRONG[name](plan))
    assert world.state == before
    report(world, plan)
    assert world.plan == plan


def test_a_supervisor_cannot_tell_of_more_steps_than_the_job_has(start: Callable[..., Any]) -> None:
    world = start(**SMALL)
    plan, steps = flush(world), world.state.shape.steps
    with pytest.raises(RemoteProtocolError, match=r"HeldJob\.step"):
        report(world, plan, step=steps + 1)
    report(world, plan, step=steps)


def test_a_scaled_job_does_not_grow_back_when_its_store_is_lost(start: Callable[..., Any]) -> None:
    world = start(**SMALL)
    world.send(ScaleRequested(replicas=1))
    world.settle()
    plan = flush(world)
    report(world, plan)
    assert world.state.wanted == 1


def let_go(world: Any) -> tuple[Plan, Any]:
    """A pod leaves, and the store is lost before anybody has adopted the plan without it."""
    leaver = world.member(1, 0)
    world.tell(world.fact(FactKind.LEAVING, leaver.slot.pod, None, evidence="SIGTERM"))
    plan = flush(world)
    assert (plan.planned, plan.outgoing) == (True, (leaver,))
    report(world, plan)
    return plan, leaver


def test_who_is_on_the_way_out_is_looked_after_although_the_store_was_lost(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    plan, leaver = let_go(world)
    pod = leaver.slot.pod
    world.send(Tick(heard=tuple(p for p in world.state.unheard if p != pod)))
    world.tick(**silent(world, pod))
    assert world.plan == plan, "late is not gone"
    world.tick(**{pod: world.state.config.heartbeat_timeout_s + 1})
    world.tick(after_s=2 * world.state.config.probe_s)
    assert (world.plan.quorum.id, world.plan.method) == (plan.quorum.id + 1, Method.MASK)
    assert "ended before the plan that drops them was adopted" in world.plan.reason
    assert world.plan.outgoing == ()


def test_who_left_in_good_order_before_the_store_was_lost_is_not_missed(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    plan, leaver = let_go(world)
    pod = leaver.slot.pod
    assert world.state.pod(pod).placeholder
    assert pod in world.state.unheard
    # The ledger's entries are told again: a step of that quorum took the votes of all.
    world.commit()
    world.tick()
    assert world.state.pod(pod) is None
    assert pod not in world.state.unheard
    everybody_heard(world)
    world.tick(**{pod: 99.0})
    assert world.plan == plan
    assert "PodGone" not in world.announced()


def test_who_is_on_the_way_out_gets_no_place_before_it_is_heard(start: Callable[..., Any]) -> None:
    world = start(**SMALL)
    plan, leaver = let_go(world)
    pod = leaver.slot.pod
    everybody_heard(world)
    world.down(world.member(0, 1))
    world.settle()
    world.tick()
    assert world.plan.quorum.id > plan.quorum.id
    assert pod not in {m.slot.pod for m in world.plan.members}


def test_a_job_that_pauses_is_suspended_by_a_store_that_lost_it(start: Callable[..., Any]) -> None:
    world = start(**SMALL, **SAVES)
    world.send(SuspendRequested(suspend=True))
    plan = flush(world)
    assert plan.pause
    report(world, plan)
    everybody_heard(world)
    assert world.plan == plan
    world.settle(0)
    for member in plan.members:
        world.tell(world.about(FactKind.PAUSED, member, step=0, durable=0))
    assert world.state.phase is JobPhase.SUSPENDED


def test_a_store_that_fell_back_does_not_suspend_a_job_that_goes_on(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL, **SAVES)
    world.send(SuspendRequested(suspend=True))
    older = world.state
    world.send(SuspendRequested(suspend=False))
    plan = world.plan
    world.state = older
    report(world, plan)
    everybody_heard(world)
    world.settle(0)
    world.tick()
    assert (world.plan, world.state.suspend) == (plan, False)


def test_a_wish_that_waited_for_a_recovery_is_not_lost_with_the_store(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL, **SAVES)
    world.down(world.member(0, 0))
    world.send(SuspendRequested(suspend=True))
    world.down(world.member(1, 1))
    plan = flush(world)
    assert not plan.pause
    report(world, plan)
    assert world.state.suspend


def test_the_plan_after_a_restored_one_takes_another_event(start: Callable[..., Any]) -> None:
    world = start(**ALONE)
    theirs = replace(world.plan, quorum=QuorumId(id=world.plan.quorum.id, nonce="other"))
    assert report(world, theirs).plan == theirs
    world.tick()
    assert world.plan.quorum.id == theirs.quorum.id + 1, "above both"


def test_a_pod_that_leaves_says_so_again_to_a_store_that_was_lost(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    plan = flush(world)
    report(world, plan)
    for i in range(4):
        world.register(f"pod-{i}", pid=1)
        world.up(
            f"pod-{i}", life=next(m.incarnation for m in plan.members if m.slot.pod == f"pod-{i}")
        )
    world.settle()
    world.tell(world.fact(FactKind.LEAVING, "pod-1", None, evidence="SIGTERM", grace_s=30.0))
    assert "pod-1" not in {m.slot.pod for m in world.plan.members}
    assert world.plan.planned


def test_whoever_registers_after_a_restore_keeps_its_trainers(start: Callable[..., Any]) -> None:
    world = start(**SMALL)
    plan = flush(world)
    report(world, plan)
    for i in range(4):
        world.register(f"pod-{i}", pid=17 + i)
    assert not world.state.unheard, "a registration is a word as well"
    assert world.plan == plan
    assert all(not p.placeholder for p in world.state.pods)
    world.register("pod-1", pid=99)
    assert world.plan.quorum.id == plan.quorum.id + 1, "another supervisor: its trainers ended"


def test_a_trainer_that_died_while_the_job_was_lost_is_recovered(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    plan = flush(world)
    report(world, plan)
    everybody_heard(world)
    dead = plan.members[3]
    world.down(dead)
    assert world.plan.quorum.id == plan.quorum.id + 1
    assert world.plan.member_of(dead.slot, dead.incarnation) is None
    assert world.plan.rendezvous.gather, "the next quorum has a place to meet"


def test_a_member_that_never_comes_back_is_found_by_its_silence(start: Callable[..., Any]) -> None:
    world = start(**SMALL)
    plan = flush(world)
    report(world, plan)
    gone = plan.members[-1].slot.pod
    world.tick(**silent(world, gone))
    world.send(Tick(heard=tuple(p for p in world.state.unheard if p != gone)))
    assert not world.state.unheard, "it is not waited for"
    assert world.plan == plan, "late is not gone"
    world.tick(**{gone: world.state.config.heartbeat_timeout_s + 1})
    assert world.plan.quorum.id == plan.quorum.id + 1
    assert gone not in {m.slot.pod for m in world.plan.members}


def test_no_plan_is_made_before_everybody_was_heard(start: Callable[..., Any]) -> None:
    world = start(**SMALL)
    stale = world.plan
    world.down(stale.members[3])
    newest = world.plan
    flush(world)
    report(world, stale, pod="pod-0")
    world.tell(world.about(FactKind.PARKED, stale.members[0], quorum=stale.quorum))
    world.tick(after_s=10.0)
    assert world.plan == stale, "one stale supervisor is not enough to decide anything"
    report(world, newest, pod="pod-1")
    everybody_heard(world)
    assert world.plan == newest
    world.down(newest.members[0])
    assert world.plan.quorum.id == newest.quorum.id + 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_newest_reported_plan_stands_whatever_the_order(
    start: Callable[..., Any], order: tuple[int, ...]
) -> None:
    world = start(**SMALL, spares=2)
    plans = [world.plan]
    for index in (3, 2):
        world.down(world.plan.members[index])
        plans.append(world.plan)
    flush(world)
    for number in order:
        report(world, plans[number], pod=f"pod-{number}")
    assert world.plan == plans[2]


def test_what_a_store_that_fell_back_still_knows_is_kept(start: Callable[..., Any]) -> None:
    world = start(**SMALL, spares=1)
    older = world.state
    world.down(world.plan.members[3])
    newest = world.plan
    world.state = older
    assert is_behind(world.state, newest.quorum)
    report(world, newest, pod="pod-1")
    assert world.state.phase is JobPhase.RECOVERING
    names = {p.registration.name for p in world.state.pods}
    assert names == {"pod-0", "pod-1", "pod-2", "pod-3", "spare-0"}
    everybody_heard(world)
    assert world.plan == newest
    free = world.state.slot(older.plan.members[3].slot)
    assert free.incarnation is None, "nobody is used before its supervisor has told of it"
    world.up("spare-0")
    for _ in range(3):
        world.commit()
    world.tick(after_s=20.0)
    assert world.plan.method == "join"


def test_of_two_plans_with_one_id_one_is_kept_and_one_above_both_follows(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    older = world.state
    world.down(world.plan.members[3])
    theirs = world.plan
    world.state = older
    world.park(older.plan.members[2])
    world.tick(after_s=10.0)
    ours = world.plan
    assert (ours.quorum.id, ours.quorum.nonce) != (theirs.quorum.id, theirs.quorum.nonce)
    assert is_behind(world.state, theirs.quorum)
    report(world, theirs, pod="pod-0")
    assert world.plan == theirs
    assert not is_behind(world.state, ours.quorum), "known as a rival"
    everybody_heard(world)
    assert world.plan.quorum.id == theirs.quorum.id + 1
    assert world.plan.unplanned_id == world.plan.quorum.id, "it interrupts everybody"
    assert {m.slot for m in world.plan.members} == {m.slot for m in theirs.members}


def test_two_reported_plans_with_one_id_do_not_chase_each_other(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    one = world.plan
    other = replace(one, quorum=replace(one.quorum, nonce="other"))
    flush(world)
    for plan, pod in ((one, "pod-0"), (other, "pod-1"), (one, "pod-2"), (other, "pod-3")):
        report(world, plan, pod=pod)
    assert world.plan.quorum.id == one.quorum.id + 1, "all four pods were heard"
    assert world.announced().count("StoreRestored") == 1


def test_a_fault_that_fired_before_does_not_fire_after_a_restore(
    new_world: Callable[..., Any],
) -> None:
    faults = tuple(
        FaultPoint(id=f"f{i}", step=3, action=FaultAction.KILL_TRAINER, replica=0, stage=0)
        for i in range(3)
    )
    world = new_world(**SMALL, faults=faults)
    for i in range(4):
        world.register(f"pod-{i}")
        world.up(f"pod-{i}")
    fire = FaultFired(fault="f0", pod=PodUid("pod-0"), slot=0, rank="r0.s0.i0", at_s=1.0)
    world.send(fire)
    world.down(world.plan.members[0])
    plan = flush(world)
    assert plan.faults_fired == ("f0",)
    report(world, plan, fired=("f1",))
    for again in ("f0", "f1"):
        with pytest.raises(RemoteProtocolError, match="already fired"):
            world.send(replace(fire, fault=again))
    world.send(replace(fire, fault="f2"))
    everybody_heard(world)
    world.down(world.plan.members[-1])
    assert set(world.plan.faults_fired) == {"f0", "f1", "f2"}


def test_the_fingerprint_comes_back_with_the_members_and_keeps_others_out(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    plan = flush(world)
    report(world, plan)
    assert world.state.fingerprint is None
    member = plan.members[0]
    world.tell(world.about(FactKind.TRAINER_UP, member, fingerprint={"torch": "2"}))
    assert world.state.fingerprint == {"torch": "2"}
    world.register("pod-9")
    world.up("pod-9", fingerprint={"torch": "3"})
    assert "FingerprintRefused" in world.announced()


def test_an_ended_job_is_not_restored(start: Callable[..., Any]) -> None:
    world = start(**SMALL, steps=1)
    plan = world.plan
    for stage in range(2):
        for replica in range(2):
            world.finish(world.member(replica, stage))
    assert world.state.phase is JobPhase.COMPLETE
    newer = replace(plan, quorum=QuorumId(id=9, nonce="x"), unplanned_id=9)
    assert not is_behind(world.state, newer.quorum)
    report(world, newer)
    assert world.state.phase is JobPhase.COMPLETE


def test_a_restarted_store_decides_when_all_were_heard_and_only_then(
    start: Callable[..., Any],
) -> None:
    world = start(**SMALL)
    world.send(StoreReopened(server="one"))
    assert not world.state.unheard, "the first process that is seen is no news"
    world.send(StoreReopened(server="two"))
    first = world.plan
    world.down(first.members[0])
    assert world.plan == first
    assert machine.is_pending(world.state)
    dead = first.members[1].slot.pod
    world.tick(**silent(world, dead))
    everybody_heard(world)
    assert world.plan.quorum.id == first.quorum.id + 1


def test_a_restarted_store_has_all_pods_tell_everything_again(start: Callable[..., Any]) -> None:
    """It may have forgotten what was acknowledged, the plan being the same."""
    world = start(**SMALL)
    world.send(StoreReopened(server="one"))
    before = world.state.restored_at_s
    world.send(StoreReopened(server="two"))
    assert world.state.restored_at_s != before, "heartbeats are answered with it"


class Branches:
    """Several copies of one job's store, each losing what it wants; supervisors hold plans."""

    def __init__(self, world: Any, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.held: dict[str, Plan] = {
            p.registration.pod: world.plan for p in world.state.pods if not p.gone
        }
        self.backups: list[CoordinatorState] = [world.state]

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.rng.choice([self.publish, self.publish, self.fall_back, self.back_up, self.beat])()

    def publish(self) -> None:
        """A plan is made and reaches some of the supervisors."""
        before = self.world.state.plan
        if before is None:
            return
        self.world.park(self.rng.choice(before.members))
        self.world.tick(after_s=30.0)
        if self.world.plan == before:
            return
        for pod in self.held:
            if self.rng.random() < 0.5:
                self.learn(pod, self.world.plan)

    def learn(self, pod: str, plan: Plan) -> None:
        if plan.quorum.id > self.held[pod].quorum.id:
            self.held[pod] = plan

    def fall_back(self) -> None:
        self.world.state = self.rng.choice(
            [*self.backups, machine.initial(self.world.state.config, self.world.now_s)]
        )
        if self.world.state.plan is not None:
            self.world.send(StoreReopened(server=f"s{self.rng.random()}"))

    def back_up(self) -> None:
        if self.world.state.plan is not None:
            self.backups.append(replace(self.world.state, server="backup"))

    def beat(self) -> None:
        """Some supervisors speak, in any order, as the api makes them do."""
        pods = self.rng.sample(sorted(self.held), self.rng.randint(1, len(self.held)))
        for pod in pods:
            self.speak(pod)
        if self.world.state.plan is None:
            self.speak(pods[0])

    def speak(self, pod: str) -> None:
        held = self.held[pod]
        before = self.world.state
        if is_behind(before, held.quorum):
            report(self.world, held, pod=pod)
        else:
            self.world.send(Tick(heard=(PodUid(pod),)))
        after = self.world.plan
        assert before.plan is None or after.quorum.id >= before.plan.quorum.id
        self.learn(pod, after)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_store_forgets_all_end_in_one_quorum_above_all_others(
    start: Callable[..., Any], seed: int
) -> None:
    world = start(**SMALL)
    branches = Branches(world, random.Random(seed))
    for _ in range(6):
        branches.run(8)
        branches.beat()
        for _ in range(3):
            for pod in branches.held:
                branches.speak(pod)
        assert not world.state.unheard
        assert not world.state.rivals
        newest = max(plan.quorum.id for plan in branches.held.values())
        assert world.plan.quorum.id == newest
        assert {p.quorum for p in branches.held.values()} == {world.plan.quorum}
