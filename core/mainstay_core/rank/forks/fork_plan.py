"""Computes the fork that a settle carries out, and the history that all states have with it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from mainstay_core.base import codec
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.rank.forks.guard_copies import LeftGuards
from mainstay_core.rank.forks.histories import before_fork, is_made_once_more
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.forks.sources import left_of
from mainstay_core.reinitialisation.sources import NoSource, plan_reinitialisation
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import Fork, History
from mainstay_core.wire.votes import Commit


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
        left=left_of(rules, lost, version, durable, known.history, guards),
        policy=rules.policy,
        ranks_per_stage=width,
    )
    if isinstance(answer, NoSource):
        raise LocalProtocolError(f"{plan.quorum} orders what is impossible: {answer.reason}")
    _, history, chain = known
    if is_made_once_more(history, lost, version):
        # The last thing that was made, or some of it, once more: of the same sources.
        return Forked(history[-1], history, chain)
    history, chain = before_fork(history, chain, lost, version)
    fork = Fork(
        version=version,
        chain=chain,
        made=answer,
        lr_boost=rules.lr_boost,
        boost_steps=rules.boost_steps,
    )
    return Forked(fork, (*history, fork), _extend(chain, fork))


def _repeated(fork: Fork, known: Forked) -> Forked:
    """Return the fork of another run as it is made here."""
    if fork in known.history:
        # It was begun under a plan before.
        return Forked(fork, known.history, known.chain)
    return Forked(fork, (*known.history, fork), _extend(known.chain, fork))


def _extend(chain: str, fork: Fork) -> str:
    return hashlib.sha256((chain + codec.dumps(fork)).encode()).hexdigest()[:32]
