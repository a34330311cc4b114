"""Builds the engines with which a session trains, for blocks or whatever else computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from mainstay_core.dmr.settings import CheckRules
from mainstay_core.job.config import JobConfig
from mainstay_core.reinitialisation.guards import guarded_blocks
from mainstay_core.snapshots.job_units import JobUnits
from mainstay_core.wire.reinitialisation import Outline
from mainstay_train.checks.checker import Checks
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.compute import purity
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.interpreter import Hook
from mainstay_train.compute.loader import Loader
from mainstay_train.exact import optimizer
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model import compilation
from mainstay_train.model.blocks import Block
from mainstay_train.model.job_units import units_of_workload
from mainstay_train.model.outline import outline_of
from mainstay_train.model.workload import Workload, user_code


class Training(Protocol):
    """The interface between a session and whatever trains: blocks, or a user's own loop."""

    @property
    def clip_norm(self) -> float | None:
        """Bound on the global norm of the mean gradient per token; None does not clip."""
        ...

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step: a function of the step alone."""
        ...

    def job_units(self) -> JobUnits:
        """Return the units of all positions, for snapshots: the same on every rank."""
        ...

    def outline(self) -> Outline:
        """Return the blocks of every stage, from which another could be made anew."""
        ...

    def try_blocks(self, rules: CheckRules) -> None:
        """Try whether blocks are pure functions, before checks take them to be.

        Args:
            rules: by which is checked.

        Raises:
            InvalidSpecError: one is not.
        """
        ...

    def build_beside(
        self, stage: int, num_stages: int, inner: int, *, masters_only: bool
    ) -> StageState:
        """Allocate the state of another position; it is void.

        Args:
            stage: the other stage.
            num_stages: stages of a chain.
            inner: which of its ranks.
            masters_only: whether it has no optimizer state.
        """
        ...

    def build_guarded(self, end: int) -> tuple[StageState, tuple[slice, ...]]:
        """Allocate a copy of what guards keep of an end of the pipeline; it is void.

        Args:
            end: its stage.

        Returns:
            The blocks with their optimizer's state, and where their statistics lie in a commit's.
        """
        ...

    def build_engine(
        self,
        stage: int,
        num_stages: int,
        inner: int,
        hook: Hook,
        checks: Checks | None = None,
    ) -> Engine:
        """Allocate what computes a stage; its state is void until initialized, healed or loaded.

        Args:
            stage: the stage to compute.
            num_stages: stages of a chain.
            inner: which of the stage's ranks this is.
            hook: called before each action of the program.
            checks: of what is computed; None: nothing is checked.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTraining:
    """Trains a workload's blocks by the interpreter: every protection."""

    workload: Workload
    config: JobConfig
    device: str
    loader: Loader
    """One for all stages that this trainer gets: a data set is called by one thread."""
    unskippable: Collection[str] = ()
    """Names of blocks of which a replay skips nothing (:mod:`mainstay_train.model.trial`)."""

    @property
    def clip_norm(self) -> float | None:
        """As the workload says."""
        return self.workload.clip_norm

    def learning_rate(self, step: int) -> float:
        """As the workload's schedule says."""
        return self.workload.learning_rate(step)

    def job_units(self) -> JobUnits:
        """Those that the blocks name."""
        inner = inner_mesh(self.config, self.device, 0)
        with user_code("laying out the model"):
            return units_of_workload(
                self.workload, self.config.shape, inner, torch.device(self.device)
            )

    def outline(self) -> Outline:
        """Those of the workload."""
        with user_code("laying out the model"):
            inner = inner_mesh(self.config, self.device, 0)
            return outline_of(self.workload, self.config.shape.stages, inner, self.config.shape.cut)

    def try_blocks(self, rules: CheckRules) -> None:
        """Run each kind of block some times, under checks if the rules have any."""
        self.loader.rest()  # a data set is called by one thread
        with user_code("trying the blocks"):
            compiles = self.config.compile == compilation.BLOCKS
            purity.try_blocks(self.workload, torch.device(self.device), rules, compiles=compiles)

    def build_beside(
        self, stage: int, num_stages: int, inner: int, *, masters_only: bool
    ) -> StageState:
        """Build the other position's blocks, if asked with an optimizer that keeps nothing."""
        with user_code("building the model"):
            mine = self.workload.stages(num_stages, self.config.shape.cut)[stage]
            mesh = inner_mesh(self.config, self.device, inner)
            blocks = self.workload.build(mine, self.device, mesh)
            kept = optimizer.stateless if masters_only else self.workload.optimizer
            return StageState(blocks, kept)

    def build_guarded(self, end: int) -> tuple[StageState, tuple[slice, ...]]:
        """Build an end's guarded blocks, with the optimizer that the end has for them."""
        names = guarded_blocks(self.outline(), end)
        with user_code("building the model"):
            stages = self.workload.stages(self.config.shape.stages, self.config.shape.cut)
            mine = [i for i in stages[end] if self.workload.blocks[i].name in names]
            blocks = self.workload.build(mine, self.device)
            state = StageState(blocks, self.workload.optimizer)
            return state, self.workload.statistics(mine)

    def build_engine(
        self,
        stage: int,
        num_stages: int,
        inner: int,
        hook: Hook,
        checks: Checks | None = None,
    ) -> Engine:
        """Build the blocks of one stage, and what computes them."""
        engine = Engine.build(
            self.workload,
            self.config,
            self.loader,
            stage=stage,
            num_stages=num_stages,
            device=self.device,
            hook=hook,
            inner=inner_mesh(self.config, self.device, inner),
            checks=checks,
        )
        for block in engine.state.blocks:
            assert isinstance(block, Block), "only a user's own loop has others"
            block.may_skip = block.name not in self.unskippable
        return engine


def inner_mesh(config: JobConfig, device: str, index: int) -> InnerMesh:
    """The inner mesh as its rank ``index`` sees it."""
    kind = device.partition(":")[0]
    return InnerMesh(size=config.shape.ranks_per_stage, index=index, device_type=kind)
