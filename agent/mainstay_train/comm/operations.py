"""Describes messages and exchanges of a group of ranks while they are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Message(NamedTuple):
    """A tensor to send to a peer, or to fill with what the peer sends."""

    tensor: torch.Tensor
    peer: int
    tag: int
    """Tells messages of a peer apart where the backend can; else their order does."""


class Pending(NamedTuple):
    """A message under way, for :meth:`Group.finish`."""

    work: Any
    staged: torch.Tensor
    """What the backend reads or writes: it stays alive and unchanged until then."""
    into: torch.Tensor | None
    """Where a received message goes."""

    @property
    def is_over(self) -> bool:
        """Whether :meth:`Group.finish` would return at once."""
        return bool(self.work.is_completed())


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """An all-to-all on its way."""

    work: Any
    received: torch.Tensor
    staged: torch.Tensor
    """What the backend receives into."""
    sent: torch.Tensor
    """What the backend reads: kept until it is over."""

    @property
    def is_over(self) -> bool:
        """Whether :meth:`Group.finish_exchange` would return at once, or raise."""
        return bool(self.work.is_completed())
