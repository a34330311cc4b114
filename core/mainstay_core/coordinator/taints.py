"""Notes which steps a device has computed wrongly perhaps, and has the job go back before them.

A device that is named computes wrongly each time. Only the types that a witness compared are right
for sure, so all that it has computed since a witness agreed with it is tainted. A job that wants to
go back does so when it can do without the device: with it, the steps would be wrong again.
"""

from __future__ import annotations

from collections.abc import Iterable

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.base.values import replace
from mainstay_core.base.words import count
from mainstay_core.coordinator import seating
from mainstay_core.coordinator.events import Transition
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.publishing import publish
from mainstay_core.coordinator.records import open_taint
from mainstay_core.coordinator.seating import Draft
from mainstay_core.coordinator.siting import usable_slots
from mainstay_core.coordinator.state import (
    CoordinatorState,
    PodState,
    SlotState,
    has_members,
    uid_of,
    with_pod,
    with_slots,
)
from mainstay_core.dmr.settings import Witnessed
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Named
from mainstay_core.wire.ledger import CleanDevice
from mainstay_core.wire.plan import MAX_VOIDED, Method, Plan, Voided
from mainstay_core.wire.taints import MAX_TAINTS, Taint

_LOADS = (Method.RESTART, Method.START)
"""Methods of plans with which all load a checkpoint, or the seed."""


def check_named(state: CoordinatorState, fact: Named) -> None:
    """Refuse a word of steps that the job does not have, or of slots that took no part in them.

    A ruling is known to those who voted, and names one who computed. Who told it may be a life that
    the store has not heard of yet, or no more: what a supervisor has from its trainers it repeats,
    before it tells that they are up.

    Raises:
        RemoteProtocolError: the message names the field.
    """
    if fact.quorum is None:
        raise RemoteProtocolError("Named.quorum: is missing; must be that in which it was named")
    for field, step in (("since", fact.since), ("step", fact.step)):
        if step is not None and step > state.shape.steps:
            raise RemoteProtocolError(
                f"Named.{field}: {step} is more than the job's {state.shape.steps}"
            )
    teller = Slot(pod=fact.pod, index=fact.slot)
    if not _has_voted(state, teller, fact.quorum):
        raise RemoteProtocolError(
            f"Named.slot: {teller} was no member of {fact.quorum}, and knows no ruling of it"
        )
    if not _has_served(state, fact.named):
        raise RemoteProtocolError(
            f"Named.device: {fact.named} has never served, and can't be wrong"
        )


def note_taint(state: CoordinatorState, fact: Named) -> CoordinatorState:
    """Return the state with the steps that a named device has tainted.

    A device may be named again until its work is handed over. Its first tainted step counts.
    """
    slot, known = fact.named, state.slot(fact.named)
    clean_from = known.clean_from if known is not None else None
    # Of a device that is no member any more, trainers do not know it.
    since = fact.since if fact.since is not None else clean_from
    if since is None:
        return state
    since = min(_bounded(state, fact, since), state.shape.steps)
    quorum, voided = fact.quorum, state.plan.voided if state.plan is not None else ()
    # What is told late was undone with what the device had computed by then.
    undone = [v.version for v in voided if quorum is not None and quorum.id < v.quorum]
    serves = has_members(state, slot.pod)
    before = [t for t in state.taints if t.slot == slot and (t.counts or (undone and not serves))]
    if before:
        return _named_again(state, before[-1], fact, since)
    if undone:
        if not serves and since >= min(undone):
            return state
        if serves:
            # The steps are undone, but it computes them again, perhaps from an older version on.
            again_from = min(undone) if clean_from is None else min(*undone, clean_from)
            since = min(since, again_from)
    is_member = state.plan is not None and any(m.slot == slot for m in state.plan.members)
    if is_member and clean_from is not None and quorum and quorum.id < state.restarted_id:
        since = min(since, clean_from)
    undone_in = "" if is_member else _undone_in(state, fact, since)
    if undone_in and any(t.slot == slot and t.since <= since for t in state.taints):
        return state
    new = Taint(
        slot=slot,
        trainer=slot_name(state, slot),
        since=since,
        named_in=max(since, fact.step or 0),
        until=None if is_member else max(since, state.step),
        is_due=state.config.goes_back and _has_served(state, slot),
        undone_in=undone_in,
    )
    return replace(state, taints=_newest((*state.taints, new)))


def _has_voted(state: CoordinatorState, teller: Slot, quorum: QuorumId) -> bool:
    """Return whether a slot was a member of a quorum, or may have been of one before the newest."""
    plan = state.plan
    if plan is None or quorum != plan.quorum:
        return _has_served(state, teller)
    return any(m.slot == teller for m in (*plan.members, *plan.outgoing))


def _bounded(state: CoordinatorState, fact: Named, since: int) -> int:
    """Return the first step that a device may have computed wrongly, as far as is known here.

    Another's word does not talk a witness's agreement away. The device's own may be older than
    that, if it comes late; and a store that has lost the job believes what it is told again.
    """
    known = state.slot(fact.named)
    if fact.named.pod == fact.pod or known is None or state.may_have_forgotten:
        return since
    return max(since, known.clean_from or 0)


def _has_served(state: CoordinatorState, device: Slot) -> bool:
    """Return whether a device is or may have been a member: else no state contains its steps."""
    known = state.slot(device)
    return state.may_have_forgotten or (known is not None and known.stage is not None)


def _newest(taints: tuple[Taint, ...]) -> tuple[Taint, ...]:
    """Return as many as a job tells of: undone ones go first, then the oldest."""
    surplus = len(taints) - MAX_TAINTS
    dropped = sorted(range(len(taints)), key=lambda i: (taints[i].counts, i))[: max(surplus, 0)]
    return tuple(t for i, t in enumerate(taints) if i not in dropped)


def _undone_in(state: CoordinatorState, fact: Named, since: int) -> str:
    """Return the quorum of a restart that undid what a device had computed, which is told late.

    Args:
        state: of a job of which the device is no member.
        fact: what is told.
        since: first step that the device may have computed wrongly.
    """
    if fact.quorum is None or fact.quorum.id >= state.restarted_id:
        return ""
    known = [t for t in state.taints if t.slot == fact.named and t.undone_in and t.since <= since]
    if known:
        return known[-1].undone_in
    plan, step = state.plan, state.settled_step
    goes_on = plan is not None and plan.quorum.id == state.restarted_id
    return str(plan.quorum) if plan and goes_on and step is not None and since >= step else ""


def _named_again(
    state: CoordinatorState, known: Taint, fact: Named, since: int
) -> CoordinatorState:
    """Return the state with what another word says of a device that was named before."""
    if not known.counts:
        return state
    changed = replace(known, since=min(known.since, since))
    is_later = (fact.step or 0) > known.named_in
    if is_later and state.config.goes_back and _has_served(state, known.slot):
        # Named in a later step: the job wants to go back by now, and did not perhaps before.
        changed = replace(changed, is_due=True)
    taints = tuple(changed if t is known else t for t in state.taints)
    return replace(state, taints=taints)


def note_clean(state: CoordinatorState, devices: Iterable[CleanDevice]) -> CoordinatorState:
    """Return the state that knows since when no witness has agreed with devices."""
    known = {s.slot: s for s in state.slots}
    changed = [_told(known[d.slot], d.clean_from) for d in devices if d.slot in known]
    return with_slots(state, changed)


def _told(known: SlotState, clean_from: int) -> SlotState:
    """Return a slot of whose device its trainer tells since when no witness has agreed with it.

    That grows by nothing but a witness. What is told first may be where the trainer began.
    """
    before = known.clean_from
    if clean_from == before:
        return known
    agreed = before is not None and clean_from > before
    return replace(known, clean_from=clean_from, witnessed_at=clean_from - 1 if agreed else None)


def count_witnessed(state: CoordinatorState) -> Witnessed | None:
    """Return with how many members a witness has agreed in the last round; None without one.

    Of the newest step that is not known yet: trainers tell of a step in the vote of the next.
    """
    plan, every_steps = state.in_force, state.checks_in_force.witness_every_steps
    if plan is None or not every_steps:
        return None
    since = state.step - 1 - every_steps * len(plan.chains)
    members = {m.slot for m in plan.members}
    clean = {s.slot for s in state.slots if s.witnessed_at is not None and s.witnessed_at >= since}
    return Witnessed(num_clean=len(clean & members), num_devices=len(members))


def forget_clean(state: CoordinatorState, step: int) -> CoordinatorState:
    """Return the state of a job that goes on at a step: what comes again nobody has compared."""
    late = [s for s in state.slots if s.clean_from is not None and s.clean_from > step]
    return with_slots(state, [replace(s, clean_from=step, witnessed_at=None) for s in late])


def note_gone(state: CoordinatorState, step: int) -> CoordinatorState:
    """Return the state in which devices that are no members any more taint nothing from ``step``.

    Args:
        state: of a job whose members all go on.
        step: at which they do, or which they have committed in the newest plan.
    """
    plan = state.plan
    if plan is None or not any(t.counts for t in state.taints):
        return state
    members = {m.slot for m in plan.members}
    taints = tuple(
        t if not t.counts or t.slot in members else _over_at(t, step, plan) for t in state.taints
    )
    return replace(state, taints=taints)


def note_again(state: CoordinatorState, step: int) -> CoordinatorState:
    """Return the state of a job that has loaded version ``step``: members compute from there on.

    A named device that is a member still does so, too, and computes wrongly each time.
    """
    plan = state.plan
    if plan is None or plan.method not in _LOADS:
        return state
    members = {m.slot for m in plan.members}
    taints = tuple(
        replace(t, since=min(t.since, step)) if t.counts and t.slot in members else t
        for t in state.taints
    )
    return replace(state, taints=taints)


def _over_at(taint: Taint, step: int, plan: Plan) -> Taint:
    """Return the taint of a device that takes no part from a step on, or that did not before.

    No state contains its steps if all go on before them. Who keeps its state may hold what a step
    that is under way was given by the device.
    """
    first = step if plan.method in _LOADS else step + 1
    if taint.since >= first:
        return replace(taint, undone_in=str(plan.quorum))
    until = max(step, taint.since)
    return replace(taint, until=until if taint.until is None else min(until, taint.until))


def recovered(state: CoordinatorState, plan: Plan) -> CoordinatorState:
    """Return the state with the taints of which a recovered plan tells.

    It is newer than what the store may have kept: of a device that it names it knows more. What it
    tells of steps that the job does not have is dropped: the plan itself is in force all the same.
    """
    steps = state.shape.steps
    told = [replace(t, named_in=min(t.named_in, steps)) for t in plan.taints if t.since <= steps]
    named = {t.slot for t in told}
    kept = tuple(t for t in state.taints if t.slot not in named)
    return replace(state, taints=_newest((*kept, *told)))


def leave_as_named(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Return the state in which all pods leave of which the taints name a device."""
    for pod in state.pods:
        named = with_reason(state, pod, now_s)
        state = state if named == pod else with_pod(state, named)
    return state


def with_reason(state: CoordinatorState, pod: PodState, now_s: float) -> PodState:
    """Return a pod that leaves if the taints name a device of it; it may be a spare by now."""
    named = [t for t in state.taints if t.slot.pod == uid_of(pod)]
    if not named or pod.leaving:
        return pod
    newest = named[-1]
    why = (
        f"the device of {newest.trainer} computes wrongly each time (named in step "
        f"{newest.named_in})"
    )
    return replace(pod, leaving=why, leaving_at_s=now_s)


def due_taints(state: CoordinatorState) -> tuple[Taint, ...]:
    """Return the tainted steps before which the job has still to go back."""
    if not state.config.goes_back:
        return ()
    return tuple(t for t in state.taints if t.is_due and t.counts)


def go_back(state: CoordinatorState, now_s: float, nonce: str) -> Transition | None:
    """Have all members go back before tainted steps, without the devices that have tainted them.

    Returns:
        None: there are none, or some stage cannot do without such a device yet. The job goes on
        then, and its pod hands its work over as soon as somebody comes.
    """
    due = due_taints(state)
    if not due or state.plan is None or state.plan.pause:
        return None
    pods = {t.slot.pod for t in due}
    left = [m for m in state.plan.members if m.slot.pod in pods]
    reason = (
        f"{count(len(due), 'device')} computed wrongly each time: all go back to the newest "
        f"checkpoint that is no later than step {first_taint(due)}, or to the seed"
    )
    draft = Draft(method=Method.RESTART, planned=False, reason=reason, now_s=now_s, nonce=nonce)
    takers = usable_slots(state, now_s)
    plan = seating.void_plan(state, draft, takers, frozenset(m.slot for m in left))
    if plan is None:
        return None
    plan = with_voided(plan, first_taint(due))
    state = open_taint(state, left, plan, "; ".join(t.describe() for t in due), reason)
    return publish(undone(state, plan), plan, JobPhase.RECOVERING)


def first_taint(due: tuple[Taint, ...]) -> int:
    """Return the newest version that none of the devices has tainted."""
    return min(t.since for t in due)


def with_voided(plan: Plan, version: int) -> Plan:
    """Return a plan of a new lineage that tells that later versions of older ones are void."""
    new = Voided(quorum=plan.quorum.id, lineage=plan.lineage, version=version)
    return replace(plan, voided=(*plan.voided, new)[-MAX_VOIDED:])


def undone(state: CoordinatorState, plan: Plan) -> CoordinatorState:
    """Return the state in which a plan has the job go back before all that is due.

    What other devices have tainted since is undone with it. One that goes on taints it again.
    """
    version, members = plan.voided[-1].version, {m.slot.pod for m in plan.members}
    taints = tuple(
        t
        if not t.counts or t.since < version
        else replace(t, since=version, named_in=max(version, t.named_in))
        if t.slot.pod in members
        else replace(t, undone_in=str(plan.quorum))
        for t in state.taints
    )
    return replace(
        state,
        taints=taints,
        restarted_id=plan.quorum.id,
        durable=min(state.durable, version),
    )
