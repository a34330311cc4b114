"""Describes a finding: two executions of one operator that differed, and what was done about it.

A trainer tells it to its supervisor as soon as the third execution was judged
(:mod:`mainstay_core.dmr.verdicts`), whether or not a recovery follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mainstay_core.base.bounds import Count, Index, Name, Sentence, TypeIndex, cut_fields
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import RankId, Slot
from mainstay_core.base.words import count
from mainstay_core.dmr.flips import Ordinal, OutputIndex
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Remedy, Verdict

_REMEDIES = {
    Remedy.NOTHING: "nothing had to be done",
    Remedy.REPAIR: "it was repaired before anybody read it",
    Remedy.VOID_TYPE: "the shard type is computed again",
    Remedy.REDUCE_AGAIN: "all cells reduce the gradient again",
    Remedy.OTHER_COPY: "the copy counts on which most replicas agree",
    Remedy.HAND_OVER: "the trainer ends, and all it holds of the step is void",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Two executions of one operator that differed, who was wrong, and what was done about it.

    Or something that came from another cell otherwise than it was sent.
    """

    step: Count
    slot: Slot
    """The accelerator that computed both."""
    rank: RankId | None = None
    """The place in the plan that the trainer had."""
    in_pass: Pass
    shard_type: TypeIndex | None = None
    """None of what is done once a step."""
    micro_batch: Index | None = None
    block: Name | None = None
    """Path of the block in the model; None of what belongs to no block."""
    ordinal: Ordinal
    """Place of the operator among those of its block and pass."""
    operator: Name
    """The kernel's name, e.g. ``aten.mm``."""
    output: OutputIndex = 0
    """The first output that differs."""
    num_elements: Count
    """Elements of it that differ; 0 where nobody has counted, as one of the two was there as a
    digest alone, or a device has compared them."""
    verdict: Verdict
    remedy: Remedy
    since: Count | None = field(default=None, metadata=OMITTED)
    """First step that a device which computes wrongly each time may have computed wrongly: the one
    after that in which a witness agreed with it last, or the first one of its trainer."""
    reason: Sentence
    """Why the verdict is what it is, for people."""

    def __post_init__(self) -> None:
        cut_fields(self, "reason")

    def describe(self, where: str = "") -> str:
        """Return the finding as one sentence for people.

        Args:
            where: the name of the slot; empty: its pod's uid and its number.
        """
        who = f"{self.rank} on {where or self.slot}" if self.rank else where or str(self.slot)
        if self.verdict in (Verdict.WIRE, Verdict.TRANSIENT, Verdict.DETERMINISTIC):
            tainted = "" if self.since is None else f"; its steps from {self.since} on are tainted"
            told = f"step {self.step} of {who}: {self.reason}"
            return f"{told}; {_REMEDIES[self.remedy]}{tainted}"
        elements = count(self.num_elements, "element") if self.num_elements else "their digests"
        if self.verdict is Verdict.UNDECIDED:
            elements = "some elements"
        output = f" of output {self.output}" if self.output else ""
        return (
            f"step {self.step} of {who}: two executions of {self.place} differ in "
            f"{elements}{output}; {self.reason}; {_REMEDIES[self.remedy]}"
        )

    @property
    def place(self) -> str:
        """Return which call it was: ``aten.mm (#4) in the forward pass of layers.3``."""
        block = f" of {self.block}" if self.block else ""
        return f"{self.operator} (#{self.ordinal}) in the {self.in_pass.value} pass{block}"
