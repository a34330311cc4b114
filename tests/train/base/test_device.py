"""What of a device needs no GPU; the rest is in ``tests/cuda``."""

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.base import device


def test_ranks_of_a_pod_that_share_a_gpu_cannot_talk_by_nccl() -> None:
    with pytest.raises(InvalidSpecError) as caught:
        device.check_devices("nccl", 2, 1)
    assert str(caught.value).startswith(
        "spec.runtime.backend: is NCCL, which takes one rank on each GPU; a pod has 2 ranks and "
        "sees 1 GPU: use Gloo or Auto"
    )


@pytest.mark.parametrize(
    ("backend", "num_ranks", "num_devices"),
    [("nccl", 1, 1), ("nccl", 2, 4), ("gloo", 2, 1), ("gloo", 2, 0)],
)
def test_other_pods_can(backend: str, num_ranks: int, num_devices: int) -> None:
    device.check_devices(backend, num_ranks, num_devices)


def test_a_pod_without_a_gpu_talks_by_gloo() -> None:
    assert device.choose_backend("auto", "cpu", 1) == "gloo"
    with pytest.raises(InvalidSpecError, match="nccl needs device cuda"):
        device.choose_backend("nccl", "cpu", 1)
