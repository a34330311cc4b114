"""A simulated trainer's segments: what it writes for its position, and a lost state made anew.

As ``mainstay_train.snapshots``: states are copied while the step is computed, and apply waits until
the copy has left; a gradient is at its holders before the vote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from mainstay_core.planning.program import Action, Op
from mainstay_core.rank.events import LoadFailed, Snapshot, StateLoaded
from mainstay_core.rank.replays.authors import Authorship, authorship
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay, UnfinishedReplay
from mainstay_core.segments.frames import Segment, VotedLogs
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.sim import terms
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.engine import Awaited, Process, ProcessKilled, Signal, Sleep, Steps
from mainstay_core.sim.groups import ChainGroup
from mainstay_core.sim.invariants.units import is_whole, key_of, size_of, unit_number
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.sim.trainers.boundary_replayer import (
    BoundaryReplayer,
    DiffersError,
    UnusableError,
)
from mainstay_core.sim.trainers.owner import Owner
from mainstay_core.sim.trainers.replay_segments import ReplaySegments
from mainstay_core.sim.trainers.replayer import Replayer
from mainstay_core.sim.trainers.segment_client import Instalment, SegmentClient, Wait
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.facts import Phase
from mainstay_core.wire.plan import OtherStore, Plan
from mainstay_core.wire.segments import (
    BadSegment,
    Holder,
    SegmentHeader,
    SegmentKey,
    SegmentKind,
    StoreReport,
    boundary_key,
)
from mainstay_core.wire.votes import CommitRecord, SnapshotStatus
from mainstay_core.wire.windows import Measures

FINGERPRINT = "f" * 32


class SegmentKeeper:
    """The segments of one trainer.

    Args:
        world: everything around it.
        process: the trainer.
        owner: the same.
        address: of its pod's store.
        changed: fired with everything that may end a wait.
    """

    def __init__(
        self,
        world: Surroundings,
        process: Process,
        owner: Owner,
        address: str,
        changed: Signal,
    ) -> None:
        config = world.config.snapshots
        assert config is not None
        self._world, self._process, self._owner, self._changed = world, process, owner, changed
        self._config = config
        self._client = SegmentClient(world, process, address, changed, self._note_held)
        self._sending: list[Instalment] = []
        """Those that are in the own store, and not known to be at all holders."""
        self._to_copy = 0
        self._states: dict[tuple[SegmentKey, str], bool] = {}
        """States of the window in flight, with the nonce of their quorum; whether they were given
        to the store."""
        self._places: dict[SegmentKey, int] = {}
        """Of the same in the window's order."""
        self._window: Window | None = None
        self._window_in = ""
        """Nonce of its quorum."""
        self._keep_from = 0
        self._bad: list[BadSegment] = []
        self._is_full = False
        """Whether a replay found no room for what others of its stretch read."""
        self._unfinished = UnfinishedReplay[Replayer]()
        self._authored: tuple[Plan, int, Authorship] | None = None
        """What a member of a plan is the author of, as it was asked for last."""

    # What is told -------------------------------------------------------------------

    async def report(self, lineage: int, *, whole: bool) -> StoreReport:
        """Return which segments were found damaged, and what the pod's store holds."""
        bad = tuple(b for b in self._bad if b.key.lineage == lineage)
        held = await Awaited(self._client.report(lineage)) if whole else None
        if held is None:
            held = StoreReport(pod=self._owner.slot.pod, address="", lineage=lineage)
        return replace(held, bad=bad, is_full=self._is_full)

    async def ask_others(
        self, wait: Wait, lineage: int, others: Sequence[OtherStore]
    ) -> tuple[StoreReport, ...]:
        """Return what stores of other pods hold; one that does not answer is empty."""
        asked = [self._client.report_of(other, lineage, wait.is_over) for other in others]
        return tuple([await Awaited(steps) for steps in asked])

    def status(self, version: int, *, logged: bool) -> SnapshotStatus:
        """Return what to say of segments in the vote on the step at ``version``."""
        left = [k.version for (k, _), g in self._states.items() if not self._is_copied(k, g)]
        return SnapshotStatus(
            logged=logged,
            copied=min(left, default=version + 1),
            # Each measures for itself: no two ranks want the same.
            measures=None if self._config.num_instalments else self._measures(),
        )

    def _is_copied(self, key: SegmentKey, given: bool) -> bool:
        return given and self._client.is_held(key)

    def _measures(self) -> Measures:
        """Return other measurements at each vote; now and then nothing was measured yet."""
        rng = self._world.engine.rng
        rate = 2 * PAGE_BYTES * rng.randint(1, 6)
        return Measures(
            copy_bytes_per_s=rate,
            host_bytes_per_s=rate + rng.randint(0, PAGE_BYTES),
            network_bytes_per_s=rng.choice((0, 2 * rate, 3 * rate)),
            step_us=rng.randint(500_000, 2_000_000),
        )

    def record(self, record: CommitRecord) -> None:
        """Give the pod's store a commit."""
        self._client.record(record)

    def keep_from(self, lineage: int, version: int) -> None:
        """Tell the pod's store that nothing before ``version`` is needed any more."""
        state = self._owner.state
        assert state.plan is not None
        checks = self._world.checks.kept
        # A rank that joins is told what the others have.
        newest = max(state.version, state.settlement.version if state.settlement else 0)
        by_votes = state.phase is Phase.APPLYING
        name = self._process.name
        checks.needless(name, state.plan, lineage, version, newest, by_votes=by_votes)
        self._keep_from = version
        self._client.keep_from(lineage, version)

    def go_back(self, lineage: int, version: int, *, drops_later: bool) -> None:
        """Tell the pod's store that the job goes on from a version that may be an older one."""
        # Only of a checkpoint's version is nothing older needed.
        self._keep_from = version if drops_later else min(self._keep_from, version)
        if drops_later:
            self._is_full = False
            self._unfinished.forget()
            self._world.checks.kept.went_back(lineage)
        self._client.keep_from(lineage, version, may_go_back=True, drops_later=drops_later)

    # What is written ------------------------------------------------------------------

    def snapshot(self, plan: Plan, index: int, lineage: int, action: Snapshot) -> None:
        """Begin to copy this member's units of an instalment."""
        own = self._authorship(plan, index)
        self._world.checks.kept.copies(plan, index, action)
        position = plan.position_of(index)
        window = action.window, plan.quorum.nonce
        if (self._window, self._window_in) != window:
            (self._window, self._window_in), self._states, self._places = window, {}, {}
            self._sending = []
        instalment = Instalment()
        for unit in action.units:
            number = unit_number(unit.name)
            key = key_of(lineage, position, number, unit.kind, action.version)
            self._states[key, plan.quorum.nonce], self._places[key] = False, unit.place
            self._to_copy += 1
            instalment.keys.append(key)
            cell = self._owner.made_cell()
            self._process.spawn(self._copy(plan, own.holders, key, cell, instalment))

    def _copy(
        self,
        plan: Plan,
        holders: Sequence[Holder],
        key: SegmentKey,
        cell: Compute,
        instalment: Instalment,
    ) -> Steps[None]:
        yield self._world.pace.segment_s()
        self._write(plan, holders, key, cell.params)
        if (key, plan.quorum.nonce) in self._states:
            self._states[key, plan.quorum.nonce] = True
        self._to_copy -= 1
        self._changed.fire()
        instalment.num_copied += 1
        if instalment.num_copied < len(instalment.keys):
            return
        if plan.quorum.nonce == self._window_in:
            self._sending.append(instalment)
        self._owner.strike("SNAPSHOT_COPIED")

    def _note_held(self, key: SegmentKey) -> None:
        """All holders have a segment; that may be the last one of an instalment."""
        for instalment in self._sending:
            if key in instalment.keys and all(map(self._client.is_held, instalment.keys)):
                self._sending.remove(instalment)
                with suppress(ProcessKilled):  # no thread of the trainer stands here
                    self._owner.strike("SNAPSHOT_HELD")
                return

    async def wait_copied(self) -> None:
        """Wait until what is being copied has left the state: it is about to be written."""
        while self._to_copy:
            await self._changed

    def begin_wait(self) -> Wait:
        """Return what ends a wait."""
        return Wait(self._changed)

    @property
    def logs_boundaries(self) -> bool:
        """Whether what crosses boundaries is logged, and not gradients."""
        return self._config.boundary

    def log_sent(
        self, plan: Plan, index: int, lineage: int, step: int, action: Action, content: str
    ) -> None:
        """Keep what this member gives a neighbour."""
        kind = SegmentKind.ACTIVATION if action.op is Op.SEND_F else SegmentKind.INPUT_GRADIENT
        key = boundary_key(
            lineage, plan.position_of(index), kind, step, action.type, action.micro_batch
        )
        self._write(plan, (), key, content)

    async def log(
        self, wait: Wait, plan: Plan, index: int, lineage: int, step: int, types: Sequence[int]
    ) -> bool:
        """Have this member's logs of a step kept; return whether its holders have them."""
        if self.logs_boundaries:
            return await self._log_boundaries(wait, self._voted(plan, index, lineage, step, types))
        own = self._authorship(plan, index)
        reduced = self._owner.made_cell().reduced
        assert reduced is not None
        keys = self.duty(plan, index, lineage, step)
        await Sleep(self._world.pace.hiccup_s())
        for key in keys:
            self._write(plan, own.holders, key, reduced)
        await Awaited(self._client.wait_answered(keys, wait.is_over))
        await self._owner.point("logged")
        return all(self._client.is_held(key) for key in keys) and not wait.ended

    async def _log_boundaries(self, wait: Wait, logs: VotedLogs) -> bool:
        await Sleep(self._world.pace.hiccup_s())
        keys = self._keys_of(logs)
        await Awaited(self._client.wait_answered(keys, wait.is_over))
        await self._owner.point("logged")
        is_kept = all(self._client.is_held(key) for key in keys) and not wait.ended
        if not keys or not is_kept:
            return is_kept
        return await Awaited(self._client.vote_on(logs, wait.is_over)) and not wait.ended

    def _voted(
        self, plan: Plan, index: int, lineage: int, step: int, types: Sequence[int]
    ) -> VotedLogs:
        stage, last = plan.members[index].rank.stage, plan.num_stages - 1
        kinds = [SegmentKind.ACTIVATION] if stage < last else []
        kinds += [SegmentKind.INPUT_GRADIENT] if stage > 0 else []
        return VotedLogs(
            request=0,
            lineage=lineage,
            position=plan.position_of(index),
            step=step,
            quorum=str(plan.quorum),
            kinds=tuple(kinds),
            types=tuple(types),
            micro_batches=self._world.config.shape.micro_batches,
        )

    def _keys_of(self, logs: VotedLogs) -> list[SegmentKey]:
        return [
            boundary_key(logs.lineage, logs.position, kind, logs.step, shard_type, micro_batch)
            for kind in logs.kinds
            for shard_type in logs.types
            for micro_batch in range(logs.micro_batches)
        ]

    def withdraw(self, plan: Plan, index: int, step: int, types: Sequence[int]) -> None:
        """Have nothing count of what this member sent for types that it no longer holds."""
        lineage = self._owner.state.lineage
        for key in self._keys_of(self._voted(plan, index, lineage, step, types)):
            self._client.withdraw(key)

    def check_voted(self, plan: Plan, index: int, step: int, types: Sequence[int]) -> None:
        """What a vote says of boundary logs holds, whatever this keeper goes by."""
        logs = self._voted(plan, index, self._owner.state.lineage, step, types)
        self._world.checks.kept.logged_boundaries(self._process.name, self._client.address, logs)

    def duty(self, plan: Plan, index: int, lineage: int, step: int) -> list[SegmentKey]:
        """Return the segments of a step's gradient that are this member's to write."""
        position, own = plan.position_of(index), self._authorship(plan, index)
        return [
            key_of(lineage, position, int(unit.name), SegmentKind.GRADIENT, step)
            for unit in own.units
        ]

    def _write(self, plan: Plan, holders: Sequence[Holder], key: SegmentKey, whole: str) -> None:
        content = terms.unit_of(key.unit, whole)
        if key.kind is SegmentKind.COMPUTE:
            content = terms.compute_weights(content)
        window = self._window or Window(first=0, length=1)
        header = SegmentHeader(
            key=key,
            job=plan.job,
            fingerprint=FINGERPRINT,
            unit_name=str(key.unit),
            num_units=self._world.scenario.num_units(key.position),
            nonce=plan.quorum.nonce,
            window=window.first,
            num_instalments=window.length,
            size_bytes=size_of(key.unit, key.kind),
            digest=terms.term("bytes", content),
            place=self._places.get(key, 0),
            quorum=plan.quorum.id,
        )
        self._client.write(header, content, holders, self._keep_from)

    def _authorship(self, plan: Plan, index: int) -> Authorship:
        known = self._authored
        if known is None or known[0] is not plan or known[1] != index:
            known = self._authored = plan, index, self._find_authorship(plan, index)
        return known[2]

    def _find_authorship(self, plan: Plan, index: int) -> Authorship:
        units = range(self._world.scenario.num_units(plan.position_of(index)))
        order = tuple(
            UnitPrice(
                name=str(n),
                full_bytes=size_of(n, SegmentKind.STATE),
                compute_bytes=0,
            )
            for n in reversed(units)
        )
        config = self._config
        return authorship(plan, index, order, peers=config.peers, domains=config.domains)

    # What is read ---------------------------------------------------------------------

    async def replay(
        self,
        wait: Wait,
        plan: Plan,
        index: int,
        replay: Replay | BoundaryReplay,
        chain: ChainGroup | None,
    ) -> StateLoaded | LoadFailed:
        """Make the state anew."""
        if isinstance(replay, BoundaryReplay):
            return await self._replay_steps(wait, plan, index, replay, chain)
        replayer = self._unfinished.take(plan)
        if replayer is None or not replayer.can_go_on(plan.lineage, replay):
            stage, inner = divmod(replay.position, plan.ranks_per_stage)
            shape = self._world.config.shape
            blocks = terms.blocks_of(stage, shape.stages, shape.order)
            replayer = Replayer(plan.lineage, replay.position, blocks, inner)
        self._world.checks.seen["replay gone on with"] += replayer.has_begun
        try:
            params = await replayer.run(replay, ReplaySegments(self, wait, plan))
        except UnusableError as error:
            if wait.ended and not isinstance(error, DiffersError):
                self._unfinished.keep(plan, replayer)
            return self._failed(error)
        return await self._made(replay, params)

    def forget_unfinished(self) -> None:
        """Go on with no replay that has not ended: something else writes the state."""
        self._unfinished.forget()

    async def _replay_steps(
        self,
        wait: Wait,
        plan: Plan,
        index: int,
        replay: BoundaryReplay,
        chain: ChainGroup | None,
    ) -> StateLoaded | LoadFailed:
        """Compute a lost stage's steps again."""
        shape = self._world.config.shape
        segments = ReplaySegments(self, wait, plan)
        cell = None if chain is None else chain.cell
        replayer = BoundaryReplayer(
            plan, index, replay, segments, shape.shards_per_lane, shape.micro_batches, cell
        )
        try:
            params = await replayer.run()
        except UnusableError as error:
            self._is_full = bool(replay.relays and segments.why_full())
            return self._failed(error)
        outcome = await self._made(replay, params)
        if isinstance(outcome, StateLoaded):
            for step in replay.steps:
                record = step.record
                at = record.commit.step
                logs = self._voted(plan, index, record.lineage, at, replayer.own_types)
                logs = replace(logs, quorum=record.certified_in)
                if logs.kinds and logs.types:
                    await Awaited(self._client.vote_on(logs, wait.is_over))
            await self._owner.point("logged-again")
        return outcome

    def _failed(self, error: UnusableError) -> LoadFailed:
        """Give a replay up. What is read is whole, so only a bad state can make it differ."""
        if isinstance(error, DiffersError):
            self._world.checks.replay_differs(self._owner, str(error))
        return LoadFailed(str(error))

    async def _made(self, replay: Replay | BoundaryReplay, params: str) -> StateLoaded | LoadFailed:
        """Go on with a state that was made anew, if it is what was told."""
        await self._owner.point("replayed")
        if replay.next is not None and params != replay.next.states[replay.position]:
            return self._failed(
                DiffersError(f"version {replay.version} comes out differently than it was told")
            )
        self._world.checks.replayed(self._owner, replay.version, params, replay.history)
        self._owner.made_cell().params = params
        return StateLoaded(params)

    async def read(self, wait: Wait, key: SegmentKey, holders: Sequence[Holder]) -> terms.UnitTerm:
        """Read a segment from the first holder whose copy is good.

        Raises:
            UnusableError: no copy is good, or the quorum has ended.
        """
        own = [h for h in holders if h.address == self._client.address]
        for holder in [*own, *(h for h in holders if h not in own)]:
            found, content = await Awaited(self._client.fetch(key, holder, wait.is_over))
            if not isinstance(found, Segment):
                continue
            assert content is not None
            if is_whole(found.header, content):
                return content
            self._bad.append(BadSegment(key=key, pod=holder.pod))
            if holder in own:
                self._client.discard(key)
            else:
                await Awaited(self._client.doubt(holder, found.header, wait.is_over))
        raise UnusableError(wait.ended or f"no good copy of {key} is left")

    async def read_new(
        self, wait: Wait, plan: Plan, key: SegmentKey, holder: Holder, why: Callable[[], str]
    ) -> terms.UnitTerm:
        """Read what another member that replays has logged in this quorum; wait for it.

        Args:
            wait: that may end this.
            plan: that is adopted.
            key: of the segment.
            holder: whose store gets it.
            why: returns why this member gives up meanwhile; empty while it does not.

        Raises:
            UnusableError: it is not good, or the wait is over.
        """
        nonce = plan.quorum.nonce
        ended = wait.is_over
        found, content = await Awaited(
            self._client.fetch(key, holder, lambda: ended() or bool(why()), nonce)
        )
        if isinstance(found, Segment) and content is not None and is_whole(found.header, content):
            return content
        raise UnusableError(wait.ended or why() or f"{key} does not come from {holder.pod}")

    def write_again(self, plan: Plan, key: SegmentKey, content: str) -> None:
        """Write what a replayed stage sends into the own store."""
        self._write(plan, (), key, content)

    def why_full(self, keys: Sequence[SegmentKey]) -> str:
        """Return why one of some segments is not kept; empty if all are, or may be."""
        return next((why for key in keys if (why := self._client.why_not(key))), "")

    async def reach(self, action: Action) -> None:
        """A place before an action of a replay's program."""
        await self._owner.begin(action)

    async def point(self, name: str) -> None:
        """A place after an action of a replay."""
        await self._owner.point(name)

    async def applied(self) -> None:
        """A replayed step is applied."""
        await self._owner.point("replay-half")
        await Sleep(self._world.pace.hiccup_s())
