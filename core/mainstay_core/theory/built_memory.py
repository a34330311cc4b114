"""Plans the memory of the pods' stores of a profiled job with the code of a running one.

A store keeps the complete window and the one that is being copied, of every author whose copies it
holds, and the logs of all steps since the complete window began. MoEvement reports what its
experiments took (arXiv 2412.15411, section 5.6, table 6) and calls logs small. That depends on the
job, so here memory follows from the job's own sizes. What a running job's stores are given is
planned by the same rules (:mod:`mainstay_core.job.sizes.snapshot_sizes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mainstay_core.base.bounds import Count, Sentence
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count, show_bytes
from mainstay_core.job.sizes.snapshot_sizes import max_log_steps
from mainstay_core.snapshots.copies import CopyDemand, CopyPlan, StorePod, plan_copies
from mainstay_core.snapshots.schedule import WindowPlan
from mainstay_core.snapshots.units import Position
from mainstay_core.snapshots.windows import Instalment, WindowLength
from mainstay_core.theory.profiles import JobProfile

WINDOWS = 2
"""Windows that a store keeps: the complete one, and the one that is being copied."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDemand:
    """The logs that the members of one position in one pod write in each step."""

    position: Position
    pod: PodUid
    gradient_bytes: Count = 0
    """Reduced gradients, which go to the holders of the position's copies."""
    boundary_bytes: Count = 0
    """Activations and gradients that cross stage boundaries, which stay in the sender's pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreNeed:
    """The least memory with which the store of one pod works."""

    pod: PodUid
    windows_bytes: Count
    """Copies of both windows, the pod's own and those that it holds for others."""
    logs_bytes: Count
    """Logs of all steps that are kept."""
    reason: Sentence
    """One sentence for people."""

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.windows_bytes + self.logs_bytes

    @property
    def size_mib(self) -> int:
        """The same in MiB, rounded up: as a setting would have it."""
        return -(-self.size_bytes // MIB)


def window_bytes(instalments: Iterable[Instalment]) -> int:
    """Return the size of one author's copies of a window."""
    return sum(instalment.size_bytes for instalment in instalments)


def plan_stores(
    plan: CopyPlan,
    demands: Sequence[CopyDemand],
    logs: Sequence[LogDemand],
    length: WindowLength,
    lag: int = 0,
) -> tuple[StoreNeed, ...]:
    """Return the least memory of each store that holds something, by pod.

    Args:
        plan: which pods hold whose copies.
        demands: the sizes of these copies.
        logs: what each step adds.
        length: of a window.
        lag: steps from a window's last instalment to the commit that completes it.

    Raises:
        InvalidSpecError: copies or logs are of a position and pod that the plan does not have.
    """
    holders = {(copies.position, copies.pod): copies.holders for copies in plan.copies}
    num_steps = max_log_steps(length, lag)
    windows: dict[PodUid, int] = {}
    kept: dict[PodUid, int] = {}
    for demand in demands:
        for pod in _holders(holders, demand.position, demand.pod, "demands"):
            windows[pod] = windows.get(pod, 0) + WINDOWS * demand.size_bytes
    for log in logs:
        for pod in _holders(holders, log.position, log.pod, "logs"):
            kept[pod] = kept.get(pod, 0) + num_steps * log.gradient_bytes
        kept[log.pod] += num_steps * log.boundary_bytes
    return tuple(
        StoreNeed(
            pod=pod,
            windows_bytes=windows.get(pod, 0),
            logs_bytes=kept.get(pod, 0),
            reason=f"{show_bytes(windows.get(pod, 0))} for two windows of "
            f"{count(length, 'step')} and {show_bytes(kept.get(pod, 0))} for the logs of "
            f"{count(num_steps, 'step')}",
        )
        for pod in sorted(windows.keys() | kept.keys())
    )


def _holders(
    holders: dict[tuple[Position, PodUid], tuple[PodUid, ...]],
    position: Position,
    pod: PodUid,
    field: str,
) -> tuple[PodUid, ...]:
    found = holders.get((position, pod))
    if found is None:
        raise InvalidSpecError(field, f"names {position} in the pod {pod}, which has no copies")
    return found


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
