"""A process group of torch over the strict transport, and what makes it for the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from tests.strict.transport import Leg, Operation, Transport
from torch import distributed

from mainstay_train.comm.backend import Meet
from mainstay_train.comm.nccl import Nccl

LONGEST = timedelta(seconds=600)
"""Wait of who says no time."""


def _bytes(tensor: torch.Tensor) -> memoryview:
    assert tensor.is_contiguous(), "as NCCL demands"
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


class StrictWork(distributed._Work):  # type: ignore[name-defined,misc]
    """An operation under way. It ends without an error, whatever happened."""

    def __init__(
        self, operation: Operation | None, outputs: Sequence[torch.Tensor], then: Callable[[], None]
    ) -> None:
        super().__init__()
        self._operation, self._then, self._over = operation, then, False
        self._outputs = list(outputs)
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait; an operation that does not end at all is the only thing that is said.

        Torch's functional collectives wait in C++, where no time means that none is said.
        """
        bound = timeout or LONGEST
        if self._operation is not None and not self._operation.ended.wait(bound.total_seconds()):
            raise RuntimeError(f"no end after {bound}")
        if not self._over:
            self._over = True
            self._then()
            self._future.set_result(self._outputs)
        return True

    def synchronize(self) -> None:
        """Wait: nothing here runs behind the host."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over."""
        return self._operation is None or self._operation.ended.is_set()

    def get_future(self) -> Any:
        """Torch's functional collectives ask for it."""
        self.wait()
        return self._future


class StrictGroup(distributed.ProcessGroup):
    """What of a process group the product uses, and DTensor on an inner mesh."""

    def __init__(self, meet: Meet, rank: int, size: int, address: str) -> None:
        super().__init__(rank, size)
        self._meet, self._address = meet, address
        self.transport = Transport(rank, size)
        self._joined: list[Leg] | None = None

    def connect(self, timeout_s: float) -> None:
        """Meet all ranks."""
        self.transport.connect(self._meet, self._address, timeout_s)

    def abort(self) -> None:
        """End all operations, without an error."""
        self.transport.abort()

    # Point to point ------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], peer: int, _tag: int) -> Any:
        """Send; the tag says nothing."""
        return self._begin([Leg(peer, outgoing=True, buffer=_bytes(tensors[0]))], [])

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, _tag: int) -> Any:
        """Receive; the tag says nothing."""
        return self._begin([Leg(peer, outgoing=False, buffer=_bytes(tensors[0]))], tensors)

    def _start_coalescing(self) -> None:
        self._joined = []

    def _end_coalescing(self) -> Any:
        legs, self._joined = self._joined, None
        assert legs is not None
        return self._begin(legs, [])

    def _begin(
        self,
        legs: Sequence[Leg],
        outputs: Sequence[torch.Tensor],
        then: Callable[[], None] = lambda: None,
    ) -> Any:
        if self._joined is not None:
            self._joined += legs
            return None
        operation = self.transport.start(legs) if legs else None
        return StrictWork(operation, outputs, then)

    # Collectives ---------------------------------------------------------------

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        _opts: Any = None,
    ) -> Any:
        """Meet pieces of flat tensors."""
        coming = torch.split(output, list(output_sizes))
        going = torch.split(given, list(input_sizes))
        me = self.rank()
        coming[me].copy_(going[me])
        return self._begin(self._legs(coming, going), [output])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], _opts: Any = None
    ) -> Any:
        """Gather every rank's tensor, one after the other."""
        legs: list[Leg] = []
        for output, given in zip(outputs, inputs, strict=True):
            coming = output.view(self.size(), -1).unbind()
            coming[self.rank()].copy_(given.reshape(-1))
            legs += self._legs(coming, [given] * self.size())
        return self._begin(legs, outputs)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], _opts: Any = None) -> Any:
        """Sum over the ranks, in their order."""
        legs: list[Leg] = []
        terms = []
        for tensor in tensors:
            coming = [torch.empty_like(tensor) for _ in range(self.size())]
            coming[self.rank()].copy_(tensor)
            legs += self._legs(coming, [coming[self.rank()]] * self.size())
            terms.append(coming)

        def add() -> None:
            for tensor, coming in zip(tensors, terms, strict=True):
                tensor.copy_(coming[0])
                for term in coming[1:]:
                    tensor.add_(term)

        return self._begin(legs, tensors, add)

    def allreduce(self, tensors: Sequence[torch.Tensor], _opts: Any = None) -> Any:
        """Sum over the ranks, in their order."""
        return self.allreduce_coalesced(tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Give all ranks the root's tensor."""
        (tensor,), root = tensors, opts.rootRank
        if self.rank() == root:
            peers = [peer for peer in range(self.size()) if peer != root]
            legs = [Leg(peer, outgoing=True, buffer=_bytes(tensor)) for peer in peers]
        else:
            legs = [Leg(root, outgoing=False, buffer=_bytes(tensor))]
        return self._begin(legs, tensors)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], _opts: Any = None
    ) -> Any:
        """Sum this rank's part over the ranks, in their order."""
        legs: list[Leg] = []
        terms = []
        for given in inputs:
            going = given.contiguous().view(self.size(), -1).unbind()
            coming = [torch.empty_like(part) for part in going]
            coming[self.rank()].copy_(going[self.rank()])
            legs += self._legs(coming, going)
            terms.append(coming)

        def add() -> None:
            for output, coming in zip(outputs, terms, strict=True):
                total = coming[0].clone()
                for term in coming[1:]:
                    total.add_(term)
                output.copy_(total.view_as(output))

        return self._begin(legs, outputs, add)

    def _legs(self, coming: Sequence[torch.Tensor], going: Sequence[torch.Tensor]) -> list[Leg]:
        peers = [peer for peer in range(self.size()) if peer != self.rank()]
        return [
            *(Leg(p, outgoing=False, buffer=_bytes(coming[p])) for p in peers if coming[p].numel()),
            *(Leg(p, outgoing=True, buffer=_bytes(going[p])) for p in peers if going[p].numel()),
        ]


class Strict(Nccl):
    """NCCL as the product uses it, where its communicator is a strict group."""

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
        """Make a group that has not met yet."""
        del connect, operation
        return StrictGroup(meet, rank, size, address)

    def connect(self, group: Any, connect: timedelta) -> None:
        """Meet all ranks."""
        group.connect(connect.total_seconds())

    def problem(self, group: Any) -> str:
        """Return what the transport has met."""
        return str(group.transport.problem)

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself: it is in host memory."""
        return tensor
