"""A device that is named leaves tainted steps behind, and a job may go back before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.worlds.pods import PlayedPods

from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import PodUid, QuorumId, Slot
from mainstay_core.control_plane.transactions import find_news
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    JobSubmitted,
    PlanReported,
    StepsCommitted,
    StoreReopened,
    Tick,
)
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.coordinator.taints import count_witnessed
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.ledger import CleanDevice, LedgerEntry
from mainstay_core.wire.plan import Member, Method, Voided, is_void
from mainstay_core.wire.taints import MAX_TAINTS

Start = Callable[..., Any]
ZERO = "0" * 32


def name(world: PlayedPods, member: Member, since: int | None = 3) -> None:
    """A device is named in step 5; a witness agreed with it last in the step before ``since``."""
    world.tell(world.about(FactKind.NAMED, member, evidence="why", since=since, step=5))


def train(world: PlayedPods, steps: int) -> None:
    for step in range(steps):
        world.commit(step)


def test_the_steps_of_a_named_device_are_tainted_until_its_work_is_handed_over(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1)
    train(world, 5)
    wrong = world.member(1, 0)

    name(world, wrong)

    (taint,) = world.state.taints
    assert (taint.slot, taint.since, taint.named_in, taint.until) == (wrong.slot, 3, 5, None)
    assert taint.counts
    assert taint.describe() == (
        f"steps from 3 on are tainted: the device of {wrong.slot.pod}/0, named in step 5, computes "
        "wrongly"
    )
    assert world.plan.planned, "it hands its work over, and nobody goes back"
    world.settle(7)
    (taint,) = world.state.taints
    assert taint.until == 7
    assert "steps from 3 to 6 are tainted" in taint.describe()
    world.stored()


def test_another_member_may_name_a_device_that_is_gone_by_then(start: Start) -> None:
    world = start(replicas=3, stages=1)
    train(world, 5)
    wrong, other = world.member(1, 0), world.member(0, 0)
    told = world.about(FactKind.NAMED, other, evidence="why", since=3, step=5, device=wrong.slot)

    world.tell(told)

    assert [t.slot for t in world.state.taints] == [wrong.slot]
    leaving = [p.registration.pod for p in world.state.pods if p.leaving]
    assert leaving == [wrong.slot.pod]
    world.pod_gone(wrong.slot.pod)
    world.tell(replace(told, quorum=world.plan.quorum))
    assert len(world.state.taints) == 1


def test_a_device_that_is_named_again_has_tainted_what_it_had(start: Start) -> None:
    world = start(replicas=1, stages=1)
    train(world, 5)
    name(world, world.member(0, 0), since=3)
    name(world, world.member(0, 0), since=5)
    (taint,) = world.state.taints
    assert (taint.since, taint.until) == (3, None)


def test_a_trainer_that_tells_no_step_taints_none(start: Start) -> None:
    world = start(replicas=3, stages=1)
    name(world, world.member(1, 0), since=None)
    assert world.state.taints == ()


def test_the_job_goes_back_without_the_pod_of_the_device(start: Start) -> None:
    world = start(replicas=3, stages=2, goes_back=True, checkpoint_dir="/c")
    train(world, 5)
    world.tell(world.about(FactKind.CHECKPOINT, world.member(0, 0), durable=4))
    wrong = world.member(1, 0)

    name(world, wrong)

    plan = world.plan
    assert (plan.method, plan.planned, plan.lineage) == (Method.RESTART, False, 1)
    assert plan.voided == (Voided(quorum=plan.quorum.id, lineage=1, version=3),)
    assert wrong.slot not in {m.slot for m in plan.members}
    assert len(plan.chains) == 2
    (taint,) = world.state.taints
    assert taint.undone_in == str(plan.quorum)
    assert not taint.counts
    assert world.state.durable == 3, "that of step 4 is none to go on from"

    world.settle(2)
    assert world.state.step == 2
    world.commit(2)
    assert world.plan.voided == plan.voided, "later plans tell of it as well"
    (recovery,) = [r for r in world.recoveries().values() if r.method is Method.RESTART]
    assert recovery.lost_steps == 3
    assert "went back before them" in taint.describe()


def test_a_device_that_two_members_name_has_the_job_go_back_once(start: Start) -> None:
    world = start(replicas=3, stages=1, goes_back=True)
    train(world, 5)
    wrong, other, before = world.member(1, 0), world.member(0, 0), world.plan.quorum
    name(world, wrong)
    went = world.plan.quorum
    late = world.about(FactKind.NAMED, other, since=3, step=5, device=wrong.slot, quorum=before)

    world.tell(late)
    world.settle(2)
    world.tell(late)

    assert len(world.state.taints) == 1
    assert (world.plan.lineage, world.plan.voided[-1].quorum) == (1, went.id)


def test_of_two_devices_the_second_that_is_named_late_goes_too_and_the_job_goes_back_for_it(
    start: Start,
) -> None:
    world = start(replicas=4, stages=1, goes_back=True)
    train(world, 5)
    first, second, before = world.member(1, 0), world.member(2, 0), world.plan.quorum
    late = world.about(FactKind.NAMED, second, since=4, step=5, quorum=before)
    name(world, first)
    assert second.slot in {m.slot for m in world.plan.members}
    world.settle(2)
    world.commit(2)

    world.tell(late)

    assert second.slot not in {m.slot for m in world.plan.members}
    assert world.plan.lineage == 2
    assert [t.since for t in world.state.taints] == [3, 3], "it has computed step 3 again"
    assert not any(t.counts for t in world.state.taints)
    world.settle(2)
    for _ in range(3):  # told again: it has computed nothing since
        world.tell(late)
    assert (world.plan.lineage, len(world.state.taints)) == (2, 2)


def test_a_device_that_was_reported_and_is_named_anew_has_the_job_go_back(start: Start) -> None:
    world = start(replicas=1, stages=1)
    train(world, 5)
    reported = world.member(0, 0)
    name(world, reported, since=4)
    assert not world.state.taints[0].is_due
    world.send(JobSubmitted(config=replace(world.state.config, goes_back=True)))

    world.tell(world.about(FactKind.NAMED, reported, since=4, step=5))
    assert not world.state.taints[0].is_due, "the same word, told again"
    world.tell(world.about(FactKind.NAMED, reported, since=4, step=6))
    assert world.state.taints[0].is_due, "named anew, as the job goes back by now"


def test_a_device_whose_pod_is_gone_by_then_has_tainted_what_it_had(start: Start) -> None:
    world = start(replicas=3, stages=1, goes_back=True)
    train(world, 5)
    wrong, other = world.member(1, 0), world.member(0, 0)
    told = world.about(FactKind.NAMED, other, since=3, step=5, device=wrong.slot)
    world.pod_gone(wrong.slot.pod)
    world.settle(5)

    world.tell(told)

    (taint,) = world.state.taints
    assert (taint.slot, taint.since, taint.until) == (wrong.slot, 3, 5)
    assert (world.plan.method, world.plan.lineage) == (Method.RESTART, 1)


def test_who_does_not_know_since_when_a_device_is_wrong_is_told_by_the_ledger(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1)
    wrong, other = world.member(1, 0), world.member(0, 0)
    clean = (CleanDevice(slot=wrong.slot, clean_from=2),)
    for step in range(5):
        quorum = world.plan.quorum
        world.send(StepsCommitted(step=step, quorum=quorum, committed_at_s=1.0, clean=clean))
    world.pod_gone(wrong.slot.pod)
    world.settle(5)

    world.tell(world.about(FactKind.NAMED, other, since=None, step=5, device=wrong.slot))

    (taint,) = world.state.taints
    assert (taint.since, taint.until) == (2, 5)


def test_without_a_successor_the_job_goes_back_as_soon_as_one_is_there(start: Start) -> None:
    world = start(replicas=1, stages=1, goes_back=True)
    train(world, 5)
    wrong = world.member(0, 0)
    name(world, wrong)
    assert world.plan.lineage == 0, "the device is the last of its stage: it would be wrong again"
    assert "LeaveWaits" in world.announced()

    world.register("late")
    world.up("late")

    assert (world.plan.method, world.plan.lineage) == (Method.RESTART, 1)
    assert [m.slot.pod for m in world.plan.members] == ["late"]


def test_a_job_whose_last_step_is_applied_goes_back_before_it_is_complete(start: Start) -> None:
    world = start(replicas=3, stages=1, steps=6, goes_back=True)
    train(world, 6)
    for member in world.plan.members[:2]:
        world.finish(member)
    wrong = world.plan.members[2]
    name(world, wrong, since=4)
    assert world.state.phase is JobPhase.RECOVERING
    assert (world.plan.lineage, world.state.finals) == (1, ())


def test_steps_that_were_reported_stay_when_the_job_is_to_go_back_from_then_on(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1)
    train(world, 5)
    name(world, world.member(1, 0))
    world.settle(5)

    world.send(JobSubmitted(config=replace(world.state.config, goes_back=True)))

    assert "recovery.onTaint Report -> Restart" in world.messages()
    world.tick()
    assert world.plan.lineage == 0


def test_a_late_word_of_a_void_checkpoint_does_not_count(start: Start) -> None:
    world = start(replicas=3, stages=1, goes_back=True, checkpoint_dir="/c")
    train(world, 5)
    teller, before = world.member(0, 0), world.plan.quorum
    name(world, world.member(1, 0))
    world.settle(2)
    world.tell(world.about(FactKind.CHECKPOINT, teller, durable=4, quorum=before))
    assert world.state.durable == 0
    world.tell(world.about(FactKind.CHECKPOINT, teller, durable=4))
    assert world.state.durable == 4


def test_what_comes_in_the_place_of_a_void_step_is_no_contradiction() -> None:
    from mainstay_core.base.ids import QuorumId

    def entry(step: int, quorum: int, masters: str) -> LedgerEntry:
        return LedgerEntry(
            step=step,
            stage=0,
            quorum=QuorumId(id=quorum, nonce="n"),
            gradient=ZERO,
            masters=masters * 32,
            data=ZERO,
            loss=0.0,
            norm=0.0,
            tokens=1,
            step_s=0.0,
            replicas=1,
        )

    first = entry(3, 2, "a")
    corrected = replace(entry(3, 2, "b"), corrects=True)
    news = find_news({first.key: first}, [corrected])
    assert (news.contradictions, news.fresh) == ((), (corrected,)), "its teller had a bad state"
    assert find_news({first.key: corrected}, [first]).fresh == (), "told again by that one"

    voided = (Voided(quorum=4, lineage=1, version=3),)
    for step, old, new, contradicts in ((3, 2, 4, False), (2, 2, 4, True), (3, 4, 5, True)):
        known, told = entry(step, old, "a"), entry(step, new, "b")
        news = find_news({known.key: known}, [told], voided)
        assert bool(news.contradictions) is contradicts
        assert news.fresh == (told,)


def test_a_version_is_void_if_it_is_later_and_of_an_older_lineage() -> None:
    voided = (
        Voided(quorum=4, lineage=1, version=3),
        Voided(quorum=9, lineage=5, version=20),
    )
    for version, lineage, expected in ((3, 0, False), (4, 0, True), (4, 1, False), (21, 4, True)):
        assert is_void(voided, version, lineage) is expected


def test_the_last_clean_witness_of_a_device_outlives_its_trainer(start: Start) -> None:
    world = start(replicas=2, stages=1, restart_grace_s=0.0)
    victim = world.member(1, 0)
    clean = (CleanDevice(slot=victim.slot, clean_from=2),)
    for step in range(4):
        quorum = world.plan.quorum
        told = clean if step == 1 else ()
        world.send(StepsCommitted(step=step, quorum=quorum, committed_at_s=1.0, clean=told))
    assert world.state.slot(victim.slot).clean_from == 2
    assert all(m.clean_from is None for m in world.plan.members)

    world.down(victim, restarting=True)
    world.settle(4)
    world.up(victim.slot.pod)

    (joiner,) = [m for m in world.plan.members if m.slot == victim.slot]
    assert (joiner.joining, joiner.clean_from) == (True, 2)
    world.settle(1)
    assert world.state.slot(victim.slot).clean_from == 1, "what comes again nobody has compared"


def test_it_is_known_how_many_devices_were_witnessed_in_the_last_round(start: Start) -> None:
    """A witness every 2 steps: in six steps each of three replicas was witnessed once."""
    world = start(replicas=3, stages=1)
    config = replace(world.state.config, witness_every_steps=2)
    plan = replace(world.plan, checks=config.checks)
    world.state = replace(world.state, phase=JobPhase.RUNNING, config=config, plan=plan)
    slots = [world.member(replica, 0).slot for replica in range(3)]

    def commit(step: int, clean: dict[int, int]) -> int:
        told = tuple(CleanDevice(slot=slots[r], clean_from=since) for r, since in clean.items())
        quorum = world.plan.quorum
        world.send(StepsCommitted(step=step, quorum=quorum, committed_at_s=1.0, clean=told))
        found = count_witnessed(world.state)
        assert found is not None
        assert found.num_devices == 3
        return found.num_clean

    assert commit(0, {0: 0, 1: 0, 2: 0}) == 0, "that is where their trainers began"
    assert commit(1, {0: 1, 1: 1}) == 2, "in step 0 two agreed"
    assert commit(2, {}) == 2
    assert commit(3, {2: 3, 0: 3}) == 3
    assert [commit(step, {}) for step in (4, 5, 6, 7)] == [3, 3, 3, 2], "step 0 is six steps back"
    assert commit(8, {1: 8}) == 3
    assert commit(9, {0: 9, 1: 8}) == 2
    assert commit(10, {1: 5}) == 1, "it has gone back: what comes again nobody has compared"


def test_without_a_witness_no_devices_are_counted(start: Start) -> None:
    assert count_witnessed(start(replicas=2, stages=1).state) is None


def lose_store(world: PlayedPods) -> None:
    """The store loses the job; a supervisor tells the plan, and all pods are heard."""
    plan = world.plan
    world.state = machine.initial(world.state.config, world.now_s)
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=5))
    world.send(Tick(heard=world.state.unheard))


def come_back(world: PlayedPods, *names: str) -> None:
    """Pods register again with the store that lost them."""
    for pod in names:
        world.register(pod)


def test_a_store_that_lost_the_job_learns_from_the_plan_who_was_named_and_who_leaves(
    start: Start,
) -> None:
    world = start(replicas=1, stages=1)
    train(world, 5)
    wrong = world.member(0, 0)
    name(world, wrong)
    world.register("late")
    world.up("late")
    assert [m.slot.pod for m in world.plan.members if m.joining] == ["late"]
    (before,) = world.plan.taints
    assert (before.since, before.until) == (3, None)

    lose_store(world)

    assert world.state.taints == (before,)
    assert "computes wrongly each time" in world.state.pod(wrong.slot.pod).leaving
    come_back(world, wrong.slot.pod, "late")
    world.settle(6)
    assert [m.slot.pod for m in world.plan.members] == ["late"]
    world.settle(7)
    (taint,) = world.state.taints
    assert (taint.since, taint.until) == (3, 7)


def test_a_named_device_that_is_known_from_a_plan_alone_gets_no_place_as_a_spare(
    start: Start,
) -> None:
    world = start(replicas=2, stages=1)
    train(world, 5)
    wrong = world.member(1, 0)
    name(world, wrong)
    assert wrong.slot not in {m.slot for m in world.plan.members}
    world.settle(6)

    lose_store(world)
    come_back(world, *(m.slot.pod for m in world.plan.members), wrong.slot.pod)
    world.up(wrong.slot.pod)
    for _ in range(3):
        world.commit()

    assert wrong.slot not in {m.slot for m in world.plan.members}
    assert world.state.pod(wrong.slot.pod).leaving


def test_after_a_store_was_lost_commits_say_from_when_a_device_took_no_part(start: Start) -> None:
    world = start(replicas=2, stages=1)
    train(world, 5)
    name(world, world.member(1, 0))
    lose_store(world)
    for step in (9, 7, 8):
        world.commit(step)
    (taint,) = world.state.taints
    assert taint.until == 7


def test_a_job_that_went_back_does_not_go_back_again_for_what_supervisors_tell_again(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1, goes_back=True)
    train(world, 5)
    wrong, other, before = world.member(1, 0), world.member(0, 0), world.plan.quorum
    name(world, wrong)
    told = world.about(FactKind.NAMED, other, since=3, step=5, device=wrong.slot, quorum=before)
    world.settle(2)

    lose_store(world)
    come_back(world, *(m.slot.pod for m in world.plan.members))
    world.tell(told)

    assert (world.plan.lineage, len(world.state.taints)) == (1, 1)
    assert not world.state.taints[0].counts


def test_a_lost_store_knows_the_last_clean_witness_of_a_device_from_the_plan(start: Start) -> None:
    world = start(replicas=3, stages=1, restart_grace_s=0.0)
    watched, victim = world.member(1, 0), world.member(2, 0)
    clean = (CleanDevice(slot=watched.slot, clean_from=2),)
    for step in range(4):
        quorum = world.plan.quorum
        told = clean if step == 1 else ()
        world.send(StepsCommitted(step=step, quorum=quorum, committed_at_s=1.0, clean=told))
    world.down(victim)
    assert [m.clean_from for m in world.plan.members if m.slot == watched.slot] == [2]

    lose_store(world)

    assert world.state.slot(watched.slot).clean_from == 2


def test_commits_from_before_a_job_went_back_say_nothing_to_a_store_that_lost_it(
    start: Start,
) -> None:
    """Later plans tell of it, whatever their method is."""
    world = start(replicas=4, stages=1, goes_back=True)
    train(world, 5)
    before, watched = world.plan.quorum, world.member(0, 0)
    name(world, world.member(1, 0))
    world.settle(2)
    world.commit(2)
    world.down(world.member(2, 0))
    assert world.plan.method is Method.MASK
    lose_store(world)
    late = (CleanDevice(slot=watched.slot, clean_from=5),)
    world.send(StepsCommitted(step=4, quorum=before, committed_at_s=1.0, clean=late))
    assert world.state.slot(watched.slot).clean_from != 5


def test_a_store_that_fell_back_takes_no_named_device_for_a_spare(start: Start) -> None:
    world = start(replicas=2, stages=1)
    train(world, 5)
    wrong, former = world.member(1, 0), world.state
    name(world, wrong)
    plan = world.plan
    assert wrong.slot not in {m.slot for m in plan.members}

    world.state = former
    world.send(StoreReopened(server="another"))
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=6))
    world.up(wrong.slot.pod, life=str(wrong.incarnation))
    world.send(Tick(heard=world.state.unheard))
    for step in (6, 7, 8, 9):
        world.commit(step)

    assert world.state.pod(wrong.slot.pod).leaving
    assert wrong.slot not in {m.slot for m in world.plan.members}


@pytest.mark.parametrize(("field", "step"), [("since", 61), ("step", 10**9)])
def test_a_trainer_cannot_tell_of_tainted_steps_that_the_job_does_not_have(
    start: Start, field: str, step: int
) -> None:
    world = start(replicas=2, stages=1)
    fields = {"since": 3, "step": 5, field: step}
    with pytest.raises(RemoteProtocolError, match=rf"Named\.{field}: {step} is more than the job"):
        world.tell(world.about(FactKind.NAMED, world.member(1, 0), **fields))
    assert world.state.taints == ()


def test_a_plan_with_tainted_steps_that_the_job_does_not_have_is_recovered_without_them(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1)
    name(world, world.member(1, 0))
    plan, (taint,) = world.plan, world.plan.taints
    other = replace(taint, slot=world.member(0, 0).slot, since=61, named_in=61)
    held = replace(plan, taints=(replace(taint, named_in=10**9), other))
    world.state = machine.initial(world.state.config, world.now_s)
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=held, step=5))
    assert world.state.plan == held
    assert world.state.taints == (replace(taint, named_in=60),)


def lose_all(world: PlayedPods) -> None:
    """All members' pods are gone, and new ones begin anew at the seed."""
    for member in world.plan.members:
        world.pod_gone(member.slot.pod)
    for new in ("new-1", "new-2"):
        world.register(new)
        world.up(new)


def test_an_ordinary_restart_to_before_tainted_steps_undoes_them(start: Start) -> None:
    world = start(replicas=2, stages=1, restart_grace_s=0.0)
    train(world, 10)
    name(world, world.member(1, 0))
    world.settle(12)
    lose_all(world)
    restart = world.plan.quorum
    assert world.plan.method is Method.RESTART
    assert world.state.taints[0].counts, "others may still go on with them"

    world.settle(0)

    (taint,) = world.state.taints
    assert (taint.since, taint.undone_in) == (3, str(restart))
    assert f"{restart} went back before them" in taint.describe()
    world.commit(0)
    assert not world.state.taints[0].counts


def test_steps_that_all_go_on_after_stay_tainted_whoever_is_lost_then(start: Start) -> None:
    world = start(replicas=3, stages=1)
    train(world, 3)
    wrong = world.member(1, 0)
    world.pod_gone(wrong.slot.pod)
    world.settle(3)
    other = world.member(0, 0)
    told = world.about(FactKind.NAMED, other, since=3, step=3, device=wrong.slot)
    world.tell(told)
    world.commit(3)
    assert world.plan.method is Method.MASK
    assert world.state.taints[0].counts, "the others had begun step 3 with what it gave them"


def test_a_word_of_steps_before_an_ordinary_restart_that_comes_late_is_of_undone_steps(
    start: Start,
) -> None:
    world = start(replicas=2, stages=1, restart_grace_s=0.0, goes_back=True)
    train(world, 12)
    wrong, before = world.member(1, 0), world.plan.quorum
    world.down(world.member(0, 0), restarting=True)
    world.pod_gone(wrong.slot.pod)
    world.up("pod-0")
    world.settle(0)
    restart, other = world.plan.quorum, world.plan.members[0]
    assert world.plan.method is Method.RESTART
    late = world.about(FactKind.NAMED, other, since=8, step=9, device=wrong.slot, quorum=before)

    for _ in range(2):
        world.tell(late)
        (taint,) = world.state.taints
        assert taint.undone_in == str(restart)
    for step in range(10):
        world.commit(step)
    world.tell(late)
    assert len(world.state.taints) == 1, "told again by a supervisor that remembers it"
    assert world.plan.lineage == 0, "it would go back for nothing"


def test_a_named_device_that_serves_after_an_ordinary_restart_taints_from_there_on(
    start: Start,
) -> None:
    world = start(replicas=1, stages=1, restart_grace_s=0.0)
    train(world, 10)
    wrong = world.member(0, 0)
    name(world, wrong, since=8)
    leaving = world.state.pod(wrong.slot.pod)
    assert leaving.leaving
    world.state = replace(
        world.state, plan=replace(world.plan, method=Method.RESTART), settled_at_s={}, commits=0
    )

    world.settle(4)

    (taint,) = world.state.taints
    assert (taint.since, taint.until, taint.counts) == (4, None, True)


def test_a_word_of_no_quorum_is_refused(start: Start) -> None:
    world = start(replicas=2, stages=1, goes_back=True)
    train(world, 5)
    told = world.about(FactKind.NAMED, world.member(0, 0), since=3, step=5)
    with pytest.raises(RemoteProtocolError, match=r"Named\.quorum: is missing"):
        world.tell(replace(told, quorum=None))
    assert world.state.taints == ()


def test_a_word_of_a_life_that_is_over_or_not_heard_of_yet_counts(start: Start) -> None:
    """A supervisor repeats it as it registers, before it tells which trainer is up."""
    world = start(replicas=2, stages=1)
    train(world, 5)
    told = world.about(FactKind.NAMED, world.member(0, 0), since=3, step=5)
    world.tell(replace(told, incarnation="an-earlier-one"))
    assert [t.slot for t in world.state.taints] == [told.named]


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_spare_that_never_voted_names_nobody(start: Start, goes_back: bool) -> None:
    world = start(spares=1, replicas=2, stages=1, goes_back=goes_back)
    train(world, 5)
    before = world.state
    told = world.about(FactKind.NAMED, world.member(0, 0), since=0, step=5)
    named = world.member(1, 0).slot
    spare = replace(told, pod=PodUid("spare-0"), slot=0, device=named)
    for quorum in (world.plan.quorum, QuorumId(id=0, nonce="older")):
        with pytest.raises(RemoteProtocolError, match=r"Named\.slot: spare-0/0 was no member of"):
            world.tell(replace(spare, quorum=quorum))
    assert (world.state.taints, world.plan) == ((), before.plan)
    assert not any(p.leaving for p in world.state.pods)


def test_a_member_before_may_name_a_device_of_its_own_quorum(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=1)
    train(world, 5)
    gone, other, before = world.member(0, 0), world.member(1, 0), world.plan.quorum
    world.down(gone)
    told = world.about(FactKind.NAMED, gone, since=3, step=5, device=other.slot, quorum=before)
    world.tell(told)
    assert [t.slot for t in world.state.taints] == [other.slot]


def test_nobody_names_a_device_that_never_served(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=1, goes_back=True)
    train(world, 5)
    for pod in ("never-was", "spare-0"):
        never = Slot(pod=PodUid(pod), index=0)
        told = world.about(FactKind.NAMED, world.member(0, 0), since=0, step=5, device=never)
        with pytest.raises(RemoteProtocolError, match=rf"Named\.device: {pod}/0 has never served"):
            world.tell(told)
    assert world.state.taints == ()


def test_a_recovered_state_of_a_version_before_hears_of_a_device_that_it_has_forgotten(
    start: Start,
) -> None:
    """It did not say that something may be forgotten: reports were refused after an upgrade."""
    world = start(replicas=2, stages=1)
    train(world, 5)
    gone = Slot(pod=PodUid("gone"), index=0)
    told = world.about(FactKind.NAMED, world.member(0, 0), since=3, step=5, device=gone)
    stored = codec.encode(replace(world.state, restored=str(world.plan.quorum)))
    assert "may_have_forgotten" not in stored
    world.state = codec.decode(CoordinatorState, stored)
    world.tell(told)

    assert [t.slot for t in world.state.taints] == [gone]


def test_another_does_not_taint_steps_in_which_a_witness_agreed_with_a_device(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1)
    train(world, 9)
    wrong, other = world.member(1, 0), world.member(0, 0)
    known = world.state.slot(wrong.slot)
    slots = (replace(s, clean_from=7) if s is known else s for s in world.state.slots)
    world.state = replace(world.state, slots=tuple(slots))

    told = world.about(FactKind.NAMED, other, since=0, step=0, device=wrong.slot)
    world.tell(told)
    assert [t.since for t in world.state.taints] == [7]

    # Its own word may come late: it was named before a witness agreed with it again.
    world.tell(world.about(FactKind.NAMED, wrong, since=3, step=5))
    assert [t.since for t in world.state.taints] == [3]


def test_of_too_many_taints_those_that_are_undone_go_first(start: Start) -> None:
    world = start(replicas=3, stages=1)
    train(world, 5)
    name(world, world.member(1, 0))
    (taint,) = world.state.taints
    undone = tuple(
        replace(taint, slot=Slot(pod=PodUid(f"x{i}"), index=0), undone_in="q9-n")
        for i in range(MAX_TAINTS - 1)
    )
    world.state = replace(world.state, taints=(taint, *undone))
    world.tell(world.about(FactKind.NAMED, world.member(0, 0), since=3, step=5))
    slots = [t.slot for t in world.state.taints]
    assert len(slots) == MAX_TAINTS
    assert slots[:2] == [taint.slot, undone[1].slot]


def test_a_job_that_waits_goes_back_before_tainted_steps_at_once(start: Start) -> None:
    world = start(replicas=1, stages=1, restart_grace_s=0.0, goes_back=True)
    train(world, 10)
    wrong, before = world.member(0, 0), world.plan.quorum
    name(world, wrong)
    world.pod_gone(wrong.slot.pod)
    assert world.state.phase is JobPhase.WAITING

    world.register("late")
    world.up("late")

    plan = world.plan
    assert (plan.quorum.id, plan.lineage, plan.method) == (before.id + 1, 1, Method.RESTART)
    assert [v.version for v in plan.voided] == [3]
    assert not world.state.taints[0].counts
    assert world.state.phase is JobPhase.RECOVERING
