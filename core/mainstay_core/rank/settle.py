"""Computes from the reports of all members where a quorum goes on after a failure.

The settle is a pure function of the gathered reports (protocol section 6). Every rank of a quorum
computes it by itself and comes to the same answer, so no coordinator takes part.

A *position* is (stage, inner rank). A member's state is a function of its position, never of its
replica, so that members of a position stand in for each other.

Invariants:
    - the version is the newest that every position can reach from members that
      stayed; only if these do not cover every position do returning ranks count,
      and only then a durable version;
    - a mark is rolled forward only with a certificate of the same quorum.
    - a joiner copies only what has been compared with another copy, where there is another.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.values import replace
from mainstay_core.base.words import count
from mainstay_core.job.config import LogKind
from mainstay_core.rank.forks import courses, fork_plan, orders, repeats
from mainstay_core.rank.forks.guard_copies import LeftGuards, find_guards
from mainstay_core.rank.forks.histories import last_known
from mainstay_core.rank.forks.rules import ForkRules, rules_of
from mainstay_core.rank.forks.sources import ends_without_guards, lacks_sources
from mainstay_core.rank.reach import certificates_of, lost_positions, newest, reach
from mainstay_core.rank.replays.boundaries import BoundaryReplay, replaying_members
from mainstay_core.rank.replays.boundary_stores import AnyStores, BoundaryStores, why_not_replayed
from mainstay_core.rank.replays.replaying import Replay, Stores
from mainstay_core.rank.settled_windows import find_basis, find_kept_from, list_unnoted
from mainstay_core.rank.steps.doubts import Doubt, find_doubt, plan_settled_step
from mainstay_core.rank.steps.step_plan import StepPlan
from mainstay_core.snapshots.stores import store_domains
from mainstay_core.wire.plan import Member, Partial, Plan
from mainstay_core.wire.reinitialisation import Fork, History
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import Commit, SettleReport
from mainstay_core.wire.windows import WindowBasis


class StateAction(enum.StrEnum):
    """The ways in which a rank comes to the settled version."""

    STAY = "stay"
    ROLL = "roll"
    HEAL = "heal"
    REPLAY = "replay"
    LOAD = "load"
    MAKE = "make"


_WITHOUT_STATE = (StateAction.HEAL, StateAction.REPLAY, StateAction.MAKE)
"""What those do who have no state yet, and get it while others could compute."""


class PositionDigests(NamedTuple):
    """The digests that the votes on a step told of one position; both empty if nobody knows."""

    gradient: str = ""
    """Of the reduced gradient."""
    masters: str = ""
    """Before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The result of a settle. It is equal on every rank."""

    version: int
    actions: tuple[StateAction, ...]
    """What each member does, by its index."""
    sources: tuple[tuple[int, ...], ...]
    """From whom each member heals, best first, by its index. Empty unless its action is HEAL."""
    expected: tuple[str, ...]
    """The digest that each member's healed masters must have, by its index; "" if no report of its
    position names one, or if they name several: then two sources must have the same."""
    commit: Commit | None
    """The commit of step version - 1, for those that roll or heal; None at version 0."""
    certified_in: str | None
    commit_chain: str
    """Hash of all commits up to ``version``; empty when everything is loaded."""
    step: StepPlan
    refused_in: int
    """Newest quorum that refused a step over a bad state, by any report. What was held from then on
    is void."""
    pipelines: Mapping[int, str]
    """The pipeline group with which each replica's chain goes on. If it is empty, some cell has
    lost the group and the chain connects a new one, under a name that was never used before."""
    stage_groups: tuple[str, ...]
    """The group with which each position goes on to reduce. If it is empty, some member does not
    have it and all members connect a new one, under a name that was never used before."""
    reason: str
    basis: WindowBasis = field(default_factory=WindowBasis)
    """What the next window of snapshots is planned from, by the report that tells the newest."""
    unnoted: tuple[Commit, ...] = ()
    """Commits since then, as far as they are known: what they counted is not in it yet."""
    kept_from: int = 0
    """First version of the newest window of snapshots that a member which stayed knows to be
    complete; 0 if something of an older one may be needed yet."""
    replays: Mapping[int, Replay | BoundaryReplay] = field(default_factory=dict)
    """How positions that nobody holds are made anew from segments, by position."""
    told: tuple[PositionDigests, ...] = ()
    """What the votes on step version - 1 told, by position; empty unless it is known of all."""
    fork: Fork | None = None
    """How positions are made anew that nobody holds; None: none is."""
    history: History = ()
    """Forks that all states at the version contain; that of a checkpoint is in the checkpoint."""
    guards: tuple[LeftGuards, ...] = ()
    """Whose copies of what ends of the pipeline alone have count at the version."""
    doubt: Doubt | None = None
    """The type on which chains have disagreed in the step; None: there is none."""


def settle(
    plan: Plan,
    shards_per_lane: int,
    reports: Sequence[SettleReport],
    store_reports: Sequence[StoreReport] = (),
    log: LogKind = LogKind.GRADIENTS,
    fork_rules: ForkRules | None = None,
) -> Settlement:
    """Return the settled version, what each rank does, and the table of the step.

    Args:
        plan: the plan being adopted.
        shards_per_lane: types of a lane.
        reports: one per member, in any order.
        store_reports: what the pods' stores of segments hold, where they were asked.
        log: from what the job's lost states are made anew.
        fork_rules: of a job that may go on approximately.

    Raises:
        LocalProtocolError: reports are missing or doubled, the plan has no whole
            replica, or it orders a fork that the job's rules do not allow.
    """
    ordered, others = courses.of_one_course(plan, _in_order(plan, reports))
    fork_rules = rules_of(plan, fork_rules)
    stores = _stores(plan, store_reports, log)
    goal = _choose_version(plan, ordered, stores, fork_rules, asked=bool(store_reports))
    version, history = goal.version, _history(plan, goal, stores)
    goal = _repeating(plan, goal, history.forks)
    actions, replays = _ways(plan, ordered, goal, stores)
    replays = {p: replace(replay, history=history.forks) for p, replay in replays.items()}
    refused_in = max(r.refused_in for r in ordered)
    # Where a stage is another one now, what is held and what was told came from the lost one.
    made = StateAction.MAKE in actions
    held = {} if made else _held(ordered, actions, goal, refused_in, history.forks)
    healing = [i for i, a in enumerate(actions) if a in _WITHOUT_STATE]
    staying = [] if made else [i for i, a in enumerate(actions) if a is StateAction.STAY]
    doubt = find_doubt(plan, ordered, staying)
    step = plan_settled_step(plan, shards_per_lane, ordered, version, held, healing, doubt)
    patched = _computed(plan, step) if any(held.values()) else ()
    basis = find_basis(plan, ordered)
    fork = _fork(plan, fork_rules, goal, history, max(r.durable for r in ordered))
    why = fork.reason + courses.name_refused(plan, others) + stores.bad_records
    heals = [_heal(plan, ordered, actions, i, replays) for i in range(len(actions))]
    commits = {number: record.commit for number, record in stores.records.items()}
    return Settlement(
        version=version,
        actions=actions,
        sources=tuple(sources for sources, _ in heals),
        expected=tuple(expected for _, expected in heals),
        commit=history.commit,
        certified_in=history.certified_in,
        commit_chain=fork.chain,
        step=step,
        refused_in=refused_in,
        pipelines={c.replica: _common(ordered[i].pipeline for i in c.cells) for c in plan.chains},
        stage_groups=tuple(
            _common(ordered[m.index].stage_group for m in members) for members in plan.positions
        ),
        reason=_reason(version, history.origin, actions, patched) + why,
        basis=basis,
        unnoted=list_unnoted(basis, version, history.commit, commits),
        kept_from=0 if goal.from_disk else find_kept_from(plan, ordered, replays),
        replays=replays,
        told=_told(plan, goal, stores),
        fork=fork.fork,
        history=fork.history,
        guards=goal.guards,
        doubt=doubt,
    )


def _stores(plan: Plan, reports: Sequence[StoreReport], log: LogKind) -> AnyStores:
    if log is LogKind.GRADIENTS:
        return Stores(reports, plan.lineage, store_domains(plan))
    return BoundaryStores(reports, plan)


def _repeating(plan: Plan, goal: _Goal, history: History) -> _Goal:
    """Return a goal at which a fork of another run is made again, if the plan orders it there."""
    again = repeats.positions_to_repeat(plan, goal.version, history)
    if goal.from_disk or not again:
        return goal
    guards = _guards(plan, goal.counted, goal.version)
    assert plan.fork is not None
    assert plan.fork.repeats is not None
    for end in ends_without_guards(plan.fork.repeats, guards):
        # A guard that is new copies in a step. The owners have the same bits, if none was lost.
        owners = [m.index for m in plan.members if m.rank.stage == end]
        there = {
            r.index
            for r in goal.counted
            if r.valid and r.lineage == plan.lineage and r.version == goal.version
        }
        if not there.issuperset(owners):
            return goal  # they come to the version first
    return replace(goal, made=goal.made | again, guards=guards)


def _fork(
    plan: Plan, rules: ForkRules | None, goal: _Goal, history: _History, durable: int
) -> fork_plan.Forked:
    known = fork_plan.Forked(None, history.forks, history.chain)
    about = plan, rules, goal.made, goal.version, history.commit, known
    return fork_plan.plan_fork(*about, goal.guards, durable)


def _ways(
    plan: Plan, ordered: Sequence[SettleReport], goal: _Goal, stores: AnyStores
) -> tuple[tuple[StateAction, ...], dict[int, Replay | BoundaryReplay]]:
    """Return how each member comes to the version, and how lost positions are made anew."""
    actions = tuple(
        StateAction.MAKE if plan.position_of(i) in goal.made else action
        for i, action in enumerate(_actions(plan, ordered, goal))
    )
    replays = {} if goal.from_disk else _replays(plan, actions, stores, goal)
    replaying = {m.index for position in replays for m in _replaying(plan, position, stores)}
    return tuple(
        StateAction.REPLAY if i in replaying else a for i, a in enumerate(actions)
    ), replays


def _held(
    ordered: Sequence[SettleReport],
    actions: Sequence[StateAction],
    goal: _Goal,
    refused_in: int,
    history: History,
) -> dict[int, tuple[Partial, ...]]:
    """Return what counts of what members hold of the step, by their index.

    What a member holds that missed a fork at the version came through a stage that is another now.
    """
    return {
        r.index: r.held
        for r in ordered
        if actions[r.index] is StateAction.STAY
        and r.version == goal.version
        and r.held_in > refused_in
        and r.history == history
    }


def _in_order(plan: Plan, reports: Sequence[SettleReport]) -> list[SettleReport]:
    """Return the reports by member index. A state that is to be made anew does not count.

    Raises:
        LocalProtocolError: reports are missing or doubled.
    """
    by_index = {r.index: r for r in reports}
    if len(reports) != len(plan.members) or set(by_index) != set(range(len(plan.members))):
        raise LocalProtocolError(
            f"settle needs one report of each of {len(plan.members)} members, got "
            f"{sorted(r.index for r in reports)}"
        )
    return repeats.without_unmade(plan, [by_index[i] for i in range(len(plan.members))])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Goal:
    """A version at which all go on."""

    version: int
    from_disk: bool
    counted: Sequence[SettleReport]
    """Of the members from whose states it is reached."""
    origin: str
    made: frozenset[int] = frozenset()
    """Positions that are made anew of others."""
    guards: tuple[LeftGuards, ...] = ()


def _choose_version(
    plan: Plan,
    ordered: Sequence[SettleReport],
    stores: AnyStores,
    rules: ForkRules | None,
    *,
    asked: bool,
) -> _Goal:
    """Return the version to go on from; ``asked``: the stores were asked what they hold."""
    durable = max(r.durable for r in ordered)
    stayed = [r for r in ordered if r.settled >= plan.members[r.index].since]
    for counted, origin in ((stayed, "the members that stayed"), (ordered, "returning members")):
        version = newest(plan, counted, stores)
        if version is None:
            continue
        if version >= durable or newest(plan, counted) is not None:
            made = orders.positions_to_make(plan, lost_positions(plan, counted))
            left = _guards(plan, counted, version) if made else ()
            goal = _Goal(
                version=version,
                from_disk=False,
                counted=counted,
                origin=origin,
                made=made,
                guards=left,
            )
            known = _history(plan, goal, stores).forks if made else ()
            if made and (
                orders.goes_back(plan, rules, version, durable)
                or lacks_sources(
                    plan, rules, made, version, durable=durable, history=known, guards=left
                )
            ):
                continue
            return goal
        # It takes stores, and they reach less than the disk.
    version = durable
    origin = "the newest durable checkpoint" if version else "the seed's initial state"
    origin += why_not_replayed(plan, ordered, stores) if asked else ""
    return _Goal(version=version, from_disk=True, counted=ordered, origin=origin)


def _guards(plan: Plan, counted: Sequence[SettleReport], version: int) -> tuple[LeftGuards, ...]:
    certificates = certificates_of(counted, plan.lineage)
    there = [r for r in counted if version in reach(r, plan.lineage, certificates)]
    staying = [r.index for r in there if r.version == version]
    return find_guards(plan, there, staying, [r.index for r in there if r.version != version])


def _actions(plan: Plan, ordered: Sequence[SettleReport], goal: _Goal) -> tuple[StateAction, ...]:
    """Return how each member comes to the version, were there no segments."""
    if goal.from_disk:
        return (StateAction.LOAD,) * len(ordered)
    certificates = certificates_of(goal.counted, plan.lineage)
    return tuple(_action(r, goal.version, plan.lineage, certificates) for r in ordered)


class _History(NamedTuple):
    """The commit before a version, and where all of it is known from."""

    commit: Commit | None
    certified_in: str | None
    chain: str
    origin: str
    forks: History = ()


def _history(plan: Plan, goal: _Goal, stores: AnyStores) -> _History:
    """Return what led to the version, from those who are there or from a store's record."""
    there = [
        r
        for r in goal.counted
        if r.valid and r.lineage == plan.lineage and r.version == goal.version
    ]
    if there:
        commit = next((r.commit for r in there if r.commit is not None), None)
        certified_in = next((r.certified_in for r in there if r.certified_in is not None), None)
        known, chain = last_known(there)
        # A checkpoint has its own; the seed's initial state has none.
        known = () if goal.from_disk else known
        return _History(commit, certified_in, chain, goal.origin, known)
    record = None if goal.from_disk else stores.records.get(goal.version - 1)
    origin = goal.origin if goal.from_disk else "segments alone"
    if record is None:
        return _History(None, None, "", origin)
    return _History(record.commit, record.certified_in, record.chain, origin)


def _told(plan: Plan, goal: _Goal, stores: AnyStores) -> tuple[PositionDigests, ...]:
    """Return what the votes on the step before the version told of each position.

    A rank that rolls forward has not seen these votes, and those who have may be gone before the
    next step is committed. So each report has what its own rank told: of the last commit, or of its
    mark, if that is rolled forward. Members of a position that say different things are not
    believed.
    """
    if goal.from_disk:
        return ()
    record = stores.records.get(goal.version - 1)
    if record is not None and record.states:
        return tuple(map(PositionDigests, record.gradients, record.states))
    certificates = certificates_of(goal.counted, plan.lineage)
    found: list[set[PositionDigests]] = [set() for _ in plan.positions]
    for report in goal.counted:
        if goal.version not in reach(report, plan.lineage, certificates):
            continue
        rolls = report.version < goal.version
        digests = (
            PositionDigests(report.mark_gradient, report.state)
            if rolls
            else PositionDigests(report.last_gradient, report.last_masters)
        )
        if all(digests):
            found[plan.position_of(report.index)].add(digests)
    if any(len(digests) != 1 for digests in found):
        return ()
    return tuple(digests for (digests,) in found)


def _replays(
    plan: Plan, actions: Sequence[StateAction], stores: AnyStores, goal: _Goal
) -> dict[int, Replay | BoundaryReplay]:
    """Return how each position is made anew of which no member will have the version by itself.

    Stages that lie beside each other are computed again together, and so are the inner ranks of a
    stage. So in a job that logs boundaries a member that returned with the version replays too, if
    the version was reached without it, and one that stayed, if its stage has lost another position.
    """
    found: dict[int, Replay | BoundaryReplay] = {}
    version, lost = goal.version, lost_positions(plan, goal.counted) - goal.made
    lost_stages = {position // plan.ranks_per_stage for position in lost}
    for position, members in enumerate(plan.positions):
        in_stretch = position // plan.ranks_per_stage in lost_stages
        together = isinstance(stores, BoundaryStores) and in_stretch
        if together or all(actions[m.index] is StateAction.HEAL for m in members):
            replay = stores.plan_replay(position, version, lost)
            assert replay is not None, f"position {position} does not reach version {version}"
            found[position] = replay
    return found


def _replaying(plan: Plan, position: int, stores: AnyStores) -> tuple[Member, ...]:
    """Return the members of a position that make it anew; the others keep or copy the state."""
    by_steps = isinstance(stores, BoundaryStores)
    return replaying_members(plan, position) if by_steps else plan.positions[position]


def _common(reported: Iterable[str]) -> str:
    """Return the group that all who need it still have; empty if one has lost it or is new.

    One member alone must not use it.
    """
    names = set(reported)
    return names.pop() if len(names) == 1 else ""


def _action(
    report: SettleReport, version: int, lineage: int, certificates: set[tuple[int, str]]
) -> StateAction:
    if version not in reach(report, lineage, certificates):
        return StateAction.HEAL
    return StateAction.STAY if report.version == version else StateAction.ROLL


def _heal(
    plan: Plan,
    reports: Sequence[SettleReport],
    actions: Sequence[StateAction],
    index: int,
    replays: Mapping[int, Replay | BoundaryReplay],
) -> tuple[tuple[int, ...], str]:
    """Return whom a member copies, best first, and the digest that its masters must have then.

    The members of its position that will have the version are taken lowest first, and joiners take
    turns. One copy alone is not believed where others roll forward or replay to the same version:
    these make the version by themselves, and a copy of theirs with the digest of the first is right
    twice. Where votes told the digest of what is replayed, it counts.
    """
    if actions[index] is not StateAction.HEAL:
        return (), ""
    peers = [m.index for m in plan.position_members(plan.position_of(index))]
    staying = [i for i in peers if actions[i] is StateAction.STAY]
    making = (StateAction.ROLL, StateAction.REPLAY)
    rolling = [i for i in peers if actions[i] in making]
    known = {reports[i].state for i in staying}
    position = plan.position_of(index)
    replay = replays.get(position)
    if replay is not None and replay.next is not None:
        known.add(replay.next.states[position])
    compared = len(known) == 1 and len(staying) > 1
    have = staying + rolling if compared or not rolling else rolling
    turn = [i for i in peers if actions[i] is StateAction.HEAL].index(index)
    start = turn % len(have) if have else 0
    return tuple(have[start:] + have[:start]), known.pop() if len(known) == 1 else ""


def _computed(plan: Plan, step: StepPlan) -> tuple[int, ...]:
    computed = {t for types in step.todo.values() for t in types}
    return tuple(t for t in range(len(plan.suppliers)) if t in computed)


def _reason(
    version: int, origin: str, actions: Sequence[StateAction], patched: Sequence[int]
) -> str:
    counts = {a: actions.count(a) for a in StateAction if actions.count(a)}
    what = ", ".join(f"{n} {a}" for a, n in counts.items())
    tail = f"; {count(len(patched), 'type')} computed again" if patched else ""
    return f"step {version} from {origin}: {what}{tail}"
