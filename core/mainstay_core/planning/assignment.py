"""Plans who computes each shard type, after replicas were lost or came back.

SPARe's reordering controller (arXiv 2603.00357, section 3.2 and appendix D) asks three questions in
three passes. Does the committed stack still collect all types? Which smallest stack would? Which
reordering to that stack moves least? Here they are one flow problem with integer costs: types on
the left, replicas with ``depth`` places each on the right (``shards_per_lane`` 1 is the paper's
case).

There are two deviations. First, hosts are a preference. The step lasts as long as its deepest
replica, so a type leaves its hosts rather than deepen a stack, and a type without a living host is
re-hosted instead of restarting the job. ``strict_hosts`` keeps the paper's behaviour, for
simulation and for data that is bound to nodes. Second, only what must move is inserted, by shortest
augmenting paths.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from mainstay_core.base.errors import InfeasiblePlanError, InvalidSpecError
from mainstay_core.base.words import count

_MAX_REGROUPED = 32  # moved types; with more, regrouping by pairs would delay the recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """A supplier for each shard type.

    Attributes:
        suppliers: per type the replica that computes it.
        depth: the largest number of types of a replica, the all-reduce stack.
        moved: types with another supplier than before, ascending.
        patched: those of them whose supplier before is lost: in a step that is
            under way they must be computed again unless another holds them.
        rehosted: types whose supplier is outside of their hosts, ascending.
        without_host: types none of whose hosts lives; in ``rehosted`` too.
        reason: one sentence for people.
    """

    suppliers: tuple[int, ...]
    depth: int
    moved: tuple[int, ...]
    patched: tuple[int, ...]
    rehosted: tuple[int, ...]
    without_host: tuple[int, ...]
    reason: str


def plan_reordering(
    hosts: Sequence[Sequence[int]],
    living_replicas: Collection[int],
    current: Sequence[int] | None,
    shards_per_lane: int,
    lanes: int,
    *,
    strict_hosts: bool = False,
) -> Reordering:
    """Assign every type to a living replica.

    The result minimises, in this order:

    1. depth: the largest number of types of a replica. Without ``strict_hosts``
       that is ``ceil(num_types / num_living)``, whatever the hosts;
    2. movement: the number of types whose supplier differs from ``current``;
    3. the number of types outside of their hosts;
    4. over the types away from home, the sum of ``shards_per_lane - index``, index =
       type mod shards_per_lane: a lane's last types are handed off, its first
       come home, so that a replica keeps a leading run and sends few partials.

    What is still equal is settled towards the least loaded replica, then the
    lowest id; at last pairs of moved types swap suppliers where this lowers the
    partials. Equal arguments give equal plans.

    Costs O(num_types) to read the input and one augmenting path per type lost or
    in excess (Dijkstra's algorithm with dual prices and early exit, in practice a
    few host lists long); ``strict_hosts`` adds a Hopcroft-Karp run per depth tried.

    Args:
        hosts: per type its host lanes; a replica is named by its lane.
        living_replicas: replicas that can compute, each in 0..lanes-1.
        current: per type its supplier so far, living or lost; None = its home
            lane's replica.
        shards_per_lane: types to a lane; type t has home ``t // shards_per_lane``.
        lanes: homes of the job.
        strict_hosts: only hosts may compute a type.

    Returns:
        The assignment.

    Raises:
        InfeasiblePlanError: no replica lives; or, with ``strict_hosts``, some type
            has no living host (the paper's wipe-out).
        InvalidSpecError: sizes or ids don't fit together.
    """
    living = frozenset(living_replicas)
    if current is None:
        current = [t // shards_per_lane for t in range(lanes * shards_per_lane)]
    _check_arguments(hosts, living, current, shards_per_lane, lanes)
    depth = math.ceil(len(hosts) / len(living))
    if strict_hosts:
        wiped = [t for t, lanes_of_type in enumerate(hosts) if living.isdisjoint(lanes_of_type)]
        if wiped:
            raise InfeasiblePlanError(f"no host lives of {_name_types(wiped)}")
        depth = _smallest_depth_over_hosts(hosts, living, lanes, depth)
    problem = _Problem(hosts, living, current, shards_per_lane, depth, strict_hosts)
    suppliers = _Flow(problem).solve()
    _regroup_moved(problem, suppliers)
    return _describe(problem, suppliers, lanes)


@dataclass(frozen=True, slots=True)
class _Problem:
    hosts: Sequence[Sequence[int]]
    living: frozenset[int]
    current: Sequence[int]
    shards_per_lane: int
    depth: int
    strict_hosts: bool


def _check_arguments(
    hosts: Sequence[Sequence[int]],
    living: frozenset[int],
    current: Sequence[int],
    shards_per_lane: int,
    lanes: int,
) -> None:
    if lanes < 1 or shards_per_lane < 1:
        raise InvalidSpecError("spec.training", "lanes and shardsPerLane must be at least 1")
    num_types = lanes * shards_per_lane
    for name, length in (("hosts", len(hosts)), ("current", len(current))):
        if length != num_types:
            raise InvalidSpecError(name, f"has {length} entries, must have {num_types}")
    if not living:
        raise InfeasiblePlanError("no replica lives, so no shard type can be computed")
    if min(living) < 0 or max(living) >= lanes:
        raise InvalidSpecError("living_replicas", f"must be within 0..{lanes - 1}")


def _smallest_depth_over_hosts(
    hosts: Sequence[Sequence[int]], living: frozenset[int], lanes: int, depth: int
) -> int:
    """Return the smallest stack from ``depth`` up that collects all types (HK-Free).

    Each replica is ``depth`` columns of a bipartite graph. Hopcroft-Karp in compiled code takes
    O(sqrt(V) E) per depth tried.
    """
    alive = np.zeros(lanes, dtype=bool)
    alive[list(living)] = True
    counts = np.fromiter((len(h) for h in hosts), dtype=np.int32, count=len(hosts))
    replicas = np.fromiter(chain.from_iterable(hosts), dtype=np.int32, count=int(counts.sum()))
    types = np.repeat(np.arange(len(hosts), dtype=np.int32), counts)
    replicas, types = replicas[alive[replicas]], types[alive[replicas]]
    while True:
        columns = np.add.outer(replicas * depth, np.arange(depth, dtype=np.int32)).ravel()
        rows = np.repeat(types, depth)
        edges = np.ones(len(rows), dtype=np.float64)
        graph = csr_array((edges, (rows, columns)), shape=(len(hosts), lanes * depth))
        if bool((maximum_bipartite_matching(graph, perm_type="column") >= 0).all()):
            return depth
        depth += 1


class _Flow:
    """Finds the assignment of least cost by successive shortest paths, starting from what is kept.

    Costs of type t at replica r are integers with three digits in a large base: moved, outside of
    hosts, away from home. Dual prices u (types) and v (replicas) certify the optimum:

    Invariant: u[t] + v[r] <= cost(t, r), with equality where t is assigned to r; v[r] <= 0, and
    v[r] == 0 while r has a free place.

    Keeping what fits at its supplier satisfies the invariant with v = 0: any other place costs a
    movement, which outweighs the rest. Each insertion preserves it.
    """

    def __init__(self, problem: _Problem) -> None:
        num_types = len(problem.hosts)
        self._problem = problem
        self._off_host = num_types * problem.shards_per_lane + 1
        self._movement = (num_types + 1) * self._off_host
        # Stands for all replicas with a free place: a type may go to any, at one price.
        self._anywhere = 1 + max(problem.living)
        self._where: list[int] = [-1] * num_types
        self._assigned: dict[int, list[int]] = {r: [] for r in sorted(problem.living)}
        self._u: dict[int, int] = {}
        self._v: dict[int, int] = {}
        self._keep()
        self._free = [(len(held), r) for r, held in self._assigned.items()]
        heapq.heapify(self._free)

    def solve(self) -> list[int]:
        """Insert every type that is not kept, in order; returns the supplier per type."""
        for t, replica in enumerate(self._where):
            if replica < 0:
                self._insert(t)
        return self._where

    def _keep(self) -> None:
        """Leave at each living supplier the types that fit there, the cheapest first."""
        problem = self._problem
        for t, supplier in enumerate(problem.current):
            allowed = not problem.strict_hosts or supplier in problem.hosts[t]
            if allowed and supplier in problem.living:
                self._assigned[supplier].append(t)
        for replica, held in self._assigned.items():
            if len(held) > problem.depth:
                order = sorted((self._cost(t, replica), t) for t in held)
                held[:] = [t for _, t in order[: problem.depth]]
            for t in held:
                self._where[t] = replica

    def _cost(self, t: int, replica: int) -> int:
        home, index = divmod(t, self._problem.shards_per_lane)
        cost = 0 if replica == home else self._problem.shards_per_lane - index
        if replica != self._problem.current[t]:
            cost += self._movement
        if replica not in self._problem.hosts[t]:
            cost += self._off_host
        return cost

    def _price(self, t: int) -> int:
        if t not in self._u:
            self._u[t] = self._cost(t, self._where[t])
        return self._u[t]

    def _places(self, t: int) -> list[tuple[int, int, int]]:
        """Return where ``t`` may go: (replica, cost, load), the cheap ones by name."""
        problem = self._problem
        home, index = divmod(t, problem.shards_per_lane)
        named = [r for r in problem.hosts[t] if r in problem.living]
        if not problem.strict_hosts:
            others = {problem.current[t], home} & problem.living
            named += sorted(others.difference(named))
        places = [(r, self._cost(t, r), len(self._assigned[r])) for r in named]
        if problem.strict_hosts:
            return places
        # Load below any depth, so that it always ends a path; last among equals by its id.
        cost = self._movement + self._off_host + problem.shards_per_lane - index
        return [*places, (self._anywhere, cost, problem.depth - 1)]

    def _insert(self, new: int) -> None:
        """Assign one more type along the cheapest path of displacements."""
        distance: dict[int, int] = {}
        via: dict[int, int] = {}
        heap: list[tuple[int, int, int]] = []
        bound: int | None = None

        def relax(t: int, start: int) -> None:
            nonlocal bound
            for replica, cost, load in self._places(t):
                reached = start + cost - self._v.get(replica, 0)
                if bound is not None and reached > bound:
                    continue
                if replica not in distance or reached < distance[replica]:
                    distance[replica] = reached
                    via[replica] = t
                    # At equal cost, prefer a place that ends the path, and the emptiest one.
                    heapq.heappush(heap, (reached, load, replica))
                    if load < self._problem.depth:
                        bound = reached

        relax(new, 0)
        full: dict[int, None] = {}
        while heap:
            reached, load, replica = heapq.heappop(heap)
            if load < self._problem.depth:
                self._reprice(new, reached, full, distance)
                self._shift(new, replica, via)
                return
            if replica not in full:
                full[replica] = None
                for t in self._assigned[replica]:
                    relax(t, reached - self._price(t))
        raise InfeasiblePlanError(f"no place for type {new} at depth {self._problem.depth}")

    def _reprice(
        self, new: int, reached: int, full: Iterable[int], distance: dict[int, int]
    ) -> None:
        self._u[new] = reached
        for replica in full:
            rise = reached - distance[replica]
            if rise:
                self._v[replica] = self._v.get(replica, 0) - rise
                for t in self._assigned[replica]:
                    self._u[t] = self._price(t) + rise

    def _shift(self, new: int, end: int, via: dict[int, int]) -> None:
        """Move every type on the path one place on, the last into the free place."""
        place = self._emptiest() if end == self._anywhere else end
        heapq.heappush(self._free, (len(self._assigned[place]) + 1, place))
        step = end
        while True:
            t = via[step]
            before = self._where[t]
            self._assigned[place].append(t)
            self._where[t] = place
            if t == new:
                return
            self._assigned[before].remove(t)
            place = step = before

    def _emptiest(self) -> int:
        while True:
            load, replica = self._free[0]
            if load == len(self._assigned[replica]) < self._problem.depth:
                return replica
            heapq.heappop(self._free)


def _regroup_moved(problem: _Problem, where: list[int]) -> None:
    """Swap suppliers of moved types so that they extend runs, which gives fewer partials.

    A swap must lower the sum over replicas of their squared partials, and leave depth, movement,
    hosts and homes as they are. ``where`` is changed in place.
    """
    current, shards_per_lane = problem.current, problem.shards_per_lane
    moved = [t for t, r in enumerate(where) if r not in (current[t], t // shards_per_lane)]
    if shards_per_lane == 1 or not 2 <= len(moved) <= _MAX_REGROUPED:
        return
    held: dict[int, set[int]] = {where[t]: set() for t in moved}
    for t, replica in enumerate(where):
        if replica in held:
            held[replica].add(t)

    def may(t: int, to: int) -> bool:
        stays_hosted = to in problem.hosts[t] or where[t] not in problem.hosts[t]
        return stays_hosted and to not in (current[t], t // shards_per_lane)

    def swap(t: int, u: int) -> int:
        left, right = where[t], where[u]
        held[left] ^= {t, u}
        held[right] ^= {t, u}
        where[t], where[u] = right, left
        return sum(_num_partials(held[r], shards_per_lane) ** 2 for r in (left, right))

    improved = True
    while improved:
        improved = False
        for t, u in combinations(moved, 2):
            if where[t] != where[u] and may(t, where[u]) and may(u, where[t]):
                after = swap(t, u)
                before = swap(t, u)
                if after < before:
                    swap(t, u)
                    improved = True


def _num_partials(types: Collection[int], shards_per_lane: int) -> int:
    """Return how many partials these types make.

    A lane's leading run is one, each other type is one.
    """
    num = 0
    following = -1
    for t in sorted(types):
        extends_run = t == following and t % shards_per_lane != 0
        num += not extends_run
        if extends_run or t % shards_per_lane == 0:
            following = t + 1
    return num


def _describe(problem: _Problem, where: Sequence[int], lanes: int) -> Reordering:
    hosts, living, current = problem.hosts, problem.living, problem.current
    depth = max(Counter(where).values())
    moved = tuple(t for t, replica in enumerate(where) if replica != current[t])
    patched = tuple(t for t in moved if current[t] not in living)
    rehosted = tuple(t for t, replica in enumerate(where) if replica not in hosts[t])
    without_host = tuple(t for t in rehosted if living.isdisjoint(hosts[t]))
    reason = (
        f"{count(len(where), 'shard type')} on {len(living)} of {count(lanes, 'replica')}: "
        f"all-reduce stack {depth}, {count(len(moved), 'type')} moved"
    )
    if patched:
        reason += f", {len(patched)} of them off lost replicas"
    if rehosted:
        reason += f"; outside of their hosts: {_name_types(rehosted)}"
        reason += f" ({len(without_host)} without a living host)"
    return Reordering(
        suppliers=tuple(where),
        depth=depth,
        moved=moved,
        patched=patched,
        rehosted=rehosted,
        without_host=without_host,
        reason=reason,
    )


def _name_types(types: Sequence[int]) -> str:
    shown = ", ".join(str(t) for t in types[:8])
    more = f" and {len(types) - 8} more" if len(types) > 8 else ""
    return f"type{'s' if len(types) > 1 else ''} {shown}{more}"
