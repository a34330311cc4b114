"""Checks what must hold of a job's state after every step of the coordinator."""

from __future__ import annotations

from mainstay_core.coordinator.state import CoordinatorState, is_living
from mainstay_core.job.phase import TERMINAL, JobPhase


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
    assert plan.unplanned_id <= plan.quorum.id, "unplanned id above the quorum's"
    assert plan.planned == (plan.unplanned_id < plan.quorum.id), "planned contradicts ids"
    assert [m.index for m in plan.members] == list(range(len(plan.members))), "indices"
    assert len({m.slot for m in plan.members}) == len(plan.members), "a slot twice"
    assert len({m.incarnation for m in plan.members}) == len(plan.members), "a trainer twice"
    seats = [(m.rank.replica, m.rank.position) for m in plan.members if m.rank.replica is not None]
    assert len(set(seats)) == len(seats), "two members in one place of a chain"
    assert plan.chains, "a plan without a whole replica"
    for chain in plan.chains:
        cells = [plan.members[i] for i in chain.cells]
        assert tuple(c.rank.position for c in cells) == state.shape.positions, "chain's positions"
        assert all(c.rank.replica == chain.replica for c in cells), "chain's replica"
        assert 0 <= chain.replica < state.shape.lanes, "replica is no lane"
    whole = len(plan.chains) * len(state.shape.positions)
    assert len(seats) == whole, "a member of no whole chain"
    replicas = {c.replica for c in plan.chains}
    assert len(plan.suppliers) == state.shape.num_types, "a type without a supplier"
    assert set(plan.suppliers) <= replicas, "a supplier is no whole chain"
    assert plan.rendezvous.pod in {m.slot.pod for m in plan.members}, "rendezvous elsewhere"
    assert all(m.since <= plan.quorum.id for m in plan.members), "since is in the future"
    finishing = len(state.finals) == len(state.shape.positions)
    excused = bool(state.unheard) or finishing
    if state.phase in {JobPhase.RUNNING, JobPhase.RECOVERING} and not excused:
        alive = [m for m in plan.members if m.incarnation not in state.finished]
        assert all(is_living(state, m) for m in alive), "a lost member without a plan"
    assert (state.phase is JobPhase.WAITING) == (state.waiting is not None), "waiting"
