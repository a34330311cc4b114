"""Decides when a joiner may copy a trainer's state, and when a copy is good (protocol section 7).

Parameters are only written by apply, apply needs the joiner's vote, and the joiner votes
after its copy. So a state that is complete at a quorum's version stays so, without a lock,
until the quorum is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.bounds import Count, Index, Name
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import QuorumId
from mainstay_core.wire.plan import Plan


class HealFailed(MainstayError):  # noqa: N818 - a state, not a failure
    """A copy of a living cell's state did not complete or has not its announced digest."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The state that a joiner asks for.

    Raises:
        ValueError: the text of the quorum names none.
    """

    quorum: Name
    position: Index
    """By stage, then by inner rank."""
    version: Count

    def __post_init__(self) -> None:
        QuorumId.parse(self.quorum)

    @property
    def number(self) -> int:
        """Id of the quorum."""
        return QuorumId.parse(self.quorum).id


def may_copy(wanted: Wanted, served: Wanted | None, adopted: Plan | None) -> bool | None:
    """Return whether a joiner's request is served; None while that is still to be seen.

    Args:
        wanted: what is asked for.
        served: what is complete here; None while a quorum settles.
        adopted: the plan of this trainer.
    """
    if served == wanted:
        return True
    return False if adopted is not None and adopted.quorum.id > wanted.number else None


def copy_problem(announced: str, found: str, masters: str, expected: str) -> str:
    """Return what is wrong with a copy; empty if it is good.

    Args:
        announced: digest of the whole state, as the source named it.
        found: the same of what has arrived.
        masters: digest of the masters that have arrived.
        expected: the masters' digest that the quorum's reports name; "" if none does.
    """
    if found != announced or (expected and masters != expected):
        return f"has digest {masters}, not {expected}"
    return ""
