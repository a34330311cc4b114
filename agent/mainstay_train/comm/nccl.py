"""The NCCL backend of process groups: GPUs.

It has run on one GPU, with one rank (``tests/cuda/test_nccl.py``); never between two devices.
NCCL's rules are not gloo's, and the tests play them on a CPU with a backend that is as strict:

- An operation that is aborted ends without an error; its output is whatever lay in memory.
- A peer that is gone is not noticed by itself. The job's gather finds out and ends the group.
- Point-to-point operations ignore tags and run in the order in which they were started. A send
  may end only when its receive has begun.
- The host does not wait for an operation, the device's stream does. Whether its result counts is
  known when the stream has come to what follows.
- An error of a connection ends no operation. It is told to whoever asks the group. But torch's own
  wait aborts the communicator of an operation that was asked whether it is over and had an error.
- A rank that initializes a communicator waits for all others, inside NCCL. It comes back when the
  sockets are shut at which NCCL waits.
- An abort waits for what the device has begun, and that may wait for another group of the process.
  So each runs in a thread, and whoever uses the device's memory again waits for all of them.

torch's own answers to failures are switched off, as the coordinator decides: its watchdog would
end this process for an operation of a group that is being replaced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_train.comm.backend import Meet

logger = logging.getLogger(__name__)

LOOK_S = 0.001
"""Between two looks whether all ranks have met."""

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # errors end groups, never this process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog that waits for a lost peer
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # peers are told by the coordinator
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RANKS_PER_ROOT": str(1 << 20),  # one rank gives the id, however many there are
}
"""How torch treats failures, and how it meets; read from the environment by each group."""


class _Ids(distributed.Store):
    """The ids of communicators as NCCL's store: one rank sets an id, all others get it."""

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet: Meet = meet

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # C++ gives bytes
        """Give the value to all others; waits until they have asked for it."""
        self._meet(key, bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of the rank that sets it."""
        return max(self._meet(key, b""))

    def check(self, keys: list[str]) -> bool:
        """Return that nobody has set them: threads of torch look for calls to write records."""
        del keys
        return False

    def close(self) -> None:
        """Let go of the meeting: all ranks have met, or will not."""
        self._meet = _over


def _over(key: str, body: bytes) -> list[bytes]:
    del body
    raise RuntimeError(f"all ranks have met, and nobody is told {key!r} any more")


def check_own(devices: Sequence[bytes]) -> None:
    """Refuse ranks of a group that share a GPU: NCCL does so only when it connects them.

    Args:
        devices: name of each rank's GPU, the same for no other in the world; empty: not told.

    Raises:
        InvalidSpecError: two ranks have the same one.
    """
    first: dict[bytes, int] = {}
    for rank, name in enumerate(devices):
        other = first.setdefault(name, rank)
        if name and other != rank:
            raise InvalidSpecError(
                "spec.runtime.backend",
                f"is NCCL, which takes one rank on each GPU; ranks {other} and {rank} of a group "
                f"share {name.decode()}: use Gloo, or give each rank a GPU of its own",
            )


class Nccl:
    """Makes NCCL's process groups; :class:`~mainstay_train.comm.backend.Backend`."""

    name = "nccl"
    ends_by_sockets = False
    waits_can_hang = False
    tells_sent = True

    def __init__(self) -> None:
        self._ids: WeakKeyDictionary[Any, _Ids] = WeakKeyDictionary()
        """By process group: torch calls them when it connects, and does not keep them alive."""
        self._changed = threading.Condition()
        self._aborting: list[Any] = []
        """Process groups whose abort is under way."""

    def create(
        self,
        meet: Meet,
        rank: int,
        size: int,
        *,
        address: str,
        connect: timedelta,
        operation: timedelta,
    ) -> Any:
        """Make a process group whose communicator is initialized without blocking.

        Raises:
            InvalidSpecError: two ranks share a GPU.
        """
        del address, connect
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        check_own(meet("devices", f"GPU {device.uuid}".encode()))
        os.environ.update(SETTINGS)
        # Not the time to connect: it also bounds the first message between two ranks, for which
        # NCCL connects them, and that waits until the later one comes to it.
        seconds = max(1, round(operation.total_seconds()))
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(seconds)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = operation
        options.config.blocking = 0
        ids = _Ids(meet)
        group = distributed.ProcessGroupNCCL(ids, rank, size, options)
        self._ids[group] = ids
        return group

    def connect(self, group: Any, connect: timedelta) -> None:
        """Initialize the communicator and wait until a first sum over all ranks is there.

        Raises:
            RuntimeError: the sum is not there within ``connect`` of its start, or the group was
                aborted. What comes before is bounded by who ends the group.
        """
        try:
            self._meet_all(group, connect)
        finally:
            self._ids[group].close()  # else it would keep the group alive

    @staticmethod
    def _meet_all(group: Any, connect: timedelta) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        group.eager_connect_single_device(device)
        met = group.allreduce([torch.zeros(1, device=device)])
        deadline_s = time.monotonic() + connect.total_seconds()
        while not met.is_completed():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not all ranks met within {connect.total_seconds():g} s")
            time.sleep(LOOK_S)
        met.wait(connect)  # an error completes it as well, and only this raises it

    def together(
        self, group: Any, send: Callable[[], Any], receive: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Start both as one operation: alone, a send waits until the peer receives."""
        group._start_coalescing()
        send()
        receive()
        work = group._end_coalescing()
        return work, work

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Have the device's current stream wait for the operation; the host goes on.

        With a timeout the host would wait, and the device would run out of work. Nor is it ``wait``
        without one: that aborts what has an error, before anybody has looked what counts until
        then. Whoever asks for :meth:`problem` is told the error.
        """
        del timeout
        work.synchronize()

    def problem(self, group: Any) -> str:
        """Return the first error that torch's watchdog has met in the group; it acts on none."""
        error = group.get_error().name
        return "" if error == "SUCCESS" else f"NCCL has met a {error}"

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself: NCCL reads GPU memory."""
        return tensor

    def abort(self, group: Any) -> None:
        """Begin to end the group's operations, in a thread of its own."""
        with self._changed:
            if any(other is group for other in self._aborting):
                return
            self._aborting.append(group)
        thread = threading.Thread(target=self._abort, args=(group,), name="abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had; else nobody would ever be told of an end
            self._abort(group)

    def _abort(self, group: Any) -> None:
        try:
            group.abort()
        except RuntimeError as error:
            # The device may be busy with something else for longer than an operation may take.
            # Nothing of the group counts any more, whenever its operations come to an end.
            logger.warning("NCCL has not ended a group's operations in time: %s", brief(error))
        finally:
            with self._changed:
                self._aborting = [other for other in self._aborting if other is not group]
                self._changed.notify_all()

    def finish_aborts(self, timeout: timedelta) -> bool:
        """Wait until all aborts are over; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._aborting, timeout.total_seconds())
