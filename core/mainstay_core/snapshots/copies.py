"""Chooses the pods whose stores hold the copies that an author makes.

An author's copies lie in the store of its own pod and in those of ``snapshots.peers`` other pods.
They protect from losses that take all cells of a stage. So one of them must lie outside of the
stage's pods, and together they span ``protection.domains`` failure domains. Pods of neighbouring
stages are avoided: they hold the logs with which the stage is replayed, and one loss should not
take both. Spares have stores too. MoEvement (arXiv 2412.15411, section 4) copies to two peers, and
leaves open which.

Given the plan in force, holders stay where the rules let them when the membership changes. Ranks
plan without it: they know the members, and a joiner does not know who kept what before. A pod that
a copy leaves keeps what it has until the next window is complete.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Annotated, NamedTuple

from mainstay_core.base.bounds import MAX_MEMBERS, Count, Index, Longest, Name, Sentence
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.snapshots.measures import MAX_PEERS
from mainstay_core.snapshots.units import Position


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
    at no more pods than ``peers`` and ``domains`` ask for, so a plan takes O(stages pods log pods +
    demands log pods).

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
    loads = [0] * len(ordered)
    kept: dict[tuple[Position, PodUid], list[int]] = {}
    for demand in sorted(demands):
        key = (demand.position, demand.pod)
        kept[key] = [numbers[pod] for pod in before.get(key, ()) if pod in numbers]
        for number in kept[key]:
            loads[number] += demand.size_bytes
    copies, num_moved = [], 0
    for stage, of_stage in groupby(sorted(demands), key=lambda demand: demand.position.stage):
        choice = _Choice(ordered, stage, loads, peers, domains)
        for demand in of_stage:
            mine = kept[demand.position, demand.pod]
            own = ordered[numbers[demand.pod]]
            chosen = choice.take(numbers[demand.pod], mine, demand.size_bytes)
            num_moved += sum(candidate.moved for candidate in chosen)
            names = tuple(ordered[number].pod for number in sorted(c.number for c in chosen))
            copies.append(
                Copies(
                    position=demand.position,
                    pod=demand.pod,
                    peers=names,
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


class _Ascending:
    """Pods that are alike but for their domain, in ascending order of what they hold."""

    def __init__(self) -> None:
        self._of_domain: dict[str, list[tuple[int, int]]] = {}
        """(bytes, number) of each pod, ascending."""
        self._heads: list[tuple[int, int, str]] = []
        """The first pod of each domain, ascending, and the domain."""

    def add(self, load_bytes: int, number: int, domain: str) -> None:
        """Add a pod."""
        pods = self._of_domain.setdefault(domain, [])
        before = pods[0] if pods else None
        insort(pods, (load_bytes, number))
        self._renew(before, pods, domain)

    def remove(self, load_bytes: int, number: int, domain: str) -> None:
        """Take a pod away that was added with that load."""
        pods = self._of_domain[domain]
        before = pods[0]
        del pods[bisect_left(pods, (load_bytes, number))]
        self._renew(before, pods, domain)

    def _renew(
        self, before: tuple[int, int] | None, pods: list[tuple[int, int]], domain: str
    ) -> None:
        after = pods[0] if pods else None
        if before == after:
            return
        if before is not None:
            del self._heads[bisect_left(self._heads, (*before, domain))]
        if after is not None:
            insort(self._heads, (*after, domain))

    def first(self, num_domains: int, num_pods: int, domain: str) -> list[int]:
        """Return the first pods of the domains that come first, and those of one more domain."""
        domains = {name: None for _, _, name in self._heads[:num_domains]}
        domains[domain] = None
        return [
            number for name in domains for _, number in self._of_domain.get(name, [])[:num_pods]
        ]


class _Kind(NamedTuple):
    """The properties of a pod that count in the choice of a stage, beside its domain and load."""

    adjacent: bool
    outside: bool
    room: int | None


class _Choice:
    """The choice of peers for the demands of one stage.

    To a stage a pod is of one of few kinds: with or without a member of a neighbouring stage, and
    of the stage itself, and by its room. Those of a kind that have room hold least. Of each kind
    only a few pods can be among the best: no set needs more than ``domains`` other domains, nor
    more than ``peers`` pods of one, nor are there more than ``peers`` domains from which it may be
    worth to take the pod outside (see :func:`choose_best`).
    """

    def __init__(
        self, pods: Sequence[StorePod], stage: int, loads: list[int], peers: int, domains: int
    ) -> None:
        self._pods, self._loads, self._peers, self._domains = pods, loads, peers, domains
        self._kinds = [
            _Kind(
                stage - 1 in pod.stages or stage + 1 in pod.stages,
                stage not in pod.stages,
                pod.room,
            )
            for pod in pods
        ]
        self._alike = {kind: _Ascending() for kind in set(self._kinds)}
        for number in range(len(pods)):
            self._put(number)

    def take(self, own: int, kept: Sequence[int], size_bytes: int) -> list[Candidate]:
        """Return the best peers of a demand, and count its bytes where they go.

        Args:
            own: number of the author's pod.
            kept: peers that held these copies before; their bytes are counted there.
            size_bytes: of the copies.
        """
        apart = {own, *kept}
        for number in apart:
            self._drop(number)
        for number in kept:
            self._loads[number] -= size_bytes
        domain = self._pods[own].failure_domain
        num_domains = 1 + max(self._peers, self._domains)
        found = [self._candidate(number, moved=False) for number in kept if number != own]
        found += [
            self._candidate(number, moved=True)
            for alike in self._alike.values()
            for number in alike.first(num_domains, 1 + self._peers, domain)
        ]
        found = [
            one
            for one in found
            if self._pods[one.number].has_room(self._loads[one.number] + size_bytes)
        ]
        chosen = choose_best(found, domain, self._peers, self._domains)
        for candidate in chosen:
            if candidate.number not in apart:
                self._drop(candidate.number)
                apart.add(candidate.number)
            self._loads[candidate.number] += size_bytes
        for number in apart:
            self._put(number)
        return chosen

    def _candidate(self, number: int, *, moved: bool) -> Candidate:
        kind = self._kinds[number]
        domain = self._pods[number].failure_domain
        return Candidate(kind.adjacent, moved, self._loads[number], number, domain, kind.outside)

    def _put(self, number: int) -> None:
        alike = self._alike[self._kinds[number]]
        alike.add(self._loads[number], number, self._pods[number].failure_domain)

    def _drop(self, number: int) -> None:
        alike = self._alike[self._kinds[number]]
        alike.remove(self._loads[number], number, self._pods[number].failure_domain)


def choose_best(
    candidates: Sequence[Candidate], domain: str, peers: int, domains: int
) -> list[Candidate]:
    """Return the best set of peers among all candidates; see :func:`plan_copies` for the order.

    Without the rule about the outside the best set is the cheapest pod of each of the cheapest
    other domains, and then the cheapest that are left. If that has no pod outside, one pod outside
    is taken first, the cheapest of some domain. Only the own domain and the ``peers`` other ones
    whose cheapest are the cheapest have to be tried: of any set, the other pods leave one of these
    out, and then its pod may stand in the place of the set's pod outside.
    """
    ascending = sorted(candidates)
    best = _cheapest(ascending, {domain}, peers, domains - 1)
    if not peers or any(candidate.outside for candidate in best):
        return best
    outside: dict[str, Candidate] = {}
    for candidate in ascending:
        if candidate.outside:
            outside.setdefault(candidate.domain, candidate)
    others = [candidate for candidate in outside.values() if candidate.domain != domain]
    of_own = [outside[domain]] if domain in outside else []
    tries = [best]
    for forced in (*of_own, *others[:peers]):
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
