"""Plans how lost stages compute their steps again, from a window of copies and boundary logs.

This is MoEvement's conversion of sparse to dense (arXiv 2412.15411, section 3.3). The lost stages
load the first instalment of the newest complete window and run its step again. Units of which they
have the full state are *active*. The others are *frozen*: they run forward and pass gradients on
with the compute weights of that version, and skip their own. With each step the next instalment is
loaded, and after W - 1 steps of a window of W all units are active. Neighbouring stages do not
compute: what they sent across the boundaries is in the logs (section 3.4). All positions of the
stretch start at one version, as windows are aligned.

This plan answers what-if questions of the theory: of any stores that are described, of stages of
several ranks, with the reads divided over stores. A settle decides by
:class:`mainstay_core.rank.replays.boundary_stores.BoundaryStores` instead. That knows
reports of stores, in which a state counts only once votes have judged it and a log only by its
quorum; and it looks for the version to begin at, where here the window is given.

The number of steps is what was committed since the window's first version: W - 1 at least, and
2 W - 1 at most if windows follow each other and are complete without delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import MAX_MEMBERS, MAX_TYPES, Count, Longest, Name, Sentence
from mainstay_core.base.bounds import TypeIndex as ShardType
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.snapshots.inventory import (
    Direction,
    HeldBoundary,
    Lack,
    NoReplay,
    Store,
    lacking,
    living,
)
from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.snapshots.units import MAX_UNITS, Position
from mainstay_core.snapshots.windows import MAX_LENGTH, UnitNames, Window


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Load:
    """A copy of one unit, loaded when the replay stands at its version."""

    version: Count
    position: Position
    unit: Name
    full: bool
    """Whether it is the full state, which makes the unit active; else the compute weights."""
    source: PodUid


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BoundaryFetch:
    """The part of one boundary's logs that one store sends: shard types of consecutive steps."""

    direction: Direction
    sender: Position
    first_step: Count
    stop_step: Count
    """The step after the last."""
    first_type: ShardType
    stop_type: ShardType
    """The shard type after the last."""
    source: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenUnits:
    """The units of a position that skip their gradients in a replayed step."""

    step: Count
    position: Position
    units: UnitNames


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReplay:
    """The replay of a stretch from a window's first version to the version that is needed."""

    stretch: Stretch
    window: Window
    version: Count
    loads: Annotated[tuple[Load, ...], Longest(MAX_UNITS * 4)]
    """By version. Of a frozen unit there is one for each version until it is active."""
    frozen: Annotated[tuple[FrozenUnits, ...], Longest(MAX_LENGTH * MAX_MEMBERS)]
    """By step and position; steps in which all units are active are left out."""
    boundaries: Annotated[tuple[BoundaryFetch, ...], Longest(MAX_TYPES)]
    """Of all steps; none at an end of the pipeline."""
    reason: Sentence
    """One sentence for people."""

    @property
    def num_steps(self) -> int:
        """Steps that are computed again."""
        return self.version - self.window.first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """The stores that hold copies of a stretch's units, by version."""

    full: Mapping[tuple[Position, str], Sequence[tuple[int, Store]]]
    compute: Mapping[tuple[Position, str], Sequence[tuple[int, Store]]]


def plan_boundary_replay(
    stretch: Stretch,
    units: Mapping[Position, Sequence[str]],
    stores: Sequence[Store],
    window: Window,
    version: int,
    *,
    num_stages: int,
    num_types: int,
) -> BoundaryReplay | NoReplay:
    """Return how a stretch of lost stages computes its state at a version again.

    Of several stores that hold a copy, the one that sends least so far is asked; ties by name.
    Equal arguments give equal plans.

    Args:
        stretch: of lost stages.
        units: names of the units of each of its positions.
        stores: of all pods, living and lost.
        window: the newest complete one.
        version: that is needed.
        num_stages: of the pipeline.
        num_types: shard types of a step.

    Raises:
        InvalidSpecError: the stretch is no part of the pipeline, or a position is none of it.
    """
    _check_arguments(stretch, units, num_stages)
    if version < window.last:
        what = f"version {version}, as the window's last is {window.last}"
        where = Position(stage=stretch.first)
        return lacking(Lack.WINDOW, where, "", version, what, ())
    copies = _Copies(full=_index(stores, full=True), compute=_index(stores, full=False))
    senders: dict[PodUid, int] = {}
    loads: list[Load] = []
    frozen: list[FrozenUnits] = []
    for position, names in sorted(units.items()):
        active_from: dict[str, int] = {}
        for name in names:
            found = _load_unit(position, name, copies, window, senders)
            if isinstance(found, NoReplay):
                return found
            loads += found
            active_from[name] = found[-1].version
        for step in range(window.first, window.last):
            waiting = tuple(name for name in names if active_from[name] > step)
            if waiting:
                frozen.append(FrozenUnits(step=step, position=position, units=waiting))
    boundaries: list[BoundaryFetch] = []
    for sender, direction in _borders(stretch, units, num_stages):
        fetched = _fetch_boundary(
            sender, direction, stores, range(window.first, version), num_types, stretch
        )
        if isinstance(fetched, NoReplay):
            return fetched
        boundaries += fetched
    num_steps = version - window.first
    return BoundaryReplay(
        stretch=stretch,
        window=window,
        version=version,
        loads=tuple(sorted(loads)),
        frozen=tuple(sorted(frozen, key=lambda one: (one.step, one.position))),
        boundaries=tuple(sorted(boundaries)),
        reason=f"{stretch}: {count(num_steps, 'step')} again from version {window.first}, of which "
        f"{window.length - 1} until all units are active",
    )


def _check_arguments(
    stretch: Stretch, units: Mapping[Position, Sequence[str]], num_stages: int
) -> None:
    if not 0 <= stretch.first <= stretch.last < num_stages:
        raise InvalidSpecError("stretch", f"is {stretch}, must be within 0..{num_stages - 1}")
    if {position.stage for position in units} != set(stretch.stages):
        raise InvalidSpecError("units", f"must be those of all positions of {stretch}")


def _index(
    stores: Sequence[Store], *, full: bool
) -> dict[tuple[Position, str], list[tuple[int, Store]]]:
    found: dict[tuple[Position, str], list[tuple[int, Store]]] = {}
    for store in sorted(stores, key=lambda store: store.pod):
        for copy in store.units:
            versions = copy.full if full else copy.compute
            copies = found.setdefault((copy.position, copy.unit), [])
            copies += [(version, store) for version in versions]
    return found


def _load_unit(
    position: Position,
    name: str,
    copies: _Copies,
    window: Window,
    senders: dict[PodUid, int],
) -> list[Load] | NoReplay:
    """Return the loads of a unit, ascending: compute weights, and then its full state.

    The window holds its full state once. Stores may have that of other windows beside it.
    """
    held = [
        (version, store)
        for version, store in copies.full.get((position, name), ())
        if window.first <= version <= window.last
    ]
    alive = [version for version, store in held if store.living]
    if not alive:
        lost = [store for _, store in held]
        version = max((version for version, _ in held), default=window.first)
        what = f"full state of the window from version {window.first}"
        return lacking(Lack.FULL_STATE, position, name, version, what, lost)
    active_from = min(alive)
    loads = []
    for version in range(window.first, active_from + 1):
        full = version == active_from
        kind = copies.full if full else copies.compute
        holders = [store for v, store in kind.get((position, name), ()) if v == version]
        source = _least_busy([store.pod for store in holders if store.living], senders)
        if source is None:
            what = f"compute weights of version {version}"
            return lacking(Lack.COMPUTE_WEIGHTS, position, name, version, what, holders)
        loads.append(Load(version=version, position=position, unit=name, full=full, source=source))
    return loads


def _least_busy(pods: Sequence[PodUid], senders: dict[PodUid, int]) -> PodUid | None:
    """Return the pod that has sent least, and count one more for it; None if there is none."""
    if not pods:
        return None
    chosen = min(pods, key=lambda pod: (senders.get(pod, 0), pod))
    senders[chosen] = senders.get(chosen, 0) + 1
    return chosen


def _borders(
    stretch: Stretch, units: Mapping[Position, Sequence[str]], num_stages: int
) -> list[tuple[Position, Direction]]:
    """Return who sent what crossed the stretch's borders: a position for each inner rank."""
    inner = sorted({position.inner for position in units})
    before = [(Position(stage=stretch.first - 1, inner=i), Direction.ACTIVATION) for i in inner]
    after = [(Position(stage=stretch.last + 1, inner=i), Direction.GRADIENT) for i in inner]
    return (before if stretch.first > 0 else []) + (after if stretch.last < num_stages - 1 else [])


def _fetch_boundary(
    sender: Position,
    direction: Direction,
    stores: Sequence[Store],
    steps: range,
    num_types: int,
    stretch: Stretch,
) -> list[BoundaryFetch] | NoReplay:
    """Return who sends which shard types of which steps; equal consecutive steps are joined."""
    held = [
        (log, store)
        for store in stores
        for log in store.boundaries
        if (log.sender, log.direction) == (sender, direction)
    ]
    alive = {store.pod for store in living(stores)}
    fetches: list[BoundaryFetch] = []
    open_from = steps.start
    before: tuple[tuple[int, int, PodUid], ...] = ()
    for step in [*steps, steps.stop]:
        pieces: tuple[tuple[int, int, PodUid], ...] = ()
        if step in steps:
            now = [(log, s.pod) for log, s in held if log.first_step <= step < log.stop_step]
            found = _cover([one for one in now if one[1] in alive], num_types)
            if isinstance(found, int):
                lost = [s for log, s in held if not s.living and _has(log, step, found)]
                what = f"{direction.value}s of shard type {found} in step {step} from {sender}"
                at = Position(stage=stretch.first)
                return lacking(Lack.BOUNDARY_LOG, at, "", step, what, lost)
            pieces = found
        if pieces != before:
            fetches += [
                BoundaryFetch(
                    direction=direction,
                    sender=sender,
                    first_step=open_from,
                    stop_step=step,
                    first_type=first,
                    stop_type=stop,
                    source=pod,
                )
                for first, stop, pod in before
            ]
            open_from, before = step, pieces
    return fetches


def _has(log: HeldBoundary, step: int, shard_type: int) -> bool:
    return log.first_step <= step < log.stop_step and log.first_type <= shard_type < log.stop_type


def _cover(
    held: Sequence[tuple[HeldBoundary, PodUid]], num_types: int
) -> tuple[tuple[int, int, PodUid], ...] | int:
    """Return fewest runs of shard types that cover all of them; else the first that nobody has."""
    pieces = []
    at = 0
    while at < num_types:
        reach = [(-log.stop_type, pod) for log, pod in held if log.first_type <= at < log.stop_type]
        if not reach:
            return at
        stop, pod = min(reach)
        pieces.append((at, min(-stop, num_types), pod))
        at = -stop
    return tuple(pieces)
