"""Decides what to believe when the store lost a job or fell back to an older state.

Agents are the truth about membership (protocol section 9). Every request of a supervisor names the
plan that it holds. A store that does not know this plan is *behind*: it must be given the plan
before anything is noted or decided. The newest reported plan becomes the job's plan, and the next
id lies above it. If two plans have one id, their nonces differ: no member of one can complete
anything with a member of the other. So one of them is kept, the other is remembered as a rival, and
a plan above both brings all members together.

One supervisor's plan may not be the newest. So no plan is made before every pod was heard or is
clearly silent: a plan made from an older one could send ranks to stages that they no longer hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.coordinator.events import (
    Announce,
    PlanReported,
    PublishPlan,
    StoreReopened,
    Transition,
)
from mainstay_core.coordinator.intake.silence import patience_s
from mainstay_core.coordinator.invariants import find_contradiction
from mainstay_core.coordinator.leaving import outgoing
from mainstay_core.coordinator.names import pod_name
from mainstay_core.coordinator.state import (
    CoordinatorState,
    FiredFault,
    PodState,
    Progress,
    SlotState,
    has_members,
    uid_of,
    with_pod,
    with_slots,
)
from mainstay_core.coordinator.taints import leave_as_named, recovered
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import PodRegistration
from mainstay_core.wire.plan import Member, Method, Plan


class StoreBehindError(RemoteProtocolError):
    """A supervisor holds a plan that the store does not know. It has to report the plan first."""


MAX_TOLD_ID = 2**52
"""Bound on the id of a quorum that a supervisor tells of: later ids must fit in a message."""


def is_behind(state: CoordinatorState, held: QuorumId | None) -> bool:
    """Return whether a supervisor that holds ``held`` knows more than this state.

    That is so for a newer id, and for the same id with a nonce that the state does not know. The
    supervisor then has to report its plan first.
    """
    if held is None or state.terminal:
        return False
    if state.plan is None:
        return True
    ours = state.plan.quorum
    if held.id != ours.id:
        return held.id > ours.id
    return held.nonce != ours.nonce and held.nonce not in state.rivals


def refuse_behind(state: CoordinatorState, held: QuorumId | None) -> None:
    """Refuse a request of a supervisor whose plan the store does not know.

    Raises:
        StoreBehindError: it does not.
    """
    if is_behind(state, held):
        ours = state.plan.quorum if state.plan is not None else "no plan"
        raise StoreBehindError(f"you hold {held}, the store has {ours}")


def note_plan(state: CoordinatorState, event: PlanReported, now_s: float) -> Transition:
    """Return the state with a supervisor's plan noted.

    The plan is recovered, a rival, known, or older.

    Raises:
        RemoteProtocolError: the supervisor tells of more steps than the job has, or of a plan that
            is none of this job.
    """
    _check_told(state, event)
    theirs = event.plan.quorum
    if not is_behind(state, theirs):
        heard = note_heard(_with_hints(state, event), (event.pod,))
        return Transition(state=heard, reason=f"{theirs} is no news")
    ours = state.plan.quorum if state.plan is not None else None
    if ours is not None and theirs.id == ours.id and state.restored == str(ours):
        # Both plans come from supervisors. Either will do, as a plan above both follows.
        rival = replace(state, rivals=(*state.rivals, theirs.nonce))
        return Transition(
            state=note_heard(rival, (event.pod,)), reason=f"{theirs} is held beside {ours}"
        )
    rivals = (ours.nonce,) if ours is not None and theirs.id == ours.id else ()
    recovered = replace(_recover(state, event, now_s), rivals=rivals)
    had = f"had {ours}" if ours is not None else "did not have the job"
    message = (
        f"the store {had}: {theirs} is recovered from {pod_name(state, event.pod)}; "
        "what only the store knew of the time in between is lost"
    )
    announce = Announce(code="StoreRestored", message=message, warning=True)
    actions = (PublishPlan(plan=event.plan), announce)
    return Transition(state=recovered, actions=actions, reason=message)


def _check_told(state: CoordinatorState, event: PlanReported) -> None:
    """Refuse what no supervisor of the job holds: decisions would be made from it."""
    plan, steps = event.plan, state.shape.steps
    if event.step > steps:
        raise RemoteProtocolError(f"HeldJob.step: {event.step} is more than the job's {steps}")
    if event.approximate_since is not None and event.approximate_since > steps:
        since = event.approximate_since
        raise RemoteProtocolError(
            f"HeldJob.approximate_since: {since} is more than the job's {steps}"
        )
    if plan.quorum.id > MAX_TOLD_ID:
        raise RemoteProtocolError(f"HeldJob.plan.quorum: no plan follows on {plan.quorum.id}")
    problem = find_contradiction(plan, state.shape)
    if problem:
        raise RemoteProtocolError(f"HeldJob.plan: {problem}")


def reopen(state: CoordinatorState, event: StoreReopened, now_s: float) -> Transition:
    """Return the state after the store was started again.

    The state may be older than what pods hold.
    """
    before, state = state.server, replace(state, server=event.server)
    if not before or state.terminal:
        return Transition(state=state, reason="the store is known by its process")
    # The plan may be the same while facts reported since are lost: all pods report them again. A
    # permission may have been used since, or taken back, and nobody tells of that.
    allowed = [p.who for p in (state.permission, state.ahead) if p is not None]
    state = replace(
        state, restored_at_s=now_s, may_have_forgotten=True, permission=None, ahead=None
    )
    if state.plan is None:
        return Transition(state=state, reason="the store was started again: pods tell all again")
    unheard = tuple(sorted(uid_of(p) for p in state.pods if not p.gone))
    message = "the store was started again: all pods are heard before the next plan is made"
    if allowed:
        names = " and that of ".join(allowed)
        message += f"; the permission of {names} does not count any more"
    return Transition(
        state=replace(state, unheard=unheard),
        actions=(Announce(code="StoreReopened", message=message),),
        reason=message,
    )


def note_heard(state: CoordinatorState, pods: Collection[PodUid]) -> CoordinatorState:
    """Return the state after ``pods`` were heard and hold no plan that the store does not know."""
    if not state.unheard:
        return state
    gone = {uid_of(p) for p in state.pods if p.gone}
    left = tuple(p for p in state.unheard if p not in pods and p not in gone)
    return replace(state, unheard=left)


def note_unheard(state: CoordinatorState, behind_s: Mapping[str, float]) -> CoordinatorState:
    """Return the state that waits no longer for pods that lag behind the job's newest heartbeat."""
    patient_s = patience_s(state)
    silent = [p for p in state.unheard if behind_s.get(p, 0.0) > patient_s]
    return note_heard(state, silent)


def drop_let_go(state: CoordinatorState) -> CoordinatorState:
    """Return the state without the pods known only from a recovered plan that has dropped them.

    Most of them ended in good order long before the store lost the job. Nobody misses them.
    """
    if outgoing(state) or not any(p.placeholder for p in state.pods):
        return state
    left = {uid_of(p) for p in state.pods if p.placeholder and not has_members(state, uid_of(p))}
    if not left:
        return state
    return replace(
        state,
        pods=tuple(p for p in state.pods if uid_of(p) not in left),
        slots=tuple(s for s in state.slots if s.slot.pod not in left),
        unheard=tuple(p for p in state.unheard if p not in left),
    )


def _recover(state: CoordinatorState, event: PlanReported, now_s: float) -> CoordinatorState:
    """Return the state with the reported plan in force.

    Everything that followed the plan is unknown.

    Its members count as living until somebody reports otherwise or they fall silent. Their next
    commits show whether they have settled. The same holds for the members that the plan drops:
    until then somebody may wait for their votes. Other trainers are known again when their
    supervisors have reported them. The plan also says whether the job is to be suspended: an older
    wish may be over.
    """
    plan = event.plan
    state = leave_as_named(_with_pods(recovered(state, plan), plan), now_s)
    state = _with_slots(state, plan)
    # Whether a replay, or a fork, has lost steps is not known: nothing before its first commit
    # counts.
    is_restart = plan.method in (Method.REPLAY, Method.RESTART, Method.APPROXIMATE)
    restarted_id = plan.quorum.id if is_restart else 0
    went_back = (v.quorum for v in plan.voided)
    if _goes_another_way(state, plan):
        # Who had finished before does so again, perhaps in another way. What has been made anew
        # since, or whether all went back behind a fork, nobody tells again.
        state = replace(state, finals=(), num_forks=0, history=())
    state = replace(
        state,
        phase=JobPhase.RECOVERING,
        plan=plan,
        scaled_to=plan.replicas_wanted or state.scaled_to,
        config=state.config if plan.checks is None else state.config.with_checks(plan.checks),
        checks_at_start=plan.checks or state.checks_at_start,
        suspend=plan.suspend_wanted,
        paused=(),
        last_id=plan.quorum.id,
        restarted_id=max(state.restarted_id, restarted_id, *went_back),
        adopted_at_s={},
        settled_at_s={},
        settled_step=None,
        told_history=None,
        is_history_told=False,
        commits=0,
        started_at_s=0.0,
        progress=Progress(),
        last_commit=None,
        waiting=None,
        permission=None,
        ahead=None,
        suspicion=None,
        unreached=False,  # its members repeat it
        asked=0,
        silent=(),
        suspected_before=(),
        reforms=0,
        restored=str(plan.quorum),
        restored_at_s=now_s,
        may_have_forgotten=True,
        unheard=tuple(
            sorted(uid_of(p) for p in state.pods if not p.gone and uid_of(p) != event.pod)
        ),
    )
    return _with_hints(state, event)


def _goes_another_way(state: CoordinatorState, plan: Plan) -> bool:
    """Return whether states may have other forks under a plan than under the store's own.

    A restart of a job that has forked begins a lineage, as a fork does. A start after a suspension
    begins none: nobody is a member any more who was one before.
    """
    if state.plan is None:
        return False
    is_new = all(member.since > state.plan.quorum.id for member in plan.members)
    return is_new or plan.lineage > state.plan.lineage


def _with_pods(state: CoordinatorState, plan: Plan) -> CoordinatorState:
    """Add the pod of every member. What is known of a pod may be old until it registers."""
    hosts = {h.pod: h for h in (*plan.hosts, plan.rendezvous)}
    serving = {m.slot.pod for m in plan.members}
    everybody = (*plan.members, *plan.outgoing)
    for uid in sorted({m.slot.pod for m in everybody}):
        members = [m for m in everybody if m.slot.pod == uid]
        known, host = state.pod(uid), hosts.get(uid)
        if known is not None and known.gone and uid not in serving:
            continue
        if known is not None:
            known = replace(known, gone=False, why="", placeholder=True)
        else:
            registration = PodRegistration(
                pod=uid,
                name=uid,
                address=members[0].address,
                gather=host.gather if host else "",
                store=host.store if host else "",
                snapshots=host.snapshots if host else "",
                domain=_node_of(members) or (host.domain if host else ""),
                num_slots=1 + max(m.slot.index for m in members),
            )
            known = PodState(registration=registration, placeholder=True)
        state = with_pod(state, known)
    return state


def _with_slots(state: CoordinatorState, plan: Plan) -> CoordinatorState:
    """Return the state in which the plan's members live, and others are known when they are told.

    Since when no witness has agreed with a device is as of when the plan was made, or later: the
    ledger's entries, which are told again, say the rest.
    """
    members = {m.slot: m for m in (*plan.outgoing, *plan.members)}
    slots = []
    for known in (*state.slots, *(SlotState(slot=s) for s in members if state.slot(s) is None)):
        member = members.get(known.slot)
        if member is None:
            # The slot may have another trainer by now: its supervisor reports it again.
            slots.append(replace(known, incarnation=None, restarting=False))
            continue
        known = replace(known, clean_from=_clean_from(known, member))
        if member.hardware is not None and member.hardware.accelerator:
            known = replace(known, accelerator=member.hardware.accelerator)
        if member.incarnation in known.ended:
            slots.append(replace(known, incarnation=None, stage=member.rank.stage))
        else:
            slots.append(
                replace(
                    known,
                    incarnation=member.incarnation,
                    stage=member.rank.stage,
                    restarting=False,
                    refused="",
                )
            )
    return with_slots(state, slots)


def _node_of(members: Sequence[Member]) -> str:
    nodes = (m.hardware.node for m in members if m.hardware is not None)
    return next((node for node in nodes if node), "")


def _clean_from(known: SlotState, member: Member) -> int | None:
    return known.clean_from if member.clean_from is None else member.clean_from


def _with_hints(state: CoordinatorState, event: PlanReported) -> CoordinatorState:
    """Add what a report says besides its plan. The plan in force may already be a newer one."""
    if state.plan is None or state.terminal:
        return state
    known = {f.fault for f in state.fired}
    told = {*event.plan.faults_fired, *event.fired}
    fired = [
        FiredFault(fault=f.id, pod=PodUid(""), slot=None, rank=None, at_s=0.0, matched=True)
        for f in state.config.faults
        if f.id in told and f.id not in known
    ]
    spares = [f.id for f in state.config.faults if f.spare is not None and f.id in told]
    step, since = state.step, state.approximate_since
    if event.plan.quorum == state.plan.quorum:
        step = max(step, event.step)
        # What the quorum's first member tells counts for more, and the commits that follow.
        since = event.approximate_since if since is None and not state.is_history_told else since
    return replace(
        state,
        step=step,
        furthest=max(state.furthest, step),
        approximate_since=since,
        fingerprint=event.fingerprint if state.fingerprint is None else state.fingerprint,
        fired=(*state.fired, *fired),
        injected=(*state.injected, *(i for i in spares if i not in state.injected)),
    )
