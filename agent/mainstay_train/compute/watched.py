"""Digests everything that leaves a cell while it computes a type that other chains compute, too.

Votes tell the digests (:mod:`mainstay_core.dmr.witness`): where two chains differ first, a device
is wrong. It is a log of what is sent that stands before the step's own log, if there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.base.shape import Order
from mainstay_core.dmr.accounts import make_account
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.witness import Account, Exchanged, Sent
from mainstay_core.planning.program import Action, Op
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.comm.chains import Mark
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.compute.boundaries import SentLog
from mainstay_train.compute.held import HeldTypes
from mainstay_train.exact.gradients import GradientSums
from mainstay_train.sums.digests import tensor_digest

MOST_EXCHANGES = 4096
"""Collectives of a type of which a rank tells. With more of them a whole cell is suspected where
one of its ranks was wrong."""
_PASS_OF = {Op.SEND_F: Pass.FORWARD, Op.SEND_B: Pass.BACKWARD}


class WatchedType:
    """A log of what leaves a cell while it computes one type.

    Args:
        shard_type: the type, the first one of a lane.
        types: where it is once it is complete.
        gradient: digests it.
        log: where all that is sent goes as well; None: nowhere.
        checks: of the rank, which see the collectives of its cell.
        inner: this rank's place in its cell.
        order: in which micro-batches pass the stages.
    """

    def __init__(
        self,
        shard_type: int,
        types: HeldTypes,
        gradient: GradientSums,
        log: SentLog | None,
        checks: Checks,
        inner: InnerMesh,
        order: Order = Order.IN_ORDER,
    ) -> None:
        self._in_order = order is Order.IN_ORDER
        self.shard_type, self._types, self._gradient, self._log = shard_type, types, gradient, log
        self._checks, self._num_exchanged = checks, 0
        self._own = f"made/{inner.index}"
        """Name of what this rank alone gets: equal parts of two ranks must not look the same."""
        self._is_partial = inner.size > 1 and not checks.shows_kernels
        if inner.size > 1 and checks.shows_kernels:
            checks.hears = self
        self._exchanged: dict[tuple[int, int | None, Pass], list[tuple[int, str, str]]] = {}
        """By micro-batch, visit and pass: its block, what was given, and what was got."""
        self._sent: list[Sent] = []
        self._account: Account | None = None

    def sent(self, action: Action, tensor: torch.Tensor) -> None:
        """Digest what a neighbour gets."""
        if action.type == self.shard_type and action.op in _PASS_OF:
            digest = tensor_digest(f"{action.op}/{action.micro_batch}", tensor).hex()
            place = {"micro_batch": action.micro_batch, "visit": action.visit}
            self._sent.append(Sent(in_pass=_PASS_OF[action.op], digest=digest, **place))
        if self._log is not None:
            self._log.sent(action, tensor)

    def exchanged(
        self, place: Place, given: Sequence[torch.Tensor], made: torch.Tensor, *, is_shared: bool
    ) -> None:
        """Digest what this rank gave to a collective of its cell, and what it got."""
        self._num_exchanged += 1
        if self._num_exchanged > MOST_EXCHANGES:
            self.missed()
            return
        assert place.micro_batch is not None
        is_forward = place.phase is Phase.FORWARD
        in_pass = Pass.FORWARD if is_forward else Pass.BACKWARD  # with what is recomputed there
        # When weights follow, and which first, depends on what else a chain computes.
        in_pass = Pass.WEIGHT if place.in_pass is Pass.WEIGHT else in_pass
        block = place.block if in_pass is Pass.WEIGHT and place.block is not None else 0
        visit = None if self._in_order else place.visit
        parts = (tensor_digest(f"given/{n}", tensor) for n, tensor in enumerate(given))
        in_all = sum(parts, Digest.zero()).hex()
        got = tensor_digest("made" if is_shared else self._own, made).hex()
        told = self._exchanged.setdefault((place.micro_batch, visit, in_pass), [])
        told.append((block, in_all, got))

    def missed(self) -> None:
        """Note a collective of which nothing is told: nobody can say then on whom it depends."""
        self._is_partial = True

    def completed(self, shard_type: int, mark: Mark | None) -> None:
        """All of a type was sent, and the type is complete."""
        if shard_type == self.shard_type:
            self._checks.hears = None
            exchanged = []
            for (micro_batch, visit, in_pass), told in self._exchanged.items():
                told.sort(key=lambda one: one[0])
                _, given, made = zip(*told, strict=True)
                one = Exchanged(in_pass=in_pass, micro_batch=micro_batch, given=given, made=made)
                exchanged.append(replace(one, visit=visit))
            self._account = make_account(
                self._sent,
                exchanged,
                self._describe(),
                in_order=self._in_order,
                is_partial=self._is_partial,
            )
        if self._log is not None:
            self._log.completed(shard_type, mark)

    def account(self, shard_type: int) -> Account | None:
        """Return what left the cell; None: it has not completed that type."""
        return self._account if shard_type == self.shard_type else None

    def _describe(self) -> tuple[str, str]:
        """Return digests of the gradient, and of what votes tell of the type."""
        held = self._types.store.partials
        (alone,) = (p for p in held if p.first == p.last == self.shard_type)
        result = self._types.results[self.shard_type]
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
