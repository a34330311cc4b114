"""Plans how a lost state is computed from copies of its units and logs of reduced gradients.

Elementwise optimizers need no more: from a unit's newest full state every later step is one update
with the logged gradient, without a forward or a backward. Each unit starts from its own newest
copy, and units are independent, so several joiners share them and then copy from each other. The
published method logs what crosses stage boundaries instead (MoEvement, arXiv 2412.15411, section
3.4; ``boundary_replay``): it needs smaller logs and computes the steps again.

A yes to step t says that the log of t is at its holders. So what a commit has applied can always be
replayed, as far as holders live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from mainstay_core.base.bounds import Count, Longest, Name, Sentence
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.job.reduction_sizes import CHUNK
from mainstay_core.snapshots.duties import Author, ChunkShare, divide_by_weight
from mainstay_core.snapshots.inventory import HeldLog, Lack, NoReplay, Store, lacking
from mainstay_core.snapshots.units import MAX_UNITS, Position, Unit
from mainstay_core.snapshots.windows import MAX_LENGTH

MAX_FETCHES = 4 * MAX_LENGTH * 64
"""Fetches of one unit's logs: runs of steps, for each share."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LogFetch:
    """One share of the gradients of consecutive steps, from one store."""

    first_step: Count
    stop_step: Count
    """The step after the last."""
    share: ChunkShare
    source: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReplay:
    """The replay of one unit by one joiner."""

    unit: Name
    joiner: Author
    from_version: Count
    """Version of the full state from which it starts."""
    source: PodUid
    """The store from which that comes."""
    logs: Annotated[tuple[LogFetch, ...], Longest(MAX_FETCHES)]
    """Gradients of all steps from that version on, ascending. A share holds all of its chunks; the
    unit needs those that it lies in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReplay:
    """The replay of a position's state up to a version."""

    position: Position
    version: Count
    units: Annotated[tuple[UnitReplay, ...], Longest(MAX_UNITS)]
    num_steps: Count
    """Updates of the unit that starts earliest."""
    reason: Sentence
    """One sentence for people."""


def plan_gradient_replay(
    units: Sequence[Unit], stores: Sequence[Store], version: int, joiners: Sequence[Author]
) -> GradientReplay | NoReplay:
    """Return how joiners compute the state of a position at a version.

    Each unit starts from its newest full state, which needs the fewest logs: if these are lacking,
    an older state cannot do without them either. Units are divided over the joiners by elements
    times steps. Of several stores the joiner's own is taken, else the one that sent the step
    before, else the one that has least to send; ties by name. Equal arguments give equal plans.

    Args:
        units: all units of the position.
        stores: of all pods, living and lost.
        version: that is needed.
        joiners: members of the position without a state.

    Raises:
        InvalidSpecError: there is no unit or no joiner, or units are of several positions.
    """
    position = _check_arguments(units, joiners)
    chunks = chunks_of(units)
    logs, copies = _Logs(position, stores), _full_copies(position, stores)
    starts: dict[str, tuple[int, list[PodUid]]] = {}
    divisions: dict[str, list[_Divided]] = {}
    for unit in units:
        start = _newest_copy(unit, copies.get(unit.name, ()), version)
        if isinstance(start, NoReplay):
            return start
        starts[unit.name] = start
        found = _find_logs(unit, chunks[unit.name], logs, start[0], version)
        if isinstance(found, NoReplay):
            return found
        divisions[unit.name] = found
    weights = [unit.num_elements * (1 + version - starts[unit.name][0]) for unit in units]
    shares = divide_by_weight(weights, joiners)
    whose = {number: place for place, share in enumerate(shares) for number in share}
    senders = _Senders()
    replays = []
    for number, unit in enumerate(units):
        joiner = joiners[whose[number]]
        first, holders = starts[unit.name]
        source = senders.choose(holders, joiner.slot.pod, None, unit.num_elements)
        fetches = _fetches(unit, chunks[unit.name], divisions[unit.name], logs, senders, joiner)
        replays.append(
            UnitReplay(
                unit=unit.name, joiner=joiner, from_version=first, source=source, logs=fetches
            )
        )
    num_steps = version - min(first for first, _ in starts.values())
    return GradientReplay(
        position=position,
        version=version,
        units=tuple(replays),
        num_steps=num_steps,
        reason=f"{position}: {count(len(units), 'unit')} from their newest copies, with the "
        f"logged gradients of {count(num_steps, 'step')} up to version {version}, by "
        f"{count(len(joiners), 'joiner')}",
    )


def _check_arguments(units: Sequence[Unit], joiners: Sequence[Author]) -> Position:
    if not joiners:
        raise InvalidSpecError("joiners", "has none, must have at least one")
    positions = {unit.position for unit in units}
    if len(positions) != 1:
        raise InvalidSpecError("units", f"are of {len(positions)} positions, must be of one")
    return positions.pop()


def chunks_of(units: Sequence[Unit]) -> dict[str, frozenset[int]]:
    """Return for each unit of a position the chunks in which it lies.

    Chunks are counted over the blocks of the position and begin anew at each (design 13.2).

    Args:
        units: all units of the position, as only all of them tell how long a block is.
    """
    sizes: dict[int, int] = {}
    for unit in units:
        end = unit.spans[-1].stop if unit.spans else 0
        sizes[unit.block_index] = max(sizes.get(unit.block_index, 0), end)
    first, firsts = 0, {}
    for block, size in sorted(sizes.items()):
        firsts[block] = first
        first += -(-size // CHUNK)
    return {
        unit.name: frozenset(
            firsts[unit.block_index] + chunk
            for span in unit.spans
            for chunk in range(span.start // CHUNK, -(-span.stop // CHUNK))
        )
        for unit in units
    }


class _Divided(NamedTuple):
    """Consecutive steps whose gradients lie in the stores in so many shares."""

    first_step: int
    stop_step: int
    of: int


class _Run(NamedTuple):
    """Consecutive steps of whose gradients the same pods hold a share."""

    first_step: int
    stop_step: int
    holders: tuple[PodUid, ...]


class _Logs:
    """The logs of a position, by share and step. What was asked once is remembered."""

    def __init__(self, position: Position, stores: Sequence[Store]) -> None:
        self._held: dict[ChunkShare, list[tuple[HeldLog, Store]]] = {}
        for store in sorted(stores, key=lambda store: store.pod):
            for log in store.logs:
                if log.position == position:
                    self._held.setdefault(log.share, []).append((log, store))
        self.divisions = sorted({share.of for share in self._held})
        self._missing: dict[tuple[int, int], frozenset[int]] = {}
        self._runs: dict[tuple[ChunkShare, int, int], list[_Run]] = {}

    def missing(self, of: int, step: int) -> frozenset[int]:
        """Return the shares of a division that no living pod holds for a step."""
        key = (of, step)
        if key not in self._missing:
            self._missing[key] = frozenset(
                index for index in range(of) if not self._pods(ChunkShare(index=index, of=of), step)
            )
        return self._missing[key]

    def runs(self, share: ChunkShare, first: int, stop: int) -> list[_Run]:
        """Return who holds a share of the gradients of these steps, ascending."""
        key = (share, first, stop)
        if key not in self._runs:
            found: list[_Run] = []
            for step in range(first, stop):
                pods = self._pods(share, step)
                if found and found[-1].holders == pods:
                    found[-1] = found[-1]._replace(stop_step=step + 1)
                else:
                    found.append(_Run(step, step + 1, pods))
            self._runs[key] = found
        return self._runs[key]

    def lost(self, step: int, shares: Iterable[ChunkShare]) -> list[Store]:
        """Return the lost stores that held one of these shares of a step's gradient."""
        return [
            store
            for share in shares
            for log, store in self._held.get(share, ())
            if not store.living and log.first_step <= step < log.stop_step
        ]

    def _pods(self, share: ChunkShare, step: int) -> tuple[PodUid, ...]:
        """Return the living pods that hold a share of a step's gradient, by name."""
        return tuple(
            store.pod
            for log, store in self._held.get(share, ())
            if store.living and log.first_step <= step < log.stop_step
        )


def _touched(chunks: frozenset[int], of: int) -> list[int]:
    """Return the shares of a division in which some of these chunks are, ascending."""
    return sorted({chunk % of for chunk in chunks})


def _full_copies(position: Position, stores: Sequence[Store]) -> dict[str, list[tuple[int, Store]]]:
    """Return for each unit the versions of its full state, and which stores hold them."""
    found: dict[str, list[tuple[int, Store]]] = {}
    for store in stores:
        for copy in store.units:
            if copy.position == position:
                versions = found.setdefault(copy.unit, [])
                versions += [(version, store) for version in copy.full]
    return found


def _newest_copy(
    unit: Unit, copies: Sequence[tuple[int, Store]], version: int
) -> tuple[int, list[PodUid]] | NoReplay:
    """Return the newest full state up to a version in a living store, and who has it."""
    held = [(copied, store) for copied, store in copies if copied <= version]
    newest = max((copied for copied, store in held if store.living), default=None)
    if newest is None:
        last = max((copied for copied, _ in held), default=version)
        what = f"full state of version {last}" if held else f"full state up to version {version}"
        lost = [store for _, store in held]
        return lacking(Lack.FULL_STATE, unit.position, unit.name, last, what, lost)
    pods = {store.pod for copied, store in held if copied == newest and store.living}
    return newest, sorted(pods)


def _find_logs(
    unit: Unit, chunks: frozenset[int], logs: _Logs, first: int, version: int
) -> list[_Divided] | NoReplay:
    """Return the steps with a division of their gradients of which all needed shares are there.

    A step that was logged in two quorums may have two divisions, of cells of different number.
    """
    touched = {of: _touched(chunks, of) for of in logs.divisions}
    found: list[_Divided] = []
    for step in range(first, version):
        whole = [
            of for of, indexes in touched.items() if logs.missing(of, step).isdisjoint(indexes)
        ]
        if not whole:
            gone = [
                ChunkShare(index=index, of=of)
                for of, indexes in touched.items()
                for index in sorted(logs.missing(of, step).intersection(indexes))
            ]
            what, lost = f"gradient of step {step}", logs.lost(step, gone)
            return lacking(Lack.GRADIENT_LOG, unit.position, unit.name, step, what, lost)
        if found and found[-1].of == whole[0]:
            found[-1] = found[-1]._replace(stop_step=step + 1)
        else:
            found.append(_Divided(step, step + 1, whole[0]))
    return found


class _Senders:
    """The elements for which each store has been asked."""

    def __init__(self) -> None:
        self._loads: dict[PodUid, int] = {}

    def choose(
        self, holders: Sequence[PodUid], own: PodUid, before: PodUid | None, size: int
    ) -> PodUid:
        """Return the store that sends so many elements."""
        if own in holders:
            chosen = own
        elif before is not None and before in holders:
            chosen = before
        else:
            chosen = min(holders, key=lambda pod: (self._loads.get(pod, 0), pod))
        self._loads[chosen] = self._loads.get(chosen, 0) + size
        return chosen


def _fetches(
    unit: Unit,
    chunks: frozenset[int],
    divided: Sequence[_Divided],
    logs: _Logs,
    senders: _Senders,
    joiner: Author,
) -> tuple[LogFetch, ...]:
    """Return who sends which share of which steps; consecutive steps of one store are one fetch."""
    fetches: list[LogFetch] = []
    for first, stop, of in divided:
        indexes = _touched(chunks, of)
        size = unit.num_elements // len(indexes)
        for index in indexes:
            share = ChunkShare(index=index, of=of)
            last: LogFetch | None = None
            for run in logs.runs(share, first, stop):
                num_steps = run.stop_step - run.first_step
                before = None if last is None else last.source
                source = senders.choose(run.holders, joiner.slot.pod, before, num_steps * size)
                begins = run.first_step
                if last is not None and last.source == source:
                    begins = fetches.pop().first_step
                last = LogFetch(
                    first_step=begins, stop_step=run.stop_step, share=share, source=source
                )
                fetches.append(last)
    return tuple(sorted(fetches))
