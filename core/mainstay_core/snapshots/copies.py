"""Chooses the pods whose stores hold the copies that an author makes.

An author's copies lie in the store of its own pod and in those of ``snapshots.peers`` other pods.
They protect from losses that take all cells of a stage. So one of them must lie outside of the
stage's pods, and together they span ``protection.domains`` failure domains. Pods of neighbouring
stages are avoided: they hold the logs with which the stage is replayed, and one loss should not
take both. Spares have stores too. MoEvement (arXiv 2412.15411, section 4) copies to two peers, and
leaves open which.

When the membership changes, holders stay where the rules let them. So few pods have to meet anew,
and a pod that a copy leaves keeps what it has until the next window is complete.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, NamedTuple

from mainstay_core.base.bounds import MAX_MEMBERS, Count, Index, Longest, Name, Sentence
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.snapshots.measures import MAX_PEERS
from mainstay_core.snapshots.units import Position

_PREFIXES = (64, 1024)
"""Numbers of pods that are looked at before all of them are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePod:
    """A living pod with a store."""

    pod: PodUid
    domain: Name = ""
    """Failure domain; a pod of which none is known is one of its own."""
    stages: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)] = ()
    """Stages of which it has members; none for a spare."""
    room: Count | None = None
    """Bytes that it takes for others; None: as many as come. A spare would be the best peer of
    everybody, and its memory is that of any pod."""

    @property
    def failure_domain(self) -> str:
        """The failure domain, the pod itself where none is known."""
        return self.domain or self.pod

    def has_room(self, size_bytes: int) -> bool:
        """Return whether it takes so much for others."""
        return self.room is None or size_bytes <= self.room


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CopyDemand:
    """The copies that the authors of one position in one pod make in a window."""

    position: Position
    pod: PodUid
    size_bytes: Count
    """Of all their instalments of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The stores that hold what the authors of one position in one pod copy."""

    position: Position
    pod: PodUid
    """The authors' own pod; its store holds the copies as well."""
    peers: Annotated[tuple[PodUid, ...], Longest(MAX_PEERS)]
    """Other pods, ascending."""
    num_domains: Index
    """Failure domains of all these pods."""
    outside: bool
    """Whether a peer has no member of the stage."""

    @property
    def holders(self) -> tuple[PodUid, ...]:
        """All pods with the copies, the own one first."""
        return (self.pod, *self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The stores of all copies of a job."""

    copies: Annotated[tuple[Copies, ...], Longest(MAX_MEMBERS)]
    """By position and pod."""
    num_moved: Count
    """Peers that did not hold these copies before."""
    reason: Sentence
    """One sentence for people; it names what the pods that live do not allow."""


class Candidate(NamedTuple):
    """A pod that may become a peer. As a tuple it orders from the best to the worst."""

    adjacent: bool
    moved: bool
    load_bytes: int
    number: int
    """Of the pod, by its name."""
    domain: str
    outside: bool


def plan_copies(
    pods: Sequence[StorePod],
    demands: Sequence[CopyDemand],
    *,
    peers: int,
    domains: int,
    previous: CopyPlan | None = None,
) -> CopyPlan:
    """Choose the peers of every demand, one demand after the other.

    For each demand the choice is the best of all sets of ``peers`` other pods (all others, if there
    are fewer), in this order:

    1. a peer outside of the stage's pods;
    2. the number of failure domains, up to ``domains``, the own pod's included;
    3. the fewest pods of neighbouring stages;
    4. the fewest pods that did not hold these copies before;
    5. the least sum of bytes that they hold already; ties by their names.

    Equal arguments give equal plans, in whatever order pods and demands are listed. A demand looks
    at few pods, as a rule, so a plan takes O(demands log pods) and for awkward ones O(pods) each.

    Args:
        pods: living pods with stores, spares among them.
        demands: one for each position and pod that has authors of it.
        peers: wanted copies beside that in the author's own pod.
        domains: failure domains that the copies should span.
        previous: the plan in force.

    Raises:
        InvalidSpecError: arguments out of their range, or a demand of an unknown pod.
    """
    _check_arguments(pods, demands, peers, domains)
    ordered = sorted(pods, key=lambda pod: pod.pod)
    numbers = {pod.pod: number for number, pod in enumerate(ordered)}
    before = {} if previous is None else {(c.position, c.pod): c.peers for c in previous.copies}
    loads = _Loads(len(ordered))
    kept: dict[tuple[Position, PodUid], list[int]] = {}
    for demand in sorted(demands):
        key = (demand.position, demand.pod)
        kept[key] = [numbers[pod] for pod in before.get(key, ()) if pod in numbers]
        for number in kept[key]:
            loads.add(number, demand.size_bytes)
    copies, num_moved = [], 0
    for demand in sorted(demands):
        mine = kept[demand.position, demand.pod]
        for number in mine:
            loads.add(number, -demand.size_bytes)
        own = ordered[numbers[demand.pod]]
        stage, size = demand.position.stage, demand.size_bytes
        chosen = _choose(ordered, own, stage, mine, loads, size, peers, domains)
        for candidate in chosen:
            loads.add(candidate.number, demand.size_bytes)
        num_moved += sum(candidate.moved for candidate in chosen)
        copies.append(
            Copies(
                position=demand.position,
                pod=demand.pod,
                peers=tuple(ordered[c.number].pod for c in sorted(chosen, key=lambda c: c.number)),
                num_domains=len({own.failure_domain, *(c.domain for c in chosen)}),
                outside=any(c.outside for c in chosen),
            )
        )
    return CopyPlan(
        copies=tuple(copies),
        num_moved=num_moved,
        reason=_describe(copies, peers, domains, num_moved),
    )


def _check_arguments(
    pods: Sequence[StorePod], demands: Sequence[CopyDemand], peers: int, domains: int
) -> None:
    if not 0 <= peers <= MAX_PEERS:
        raise InvalidSpecError("spec.snapshots.peers", f"is {peers}, must be 0..{MAX_PEERS}")
    if not 1 <= domains <= peers + 1:
        raise InvalidSpecError(
            "spec.protection.domains",
            f"is {domains}, must be 1..{peers + 1}: there are {count(peers + 1, 'copy', 'copies')}",
        )
    known = {pod.pod for pod in pods}
    if len(known) < len(pods):
        raise InvalidSpecError("pods", "lists a pod twice")
    if len({(demand.position, demand.pod) for demand in demands}) < len(demands):
        raise InvalidSpecError("demands", "lists a position of a pod twice")
    for demand in demands:
        if demand.pod not in known:
            raise InvalidSpecError("demands", f"names the pod {demand.pod}, which has no store")


class _Loads:
    """Bytes that the pods hold for others, with the pods in ascending order of them."""

    def __init__(self, num_pods: int) -> None:
        self.of = [0] * num_pods
        self._ascending = [(0, number) for number in range(num_pods)]

    def add(self, number: int, size_bytes: int) -> None:
        """Add to what a pod holds."""
        del self._ascending[bisect_left(self._ascending, (self.of[number], number))]
        self.of[number] += size_bytes
        insort(self._ascending, (self.of[number], number))

    def least(self, how_many: int) -> list[int]:
        """Return the pods that hold least."""
        return [number for _, number in self._ascending[:how_many]]


def _choose(
    pods: Sequence[StorePod],
    own: StorePod,
    stage: int,
    kept: Sequence[int],
    loads: _Loads,
    size_bytes: int,
    peers: int,
    domains: int,
) -> list[Candidate]:
    """Return the best peers of one demand, of those that have room for it.

    Pods are looked at in ascending order of what they hold. If all that are chosen of the first
    ones are good, those that were not looked at cannot be better: they hold no less.
    """
    for how_many in (*_PREFIXES, len(pods)):
        candidates = [
            Candidate(
                adjacent=stage - 1 in pods[number].stages or stage + 1 in pods[number].stages,
                moved=number not in kept,
                load_bytes=loads.of[number],
                number=number,
                domain=pods[number].failure_domain,
                outside=stage not in pods[number].stages,
            )
            for number in dict.fromkeys([*kept, *loads.least(how_many)])
            if pods[number].pod != own.pod and pods[number].has_room(loads.of[number] + size_bytes)
        ]
        first = _cheapest(sorted(candidates), {own.failure_domain}, peers, domains - 1)
        good = (
            len(first) == peers
            and any(candidate.outside for candidate in first)
            and not any(candidate.adjacent for candidate in first)
            and len({own.failure_domain, *(c.domain for c in first)}) >= domains
        )
        if good or how_many >= len(pods):
            break
    return choose_best(candidates, own.failure_domain, peers, domains)


def choose_best(
    candidates: Sequence[Candidate], domain: str, peers: int, domains: int
) -> list[Candidate]:
    """Return the best set of peers among all candidates; see :func:`plan_copies` for the order.

    Without the rule about the outside the best set is the cheapest pod of each of the cheapest
    other domains, and then the cheapest that are left. If that has no pod outside, one pod outside
    is taken first, the cheapest of each domain in turn.
    """
    ascending = sorted(candidates)
    best = _cheapest(ascending, {domain}, peers, domains - 1)
    if not peers or any(candidate.outside for candidate in best):
        return best
    outside: dict[str, Candidate] = {}
    for candidate in ascending:
        if candidate.outside:
            outside.setdefault(candidate.domain, candidate)
    tries = [best]
    for forced in outside.values():
        rest = [candidate for candidate in ascending if candidate is not forced]
        reached = {domain, forced.domain}
        tries.append([forced, *_cheapest(rest, reached, peers - 1, domains - len(reached))])
    return min(tries, key=lambda chosen: cost_of(chosen, domain, domains))


def _cheapest(
    ascending: Sequence[Candidate], reached: set[str], how_many: int, new_domains: int
) -> list[Candidate]:
    """Return the cheapest candidates that reach so many domains beyond those reached."""
    heads: dict[str, Candidate] = {}
    for candidate in ascending:
        if candidate.domain not in reached:
            heads.setdefault(candidate.domain, candidate)
    chosen = list(heads.values())[: max(0, min(new_domains, how_many))]
    taken = {candidate.number for candidate in chosen}
    rest = (candidate for candidate in ascending if candidate.number not in taken)
    return [*chosen, *islice(rest, how_many - len(chosen))]


def cost_of(
    chosen: Sequence[Candidate], domain: str, domains: int
) -> tuple[bool, int, int, int, int, tuple[int, ...]]:
    """Return what is minimised: see :func:`plan_copies`."""
    num_domains = len({domain, *(candidate.domain for candidate in chosen)})
    return (
        not any(candidate.outside for candidate in chosen),
        max(0, domains - num_domains),
        sum(candidate.adjacent for candidate in chosen),
        sum(candidate.moved for candidate in chosen),
        sum(candidate.load_bytes for candidate in chosen),
        tuple(sorted(candidate.number for candidate in chosen)),
    )


def _describe(copies: Sequence[Copies], peers: int, domains: int, num_moved: int) -> str:
    fewer = sum(len(c.peers) < peers for c in copies)
    inside = sum(not c.outside for c in copies)
    narrow = sum(c.num_domains < domains for c in copies)
    reason = (
        f"copies of {count(len(copies), 'share')} in the own pod and "
        f"{count(peers, 'other')}; {count(num_moved, 'peer')} new"
    )
    for number, problem in (
        (fewer, "fewer peers, as there are no more pods"),
        (inside, "no copy outside of the stage's own pods"),
        (narrow, f"copies in fewer than {count(domains, 'failure domain')}"),
    ):
        if number:
            reason += f"; {number} with {problem}"
    return reason
