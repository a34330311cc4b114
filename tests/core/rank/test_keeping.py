"""What a rank keeps in the memory of pods: when its machine says so, and in which order it does."""

# ruff: noqa: ARG002 - the played keeper needs little of what it is given

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan
from tests.core.rank import test_machine as machines
from tests.core.rank import test_session as sessions
from tests.core.rank.replays.test_replaying import GRADIENT, STATE, Pod, key_of, record_of
from tests.core.rank.test_machine import applied, computing, follow, report, vote, voting
from tests.core.rank.test_session import Played, run

from mainstay_core.base.ids import PodUid
from mainstay_core.rank import machine
from mainstay_core.rank.connections import Ends, GroupEnded
from mainstay_core.rank.events import (
    Applied,
    Apply,
    Compute,
    KeepFrom,
    KeepRecord,
    LoadFailed,
    LoadState,
    QuorumLost,
    Reduced,
    ReportsGathered,
    Snapshot,
    StateLoaded,
    TodoDone,
    VotesGathered,
)
from mainstay_core.rank.machine import Phase, RankState
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.state import SnapshotRules, report_of
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.facts import Cause, Parked
from mainstay_core.wire.plan import OtherStore, Partial, Plan
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import CommitRecord, SnapshotStatus, Vote

RULES = SnapshotRules(num_instalments=2)
KINDS = (Snapshot, KeepRecord, KeepFrom)


def told(step: int, copied: int, **fields: object) -> Vote:
    status = SnapshotStatus(logged=True, copied=copied)
    return vote(step, snapshots=status, **fields)


# The machine --------------------------------------------------------------------------


def test_a_settle_begins_a_window_and_its_first_instalment_is_copied_before_the_step() -> None:
    absent = ReportsGathered((report(0, valid=False), report(1, valid=False)))
    outcome = follow(machines.adopting(snapshots=RULES), absent, StateLoaded("digest", None, ""))

    assert outcome.state.window == Window(first=0, length=2)
    assert outcome.actions[-2] == Snapshot(0, Window(first=0, length=2))
    assert isinstance(outcome.actions[-1], Compute)


def test_a_settle_gives_the_window_before_it_up() -> None:
    state = replace(computing(snapshots=RULES), version=1)
    later = machine.saw_plan(state, make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2))
    adopting = follow(later, TodoDone(())).state
    stayed = tuple(report(i, 1, settled=1, lineage=0) for i in range(2))

    outcome = machine.step(adopting, ReportsGathered(stayed))
    assert outcome.state.window == Window(first=1, length=2)
    assert Snapshot(1, Window(first=1, length=2)) in outcome.actions


def test_a_commit_is_kept_before_it_is_applied_and_the_next_window_begins_when_one_is_whole() -> (
    None
):
    state = voting(snapshots=SnapshotRules(num_instalments=1))
    outcome = machine.step(state, VotesGathered((told(0, 1), told(0, 1))))

    keep, record, apply = outcome.actions[-3:]
    assert keep == KeepFrom(0, 0)
    assert isinstance(record, KeepRecord)
    assert isinstance(apply, Apply)
    assert record.record.commit == apply.commit
    after = machine.step(outcome.state, Applied("after", apply.commit))
    assert after.state.window == Window(first=1, length=1)
    assert Snapshot(1, Window(first=1, length=1)) in after.actions


def test_a_step_inside_a_window_copies_its_instalment_and_begins_no_other_window() -> None:
    state = voting(snapshots=RULES)
    outcome = applied(state, told(0, 1), told(0, 1))

    assert outcome.state.window == Window(first=0, length=2)
    assert Snapshot(1, Window(first=0, length=2)) in outcome.actions


def test_votes_of_a_refused_step_complete_no_window_and_leave_no_record() -> None:
    state = voting(snapshots=SnapshotRules(num_instalments=1))
    outcome = machine.step(state, VotesGathered((told(0, 1), told(0, 1, ok=False))))

    assert not [a for a in outcome.actions if isinstance(a, (KeepRecord, KeepFrom))]
    assert outcome.state.window == Window(first=0, length=1)


def stores(*records: int, first: Sequence[int] = (1, 1)) -> tuple[StoreReport, ...]:
    """That of another pod: from states at ``first`` it makes both positions anew."""
    pod = Pod("z", lineage=0, num_units=1, records=set(records))
    for position in range(2):
        for kind, version in ((STATE, first[position]), *((GRADIENT, step) for step in records)):
            pod.segments.add(replace(key_of(position, 0, kind, version), lineage=0))
    return (pod.report(),)


def kept_by(outcome: Any) -> list[int]:
    return [a.record.commit.step for a in outcome.actions if isinstance(a, KeepRecord)]


def test_a_rank_of_a_lost_stage_makes_its_state_anew_and_has_the_history_of_the_record() -> None:
    lost = tuple(report(i, valid=False, settled=-1) for i in range(2))
    reports = ReportsGathered(lost, stores(0, 1, 2))
    outcome = machine.step(machines.adopting(snapshots=RULES, num_steps=9), reports)

    load = outcome.actions[-1]
    assert isinstance(load, LoadState)
    assert (load.action, load.version) == (StateAction.REPLAY, 3)
    assert load.replay is not None
    assert (load.replay.position, load.replay.first_step) == (0, 1)
    kept = kept_by(outcome)
    assert kept == [0, 1, 2], "its own store may be the only one that is left at the next loss"

    after = machine.step(outcome.state, StateLoaded("made anew"))
    assert (after.state.version, after.state.digest) == (3, "made anew")
    assert after.state.commit == record_of(2).commit
    assert after.state.commit_chain == record_of(2).chain
    assert after.state.window == Window(first=3, length=2)


def test_its_store_keeps_the_commits_that_another_position_starts_from_as_well() -> None:
    lost = tuple(report(i, valid=False, settled=-1) for i in range(2))
    reports = ReportsGathered(lost, stores(0, 1, 2, 3, first=(3, 1)))
    outcome = machine.step(machines.adopting(snapshots=RULES, num_steps=9), reports)

    load = outcome.actions[-1]
    assert isinstance(load, LoadState)
    assert load.replay is not None
    assert (load.replay.first_step, load.version) == (3, 4)
    assert kept_by(outcome) == [0, 1, 2, 3]


def test_what_its_store_has_is_not_kept_again_and_of_nobody_who_loads() -> None:
    lost = tuple(report(i, valid=False, settled=-1) for i in range(2))
    own = Pod("a", lineage=0, num_units=1, records={1}).report()
    reports = ReportsGathered(lost, (own, *stores(0, 1, 2)))
    outcome = machine.step(machines.adopting(snapshots=RULES, num_steps=9), reports)
    assert kept_by(outcome) == [0, 2]

    gone = Pod("z", lineage=0, num_units=1, records={1}).report()
    outcome = machine.step(machines.adopting(snapshots=RULES), ReportsGathered(lost, (gone,)))
    assert kept_by(outcome) == []


def test_a_rank_that_keeps_its_state_has_its_store_keep_the_commits_that_it_lacks() -> None:
    state = replace(computing(snapshots=RULES, num_steps=9), version=3)
    later = machine.saw_plan(state, make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2))
    adopting = follow(later, TodoDone(())).state
    stayed = tuple(report(i, 3, settled=1, lineage=0) for i in range(2))

    outcome = machine.step(adopting, ReportsGathered(stayed, stores(1, 2)))
    assert outcome.state.version == 3
    assert kept_by(outcome) == [1, 2]
    assert kept_by(machine.step(adopting, ReportsGathered(stayed))) == []


def test_a_replay_that_fails_parks_with_what_was_wrong_and_leaves_no_valid_state() -> None:
    lost = tuple(report(i, valid=False, settled=-1) for i in range(2))
    reports = ReportsGathered(lost, stores(0, 1, 2))
    outcome = follow(machines.adopting(snapshots=RULES), reports, LoadFailed("damaged"))

    assert outcome.state.phase is Phase.PARKED
    assert not outcome.state.valid
    assert machines.parked_for(
        follow(machines.adopting(snapshots=RULES), reports).state, LoadFailed("damaged")
    ) == (Cause.LOAD, (), False)
    assert [a.fact.evidence for a in outcome.actions if hasattr(a, "fact")] == ["damaged"]


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        ("gradient", (("gradient",), ("digest",), "q1-n")),
        ("", (("gradient",), ("digest",), "q1-n")),
        ("another", ((), (), "q1-n")),
    ],
)
def test_a_rank_that_rolls_forward_keeps_the_commit_with_what_reports_tell(
    gradient: str, expected: object
) -> None:
    state = replace(computing(snapshots=RULES), mark="q1-n", digest="digest")
    commit = machines.EVENTS[Applied].commit  # type: ignore[union-attr]
    later = machine.saw_plan(state, make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2))
    adopting = follow(later, TodoDone(())).state
    ahead = report(
        1,
        1,
        settled=1,
        certified_in="q1-n",
        commit=commit,
        last_gradient=gradient,
        last_masters="digest",
    )
    mine = report(0, 0, settled=1, mark="q1-n", state="digest", mark_gradient="gradient")

    outcome = machine.step(adopting, ReportsGathered((mine, ahead)))
    record, apply = outcome.actions[-2:]
    assert isinstance(record, KeepRecord)
    kept = record.record
    assert (kept.gradients, kept.states, kept.certified_in) == expected
    assert isinstance(apply, Apply)


@pytest.mark.parametrize("rules", [RULES, None])
def test_a_report_has_the_digests_of_the_last_commit_only_in_a_job_with_snapshots(
    rules: SnapshotRules | None,
) -> None:
    state = replace(voting(snapshots=rules, num_steps=9), digest="before")
    outcome = machine.step(state, VotesGathered((told(0, 1), told(0, 1))))
    apply = outcome.actions[-1]
    assert isinstance(apply, Apply)

    after = machine.step(outcome.state, Applied("after", apply.commit, "gradient")).state

    digests = (report_of(after).last_gradient, report_of(after).last_masters)
    assert digests == (("gradient", "before") if rules else ("", ""))


def walk(**fields: object) -> list[str]:
    """Every action of two steps, and what the rank reports after them, as text."""
    state: RankState = voting(**fields)
    lines = []
    for version in range(2):
        outcome = applied(state, vote(version), vote(version))
        lines += [repr(action) for action in outcome.actions]
        held = (Partial(lane=0, first=0, last=0),)
        state = follow(outcome.state, TodoDone(held), Reduced()).state
    return [*lines, repr(machine.step(replace(state), QuorumLost("gone")).actions)]


def test_a_job_without_snapshots_has_not_one_action_more() -> None:
    lines = walk(num_steps=9)

    assert lines
    assert not any(kind.__name__ in line for kind in KINDS for line in lines)
    assert any("Snapshot(" in line for line in walk(num_steps=9, snapshots=RULES))


# The session --------------------------------------------------------------------------


class Keeper:
    """A keeper that notes what it is asked for."""

    def __init__(self, session: Played, *, logged: bool = True) -> None:
        self._done, self._logged = session.done, logged
        self.held: StoreReport | None = None
        self.others: tuple[StoreReport, ...] = ()
        self.outcome: StateLoaded | LoadFailed = StateLoaded("replayed")
        self.breaks = ""

    async def report(self, lineage: int, *, whole: bool) -> StoreReport:
        self._done.append(f"report of lineage {lineage}, whole: {whole}")
        assert self.held is not None
        return self.held

    async def ask_others(
        self, wait: Any, lineage: int, others: Sequence[OtherStore]
    ) -> tuple[StoreReport, ...]:
        self._done.append(f"ask {[other.pod for other in others]}")
        return self.others

    def snapshot(self, plan: Plan, index: int, lineage: int, action: Snapshot) -> None:
        self._done.append(f"snapshot of {action.version}")

    def begin_wait(self) -> Ends:
        return sessions.HealClient()

    async def log(
        self, wait: Any, plan: Plan, index: int, lineage: int, step: int, types: Sequence[int]
    ) -> bool:
        self._done.append(f"log of {step}")
        return self._logged

    def status(self, version: int, *, logged: bool) -> SnapshotStatus:
        return SnapshotStatus(logged=logged, copied=version + 1)

    def record(self, record: CommitRecord) -> None:
        self._done.append(f"record of {record.commit.step}")

    def keep_from(self, lineage: int, version: int) -> None:
        self._done.append(f"keep from {version}")

    def go_back(self, lineage: int, version: int, *, drops_later: bool) -> None:
        self._done.append(f"{'go back' if drops_later else 'keep what is there'} to {version}")

    async def replay(
        self, wait: Any, plan: Plan, index: int, replay: Replay | BoundaryReplay, chain: Any
    ) -> StateLoaded | LoadFailed:
        if self.breaks:
            raise GroupEnded(self.breaks)
        self._done.append(f"replay to {replay.version} from {replay.first_step}")
        return self.outcome


def keeping(*others: OtherStore, **fields: Any) -> tuple[Played, Keeper]:
    session = Played(replace(make_plan({0: ["a.1"]}), other_stores=others))
    session.state = replace(session.state, snapshots=SnapshotRules(), **fields)
    keeper = Keeper(session)
    keeper.held = StoreReport(
        pod=make_plan({0: ["a.1"]}).members[0].slot.pod, address="", lineage=0
    )
    session.keeper = keeper
    return session, keeper


def test_a_gradient_is_at_its_holders_before_the_vote_and_the_commit_before_it_is_applied() -> None:
    session, _ = keeping()

    done = [d for d in run(session) if not d.startswith(("tell", "serve", "entry"))]

    assert done == [
        *(
            "SETTLE",
            "post settle",
            "report of lineage 0, whole: True",
            "post stores",
            "go back to 0",
            "load 0",
        ),
        *("SNAPSHOT", "snapshot of 0", "compute [0]", "REDUCE", "reduce over [0]"),
        *("VOTE", "LOG", "log of 0", "LOGGED", "post vote/0/0", "keep from 0", "record of 0"),
        *("APPLY", "apply 0", "SNAPSHOT", "snapshot of 1", "compute [0]", "REDUCE"),
        *("reduce over [0]", "VOTE", "LOG", "log of 1", "LOGGED", "post vote/1/0", "keep from 1"),
        *("record of 1", "APPLY", "apply 1"),
    ]


@pytest.mark.parametrize("outcome", [StateLoaded("replayed"), LoadFailed("damaged")])
def test_a_lost_state_is_replayed_from_what_the_stores_hold(
    outcome: StateLoaded | LoadFailed,
) -> None:
    session, keeper = keeping()
    pod = Pod("a", lineage=0, num_units=1, records={0})
    pod.segments = {replace(key_of(0, 0, kind, 0), lineage=0) for kind in (STATE, GRADIENT)}
    keeper.held, keeper.outcome = pod.report(), outcome

    done = run(session)

    at = done.index("REPLAY")
    assert done[at + 1] == "replay to 1 from 0"
    if isinstance(outcome, StateLoaded):
        assert (session.state.version, session.state.settled) == (2, 1)
    else:
        assert session.state.phase is Phase.PARKED


def test_a_replay_that_another_rank_of_the_cell_ends_parks_as_a_broken_chain_does() -> None:
    session, keeper = keeping()
    pod = Pod("a", lineage=0, num_units=1, records={0})
    pod.segments = {replace(key_of(0, 0, kind, 0), lineage=0) for kind in (STATE, GRADIENT)}
    keeper.held, keeper.breaks = pod.report(), "its peer is gone"

    run(session)

    assert (session.state.phase, session.state.valid) == (Phase.PARKED, False)
    (parked,) = [fact for fact in session.facts if isinstance(fact, Parked)]
    assert (parked.cause, parked.evidence) == (
        Cause.CHAIN,
        "the cell broke in a replay: its peer is gone",
    )


def test_what_a_pod_without_a_member_keeps_is_asked_for_before_the_exchange() -> None:
    session, keeper = keeping(OtherStore(pod=PodUid("s"), address="s:1"))
    pod = Pod("s", lineage=0, num_units=1, records={0})
    pod.segments = {replace(key_of(0, 0, kind, 0), lineage=0) for kind in (STATE, GRADIENT)}
    keeper.others = (pod.report(),)

    done = run(session)

    at = done.index("ask ['s']")
    assert done[at + 1] == "post stores"
    assert "replay to 1 from 0" in done


def test_a_session_without_a_keeper_asks_no_store_and_logs_nothing() -> None:
    done = run(Played(make_plan({0: ["a.1"]})))

    assert not {"LOG", "SNAPSHOT", "REPLAY", "post stores"} & set(done)


@pytest.mark.parametrize("is_unjudged", [False, True])
def test_a_mark_is_reported_with_the_digest_that_was_voted_whatever_else_is_dropped(
    is_unjudged: bool,
) -> None:
    session, _ = keeping()
    session.breaks = "vote/1/0"
    run(session)
    assert session.state.mark == "q1-n"
    if is_unjudged:  # a cell that computed with it is gone
        gone = next(iter(make_plan({0: ["gone.1"]}).members))
        cells = frozenset({(gone.slot, gone.incarnation)})
        session.state = replace(session.state, held_with=cells)
    session.connections.see(make_plan({0: ["a.1"]}, quorum=2, since={"a.1": 1}))

    (report,) = sessions.run_to_report(session)

    assert (report.version, report.mark, report.mark_gradient) == (1, "q1-n", "gradient 1")
    assert (report.last_gradient, report.last_masters) == ("gradient 0", "state 0")
