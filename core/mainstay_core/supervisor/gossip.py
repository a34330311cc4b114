"""Plans from supervisor to supervisor: a plan that one has reaches all, whatever the api does.

The api's stream is the fast way. But a plan may be stored and known to one supervisor only
when the api dies, and then the recovery must complete without it (protocol section 9). So a
supervisor offers its newest plan to a few member pods at ring distances 1, 2, 4, ... and takes
a newer one that it is offered in return: after log2(pods) rounds all have it. An offer is one
small message; the plan itself travels only to a supervisor that lacks it. A plan whose members
have met is not offered: each of them has it from its supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.ids import QuorumId
from mainstay_core.wire.plan import Plan

OFFER_AFTER_S = 2.0
"""While the api's stream stands: it brings a plan to everybody within milliseconds. Then the
members meet, and whoever has met them offers nothing. Where many ranks share a few processors that
may take more than a second, in which the offers of all pods would be in the way. A plan that
another supervisor has given is offered at once: it came before the stream's word."""
OFFER_TIMEOUT_S = 2.0
"""Of one conversation; a pod that does not answer is offered the plan by others as well."""


@dataclass(frozen=True, slots=True)
class Holds:
    """A supervisor names the plan that it holds."""

    quorum: QuorumId


@dataclass(frozen=True, slots=True)
class Given:
    """A supervisor gives its plan."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answer of a supervisor that lacks the plan that was named."""


@dataclass(frozen=True, slots=True)
class Thanks:
    """The answer of a supervisor that needs nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The action that follows the answer to a supervisor's offer."""

    give: Given | None = None
    """To send in the same conversation, which ends after one more answer; None ends it now."""
    learn: Plan | None = None
    """A newer plan that the answer brought."""


def offer_after_s(stream_stands: bool) -> float:
    """Return the seconds after which a new plan is offered to the neighbours."""
    return OFFER_AFTER_S if stream_stands else 0.0


def answer(held: Plan | None, asked: Holds | Given) -> Wanted | Given | Thanks:
    """Return the answer to another supervisor, which may have given a plan.

    Args:
        held: the newest plan held here.
        asked: what the other one says; a plan that it gives is to be learnt.
    """
    if isinstance(asked, Given):
        return Thanks()
    if held is None or asked.quorum.id > held.quorum.id:
        return Wanted()
    return Given(held) if asked.quorum.id < held.quorum.id else Thanks()


def follow_up(held: Plan, answered: Wanted | Given | Thanks) -> FollowUp:
    """Return what follows from the answer to an offer of ``held``."""
    if isinstance(answered, Wanted):
        return FollowUp(give=Given(held))
    return FollowUp(learn=answered.plan if isinstance(answered, Given) else None)
