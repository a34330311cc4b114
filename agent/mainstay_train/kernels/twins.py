"""Copies the memory that a call overwrites, so that the call can be executed again.

Kernels choose their path by strides, by the alignment of their operands and by what overlaps. So a
twin has the strides of its tensor, lies as far from a cache line's begin, and shares memory with
other twins as their tensors do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mainstay_train.kernels.dispatch import key_of
from mainstay_train.kernels.regions import Region

ALIGNMENT_BYTES = 64
"""No kernel looks at more of an address."""

Operand = tuple[torch.Tensor, bool]
"""A tensor that a call is given, and whether the call writes it."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of one storage in which a call writes, with all operands that lie there."""

    storage: torch.UntypedStorage
    device: torch.device
    region: Region
    """One run."""
    operands: tuple[torch.Tensor, ...]

    def copy(self, *, contents: bool) -> dict[int, torch.Tensor]:
        """Return a twin of each operand, by the operand's id; with the contents of now."""
        start, size = self.region.start, self.region.run
        raw = torch.empty(size + ALIGNMENT_BYTES, dtype=torch.uint8, device=self.device)
        shift = (self.storage.data_ptr() + start - raw.data_ptr()) % ALIGNMENT_BYTES
        if contents:
            raw[shift : shift + size].copy_(_bytes_of(self.storage, self.device)[start:][:size])
        memory = raw.untyped_storage()
        return {id(tensor): _laid_out(tensor, memory, shift - start) for tensor in self.operands}


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _laid_out(tensor: torch.Tensor, memory: torch.UntypedStorage, distance: int) -> torch.Tensor:
    """Return a tensor's like in other memory, so many bytes further on."""
    width = tensor.element_size()
    offset = (int(tensor.storage_offset()) * width + distance) // width
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    twin.set_(memory, offset, tensor.size(), tensor.stride())
    twin = twin.conj() if tensor.is_conj() else twin
    return torch._neg_view(twin) if tensor.is_neg() else twin


class Overwritten:
    """The memory that one call overwrites.

    Args:
        operands: of the call.
        replaces: whether it reads nothing of what it overwrites.
    """

    def __init__(self, operands: Sequence[Operand], *, replaces: bool) -> None:
        self.written = [tensor for tensor, is_written in operands if is_written]
        self._alone = self.written if _are_alone(self.written, operands) else None
        """All that is written, if the twin of each is what torch makes of it by itself."""
        self.has_contents = not replaces
        """Whether the call reads some of it, so that it has to be copied before."""
        if self._alone is None:
            self._find_stretches(operands, replaces=replaces)

    def _find_stretches(self, operands: Sequence[Operand], *, replaces: bool) -> None:
        self._stretches = [
            _stretch(key, self.written, operands)
            for key in dict.fromkeys(key_of(t) for t in self.written if t.numel())
        ]
        written = {id(tensor) for tensor in self.written}
        inside = {id(t) for stretch in self._stretches for t in stretch.operands}
        read = {id(tensor) for tensor, is_written in operands if not is_written}
        self.has_contents = not replaces or bool((inside - written) | (inside & read))

    def copy(self) -> Twins:
        """Return twins of all operands that lie in it, as it is now."""
        if (alone := self._alone) is not None:
            make = torch.clone if self.has_contents else torch.empty_like
            twins = [make(tensor) for tensor in alone]
            return Twins({id(t): twin for t, twin in zip(alone, twins, strict=True)}, twins)
        found: dict[int, torch.Tensor] = {}
        for stretch in self._stretches:
            found |= stretch.copy(contents=self.has_contents)
        for tensor in self.written:
            if id(tensor) not in found:  # it has no elements: the call gives it some
                found[id(tensor)] = torch.empty_like(tensor)
        return Twins(found, [found[id(tensor)] for tensor in self.written])


@dataclass(frozen=True, slots=True)
class Twins:
    """Tensors that stand for the operands of a call which the call overwrites."""

    by_id: Mapping[int, torch.Tensor]
    written: Sequence[torch.Tensor]
    """Those of the written operands, in their order."""

    def put(self, value: Any) -> Any:
        """Return an argument with twins in place of what has some."""
        if isinstance(value, torch.Tensor):
            return self.by_id.get(id(value), value)
        if isinstance(value, list | tuple):
            return type(value)([self.put(part) for part in value])
        return value


def _are_alone(written: Sequence[torch.Tensor], operands: Sequence[Operand]) -> bool:
    """Return whether tensors that a call writes are packed, each the only one in its memory.

    They are aligned as new memory is: so new memory of a tensor's shape is its twin.
    """
    for tensor in written:
        if (
            not tensor.is_contiguous()
            or not tensor.numel()
            or tensor.data_ptr() % ALIGNMENT_BYTES
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
    keys = [key_of(tensor) for tensor, _ in operands]
    return all(keys.count(key_of(tensor)) == 1 for tensor in written)


def _stretch(key: int, written: Sequence[torch.Tensor], operands: Sequence[Operand]) -> _Stretch:
    """Return what is written in one storage, and all operands that overlap it."""
    here = [tensor for tensor, _ in operands if key_of(tensor) == key and tensor.numel()]
    regions = {id(tensor): _region(tensor) for tensor in here}
    first, *others = [regions[id(t)] for t in written if id(t) in regions]
    whole = Region(first.start, first.end - first.start)
    for region in others:
        whole = whole.hull(region)
    inside: dict[int, torch.Tensor] = {}
    while True:
        found = {id(t): t for t in here if regions[id(t)].overlaps(whole)}
        if len(found) == len(inside):
            break
        inside = found
        for tensor in found.values():
            whole = whole.hull(regions[id(tensor)])
    some = here[0]
    return _Stretch(some.untyped_storage(), some.device, whole, tuple(inside.values()))


def _region(tensor: torch.Tensor) -> Region:
    region = Region.of(tensor)
    assert region is not None, "it has elements"
    return region
