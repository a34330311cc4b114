"""What pods are said to send each other is what trainers give to other pods' stores."""

from __future__ import annotations

import pytest
from tests.train.snapshots.trained_chain import LENGTH, MODELS, NUM_STAGES, make_engine

from mainstay_core.base.shape import JobShape
from mainstay_core.job import model_sizes
from mainstay_core.job.config import LogKind
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.snapshot_traffic import pod_traffic
from mainstay_core.wire.segments import SegmentKind
from mainstay_train.snapshots.unit_bytes import UnitBytes

PEERS = 2
SHAPE = JobShape(
    lanes=2, shards_per_lane=2, replicas=1, min_replicas=1, stages=NUM_STAGES, steps=1, seed=0
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_bytes_sent_are_those_of_all_units_to_each_of_their_peers(name: str, dtype: str) -> None:
    entrypoint, config = MODELS[name]
    model = built_in_sizes(
        entrypoint or model_sizes.LLAMA, {**config, "dtype": dtype}, 1, 0, accumulates=True
    )
    written = dict.fromkeys(SegmentKind, 0)
    for stage in range(NUM_STAGES):
        engine = make_engine(name, dtype, stage)
        units = UnitBytes(engine.state, engine.reducer.reduced)
        for unit in range(len(units.names)):
            for kind in (SegmentKind.STATE, SegmentKind.GRADIENT, SegmentKind.COMPUTE):
                written[kind] += units.size_bytes(unit, kind)

    told = {
        log: pod_traffic([model], SHAPE, window=LENGTH, peers=PEERS, log=log) for log in LogKind
    }

    gradients, boundary = told[LogKind.GRADIENTS], told[LogKind.BOUNDARY]
    assert gradients.window == boundary.window == LENGTH
    assert not gradients.is_chosen
    # Scalars and gaps between tensors are left out.
    assert gradients.step_bytes == pytest.approx(PEERS * written[SegmentKind.GRADIENT], rel=0.05)
    assert gradients.window_bytes == pytest.approx(PEERS * written[SegmentKind.STATE], rel=0.05)
    waits = written[SegmentKind.COMPUTE] * (LENGTH - 1) / 2
    expected = PEERS * (written[SegmentKind.STATE] + waits)
    assert boundary.window_bytes == pytest.approx(expected, rel=0.05)
    assert boundary.step_bytes == 0
