"""Decides what follows when the members meet again and again for the same cause.

To meet again mends what was an accident. A cause that comes back is none. It is the same cause if
its kind is, and if it names a slot that it named before: as a source (from which the fault came) or
as a witness (who saw it). What is named each time remains, so who is named by chance drops out. The
cause is forgotten once all that it names have committed ``COMMITS_THAT_CLEAR`` steps in one quorum,
and are further than they were when it came.

When it has come back ``recovery.escalateAfter`` times, the job goes on without its sources. After
twice as many it goes on without the witnesses, after three times as many all members restart from
the newest checkpoint, and after four times as many the job fails with the reason. A rung that is
not possible, as the others cannot do without, leaves it at meeting again.

Who was left out may come back and bring the cause with it, or others may meet it as well. That rung
is taken again at once then, and no further one as long as somebody is left to leave out. But if a
witness has it from others after its sources were left out, it is itself the next to go. A job that
waits for trainers (row 6 of the ladder) does not meet, so nothing repeats itself there.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.base.words import count
from mainstay_core.coordinator.causes import Repetition, Suspicion
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.state import CoordinatorState, holds_state, is_living
from mainstay_core.wire.facts import Cause

COMMITS_THAT_CLEAR = 2
"""Steps that a quorum must commit before what it met for is forgotten. One is not enough: a device
that spoils its state in a step is found by the vote on the next."""
MAX_KINDS = 16
"""Causes that are counted; the one that came back longest ago goes first."""


class Rung(enum.IntEnum):
    """The answers to a cause that comes back, the mildest first."""

    AGAIN = 0
    SOURCE = 1
    WITNESS = 2
    RESTART = 3
    FAIL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    """The answer to a cause."""

    rung: Rung
    excluded: frozenset[Slot] = frozenset()
    """Members without whom the job goes on, if it can."""
    reason: str = ""
    """One sentence for people; empty if the members just meet again."""


def cause_of(suspicion: Suspicion) -> Repetition | None:
    """Return the cause of a suspicion as something that has come once; None if nobody tells it.

    Of several kinds the most telling one counts. Who was only told of the end by others knows no
    kind, but may name a source.
    """
    seen = [c for c in suspicion.causes if not c.was_told] or list(suspicion.causes)
    if not seen:
        return None
    order = list(Cause)
    kind = min((c.kind for c in seen), key=order.index)
    named = [c for c in suspicion.causes if c.kind is kind]
    return Repetition(
        kind=kind,
        sources=tuple(sorted({slot for c in named for slot in c.sources})),
        witnesses=tuple(sorted({c.teller for c in seen if c.kind is kind})),
        evidence=suspicion.evidence,
    )


def is_undecided(suspicion: Suspicion) -> bool:
    """Return whether copies of a state differ and none has a majority.

    All of them are void then, so that the members go on from an older version.
    """
    found = any(c.kind is Cause.STATE and not c.was_told for c in suspicion.causes)
    return found and not suspicion.differing


def note_repetition(state: CoordinatorState) -> tuple[CoordinatorState, Repetition | None]:
    """Return the state with the suspicion's cause counted, and that cause; None without one."""
    assert state.suspicion is not None
    assert state.plan is not None
    new = cause_of(state.suspicion)
    if new is None:
        return state, None
    known = next((r for r in state.repetitions if _is_same(r, new)), None)
    host = state.plan.rendezvous.pod
    if known is None:
        counted = replace(new, hosts=(host,), furthest=state.step)
    else:
        counted = replace(
            _again(state, known, new),
            rung=known.rung,
            hosts=(*(h for h in known.hosts if h != host), host),
            furthest=max(known.furthest, state.step),
            doubted=known.doubted,
        )
    others = [r for r in state.repetitions if r is not known]
    return replace(state, repetitions=(*others, counted)[-MAX_KINDS:]), counted


def _is_same(known: Repetition, new: Repetition) -> bool:
    ours, theirs = {*known.sources, *known.witnesses}, {*new.sources, *new.witnesses}
    return known.kind is new.kind and not ours.isdisjoint(theirs)


def _again(state: CoordinatorState, known: Repetition, new: Repetition) -> Repetition:
    """Return a cause that has come back."""
    if not known.excluded:
        return replace(
            new,
            sources=_narrowed(known.sources, new.sources),
            witnesses=_narrowed(known.witnesses, new.witnesses),
            count=known.count + 1,
            climbed=known.climbed + 1,
        )
    rung = Rung(known.rung)
    if rung is Rung.SOURCE and not {*new.sources} & {*known.excluded}:
        rung = Rung.WITNESS
    climbed = rung * state.config.escalate_after
    return replace(new, count=known.count + 1, climbed=climbed)


def _narrowed(known: tuple[Slot, ...], new: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Return the slots that were named each time; those named now if no slot was."""
    return tuple(slot for slot in known if slot in new) or new


def escalate(state: CoordinatorState, cause: Repetition) -> Escalation:
    """Return what is done about a cause that has just come back, or come for the first time."""
    after = state.config.escalate_after
    often, rest = divmod(cause.climbed, after)
    rung = Rung(min(often, Rung.FAIL)) if rest == 0 or often >= Rung.FAIL else Rung.AGAIN
    if rung is Rung.AGAIN:
        return Escalation(rung=rung)
    said = f"{count(cause.count, 'quorum')} ended for the same cause, {_describe(state, cause)}"
    if rung is Rung.FAIL:
        return Escalation(rung=rung, reason=f"{said}; recovery.escalateAfter is {after}")
    if rung is Rung.RESTART:
        reason = f"{said}: all members restart from the newest checkpoint"
        return Escalation(rung=rung, reason=reason)
    assert state.plan is not None
    named = frozenset(cause.sources if rung is Rung.SOURCE else cause.witnesses)
    excluded = named & {m.slot for m in state.plan.members}
    if not excluded or not _can_do_without(state, excluded):
        return Escalation(rung=Rung.AGAIN)
    names = ", ".join(slot_name(state, slot) for slot in sorted(excluded))
    what = "its source" if rung is Rung.SOURCE else "its witness"
    return Escalation(rung=rung, excluded=excluded, reason=f"{said}: without {what}, {names}")


def _can_do_without(state: CoordinatorState, excluded: Collection[Slot]) -> bool:
    """Return whether every position keeps a member, and one with its state if it has one."""
    assert state.plan is not None
    for position in state.plan.positions:
        living = [m for m in position if is_living(state, m)]
        holders = [m for m in living if holds_state(state, m)]
        if all(m.slot in excluded for m in holders or living):
            return False
    return True


def _describe(state: CoordinatorState, cause: Repetition) -> str:
    named = [f"{cause.kind}"]
    if cause.sources:
        named.append(f"from {', '.join(slot_name(state, s) for s in cause.sources)}")
    if cause.witnesses:
        named.append(f"seen by {', '.join(slot_name(state, s) for s in cause.witnesses)}")
    return f"{' '.join(named)} ({cause.evidence or 'no detail'})"


def hosts_to_avoid(state: CoordinatorState, cause: Repetition | None) -> frozenset[PodUid]:
    """Return the pods where the next quorum is not to meet, if another pod can host it.

    These are the pods where it failed to meet; if that is all of them, the last one.
    """
    assert state.plan is not None
    last = state.plan.rendezvous.pod
    if cause is None:
        return frozenset({last})
    pods = {m.slot.pod for m in state.plan.members}
    failed = frozenset(h for h in cause.hosts if h in pods)
    return failed if failed != pods else frozenset({last})


def note_answer(state: CoordinatorState, cause: Repetition, answer: Escalation) -> CoordinatorState:
    """Return the state with what is done about a cause noted."""
    noted = replace(cause, rung=int(answer.rung), excluded=tuple(sorted(answer.excluded)))
    return replace(state, repetitions=tuple(noted if r is cause else r for r in state.repetitions))


def was_asked(state: CoordinatorState) -> bool:
    """Return whether the same members have met again for the doubt that the suspicion tells of."""
    assert state.suspicion is not None
    return any(r.doubted == state.suspicion.doubted for r in state.repetitions)


def note_asked(state: CoordinatorState) -> CoordinatorState:
    """Return the state in which the same members meet again for the suspicion's doubt."""
    assert state.suspicion is not None
    cause = cause_of(state.suspicion)
    if cause is None:
        return state
    doubted = state.suspicion.doubted
    noted = (replace(r, doubted=doubted) if _is_same(r, cause) else r for r in state.repetitions)
    return replace(state, repetitions=tuple(noted))


def forget_mended(state: CoordinatorState) -> CoordinatorState:
    """Return the state after a commit: what all that a cause names have overcome is forgotten.

    A cause for which some were left out stays known until these have come back and committed, too.
    After a restart the steps that are done again tell nothing of it.
    """
    if not state.repetitions or state.commits < COMMITS_THAT_CLEAR:
        return state
    assert state.plan is not None
    members = {m.slot for m in state.plan.members}
    kept = [
        r
        for r in state.repetitions
        if state.step <= r.furthest or not members.issuperset(r.excluded)
    ]
    return replace(state, repetitions=tuple(kept))
