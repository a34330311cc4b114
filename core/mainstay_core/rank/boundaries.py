"""Describes how the members of lost stages compute their steps again from boundary logs.

Neighbouring lost stages form a *stretch* (MoEvement, arXiv 2412.15411, appendix A). What crossed
the two borders of a stretch is read from the logs of the stages beside it. What crosses a border
inside it is made anew: whoever replays a stage logs what it sends, as in any step, and the stage
beside it reads that from the log as soon as it is there. So a replay connects no group, and each
member of a lost position computes all shard types by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder, Holders, SegmentKey, SegmentKind
from mainstay_core.wire.votes import CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLoad:
    """A copy of one unit, loaded when the replay stands at the key's version.

    Of the kind STATE it makes the unit active from this version on. Of the kind COMPUTE it is what
    the unit computes with in the step at this version.
    """

    name: str
    """Model-wide name of the unit."""
    key: SegmentKey
    holders: Holders


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryStep:
    """One step that a position computes again."""

    record: CommitRecord
    """Its commit: the scale, and the digests that must come out once all units are active."""
    loads: tuple[UnitLoad, ...]
    """What is loaded before it is computed."""
    frozen: tuple[int, ...]
    """Units whose full state is not there yet, ascending: they run forward and input gradient, and
    skip weight gradient and apply."""
    inputs: tuple[tuple[SegmentKey, Holders], ...]
    """What came across the borders of the stretch, and who keeps it: activations and then input
    gradients, by type and micro-batch. None at an end of the pipeline or inside the stretch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The messages that cross a border inside the stretch, from a neighbour that replays, too."""

    position: int
    """The neighbour's."""
    kind: SegmentKind
    holders: Holders
    """By shard type the pod in whose store the neighbour's message appears, in this quorum. A
    reader asks there with the quorum's nonce, and waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReplay:
    """The steps that a member computes again to make its position's state anew."""

    position: int
    version: int
    """At which it is then."""
    stretch: Stretch
    window: Window
    """Over which the units become active: from its last version on all are."""
    steps: tuple[BoundaryStep, ...]
    """Ascending and unbroken, from the window's first version to the one before ``version``."""
    loads: tuple[UnitLoad, ...] = ()
    """What is loaded at ``version`` itself, after all steps."""
    relays: tuple[Relay, ...] = ()
    """At most two: from the stage before, and from the stage after."""
    next: CommitRecord | None = None
    """The commit of the step at ``version``, whose votes told the digest that the masters must
    have; None if no store has it."""

    @property
    def first_step(self) -> int:
        """Return the first step that is computed again; the version where none is."""
        return self.window.first


def logged_again(plan: Plan, index: int) -> tuple[int, ...]:
    """Return the shard types whose messages a member logs while it replays, ascending.

    Each member of its position replays all types; they share the logs evenly.

    Args:
        plan: that is adopted.
        index: of the member.
    """
    members = _writers(plan, plan.position_of(index))
    turn = [m.index for m in plan.position_members(plan.position_of(index))].index(index)
    return tuple(range(turn, len(plan.suppliers), len(members)))


def relay_holders(plan: Plan, position: int) -> Holders:
    """Return by shard type the pod whose store gets what a replaying position sends."""
    writers = _writers(plan, position)
    return tuple(writers[t % len(writers)] for t in range(len(plan.suppliers)))


def _writers(plan: Plan, position: int) -> Sequence[Holder]:
    addresses = {host.pod: host.snapshots for host in plan.hosts}
    return [
        Holder(pod=member.slot.pod, address=addresses.get(member.slot.pod, ""))
        for member in plan.positions[position]
    ]
