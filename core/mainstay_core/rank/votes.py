"""Judges all votes of a step: whether it is committed, and what else they say together.

Every rank reads the same votes and comes to the same verdict, so the certificate of a step needs no
coordinator (protocol sections 4 and 5). Clipping by the global norm needs this exchange anyway.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mainstay_core.base.digest import Digest
from mainstay_core.base.ids import Slot
from mainstay_core.base.sums import add_in_order
from mainstay_core.rank.saving.saves import Saves, judge_saves
from mainstay_core.rank.settle import StateAction
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import Commit, SettleReport, Vote

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as ``torch.nn.utils.clip_grad_norm_`` does."""


PARAMETERS = "parameters"
BESIDE_THEM = "the optimizer's moments, or the weights that are computed with,"
"""The parts of a state, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a full set of votes. It is equal on every rank."""

    commit: Commit | None
    """The certificate; None when the step is not applied."""
    state_bad: tuple[int, ...]
    """Members whose state differs from the majority of their position. Without a majority these are
    all: the state before is gone, so nobody can say who is right, and all go on from an older one.
    """
    hopeless: bool
    """Whether trying again cannot help, as the same inputs give the same answer."""
    adopt_planned: bool
    """Whether all members have seen the same newer planned plan, and adopt it at this boundary."""
    saves: Saves
    """The state of durable checkpoints, whether or not the step is applied."""
    reason: str
    bad: tuple[int, ...] = ()
    """Shard types that some member calls wrong: all copies are void."""
    bad_chains: tuple[int, ...] = ()
    """Replicas whose cells do so."""
    undecided: bool = False
    """Whether some position has no majority: then no copy of it can be believed, all are void, and
    the members go on from an older version."""
    doubted: tuple[Slot, ...] = ()
    """Devices that have computed a type differently, again and again, between which nobody here can
    decide: a further device has to compute it."""
    differing: tuple[Slot, ...] = ()
    """Slots of the members of ``state_bad``. Empty when a position has no majority: then no member
    of it can be believed."""


def judge(plan: Plan, votes: Sequence[Vote], clip_norm: float | None, data_total: str) -> Verdict:
    """Return the verdict on the votes of all members, in member order.

    Args:
        plan: the quorum's plan.
        votes: by member index.
        clip_norm: global L2 norm to clip to; None does not clip.
        data_total: digest of all samples before this step ("" for none).
    """
    # Joined, as both are of one state: whoever differs in either of them has a bad one.
    states = {i: f"{v.state} {v.rest}" for i, v in enumerate(votes)}
    state_bad = _state_bad(plan, states)
    problems = [f"member {i}: {v.problem}" for i, v in enumerate(votes) if v.problem]
    problems += [_name_types(plan, i, v.bad) for i, v in enumerate(votes) if v.bad]
    problems += [
        f"member {i} says no" for i, v in enumerate(votes) if not (v.ok or v.problem or v.bad)
    ]
    problems += _disagreements(plan, votes)
    adopt = len({(v.newest_plan, v.newest_nonce) for v in votes}) == 1 and (
        votes[0].newest_plan > plan.quorum.id
    )
    commit, hopeless = None, False
    if not problems and not state_bad:
        commit = _commit(plan, votes, clip_norm, data_total)
        if not (math.isfinite(commit.norm) and math.isfinite(commit.scale)):
            problems = [_hopeless(commit)]
            commit, hopeless = None, True
    if state_bad:
        masters = _state_bad(plan, {i: v.state for i, v in enumerate(votes)})
        what = PARAMETERS if masters else BESIDE_THEM
        problems.append(_name_bad(plan, state_bad, what))
    return Verdict(
        commit=commit,
        state_bad=state_bad,
        hopeless=hopeless,
        adopt_planned=adopt,
        saves=_certified(judge_saves(plan, votes), votes[0].step, state_bad),
        reason="; ".join(problems) or "all votes say yes",
        bad=tuple(sorted({t for v in votes for t in v.bad if t < len(plan.suppliers)})),
        bad_chains=_chains_of(plan, [i for i, v in enumerate(votes) if v.bad]),
        differing=_differing(plan, states, state_bad),
        undecided=_undecided(plan, states, state_bad),
    )


def judge_reports(
    plan: Plan, reports: Iterable[SettleReport], actions: Sequence[StateAction]
) -> Verdict:
    """Return the verdict on the states that a settle goes on from.

    Copies at the settled version are compared. A member that rolls forward to it has no digest of
    it yet: where copies differ and none has a majority beside such a member, the next vote decides.

    Args:
        plan: the quorum's plan.
        reports: one per member.
        actions: of the settle, by member index.
    """
    states = {r.index: r.state for r in reports if actions[r.index] is StateAction.STAY}
    rolling = [i for i, action in enumerate(actions) if action is StateAction.ROLL]
    return judge_states(plan, states, rolling)


def judge_states(plan: Plan, states: Mapping[int, str], pending: Collection[int] = ()) -> Verdict:
    """Return the verdict on the digests of members' states, where no vote judges them.

    Args:
        plan: the quorum's plan.
        states: by member index, of one version.
        pending: members that will have that version, but no digest of it yet.
    """
    state_bad = _state_bad(plan, states, pending)
    return Verdict(
        commit=None,
        state_bad=state_bad,
        hopeless=False,
        undecided=_undecided(plan, states, state_bad),
        adopt_planned=False,
        saves=Saves(),
        reason=_name_bad(plan, state_bad) if state_bad else "all states agree",
        differing=_differing(plan, states, state_bad),
    )


def _name_types(plan: Plan, index: int, bad: Sequence[int]) -> str:
    types, member = ", ".join(map(str, bad)), plan.members[index]
    return f"{member.rank} on {member.slot} has computed wrongly what belongs to types {types}"


def _chains_of(plan: Plan, indices: Iterable[int]) -> tuple[int, ...]:
    """Return the replicas of whose chains some of the members are cells, each once."""
    chains = (plan.chain_of(i) for i in indices)
    return tuple(sorted({chain.replica for chain in chains if chain is not None}))


def _name_bad(plan: Plan, state_bad: Sequence[int], what: str = PARAMETERS) -> str:
    members = ", ".join(f"{plan.members[i].rank} on {plan.members[i].slot}" for i in state_bad)
    return f"{what} of {members} differ from the rest of the stage"


def _differing(plan: Plan, states: Mapping[int, str], state_bad: Sequence[int]) -> tuple[Slot, ...]:
    """Return the slots to name as those that computed wrongly."""
    if _undecided(plan, states, state_bad):
        return ()
    return tuple(plan.members[i].slot for i in state_bad)


def _certified(saves: Saves, step: int, state_bad: Sequence[int]) -> Saves:
    """Return the saves that may become durable.

    Votes on a version compare its parameters. That its moments were wrong shows only in the next
    one's parameters, so where states differ the version before is not believed either.
    """
    if saves.safe is not None and saves.safe.version >= step - 1 and state_bad:
        return replace(saves, safe=None)
    return saves


def _hopeless(commit: Commit) -> str:
    if commit.tokens < 1:
        return f"no token of step {commit.step} counts in the loss: look at the data set's targets"
    return (
        f"the gradient norm of step {commit.step} is {commit.norm}: the model diverged; "
        "lower the learning rate or start from an earlier checkpoint"
    )


def _state_bad(
    plan: Plan, states: Mapping[int, str], pending: Collection[int] = ()
) -> tuple[int, ...]:
    bad: list[int] = []
    for members in plan.positions:
        indices = [m.index for m in members if m.index in states]
        counts = Counter(states[i] for i in indices)
        if len(counts) < 2:
            continue
        (top, top_count), (_, second_count) = counts.most_common(2)
        tied = top_count == second_count
        if tied and any(m.index in pending for m in members):
            continue
        bad += [i for i in indices if tied or states[i] != top]
    return tuple(bad)


def _undecided(plan: Plan, states: Mapping[int, str], state_bad: Sequence[int]) -> bool:
    """Return whether some position has no majority, so that no copy of it can be believed."""
    known = ([m.index for m in members if m.index in states] for members in plan.positions)
    return any(indices and all(i in state_bad for i in indices) for indices in known)


def _disagreements(plan: Plan, votes: Sequence[Vote]) -> list[str]:
    problems = []
    for members in plan.positions:
        # Compared as text: a NaN that all cells share is no disagreement, but differs from itself.
        seen = {(votes[m.index].gradient, repr(votes[m.index].norms_sq)) for m in members}
        if len(seen) > 1:
            stage = members[0].rank.stage
            problems.append(f"stage {stage}: its cells disagree on the reduced gradient")
    for stage, types in enumerate(_statistics_by_type(plan, votes)):
        lengths = sorted({len(told) for told in types.values()})
        if len(lengths) > 1:
            shown = " and ".join(map(str, lengths))
            problems.append(f"stage {stage}: its cells tell {shown} statistics of a type")
    if problems:
        return problems
    # Each inner rank computes the copies by itself, and must come to the same bits.
    return [
        f"stage {stage}: its inner ranks disagree on what they hold in copies"
        for stage in range(plan.num_stages)
        if len({votes[m.index].copies for m in plan.members if m.rank.stage == stage}) > 1
    ]


def _statistics_by_type(plan: Plan, votes: Sequence[Vote]) -> list[dict[int, tuple[int, ...]]]:
    """Return by stage what was counted in each type. The first inner rank speaks for all."""
    stages: list[dict[int, tuple[int, ...]]] = [{} for _ in range(plan.num_stages)]
    for member, vote in zip(plan.members, votes, strict=True):
        if member.rank.inner == 0:
            stages[member.rank.stage] |= {stat.type: stat.statistics for stat in vote.stats}
    return stages


def _statistics(plan: Plan, votes: Sequence[Vote]) -> tuple[int, ...]:
    """Return what was counted in all types, stage by stage: the sums are exact in any order."""
    return tuple(
        sum(counts)
        for types in _statistics_by_type(plan, votes)
        for counts in zip(*(types[shard_type] for shard_type in sorted(types)), strict=True)
    )


def _norms_sq(plan: Plan, votes: Sequence[Vote]) -> list[float]:
    """Return the squared norms per block and inner rank: in model order, then by inner rank."""
    firsts = [votes[members[0].index] for members in plan.positions]
    width = plan.ranks_per_stage
    return [
        norm_sq
        for stage in range(0, len(firsts), width)
        for block in zip(*(v.norms_sq for v in firsts[stage : stage + width]), strict=True)
        for norm_sq in block
    ]


def clip(
    norms_sq: Iterable[float], num_tokens: int, clip_norm: float | None
) -> tuple[float, float]:
    """Return (norm of the mean gradient, factor from summed to applied gradient).

    Both are NaN when no token counts; callers look at whether they are finite.

    Args:
        norms_sq: squared norm of the summed gradient per block, all blocks in model order.
        num_tokens: tokens of the whole step.
        clip_norm: bound on the norm of the mean gradient; None does not clip.
    """
    total = add_in_order(norms_sq)
    if num_tokens < 1 or not total >= 0:
        return math.nan, math.nan
    norm = math.sqrt(total) / num_tokens
    if clip_norm is None or norm + CLIP_EPSILON <= clip_norm:
        return norm, 1.0 / num_tokens
    return norm, clip_norm / (norm + CLIP_EPSILON) / num_tokens


def _commit(plan: Plan, votes: Sequence[Vote], clip_norm: float | None, data_total: str) -> Commit:
    losses: dict[int, float] = {}
    tokens: dict[int, int] = {}
    data = Digest.zero()
    for vote in votes:
        for stat in vote.stats:
            if stat.loss_sum is not None:
                losses[stat.type] = stat.loss_sum
            if stat.tokens is not None:
                tokens[stat.type] = stat.tokens
            if stat.data is not None:
                data += Digest.parse(stat.data)
    num_tokens = sum(tokens.values())
    norm, scale = clip(_norms_sq(plan, votes), num_tokens, clip_norm)
    loss = add_in_order(losses[shard_type] for shard_type in sorted(losses))
    total = (Digest.parse(data_total) if data_total else Digest.zero()) + data
    return Commit(
        step=votes[0].step,
        norm=norm,
        scale=scale,
        tokens=num_tokens,
        loss=loss / num_tokens if num_tokens else math.nan,
        data=data.hex(),
        data_total=total.hex(),
        statistics=_statistics(plan, votes),
    )


def norms_by_block(plan: Plan, votes: Sequence[Vote]) -> tuple[float, ...]:
    """Return the squared gradient norm of each block, in model order.

    Those of a stage's inner ranks are added left to right. All cells of a position tell the same.
    """
    width = plan.ranks_per_stage
    firsts = [votes[members[0].index].norms_sq for members in plan.positions]
    return tuple(
        add_in_order(told)
        for stage in range(0, len(firsts), width)
        for told in zip(*firsts[stage : stage + width], strict=True)
    )
