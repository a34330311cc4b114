"""Functions that raise what does not hold in a simulation, and read the numbers of quorums."""

from __future__ import annotations

from mainstay_core.sim.engine import Violation


def hold(condition: bool, what: str) -> None:
    """Raise Violation with ``what`` unless the condition holds."""
    if not condition:
        raise Violation(what)


def quorum_number(quorum: str) -> int:
    """Return the number in a quorum's written name."""
    return int(quorum.removeprefix("q").partition("-")[0])
