"""The trainer's shell around the rank's state machine.

``core.rank`` decides, this class carries out: each action is one method whose
outcome is the next event. The main thread runs the loop; the uplink's thread and
the gather's thread only end connections (:mod:`mainstay_train.comm.connections`).

Who computes is not its business: :meth:`Session.run` has the engine's interpreter
compute, a user's own loop calls :meth:`Session.advance` and computes itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank import events, machine
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.reports import Ballot, Status, last_status, vote_of
from mainstay_core.rank.serving import Wanted
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.state import fact_of
from mainstay_core.wire.facts import Checkpoint, Failed, Settled
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import Commit, LastStatus, SettleReport, Vote
from mainstay_train.base.aborts import HealFailed, JobOver
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.comm.connections import Connections
from mainstay_train.compute.engine import Engine, Training
from mainstay_train.model.workload import user_code
from mainstay_train.session.fault_points import FaultPoints
from mainstay_train.session.reporting import Reporter
from mainstay_train.session.uplink import Uplink
from mainstay_train.state.controller import Checkpointing
from mainstay_train.state.heal import HealClient, HealServer, copy_from_any
from mainstay_train.state.serving import ServedState

logger = logging.getLogger(__name__)


class Session:
    """One life of a trainer, from its first plan to the end of the job.

    Args:
        settings: who this trainer is.
        training: what it trains.
        backend: of its process groups.
    """

    def __init__(self, settings: TrainerSettings, training: Training, backend: str) -> None:
        self._settings, self._config, self._training = settings, settings.config, training
        self._slot = Slot(pod=PodUid(settings.pod), index=settings.slot)
        self._connections = Connections(settings, backend)
        status = Status()
        self._uplink = Uplink(
            settings.socket,
            status,
            self._config.heartbeat_s,
            self._connections.see,
            self._stop,
            lambda faults: self._faults.add(faults),
            lambda fault: self._faults.note_fired(fault),
        )
        self._connections.on_plan = self._uplink.pass_plan
        self._faults = FaultPoints(self._config.faults, self._config.shape.replicas, self._uplink)
        self._reporter = Reporter(self._uplink, status)
        self._served = ServedState(self._connections)
        heal_server = HealServer(settings.address, self._served.state_at, self._serves)
        self._checkpoints = Checkpointing(self._config, self._report_checkpoint)
        self._engine: Engine | None = None
        self._reports: tuple[SettleReport, ...] = ()
        self._gradient = ""
        self._state = machine.RankState(
            slot=self._slot,
            incarnation=Incarnation(settings.incarnation),
            num_steps=self._config.shape.steps,
            shards_per_lane=self._config.shape.shards_per_lane,
            clip_norm=training.clip_norm,
            heal_address=heal_server.address,
            checkpoint_every_steps=self._checkpoints.every_steps,
        )

    @property
    def version(self) -> int:
        """Number of steps that this trainer's state contains."""
        return self._state.version

    @property
    def leads(self) -> bool:
        """Whether this trainer is the quorum's first member."""
        return self._state.index == 0

    def run(self, hello: dict[str, Any]) -> None:
        """Say hello and follow the plans until the job ends.

        Raises:
            JobOver: the job is complete.
        """
        self.start(hello)
        outcome = self.advance(None)
        while True:
            if isinstance(outcome, events.Compute):
                outcome = self._compute(outcome)
            outcome = self.advance(outcome)

    def start(self, hello: dict[str, Any]) -> None:
        """Say hello; what to do first is to wait for a plan."""
        self._uplink.start(hello)
        durable = self._checkpoints.start(hello["fingerprint"])
        self._state = machine.saw_durable(self._state, durable)

    def advance(self, event: events.Event | None) -> events.Event | events.Compute:
        """Let the rank's state machine take an event, and carry out what it asks for.

        Args:
            event: the outcome of the action before; None at the start.

        Returns:
            The outcome of what was asked for; or Compute, which is the caller's to carry out.

        Raises:
            JobOver: the job is complete, and nothing is left to do.
        """
        actions: tuple[events.Action, ...] = (events.WaitForPlan(),)
        if event is not None:
            if self._connections.newest is not None:
                self._state = machine.saw_plan(self._state, self._connections.newest)
            before = self._state
            transition = machine.step(before, event)
            self._state, actions = transition.state, transition.actions
            self._note(before.phase, transition.reason)
        outcome = None
        for action in actions:
            if isinstance(action, events.Compute):
                return action
            try:
                outcome = self._perform(action)
            except QuorumAborted as end:
                outcome = events.QuorumLost(end.why, end.suspects)
        assert outcome is not None, f"no event after {actions}"
        return outcome

    def _note(self, before: machine.Phase, reason: str) -> None:
        self._reporter.phase(self._state)
        phases = {before, self._state.phase}
        level = (
            logging.INFO
            if phases & {machine.Phase.SETTLING, machine.Phase.PARKED}
            else logging.DEBUG
        )
        logger.log(level, "%s: %s", self._state.phase, reason)

    def fail(self, why: str) -> None:
        """Tell the api that this job cannot run, and why."""
        self._reporter.send_fact(fact_of(self._state, Failed, evidence=why))

    def _stop(self) -> None:
        """The supervisor says that the job has ended (the uplink's thread)."""
        logger.info("the job has ended")
        if self._state.phase is machine.Phase.FINISHED:
            self._connections.end()
            return
        logging.shutdown()
        os._exit(0)

    def _perform(self, action: events.Action) -> events.Event | None:
        match action:
            case events.WaitForPlan():
                return self._wait_for_plan()
            case events.Settle():
                return self._settle(action)
            case events.LoadState():
                return self._load_state(action)
            case events.Reduce():
                return self._reduce(action)
            case events.CastVote():
                return self._vote(action)
            case events.Apply():
                return self._apply(action.commit)
            case events.ShareSaves():
                return self._share_saves(action)
            case _:
                self._perform_at_once(action)
                return None

    def _perform_at_once(self, action: events.Action) -> None:
        match action:
            case events.SendFact():
                self._send_fact(action)
            case events.DropHeld():
                self._drop_held()
            case events.Leave():
                self._connections.leave()
            case events.WriteCheckpoint():
                self._write_checkpoint(action)
            case events.RenameCheckpoint():
                self._checkpoints.complete(action, self._plan, self._writer_hook())
            case events.VoidSave():
                self._checkpoints.void(action.version)
            case events.Finish():
                self._finish()
            case _:
                raise AssertionError(f"unknown action {action}")

    # Blocking actions -------------------------------------------------------

    def _wait_for_plan(self) -> events.Event:
        known = self._state.newest.quorum.id if self._state.newest else -1
        connections = self._connections
        self._reporter.waits()
        with connections.changed:
            connections.changed.wait_for(
                lambda: (
                    connections.ended
                    or (connections.newest is not None and connections.newest.quorum.id > known)
                )
            )
            if connections.ended:
                raise JobOver("the job is complete")
        return events.PlanSeen()

    def _settle(self, action: events.Settle) -> events.Event:
        self._served.close()
        self._reporter.waits()
        gather = self._connections.adopt(action.plan, action.report.index)
        settling = Action(Op.SETTLE, action.plan.members[action.report.index].rank.stage)
        self._faults.reach(action.plan, action.report.index, self._state.version, settling)
        report = replace(
            action.report,
            pipeline=self._connections.pipeline_name,
            durable=self._checkpoints.newest_complete(),
        )
        gather.post("settle", codec.dumps(report).encode())
        # A joiner allocates its stage while the others finish their step, not while they wait.
        self._engine_for_plan()
        bodies = gather.wait("settle")
        self._reports = tuple(codec.loads(SettleReport, body) for body in bodies)
        return events.ReportsGathered(self._reports)

    def _load_state(self, action: events.LoadState) -> events.Event:
        engine = self._engine_for_plan()
        if action.action is StateAction.LOAD:
            return self._checkpoints.load(engine, action.version)
        self._hook(Action(Op.HEAL, engine.stage))
        try:
            masters = copy_from_any(
                self._connections.healing(HealClient(self._settings.address)),
                engine.state,
                [(source, self._reports[source].heal_address) for source in action.sources],
                quorum=str(self._plan.quorum),
                position=self._state.member_position,
                version=action.version,
                expected=action.expected,
            )
        except HealFailed as failure:
            return events.LoadFailed(str(failure))
        return events.StateLoaded(masters)

    def _compute(self, action: events.Compute) -> events.Event:
        engine = self._engine_for_plan()
        try:
            pipeline = (
                self._connections.pipeline(self._state.agreed_pipeline) if action.types else None
            )
            engine.compute(action.types, self._state.version, pipeline)
        except GroupEnded as end:
            self._connections.fail_pipeline(str(end))
            return events.ComputeBroken(engine.store.held(), f"the chain broke: {end}")
        return events.TodoDone(engine.store.held())

    def _reduce(self, action: events.Reduce) -> events.Event:
        engine = self._engine_for_plan()
        self._hook(Action(Op.REDUCE, engine.stage))
        self._gradient = ""
        position = self._state.member_position
        members = [m.index for m in self._plan.position_members(position)]
        try:
            group = self._connections.reduce_group(position)
            engine.reduce(group, action.table, members, self._state.index, self._slot)
        except GroupEnded as end:
            return events.QuorumLost(*self._connections.fail_quorum(str(end)))
        return events.Reduced()

    def _vote(self, action: events.CastVote) -> events.Event:
        engine = self._engine_for_plan()
        self._hook(Action(Op.VOTE, engine.stage))
        vote = self._make_vote(engine, action)
        bodies = self._exchange(f"vote/{action.step}/{action.attempt}", vote)
        return events.VotesGathered(tuple(codec.loads(Vote, body) for body in bodies))

    def _exchange(self, key: str, message: Vote | LastStatus) -> list[bytes]:
        """Give a message to all members; returns what each of them gave.

        Raises:
            QuorumAborted: the quorum ended first.
        """
        gather = self._connections.gather()
        gather.post(key, codec.dumps(message).encode())
        return gather.wait(key)

    def _make_vote(self, engine: Engine, action: events.CastVote) -> Vote:
        state = self._state
        assert state.step_plan is not None
        newest = self._connections.newest or self._plan
        self._gradient = engine.gradient_digest()
        ballot = Ballot(
            norms_sq=engine.norms_sq(),
            gradient=self._gradient,
            copies=engine.copies_digest(state.digest),
            stats=engine.stats(state.step_plan.table[state.member_position], state.index),
        )
        return vote_of(state, action, newest, ballot, self._checkpoints.status())

    def _apply(self, commit: Commit) -> events.Event:
        engine = self._engine_for_plan()
        self._hook(Action(Op.APPLY, engine.stage))
        if not self._gradient:  # rolled forward: it was reduced in a quorum without our vote
            self._gradient = engine.gradient_digest()
        with user_code(f"the learning rate of step {commit.step}"):
            learning_rate = self._training.learning_rate(commit.step)
        masters = engine.apply(commit, learning_rate)
        self._reporter.record(
            self._state,
            commit,
            gradient=self._gradient,
            masters=engine.counted_masters(masters),
            partials=engine.sent,
            post=self._state.is_lowest,
        )
        return events.Applied(masters, commit)

    def _share_saves(self, action: events.ShareSaves) -> events.Event:
        self._reporter.waits()
        status = last_status(self._checkpoints.wait_idle(), action.state)
        bodies = self._exchange(f"save/{action.round}", status)
        return events.SavesGathered(tuple(codec.loads(LastStatus, b) for b in bodies))

    # Actions at once --------------------------------------------------------

    def _send_fact(self, action: events.SendFact) -> None:
        self._reporter.send_fact(action.fact)
        if isinstance(action.fact, Settled):
            position, state = self._state.member_position, self._engine_for_plan().state
            self._served.open(Wanted(str(self._plan.quorum), position, self._state.version), state)
            if self._state.is_lowest:
                self._reporter.repeat_entries()

    def _drop_held(self) -> None:
        if self._engine is not None:
            self._engine.drop_held()
        self._gradient = ""

    def _write_checkpoint(self, action: events.WriteCheckpoint) -> None:
        engine = self._engine_for_plan()
        self._hook(Action(Op.CHECKPOINT, engine.stage))
        state, hook = self._state, self._writer_hook()
        self._checkpoints.write(action, engine, self._plan, state.index, state.digest, hook)

    def _writer_hook(self) -> Callable[[Op], None]:
        return self._faults.in_background(self._plan, self._state.index, self._state.version)

    def _report_checkpoint(self, durable: int, problem: str) -> None:
        """From the thread that writes: a version is complete, or why it is late or failed."""
        state = machine.saw_durable(self._state, durable)
        self._reporter.send_fact(
            fact_of(
                state,
                Checkpoint,
                complete=not problem,
                durable=state.durable,
                evidence=problem,
            )
        )

    def _finish(self) -> None:
        state = self._state
        data = state.commit.data_total if state.commit else ""
        final = self._engine_for_plan().final_digests(state.version, state.digest, data)
        self._reporter.finished(state, final)

    # Helpers ----------------------------------------------------------------

    @property
    def _plan(self) -> Plan:
        assert self._state.plan is not None
        return self._state.plan

    def _hook(self, action: Action) -> None:
        """Before every action of a program: progress, and injected faults."""
        self._reporter.progress(action)
        self._faults.reach(self._plan, self._state.index, self._state.step_at_hand, action)

    def _serves(self) -> None:
        """A part of this rank's state is on its way to a joiner (a thread of the heal server)."""
        state = self._state
        if state.plan is not None:
            action = Action(Op.SERVE, state.member_stage)
            self._faults.reach(state.plan, state.index, state.version, action)

    def _engine_for_plan(self) -> Engine:
        state = self._state
        place = (state.member_stage, self._plan.num_stages, state.member_inner)
        if self._engine is None or not self._engine.computes(*place):
            self._engine = self._training.build_engine(*place, self._hook)
        return self._engine
