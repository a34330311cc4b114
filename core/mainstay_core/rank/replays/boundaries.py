"""Describes how the members of lost stages compute their steps again from boundary logs.

Neighbouring lost stages form a *stretch* (MoEvement, arXiv 2412.15411, appendix A). What crossed
the two borders of a stretch is read from the logs of the stages beside it. What crosses a border
inside it is made anew: whoever replays a stage logs what it sends, as in any step, and the stage
beside it reads that from the log as soon as it is there. So a replay connects no pipeline, and each
cell of a lost stage computes all shard types by itself.

The inner ranks of a cell compute with each other, in a replay as in any step. So all positions of a
lost stage are computed again, also those whose state somebody holds, by the cells that are chained:
a follower has no cell to compute with. One that needs the state copies it from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.reinitialisation import History
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
    """Units whose full state is not there yet, ascending: the step is not applied to them."""
    skipped: tuple[int, ...]
    """Units that run forward and input gradient, and skip their weight gradient, ascending: those
    that are frozen on all inner ranks of the stage. These compute the same operations in step."""
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
    history: History = ()
    """Forks that the state contains: learning rates of its steps follow from them."""

    @property
    def first_step(self) -> int:
        """Return the first step that is computed again; the version where none is."""
        return self.window.first

    @property
    def known(self) -> tuple[CommitRecord, ...]:
        """Return all commits that it names, by step."""
        ends = () if self.next is None else (self.next,)
        return (*(step.record for step in self.steps), *ends)


def replaying_members(plan: Plan, position: int) -> tuple[Member, ...]:
    """Return the members of a position of a stretch that compute its steps again, by index.

    Several inner ranks of a stage need the cell of a chain for that; a follower has none.
    """
    members = plan.positions[position]
    if plan.ranks_per_stage == 1:
        return members
    return tuple(member for member in members if plan.chain_of(member.index) is not None)


def logged_again(plan: Plan, index: int) -> tuple[int, ...]:
    """Return the shard types whose messages a member logs while it replays, ascending.

    Each replaying member of its position computes all types; they share the logs evenly.

    Args:
        plan: that is adopted.
        index: of the member.
    """
    members = [member.index for member in replaying_members(plan, plan.position_of(index))]
    return tuple(range(members.index(index), len(plan.suppliers), len(members)))


def relay_holders(plan: Plan, position: int) -> Holders:
    """Return by shard type the pod whose store gets what a replaying position sends."""
    writers = _writers(plan, position)
    return tuple(writers[t % len(writers)] for t in range(len(plan.suppliers)))


def _writers(plan: Plan, position: int) -> Sequence[Holder]:
    addresses = {host.pod: host.snapshots for host in plan.hosts}
    return [
        Holder(pod=member.slot.pod, address=addresses.get(member.slot.pod, ""))
        for member in replaying_members(plan, position)
    ]
