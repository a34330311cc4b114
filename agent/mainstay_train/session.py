"""The trainer's shell around the rank's state machine.

``core.rank`` decides, this class carries out: each action is one method whose
outcome is the next event. The main thread runs the loop; the uplink's thread and
the gather's thread only end connections (:mod:`mainstay_train.connections`).
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mainstay_core import codec, rank, rank_events
from mainstay_core.errors import IntegrityError
from mainstay_core.ids import Incarnation, PodUid, Slot
from mainstay_core.messages import (
    Commit,
    Fact,
    FactKind,
    FinalDigests,
    LedgerEntry,
    PartialDigest,
    SettleReport,
    TypeStat,
    Vote,
)
from mainstay_core.program import Action, Op, compile_compute
from mainstay_core.settle import StateAction
from mainstay_train import digests, optimizer
from mainstay_train.aborts import HealFailed, QuorumAborted
from mainstay_train.checkpoints import CheckpointDirectory
from mainstay_train.connections import Connections
from mainstay_train.fault_points import FaultPoints
from mainstay_train.groups import GroupEnded
from mainstay_train.heal import HealServer, masters_digest
from mainstay_train.interpreter import Interpreter
from mainstay_train.optimizer import StageState
from mainstay_train.reduction import PartialStore, Reducer
from mainstay_train.settings import TrainerSettings
from mainstay_train.uplink import Status, Uplink
from mainstay_train.workload import Workload

logger = logging.getLogger(__name__)

WAITING_OPS = frozenset({Op.RECV_F, Op.RECV_B, Op.REDUCE, Op.VOTE, Op.HEAL})
KEPT_ENTRIES = 3
"""Ledger entries told again after a settle: who posted them may be gone."""


@dataclass(slots=True)
class Engine:
    """What computes one stage: made when a plan first gives this trainer the stage."""

    stage: int
    num_stages: int
    state: StageState
    store: PartialStore
    reducer: Reducer
    interpreter: Interpreter


class Session:
    """One life of a trainer, from its first plan to the end of the job.

    Args:
        settings: who this trainer is.
        workload: what it trains.
        device: where it computes.
        backend: of its process groups.
    """

    def __init__(
        self, settings: TrainerSettings, workload: Workload, device: str, backend: str
    ) -> None:
        self._settings, self._config, self._workload = settings, settings.config, workload
        self._device = device
        self._slot = Slot(pod=PodUid(settings.pod), index=settings.slot)
        self._connections = Connections(settings, backend)
        self._status = Status()
        self._uplink = Uplink(
            settings.socket,
            self._status,
            self._config.heartbeat_s,
            self._connections.see,
            self._stop,
        )
        self._faults = FaultPoints(self._config.faults, self._uplink)
        self._heal_server = HealServer(settings.address, self._state_at)
        root = Path(self._config.checkpoint_dir) if self._config.checkpoint_dir else None
        self._checkpoints = CheckpointDirectory(root) if root else None
        self._checkpoint_safe: tuple[int, str] | None = None
        self._engine: Engine | None = None
        self._reports: tuple[SettleReport, ...] = ()
        self._partial_digests: tuple[PartialDigest, ...] = ()
        self._gradient = ""
        self._entries: list[LedgerEntry] = []
        self._ready: tuple[str, int, int] | None = None
        self._step_began_s = time.monotonic()
        self._state = rank.RankState(
            slot=self._slot,
            incarnation=Incarnation(settings.incarnation),
            num_steps=self._config.shape.steps,
            shards_per_lane=self._config.shape.shards_per_lane,
            clip_norm=workload.clip_norm,
            heal_address=self._heal_server.address,
            checkpoint_every_steps=self._config.shape.checkpoint_every_steps if root else 0,
        )

    def run(self, hello: dict[str, object]) -> None:
        """Say hello and follow the plans until the job ends; does not return before."""
        if self._checkpoints is not None:
            durable = self._checkpoints.newest_complete()
            self._state = rank.saw_durable(self._state, durable)
        self._uplink.start(hello)
        actions: tuple[rank_events.Action, ...] = (rank_events.WaitForPlan(),)
        while True:
            event = None
            for action in actions:
                event = self._perform(action)
            assert event is not None, f"no event after {actions}"
            if self._connections.newest is not None:
                self._state = rank.saw_plan(self._state, self._connections.newest)
            before = self._state
            transition = rank.step(before, event)
            self._state, actions = transition.state, transition.actions
            self._note(before.phase, transition.reason)

    def _note(self, before: rank.Phase, reason: str) -> None:
        state = self._state
        self._status.phase, self._status.step = state.phase.value, state.version
        self._status.quorum = state.plan.quorum if state.plan and state.index >= 0 else None
        self._status.waiting = state.phase in (rank.Phase.IDLE, rank.Phase.PARKED)
        settling = {before, state.phase} & {rank.Phase.SETTLING, rank.Phase.PARKED}
        logger.log(logging.INFO if settling else logging.DEBUG, "%s: %s", state.phase, reason)

    def fail(self, why: str) -> None:
        """Tell the api that this job cannot run, and why."""
        self._tell(rank_events.Tell(FactKind.FAILED, self._state.version, why))

    @staticmethod
    def _stop() -> None:
        logger.info("the job has ended")
        logging.shutdown()
        os._exit(0)

    def _perform(self, action: rank_events.Action) -> rank_events.Event | None:
        match action:
            case rank_events.WaitForPlan():
                return self._wait_for_plan()
            case rank_events.Settle():
                return self._settle(action)
            case rank_events.Restore():
                return self._restore(action)
            case rank_events.Compute():
                return self._compute(action)
            case rank_events.Reduce():
                return self._reduce(action)
            case rank_events.CastVote():
                return self._vote(action)
            case rank_events.Apply():
                return self._apply(action.commit)
            case _:
                return self._perform_at_once(action)

    def _perform_at_once(self, action: rank_events.Action) -> None:
        match action:
            case rank_events.Tell():
                self._tell(action)
            case rank_events.DropHeld():
                self._drop_held()
            case rank_events.Leave():
                self._connections.leave()
            case rank_events.WriteCheckpoint():
                self._write_checkpoint(action)
            case rank_events.RenameCheckpoint():
                self._rename_checkpoint(action.version)
            case rank_events.Finish():
                self._finish()
            case _:
                raise AssertionError(f"unknown action {action}")

    # Blocking actions -------------------------------------------------------

    def _wait_for_plan(self) -> rank_events.Event:
        known = self._state.newest.quorum.id if self._state.newest else -1
        connections = self._connections
        self._status.waiting = True
        with connections.changed:
            connections.changed.wait_for(
                lambda: connections.newest is not None and connections.newest.quorum.id > known
            )
        return rank_events.PlanSeen()

    def _settle(self, action: rank_events.Settle) -> rank_events.Event:
        self._ready = None
        self._checkpoint_safe = None
        self._status.waiting = True
        try:
            gather = self._connections.adopt(action.plan, action.report.index)
            gather.post("settle", codec.dumps(action.report).encode())
            bodies = gather.wait("settle")
        except QuorumAborted as end:
            return rank_events.QuorumLost(end.why, end.suspects)
        self._reports = tuple(codec.loads(SettleReport, body) for body in bodies)
        return rank_events.ReportsGathered(self._reports)

    def _restore(self, action: rank_events.Restore) -> rank_events.Event:
        engine = self._engine_for_plan()
        if action.action is StateAction.LOAD:
            return self._load(engine, action.version)
        self._hook(Action(Op.HEAL, engine.stage))
        client = self._connections.healing()
        plan = self._state.plan
        assert plan is not None
        why = f"no member of stage {engine.stage} has version {action.version}"
        for source in action.sources:
            try:
                masters = client.copy(
                    engine.state,
                    peer=self._reports[source].heal_address,
                    source=source,
                    quorum=str(plan.quorum),
                    stage=engine.stage,
                    version=action.version,
                    expected=action.expected,
                )
            except HealFailed as failure:
                logger.warning("healing from member %d failed: %s", source, failure)
                why = str(failure)
                continue
            return rank_events.Restored(masters)
        return rank_events.RestoreFailed(why)

    def _load(self, engine: Engine, version: int) -> rank_events.Event:
        if version == 0:
            engine.state.initialize(self._config.shape.seed)
            return rank_events.Restored(masters_digest(engine.state), None, "")
        assert self._checkpoints is not None
        try:
            loaded = self._checkpoints.load(version, engine.state)
        except (IntegrityError, OSError) as error:
            logger.warning("checkpoint %d is skipped: %s", version, error)
            self._state = rank.saw_durable(self._state, self._checkpoints.newest_complete())
            return rank_events.RestoreFailed(str(error))
        return rank_events.Restored(loaded.masters, loaded.commit, loaded.chain)

    def _compute(self, action: rank_events.Compute) -> rank_events.Event:
        engine, version = self._engine_for_plan(), self._state.version
        program = compile_compute(
            action.types, self._config.shape.micro_batches, engine.stage, engine.num_stages
        )
        try:
            pipeline = self._connections.pipeline() if program else None
            engine.interpreter.run(program, version, pipeline)
        except GroupEnded as end:
            self._connections.fail_pipeline(str(end))
            return rank_events.ComputeBroken(engine.store.held(), f"the chain broke: {end}")
        return rank_events.TodoDone(engine.store.held())

    def _reduce(self, action: rank_events.Reduce) -> rank_events.Event:
        engine, plan = self._engine_for_plan(), self._state.plan
        assert plan is not None
        self._hook(Action(Op.REDUCE, engine.stage))
        members = [m.index for m in plan.stage_members(engine.stage)]
        try:
            group = self._connections.stage_group(engine.stage)
            engine.reducer.reduce(
                group, action.table, members, self._state.index, engine.store.partials
            )
        except GroupEnded as end:
            return rank_events.QuorumLost(*self._connections.fail_quorum(str(end)))
        self._partial_digests = tuple(
            PartialDigest(
                partial=s.partial,
                slot=self._slot,
                digest=self._flat_digest(engine, engine.store.partials[s.partial]),
            )
            for s in action.table
            if s.index == self._state.index
        )
        return rank_events.Reduced()

    def _vote(self, action: rank_events.CastVote) -> rank_events.Event:
        engine = self._engine_for_plan()
        self._hook(Action(Op.VOTE, engine.stage))
        vote = self._make_vote(engine, action)
        gather, key = self._connections.gather(), f"vote/{action.step}/{action.attempt}"
        try:
            gather.post(key, codec.dumps(vote).encode())
            bodies = gather.wait(key)
        except QuorumAborted as end:
            return rank_events.QuorumLost(end.why, end.suspects)
        return rank_events.VotesGathered(tuple(codec.loads(Vote, body) for body in bodies))

    def _make_vote(self, engine: Engine, action: rank_events.CastVote) -> Vote:
        state = self._state
        assert state.plan is not None
        newest = self._connections.newest or state.plan
        blocks = engine.state.layout.block_views(engine.reducer.reduced)
        self._gradient = self._flat_digest(engine, engine.reducer.reduced)
        safe = self._checkpoint_safe
        return Vote(
            step=action.step,
            attempt=action.attempt,
            ok=True,
            norms_sq=tuple(optimizer.block_norms_sq(blocks)),
            gradient=self._gradient,
            state=state.digest,
            stats=self._own_stats(engine),
            newest_plan=newest.quorum.id,
            newest_nonce=newest.quorum.nonce,
            checkpoint_safe=safe[0] if safe and safe[1] == state.plan.quorum.nonce else None,
        )

    def _own_stats(self, engine: Engine) -> tuple[TypeStat, ...]:
        """Of the types that the table credits to this cell."""
        assert self._state.step_plan is not None
        table = self._state.step_plan.table[engine.stage]
        return tuple(
            engine.interpreter.stats[t]
            for s in table
            if s.index == self._state.index
            for t in range(s.partial.first, s.partial.last + 1)
        )

    def _apply(self, commit: Commit) -> rank_events.Event:
        engine = self._engine_for_plan()
        self._hook(Action(Op.APPLY, engine.stage))
        blocks = engine.state.layout.block_views(engine.reducer.reduced)
        if not self._gradient:  # rolled forward: it was reduced in a quorum without our vote
            self._gradient = self._flat_digest(engine, engine.reducer.reduced)
        engine.state.apply(blocks, commit.scale, self._workload.learning_rate(commit.step))
        masters = masters_digest(engine.state)
        self._record(engine, commit, masters)
        return rank_events.Applied(masters, commit)

    # Actions at once --------------------------------------------------------

    def _tell(self, action: rank_events.Tell) -> None:
        plan = self._state.plan
        fact = Fact(
            kind=action.kind,
            pod=self._slot.pod,
            slot=self._slot.index,
            incarnation=self._state.incarnation,
            quorum=plan.quorum if plan else None,
            step=action.step,
            suspects=action.suspects,
            evidence=action.evidence,
            observed_at_s=time.time(),
        )
        self._uplink.tell(fact)
        if action.kind is FactKind.SETTLED:
            self._serve_heals(action.step)
            if self._posts_ledger():
                for entry in self._entries:
                    self._uplink.record(entry, post=True)

    def _drop_held(self) -> None:
        if self._engine is not None:
            self._engine.store.clear()
            self._engine.interpreter.forget()
        self._gradient, self._partial_digests = "", ()

    def _write_checkpoint(self, action: rank_events.WriteCheckpoint) -> None:
        engine, plan = self._engine_for_plan(), self._state.plan
        assert plan is not None
        assert self._checkpoints is not None
        self._hook(Action(Op.CHECKPOINT, engine.stage))
        nonce = plan.quorum.nonce
        try:
            self._checkpoints.write_part(
                action.version, nonce, engine.stage, engine.state, action.commit, action.chain
            )
        except OSError as error:
            logger.warning("checkpoint %d is not written: %s", action.version, error)
            return
        self._checkpoint_safe = (action.version, nonce)

    def _rename_checkpoint(self, version: int) -> None:
        plan = self._state.plan
        assert plan is not None
        assert self._checkpoints is not None
        try:
            self._checkpoints.complete(version, plan.quorum.nonce, plan.num_stages)
        except OSError as error:
            logger.warning("checkpoint %d is not completed: %s", version, error)

    def _finish(self) -> None:
        engine, plan = self._engine_for_plan(), self._state.plan
        assert plan is not None
        tensors = engine.state.state_tensors()
        params = (
            (f"param:{name}", view)
            for block in engine.state.blocks
            for name, view in block.layout.views(block.compute).items()
        )
        moments = ((t.id, t.tensor) for t in tensors if t.kind != "master")
        final = FinalDigests(
            stage=engine.stage,
            version=self._state.version,
            params=digests.digest_tensors(params).hex(),
            masters=self._state.digest,
            optimizer=digests.digest_tensors(moments).hex(),
            data=self._state.commit.data_total if self._state.commit else "",
        )
        self._uplink.tell(
            Fact(
                kind=FactKind.FINISHED,
                pod=self._slot.pod,
                slot=self._slot.index,
                incarnation=self._state.incarnation,
                quorum=plan.quorum,
                step=self._state.version,
                final=final,
                observed_at_s=time.time(),
            )
        )

    # Helpers ----------------------------------------------------------------

    def _hook(self, action: Action) -> None:
        """Before every action of a program: progress, and injected faults."""
        self._status.progress += 1
        self._status.waiting = action.op in WAITING_OPS
        plan = self._state.plan
        assert plan is not None
        self._faults.reach(plan, self._state.index, self._current_step(), action)

    def _current_step(self) -> int:
        """Step at hand: while restoring it is the settled version's."""
        settlement = self._state.settlement
        if self._state.phase is rank.Phase.HEALING and settlement is not None:
            return settlement.version
        return self._state.version

    def _engine_for_plan(self) -> Engine:
        plan, stage = self._state.plan, self._state.member_stage
        assert plan is not None
        engine = self._engine
        if engine is not None and (engine.stage, engine.num_stages) == (stage, plan.num_stages):
            return engine
        state = self._workload.build_stage(plan.num_stages, stage, self._device)
        store = PartialStore(state.layout, self._config.shape.shards_per_lane, self._device)
        interpreter = Interpreter(
            workload=self._workload,
            blocks=state.blocks,
            stage=stage,
            num_stages=plan.num_stages,
            seed=self._config.shape.seed,
            micro_batches=self._config.shape.micro_batches,
            store=store,
            recompute=self._config.recompute,
            hook=self._hook,
        )
        reducer = Reducer(state.layout, self._device)
        self._engine = Engine(stage, plan.num_stages, state, store, reducer, interpreter)
        return self._engine

    @staticmethod
    def _flat_digest(engine: Engine, flat: torch.Tensor) -> str:
        names = (f"gradient:{block.name}" for block in engine.state.layout.blocks)
        views = engine.state.layout.block_views(flat)
        return digests.digest_tensors(zip(names, views, strict=True)).hex()

    def _serve_heals(self, version: int) -> None:
        """The state is complete at ``version``: heal requests of this quorum may be served."""
        plan, engine = self._state.plan, self._engine
        assert plan is not None
        assert engine is not None
        with self._connections.changed:
            self._ready = (str(plan.quorum), engine.stage, version)
            self._connections.changed.notify_all()

    def _state_at(self, quorum: str, stage: int, version: int) -> StageState | None:
        """For the heal server's threads: wait until this trainer is there, or never will be."""
        connections = self._connections

        def over() -> bool:
            adopted = connections.adopted
            return adopted is not None and adopted.quorum.id > _quorum_number(quorum)

        with connections.changed:
            wanted = (quorum, stage, version)
            connections.changed.wait_for(lambda: self._is_at(wanted) or over())
            if not self._is_at(wanted) or self._engine is None:
                return None
            return self._engine.state

    def _is_at(self, wanted: tuple[str, int, int]) -> bool:
        return self._ready == wanted

    def _posts_ledger(self) -> bool:
        """Whether this member mirrors its stage's entries to the api: the lowest one does."""
        plan, engine = self._connections.adopted, self._engine
        if plan is None or engine is None:
            return False
        return plan.stage_members(engine.stage)[0].index == self._state.index

    def _record(self, engine: Engine, commit: Commit, masters: str) -> None:
        plan = self._state.plan
        assert plan is not None
        now = time.monotonic()
        entry = LedgerEntry(
            step=commit.step,
            stage=engine.stage,
            quorum=plan.quorum,
            gradient=self._gradient,
            masters=masters,
            data=commit.data,
            loss=commit.loss,
            norm=commit.norm,
            tokens=commit.tokens,
            step_s=now - self._step_began_s,
            replicas=len(plan.chains),
            attempt=self._state.attempt,
            partials=self._partial_digests,
            committed_at_s=time.time(),
        )
        self._step_began_s = now
        self._entries = [*self._entries[1 - KEPT_ENTRIES :], entry]
        self._uplink.record(entry, post=self._posts_ledger())


def _quorum_number(quorum: str) -> int:
    return int(quorum.removeprefix("q").partition("-")[0])
