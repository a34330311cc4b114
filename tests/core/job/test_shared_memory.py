"""How large /dev/shm of a pod may grow: by the model where it is known; always with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape
from mainstay_core.job.model_sizes import LLAMA
from mainstay_core.job.shared_memory import SharedMemory, plan_shared_memory

SEVEN_BILLION = {
    "dim": 4096,
    "layers": 32,
    "heads": 32,
    "kvHeads": 32,
    "hidden": 11008,
    "vocab": 32000,
    "sequence": 4096,
}
"""Llama 2."""


def plan(
    config: dict[str, Any], entrypoint: str = LLAMA, *, by_nccl: bool = False, **shape: Any
) -> SharedMemory:
    degrees = {"lanes": 8, "shards_per_lane": 1, "replicas": 8, "min_replicas": 1, "stages": 1}
    made = JobShape(**{**degrees, **shape, "steps": 9, "seed": 0})
    return plan_shared_memory(entrypoint, config, made, by_nccl=by_nccl)


def test_a_slot_has_room_for_the_state_of_the_largest_stage() -> None:
    whole = plan(SEVEN_BILLION)
    # 6,738,415,616 parameters, as published, of 12 bytes.
    assert whole.size_mib == 64 + 77_116
    words = "64 MiB and, for each of 1 slots, 77116 MiB for the state of the largest stage"
    assert whole.reason == words
    split = plan(SEVEN_BILLION, stages=4, ranks_per_stage=8, ranks_per_pod=8)
    assert split.size_mib is not None
    # A quarter each, an eighth of it on each of a pod's eight slots; the ends are not quite even.
    assert 77_116 / 4 < split.size_mib - 64 < 77_116 / 4 * 1.1


def test_nccl_gets_room_of_its_own_for_each_slot() -> None:
    with_nccl = plan({}, by_nccl=True, ranks_per_pod=4).size_mib or 0
    assert with_nccl - (plan({}, ranks_per_pod=4).size_mib or 0) == 4 * 1024


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"entrypoint": "mine:workload"}, "how large the model of mine:workload is is not known"),
        ({"stages": 11}, "10 blocks are not cut into 11 stages"),
        ({"config": {"layers": 60_000}}, "60002 blocks are not cut into 1 stages"),
    ],
)
def test_what_is_not_known_is_not_bounded_and_says_so(bounds: dict[str, Any], words: str) -> None:
    found = plan(**{"config": {}, **bounds})
    assert found.size_mib is None
    assert words in found.reason


def test_a_size_that_is_none_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.workload\.config\.dim: is 'wide', must be"):
        plan({"dim": "wide"})
