"""The inner mesh: the ranks of one cell, on which the user's parallelism runs.

A cell of ``ranksPerStage`` ranks is the user's: tensor parallelism with DTensor,
or whatever else works on a :class:`~torch.distributed.device_mesh.DeviceMesh`.
torch's default process group is not used, so that the mesh can be formed again
without restarting anybody: the mesh refers to its process group by a name, under
which the group of the chain at hand is registered (:func:`enter`). A collective
that waits for a lost rank ends when the group's sockets are shut, as any other
operation of a :class:`~mainstay_train.comm.group.Group` does.

A mesh lives as long as its chain (protocol section 3). In a cell all ranks run
the same program, so their collectives meet. Sums over the mesh must have the same
bits each time: gloo's have, as it adds in an order that the ranks' numbers fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_train.comm.ending import destroy
from mainstay_train.comm.group import Group
from mainstay_train.comm.interruptible import InterruptibleGroup

MAX_MESSAGE_BYTES = 1 << 26
"""Bound on what a rank tells the others of its cell: each of them allocates as much per rank."""

GROUP_NAME: Any = "mainstay-inner"
DIM_NAME = "inner"
"""Name of the mesh's only dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerMesh:
    """The ranks of this rank's cell."""

    size: int = 1
    """``parallelism.ranksPerStage``."""
    index: int = 0
    """Of this rank, 0..size-1."""
    device_type: str = "cpu"

    @property
    def device_mesh(self) -> Any:
        """As ``parallelize_module`` and ``distribute_tensor`` take it: one dimension, "inner".

        There before its ranks are connected: nothing may be communicated while a
        block is built (``src_data_rank=None``), since first values come by address.
        """
        return _device_mesh(self.size, self.index, self.device_type)

    @property
    def counts_copies(self) -> bool:
        """Whether this rank speaks for what all ranks of the mesh hold in copies."""
        return self.index == 0


SINGLE = InnerMesh()
"""Of a stage with one rank."""


def warm_up() -> None:
    """Import what distributed tensors need: seconds that a warm parent spends once."""
    import torch.distributed.tensor.parallel  # noqa: F401


@lru_cache(maxsize=4)
def _device_mesh(size: int, index: int, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    # Global numbers mean nothing here, but torch caches by them where a rank's part lies: a
    # trainer that is given another place must not find the former one's.
    first = index * size
    mesh: Any = DeviceMesh(
        device_type,
        torch.arange(first, first + size, device="cpu"),
        mesh_dim_names=(DIM_NAME,),
        _init_backend=False,
        _rank=first + index,
    )
    # What a mesh made from process groups has, without asking for torch's default group.
    mesh._dim_group_names = [GROUP_NAME]
    return mesh


_entered: Any = None
"""The registered process group: torch's registry does not keep it alive."""
_group: Group | None = None
"""Over which collectives on the mesh run."""


def enter(group: Group) -> None:
    """Collectives on the inner mesh run over ``group`` from now on."""
    global _entered, _group
    leave()
    backend_type = distributed.ProcessGroup.BackendType
    kind = backend_type.NCCL if group.backend == "nccl" else backend_type.GLOO
    entered: Any = group.process_group
    if not isinstance(entered, distributed.ProcessGroup):  # a backend, which torch wants in one
        devices = ("cuda",) if group.backend == "nccl" else ("cpu", "cuda")
        entered = distributed.ProcessGroup(distributed.HashStore(), group.rank, group.size)
        _register(entered, group.process_group, kind, devices)
        if group.waits_can_hang:
            entered = InterruptibleGroup(entered, group)
            _register(entered, group.process_group, kind, devices)
    entered._set_group_name(GROUP_NAME)
    entered._set_group_desc(group.name)
    distributed_c10d._register_process_group(GROUP_NAME, entered)
    _entered, _group = entered, group


def check() -> None:
    """Return if what the mesh's collectives have yielded counts, once it was read by the host.

    Raises:
        RuntimeError: it may be anything, as the group has ended or its connections have failed. It
            is of the kind as which torch hands on what a backend says.
    """
    problem = _group.problem if _group is not None else ""
    if problem:
        raise distributed.DistBackendError(problem)


def _register(entered: Any, backend: Any, kind: Any, devices: Sequence[str]) -> None:
    entered._set_default_backend(kind)
    for device in devices:
        entered._register_backend(torch.device(device), kind, backend)


def leave() -> None:
    """The mesh has no group: a collective on it is refused."""
    global _entered, _group
    if _entered is not None:
        distributed_c10d._unregister_process_group(GROUP_NAME)
        held = _entered.let_go() if isinstance(_entered, InterruptibleGroup) else []
        held.append(_entered)
        _entered, _group = None, None
        destroy(held)  # a collective that nobody waited for may be under way


def tell_all(values: Sequence[int], inner: InnerMesh) -> tuple[tuple[int, ...], ...]:
    """Return what each rank of a cell tells, by inner rank. All of them call it at once.

    Args:
        values: of this rank, as many as the others have.
        inner: this rank's place in its cell.

    Raises:
        RuntimeError: the cell's group has ended.
    """
    mine = torch.tensor([*values], dtype=torch.int64, device=inner.device_type)
    told = _gathered(mine, inner).view(inner.size, len(values)).tolist()
    check()  # now that it was read: what is aborted may end without an error
    return tuple(tuple(row) for row in told)


def exchange_all(message: bytes, inner: InnerMesh) -> tuple[bytes, ...]:
    """Return the message of each rank of a cell, by inner rank. All of them call it at once.

    Raises:
        RemoteProtocolError: a rank wants to tell more than :data:`MAX_MESSAGE_BYTES`. All ranks see
            that, and none of them takes part in what follows.
        RuntimeError: the cell's group has ended.
    """
    lengths = [length for (length,) in tell_all([len(message)], inner)]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MAX_MESSAGE_BYTES:
            raise RemoteProtocolError(
                f"inner rank {rank} tells {length} bytes, the most is {MAX_MESSAGE_BYTES}"
            )
    padded = bytearray(message.ljust(max(1, *lengths), b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(inner.device_type)
    rows = _gathered(mine, inner).view(inner.size, len(padded)).cpu()
    check()
    return tuple(row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True))


def _gathered(mine: torch.Tensor, inner: InnerMesh) -> torch.Tensor:
    functional = torch.ops._c10d_functional
    result = functional.all_gather_into_tensor(mine, inner.size, GROUP_NAME)
    there: torch.Tensor = functional.wait_tensor(result)
    return there


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor, there for sure: what an asynchronous collective yields waits here."""
    # By what it can do: importing its class takes seconds, and a plain tensor has no wait().
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def placed_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that is distributed as ``parameter`` is."""
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def local_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that belongs to what this rank holds of the parameter."""
    if not hasattr(parameter, "placements"):
        return plain(gradient)
    placed: Any = gradient
    if placed.placements != parameter.placements:
        placed = placed.redistribute(placements=parameter.placements)
    return plain(placed.to_local())
