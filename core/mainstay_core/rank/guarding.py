"""Has guards get in each step what they need: the gradient of what they keep, and first a copy.

It belongs to the reduction: what comes late still ends that, and nobody votes without it. So a rank
that holds a step's mark holds the gradients of all that it guards, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mainstay_core.rank.connections import QuorumConnections
from mainstay_core.rank.serving import HealFailed, Sources, Wanted, sources_of
from mainstay_core.rank.shell import RankShell
from mainstay_core.rank.state import RankState
from mainstay_core.reinitialisation.guards import Guard, guard_groups
from mainstay_core.wire.votes import GuardedDigest, SettleReport, Vote


async def guard(
    shell: RankShell,
    state: RankState,
    connections: QuorumConnections[Any, Any, Any],
    reports: Sequence[SettleReport],
) -> tuple[GuardedDigest, ...]:
    """Give the guards of this rank's end the reduced gradient; as a guard take that of an end.

    A guard that is new, or whose copy is void, copies the blocks from their owners first. If that
    fails it has none in this step, and tries again in the next one: no step stops for it.

    Args:
        shell: of the rank.
        state: of the rank, which has reduced its own gradient.
        connections: for its plan.
        reports: of the quorum's settle.

    Returns:
        What it guards now, as it is before the step.

    Raises:
        GroupEnded: an owner or a guard is gone.
    """
    guards, index = state.guards, state.index
    groups = guard_groups(guards)
    own = {guard.end: guard for guard in guards if guard.index == index}
    given = {guard.end for guard in guards if guard.owner == index}
    # All copies come before the first meeting: an owner that has sent to a guard that does not
    # receive yet has a device that waits, and a copy from there would wait with it.
    kept = [
        copy
        for end in sorted(own)
        if (copy := await _copy_of(shell, state, connections, reports, own[end])) is not None
    ]
    for end in sorted({*own, *given}):
        places = groups[end].members
        group, is_new = connections.begin_guard_group(groups[end].end, places)
        if is_new:
            await shell.connect(group)
        if end in given:
            of_end = [guard for guard in guards if (guard.end, guard.owner) == (end, index)]
            await shell.give_guarded(group, [places.index(guard.index) for guard in of_end])
        if end in own:
            await shell.take_guarded(group, end, places.index(own[end].owner))
    shell.keep_guarded([copy.stage for copy in kept])
    return tuple(kept)


async def _copy_of(
    shell: RankShell,
    state: RankState,
    connections: QuorumConnections[Any, Any, Any],
    reports: Sequence[SettleReport],
    guard: Guard,
) -> GuardedDigest | None:
    """Return what a guard has, or copies from the first owner that gives it; None if none does."""
    held = next((held for held in state.guarded if held.stage == guard.end), None)
    if held is not None:
        return held
    plan = state.plan
    assert plan is not None
    wanted = Wanted(str(plan.quorum), guard.end, state.version, guarded=guard.end)
    others = [m.index for m in plan.positions[guard.end] if m.index != guard.owner]
    sources: Sources = sources_of(plan, reports, (guard.owner, *others))
    for source in sources:
        client = connections.healing(shell.make_heal_client())
        try:
            return await shell.copy_guarded(client, (source,), wanted)
        except HealFailed as failure:
            shell.warn(f"a guard has no copy of stage {guard.end}: {failure}")
    return None


def tell_own(shell: RankShell, state: RankState, vote: Vote) -> Vote:
    """Return a vote with the digest of what others guard of this rank's stage, if they do."""
    own = shell.own_guarded() if state.guards else None
    return vote if own is None else replace(vote, guarded=(own, *vote.guarded))


def serve_guards(shell: RankShell, state: RankState, version: int) -> None:
    """Serve a version that was applied: a guard whose copy a vote found bad copies it again."""
    if state.is_guarded and state.plan is not None:
        shell.serve(Wanted(str(state.plan.quorum), state.member_position, version))
