"""A model with all of its stages in this process, which lose their state and are made anew.

Blocks, optimizer, order of work, reduction and re-initialisation are the product's. In order, bits
do not depend on the number of stages, so one engine computes all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.step_plan import Supply
from mainstay_core.rank.votes import clip
from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Policy,
    plan_reinitialisation,
)
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.reinitialisation import MadeBlock, MadePosition, Reinitialisation
from mainstay_core.wire.votes import Commit
from mainstay_train.comm.mesh import SINGLE
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.exact import numerics, optimizer
from mainstay_train.exact.blending import make_anew
from mainstay_train.exact.draws import Address
from mainstay_train.exact.optimizer import StatePart, StateTensor
from mainstay_train.model.blocks import Block
from mainstay_train.model.data import ByteDataset, Dataset, load_corpus, num_tokens
from mainstay_train.model.outline import outline_of
from mainstay_train.model.workload import Workload
from mainstay_train.models import llama

HELD_OUT_SHARE = 0.05
"""Of the text, at its end: it is never trained on."""
AUTHORS_FLOOR = 1e-4
"""What the authors' code adds to a norm, so that no weight is zero."""
SLOT = Slot(pod=PodUid("one"), index=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model and its training: everything on which a curve without losses depends."""

    data: str
    """A folder of text, a file, or "stdlib"."""
    stages: int = 6
    layers: int = 12
    dim: int = 64
    heads: int = 4
    sequence: int = 64
    micro_batch_size: int = 8
    types: int = 2
    steps: int = 1500
    lr: float = 1e-3
    seed: int = 0
    validation_batches: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way in which a lost stage gets a state."""

    name: str
    how: str = "plan"
    """``plan`` is the product's; ``random``, ``authors`` and ``stale`` are compared with it."""
    weighting: Weighting = Weighting.GRADIENT_NORM
    age: int = 0
    """Steps by which a stale copy is behind."""
    averages_moments: bool = False
    boost: float = 1.1


def split_text(data: str, folder: Path) -> tuple[Path, Path]:
    """Write the text to train on and the text held out, once; return their paths."""
    trained, held_out = folder / "trained.txt", folder / "held-out.txt"
    if not held_out.exists():
        content = bytes(load_corpus(data).data.numpy())
        border = int(len(content) * (1 - HELD_OUT_SHARE))
        trained.write_bytes(content[:border])
        held_out.write_bytes(content[border:])
    return trained, held_out


def workload_of(setting: Setting, text: Path) -> Workload:
    """Return the built-in Llama, trained as the paper says: Adam without decay, constant rate."""
    config: dict[str, Any] = {
        "dim": setting.dim,
        "layers": setting.layers,
        "heads": setting.heads,
        "kvHeads": setting.heads,
        "hidden": 4 * setting.dim,
        "sequence": setting.sequence,
        "microBatchSize": setting.micro_batch_size,
        "data": {"path": str(text)},
    }
    return dataclasses.replace(
        llama.workload(config),
        optimizer=optimizer.adamw(weight_decay=0.0, betas=(0.9, 0.999)),
        learning_rate=optimizer.constant(setting.lr),
    )


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


def _ignore(_: object) -> None:
    return None


class StagedModel:
    """A model in training, stage by stage.

    Args:
        workload: what is trained.
        shape: of the job: its types, micro-batches, steps and seed count.
        num_stages: that lose their states one by one.
        held_out: what is validated with, and in how many batches.
    """

    def __init__(
        self,
        workload: Workload,
        shape: JobShape,
        num_stages: int,
        held_out: tuple[Dataset, int] | None = None,
    ) -> None:
        numerics.setup("cpu")
        alone = dataclasses.replace(shape, stages=1, replicas=1, min_replicas=1)
        config = JobConfig(
            job=JobUid("approximate"), name="approximate", shape=alone, entrypoint="", workload={}
        )
        self._shape, self._workload, self._held_out = shape, workload, held_out
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
        self._outline = outline_of(workload, num_stages, SINGLE)
        blocks = self._engine.state.blocks
        self._stages = [
            _Stage([blocks[i] for i in numbers], self._engine)
            for numbers in workload.stages(num_stages)
        ]
        self._boosts: dict[str, float] = {}
        self._norms_sq: dict[str, float] = {}
        self._num_tokens = 1

    @classmethod
    def of(cls, setting: Setting, folder: Path) -> StagedModel:
        """Return the model of a setting, whose text lies split in a folder."""
        trained, held_out = split_text(setting.data, folder)
        shape = JobShape(
            lanes=1,
            shards_per_lane=setting.types,
            replicas=1,
            min_replicas=1,
            stages=setting.stages,
            steps=setting.steps,
            seed=setting.seed,
            micro_batches=1,
        )
        validation = ByteDataset(
            str(held_out), sequence=setting.sequence, micro_batch_size=setting.micro_batch_size
        )
        batches = setting.validation_batches
        return cls(workload_of(setting, trained), shape, setting.stages, (validation, batches))

    def step(self, step: int) -> float:
        """Train one step; return its mean loss."""
        engine = self._engine
        engine.drop_held()
        engine.compute(range(self._shape.num_types), step, None)
        table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
        engine.reduce(None, table, [0], 0)
        ballot = engine.ballot(None, table, 0, SLOT, "", step)
        tokens = sum(stat.tokens or 0 for stat in ballot.stats)
        norm, scale = clip(ballot.norms_sq, tokens, self._workload.clip_norm)
        loss = sum(stat.loss_sum or 0.0 for stat in ballot.stats) / tokens
        commit = Commit(step=step, norm=norm, scale=scale, tokens=tokens, loss=loss, data="0" * 32)
        engine.apply(commit, self._workload.learning_rate(step), self._boosts)
        names = [block.name for block in engine.state.blocks]
        self._norms_sq = dict(zip(names, ballot.norms_sq, strict=True))
        self._num_tokens = tokens
        return loss

    def masters_digest(self) -> str:
        """Return the digest of all masters, as a ledger has it."""
        return self._engine.state.masters_digest().whole.hex()

    def validate(self, without: Collection[str] = ()) -> float:
        """Return the mean loss on held-out text, blocks ``without`` left out."""
        assert self._held_out is not None, "there is nothing to validate with"
        (dataset, num_batches), total, tokens = self._held_out, 0.0, 0
        blocks = [b for b in self._engine.state.blocks if isinstance(b, Block)]
        for number in range(num_batches):
            address = Address(seed=1, step=0, type=0, micro_batch=number)
            batch = dataset.batch(address)
            x = batch.tokens
            for block in blocks[:-1]:
                if block.name not in without:
                    x = block.forward(x, address)
            total += float(blocks[-1].recompute_loss(x, batch.targets, address).loss)
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
            The weights, by stage.
        """
        lost, made = self._stages[stage], self._plan(stage, step, strategy)
        weights: dict[int, float] = {}
        if strategy.how == "stale":
            for flat in lost.flats():
                flat.tensor.copy_(stale[flat.id])
            lost.refresh()
        elif strategy.how == "random":
            for flat in lost.flats():
                flat.tensor.zero_()
            for block in lost.blocks:
                block.initialize(self._shape.seed + 1 + step)
        else:
            beside = {(number, 0): part for number, part in enumerate(self._stages)}
            make_anew(lost, made, beside)
            if strategy.averages_moments:
                self._average_moments(made)
            sources = made.blocks[0].sources
            weights = {source.stage: source.weight for source in sources}
        for block in lost.blocks:
            self._boosts[block.name] = strategy.boost
        return weights

    def _plan(self, stage: int, step: int, strategy: Strategy) -> MadePosition:
        answer = plan_reinitialisation(
            self._outline,
            [(stage, 0)],
            version=step,
            norms_sq=self._norms_sq,
            left=Left(),
            policy=Policy(weighting=strategy.weighting),
        )
        if isinstance(answer, NoSource):
            raise ValueError(answer.reason)
        assert isinstance(answer, Reinitialisation)
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

    def _average_moments(self, made: MadePosition) -> None:
        flats = {(f.name, f.kind): f.tensor for f in self._engine.state.flats()}
        for block in made.blocks:
            for (name, kind), tensor in flats.items():
                if name != block.block or kind == "master":
                    continue
                parts = [flats[s.block, kind] * s.weight for s in block.sources]
                tensor.copy_(torch.stack(parts).sum(0))
