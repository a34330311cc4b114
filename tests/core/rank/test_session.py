"""The order in which a trainer carries out what its machine decides: one rank, all else played."""

# ruff: noqa: ARG002 - the played shell needs little of what it is given

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan, slot_of

from mainstay_core.base.ids import Incarnation
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.planning.partials import grow_all
from mainstay_core.planning.program import Action
from mainstay_core.rank import events
from mainstay_core.rank.connections import GroupEnded, QuorumConnections
from mainstay_core.rank.forks.makers import Beside, Making
from mainstay_core.rank.reports import AppliedStep, Ballot
from mainstay_core.rank.serving import CopyOrder, HealFailed, Source, Wanted
from mainstay_core.rank.session import RankSession
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.shell import run_blocking
from mainstay_core.rank.state import RankState, fact_of
from mainstay_core.wire.facts import RankFact, Settled
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry
from mainstay_core.wire.plan import Chain, Partial, Plan
from mainstay_core.wire.reinitialisation import MadePosition
from mainstay_core.wire.votes import Commit, GuardedDigest, SaveStatus, SettleReport, TypeStat

STEPS = 2


class Over(Exception):  # noqa: N818 - a state, not a failure
    """There is no further plan."""


class Changed(nullcontext[None]):
    def notify_all(self) -> None: ...


class Gather:
    ended: QuorumAborted | None = None

    def leave(self) -> None: ...
    def abort(self, why: str) -> None:
        self.ended = QuorumAborted(why, (0,))


class HealClient:
    def shutdown(self, why: str) -> None: ...


class Connections(QuorumConnections[Any, Any, Any]):
    def _join(self, plan: Plan, index: int) -> Gather:
        return Gather()

    def _group(self, name: str, rank: int, size: int) -> Any:
        raise AssertionError("a rank that is alone needs no group")

    def _chain_groups(self, name: str, plan: Plan, chain: Chain) -> Any:
        raise AssertionError("a chain of one rank needs no group")


class Writer:
    def newest_complete(self) -> int:
        return 0

    def status(self) -> SaveStatus:
        return SaveStatus()

    def void(self, version: int) -> None: ...


class Played(RankSession[Connections]):
    """A trainer alone in its quorum; ``done`` is what it was asked for, in order."""

    def __init__(self, plan: Plan, life: str = "a.1") -> None:
        state = RankState(
            slot=slot_of(life),
            incarnation=Incarnation(life),
            num_steps=STEPS,
            shards_per_lane=1,
            clip_norm=None,
            heal_address="",
        )
        super().__init__(state, Connections(Changed()), Writer())
        self.connections.see(plan)
        self.done: list[str] = []
        self.facts: list[RankFact] = []
        self.entries: list[tuple[int, bool]] = []
        self.copies: dict[str, str] = {}
        self.breaks = ""
        self.cut_off: set[Partial] = set()
        self.wrong: set[int] = set()
        self._partials: tuple[Partial, ...] = ()
        self._time_s = 0.0

    def now_s(self) -> float:
        self._time_s += 1
        return self._time_s

    def lap_s(self) -> float:
        return 0.5

    def send_status(self) -> None: ...

    def send_fact(self, fact: RankFact) -> None:
        self.facts.append(fact)
        self.done.append(f"tell {fact.kind}")

    def send_entry(self, entry: LedgerEntry, *, post: bool) -> None:
        self.entries.append((entry.step, post))
        self.done.append(f"entry {entry.step}")

    def moved(self, before: RankState, event: events.Event, reason: str) -> None: ...

    def warn(self, text: str) -> None:
        self.done.append(text)

    async def wait_newer(self, known: int) -> None:
        if not self.connections.has_newer(known):
            raise Over

    async def post(self, key: str, message: Any) -> None:
        if key == self.breaks:
            self.breaks = ""
            raise QuorumAborted("somebody died", (0,))
        self.done.append(f"post {key}")
        self._posted = message

    async def gathered(self, key: str, kind: Any) -> Any:
        assert isinstance(self._posted, kind)
        return (self._posted,)

    async def connect(self, groups: Any) -> None:
        raise AssertionError("nothing to connect")

    async def connect_cell(self, groups: Any) -> None:
        raise AssertionError("nothing to connect")

    def make_heal_client(self) -> HealClient:
        return HealClient()

    async def begin_beside(
        self, client: Any, made: MadePosition, orders: Sequence[CopyOrder], *, keeps_own: bool
    ) -> None:
        positions = [str(order.wanted.position) for order in orders]
        self.done.append(f"begin with positions {' and '.join(positions)}")

    async def copy_beside(
        self, client: Any, sources: Sequence[Source], wanted: Wanted, expected: str
    ) -> str:
        assert wanted.masters_only
        self.done.append(f"beside, position {wanted.position}")
        return await self.copy(client, sources, wanted, expected)

    async def make_anew(self, made: MadePosition, *, keeps_own: bool) -> str:
        self.done.append(f"made stage {made.stage}")
        return "made"

    def drop_beside(self) -> None:
        self.done.append("drop what is beside")

    async def copy(
        self, client: Any, sources: Sequence[Source], wanted: Wanted, expected: str
    ) -> str:
        asked = ", ".join(source.address for source in sources)
        self.done.append(f"copy of version {wanted.version} from {asked}")
        found = {self.copies[s.address] for s in sources if s.address in self.copies}
        slots = ", ".join(source.slot for source in sources)
        if not found:
            raise HealFailed(f"{slots} is gone")
        if len(found) > 1 or (expected and found != {expected}):
            raise HealFailed(f"the copy from {slots} is another")
        return found.pop()

    async def give_guarded(self, group: Any, peers: Sequence[int]) -> None:
        raise AssertionError("nobody guards")

    async def take_guarded(self, group: Any, end: int, peer: int) -> None:
        raise AssertionError("nobody guards")

    async def copy_guarded(
        self, client: Any, sources: Sequence[Source], wanted: Wanted
    ) -> GuardedDigest:
        raise AssertionError("nobody guards")

    def keep_guarded(self, ends: Collection[int]) -> None:
        assert not ends

    def own_guarded(self) -> GuardedDigest | None:
        raise AssertionError("nobody guards")

    def tell_void_guard(self, action: events.TellVoidGuard) -> None:
        raise AssertionError("nobody guards")

    def serve(self, served: Wanted | None) -> None:
        self.done.append(f"serve {served.version if served else None}")

    async def reach(self, action: Action) -> None:
        self.done.append(action.op.value)

    def prepare(self) -> None: ...

    async def compute_types(self, types: Sequence[int], groups: Any, early: Any) -> None:
        if self.breaks == "chain":
            self.breaks = ""
            raise GroupEnded("a cell is gone")
        self.done.append(f"compute {list(types)}")
        self._partials = tuple(sorted(grow_all(self._partials, types, 1)))

    def held(self, *, judged: bool = False) -> tuple[Partial, ...]:
        if judged:
            self._partials = tuple(p for p in self._partials if p not in self.cut_off)
        return self._partials

    def bad_types(self) -> tuple[int, ...]:
        held = {t for p in self._partials for t in range(p.first, p.last + 1)}
        return tuple(sorted(held & self.wrong))

    def account(self, shard_type: int) -> None:
        return None

    def tell_deviation(self, action: events.TellDeviation) -> None:
        self.done.append("tell a deviation")

    def drop_partials(self, partials: Sequence[Partial]) -> None:
        self._partials = tuple(p for p in self._partials if p not in partials)

    def drop_held(self) -> None:
        self._partials = ()

    async def reduce(self, group: Any, table: Sequence[Any], members: Sequence[int]) -> None:
        if self.breaks == "reduction":
            self.breaks = ""
            raise GroupEnded("a member is gone")
        self.done.append(f"reduce over {list(members)}")

    def gradient_digest(self) -> str:
        return f"gradient {self.state.version}"

    def make_ballot(self, step: int, table: Sequence[Any]) -> Ballot:
        stat = TypeStat(type=0, loss_sum=1.0, tokens=4, data="00" * 16)
        return Ballot(norms_sq=(1.0,), gradient=self.gradient_digest(), copies="", stats=(stat,))

    async def apply(self, commit: Commit) -> AppliedStep:
        self.done.append(f"apply {commit.step}")
        return AppliedStep(digest=f"state {commit.step + 1}", masters="counted")

    def final_digests(self, data: str) -> FinalDigests:
        version = self.state.version
        return FinalDigests(
            stage=0, version=version, params="", masters="", optimizer="", data=data
        )

    def rest_digest(self) -> str:
        return "rest"

    async def load(self, version: int) -> events.StateLoaded | events.LoadFailed:
        self.done.append(f"load {version}")
        return events.StateLoaded(f"state {version}", None, "")

    def write_part(self, action: events.WriteCheckpoint) -> None: ...
    def rename(self, action: events.RenameCheckpoint) -> None: ...

    async def wait_written(self) -> SaveStatus:
        return SaveStatus()


def run(session: Played) -> list[str]:
    with pytest.raises(Over):
        run_blocking(session.follow_plans())
    return session.done


def step(number: int) -> list[str]:
    return [
        "compute [0]",
        "REDUCE",
        "reduce over [0]",
        "VOTE",
        f"post vote/{number}/0",
        "APPLY",
        f"apply {number}",
        f"entry {number}",
    ]


def test_a_rank_that_enters_a_quorum_waits_for_its_own_device_and_for_nobody_else() -> None:
    """What hangs there is bounded as a step is."""
    session = Played(make_plan({0: ["a.1"]}))
    adopt, waiting = session.connections.adopt, []

    def adopt_seen(plan: Plan, index: int) -> Any:
        waiting.append(session.status.waiting)
        return adopt(plan, index)

    session.connections.adopt = adopt_seen  # type: ignore[method-assign]
    run(session)
    assert waiting == [False]


def test_a_rank_settles_loads_serves_and_trains_to_the_end() -> None:
    session = Played(make_plan({0: ["a.1"]}))

    done = run(session)

    expected = ["serve None", "SETTLE", "post settle", "load 0", "tell settled", "serve 0"]
    assert [d for d in done if d != "tell adopted"] == [
        *expected,
        *step(0),
        *step(1),
        "tell finished",
    ]
    assert session.entries == [(0, True), (1, True)]
    times = [fact.observed_at_s for fact in session.facts]
    assert times == sorted(times)
    assert times[0] > 0


def test_an_aborted_exchange_parks_the_rank() -> None:
    session = Played(make_plan({0: ["a.1"]}))
    session.breaks = "vote/0/0"

    done = run(session)

    assert done[-1] == "tell parked"
    assert session.facts[-1].evidence == "somebody died"


def test_a_broken_reduction_ends_the_quorum_for_all_and_parks_the_rank() -> None:
    session = Played(make_plan({0: ["a.1"]}))
    session.breaks = "reduction"

    assert run(session)[-1] == "tell parked"
    assert session.connections.gather().ended is not None
    assert session.facts[-1].evidence == "a member is gone"


def test_a_broken_chain_keeps_what_is_complete() -> None:
    session = Played(make_plan({0: ["a.1"]}))
    session.breaks = "chain"

    assert run(session)[-1] == "tell parked"
    assert session.connections.gather().ended is None, "the quorum is the coordinator's to end"


def test_what_checks_found_wrong_since_the_vote_is_reported_beside_what_is_held() -> None:
    plan = make_plan({0: ["a.1"]})
    session = Played(plan)
    session.breaks = "reduction"
    run(session)
    held, session.wrong = session.held(), {0, 5}

    session.connections.see(make_plan({0: ["a.1"]}, quorum=plan.quorum.id + 1))
    (report,) = run_to_report(session)

    assert report.held == held
    assert report.bad == (0,), "a type that is not held is lacked anyhow"


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_what_a_device_was_cut_off_in_is_not_reported_as_held(is_cut_off: bool) -> None:
    plan = make_plan({0: ["a.1"]})
    session = Played(plan)
    session.breaks = "reduction"
    run(session)
    held = session.held()
    assert len(held) == 1
    assert session.state.held == held, "as far as the host knew"
    session.cut_off = {*held} if is_cut_off else set()

    session.connections.see(make_plan({0: ["a.1"]}, quorum=plan.quorum.id + 1))
    (report,) = run_to_report(session)

    assert report.held == (() if is_cut_off else held)
    assert session.entries == [(0, True), (1, True)], "the step is computed to its end"
    assert session.done.count("compute [0]") == (3 if is_cut_off else 2)


def run_to_report(session: Played) -> tuple[SettleReport, ...]:
    """Follow the next plans to their end; return the reports that were made."""
    reports: list[SettleReport] = []
    gathered = session.gathered

    async def noting(key: str, kind: Any) -> Any:
        messages = await gathered(key, kind)
        reports.extend(m for m in messages if isinstance(m, SettleReport))
        return messages

    session.gathered = noting  # type: ignore[method-assign]
    with pytest.raises(Over):
        run_blocking(session.follow_plans())
    return tuple(reports)


def make_joiner() -> Played:
    """A rank whose plan has two other members."""
    session = Played(make_plan({0: ["a.1"]}))
    run(session)
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]})
    session.state = replace(session.state, plan=plan)
    session.done.clear()
    return session


def test_a_joiner_copies_from_all_sources_and_then_finds_out_which_one_is_wrong() -> None:
    session = make_joiner()
    session.copies = {"first": "another", "second": "the state"}
    reports = (
        SettleReport(index=0, valid=True, heal_address="first"),
        SettleReport(index=1, valid=True, heal_address="second"),
    )
    session._reports = reports
    heal = events.LoadState(StateAction.HEAL, version=2, sources=(0, 1), expected="the state")

    outcome = run_blocking(session.perform(heal))

    assert outcome == events.StateLoaded("the state")
    assert session.done == [
        "HEAL",
        "copy of version 2 from first, second",
        "healing failed: the copy from a/0, b/0 is another",
        "copy of version 2 from first",
        "healing failed: the copy from a/0 is another",
        "copy of version 2 from second",
    ]
    session.copies = {}
    assert run_blocking(session.perform(heal)) == events.LoadFailed("b/0 is gone")


@pytest.mark.parametrize(
    ("copies", "outcome"),
    [
        ({"0": "good", "1": "good", "2": "bad"}, events.StateLoaded("good")),
        ({"0": "good", "1": "bad", "2": "good"}, events.StateLoaded("good")),
        ({"0": "bad", "1": "good", "2": "good"}, events.LoadFailed("the copy from c/0 is another")),
        ({"1": "bad"}, events.LoadFailed("c/0 is gone")),
        (
            {"2": "bad"},
            events.LoadFailed("no other source is left to compare the copy with"),
        ),
    ],
)
def test_a_joiner_whose_digest_no_report_names_takes_what_two_sources_have(
    copies: dict[str, str], outcome: events.Event
) -> None:
    session = make_joiner()
    session.copies = copies
    session._reports = tuple(
        SettleReport(index=i, valid=True, heal_address=str(i)) for i in range(3)
    )
    heal = events.LoadState(StateAction.HEAL, version=2, sources=(0, 1, 2), expected="")

    assert run_blocking(session.perform(heal)) == outcome


def test_a_joiner_takes_the_only_copy_there_is() -> None:
    session = make_joiner()
    session.copies = {"0": "the state"}
    session._reports = (SettleReport(index=0, valid=True, heal_address="0"),)
    heal = events.LoadState(StateAction.HEAL, version=2, sources=(0,), expected="")

    assert run_blocking(session.perform(heal)) == events.StateLoaded("the state")


def test_what_was_copied_to_make_a_stage_anew_is_dropped_also_if_that_fails() -> None:
    session = make_joiner()
    session._reports = tuple(
        SettleReport(index=i, valid=True, heal_address=str(i)) for i in range(3)
    )
    making = Making(
        made=MadePosition(stage=1, blocks=()),
        beside=tuple(Beside(position=i, members=(i,), expected="") for i in (0, 2)),
    )
    make = events.LoadState(StateAction.MAKE, version=2, sources=(), expected="", making=making)
    session.copies = {"0": "before", "2": "after"}

    assert run_blocking(session.perform(make)) == events.StateLoaded("made")
    assert session.done[-2:] == ["made stage 1", "drop what is beside"]

    del session.copies["2"]
    assert run_blocking(session.perform(make)) == events.LoadFailed("c/0 is gone")
    assert session.done.count("made stage 1") == 1
    assert session.done[-1] == "drop what is beside"


def test_a_rank_that_takes_over_the_ledger_tells_the_last_entries_again() -> None:
    session = Played(make_plan({0: ["a.1"]}))
    run(session)
    session._log = session._log.add(session._log.entries[-1], post=False).takes_over()
    session.entries.clear()

    session._finish()

    assert session.entries == [(0, True), (1, True), (1, True)]


@pytest.mark.parametrize(
    ("since", "repeats"),
    [
        ({"b.1": 3, "a.1": 1}, True),  # this rank was there when the first member was not
        ({"b.1": 1, "a.1": 1}, False),
        ({"b.1": 1, "a.1": 3}, False),
    ],
)
def test_the_oldest_member_tells_the_last_entries_again_as_the_first_may_have_joined_just_now(
    since: dict[str, int], repeats: bool
) -> None:
    session = Played(make_plan({0: ["a.1"]}))
    run(session)
    session._log = session._log.add(session._log.entries[-1], post=False)
    plan = make_plan({0: ["b.1"], 1: ["a.1"]}, quorum=3, since=since)
    session.state = replace(session.state, plan=plan, index=1)

    session._send_fact(fact_of(session.state, Settled))

    assert session._log.repeats is repeats


def test_a_blocking_shell_never_suspends() -> None:
    with pytest.raises(AssertionError, match="suspended"):
        run_blocking(asyncio.sleep(0))
