"""Agrees on how fast copies travel and how long a step takes, so that all ranks plan one window.

Each rank measures the three legs of a copy's way and its own steps, rounds what it measured to two
digits, and tells it in its vote. From the votes of one commit everybody computes the same pace: the
slowest bandwidth of any rank, and the median step. No decision reads a clock of its own. MoEvement
profiles one bandwidth, that of PCIe (arXiv 2412.15411, algorithm 1); here the network counts too,
as a copy is only worth something at its peers.

All numbers are integers, so that no rank rounds otherwise than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import Count, Range, Sentence
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import show_bytes
from mainstay_core.wire.windows import Measures

MAX_PEERS = 16
"""Copies of a unit beside that in its author's own pod."""
MICROSECONDS = 1_000_000
"""In a second."""
_NANOSECONDS = 1_000_000_000

Peers = Annotated[int, Range(0, MAX_PEERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The speed of copies and of steps on which all ranks agree, from the votes of one commit."""

    bytes_per_s: Count
    """Of the slowest leg of the slowest rank."""
    step_us: Count
    """The median of the ranks' step times; the lower one of two in the middle."""
    reason: Sentence
    """One sentence for people."""

    @property
    def budget_bytes(self) -> int:
        """What a rank can copy in a step."""
        return self.bytes_per_s * self.step_us // MICROSECONDS


def round_measure(value: int) -> int:
    """Round a number to two digits, halves upwards, so that noise seldom changes a plan."""
    if value < 0:
        raise InvalidSpecError("value", f"is {value}, must be at least 0")
    scale: int = 10 ** max(len(str(value)) - 2, 0)
    return (value + scale // 2) // scale * scale


def rate(size_bytes: int, elapsed_ns: int) -> int:
    """Return bytes per second, rounded to two digits, of a transfer that was timed.

    Raises:
        InvalidSpecError: no time has passed.
    """
    if elapsed_ns <= 0:
        raise InvalidSpecError("elapsed_ns", f"is {elapsed_ns}, must be more than 0")
    return round_measure(size_bytes * _NANOSECONDS // elapsed_ns)


def agree(told: Sequence[Measures], peers: int) -> Pace | None:
    """Return the pace that follows from the votes of a commit.

    A rank that has not measured a leg or a step yet, such as a joiner, does not count there.

    Args:
        told: by the ranks, in any order.
        peers: other pods to which each byte goes, so often does the network carry it.

    Returns:
        The pace; None while no rank has measured each of the legs and a step.
    """
    if not 0 <= peers <= MAX_PEERS:
        raise InvalidSpecError("spec.snapshots.peers", f"is {peers}, must be 0..{MAX_PEERS}")
    legs = {
        "copy": [m.copy_bytes_per_s for m in told if m.copy_bytes_per_s],
        "host": [m.host_bytes_per_s for m in told if m.host_bytes_per_s],
    }
    if peers:
        legs["network"] = [m.network_bytes_per_s // peers for m in told if m.network_bytes_per_s]
    steps = sorted(m.step_us for m in told if m.step_us)
    if not steps or not all(legs.values()):
        return None
    slowest, leg = min((min(rates), name) for name, rates in legs.items())
    step_us = steps[(len(steps) - 1) // 2]
    shared = f", shared by {peers} peers" if leg == "network" and peers > 1 else ""
    return Pace(
        bytes_per_s=slowest,
        step_us=step_us,
        reason=f"the slowest leg is the {leg} with {show_bytes(slowest)}/s{shared}; "
        f"a step takes {step_us / MICROSECONDS:g} s",
    )
