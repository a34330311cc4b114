"""What of a device needs no GPU; the rest is in ``tests/cuda``."""

from collections.abc import Callable

import pytest
import torch

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
    with pytest.raises(InvalidSpecError) as caught:
        device.choose_backend("nccl", "cpu", 1)
    assert str(caught.value) == (
        "spec.runtime.backend: is NCCL, which needs CUDA; use Gloo or Auto with device CPU"
    )


@pytest.mark.parametrize(
    ("lacks", "wanted", "chosen", "message"),
    [
        ("nccl", "auto", "gloo", ""),
        ("nccl", "gloo", "gloo", ""),
        ("nccl", "nccl", "", "is NCCL, which torch .* was built without: use Gloo or Auto"),
        ("gloo", "auto", "nccl", ""),
        ("gloo", "nccl", "nccl", ""),
        ("gloo", "gloo", "", "comes to Gloo, which torch .* built without: .*, or NCCL and a GPU"),
    ],
)
def test_a_backend_that_torch_lacks_is_refused_or_not_chosen(
    monkeypatch: pytest.MonkeyPatch, lacks: str, wanted: str, chosen: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("nccl", "gloo"):
        monkeypatch.setattr(
            device.distributed, f"is_{name}_available", lambda name=name: name != lacks
        )
    if not message:
        assert device.choose_backend(wanted, "cuda:0", 1) == chosen
        return
    with pytest.raises(InvalidSpecError, match=rf"^spec\.runtime\.backend: {message}"):
        device.choose_backend(wanted, "cuda:0", 1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto", 0) == "cpu"
    with pytest.raises(InvalidSpecError, match=r"^spec\.runtime\.device: is CUDA, but .* use CPU"):
        device.choose_device("cuda", 0)


@pytest.mark.parametrize(
    ("choose", "field", "right"),
    [
        (lambda: device.choose_device("tpu", 0), "device", "Auto, CPU or CUDA"),
        (lambda: device.choose_backend("mpi", "cpu", 1), "backend", "Auto, Gloo or NCCL"),
    ],
)
def test_a_name_that_nobody_knows_is_refused(
    choose: Callable[[], str], field: str, right: str
) -> None:
    with pytest.raises(InvalidSpecError, match=rf"^spec\.runtime\.{field}: .* must be {right}"):
        choose()
