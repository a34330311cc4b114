"""Describes steps that a device may have computed wrongly, as the control plane tells of them."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.bounds import Count, Name
from mainstay_core.base.ids import Slot

MAX_TAINTS = 64
"""Devices of which a job tells; the oldest go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """Steps that are tainted: a device of theirs was named, as it computes wrongly each time.

    Only what a witness compares is right for sure. So all of these steps may be wrong.
    """

    slot: Slot
    """The device."""
    trainer: Name
    """Its name for people: pod and slot."""
    since: Count
    """First tainted step: the one after that in which a witness agreed with the device last."""
    named_in: Count
    """Step in which it was named."""
    until: Count | None = None
    """First step in which it took no part any more; None: it is still a member."""
    is_due: bool = False
    """Whether the job is to go back before them, once it can do without the device."""
    undone_in: Name = ""
    """Quorum with which the job went back before them; empty: they count."""

    @property
    def counts(self) -> bool:
        """Whether the job's states contain these steps."""
        return not self.undone_in

    def describe(self) -> str:
        """Return the steps and whose they are, as one sentence."""
        last = "on" if self.until is None else f"to {max(self.until - 1, self.since)}"
        device = f"the device of {self.trainer}, named in step {self.named_in}, computes wrongly"
        if self.undone_in:
            return (
                f"steps from {self.since} on were tainted, as {device}; {self.undone_in} went back "
                "before them"
            )
        return f"steps from {self.since} {last} are tainted: {device}"
