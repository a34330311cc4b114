"""Logs what a stage gives its neighbours, so that these can compute their steps again.

The activations and input gradients that cross a stage's boundaries are kept by their sender
(MoEvement, arXiv 2412.15411, section 3.4). Nothing of a step waits for that until its vote: the
tensor that is sent is copied in the background, on a device by a stream of its own. It stays where
it is meanwhile, and its bits and the order of the step are what they are without a log.

What is logged of a type counts as soon as the type is complete. So nothing is kept of a type that
the chain's end has cut off: whoever computes it again logs it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch

from mainstay_core.planning.program import Action, Op
from mainstay_core.segments import frames
from mainstay_core.wire.segments import SegmentKey, SegmentKind, boundary_key
from mainstay_train.base import device as devices
from mainstay_train.base.background import Background
from mainstay_train.base.device import Copied
from mainstay_train.comm.chains import Mark
from mainstay_train.snapshots.writer import Place, SegmentWriter
from mainstay_train.state.rooms import StoreFull
from mainstay_train.state.segments import SegmentClient
from mainstay_train.state.store_connection import StoreGone
from mainstay_train.sums import digests

logger = logging.getLogger(__name__)

KINDS = {
    Op.SEND_F: SegmentKind.ACTIVATION,
    Op.WRITE_F: SegmentKind.ACTIVATION,
    Op.SEND_B: SegmentKind.INPUT_GRADIENT,
    Op.WRITE_B: SegmentKind.INPUT_GRADIENT,
}
"""What is logged of each action that sends."""


def kinds_of(stage: int, num_stages: int) -> tuple[SegmentKind, ...]:
    """Return what a stage gives its neighbours."""
    forward = (SegmentKind.ACTIVATION,) if stage < num_stages - 1 else ()
    return forward + ((SegmentKind.INPUT_GRADIENT,) if stage > 0 else ())


def flow_digest(key: SegmentKey, tensor: torch.Tensor) -> str:
    """Return the digest of what was sent, which no other micro-batch's has."""
    flow = f"{key.kind}:{key.position}:{key.version}:{key.shard_type}:{key.micro_batch}"
    return digests.tensor_digest(flow, tensor.reshape(-1)).hex()


@dataclass(frozen=True, slots=True)
class _Flow:
    """A tensor that was sent, as the content of a segment."""

    key: SegmentKey
    copied: Copied
    name: str

    @property
    def size_bytes(self) -> int:
        tensor = self.copied.tensor
        return tensor.numel() * tensor.element_size()

    def write(self, memory: memoryview) -> None:
        self.copied.wait()
        flat = self.copied.tensor.reshape(-1).view(torch.uint8)
        torch.frombuffer(memory, dtype=torch.uint8).copy_(flat)

    def digest(self, memory: memoryview) -> str:
        return flow_digest(self.key, torch.frombuffer(memory, dtype=self.copied.tensor.dtype))


class SentLogs:
    """The boundary logs of one trainer.

    Args:
        client: of the store of this trainer's pod.
        writer: of segments there.
    """

    def __init__(self, client: SegmentClient, writer: SegmentWriter) -> None:
        self._client, self._writer = client, writer
        self._worker = Background("boundary log")
        self._copies = devices.HostCopies()
        self.problem = ""
        """Why something of the step at hand, or of the replay at hand, is not kept."""
        self.on_problem: Callable[[], None] | None = None
        """Called when there is one, in the background."""

    def begin_replay(self) -> None:
        """Forget what was wrong before."""
        self._worker.wait_idle()
        self.problem = ""

    def of_step(self, place: Place, step: int, at_once: Collection[int] | None = None) -> StepLog:
        """Return what takes the tensors of a step, once those of the one before are written.

        So no more than one step's tensors wait here, however slow the store is: neither while a
        step is tried again and again before its vote, nor in a replay of many steps.

        Args:
            place: this trainer's, as the plan says.
            step: at hand.
            at_once: in a replay the types that are kept, each tensor as soon as it is there; None:
                all types are, once they are complete.
        """
        self._worker.wait_idle()
        if at_once is None:
            self.problem = ""
        return StepLog(self, place, step, at_once)

    def copy(self, tensor: torch.Tensor) -> Copied:
        """Begin to copy a tensor to the host."""
        return self._copies.begin(tensor)

    def keep(
        self, place: Place, flows: Sequence[_Flow], mark: Mark | None, *, again: bool = False
    ) -> None:
        """Give tensors to the store, in the background.

        Args:
            place: this trainer's.
            flows: that were sent.
            mark: says whether they count; None: they do.
            again: whether a replay sends them, so that the store may have the same bytes.
        """
        self._worker.submit(lambda: self._keep(place, flows, mark, again))

    def _keep(self, place: Place, flows: Sequence[_Flow], mark: Mark | None, again: bool) -> None:
        if mark is not None:
            mark.moment.wait()
        for flow in flows:
            # The chain's end says of what the device had not done by then that it does not count.
            if mark is None or mark.counts is not False:
                self._give(place, flow, again)
            flow.copied.release()

    def _give(self, place: Place, flow: _Flow, again: bool) -> None:
        """Give a tensor to the store. What that has of an earlier attempt counts no more.

        A type that a later attempt does not compute again is voted on by what lies under its keys:
        what was sent last must lie there, or nothing. What a replay sends again has been voted on:
        if there is no room for it, what lies there stays, and what others read does not go for it.
        """
        try:
            if not self.problem:
                self._writer.write(place, flow.key, flow, (), may_evict=not again)
                return
        except (StoreFull, StoreGone) as error:
            self.problem = str(error)
            if (told := self.on_problem) is not None:
                told()
        if again:
            return
        with suppress(StoreGone):  # what it kept has gone with it
            self._client.withdraw(flow.key)

    def withdraw(
        self,
        place: Place,
        step: int,
        kinds: Sequence[SegmentKind],
        types: Sequence[int],
        micro_batches: int,
    ) -> None:
        """Have the store keep nothing of some types any more.

        Args:
            place: this trainer's.
            step: to which the logs belong.
            kinds: what this stage sends.
            types: shard types.
            micro_batches: of each type.
        """
        self._worker.wait_idle()
        with suppress(StoreGone):  # what it kept has gone with it
            for kind, shard_type, number in product(kinds, types, range(micro_batches)):
                at = place.lineage, place.position, kind, step, shard_type, number
                self._client.withdraw(boundary_key(*at))

    def settle(
        self,
        place: Place,
        step: int,
        quorum: str,
        kinds: Sequence[SegmentKind],
        types: Sequence[int],
        micro_batches: int,
    ) -> str:
        """Have what was logged of some types count for a step.

        Args:
            place: this trainer's.
            step: to which the logs belong.
            quorum: in which its votes were, or are about to be, cast.
            kinds: what this stage sends.
            types: shard types that this trainer gives to the step.
            micro_batches: of each type.

        Returns:
            Why they do not; empty if they do.
        """
        self._worker.wait_idle()
        if self.problem:
            return self.problem
        if not kinds or not types:
            return ""
        try:
            voted = frames.VotedLogs(
                request=0,
                lineage=place.lineage,
                position=place.position,
                step=step,
                quorum=quorum,
                kinds=tuple(kinds),
                types=tuple(types),
                micro_batches=micro_batches,
            )
            return self._client.voted_logs(voted)
        except StoreGone as error:
            return str(error)


class StepLog:
    """Takes the tensors that this trainer sends in a step; arguments are those of ``of_step``."""

    def __init__(
        self, logs: SentLogs, place: Place, step: int, at_once: Collection[int] | None
    ) -> None:
        self._logs, self._place, self._step, self._at_once = logs, place, step, at_once
        self._flows: dict[int, list[_Flow]] = {}
        """Of types that are not complete."""

    def sent(self, action: Action, tensor: torch.Tensor) -> None:
        """Keep what a neighbour gets in an action; nobody writes to the tensor any more."""
        if self._at_once is not None and action.type not in self._at_once:
            return
        kind, place = KINDS[action.op], self._place
        key = boundary_key(
            place.lineage, place.position, kind, self._step, action.type, action.micro_batch
        )
        flow = _Flow(key, self._logs.copy(tensor.detach()), f"{kind}s of position {place.position}")
        if self._at_once is None:
            self._flows.setdefault(action.type, []).append(flow)
        else:
            self._logs.keep(place, [flow], None, again=True)

    def completed(self, shard_type: int, mark: Mark | None) -> None:
        """All of a type was sent, and the type is complete; see the interpreter."""
        flows = self._flows.pop(shard_type, [])
        if flows:
            self._logs.keep(self._place, flows, mark)
