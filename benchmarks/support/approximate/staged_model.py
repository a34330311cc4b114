"""A model with all of its stages in this process, which lose their state and are made anew.

Blocks, optimizer, order of work, reduction and re-initialisation are the product's. In order, bits
do not depend on the number of stages, so one engine computes all of them. Swapped, flows go through
the blocks one by one as their routes say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.routes import Extent, route_of
from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.rank.votes import clip
from mainstay_core.reinitialisation.guards import ends_of, guarded_blocks
from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Policy,
    plan_reinitialisation,
)
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.reinitialisation import (
    Fork,
    History,
    MadeBlock,
    MadePosition,
    OptimizerState,
    Reinitialisation,
)
from mainstay_core.wire.votes import Commit
from mainstay_train.comm.mesh import SINGLE
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.micro_batch import as_received
from mainstay_train.compute.statistics import TypeResult, TypeSums
from mainstay_train.exact import numerics
from mainstay_train.exact.blending import make_anew
from mainstay_train.exact.draws import Address
from mainstay_train.exact.optimizer import StatePart, StateTensor
from mainstay_train.model.blocks import Block, Tape
from mainstay_train.model.data import Dataset, consumed_digest, num_tokens
from mainstay_train.model.outline import outline_of
from mainstay_train.model.workload import Workload

AUTHORS_FLOOR = 1e-4
"""What the authors' code adds to a norm, so that no weight is zero."""
SLOT = Slot(pod=PodUid("one"), index=0)
NO_CHAIN = "0" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way in which a lost stage gets a state."""

    name: str
    how: str = "plan"
    """``plan`` is the product's; ``random``, ``authors`` and ``stale`` are compared with it."""
    weighting: Weighting = Weighting.GRADIENT_NORM
    age: int = 0
    """Steps by which a stale copy is behind."""
    optimizer_state: OptimizerState = OptimizerState.ZERO
    boost: float = 1.1
    copies_ends: bool = False
    """Whether the layers of an end are copied from the stage beside it in an ordered pipeline, too,
    as the authors' code does. The product refuses that: the two have not learnt the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a model between two steps."""

    flats: dict[str, torch.Tensor]
    norms_sq: dict[str, float]
    history: History


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage's part of the whole state."""

    blocks: Sequence[StatePart]
    whole: Engine

    def flats(self) -> list[StateTensor]:
        names = {block.name for block in self.blocks}
        return [flat for flat in self.whole.state.flats() if flat.name in names]

    def refresh(self) -> None:
        for block in self.blocks:
            block.refresh()


@dataclass(frozen=True, slots=True)
class _Guard:
    """A copy of a block with its optimizer's state, as another stage keeps it."""

    kept: Sequence[StateTensor]
    blocks: Sequence[StatePart] = ()

    def flats(self) -> list[StateTensor]:
        return [*self.kept]

    def refresh(self) -> None:
        """Nothing computes with a copy."""


def _ignore(_: object) -> None:
    return None


class StagedModel:
    """A model in training, stage by stage.

    Args:
        workload: what is trained.
        shape: of the job: its stages, order, cut, types, micro-batches, steps and seed count.
        by_routes: goes through the blocks one by one in any order, so that times can be compared.
        redundant: each stage computes the next one's forward as well, and drops it.
    """

    def __init__(
        self,
        workload: Workload,
        shape: JobShape,
        *,
        by_routes: bool = False,
        redundant: bool = False,
    ) -> None:
        numerics.setup("cpu")
        alone = dataclasses.replace(
            shape, stages=1, replicas=1, min_replicas=1, order=Order.IN_ORDER
        )
        config = JobConfig(
            job=JobUid("approximate"), name="approximate", shape=alone, entrypoint="", workload={}
        )
        self._shape, self._workload = shape, workload
        self._engine = Engine.build(
            workload,
            config,
            Loader(workload.dataset, "cpu", ahead=False),
            stage=0,
            num_stages=1,
            device="cpu",
            hook=_ignore,
        )
        self._engine.state.initialize(shape.seed)
        self._outline = outline_of(workload, shape.stages, SINGLE, shape.cut)
        self._blocks = [b for b in self._engine.state.blocks if isinstance(b, Block)]
        cuts = workload.stages(shape.stages, shape.cut)
        self._stages = [
            _Stage([self._blocks[i] for i in numbers], self._engine) for numbers in cuts
        ]
        self._by_routes = by_routes or redundant or shape.order is Order.SWAPPED
        self._redundant = frozenset(
            block.name for stage in self._outline[1:] for block in stage if redundant
        )
        self._routes = [[*self._route(number)] for number in (0, 1)]
        self._guards = {
            block: twin
            for end, twin in ends_of(shape.stages)
            for block in guarded_blocks(self._outline, end)
        }
        """The stage that keeps a copy of a block which an end alone has."""
        self._history: History = ()
        self._norms_sq: dict[str, float] = {}
        self._num_tokens = 1

    def _route(self, number: int) -> Iterator[Block]:
        """The blocks through which a flow goes forward."""
        shape = self._shape
        for stage, extent in route_of(shape.order, number, shape.stages):
            blocks = [b for b in self._stages[stage].blocks if isinstance(b, Block)]
            if extent is Extent.EMBEDDING:
                blocks = blocks[:1]
            elif extent is Extent.HEAD:
                blocks = blocks[-1:]
            elif extent is Extent.LAYERS:
                blocks = blocks[stage == 0 : len(blocks) - (stage == shape.stages - 1)]
            yield from blocks

    def step(self, step: int) -> float:
        """Train one step; return its mean loss."""
        engine = self._engine
        engine.drop_held()
        if self._by_routes:
            self._compute(step)
        else:
            engine.compute(range(self._shape.num_types), step, None)
        table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
        engine.reduce(None, table, [0], 0)
        ballot = engine.ballot(None, table, 0, SLOT, "", step)
        tokens = sum(stat.tokens or 0 for stat in ballot.stats)
        norm, scale = clip(ballot.norms_sq, tokens, self._workload.clip_norm)
        loss = sum(stat.loss_sum or 0.0 for stat in ballot.stats) / tokens
        commit = Commit(step=step, norm=norm, scale=scale, tokens=tokens, loss=loss, data=NO_CHAIN)
        boosts = boosts_of(self._history, step, 0)
        engine.apply(commit, self._workload.learning_rate(step), boosts)
        names = [block.name for block in engine.state.blocks]
        self._norms_sq = dict(zip(names, ballot.norms_sq, strict=True))
        self._num_tokens = tokens
        return loss

    def _compute(self, step: int) -> None:
        """Run all types through the blocks; a type's gradients add in micro-batch order."""
        engine, num = self._engine, self._shape.micro_batches
        for shard_type in range(self._shape.num_types):
            sums = TypeSums()
            for micro_batch in range(num):
                address = Address(self._shape.seed, step, shard_type, micro_batch)
                self._pass(address, self._routes[(shard_type * num + micro_batch) % 2], sums)
            engine.type_results[shard_type] = TypeResult(
                loss_sum=sums.loss_sum, tokens=sums.tokens, data=sums.data.hex()
            )
            engine.store.complete(shard_type)

    def _pass(self, address: Address, route: Sequence[Block], sums: TypeSums) -> None:
        batch = self._workload.dataset.batch(address)
        sums.tokens += num_tokens(batch)
        sums.data += consumed_digest(address, batch)
        *body, head = route
        x, tapes = batch.tokens, list[tuple[Block, Tape]]()
        for block in body:
            if block.name in self._redundant:
                block.forward(x, address)
            tape = block.recompute(x, address)
            tapes.append((block, tape))
            assert tape.output is not None
            x = as_received(tape.output.detach())
        if head.name in self._redundant:
            head.recompute_loss(x, batch.targets, address)
        tape = head.recompute_loss(x, batch.targets, address)
        sums.add_loss(tape.loss)
        tapes.append((head, tape))
        gradient: torch.Tensor | None = None
        for block, tape in reversed(tapes):
            gradient = block.backward_input(tape, gradient)
            gradient = None if gradient is None else as_received(gradient)
            views = self._engine.store.scratch_views
            block.backward_weight(tape, views, accumulate=address.micro_batch > 0)

    def masters_digest(self) -> str:
        """Return the digest of all masters, as a ledger has it."""
        return self._engine.state.masters_digest().whole.hex()

    def validate(self, dataset: Dataset, num_batches: int, without: Collection[str] = ()) -> float:
        """Return the mean loss of a data set, blocks ``without`` left out.

        Stages are passed in order, as whoever uses the model would.
        """
        total, tokens = 0.0, 0
        *body, head = self._blocks
        for number in range(num_batches):
            address = Address(seed=-1, step=0, type=0, micro_batch=number)
            batch = dataset.batch(address)
            x = batch.tokens
            for block in body:
                if block.name not in without:
                    x = block.forward(x, address)
            total += float(head.recompute_loss(x, batch.targets, address).loss)
            tokens += num_tokens(batch)
        return total / tokens

    def layers_of(self, stage: int) -> list[str]:
        """Return the names of a stage's layers."""
        kinds = [block.kind for blocks in self._outline for block in blocks]
        layer = max(set(kinds), key=kinds.count)
        return [block.name for block in self._outline[stage] if block.kind == layer]

    def copy_of(self, stage: int) -> dict[str, torch.Tensor]:
        """Return a copy of a stage's state."""
        return {flat.id: flat.tensor.clone() for flat in self._stages[stage].flats()}

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that the next step depends on."""
        flats = {flat.id: flat.tensor.clone() for flat in self._engine.state.flats()}
        return Snapshot(flats=flats, norms_sq=self._norms_sq, history=self._history)

    def go_back(self, snapshot: Snapshot) -> None:
        """Go on from a copy."""
        for flat in self._engine.state.flats():
            flat.tensor.copy_(snapshot.flats[flat.id])
        self._norms_sq, self._history = snapshot.norms_sq, snapshot.history
        for stage in self._stages:
            stage.refresh()

    def lose(
        self, stage: int, step: int, strategy: Strategy, stale: Mapping[str, torch.Tensor]
    ) -> dict[int, float]:
        """Give a stage another state, as if every copy of it were gone.

        Args:
            stage: that is lost.
            step: steps trained so far.
            strategy: how it is made anew.
            stale: an older copy, where the strategy takes one.

        Returns:
            The weights of its layers' sources, by stage.

        Raises:
            ValueError: it cannot be made anew, and why.
        """
        lost, made = self._stages[stage], self._plan(stage, step, strategy)
        guards = self._guards_of(lost, made)
        if strategy.how == "stale":
            for flat in lost.flats():
                flat.tensor.copy_(stale[flat.id])
        elif strategy.how == "random":
            for flat in lost.flats():
                flat.tensor.zero_()
            for block in lost.blocks:
                block.initialize(self._shape.seed + 1 + step)
        else:
            beside = {(number, 0): part for number, part in enumerate(self._stages)}
            make_anew(lost, made, beside, guards)
        if strategy.how in ("stale", "random"):
            exact = {flat.id: flat.tensor for guard in guards.values() for flat in guard.flats()}
            for flat in lost.flats():
                if flat.id in exact:
                    flat.tensor.copy_(exact[flat.id])
        lost.refresh()
        self._history = (*self._history, _fork(made, step, strategy.boost))
        layer = self.layers_of(stage)[0]
        (sources,) = [block.sources for block in made.blocks if block.block == layer]
        return {source.stage: source.weight for source in sources}

    def _guards_of(self, lost: _Stage, made: MadePosition) -> dict[str, _Guard]:
        """Return what guards have of a stage, by block.

        A guard applies the same gradients as the owner, so it has the same bits.
        """
        found = {}
        for block in (one.block for one in made.blocks if one.is_exact):
            flats = [flat for flat in lost.flats() if flat.name == block]
            found[block] = _Guard([flat._replace(tensor=flat.tensor.clone()) for flat in flats])
        return found

    def _plan(self, stage: int, step: int, strategy: Strategy) -> MadePosition:
        has_twins = strategy.copies_ends or self._shape.order is Order.SWAPPED
        guards = {(block, 0): twin for block, twin in self._guards.items()}
        stale = {(stage, 0): step - strategy.age} if strategy.how == "stale" else {}
        answer = plan_reinitialisation(
            self._outline,
            [(stage, 0)],
            version=step,
            norms_sq=self._norms_sq,
            left=Left(guards=guards if has_twins else {}, stale=stale),
            policy=Policy(
                order=Order.SWAPPED if has_twins else Order.IN_ORDER,
                weighting=strategy.weighting,
                stale_steps=strategy.age,
                optimizer_state=strategy.optimizer_state,
            ),
        )
        if isinstance(answer, NoSource):
            raise ValueError(answer.reason)
        (made,) = answer.positions
        return self._weighed_as_authors(made) if strategy.how == "authors" else made

    def _weighed_as_authors(self, made: MadePosition) -> MadePosition:
        """Return a plan with the weights of the authors' code: norms, each stage clipped to 1."""
        norms = {
            stage: min(
                1.0,
                math.sqrt(sum(self._norms_sq[b.name] for b in blocks)) / self._num_tokens,
            )
            + AUTHORS_FLOOR
            for stage, blocks in enumerate(self._outline)
        }

        def weighed(block: MadeBlock) -> MadeBlock:
            total = sum(norms[source.stage] for source in block.sources)
            sources = tuple(
                dataclasses.replace(source, weight=norms[source.stage] / total)
                for source in block.sources
            )
            return dataclasses.replace(block, sources=sources)

        return dataclasses.replace(made, blocks=tuple(map(weighed, made.blocks)))


def _fork(made: MadePosition, step: int, boost: float) -> Fork:
    """Return what a state has in its history of it: the learning rate follows from that."""
    how = Reinitialisation(positions=(made,), reason="")
    return Fork(version=step, chain=NO_CHAIN, made=how, lr_boost=boost)
