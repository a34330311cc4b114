"""Decides how long a trainer that ends again and again gets no place.

Each failed join costs the other ranks a settle. So the second end in a row without a commit in
between holds a slot back for ``hold_back_s``. Each further end doubles that time, up to
``hold_back_max_s``. The same is counted for each failure domain (for each pod where no domain is
known): a pod made anew on a bad node does not start with a clean record. A commit in which a member
votes clears the count and ends the hold-back of its slot and of its domain.

A slot that is held back blocks nobody: a spare or another trainer takes its place at once. A
restart disturbs nobody, so it does not wait for a hold-back.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.backoff import doubled_s
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.siting import domain_of
from mainstay_core.coordinator.state import (
    CoordinatorState,
    DomainState,
    SlotState,
    is_living,
    with_slots,
)


def pause_s(state: CoordinatorState, failures: int) -> float:
    """Return for how many seconds a trainer is held back that ended ``failures`` times in a row."""
    if failures < 2:
        return 0.0
    config = state.config
    return doubled_s(config.hold_back_s, failures - 2, config.hold_back_max_s)


def hold_slot(state: CoordinatorState, slot: SlotState, now_s: float) -> SlotState:
    """Return a slot whose trainer has just ended. From the second end in a row it is held back."""
    until_s = now_s + pause_s(state, slot.failures)
    return replace(slot, held_until_s=max(slot.held_until_s, until_s))


def hold_domain(state: CoordinatorState, pod: PodUid, why: str, now_s: float) -> CoordinatorState:
    """Return the state after an end on ``pod``. Ends at the same moment count once."""
    name = domain_of(state, pod)
    known = state.domains.get(name)
    if known is not None and known.last_s == now_s:
        return state
    failures = known.failures + 1 if known else 1
    pause = pause_s(state, failures)
    held = DomainState(
        failures=failures,
        last_s=now_s,
        held_until_s=now_s + pause if pause else 0.0,
        why=why,
    )
    domains = {**state.domains, name: held}
    return replace(state, domains=_remembered(state, domains, now_s))


def _remembered(
    state: CoordinatorState, domains: dict[str, DomainState], now_s: float
) -> dict[str, DomainState]:
    """Return the domains to remember. Pods come and go for as long as the job lives."""
    forget_s = 2 * state.config.hold_back_max_s
    return {n: d for n, d in domains.items() if now_s - max(d.last_s, d.held_until_s) <= forget_s}


def clear_failures(state: CoordinatorState) -> CoordinatorState:
    """Return the state after a commit.

    It clears the failures of all members and ends their hold-backs, as they voted for it.
    """
    assert state.plan is not None
    living = [m for m in state.plan.members if is_living(state, m)]
    clean = [
        replace(slot, failures=0, held_until_s=0.0)
        for member in living
        if (slot := state.slot(member.slot)) is not None and (slot.failures or slot.held_until_s)
    ]
    state = with_slots(state, clean)
    working = {domain_of(state, m.slot.pod) for m in living}
    if not working.intersection(state.domains):
        return state
    domains = {n: d for n, d in state.domains.items() if n not in working}
    return replace(state, domains=domains)
