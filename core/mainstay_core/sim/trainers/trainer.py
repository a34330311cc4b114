"""A simulated trainer: what the rank's session needs, played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mainstay_core.base.ids import Incarnation, PodUid, QuorumId, Slot
from mainstay_core.dmr.witness import Account
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank import events, machine
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.reports import AppliedStep
from mainstay_core.rank.saving.saves import name_attempt
from mainstay_core.rank.serving import CopyOrder, Sources, Wanted
from mainstay_core.rank.session import RankSession
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.shell import MessageT
from mainstay_core.rank.steps.step_plan import Compared, types_of
from mainstay_core.sim import terms
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.engine import Awaited, Process, Sleep, Steps
from mainstay_core.sim.invariants.lineages import fork_rules
from mainstay_core.sim.invariants.units import job_units
from mainstay_core.sim.network import End
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.sim.trainers.connections import Connections
from mainstay_core.sim.trainers.guarding import GuardingTrainer
from mainstay_core.sim.trainers.heal import HealClient, HealServer
from mainstay_core.sim.trainers.keeper import SegmentKeeper
from mainstay_core.sim.trainers.saving import Saving
from mainstay_core.snapshots.orderings import Ordering
from mainstay_core.wire.reinitialisation import MadePosition
from mainstay_core.wire.repeated_lineage import read_outcomes, read_repeats
from mainstay_core.wire.votes import Commit, SaveStatus, Vote

POSTED = {
    "settle": "settle-posted",
    "stores": "stores-posted",
    "vote": "vote-posted",
    "save": "saves-posted",
}
"""Points after a post, by the first part of its key."""
CARRIED_OUT = {
    events.ReportsGathered: "settle-gathered",
    events.Reduced: "reduced",
    events.VotesGathered: "votes-gathered",
    events.Applied: "applied",
}
"""Points after an action, by its outcome."""
STEP_S = 0.5
"""What the ledger says of every step."""


class Trainer(Process, GuardingTrainer):
    """One life of a trainer.

    Args:
        world: everything around it.
        pod: where it runs.
        slot: which of the pod's.
        incarnation: its name.
        segments: where its pod's store of segments is asked.
    """

    def __init__(
        self,
        world: Surroundings,
        pod: PodUid,
        slot: int,
        incarnation: Incarnation,
        segments: str,
    ) -> None:
        Process.__init__(self, world.engine, f"{incarnation}", pod)
        self.world, self.slot, self.incarnation = world, Slot(pod=pod, index=slot), incarnation
        self.exit_code: int | None = None
        self._uplink: End | None = None
        shape = world.config.shape
        heal_address = f"heal@{incarnation}"
        state = machine.RankState(
            slot=self.slot,
            incarnation=incarnation,
            num_steps=shape.steps,
            shards_per_lane=shape.shards_per_lane,
            clip_norm=terms.CLIP_NORM,
            heal_address=heal_address,
            checkpoint_every_steps=shape.checkpoint_every_steps,
            snapshots=_snapshot_rules(world),
            fork_rules=fork_rules(world.config),
            repeats=read_repeats(world.config),
            outcomes=read_outcomes(world.config),
            witness_every_steps=world.config.witness_every_steps,
            compares_last=bool(world.config.witness_every_steps),
        )
        connections = Connections(self, world.network, incarnation, world.config.connect_s)
        connections.on_plan = lambda plan: self._send("plan", plan)
        self._saving = Saving(world, self, connections.changed, self.tell_checkpoint)
        self._segments: SegmentKeeper | None = None
        if world.config.snapshots is not None:
            self._segments = SegmentKeeper(world, self, self, segments, connections.changed)
        RankSession.__init__(self, state, connections, self._saving, self._segments)
        self.heal_server = HealServer(
            self,
            world.network,
            heal_address,
            connections.changed,
            lambda: connections.adopted,
            self.served,
            world.pace.copy_s,
        )
        self.cell: Compute | None = None
        self._beside: dict[tuple[int, int], str] = {}
        """States of other positions that were copied to make this one anew."""
        self._taken_back = ""
        """What guards had of it."""
        self.copies, self.given = {}, {}
        self.slow = 1.0
        self.tampered = False
        """Whether its state was corrupted on purpose: a vote must find it."""
        self.was_tampered = False
        self.guards_wrong: int | None = None
        """The end whose copy has just been corrupted on purpose."""
        self.sticks = False
        """Whether its device is wrong in each forward of a type that others compute, too."""
        self.wrong: set[tuple[int, int]] = set()
        """Steps and types that its device has computed wrongly, unseen by its own checks."""
        self.was_wrong = False
        """Whether its device was ever wrong where no check of its own sees it."""
        self.waits_in: object = "starting"

    @property
    def has_entries_to_repeat(self) -> bool:
        """Whether it took over telling the ledger, and has not told again what it holds."""
        return self._log.repeats

    @property
    def quorum(self) -> QuorumId | None:
        """Adopted quorum."""
        return self.state.plan.quorum if self.state.plan else None

    @property
    def known_wrong(self) -> tuple[int, ...]:
        """Types that it holds, and of which its checks have found that they are wrong."""
        return self.cell.bad_types() if self.cell else ()

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

    def _send(self, *frame: object) -> None:
        assert self._uplink is not None
        self._uplink.send(frame)

    async def _run(self) -> None:
        await Sleep(self.world.pace.startup_s())
        self.state = machine.saw_durable(self.state, self._saving.newest_complete())
        rules = self.state.fork_rules
        self._send("hello", rules.outline if rules is not None else ())
        self._send_statuses()
        await self.follow_plans()

    def _send_statuses(self) -> None:
        self.send_status()
        self.after(self.world.config.heartbeat_s, self._send_statuses)

    # What a session asks of its shell: time and messages ---------------------------------

    def now_s(self) -> float:
        return self.world.clock(self.slot.pod)

    def lap_s(self) -> float:
        return STEP_S

    def send_status(self) -> None:
        self._send("status", self.status.of_slot(self.slot.index))

    def send_fact(self, fact: object) -> None:
        self._send("fact", fact)

    def send_entry(self, entry: object, *, post: bool) -> None:
        self._send("ledger", entry, post)

    def moved(self, before: machine.RankState, event: events.Event, reason: str) -> None:
        if self.engine.tracing:
            self.engine.say(self.name, f"{self.state.phase}: {reason}")
        self.world.checks.moved(self, before, event)

    def warn(self, text: str) -> None:
        self.engine.say(self.name, text)

    # The points at which faults strike ---------------------------------------------------

    async def point(self, name: str) -> None:
        """A place in the code where a fault may strike; now and then others come first."""
        self.strike(name)
        if self.engine.rng.random() < 0.2:
            await Sleep(self.world.pace.hiccup_s())

    def strike(self, name: str) -> None:
        """A place in the code of any thread where a fault may strike."""
        self.world.faults.reach(self, name)

    async def perform(self, action: events.Action) -> events.Event | None:
        """Carry out an action, with the points before and after it."""
        self.waits_in = name = type(action).__name__
        await self.point(name)
        if isinstance(action, events.Settle):
            self.world.checks.adopts(self, action.plan)
        elif isinstance(action, events.LoadState):
            await self._wait_copied()
            if self._segments is not None and action.action is not StateAction.REPLAY:
                self._segments.forget_unfinished()
            self.made_cell().params, self.tampered = "", False
        outcome = await super().perform(action)
        if type(outcome) in CARRIED_OUT:
            await self.point(CARRIED_OUT[type(outcome)])
        return outcome

    async def compute(self, action: events.Compute) -> events.Event:
        self.waits_in = "Compute"
        await self.point("Compute")
        return await super().compute(action)

    async def reach(self, action: Action) -> None:
        """Take the time that computing takes; a fault may strike first."""
        self.waits_in = action
        self.world.faults.reach(self, action.op.value)
        if action.op in (Op.FORWARD, Op.BACKWARD_INPUT):
            await Sleep(self.world.pace.block_s() * self.slow)

    def _before(self, action: Action) -> Steps[None]:
        return self.begin(action).__await__()

    # Others --------------------------------------------------------------------------------

    async def wait_newer(self, known: int) -> None:
        while not self.connections.has_newer(known):
            await self.connections.changed

    async def post(self, key: str, message: object) -> None:
        if isinstance(message, Vote) and message.snapshots and message.snapshots.logged:
            self._check_logged()
        await Awaited(self.connections.gather().post(key, message))
        await self.point(POSTED[key.partition("/")[0]])

    def _check_logged(self) -> None:
        """What the vote says of the gradient holds, whatever the keeper goes by."""
        assert self._segments is not None
        plan, state, reduced = self.plan, self.state, self.made_cell().reduced
        assert reduced is not None
        if self._segments.logs_boundaries:
            assert state.step_plan is not None
            types = types_of(state.step_plan.table[state.member_position], state.index)
            self._segments.check_voted(plan, state.index, state.version, types)
            return
        keys = self._segments.duty(plan, state.index, state.lineage, state.version)
        self.world.checks.kept.logged(self.name, keys, reduced)

    async def _wait_copied(self) -> None:
        """Wait until no copy for the memory of pods needs the state as it is."""
        if self._segments is not None:
            await self._segments.wait_copied()

    async def gathered(self, key: str, kind: type[MessageT]) -> tuple[MessageT, ...]:
        del kind
        return await Awaited(self.connections.gather().wait(key))

    async def connect(self, groups: Any) -> None:
        await Awaited(groups.connect())
        self.world.checks.connected(self, groups.name)

    async def connect_cell(self, groups: Any) -> None:
        await Awaited(groups.connect_cell())

    def make_heal_client(self) -> HealClient:
        return HealClient(self, self.world.network, self.connections.changed)

    async def copy(
        self, client: HealClient, sources: Sources, wanted: Wanted, expected: str
    ) -> str:
        cell = self.made_cell()
        cell.params = await Awaited(client.copy(sources, wanted, expected))
        await self.point("healed")
        return cell.params

    async def begin_beside(
        self,
        client: HealClient,
        made: MadePosition,
        orders: Sequence[CopyOrder],
        *,
        keeps_own: bool,
    ) -> None:
        """Here they follow one another. What comes of them is the same."""

    async def copy_beside(
        self, client: HealClient, sources: Sources, wanted: Wanted, expected: str
    ) -> str:
        copied = await Awaited(client.copy(sources, wanted, expected))
        if wanted.guarded is None:
            width = self.world.config.shape.ranks_per_stage
            self._beside[divmod(wanted.position, width)] = copied
        else:
            self._taken_back = copied
        await self.point("copied-beside")
        return copied

    async def make_anew(self, made: MadePosition, *, keeps_own: bool) -> str:
        cell = self.made_cell()
        exact = terms.part(cell.params) if keeps_own else self._taken_back
        cell.params = terms.made(made, self._beside, exact)
        await self.point("made-anew")
        return cell.params

    def drop_beside(self) -> None:
        self._beside, self._taken_back = {}, ""

    def serve(self, served: Wanted | None) -> None:
        self.heal_server.serves = served
        if served is not None:
            self.connections.changed.fire()

    # Arithmetic and disk ---------------------------------------------------------------------

    def prepare(self) -> None:
        position, shape = self.state.member_position, self.world.config.shape
        if self.cell is None or self.cell.position != position:
            self.cell = Compute(
                position,
                shape.stages,
                shape.ranks_per_stage,
                shape.shards_per_lane,
                shape.micro_batches,
                self._before,
                self._sent,
                lambda shard_type: self.world.faults.goes_wrong(self, shard_type),
                shape.order,
            )

    def _sent(self, action: Action, content: str) -> None:
        """Log what is given to a neighbour, in a job that logs boundaries."""
        if self._segments is not None and self._segments.logs_boundaries:
            state = self.state
            self._segments.log_sent(
                self.plan, state.index, state.lineage, state.version, action, content
            )

    def made_cell(self) -> Compute:
        """Return the cell of the adopted plan's position."""
        self.prepare()
        assert self.cell is not None
        return self.cell

    async def compute_types(self, types: Sequence[int], groups: Any, early: Any) -> None:
        cell, compared = self.made_cell(), self.compared
        watched = None if compared is None else compared.type
        try:
            await Awaited(cell.run(types, self.state.version, groups, early, watched=watched))
        except GroupEnded:
            cell.give_up()
            raise

    def held(self, *, judged: bool = False) -> tuple[Any, ...]:
        if judged:
            self.made_cell().judge()
        return self.made_cell().held()

    def bad_types(self) -> tuple[int, ...]:
        return self.made_cell().bad_types()

    @property
    def compared(self) -> Compared | None:
        """The type that this rank's chain and others compute in the step at hand."""
        compared = self.state.step_plan.compared if self.state.step_plan else None
        return compared if compared is not None and self.state.computes(compared) else None

    @property
    def is_alone(self) -> bool:
        """Whether no other chain computes, nor is known to have told anything of the type."""
        others = any(self.slot not in told.cells for told in self.state.told)
        return self.state.plan is not None and len(self.plan.chains) < 2 and not others

    def account(self, shard_type: int) -> Account | None:
        return self.made_cell().accounts.get(shard_type)

    def tell_deviation(self, action: events.TellDeviation) -> None:
        deviation = action.deviation
        self.engine.say(self.name, f"{deviation.verdict}: {action.reason}")
        self.world.checks.accused(self, deviation.verdict)

    def drop_partials(self, partials: Sequence[Any]) -> None:
        self.made_cell().drop_partials(partials)
        if self._segments is not None and self._segments.logs_boundaries:
            state = self.state
            types = [t for partial in partials for t in range(partial.first, partial.last + 1)]
            self._segments.withdraw(self.plan, state.index, state.version, types)

    def drop_held(self) -> None:
        if self.cell is not None:
            self.cell.drop_held()

    async def reduce(self, group: Any, table: Sequence[Any], members: Sequence[int]) -> None:
        cell = self.made_cell()
        await Awaited(
            cell.reduce(
                group,
                table,
                members,
                self.state.index,
                lambda: self.point("reduce-half").__await__(),
            )
        )
        self.world.faults.corrupt_gradient(self, cell)

    def gradient_digest(self) -> str:
        return self.made_cell().gradient_digest()

    def make_ballot(self, step: int, table: Sequence[Any]) -> Any:
        return self.made_cell().make_ballot(table, self.state.index, step)

    async def apply(self, commit: Commit) -> AppliedStep:
        cell = self.made_cell()
        await self._wait_copied()
        if self._segments is not None:
            self._segments.forget_unfinished()
        await Sleep(self.world.pace.apply_s() * self.slow)
        cell.apply(commit.scale, boosts_of(self.state.history, commit.step, cell.inner))
        self.world.faults.corrupt_guard(self)
        guarded = self.apply_guarded(commit)
        self.world.checks.guarded(self, commit, guarded, self.guards_wrong)
        self.guards_wrong = None
        self.world.faults.corrupt_state(self, cell)
        self.world.checks.applied(self, commit, cell.params)
        return AppliedStep(digest=cell.params, masters=cell.params, guarded=guarded)

    def final_digests(self, data: str) -> Any:
        return self.made_cell().final_digests(self.state.version, self.state.digest, data)

    def rest_digest(self) -> str:
        return ""

    async def load(self, version: int) -> events.StateLoaded | events.LoadFailed:
        return await Awaited(self._saving.load(self.made_cell(), version))

    def write_part(self, action: events.WriteCheckpoint) -> None:
        self._saving.write(action, self.made_cell(), name_attempt(self.plan.quorum))

    def rename(self, action: events.RenameCheckpoint) -> None:
        self._saving.complete(action, self.plan.lineage)

    async def wait_written(self) -> SaveStatus:
        await Awaited(self._saving.wait_idle())
        return self._saving.status()


def _snapshot_rules(world: Surroundings) -> machine.SnapshotRules | None:
    config = world.config.snapshots
    if config is None:
        return None
    return machine.SnapshotRules(
        num_instalments=config.num_instalments,
        log=config.log,
        peers=config.peers,
        ordering=Ordering(config.ordering),
        decay=config.decay,
        units=job_units(world.scenario),
    )
