"""Phase 2 of the static planner: which AGC segments of blocks are replayed in a later window.

Activation-gradient checkpointing (AGC) keeps the boundary tensors of a connected, convex part of a
block's graph, and replays all of it from them (SpareTrain, section 5.2). Operators are connected if
they share a tensor, also if both merely read it. The gain of a segment is the time of its checks
that is saved: of its operators that nothing else checks, without communication.

The paper divides memory and time evenly over the blocks that share a window, and takes the best
segment of each. Ours shares them: one choice for each block, the greatest sum of gains.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mainstay_core.base.words import count
from mainstay_core.dmr.plan import Method, Piece, Policy, most_retained_bytes, waited_for
from mainstay_core.dmr.profiles import Profile, Window, WindowKind

MAX_SETS = 10_000
"""Sets of operators that are looked at in all blocks together. Blocks with more are searched by
their best sets alone, so that a plan stays a matter of seconds."""
MIN_SETS = 256
"""Sets that are looked at in each block, however many blocks there are."""
MAX_NEIGHBOURS = 16
"""Operators by which a set grows when only the best sets do."""
MAX_MIXES = 5000
"""Combinations that are looked at for one more block; with more of them, sharing is approximate."""
GRID = 16
"""Cells of memory, and of time, of each of which one combination goes on then."""


class Candidate(NamedTuple):
    """A segment of a block that could be replayed."""

    gain_s: float
    """Time of checks that it saves."""
    replay_s: float
    """Communication included."""
    size_bytes: int
    """Its boundary tensors."""
    members: int
    """Its operators, as a bit set: of the block's, in order."""


class BlockGraph:
    """A block's operators with their neighbours, as bit sets, to enumerate segments.

    Args:
        profile: of the stage.
        block: of the stage.
        unchecked: the stage's operators that nothing else checks.
        gathers: whether checks may communicate in the window of its replay.
        until: number of operators executed when that opens.
    """

    def __init__(
        self,
        profile: Profile,
        block: int,
        unchecked: frozenset[int],
        *,
        gathers: bool = True,
        until: int = 0,
    ) -> None:
        graph = profile.graph
        self.places = graph.blocks[block]
        self._number = {place: number for number, place in enumerate(self.places)}
        size = len(self.places)
        operators = [graph.operators[place] for place in self.places]
        self.movable = [
            number
            for number, operator in enumerate(operators)
            if operator.static and operator.waits and (gathers or not operator.communication_s)
        ]
        """Operators that can be replayed: not those of unknown time."""
        self.replay_s = [operator.replay_s for operator in operators]
        self.gain_s = [
            operator.median_s if place in unchecked else 0.0
            for place, operator in zip(self.places, operators, strict=True)
        ]
        movable = sum(1 << number for number in self.movable)
        self.gaining = movable & sum(
            1 << number for number, gain_s in enumerate(self.gain_s) if gain_s > 0
        )
        """Operators that can be replayed and gain something, as a bit set."""
        self.helping = movable & ~self.gaining
        """Those that can be replayed and gain nothing."""
        self._checked = [place not in unchecked for place in self.places]
        self.next_to = [0] * size
        self.before, self.behind = self._find_orders(profile)
        # By tensor: bytes, bit sets of maker and of readers in the block, whether others read it.
        self._tensors: list[tuple[int, int, int, bool]] = []
        self._of: list[list[int]] = [[] for _ in range(size)]
        self._add_tensors(profile, until)

    def _find_orders(self, profile: Profile) -> tuple[list[int], list[int]]:
        """Return, of each operator, all before it and all behind it, by paths in the block."""
        graph = profile.graph
        before = [0] * len(self.places)
        behind = [0] * len(self.places)
        for number, place in enumerate(self.places):
            for name in graph.operators[place].inputs:
                maker = self._number.get(graph.makers.get(name, -1))
                if maker is not None:
                    before[number] |= before[maker] | 1 << maker
        for number in range(len(self.places) - 1, -1, -1):
            for name in graph.operators[self.places[number]].outputs:
                for place in graph.readers[name]:
                    reader = self._number.get(place)
                    if reader is not None:
                        behind[number] |= behind[reader] | 1 << reader
        return before, behind

    def _add_tensors(self, profile: Profile, until: int) -> None:
        graph = profile.graph
        results = set(profile.results)
        names = {
            name: None
            for place in self.places
            for name in (*graph.operators[place].inputs, *graph.operators[place].outputs)
        }
        for name in names:
            readers = [self._number.get(place) for place in graph.readers[name]]
            mask = sum(1 << number for number in readers if number is not None)
            maker = self._number.get(graph.makers.get(name, -1))
            made = 0 if maker is None else 1 << maker
            for number in _bits(mask | made):
                self.next_to[number] |= (mask | made) & ~(1 << number)
                self._of[number].append(len(self._tensors))
            used_by_others = None in readers or name in results
            self._tensors.append((graph.size_of((name,), until), made, mask, used_by_others))

    def size_of(self, tensors: Iterable[int], members: int) -> int:
        """Return the bytes of those tensors that are a segment's boundary.

        These are the ones that it reads and does not make, and what of it is compared.
        """
        size = 0
        for number in tensors:
            size_bytes, made, readers, used_by_others = self._tensors[number]
            if made & members:
                leaves = used_by_others or readers & ~members
                if leaves and not self._checked[made.bit_length() - 1]:
                    size += size_bytes
            elif readers & members:
                size += size_bytes
        return size

    def places_of(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the operators of a candidate among all of the stage, ascending."""
        return tuple(self.places[number] for number in _bits(candidate.members))

    def single(self, number: int) -> _Grown:
        """Return the set of one operator."""
        return self.add(_Grown(0, 0, 0, 0, 0.0, 0.0, 0), number)

    def add(self, grown: _Grown, number: int) -> _Grown:
        """Return a set with one more operator. O(its tensors)."""
        members = grown.members | 1 << number
        tensors = self._of[number]
        return _Grown(
            members=members,
            before=grown.before | self.before[number],
            behind=grown.behind | self.behind[number],
            next_to=grown.next_to | self.next_to[number],
            gain_s=grown.gain_s + self.gain_s[number],
            replay_s=grown.replay_s + self.replay_s[number],
            size_bytes=grown.size_bytes
            + self.size_of(tensors, members)
            - self.size_of(tensors, grown.members),
        )

    def stays_convex(self, grown: _Grown, number: int) -> bool:
        """Return whether no path leaves a set with one more operator and comes back."""
        before = grown.before | self.before[number]
        behind = grown.behind | self.behind[number]
        return not before & behind & ~(grown.members | 1 << number)


class _Grown(NamedTuple):
    """A connected, convex set of a block's operators, with what its growth needs."""

    members: int
    before: int
    """All operators from which a path leads to one of it."""
    behind: int
    next_to: int
    gain_s: float
    replay_s: float
    size_bytes: int


def find_candidates(block: BlockGraph, slack_s: float, max_sets: int) -> list[Candidate]:
    """Return the connected, convex segments of a block that fit into a time and gain something.

    Sets grow by one operator at a time, which reaches every connected convex set through others of
    them: of a connected set, some first or last operator is no cut of it. All are found if there
    are at most ``max_sets``. If not, of each size go on growing those that gain most, and those
    with the smallest boundaries, each by at most :data:`MAX_NEIGHBOURS` operators. No more sets are
    made than ``max_sets``, and that many more times the greater of ``max_sets`` and twice the
    block's operators.
    """
    width = max(2, max_sets // max(1, len(block.places)))
    level = [block.single(number) for number in block.movable if block.replay_s[number] <= slack_s]
    found: list[Candidate] = []
    num_left = max_sets
    while level:
        found += [
            Candidate(grown.gain_s, grown.replay_s, grown.size_bytes, grown.members)
            for grown in level
            if grown.gain_s > 0
        ]
        num_left -= len(level)
        larger = None
        if num_left >= 0:
            larger = _grow(block, level, slack_s, 2 * len(block.places), num_left)
        if larger is None:
            num_left = -1
            best = _keep_best(level, width)
            larger = _grow(block, best, slack_s, MAX_NEIGHBOURS, MAX_NEIGHBOURS * len(best))
        assert larger is not None, "no set grows by more neighbours than it may"
        level = larger
    return found


def _grow(
    block: BlockGraph, level: list[_Grown], slack_s: float, most_each: int, most: int
) -> list[_Grown] | None:
    """Return the sets with one more operator than those of a level.

    Args:
        block: that they are of.
        level: sets of one size.
        slack_s: the most that their replay may take.
        most_each: sets to make of one set, of operators that gain something as many as of others.
        most: sets to make.

    Returns:
        None if there are more than ``most``.
    """
    larger: dict[int, _Grown] = {}
    for grown in level:
        neighbours = grown.next_to & ~grown.members
        for some, most_some in (
            (neighbours & block.gaining, -(-most_each // 2)),
            (neighbours & block.helping, most_each // 2),
        ):
            num_made = 0
            for number in _bits(some):
                members = grown.members | 1 << number
                if (
                    grown.replay_s + block.replay_s[number] > slack_s
                    or members in larger
                    or not block.stays_convex(grown, number)
                ):
                    continue
                if num_made == most_some:
                    break
                if len(larger) == most:
                    return None
                larger[members] = block.add(grown, number)
                num_made += 1
    return list(larger.values())


def _keep_best(level: list[_Grown], width: int) -> list[_Grown]:
    by_gain = sorted(level, key=lambda grown: (-grown.gain_s, grown.size_bytes, grown.members))
    by_size = sorted(level, key=lambda grown: (grown.size_bytes, -grown.gain_s, grown.members))
    kept = {grown.members: grown for grown in (*by_gain[: width // 2], *by_size[: width // 2])}
    return list(kept.values())


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def choose_segments(
    blocks: Sequence[Sequence[Candidate]],
    headroom_bytes: int,
    slack_s: float,
    policy: Policy,
) -> list[Candidate | None]:
    """Return the segment of each block that shares a window with others, None for none.

    Args:
        blocks: the candidates of each block.
        headroom_bytes: for the boundaries of all segments together.
        slack_s: for the replays of all segments together.
        policy: how both are divided: evenly, or as the sum of gains is greatest. The latter is
            exact up to :data:`MAX_MIXES` combinations, and never worse than the former.
    """
    if not blocks:
        return []
    even = [
        _best(candidates, headroom_bytes / len(blocks), slack_s / len(blocks))
        for candidates in blocks
    ]
    if policy is Policy.PAPER:
        return even
    shared = _share(blocks, headroom_bytes, slack_s)
    return shared if _sum_gain_s(shared) >= _sum_gain_s(even) else even


def _sum_gain_s(chosen: Sequence[Candidate | None]) -> float:
    return math.fsum(candidate.gain_s for candidate in chosen if candidate is not None)


def _best(candidates: Sequence[Candidate], most_bytes: float, most_s: float) -> Candidate | None:
    fitting = [c for c in candidates if c.size_bytes <= most_bytes and c.replay_s <= most_s]
    return min(fitting, key=_preference, default=None)


def _preference(candidate: Candidate) -> tuple[float, int, float, int]:
    return (-candidate.gain_s, candidate.size_bytes, candidate.replay_s, candidate.members)


class _Mix(NamedTuple):
    """One choice for each of the blocks so far."""

    gain_s: float
    size_bytes: int
    replay_s: float
    earlier: _Mix | None
    """The choices of the blocks before."""
    choice: Candidate | None
    """The last block's."""


def _share(
    blocks: Sequence[Sequence[Candidate]], headroom_bytes: int, slack_s: float
) -> list[Candidate | None]:
    """Return the choices with the greatest sum of gains within both bounds."""
    mixes = [_Mix(0.0, 0, 0.0, None, None)]
    for candidates in blocks:
        options = [_Mix(0.0, 0, 0.0, None, None)]
        options += [
            _Mix(option.gain_s, option.size_bytes, option.replay_s, None, option)
            for option in candidates
            if option.size_bytes <= headroom_bytes and option.replay_s <= slack_s
        ]
        options = _undominated(options)
        if len(mixes) * len(options) > MAX_MIXES:
            mixes = _thin(mixes, headroom_bytes, slack_s, GRID)
            options = _thin(options, headroom_bytes, slack_s, GRID)
        mixes = _undominated(
            [
                _Mix(
                    mix.gain_s + option.gain_s,
                    mix.size_bytes + option.size_bytes,
                    mix.replay_s + option.replay_s,
                    mix,
                    option.choice,
                )
                for option in options
                for mix in mixes
                if mix.size_bytes + option.size_bytes <= headroom_bytes
                and mix.replay_s + option.replay_s <= slack_s
            ]
        )
    best = min(mixes, key=lambda mix: (-mix.gain_s, mix.size_bytes, mix.replay_s))
    found: list[Candidate | None] = []
    while best.earlier is not None:
        found.append(best.choice)
        best = best.earlier
    return found[::-1]


def _undominated(mixes: list[_Mix]) -> list[_Mix]:
    """Return the mixes of which none other gains as much with as few bytes and as little time.

    O(n log n) comparisons: by falling gain, beside the stairs of bytes and seconds seen so far.
    """
    sizes: list[int] = []
    times: list[float] = []  # falling, as sizes rise
    kept = []
    for mix in sorted(mixes, key=lambda mix: (-mix.gain_s, mix.size_bytes, mix.replay_s)):
        at = bisect.bisect_right(sizes, mix.size_bytes)
        if at and times[at - 1] <= mix.replay_s:
            continue
        kept.append(mix)
        stop = at
        while stop < len(sizes) and times[stop] >= mix.replay_s:
            stop += 1
        sizes[at:stop] = [mix.size_bytes]
        times[at:stop] = [mix.replay_s]
    return kept


def _thin(mixes: list[_Mix], headroom_bytes: int, slack_s: float, grid: int) -> list[_Mix]:
    """Return the mix with the greatest gain of each cell of a grid of bytes and seconds.

    The one that takes nothing, the last, always goes on: with it whatever comes later fits.
    """
    cells: dict[tuple[int, int], _Mix] = {}
    for mix in mixes:  # by falling gain
        cell = (
            int(grid * mix.size_bytes / max(1, headroom_bytes)),
            int(grid * mix.replay_s / slack_s) if slack_s else 0,
        )
        cells.setdefault(cell, mix)
    kept = list(cells.values())
    return kept if kept[-1] is mixes[-1] else [*kept, mixes[-1]]


def plan_segments(
    profile: Profile,
    unchecked: frozenset[int],
    policy: Policy,
    budget_bytes: int,
) -> tuple[list[Piece], dict[str, str]]:
    """Return the segments of all blocks, and the reason of each operator that they check.

    Each block is replayed in the next inter window after its passes. The pieces have no
    comparisons yet.

    Args:
        profile: of the stage.
        unchecked: places of the operators that nothing checks yet.
        policy: how blocks share a window.
        budget_bytes: the most that all checks retain at any time.
    """
    by_window: dict[str, list[tuple[int, BlockGraph]]] = {}
    for block, places in profile.graph.blocks.items():
        window = _window_after(profile, places[-1] + 1)
        if window is not None and not unchecked.isdisjoint(places):
            graph = BlockGraph(
                profile, block, unchecked, gathers=window.gathers, until=window.after
            )
            by_window.setdefault(window.name, []).append((block, graph))
    max_sets = max(MIN_SETS, MAX_SETS // max(1, sum(map(len, by_window.values()))))
    pieces: list[Piece] = []
    reasons: dict[str, str] = {}
    free = [most_retained_bytes(window, budget_bytes) for window in profile.windows]
    numbers = {window.name: number for number, window in enumerate(profile.windows)}
    for name, blocks in by_window.items():
        window = profile.window_of[name]
        headroom = min(free[at] for at in waited_for(profile, _ids(profile, blocks), numbers[name]))
        slack_s = window.usable_s
        most_s = slack_s / len(blocks) if policy is Policy.PAPER else slack_s
        candidates = [find_candidates(graph, most_s, max_sets) for _, graph in blocks]
        chosen = choose_segments(candidates, headroom, slack_s, policy)
        for (block, graph), choice in zip(blocks, chosen, strict=True):
            if choice is not None:
                piece = _piece(profile, block, graph.places_of(choice), window, unchecked)
                pieces.append(piece)
                reasons |= _reasons(piece, choice)
                for at in waited_for(profile, piece.operators, numbers[name]):
                    free[at] -= choice.size_bytes
    return pieces, reasons


def _ids(profile: Profile, blocks: Sequence[tuple[int, BlockGraph]]) -> list[str]:
    """Return the operators of some blocks."""
    return [profile.graph.ids[place] for _, block in blocks for place in block.places]


def _reasons(piece: Piece, choice: Candidate) -> dict[str, str]:
    reason = (
        f"replayed with {count(len(piece.operators), 'operator')} of its block from "
        f"{choice.size_bytes} bytes; {choice.gain_s:.6g} s of checks saved"
    )
    return {name: reason for name in piece.operators if name not in piece.helpers}


def _window_after(profile: Profile, num_executed: int) -> Window | None:
    """Return the first inter window that opens after a number of operators."""
    for window in profile.windows:
        if window.kind is WindowKind.INTER and window.after >= num_executed:
            return window
    return None


def _piece(
    profile: Profile,
    block: int,
    places: Sequence[int],
    window: Window,
    unchecked: frozenset[int],
) -> Piece:
    ids = profile.graph.ids
    return Piece(
        name=f"agc-{block}",
        method=Method.INTER,
        operators=tuple(ids[place] for place in places),
        helpers=tuple(ids[place] for place in places if place not in unchecked),
        window=window.name,
        comparisons=(),
    )
