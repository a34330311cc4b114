"""Chooses the sources from which the blocks of lost positions are made anew, or says why not.

Sources are tried best first (:class:`~mainstay_core.wire.reinitialisation.SourceKind`). A guard is
exact. A stale copy of the very same stage comes next while it is young enough. Then come other
stages: the twin of a pipeline's end, where flows pass in both orders, and the two neighbours of any
other stage. A young copy is also the only answer where two lost stages lie beside each other, for
which the paper has none (Blagoev et al., section 6).

A stage with several ranks is made anew position by position, from the same inner rank of the other
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mainstay_core.base.shape import Order
from mainstay_core.base.sums import add_in_order
from mainstay_core.base.words import count
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.reinitialisation.guards import guarded_blocks
from mainstay_core.reinitialisation.likeness import like_blocks, match_index
from mainstay_core.reinitialisation.weights import Weighting, Weights, weigh
from mainstay_core.wire.reinitialisation import (
    BlockOutline,
    BlockSource,
    MadeBlock,
    MadePosition,
    OptimizerState,
    Reinitialisation,
    Rule,
    SourceKind,
    StageOutline,
)

Position = tuple[int, int]
"""(stage, inner rank)"""

_Sources = tuple[BlockSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The copies that are left of the lost positions, beside other stages."""

    guards: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Stage of a living guard, by (block, inner rank)."""
    stale: Mapping[Position, int] = field(default_factory=dict)
    """Newest version of which a copy of the position's whole state is left."""


def with_stale(
    left: Left, stages: Sequence[StageOutline], lost: Collection[Position], durable: int
) -> Left:
    """Return what is left, with the lost positions' parts of a checkpoint.

    Where a guard is left, that and the twin are taken: two halves of a state would be of two steps.

    Args:
        left: beside that.
        stages: the cut: the blocks of every stage.
        lost: positions whose every copy is gone.
        durable: version of the checkpoint.
    """
    unguarded = [
        (stage, inner)
        for stage, inner in lost
        if not any((block.name, inner) in left.guards for block in stages[stage])
    ]
    return replace(left, stale=dict.fromkeys(unguarded, durable))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The choices of a job about lost blocks."""

    order: Order = Order.IN_ORDER
    weighting: Weighting = Weighting.GRADIENT_NORM
    stale_steps: int = 0
    """A stale copy that is at most so many steps old goes before other stages; an older one does
    not count."""
    optimizer_state: OptimizerState = OptimizerState.ZERO
    """How the optimizer's state begins of what is made of other stages."""


def policy_of(how: ApproximateConfig, before: Policy | None = None) -> Policy:
    """Return the choices of a job about lost blocks, as its rules say.

    Args:
        how: the rules.
        before: what they do not say.
    """
    weighting = Weighting(how.weights)
    return replace(
        before or Policy(),
        weighting=weighting,
        stale_steps=how.stale_steps,
        optimizer_state=OptimizerState(how.optimizer_state),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSource:
    """The answer that a lost position cannot be made anew."""

    reason: str


def norms_beside(
    stages: Sequence[StageOutline], stage: int, kind: str, norms_sq: Mapping[str, float]
) -> tuple[float, float]:
    """Return the squared norms of the stages before and after an inner one, over like blocks.

    Args:
        stages: the cut: the blocks of every stage.
        stage: the one between them.
        kind: of the blocks.
        norms_sq: squared norm of each block; one that is not named has none.
    """
    before, after = (
        add_in_order(norms_sq.get(b.name, 0.0) for b in like_blocks(stages[beside], kind))
        for beside in (stage - 1, stage + 1)
    )
    return before, after


class _NoSourceError(Exception):
    """A lost position cannot be made anew in the way that is tried."""


def plan_reinitialisation(
    stages: Sequence[StageOutline],
    lost: Collection[Position],
    *,
    version: int,
    norms_sq: Mapping[str, float],
    left: Left,
    policy: Policy,
    ranks_per_stage: int = 1,
) -> Reinitialisation | NoSource:
    """Return the sources of all blocks of the lost positions; or why one of them has none.

    Complexity: linear in the blocks of the lost stages, times those of the stages beside them.

    Args:
        stages: the cut: the blocks of every stage.
        lost: positions whose every copy is gone.
        version: at which all go on.
        norms_sq: squared gradient norm of each block in the step that led to it, before clipping. A
            block that is not named has none: at version 0 no step led to it. Where none is named
            later, none is known, and the blocks are weighed as if all were 0.
        left: what is left of the lost positions.
        policy: how they may be made anew.
        ranks_per_stage: inner ranks of each stage.
    """
    if not lost:
        return NoSource(reason="nothing is lost")
    made, told = [], []
    for stage, inner in sorted(set(lost)):
        place = _Place(
            stages=stages,
            lost=frozenset(lost),
            position=(stage, inner),
            name=f"stage {stage}" if ranks_per_stage == 1 else f"inner rank {stage}.{inner}",
            ranks_per_stage=ranks_per_stage,
            version=version,
            norms_sq=norms_sq,
            left=left,
            policy=policy,
        )
        try:
            blocks, how = place.make()
        except _NoSourceError as why:
            return NoSource(reason=str(why))
        made.append(
            MadePosition(
                stage=stage,
                inner=inner,
                blocks=blocks,
                optimizer_state=place.optimizer_state_of(blocks),
            )
        )
        told.append(f"{place.name} is made anew from {how}")
    return Reinitialisation(positions=tuple(made), reason="; ".join(told))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One lost position, and everything that its sources depend on."""

    stages: Sequence[StageOutline]
    lost: frozenset[Position]
    position: Position
    name: str
    ranks_per_stage: int
    version: int
    norms_sq: Mapping[str, float]
    left: Left
    policy: Policy

    def make(self) -> tuple[tuple[MadeBlock, ...], str]:
        """Return the sources of every block, and what they are.

        Raises:
            _NoSourceError: some block has none.
        """
        stale = self.left.stale.get(self.position)
        age = None if stale is None else self.version - stale
        is_young = age is not None and age <= self.policy.stale_steps
        return self._from(self._stale if is_young else self._other_stages)

    def optimizer_state_of(self, blocks: Sequence[MadeBlock]) -> OptimizerState:
        """Return how the optimizer's state begins: as the job says, if other stages are sources."""
        others = (SourceKind.TWIN, SourceKind.NEIGHBOUR)
        kinds = {source.kind for block in blocks for source in block.sources}
        return self.policy.optimizer_state if kinds.intersection(others) else OptimizerState.ZERO

    def _from(
        self, sources_of: Callable[[BlockOutline], _Sources]
    ) -> tuple[tuple[MadeBlock, ...], str]:
        blocks = tuple(
            self._made(
                block,
                (
                    *self._held(block),
                    *(self._guarded(block) or self._unguarded(block, sources_of)),
                ),
            )
            for block in self.stages[self.position[0]]
        )
        found = {_phrase(s, self.version): None for block in blocks for s in block.sources}
        how = ", ".join(found) or "nothing, as it has no block"
        return blocks, f"{how}{self._why_halves(blocks)}"

    def _why_halves(self, blocks: Sequence[MadeBlock]) -> str:
        """Return why neighbours count one half each though they are weighed by their norms."""
        if self.policy.weighting is not Weighting.GRADIENT_NORM:
            return ""
        halves = [
            block
            for block in blocks
            if [s.weight for s in block.sources if s.kind is SourceKind.NEIGHBOUR] == [0.5, 0.5]
            and not any(block.norms_sq)
        ]
        if not halves:
            return ""
        if self.version == 0:
            return " (one half each, as no step has been taken)"
        if any(not block.norms_sq for block in halves):
            return " (one half each, as the norms of their gradients are not known)"
        return " (one half each, as both gradients are zero)"

    def _made(self, block: BlockOutline, sources: _Sources) -> MadeBlock:
        """Return how a block is made, with the norms if two stages are weighed by them.

        A run that makes it again has norms to compare with these.
        """
        is_weighed = any(source.kind is SourceKind.NEIGHBOUR for source in sources)
        norms_sq: tuple[float, ...] = ()
        # A commit of a job whose stages could not be made anew has no norms: these are not known.
        has_norms = bool(self.norms_sq) or self.version == 0
        if is_weighed and has_norms and self.policy.weighting is Weighting.GRADIENT_NORM:
            norms_sq = norms_beside(self.stages, self.position[0], block.kind, self.norms_sq)
        return MadeBlock(block=block.name, sources=sources, norms_sq=norms_sq)

    def _guarded(self, block: BlockOutline) -> _Sources:
        guard = self.left.guards.get((block.name, self.position[1]))
        if guard is None:
            return ()
        return (self._source(SourceKind.GUARD, guard, block),)

    def _unguarded(
        self, block: BlockOutline, sources_of: Callable[[BlockOutline], _Sources]
    ) -> _Sources:
        """Return the sources of a block that no living guard has.

        Raises:
            _NoSourceError: there are none.
        """
        try:
            return sources_of(block)
        except _NoSourceError as why:
            if block.name not in guarded_blocks(self.stages, self.position[0]):
                raise
            if self.policy.order is Order.IN_ORDER:
                raise
            raise _NoSourceError(f"{why}, and no guard of {block.name} is left") from why

    def _held(self, block: BlockOutline) -> _Sources:
        """Return the first living inner rank of the stage, if it holds some of the block too."""
        stage, _ = self.position
        living = [i for i in range(self.ranks_per_stage) if (stage, i) not in self.lost]
        if not block.copied or not living:
            return ()
        return (
            BlockSource(
                kind=SourceKind.INNER_RANK,
                stage=stage,
                inner=living[0],
                block=block.name,
                parameters=block.copied,
            ),
        )

    def _stale(self, block: BlockOutline) -> _Sources:
        version = self.left.stale[self.position]
        return (self._source(SourceKind.STALE_COPY, self.position[0], block, version=version),)

    def _other_stages(self, block: BlockOutline) -> _Sources:
        if block.rule in (Rule.GUARD, Rule.NO):
            raise _NoSourceError(f"{self.name}: {block.name} may not be made of other blocks")
        beside = self._beside()
        found = [self._match(stage, block) for stage in beside]
        if len(beside) == 1:
            return (self._source(SourceKind.TWIN, beside[0], found[0]),)
        norms_sq = norms_beside(self.stages, self.position[0], block.kind, self.norms_sq)
        weights = weigh(self.policy.weighting, *norms_sq)
        if block.rule is Rule.COPY:
            # An average of these means nothing: the heavier one is taken, the first of equal ones.
            weights = Weights(1.0, 0.0) if weights.before >= 0.5 else Weights(0.0, 1.0)
        shares = zip(beside, found, (weights.before, weights.after), strict=True)
        return tuple(
            self._source(SourceKind.NEIGHBOUR, stage, other, weight)
            for stage, other, weight in shares
            if weight
        )

    def _beside(self) -> tuple[int, ...]:
        """Return the stages whose blocks may stand for the lost ones: a twin, or two neighbours.

        Raises:
            _NoSourceError: there are none, or one of them is lost as well.
        """
        stage, inner = self.position
        last = len(self.stages) - 1
        if 0 < stage < last:
            beside: tuple[int, ...] = (stage - 1, stage + 1)
        elif self.policy.order is Order.SWAPPED and last > 0:
            beside = (stage + 1 if stage == 0 else stage - 1,)
        else:
            end = "the only stage" if last == 0 else "an end of the pipeline"
            raise _NoSourceError(f"{self.name} is {end}: it has no two neighbours")
        gone = [s for s in beside if (s, inner) in self.lost]
        if gone:
            what = "its twin" if len(beside) == 1 else "its neighbour"
            raise _NoSourceError(f"{self.name} and {what} stage {gone[0]} are lost together")
        return beside

    def _match(self, stage: int, block: BlockOutline) -> BlockOutline:
        """Return the block of another stage that stands for a lost one.

        Raises:
            _NoSourceError: it has no like block; or a twin has more or fewer of them.
        """
        lost_ones = like_blocks(self.stages[self.position[0]], block.kind)
        others = like_blocks(self.stages[stage], block.kind)
        if not others:
            raise _NoSourceError(f"{self.name}: stage {stage} has no block like {block.name}")
        is_twin = not 0 < self.position[0] < len(self.stages) - 1
        if is_twin and len(others) != len(lost_ones):
            blocks = count(len(others), "block")
            raise _NoSourceError(
                f"{self.name}: its twin stage {stage} has {blocks} like {block.name}, it has "
                f"{len(lost_ones)}"
            )
        return others[match_index(lost_ones.index(block), len(lost_ones), len(others))]

    def _source(
        self,
        kind: SourceKind,
        stage: int,
        block: BlockOutline,
        weight: float = 1.0,
        version: int | None = None,
    ) -> BlockSource:
        return BlockSource(
            kind=kind,
            stage=stage,
            inner=self.position[1],
            block=block.name,
            weight=weight,
            version=version,
        )


def _phrase(source: BlockSource, version: int) -> str:
    """Return a source as a sentence names it; ``version`` is that at which all go on."""
    match source.kind:
        case SourceKind.GUARD:
            return f"a guard of {source.block} in stage {source.stage}"
        case SourceKind.INNER_RANK:
            return f"inner rank {source.stage}.{source.inner}"
        case SourceKind.STALE_COPY:
            age = version - (source.version or 0)
            return f"its own copy of step {source.version}, {count(age, 'step')} old"
        case SourceKind.TWIN:
            return f"its twin stage {source.stage}"
        case SourceKind.NEIGHBOUR:
            return f"{source.weight:.6g} of stage {source.stage}"
