"""Decides which segments a store sends again, after pods that kept them too have gone.

The next window is copied to holders of its own. Until it is complete, the states of the one before
and the gradients since lie where they were written, with one copy fewer for each pod that is gone.
So each store that holds a new plan looks at what it keeps: of the stores that were to keep a
segment, the first that the plan still names sends it to others, until it has as many holders as it
had to have. If that is the store of a pod without a member, the first of one with a member sends it
too: no trainer tells the other one which window is complete. Nobody has to be asked: all that is
needed stands in the plan, and beside the segment.

A store is known by its pod and its address. A supervisor that starts again in its pod has an empty
store, which listens elsewhere: it keeps nothing of what the store before it confirmed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.copies import CopyDemand, plan_copies
from mainstay_core.snapshots.stores import store_addresses, store_pods
from mainstay_core.snapshots.units import Position
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder, SegmentKey


class Held(NamedTuple):
    """A segment of a store, and the stores that were to keep it."""

    key: SegmentKey
    holders: tuple[Holder, ...]
    """The writer's first; empty if that is not known."""


class Recopy(NamedTuple):
    """A segment that is to be sent again."""

    key: SegmentKey
    to: tuple[Holder, ...]
    holders: tuple[Holder, ...]
    """Stores that keep it then; the sender's is the first."""


def plan_recopies(
    plan: Plan, pod: PodUid, kept: Iterable[Held], *, peers: int, domains: int
) -> list[Recopy]:
    """Return what a pod's store sends, in the order of ``kept``.

    New holders are those that the plan gives to copies of the same position from the same pod, so
    that one choice spreads both. Pods outside of the position's stage come first. Where that is too
    few, as there is no more room with pods without a member, any other pod with a store is one.

    Args:
        plan: that is held now; it names the stores of living pods.
        pod: whose store decides.
        kept: its segments that a replay may need.
        peers: other pods that are to keep each.
        domains: failure domains that they are to span.
    """
    addresses = store_addresses(plan)
    if pod not in addresses:
        return []
    wanted = 1 + min(peers, len(addresses) - 1)
    with_member = {member.slot.pod for member in plan.members}
    found = []
    choices: dict[tuple[PodUid, int], list[PodUid]] = {}
    for held in kept:
        living = [h for h in held.holders if addresses.get(h.pod) == h.address]
        senders = [h.pod for h in living][:1]
        senders += [h.pod for h in living if h.pod in with_member][:1]
        if pod not in senders or len(living) >= wanted:
            continue
        # Two that send one segment choose as the first of them.
        chooser, position = senders[0], held.key.position
        if (chooser, position) not in choices:
            choices[chooser, position] = _ranked(plan, chooser, position, peers, domains)
        keeping = {holder.pod for holder in living}
        new = [p for p in choices[chooser, position] if p not in keeping][: wanted - len(living)]
        to = tuple(Holder(pod=p, address=addresses[p]) for p in new)
        sender_first = sorted(living, key=lambda h: h.pod != pod)
        found.append(Recopy(held.key, to, (*sender_first, *to)))
    return found


class Recopies:
    """Remembers what a store has looked at under the plan that is held, to look at nothing twice.

    Args:
        pod: whose store it is.
    """

    def __init__(self, pod: PodUid) -> None:
        self._pod = pod
        self._plan: Plan | None = None
        self._peers = self._domains = 1
        self._from_version = 0
        self._seen: set[SegmentKey] = set()

    def adopt(self, plan: Plan, *, peers: int, domains: int) -> None:
        """Begin anew with a plan; arguments as those of :func:`plan_recopies`."""
        self._plan, self._peers, self._domains = plan, peers, domains
        self._from_version, self._seen = -1, set()

    def due(self, from_version: int) -> Plan | None:
        """Return the plan under which it is to be looked; None if that is done.

        Args:
            from_version: first version of the newest window that the store knows to be complete.
        """
        return self._plan if from_version != self._from_version else None

    def look(self, from_version: int, kept: Iterable[Held]) -> list[Recopy]:
        """Return what the store sends now, in the order of ``kept``.

        Args:
            from_version: as :meth:`due` was asked.
            kept: the store's segments that a replay may need.
        """
        if self._plan is None:
            return []
        self._from_version, kept = from_version, list(kept)
        new = [held for held in kept if held.key not in self._seen]
        self._seen = {held.key for held in kept}
        return plan_recopies(self._plan, self._pod, new, peers=self._peers, domains=self._domains)


def holders_after(holders: Iterable[Holder], recopy: Recopy, holder: Holder) -> tuple[Holder, ...]:
    """Return the stores that keep a segment once one more has taken it.

    Two plans may have it sent to the same store before that has answered, which counts once.

    Args:
        holders: those before.
        recopy: by which it was sent.
        holder: that has taken it.
    """
    return (*(h for h in holders if h in recopy.holders and h != holder), holder)


def _ranked(plan: Plan, pod: PodUid, position: int, peers: int, domains: int) -> list[PodUid]:
    """Return the holders that a plan gives to a position's copies from a pod, best first.

    All other pods with a store follow, those with a member first: the others' room is used up.
    """
    pods = store_pods(plan, peers=peers)
    place = divmod(position, plan.ranks_per_stage)
    names = {p.pod for p in pods}
    places = {(m.rank.position, m.slot.pod) for m in plan.members if m.slot.pod in names}
    demands = [
        CopyDemand(position=Position(stage=stage, inner=inner), pod=at, size_bytes=1)
        for (stage, inner), at in sorted({*places, (place, pod)})
    ]
    copies = plan_copies(pods, demands, peers=peers, domains=min(domains, peers + 1))
    inside = {p.pod for p in pods if place[0] in p.stages}
    chosen = next(
        sorted(copy.peers, key=lambda peer: (peer in inside, peer))
        for copy in copies.copies
        if copy.pod == pod and (copy.position.stage, copy.position.inner) == place
    )
    others = [p.pod for p in pods if p.pod != pod and p.pod not in chosen]
    start = position % max(1, len(others))  # positions do not all go to the same pod
    without_member = {p.pod for p in pods if not p.stages}
    spread = sorted(
        [*others[start:], *others[:start]], key=lambda p: (p in without_member, p in inside)
    )
    return [*chosen, *spread]
