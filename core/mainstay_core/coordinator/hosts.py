"""Says where the pods of a plan are reached: gathers, stores, and stores beside them."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.state import (
    CoordinatorState,
    is_leaving,
)
from mainstay_core.wire.plan import Member, OtherStore, Rendezvous


def rendezvous_of(
    state: CoordinatorState, members: Sequence[Member], avoid: frozenset[PodUid]
) -> Rendezvous:
    """Return the pod where the quorum meets.

    It is that of the first member that stayed, unless the draft avoids it.
    """
    known = {p.registration.pod for p in state.pods if p.registration.gather}
    best = min(
        members,
        key=lambda m: (
            m.slot.pod not in known,
            m.joining,
            is_leaving(state, m.slot.pod),
            m.slot.pod in avoid,
            m.index,
        ),
    )
    (host,) = hosts_of(state, (best,))
    return host


def hosts_of(state: CoordinatorState, members: Sequence[Member]) -> tuple[Rendezvous, ...]:
    """Return where each pod with a member can be met, in pod order."""
    used = {m.slot.pod for m in members}
    has_copies = state.config.snapshots is not None or state.config.guards > 0
    return tuple(
        Rendezvous(
            pod=p.registration.pod,
            gather=p.registration.gather,
            store=p.registration.store,
            snapshots=p.registration.snapshots,
            domain=p.registration.domain if has_copies else "",
        )
        for p in state.pods
        if p.registration.pod in used
    )


def other_stores_of(state: CoordinatorState, members: Sequence[Member]) -> tuple[OtherStore, ...]:
    """Return the stores of segments of living pods that none of ``members`` is in, in pod order."""
    used = {m.slot.pod for m in members}
    return tuple(
        OtherStore(
            pod=p.registration.pod,
            address=p.registration.snapshots,
            domain=p.registration.domain,
        )
        for p in state.pods
        if p.registration.snapshots and not p.gone and p.registration.pod not in used
    )
