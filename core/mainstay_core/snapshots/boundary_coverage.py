"""Says how far stores bring lost stages by boundary logs, from what the stores have told.

The rule is that of a settle (``rank/boundary_stores.py``): neighbouring lost stages are computed
again together, from a version at which stores hold each of their units, in full or as compute
weights, through steps whose logs lie on both sides of them (MoEvement, arXiv 2412.15411, section
3.3). Nothing is decided by this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mainstay_core.base.bounds import Count, Sentence
from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.stretches import Border, Stretch, borders_of, find_stretches
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
    """The content of the stores of a job that logs boundaries, one rank to a stage.

    Args:
        stores: of living pods, all of the lineage in force.
        training: pods that have a member with a state. Their stores learn of each step.
        num_stages: of the pipeline.
        num_types: shard types of a step.
    """

    def __init__(
        self,
        stores: Mapping[PodUid, StoreStatus],
        training: Collection[PodUid],
        num_stages: int,
        num_types: int,
    ) -> None:
        self._stores, self._training = stores, training
        self._num_stages, self._num_types = num_stages, num_types
        self._known: dict[tuple[Stretch, frozenset[PodUid]], Reach] = {}

    def reach(self, lost: Collection[int], stage: int, gone: Collection[PodUid] = ()) -> Reach:
        """Return how far the stores that are left bring a lost stage.

        Args:
            lost: all stages without a member, among them this one.
            stage: that is asked for.
            gone: pods whose stores are lost.
        """
        stretch = next(s for s in find_stretches(lost) if stage in s.stages)
        key = stretch, frozenset(gone)
        if key not in self._known:
            left = {uid: store for uid, store in self._stores.items() if uid not in gone}
            needed = self._needed(stretch, left)
            self._known[key] = self._contents(left, left.values()).reach(stretch, needed)
        return self._known[key]

    def is_enough(self, pod: PodUid, lost: Collection[int], stage: int) -> bool:
        """Return whether one store's units bring a lost stage back, with the logs of all stores.

        Args:
            pod: whose store it is.
            lost: all stages without a member, among them this one.
            stage: that is asked for.
        """
        store = self._stores[pod]
        if not any(group.position == stage for group in store.units):
            return False
        stretch = next(s for s in find_stretches(lost) if stage in s.stages)
        needed = self._needed(stretch, self._stores)
        return self._contents(self._stores, [store]).reach(stretch, needed).steps is not None

    def _contents(
        self, left: Mapping[PodUid, StoreStatus], unit_stores: Iterable[StoreStatus]
    ) -> _Contents:
        return _Contents([*left.values()], [*unit_stores], self._num_stages, self._num_types)

    def _needed(self, stretch: Stretch, left: Mapping[PodUid, StoreStatus]) -> int:
        """Return the newest step that each store which a stretch needs has told of."""
        borders = borders_of(stretch, self._num_stages)
        concerned = {
            uid: _newest(store)
            for uid, store in left.items()
            if any(group.position in stretch.stages for group in store.units)
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
        unit_stores: stores whose units count.
        num_stages: of the pipeline.
        num_types: shard types of a step.
    """

    def __init__(
        self,
        left: Sequence[StoreStatus],
        unit_stores: Sequence[StoreStatus],
        num_stages: int,
        num_types: int,
    ) -> None:
        self._unit_stores = unit_stores
        self._num_stages, self._num_types = num_stages, num_types
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
        for stage in stretch.stages:
            found, lacking = self._units_of(stage)
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

    def _units_of(self, stage: int) -> tuple[list[tuple[set[int], set[int]]], str]:
        """Return judged versions of full states and compute weights; and which unit lacks any.

        Units that the same stores tell together are alike and stand there once.
        """
        groups = [g for store in self._unit_stores for g in store.units if g.position == stage]
        holders: dict[int, list[UnitsHeld]] = {}
        for group in groups:
            for number in group.numbers:
                holders.setdefault(number, []).append(group)
        if not groups:
            return [], f"no store holds anything of stage {stage}"
        missing = set(range(max(group.num_units for group in groups))) - set(holders)
        if missing:
            return [], f"no store holds unit {min(missing)} of stage {stage}"
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
        for border in borders_of(stretch, self._num_stages):
            types = {
                shard_type
                for log in self._logs.get(border, ())
                if log.first_step <= step <= log.last_step
                and (log.voted_in, step) in self._certified
                for shard_type in range(log.first_type, log.last_type + 1)
            }
            missing = set(range(self._num_types)) - types
            if missing:
                stage, kind = border
                return (
                    f"{stretch} lacks the {kind} of stage {stage}, type {min(missing)}, in step "
                    f"{step}"
                )
        return ""


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
