"""Decides which segments a store sends again, after pods that kept them too have gone.

The next window is copied to holders of its own. Until it is complete, the states of the one before
and the gradients since lie where they were written, with one copy fewer for each pod that is gone.
So each store that holds a new plan looks at what it keeps: of the stores that were to keep a
segment, the first that the plan still names sends it to others, until it has as many holders as it
had to have. If that is the store of a pod without a member, the first of one with a member sends it
too: no trainer tells the other one which window is complete. Nobody has to be asked: all that is
needed stands in the plan, and beside the segment.

A quorum may go on for a while under a plan that has a successor. So what it writes is looked at as
well when it comes: the newest plan may not name all of its holders, or have stores for more of
them. A store that does not take what is sent again is passed over for the next one. Where none is
left, all are asked again at the next window, and after a step, two steps, four and so on: there may
be room again.

What is on its way again to a store when a newer plan comes goes on, if that names the store as
well. It counts as one that keeps the segment until it has answered, and is sent it once.

A store is known by its pod and its address. A supervisor that starts again in its pod has an empty
store, which listens elsewhere: it keeps nothing of what the store before it confirmed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.copies import CopyDemand, plan_copies
from mainstay_core.snapshots.stores import store_addresses, store_pods
from mainstay_core.snapshots.units import Position
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import BOUNDARY_KINDS, Holder, SegmentKey


class Held(NamedTuple):
    """A segment of a store, and the stores that were to keep it."""

    key: SegmentKey
    holders: tuple[Holder, ...]
    """The writer's first; empty if that is not known."""
    coming: tuple[Holder, ...] = ()
    """Stores to which it is on its way from here again, and which have not answered."""


class Recopy(NamedTuple):
    """A segment that is to be sent again."""

    key: SegmentKey
    to: tuple[Holder, ...]
    holders: tuple[Holder, ...]
    """Stores that keep it then, those that it was on its way to among them; the sender's first."""


def plan_recopies(
    plan: Plan,
    pod: PodUid,
    kept: Iterable[Held],
    *,
    peers: int,
    domains: int,
    refused: Collection[Holder] = (),
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
        refused: stores that did not take what was sent to them again.

    Returns:
        What is to be sent; to fewer stores than it lacks, or to none, if no others are left.
    """
    addresses = store_addresses(plan)
    if pod not in addresses:
        return []
    left_out = {holder.pod for holder in refused if addresses.get(holder.pod) == holder.address}
    wanted = 1 + min(peers, len(addresses) - 1)
    with_member = {member.slot.pod for member in plan.members}
    found = []
    choices: dict[tuple[PodUid, int], list[PodUid]] = {}
    for held in kept:
        living = [h for h in held.holders if addresses.get(h.pod) == h.address]
        coming = [h for h in held.coming if addresses.get(h.pod) == h.address and h not in living]
        num_lacking = wanted - len(living) - len(coming)
        senders = [h.pod for h in living][:1]
        senders += [h.pod for h in living if h.pod in with_member][:1]
        if pod not in senders or num_lacking <= 0:
            continue
        # Two that send one segment choose as the first of them.
        chooser, position = senders[0], held.key.position
        if (chooser, position) not in choices:
            choices[chooser, position] = _ranked(plan, chooser, position, peers, domains)
        keeping = {holder.pod for holder in (*living, *coming)} | left_out
        new = [p for p in choices[chooser, position] if p not in keeping][:num_lacking]
        to = tuple(Holder(pod=p, address=addresses[p]) for p in new)
        sender_first = sorted(living, key=lambda h: h.pod != pod)
        found.append(Recopy(held.key, to, (*sender_first, *coming, *to)))
    return found


@dataclass(slots=True, eq=False)
class _Sent:
    """A segment that is on its way to other stores again."""

    left: dict[Holder, Recopy]
    """Those that have not answered, each with what it was sent by."""
    has_failed: bool = False
    """Whether one of them has not taken it."""


class Recopies:
    """Remembers what a store has looked at under the plan that is held, to look at nothing twice.

    Of the segments that some store did not take, one is tried at other stores, and the rest once
    it has found one: bytes for which nobody has room travel once to each store, not all of them.

    Args:
        pod: whose store it is.
    """

    def __init__(self, pod: PodUid) -> None:
        self._pod = pod
        self._plan: Plan | None = None
        self._stores = frozenset[Holder]()
        """Those that the plan names."""
        self._peers = self._domains = 1
        self._from_version = -1
        self._seen: set[SegmentKey] = set()
        self._new: set[SegmentKey] = set()
        """Those to be looked at before the next window."""
        self._sent: dict[SegmentKey, _Sent] = {}
        self._lacking: set[SegmentKey] = set()
        """Those that some store did not take."""
        self._tried: SegmentKey | None = None
        """The one of them that is tried at others."""
        self._refused: set[Holder] = set()
        """Stores that are not asked now, as they did not take something."""
        self._step = -1
        """The newest of which something came."""
        self._num_steps, self._patience_steps = 0, 1
        """Steps that began since all stores were asked, and after how many they are again."""

    @property
    def is_waiting(self) -> bool:
        """Whether something lacks holders, as stores that were asked have not taken it."""
        return bool(self._lacking)

    @property
    def _num_wanted(self) -> int:
        """Stores that are to keep each segment under the plan."""
        return 1 + min(self._peers, len(self._stores) - 1)

    def adopt(self, plan: Plan, *, peers: int, domains: int) -> None:
        """Look at everything anew with a plan; arguments as those of :func:`plan_recopies`."""
        self._plan, self._peers, self._domains = plan, peers, domains
        self._stores = frozenset(Holder(pod=p, address=a) for p, a in store_addresses(plan).items())
        self._from_version, self._step = -1, -1
        self._seen, self._new = set(), set()
        on_their_way = {
            key: {holder: by for holder, by in sent.left.items() if holder in self._stores}
            for key, sent in self._sent.items()
        }
        self._sent = {key: _Sent(left) for key, left in on_their_way.items() if left}
        self._lacking, self._tried = set(), None
        self._ask_all_again(1)

    def came(self, held: Held) -> None:
        """Note that a segment has come, perhaps in place of one of the same key."""
        key = held.key
        self._sent.pop(key, None)
        self._seen.discard(key)
        self._lacking.discard(key)
        if self._tried == key:
            self._tried = None
        if self._plan is None or key.kind in BOUNDARY_KINDS:
            return
        if held.holders and len(self._stores.intersection(held.holders)) < self._num_wanted:
            self._new.add(key)
        if key.version <= self._step:
            return
        self._step = key.version
        self._num_steps += 1
        if self._lacking and self._tried is None and self._num_steps >= self._patience_steps:
            self._ask_all_again(2 * self._patience_steps)
            self._try_one()

    def answered(self, recopy: Recopy, holder: Holder, *, is_kept: bool) -> None:
        """Note what became of a segment that was sent again to a store."""
        key, sent = recopy.key, self._sent.get(recopy.key)
        if sent is None or sent.left.get(holder) is not recopy:
            return  # a plan without this store has come, or another segment in place of this one
        del sent.left[holder]
        sent.has_failed |= not is_kept
        if not is_kept:
            self._refused.add(holder)
        if sent.left:
            return
        del self._sent[key]
        was_tried = key == self._tried
        if was_tried:
            self._tried = None
        if sent.has_failed:
            self._lacking.add(key)
        elif was_tried:  # there may be room for more
            self._new |= self._lacking - self._sent.keys()
            self._lacking &= self._sent.keys()  # these may lack more than they are on their way to
        if self._tried is None:
            self._try_one()

    def due(self, from_version: int) -> Plan | None:
        """Return the plan under which it is to be looked; None if that is done.

        Args:
            from_version: first version of the newest window that the store knows to be complete.
        """
        return self._plan if self._new or from_version != self._from_version else None

    def wanted(self, from_version: int) -> frozenset[SegmentKey] | None:
        """Return the keys of what is to be looked at, if that is due; None: all that is kept.

        Args:
            from_version: as :meth:`due` was asked.
        """
        return None if from_version != self._from_version else frozenset(self._new)

    def look(self, from_version: int, kept: Iterable[Held]) -> list[Recopy]:
        """Return what the store sends now, in the order of ``kept``.

        Args:
            from_version: as :meth:`due` was asked.
            kept: the store's segments that a replay may need, of those that are :meth:`wanted`.
        """
        if self._plan is None:
            return []
        kept, new = list(kept), self._new
        if from_version != self._from_version:
            self._from_version = from_version
            self._ask_all_again(1)
            new |= {h.key for h in kept if h.key not in self._seen} | self._lacking
            self._tried, self._seen = None, {held.key for held in kept}
        self._new = set()
        self._lacking -= new - self._sent.keys()
        coming = {key: tuple(sent.left) for key, sent in self._sent.items()}
        looked = [h._replace(coming=coming.get(h.key, ())) for h in kept if h.key in new]
        self._seen |= {held.key for held in looked}
        found = plan_recopies(
            self._plan,
            self._pod,
            looked,
            peers=self._peers,
            domains=self._domains,
            refused=self._refused,
        )
        short = {recopy.key for recopy in found if len(recopy.holders) < self._num_wanted}
        self._lacking |= short
        found = [recopy for recopy in found if recopy.to]
        for recopy in found:
            sent = self._sent.setdefault(recopy.key, _Sent({}))
            sent.left |= dict.fromkeys(recopy.to, recopy)
        if self._tried is not None and self._tried not in self._sent:
            is_left = self._tried in self._lacking  # as no other store is
            self._tried = None
            if not is_left:
                self._try_one()
        return found

    def holders_after(self, holders: Iterable[Holder], holder: Holder) -> tuple[Holder, ...]:
        """Return the stores that keep a segment once one more has taken it.

        Those that the plan does not name stay out: what they had is gone with them.

        Args:
            holders: those before.
            holder: that has taken it.
        """
        return (*(h for h in holders if h in self._stores and h != holder), holder)

    def _ask_all_again(self, patience_steps: int) -> None:
        self._refused, self._num_steps, self._patience_steps = set(), 0, patience_steps

    def _try_one(self) -> None:
        """Have the first segment looked at that some store did not take."""
        if self._lacking:
            self._tried = min(self._lacking)
            self._new.add(self._tried)


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
