"""Notes which checkpoints are durable, which steps a restart loses, and what a replay came to.

The trainers decide by themselves which version they load (protocol section 6). The ladder's reason,
the status and the count of lost steps are derived from what is noted here.
"""

from __future__ import annotations

from mainstay_core.base.ids import Slot
from mainstay_core.base.values import replace
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.state import CheckpointTeller, CoordinatorState, OpenRecovery
from mainstay_core.wire.facts import Adopted, Checkpoint, Settled
from mainstay_core.wire.plan import Method


def note_checkpoint(state: CoordinatorState, fact: Checkpoint, now_s: float) -> Transition:
    """Return the state with a version durable, or with why a version is late or failed."""
    del now_s
    durable = max(state.durable, _counting(state, fact))
    if not fact.complete:
        slot = Slot(pod=fact.pod, index=fact.slot)
        teller = CheckpointTeller(slot=slot, incarnation=fact.incarnation, step=fact.step)
        noted = replace(
            state, durable=durable, checkpoint_problem=fact.evidence, checkpoint_teller=teller
        )
        told_by = slot_name(state, slot)
        message = f"{describe_problem(noted)} (told by {told_by}); training goes on"
        announce = Announce(code="CheckpointProblem", message=message, warning=True)
        actions = () if teller == state.checkpoint_teller else (announce,)
        return Transition(state=noted, actions=actions, reason=message)
    if durable == state.durable:
        return Transition(state=state, reason="known to be durable")
    message = f"the checkpoint of step {durable} is durable"
    return Transition(
        state=replace(state, durable=durable, checkpoint_problem="", checkpoint_teller=None),
        actions=(Announce(code="CheckpointComplete", message=message),),
        reason=message,
    )


def _counting(state: CoordinatorState, fact: Checkpoint) -> int:
    """Return the version that a fact tells of; 0 of none, and of one that does not count any more.

    Such a fact comes late: the job went back before what was computed in the fact's quorum.
    """
    told, quorum = fact.durable or 0, fact.quorum
    voided = state.plan.voided if state.plan is not None else ()
    late = any(quorum is None or quorum.id < v.quorum for v in voided if told > v.version)
    return 0 if late else told


def describe_problem(state: CoordinatorState) -> str:
    """Return why no newer version is complete, and since which step; empty if nothing is wrong."""
    if not state.checkpoint_problem:
        return ""
    since = f"since step {state.durable}" if state.durable else "yet"
    return f"nothing has been saved {since}: {state.checkpoint_problem}"


def note_settled(state: CoordinatorState, fact: Settled) -> CoordinatorState:
    """Return the state after a settle, with the newest version that its members found on the disk.

    That version may be older than the one known before: the newest may have been damaged.
    """
    return state if fact.durable is None else replace(state, durable=fact.durable)


def note_replayed(state: CoordinatorState, fact: Settled) -> CoordinatorState:
    """Return the state in which open replays have how a position was made anew.

    All members of a position make the same state. The slowest of them counts.
    """
    new = fact.replayed
    if new is None:
        return state

    def told(opened: OpenRecovery) -> OpenRecovery:
        recovery = opened.recovery
        if recovery.method is not Method.REPLAY or opened.load_end_s is not None:
            return opened
        by_place = {(r.stage, r.inner): r for r in recovery.replays}
        known = by_place.get((new.stage, new.inner), new)
        by_place[new.stage, new.inner] = replace(
            new,
            seconds=max(new.seconds, known.seconds),
            num_damaged=max(new.num_damaged, known.num_damaged),
        )
        replays = tuple(by_place[place] for place in sorted(by_place))
        return replace(opened, recovery=replace(recovery, replays=replays))

    return replace(state, recoveries=tuple(told(opened) for opened in state.recoveries))


def note_how(state: CoordinatorState, fact: Adopted) -> CoordinatorState:
    """Return the state in which open replays, and forks, have what the newest settle says."""

    def told(opened: OpenRecovery) -> OpenRecovery:
        if opened.recovery.method is Method.APPROXIMATE and opened.load_end_s is None:
            return opened if fact.loads is None else replace(opened, loads=fact.loads)
        waits = opened.recovery.method is Method.REPLAY and opened.load_end_s is None
        return replace(opened, settled_how=fact.evidence) if waits and fact.evidence else opened

    return replace(state, recoveries=tuple(told(opened) for opened in state.recoveries))


def note_reached(state: CoordinatorState, version: int | None) -> CoordinatorState:
    """Return the state in which some member is known to have applied ``version`` steps.

    The ledger may not show these steps yet, as the trainers that report them die as well. The steps
    that an open restart loses are counted from what was reached, not from the ledger.
    """
    if version is None:
        return state
    recoveries = []
    for opened in state.recoveries:
        recovery = opened.recovery
        judged = recovery.method in (Method.REPLAY, Method.APPROXIMATE)
        if judged and opened.load_end_s is None:
            opened = replace(opened, reached=max(version, opened.reached or 0))
        if recovery.method is Method.RESTART and version > recovery.from_step:
            more = version - recovery.from_step if opened.load_end_s is not None else 0
            lost = recovery.lost_steps + more
            recovery = replace(recovery, from_step=version, lost_steps=lost)
        recoveries.append(replace(opened, recovery=recovery))
    return replace(state, recoveries=tuple(recoveries))
