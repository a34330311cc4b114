"""Chooses the cells that guard what an end of the pipeline alone has: its embedding, or its head.

In a swapped pipeline the layers of an end can be made anew from its twin, the stage beside it. What
has no like block there cannot. Some cells of the twin guard it: they keep it with its optimizer's
state, get its reduced gradient in every step, and apply that by themselves. So it comes back bit
for bit. Blagoev et al. (section 4.3) send the weights, and lose the moments.

Who guards follows from a plan alone. Cells that have been members for longer go first: a cell that
joins takes no guard's place, unless it is in a failure domain that no guard is in yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.reinitialisation.likeness import like_blocks
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.reinitialisation import BlockOutline, Rule, StageOutline


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A cell that guards the blocks of an end, and who gives it their gradients."""

    end: int
    """Stage whose blocks it keeps."""
    index: int
    """Member that keeps them."""
    owner: int
    """Member of the end that gives it their reduced gradient: that of its own chain, if it has
    one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardGroup:
    """The owners and guards of an end, or of both ends, who send gradients to each other."""

    end: int
    """The first end that it is of."""
    members: tuple[int, ...]
    """Their indices, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardingCell:
    """A cell that has the copy of an end's blocks for sure: a step was committed with its vote."""

    end: int
    incarnation: Incarnation
    """Of its trainer."""
    quorum_id: int
    """In which the step was committed."""


def ends_of(num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return the ends of a pipeline with the stage beside each: (end, twin)."""
    return () if num_stages < 2 else ((0, 1), (num_stages - 1, num_stages - 2))


def guarded_blocks(stages: Sequence[StageOutline], end: int) -> tuple[str, ...]:
    """Return the names of an end's blocks that guards keep, in model order.

    These are all that have no like block in the twin, and those whose author wants a guard; none of
    a stage that is no end.

    Args:
        stages: the blocks of every stage.
        end: the stage.
    """
    twins = dict(ends_of(len(stages)))
    if end not in twins:
        return ()
    twin = stages[twins[end]]
    return tuple(block.name for block in stages[end] if _is_guarded(block, twin))


def _is_guarded(block: BlockOutline, twin: StageOutline) -> bool:
    if block.rule is Rule.NO:
        return False
    return block.rule is Rule.GUARD or not like_blocks(twin, block.kind)


def choose_cells(
    members: Sequence[Member], domains: Mapping[PodUid, str], number: int
) -> tuple[Member, ...]:
    """Return the cells of a stage that guard: in as many failure domains as there can be.

    Of each domain the oldest cell goes first, then the oldest others. Ties are broken by slot.

    Args:
        members: of the stage.
        domains: failure domain of each pod; a pod of which none is known is one by itself.
        number: of guards; fewer are chosen where there are fewer cells.
    """
    ordered = _by_age(members)
    first: dict[str, Member] = {}
    for member in ordered:
        first.setdefault(domains.get(member.slot.pod) or member.slot.pod, member)
    apart = {member.index for member in first.values()}
    return tuple([*first.values(), *(m for m in ordered if m.index not in apart)][:number])


def plan_guards(plan: Plan, stages: Sequence[StageOutline], number: int) -> tuple[Guard, ...]:
    """Return who guards under a plan, by end.

    Complexity: that of sorting the members of four stages.

    Args:
        plan: the membership.
        stages: the blocks of every stage; empty if nobody has told them.
        number: guards of each end.
    """
    if not number or len(stages) != plan.num_stages or plan.ranks_per_stage > 1:
        return ()
    domains = {host.pod: host.domain for host in plan.hosts}
    guards = []
    for end, twin in ends_of(plan.num_stages):
        if not guarded_blocks(stages, end):
            continue
        owners = [member.index for member in _by_age(plan.positions[end])]
        for turn, member in enumerate(choose_cells(plan.positions[twin], domains, number)):
            chain = plan.chain_of(member.index)
            owner = chain.cells[end] if chain is not None else owners[turn % len(owners)]
            guards.append(Guard(end=end, index=member.index, owner=owner))
    return tuple(guards)


def guard_groups(guards: Sequence[Guard]) -> dict[int, GuardGroup]:
    """Return the group of each end. Ends with a member in common share one, as in two stages.

    A group has a thread in each of its members. Gloo's wakes up a hundred times a second, whether
    anything is sent or not.

    Args:
        guards: of all ends.
    """
    members: dict[int, set[int]] = {}
    for guard in sorted(guards, key=lambda guard: guard.end):
        members.setdefault(guard.end, set()).update((guard.index, guard.owner))
    groups = {}
    for end, own in members.items():
        shared = [other for other, theirs in members.items() if theirs & own]
        together = set().union(*(members[other] for other in shared))
        groups[end] = GuardGroup(end=shared[0], members=tuple(sorted(together)))
    return groups


def _by_age(members: Sequence[Member]) -> list[Member]:
    return sorted(members, key=lambda m: (m.since, m.slot.pod, m.slot.index))
