"""Decides which nodes a job stays off because their devices computed wrongly again and again.

A mismatch is a state that differs from the majority of its stage's cells
(:mod:`mainstay_core.rank.votes`), or two executions of one operator that differ
(:mod:`mainstay_core.dmr.findings`): evidence against the device that computed it. One may be
bad luck, a repeat offender is not. A guard keeps an error of ours, or a bad model,
from taking the cluster away: never more than a share of the job's nodes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

MAX_MISMATCHES = 256
"""Newest ones that are remembered."""


class QuarantineMode(enum.StrEnum):
    """The treatments of a repeat offender; ``recovery.quarantine.mode``."""

    OFF = "Off"
    DRY_RUN = "DryRun"
    AVOID = "Avoid"
    TAINT = "Taint"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePolicy:
    """``recovery.quarantine`` of a TrainingJob."""

    mode: QuarantineMode = QuarantineMode.OFF
    after_mismatches: int = 2
    window_s: float = 86_400.0
    max_nodes_percent: int = 10
    trusted: frozenset[str] = frozenset()
    """Nodes that a person has looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One wrong result of a node."""

    at_s: float
    node: str
    pod: str
    """Name of the pod that held it."""
    quorum: str = ""
    """The recovery that it caused: told again, it is the same one."""
    step: int | None = None
    """The step in which a check found it, where no recovery followed: all that a check finds on a
    pod in a step counts once."""

    @property
    def id(self) -> tuple[str, str, int | None]:
        """Return what tells it from all others of the job."""
        return self.pod, self.quorum, self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A node in quarantine."""

    node: str
    since_s: float
    reason: str
    dry_run: bool = False
    """Nothing is done but to say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineState:
    """The wrong results of a job's nodes, and the nodes in quarantine for them."""

    mismatches: tuple[Mismatch, ...] = ()
    """Oldest first."""
    nodes: tuple[Quarantined, ...] = ()
    """In the order in which they came."""

    @property
    def avoided(self) -> tuple[str, ...]:
        """Nodes on which the job has no pods any more."""
        return tuple(sorted(q.node for q in self.nodes if not q.dry_run))

    def with_mismatches(self, new: Iterable[Mismatch]) -> QuarantineState:
        """Return the state with those of ``new`` that it does not have yet."""
        known = {m.id for m in self.mismatches}
        added = {m.id: m for m in new if m.id not in known}
        kept = sorted([*self.mismatches, *added.values()], key=lambda m: m.at_s)
        kept = kept[-MAX_MISMATCHES:]
        return QuarantineState(mismatches=tuple(kept), nodes=self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePlan:
    """The actions of a quarantine now: nodes to avoid, to taint and to let out."""

    state: QuarantineState
    new: tuple[Quarantined, ...] = ()
    """Nodes that come into quarantine by this, those of a dry run among them."""
    spared: tuple[tuple[str, str], ...] = ()
    """(node, why it is left alone): repeat offenders beyond the guard."""
    released: tuple[tuple[Quarantined, str], ...] = ()
    """Nodes that come out of quarantine, and why."""


def plan_quarantine(
    state: QuarantineState, job_nodes: Iterable[str], policy: QuarantinePolicy, now_s: float
) -> QuarantinePlan:
    """Return which nodes come into quarantine, and which come out of it.

    Out of it they come by the job's specification alone, never by the time that passes.

    Args:
        state: what is known of the job's nodes.
        job_nodes: nodes on which the job has pods.
        policy: what the job asks for.
        now_s: wall clock.
    """
    inside, released = _still_inside(state, policy)
    if policy.mode is QuarantineMode.OFF:
        kept = QuarantineState(mismatches=state.mismatches) if released else state
        return QuarantinePlan(state=kept, released=released)
    dry_run = policy.mode is QuarantineMode.DRY_RUN
    most = num_allowed(len({*job_nodes, *state.avoided}), policy.max_nodes_percent)
    new: list[Quarantined] = []
    spared: list[tuple[str, str]] = []
    for node, count in _offenders(state, policy, now_s):
        if any(q.node == node for q in inside):
            continue
        reason = f"{count} mismatches within {policy.window_s:.0f} s"
        if len(inside) >= most:
            spared.append((node, f"{reason}, but {len(inside)} of at most {most} nodes are out"))
            continue
        found = Quarantined(node=node, since_s=now_s, reason=reason, dry_run=dry_run)
        inside.append(found)
        new.append(found)
    return QuarantinePlan(
        state=QuarantineState(mismatches=state.mismatches, nodes=tuple(inside)),
        new=tuple(new),
        spared=tuple(spared),
        released=released,
    )


def _still_inside(
    state: QuarantineState, policy: QuarantinePolicy
) -> tuple[list[Quarantined], tuple[tuple[Quarantined, str], ...]]:
    """Return the nodes that stay in quarantine, and those that come out of it, with the reason."""
    inside: list[Quarantined] = []
    released: list[tuple[Quarantined, str]] = []
    for found in state.nodes:
        if policy.mode is QuarantineMode.OFF:
            released.append((found, "recovery.quarantine.mode is Off"))
        elif found.node in policy.trusted:
            released.append((found, "recovery.quarantine.trustedNodes names it"))
        elif policy.mode is QuarantineMode.DRY_RUN and not found.dry_run:
            released.append((found, "recovery.quarantine.mode is DryRun"))
            inside.append(replace(found, dry_run=True))
        elif policy.mode is QuarantineMode.DRY_RUN or not found.dry_run:
            # What a dry run has found counts for nothing once it is meant.
            inside.append(found)
    return inside, tuple(released)


def num_allowed(num_nodes: int, percent: int) -> int:
    """Return how many of a job's nodes may be out: rounded down, but one unless it is 0 %."""
    return max(1, num_nodes * percent // 100) if percent else 0


def _offenders(
    state: QuarantineState, policy: QuarantinePolicy, now_s: float
) -> list[tuple[str, int]]:
    """Return (node, mismatches within the window) of repeat offenders: the worst first."""
    counts: dict[str, int] = {}
    for mismatch in state.mismatches:
        if now_s - mismatch.at_s <= policy.window_s:
            counts[mismatch.node] = counts.get(mismatch.node, 0) + 1
    found = [
        (node, n)
        for node, n in counts.items()
        if n >= policy.after_mismatches and node not in policy.trusted
    ]
    return sorted(found, key=lambda item: (-item[1], item[0]))
