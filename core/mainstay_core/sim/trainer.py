"""A simulated trainer: the shell of ``mainstay_train.session`` around the rank's state machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mainstay_core.base.ids import Incarnation, PodUid, QuorumId, Slot
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank import events, machine
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.reports import Ballot, EntryLog, Status, entry_of, last_status, vote_of
from mainstay_core.rank.serving import Wanted
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.state import fact_of
from mainstay_core.sim import terms
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.connections import Connections
from mainstay_core.sim.disk import DamagedError
from mainstay_core.sim.engine import Process, Steps
from mainstay_core.sim.heal import HealClient, HealFailed, HealServer
from mainstay_core.sim.network import End
from mainstay_core.sim.saving import Saving
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.wire.facts import Checkpoint, Finished, RankFact, Settled
from mainstay_core.wire.ledger import FinalDigests
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import Commit, SettleReport


class Trainer(Process):
    """One life of a trainer.

    Args:
        world: everything around it.
        pod: where it runs.
        slot: which of the pod's.
        incarnation: its name.
    """

    def __init__(
        self, world: Surroundings, pod: PodUid, slot: int, incarnation: Incarnation
    ) -> None:
        super().__init__(world.engine, f"{incarnation}", pod)
        self.world, self.slot, self.incarnation = world, Slot(pod=pod, index=slot), incarnation
        self.exit_code: int | None = None
        self._uplink: End | None = None
        config = world.config
        self.connections = Connections(self, world.network, incarnation, config.connect_s)
        self.connections.on_plan = lambda plan: self._send(("plan", plan))
        heal_address = f"heal@{incarnation}"
        self.heal_server = HealServer(
            self,
            world.network,
            heal_address,
            self.connections.changed,
            lambda: self.connections.adopted,
            lambda: self.compute.params if self.compute else "",
            world.pace.copy_s,
        )
        self.compute: Compute | None = None
        self.slow = 1.0
        self.tampered = False
        """Whether its state was corrupted on purpose: a vote must find it."""
        self.was_tampered = False
        self.state = machine.RankState(
            slot=self.slot,
            incarnation=incarnation,
            num_steps=config.shape.steps,
            shards_per_lane=config.shape.shards_per_lane,
            clip_norm=1.0,
            heal_address=heal_address,
            checkpoint_every_steps=config.shape.checkpoint_every_steps,
        )
        self.waits_in = "starting"
        self._status = Status()
        self._reports: tuple[SettleReport, ...] = ()
        self._saving = Saving(world, self, self.connections.changed, self._tell_complete)
        self._log = EntryLog()
        self._gradient = ""

    # The connection to the supervisor --------------------------------------------------

    def connected(self, end: End) -> None:
        """The socket stands: say hello once everything is loaded."""
        self._uplink = end
        end.on_message, end.on_end = self._on_frame, lambda _: self.kill()
        self.spawn(self._run())

    def _on_frame(self, frame: tuple[str, Any]) -> None:
        if frame[0] == "plan":
            self.connections.see(frame[1])
        else:
            self.exit_code = 0
            self.kill()

    def _send(self, frame: tuple[Any, ...]) -> None:
        assert self._uplink is not None
        self._uplink.send(frame)

    def _send_status(self) -> None:
        self._send(("status", self._status.of_slot(self.slot.index)))

    def _send_statuses(self) -> None:
        self._send_status()
        self.after(self.world.config.heartbeat_s, self._send_statuses)

    # The loop ---------------------------------------------------------------

    def _run(self) -> Steps[None]:
        yield self.world.pace.startup_s()
        self.state = machine.saw_durable(self.state, self._saving.look())
        self._send(("hello", None))
        self._send_statuses()
        actions: tuple[events.Action, ...] = (events.WaitForPlan(),)
        while True:
            event = None
            for action in actions:
                event = yield from self._perform(action)
            if self.connections.newest is not None:
                self.state = machine.saw_plan(self.state, self.connections.newest)
            before = self.state
            assert event is not None
            transition = machine.step(before, event)
            self.state, actions = transition.state, transition.actions
            if self.engine.tracing:
                self.engine.say(self.name, f"{self.state.phase}: {transition.reason}")
            if self._status.moved(self.state):
                self._send_status()
            self.world.checks.moved(self, before, event)

    def _perform(self, action: events.Action) -> Steps[events.Event | None]:
        name = type(action).__name__
        self.waits_in = name
        yield from self.point(name)
        match action:
            case events.WaitForPlan():
                return (yield from self._wait_for_plan())
            case events.Settle():
                return (yield from self._settle(action))
            case events.LoadState():
                return (yield from self._load_state(action))
            case events.Compute():
                return (yield from self._compute(action))
            case events.Reduce():
                return (yield from self._reduce(action))
            case events.CastVote():
                return (yield from self._vote(action))
            case events.Apply():
                return (yield from self._apply(action.commit))
            case events.ShareSaves():
                return (yield from self._share_saves(action))
            case events.WriteCheckpoint():
                yield from self._write_checkpoint(action)
            case events.SendFact():
                self._send_fact(action)
            case events.DropHeld():
                if self.compute is not None:
                    self.compute.drop_held()
                self._gradient = ""
            case events.Leave():
                self.connections.leave()
            case events.RenameCheckpoint():
                self._saving.complete(action)
            case events.VoidSave():
                self._saving.void(action.version)
            case events.Finish():
                self._finish()
        return None

    def point(self, name: str) -> Steps[None]:
        """A place in the code where a fault may strike; now and then others come first."""
        self.world.faults.reach(self, name)
        if self.engine.rng.random() < 0.2:
            yield self.world.pace.hiccup_s()

    def _hook(self, action: Action) -> Steps[None]:
        self._status.begins(action)
        self.waits_in = str(action)
        self.world.faults.reach(self, action.op.value)
        if action.op in (Op.FORWARD, Op.BACKWARD_INPUT):
            yield self.world.pace.block_s() * self.slow

    # Blocking actions -------------------------------------------------------

    def _wait_for_plan(self) -> Steps[events.Event]:
        known = self.state.newest.quorum.id if self.state.newest else -1
        self._status.waits()
        connections = self.connections
        while connections.newest is None or connections.newest.quorum.id <= known:
            yield connections.changed
        return events.PlanSeen()

    def _settle(self, action: events.Settle) -> Steps[events.Event]:
        self.heal_server.serves = None
        self._status.waits()
        try:
            self.world.checks.adopts(self, action.plan)
            gather = self.connections.adopt(action.plan, action.report.index)
            self.connections.changed.fire()
            report = replace(
                action.report,
                pipeline=self.connections.pipeline_name,
                durable=self._saving.look(),
            )
            yield from gather.post("settle", report)
            yield from self.point("settle-posted")
            reports = yield from gather.wait("settle")
        except QuorumAborted as end:
            return events.QuorumLost(end.why, end.suspects)
        yield from self.point("settle-gathered")
        self._reports = reports
        return events.ReportsGathered(reports)

    def _engine(self) -> Compute:
        position = self.state.member_position
        if self.compute is None or self.compute.position != position:
            shape = self.world.config.shape
            self.compute = Compute(
                position,
                shape.stages,
                shape.ranks_per_stage,
                shape.shards_per_lane,
                shape.micro_batches,
                self._hook,
            )
        return self.compute

    def _load_state(self, action: events.LoadState) -> Steps[events.Event]:
        compute = self._engine()
        compute.params, self.tampered = "", False
        if action.action is StateAction.LOAD:
            return (yield from self._load(compute, action.version))
        yield from self._hook(Action(Op.HEAL, compute.stage))
        client = self.connections.healing(
            HealClient(self, self.world.network, self.connections.changed)
        )
        why = f"no member of position {compute.position} has version {action.version}"
        wanted = Wanted(str(self._plan.quorum), compute.position, action.version)
        for source in action.sources:
            try:
                params = yield from client.copy(
                    self._reports[source].heal_address, wanted, action.expected
                )
            except HealFailed as failure:
                why = str(failure)
                continue
            compute.params = params
            yield from self.point("healed")
            return events.StateLoaded(params)
        return events.LoadFailed(why)

    def _load(self, compute: Compute, version: int) -> Steps[events.Event]:
        yield self.world.pace.copy_s()
        if version == 0:
            compute.params = terms.initial_state(compute.position)
            return events.StateLoaded(compute.params, None, "")
        try:
            part = self.world.disk.load(version)[compute.position]
        except DamagedError as error:
            return events.LoadFailed(str(error))
        compute.params = part.params
        return events.StateLoaded(part.params, part.commit, part.commit_chain)

    def _compute(self, action: events.Compute) -> Steps[events.Event]:
        compute = self._engine()
        agreed = self.state.agreed_pipeline
        try:
            group = (yield from self.connections.pipeline(agreed)) if action.types else None
            yield from compute.run(action.types, self.state.version, group)
        except GroupEnded as end:
            self.connections.fail_pipeline(str(end))
            return events.ComputeBroken(compute.held(), f"the chain broke: {end}")
        return events.TodoDone(compute.held())

    def _reduce(self, action: events.Reduce) -> Steps[events.Event]:
        compute = self._engine()
        yield from self._hook(Action(Op.REDUCE, compute.stage))
        self._gradient = ""
        members = [m.index for m in self._plan.position_members(compute.position)]
        try:
            group = yield from self.connections.reduce_group(compute.position)
            yield from compute.reduce(
                group, action.table, members, self.state.index, lambda: self.point("reduce-half")
            )
        except GroupEnded as end:
            return events.QuorumLost(*self.connections.fail_quorum(str(end)))
        self.world.faults.corrupt_gradient(self, compute)
        yield from self.point("reduced")
        return events.Reduced()

    def _vote(self, action: events.CastVote) -> Steps[events.Event]:
        compute = self._engine()
        yield from self._hook(Action(Op.VOTE, compute.stage))
        newest = self.connections.newest or self._plan
        self._gradient = terms.term("gradient", compute.reduced)
        assert self.state.step_plan is not None
        table = self.state.step_plan.table[compute.position]
        ballot = Ballot(
            norms_sq=(2.0 + compute.stage, 1.0 + compute.inner),
            gradient=self._gradient,
            copies=terms.term("copies", compute.stage, action.step),
            stats=compute.stats(table, self.state.index, action.step),
        )
        vote = vote_of(self.state, action, newest, ballot, self._saving.status())
        gather, key = self.connections.gather(), f"vote/{action.step}/{action.attempt}"
        try:
            yield from gather.post(key, vote)
            yield from self.point("vote-posted")
            votes = yield from gather.wait(key)
        except QuorumAborted as end:
            return events.QuorumLost(end.why, end.suspects)
        yield from self.point("votes-gathered")
        return events.VotesGathered(votes)

    def _apply(self, commit: Commit) -> Steps[events.Event]:
        compute = self._engine()
        yield from self._hook(Action(Op.APPLY, compute.stage))
        self._gradient = self._gradient or terms.term("gradient", compute.reduced)
        yield self.world.pace.apply_s() * self.slow
        assert compute.reduced is not None
        compute.params = terms.applied(compute.params, compute.reduced)
        self.world.faults.corrupt_state(self, compute)
        self.world.checks.applied(self, commit, compute.params)
        self._record(commit, compute.params)
        yield from self.point("applied")
        return events.Applied(compute.params, commit)

    # Actions at once --------------------------------------------------------

    def _send_fact(self, action: events.SendFact) -> None:
        self._tell_fact(action.fact)
        if isinstance(action.fact, Settled):
            version, position = self.state.version, self._engine().position
            self.heal_server.serves = Wanted(str(self._plan.quorum), position, version)
            self.connections.changed.fire()
            if self.state.is_lowest:
                self._log = self._log.takes_over()

    def _tell_complete(self, version: int) -> None:
        """A version is complete."""
        self._tell_fact(fact_of(self.state, Checkpoint, complete=True, durable=version))

    def _share_saves(self, action: events.ShareSaves) -> Steps[events.Event]:
        self._status.waits()
        yield from self._saving.wait_idle()
        gather, key = self.connections.gather(), f"save/{action.round}"
        try:
            yield from gather.post(key, last_status(self._saving.status(), action.state))
            yield from self.point("saves-posted")
            return events.SavesGathered((yield from gather.wait(key)))
        except QuorumAborted as end:
            return events.QuorumLost(end.why, end.suspects)

    def _tell_fact(self, fact: RankFact) -> None:
        self._send(("fact", replace(fact, observed_at_s=self.world.clock(self.slot.pod))))

    def _record(self, commit: Commit, masters: str) -> None:
        entry = entry_of(
            self.state,
            commit,
            gradient=self._gradient,
            masters=masters,
            step_s=0.5,
            now_s=self.world.clock(self.slot.pod),
        )
        self._repeat_entries()
        self._log = self._log.add(entry, post=self.state.is_lowest)
        self._send(("ledger", entry, self.state.is_lowest))

    def _repeat_entries(self) -> None:
        self._log, entries = self._log.again()
        for entry in entries:
            self._send(("ledger", entry, True))

    def _write_checkpoint(self, action: events.WriteCheckpoint) -> Steps[None]:
        compute = self._engine()
        yield from self._hook(Action(Op.CHECKPOINT, compute.stage))
        self._saving.write(action, self._plan.quorum.nonce, compute.position, compute.params)

    def _finish(self) -> None:
        state, compute = self.state, self._engine()
        final = FinalDigests(
            stage=compute.stage,
            inner=compute.inner,
            version=state.version,
            params=compute.params,
            masters=state.digest,
            optimizer=compute.params,
            data=state.commit.data_total if state.commit else "",
        )
        self._repeat_entries()
        self._tell_fact(fact_of(self.state, Finished, final=final))

    @property
    def _plan(self) -> Plan:
        assert self.state.plan is not None
        return self.state.plan

    @property
    def quorum(self) -> QuorumId | None:
        """Adopted quorum."""
        return self.state.plan.quorum if self.state.plan else None
