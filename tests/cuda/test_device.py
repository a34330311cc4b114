"""Copies between host and device, and whoever waits for them."""

import threading

import pytest
import torch
from tests.train.compute.test_loader import Samples, place, wanted

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.base import device as devices
from mainstay_train.compute.loader import Loader
from mainstay_train.dmr.timers import timer_of


def busy(device, turns=60):
    """Have a device compute for some milliseconds at least."""
    x = torch.ones(2048, 2048, device=device)
    for _ in range(turns):
        x = x @ x * 0.0 + 1.0
    return x


def test_a_copy_to_the_host_has_the_bits_of_its_moment(needs_cuda):
    copies = devices.HostCopies()
    busy(needs_cuda)
    tensor = torch.arange(100_000, device=needs_cuda).view(100, 1000)
    expected = torch.arange(100_000)
    first = copies.begin(tensor)
    del tensor
    other = torch.full((100_000,), -1, device=needs_cuda)  # may not lie where the first is read
    second = copies.begin(other)
    for copied in (first, second):
        copied.wait()
        assert copied.tensor.is_pinned()
    assert torch.equal(first.tensor, expected)
    assert second.tensor.eq(-1).all()
    where = first.tensor.data_ptr()
    first.release()
    third = copies.begin(other)
    third.wait()
    assert third.tensor.data_ptr() == where, "memory is used again"


def test_a_copy_of_what_is_not_packed_keeps_the_order_of_elements(device):
    matrix = torch.arange(12.0, device=device).view(3, 4).t()
    copied = devices.HostCopies().begin(matrix)
    copied.wait()
    assert copied.tensor.reshape(-1).tolist() == matrix.cpu().reshape(-1).tolist()


def test_to_begin_a_copy_waits_for_nothing(needs_cuda):
    copies, tensor = devices.HostCopies(), torch.ones(1 << 20, device=needs_cuda)
    copies.begin(tensor).release()
    torch.cuda.synchronize()
    busy(needs_cuda, 300)
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = copies.begin(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copied.wait()
    assert copied.tensor.eq(1).all()


def test_a_moment_is_over_when_the_device_has_come_to_it(needs_cuda):
    torch.cuda.synchronize()
    busy(needs_cuda, 500)
    moment = devices.moment(needs_cuda)
    with pytest.raises(TimeoutError, match="was not done within"):
        moment.wait(1e-6)
    asked = []
    thread = threading.Thread(target=lambda: (moment.wait(60), asked.append(moment.is_over())))
    thread.start()
    thread.join()
    moment.wait()
    assert asked == [True]


def test_tensors_are_sent_from_page_locked_memory(device):
    tensor = torch.arange(1000)
    if device.type == "cuda":
        assert devices.page_locked(tensor, device).is_pinned()
        busy(device)
        torch.cuda.set_sync_debug_mode("error")
    try:
        sent = devices.sent(tensor, device)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert sent.device == device
    assert torch.equal(sent.cpu(), tensor)


def test_batches_come_page_locked_and_ahead(device):
    samples = Samples()
    loader = Loader(samples, device, twice=True)
    gate = samples.hold(1)
    first = loader.take(wanted(0))
    loader.order(wanted(1))
    samples.begins(1).wait(60)
    gate.set()
    second = loader.take(wanted(1, digests=True))
    assert [place(first), place(second)] == [(0, 0), (0, 1)]
    for loaded in (first, second):
        for part in (loaded.batch.tokens, loaded.batch.targets):
            assert part.is_pinned() == (device.type == "cuda")
            assert part.device.type == "cpu"
    (thread,) = samples.threads
    assert thread is not threading.current_thread()


def test_devices_and_backends_are_chosen_by_what_is_there(needs_cuda):
    count = torch.cuda.device_count()
    assert devices.choose_device("auto", 0) == "cuda:0"
    assert devices.choose_device("cuda", count) == "cuda:0"
    assert devices.choose_device("cpu", 0) == "cpu"
    assert devices.choose_backend("auto", "cuda:0", count) == "nccl"
    assert devices.choose_backend("auto", "cuda:0", count + 1) == "gloo"
    with pytest.raises(InvalidSpecError, match="is NCCL, which needs CUDA"):
        devices.choose_backend("nccl", "cpu", 1)
    assert devices.choose_backend("nccl", "cuda:0", count + 1) == "nccl", "and refused by name"
    with pytest.raises(InvalidSpecError, match="one rank on each GPU"):
        devices.check_devices("nccl", count + 1, count)
    total = devices.memory_of(needs_cuda)
    assert total == torch.cuda.mem_get_info(needs_cuda)[1]


def test_calls_are_timed(device):
    ticks = iter(range(100))
    timer = timer_of(device, lambda: next(ticks))
    for _ in range(2):
        timer.begin()
        busy(device, 2)
        timer.end()
    taken = timer.seconds()
    assert len(taken) == 2
    assert all(value > 0 for value in taken)
