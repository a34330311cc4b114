"""Digests everything that leaves a cell while it computes a type that other chains compute, too.

Votes tell the digests (:mod:`mainstay_core.dmr.witness`): where two chains differ first, a device
is wrong. It is a log of what is sent that stands before the step's own log, if there is one.
"""

from __future__ import annotations

import hashlib

import torch

from mainstay_core.dmr.witness import Account
from mainstay_core.planning.program import Action, Op
from mainstay_train.comm.chains import Mark
from mainstay_train.compute.boundaries import SentLog
from mainstay_train.compute.held import HeldTypes
from mainstay_train.exact.digests import tensor_digest
from mainstay_train.exact.gradients import GradientSums


class WatchedType:
    """A log of what leaves a cell while it computes one type.

    Args:
        shard_type: the type, the first one of a lane.
        types: where it is once it is complete.
        gradient: digests it.
        log: where all that is sent goes as well; None: nowhere.
    """

    def __init__(
        self, shard_type: int, types: HeldTypes, gradient: GradientSums, log: SentLog | None
    ) -> None:
        self._type, self._types, self._gradient, self._log = shard_type, types, gradient, log
        self._sent: dict[Op, list[str]] = {Op.SEND_F: [], Op.SEND_B: []}
        self._account: Account | None = None

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
            self._account = Account(
                forward=tuple(self._sent[Op.SEND_F]),
                backward=tuple(self._sent[Op.SEND_B]),
                weights=self._describe(),
            )
        if self._log is not None:
            self._log.completed(shard_type, mark)

    def account(self, shard_type: int) -> Account | None:
        """Return what left the cell; None: it has not completed that type."""
        return self._account if shard_type == self._type else None

    def _describe(self) -> tuple[str, str]:
        """Return digests of the gradient, and of what votes tell of the type."""
        held = self._types.store.partials
        (alone,) = (p for p in held if p.first == p.last == self._type)
        result = self._types.results[self._type]
        loss, counted = result.loss_sum, result.statistics
        told = (
            loss.item() if isinstance(loss, torch.Tensor) else loss,
            result.tokens,
            result.data,
            None if counted is None else counted.tolist(),
        )
        return (
            self._gradient.digest(held[alone]).hex(),
            hashlib.sha256(repr(told).encode()).hexdigest()[:32],
        )
