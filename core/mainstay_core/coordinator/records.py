"""Keeps the record of each recovery and its five times (design 13.9).

    death --detect--> first fact at the api --decide--> plan stored
          --fence--> last survivor holds all settle reports
          --load--> last survivor has state and table
          --resume--> next commit of a step

A death that was found out by waiting is dated by the last sign of life, so the wait is a part of
detect (:mod:`mainstay_core.coordinator.intake.silence`). How much later than normal the next commit
came follows from the ledger's times alone (:mod:`mainstay_core.coordinator.progress`).

Times are differences of wall clocks of one machine, or of machines kept in step. They are shown and
never decide anything: a wrong clock yields a wrong number and nothing else. Negative times are
shown as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.base.values import replace
from mainstay_core.base.words import count
from mainstay_core.coordinator.events import StepsCommitted
from mainstay_core.coordinator.names import pod_name, slot_name
from mainstay_core.coordinator.state import (
    CoordinatorState,
    FiredFault,
    OpenRecovery,
    PodState,
    median,
    uid_of,
)
from mainstay_core.faults.points import OWN_ACTIONS
from mainstay_core.wire.plan import Member, Method, Plan
from mainstay_core.wire.recoveries import Recovery, StageTimes, describe_replays

_TO_JOINERS = (Method.JOIN, Method.REPLAY, Method.RESTART, Method.APPROXIMATE)
"""Methods whose recovery is over only when members have a state that had none."""


def open_loss(
    state: CoordinatorState,
    lost: Sequence[Member],
    plan: Plan,
    reason: str,
    allowed_by: str = "",
) -> CoordinatorState:
    """Return the state with a recovery of lost members begun. Call it before the plan is set.

    Args:
        state: of the job.
        lost: members.
        plan: that answers their loss.
        reason: why by this method.
        allowed_by: who has allowed it for this once; empty: it is the job's policy.
    """
    deaths, learnt, fired = [], [plan.created_at_s], list(state.fired)
    waited = state.waiting.reason if state.waiting else "no detail"
    if state.suspicion:
        learnt.append(state.suspicion.first_s)
    for member in lost:
        slot = state.slot(member.slot)
        assert slot is not None
        at_s = slot.down_at_s
        learnt.append(slot.learnt_down_s)
        injected = _injected(state, fired, member, slot.learnt_down_s)
        if injected is not None:
            at_s = fired[injected].at_s
            fired[injected] = replace(fired[injected], matched=True)
        deaths.append(at_s)
    return _open(
        replace(state, fired=tuple(fired)),
        plan,
        fault=_loss_sentence(state, lost) or waited,
        reason=reason,
        members=lost,
        died_at_s=min(deaths, default=plan.created_at_s),
        first_fact_s=min(learnt),
        allowed_by=allowed_by,
    )


def open_suspicion(
    state: CoordinatorState,
    excluded: Sequence[Member],
    plan: Plan,
    reason: str,
    allowed_by: str = "",
) -> CoordinatorState:
    """Return the state with the recovery of a failed collective begun.

    Args:
        state: of the job.
        excluded: members that the plan leaves out.
        plan: by which the job goes on.
        reason: of the plan.
        allowed_by: who has allowed an approximate recovery for this once.
    """
    suspicion = state.suspicion
    assert suspicion is not None
    who = ", ".join(slot_name(state, s) for s in suspicion.reporters)
    what = "devices disagree" if suspicion.doubted else "a collective failed"
    fault = f"{what}, told by {who}: {suspicion.evidence or 'no detail'}"
    if suspicion.unreached:
        fault = f"no store brings back what is lost: {suspicion.evidence}"
    return _open(
        state,
        plan,
        fault=fault if suspicion.repeats is None else "nothing has failed",
        reason=reason,
        members=excluded,
        died_at_s=suspicion.observed_at_s,
        first_fact_s=suspicion.first_s,
        differing=suspicion.differing,
        allowed_by=allowed_by,
    )


def open_join(state: CoordinatorState, plan: Plan, reason: str) -> CoordinatorState:
    """Return the state with the join of missing replicas begun."""
    assert state.plan is not None
    missing = state.wanted - len(state.plan.chains)
    return _open(
        state,
        plan,
        fault=f"missing: {missing} of {count(state.wanted, 'replica')}",
        reason=reason,
        members=[m for m in plan.members if m.joining],
        died_at_s=plan.created_at_s,
        first_fact_s=plan.created_at_s,
    )


def open_hand_over(
    state: CoordinatorState, pods: Sequence[PodState], plan: Plan, reason: str
) -> CoordinatorState:
    """Return the state with the hand-over of leaving pods begun. Nobody has failed."""
    assert state.plan is not None
    uids = {uid_of(p) for p in pods}
    said = "; ".join(f"pod {p.registration.name} will leave: {p.leaving}" for p in pods)
    return _open(
        state,
        plan,
        fault=said,
        reason=reason,
        members=[m for m in state.plan.members if m.slot.pod in uids],
        died_at_s=plan.created_at_s,
        first_fact_s=plan.created_at_s,
    )


def open_taint(
    state: CoordinatorState, left: Sequence[Member], plan: Plan, fault: str, reason: str
) -> CoordinatorState:
    """Return the state with the return before tainted steps begun.

    Args:
        state: of the job.
        left: members that the plan leaves out.
        plan: with which all go back.
        fault: which steps are tainted, and by whom.
        reason: of the plan.
    """
    return _open(
        state,
        plan,
        fault=fault,
        reason=reason,
        members=left,
        died_at_s=plan.created_at_s,
        first_fact_s=plan.created_at_s,
    )


def drop_hand_overs(state: CoordinatorState, left: Sequence[Member]) -> CoordinatorState:
    """Return the state without the open hand-overs of members that ended before they were adopted.

    Their work was not handed over: what is done about their end is the one recovery of it.
    """
    slots = {m.slot for m in left}
    kept = tuple(o for o in state.recoveries if is_shown(o) or not slots & set(o.recovery.slots))
    return replace(state, recoveries=kept)


def is_shown(opened: OpenRecovery) -> bool:
    """Return whether a recovery is to be stored for people.

    A hand-over is none before all have adopted its plan: if the pod ends earlier, that is a fault.
    """
    return opened.recovery.method is not Method.HAND_OVER or opened.load_end_s is not None


def _open(
    state: CoordinatorState,
    plan: Plan,
    *,
    fault: str,
    reason: str,
    members: Sequence[Member],
    died_at_s: float,
    first_fact_s: float,
    differing: tuple[Slot, ...] = (),
    allowed_by: str = "",
) -> CoordinatorState:
    allowed = f"; {allowed_by} allowed it" if allowed_by else ""
    opened = OpenRecovery(
        recovery=Recovery(
            fault=fault,
            method=plan.method,
            exact=plan.fork is None,
            reason=f"{reason}{allowed}",
            quorum=plan.quorum,
            from_step=state.step,
            slots=tuple(m.slot for m in members),
            started_at_s=died_at_s,
            differing=differing,
            allowed_by=allowed_by,
        ),
        died_at_s=died_at_s,
        first_fact_s=first_fact_s,
        durable_s=plan.created_at_s,
    )
    opened = replace(opened, recovery=_timed(opened))
    return replace(state, recoveries=(*state.recoveries, opened))


def _injected(
    state: CoordinatorState, fired: Sequence[FiredFault], member: Member, learnt_s: float
) -> int | None:
    """Return the index of the newest injected fault that explains the loss and is not used yet.

    A fault that lasts a while explains what was noted before it was over. One that a trainer
    carries out itself, and lives on, explains none.
    """
    lasts_s = {fault.id: fault.for_s for fault in state.config.faults}
    harmless = {fault.id for fault in state.config.faults if fault.action in OWN_ACTIONS}
    for index in reversed(range(len(fired))):
        fault = fired[index]
        here = fault.pod == member.slot.pod and fault.slot in (None, member.slot.index)
        for_s = lasts_s.get(fault.fault)
        here = here and fault.fault not in harmless
        if here and not fault.matched and (for_s is None or learnt_s <= fault.at_s + for_s):
            return index
    return None


def _loss_sentence(state: CoordinatorState, lost: Sequence[Member]) -> str:
    """Return a sentence that names ranks and slots. The slots of one lost pod are one fault."""
    parts = []
    for uid in dict.fromkeys(m.slot.pod for m in lost):
        members = [m for m in lost if m.slot.pod == uid]
        ranks = ", ".join(str(m.rank) for m in members)
        pod = state.pod(uid)
        if pod is not None and pod.gone:
            parts.append(f"pod {pod_name(state, uid)} ({ranks}) is gone: {pod.why or 'no detail'}")
            continue
        for member in members:
            slot = state.slot(member.slot)
            why = slot.why if slot and slot.why else "no detail"
            parts.append(f"trainer {slot_name(state, member.slot)} ({member.rank}) ended: {why}")
    return "; ".join(parts)


def plan_stored(state: CoordinatorState, quorum: QuorumId, at_s: float) -> CoordinatorState:
    """Return the state in which the plan of the recoveries of ``quorum`` was stored at ``at_s``."""
    return _update(
        state, lambda o: replace(o, durable_s=at_s) if o.recovery.quorum == quorum else o
    )


def plan_settled(state: CoordinatorState) -> CoordinatorState:
    """Return the state after the last member went on.

    Fence and load of open recoveries are known.
    """
    assert state.plan is not None
    counted = [
        m.index for m in state.plan.members if not m.joining or state.plan.method in _TO_JOINERS
    ] or [m.index for m in state.plan.members]
    load_end_s = max(state.settled_at_s[i] for i in counted)
    fence_end_s = max(state.adopted_at_s.get(i, state.settled_at_s[i]) for i in counted)
    step = state.settled_step
    if step is not None:
        state = _judge_replays(state, step)
    # A restart may fail and be followed by other plans before the job goes on: the steps are lost
    # once, by the first of them.
    waiting = [o for o in state.recoveries if o.load_end_s is None]
    restart = next((o for o in waiting if o.recovery.method is Method.RESTART), None)

    def settle(opened: OpenRecovery) -> OpenRecovery:
        if opened.load_end_s is not None:
            return opened
        recovery = opened.recovery
        if opened is restart and step is not None:
            recovery = replace(recovery, lost_steps=max(0, recovery.from_step - step))
        if recovery.replays:
            how = describe_replays(recovery.replays)
            recovery = replace(recovery, reason=f"{recovery.reason}; {how}")
        if not recovery.exact and state.is_history_told:
            recovery = _judge_fork(state, recovery, opened.loads)
        return replace(opened, recovery=recovery, fence_end_s=fence_end_s, load_end_s=load_end_s)

    return _update(state, settle)


def _judge_fork(state: CoordinatorState, recovery: Recovery, loads: bool | None) -> Recovery:
    """Return the record of a recovery that was ordered to make stages anew, as it came out.

    Where they went on from what somebody held after all, or from a checkpoint, nothing of the job's
    course was lost.
    """
    assert state.plan is not None
    told = state.told_history
    if told is not None and told.made:
        reason = f"{recovery.reason}; {told.newest[-1].made.reason}"
        return replace(recovery, approximate_since=told.since, reason=reason)
    recovery = replace(recovery, exact=True)
    if recovery.method is not Method.APPROXIMATE:
        return recovery
    if recovery.quorum != state.plan.quorum:
        reason = f"{recovery.reason}; {state.plan.quorum} ended it"
        return replace(recovery, reason=reason)
    step = state.settled_step
    if loads is None:  # of pods of the version before
        loads = step is not None and step <= state.durable
    if loads and step is not None:
        where = f"step {step}, which is on the disk" if step else "the seed's initial state"
        reason = f"{recovery.reason}; in the end nothing was made anew: all went on from {where}"
        return replace(recovery, method=Method.RESTART, reason=reason)
    reason = f"{recovery.reason}; in the end nothing was made anew, as somebody held it"
    return replace(recovery, method=Method.MASK, reason=reason)


def how_replayed(state: CoordinatorState) -> str:
    """Return how lost states were made anew for the newest plan, as the end of a sentence."""
    assert state.plan is not None
    ours = (o.recovery for o in state.recoveries if o.recovery.quorum == state.plan.quorum)
    return "".join(f"; {describe_replays(r.replays)}" for r in ours if r.replays)


def _judge_replays(state: CoordinatorState, step: int) -> CoordinatorState:
    """Return the state in which replays, and forks, that came back to an older step are restarts.

    A member that was left stood at a version. If the job goes on there, nothing is lost: a step
    that only the dead had applied is done again, as under a mask. Where nobody was left to stand
    anywhere, the ledger's steps count.

    Args:
        state: of the job, before its open recoveries are settled.
        step: at which all go on.
    """
    assert state.plan is not None
    judged, quorum = [], state.plan.quorum.id
    for opened in state.recoveries:
        recovery = opened.recovery
        stood = max(recovery.from_step, state.step) if opened.reached is None else opened.reached
        # One that another plan ended was a fork, and of the newest its members' word counts alone.
        is_newest = recovery.quorum.id == quorum and opened.reached is not None
        forks = recovery.method is Method.APPROXIMATE and is_newest
        may_go_back = recovery.method is Method.REPLAY or forks
        waits = may_go_back and opened.load_end_s is None
        if waits and step < stood:
            how = opened.settled_how or f"step {step}"
            recovery = replace(
                recovery,
                method=Method.RESTART,
                from_step=stood,
                reason=f"{recovery.reason}; in the end all went on from {how}",
            )
            state = replace(state, restarted_id=quorum)
        judged.append(replace(opened, recovery=recovery))
    return replace(state, recoveries=tuple(judged))


def step_committed(
    state: CoordinatorState, event: StepsCommitted, late_s: float | None
) -> CoordinatorState:
    """Return the state after a commit, which came ``late_s`` later than normal, if that is known.

    Only the first commit counts that a recovery's quorum, or a later one, has made.
    """

    def commit(opened: OpenRecovery) -> OpenRecovery:
        if opened.commit_at_s is not None or event.quorum.id < opened.recovery.quorum.id:
            return opened
        recovery = opened.recovery
        if not recovery.exact and recovery.approximate_since is None:
            # Of members that are only known to have settled as they commit.
            recovery = replace(recovery, approximate_since=event.approximate_since)
        return replace(opened, recovery=recovery, commit_at_s=event.committed_at_s, late_s=late_s)

    return _update(state, commit)


def close_known(state: CoordinatorState) -> tuple[CoordinatorState, tuple[Recovery, ...]]:
    """Return the state without the recoveries whose times are complete, and these recoveries."""
    ready = [o for o in state.recoveries if o.load_end_s is not None and o.commit_at_s is not None]
    if not ready:
        return state, ()
    rest = tuple(o for o in state.recoveries if o not in ready)
    return replace(state, recoveries=rest), tuple(_closed(state, o) for o in ready)


def close_all(state: CoordinatorState) -> tuple[CoordinatorState, tuple[Recovery, ...]]:
    """Return the state without open recoveries, and these recoveries: the job has ended."""
    closed = tuple(_closed(state, o) for o in state.recoveries if is_shown(o))
    return replace(state, recoveries=()), closed


def _update(
    state: CoordinatorState, change: Callable[[OpenRecovery], OpenRecovery]
) -> CoordinatorState:
    changed = [change(o) for o in state.recoveries]
    return replace(state, recoveries=tuple(replace(o, recovery=_timed(o)) for o in changed))


def _closed(state: CoordinatorState, opened: OpenRecovery) -> Recovery:
    recovery = _timed(opened)
    times = recovery.times
    after_s = opened.late_s
    if after_s is None and times.resume_s is not None:
        # There is no commit before, or the store has lost it: the death is all that is known.
        total = sum(t for t in times.by_stage.values() if t is not None)
        after_s = max(0.0, total - median(state.step_seconds))
    return replace(recovery, done=True, first_commit_after_s=after_s)


def _timed(opened: OpenRecovery) -> Recovery:
    """Return the record with the times that are known so far."""

    def between(start_s: float, end_s: float | None) -> float | None:
        return None if end_s is None else max(0.0, end_s - start_s)

    fence_end_s = opened.fence_end_s if opened.fence_end_s is not None else opened.durable_s
    load_end_s = opened.load_end_s if opened.load_end_s is not None else fence_end_s
    return replace(
        opened.recovery,
        times=StageTimes(
            detect_s=between(opened.died_at_s, opened.first_fact_s),
            decide_s=between(opened.first_fact_s, opened.durable_s),
            fence_s=between(opened.durable_s, opened.fence_end_s),
            load_s=between(fence_end_s, opened.load_end_s),
            resume_s=between(load_end_s, opened.commit_at_s),
        ),
    )
