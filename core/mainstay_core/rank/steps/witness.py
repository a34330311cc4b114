"""Has a second chain compute one type of a step, and says what its votes mean.

Who is witnessed by whom is a function of the step and the plan, so every rank knows it. The
witness computes the type behind its own list, tells of it in its vote, and drops it: its copy never
counts (:mod:`mainstay_core.dmr.witness` judges what is told).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mainstay_core.dmr.witness import Account, Ruling, Telling, Told, turn_of
from mainstay_core.rank.steps.doubts import account_of, cells_of, hardware_of, read_account
from mainstay_core.rank.steps.step_plan import Compared
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import Vote, WitnessAccount


def compared_in(plan: Plan, step: int, every_steps: int, shards_per_lane: int) -> Compared | None:
    """Return the type that two chains compute in a step, and by whom; None: there is none.

    It is the first of a lane, so no run begins with the witness's copy.
    """
    replicas = sorted(chain.replica for chain in plan.chains)
    turn = turn_of(step, every_steps, len(replicas))
    if turn is None:
        return None
    witnessed, witness = (replicas[place] for place in turn)
    firsts = range(0, len(plan.suppliers), shards_per_lane)
    own = [t for t in firsts if plan.suppliers[t] == witnessed]
    if not own:
        return None
    round_length = len(replicas) * (len(replicas) - 1)
    shard_type = own[(step // every_steps // round_length) % len(own)]
    return Compared(type=shard_type, replicas=(witnessed, witness))


def tellings(plan: Plan, compared: Compared, votes: Sequence[Vote]) -> dict[int, Telling]:
    """Return what the chains that computed a type tell of it, as far as all their cells do."""
    found: dict[int, Telling] = {}
    for chain in plan.chains:
        if chain.replica not in compared.replicas:
            continue
        told = [votes[index].witness for index in chain.cells]
        accounts = tuple(read_account(a) for a in told if a is not None and a.type == compared.type)
        if len(accounts) == len(told):
            found[chain.replica] = accounts
    return found


def told_in(plan: Plan, attempt: int, tellings: Mapping[int, Telling]) -> tuple[Told, ...]:
    """Return what chains tell in an attempt at a step, with the devices that computed it."""
    return tuple(
        Told(
            quorum=plan.quorum.id,
            attempt=attempt,
            replica=chain.replica,
            cells=cells_of(plan, chain),
            telling=tellings[chain.replica],
            hardware=hardware_of(plan, chain),
        )
        for chain in sorted(plan.chains, key=lambda c: c.replica)
        if chain.replica in tellings
    )


def counts(compared: Compared, told: Mapping[int, Telling], ruling: Ruling) -> bool:
    """Return whether the copy that went into the reduction is the one that was agreed on."""
    return ruling.agreed is not None and told.get(compared.replicas[0]) == ruling.agreed


def compared_again(
    plan: Plan, compared: Compared, told: Mapping[int, Telling], ruling: Ruling
) -> Compared:
    """Return by whom a type is computed again on which chains have disagreed.

    A third chain joins in, and its copy counts next. If that differs as well, one counts that most
    agree with.
    """
    others = [c.replica for c in sorted(plan.chains, key=lambda c: c.replica)]
    third = [replica for replica in others if replica not in compared.replicas]
    if len(compared.replicas) < 3 and third:
        return replace(compared, replicas=(third[0], *compared.replicas))
    values = [*told.values()]
    best = max(told, key=lambda r: (values.count(told[r]), -r), default=compared.replicas[0])
    if ruling.agreed is not None:
        best = min((r for r in told if told[r] == ruling.agreed), default=best)
    rest = (r for r in compared.replicas if r != best)
    return replace(compared, replicas=(best, *rest))


def has_insisted(plan: Plan, compared: Compared, told: Sequence[Told]) -> bool:
    """Return whether all chains that could compute a type again have done so twice already."""
    asked = [
        sum(one.cells == cells_of(plan, chain) for one in told)
        for chain in plan.chains
        if chain.replica in compared.replicas
    ]
    return min(asked, default=0) > 1


def vote_account(shard_type: int, account: Account | None) -> WitnessAccount | None:
    """Return what a rank tells of a type in its vote; None: it has not computed it."""
    return None if account is None else account_of(account, shard_type)
