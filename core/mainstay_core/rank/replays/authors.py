"""Says which units a member copies, and which pods hold the copies, by the plan alone.

All members of a position hold the same state, so each unit has one author among them. The authors
and the holders of a quorum follow from its plan: every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.snapshots.copies import CopyDemand, plan_copies
from mainstay_core.snapshots.duties import Author, divide
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.stores import store_addresses, store_pods
from mainstay_core.snapshots.units import Position
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.segments import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Authorship:
    """The units that one member copies in a quorum, and the pods that get them."""

    units: tuple[UnitPrice, ...]
    """In the window's order."""
    holders: tuple[Holder, ...]
    """Other pods that keep the copies; the own pod's store has them first."""


def authorship(
    plan: Plan, index: int, order: Sequence[UnitPrice], *, peers: int, domains: int
) -> Authorship:
    """Return what a member copies, and where to.

    Args:
        plan: that is adopted.
        index: of the member.
        order: units of its position, in the window's order.
        peers: other pods that keep each copy, where there are as many.
        domains: failure domains of all copies, where there are as many.
    """
    me = plan.members[index]
    members = plan.position_members(plan.position_of(index))
    duties = {d.author: d.units for d in divide(order, [author_of(m) for m in members])}
    return Authorship(units=duties[author_of(me)], holders=_holders(plan, me, peers, domains))


def author_of(member: Member) -> Author:
    """Return a member as the author of copies."""
    return Author(slot=member.slot, incarnation=member.incarnation)


def _holders(plan: Plan, me: Member, peers: int, domains: int) -> tuple[Holder, ...]:
    pods, addresses = store_pods(plan, peers=peers), store_addresses(plan)
    if me.slot.pod not in addresses:
        return ()
    places = {(m.rank.position, m.slot.pod) for m in plan.members if m.slot.pod in addresses}
    copies = plan_copies(
        pods,
        # Sizes would be told by votes; without them every position counts the same.
        [
            CopyDemand(position=Position(stage=stage, inner=inner), pod=pod, size_bytes=1)
            for (stage, inner), pod in sorted(places)
        ],
        peers=peers,
        domains=min(domains, peers + 1),
    )
    position = Position(stage=me.rank.stage, inner=me.rank.inner)
    mine = next(c for c in copies.copies if (c.position, c.pod) == (position, me.slot.pod))
    return tuple(Holder(pod=pod, address=addresses[pod]) for pod in mine.peers)
