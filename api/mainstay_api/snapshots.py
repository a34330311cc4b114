"""Says what the snapshots of a job come to, from what its pods' stores of segments have told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mainstay_api.store_protocol import Store
from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.shape import JobShape
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.config import LogKind, SnapshotConfig
from mainstay_core.job.sections import Workload
from mainstay_core.job.sizes.snapshot_sizes import (
    expected_store_bytes,
    known_models,
    store_bytes,
)
from mainstay_core.snapshots.checks import judge
from mainstay_core.snapshots.coverage import CoveredPod, cover, summarize
from mainstay_core.wire.facts import PodRegistration
from mainstay_core.wire.segments import MAX_BAD, SegmentKey
from mainstay_core.wire.stores import (
    Doubts,
    PositionCoverage,
    SnapshotSummary,
    StoreCheck,
    StoreStatus,
)


async def fetch_summary(store: Store, state: CoordinatorState) -> SnapshotSummary | None:
    """Return the snapshots of a job in short; None in a job without."""
    if state.config.snapshots is None:
        return None
    stores = await store.fetch_stores(state.config.job)
    return await asyncio.to_thread(summarize_job, state, stores)


def summarize_job(state: CoordinatorState, stores: Mapping[PodUid, StoreStatus]) -> SnapshotSummary:
    """Return the snapshots of a job in short.

    Args:
        state: of the job.
        stores: what each pod's store has told last.
    """
    return _judge(state, covered_pods(state, stores))[1]


def show_snapshots(state: CoordinatorState, stores: Mapping[PodUid, StoreStatus]) -> dict[str, Any]:
    """Return all that is known of a job's snapshots, by position and by store.

    Args:
        state: of the job.
        stores: what each pod's store has told last.
    """
    pods = covered_pods(state, stores)
    coverage, summary = _judge(state, pods)
    return {
        "lineage": _lineage(state),
        "step": state.step,
        "summary": codec.encode(summary),
        "positions": [codec.encode(position) for position in coverage],
        "stores": [
            {"name": pod.name, "domain": pod.domain, **codec.encode(pod.store)}
            for pod in pods
            if pod.store is not None
        ],
        "silent": [pod.name for pod in pods if pod.store is None],
    }


def show_check(
    state: CoordinatorState, wanted: int, checks: Mapping[PodUid, StoreCheck]
) -> tuple[dict[str, Any], dict[PodUid, Doubts] | None]:
    """Return the outcome of a check of all stores, and what each store has to hear of it.

    That is None before all have told: of copies that differ, those like most others are good.

    Args:
        state: of the job.
        wanted: number of the newest check.
        checks: newest outcome of each pod's store.
    """
    living = {
        p.registration.pod: p.registration.name
        for p in state.pods
        if not p.gone and p.registration.snapshots
    }
    told = {
        living[pod]: check
        for pod, check in checks.items()
        if pod in living and check.number >= wanted
    }
    verdict = judge(told)
    waiting = sorted(set(living.values()) - set(told))
    bad: dict[str, list[SegmentKey]] = {}
    known = {pod: frozenset(check.doubted) for pod, check in told.items()}
    for copy in verdict.damaged:
        # What a store knows already is not told again: good bytes may have come in its place.
        if copy.key not in known[copy.pod]:
            bad.setdefault(copy.pod, []).append(copy.key)
    doubts = {
        pod: Doubts(check=wanted, keys=tuple(bad[name][:MAX_BAD]))
        for pod, name in living.items()
        if name in bad
    }
    return {
        "check": wanted,
        "told": sorted(told),
        "waiting": waiting,
        "num_segments": sum(check.num_segments for check in told.values()),
        "size_bytes": sum(check.size_bytes for check in told.values()),
        "num_compared": verdict.num_compared,
        "num_alone": verdict.num_alone,
        "damaged": [
            {**codec.encode(copy), "segment": str(copy.key)}
            for copy in verdict.damaged + verdict.lost
        ],
        "num_records": sum(check.num_records for check in told.values()),
        "damaged_records": [
            {"pod": pod, "step": step} for pod in sorted(told) for step in told[pod].bad_records
        ],
    }, None if waiting else doubts


def covered_pods(
    state: CoordinatorState, stores: Mapping[PodUid, StoreStatus]
) -> tuple[CoveredPod, ...]:
    """Return a job's living pods: the positions of their members, and what their stores told."""
    positions: dict[PodUid, set[int]] = {}
    plan = state.in_force
    for number, members in enumerate(plan.positions if plan else ()):
        for member in members:
            if not member.joining or member.index in state.settled_at_s:
                positions.setdefault(member.slot.pod, set()).add(number)
    return tuple(
        CoveredPod(
            uid=pod.registration.pod,
            name=pod.registration.name,
            domain=pod.registration.domain or pod.registration.name,
            positions=frozenset(positions.get(pod.registration.pod, ())),
            store=_told_by(pod.registration, stores),
        )
        for pod in state.pods
        if not pod.gone
    )


def _told_by(
    registration: PodRegistration, stores: Mapping[PodUid, StoreStatus]
) -> StoreStatus | None:
    """Return what a pod's store has told last; None if it was the one of a supervisor before.

    That one is gone with all that it held.
    """
    told = stores.get(registration.pod)
    if told is not None and told.address not in ("", registration.snapshots):
        return None
    return told


def _judge(
    state: CoordinatorState, pods: Sequence[CoveredPod]
) -> tuple[tuple[PositionCoverage, ...], SnapshotSummary]:
    """Return what each position survives, and the whole in short."""
    snapshots, lineage = state.config.snapshots, _lineage(state)
    log = snapshots.log if snapshots is not None else LogKind.GRADIENTS
    num_types = state.shape.num_types if log is LogKind.BOUNDARY else 0
    coverage = cover(state.shape.positions, pods, lineage, num_types)
    summary = summarize(
        coverage,
        pods,
        lineage,
        log=log,
        ordering=snapshots.ordering if snapshots is not None else "",
        log_reason=snapshots.log_reason if snapshots is not None else "",
    )
    if snapshots is None:
        return coverage, summary
    config = state.config
    known = _store_sizes(config.entrypoint, codec.dumps(config.workload), state.shape, snapshots)
    expected_bytes, bound_bytes = known
    return coverage, replace(
        summary,
        expected_bytes=expected_bytes,
        bound_bytes=bound_bytes,
        is_auto=bool(expected_bytes) and not snapshots.num_instalments,
    )


@lru_cache(maxsize=64)
def _store_sizes(
    entrypoint: str, workload: str, shape: JobShape, snapshots: SnapshotConfig
) -> tuple[int, int]:
    """Return what a pod's store is expected to hold, and what it must have room for.

    Both are 0 of a model whose sizes nobody knows here: the user's own, or a built-in one that is
    too deep to be cut here. Whoever watches a job asks again and again, so they are kept.

    Args:
        entrypoint: of the job.
        workload: its settings, as JSON.
        shape: the degrees that it has now.
        snapshots: how its state is kept.
    """
    try:
        models = known_models(Workload(entrypoint=entrypoint, config=json.loads(workload)), shape)
    except InvalidSpecError:
        # The job began before such a configuration was refused.
        models = None
    if models is None:
        return 0, 0
    how: Any = {
        "window": snapshots.num_instalments, "peers": snapshots.peers, "log": snapshots.log
    }  # fmt: skip
    return expected_store_bytes(models, shape, **how), store_bytes(models, shape, **how)


def _lineage(state: CoordinatorState) -> int:
    return state.plan.lineage if state.plan is not None else 0
