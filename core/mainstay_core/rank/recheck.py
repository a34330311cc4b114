"""Decides what a rank computes again when its results are doubted, by votes or by a witness.

These are parts of the rank's state machine (:mod:`mainstay_core.rank.machine`): what counts of what
is held, and which types of a step are computed once more. It is row 1 of the recovery ladder, which
the ranks carry out by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mainstay_core.base.ids import Slot
from mainstay_core.base.values import replace
from mainstay_core.dmr.verdicts import MAX_REPEATS
from mainstay_core.dmr.verdicts import Verdict as DeviceVerdict
from mainstay_core.dmr.witness import MAX_TOLD, Ruling, Told, first_difference, rule
from mainstay_core.rank.adoption import park
from mainstay_core.rank.events import (
    Action,
    Compute,
    CorrectEntry,
    DropPartials,
    Leave,
    SendFact,
    TellDeviation,
)
from mainstay_core.rank.settle import Settlement
from mainstay_core.rank.state import RankState, Transition, fact_of
from mainstay_core.rank.steps.doubts import Watched, slots_of
from mainstay_core.rank.steps.step_plan import Compared, StepPlan, plan_step, witnessed
from mainstay_core.rank.steps.witness import (
    compared_again,
    compared_in,
    counts,
    has_insisted,
    tellings,
    told_in,
)
from mainstay_core.rank.votes import Verdict
from mainstay_core.wire.facts import Cause, Named, Phase
from mainstay_core.wire.ledger import CleanDevice
from mainstay_core.wire.plan import Partial, Plan, follows
from mainstay_core.wire.votes import MadeType, Vote


def plan_undisturbed(state: RankState) -> StepPlan:
    """Return the work of the step at ``version`` when nobody holds anything of it."""
    assert state.plan is not None
    return _undisturbed(state.plan, state.shards_per_lane, _compared_at(state, state.version))


@follows
def _undisturbed(plan: Plan, shards_per_lane: int, compared: Compared | None) -> StepPlan:
    return plan_step(plan, shards_per_lane, compared=compared)


def _compared_at(state: RankState, version: int) -> Compared | None:
    assert state.plan is not None
    return compared_in(state.plan, version, state.witness_every_steps, state.shards_per_lane)


def witnessed_step(state: RankState, outcome: Settlement) -> StepPlan:
    """Return the settled step with the type that a second chain is to compute, if there is one.

    A type on which chains have disagreed goes first: that is open until it is ruled on.
    """
    assert state.plan is not None
    if outcome.doubt is not None:
        return outcome.step
    compared = _compared_at(state, outcome.version)
    return outcome.step if compared is None else witnessed(outcome.step, compared)


def settled(state: RankState, outcome: Settlement) -> RankState:
    """Return the state with what all members know of doubted results after a settle."""
    doubt = outcome.doubt
    return replace(
        state,
        told=() if doubt is None else doubt.told,
        told_of=None if doubt is None else doubt.type,
        watched=None,
        bad=(),
        bad_chains=(),
    )


def todo_of(state: RankState) -> tuple[int, ...]:
    """Return the types that this rank's chain computes, in order."""
    assert state.plan is not None
    assert state.step_plan is not None
    chain = state.plan.chain_of(state.index)
    return tuple(state.step_plan.todo.get(chain.replica, ())) if chain else ()


def makers_of_held(state: RankState, held: Sequence[Partial]) -> tuple[MadeType, ...]:
    """Return which chains have computed what is held, once this rank's chain has computed."""
    assert state.plan is not None
    chain = state.plan.chain_of(state.index)
    here, known = set(todo_of(state)), {made.type: made for made in state.made}
    for shard_type in here:
        assert chain is not None
        known[shard_type] = MadeType(
            type=shard_type, quorum=state.plan.quorum.id, replica=chain.replica
        )
    types = sorted({t for partial in held for t in range(partial.first, partial.last + 1)})
    return tuple(known[t] for t in types if t in known)


def watched_now(state: RankState) -> Watched | None:
    """Return the compared type, if this rank's chain has just computed it."""
    plan, compared = state.plan, state.step_plan.compared if state.step_plan else None
    chain = plan.chain_of(state.index) if plan else None
    if compared is None or chain is None or plan is None:
        return None
    if chain.replica not in compared.replicas or compared.type not in todo_of(state):
        return None
    return Watched(
        type=compared.type,
        quorum=plan.quorum.id,
        attempt=state.attempt,
        replica=chain.replica,
        hardware=plan.members[state.index].hardware,
    )


def without_witness(
    state: RankState, held: tuple[Partial, ...]
) -> tuple[tuple[Partial, ...], tuple[Action, ...]]:
    """Return what counts of what is held, and what drops the copy that a witness has made."""
    compared = state.step_plan.compared if state.step_plan else None
    chain = state.plan.chain_of(state.index) if state.plan else None
    if compared is None or chain is None or chain.replica not in compared.replicas[1:]:
        return held, ()
    copies = tuple(p for p in held if p.first == p.last == compared.type)
    kept = tuple(p for p in held if p not in copies)
    return kept, (DropPartials(copies),) if copies else ()


def clean_from(state: RankState, version: int) -> int | None:
    """Return since when no witness has agreed with this device, now that it goes on at a version.

    What it computes again nobody has compared.
    """
    return None if state.clean_from is None else min(state.clean_from, version)


def note_clean(state: RankState, votes: Sequence[Vote]) -> RankState:
    """Return the state that knows since when no witness has agreed with each device."""
    assert state.plan is not None
    told = [vote.clean_from for vote in votes if vote.clean_from is not None]
    if not told and state.all_clean_at is None and not (state.clean or state.clean_before):
        return state
    members = state.plan.position_members(state.member_position) if told else ()
    clean = tuple(
        CleanDevice(slot=m.slot, clean_from=since)
        for m in members
        if (since := votes[m.index].clean_from) is not None
    )
    return replace(
        state, all_clean_at=min(told, default=None), clean=clean, clean_before=state.clean
    )


def heard(
    state: RankState, verdict: Verdict, votes: Sequence[Vote]
) -> tuple[RankState, Verdict, tuple[Action, ...]]:
    """Return the verdict with what chains tell of a type that several of them computed.

    Beside it the state that remembers what they told, and what tells of devices that were wrong.
    That is told once it is known, also where the step is refused for another reason: the type may
    not be compared again.
    """
    plan, step_plan = state.plan, state.step_plan
    assert plan is not None
    compared = step_plan.compared if step_plan is not None else None
    if compared is None or verdict.state_bad:
        # What was computed from a bad state says nothing of a device.
        if (state.told, state.told_of, state.watched) != ((), None, None):
            state = replace(state, told=(), told_of=None, watched=None)
        return state, verdict, ()
    state = replace(state, watched=None)
    told = tellings(plan, compared, votes)
    if len(told) < len(compared.replicas) and not state.told:
        return state, verdict, ()
    known = (*state.told, *told_in(plan, state.attempt, told))[-MAX_TOLD:]
    width = plan.ranks_per_stage
    ruling = rule(known, width, slots_of(plan))
    if not counts(compared, told, ruling):
        bad = tuple(sorted({*verdict.bad, compared.type}))
        reason = f"{verdict.reason}; {ruling.reason}" if verdict.bad else ruling.reason
        # A norm that is no number may come from the wrong copy.
        verdict = replace(verdict, commit=None, hopeless=False, bad=bad, reason=reason)
        again = compared_again(plan, compared, told, ruling)
        if has_insisted(plan, again, known):
            verdict = replace(verdict, doubted=ruling.doubted)
        assert step_plan is not None
        step_plan = replace(step_plan, compared=again)
        state = replace(state, told=known, told_of=compared.type, step_plan=step_plan)
        return state, verdict, ()
    named = _named(state, compared.type, ruling, votes)
    own = next((d.verdict for d in ruling.deviations if d.slot == state.slot), None)
    if own is not None:
        state = replace(state, named_as=own)
    elif verdict.commit is not None and is_agreed_with(state.slot, known, ruling, width):
        state = replace(state, clean_from=state.version + 1)
    if verdict.commit is None:
        # Asked again, the chains are judged by what they have told as well.
        state = replace(state, told=known, told_of=compared.type)
    return state, verdict, named


def is_agreed_with(slot: Slot, known: Sequence[Told], ruling: Ruling, width: int) -> bool:
    """Return whether a chain that a device computed in has told what counts.

    Where a chain was wrong nobody has compared what comes after it: it had wrong inputs.
    """
    if ruling.agreed is None:
        return False
    return any(
        slot in one.cells and first_difference(one.telling, ruling.agreed, width) is None
        for one in known
    )


def _named(
    state: RankState, shard_type: int, ruling: Ruling, votes: Sequence[Vote]
) -> tuple[Action, ...]:
    """Return what tells that devices were wrong, and that the work of one that insists is to go.

    A device tells of itself, once in a step for each verdict. The first other member tells of one
    that insists as well: it may be gone, or may not have heard the votes.
    """
    actions: list[Action] = []
    for deviation in ruling.deviations:
        what = f"step {state.version}, type {shard_type}: {ruling.reason}"
        insists = deviation.verdict is DeviceVerdict.DETERMINISTIC
        if deviation.slot == state.slot:
            if deviation.verdict is state.named_as:
                continue
            actions.append(TellDeviation(state.version, shard_type, deviation, ruling.reason))
            told = fact_of(state, Named, evidence=what, since=state.clean_from)
            actions += [SendFact(told)] if insists else []
        elif insists and _speaks_of(state, deviation.slot):
            since = _clean_from_of(state, deviation.slot, votes)
            fields = {"evidence": what, "since": since, "device": deviation.slot}
            actions.append(SendFact(fact_of(state, Named, **fields)))
    return tuple(actions)


def _speaks_of(state: RankState, slot: Slot) -> bool:
    """Return whether this is the first member beside a device."""
    assert state.plan is not None
    return next((m.index for m in state.plan.members if m.slot != slot), -1) == state.index


def _clean_from_of(state: RankState, slot: Slot, votes: Sequence[Vote]) -> int | None:
    """Return since when no witness has agreed with a device, as it tells; None: it is gone."""
    assert state.plan is not None
    told = [votes[m.index].clean_from for m in state.plan.members if m.slot == slot]
    return told[0] if told else None


def corrected_entry(state: RankState, verdict: Verdict) -> tuple[Action, ...]:
    """Return what has the ledger keep the entry of the agreed state.

    The first cell of a position writes the ledger. If its state is found bad, its entry of the step
    before has the digest of wrong masters, and the first cell with a good state tells its own.
    """
    assert state.plan is not None
    members = [m.index for m in state.plan.position_members(state.member_position)]
    good = [index for index in members if index not in verdict.state_bad]
    is_wrong = members[0] in verdict.state_bad and not verdict.undecided
    if not is_wrong or good[:1] != [state.index] or state.version < 1:
        return ()
    return (CorrectEntry(state.version - 1),)


def try_again(state: RankState, verdict: Verdict) -> Verdict:
    """Return a hopeless verdict, or one that has the whole step computed again, once.

    A norm that is no number, or no token that counts, may come from one wrong bit. All members see
    the same votes, and which types were computed again since the last settle.
    """
    assert state.plan is not None
    types = range(len(state.plan.suppliers))
    if set(types) <= set(state.bad):
        return verdict
    reason = "the gradient's norm or scale is no finite number: all is computed again, once"
    return replace(verdict, hopeless=False, bad=tuple(types), reason=reason)


def wait_for_another(state: RankState, verdict: Verdict, prefix: tuple[Action, ...]) -> Transition:
    """Give the quorum up: it takes a device that is in none of its chains to rule on a type.

    What is held stays, but for that type.
    """
    bad = tuple(sorted({*state.bad, *verdict.bad}))
    parked = replace(state, bad=bad, mark=None)
    return park(
        parked,
        verdict.reason,
        (),
        *prefix,
        Leave(),
        cause=Cause.RESULT,
        doubted=verdict.doubted,
    )


def compute_again(state: RankState, verdict: Verdict, prefix: tuple[Action, ...]) -> Transition:
    """Compute the types again that votes call wrong, and what they were summed into.

    What else is held stays. A chain that called types wrong twice is passed over.
    """
    assert state.plan is not None
    assert state.step_plan is not None
    before, bad_chains = state.step_plan, (*state.bad_chains, *verdict.bad_chains)
    tired = {r for r, times in Counter(bad_chains).items() if times > MAX_REPEATS}
    step_plan = plan_step(
        state.plan,
        state.shards_per_lane,
        before.holdings,
        makers=before.makers,
        bad=verdict.bad,
        tired=tired,
        compared=before.compared,
        insists=bool(state.told),
    )
    kept = step_plan.kept.get(state.index, ())
    void = tuple(partial for partial in state.held if partial not in kept)
    new = replace(
        state,
        phase=Phase.COMPUTING,
        step_plan=step_plan,
        held=kept,
        bad=tuple(sorted({*state.bad, *verdict.bad})),
        bad_chains=bad_chains,
        mark=None,
        attempt=state.attempt + 1,
    )
    drop = (DropPartials(void),) if void else ()
    return Transition(new, (*prefix, *drop, Compute(todo_of(new))), verdict.reason)
