"""Decides between faults: hands work over, drops and fills places, changes stores and checks.

All members adopt a planned plan at the end of a step: nobody stops, and no step is lost or done
again. There is one such plan at a time. The next one comes when all members have settled.

A hand-over (the ladder's row 0) takes two plans. With the first one the successors join as
followers and heal while the others compute; the leaving members still serve. The second one puts
the successors into the chains and drops the leaving members. Without a successor the second plan
comes at once, and other chains take the types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.coordinator import hosts, ladder, seating
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.leaving import leaving_members, leaving_pods
from mainstay_core.coordinator.names import pod_name, slot_name
from mainstay_core.coordinator.publishing import publish
from mainstay_core.coordinator.records import open_hand_over, open_join
from mainstay_core.coordinator.seating import Draft
from mainstay_core.coordinator.seats import Seat, keep_whole, living_seats, seat_joiners
from mainstay_core.coordinator.siting import locations_of, restarting_slots, usable_slots
from mainstay_core.coordinator.state import CoordinatorState, PodState, SlotState, uid_of, with_pod
from mainstay_core.coordinator.stores import has_store
from mainstay_core.job.phase import JobPhase
from mainstay_core.snapshots.stores import lacks_holders
from mainstay_core.wire.plan import Chain, Method, Plan


def decide_between_faults(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Publish the planned plan that is due, if any.

    It is a hand-over, a shrink, a join, or one with other stores or checks.

    Near the end of the job no plan is due: it would be adopted after the last step.
    """
    if state.shape.steps - state.step <= 1:
        return Transition(state=state)
    result = Transition(state=state)
    for decide in (_hand_over, _shrink, _join, _name_stores, _change_checks):
        result = result.then(decide(result.state, now_s, nonce))
        if result.plan is not None:
            break
    return result


def _hand_over(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Seat the successors of leaving members.

    If none are left to seat, drop the members that may go.
    """
    leaving = leaving_members(state)
    if not leaving:
        return Transition(state=state)
    answer = ladder.decide(
        ladder.Situation(stages=(), step=state.step, leaving=len(leaving), lost=0)
    )
    assert answer.row is ladder.Row.HAND_OVER
    draft = Draft(
        method=Method.HAND_OVER, planned=True, reason=answer.reason, now_s=now_s, nonce=nonce
    )
    seats = living_seats(state)
    staying = [s for s in seats if s.slot not in {m.slot for m in leaving}]
    joiners = _successors(state, staying, now_s)
    if joiners:
        names = ", ".join(slot_name(state, s.slot) for s in joiners)
        reason = f"{answer.reason}; the successors heal first: {names}"
        plan = seating.compose(state, [*seats, *joiners], replace(draft, reason=reason))
        return publish(state, plan, JobPhase.RUNNING)
    going, blocked = _may_go(state, seats)
    result = _announce_blocked(state, going, blocked)
    if not going:
        return result
    return result.then(_let_go(result.state, going, draft))


def _successors(state: CoordinatorState, staying: Sequence[Seat], now_s: float) -> list[Seat]:
    """Return new cells for the places of the leaving members, if enough trainers are up."""
    counts = _count_positions(staying)
    free = list(usable_slots(state, now_s))
    free.sort(key=lambda s: s.stage is None)
    whole = min(counts[p] for p in state.shape.positions)
    for target in range(state.wanted, whole, -1):
        wanted = [p for p in state.shape.positions for _ in range(counts[p], target)]
        if len(wanted) <= len(free):
            return seat_joiners(locations_of(state), staying, wanted, free)
    return []


def _may_go(
    state: CoordinatorState, seats: Sequence[Seat]
) -> tuple[list[PodState], list[PodState]]:
    """Return the leaving pods that may go, and those that hold the last cell of a position."""
    going: list[PodState] = []
    blocked: list[PodState] = []
    for pod in leaving_pods(state):
        uids = {uid_of(p) for p in (*going, pod)}
        counts = _count_positions(s for s in seats if s.slot.pod not in uids)
        enough = all(counts[p] for p in state.shape.positions)
        (going if enough else blocked).append(pod)
    return going, blocked


def _announce_blocked(
    state: CoordinatorState, going: Iterable[PodState], blocked: Iterable[PodState]
) -> Transition:
    """Announce once why a pod's work cannot be handed over yet."""
    actions = []
    for pod in going:
        state = with_pod(state, replace(pod, leave_waits=""))
    for pod in blocked:
        if pod.leave_waits:
            continue  # there is one cause, and it was announced
        why = "it holds the last cell of a stage, and no trainer is free to succeed it"
        state = with_pod(state, replace(pod, leave_waits=why))
        message = f"pod {pod.registration.name} cannot leave yet: {why}"
        actions.append(Announce(code="LeaveWaits", message=message, warning=True))
    return Transition(
        state=state, actions=tuple(actions), reason="; ".join(a.message for a in actions)
    )


def _let_go(state: CoordinatorState, going: Sequence[PodState], draft: Draft) -> Transition:
    """Drop the members of the pods that may go.

    Successors and remains are chained in their places.
    """
    assert state.plan is not None
    uids: set[PodUid] = {uid_of(p) for p in going}
    seats = [s for s in living_seats(state) if s.slot.pod not in uids]
    seats = seating.mate(state, keep_whole(seats, len(state.shape.positions)), most=state.wanted)
    seats = _without_surplus(state, seats)
    before, after = len(state.plan.chains), _count_chains(seats)
    how = "successors take their places" if after >= before else "other replicas take their types"
    names = ", ".join(p.registration.name for p in going)
    reason = f"work handed over between steps by {names}: {how}"
    plan = seating.compose(state, seats, replace(draft, reason=f"{draft.reason}; {reason}"))
    opened = open_hand_over(state, going, plan, f"{draft.reason}; {reason}")
    return publish(opened, plan, JobPhase.RUNNING)


def _count_positions(seats: Iterable[Seat]) -> Counter[tuple[int, int]]:
    return Counter(s.position for s in seats)


def _count_chains(seats: Iterable[Seat]) -> int:
    return len({s.replica for s in seats if s.replica is not None})


def _without_surplus(state: CoordinatorState, seats: Sequence[Seat]) -> list[Seat]:
    """Return the seats without the followers that no missing replica could use."""
    if _count_chains(seats) < state.wanted:
        return list(seats)
    return [s for s in seats if s.replica is not None]


def _shrink(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Drop the chains that are not wanted any more, and the followers that no chain will need."""
    plan = state.plan
    assert plan is not None
    surplus = len(plan.chains) - state.wanted
    followers = any(m.rank.replica is None for m in plan.members)
    if surplus < 0 or (surplus == 0 and not followers):
        return Transition(state=state)
    ending = sorted(
        sorted(plan.chains, key=lambda c: _worth(state, plan, c))[:surplus],
        key=lambda c: c.replica,
    )
    names = ", ".join(str(c.replica) for c in ending)
    what = f"ended between steps: replica {names}" if ending else "followers are dropped"
    reason = f"wanted: {count(state.wanted, 'replica')}; {what}"
    dropped = {c.replica for c in ending} | {None}
    seats = [s for s in living_seats(state) if s.replica not in dropped]
    draft = Draft(method=Method.MASK, planned=True, reason=reason, now_s=now_s, nonce=nonce)
    return publish(state, seating.compose(state, seats, draft), JobPhase.RUNNING)


def _worth(state: CoordinatorState, plan: Plan, chain: Chain) -> tuple[int, int]:
    """Return a chain's sort key: the lowest is dropped first.

    Failing trainers first, then high lanes.
    """
    failures = 0
    for index in chain.cells:
        slot = state.slot(plan.members[index].slot)
        failures += slot.failures if slot else 0
    return -failures, -chain.replica


def _join(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Fill the places of missing replicas.

    Followers take places at once. If the trainer of a place is being restarted, the place waits for
    it up to ``restart_grace_s``; then a spare takes it.
    """
    assert state.plan is not None
    have = len(state.plan.chains)
    if have >= state.wanted:
        return Transition(state=state)
    draft = Draft(method=Method.JOIN, planned=True, reason="", now_s=now_s, nonce=nonce)
    plan = seating.join_plan(state, draft, _takers(state, now_s))
    if plan is None:
        return Transition(state=state)
    reason = _join_sentence(state, plan)
    plan = replace(plan, reason=f"{reason}; {plan.reason}")
    return publish(open_join(state, plan, reason), plan, JobPhase.RUNNING)


def _name_stores(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Have the same members go on with the stores of other pods that there are now.

    That is due when a store that the plan names is gone: each copy for it is waited for in vain.
    One that came later is named at once only where copies lack holders.
    """
    plan, config = state.plan, state.config.snapshots
    assert plan is not None
    if config is None or state.restored == str(plan.quorum):
        return Transition(state=state)  # after a recovery of the api's store pods register anew
    gone = [o.pod for o in plan.other_stores if not has_store(state, o.pod, o.address)]
    known = {o.pod for o in plan.other_stores}
    new = [o.pod for o in hosts.other_stores_of(state, plan.members) if o.pod not in known]
    if not gone and not (new and lacks_holders(plan, peers=config.peers, domains=config.domains)):
        return Transition(state=state)
    names = ", ".join(pod_name(state, pod) for pod in (gone or new))
    what = "are gone" if gone else "keep copies from now on"
    draft = Draft(
        method=Method.REFORM,
        planned=True,
        reason=f"stores of pods without a member {what}: {names}",
        now_s=now_s,
        nonce=nonce,
    )
    return publish(state, seating.compose(state, living_seats(state), draft), JobPhase.RUNNING)


def _change_checks(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Have the same members go on with other checks, all from the same step on."""
    plan, wanted = state.plan, state.wanted_checks
    assert plan is not None
    if wanted == state.checks_in_force:
        return Transition(state=state)
    reason = f"checks change between steps: {wanted.describe()}"
    draft = Draft(method=Method.REFORM, planned=True, reason=reason, now_s=now_s, nonce=nonce)
    return publish(state, seating.compose(state, living_seats(state), draft), JobPhase.RUNNING)


def _takers(state: CoordinatorState, now_s: float) -> tuple[SlotState, ...]:
    """Return the trainers that may take a place now.

    Spares take the places to which none returns.
    """
    usable = usable_slots(state, now_s)
    restarted = [s for s in usable if s.stage is not None]
    spares = [s for s in usable if s.stage is None]
    returning = len(restarted) + len(restarting_slots(state, now_s))
    return (*restarted, *spares[: max(0, seating.num_places(state) - returning)])


def _join_sentence(state: CoordinatorState, plan: Plan) -> str:
    assert state.plan is not None
    before = {c.replica for c in state.plan.chains}
    came = ", ".join(str(c.replica) for c in plan.chains if c.replica not in before)
    joiners = []
    for member in plan.members:
        slot = state.slot(member.slot)
        if member.joining and slot is not None:
            kind = "restarted" if slot.stage is not None and slot.ended else "spare"
            joiners.append(f"{slot_name(state, member.slot)} ({kind}) as {member.rank}")
    how = f"joined by {', '.join(joiners)}" if joiners else "followers are chained, no transfer"
    return f"whole again: replica {came}, {how}"
