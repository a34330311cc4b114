"""Plans the memory of the pods' stores of a profiled job with the code of a running one."""

from __future__ import annotations

from mainstay_core.snapshots.copies import CopyDemand, StorePod, plan_copies
from mainstay_core.snapshots.memory import LogDemand, StoreNeed, plan_stores, window_bytes
from mainstay_core.snapshots.schedule import WindowPlan
from mainstay_core.theory.profiles import JobProfile


def plan_built_stores(
    profile: JobProfile, window: WindowPlan, *, lag: int, peers: int
) -> tuple[StoreNeed, ...]:
    """Return what the store of each pod of one pipeline needs, with boundary logs.

    Each cell has a pod of its own. Pipelines are alike, so one of them stands for all: its copies
    lie in its own pods here.

    Args:
        profile: the job.
        window: its window.
        lag: steps from a window's end until the vote that says that its copies have arrived.
        peers: copies beside that in the author's own pod.
    """
    pods, demands, logs = [], [], []
    first = {one.position: one for one in reversed(window.assignments)}
    for position, one in sorted(first.items()):
        pod = one.author.slot.pod
        pods.append(StorePod(pod=pod, stages=(position.stage,)))
        demands.append(
            CopyDemand(position=position, pod=pod, size_bytes=window_bytes(one.instalments))
        )
        logs.append(
            LogDemand(
                position=position, pod=pod, boundary_bytes=_log_bytes(profile, position.stage)
            )
        )
    plan = plan_copies(pods, demands, peers=peers, domains=1)
    return plan_stores(plan, demands, logs, window.window.length, lag)


def _log_bytes(profile: JobProfile, stage: int) -> int:
    """Return what one cell sends across its borders in a step."""
    shape = profile.shape
    borders = (stage > 0) + (stage < shape.num_stages - 1)
    tokens = shape.sequences * shape.sequence_length // shape.num_pipelines
    return borders * tokens * shape.width * profile.types.compute_bytes
