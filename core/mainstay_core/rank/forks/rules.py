"""Holds the settings of a job's forks, and finds those by which an ordered fork is made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.reinitialisation.sources import Policy, policy_of
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import OptimizerState, Outline


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
