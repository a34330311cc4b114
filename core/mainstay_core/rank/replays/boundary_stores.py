"""Decides which states of lost stages boundary logs can bring back (protocol section 6).

A stretch of lost stages begins again at some version: there each of its units is in the stores, in
full or as compute weights. It runs the steps since with what the stages beside it logged. As the
full states of its units come, one version after the other, all of them become active
(MoEvement, arXiv 2412.15411, section 3.3). The version is reached once all are.

Of a stage with several inner ranks each position needs its own units and logs. All of them begin at
one version, and go on in step.

A log counts if its sender voted for the step in the quorum that committed it. So an attempt that
was refused, or that nobody finished, leaves nothing that counts, as a mark without a certificate
does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache

from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays.boundaries import (
    BoundaryReplay,
    BoundaryStep,
    Relay,
    UnitLoad,
    relay_holders,
)
from mainstay_core.rank.replays.replaying import StoreContents, Stores
from mainstay_core.snapshots.stores import store_domains
from mainstay_core.snapshots.stretches import Border, Stretch, borders_of, find_stretch
from mainstay_core.snapshots.windows import MAX_LENGTH, Window
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import (
    BOUNDARY_KINDS,
    Holder,
    LogsHeld,
    SegmentKey,
    SegmentKind,
    StoreReport,
    boundary_key,
)
from mainstay_core.wire.votes import SettleReport

Bad = frozenset[tuple[PodUid, SegmentKey]]


class BoundaryStores(StoreContents):
    """The contents of all stores of a quorum's pods, in a job that logs boundaries.

    Args:
        reports: of the stores.
        plan: that is adopted.
    """

    def __init__(self, reports: Iterable[StoreReport], plan: Plan) -> None:
        reports = tuple(reports)
        super().__init__(reports, plan.lineage, store_domains(plan))
        self._plan, self._num_types = plan, len(plan.suppliers)
        self._num_stages, self._width = plan.num_stages, plan.ranks_per_stage
        self._logs: dict[Border, list[tuple[Holder, LogsHeld]]] = {}
        told = sorted((r for r in reports if r.lineage == plan.lineage), key=lambda r: r.pod)
        for report in told:
            holder = Holder(pod=report.pod, address=report.address)
            for log in report.logs:
                self._logs.setdefault((log.position, log.kind), []).append((holder, log))
        self._bad_logs: Bad = frozenset(
            (bad.pod, bad.key) for r in told for bad in r.bad if bad.key.kind in BOUNDARY_KINDS
        )
        self._full = frozenset(r.pod for r in told if r.is_full)
        # A settle asks for the same again and again: of each unit, from each beginning.
        self._holders_of_type = cache(self._find_holders)
        self._fulls, self._computes = cache(self._find_fulls), cache(self._find_computes)
        self._active_from = cache(self._find_active_from)
        self._starts = cache(self._find_starts)

    # Questions of a settle -------------------------------------------------------------

    def reach(self, position: int, lost: Collection[int] = ()) -> frozenset[int]:
        """Return the versions of a position that can be computed again.

        Args:
            position: that nobody holds.
            lost: all positions that nobody holds, among them this one.
        """
        stretch = find_stretch(lost, position, self._width)
        if self._without_room(stretch):
            return frozenset()
        return frozenset(
            version for start in self._starts(stretch) for version in self._from(stretch, start)
        )

    def plan_replay(
        self, position: int, version: int, lost: Collection[int] = ()
    ) -> BoundaryReplay | None:
        """Return how to compute a position's state at a version; None if it cannot be had.

        All positions of its stretch begin at one version: the newest that will do, so that as few
        steps as can be are computed again.

        Args:
            position: of a stage of which some position is lost.
            version: that is wanted.
            lost: all positions that nobody holds.
        """
        stretch = find_stretch(lost, position, self._width)
        if self._without_room(stretch):
            return None
        starts = [v for v in self._starts(stretch) if version in self._from(stretch, v)]
        if not starts:
            return None
        start = max(starts)
        last = self._active_from(stretch, start)
        assert last is not None
        loads, frozen = self._loads(position, start)
        skipped = self._skipped(position, start)
        inputs = [
            border
            for border in borders_of(stretch, self._num_stages, self._width)
            if abs(border[0] - position) == self._width
        ]
        return BoundaryReplay(
            position=position,
            version=version,
            stretch=stretch,
            window=Window(first=start, length=last - start + 1),
            steps=tuple(
                BoundaryStep(
                    record=self.records[step],
                    loads=loads.get(step, ()),
                    frozen=frozen.get(step, ()),
                    skipped=skipped.get(step, ()),
                    inputs=tuple(
                        pair for border in inputs for pair in self._inputs_of(border, step)
                    ),
                )
                for step in range(start, version)
            ),
            loads=loads.get(version, ()),
            relays=tuple(self._relays(stretch, position)),
            next=self.records.get(version) if self._is_judged(version) else None,
        )

    def why_not(self, position: int, version: int, lost: Collection[int] = ()) -> str:
        """Return why a position is not had at a version, naming what is lacking; empty if it is."""
        stretch = find_stretch(lost, position, self._width)
        if version in self.reach(position, lost):
            return ""
        full = self._without_room(stretch)
        if full:
            where = ", ".join(full)
            return f"{where} found no room for what members of {stretch} give each other"
        for needed in stretch.positions(self._width):
            why = self._why_not_units(needed, version)
            if why:
                return why
        starts = [v for v in self._starts(stretch) if v <= version]
        if not starts:
            return f"no version of {stretch} has all units in the stores, up to version {version}"
        start = max(starts, key=lambda v: (len(self._from(stretch, v)), v))
        for step in range(start, version):
            why = self._why_not_step(stretch, step)
            if why:
                return why
        return (
            f"the units of {stretch} are not all in full by version {version}, from version "
            f"{start} on"
        )

    # Stretches -----------------------------------------------------------------------------

    def _without_room(self, stretch: Stretch) -> tuple[PodUid, ...]:
        """Return the members' pods that found no room for what crosses borders inside it.

        Another try would end like the one before.
        """
        inside = stretch.positions(self._width) if len(stretch.stages) > 1 else ()
        pods = {m.slot.pod for position in inside for m in self._plan.positions[position]}
        return tuple(sorted(pods & self._full))

    def _relays(self, stretch: Stretch, position: int) -> list[Relay]:
        """Return what comes across borders inside the stretch."""
        before, after = position - self._width, position + self._width
        found = [(before, SegmentKind.ACTIVATION), (after, SegmentKind.INPUT_GRADIENT)]
        return [
            Relay(position=at, kind=kind, holders=relay_holders(self._plan, at))
            for at, kind in found
            if at in stretch.positions(self._width)
        ]

    # Units -------------------------------------------------------------------------------------

    def _find_starts(self, stretch: Stretch) -> tuple[int, ...]:
        """Return versions from which all units of a stretch become active, ascending."""
        common: frozenset[int] | None = None
        for position in stretch.positions(self._width):
            units = self._units_of(position)
            if units is None:
                return ()
            for number in units:
                there = self._fulls(position, number) | self._computes(position, number)
                common = there if common is None else common & there
        return tuple(v for v in sorted(common or ()) if self._active_from(stretch, v) is not None)

    def _find_active_from(self, stretch: Stretch, start: int) -> int | None:
        """Return the version from which all units are active; None if one never is."""
        last = start
        for position in stretch.positions(self._width):
            for number in self._units_of(position) or ():
                at = self._full_after(position, number, start)
                if at is None or at - start >= MAX_LENGTH:
                    return None
                last = max(last, at)
        return last

    def _full_after(self, position: int, number: int, start: int) -> int | None:
        """Return at which version a unit becomes active if it begins at ``start``."""
        fulls, computes = self._fulls(position, number), self._computes(position, number)
        version = start
        while version not in fulls:
            if version not in computes:
                return None
            version += 1
        return version

    def _find_fulls(self, position: int, number: int) -> frozenset[int]:
        """Return versions of a unit's full state that votes have judged."""
        held = (units for _, units in self._units[position][number])
        return frozenset(v for units in held for v in units.states if self._is_judged(v))

    def _find_computes(self, position: int, number: int) -> frozenset[int]:
        held = (units for _, units in self._units[position][number])
        return frozenset(
            v
            for units in held
            for run in units.computes
            for v in range(run.first, run.last + 1)
            if self._is_judged(v)
        )

    def _loads(
        self, position: int, start: int
    ) -> tuple[dict[int, tuple[UnitLoad, ...]], dict[int, tuple[int, ...]]]:
        """Return by version what is loaded there, and by step which units are frozen in it."""
        loads: dict[int, list[UnitLoad]] = {}
        frozen: dict[int, list[int]] = {}
        for number, copies in sorted(self._units[position].items()):
            active_from = self._full_after(position, number, start)
            assert active_from is not None
            for version in range(start, active_from + 1):
                is_full = version == active_from
                kind = SegmentKind.STATE if is_full else SegmentKind.COMPUTE
                holders = tuple(
                    holder
                    for holder, held in copies
                    if (
                        version in held.states
                        if is_full
                        else any(run.first <= version <= run.last for run in held.computes)
                    )
                )
                key = SegmentKey(
                    lineage=self._lineage,
                    position=position,
                    unit=number,
                    kind=kind,
                    version=version,
                )
                load = UnitLoad(name=copies[0][1].unit_name, key=key, holders=holders)
                loads.setdefault(version, []).append(load)
                if not is_full:
                    frozen.setdefault(version, []).append(number)
        return (
            {version: tuple(found) for version, found in loads.items()},
            {step: tuple(found) for step, found in frozen.items()},
        )

    def _skipped(self, position: int, start: int) -> dict[int, tuple[int, ...]]:
        """Return by step which units are frozen at all positions of a position's stage."""
        first = position - position % self._width
        cell = [self._loads(at, start)[1] for at in range(first, first + self._width)]
        common = {
            step: set.intersection(*(set(frozen.get(step, ())) for frozen in cell))
            for step in cell[0]
        }
        return {step: tuple(sorted(units)) for step, units in common.items()}

    def _why_not_units(self, position: int, version: int) -> str:
        """Return which unit of a position has no full state up to a version; empty if none."""
        held = self._units.get(position, {})
        if not held:
            return f"no store holds anything of position {position}"
        num_units = max(u.num_units for copies in held.values() for _, u in copies)
        for number in range(num_units):
            if number not in held:
                return f"no store holds unit {number} of position {position}"
            if not any(v <= version for v in self._fulls(position, number)):
                pods = self._name_pods(holder for holder, _ in held[number])
                return (
                    f"unit {held[number][0][1].unit_name} of position {position} has no full state "
                    f"up to version {version} that votes have judged, on {pods}"
                )
        return ""

    # Steps -----------------------------------------------------------------------------------

    def _from(self, stretch: Stretch, start: int) -> range:
        """Return the versions that a stretch reaches if it begins at ``start``."""
        first = self._active_from(stretch, start)
        assert first is not None
        version = start
        while not self._why_not_step(stretch, version):
            version += 1
        return range(first, version + 1)

    def _why_not_step(self, stretch: Stretch, step: int) -> str:
        """Return why a stretch cannot compute a step again; empty if it can."""
        if not self._is_judged(step):
            return f"no store knows the votes on step {step}"
        for position, kind in borders_of(stretch, self._num_stages, self._width):
            for shard_type in range(self._num_types):
                if not self._holders_of_type((position, kind), step, shard_type):
                    pods = self._name_pods(h for h, _ in self._logs.get((position, kind), ()))
                    where = f"; others of its logs are on {pods}" if pods else ""
                    return (
                        f"{stretch} lacks the {kind} of position {position}, type {shard_type}, in "
                        f"step {step}{where}"
                    )
        return ""

    def _find_holders(
        self, border: Border, step: int, shard_type: int
    ) -> tuple[tuple[Holder, int], ...]:
        """Return who keeps a type's logs that count, each with the number of micro-batches."""
        return tuple(
            (holder, log.micro_batches)
            for holder, log in self._logs.get(border, ())
            if log.first_step <= step <= log.last_step
            and log.first_type <= shard_type <= log.last_type
            and log.voted_in in self.certified.get(step, ())
            and not any(
                (holder.pod, key) in self._bad_logs
                for key in self._keys(border, step, shard_type, log.micro_batches)
            )
        )

    def _inputs_of(self, border: Border, step: int) -> list[tuple[SegmentKey, tuple[Holder, ...]]]:
        found = []
        for shard_type in range(self._num_types):
            holders = self._holders_of_type(border, step, shard_type)
            most = max(micro_batches for _, micro_batches in holders)
            for number, key in enumerate(self._keys(border, step, shard_type, most)):
                of_key = (holder for holder, micro_batches in holders if micro_batches > number)
                found.append((key, tuple(dict.fromkeys(of_key))))
        return found

    def _keys(
        self, border: Border, step: int, shard_type: int, micro_batches: int
    ) -> Sequence[SegmentKey]:
        position, kind = border
        return [
            boundary_key(self._lineage, position, kind, step, shard_type, micro_batch)
            for micro_batch in range(micro_batches)
        ]


AnyStores = Stores | BoundaryStores


def why_not_replayed(plan: Plan, reports: Sequence[SettleReport], stores: AnyStores) -> str:
    """Return why segments do not bring the job to the newest version that is known."""
    versions = [r.version for r in reports if r.valid and r.lineage == plan.lineage]
    if not versions and stores.are_empty:
        return ""  # of a job that begins, nobody expects any
    newest = max(versions) if versions else max(stores.records, default=-1) + 1
    lost = frozenset(
        position
        for position, members in enumerate(plan.positions)
        if not any(reports[m.index].valid for m in members)
    )
    whys = (stores.why_not(position, newest, lost) for position in sorted(lost))
    why = next((why for why in whys if why), "")
    unasked = "".join(
        f"; not all is known of what the store of {pod} holds: {problem}"
        for pod, problem in sorted(stores.unasked.items())
    )
    return f" ({why}{unasked})" if why else ""
