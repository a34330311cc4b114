"""Keeps a disagreement of chains on a type over a failure, until it is ruled on.

What chains have told of a type lives in votes. If a member is lost before a third chain has ruled,
the members settle, and each reports what it has heard of its position. So the words of a device
that is gone still count, and the type is computed again by others than those who disagree.

All here is a function of the reports, as the rest of the settle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mainstay_core.base.ids import Hardware, Slot
from mainstay_core.dmr.witness import MAX_TOLD, Account, Told, rule
from mainstay_core.rank.steps.step_plan import Compared, Maker, StepPlan, plan_step
from mainstay_core.wire.plan import Chain, Partial, Plan
from mainstay_core.wire.votes import DoubtedAccount, SettleReport, WitnessAccount

MOST_ASKED = 3
"""Chains that compute a doubted type at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A type on which chains have disagreed, or of which one alone has told."""

    type: int
    told: tuple[Told, ...]
    """What they have told, in the order in which they were asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A type that this rank's chain has computed beside others, and of which no vote has heard."""

    type: int
    quorum: int
    attempt: int
    replica: int
    hardware: Hardware | None = None
    """What this rank ran on then."""


def account_of(account: Account, shard_type: int) -> WitnessAccount:
    """Return an account as votes and reports tell it."""
    return WitnessAccount(
        type=shard_type,
        forward=account.forward,
        backward=account.backward,
        sent=account.sent,
        weights=account.weights,
        exchanged=account.exchanged,
        is_partial=account.is_partial,
    )


def read_account(told: WitnessAccount) -> Account:
    """Return the account that a vote or a report tells."""
    return Account(
        forward=told.forward,
        backward=told.backward,
        sent=told.sent,
        weights=told.weights,
        exchanged=told.exchanged,
        is_partial=told.is_partial,
    )


def doubted_of(
    told: Sequence[Told], shard_type: int | None, position: int
) -> tuple[DoubtedAccount, ...]:
    """Return what a rank reports of earlier accounts: those of its position."""
    if shard_type is None:
        return ()
    return tuple(
        DoubtedAccount(
            quorum=one.quorum,
            attempt=one.attempt,
            replica=one.replica,
            slot=one.cells[position],
            account=account_of(one.telling[position], shard_type),
            hardware=one.hardware[position] if one.hardware else None,
        )
        for one in told
    )


def unheard(
    watched: Watched | None, slot: Slot, account_of_type: Callable[[int], Account | None]
) -> tuple[DoubtedAccount, ...]:
    """Return what a rank reports of a type of which no vote has heard: its own account, if any.

    Args:
        watched: the type, if there is one.
        slot: of the rank.
        account_of_type: returns what left the rank while it computed a type, if that was kept.
    """
    account = None if watched is None else account_of_type(watched.type)
    if watched is None or account is None:
        return ()
    own = DoubtedAccount(
        quorum=watched.quorum,
        attempt=watched.attempt,
        replica=watched.replica,
        slot=slot,
        account=account_of(account, watched.type),
        hardware=watched.hardware,
    )
    return (own,)


def find_doubt(plan: Plan, reports: Sequence[SettleReport], staying: Sequence[int]) -> Doubt | None:
    """Return the type that is in doubt in the settled step; None if there is none.

    Args:
        plan: the plan being adopted.
        reports: by member index.
        staying: indices of the members that were there already, with what they have heard.
    """
    return open_doubt(plan, [reports[i] for i in staying])


def plan_settled_step(
    plan: Plan,
    shards_per_lane: int,
    reports: Sequence[SettleReport],
    version: int,
    held: Mapping[int, tuple[Partial, ...]],
    healing: Sequence[int],
    doubt: Doubt | None,
) -> StepPlan:
    """Return the work of the settled step.

    Args:
        plan: the plan being adopted.
        shards_per_lane: types of a lane.
        reports: by member index.
        version: at which all go on.
        held: what counts of what members hold, by their index.
        healing: member indices that are still receiving their state.
        doubt: what chains have disagreed on.
    """
    bad = _bad_types(reports, version)
    return plan_step(
        plan,
        shards_per_lane,
        held,
        healing,
        makers={r.index: {m.type: Maker(m.quorum, m.replica) for m in r.made} for r in reports},
        bad=bad if doubt is None else {*bad, doubt.type},
        compared=None if doubt is None else compared_of(plan, doubt, healing),
        insists=True,
    )


def _bad_types(reports: Iterable[SettleReport], version: int) -> set[int]:
    return {t for r in reports if r.version == version for t in r.bad}


def open_doubt(plan: Plan, reports: Iterable[SettleReport]) -> Doubt | None:
    """Return the type on which chains disagree, or of which one alone has told; None if none is.

    Of a type that one chain has computed while the other was lost, nobody has compared anything. So
    it is computed again as well, by others too. So is one on which most agree by now: no vote has
    looked at the copy that is held, and whoever was wrong may have made it.

    Of a type that votes have called wrong what was told may be there of some positions only; then
    it is computed like any other.

    Args:
        plan: the plan being adopted.
        reports: of the members that stay at the settled version.
    """
    found: dict[int, dict[tuple[int, int, int], dict[int, DoubtedAccount]]] = {}
    for report in sorted(reports, key=lambda r: r.index):
        position = plan.position_of(report.index)
        for doubted in report.doubted:
            asked = (doubted.quorum, doubted.attempt, doubted.replica)
            cells = found.setdefault(doubted.account.type, {}).setdefault(asked, {})
            cells.setdefault(position, doubted)
    num_positions = len(plan.positions)
    for shard_type in sorted(found):
        told = tuple(
            _told(asked, cells)
            for asked, cells in sorted(found[shard_type].items())
            if len(cells) == num_positions
        )
        if shard_type >= len(plan.suppliers) or not told:
            continue
        ruling = rule(told, plan.ranks_per_stage, slots_of(plan))
        is_compared = len(told) > 1 and ruling.agreed is not None
        if not is_compared or len({t.telling for t in told}) > 1:
            return Doubt(type=shard_type, told=told[-MAX_TOLD:])
    return None


def _told(asked: tuple[int, int, int], cells: Mapping[int, DoubtedAccount]) -> Told:
    ordered = [cells[position] for position in sorted(cells)]
    quorum, attempt, replica = asked
    return Told(
        quorum=quorum,
        attempt=attempt,
        replica=replica,
        cells=tuple(doubted.slot for doubted in ordered),
        telling=tuple(read_account(doubted.account) for doubted in ordered),
        hardware=tuple(doubted.hardware for doubted in ordered),
    )


def compared_of(plan: Plan, doubt: Doubt, healing: Iterable[int] = ()) -> Compared:
    """Return by whom a doubted type is computed: by one chain more than those who have told of it.

    The first one's copy counts: where all have told, that of one that told what most agree on. A
    chain with a cell that heals is none of those if there is another: it computes when that is
    done.

    Args:
        plan: the plan being adopted.
        doubt: what was told so far.
        healing: member indices that are still receiving their state.
    """
    unfit, asked = frozenset(healing), {told.cells for told in doubt.told}
    chains = sorted(plan.chains, key=lambda chain: chain.replica)
    fresh = [chain for chain in chains if cells_of(plan, chain) not in asked]
    agreed = rule(doubt.told, plan.ranks_per_stage, slots_of(plan)).agreed
    right = {told.cells for told in doubt.told if told.telling == agreed}
    known = [chain for chain in chains if cells_of(plan, chain) in asked]
    known.sort(key=lambda chain: cells_of(plan, chain) not in right)
    chosen = [*fresh[:1], *known, *fresh[1:]][:MOST_ASKED]
    first = [chain for chain in chosen if not unfit.intersection(chain.cells)]
    rest = [chain for chain in chosen if unfit.intersection(chain.cells)]
    return Compared(type=doubt.type, replicas=tuple(c.replica for c in (*first, *rest)))


def slots_of(plan: Plan) -> tuple[Slot, ...]:
    """Return the slots of all members, also of those that are in no chain."""
    return tuple(member.slot for member in plan.members)


def cells_of(plan: Plan, chain: Chain) -> tuple[Slot, ...]:
    """Return the devices of a chain, by position."""
    return tuple(plan.members[index].slot for index in chain.cells)


def hardware_of(plan: Plan, chain: Chain) -> tuple[Hardware | None, ...]:
    """Return what the devices of a chain run on, by position."""
    return tuple(plan.members[index].hardware for index in chain.cells)
