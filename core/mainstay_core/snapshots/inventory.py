"""Describes what stores hold of a job's copies and logs, and what a replay lacks.

A planner of replays is given all stores, those of lost pods among them, with what they are known to
have held. What only lost ones held is lacking, and the answer names their failure domains.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    MAX_TYPES,
    Count,
    Longest,
    Name,
    Sentence,
    TypeIndex,
)
from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.units import MAX_UNITS, Position
from mainstay_core.snapshots.windows import MAX_LENGTH

Versions = Annotated[tuple[Count, ...], Longest(4 * MAX_LENGTH)]


class Direction(enum.StrEnum):
    """The way in which a logged tensor crossed a stage boundary."""

    ACTIVATION = "activation"
    """To the next stage."""
    GRADIENT = "gradient"
    """To the stage before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUnit:
    """The copies of one unit in a store."""

    position: Position
    unit: Name
    full: Versions = ()
    """Versions of which its full state is there."""
    compute: Versions = ()
    """Versions of which its compute weights are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBoundary:
    """Tensors in a store that crossed a stage boundary: of some shard types, in some steps."""

    sender: Position
    direction: Direction
    first_type: TypeIndex
    stop_type: TypeIndex
    """The shard type after the last."""
    first_step: Count
    stop_step: Count
    """The step after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The store of one pod. Of a lost pod it is what it is known to have held."""

    pod: PodUid
    domain: Name
    living: bool = True
    units: Annotated[tuple[HeldUnit, ...], Longest(MAX_UNITS)] = ()
    boundaries: Annotated[tuple[HeldBoundary, ...], Longest(MAX_TYPES)] = ()


class Lack(enum.StrEnum):
    """The kinds of things without which a replay cannot be."""

    FULL_STATE = "full state"
    COMPUTE_WEIGHTS = "compute weights"
    BOUNDARY_LOG = "boundary log"
    WINDOW = "window"
    """The needed version comes before the window's last, so nobody can have needed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReplay:
    """The answer that a lost state cannot be computed from what stores hold."""

    lack: Lack
    position: Position
    unit: Name
    """The unit that cannot be had; empty if it is a whole stage."""
    version: Count
    """The version of the state that is lacking, or the step of the log."""
    domains: Annotated[tuple[Name, ...], Longest(MAX_MEMBERS)]
    """Failure domains of lost pods that held it, ascending."""
    reason: Sentence
    """One sentence for people."""


def lacking(
    lack: Lack, position: Position, unit: str, version: int, what: str, held: Iterable[Store]
) -> NoReplay:
    """Return the answer that something is lacking.

    Args:
        lack: its kind.
        position: whose state is lost.
        unit: that needs it; empty for a whole stage.
        version: of the state, or step of the log.
        what: it is, as a noun with its number, for the reason.
        held: stores that held it, in any order; all are lost.
    """
    domains = tuple(sorted({store.domain for store in held}))
    whose = f"{position}: {unit}" if unit else str(position)
    where = (
        f"its copies were in {', '.join(domains)}" if domains else "no store is known to have it"
    )
    return NoReplay(
        lack=lack,
        position=position,
        unit=unit,
        version=version,
        domains=domains,
        reason=f"{whose} lacks its {what}: {where}",
    )


def living(stores: Sequence[Store]) -> list[Store]:
    """Return the stores that can be read, by the names of their pods."""
    return sorted((store for store in stores if store.living), key=lambda store: store.pod)
