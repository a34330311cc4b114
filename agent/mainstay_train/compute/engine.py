"""The engine of one cell: its state, partials, interpreter and reducer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.base.errors import InvalidSpecError, ProtocolError
from mainstay_core.base.ids import Slot
from mainstay_core.base.shape import Order
from mainstay_core.dmr.settings import CheckRules
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.program import Action, compile_compute, compile_replay
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.early import EarlyReduction
from mainstay_core.rank.reports import Ballot
from mainstay_core.rank.steps.step_plan import Supply, types_of
from mainstay_core.wire.ledger import FinalDigests, PartialDigest
from mainstay_core.wire.plan import Partial
from mainstay_core.wire.votes import Commit
from mainstay_train.base.background import Background
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.checks.scopes import Scope
from mainstay_train.checks.sums import Digests, sum_now
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.group import Group
from mainstay_train.comm.mesh import SINGLE, InnerMesh
from mainstay_train.compute import comparisons
from mainstay_train.compute.arrivals import ReductionWaits
from mainstay_train.compute.boundaries import Recomputed, SentLog
from mainstay_train.compute.held import HeldTypes
from mainstay_train.compute.interpreter import Deliver, Hook, Interpreter
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.statistics import TypeResult, read_results
from mainstay_train.compute.watched import WatchedType
from mainstay_train.exact.early import BegunReduction
from mainstay_train.exact.gradients import GradientSums, Read
from mainstay_train.exact.optimizer import Boosts, Shared, StageState
from mainstay_train.exact.reduction import PartialStore, Reducer, SumNow
from mainstay_train.exact.unit_sums import units_of
from mainstay_train.kernels.calls import UnreliableDeviceError
from mainstay_train.model import compilation
from mainstay_train.model.workload import Workload, WorkloadError, user_code
from mainstay_train.sums import digests
from mainstay_train.sums.readout import Readout


@dataclass(slots=True, kw_only=True)
class Engine:
    """The state, partials, reducer and interpreter of one cell. It decides nothing.

    A plan that gives this trainer a stage for the first time has it made.
    Invariant: ``state`` is written by :meth:`apply` and by what initializes, heals or loads it.
    """

    stage: int
    num_stages: int
    micro_batches: int
    num_types: int = 1  # of a step
    order: Order = Order.IN_ORDER  # in which micro-batches pass the stages
    first_block: int = 0
    """Of the stage, in the model."""
    state: StageState
    store: PartialStore
    reducer: Reducer
    type_results: dict[int, TypeResult] = field(default_factory=dict)
    """Of every complete type of the step."""
    interpreter: Interpreter | None = None
    """None where the user's own loop computes (:mod:`mainstay_train.session.loop`)."""
    statistics: tuple[slice, ...] = ()
    """Where each block's statistics lie in those of a commit; none in a loop of the user's own."""
    sent: tuple[PartialDigest, ...] = ()
    """What this cell sent into the last reduction; with its ballot."""
    inner: InnerMesh = SINGLE
    checks: Checks = field(default_factory=Checks)
    types: HeldTypes = field(init=False)
    _chain: ChainGroups | None = None  # over which was computed last
    _begun: BegunReduction | None = None
    """That of the types that were computed last, until :meth:`reduce` or what comes instead."""
    _worker: Background = field(default_factory=lambda: Background("early reduction"))  # runs it
    _sums: tuple[tuple[Partial, list[torch.Tensor]], ...] = ()
    """Digests of the same, where they were computed."""
    _members: Sequence[int] = ()  # of the last reduction, in their order
    _masters: Shared | None = None  # as they were last applied
    read: Read | None = None  # of the reduced gradient; with the ballot
    _gradient: GradientSums = field(init=False)
    """Digest and norms of a flat gradient, reduced or a partial."""

    def __post_init__(self) -> None:
        self.types = HeldTypes(self.store, self.type_results, self.checks.void)
        self._gradient = GradientSums(
            self.state.layout,
            self.reducer.bounds,
            place=f"@{self.inner.index}" if self.inner.size > 1 else "",
            counts_copies=self.inner.counts_copies,
            device=self.reducer.reduced.device,
            units=units_of(self.state.blocks),
        )

    @classmethod
    def build(
        cls,
        workload: Workload,
        config: JobConfig,
        loader: Loader,
        *,
        stage: int,
        num_stages: int,
        device: str,
        hook: Hook,
        inner: InnerMesh = SINGLE,
        checks: Checks | None = None,
    ) -> Engine:
        """Allocate everything for ``stage``; its state is void until initialized, healed or loaded.

        Args:
            workload: what is trained.
            config: the job.
            loader: loads the workload's samples.
            stage: the stage to compute.
            num_stages: stages of a chain.
            device: where it computes.
            hook: called before each action of the program.
            inner: this rank's place in its cell.
            checks: of what is computed; None: nothing is checked.
        """
        checks = checks or Checks()
        with user_code("building the model"):
            compiles = config.compile == compilation.BLOCKS
            mine = workload.stages(num_stages, config.shape.cut)[stage]
            blocks = workload.build(mine, device, inner, compiles=compiles)
            state = StageState(blocks, workload.optimizer)
        store = PartialStore(state.layout, config.shape.shards_per_lane, device)
        results: dict[int, TypeResult] = {}
        interpreter = Interpreter(
            workload=workload,
            loader=loader,
            blocks=blocks,
            stage=stage,
            num_stages=num_stages,
            seed=config.shape.seed,
            num_steps=config.shape.steps,
            micro_batches=config.shape.micro_batches,
            store=store,
            results=results,
            recompute=config.recomputed,
            hook=hook,
            inner=inner,
            order=config.shape.order,
            checks=checks,
        )
        return cls(
            stage=stage,
            num_stages=num_stages,
            micro_batches=config.shape.micro_batches,
            num_types=config.shape.num_types,
            order=config.shape.order,
            first_block=mine[0],
            state=state,
            store=store,
            reducer=Reducer(
                state.layout, device, config.bucket_bytes, compares_wire=checks.compares
            ),
            type_results=results,
            interpreter=interpreter,
            statistics=workload.statistics(mine),
            inner=inner,
            checks=checks,
        )

    def follow(self, rules: CheckRules) -> None:
        """Check by other rules from now on, between two programs; the state stays as it is."""
        self._give_up()
        self.checks.change(rules)
        if self.interpreter is not None:
            self.interpreter.follow()
        self.reducer.compare_wire(compares_wire=self.checks.compares)

    def computes(self, stage: int, num_stages: int, inner: int) -> bool:
        """Whether this is the engine for that rank of ``stage`` out of ``num_stages``."""
        return (self.stage, self.num_stages, self.inner.index) == (stage, num_stages, inner)

    def compute(
        self,
        types: Sequence[int],
        step: int,
        chain: ChainGroups | None,
        early: EarlyReduction[Group] | None = None,
        log: SentLog | None = None,
    ) -> None:
        """Run the types through the stage; complete ones are in the store, whatever happens.

        Args:
            types: in this order.
            step: whose samples are used.
            chain: the groups of the rank's chain; None for a chain of one rank.
            early: the reduction that begins as soon as parts of the last type are there.
            log: keeps what is sent to neighbours; None: nothing does.

        Raises:
            GroupEnded: the chain broke.
            WorkloadError: the user's blocks or data set failed.
        """
        place = self.stage, self.num_stages, self.order
        program = compile_compute(types, self.micro_batches, *place)
        self.types.wrong.difference_update(types)
        self._run(program, step, chain, log, self._deliver_to(early))

    def watch(self, shard_type: int, log: SentLog | None) -> WatchedType:
        """Return a log that digests what leaves this cell for a type, before another log."""
        about = self.types, self._gradient, log, self.checks, self.inner
        return WatchedType(shard_type, *about, self.order)

    def program_again(self) -> tuple[Action, ...]:
        """Return the program of a step that is computed again, of all its types."""
        place = self.micro_batches, self.stage, self.num_stages
        return compile_replay(range(self.num_types), *place)

    def make_activation(self) -> torch.Tensor:
        """Return memory of the host for what crosses a stage's boundary in a micro-batch."""
        assert self.interpreter is not None
        return self.interpreter.make_activation("cpu")

    def compute_again(
        self, step: int, again: Recomputed, log: SentLog | None, cell: ChainGroups | None = None
    ) -> None:
        """Compute a step's reduced gradient as all cells of the stage together did before.

        All types of the step run in this cell, and are added in canonical order.

        Args:
            step: that was committed.
            again: what is particular about it.
            log: keeps what neighbours would get; None: nothing does.
            cell: groups over which the blocks compute; None where a cell has one rank.

        Raises:
            GroupEnded: another rank of the cell is gone.
            WorkloadError: the user's blocks or data set failed.
        """
        self.drop_held()
        self._run(self.program_again(), step, cell, log, again=again)
        if cell is not None:
            # Collectives that are aborted may end without an error.
            cell.judge()
            cell.check()
        table = [Supply(partial=partial, index=0) for partial in self.store.held()]
        self.reduce(None, table, [0], 0)
        self.drop_held()

    def _run(
        self,
        program: Sequence[Action],
        step: int,
        chain: ChainGroups | None,
        log: SentLog | None,
        deliver: Deliver | None = None,
        again: Recomputed | None = None,
    ) -> None:
        assert self.interpreter is not None
        self._give_up()
        self._chain = chain
        is_done = False
        try:
            with user_code(f"computing step {step}"):
                self.interpreter.run(program, step, chain, deliver, log=log, again=again)
            is_done = True
        except RuntimeError as error:
            if chain is not None:
                if why := chain.broke(error):
                    raise GroupEnded(why) from error
                chain.check()
            raise
        except (InvalidSpecError, ProtocolError, UnreliableDeviceError, WorkloadError):
            # What is aborted may leave anything, and whoever reads it may stumble.
            if chain is not None:
                chain.check()
            raise
        finally:
            if not is_done:
                self._give_up()

    def _deliver_to(self, early: EarlyReduction[Group] | None) -> Deliver | None:
        """Return what is told of finished blocks and reduces them, if that gains something."""
        # One bucket is there with the last gradient. And a device computes in its stream's order.
        on_host = self.reducer.reduced.device.type == "cpu"
        if early is None or not on_host or len(self.reducer.bounds) == 1:
            return None

        def deliver(block: int) -> None:
            if self._begun is None:
                within, sums = self._begin_reduction()
                by = self.store, self.reducer, self._worker, self._take
                told = within, self.checks.arrive, sums
                self._begun = BegunReduction(early, self.state.layout, *by, *told)
            self._begun.deliver(block)

        return deliver

    def _begin_reduction(self) -> tuple[Scope, SumNow | None]:
        """Return the scope of what it computes, and what has its sums executed twice."""
        self._gradient.begin()
        self.checks.wrong_sum = ""
        scope = self.checks.over(Phase.REDUCE)
        return scope, partial(sum_now, self.checks, scope) if self.checks.compares else None

    def _give_up(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.give_up()

    def close(self) -> None:
        """Give up what was begun: another engine comes."""
        self._give_up()
        self.checks.drop()
        self._worker.end()

    def reduce(
        self, group: Group | None, table: Sequence[Supply], members: Sequence[int], index: int
    ) -> None:
        """Reduce the stage's gradient; arguments as of :meth:`Reducer.reduce`.

        Checks that wait are executed while others are waited for, and all that are left afterwards.

        Raises:
            GroupEnded: the group ended before it completed; partials are as before, and so are
                checks that wait.
        """
        partials, self._members = self.store.partials, members
        own = [supply.partial for supply in table if supply.index == index]

        def describe() -> None:
            with self.checks.over(Phase.VOTE):
                self._sums = tuple((p, self._gradient.sums(partials[p])) for p in own)

        begun, waits = self._begun, ReductionWaits(self.checks)
        if begun is None or not begun.is_for(group, table, members):
            self._give_up()
            within, sums = self._begin_reduction()
            called = describe, None, self._take, within, self.checks.arrive, sums, waits.finish
            self.reducer.reduce(group, table, members, index, partials, *called)
        else:
            self._begun = None
            describe()
            waits.finish_begun(begun)
        self.checks.settle(self.type_results)
        self.checks.reduced(waits.waited_s)

    def _take(self, start: int) -> None:
        """A bucket of the reduced gradient is complete."""
        self._gradient.take(self.reducer.reduced, start)

    def judge_held(self) -> None:
        """Wait until the device is done, drop what the chain's end cut off, and check the rest."""
        self._give_up()
        if self._chain is not None:
            self._chain.judge()
        self.types.drop_cut_off()
        self.checks.settle(self.type_results)
        self.checks.judge(self.type_results)

    def drop_partials(self, partials: Sequence[Partial]) -> None:
        """Forget some partials and what is known of their types."""
        self._give_up()
        self.types.drop(partials)

    def ballot(
        self,
        group: Group | None,
        table: Sequence[Supply],
        index: int,
        slot: Slot,
        masters: str,
        step: int = 0,
    ) -> Ballot:
        """Return the results that enter the vote on what was reduced last.

        All are fetched from the device together, and little else of a step waits for it. So here a
        group is found to have ended while the device computed what the host had counted.

        Args:
            group: that reduced; None when there is one cell only.
            table: of the reduction; it credits types to members.
            index: this cell's member index.
            slot: of this rank.
            masters: digest of all its masters, as they are now.
            step: that is voted on; it says which part of the state beside the masters is told.

        Raises:
            GroupEnded: a group ended before the device was done; partials are as before.
        """
        supplied, readout = {t: self.type_results[t] for t in types_of(table, index)}, Readout()
        gradient = self._gradient.read(readout)
        copied = partial(comparisons.copied, self.reducer, self.state, self.inner)
        due = partial(comparisons.due, self.state, self.checks, step)
        copies, rest = (Digests(self.checks, make, readout) for make in (copied, due))
        arrived = readout.add_all(self.reducer.differing)
        sent = [(partial, readout.add_all(sums)) for partial, sums in self._sums]
        stats = read_results(supplied, readout)
        if self._chain is not None:
            self._chain.judge()
        if any(result.is_cut_off for result in self.type_results.values()):
            raise GroupEnded("the chain ended before its types were computed")
        readout.fetch(None if group is None else group.wait_for)
        self.checks.judge(self.type_results)  # the device has come to all of it
        self.read = gradient
        self.sent = tuple(
            PartialDigest(partial=partial, slot=slot, digest=digests.fetched(sums).hex())
            for partial, sums in sent
        )
        return Ballot(
            norms_sq=gradient.norms_sq(),
            gradient=gradient.digest().hex(),
            copies=self._copies_digest(digests.added(copies.read()), masters),
            rest=digests.added(told).hex() if (told := rest.read()) else "",
            problem=comparisons.tell_arrived(self.checks, step, self._members, arrived)
            or self.checks.wrong_sum,
            bad=self.types.bad(),
            stats=stats(),
        )

    def gradient_digests_of_units(self) -> dict[str, str]:
        """Digests of the gradient that the last ballot told, of the units that are whole blocks."""
        if self.inner.size > 1 or self.read is None:  # a block's identity names the inner rank
            return {}
        told = zip(self.state.blocks, self.read.block_digests(), strict=True)
        return {next(iter(b.units)): digest.hex() for b, digest in told if len(b.units) == 1}

    def gradient_digest(self) -> str:
        """Digest of the reduced gradient."""
        return self._gradient.digest(self.reducer.reduced).hex()

    def apply(self, commit: Commit, learning_rate: float, boosts: Boosts | None = None) -> str:
        """Apply the reduced gradient, the rate boosted by block; returns the masters' digest."""
        counted, gradients = self._counted(commit), self.reduced_blocks()
        with self.checks.over(Phase.APPLY):
            self.state.apply(gradients, commit.scale, learning_rate, counted, boosts=boosts)
            self._masters = self.state.masters_digest()
        return self._masters.whole.hex()

    def apply_again(
        self, commit: Commit, learning_rate: float, parameters: Sequence[str], boosts: Boosts
    ) -> None:
        """Apply to some parameters a step that this rank's position has applied before.

        Args:
            commit: of the step, whose reduced gradient is there for these parameters.
            learning_rate: of the step.
            parameters: their model-wide names.
            boosts: factors of the learning rate, by block; 1 for what is not named.
        """
        counted, reduced = self._counted(commit), self.reduced_blocks()
        with self.checks.over(Phase.APPLY, commit.step):
            only = frozenset(parameters)
            self.state.apply(reduced, commit.scale, learning_rate, counted, only, boosts)

    def _counted(self, commit: Commit) -> list[tuple[int, ...]] | None:
        """What each block counted in a step; None where no block counts anything."""
        return [commit.statistics[where] for where in self.statistics] or None

    def counted_masters(self, masters: str) -> str:
        """What a digest of all this rank's masters, as they are now, adds to that of the model."""
        return self.shared(masters).counted(self.inner).hex()

    def _copies_digest(self, gradients: Digest, masters: str) -> str:
        """Digest of the gradient and masters that all inner ranks hold; empty with one rank."""
        return "" if self.inner.size == 1 else (gradients + self.shared(masters).copies).hex()

    def shared(self, masters: str) -> Shared:
        """Return the digest of this rank's masters, as they are now, whose hex this should be."""
        if self._masters is None or self._masters.whole.hex() != masters:
            self._masters = self.state.masters_digest()  # they were healed or loaded
        return self._masters

    def drop_held(self) -> None:
        """Forget all partials and what is known of their types."""
        self._give_up()
        self.checks.drop()
        self.types.clear()
        self.sent = self._sums = ()

    def final_digests(self, version: int, masters: str, data: str) -> FinalDigests:
        """What this rank adds to the digests of the model at the end of the job.

        Args:
            version: steps applied.
            masters: digest of all its masters at that version.
            data: digest of all samples consumed.
        """
        counted = self.counted_masters(masters)
        return comparisons.final(self.state, self.inner, self.stage, version, counted, data)

    def reduced_blocks(self) -> list[torch.Tensor]:
        """Return the reduced gradient of each block, flat."""
        return self.state.layout.block_views(self.reducer.reduced)
