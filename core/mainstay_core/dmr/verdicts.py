"""Judges three executions of one operator, after the first two differed.

A mismatch alone does not say which execution was wrong. So the operator is executed a third time,
and the majority is right. SpareTrain rolls the whole iteration back on each mismatch (section 4);
a third execution is cheaper, and says whether the device can be relied on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mainstay_core.base.errors import LocalProtocolError

MAX_REPEATS = 1
"""Times that a chain computes types again in a step, after as many votes that call what it computed
bad. With the next such vote another chain computes them: the ranks decide that
(:mod:`mainstay_core.rank.recheck`)."""


class Verdict(enum.StrEnum):
    """The execution that was wrong."""

    CHECKER_HIT = "checker"
    """The third equals the primary one."""
    PRIMARY_HIT = "primary"
    """The third equals the checker."""
    UNRELIABLE = "unreliable"
    """All three differ: the device computes wrongly again and again."""
    UNDECIDED = "undecided"
    """One of two executions, nobody knows which: what they were made from was gone when it was seen
    that they differ."""
    WIRE = "wire"
    """Nothing was executed: what came from another cell is not what that says it sent, or several
    ranks have computed something wrong together."""
    TRANSIENT = "transient"
    """Other devices have computed something else, and so did this one when it was asked again."""
    DETERMINISTIC = "deterministic"
    """Other devices have computed something else, and this one insists."""


class Remedy(enum.StrEnum):
    """The answer to a verdict."""

    NOTHING = "nothing"
    REPAIR = "repair"
    """The right value takes the place of the wrong one, which nobody has used."""
    VOID_TYPE = "void-type"
    """The shard type is void in its whole chain, with all it was summed into; only that is computed
    again."""
    REDUCE_AGAIN = "reduce-again"
    """The gradient is reduced once more, by all cells."""
    OTHER_COPY = "other-copy"
    """The copy counts on which most chains agree."""
    HAND_OVER = "hand-over"
    """All that the device holds of the step is void, and its work is handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict with what follows from it, and a reason for people."""

    verdict: Verdict
    remedy: Remedy
    reason: str


def judge(
    primary: str,
    checker: str,
    third: str,
    *,
    used: bool,
    goes_on: bool = False,
) -> Judgement:
    """Return which of three executions was wrong, and what is done about it.

    Args:
        primary: digest of the first execution, whose value went on.
        checker: digest of the second one.
        third: digest of the third one, from the same inputs.
        used: whether something was computed from the primary value already.
        goes_on: whether the checker's value goes on as well, as that of a recompute does. Nobody
            has used it.

    Raises:
        LocalProtocolError: the first two are equal, so that there is nothing to judge.
    """
    if primary == checker:
        raise LocalProtocolError("primary and checker are equal; no third execution is needed")
    if third == primary:
        reason = "the third execution equals the primary one: the checker was hit"
        return Judgement(
            verdict=Verdict.CHECKER_HIT,
            remedy=Remedy.REPAIR if goes_on else Remedy.NOTHING,
            reason=reason + (", and nobody has used its value" if goes_on else ""),
        )
    if third != checker:
        return Judgement(
            verdict=Verdict.UNRELIABLE,
            remedy=Remedy.HAND_OVER,
            reason="all three executions differ: the device is unreliable",
        )
    reason = "the third execution equals the checker: the primary one was hit, and "
    if not used:
        remedy, what = Remedy.REPAIR, "nobody has used its value"
    else:
        remedy, what = Remedy.VOID_TYPE, "its value was used"
    return Judgement(verdict=Verdict.PRIMARY_HIT, remedy=remedy, reason=reason + what)


def judge_late() -> Judgement:
    """Return the judgement on two executions that differ, of which nothing but that is left."""
    return Judgement(
        verdict=Verdict.UNDECIDED,
        remedy=Remedy.VOID_TYPE,
        reason="what both were made from was gone by then, so it is not known which one was wrong",
    )


def judge_raised(why: str) -> Judgement:
    """Return the judgement on an execution that raised where the next one, of the same, did not.

    Args:
        why: what it raised.
    """
    return Judgement(
        verdict=Verdict.PRIMARY_HIT,
        remedy=Remedy.REPAIR,
        reason=f"the primary one raised {why}, the checker did not: the primary one was hit",
    )


def judge_raised_type(why: str, *, alone: bool) -> Judgement:
    """Return the judgement on blocks that raised something which did not come back.

    Args:
        why: what they raised.
        alone: whether this device alone may have led to it.
    """
    again = f"blocks raised {why}, and did not when their shard type was computed again"
    if alone:
        return Judgement(verdict=Verdict.PRIMARY_HIT, remedy=Remedy.VOID_TYPE, reason=again)
    return Judgement(
        verdict=Verdict.WIRE,
        remedy=Remedy.VOID_TYPE,
        reason=f"{again}: this device has computed wrongly, or one that gave them their input",
    )
