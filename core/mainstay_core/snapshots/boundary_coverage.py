"""Says how far stores bring lost stages by boundary logs, from what the stores have told.

The rule is that of a settle (``rank/replays/boundary_stores.py``): neighbouring lost stages are
computed again together, from a version at which stores hold each of their units, in full or as
compute weights, through steps whose logs lie on both sides of them (MoEvement, arXiv 2412.15411,
section 3.3). All inner ranks of a stage are computed again as soon as one is lost. Nothing is
decided by this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mainstay_core.base.bounds import Count, Sentence
from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.stretches import Border, Stretch, borders_of, find_stretch
from mainstay_core.snapshots.windows import MAX_LENGTH
from mainstay_core.wire.segments import LogsHeld, Run
from mainstay_core.wire.stores import StoreStatus, UnitsHeld


@dataclass(frozen=True, slots=True)
class Reach:
    """The steps by which stores bring a position to their newest step."""

    steps: Count | None = None
    """Steps that a replay takes; None if they cannot make its state."""
    why_not: Sentence = ""
    """What is lacking; empty if nothing is."""


class BoundaryCopies:
    """The content of the stores of a job that logs boundaries.

    Args:
        stores: of living pods, all of the lineage in force.
        training: pods that have a member with a state. Their stores learn of each step.
        num_stages: of the pipeline.
        num_types: shard types of a step.
        ranks_per_stage: inner ranks of each stage.
    """

    def __init__(
        self,
        stores: Mapping[PodUid, StoreStatus],
        training: Collection[PodUid],
        num_stages: int,
        num_types: int,
        ranks_per_stage: int = 1,
    ) -> None:
        self._stores, self._training = stores, training
        self._num_stages, self._num_types = num_stages, num_types
        self._width = ranks_per_stage
        self._known: dict[tuple[Stretch, frozenset[PodUid]], Reach] = {}

    def reach(self, lost: Collection[int], position: int, gone: Collection[PodUid] = ()) -> Reach:
        """Return how far the stores that are left bring a lost position.

        Args:
            lost: all positions without a member, among them this one.
            position: that is asked for.
            gone: pods whose stores are lost.
        """
        stretch = find_stretch(lost, position, self._width)
        key = stretch, frozenset(gone)
        if key not in self._known:
            left = {uid: store for uid, store in self._stores.items() if uid not in gone}
            needed = self._needed(stretch, left)
            units = [g for store in left.values() for g in store.units]
            self._known[key] = self._contents(left, units).reach(stretch, needed)
        return self._known[key]

    def is_enough(self, pod: PodUid, lost: Collection[int], position: int) -> bool:
        """Return whether one store's units bring a lost position back, with the logs of all stores.

        Of the other inner ranks of the stage the units of all stores count.

        Args:
            pod: whose store it is.
            lost: all positions without a member, among them this one.
            position: that is asked for.
        """
        own = self._stores[pod].units
        if not any(group.position == position for group in own):
            return False
        stretch = find_stretch(lost, position, self._width)
        needed = self._needed(stretch, self._stores)
        stage = position // self._width
        beside = set(range(stage * self._width, (stage + 1) * self._width)) - {position}
        others = [g for s in self._stores.values() for g in s.units if g.position in beside]
        units = [*(group for group in own if group.position not in beside), *others]
        return self._contents(self._stores, units).reach(stretch, needed).steps is not None

    def _contents(
        self, left: Mapping[PodUid, StoreStatus], units: Sequence[UnitsHeld]
    ) -> _Contents:
        return _Contents([*left.values()], units, self._num_stages, self._num_types, self._width)

    def _needed(self, stretch: Stretch, left: Mapping[PodUid, StoreStatus]) -> int:
        """Return the newest step that each store which a stretch needs has told of."""
        borders = borders_of(stretch, self._num_stages, self._width)
        positions = stretch.positions(self._width)
        concerned = {
            uid: _newest(store)
            for uid, store in left.items()
            if any(group.position in positions for group in store.units)
            or any((log.position, log.kind) in borders for log in store.logs)
        }
        told = {uid: step for uid, step in concerned.items() if step is not None}
        # A store whose pod trains nothing may have stopped with a step long ago.
        of_training = [step for uid, step in told.items() if uid in self._training]
        return min(of_training or told.values(), default=0)


def steps_of(runs: Iterable[Run]) -> set[int]:
    """Return all steps of runs."""
    return {step for run in runs for step in range(run.first, run.last + 1)}


class _Contents:
    """The contents of some stores, taken together.

    Args:
        left: stores whose logs and commits count.
        units: that count.
        num_stages: of the pipeline.
        num_types: shard types of a step.
        ranks_per_stage: inner ranks of each stage.
    """

    def __init__(
        self,
        left: Sequence[StoreStatus],
        units: Sequence[UnitsHeld],
        num_stages: int,
        num_types: int,
        ranks_per_stage: int,
    ) -> None:
        self._units = units
        self._num_stages, self._num_types = num_stages, num_types
        self._width = ranks_per_stage
        self._judged = steps_of(run for store in left for run in store.judged)
        self._certified = {
            (made.quorum, step)
            for store in left
            for made in store.certified
            for step in range(made.first, made.last + 1)
        }
        self._logs: dict[Border, list[LogsHeld]] = {}
        for store in left:
            for log in store.logs:
                self._logs.setdefault((log.position, log.kind), []).append(log)

    def reach(self, stretch: Stretch, needed: int) -> Reach:
        """Return the steps that bring a stretch to a version or beyond, from its newest start."""
        units: list[tuple[set[int], set[int]]] = []
        for position in stretch.positions(self._width):
            found, lacking = self._units_of(position)
            if lacking:
                return Reach(None, lacking)
            units += found
        starts = set.intersection(*(fulls | computes for fulls, computes in units))
        if not starts:
            return Reach(None, f"no version of {stretch} has all units in the stores")
        why_not = ""
        for start in sorted(starts, reverse=True):
            active = _active_from(units, start)
            if active is None:
                continue
            version, lacking = start, self._lacking(stretch, start)
            while not lacking:
                version += 1
                lacking = self._lacking(stretch, version)
            if version >= max(active, needed):
                return Reach(version - start)
            why_not = why_not or lacking
        return Reach(None, why_not or f"not all units of {stretch} come in full")

    def _units_of(self, position: int) -> tuple[list[tuple[set[int], set[int]]], str]:
        """Return judged versions of full states and compute weights; and which unit lacks any.

        Units that the same stores tell together are alike and stand there once.
        """
        groups = [group for group in self._units if group.position == position]
        name = self._name(position)
        holders: dict[int, list[UnitsHeld]] = {}
        for group in groups:
            for number in group.numbers:
                holders.setdefault(number, []).append(group)
        if not groups:
            return [], f"no store holds anything of {name}"
        missing = set(range(max(group.num_units for group in groups))) - set(holders)
        if missing:
            return [], f"no store holds unit {min(missing)} of {name}"
        alike = {tuple(map(id, held)): held for held in holders.values()}
        return [
            (
                {v for group in held for v in group.states} & self._judged,
                steps_of(run for group in held for run in group.computes) & self._judged,
            )
            for held in alike.values()
        ], ""

    def _lacking(self, stretch: Stretch, step: int) -> str:
        """Return why a stretch cannot compute a step again; empty if it can."""
        if step not in self._judged:
            return f"no store knows the votes on step {step}"
        for border in borders_of(stretch, self._num_stages, self._width):
            types = {
                shard_type
                for log in self._logs.get(border, ())
                if log.first_step <= step <= log.last_step
                and (log.voted_in, step) in self._certified
                for shard_type in range(log.first_type, log.last_type + 1)
            }
            missing = set(range(self._num_types)) - types
            if missing:
                position, kind = border
                return (
                    f"{stretch} lacks the {kind} of {self._name(position)}, type {min(missing)}, "
                    f"in step {step}"
                )
        return ""

    def _name(self, position: int) -> str:
        """Return a position's name, for people."""
        stage, inner = divmod(position, self._width)
        return f"stage {stage}" if self._width == 1 else f"stage {stage}, inner rank {inner}"


def _active_from(units: Iterable[tuple[set[int], set[int]]], start: int) -> int | None:
    """Return the version from which all units are in full; None if one never is."""
    last = start
    for fulls, computes in units:
        version = start
        while version not in fulls:
            if version not in computes:
                return None
            version += 1
        if version - start >= MAX_LENGTH:
            return None
        last = max(last, version)
    return last


def _newest(store: StoreStatus) -> int | None:
    """Return the newest step of which a store has the commit or a log; None if it has none."""
    steps = [run.last for run in store.judged] + [log.last_step for log in store.logs]
    return max(steps, default=None)
