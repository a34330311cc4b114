"""What is told of a pod that registers."""

from __future__ import annotations

import pytest

from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.base.shape import JobShape
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import PodRegistered
from mainstay_core.job.config import JobConfig, SnapshotConfig
from mainstay_core.wire.facts import PodRegistration

SNAPSHOTS = SnapshotConfig(memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("snapshots", "address", "is_told"),
    [(SNAPSHOTS, "", True), (SNAPSHOTS, "10.0.0.1:7", False), (None, "", False)],
)
def test_a_pod_without_memory_for_snapshots_is_named_where_the_job_has_some(
    snapshots: SnapshotConfig | None, address: str, is_told: bool
) -> None:
    shape = JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=1, steps=9, seed=1
    )  # fmt: skip
    config = JobConfig(
        job=JobUid("j"), name="j", shape=shape, entrypoint="a:b", workload={}, snapshots=snapshots
    )
    pod = PodRegistration(
        pod=PodUid("pod-1"), name="worker-1", address="h", gather="g", num_slots=1,
        snapshots=address,
    )  # fmt: skip

    event = PodRegistered(registration=pod)
    outcome = machine.step(machine.initial(config, 0.0), event, 1.0, "nonce")

    (told,) = [a.message for a in outcome.actions if getattr(a, "code", "") == "PodRegistered"]
    assert told.startswith("worker-1 at h registered")
    assert ("it keeps no snapshots: it was started without memory" in told) is is_told
