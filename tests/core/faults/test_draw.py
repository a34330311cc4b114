"""What chaos draws: always usable, always the same for a seed, and all that there is."""

from __future__ import annotations

import itertools

import pytest

from mainstay_core.base.shape import JobShape
from mainstay_core.faults import draw, files


def choices(stages: int = 2, replicas: int = 3, spares: int = 1) -> draw.Choices:
    shape = JobShape(
        lanes=replicas,
        shards_per_lane=1,
        replicas=replicas,
        min_replicas=1,
        stages=stages,
        steps=400,
        seed=1,
    )
    return draw.Choices(shape=shape, num_spares=spares, heartbeat_timeout_s=4)


def drawn(given: draw.Choices, seed: int, num_faults: int = 40) -> tuple[draw.Run, ...]:
    return draw.pack(draw.draw(given, num_faults, seed), 8, seed)


def test_the_same_seed_draws_the_same_and_another_one_something_else() -> None:
    assert drawn(choices(), 1) == drawn(choices(), 1)
    assert drawn(choices(), 1) != drawn(choices(), 2)


@pytest.mark.parametrize(
    ("stages", "replicas", "spares"), list(itertools.product((1, 2, 3), (1, 2, 4), (0, 2)))
)
def test_every_draw_is_a_faults_file_that_is_accepted(
    stages: int, replicas: int, spares: int
) -> None:
    given = choices(stages, replicas, spares)
    for seed in range(8):
        runs = drawn(given, seed)
        assert sum(len(run.entries) for run in runs) == 40
        for run in runs:
            assert len(run.entries) <= 8
            files.parse_faults(run.entries, given.shape, spares)


def test_ids_are_unique_in_a_campaign() -> None:
    ids = [entry["id"] for run in drawn(choices(), 3) for entry in run.entries]
    assert len(set(ids)) == len(ids) == 40


def test_every_kind_of_fault_is_drawn_in_a_few_campaigns() -> None:
    entries = [e for seed in range(10) for run in drawn(choices(), seed) for e in run.entries]
    assert {e["action"] for e in entries} >= {
        "kill-trainer",
        "kill-pod",
        "stop",
        "slow",
        "disconnect",
        "kill",
    }
    assert {e["at"].get("during") for e in entries} >= {"settle", "mask", "heal", "heal-source"}
    phases = {e["at"].get("phase") for e in entries}
    assert phases >= {*draw.ALWAYS, "SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    assert any("with" in e["at"] for e in entries)
    assert {key for e in entries for key in e["target"]} >= {"replica", "spare", "process"}


def test_a_group_can_stand_alone() -> None:
    for group in draw.draw(choices(), 40, 5):
        (run,) = draw.pack([group], 8, 5)
        assert run.entries[0]["at"]["step"] == draw.FIRST_STEP
        files.parse_faults(run.entries, choices().shape, 1)
