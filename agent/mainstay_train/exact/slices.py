"""Describes the part of a model-wide tensor that a rank holds.

Names, first values and digests belong to the whole tensor, by global element
index (design.md 13.3): so ``ranksPerStage`` 1 and 2 start from the same
parameters, and digests of the parts add up to that of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mainstay_core.base.digest import Digest
from mainstay_train.sums import digests


class _Rows(NamedTuple):
    """Equally long runs of elements, equally far apart in a tensor."""

    number: int
    width: int
    first: int
    """Index of the first element in the tensor."""
    apart: int
    """From the first element of a row to that of the next."""


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
        rows = self._rows()
        return digests.rows_sums(
            f"{kind}:{self.name}", local.reshape(rows.number, -1), rows.first, rows.apart
        )

    def piece_digest(self, kind: str, piece: torch.Tensor, start: int) -> Digest:
        """The part of the whole tensor's digest that consecutive elements of the slice are.

        Args:
            kind: "master", "param" ...: with the name the identity of the tensor.
            piece: flat.
            start: index of its first element among those of the slice.
        """
        rows, name = self._rows(), f"{kind}:{self.name}"
        sums = []
        at, stop = start, start + piece.numel()
        while at < stop:
            row, column = divmod(at, rows.width)
            # To the end of a row that is begun; then whole rows; then the begin of the last one.
            whole = (stop - at) // rows.width if column == 0 else 0
            taken = whole * rows.width or min(stop - at, rows.width - column)
            cut = piece[at - start : at - start + taken].reshape(max(1, whole), -1)
            sums.append(
                digests.rows_sums(name, cut, rows.first + row * rows.apart + column, rows.apart)
            )
            at += taken
        return digests.added(sums)

    def _rows(self) -> _Rows:
        """How its elements lie in the whole tensor.

        Raises:
            ValueError: it is cut in dimensions for which they lie in no such rows.
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
        number, width = math.prod(self.size[:dim]), math.prod(self.size[dim:])
        return _Rows(number, width, first, math.prod(self.shape[dim:]) if dim else width)


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
    # torch counts rows with tensors of its default device, which may be that of shapes alone.
    with torch.device("cpu"):
        size, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return Slice(name=name, shape=tuple(parameter.shape), start=tuple(start), size=tuple(size))
