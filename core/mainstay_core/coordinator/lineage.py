"""Notes which forks the job's states contain, and lists what each stage could be made anew from.

The trainers carry a fork out. The first member of a quorum tells the history of all states once it
goes on, and it counts when all others go on too. Every entry of the ledger says since when its
state is approximate. So that is known also after the store has lost the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from mainstay_core.base.shape import Order
from mainstay_core.coordinator.events import Announce, StepsCommitted, Transition
from mainstay_core.coordinator.ladder import FULL_HISTORY
from mainstay_core.coordinator.situation import (
    for_recovery_at_hand,
    left_ahead,
    left_of_lost,
    permitted_rules,
    rules_of,
)
from mainstay_core.coordinator.state import CoordinatorState, OpenRecovery, all_settled
from mainstay_core.job.config import MAX_FORKS, ApproximateConfig
from mainstay_core.job.protections import entry_of
from mainstay_core.reinitialisation.prospects import list_prospects
from mainstay_core.reinitialisation.sources import Policy, policy_of
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.reinitialisation import (
    REINITIALISED,
    Fork,
    ForkOutcome,
    History,
    LineagePage,
    PlaceDigest,
    Prospect,
    ToldFork,
    ToldHistory,
    describe_course,
    describe_fork,
    digest_of_fork,
    places_of,
    since_of,
)

EXACT_AGAIN = "ExactAgain"


def note_course(state: CoordinatorState, event: StepsCommitted) -> CoordinatorState:
    """Return the state with what a commit says of the states that follow it.

    Entries of older quorums come late: a step before a fork is exact, and says nothing of it. So is
    one that was rolled forward in the quorum of the fork. What the quorum's first member has told
    counts.
    """
    since, plan = event.approximate_since, state.plan
    if plan is None or event.quorum != plan.quorum or since == state.approximate_since:
        return state
    if state.is_history_told:
        # Who commits has gone on: only the others' word that they do is missing.
        told = state.told_history
        is_told = told is not None and told.since == since
        return _on_course(state, since) if is_told and not all_settled(state) else state
    return _on_course(state, since)


def apply_finals(state: CoordinatorState) -> Transition:
    """Return the state with what the last states of a job that is complete say of themselves."""
    told = [final.approximate_since for final in state.finals]
    since = min((each for each in told if each is not None), default=None)
    is_told = state.is_history_told and state.told_history is not None
    if since == state.approximate_since or (since is None and is_told):
        return Transition(state=state)
    message = f"{describe_course(since)}: the job's last states say so"
    code = EXACT_AGAIN if since is None else REINITIALISED
    announce = Announce(code=code, message=message, warning=since is not None)
    return Transition(state=_on_course(state, since), actions=(announce,), reason=message)


def apply_told(state: CoordinatorState) -> Transition:
    """Return the state with the history that its first member has told, now that all go on."""
    told, before = state.told_history, state.approximate_since
    if not state.is_history_told:
        return Transition(state=state)  # the next commits say since when
    if told is None:
        state = _on_course(state, None)
        if before is None:
            return Transition(state=state)
        message = f"{describe_course(None)} again: all go on from before any stage was made anew"
        return Transition(
            state=state, actions=(Announce(code=EXACT_AGAIN, message=message),), reason=message
        )
    history = splice(state.history, told)
    state = replace(state, approximate_since=told.since, num_forks=told.num_forks, history=history)
    if before is not None and not told.made:
        return Transition(state=state)
    allowed_by = next((o.recovery.allowed_by for o in state.recoveries if _is_of(state, o)), "")
    allowed = f"; {allowed_by} allowed it" if allowed_by else ""
    message = f"{describe_course(told.since)}: {describe_fork(told.newest[-1])}{allowed}"
    announce = Announce(code=REINITIALISED, message=message, warning=True)
    return Transition(state=state, actions=(announce,), reason=message)


def _is_of(state: CoordinatorState, opened: OpenRecovery) -> bool:
    return state.plan is not None and opened.recovery.quorum == state.plan.quorum


def _on_course(state: CoordinatorState, since: int | None) -> CoordinatorState:
    if since is None:
        return replace(state, approximate_since=None, num_forks=0, history=())
    if since_of(state.history) == since:
        return replace(state, approximate_since=since)
    # How many forks there are on this course is known as little as which.
    return replace(state, approximate_since=since, num_forks=0, history=())


def splice(known: History, told: ToldHistory) -> History:
    """Return a history as far as it is known: what is told, and what was known of the forks before.

    A fork is known again by its version and the commit chain before it.
    """
    names = [_name(fork) for fork in known]
    first = _name(told.newest[0]) if told.newest else None
    before = names.index(first) if first in names else len(names)
    wanted = told.num_forks - len(told.newest)
    # What is known counts only if it leads up to what is told without a gap.
    fits = before == wanted and since_of((*known[:before], *told.newest)) == told.since
    return (*(known[:before] if fits else ()), *told.newest)


def is_known(state: CoordinatorState) -> bool:
    """Return whether the history that is told names no fork that the state does not know.

    Nothing was made anew since then. What was never told, nobody knows.
    """
    told = state.told_history
    if not state.is_history_told or told is None:
        return state.is_history_told
    # Of two forks at one version the second one has the same name, also where it takes the first
    # one's place: so forks are compared as a whole.
    is_longer = told.num_forks > state.num_forks
    return not (told.made or is_longer) and set(told.newest) <= set(state.history)


def _name(fork: Fork) -> tuple[int, str]:
    return fork.version, fork.chain


def list_keys(history: History) -> tuple[LedgerKey, ...]:
    """Return the keys of the ledger's entries that tell what came of forks."""
    places = ((fork.version, *place) for fork in history for place in places_of(fork))
    return tuple(dict.fromkeys(places))


def tell_forks(history: History, ledger: Mapping[LedgerKey, LedgerEntry]) -> tuple[ToldFork, ...]:
    """Return forks with what came of them, as far as the ledger says.

    Args:
        history: the forks.
        ledger: entries at :func:`list_keys`, as far as there are any.
    """
    return tuple(
        ToldFork(
            **{each.name: getattr(fork, each.name) for each in fields(Fork)},
            outcome=_outcome_of(fork, ledger),
        )
        for fork in history
    )


def _outcome_of(fork: Fork, ledger: Mapping[LedgerKey, LedgerEntry]) -> ForkOutcome | None:
    """Return what came of a fork; None until all its places have told of the first step after it.

    What they began that step with is the same in whatever quorum they tell of it: the fork says it.
    A member that was rolled forward to the step tells of a later quorum than that which committed
    it, in place of what its position told before. So the lowest one is named.
    """
    digest, places = digest_of_fork(fork), places_of(fork)
    states, quorums = [], []
    for stage, inner in places:
        entry = ledger.get((fork.version, stage, inner))
        if entry is None or entry.forked is None or entry.forked.fork != digest:
            return None
        quorums.append(entry.quorum)
        states.append(PlaceDigest(stage=stage, inner=inner, masters=entry.forked.masters))
    if not states:
        return None
    quorum = min(quorums, key=lambda each: each.id)
    return ForkOutcome(quorum=quorum, states=tuple(states))


def show_lineage(
    state: CoordinatorState, ledger: Mapping[LedgerKey, LedgerEntry] | None = None
) -> LineagePage:
    """Return what the job's states were made of, and what each stage could be made anew from.

    Args:
        state: of the job.
        ledger: its entries at :func:`list_keys`, as far as there are any.
    """
    policy, permission = state.config.approximate, for_recovery_at_hand(state)
    return LineagePage(
        exact=state.approximate_since is None,
        approximate_since=state.approximate_since,
        course=describe_course(state.approximate_since),
        num_forks=state.num_forks,
        forks=tell_forks(state.history, ledger or {}),
        allowed=policy is not None,
        after_lost_steps=policy.after_lost_steps if policy is not None else None,
        permitted_by=permission.who if permission is not None else "",
        ahead=left_ahead(state),
        stages=prospects_of(state),
    )


def prospects_of(state: CoordinatorState) -> tuple[Prospect, ...]:
    """Return for each stage from what it could be made anew, were every copy of it lost now.

    Where the policy is off, it is what a person may allow.
    """
    rules, order = rules_of(state) or permitted_rules(state.config), Policy(order=state.shape.order)
    why = why_never(state, rules)
    if why:
        stages = range(state.shape.stages)
        return tuple(Prospect(stage=stage, possible=False, reason=why) for stage in stages)
    if not rules.loads_alone:
        # All stages go back to whatever checkpoint is young enough, as to any of no more steps ago.
        rules = replace(rules, stale_steps=0)
    return list_prospects(
        state.outline,
        policy=policy_of(rules, order),
        left=left_of_lost(state),
        ranks_per_stage=state.shape.ranks_per_stage,
        version=state.step,
        durable=state.durable,
    )


def why_never(state: CoordinatorState, rules: ApproximateConfig) -> str:
    """Return why no stage of the job can be made anew by these rules; empty if some may be."""
    if state.config.repeats:
        return "the job repeats the lineage of another run, and makes no other fork"
    if state.shape.stages == 1:
        if entry_of(state.fingerprints) == "loop":
            return "an own training loop is one stage, and there is no other to make it anew from"
        return "a pipeline of one stage has no other to make it anew from"
    is_in_order = state.shape.order is Order.IN_ORDER
    if state.shape.stages == 2 and is_in_order and not rules.loads_alone:
        return "with two stages none has two neighbours to make it anew from"
    if state.num_forks >= MAX_FORKS:
        return FULL_HISTORY
    if len(state.outline) != state.shape.stages:
        return "no trainer has told of what blocks the stages consist"
    return ""
