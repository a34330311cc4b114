"""Describes how a lost state is made anew from others: the sources of every block, with weights.

:mod:`mainstay_core.reinitialisation` plans it. A state that is made so is not the lost one: what
follows is another course of training (design section 5, row 5).
"""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base import codec
from mainstay_core.base.bounds import (
    MAX_BLOCKS,
    MAX_MEMBERS,
    Count,
    Digest,
    Finite,
    Index,
    Longest,
    Name,
    Range,
    Sentence,
    cut_fields,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import Incarnation, QuorumId
from mainstay_core.base.words import count
from mainstay_core.job.config import MAX_FORKS, MAX_LR_BOOST, ApproximateConfig

REINITIALISED = "StageReinitialised"
"""What a condition, an Event and the job's history call it, for programs, that a stage was made
anew from others: the job is another one from there on."""
MAX_SOURCES_OF_A_BLOCK = 3
"""Two neighbours, and an inner rank of the same stage."""
MAX_TOLD_FORKS = 8
"""Forks that a history has in full where it is told: the newest. Each may name hundreds of
blocks."""
MIN_RUN = 2
"""Stages in a row that are still named one by one."""
MAX_COPIED = 1024
"""Parameters of one block that all inner ranks hold."""


class Rule(enum.StrEnum):
    """The ways in which a block may be made anew, as its author says."""

    AVERAGE = "Average"
    """As the weighted average of like blocks of both neighbours."""
    COPY = "Copy"
    """As a copy of a like block of one neighbour: an average would mean nothing, as for experts,
    which do not correspond from layer to layer."""
    GUARD = "Guard"
    """From a guard, which has the very same bits."""
    NO = "No"
    """In no way but from an older copy of itself."""


class SourceKind(enum.StrEnum):
    """The kinds of sources of which a block is made anew, best first."""

    GUARD = "guard"
    """A cell of another stage that holds the block with its optimizer state: exact."""
    INNER_RANK = "inner rank"
    """Another inner rank of the stage, which holds some of the parameters too: exact."""
    STALE_COPY = "stale copy"
    """An older durable version of the lost stage."""
    TWIN = "twin"
    """The stage with which a pipeline's end takes turns, where flows pass in both orders."""
    NEIGHBOUR = "neighbour"
    """A stage beside the lost one."""


class OptimizerState(enum.StrEnum):
    """The ways in which the optimizer's state of what is made of other stages begins.

    What a guard had, and a stale copy, bring their own.
    """

    ZERO = "Zero"
    """From nothing, as in the authors' code."""
    AVERAGE = "Average"
    """As the average of the sources' state, by the same weights as their parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutline:
    """A block as a re-initialisation sees it."""

    name: Name
    """Model-wide."""
    kind: Name
    """Like blocks have the same (:func:`mainstay_core.reinitialisation.likeness.kind_of`)."""
    rule: Rule | None = field(default=None, metadata=OMITTED)
    """None: Average if both neighbours have like blocks, else Guard."""
    copied: Annotated[tuple[Name, ...], Longest(MAX_COPIED)] = field(default=(), metadata=OMITTED)
    """Local names of the parameters that each inner rank holds whole."""


StageOutline = Annotated[tuple[BlockOutline, ...], Longest(MAX_BLOCKS)]
"""The blocks of a stage, in model order."""
Outline = Annotated[tuple[StageOutline, ...], Longest(MAX_MEMBERS)]
"""The blocks of every stage: the cut."""

Weight = Annotated[float, Range(0, 1)]
NormSq = Annotated[float, Range(0, sys.float_info.max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSource:
    """One source of a block, and how much of it is taken."""

    kind: SourceKind
    stage: Index
    inner: Index = field(default=0, metadata=OMITTED)
    block: Name
    """The source's block, by its model-wide name."""
    weight: Weight = 1.0
    """fp64. The weights of a block's sources add up to 1, those of inner ranks left out."""
    version: Count | None = field(default=None, metadata=OMITTED)
    """Of a stale copy; None: the version at which all go on."""
    parameters: Annotated[tuple[Name, ...], Longest(MAX_COPIED)] = field(
        default=(), metadata=OMITTED
    )
    """Local names of what is taken from an inner rank; the other sources give the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBlock:
    """A block that is made anew, and from what."""

    block: Name
    sources: Annotated[tuple[BlockSource, ...], Longest(MAX_SOURCES_OF_A_BLOCK)]
    norms_sq: Annotated[tuple[NormSq, ...], Longest(2)] = field(default=(), metadata=OMITTED)
    """Squared gradient norms by which the stages before and after are weighed: of their like blocks
    in the last committed step, before clipping, fp64. Empty where none are, or where that step's
    commit has none: then the weights are one half each."""

    @property
    def is_exact(self) -> bool:
        """Whether it is the lost one, optimizer state included: a guard had it."""
        return bool(self.sources) and all(s.kind is SourceKind.GUARD for s in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePosition:
    """A position whose every copy is gone, and how its blocks are made anew."""

    stage: Index
    inner: Index = field(default=0, metadata=OMITTED)
    blocks: Annotated[tuple[MadeBlock, ...], Longest(MAX_BLOCKS)]
    """In model order."""
    optimizer_state: OptimizerState = field(default=OptimizerState.ZERO, metadata=OMITTED)
    """How the optimizer's state begins of the blocks that are made of other stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinitialisation:
    """The plan by which all lost positions are made anew."""

    positions: Annotated[tuple[MadePosition, ...], Longest(MAX_MEMBERS)]
    """By stage, then by inner rank."""
    reason: Sentence
    """What is made from what, in one sentence."""

    def __post_init__(self) -> None:
        cut_fields(self, "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The record of a re-initialisation: everything that what follows depends on.

    Two states with equal versions and equal histories of forks have equal bits.
    """

    version: Count
    """At which the positions were made anew: step ``version`` is the first with them."""
    chain: Digest
    """Commit chain up to the version, before this fork."""
    made: Reinitialisation
    lr_boost: Annotated[float, Range(1, MAX_LR_BOOST)] = 1.0
    """Factor of the learning rate of what was made anew."""
    boost_steps: Count | None = None
    """Steps for which it lasts; None: to the job's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDigest:
    """The digest of one position's masters."""

    stage: Index
    inner: Index = field(default=0, metadata=OMITTED)
    masters: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOutcome:
    """The outcome of a fork, beside what its states depend on, as the votes on its step told it.

    No state has it in its history: who made a fork, and in which quorum, changes no bit.
    """

    quorum: QuorumId
    """The lowest one in which a position has told of the first step with it. It committed that
    step, unless all of these positions were rolled forward to it later."""
    states: Annotated[tuple[PlaceDigest, ...], Longest(MAX_MEMBERS)]
    """At its version, of the positions that were made anew and of those of which they were made:
    by stage, then by inner rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldFork(Fork):
    """A fork as people are told of it, and as another run gets it that makes it again."""

    outcome: ForkOutcome | None = field(default=None, metadata=OMITTED)
    """None: no step with it is committed yet, another fork was made at its version, or the ledger
    does not have that step any more."""

    @property
    def fork(self) -> Fork:
        """Return the fork alone, as states have it in their history."""
        return Fork(
            version=self.version,
            chain=self.chain,
            made=self.made,
            lr_boost=self.lr_boost,
            boost_steps=self.boost_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """The order, in a plan, to make positions anew that no member holds when it settles.

    A plan that has it begins a new lineage. Until all have settled in it, each later plan repeats
    the order and begins another lineage.
    """

    positions: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)]
    """Numbers of the positions, ascending."""
    since: Count
    """States of this lineage, and of later ones, count as well if their rank stayed a member: only
    such a rank is sure to have what the others settle on."""
    how: ApproximateConfig | None = field(default=None, metadata=OMITTED)
    """By what rules, as they were when the fork was ordered; None: by those that the ranks were
    started with. They may change in a running job, and a fork that is repeated keeps its own."""
    repeats: Fork | None = field(default=None, metadata=OMITTED)
    """The fork of another run that is made again: its positions are made as it says, though members
    hold them, if its version is the one at which all go on. None: what nobody holds is made."""

    def made_with(self, lost: Collection[int], ranks_per_stage: int) -> frozenset[int]:
        """Return the positions that are made anew, as they are lost or go with one that is.

        With one all are made anew that are ordered of its stage. Their moments begin together: as
        of what inner ranks hold in copies they must be the same.
        """
        stages = {position // ranks_per_stage for position in self.positions if position in lost}
        return frozenset(p for p in self.positions if p // ranks_per_stage in stages)


History = Annotated[tuple[Fork, ...], Longest(MAX_FORKS)]
"""The forks that a state contains, in order. Empty: it is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldHistory:
    """The history of the states of a quorum, as its first member tells it once it goes on."""

    since: Count
    """Version of the first fork."""
    num_forks: Annotated[int, Range(1, MAX_FORKS)]
    newest: Annotated[tuple[Fork, ...], Longest(MAX_TOLD_FORKS)]
    """In order."""
    made: bool = False
    """Whether the last of them was made as the quorum settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The answer to what a stage could be made anew from if every copy of it were lost now."""

    stage: Index
    possible: bool
    reason: Sentence
    """From what; or why from nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """A person's permission to make stages anew from others in one recovery."""

    who: Name
    at_s: Finite
    stages: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)]
    """Those that may be made anew, ascending. It counts for no others."""
    after_lost_steps: Count | None = field(default=None, metadata=OMITTED)
    """Where it is given ahead of a loss: the most steps that the job gives up rather than use it.
    None: it is for the recovery that the job waits for, whatever that would lose."""

    @property
    def is_ahead(self) -> bool:
        """Whether it was given while nothing was lost."""
        return self.after_lost_steps is not None

    def describe(self) -> str:
        """Return what it is for, as the end of a sentence."""
        names = describe_stages(self.stages)
        if self.after_lost_steps is None:
            return f"for the recovery of {names} that the job waits for"
        steps = count(self.after_lost_steps, "step")
        return f"for one recovery of {names} that would lose more than {steps} otherwise"


def describe_stages(stages: Sequence[int]) -> str:
    """Return stages by number, ascending, in words."""
    if not stages:
        return "no stage"
    first, last = stages[0], stages[-1]
    if len(stages) > MIN_RUN and list(stages) == list(range(first, last + 1)):
        return f"stages {first} to {last}"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineagePage:
    """The api's page of what a job's states were made of, and could be made of now."""

    exact: bool
    approximate_since: Count | None = None
    course: Sentence
    """The same in words (:func:`describe_course`)."""
    num_forks: Count = 0
    forks: Annotated[tuple[ToldFork, ...], Longest(MAX_FORKS)] = ()
    """Those that the api knows in full, in order: at least the newest ones, unless the store has
    lost them since the last plan."""
    allowed: bool = False
    """Whether ``recovery.allowApproximate`` is on."""
    after_lost_steps: Count | None = None
    """``recovery.approximateAfterLostSteps``."""
    permitted_by: Name = ""
    """Who has allowed that the recovery which the job waits for, or is in, is approximate; empty:
    nobody."""
    ahead: Permission | None = field(default=None, metadata=OMITTED)
    """A permission for a loss that is still to come, and is not used yet."""
    stages: Annotated[tuple[Prospect, ...], Longest(MAX_MEMBERS)] = ()


MAX_REFUSED_STATES = 8
"""Refused states that are shown, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedState:
    """A state that came back after the job had gone on without it, and does not count."""

    trainer: Name
    incarnation: Incarnation
    """The life of the trainer that brought it."""
    place: Name
    """Of which stage it is, and of which inner rank if it has several."""
    step: Count
    """Number of steps that it contains."""
    reason: Sentence
    """Why it does not count."""
    at_s: Finite

    def describe(self) -> str:
        """Return it in one sentence."""
        return (
            f"trainer {self.trainer} has come back with the state of {self.place} after "
            f"{count(self.step, 'step')}, which is refused, and of which no bit is used: "
            f"{self.reason}"
        )


def since_of(history: History) -> int | None:
    """Return the first step of another course than the undisturbed one; None: there is none."""
    return history[0].version if history else None


def digest_of_fork(fork: Fork) -> str:
    """Return a short text that differs where forks do, or what came before them."""
    return hashlib.sha256(codec.dumps(fork).encode()).hexdigest()[:32]


def places_of(fork: Fork) -> tuple[tuple[int, int], ...]:
    """Return the positions that a fork makes anew, and those of which it makes them, in order."""
    made = [(place.stage, place.inner) for place in fork.made.positions]
    sources = [(s.stage, s.inner) for p in fork.made.positions for b in p.blocks for s in b.sources]
    return tuple(sorted({*made, *sources}))


def describe_course(since: int | None) -> str:
    """Return whether a job is what it would have been, in the words that every surface has.

    Args:
        since: the first step of another course; None if there is none.
    """
    return "exact" if since is None else f"approximate since step {since}"


def describe_fork(fork: Fork) -> str:
    """Return a fork in one line: where, from what, and at which learning rate."""
    lasts = "" if fork.boost_steps is None else f" for {count(fork.boost_steps, 'step')}"
    boost = "" if fork.lr_boost == 1 else f"; learning rate x {fork.lr_boost:g}{lasts}"
    averages = any(p.optimizer_state is OptimizerState.AVERAGE for p in fork.made.positions)
    moments = "; the optimizer's state likewise" if averages else ""
    return f"step {fork.version}: {fork.made.reason}{moments}{boost}"
