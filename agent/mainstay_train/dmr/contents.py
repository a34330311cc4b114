"""Keeps the names of what lies in memory, as operators write it.

A name stands for one content: what is written in place has a new name afterwards. A storage holds
contents side by side, each in a region of its own.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from mainstay_train.kernels.dispatch import key_of
from mainstay_train.kernels.regions import Region


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes of a storage that were written as one."""

    name: str
    region: Region


@dataclass(slots=True)
class _Storage:
    """The contents of one piece of memory; none of what was allocated and not written yet."""

    contents: list[Content] = field(default_factory=list)


class Contents:
    """Knows the contents of all storages that were told of. A freed storage is forgotten."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory was told of."""
        return key_of(tensor) in self._storages

    def allocate(self, tensor: torch.Tensor) -> None:
        """Take a tensor's memory for one that holds nothing yet."""
        storage = tensor.untyped_storage()
        key = key_of(tensor)
        if key not in self._storages:
            weakref.finalize(storage, self._storages.pop, key, None)
        self._storages[key] = _Storage()

    def put(self, tensor: torch.Tensor, name: str) -> int:
        """Say what a tensor's bytes hold from now on; return how many bytes that are.

        What it replaces only in part is part of it.
        """
        region, replaced = self._target(tensor)
        if region is None:
            return 0
        storage = self._storages[key_of(tensor)]
        storage.contents = [content for content in storage.contents if content not in replaced]
        storage.contents.append(Content(name, region))
        return region.size_bytes

    def put_all(self, tensor: torch.Tensor, name: str) -> int:
        """Say what all of a new tensor's memory holds; return how many bytes that are."""
        self.allocate(tensor)
        size = int(tensor.untyped_storage().nbytes())
        if size:
            self._storages[key_of(tensor)].contents = [Content(name, Region(0, size))]
        return size

    def covered(self, tensor: torch.Tensor) -> list[Content]:
        """Return what a tensor's bytes hold, in the order of places."""
        region = Region.of(tensor)
        if region is None or not self.knows(tensor):
            return []
        found = [
            content
            for content in self._storages[key_of(tensor)].contents
            if content.region.overlaps(region)
        ]
        return sorted(found, key=lambda content: content.region.start)

    def replaced(self, tensor: torch.Tensor) -> list[Content]:
        """Return what :meth:`put` would replace, even in part."""
        return self._target(tensor)[1]

    def _target(self, tensor: torch.Tensor) -> tuple[Region | None, list[Content]]:
        """Return the region of what is written into a tensor, and what it replaces."""
        region = Region.of(tensor)
        if region is None:
            return None, []
        contents = self._storages[key_of(tensor)].contents
        while True:
            replaced = [content for content in contents if content.region.overlaps(region)]
            grown = region
            for content in replaced:
                if content.region.contains(grown):
                    grown = content.region
                elif not grown.contains(content.region):
                    grown = grown.hull(content.region)
            if grown == region:
                return region, replaced
            region = grown
