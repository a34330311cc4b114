"""Decides when a rank copies which part of its state into memory, and when a snapshot is complete.

A *window* is a run of versions over which all positions spread one snapshot of their states. Its
instalment i, at version first + i, holds the whole state of some units of each position; after the
last one each unit has been copied once (MoEvement, sections 3.2 and 3.5). Windows are the same on
all ranks: they begin where all settle, and end by what all votes say. How long one is, and in which
order it copies units, follows from its *basis*: what the votes of committed steps have measured and
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mainstay_core.base.values import replace
from mainstay_core.job.config import MAX_AUTO_WINDOW, MAX_LAG_STEPS, LogKind
from mainstay_core.rank.events import GoBack, KeepFrom, KeepRecord, PlacedUnit, Snapshot
from mainstay_core.rank.forks.histories import digest_of
from mainstay_core.rank.replays.authors import author_of
from mainstay_core.rank.replays.replaying import StoreContents
from mainstay_core.rank.settle import PositionDigests, Settlement, StateAction
from mainstay_core.rank.settled_windows import is_outdated
from mainstay_core.rank.state import RankState, SnapshotRules, extend_commit_chain
from mainstay_core.snapshots import orderings
from mainstay_core.snapshots.duties import Author
from mainstay_core.snapshots.job_units import JobUnits
from mainstay_core.snapshots.measures import MICROSECONDS, agree
from mainstay_core.snapshots.orderings import Ordering
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.schedule import PositionState, assign, choose_length
from mainstay_core.snapshots.stores import store_addresses
from mainstay_core.snapshots.units import Position
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import (
    Commit,
    CommitRecord,
    SettleReport,
    SnapshotStatus,
    Vote,
    is_sealed,
    seal_record,
)
from mainstay_core.wire.windows import Scores, WindowBasis

Shares = tuple[tuple[PlacedUnit, ...], ...]
"""What a rank copies in a window, by instalment."""
_Authors = tuple[tuple[Author, ...], ...]
"""Of each position, by its number."""


def begin_window(state: RankState) -> RankState:
    """Return the state with a window that begins at its version.

    The order of units changes here alone.
    """
    rules, basis = state.snapshots, state.basis
    if rules is None:
        return state
    length = rules.num_instalments or 1
    share: Shares = ()
    if rules.units is not None:
        assert state.plan is not None
        authors = tuple(tuple(map(author_of, members)) for members in state.plan.positions)
        layers = rules.units.layers
        popularity, _ = orderings.close_window(basis.popularity, rules.ordering, layers)
        basis = replace(basis, popularity=popularity)
        budget_bytes = basis.bytes_per_s * basis.step_us // MICROSECONDS
        with_compute = rules.log is LogKind.BOUNDARY
        what = _Ordered(rules.units, rules.ordering, popularity.ordered_by, with_compute)
        if not rules.num_instalments and budget_bytes:
            length = _automatic_length(what, authors, budget_bytes)
        position, me = state.member_position, author_of(state.plan.members[state.index])
        share = _share(what, position, authors[position], me, length)
    window = Window(first=state.version, length=length)
    return replace(state, basis=basis, window=window, share=share)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """The units of a job, and what their order follows from."""

    units: JobUnits
    ordering: Ordering
    ordered_by: Scores
    with_compute: bool
    """Whether the compute weights of units are copied whose turn is still to come."""


@lru_cache(maxsize=8)
def _orders(what: _Ordered) -> tuple[tuple[UnitPrice, ...], ...]:
    """Return the units of each position in a window's order. A new one is seldom made."""
    return tuple(
        what.units.order(p, what.ordering, what.ordered_by, with_compute=what.with_compute)
        for p in range(len(what.units.positions))
    )


@lru_cache(maxsize=8)
def _automatic_length(what: _Ordered, authors: _Authors, budget_bytes: int) -> int:
    """Return the least length for which each instalment of each author fits into a step."""
    states = [
        PositionState(position=Position(stage=number), order=order, authors=of_position)
        for number, (order, of_position) in enumerate(zip(_orders(what), authors, strict=True))
    ]
    return min(MAX_AUTO_WINDOW, choose_length(states, budget_bytes))


@lru_cache(maxsize=8)
def _share(
    what: _Ordered, position: int, authors: tuple[Author, ...], me: Author, length: int
) -> Shares:
    """Return what one author copies in a window; windows that follow each other share it."""
    order = _orders(what)[position]
    state = PositionState(position=Position(stage=position), order=order, authors=authors)
    places = {price.name: place for place, price in enumerate(order)}
    return tuple(
        tuple(PlacedUnit(name, places[name]) for name in instalment.full)
        + tuple(PlacedUnit(name, places[name], is_full=False) for name in instalment.compute)
        for instalment in assign(state, me, length).instalments
    )


def settled_basis(state: RankState, outcome: Settlement) -> WindowBasis:
    """Return what a member plans its next window from after a settle: the same as all others."""
    basis = outcome.basis
    for commit in outcome.unnoted:
        basis = _note_counts(state.snapshots, basis, commit)
    return basis


def note_commit(state: RankState, commit: Commit, votes: Sequence[Vote]) -> RankState:
    """Return the state with what a commit and its votes say of the next window.

    No rank measures for itself alone: all read the same votes.
    """
    rules, plan = state.snapshots, state.plan
    if rules is None or plan is None:
        return state
    basis = _note_counts(rules, state.basis, commit)
    told = [v.snapshots.measures for v in votes if v.snapshots and v.snapshots.measures]
    pace = agree(told, num_peers(plan, rules.peers))
    if pace is not None:
        basis = replace(basis, bytes_per_s=pace.bytes_per_s, step_us=pace.step_us)
    return replace(state, basis=basis)


def num_peers(plan: Plan, peers: int) -> int:
    """Return the other pods to which each copy goes: no more than have a store."""
    return min(peers, max(0, len(store_addresses(plan)) - 1))


def _note_counts(rules: SnapshotRules | None, basis: WindowBasis, commit: Commit) -> WindowBasis:
    basis = replace(basis, version=commit.step + 1)
    units = None if rules is None else rules.units
    if rules is None or units is None or not units.experts:
        return basis
    counts = units.counts(commit.statistics, rules.ordering)
    popularity = orderings.note_step(basis.popularity, counts, rules.ordering, rules.decay)
    return replace(basis, popularity=popularity)


def go_back(
    state: RankState, version: int, kept_from: int, *, from_disk: bool
) -> tuple[GoBack | KeepFrom, ...]:
    """Return the actions that have the pod's store keep what comes after a settled version.

    The store of a pod that had no member for a while may know of newer windows only: the others
    have gone back to a checkpoint meanwhile. Or it has not heard that a window is complete, and
    would take its states for given up.

    Args:
        state: of a rank that has no state of the version.
        version: that is settled.
        kept_from: first version of the newest complete window; 0 if older ones may be needed.
        from_disk: whether all load the version, so that nothing later counts.
    """
    assert state.plan is not None
    if state.snapshots is None:
        return ()
    lineage = state.plan.lineage
    complete = (KeepFrom(lineage, kept_from),) if kept_from else ()
    return (GoBack(lineage, version, drops_later=from_disk), *complete)


def catch_up(
    state: RankState, kept_from: int, reports: Sequence[SettleReport]
) -> tuple[RankState, tuple[KeepFrom, ...]]:
    """Return the state of a rank that keeps its own, and what the reports say is not needed.

    A rank that rolls forward over the step with which a window became complete has not seen the
    votes. Its store must not keep the window before for one window longer. One that was away may
    know of a window that the others have gone back before: it must tell nobody that this one is
    complete, though it holds the very state that they have come to again.

    Args:
        state: of the rank as it settles.
        kept_from: first version of the newest complete window; 0 if older ones may be needed.
        reports: of all members.
    """
    if state.snapshots is None:
        return state, ()
    if kept_from > state.kept_from:
        return replace(state, kept_from=kept_from), (KeepFrom(state.lineage, kept_from),)
    assert state.plan is not None
    if is_outdated(state.plan, reports, state.index):
        return replace(state, kept_from=kept_from), ()
    return state, ()


def due_snapshot(state: RankState) -> tuple[Snapshot, ...]:
    """Return the action that copies the instalment of the version at hand, if one is due."""
    number = None if state.window is None else state.window.number_of(state.version)
    if state.window is None or number is None:
        return ()
    units = state.share[number] if state.share else ()
    return (Snapshot(state.version, state.window, units),)


def note_copies(state: RankState, votes: Sequence[Vote]) -> tuple[RankState, tuple[KeepFrom, ...]]:
    """Return the state after the votes of a committed step, and what is no longer needed.

    The votes found all states at this version good, so what was copied of them counts.
    """
    told = [v.snapshots for v in votes if v.snapshots]
    window = state.window
    if window is None or state.version < window.last:
        return state, ()
    if len(told) == len(votes) and is_complete(window, state.version, told):
        complete = replace(state, window=None, kept_from=window.first)
        return complete, (KeepFrom(state.lineage, window.first),)
    if state.version > window.last + MAX_LAG_STEPS:
        # Where gradients find no room either, what is kept has a gap, and would keep the room for
        # good.
        is_useless = not all(t.logged for t in told)
        next_first = state.version + 1
        needless = (KeepFrom(state.lineage, next_first),) if is_useless else ()
        return replace(state, window=None), needless
    return state, ()


def is_complete(window: Window, version: int, told: Sequence[SnapshotStatus]) -> bool:
    """Return whether a window is complete at the commit of the step at a version.

    Args:
        window: in flight.
        version: at which all states were found good.
        told: by all members.
    """
    return version >= window.last and all(status.copied > window.last for status in told)


def record_of(state: RankState, commit: Commit, votes: Sequence[Vote]) -> tuple[KeepRecord, ...]:
    """Return the action that keeps a commit about to be applied; none in a job without snapshots.

    Args:
        state: at the commit's step.
        commit: the certificate.
        votes: of all members.
    """
    assert state.plan is not None
    firsts = [votes[members[0].index] for members in state.plan.positions]
    told = tuple(PositionDigests(v.gradient, v.state) for v in firsts)
    return _keep(state, commit, str(state.plan.quorum), told)


def record_rolled(state: RankState, outcome: Settlement) -> tuple[KeepRecord, ...]:
    """Return the same for a rank that rolls forward: it has not seen the votes.

    What they told is known from the settle reports, or is missing in the record.
    """
    assert outcome.commit is not None
    assert outcome.certified_in is not None
    return _keep(state, outcome.commit, outcome.certified_in, outcome.told)


def records_told(
    state: RankState, outcome: Settlement, stores: Sequence[StoreReport]
) -> tuple[KeepRecord, ...]:
    """Return the actions that keep the commits which a settle was told of, and the pod lacks.

    Who is lost next may be the last to have them. They are all since the newest complete window,
    not just those of this rank's own replay: units of another position may start from an older
    state.

    Args:
        state: of a rank that settles.
        outcome: of the settle.
        stores: what pods' stores hold; empty if they were not asked.
    """
    assert state.plan is not None
    if state.snapshots is None or not stores or StateAction.LOAD in outcome.actions:
        return ()
    lineage, pod = state.plan.lineage, state.slot.pod
    replay = outcome.replays.get(state.member_position)
    told = StoreContents(stores, lineage).records
    wanted = {step: told[step] for step in told if outcome.kept_from <= step < outcome.version}
    if replay is not None and outcome.actions[state.index] is StateAction.REPLAY:
        wanted |= {record.commit.step: record for record in replay.known}
    # Of one step two quorums may have a record, and logs count by either: what is here stays,
    # unless it is damaged.
    of_lineage = [s for s in stores if s.pod == pod and s.lineage == lineage]
    here = {r.commit.step for s in of_lineage for r in s.records if r.states and is_sealed(r)}
    return tuple(KeepRecord(wanted[step]) for step in sorted(wanted.keys() - here))


def _keep(
    state: RankState, commit: Commit, certified_in: str, told: Sequence[PositionDigests]
) -> tuple[KeepRecord, ...]:
    if state.snapshots is None:
        return ()
    record = CommitRecord(
        lineage=state.lineage,
        commit=commit,
        certified_in=certified_in,
        chain=extend_commit_chain(state.commit_chain, commit),
        gradients=tuple(digests.gradient for digests in told),
        states=tuple(digests.masters for digests in told),
        forks=digest_of(state.history),
    )
    return (KeepRecord(seal_record(record)),)
