"""Digests everything that leaves a cell while it computes a type that other chains compute, too.

Votes tell the digests (:mod:`mainstay_core.dmr.witness`): where two chains differ first, a device
is wrong. It is a log of what is sent that stands before the step's own log, if there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from mainstay_core.dmr.witness import Account
from mainstay_core.planning.program import Action, Op
from mainstay_train.comm.chains import Mark
from mainstay_train.compute.interpreter import SentLog
from mainstay_train.exact.digests import tensor_digest


class WatchedType:
    """What leaves a cell while it computes one type.

    Args:
        shard_type: the type.
        describe: called once the type is complete: returns digests of its gradient, and what is
            told of it.
        log: where all that is sent goes as well; None: nowhere.
    """

    def __init__(
        self, shard_type: int, describe: Callable[[], tuple[str, ...]], log: SentLog | None
    ) -> None:
        self._type, self._describe, self._log = shard_type, describe, log
        self._sent: dict[Op, list[str]] = {Op.SEND_F: [], Op.SEND_B: []}
        self.account: Account | None = None
        """What left the cell, once the type is complete."""

    def sent(self, action: Action, tensor: torch.Tensor) -> None:
        """Digest what a neighbour gets."""
        if action.type == self._type and action.op in self._sent:
            name = f"{action.op}/{action.micro_batch}"
            self._sent[action.op].append(tensor_digest(name, tensor).hex())
        if self._log is not None:
            self._log.sent(action, tensor)

    def completed(self, shard_type: int, mark: Mark | None) -> None:
        """All of a type was sent, and the type is complete."""
        if shard_type == self._type:
            self.account = Account(
                forward=tuple(self._sent[Op.SEND_F]),
                backward=tuple(self._sent[Op.SEND_B]),
                weights=self._describe(),
            )
        if self._log is not None:
            self._log.completed(shard_type, mark)


def name_told(*told: object) -> str:
    """Return a digest of what a rank tells of a type beside its gradient."""
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
