"""Decides which of several operators leads, by a Lease in the cluster. Pure: times are arguments.

The rules are those of client-go's leader election. Whoever leads renews the Lease and stops to lead
when for ``renew_s`` no renewal has succeeded, counted from when the last one was *sent*. Whoever
waits takes the Lease over when it has not changed for the Lease's ``duration_s``, counted by its
own clock from when it *saw* the last change. No clock is compared with another one. As
``duration_s`` is longer than ``renew_s``, the one has stopped before the other begins, unless one
clock runs faster than the other by more than ``duration_s / renew_s``. Two who claim the Lease at
once do so from the same version of it, and the API server lets one of them.

A Lease that somebody deletes or empties is no end of its term: who has seen it waits as if it were
there, and its holder stops to lead. Only who comes in the moment in which there is none, or an
empty one, takes it at once, as it would a new one. Who held it ends its term by giving it back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

MAX_DURATION_S = 600.0
"""No holder may promise more: one that ended without a word would be waited for so long."""
RELEASED_S = 1
"""Term of a Lease that nobody holds; it must be more than 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTiming:
    """The timing of a Lease: how long it is good for, and how often it is renewed."""

    duration_s: float
    """Without a change for so long, others may take the Lease."""
    renew_s: float
    """Without a successful renewal for so long, the holder stops to lead."""
    retry_s: float
    """Between two renewals, and two looks of those who wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The content of a Lease. Its times are told to people and compared for equality alone."""

    holder: str = ""
    """Identity of the process that leads; empty: nobody does."""
    duration_s: float = RELEASED_S
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    """How often the Lease went from one holder to another."""
    version: str = ""
    """The version of the object: it is other after each change."""


class Step(enum.StrEnum):
    """One of three things that a candidate may do after a look at the Lease."""

    CLAIM = "claim"
    """Write its claim: take the Lease, or renew it."""
    WAIT = "wait"
    STOP = "stop"
    """It led, and leads no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The next step of a candidate, with its reason."""

    step: Step
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One process that would lead, and what it has seen of the Lease."""

    identity: str
    """No other process has it, not even the next one of the same pod."""
    timing: LeaseTiming
    seen: LeaseRecord | None = None
    """None until there was a Lease that somebody held or gave back."""
    is_gone: bool = True
    """Whether the last look found no Lease, or an empty one."""
    changed_at_s: float = -math.inf
    """Own clock when it was seen changed."""
    renewed_at_s: float | None = None
    """Own clock when the last claim that succeeded was sent; None before the first one."""

    def after_look(self, found: LeaseRecord | None, now_s: float) -> Candidate:
        """Return the candidate after it has read the Lease; None: there is none, or it is empty."""
        looked = replace(self, is_gone=found is None)
        if found is None or found == self.seen:
            return looked
        return replace(looked, seen=found, changed_at_s=now_s)

    def after_claim(self, written: LeaseRecord, sent_at_s: float) -> Candidate:
        """Return the candidate after its claim was written, that it sent at this time."""
        claimed = replace(self, seen=written, is_gone=False)
        return replace(claimed, changed_at_s=sent_at_s, renewed_at_s=sent_at_s)

    def left_s(self, now_s: float) -> float:
        """Return how long it leads without another renewal, in seconds; 0: it does not lead."""
        if self.renewed_at_s is None:
            return 0.0
        return max(0.0, self.renewed_at_s + self.timing.renew_s - now_s)

    def decide(self, now_s: float) -> Verdict:
        """Return what to do after a look at the Lease.

        Args:
            now_s: own clock, at any time after the look.
        """
        seen = self.seen
        if self.renewed_at_s is not None:
            if not self.left_s(now_s):
                why = f"the Lease could not be renewed for {self.timing.renew_s:g} s"
                return Verdict(step=Step.STOP, reason=why)
            if self.is_gone:
                return Verdict(step=Step.STOP, reason="the Lease was deleted or emptied")
            if seen is not None and seen.holder != self.identity:
                who = seen.holder or "nobody"
                return Verdict(step=Step.STOP, reason=f"the Lease was taken away: {who} has it")
            return Verdict(step=Step.CLAIM, reason="the Lease is to be renewed")
        if seen is None:
            return Verdict(step=Step.CLAIM, reason="nobody has had the Lease yet")
        if seen.holder in ("", self.identity):
            return Verdict(step=Step.CLAIM, reason="nobody else has the Lease")
        left_s = self.changed_at_s + min(seen.duration_s, MAX_DURATION_S) - now_s
        if left_s > 0:
            return Verdict(step=Step.WAIT, reason=f"{seen.holder} leads")
        return Verdict(
            step=Step.CLAIM,
            reason=f"{seen.holder} has not renewed the Lease for {seen.duration_s:g} s",
        )

    def claim(self, wall_s: float) -> LeaseRecord:
        """Return what its claim writes.

        Args:
            wall_s: wall clock, for people.
        """
        seen = self.seen or LeaseRecord()
        now, is_own = show_micro_time(wall_s), seen.holder == self.identity
        return LeaseRecord(
            holder=self.identity,
            duration_s=self.timing.duration_s,
            acquired=seen.acquired if is_own else now,
            renewed=now,
            transitions=seen.transitions + (not is_own and self.seen is not None),
        )

    def release(self, wall_s: float) -> LeaseRecord:
        """Return what it writes when it ends in good order: nobody has to wait for the term."""
        assert self.seen is not None
        now = show_micro_time(wall_s)
        return replace(self.seen, holder="", duration_s=RELEASED_S, renewed=now, version="")


def read_lease(body: Mapping[str, Any] | None) -> LeaseRecord | None:
    """Return the content of a Lease object; None of none, and of one that is empty.

    One that names no holder is empty, unless who held it gave it back (:meth:`Candidate.release`):
    it was never held, or somebody else has emptied it, whose holder may still lead.
    """
    if body is None:
        return None
    spec = body.get("spec") or {}
    record = LeaseRecord(
        holder=spec.get("holderIdentity") or "",
        duration_s=float(spec.get("leaseDurationSeconds") or RELEASED_S),
        acquired=spec.get("acquireTime") or "",
        renewed=spec.get("renewTime") or "",
        transitions=int(spec.get("leaseTransitions") or 0),
        version=body["metadata"].get("resourceVersion") or "",
    )
    is_given_back = record.duration_s == RELEASED_S and bool(record.acquired)
    return record if record.holder or is_given_back else None


def show_lease(record: LeaseRecord) -> dict[str, Any]:
    """Return the ``spec`` of a Lease object."""
    shown = {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": int(record.duration_s),
        "acquireTime": record.acquired,
        "renewTime": record.renewed,
        "leaseTransitions": record.transitions,
    }
    return {key: value for key, value in shown.items() if value != ""}


def show_micro_time(at_s: float) -> str:
    """Return a wall clock as a Lease has it: with microseconds."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def forbid_nothing() -> str:
    """Return that everything may be changed: there is no other operator."""
    return ""
