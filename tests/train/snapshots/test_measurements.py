"""What a trainer tells of its copies and steps: medians, rounded, and nothing before a measure."""

from __future__ import annotations

from mainstay_core.wire.windows import Measures
from mainstay_train.snapshots.measurements import REMEMBERED, Leg, Measurements

SECOND_NS = 1_000_000_000


def test_nothing_is_told_before_it_was_measured() -> None:
    measured = Measurements()
    measured.note_copy(Leg.COPY, 0, SECOND_NS)
    measured.note_copy(Leg.COPY, 10, 0)

    assert measured.told() == Measures(
        copy_bytes_per_s=0, host_bytes_per_s=0, network_bytes_per_s=0, step_us=0
    )


def test_medians_of_the_last_ones_are_told_with_two_digits() -> None:
    measured = Measurements()
    for elapsed in (1, 1, 1, 30):
        measured.note_copy(Leg.COPY, 123_456, elapsed * SECOND_NS)
        measured.note_step(elapsed * SECOND_NS // 8)
    measured.note_copy(Leg.HOST, 999, SECOND_NS)
    measured.note_copy(Leg.NETWORK, 1, 3 * SECOND_NS)

    assert measured.told() == Measures(
        copy_bytes_per_s=120_000, host_bytes_per_s=1_000, network_bytes_per_s=1, step_us=130_000
    )
    for _ in range(REMEMBERED):
        measured.note_step(2 * SECOND_NS)
    assert measured.told().step_us == 2_000_000
