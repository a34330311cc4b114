"""The trainer's shell around the rank's state machine.

``core.rank`` decides, and says in which order that is done (:mod:`mainstay_core.rank.session`).
Here is what that needs: sockets, the engine, the disk. The main thread runs the loop; the uplink's
thread and the gather's thread only end connections (:mod:`mainstay_train.comm.connections`).

Who computes is not its business: :meth:`Session.run` has the engine's interpreter
compute, a user's own loop calls :meth:`Session.advance` and computes itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.witness import Account
from mainstay_core.faults.points import FaultPoint
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank import events, machine
from mainstay_core.rank.early import EarlyReduction
from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.reports import AppliedStep, Ballot, finding_of
from mainstay_core.rank.serving import Sources, Wanted
from mainstay_core.rank.shell import Message, MessageT, run_blocking
from mainstay_core.rank.state import fact_of
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import Checks as ChecksFact
from mainstay_core.wire.facts import Failed, RankFact
from mainstay_core.wire.facts import Missed as MissedFact
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry
from mainstay_core.wire.plan import Method, Partial
from mainstay_core.wire.reinitialisation import MadePosition
from mainstay_core.wire.rules import without_rules
from mainstay_core.wire.votes import Commit, SaveStatus
from mainstay_train.base.aborts import JobOver
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.flips import Missed
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.connections import Connections
from mainstay_train.comm.group import Group
from mainstay_train.compute import at_rest
from mainstay_train.compute.boundaries import SentLog
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.training import Training
from mainstay_train.compute.watched import WatchedType
from mainstay_train.dmr.run_planner import Told
from mainstay_train.exact import fingerprint
from mainstay_train.model.workload import user_code
from mainstay_train.session.checking import RulesOfChecks
from mainstay_train.session.fault_points import FaultPoints
from mainstay_train.session.guarding import GuardingSession
from mainstay_train.session.rules import check_units, first_state
from mainstay_train.session.uplink import Uplink
from mainstay_train.snapshots.keeper import SegmentKeeper
from mainstay_train.state.beside import BesideStates
from mainstay_train.state.controller import Checkpointing
from mainstay_train.state.heal import HealClient, HealServer
from mainstay_train.state.segments import SegmentClient, socket_beside
from mainstay_train.state.serving import ServedState

logger = logging.getLogger(__name__)


class Session(GuardingSession):
    """One life of a trainer, from its first plan to the end of the job.

    Args:
        settings: who this trainer is.
        training: what it trains.
        backend: of its process groups.
    """

    def __init__(self, settings: TrainerSettings, training: Training, backend: str) -> None:
        config = settings.config
        connections = Connections(settings, backend)
        self._served = ServedState(connections, self._served_part)
        heal_server = HealServer(settings.address, self._served.state_at, self._serves)
        self._checkpoints = Checkpointing(config, self.tell_checkpoint)
        state = first_state(settings, training, heal_server.address, self._checkpoints.every_steps)
        self._segments = self._make_keeper(settings, training)
        super().__init__(state, connections, self._checkpoints, self._segments)
        self._settings, self._training = settings, training
        self._uplink = Uplink(
            settings.socket,
            self.status,
            config.heartbeat_s,
            connections.see,
            self._stop,
            lambda faults, sticky: self._faults.add(faults, sticky),
            lambda fault: self._faults.note_fired(fault),
        )
        connections.on_plan = self._uplink.pass_plan
        self._checks = Checks.of(config, state.slot, self.tell_finding, self._tell_missed)
        self._rules = RulesOfChecks(config, training, self._tell_checks)
        replicas = config.shape.replicas
        self._faults = FaultPoints(config.faults, replicas, self._uplink, self._order_flip)
        self._checks.await_cell = lambda: self._writer_hook()(Op.INNER_WAIT)
        self._engine: Engine | None = None
        self.beside = BesideStates(training)
        self.guard_copies = self._make_guard_copies(training, state.fork_rules)
        self._seen: WatchedType | None = None
        """What left this rank while it last computed a type that other chains compute, too."""
        self._ballot: Ballot | None = None
        """Of the last reduction."""
        self._lap_began_s = time.monotonic()

    @property
    def version(self) -> int:
        """Number of steps that this trainer's state contains."""
        return self.state.version

    @property
    def leads(self) -> bool:
        """Whether this trainer is the quorum's first member."""
        return self.state.index == 0

    def _make_keeper(self, settings: TrainerSettings, training: Training) -> SegmentKeeper | None:
        """Return what keeps this trainer's segments; None in a job without snapshots."""
        config = settings.config
        if config.snapshots is None:
            return None
        path = socket_beside(settings.socket)
        return SegmentKeeper(
            job=config.job,
            slot=Slot(pod=PodUid(settings.pod), index=settings.slot),
            config=config.snapshots,
            client=SegmentClient(path, settings.slot, settings.incarnation, settings.address),
            engine=lambda: self.engine,
            learning_rate=training.learning_rate,
            hook=self._writer_hook,
        )

    def run(self, hello: dict[str, Any]) -> None:
        """Say hello and follow the plans until the job ends.

        Raises:
            JobOver: the job is complete.
        """
        self.start(hello)
        run_blocking(self.follow_plans())

    def start(self, hello: dict[str, Any]) -> None:
        """Say hello; what to do first is to wait for a plan."""
        rules = self.state.fork_rules
        self._uplink.start(hello | ({"outline": codec.encode(rules.outline)} if rules else {}))
        numerics = without_rules(hello["fingerprint"])
        self._rules.fingerprint = fingerprint.digest_of(numerics)
        durable = self._checkpoints.start(numerics)
        if self._segments is not None:
            self._segments.start(numerics)
        self.state = machine.saw_durable(self.state, durable)

    def advance(self, event: events.Event | None) -> events.Event | events.Compute:
        """Let the rank's state machine take an event, and carry out what it asks for.

        Args:
            event: the outcome of the action before; None at the start.

        Returns:
            The outcome of what was asked for; or Compute, which is the caller's to carry out.

        Raises:
            JobOver: the job is complete, and nothing is left to do.
        """
        return run_blocking(self.proceed(event))

    def fail(self, why: str, crash: Crash) -> None:
        """Tell the api that this job cannot run, and why."""
        placed = self._placed(crash)
        self.tell(fact_of(self.state, Failed, evidence=placed.place(why), crash=placed))

    def crash(self, crash: Crash) -> None:
        """Tell what ends this trainer."""
        self._uplink.send_crash(
            self._settings.slot, self._settings.incarnation, self._placed(crash)
        )

    def _placed(self, crash: Crash) -> Crash:
        """Return a crash with the rank and step in which it happened."""
        state = self.state
        if state.plan is None or state.index < 0:
            return crash
        rank = state.plan.members[state.index].rank
        return replace(crash, rank=rank, quorum=state.plan.quorum, step=state.step_at_hand)

    def _stop(self) -> None:
        """The supervisor says that the job has ended (the uplink's thread)."""
        logger.info("the job has ended")
        if self.state.phase is machine.Phase.FINISHED:
            self.connections.end()
            return
        logging.shutdown()
        os._exit(0)

    # Time and messages ------------------------------------------------------

    def now_s(self) -> float:
        """Return the wall clock, in seconds."""
        return time.time()

    def lap_s(self) -> float:
        """Return the seconds since this was asked before, or since the start."""
        began_s, self._lap_began_s = self._lap_began_s, time.monotonic()
        return self._lap_began_s - began_s

    def send_status(self) -> None:
        """Send the status to the supervisor."""
        self._uplink.send_status()

    def send_fact(self, fact: RankFact) -> None:
        """Send a fact to the supervisor."""
        self._uplink.send_fact(fact)

    def send_entry(self, entry: LedgerEntry, *, post: bool) -> None:
        """Send a ledger entry to the supervisor."""
        self._uplink.record(entry, post=post)

    def moved(self, before: machine.RankState, event: events.Event, reason: str) -> None:
        """Log a transition of the state machine."""
        del event
        unusual = {machine.Phase.SETTLING, machine.Phase.PARKED}
        level = logging.INFO if unusual & {before.phase, self.state.phase} else logging.DEBUG
        logger.log(level, "%s: %s", self.state.phase, reason)

    def warn(self, text: str) -> None:
        """Log that one of several attempts failed."""
        logger.warning("%s", text)

    # Others -----------------------------------------------------------------

    async def wait_newer(self, known: int) -> None:
        """Wait for a plan whose quorum has an id above ``known``.

        Raises:
            JobOver: there will be none.
        """
        connections = self.connections
        with connections.changed:
            connections.changed.wait_for(lambda: connections.ended or connections.has_newer(known))
            if connections.ended:
                raise JobOver("the job is complete")

    async def post(self, key: str, message: Message) -> None:
        """Give a message to all members."""
        self.connections.gather().post(key, codec.dumps(message).encode())

    async def gathered(self, key: str, kind: type[MessageT]) -> tuple[MessageT, ...]:
        """Wait for the messages that all members gave for ``key``, in index order."""
        return tuple(codec.loads(kind, body) for body in self.connections.gather().wait(key))

    async def connect(self, groups: Group | ChainGroups) -> None:
        """Connect groups that are not connected yet."""
        groups.connect()

    async def connect_cell(self, groups: ChainGroups) -> None:
        """Connect the inner mesh of a chain."""
        groups.connect_cell()

    def make_heal_client(self) -> HealClient:
        """Return what copies a state."""
        return HealClient(self._settings.address)

    async def copy(
        self, client: HealClient, sources: Sources, wanted: Wanted, expected: str
    ) -> str:
        """Copy other cells' state into the engine's; return the digest of its masters."""
        self._wait_copied()
        return client.copy(
            self.engine.state,
            sources=sources,
            wanted=wanted,
            expected=expected,
            holders=self.compared(self.holders),
        )

    def compared(self, holders: Sources) -> Sources:
        """Return whose whole states a copy is compared with: nobody's where nothing is checked."""
        return holders if self._checks.compares else ()

    async def make_anew(self, made: MadePosition, *, keeps_own: bool) -> str:
        """Write the engine's state from what was copied beside it; return its masters' digest."""
        self._wait_copied()
        with self._checks.over_state():
            return self.beside.make(self.engine.state, made, keeps_own=keeps_own)

    def serve(self, served: Wanted | None) -> None:
        """Answer joiners who ask for ``served``: the state is complete; None: nobody for now."""
        self._served.serve(served, self.engine.state if served else None)

    # Arithmetic and disk ----------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the adopted plan's stage."""
        self._build()
        assert self._engine is not None
        return self._engine

    def prepare(self) -> None:
        """Allocate what computes the adopted plan's stage, and check by its rules: also to heal."""
        self._build()
        self._rules.follow(self.plan.checks, self.engine, self.state.step_at_hand)

    def _build(self) -> None:
        state = self.state
        place = (state.member_stage, self.plan.num_stages, state.member_inner)
        if self._engine is None or not self._engine.computes(*place):
            check_units(state, self.plan)
            self._served.serve(None, None)  # freed first: a device need not hold two stages
            self._checkpoints.forget_state()
            if self._engine is not None:
                self._engine.close()
            if self._segments is not None:
                self._segments.forget_state()
            self._engine, self._checks.planner = None, None
            self._engine = self._training.build_engine(*place, self._begin_computing, self._checks)
            self._rules.plan(self._engine, starts=self.plan.method is Method.START)

    def _tell_checks(self, stage: int, told: Told) -> None:
        about = {"plan": told.plan, "shares": told.shares, "evidence": told.reason}
        self.tell(fact_of(self.state, ChecksFact, stage=stage, **about))

    def _begin_computing(self, action: Action) -> None:
        run_blocking(self.begin(action))

    async def reach(self, action: Action) -> None:
        """Fire the injected faults of an action that is about to run."""
        self._checks.begin_step(self.state.step_at_hand)
        self._faults.reach(self.plan, self.state.index, self.state.step_at_hand, action)
        if action.op in at_rest.BEGINS:
            at_rest.put_flips(self._checks, self.engine.state)

    def _order_flip(self, fault: FaultPoint, step: int) -> None:
        """Have the wrong bit of a fault put in (also other threads)."""
        phase = at_rest.phase_of(fault)
        if fault.flip is None or phase is None:
            self._checks.miss(Missed(fault.id, "it names no phase of a step that computes"))
        elif not self._checks.order(fault.id, step, phase, fault.flip):
            why = "calls of compiled code are no operators; use runtime.compile: Off"
            self._checks.miss(Missed(fault.id, why))

    def _tell_missed(self, missed: Missed) -> None:
        """Tell that a flip was not put in (also other threads)."""
        self.tell(fact_of(self.state, MissedFact, fault=missed.fault, evidence=missed.why))

    def tell_finding(self, finding: Finding) -> None:
        """Tell what a check has found (also other threads)."""
        state = self.state
        if state.plan is not None and state.index >= 0:
            finding = replace(finding, rank=state.plan.members[state.index].rank)
        logger.warning("%s", finding.describe())
        self._uplink.send_finding(finding)

    async def compute_types(
        self,
        types: Sequence[int],
        groups: ChainGroups | None,
        early: EarlyReduction[Group] | None,
    ) -> None:
        """Run types through the engine's stage; complete ones are held, whatever happens."""
        keeper, state = self._segments, self.state
        log: SentLog | None = None
        if keeper is not None:
            log = keeper.sent_log(self.plan, state.index, state.lineage, state.version)
        watched = self.watch(types, log)
        if watched is not None:
            # A reduction that begins meanwhile would digest in another thread.
            early, log = None, watched
        self.engine.compute(types, state.version, groups, early, log)

    def watch(self, types: Sequence[int], log: SentLog | None = None) -> WatchedType | None:
        """Return what digests the type of these that other chains compute, too, if one is."""
        compared = self.state.step_plan.compared if self.state.step_plan is not None else None
        if compared is None or compared.type not in types:
            return None
        self._seen = self.engine.watch(compared.type, log)
        return self._seen

    def held(self, *, judged: bool = False) -> tuple[Partial, ...]:
        """Return the complete partials; ``judged``: those that count once they are computed."""
        if judged:
            self.engine.judge_held()
        return self.engine.store.held()

    def bad_types(self) -> tuple[int, ...]:
        """Return the complete types that checks have found to be wrong."""
        return self.engine.types.bad()

    def account(self, shard_type: int) -> Account | None:
        """Return what left this rank while it computed a type; None: that was not kept."""
        return self._seen.account(shard_type) if self._seen is not None else None

    def tell_deviation(self, action: events.TellDeviation) -> None:
        """Tell that this device has computed a type otherwise than most chains."""
        self.tell_finding(finding_of(self.state, action))

    def drop_partials(self, partials: Sequence[Partial]) -> None:
        """Free some partials; logs of what they were computed from count no more."""
        self.engine.drop_partials(partials)
        if self._segments is not None:
            state = self.state
            types = [t for partial in partials for t in range(partial.first, partial.last + 1)]
            self._segments.withdraw(self.plan, state.index, state.lineage, state.version, types)

    def drop_held(self) -> None:
        """Free all partials."""
        if self._engine is not None:
            self._engine.drop_held()

    async def reduce(
        self, group: Group | None, table: Sequence[Supply], members: Sequence[int]
    ) -> None:
        """Reduce the position's gradient in canonical order."""
        engine, state = self.engine, self.state
        engine.reduce(group, table, members, state.index)
        # Asked for here, so that what a collective yields too late still fails the reduction.
        self._ballot = engine.ballot(
            group, table, state.index, state.slot, state.digest, state.version
        )

    def gradient_digest(self) -> str:
        """Return the digest of the reduced gradient."""
        return self.engine.gradient_digest()

    def make_ballot(self, step: int, table: Sequence[Supply]) -> Ballot:
        """Return the results that enter the vote on a step; the table credits its types."""
        del step, table  # those of the reduction before
        assert self._ballot is not None
        return self._ballot

    async def apply(self, commit: Commit) -> AppliedStep:
        """Apply the reduced gradient."""
        with user_code(f"the learning rate of step {commit.step}"):
            learning_rate = self._training.learning_rate(commit.step)
        engine = self.engine
        copy_wait_s = self._wait_copied()
        boosts = boosts_of(self.state.history, commit.step, self.state.member_inner)
        digest = engine.apply(commit, learning_rate, boosts)
        return AppliedStep(
            digest=digest,
            masters=engine.counted_masters(digest),
            partials=engine.sent,
            guarded=self.guard_copies.apply(commit, learning_rate, boosts),
            copy_wait_s=copy_wait_s,
        )

    def _wait_copied(self) -> float:
        """Wait until no copy needs the state as it is; return for how long the checkpoint's did."""
        if self._segments is not None:
            self._segments.wait_copied()
        return self._checkpoints.wait_copied()

    def final_digests(self, data: str) -> FinalDigests:
        """Return the digests at the end of the job; ``data`` is that of all samples consumed."""
        self._checks.begin_step(self.state.version)  # no step is at hand any more
        return self.engine.final_digests(self.state.version, self.state.digest, data)

    def rest_digest(self) -> str:
        """Return a digest of this rank's whole state beside the masters."""
        state, compares = self.state, self._checks.compares
        return at_rest.digest(self.engine, state.version, state.digest) if compares else ""

    async def load(self, version: int) -> events.StateLoaded | events.LoadFailed:
        """Read a version from the disk; version 0 is the seed's initial state."""
        self._wait_copied()
        return self._checkpoints.load(self.engine, version)

    def write_part(self, action: events.WriteCheckpoint) -> None:
        """Copy this position's part now and write it in the background."""
        state, hook = self.state, self._writer_hook()
        self._checkpoints.write(action, self.engine, self.plan, state.index, state.digest, hook)

    def rename(self, action: events.RenameCheckpoint) -> None:
        """Complete an attempt in the background."""
        self._checkpoints.complete(action, self.plan, self._writer_hook())

    async def wait_written(self) -> SaveStatus:
        """Wait until nothing is being written; return what to say of it then."""
        return self._checkpoints.wait_idle()

    # Other threads ----------------------------------------------------------

    def _writer_hook(self) -> Callable[[Op], None]:
        return self._faults.in_background(self.plan, self.state.index, self.state.version)

    def _serves(self) -> None:
        """A part of this rank's state is on its way to a joiner (a thread of the heal server)."""
        state = self.state
        if state.plan is not None:
            action = Action(Op.SERVE, state.member_stage)
            self._faults.reach(state.plan, state.index, state.version, action)
