"""Plans which lanes host which shard type: SPARe's cyclic Golomb ruler rule, on lanes.

A type's hosts are the first choice when its supplier is lost (that they also prefetch its data is
planned). A placement is good if any two types share few hosts: then the loss of a few lanes never
exhausts the hosts of many types at once. Marks of a Golomb ruler have distinct differences, so
types placed by it share at most one host (SPARe, arXiv 2603.00357, definition B.1 and lemma B.2).

There are two deviations from the paper, and the plan's reason names both. A ruler needs ``lanes >=
2 * length + 1``; below that a cyclic set is searched instead. With several types to a lane, each
index inside the lane has its own variant of the set, so that a lost lane's types go to different
places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from mainstay_core.base.errors import InvalidSpecError

# fmt: off
GOLOMB_RULERS: dict[int, tuple[int, ...]] = {
    2: (0, 1),
    3: (0, 1, 3),
    4: (0, 1, 4, 6),
    5: (0, 1, 4, 9, 11),
    6: (0, 1, 4, 10, 12, 17),
    7: (0, 1, 4, 10, 18, 23, 25),
    8: (0, 1, 4, 9, 15, 22, 32, 34),
    9: (0, 1, 5, 12, 25, 27, 35, 41, 44),
    10: (0, 1, 6, 10, 23, 26, 34, 41, 53, 55),
    11: (0, 1, 4, 13, 28, 33, 47, 54, 64, 70, 72),
    12: (0, 2, 6, 24, 29, 40, 43, 55, 68, 75, 76, 85),
    13: (0, 2, 5, 25, 37, 43, 59, 70, 85, 89, 98, 99, 106),
    14: (0, 4, 6, 20, 35, 52, 59, 77, 78, 86, 89, 99, 122, 127),
    15: (0, 4, 20, 30, 57, 59, 62, 76, 100, 111, 123, 136, 144, 145, 151),
    16: (0, 1, 4, 11, 26, 32, 56, 68, 76, 115, 117, 134, 150, 163, 168, 177),
    17: (0, 5, 7, 17, 52, 56, 67, 80, 81, 100, 122, 138, 159, 165, 168, 191, 199),
    18: (0, 2, 10, 22, 53, 56, 82, 83, 89, 98, 130, 148, 153, 167, 188, 192, 205, 216),
    19: (0, 1, 6, 25, 32, 72, 100, 108, 120, 130, 153, 169, 187, 190, 204, 231, 233, 242, 246),
    20: (0, 1, 8, 11, 68, 77, 94, 116, 121, 156, 158, 179, 194, 208, 212, 228, 240, 253, 259, 283),
    21: (0, 2, 24, 56, 77, 82, 83, 95, 129, 144, 179, 186, 195, 255, 265, 285, 293, 296, 310, 329,
         333),
    22: (0, 1, 9, 14, 43, 70, 106, 122, 124, 128, 159, 179, 204, 223, 253, 263, 270, 291, 330, 341,
         353, 356),
    23: (0, 3, 7, 17, 61, 66, 91, 99, 114, 159, 171, 199, 200, 226, 235, 246, 277, 316, 329, 348,
         350, 366, 372),
    24: (0, 9, 33, 37, 38, 97, 122, 129, 140, 142, 152, 191, 205, 208, 252, 278, 286, 326, 332,
         353, 368, 384, 403, 425),
    25: (0, 12, 29, 39, 72, 91, 146, 157, 160, 161, 166, 191, 207, 214, 258, 290, 316, 354, 372,
         394, 396, 431, 459, 467, 480),
    26: (0, 1, 33, 83, 104, 110, 124, 163, 185, 200, 203, 249, 251, 258, 314, 318, 343, 356, 386,
         430, 440, 456, 464, 475, 487, 492),
    27: (0, 3, 15, 41, 66, 95, 97, 106, 142, 152, 220, 221, 225, 242, 295, 330, 338, 354, 382, 388,
         402, 415, 486, 504, 523, 546, 553),
    28: (0, 3, 15, 41, 66, 95, 97, 106, 142, 152, 220, 221, 225, 242, 295, 330, 338, 354, 382, 388,
         402, 415, 486, 504, 523, 546, 553, 585),
}
"""Marks of an optimal Golomb ruler by number of marks, as published; those of 24
to 28 marks were proved optimal by distributed.net (2004 to 2022)."""
# fmt: on

EULER_MASCHERONI = 0.5772156649015329

# Bounds on the effort of the searches below, after which they settle for less.
_MAX_SEARCH_NODES = 20_000
_MAX_VARIANT_CANDIDATES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The lanes that host each shard type.

    Attributes:
        hosts: per type (``lanes * shards_per_lane`` of them) its host lanes,
            home lane first.
        offsets: per index of a type inside its lane, its hosts relative to the
            home lane: ``hosts[t] == (t // c + offsets[t % c]) mod lanes``.
        redundancy: number of hosts of a type, r of the paper.
        max_shared_hosts: the largest number of hosts that two types share.
        reason: one sentence for people.
    """

    hosts: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    redundancy: int
    max_shared_hosts: int
    reason: str


def plan_redundancy(lanes: int) -> int:
    """Return the redundancy with the least time to train: ``Auto`` in the spec.

    It is ``r* = (ln N + g) / ln 2``, rounded to the nearest integer (SPARe, section 4.2, equation
    8). N is the number of lanes, since a failure takes a lane whatever the number of its types. The
    result is at least 2, and at most ``lanes`` and the longest ruler known.
    """
    best = round((math.log(lanes) + EULER_MASCHERONI) / math.log(2))
    return min(max(best, 2), lanes, max(GOLOMB_RULERS))


def plan_placement(lanes: int, shards_per_lane: int, redundancy: int | None = None) -> Placement:
    """Choose the hosts of every shard type (SPARe, equation 10).

    Type ``t`` of lane ``l = t // shards_per_lane`` is hosted by the lanes
    ``(l + a) mod lanes`` for ``a`` in a set with 0 and ``redundancy`` members: the
    optimal Golomb ruler where ``lanes >= 2 * length + 1``, else a searched set whose
    cyclic differences repeat as little as possible. Of several types to a lane,
    each index multiplies the set by a number coprime to ``lanes`` (which keeps
    the differences of a set apart), chosen in turn to share the fewest hosts with
    the indices before it.

    Args:
        lanes: homes, at least 1.
        shards_per_lane: types to a lane, at least 1.
        redundancy: hosts of a type, 1 to 28 and at most ``lanes``; None is ``Auto``.

    Returns:
        The placement; equal arguments give equal placements.

    Raises:
        InvalidSpecError: an argument is out of its range; the field is its path in
            the TrainingJob.
    """
    _check_arguments(lanes, shards_per_lane, redundancy)
    marks = plan_redundancy(lanes) if redundancy is None else redundancy
    base, how = _base_set(lanes, marks)
    offsets = _spread_variants(lanes, base, shards_per_lane)
    hosts = tuple(
        tuple((lane + offset) % lanes for offset in offsets[index])
        for lane in range(lanes)
        for index in range(shards_per_lane)
    )
    shared = _max_shared(lanes, offsets)
    chosen = "chosen for the number of lanes" if redundancy is None else "as asked"
    return Placement(
        hosts=hosts,
        offsets=offsets,
        redundancy=marks,
        max_shared_hosts=shared,
        reason=f"redundancy {marks} ({chosen}) on {lanes} lanes: {how}; "
        f"two types share at most {shared} of their {marks} hosts",
    )


def _check_arguments(lanes: int, shards_per_lane: int, redundancy: int | None) -> None:
    if lanes < 1:
        raise InvalidSpecError("spec.training.lanes", f"is {lanes}, must be at least 1")
    if shards_per_lane < 1:
        raise InvalidSpecError(
            "spec.training.shardsPerLane", f"is {shards_per_lane}, must be at least 1"
        )
    if redundancy is None:
        return
    most = min(lanes, max(GOLOMB_RULERS))
    if not 1 <= redundancy <= most:
        raise InvalidSpecError(
            "spec.redundancy",
            f"is {redundancy}, must be Auto or 1 to {most} with {lanes} lanes",
        )


def _base_set(lanes: int, marks: int) -> tuple[tuple[int, ...], str]:
    """Return the cyclic set of one type per lane, and how it was found."""
    if marks == 1:
        return (0,), "no host beside the home lane"
    ruler = GOLOMB_RULERS[marks]
    if lanes >= 2 * ruler[-1] + 1:
        return ruler, f"optimal Golomb ruler of length {ruler[-1]}"
    found, proved = _search_cyclic_set(lanes, marks)
    best = "the fewest repeated differences possible" if proved else "few repeated differences"
    return found, (
        f"too few lanes for the Golomb ruler (needs {2 * ruler[-1] + 1}), "
        f"so a searched cyclic set with {best}"
    )


@lru_cache(maxsize=64)
def _search_cyclic_set(lanes: int, marks: int) -> tuple[tuple[int, ...], bool]:
    """Return a set of ``marks`` residues with 0 whose differences repeat as little as possible.

    The number of repeats of a difference s is the number of hosts that the types of lanes l and l +
    s share. The search tries limits upwards from the pigeonhole bound, depth first and with bounded
    effort. It returns the first set in lexicographic order under the first limit that succeeds. The
    limit ``marks`` always does.

    Returns:
        The set, ascending, and whether every smaller limit was proved impossible.
    """
    limit = math.ceil(marks * (marks - 1) / (lanes - 1))
    proved = True
    while True:
        found, complete = _search_under_limit(lanes, marks, limit)
        if found is not None:
            return found, proved
        proved = proved and complete
        limit += 1


def _search_under_limit(lanes: int, marks: int, limit: int) -> tuple[tuple[int, ...] | None, bool]:
    """Return the first set with no difference more than ``limit`` times.

    False: the search gave up.
    """
    repeats = [0] * lanes
    chosen = [0]
    candidate = 1
    num_nodes = 0
    while True:
        if len(chosen) == marks:
            return tuple(chosen), True
        if candidate > lanes - (marks - len(chosen)):
            if len(chosen) == 1:
                return None, True
            candidate = chosen.pop()
            _count_differences(repeats, lanes, chosen, candidate, -1)
            candidate += 1
            continue
        num_nodes += 1
        if num_nodes > _MAX_SEARCH_NODES:
            return None, False
        _count_differences(repeats, lanes, chosen, candidate, 1)
        changed = [(candidate - mark) % lanes for mark in chosen]
        if all(max(repeats[d], repeats[lanes - d]) <= limit for d in changed):
            chosen.append(candidate)
        else:
            _count_differences(repeats, lanes, chosen, candidate, -1)
        candidate += 1


def _count_differences(
    repeats: list[int], lanes: int, chosen: list[int], candidate: int, by: int
) -> None:
    for mark in chosen:
        repeats[(candidate - mark) % lanes] += by
        repeats[(mark - candidate) % lanes] += by


def _spread_variants(
    lanes: int, base: tuple[int, ...], num_variants: int
) -> tuple[tuple[int, ...], ...]:
    """Return one variant of the set for each index inside a lane.

    They overlap as little as possible.

    Greedy in the order of indices. The best candidate shares the fewest hosts with a chosen variant
    at any distance of lanes, then inside the lane. Then come how crowded the lanes get to which a
    lost lane's types go, and its multiplier.
    """
    if num_variants == 1 or len(base) in (1, lanes):
        return (base,) * num_variants
    candidates = _variant_candidates(lanes, base)
    worst = [0] * len(candidates)
    own = [0] * len(candidates)
    squares = [0] * len(candidates)
    crowd: Counter[int] = Counter()
    chosen: list[tuple[int, ...]] = []
    pick = 0
    while True:
        variant = candidates[pick]
        chosen.append(variant)
        if len(chosen) == num_variants:
            return tuple(chosen)
        crowd.update(offset for offset in variant if offset)
        ranks = []
        for i, candidate in enumerate(candidates):
            shared = _shared_by_distance(lanes, variant, candidate)
            worst[i] = max(worst[i], max(shared.values()))
            squares[i] += sum(count * count for count in shared.values())
            own[i] = max(own[i], shared[0])
            crowding = sum(crowd[offset] for offset in candidate if offset)
            ranks.append((worst[i], own[i], crowding, squares[i], i))
        pick = min(ranks)[-1]


def _variant_candidates(lanes: int, base: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return multiples of the set by units modulo ``lanes``, then their rotations onto a mark.

    Home (0) is first in each. The mirrored set is the multiple by -1. Rotations are offered only
    where there are few multiples: a rotated set is the set of another lane, which shares all hosts
    with it.
    """
    candidates: list[tuple[int, ...]] = []
    seen: set[frozenset[int]] = set()

    def offer(offsets: Iterable[int]) -> None:
        residues = frozenset(offsets)
        if residues not in seen and len(candidates) < _MAX_VARIANT_CANDIDATES:
            seen.add(residues)
            candidates.append((0, *sorted(residues - {0})))

    units = [unit for unit in range(1, lanes) if math.gcd(unit, lanes) == 1]
    for unit in units[:_MAX_VARIANT_CANDIDATES]:
        offer(mark * unit % lanes for mark in base)
    for variant in tuple(candidates):
        for start in variant[1:]:
            offer((mark - start) % lanes for mark in variant)
    return candidates


def _shared_by_distance(lanes: int, left: tuple[int, ...], right: tuple[int, ...]) -> Counter[int]:
    """Return for each s how many hosts a type of lane l shares with one of lane l + s."""
    return Counter((a - b) % lanes for a in left for b in right)


def _max_shared(lanes: int, offsets: tuple[tuple[int, ...], ...]) -> int:
    """Return the largest number of hosts that two distinct types share."""
    kinds = Counter(offsets)
    distinct = sorted(kinds)
    worst = 0
    for i, left in enumerate(distinct):
        for right in distinct[i:]:
            for distance, count in _shared_by_distance(lanes, left, right).items():
                itself = left == right and distance == 0 and kinds[left] == 1
                worst = worst if itself else max(worst, count)
    return worst
