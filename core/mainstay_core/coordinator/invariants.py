"""Checks what must hold of a job's state after every step of the coordinator, and of every plan."""

from __future__ import annotations

from mainstay_core.base.shape import JobShape
from mainstay_core.coordinator.state import CoordinatorState, is_living
from mainstay_core.job.phase import TERMINAL, JobPhase
from mainstay_core.wire.plan import Plan, follows


def check_invariants(state: CoordinatorState) -> None:
    """Assert that a state keeps the coordinator's invariants.

    Raises:
        AssertionError: a decision was wrong; the message says which invariant.
    """
    for slot in state.slots:
        assert slot.incarnation not in slot.ended, f"{slot.slot} lives and has ended"
    shape = state.shape
    assert shape.min_replicas <= state.wanted <= shape.lanes, "wanted replicas out of bounds"
    plan = state.plan
    if plan is None:
        without = {JobPhase.FORMING, JobPhase.SUSPENDED, *TERMINAL}
        assert state.phase in without, f"{state.phase} without a plan"
        return
    assert plan.quorum.id == state.last_id, "the plan is not the newest quorum"
    problem = find_contradiction(plan, shape)
    assert not problem, problem
    finishing = len(state.finals) == len(state.shape.positions)
    excused = bool(state.unheard) or finishing
    if state.phase in {JobPhase.RUNNING, JobPhase.RECOVERING} and not excused:
        alive = [m for m in plan.members if m.incarnation not in state.finished]
        assert all(is_living(state, m) for m in alive), "a lost member without a plan"
    assert (state.phase is JobPhase.WAITING) == (state.waiting is not None), "waiting"


@follows
def find_contradiction(plan: Plan, shape: JobShape) -> str:
    """Return in what a plan contradicts itself or its job; empty if it does not.

    Every plan of the coordinator is free of that. One that a supervisor tells may be anything.
    """
    indices = range(len(plan.members))
    if [m.index for m in plan.members] != list(indices):
        return "members are not numbered in their order"
    if plan.unplanned_id > plan.quorum.id or any(m.since > plan.quorum.id for m in plan.members):
        return "it refers to a quorum after its own"
    if plan.planned != (plan.unplanned_id < plan.quorum.id):
        return "whether it was planned contradicts the ids"
    places = frozenset(shape.positions)
    if any(m.rank.position not in places for m in (*plan.members, *plan.outgoing)):
        return "a member has a place that the job does not have"
    num_slots = len({m.slot for m in plan.members})
    num_trainers = len({m.incarnation for m in plan.members})
    if min(num_slots, num_trainers) < len(plan.members):
        return "a slot or a trainer is a member twice"
    if plan.rendezvous.pod not in {m.slot.pod for m in plan.members}:
        return "it meets at a pod without a member"
    if plan.replicas_wanted > shape.lanes:
        return "it wants more replicas than there are lanes"
    return _wrong_chains(plan, shape)


def _wrong_chains(plan: Plan, shape: JobShape) -> str:
    replicas = [chain.replica for chain in plan.chains]
    if not replicas or len(set(replicas)) != len(replicas) or max(replicas) >= shape.lanes:
        return "it has no whole replica, one twice, or one that is no lane"
    for chain in plan.chains:
        if any(index >= len(plan.members) for index in chain.cells):
            return "a chain has a cell that is no member"
        ranks = [plan.members[index].rank for index in chain.cells]
        if tuple(rank.position for rank in ranks) != shape.positions:
            return "a chain does not go through all positions"
        if any(rank.replica != chain.replica for rank in ranks):
            return "a cell belongs to another replica than its chain"
    seated = sum(m.rank.replica is not None for m in plan.members)
    if seated != len(replicas) * len(shape.positions):
        return "a member has a replica and no chain"
    if len(plan.suppliers) != shape.num_types or not set(plan.suppliers) <= set(replicas):
        return "a shard type has no supplier"
    return ""
