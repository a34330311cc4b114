"""Says which losses a job's positions survive, from what its pods and stores have told.

A position survives a loss if a living member outside of it holds its state, or if the stores that
are left can make the state anew. Stores tell what they hold at different times, while windows come
and go. So each is measured by its own newest step: what one has held until then, it is taken to
hold now. One that is left far behind the newest commit, such as that of a pod to which nobody
copies any more, says nothing of how far the job is. Nothing is decided by this; what a settle
decides by are the stores' own reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mainstay_core.base.ids import PodUid
from mainstay_core.base.values import replace
from mainstay_core.base.words import count
from mainstay_core.job.config import MAX_LAG_STEPS, LogKind
from mainstay_core.snapshots.boundary_coverage import BoundaryCopies, Reach, steps_of
from mainstay_core.snapshots.stretches import find_stretch
from mainstay_core.snapshots.units import agreed_number
from mainstay_core.wire.segments import Run
from mainstay_core.wire.stores import (
    MAX_LOSSES,
    PositionCoverage,
    SegmentBytes,
    SnapshotSummary,
    StoreStatus,
    UnitsHeld,
    WindowHeld,
)

MAX_NAMED = 3
"""Losses that the sentence of a summary names, and positions for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredPod:
    """A living pod of a job, as coverage takes it."""

    uid: PodUid
    name: str
    domain: str
    """Failure domain; the pod's own name where none is known."""
    positions: frozenset[int] = frozenset()
    """Positions of which it has a member that holds a state."""
    store: StoreStatus | None = None
    """What its store has told; None: nothing yet."""


def cover(
    positions: Sequence[tuple[int, int]],
    pods: Sequence[CoveredPod],
    lineage: int,
    num_types: int = 0,
) -> tuple[PositionCoverage, ...]:
    """Return which losses each position survives.

    Complexity: for each position, its stores times its pods and domains.

    Args:
        positions: (stage, inner) of each, in order.
        pods: those that live.
        lineage: of the plan in force; stores of another one hold nothing that counts.
        num_types: shard types of a step in a job that logs boundaries; 0: the job logs gradients.
    """
    pods = _with_what_counts(pods, lineage)
    if num_types:
        return _cover_by_boundaries(positions, pods, lineage, num_types)
    commits = _Commits(_told(pods, lineage))
    return tuple(
        _cover_position(number, place, pods, lineage, commits)
        for number, place in enumerate(positions)
    )


def summarize(
    coverage: Sequence[PositionCoverage],
    pods: Sequence[CoveredPod],
    lineage: int,
    *,
    log: LogKind = LogKind.GRADIENTS,
    ordering: str = "",
    log_reason: str = "",
) -> SnapshotSummary:
    """Return the job's snapshots in short.

    Args:
        coverage: as :func:`cover` returns it.
        pods: those that live.
        lineage: of the plan in force.
        log: kind of log of the job.
        ordering: of the job, for people.
        log_reason: why the job has this kind of log, for people.
    """
    stores = [_store_of(pod) for pod in pods if pod.store is not None]
    pods = _with_what_counts(pods, lineage)
    windows = _windows(pods, lineage)
    complete = [w for w in windows if _is_complete(w, len(coverage), pods, lineage)]
    window = complete[-1] if complete else None
    judged = [run.last for pod in _told(pods, lineage) for run in _store_of(pod).judged]
    version = max(judged, default=-1) + 1
    newer = [w for w in windows if window is None or w.first > window.first]
    fullest = min(
        (pod for pod in pods if pod.store is not None),
        key=lambda pod: (_store_of(pod).memory_bytes - _store_of(pod).used_bytes, pod.name),
        default=None,
    )
    short = next((pod for pod in pods if pod.store is not None and pod.store.short_of), None)
    return SnapshotSummary(
        window=window,
        in_flight=newer[-1] if newer else None,
        lag=max(0, version - window.last) if window is not None else version,
        kinds=_add_up(kind for store in stores for kind in store.kinds),
        memory_bytes=sum(store.memory_bytes for store in stores),
        used_bytes=sum(store.used_bytes for store in stores),
        fullest=fullest.name if fullest else "",
        fullest_used_bytes=_store_of(fullest).used_bytes if fullest else 0,
        fullest_memory_bytes=_store_of(fullest).memory_bytes if fullest else 0,
        num_stores=len(stores),
        num_positions=len(coverage),
        num_covered=sum(p.is_covered for p in coverage),
        num_survive_pod=sum(not p.pods for p in coverage),
        num_survive_domain=sum(not p.domains for p in coverage),
        replay_steps=max((p.replay_steps for p in coverage), default=0),
        num_discarded=sum(store.num_discarded for store in stores),
        num_damaged=sum(store.num_damaged for store in stores),
        num_refused=sum(store.num_refused for store in stores),
        short_of=f"pod {short.name}: {_store_of(short).short_of}" if short else "",
        coverage=describe(coverage, log),
        log=log.value,
        ordering=ordering,
        log_reason=log_reason,
    )


def describe(coverage: Sequence[PositionCoverage], log: LogKind = LogKind.GRADIENTS) -> str:
    """Return in one sentence which losses are survived, and by which positions which are not.

    While positions are being made anew, it also says which further losses would join them.

    Args:
        coverage: as :func:`cover` returns it.
        log: kind of log of the job. By logs of boundaries a stage needs those beside it, so only
            the loss of one stage's trainers is spoken of.
    """
    lost_pods, lost_domains = _by_loss(coverage, "pods"), _by_loss(coverage, "domains")
    bare = [p for p in coverage if not p.is_covered]
    if all(not p.num_members for p in bare) and len(bare) == len(coverage):
        return "nothing holds a state yet"
    parts = [_survival("pod", lost_pods)]
    if lost_domains != lost_pods:
        parts.append(_survival("failure domain", lost_domains))
    parts += _replays(coverage)
    if bare:
        names = _names(f"{_place(p)}: {p.why_not}" for p in bare)
        parts.append(f"no store can make these anew: {names}")
    else:
        whose = " of any one stage" if log is LogKind.BOUNDARY else ""
        parts.append(f"the loss of all trainers{whose}, whose pods live, is survived")
    return "; ".join(parts)


# One position ---------------------------------------------------------------------------


def _cover_position(
    number: int,
    place: tuple[int, int],
    pods: Sequence[CoveredPod],
    lineage: int,
    commits: _Commits,
) -> PositionCoverage:
    told = {
        pod.uid: _Copies(_store_of(pod), [u for u in _store_of(pod).units if u.position == number])
        for pod in _told(pods, lineage)
    }
    held = {uid: copies for uid, copies in told.items() if copies.units}

    def has_loss(lost: Collection[PodUid]) -> bool:
        left = [c for uid, c in held.items() if uid not in lost]
        is_there = any(number in pod.positions for pod in pods if pod.uid not in lost)
        return not is_there and _reach(left, commits.without(lost)).steps is None

    steps = commits.without(())
    whole = _reach([*held.values()], steps)
    alone = [uid for uid, c in held.items() if _is_whole(c, steps)]
    # Who has no member, no copy of the position and no commits is not missed by it.
    concerned = [
        pod
        for pod in pods
        if pod.uid in held or number in pod.positions or pod.uid in commits.alone
    ]
    domains = sorted({pod.domain for pod in concerned})
    by_domain = {d: {pod.uid for pod in pods if pod.domain == d} for d in domains}
    return PositionCoverage(
        position=number,
        stage=place[0],
        inner=place[1],
        is_covered=whole.steps is not None,
        why_not=whole.why_not,
        num_members=sum(number in pod.positions for pod in pods),
        num_copies=len(alone),
        replay_steps=whole.steps or 0,
        pods=tuple(pod.name for pod in concerned if has_loss({pod.uid}))[:MAX_LOSSES],
        domains=tuple(d for d in domains if has_loss(by_domain[d]))[:MAX_LOSSES],
    )


def _cover_by_boundaries(
    positions: Sequence[tuple[int, int]],
    pods: Sequence[CoveredPod],
    lineage: int,
    num_types: int,
) -> tuple[PositionCoverage, ...]:
    """Return which losses positions survive, where the stages beside a lost one have logged."""
    members = [{p.uid for p in pods if n in p.positions} for n in range(len(positions))]
    training = {pod.uid for pod in pods if pod.positions}
    told = {pod.uid: _store_of(pod) for pod in _told(pods, lineage)}
    width = 1 + max((inner for _, inner in positions), default=0)
    copies = BoundaryCopies(told, training, len(positions) // width, num_types, width)
    # A pod without a member, units and logs is not missed by anybody.
    concerned = {uid for uid, store in told.items() if store.units or store.logs} | training
    by_domain = {
        domain: {pod.uid for pod in pods if pod.domain == domain}
        for domain in sorted({pod.domain for pod in pods})
    }

    def has_loss(number: int, gone: Collection[PodUid]) -> bool:
        if members[number].difference(gone) or concerned.isdisjoint(gone):
            return False
        lost = {n for n, uids in enumerate(members) if not uids.difference(gone)}
        return copies.reach(lost, number, gone).steps is None

    def cover_one(number: int, place: tuple[int, int]) -> PositionCoverage:
        lost = {number, *(n for n, uids in enumerate(members) if not uids)}
        whole = copies.reach(lost, number)
        together = find_stretch(lost, number, width).positions(width)
        return PositionCoverage(
            position=number,
            stage=place[0],
            inner=place[1],
            is_covered=whole.steps is not None,
            why_not=whole.why_not,
            num_members=len(members[number]),
            num_copies=sum(copies.is_enough(uid, lost, number) for uid in told),
            replay_steps=whole.steps or 0,
            pods=tuple(p.name for p in pods if has_loss(number, {p.uid}))[:MAX_LOSSES],
            domains=tuple(d for d, uids in by_domain.items() if has_loss(number, uids))[
                :MAX_LOSSES
            ],
            stretch=Run(first=together[0], last=together[-1]),
        )

    return tuple(cover_one(number, place) for number, place in enumerate(positions))


class _Steps(NamedTuple):
    """The steps by which the stores of a job are measured."""

    judged: Collection[int]
    """Those of which some store knows the votes."""
    least: int
    """A store that has nothing of this step or a later one is left behind."""
    most: int | None
    """The newest step of which a pod with a member knows; None: no such pod knows any."""


class _Commits:
    """The steps of which stores know the votes. What is lost with a pod is known no more."""

    def __init__(self, told: Sequence[CoveredPod]) -> None:
        self._of = {pod.uid: steps_of(_store_of(pod).judged) for pod in told}
        self._members = {
            pod.uid: max(self._of[pod.uid], default=-1) for pod in told if pod.positions
        }
        self._num_knowing = Counter(step for steps in self._of.values() for step in steps)
        self._all = frozenset(self._num_knowing)
        self._least = max(self._members.values(), default=-1) - MAX_LAG_STEPS
        self._known: dict[frozenset[PodUid], _Steps] = {}
        self.alone = {uid for uid in self._of if self._lost_with([uid])}
        """Pods that know the votes on a step of which no other one knows."""

    def without(self, lost: Collection[PodUid]) -> _Steps:
        """Return by what stores are measured once some pods are lost."""
        key = frozenset(lost)
        if key not in self._known:
            left = [step for uid, step in self._members.items() if uid not in key and step >= 0]
            judged = self._all - self._lost_with(key)
            self._known[key] = _Steps(judged, self._least, max(left, default=None))
        return self._known[key]

    def _lost_with(self, lost: Iterable[PodUid]) -> set[int]:
        counts = Counter(step for uid in lost for step in self._of.get(uid, ()))
        return {step for step, number in counts.items() if number == self._num_knowing[step]}


class _Copies:
    """The states and gradients that one store holds of one position, by unit."""

    def __init__(self, store: StoreStatus, held: Sequence[UnitsHeld]) -> None:
        self.groups = held
        self.units = {unit: group for group in held for unit in group.numbers}
        self.num_units = max((group.num_units for group in held), default=0)
        newest = [run.last for run in store.judged]
        newest += [run.last for group in held for run in group.gradients]
        self.newest = max(newest, default=-1)
        """The newest step of which the store has anything. The gradient of that step may be on
        its way."""


def _needed(stores: Iterable[_Copies], steps: _Steps) -> int:
    """Return the step to which stores have to bring what they hold.

    A pod without a member may have told of its gradients after those that know the commits.
    """
    found = min((s.newest for s in stores if s.newest >= steps.least), default=steps.least)
    return found if steps.most is None else min(found, max(steps.most, steps.least))


def _reach(stores: Sequence[_Copies], steps: _Steps) -> Reach:
    """Return how far stores bring a position together."""
    num_units = max((store.num_units for store in stores), default=0)
    if not num_units:
        return Reach(None, "no store holds anything of it")
    most = 0
    known: dict[tuple[int, ...], int | None] = {}
    for unit in range(num_units):
        holders = [store for store in stores if unit in store.units]
        if not holders:
            return Reach(None, f"no store holds unit {unit}")
        # Units that are told together by the same stores come equally far.
        alike = tuple(id(store.units[unit]) for store in holders)
        if alike not in known:
            groups = [store.units[unit] for store in holders]
            known[alike] = _reach_of(groups, _needed(holders, steps), steps.judged)
        taken = known[alike]
        if taken is None:
            return Reach(None, f"unit {unit} has no state with all gradients since")
        most = max(most, taken)
    return Reach(most)


def _is_whole(store: _Copies, steps: _Steps) -> bool:
    """Return whether one store brings all units of a position to its newest step by itself."""
    return len(store.units) == store.num_units and all(
        _reach_of([group], _needed([store], steps), steps.judged) is not None
        for group in store.groups
    )


def _reach_of(groups: Sequence[UnitsHeld], needed: int, judged: Collection[int]) -> int | None:
    """Return the steps that bring a unit to a version or beyond, from what stores hold of it."""
    gradients = steps_of(run for group in groups for run in group.gradients)
    for state in sorted({v for group in groups for v in group.states}, reverse=True):
        if state not in judged:
            continue  # no vote has found it good yet
        version = state
        while version in gradients and version in judged:
            version += 1
        if version >= needed:
            return version - state
    return None


# Windows and sums ------------------------------------------------------------------------


def _windows(pods: Sequence[CoveredPod], lineage: int) -> list[WindowHeld]:
    found = {w for pod in _told(pods, lineage) for w in _store_of(pod).windows}
    return sorted(found, key=lambda w: (w.first, w.length))


def _is_complete(
    window: WindowHeld, num_positions: int, pods: Sequence[CoveredPod], lineage: int
) -> bool:
    """Return whether stores hold, of each unit of each position, a state of a window."""
    there: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for pod in _told(pods, lineage):
        for group in _store_of(pod).units:
            sizes[group.position] = group.num_units
            if any(window.first <= version <= window.last for version in group.states):
                there.setdefault(group.position, set()).update(group.numbers)
    return all(
        number in sizes and len(there.get(number, ())) == sizes[number]
        for number in range(num_positions)
    )


def _add_up(kinds: Iterable[SegmentBytes]) -> tuple[SegmentBytes, ...]:
    sums: dict[str, tuple[int, int]] = {}
    for kind in kinds:
        number, size = sums.get(kind.kind, (0, 0))
        sums[kind.kind] = number + kind.num_segments, size + kind.size_bytes
    return tuple(
        SegmentBytes(kind=name, num_segments=number, size_bytes=size)
        for name, (number, size) in sorted(sums.items())
    )


def _with_what_counts(pods: Sequence[CoveredPod], lineage: int) -> list[CoveredPod]:
    """Return pods with those units alone whose copies tell as many of a position as most do.

    A store that has such a number wrong has it for some copies. They count for nothing, as in a
    settle; those of other stores do.
    """
    told: dict[int, list[tuple[int, int]]] = {}
    for pod in _told(pods, lineage):
        for group in _store_of(pod).units:
            copies = told.setdefault(group.position, [])
            copies += ((unit, group.num_units) for unit in group.numbers)
    sizes = {position: agreed_number(copies) for position, copies in told.items()}

    def counts(group: UnitsHeld) -> bool:
        number = sizes.get(group.position, group.num_units)
        return group.num_units == number and all(unit < number for unit in group.numbers)

    return [
        replace(pod, store=replace(pod.store, units=tuple(filter(counts, pod.store.units))))
        if pod.store is not None and not all(map(counts, pod.store.units))
        else pod
        for pod in pods
    ]


def _told(pods: Sequence[CoveredPod], lineage: int) -> list[CoveredPod]:
    return [pod for pod in pods if pod.store is not None and pod.store.lineage == lineage]


def _store_of(pod: CoveredPod) -> StoreStatus:
    assert pod.store is not None
    return pod.store


# Sentences --------------------------------------------------------------------------------


def _by_loss(coverage: Sequence[PositionCoverage], what: str) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for position in coverage:
        for name in getattr(position, what):
            found.setdefault(name, []).append(_place(position))
    return found


def _survival(what: str, lost: Mapping[str, Sequence[str]]) -> str:
    if not lost:
        return f"the loss of any one {what} is survived"
    named = _names(f"{name} ({_names(places)})" for name, places in sorted(lost.items()))
    return f"the loss of {count(len(lost), what)} is not survived: {named}"


def _replays(coverage: Sequence[PositionCoverage]) -> list[str]:
    """Return which positions are being made anew, and which further losses would join them.

    A stretch that is joined begins again (MoEvement, arXiv 2412.15411, appendix A). Nothing joins a
    position whose state exists again: from then on the stages beside it are covered by logs alone.
    """
    lost = [p for p in coverage if p.is_covered and not p.num_members]
    if not lost:
        return []
    numbers = {p.position for p in lost}
    stages = {p.stage for p in lost}
    joining = {
        f"s{p.stage}": _together(coverage, p.stretch)
        for p in coverage
        if p.stretch is not None
        and p.stage not in stages
        and numbers.intersection(range(p.stretch.first, p.stretch.last + 1))
    }
    names = list(dict.fromkeys(_together(coverage, p.stretch) or _place(p) for p in lost))
    is_one = len(names) == len(stages) == 1
    told = f"{_names(names)} {'is' if is_one else 'are'} being made anew; "
    them = "it" if is_one else "them"
    if not joining:
        return [told + f"no further loss would join {them}"]
    whose = _names(f"{name} ({stretch} together)" for name, stretch in joining.items())
    return [told + f"a further loss of these would join {them}: {whose}"]


def _together(coverage: Sequence[PositionCoverage], stretch: Run | None) -> str:
    """Return the name of a stretch's stages; empty without one."""
    if stretch is None:
        return ""
    first, last = coverage[stretch.first].stage, coverage[stretch.last].stage
    return f"s{first}" if first == last else f"s{first} to s{last}"


def _place(position: PositionCoverage) -> str:
    return f"s{position.stage}.i{position.inner}" if position.inner else f"s{position.stage}"


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = [f"{len(listed) - MAX_NAMED} more"] if len(listed) > MAX_NAMED else []
    return ", ".join([*listed[:MAX_NAMED], *more])
