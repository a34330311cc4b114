"""What the coordinator decides, one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.ids import PodUid, QuorumId, Slot
from mainstay_core.coordinator.causes import Suspicion
from mainstay_core.coordinator.ladder import Lack, Row
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire import rules
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]


# Forming --------------------------------------------------------------------


def test_first_plan_comes_when_enough_trainers_are_up(new_world: Start) -> None:
    world = new_world(replicas=2, stages=2)
    for i in range(4):
        assert world.state.plan is None
        world.register(f"pod-{i}")
        world.up(f"pod-{i}")
    plan = world.plan
    assert (plan.quorum.id, plan.method, plan.planned, plan.unplanned_id) == (
        1,
        Method.START,
        False,
        1,
    )
    assert [str(m.rank) for m in plan.members] == ["r0.s0.i0", "r1.s0.i0", "r0.s1.i0", "r1.s1.i0"]
    assert [m.slot.pod for m in plan.members] == ["pod-0", "pod-2", "pod-1", "pod-3"]
    assert plan.rendezvous.gather == "pod-0:1"
    assert len(plan.suppliers) == 16


def test_pods_of_the_version_before_are_told_where_their_groups_meet(new_world: Start) -> None:
    world = new_world(replicas=2, stages=1)
    for name in ("pod-0", "pod-1"):
        world.register(name, store=f"{name}:2")
        world.up(name)
    assert world.plan.rendezvous.store == "pod-0:2"
    assert [host.store for host in world.plan.hosts] == ["pod-0:2", "pod-1:2"]


def test_pods_are_taken_in_the_order_of_their_names(new_world: Start) -> None:
    world = new_world(replicas=2, stages=1)
    for name in ("pod-10", "pod-9", "pod-2"):
        world.register(name)
    world.up("pod-10")
    world.up("pod-2")
    assert [m.slot.pod for m in world.plan.members] == ["pod-2", "pod-10"]


@pytest.mark.parametrize(("replicas", "stages", "slots"), [(4, 2, 2), (2, 3, 2), (3, 4, 3)])
def test_no_pod_has_two_cells_of_a_stage_while_avoidable(
    start: Start, replicas: int, stages: int, slots: int
) -> None:
    plan = start(replicas=replicas, stages=stages, ranks_per_pod=slots).plan
    cells = [(m.slot.pod, m.rank.stage) for m in plan.members]
    assert len(set(cells)) == len(cells)


@pytest.mark.parametrize(("stages", "slots"), [(1, 2), (2, 2), (2, 4), (3, 4)])
def test_the_inner_ranks_of_a_cell_share_a_pod_that_has_room_for_them(
    start: Start, stages: int, slots: int
) -> None:
    plan = start(replicas=2, stages=stages, ranks_per_stage=2, ranks_per_pod=slots).plan
    pods: dict[tuple[int | None, int], set[str]] = {}
    for member in plan.members:
        pods.setdefault((member.rank.replica, member.rank.stage), set()).add(member.slot.pod)
    assert all(len(names) == 1 for names in pods.values())
    cells = [(next(iter(names)), stage) for (_, stage), names in pods.items()]
    assert len(set(cells)) == len(cells), "two cells of a stage in a pod"
    ranks = [str(m.rank) for m in plan.members]
    assert ranks == sorted(ranks, key=lambda r: (r[3:], r)), "by stage, inner rank, replica"


def test_a_cell_spreads_over_pods_of_one_slot(start: Start) -> None:
    plan = start(replicas=2, stages=1, ranks_per_stage=2).plan
    assert len({m.slot.pod for m in plan.members}) == 4
    assert [[plan.members[i].rank.position for i in c.cells] for c in plan.chains] == [
        [(0, 0), (0, 1)]
    ] * 2


def test_a_cell_fails_as_a_unit_and_its_other_ranks_follow(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1, ranks_per_stage=2)
    lost = world.member(1, 0, 1)

    world.down(lost, restarting=True)

    assert [c.replica for c in world.plan.chains] == [0]
    assert [f.rank.position for f in world.followers()] == [(0, 0)]
    assert "1 cell lost" in world.plan.reason


def test_a_restarted_inner_rank_comes_back_to_its_own_place(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1, ranks_per_stage=2, ranks_per_pod=2)
    lost = world.member(1, 0, 1)
    world.down(lost, restarting=True)
    world.settle()
    world.commit()

    world.up(lost.slot.pod, lost.slot.index)
    world.tick()

    back = world.member(1, 0, 1)
    assert (back.slot, back.joining) == (lost.slot, True)
    assert world.followers() == []


def test_remains_of_two_cells_are_mated_when_no_replica_is_whole(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1, ranks_per_stage=2)
    lost = (world.member(0, 0, 0), world.member(1, 0, 1))

    world.tell(*(world.down_fact(m) for m in lost))

    (chain,) = world.plan.chains
    assert [world.plan.members[i].rank.position for i in chain.cells] == [(0, 0), (0, 1)]
    assert world.plan.method == "mask"


def test_a_place_that_lost_all_its_ranks_is_named_with_its_inner_rank(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1, ranks_per_stage=2)
    lost = (world.member(0, 0, 1), world.member(1, 0, 1))

    world.tell(*(world.down_fact(m) for m in lost))

    assert world.state.phase == "waiting"
    assert "inner rank 0.1 has no living cell: needs 1 free trainer" in world.messages()


def test_a_job_of_cells_completes_when_every_inner_rank_has_finished(start: Start) -> None:
    world = start(replicas=1, lanes=1, stages=1, ranks_per_stage=2)
    for inner in (0, 1):
        assert world.state.phase == "running"
        world.finish(world.member(0, 0, inner), version=60)
    assert world.state.phase == "complete"
    assert [(f.stage, f.inner) for f in world.state.finals] == [(0, 0), (0, 1)]
    world.stored()


def test_a_late_job_starts_with_fewer_replicas(new_world: Start) -> None:
    world = new_world(replicas=4, min_replicas=2, stages=2, startup_deadline_s=30.0)
    for i in range(5):
        world.register(f"pod-{i}")
        world.up(f"pod-{i}")
    world.tick(after_s=20.0)
    assert world.state.plan is None
    world.tick(after_s=20.0)
    assert [c.replica for c in world.plan.chains] == [0, 1]
    assert set(world.plan.suppliers) == {0, 1}


def test_a_job_that_never_gets_its_trainers_fails_and_says_what_is_missing(
    new_world: Start,
) -> None:
    world = new_world(replicas=2, stages=2, startup_deadline_s=30.0)
    world.register("pod-0")
    world.up("pod-0")
    world.tick(after_s=31.0)
    assert world.state.phase is JobPhase.FAILED
    ended = world.ended()
    assert "1 of the 2 trainers" in ended.reason
    assert "pod-0/0" in ended.reason


def test_in_a_cluster_pods_that_are_still_to_come_are_waited_for(new_world: Start) -> None:
    fields = {"replicas": 2, "stages": 2, "namespace": "n", "startup_deadline_s": 30.0}
    world = new_world(**fields)
    world.register("pod-0")
    world.up("pod-0")
    world.tick(after_s=1000.0)
    assert world.state.phase is JobPhase.FORMING
    world.register("pod-1")
    world.up("pod-1")
    assert [c.replica for c in world.plan.chains] == [0], "it is late: it starts with what is there"


def test_in_a_cluster_too_a_job_fails_when_those_that_came_have_ended(new_world: Start) -> None:
    fields = {"replicas": 1, "stages": 2, "namespace": "n", "startup_deadline_s": 30.0}
    world = new_world(**fields)
    world.register("pod-0")
    life = world.up("pod-0")
    world.tell(
        world.fact(
            FactKind.TRAINER_DOWN, "pod-0", 0, incarnation=life, restarting=True, evidence="exit 1"
        )
    )
    world.tick(after_s=31.0)
    assert world.state.phase is JobPhase.FAILED
    assert "pod-0/0 is down: " in world.ended().reason


def test_a_trainer_with_other_arithmetic_is_refused_by_name(new_world: Start) -> None:
    world = new_world(replicas=2, stages=1)
    for i in range(3):
        world.register(f"pod-{i}")
    world.up("pod-0", fingerprint={"torch": "2.13", "device": "cpu"})
    world.up("pod-1", fingerprint={"torch": "2.12", "device": "cpu"})
    assert world.state.plan is None
    assert "pod-1/0 is refused" in world.messages()
    assert "torch is 2.12, the job has 2.13" in world.messages()
    world.up("pod-2", fingerprint={"torch": "2.13", "device": "cpu"})
    assert [m.slot.pod for m in world.plan.members] == ["pod-0", "pod-2"]


def test_the_fingerprint_is_fixed_by_the_first_plan(start: Start) -> None:
    world = start(replicas=2, stages=1)
    world.register("late")
    world.up("late", fingerprint={"torch": "3"})
    world.down(world.member(1, 0))
    world.settle()
    assert world.plan.method is Method.MASK
    assert [m.slot.pod for m in world.plan.members] == ["pod-0"]


def test_a_trainer_that_decides_by_other_rules_is_refused_by_name_and_number(start: Start) -> None:
    world = start(replicas=2, stages=1)
    ours = rules.with_rules({"torch": "2.13"})
    world.state = replace(world.state, fingerprint=ours)
    world.register("newer")

    world.up("newer", fingerprint={**ours, rules.KEY: "99"})

    assert "trainer newer/0 is refused" in world.messages()
    assert f"rules is 99, the job has {rules.NUMBER}: trainers of this release decide" in (
        world.messages()
    )


# Masks ----------------------------------------------------------------------


def test_a_lost_cell_is_masked_at_once_and_its_chain_follows(start: Start) -> None:
    world = start()
    first = world.plan
    world.down(world.member(1, 0))
    plan = world.plan
    assert (plan.quorum.id, plan.method, plan.planned, plan.unplanned_id) == (
        2,
        Method.MASK,
        False,
        2,
    )
    assert [c.replica for c in plan.chains] == [0, 2, 3]
    assert [(str(m.rank), m.slot) for m in world.followers()] == [
        ("f.s1.i0", first.members[5].slot)
    ]
    assert all(c.formed_in == first.quorum for c in plan.chains)
    assert all(m.since == 1 for m in plan.members)
    assert plan.all_reduce_stack == 6
    assert world.state.phase is JobPhase.RECOVERING
    world.settle()
    assert world.state.phase is JobPhase.RUNNING


def test_a_pod_with_two_cells_is_one_fault_and_one_plan(start: Start) -> None:
    world = start(ranks_per_pod=2)
    world.pod_gone("pod-1")
    assert world.plan.quorum.id == 2
    assert len(world.plan.members) == 6
    assert [c.replica for c in world.plan.chains] == [0, 2, 3]
    assert world.recoveries()[2].fault.startswith("pod pod-1 (r1.s0.i0, r1.s1.i0) is gone")


def test_facts_told_together_are_decided_together(start: Start) -> None:
    world = start()
    lost = [world.member(1, 0), world.member(2, 1)]
    world.tell(*(world.down_fact(m) for m in lost))
    assert world.plan.quorum.id == 2
    assert [c.replica for c in world.plan.chains] == [0, 3]
    assert len(world.followers()) == 2


def test_remains_are_mated_by_the_fault_plan_only_when_no_replica_is_whole(start: Start) -> None:
    world = start(replicas=2, stages=2)
    world.tell(world.down_fact(world.member(0, 0)), world.down_fact(world.member(1, 1)))
    plan = world.plan
    assert plan.method is Method.MASK
    assert len(plan.chains) == 1
    assert plan.chains[0].formed_in == plan.quorum
    assert not world.followers()
    assert set(plan.suppliers) == {plan.chains[0].replica}


def test_all_but_one_replica_may_be_lost_at_once(start: Start) -> None:
    world = start()
    lost = [m for m in world.plan.members if m.rank.replica != 2]
    world.tell(*(world.down_fact(m) for m in lost))
    assert [c.replica for c in world.plan.chains] == [2]
    assert set(world.plan.suppliers) == {2}


def test_telling_a_death_twice_changes_nothing(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    world.down(victim)
    after = world.state
    world.down(victim)
    world.pod_gone("no-such-pod")
    assert world.state == after


def test_a_trainer_that_restarted_unnoticed_does_not_enter_the_old_quorum(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    life = world.up(victim.slot.pod)
    assert world.plan.quorum.id == 2
    assert all(m.incarnation not in (victim.incarnation, life) for m in world.plan.members)
    world.settle()
    assert world.plan.member_of(victim.slot, life).since == 3


def test_a_new_supervisor_on_a_pod_means_that_its_trainers_ended(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    world.register(victim.slot.pod, pid=2)
    assert world.plan.quorum.id == 2
    assert victim.slot not in {m.slot for m in world.plan.members}


def test_a_late_report_of_an_ended_trainer_does_not_revive_it(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    world.down(victim)
    world.up(victim.slot.pod, life=victim.incarnation)
    assert world.state.slot(victim.slot).incarnation is None


# Rows 4 and 6 -----------------------------------------------------------------


def test_a_stage_without_a_cell_restarts_from_free_trainers(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    world.commit()
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))
    plan = world.plan
    assert plan.method is Method.RESTART
    assert [c.replica for c in plan.chains] in ([0], [1])
    joiner = next(m for m in plan.members if m.joining)
    assert (joiner.slot.pod, joiner.since) == ("spare-0", plan.quorum.id)
    assert all(m.since == 1 for m in plan.members if not m.joining)
    world.settle(step=0)
    assert world.state.step == 0
    world.commit(step=0)
    recovery = world.recoveries()[plan.quorum.id]
    assert (recovery.method, recovery.exact, recovery.lost_steps, recovery.done) == (
        Method.RESTART,
        True,
        1,
        True,
    )


def test_commits_of_before_a_restart_do_not_count(start: Start) -> None:
    world = start(spares=1, replicas=1, stages=2)
    old = world.plan.quorum
    world.commit()
    world.commit()
    world.down(world.member(0, 1))
    world.settle(step=0)
    world.commit(step=1, quorum=old)
    assert world.state.step == 0


def test_a_restart_that_another_plan_overtakes_still_goes_back(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    for _ in range(5):
        world.commit()
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))
    assert world.plan.method is Method.RESTART
    world.down(world.followers()[0])
    assert world.plan.quorum.id == 3
    world.settle(step=3)
    assert world.state.step == 3
    world.commit(step=3)
    lost = {q: r.lost_steps for q, r in world.recoveries().items()}
    assert lost == {2: 2, 3: 0}


def test_where_a_restart_stands_is_known_from_its_first_commit_as_well(start: Start) -> None:
    world = start(spares=1, replicas=1, stages=2)
    for _ in range(5):
        world.commit()
    world.down(world.member(0, 1))
    world.commit(step=2)
    assert world.state.step == 3
    world.settle(step=2)
    assert world.state.step == 3


def test_without_a_free_trainer_the_job_waits_and_says_for_what(start: Start) -> None:
    world = start(replicas=1, stages=2)
    victim = world.member(0, 1)
    world.down(victim, restarting=True)
    assert world.state.phase is JobPhase.WAITING
    assert "stage 1 has no living cell" in world.state.waiting.reason
    assert world.plan.quorum.id == 1
    life = world.up(victim.slot.pod)
    assert world.plan.method is Method.RESTART
    assert world.plan.member_of(victim.slot, life) is not None
    assert world.state.waiting is None


def test_a_wait_is_announced_again_when_something_else_is_lacking_and_not_for_other_words(
    start: Start,
) -> None:
    world = start(replicas=1, stages=2)
    world.down(world.member(0, 1))
    waiting = world.state.waiting
    assert waiting.lack == Lack(row=Row.WAIT, stages=((1, None),))
    assert world.announced().count("Waiting") == 1

    world.state = replace(world.state, waiting=replace(waiting, reason="in other words"))
    world.tick(after_s=1.0)
    assert world.announced().count("Waiting") == 1

    world.down(world.member(0, 0))
    assert world.state.waiting.lack.stages == ((0, None), (1, None))
    assert world.announced().count("Waiting") == 2


def test_a_wait_has_a_deadline(start: Start) -> None:
    world = start(replicas=1, stages=2, startup_deadline_s=30.0)
    world.down(world.member(0, 1))
    world.tick(after_s=29.0)
    assert world.state.phase is JobPhase.WAITING
    world.tick(after_s=2.0)
    assert world.state.phase is JobPhase.FAILED
    assert "stage 1" in world.ended().reason


def test_in_a_cluster_a_lost_stage_waits_for_pods_without_a_deadline(start: Start) -> None:
    world = start(replicas=1, stages=2, namespace="n", startup_deadline_s=30.0)
    world.pod_gone("pod-1")
    assert "fails in" not in world.messages()
    world.tick(after_s=1000.0)
    assert world.state.phase is JobPhase.WAITING
    world.register("new")
    world.up("new")
    assert world.plan.method is Method.RESTART


def test_more_losses_while_waiting_are_recovered_together(start: Start) -> None:
    world = start(replicas=2, stages=2)
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))
    world.down(world.member(0, 0))
    assert world.state.phase is JobPhase.WAITING
    world.register("new")
    world.up("new")
    assert world.plan.method is Method.RESTART
    assert len(world.plan.members) == 2
    assert world.recoveries()[2].fault.count("ended") == 3


def test_a_silent_pod_that_is_heard_again_may_end_the_wait(start: Start) -> None:
    world = start(replicas=1, stages=2)
    silent = world.member(0, 1)
    world.tick(**{silent.slot.pod: 99.0})
    assert world.state.phase is JobPhase.WAITING
    world.register(silent.slot.pod)
    world.up(silent.slot.pod, life=silent.incarnation)
    assert world.plan.quorum.id == 2
    assert world.plan.member_of(silent.slot, silent.incarnation) is not None


# Suspicion ------------------------------------------------------------------


def test_a_failed_collective_without_evidence_forms_the_same_quorum_again(start: Start) -> None:
    world = start()
    before = world.plan
    world.park(world.member(0, 0), world.member(1, 0).slot)
    world.park(world.member(2, 0), world.member(1, 0).slot)
    assert world.plan == before
    world.tick(after_s=0.4)
    plan = world.plan
    assert (plan.method, plan.planned, plan.quorum.id) == (Method.REFORM, False, 2)
    assert [m.slot for m in plan.members] == [m.slot for m in before.members]
    assert all(c.formed_in == before.quorum for c in plan.chains)
    assert plan.rendezvous.pod != before.rendezvous.pod


def test_a_suspicion_that_the_version_before_stored_still_says_whose_state_differed() -> None:
    told = {
        "first_s": 1.0,
        "reporters": [{"pod": "a", "index": 0}],
        "suspects": [],
        "evidence": "parameters of r0.s1.i0 on pod-a/1 differ from the rest of the stage",
        "observed_at_s": 1.0,
    }
    slot = Slot(pod=PodUid("pod-a"), index=1)
    assert codec.decode(Suspicion, told).differing == (slot,)
    assert codec.decode(Suspicion, {**told, "differing": []}).differing == ()


def test_a_slot_suspected_twice_is_left_out(start: Start) -> None:
    world = start()
    suspect = world.member(1, 0)
    for _ in range(2):
        world.park(world.member(0, 0), suspect.slot)
        world.tick(after_s=1.0)
    assert world.plan.method is Method.MASK
    assert suspect.slot not in {m.slot for m in world.plan.members}
    world.settle()
    assert world.plan.method is Method.MASK, "an excluded slot is held back"
    world.tick(after_s=60.0)
    assert world.plan.method is Method.JOIN


def test_a_commit_clears_suspects(start: Start) -> None:
    world = start()
    suspect = world.member(1, 0)
    world.park(world.member(0, 0), suspect.slot)
    world.tick(after_s=1.0)
    world.settle()
    world.commit()
    world.park(world.member(0, 0), suspect.slot)
    world.tick(after_s=1.0)
    assert world.plan.method is Method.REFORM


def test_who_parked_itself_is_not_left_out(start: Start) -> None:
    world = start()
    one, other = world.member(0, 0), world.member(1, 0)
    for _ in range(2):
        world.park(one, other.slot)
        world.park(other, one.slot)
        world.tick(after_s=1.0)
    assert world.plan.method is Method.REFORM
    assert len(world.plan.members) == 8


def test_evidence_during_the_probe_makes_a_mask_and_dates_the_first_fact(start: Start) -> None:
    world = start()
    world.park(world.member(0, 0), world.member(1, 0).slot)
    first_fact_s = world.now_s
    world.down(world.member(1, 0))
    assert world.plan.method is Method.MASK
    decide_s = world.recoveries()[2].times.decide_s
    assert decide_s == pytest.approx(world.now_s - first_fact_s)


def test_parked_in_an_older_quorum_is_stale(start: Start) -> None:
    world = start()
    old = world.plan.quorum
    world.down(world.member(1, 0))
    world.settle()
    assert world.park(world.member(0, 0), quorum=old).stale
    assert world.park(world.member(0, 0), quorum=QuorumId(id=2, nonce="other")).stale
    world.tick(after_s=1.0)
    assert world.plan.quorum.id == 2


def test_parked_below_a_planned_plan_is_helped(start: Start) -> None:
    """A planned plan interrupts nobody, so it cannot bring a broken quorum together again."""
    world = start(spares=1)
    world.down(world.member(1, 0))
    world.settle()
    assert world.plan.planned
    mask = world.recoveries()[2].quorum
    assert not world.park(world.member(0, 0), quorum=mask).stale
    world.tick(after_s=1.0)
    assert (world.plan.method, world.plan.planned) == (Method.REFORM, False)
    assert world.plan.unplanned_id == world.plan.quorum.id == 4
    assert any(m.joining for m in world.plan.members)
