"""Decides what a fork means for a rank: who makes what anew, and what follows from it for ever.

A fork is the ladder's row 5 (design section 5). A plan orders it, the settle carries it out at the
newest version that all other positions reach, and every state has it in its history from then on
(protocol section 6). What a fork makes depends on the version, the order and the last commit alone,
so it is repeated with the same bits when something fails on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mainstay_core.base import codec
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.rank.guard_copies import LeftGuards, by_block
from mainstay_core.rank.histories import history_at
from mainstay_core.rank.serving import CopyOrder, Wanted, sources_of
from mainstay_core.reinitialisation.guards import guarded_blocks
from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Policy,
    Position,
    plan_reinitialisation,
    policy_of,
    with_stale,
)
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import (
    Fork,
    History,
    MadePosition,
    OptimizerState,
    Outline,
    SourceKind,
)
from mainstay_core.wire.votes import Commit, SettleReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRules:
    """The settings of forks by which ranks decide: equal on all of them."""

    outline: Outline
    policy: Policy = field(default_factory=Policy)
    after_lost_steps: int | None = None
    """A checkpoint older than this is not worth to go back to; None: any is."""
    lr_boost: float = 1.1
    """Factor of the learning rate of what is made anew (Blagoev et al., algorithm 1, line 4)."""
    boost_steps: int | None = None
    """Steps for which it lasts; None: to the job's end."""
    guards: int = 0
    """Cells that keep what an end of the pipeline alone has, for each end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A position of another stage whose parameters a maker copies."""

    position: int
    """Its number."""
    members: tuple[int, ...]
    """Members that have them, best first."""
    expected: str
    """Digest of its masters; "" if no report names one, or if they name several."""
    guarded: int | None = None
    """The end whose blocks they guard, with the optimizer's state, if these are copied instead."""
    whole: bool = False
    """Whether the optimizer's state is copied, too."""

    def wanted(self, quorum: str, version: int) -> Wanted:
        """Return what its members are asked for in a quorum."""
        masters_only = self.guarded is None and not self.whole
        return Wanted(quorum, self.position, version, masters_only, self.guarded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """The work of one member that makes its position anew."""

    made: MadePosition
    beside: tuple[Beside, ...]
    """The positions that it copies, ascending."""
    stale: int | None = None
    """The version of its own that it loads; None: it is made of others."""
    stale_history: History = ()
    """Forks that this version contains."""
    keeps_own: bool = False
    """Whether what guards would give is as it has it itself: nobody was lost, and nobody guards."""


class Forked(NamedTuple):
    """The outcome of a settle, as far as forks go."""

    fork: Fork | None
    """The one that it carries out."""
    history: History
    """Of all states at the version."""
    chain: str
    """Their commit chain."""

    @property
    def reason(self) -> str:
        """What is made of what, as the end of a sentence; empty without a fork."""
        return f"; {self.fork.made.reason}" if self.fork is not None else ""


def rules_of(plan: Plan, rules: ForkRules | None) -> ForkRules | None:
    """Return the rules of the fork that a plan orders: those of the order, if it names them.

    Args:
        plan: which may order one.
        rules: with which this rank was started.

    Raises:
        LocalProtocolError: the order names a way of weighing, or for the optimizer's state to
            begin, that there is not.
    """
    how = plan.fork.how if plan.fork is not None else None
    if rules is None or how is None:
        return rules
    if how.weights not in set(Weighting):
        raise LocalProtocolError(f"{plan.quorum} orders a fork by weights {how.weights!r}")
    if how.optimizer_state not in set(OptimizerState):
        state = how.optimizer_state
        raise LocalProtocolError(f"{plan.quorum} orders a fork with optimizer state {state!r}")
    return replace(
        rules,
        policy=policy_of(how, rules.policy),
        after_lost_steps=how.after_lost_steps,
        lr_boost=how.lr_boost,
        boost_steps=how.boost_steps,
    )


def _left_of(
    rules: ForkRules,
    lost: Sequence[Position],
    version: int,
    durable: int,
    history: History,
    guards: Collection[LeftGuards],
) -> Left:
    """Return what is left of lost positions: what guards keep, and parts of the newest checkpoint.

    A part that is older than the policy allows does not count, as the ladder and the prospects say.
    Nor does one of the very version of a fork, which may be from before or after it.
    """
    left = Left(guards=by_block(rules.outline, guards))
    is_clear = not any(fork.version == durable for fork in history)
    is_young = 0 < version - durable <= rules.policy.stale_steps
    if not durable or not is_young or not is_clear:
        return left
    return with_stale(left, rules.outline, lost, durable)


def lacks_sources(
    plan: Plan,
    rules: ForkRules | None,
    positions: Collection[int],
    version: int,
    *,
    durable: int,
    history: History,
    guards: Collection[LeftGuards],
) -> bool:
    """Return whether an ordered fork cannot be made after all: a guard or a stale copy has gone.

    The coordinator goes by whom the last commit showed to guard, and by the checkpoints of which it
    has heard. What has become of them since then the trainers find out.

    Args:
        plan: that orders it.
        rules: of the job.
        positions: numbers of those that are to be made anew.
        version: at which all go on.
        durable: newest version on the disk.
        history: of the states at the version.
        guards: whose copies of what ends alone have count.
    """
    width = plan.ranks_per_stage
    lost = [divmod(position, width) for position in positions]
    again = plan.fork.repeats if plan.fork is not None else None
    if again is not None:
        return not has_guards(again, guards, lost if again in history else None)
    if rules is None:
        return False
    if _is_made_once_more(history, lost, version):
        return not has_guards(history[-1], guards, lost)
    if not rules.policy.stale_steps:
        return _lacks_guard(plan, rules, positions, guards)
    answer = plan_reinitialisation(
        rules.outline,
        lost,
        version=version,
        norms_sq={},
        left=_left_of(rules, lost, version, durable, history, guards),
        policy=rules.policy,
        ranks_per_stage=width,
    )
    return isinstance(answer, NoSource)


def _lacks_guard(
    plan: Plan, rules: ForkRules, made: Collection[int], left: Collection[LeftGuards]
) -> bool:
    """Return whether an end cannot be made anew, as nobody has what it alone has."""
    guarded = {guards.end for guards in left}
    stages = {position // plan.ranks_per_stage for position in made}
    return any(s not in guarded and guarded_blocks(rules.outline, s) for s in stages)


def is_made(plan: Plan, history: History, version: int) -> bool:
    """Return whether some of what a plan orders was made at this version under a plan before it.

    Its quorum was interrupted before all had settled, and the order is repeated: nothing is left to
    make, and all go on from a fork nonetheless. What else was lost meanwhile somebody may hold.

    Args:
        plan: which may order one.
        history: of the state with which this rank goes on.
        version: at which all go on.
    """
    if plan.fork is None or not history or history[-1].version != version:
        return False
    ordered = {divmod(position, plan.ranks_per_stage) for position in plan.fork.positions}
    return not ordered.isdisjoint(_places(history[-1]))


def positions_to_make(plan: Plan, lost: Collection[int]) -> frozenset[int]:
    """Return the positions that a plan orders to make anew, of those that nobody holds."""
    return plan.fork.made_with(lost, plan.ranks_per_stage) if plan.fork else frozenset()


def has_guards(
    fork: Fork, guards: Collection[LeftGuards], lost: Collection[Position] | None = None
) -> bool:
    """Return whether there is a guard of every end of which a fork takes what guards keep.

    Args:
        fork: that is made.
        guards: whose copies count.
        lost: the positions of it that are made now; None: all of them.
    """
    return not ends_without_guards(fork, guards, lost)


def ends_without_guards(
    fork: Fork, guards: Collection[LeftGuards], lost: Collection[Position] | None = None
) -> frozenset[int]:
    """Return the ends that lack such a guard; arguments likewise."""
    ends = frozenset(
        place.stage
        for place in fork.made.positions
        if any(b.is_exact for b in place.blocks)
        and (lost is None or (place.stage, place.inner) in lost)
    )
    return ends - {left.end for left in guards}


def goes_back(plan: Plan, rules: ForkRules | None, version: int, durable: int) -> bool:
    """Return whether an exact state is loaded, though the plan orders a fork.

    The coordinator orders forks by what it has been told, and the newest checkpoint may have become
    durable just before the fault. The trainers see the disk. At a version that is kept there, or
    can be made from the seed, nothing would be lost without a fork. A fork that is made again is
    made at its own version, and at no other.

    Args:
        plan: that orders it.
        rules: of the job.
        version: at which it would be forked.
        durable: newest version on the disk; 0: the seed's initial state, of which nobody has to be
            told.
    """
    if plan.fork is not None and plan.fork.repeats is not None:
        return version != plan.fork.repeats.version
    if rules is None:
        return False
    if version <= durable:
        return True
    if not durable:
        return False
    return rules.after_lost_steps is None or version - durable <= rules.after_lost_steps


def last_known(reports: Sequence[SettleReport]) -> tuple[History, str]:
    """Return (history, commit chain) of the states at a version.

    A member that missed the quorum of a fork at this very version does not know of it; its state is
    the same with and without. The newest history names the most positions at this version: one that
    is repeated takes the place of one of fewer positions, so a longer history may be older.
    """
    if not reports:
        return (), ""
    newest = max(reports, key=lambda r: (len(_made_at(r.history, r.version)), len(r.history)))
    return newest.history, newest.chain


def _made_at(history: History, version: int) -> set[tuple[int, int]]:
    return {place for fork in history if fork.version == version for place in _places(fork)}


def plan_fork(
    plan: Plan,
    rules: ForkRules | None,
    positions: Collection[int],
    version: int,
    commit: Commit | None,
    known: Forked,
    guards: Collection[LeftGuards] = (),
    durable: int = 0,
) -> Forked:
    """Return a fork, if there is one, and the history and the commit chain of all states with it.

    Args:
        plan: that orders it.
        rules: of the job.
        positions: numbers of those that are made anew; empty: there is no fork.
        version: at which all go on.
        commit: of the step that led to it; None at version 0.
        known: history and commit chain of the states at that version.
        guards: whose copies of what ends alone have count.
        durable: newest version on the disk.

    Raises:
        LocalProtocolError: the order is not one that these rules allow.
    """
    if not positions:
        return known
    if plan.fork is not None and plan.fork.repeats is not None:
        return _repeated(plan.fork.repeats, known)
    if rules is None:
        raise LocalProtocolError(f"{plan.quorum} orders a fork, which this job does not allow")
    width = plan.ranks_per_stage
    lost = [divmod(position, width) for position in positions]
    names = [block.name for stage in rules.outline for block in stage]
    norms_sq = dict(zip(names, commit.norms_sq, strict=False)) if commit is not None else {}
    answer = plan_reinitialisation(
        rules.outline,
        lost,
        version=version,
        norms_sq=norms_sq,
        left=_left_of(rules, lost, version, durable, known.history, guards),
        policy=rules.policy,
        ranks_per_stage=width,
    )
    if isinstance(answer, NoSource):
        raise LocalProtocolError(f"{plan.quorum} orders what is impossible: {answer.reason}")
    _, history, chain = known
    if _is_made_once_more(history, lost, version):
        # The last thing that was made, or some of it, once more: of the same sources.
        return Forked(history[-1], history, chain)
    # One at this version that did not come to an end is repeated, not added to.
    while history and history[-1].version == version and _places(history[-1]) <= set(lost):
        history, chain = history[:-1], history[-1].chain
    fork = Fork(
        version=version,
        chain=chain,
        made=answer,
        lr_boost=rules.lr_boost,
        boost_steps=rules.boost_steps,
    )
    return Forked(fork, (*history, fork), _extend(chain, fork))


def _is_made_once_more(history: History, lost: Collection[Position], version: int) -> bool:
    """Return whether what is lost was made at this very version, and is made of the same again."""
    return bool(history) and history[-1].version == version and set(lost) <= _places(history[-1])


def _repeated(fork: Fork, known: Forked) -> Forked:
    """Return the fork of another run as it is made here."""
    if fork in known.history:
        # It was begun under a plan before.
        return Forked(fork, known.history, known.chain)
    return Forked(fork, (*known.history, fork), _extend(known.chain, fork))


def _extend(chain: str, fork: Fork) -> str:
    return hashlib.sha256((chain + codec.dumps(fork)).encode()).hexdigest()[:32]


def _places(fork: Fork) -> set[tuple[int, int]]:
    return {(made.stage, made.inner) for made in fork.made.positions}


def copy_orders(
    plan: Plan, reports: Sequence[SettleReport], beside: Sequence[Beside], version: int
) -> tuple[CopyOrder, ...]:
    """Return what a maker copies in a quorum, and from whom.

    Args:
        plan: of the quorum.
        reports: by member index.
        beside: the positions.
        version: at which all go on.
    """
    quorum = str(plan.quorum)
    return tuple(
        CopyOrder(sources_of(plan, reports, one.members), one.wanted(quorum, version), one.expected)
        for one in beside
    )


def plan_making(
    plan: Plan,
    fork: Fork,
    index: int,
    holders: Mapping[int, Sequence[int]],
    reports: Sequence[SettleReport],
    guards: Collection[LeftGuards] = (),
    history: History = (),
) -> Making:
    """Return what a member does to make its position anew.

    The members that hold a position beside are taken by turns, as each maker begins with another.

    Args:
        plan: that orders the fork.
        fork: that makes the member's position.
        index: of the member.
        holders: by number of a position, the members that will have the version without making it.
        reports: by member index.
        guards: whose copies of what ends alone have count.
        history: of all states with the fork.
    """
    width, position = plan.ranks_per_stage, plan.position_of(index)
    (made,) = [m for m in fork.made.positions if m.stage * width + m.inner == position]
    turn = [m.index for m in plan.position_members(position)].index(index)
    beside = []
    sources = [s for block in made.blocks for s in block.sources if not block.is_exact]
    stale = next((s.version for s in sources if s.kind is SourceKind.STALE_COPY), None)
    others = {s.stage * width + s.inner for s in sources if s.kind is not SourceKind.STALE_COPY}
    for other in sorted(others):
        members = tuple(holders[other])
        start = turn % len(members) if members else 0
        told = {reports[i].state for i in members if reports[i].version == fork.version}
        beside.append(
            Beside(
                position=other,
                members=members[start:] + members[:start],
                expected=told.pop() if len(told) == 1 else "",
                whole=made.optimizer_state is OptimizerState.AVERAGE,
            )
        )
    has_exact = any(block.is_exact for block in made.blocks)
    for left in guards:
        if left.end == made.stage and has_exact:
            start = turn % len(left.members)
            members = left.members[start:] + left.members[:start]
            beside.append(
                Beside(
                    position=left.stage * width,
                    members=members,
                    expected=left.masters,
                    guarded=left.end,
                )
            )
    return Making(
        made=made,
        beside=tuple(beside),
        stale=stale,
        stale_history=() if stale is None else history_at(history, stale),
        keeps_own=has_exact and all(left.end != made.stage for left in guards),
    )
