"""Carries out what a rank's machine decides, action by action, and tells its supervisor of it.

A shell subclasses :class:`RankSession`. It owns the sockets, the arithmetic, the disk and the
clocks. The procedures await nothing but what the shell defines. In a trainer that blocks the main
thread, so a procedure never suspends (:func:`run_blocking`). In the simulation it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from mainstay_core.base.values import replace
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank import events, machine
from mainstay_core.rank.connections import GroupEnded, QuorumConnections
from mainstay_core.rank.early import early_reduction
from mainstay_core.rank.forks import histories
from mainstay_core.rank.forks.makers import Making, copy_orders
from mainstay_core.rank.guarding import guard, serve_guards, tell_own
from mainstay_core.rank.keeping import Keeper, Writer
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import (
    Replay,
    bytes_to_tell,
    needs_stores,
    others_to_ask,
    speaks_for_store,
)
from mainstay_core.rank.reports import (
    AppliedStep,
    EntryLog,
    Status,
    entry_of,
    last_status,
    replayed_of,
    vote_of,
)
from mainstay_core.rank.serving import HealFailed, Sources, Wanted, copy_from, sources_of
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.shell import RankShell
from mainstay_core.rank.state import fact_of
from mainstay_core.rank.steps.doubts import unheard
from mainstay_core.rank.steps.step_plan import types_of
from mainstay_core.rank.steps.witness import vote_account
from mainstay_core.segments.report_sizes import fit_reports
from mainstay_core.wire.facts import Checkpoint, Finished, RankFact, Settled
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import History, since_of
from mainstay_core.wire.segments import StoreReport, ToldStores
from mainstay_core.wire.votes import Commit, LastStatus, SettleReport, SnapshotStatus, Vote

T = TypeVar("T")
ConnectionsT = TypeVar("ConnectionsT", bound=QuorumConnections[Any, Any, Any])


class RankSession(RankShell, Generic[ConnectionsT]):
    """One life of a trainer without its sockets, its arithmetic and its disk.

    Args:
        state: of the rank, before its first plan.
        connections: what the trainer is connected to for its plan.
        writer: of its checkpoints.
        keeper: of its segments; None in a job without snapshots.
    """

    def __init__(
        self,
        state: machine.RankState,
        connections: ConnectionsT,
        writer: Writer,
        keeper: Keeper | None = None,
    ) -> None:
        self.state, self.connections, self.writer = state, connections, writer
        self.keeper = keeper
        self.status = Status()
        self._reports: tuple[SettleReport, ...] = ()
        self.holders: Sources = ()
        """Members that have the state which is copied."""
        self._gradient = ""
        """Digest of the reduced gradient, once it is known."""
        self._log = EntryLog()

    # The loop ------------------------------------------------------------------------

    async def follow_plans(self) -> None:
        """Follow the plans until the shell ends it."""
        outcome = await self.proceed(None)
        while True:
            if isinstance(outcome, events.Compute):
                outcome = await self.compute(outcome)
            outcome = await self.proceed(outcome)

    async def proceed(self, event: events.Event | None) -> events.Event | events.Compute:
        """Let the machine take an event, and carry out what it asks for.

        Args:
            event: the outcome of the action before; None at the start.

        Returns:
            The outcome of what was asked for; or Compute, which is the caller's to carry out.
        """
        actions: tuple[events.Action, ...] = (events.WaitForPlan(),)
        if event is not None:
            if self.connections.newest is not None:
                self.state = machine.saw_plan(self.state, self.connections.newest)
            before = self.state
            transition = machine.step(before, event)
            self.state, actions = transition.state, transition.actions
            if self.status.moved(self.state):
                self.send_status()
            self.moved(before, event, transition.reason)
        outcome = None
        for action in actions:
            if isinstance(action, events.Compute):
                return action
            try:
                outcome = await self.perform(action)
            except QuorumAborted as end:
                outcome = events.QuorumLost.of(end)
        assert outcome is not None, f"no event after {actions}"
        return outcome

    async def perform(self, action: events.Action) -> events.Event | None:
        """Carry out an action; return its outcome, None for one that has none.

        Raises:
            QuorumAborted: the quorum ended meanwhile.
        """
        match action:
            case events.WaitForPlan():
                return await self._wait_for_plan()
            case events.Settle():
                return await self._settle(action)
            case events.LoadState():
                return await self._load_state(action)
            case events.Reduce():
                return await self._reduce(action)
            case events.CastVote():
                return await self._vote(action)
            case events.Apply():
                return await self._apply(action.commit)
            case events.ShareSaves():
                return await self._share_saves(action)
            case events.WriteCheckpoint():
                await self._begin(Op.CHECKPOINT)
                self.write_part(action)
            case events.Snapshot():
                await self._begin(Op.SNAPSHOT)
                state = self.state
                self._keeper.snapshot(self.plan, state.index, state.lineage, action)
            case _:
                self._perform_at_once(action)
        return None

    def _perform_at_once(self, action: events.Action) -> None:
        match action:
            case events.SendFact():
                self._send_fact(action.fact)
            case events.DropHeld():
                self.drop_held()
                if self.state.mark is None:
                    self._gradient = ""
            case events.DropPartials():
                self.drop_partials(action.partials)
            case events.TellDeviation():
                self.tell_deviation(action)
            case events.TellVoidGuard():
                self.tell_void_guard(action)
            case events.Leave():
                self.connections.leave()
            case events.RenameCheckpoint():
                self.rename(action)
            case events.CorrectEntry():
                for entry in self._log.corrected(action.step):
                    self.send_entry(entry, post=True)
            case events.VoidSave():
                self.writer.void(action.version)
            case events.KeepRecord():
                self._keeper.record(action.record)
            case events.KeepFrom():
                self._keeper.keep_from(action.lineage, action.version)
            case events.GoBack():
                self._keeper.go_back(action.lineage, action.version, drops_later=action.drops_later)
            case events.Finish():
                self._finish()
            case _:
                raise AssertionError(f"unknown action {action}")

    # Actions that wait -----------------------------------------------------------------

    async def _wait_for_plan(self) -> events.Event:
        known = self.state.newest.quorum.id if self.state.newest else -1
        self.status.waits()
        await self.wait_newer(known)
        return events.PlanSeen()

    async def _settle(self, action: events.Settle) -> events.Event:
        self.serve(None)
        # It may wait for this rank's device alone, and nobody else would end that.
        self.connections.adopt(action.plan, action.report.index)
        self.status.waits()
        await self.reach(Action(Op.SETTLE, self.state.member_stage))
        held = self.held(judged=True) if action.report.held else ()
        own = unheard(self.state.watched, self.state.slot, self.account)
        if action.plan.voided:
            self.writer.go_back(action.plan.voided, puts_aside=action.report.index == 0)
        report = replace(
            action.report,
            held=held,
            bad=tuple(sorted({*action.report.bad, *(self.bad_types() if held else ())})),
            pipeline=self.connections.pipeline_name,
            stage_group=self.connections.stage_group_name,
            durable=self.writer.newest_complete(),
            mark_gradient=self._gradient if self.keeper and action.report.mark else "",
            doubted=(*action.report.doubted, *own),
        )
        await self.post("settle", report)
        # A joiner allocates its stage while the others finish their step, not while they wait.
        self.prepare()
        self._reports = await self.gathered("settle", SettleReport)
        if self.keeper is None or not needs_stores(action.plan, self._reports):
            return events.ReportsGathered(self._reports)
        stores = await self._ask_stores(self.keeper, action)
        return events.ReportsGathered(self._reports, stores)

    async def _ask_stores(self, keeper: Keeper, action: events.Settle) -> tuple[StoreReport, ...]:
        """Exchange what the stores of all pods hold: some position has nobody who stayed."""
        plan, index = action.plan, action.report.index
        held = await keeper.report(plan.lineage, whole=speaks_for_store(plan, index))
        others = others_to_ask(plan, index)
        found: tuple[StoreReport, ...] = ()
        if others:
            wait = self.connections.healing(keeper.begin_wait())
            found = await keeper.ask_others(wait, plan.lineage, others)
        reports = fit_reports((held, *found), bytes_to_tell(plan, index))
        await self.post("stores", ToldStores(reports=reports))
        told = await self.gathered("stores", ToldStores)
        return tuple(report for one in told for report in one.reports)

    async def _load_state(self, action: events.LoadState) -> events.Event:
        self.prepare()
        if action.action is StateAction.LOAD:
            return await self.load(action.version)
        if action.replay is not None:
            return await self._replay(action.replay)
        await self._begin(Op.HEAL)
        client = self.connections.healing(self.make_heal_client())
        if action.making is not None:
            return await self._make(client, action.making, action.version)
        wanted = Wanted(str(self.plan.quorum), self.state.member_position, action.version)
        known = sources_of(self.plan, self._reports, action.sources)
        found = await self._copied(self.copy, client, known, wanted, action.expected)
        return events.StateLoaded(found) if isinstance(found, str) else found

    async def _make(self, client: Any, making: Making, version: int) -> events.Event:
        """Make the state anew from what other stages hold at the version, or load an older one."""
        if making.stale is not None:
            return await self._load_stale(making.stale, making.stale_history)
        try:
            orders = copy_orders(self.plan, self._reports, making.beside, version)
            await self.begin_beside(client, making.made, orders, keeps_own=making.keeps_own)
            for order in orders:
                found = await self._copied(self.copy_beside, client, *order)
                if not isinstance(found, str):
                    return found
            made = await self.make_anew(making.made, keeps_own=making.keeps_own)
        finally:
            # Each is as large as a state. The next making may be of others, or of more of them.
            self.drop_beside()
        return events.StateLoaded(made)

    async def _load_stale(self, version: int, history: History) -> events.Event:
        """Load an older version of this position alone."""
        loaded = await self.load(version)
        if isinstance(loaded, events.LoadFailed):
            return loaded
        if loaded.history == history:
            return events.StateLoaded(loaded.digest)
        return events.LoadFailed(f"the checkpoint of step {version} is of another course")

    async def _copied(
        self,
        copy: Callable[[Any, Sources, Wanted, str], Coroutine[Any, Any, str]],
        client: Any,
        known: Sources,
        wanted: Wanted,
        expected: str,
    ) -> str | events.Event:
        """Copy what other cells hold; return its digest, or the event if that was in vain."""
        self.holders = known
        try:
            return await copy_from(partial(copy, client), known, wanted, expected, self.warn)
        except HealFailed as failure:
            end = self.connections.gather().ended
            return events.QuorumLost.of(end) if end else events.LoadFailed(str(failure))

    async def _replay(self, replay: Replay | BoundaryReplay) -> events.Event:
        """Make the state anew from segments."""
        await self._begin(Op.REPLAY)
        plan, index, began_s = self.plan, self.state.index, self.now_s()
        chain = None
        try:
            if isinstance(replay, BoundaryReplay) and plan.ranks_per_stage > 1:
                chain, is_new = self.connections.begin_pipeline(self.state.agreed_pipeline)
                if is_new:
                    await self.connect_cell(chain)
            wait = self.connections.healing(self._keeper.begin_wait())
            outcome = await self._keeper.replay(wait, plan, index, replay, chain)
        except GroupEnded as end:
            self.connections.fail_pipeline(str(end))
            return events.ComputeBroken((), f"the cell broke in a replay: {end}")
        await self._begin(Op.REPLAYED)
        if not isinstance(outcome, events.StateLoaded):
            return outcome
        self._log_replayed(outcome.replayed)
        told = replayed_of(
            plan.members[index].rank,
            replay,
            seconds=max(0.0, self.now_s() - began_s),
            num_damaged=outcome.num_damaged,
        )
        return replace(outcome, told=told)

    async def compute(self, action: events.Compute) -> events.Event:
        """Run the types of an action through this rank's chain."""
        self.prepare()
        try:
            groups = early = None
            if action.types:
                begun = self.connections.begin_pipeline(self.state.agreed_pipeline)
                groups = await self._connected(*begun)
                early = early_reduction(self.state, self.connections, self.held())
            await self.compute_types(action.types, groups, early)
        except GroupEnded as end:
            self.connections.fail_pipeline(str(end))
            return events.ComputeBroken(self.held(), f"the chain broke: {end}")
        return events.TodoDone(self.held())

    async def _reduce(self, action: events.Reduce) -> events.Event:
        self.prepare()
        await self._begin(Op.REDUCE)
        self._gradient = ""
        try:
            own = self.connections
            group = await self._connected(*own.begin_stage_group(self.state.agreed_stage_group))
            await self.reduce(group, action.table, own.stage_order())
            return events.Reduced(await guard(self, self.state, self.connections, self._reports))
        except GroupEnded as end:
            return events.QuorumLost(*self.connections.fail_quorum(str(end)))

    async def _connected(self, groups: T, is_new: bool) -> T:
        if groups is not None and is_new:
            await self.connect(groups)
        return groups

    async def _vote(self, action: events.CastVote) -> events.Event:
        await self._begin(Op.VOTE)
        newest = self.connections.newest or self.plan
        assert self.state.step_plan is not None
        table = self.state.step_plan.table[self.state.member_position]
        ballot = self.make_ballot(action.step, table)
        self._gradient = ballot.gradient
        vote = vote_of(self.state, action, newest, ballot, self.writer.status())
        compared = self.state.step_plan.compared
        if compared is not None and self.state.computes(compared):
            account = self.account(compared.type)
            vote = replace(vote, witness=vote_account(compared.type, account))
        vote = tell_own(self, self.state, vote)
        if self.keeper is not None:
            types = types_of(table, self.state.index)
            vote = replace(vote, snapshots=await self._keep_logs(self.keeper, types))
        key = f"vote/{action.step}/{action.attempt}"
        await self.post(key, vote)
        return events.VotesGathered(await self.gathered(key, Vote))

    async def _keep_logs(self, keeper: Keeper, types: Sequence[int]) -> SnapshotStatus:
        """Have the step's logs kept: a step that is committed can always be made again."""
        await self._begin(Op.LOG)
        state = self.state
        wait = self.connections.healing(keeper.begin_wait())
        logged = await keeper.log(wait, self.plan, state.index, state.lineage, state.version, types)
        await self._begin(Op.LOGGED)
        return keeper.status(state.version, logged=logged)

    async def _apply(self, commit: Commit) -> events.Event:
        await self._begin(Op.APPLY)
        if not self._gradient:  # rolled forward: it was reduced in a quorum without our vote
            self._gradient = self.gradient_digest()
        done = await self.apply(commit)
        self._record(commit, done)
        serve_guards(self, self.state, commit.step + 1)
        return events.Applied(done.digest, commit, self._gradient, done.guarded)

    async def _share_saves(self, action: events.ShareSaves) -> events.Event:
        self.status.waits()
        is_last = self.state.compares_last and self.state.version >= self.state.num_steps
        rest = self.rest_digest() if is_last else ""
        status = last_status(await self.wait_written(), action.state, rest)
        key = f"save/{action.round}"
        await self.post(key, status)
        return events.SavesGathered(await self.gathered(key, LastStatus))

    # What is told --------------------------------------------------------------------------

    def tell(self, fact: RankFact) -> None:
        """Tell the api, through the supervisor, what was learnt just now."""
        self.send_fact(replace(fact, observed_at_s=self.now_s()))

    def tell_checkpoint(self, durable: int, problem: str) -> None:
        """Tell that a version is complete, or why it is late or failed (any thread).

        Args:
            durable: newest complete version.
            problem: empty if a version was completed.
        """
        fields = {"complete": not problem, "durable": durable, "evidence": problem}
        self.tell(fact_of(self.state, Checkpoint, **fields))

    def _send_fact(self, fact: RankFact) -> None:
        self.tell(fact)
        if isinstance(fact, Settled):
            state = self.state
            self.serve(Wanted(str(self.plan.quorum), state.member_position, state.version))
            if state.is_lowest or state.is_oldest:  # the lowest may lack entries of steps before
                self._log = self._log.takes_over()

    def _finish(self) -> None:
        final = self.final_digests(self.state.commit.data_total if self.state.commit else "")
        history = self.state.history
        final = replace(
            final, history=histories.digest_of(history), approximate_since=since_of(history)
        )
        self._repeat_entries()
        self.tell(fact_of(self.state, Finished, final=final))

    def _record(self, commit: Commit, done: AppliedStep) -> None:
        """Give the ledger the entry of a step that is applied."""
        entry = entry_of(
            self.state,
            commit,
            gradient=self._gradient,
            masters=done.masters,
            partials=done.partials,
            copy_wait_s=done.copy_wait_s,
            step_s=self.lap_s(),
            now_s=self.now_s(),
            began=self.state.digest,
        )
        self._repeat_entries()
        post = self.state.is_lowest
        self._log = self._log.add(entry, post=post)
        self.send_entry(entry, post=post)

    def _log_replayed(self, steps: Sequence[events.ReplayedStep]) -> None:
        """Keep the entries of replayed steps: if this rank speaks for its position, it tells them
        with the next one.
        """
        for step in steps:
            entry = entry_of(
                self.state,
                step.commit,
                gradient=step.gradient,
                masters=step.masters,
                step_s=0.0,
                now_s=self.now_s(),
            )
            self._log = self._log.add(entry, post=False)

    def _repeat_entries(self) -> None:
        self._log, entries = self._log.again()
        for entry in entries:
            self.send_entry(entry, post=True)

    # Helpers -----------------------------------------------------------------------------------

    async def begin(self, action: Action) -> None:
        """Take note, before every action of a program: progress, and injected faults."""
        self.status.begins(action)
        await self.reach(action)

    async def _begin(self, op: Op) -> None:
        await self.begin(Action(op, self.state.member_stage))

    @property
    def _keeper(self) -> Keeper:
        assert self.keeper is not None
        return self.keeper

    @property
    def plan(self) -> Plan:
        """The adopted plan."""
        assert self.state.plan is not None
        return self.state.plan
