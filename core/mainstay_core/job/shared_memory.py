"""Computes how large a pod's memory-backed volume at ``/dev/shm`` may grow, and why.

The size is a bound, not a reservation. What lies there counts against the memory limits of the
containers that wrote it; what does not lie there costs nothing. Too small a bound ends trainers,
and too large a bound protects nobody. So it is the size that the pod's ranks can have reason to
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mainstay_core.base.shape import JobShape
from mainstay_core.job import model_sizes

SHM_DIR = "/dev/shm"
MIB = 1 << 20
BASE_MIB = 64
"""The size that container runtimes give by default. It serves semaphores, and tensors that torch
hands from process to process."""
NCCL_RANK_MIB = 1024
"""The share of a rank that communicates by NCCL. For each communicator it keeps there the queue to
its proxy (an array of fixed length: 184 MiB have been seen) and, for each neighbour in the pod that
it cannot reach directly, some 9 MiB of buffers. A rank is in up to three groups, of which the next
ones are made while the last ones end. NVIDIA's advice for a container is 1 GiB as well. Gloo
communicates by sockets alone."""


def is_at_shm(mount: Mapping[str, Any]) -> bool:
    """Return whether a container's mount, as in a pod template, is at the path of this volume."""
    return str(mount.get("mountPath", "")).rstrip("/") == SHM_DIR


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The bound of the volume, or that it has none."""

    size_mib: int | None
    """Bound in MiB; None: only the memory limits of the containers that write there, and the node,
    bound it."""
    reason: str


def plan_shared_memory(
    entrypoint: str, config: Mapping[str, Any], shape: JobShape, *, by_nccl: bool
) -> SharedMemory:
    """Return how large the volume of each of the job's pods may grow.

    Args:
        entrypoint: of the workload.
        config: of the workload.
        shape: degrees of the job.
        by_nccl: whether ranks may talk by NCCL.

    Raises:
        InvalidSpecError: the sizes of a built-in model are none.
    """
    if entrypoint not in model_sizes.BUILT_IN:
        return SharedMemory(
            size_mib=None,
            reason=f"unbounded but for memory limits: how large the model of {entrypoint} is "
            "is not known here; a volume of the template at /dev/shm sets a bound",
        )
    model_sizes.check_config(entrypoint, config)
    num_blocks = model_sizes.num_blocks(config)
    if shape.stages > num_blocks or shape.stages * num_blocks**2 > model_sizes.MAX_CUTS:
        return SharedMemory(
            size_mib=None,
            reason=f"unbounded but for memory limits: {num_blocks} blocks are not cut into "
            f"{shape.stages} stages here",
        )
    blocks = model_sizes.blocks_of(entrypoint, config)
    state_mib = -(-_largest_state(blocks, shape.stages, shape.ranks_per_stage, shape.cut) // MIB)
    rank_mib = state_mib + (NCCL_RANK_MIB if by_nccl else 0)
    library = f" and {NCCL_RANK_MIB} MiB for NCCL" if by_nccl else ""
    return SharedMemory(
        size_mib=BASE_MIB + shape.ranks_per_pod * rank_mib,
        reason=f"{BASE_MIB} MiB and, for each of {shape.ranks_per_pod} slots, {state_mib} MiB for "
        f"the state of the largest stage{library}",
    )


_largest_state = lru_cache(maxsize=256)(model_sizes.largest_state)
"""Cached, as each pod of a job asks for it, and cutting a deep model is not free."""
