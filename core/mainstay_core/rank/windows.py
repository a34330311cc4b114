"""Decides when a rank copies which part of its state into memory, and when a snapshot is complete.

A *window* is a run of versions over which all positions spread one snapshot of their states. Its
instalment i, at version first + i, holds the whole state of some units of each position; after the
last one each unit has been copied once (MoEvement, sections 3.2 and 3.5). Windows are the same on
all ranks: they begin where all settle, and end by what all votes say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.rank.events import GoBack, KeepFrom, KeepRecord, Snapshot
from mainstay_core.rank.state import RankState, extend_commit_chain
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.votes import Commit, CommitRecord, Vote

MAX_WINDOW_LAG = 64
"""Versions after its last one for which a window may wait for its holders. One that never becomes
complete, as some store has no room, must not keep all later ones from beginning."""


def begin_window(state: RankState) -> RankState:
    """Return the state with a window that begins at its version."""
    if state.snapshots is None:
        return state
    rules = state.snapshots
    wanted = rules.num_instalments or state.num_instalments or rules.first_instalments
    return replace(state, window=Window(first=state.version, length=wanted))


def go_back(state: RankState, version: int, *, from_disk: bool) -> tuple[GoBack, ...]:
    """Return the action that has the pod's store keep what comes after a settled version.

    The store of a pod that had no member for a while may know of newer windows only: the others
    have gone back to a checkpoint meanwhile.

    Args:
        state: of a rank that has no state of the version.
        version: that is settled.
        from_disk: whether all load it, so that nothing later counts.
    """
    assert state.plan is not None
    if state.snapshots is None:
        return ()
    return (GoBack(state.plan.lineage, version, drops_later=from_disk),)


def catch_up(state: RankState, kept_from: int) -> tuple[RankState, tuple[KeepFrom, ...]]:
    """Return the state of a rank that keeps its own, and what the reports say is not needed.

    A rank that rolls forward over the step with which a window became complete has not seen the
    votes. Its store must not keep the window before for one window longer.
    """
    if state.snapshots is None or kept_from <= state.kept_from:
        return state, ()
    return replace(state, kept_from=kept_from), (KeepFrom(state.lineage, kept_from),)


def due_snapshot(state: RankState) -> tuple[Snapshot, ...]:
    """Return the action that copies the instalment of the version at hand, if one is due."""
    if state.window is None or state.window.number_of(state.version) is None:
        return ()
    return (Snapshot(state.version, state.window),)


def note_copies(state: RankState, votes: Sequence[Vote]) -> tuple[RankState, tuple[KeepFrom, ...]]:
    """Return the state after the votes of a committed step, and what is no longer needed.

    The votes found all states at this version good, so what was copied of them counts.
    """
    told = [v.snapshots for v in votes if v.snapshots]
    state = replace(state, num_instalments=max((t.wanted_instalments for t in told), default=0))
    window = state.window
    if window is None or state.version < window.last:
        return state, ()
    if len(told) == len(votes) and all(t.copied > window.last for t in told):
        complete = replace(state, window=None, kept_from=window.first)
        return complete, (KeepFrom(state.lineage, window.first),)
    if state.version > window.last + MAX_WINDOW_LAG:
        # Where gradients find no room either, what is kept has a gap, and would keep the room for
        # good.
        is_useless = not all(t.logged for t in told)
        next_first = state.version + 1
        needless = (KeepFrom(state.lineage, next_first),) if is_useless else ()
        return replace(state, window=None), needless
    return state, ()


def record_of(
    state: RankState, commit: Commit, votes: Sequence[Vote], certified_in: str | None = None
) -> tuple[KeepRecord, ...]:
    """Return the action that keeps a commit about to be applied; none in a job without snapshots.

    Args:
        state: at the commit's step.
        commit: the certificate.
        votes: of all members; empty for a rank that rolls forward and has not seen them.
        certified_in: quorum of the votes, if it is not the adopted one.
    """
    if state.snapshots is None:
        return ()
    assert state.plan is not None
    firsts = [votes[members[0].index] for members in state.plan.positions] if votes else []
    record = CommitRecord(
        lineage=state.lineage,
        commit=commit,
        certified_in=certified_in or str(state.plan.quorum),
        chain=extend_commit_chain(state.commit_chain, commit),
        gradients=tuple(v.gradient for v in firsts),
        states=tuple(v.state for v in firsts),
    )
    return (KeepRecord(record),)
