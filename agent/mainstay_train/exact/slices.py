"""Describes the part of a model-wide tensor that a rank holds.

Names, first values and digests belong to the whole tensor, by global element
index (design.md 13.3): so ``ranksPerStage`` 1 and 2 start from the same
parameters, and digests of the parts add up to that of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mainstay_core.base.digest import Digest
from mainstay_train.exact import digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A rectangle of a model-wide tensor: an interval in each of its dimensions.

    Raises:
        ValueError: it is no rectangle of the tensor.
    """

    name: str
    """Of the whole tensor: its identity in digests, and the seed of its first values."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Index of the first element, by dimension."""
    size: tuple[int, ...]
    """Elements by dimension: the local shape."""

    def __post_init__(self) -> None:
        bounds = zip(self.start, self.size, self.shape, strict=True)
        if not all(0 <= begin <= begin + count <= whole for begin, count, whole in bounds):
            raise ValueError(
                f"{self.size} elements from {self.start} are no part of {self.name} of {self.shape}"
            )

    @property
    def bounds(self) -> str:
        """The intervals in words, e.g. "[0:16,8:24]"."""
        bounds = zip(self.start, self.size, strict=True)
        return f"[{','.join(f'{begin}:{begin + count}' for begin, count in bounds)}]"

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice's view of the whole tensor."""
        view = whole
        for dim, (begin, count) in enumerate(zip(self.start, self.size, strict=True)):
            view = view.narrow(dim, begin, count)
        return view

    def digest(self, kind: str, local: torch.Tensor) -> Digest:
        """The part of the whole tensor's digest that these elements are; as of :meth:`sums`."""
        return digests.added([self.sums(kind, local)])

    def sums(self, kind: str, local: torch.Tensor) -> torch.Tensor:
        """Both sums of that part, [mixers], where the elements are: see :func:`digests.added`.

        Args:
            kind: "master", "param" ...: with the name the identity of the tensor.
            local: the slice's elements, of shape ``size``.
        """
        # From the last dimension that is cut on, elements of a row lie one behind the other.
        cut = [d for d, count in enumerate(self.size) if count != self.shape[d]]
        dim = max(cut, default=0)
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        first = sum(begin * stride for begin, stride in zip(self.start, strides, strict=True))
        if len(cut) > 1 and cut != [0, dim]:
            raise ValueError(
                f"{self.name} is cut in dimensions {cut}, at most 0 and another can be"
            )
        rows = local.reshape(math.prod(self.size[:dim]), -1)
        length = math.prod(self.shape[dim:]) if dim else rows.shape[1]
        return digests.rows_sums(f"{kind}:{self.name}", rows, first, length)


def slice_of(name: str, parameter: torch.Tensor) -> Slice | None:
    """What a distributed tensor holds here of the whole; None where every rank holds all of it.

    Args:
        name: model-wide.
        parameter: a DTensor of one mesh dimension, sharded or replicated; or a plain tensor.

    Raises:
        ValueError: it is placed in a way that has no rectangle per rank.
    """
    placements: Any = getattr(parameter, "placements", None)
    if placements is None:
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(p) is not Replicate and type(p) is not Shard for p in placements):
        raise ValueError(f"parameter {name} is placed as {placements}; use Shard or Replicate")
    if all(type(p) is Replicate for p in placements):
        return None
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    size, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return Slice(name=name, shape=tuple(parameter.shape), start=tuple(start), size=tuple(size))
