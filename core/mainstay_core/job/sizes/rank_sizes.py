"""Computes what each rank of a job holds in memory, and what it sends in a step.

Each line of :class:`RankSizes` has one function or property here. What a block takes comes from
``built_in_sizes``, or from a measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.job.config import BUCKET_BYTES
from mainstay_core.job.recompute import num_recomputed
from mainstay_core.job.sizes.block_sizes import BlockSizes, ModelSizes
from mainstay_core.job.sizes.llama_sizes import padded
from mainstay_core.job.sizes.reduction_sizes import owned_elements, reduction_bytes
from mainstay_core.job.stages import cut_blocks

WIDE_BYTES = 4
"""Masters, gradients and partials are fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """The work of one replica in a step."""

    replica: int
    num_types: int
    """Shard types that it computes."""
    num_partials: int
    """Buffers in which their gradients are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The way in which lost stages may be made anew from others."""

    averages_optimizer: bool
    """Whether the optimizer's state is copied with the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """The sizes of what one rank holds, and of what it sends in a step without a fault."""

    replica: int
    stage: int
    inner: int
    num_parameters: int
    parameters_bytes: int
    """Parameters that blocks compute with, where they are no masters: 0 in fp32."""
    masters_bytes: int
    moments_bytes: int
    gradients_bytes: int
    """The gradient being computed, the reduced one, and a scaled one of the largest block."""
    partials_bytes: int
    reduction_bytes: int
    """What the reduction packs, receives and adds up, with the order in which it packs."""
    activations_bytes: int
    """The most at any time of forward and backward: what waits for a backward, what was sent and
    the peer is not known to have, and what the block at hand takes to compute."""
    sent_pipeline_bytes: int
    """Activations and their gradients, to neighbouring stages in a step."""
    sent_reduction_bytes: int
    """Gradients, to the other cells of the stage in a step."""
    sent_inner_bytes: int
    """To the other ranks of the cell in a step; those of a ring."""
    guarded_bytes: int = 0
    """What it guards of an end of the pipeline, if it guards: parameters, moments, a gradient."""
    sent_guarded_bytes: int = 0
    """Gradients, to a guard of its own replica in a step."""
    making_bytes: int = 0
    """Copies of other stages' states that are held beside its own while it is made anew. That is
    before it computes, and no part of what it holds then."""

    @property
    def memory_bytes(self) -> int:
        """All that it holds."""
        return (
            self.parameters_bytes
            + self.masters_bytes
            + self.moments_bytes
            + self.gradients_bytes
            + self.partials_bytes
            + self.reduction_bytes
            + self.activations_bytes
            + self.guarded_bytes
        )

    @property
    def sent_bytes(self) -> int:
        """All that it sends in a step; votes and settle reports, some KiB, are left out."""
        to_others = self.sent_pipeline_bytes + self.sent_reduction_bytes + self.sent_inner_bytes
        return to_others + self.sent_guarded_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the lines and the sums."""
        return {**asdict(self), "memory_bytes": self.memory_bytes, "sent_bytes": self.sent_bytes}


def largest(ranks: Sequence[RankSizes]) -> RankSizes:
    """Return the most that any of the ranks has, line by line, under the place of the first.

    Args:
        ranks: at least one.
    """
    lines = [f.name for f in fields(RankSizes) if f.name not in ("replica", "stage", "inner")]
    most = {line: max(getattr(rank, line) for rank in ranks) for line in lines}
    return replace(ranks[0], **most)


def rank_sizes(
    model: ModelSizes,
    shape: JobShape,
    shares: Sequence[ReplicaShare],
    *,
    recompute: float,
    bucket_bytes: int = BUCKET_BYTES,
    replicas: Collection[int] | None = None,
    guards: int = 0,
    made: Made | None = None,
) -> tuple[RankSizes, ...]:
    """Return the sizes of all ranks with the model's inner index, by replica and stage.

    Args:
        model: what the blocks take on these ranks.
        shape: degrees of the job.
        shares: work of each replica; all of them are there.
        recompute: share of a stage's blocks whose forwards run again in the backward.
        bucket_bytes: what is reduced at a time.
        replicas: those whose ranks are computed; None: all.
        guards: of each end of the pipeline. Which cells these are is not known before: each that
            may guard is shown as if it does.
        made: how stages may be made anew; None: they may not.

    Raises:
        InvalidSpecError: there are more stages than blocks.
    """
    try:
        cuts = cut_blocks([block.cost for block in model.blocks], shape.stages, shape.cut)
    except ValueError as error:
        raise InvalidSpecError("spec.parallelism.stages", str(error)) from error
    stages = [
        StageSizes(model, cut, shape, number, recompute=recompute)
        for number, cut in enumerate(cuts)
    ]
    num_partials = [share.num_partials for share in shares]
    making = [_making_bytes(stages, number, guards, made) for number in range(len(stages))]
    return tuple(
        replace(
            with_guards(stage.rank(share, num_partials, bucket_bytes), model, shape.stages, guards),
            making_bytes=making[stage.number],
        )
        for share in shares
        if replicas is None or share.replica in replicas
        for stage in stages
    )


def _making_bytes(stages: Sequence[StageSizes], number: int, guards: int, made: Made | None) -> int:
    """Return the most that a stage's rank copies to be made anew, checkpoints of its own left out.

    An inner stage is made of both neighbours. An end that has its layers swapped with a twin is
    made of that, and of what guards have; another end is not made of others.

    Args:
        stages: of the model.
        number: of the stage.
        guards: of each end.
        made: how it may be made anew; None: it may not.
    """
    last = len(stages) - 1
    is_end = number in (0, last)
    if made is None or not last or (is_end and stages[number].shape.order is Order.IN_ORDER):
        return 0
    sources = [stages[n] for n in (number - 1, number + 1) if 0 <= n <= last]
    total = sum(
        _copy_bytes(stage.model, stage.blocks, whole=made.averages_optimizer) for stage in sources
    )
    if is_end and guards:
        own = stages[number]
        kept = own.blocks[0] if number == 0 else own.blocks[-1]
        total += _copy_bytes(own.model, [kept], whole=True)
    return total


def _copy_bytes(model: ModelSizes, blocks: Sequence[BlockSizes], *, whole: bool) -> int:
    """Return what a copy of blocks takes: masters, what is computed with, a scaled gradient."""
    sizes = [sum(map(padded, block.parameters)) for block in blocks]
    width = 0 if model.width_bytes == WIDE_BYTES else model.width_bytes
    moments = sum(block.moments_bytes for block in blocks) if whole else 0
    return sum(sizes) * (WIDE_BYTES + width) + max(sizes) * WIDE_BYTES + moments


def with_guards(rank: RankSizes, model: ModelSizes, num_stages: int, guards: int) -> RankSizes:
    """Return a rank's sizes with what it guards, and what it sends to a guard.

    The first block of the model, and the last one, are those that no other stage has.

    Args:
        rank: of a stage.
        model: what the blocks take.
        num_stages: of a replica.
        guards: of each end.
    """
    if not guards or num_stages < 2:
        return rank
    last = num_stages - 1
    ends = {0: (1, model.blocks[0]), last: (last - 1, model.blocks[-1])}
    kept = [block for twin, block in ends.values() if twin == rank.stage]
    sizes = [sum(map(padded, block.parameters)) for block in kept]
    width = 0 if model.width_bytes == WIDE_BYTES else model.width_bytes
    # Masters, the reduced gradient, and the scaled one of the larger block.
    flats = sum(sizes) * (2 * WIDE_BYTES + width) + sum(sizes) * WIDE_BYTES
    sent = sum(map(padded, ends[rank.stage][1].parameters)) if rank.stage in ends else 0
    return replace(
        rank,
        guarded_bytes=flats + sum(block.moments_bytes for block in kept),
        sent_guarded_bytes=sent * WIDE_BYTES,
    )


class StageSizes:
    """One stage of a model on one rank."""

    def __init__(
        self, model: ModelSizes, cut: range, shape: JobShape, number: int, *, recompute: float
    ) -> None:
        self.model, self.shape, self.number = model, shape, number
        self.blocks = [model.blocks[i] for i in cut]
        first = self.blocks[: num_recomputed(recompute, len(self.blocks))]
        self.again = [bool(block.output_bytes) for block in first]
        """Whether each block runs again. The loss comes just before its backward, so it never does;
        it has no output."""
        self.again += [False] * (len(self.blocks) - len(first))
        self.recompute = bool(first)
        self.sizes = [sum(map(padded, block.parameters)) for block in self.blocks]
        self.size = sum(self.sizes)
        """Elements of a flat buffer."""
        self.constant_bytes = _constants(model.blocks, cut)
        self.is_last = number == shape.stages - 1
        self.input_bytes = model.blocks[cut.start - 1].output_bytes if number else 0
        self.input_bytes = self.input_bytes or model.tokens_bytes

    def rank(
        self, share: ReplicaShare, num_partials: Sequence[int], bucket_bytes: int
    ) -> RankSizes:
        """Return the sizes of the stage's rank in one replica.

        Args:
            share: work of the replica.
            num_partials: of each cell of the stage.
            bucket_bytes: what is reduced at a time.
        """
        num_cells = len(num_partials)
        own = owned_elements(self.sizes, share.replica, num_cells, bucket_bytes)
        num_flows = share.num_types * self.shape.micro_batches
        width = self.model.width_bytes
        buffers = self.size * WIDE_BYTES
        scattered = share.num_partials * (self.size - own)
        gathered = own * (num_cells - 1)
        return RankSizes(
            replica=share.replica,
            stage=self.number,
            inner=self.model.inner,
            num_parameters=sum(sum(block.parameters) for block in self.blocks),
            parameters_bytes=0 if width == WIDE_BYTES else self.size * width,
            masters_bytes=buffers,
            moments_bytes=sum(block.moments_bytes for block in self.blocks),
            gradients_bytes=2 * buffers + max(self.sizes) * WIDE_BYTES,
            partials_bytes=share.num_partials * buffers,
            reduction_bytes=reduction_bytes(
                self.sizes,
                share.replica,
                num_partials,
                num_lanes=self.shape.lanes,
                bucket_bytes=bucket_bytes,
            ),
            activations_bytes=self.activations(num_flows),
            sent_pipeline_bytes=num_flows * (self.output_bytes + self.returned_bytes)
            if self.shape.order is Order.IN_ORDER
            else self._sent_swapped(num_flows),
            sent_reduction_bytes=WIDE_BYTES * (scattered + gathered),
            sent_inner_bytes=num_flows * sum(map(self._sent_inner, self.blocks, self.again)),
        )

    @property
    def output_bytes(self) -> int:
        """What a micro-batch sends to the next stage."""
        return 0 if self.is_last else self.blocks[-1].output_bytes

    @property
    def returned_bytes(self) -> int:
        """What a micro-batch sends back to the stage before."""
        return self.input_bytes if self.number else 0

    @staticmethod
    def _sent_inner(block: BlockSizes, again: bool) -> int:
        return (1 + again) * block.sent_forward_bytes + block.sent_backward_bytes

    def activations(self, num_flows: int) -> int:
        """Return the most bytes at any time of a step's forward and backward.

        1F1B has at most ``stages - stage`` micro-batches under way. What was sent stays until the
        peer is known to have it (:mod:`mainstay_core.planning.receipts`): an output until the first
        gradient comes that the peer sent later, and a gradient until two forwards later. So at most
        one gradient that was sent before stays beside the next forward and backward. Nothing has
        come before the first gradient: only then all outputs are there, and that gradient. While
        weights get their gradients, the input of the next forward may come already. After the last
        forward each backward lets go of more than it sends.

        Args:
            num_flows: micro-batches of the step.
        """
        if self.shape.order is not Order.IN_ORDER:
            return self._activations_swapped(num_flows)
        under_way = min(num_flows, self.shape.stages - self.number)
        waiting = (under_way - 1) * self.waiting_bytes
        # A gradient tells that the next stage has taken these outputs, which no tape keeps.
        taken = max(0, min(under_way - 1, self.shape.stages - self.number - 2))
        left = waiting - taken * self.again[-1] * self.output_bytes
        later = num_flows - under_way
        forward = max(*self.forward_peaks(), self.waiting_bytes + self.output_bytes)
        passing = max(forward, *self.backward_peaks()) + min(later, 1) * self.returned_bytes
        weights = max(self.weights_peaks()) + min(later, 2) * self.returned_bytes
        return self.constant_bytes + max(waiting + forward, left + max(passing, weights))

    def _activations_swapped(self, num_flows: int) -> int:
        """Return a bound on the bytes of a step whose micro-batches take several routes.

        Each of those under way holds what its forward kept, or what its weights' gradients wait
        with, and an activation that has come both ways. A second visit is to other blocks. Of what
        was sent no more stays than as many send.
        """
        under_way = min(num_flows, self.shape.flows_under_way(self.number))
        pending = self._passed_bytes + sum(block.pending_bytes for block in self.blocks)
        held = max(self.waiting_bytes, pending) + 2 * self.activation_bytes
        busiest = max(*self.forward_peaks(), *self.backward_peaks(), *self.weights_peaks())
        return self.constant_bytes + under_way * held + self._sent_swapped(under_way) + busiest

    def _sent_swapped(self, num_flows: int) -> int:
        """Return what micro-batches send: an end of the pipeline sends one, or on the other route
        three activations or gradients of them, and any other stage two.
        """
        return 2 * num_flows * self.activation_bytes

    @property
    def activation_bytes(self) -> int:
        """What crosses a stage's boundary in a micro-batch."""
        return self.model.blocks[0].output_bytes

    @property
    def _batch_bytes(self) -> int:
        """What a micro-batch brings besides the stage's input: the first stage has its targets as
        well, the last one its targets and, if it is another, its tokens.
        """
        if not self.number:
            return self.model.targets_bytes
        return self.model.tokens_bytes + self.model.targets_bytes if self.is_last else 0

    @property
    def _passed_bytes(self) -> int:
        """Input of the stage and outputs of its blocks, of one micro-batch."""
        return self._batch_bytes + self.input_bytes + sum(b.output_bytes for b in self.blocks)

    @property
    def waiting_bytes(self) -> int:
        """What a micro-batch holds between its forward and its backward."""
        return self._passed_bytes + sum(self._taped)

    @property
    def _taped(self) -> list[int]:
        """What each block keeps of a forward: nothing where it runs again."""
        return [
            0 if again else block.kept_bytes
            for block, again in zip(self.blocks, self.again, strict=True)
        ]

    def forward_peaks(self) -> list[int]:
        """The most while each block computes its forward."""
        now, peaks = self._batch_bytes + self.input_bytes, []
        for block, again, taped in zip(self.blocks, self.again, self._taped, strict=True):
            peaks.append(now + (block.plain_forward_bytes if again else block.forward_bytes))
            now += taped + block.output_bytes
        return peaks

    def backward_peaks(self) -> list[int]:
        """The most while each block computes its backward, and its forward again."""
        if self.recompute:
            return self._peaks_of_recompute()
        now = self._passed_bytes + sum(block.kept_bytes for block in self.blocks)
        peaks = []
        for block in reversed(self.blocks):
            now -= block.kept_bytes
            peaks.append(now + block.backward_bytes)
            now += block.pending_bytes
            if block is self.blocks[-1]:
                now -= self.output_bytes  # the next stage has it, and its gradient is used up
        return peaks

    def _peaks_of_recompute(self) -> list[int]:
        """One block at a time runs forward again and backward, and gets its weights' gradients.

        Then its input goes. The first block's weights wait until the stage's input gradient is
        on its way.
        """
        taped = self._taped
        # What was sent to the next stage is here no longer, unless a tape has kept it.
        now = self._passed_bytes + sum(taped) - self.again[-1] * self.output_bytes
        peaks = []
        for number in reversed(range(len(self.blocks))):
            block, again = self.blocks[number], self.again[number]
            # Its output is made again, while the output's gradient is there.
            peaks.append(now + again * (block.output_bytes + block.forward_bytes))
            now -= taped[number]
            peaks.append(now + again * block.output_bytes + block.backward_bytes)
            if number:
                below = self.blocks[number - 1].output_bytes
                peaks.append(now + below + block.weights_bytes)
                # A block that keeps what it saved keeps its output with that.
                now -= below * self.again[number - 1]
                now -= block.output_bytes * (not again)
        return peaks

    def weights_peaks(self) -> list[int]:
        """The most while each block's weights that had to wait get their gradients."""
        waiting = self.blocks[:1] if self.recompute else self.blocks
        now = self._passed_bytes + sum(block.pending_bytes for block in waiting)
        now += self.returned_bytes - self.output_bytes
        if self.recompute:
            now -= sum(block.output_bytes for block in self.blocks[:-1])
        peaks = []
        for block in waiting:
            peaks.append(now - block.pending_bytes + block.weights_bytes)
            now -= block.pending_bytes
        return peaks


def _constants(blocks: Sequence[BlockSizes], cut: range) -> int:
    """Return what a stage's blocks make once and keep.

    A block that made nothing in a process where a like one had run before uses what that one made.
    """
    made: dict[object, int] = {}
    for block in blocks:
        made.setdefault(block.sharers or block.parameters, block.constant_bytes)
    total, seen = 0, set()
    for block in (blocks[i] for i in cut):
        sharers = block.sharers or block.parameters
        shared = 0 if sharers in seen else made[sharers]
        total += block.constant_bytes or shared
        seen.add(sharers)
    return total


def even_shares(shape: JobShape) -> tuple[ReplicaShare, ...]:
    """Return the shares where each lane has a replica; else bounds of them.

    With fewer replicas than lanes the types of the others are spread evenly, and each may be a
    partial of its own.
    """
    num_types = -(-shape.num_types // shape.replicas)
    return tuple(
        ReplicaShare(
            replica=replica,
            num_types=num_types,
            num_partials=1 + num_types - shape.shards_per_lane,
        )
        for replica in range(shape.replicas)
    )
