"""Decides which copies of guards count: of those that are left, and of those that a vote compares.

A copy is at the version of its cell's own state, or it is void. Votes compare it with what the
owners have, masters and a part of the rest, as they compare the cells of a stage. But what the
owners have counts, also against more guards: these got their copies and each gradient from them,
and are no witnesses of their own. Who may be wrong is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mainstay_core.base.ids import Slot
from mainstay_core.reinitialisation.guards import Guard, ends_of, guarded_blocks
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import StageOutline
from mainstay_core.wire.votes import GuardedDigest, SettleReport, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftGuards:
    """The copies of an end's blocks that count at the version at which all go on."""

    end: int
    stage: int
    """Of the guards."""
    members: tuple[int, ...]
    """That have one."""
    masters: str
    """Digest of the masters of all of these; "" if they have yet to apply the last step."""


def find_guards(
    plan: Plan, reports: Iterable[SettleReport], staying: Collection[int], rolling: Collection[int]
) -> tuple[LeftGuards, ...]:
    """Return the guards of each end whose copies count.

    Of copies that differ the most frequent counts. Without a majority none does: the owners that
    could say which is right may be lost. A member that has yet to apply the last step counts where
    nobody has the version already; such copies are compared as they are before that step.

    Args:
        plan: the quorum's plan.
        reports: of its members.
        staying: members that have the version.
        rolling: members that come to it by their mark.
    """
    twins, told = dict(ends_of(plan.num_stages)), list(reports)
    found = []
    for end, twin in twins.items():
        copies: dict[GuardedDigest, list[int]] = defaultdict(list)
        later: dict[GuardedDigest, list[int]] = defaultdict(list)
        for report in told:
            if plan.members[report.index].rank.stage != twin:
                continue
            for copy in report.guarded:
                if copy.stage == end and report.index in staying:
                    copies[copy].append(report.index)
                elif copy.stage == end and report.index in rolling:
                    later[copy].append(report.index)
        most = _most_frequent(copies or later)
        if most is not None:
            copy, members = most
            masters = copy.masters if copies else ""
            found.append(LeftGuards(end=end, stage=twin, members=members, masters=masters))
    return tuple(found)


def _most_frequent(
    copies: Mapping[GuardedDigest, Sequence[int]],
) -> tuple[GuardedDigest, tuple[int, ...]] | None:
    """Return the copy that most members have, and these; None if there is no such."""
    ranked = sorted(copies.items(), key=lambda item: len(item[1]), reverse=True)
    if not ranked or (len(ranked) > 1 and len(ranked[0][1]) == len(ranked[1][1])):
        return None
    copy, members = ranked[0]
    return copy, tuple(sorted(members))


def by_block(
    stages: Sequence[StageOutline], left: Iterable[LeftGuards]
) -> dict[tuple[str, int], int]:
    """Return the stage of a guard by (block, inner rank), for what the guards left keep."""
    return {(name, 0): one.stage for one in left for name in guarded_blocks(stages, one.end)}


def void_copies(
    plan: Plan, guards: Iterable[Guard], votes: Sequence[Vote], index: int
) -> tuple[int, ...]:
    """Return the ends whose copy at a member is not what the owners have, by all votes of a step.

    Args:
        plan: the quorum's plan.
        guards: under it.
        votes: by member index, of a step that is committed: the owners' masters agree.
        index: of the member.
    """
    void = []
    for guard in guards:
        if guard.index != index:
            continue
        mine = _told(votes[index], guard.end)
        owners = {_told(votes[m.index], guard.end) for m in plan.positions[guard.end]}
        if mine is not None and mine not in owners:
            void.append(guard.end)
    return tuple(void)


def undecided_members(
    plan: Plan, guards: Iterable[Guard], votes: Sequence[Vote], end: int
) -> frozenset[int]:
    """Return the members of which nobody knows who has the right copy of an end's blocks.

    They are owners and guards that differ, where those who have what the owners have are no more
    than those who have something else: one guard against the only owner, above all. Empty where
    all have the same, or where more agree with the owners.

    Args:
        plan: the quorum's plan.
        guards: under it.
        votes: by member index, of a step that is committed.
        end: its stage.
    """
    owners, groups = _told_alike(plan, guards, votes, end)
    theirs = max((len(group) for group in groups.values() if group & owners), default=0)
    others = [group for group in groups.values() if not group & owners]
    if not theirs or not others or theirs > max(map(len, others)):
        return frozenset()
    return frozenset().union(*groups.values())


def is_outnumbered(plan: Plan, guards: Iterable[Guard], votes: Sequence[Vote], end: int) -> bool:
    """Return whether more guards of an end agree with each other than it has owners.

    Then rather these are wrong: they alone, or they together with some guards that copied of them.
    What they have goes on to count all the same. Arguments are those of
    :func:`undecided_members`.
    """
    owners, groups = _told_alike(plan, guards, votes, end)
    others = [group for group in groups.values() if not group & owners]
    return max(map(len, others), default=0) > len(owners)


def _told_alike(
    plan: Plan, guards: Iterable[Guard], votes: Sequence[Vote], end: int
) -> tuple[frozenset[int], Mapping[GuardedDigest, set[int]]]:
    """Return an end's owners, and its owners and guards by what they tell of its blocks."""
    owners = frozenset(m.index for m in plan.positions[end])
    groups: dict[GuardedDigest, set[int]] = defaultdict(set)
    for index in sorted(owners | {guard.index for guard in guards if guard.end == end}):
        told = _told(votes[index], end)
        if told is not None:
            groups[told].add(index)
    return owners, groups


def rivals_of_copies(
    plan: Plan, guards: Sequence[Guard], votes: Sequence[Vote], index: int
) -> dict[int, tuple[Slot, ...]]:
    """Return by end who may be wrong instead of a member whose copy of it differs from others'.

    Of a guard's copy that is void it is nobody where more members agree with the owners. Owners are
    told of only where nobody knows who is wrong. Arguments likewise.
    """
    found = {}
    own = {guard.end for guard in guards} & {plan.members[index].rank.stage}
    void = void_copies(plan, guards, votes, index)
    for end in sorted({*void, *own}):
        unsure = undecided_members(plan, guards, votes, end)
        if end in void or index in unsure:
            found[end] = tuple(plan.members[i].slot for i in sorted(unsure) if i != index)
    return found


def _told(vote: Vote, end: int) -> GuardedDigest | None:
    return next((told for told in vote.guarded if told.stage == end), None)
