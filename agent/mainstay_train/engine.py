"""What computes one stage: state, partials, interpreter and reducer of one cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mainstay_core.digest import Digest
from mainstay_core.ids import Slot
from mainstay_core.jobspec import JobConfig
from mainstay_core.messages import Commit, FinalDigests, PartialDigest, TypeStat
from mainstay_core.program import compile_compute
from mainstay_core.settle import Supply
from mainstay_train import digests, optimizer
from mainstay_train.groups import Group
from mainstay_train.heal import masters_digest
from mainstay_train.interpreter import Hook, Interpreter
from mainstay_train.optimizer import StageState
from mainstay_train.reduction import PartialStore, Reducer
from mainstay_train.workload import Workload, user_code


class Training(Protocol):
    """What a session drives, and what its commits need beside the votes."""

    @property
    def clip_norm(self) -> float | None:
        """Bound on the global norm of the mean gradient per token; None does not clip."""
        ...

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step: a function of the step alone."""
        ...

    def build_engine(self, stage: int, num_stages: int, hook: Hook) -> Engine:
        """Allocate what computes a stage; its state is void until restored.

        Args:
            stage: the stage to compute.
            num_stages: stages of a chain.
            hook: called before each action of the program.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTraining:
    """Trains a workload's blocks by the interpreter: every protection."""

    workload: Workload
    config: JobConfig
    device: str

    @property
    def clip_norm(self) -> float | None:
        """As the workload says."""
        return self.workload.clip_norm

    def learning_rate(self, step: int) -> float:
        """As the workload's schedule says."""
        return self.workload.learning_rate(step)

    def build_engine(self, stage: int, num_stages: int, hook: Hook) -> Engine:
        """Build the blocks of one stage, and what computes them."""
        return Engine.build(
            self.workload,
            self.config,
            stage=stage,
            num_stages=num_stages,
            device=self.device,
            hook=hook,
        )


@dataclass(slots=True, kw_only=True)
class Engine:
    """Made when a plan first gives this trainer the stage; decides nothing.

    Invariant: ``state`` is only written by :meth:`apply` and by whoever restores it.
    """

    stage: int
    num_stages: int
    micro_batches: int
    state: StageState
    store: PartialStore
    reducer: Reducer
    type_stats: dict[int, TypeStat] = field(default_factory=dict)
    """Of every complete type of the step."""
    interpreter: Interpreter | None = None
    """None where the user's own loop computes (:mod:`mainstay_train.own_loop`)."""
    sent: tuple[PartialDigest, ...] = ()
    """What this cell sent into the last reduction."""

    @classmethod
    def build(
        cls,
        workload: Workload,
        config: JobConfig,
        *,
        stage: int,
        num_stages: int,
        device: str,
        hook: Hook,
    ) -> Engine:
        """Allocate everything for ``stage``; its state is void until restored.

        Args:
            workload: what is trained.
            config: the job.
            stage: the stage to compute.
            num_stages: stages of a chain.
            device: where it computes.
            hook: called before each action of the program.
        """
        with user_code("building the model"):
            blocks = workload.build(workload.stages(num_stages)[stage], device)
            state = StageState(blocks, workload.optimizer)
        store = PartialStore(state.layout, config.shape.shards_per_lane, device)
        stats: dict[int, TypeStat] = {}
        interpreter = Interpreter(
            workload=workload,
            blocks=blocks,
            stage=stage,
            num_stages=num_stages,
            seed=config.shape.seed,
            micro_batches=config.shape.micro_batches,
            store=store,
            stats=stats,
            recompute=config.recompute,
            hook=hook,
        )
        return cls(
            stage=stage,
            num_stages=num_stages,
            micro_batches=config.shape.micro_batches,
            state=state,
            store=store,
            reducer=Reducer(state.layout, device),
            type_stats=stats,
            interpreter=interpreter,
        )

    def computes(self, stage: int, num_stages: int) -> bool:
        """Whether this is the engine for ``stage`` out of ``num_stages``."""
        return (self.stage, self.num_stages) == (stage, num_stages)

    def compute(self, types: Sequence[int], step: int, pipeline: Group | None) -> None:
        """Run the types through the stage; complete ones are in the store, whatever happens.

        Raises:
            GroupEnded: the chain broke.
            WorkloadError: the user's blocks or data set failed.
        """
        assert self.interpreter is not None
        program = compile_compute(types, self.micro_batches, self.stage, self.num_stages)
        with user_code(f"computing step {step}"):
            self.interpreter.run(program, step, pipeline)

    def reduce(
        self,
        group: Group | None,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        slot: Slot,
    ) -> None:
        """Reduce the stage's gradient; arguments as of :meth:`Reducer.reduce`.

        Raises:
            GroupEnded: the group ended before it completed; partials are as before.
        """
        self.reducer.reduce(group, table, members, index, self.store.partials)
        self.sent = tuple(
            PartialDigest(
                partial=supply.partial,
                slot=slot,
                digest=self._flat_digest(self.store.partials[supply.partial]).hex(),
            )
            for supply in table
            if supply.index == index
        )

    def stats(self, table: Sequence[Supply], index: int) -> tuple[TypeStat, ...]:
        """Of the types that the table credits to member ``index``."""
        return tuple(
            self.type_stats[shard_type]
            for supply in table
            if supply.index == index
            for shard_type in range(supply.partial.first, supply.partial.last + 1)
        )

    def norms_sq(self) -> tuple[float, ...]:
        """Squared norm of the reduced gradient, fp64, per block in model order."""
        return tuple(optimizer.block_norms_sq(self._reduced_blocks()))

    def gradient_digest(self) -> str:
        """Digest of the reduced gradient."""
        return self._flat_digest(self.reducer.reduced).hex()

    def apply(self, commit: Commit, learning_rate: float) -> str:
        """Apply the reduced gradient; returns the digest of the masters after it."""
        self.state.apply(self._reduced_blocks(), commit.scale, learning_rate)
        return masters_digest(self.state)

    def drop_held(self) -> None:
        """Forget all partials and what is known of their types."""
        self.store.clear()
        self.type_stats.clear()
        self.sent = ()

    def final_digests(self, version: int, masters: str, data: str) -> FinalDigests:
        """Digests of the stage at the end of the job.

        Args:
            version: steps applied.
            masters: digest of the masters at that version.
            data: digest of all samples consumed.
        """
        params = (
            (f"param:{name}", view)
            for block in self.state.blocks
            for name, view in block.layout.views(block.compute).items()
        )
        moments = ((t.id, t.tensor) for t in self.state.state_tensors() if t.kind != "master")
        return FinalDigests(
            stage=self.stage,
            version=version,
            params=digests.digest_tensors(params).hex(),
            masters=masters,
            optimizer=digests.digest_tensors(moments).hex(),
            data=data,
        )

    def _reduced_blocks(self) -> list[torch.Tensor]:
        return self.state.layout.block_views(self.reducer.reduced)

    def _flat_digest(self, flat: torch.Tensor) -> Digest:
        names = (f"gradient:{block.name}" for block in self.state.layout.blocks)
        views = self.state.layout.block_views(flat)
        return digests.digest_tensors(zip(names, views, strict=True))
