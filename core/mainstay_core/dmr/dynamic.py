"""Decides while a step runs when operators of unknown shapes or times are executed again.

Their checks wait in a queue (SpareTrain, section 5.3, for mixtures of experts). A window whose
length is known takes what fills it best, all at once. One of unknown length takes one check after
the other while it is open. Before the queue exceeds its budget, checks are executed at once: the
ones that free the most bytes for their time. At the end of a step nothing may wait any longer.

A check with a collective in it never waits: inner ranks poll at different moments, and would meet
in different collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.words import count
from mainstay_core.dmr.fits import best_fit
from mainstay_core.dmr.plan import Method
from mainstay_core.dmr.profiles import WindowKind

SPARED = 8
"""When the budget is reached, one part of so many of it is freed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """The primary execution of an operator is over."""

    operator: str
    expected_s: float
    """Of one execution, as far as is known: the last one's, or 0."""
    size_bytes: int
    """Its inputs and outputs, which a check that waits retains."""
    communicates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """An operator of a piece was executed of which more come, so no window takes the piece before
    it is complete. Or a complete one has to retain more.
    """

    piece: str
    expected_s: float
    """Of its replay."""
    size_bytes: int
    """What the piece retains more than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """All operators of a piece were executed."""

    piece: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOpened:
    """The stage begins to wait."""

    kind: WindowKind
    length_s: float | None
    """None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDone:
    """A check is over, and its window is still open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed:
    """The stage ends its wait, as what it waited for is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Checks cannot wait any longer: their memory is about to be overwritten, or a shard type that
    they belong to is about to count.
    """

    operators: tuple[str, ...]
    """Those of them that wait are executed, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnding:
    """All is executed, and the vote comes: no check may wait any longer."""


Event = Executed | Grown | Completed | WindowOpened | CheckDone | WindowClosed | Needed | StepEnding


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An operator to execute again now, and how that is counted."""

    operator: str
    method: Method


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckQueue:
    """The checks that wait.

    Invariant: they retain no more than the budget.
    """

    budget_bytes: int
    waiting: tuple[Executed, ...] = ()
    """In order of execution; those of pieces in the order in which these became complete."""
    growing: tuple[Executed, ...] = ()
    """Pieces that are not complete yet, in the order in which they began."""
    size_bytes: int = 0
    """The sum of what all of these retain."""
    window: WindowKind | None = None
    """The open window of unknown length; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The queue after an event, and what to execute again now, in order."""

    queue: CheckQueue
    checks: tuple[Check, ...]
    reason: str


def step(queue: CheckQueue, event: Event) -> Decision:
    """Return what follows from an event. Equal arguments give equal decisions.

    Raises:
        LocalProtocolError: the event does not fit the queue's state: a window opens or an operator
            is executed while one is open, or one closes that is not.
    """
    match event:
        case Executed():
            return _enqueue(queue, event)
        case Grown():
            return _grow(queue, event)
        case Completed():
            return _complete(queue, event)
        case WindowOpened():
            return _open(queue, event)
        case CheckDone():
            return _drain(queue)
        case WindowClosed():
            # A window of known length is not waited for check by check, and closes silently.
            return Decision(
                queue=replace(queue, window=None), checks=(), reason="the window closes"
            )
        case Needed():
            names = frozenset(event.operators)
            gone = [c for c in (*queue.growing, *queue.waiting) if c.operator in names]
            return _naive(queue, gone, "they are needed now")
        case StepEnding():
            return _end(queue)


def _enqueue(queue: CheckQueue, executed: Executed) -> Decision:
    _require_closed(queue, executed.operator)
    at_once = Check(operator=executed.operator, method=Method.NAIVE)
    if executed.communicates:
        reason = "a check that communicates does not wait"
        return Decision(queue=queue, checks=(at_once,), reason=reason)
    if executed.size_bytes > queue.budget_bytes:
        reason = "it retains more than the whole budget"
        return Decision(queue=queue, checks=(at_once,), reason=reason)
    longer = replace(
        queue,
        waiting=(*queue.waiting, executed),
        size_bytes=queue.size_bytes + executed.size_bytes,
    )
    return _keep_budget(longer)


def _grow(queue: CheckQueue, grown: Grown) -> Decision:
    _require_closed(queue, grown.piece)
    growing, waiting = list(queue.growing), list(queue.waiting)
    known = next(
        (
            (checks, at)
            for checks in (growing, waiting)
            for at, check in enumerate(checks)
            if check.operator == grown.piece
        ),
        None,
    )
    before = 0 if known is None else known[0][known[1]].size_bytes
    whole = Executed(
        operator=grown.piece,
        expected_s=grown.expected_s,
        size_bytes=before + grown.size_bytes,
    )
    if known is None:
        growing.append(whole)
    else:
        known[0][known[1]] = whole
    longer = replace(
        queue,
        growing=tuple(growing),
        waiting=tuple(waiting),
        size_bytes=queue.size_bytes + grown.size_bytes,
    )
    if whole.size_bytes > queue.budget_bytes:
        return _naive(longer, [whole], "it retains more than the whole budget")
    return _keep_budget(longer)


def _complete(queue: CheckQueue, completed: Completed) -> Decision:
    done = tuple(piece for piece in queue.growing if piece.operator == completed.piece)
    left = tuple(piece for piece in queue.growing if piece.operator != completed.piece)
    return Decision(
        queue=replace(queue, waiting=(*queue.waiting, *done), growing=left),
        checks=(),
        reason="the piece is complete",
    )


def _require_closed(queue: CheckQueue, operator: str) -> None:
    if queue.window is not None:
        raise LocalProtocolError(f"{operator} is executed in an open window")


def _keep_budget(queue: CheckQueue) -> Decision:
    """Have checks executed at once, beyond the budget, until the rest is within 7/8 of it.

    Else each further operator would have all that waits sorted again.
    """
    if queue.size_bytes <= queue.budget_bytes:
        return Decision(queue=queue, checks=(), reason="it waits")
    excess = queue.size_bytes - (queue.budget_bytes - queue.budget_bytes // SPARED)
    checks = (*queue.growing, *queue.waiting)
    gone: list[int] = []
    for at in sorted(range(len(checks)), key=lambda at: (_time_per_byte(checks[at]), at)):
        if excess <= 0:
            break
        gone.append(at)
        excess -= checks[at].size_bytes
    reason = f"the budget of {queue.budget_bytes} bytes is reached"
    return _naive(queue, [checks[at] for at in gone], reason)


def _time_per_byte(check: Executed) -> float:
    return check.expected_s / max(1, check.size_bytes)


def _naive(queue: CheckQueue, gone: Sequence[Executed], reason: str) -> Decision:
    """Have checks of the queue executed at once, in the order in which they are given."""
    ended = {id(check) for check in gone}
    return Decision(
        queue=replace(
            queue,
            waiting=tuple(check for check in queue.waiting if id(check) not in ended),
            growing=tuple(check for check in queue.growing if id(check) not in ended),
            size_bytes=queue.size_bytes - sum(check.size_bytes for check in gone),
        ),
        checks=tuple(Check(operator=check.operator, method=Method.NAIVE) for check in gone),
        reason=reason,
    )


def _open(queue: CheckQueue, opened: WindowOpened) -> Decision:
    if queue.window is not None:
        raise LocalProtocolError("a window opens in an open window")
    if opened.length_s is None:
        return _drain(replace(queue, window=opened.kind))
    chosen = set(best_fit([check.expected_s for check in queue.waiting], opened.length_s))
    kept = tuple(check for at, check in enumerate(queue.waiting) if at not in chosen)
    method, taken = Method(opened.kind.value), sum(queue.waiting[at].size_bytes for at in chosen)
    return Decision(
        queue=replace(queue, waiting=kept, size_bytes=queue.size_bytes - taken),
        checks=tuple(
            Check(operator=queue.waiting[at].operator, method=method) for at in sorted(chosen)
        ),
        reason=f"{count(len(chosen), 'check')} fit best into {opened.length_s:.6g} s",
    )


def _drain(queue: CheckQueue) -> Decision:
    """Take the oldest check, as long as a window of unknown length is open."""
    if queue.window is None:
        raise LocalProtocolError("a check is over in no open window")
    if not queue.waiting:
        return Decision(queue=queue, checks=(), reason="no check waits")
    first = queue.waiting[0]
    return Decision(
        queue=replace(
            queue, waiting=queue.waiting[1:], size_bytes=queue.size_bytes - first.size_bytes
        ),
        checks=(Check(operator=first.operator, method=Method(queue.window.value)),),
        reason="one check while the window is open",
    )


def _end(queue: CheckQueue) -> Decision:
    if queue.window is not None:
        raise LocalProtocolError("the step ends in an open window")
    every = (*queue.growing, *queue.waiting)
    return _naive(queue, every, "all checks are over before the vote")
