"""Chooses a rank's device, and gives work to it without waiting.

An accelerator does its work in the order in which it was given, behind the host. The host goes on
until it asks for a value, or copies between the two in a way that waits: then everything given
before has to be done first, and nothing new is given meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import distributed

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import count

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
LOOK_S = 1e-4
"""Between two looks at a moment whose wait has a bound: what such a wait is late by."""


def choose_device(wanted: str, slot: int) -> str:
    """Return the device of a slot: ``auto`` is cuda where there is one.

    Raises:
        InvalidSpecError: ``wanted`` is none of auto, cpu, cuda, or it is cuda and there is none.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise InvalidSpecError("spec.runtime.device", f"is {wanted!r}, must be Auto, CPU or CUDA")
    if wanted == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        if wanted == "auto":
            return "cpu"
        raise InvalidSpecError(
            "spec.runtime.device",
            f"is CUDA, but torch {torch.__version__} finds no CUDA device here: use CPU or Auto, "
            "or run the job where there are GPUs, with a torch that is built for them",
        )
    return f"cuda:{slot % max(1, torch.cuda.device_count())}"


def accelerator_of(device: torch.device) -> str:
    """Return the UUID of a device's accelerator; empty on a CPU, which has none."""
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory of a device, whatever uses them; None where nobody says.

    A CPU's memory is the machine's, or that of the container if that has less.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        limit = ""
    return min(machine, int(limit)) if limit.isdecimal() else machine


def choose_backend(wanted: str, device: str, ranks_per_pod: int) -> str:
    """Return the communicator backend: nccl where every rank has a device of its own.

    Raises:
        InvalidSpecError: nccl is asked for on a CPU, torch lacks what is asked for, or the name is
            unknown.
    """
    if wanted not in ("auto", "gloo", "nccl"):
        raise InvalidSpecError("spec.runtime.backend", f"is {wanted!r}, must be Auto, Gloo or NCCL")
    cuda, has_nccl = device.startswith("cuda"), distributed.is_nccl_available()
    if wanted == "nccl" and not cuda:
        raise InvalidSpecError(
            "spec.runtime.backend", "is NCCL, which needs CUDA; use Gloo or Auto with device CPU"
        )
    if wanted == "nccl" and not has_nccl:
        raise InvalidSpecError(
            "spec.runtime.backend",
            f"is NCCL, which torch {torch.__version__} was built without: use Gloo or Auto, or a "
            "torch with NCCL",
        )
    own_device = cuda and torch.cuda.device_count() >= ranks_per_pod
    if wanted == "nccl" or (wanted == "auto" and own_device and has_nccl):
        return "nccl"
    if not distributed.is_gloo_available():
        raise InvalidSpecError(
            "spec.runtime.backend",
            f"comes to Gloo, which torch {torch.__version__} was built without: use a torch with "
            "Gloo" + (", or NCCL and a GPU for each rank" if has_nccl else ""),
        )
    return "gloo"


def check_devices(backend: str, ranks_per_pod: int, num_devices: int) -> None:
    """Refuse a pod whose ranks share a device that their backend does not let them share.

    NCCL does so only when it connects them, and each trainer that is started again fails likewise.

    Raises:
        InvalidSpecError: there are fewer devices than ranks.
    """
    if backend == "nccl" and num_devices < ranks_per_pod:
        raise InvalidSpecError(
            "spec.runtime.backend",
            f"is NCCL, which takes one rank on each GPU; a pod has {count(ranks_per_pod, 'rank')} "
            f"and sees {count(num_devices, 'GPU')}: use Gloo or Auto, or give it more GPUs",
        )


class Moment(Protocol):
    """A point in a device's work: all that it was given until then."""

    def is_over(self) -> bool:
        """Whether the device has done all of it; asked by any thread."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has.

        Raises:
            TimeoutError: it has not within ``timeout_s``.
            RuntimeError: the device failed.
        """


class _Over:
    """The moment of a CPU, which has done its work when the host goes on."""

    def is_over(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""


class _CudaMoment:
    """A moment of a CUDA device: an event in its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def is_over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._event.synchronize()
            return
        deadline_s = time.monotonic() + timeout_s
        while not self.is_over():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the device was not done within {timeout_s:g} s")
            time.sleep(LOOK_S)


def moment(device: torch.device) -> Moment:
    """Return the moment of now: after all that the device was given so far."""
    return _CudaMoment(device) if device.type == "cuda" else _Over()


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device; on CPU it is the tensor itself.

    Page-locked memory is read while the host goes on; a copy from other memory waits.
    """
    return page_locked(tensor, device).to(device, non_blocking=True)


def page_locked(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host in memory from which ``device`` copies by itself."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor


class Copied:
    """A tensor on its way to the host."""

    def __init__(
        self, tensor: torch.Tensor, there: Moment, release: Callable[[], None] = lambda: None
    ) -> None:
        self.tensor = tensor
        """On the host; on a CPU the tensor itself."""
        self._there, self.release = there, release
        """To be called once nobody reads the copy any more."""

    def wait(self) -> None:
        """Wait until the copy is whole.

        Raises:
            RuntimeError: the device failed.
        """
        self._there.wait()


class HostCopies:
    """Copies tensors of a device to page-locked memory, on a stream of their own.

    The device's other work neither waits for the copies nor is waited for by the host. Memory is
    made once for as many copies as there are at a time. On a CPU nothing is copied.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensor: torch.Tensor) -> Copied:
        """Begin to copy a tensor that nobody writes to any more; the order of elements stays."""
        if tensor.device.type != "cuda":
            return Copied(tensor, _Over())
        key = tensor.numel(), tensor.dtype
        with self._lock:
            places = self._free.setdefault(key, [])
            place = places.pop() if places else None
        if place is None:
            place = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            place.copy_(tensor.reshape(-1), non_blocking=True)
            there = _CudaMoment(tensor.device)
        # Its memory is given to nobody else before this stream has read it.
        tensor.record_stream(self._stream)

        def release() -> None:
            with self._lock:
                self._free[key].append(place)

        return Copied(place, there, release)
