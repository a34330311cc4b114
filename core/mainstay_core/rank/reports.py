"""Makes a trainer's reports: its status, its votes, and the ledger entries of its position."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mainstay_core.base.ids import QuorumId, RankId
from mainstay_core.base.values import replace
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.job.config import LogKind
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank.events import CastVote, TellDeviation, TellVoidGuard
from mainstay_core.rank.forks import histories
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay
from mainstay_core.rank.state import RankState
from mainstay_core.wire.facts import Phase, SlotStatus
from mainstay_core.wire.ledger import ForkedState, LedgerEntry, PartialDigest
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.recoveries import Replayed
from mainstay_core.wire.reinitialisation import History, digest_of_fork, since_of
from mainstay_core.wire.votes import (
    Commit,
    GuardedDigest,
    LastStatus,
    SaveStatus,
    TypeStat,
    Vote,
)

WAITING_OPS = frozenset(
    {
        Op.RECV_F,
        Op.RECV_B,
        Op.READ_F,
        Op.READ_B,
        Op.REDUCE,
        Op.LOG,
        Op.LOGGED,
        Op.VOTE,
        Op.HEAL,
        Op.REPLAY,
    }
)
"""Actions in which a rank is blocked on others. Votes are waited for after either of two: of
gradients that are logged, and of those that are not."""
GUARD = "guard"
"""Stands there likewise: a copy that a guard keeps is another one than its owners have."""
KEPT_ENTRIES = 32
"""Ledger entries told again by a rank that takes over telling them: who did so before may be gone,
with what it had not told yet. Under load that is more than the last one."""
WITNESS = "witness"
"""Stands in findings for an operator: what other chains have computed differently."""


@dataclass(slots=True)
class Status:
    """A trainer's periodic status. Its main thread alone changes it."""

    phase: str = "idle"
    waiting: bool = True
    step: int = 0
    progress: int = 0
    quorum: QuorumId | None = None

    def moved(self, state: RankState) -> bool:
        """Take note of a transition; return whether the status is to be sent at once."""
        self.phase, self.step = state.phase.value, state.version
        # Of a trainer without a rank: the newest plan, in which it has no place.
        self.quorum = state.plan.quorum if state.plan else None
        self.waiting = state.phase in (Phase.IDLE, Phase.PARKED)
        # A pod that leaves waits for just this, and nobody else is kept from anything.
        return state.phase is Phase.IDLE

    def waits(self) -> None:
        """Take note that the trainer is about to block on others."""
        self.waiting = True

    def begins(self, action: Action) -> None:
        """Take note that an action of the program is about to run."""
        self.progress += 1
        self.waiting = action.op in WAITING_OPS

    def of_slot(self, index: int) -> SlotStatus:
        """Return the status as a slot's."""
        return SlotStatus(
            index=index,
            phase=self.phase,
            waiting=self.waiting,
            step=self.step,
            progress=self.progress,
            quorum=self.quorum,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The results of a rank that enter its vote."""

    norms_sq: tuple[float, ...]
    """Squared norm of the reduced gradient, by block of its stage."""
    gradient: str
    """Digest of the reduced gradient."""
    copies: str
    """Digest of what inner ranks hold in copies."""
    stats: tuple[TypeStat, ...]
    """Of the types that the table credits to this rank."""
    rest: str = ""
    """Digest of the part of its state beside the masters that is due in this step."""
    problem: str = ""
    """Why what it has reduced does not count, in one sentence."""
    bad: tuple[int, ...] = ()
    """Complete types that a check has found to be wrong."""


def vote_of(
    state: RankState, action: CastVote, newest: Plan, ballot: Ballot, saves: SaveStatus
) -> Vote:
    """Return a rank's vote.

    Args:
        state: the rank.
        action: which vote.
        newest: the newest plan seen.
        ballot: what it has computed.
        saves: what it says of checkpoints.
    """
    return Vote(
        step=action.step,
        attempt=action.attempt,
        ok=not (ballot.problem or ballot.bad),
        problem=ballot.problem,
        bad=ballot.bad,
        norms_sq=ballot.norms_sq,
        gradient=ballot.gradient,
        state=state.digest,
        copies=ballot.copies,
        guarded=state.guarded,
        rest=ballot.rest,
        stats=ballot.stats,
        newest_plan=newest.quorum.id,
        newest_nonce=newest.quorum.nonce,
        clean_from=state.clean_from if state.witness_every_steps else None,
        **_told_of(saves),
    )


def finding_of(state: RankState, action: TellDeviation) -> Finding:
    """Return what is told of a device that has computed a type otherwise than most chains."""
    difference = action.deviation.difference
    insists = action.deviation.verdict is Verdict.DETERMINISTIC
    where = f"type {action.shard_type}: other devices differ first in {difference.describe()}"
    return Finding(
        step=action.step,
        slot=state.slot,
        in_pass=difference.in_pass,
        shard_type=action.shard_type,
        micro_batch=difference.micro_batch,
        ordinal=0,
        operator=WITNESS,
        num_elements=0,
        verdict=action.deviation.verdict,
        remedy=Remedy.OTHER_COPY,
        since=state.clean_from if insists else None,
        reason=f"{where}; {action.reason}",
    )


def guard_finding(state: RankState, action: TellVoidGuard) -> Finding:
    """Return what is told of a copy that a guard keeps, and that is not what its owners have."""
    assert state.plan is not None
    owns = state.plan.members[state.index].rank.stage == action.end
    what = "what guards keep of it" if owns else f"what it guards of stage {action.end}"
    than = "what it has" if owns else "what its owners have"
    reason = f"{what} differs from {than}, and is copied again"
    if action.rivals:
        names = ", ".join(map(str, action.rivals))
        reason = f"{reason}; nobody knows which is wrong, it or {names}"
        if action.outnumbered:
            owner = "this is the owner" if owns else f"rather the owner, in stage {action.end}"
            reason = f"{reason}; more guards agree than there are owners: {owner}"
    return Finding(
        step=action.step,
        slot=state.slot,
        in_pass=Pass.STEP,
        ordinal=0,
        operator=GUARD,
        num_elements=0,
        # Of two that differ neither is accused: both are named.
        verdict=Verdict.WIRE if action.rivals else Verdict.TRANSIENT,
        remedy=Remedy.OTHER_COPY if not action.rivals else Remedy.NOTHING,
        reason=reason,
    )


def last_status(saves: SaveStatus, state: str, rest: str = "") -> LastStatus:
    """Return what a rank says of checkpoints, and of its state, where no step follows."""
    return LastStatus(**_told_of(saves), state=state, rest=rest)


def _told_of(saves: SaveStatus) -> dict[str, Any]:
    return {field.name: getattr(saves, field.name) for field in fields(SaveStatus)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedStep:
    """The state of a rank after a step, and what it sent into the step's reduction."""

    digest: str
    """Digest of all masters that the rank holds."""
    masters: str
    """Digest of the masters that count for its position in the ledger."""
    partials: tuple[PartialDigest, ...] = ()
    guarded: tuple[GuardedDigest, ...] = ()
    """Of what it guards of other stages."""
    copy_wait_s: float = 0.0
    """For which it waited, before it applied the step, for the copy of a checkpoint."""


def entry_of(
    state: RankState,
    commit: Commit,
    *,
    gradient: str,
    masters: str,
    step_s: float,
    now_s: float,
    partials: tuple[PartialDigest, ...] = (),
    copy_wait_s: float = 0.0,
    began: str = "",
) -> LedgerEntry:
    """Return the ledger's entry of a step that a rank has applied.

    Args:
        state: as it was while the step was applied.
        commit: the step's certificate.
        gradient: digest of the position's reduced gradient.
        masters: digest of the position's masters after the step.
        step_s: seconds since the step before.
        now_s: wall clock.
        partials: what this cell sent into the reduction.
        copy_wait_s: seconds for which the step waited for the copy of a checkpoint.
        began: digest of the masters before the step; empty if it was replayed.
    """
    assert state.plan is not None
    history = histories.history_at(state.history, commit.step)
    return LedgerEntry(
        step=commit.step,
        stage=state.member_stage,
        inner=state.member_inner,
        quorum=state.plan.quorum,
        gradient=gradient,
        masters=masters,
        data=commit.data,
        loss=commit.loss,
        norm=commit.norm,
        tokens=commit.tokens,
        step_s=step_s,
        replicas=len(state.plan.chains),
        attempt=state.attempt,
        partials=partials,
        committed_at_s=now_s,
        copy_wait_s=copy_wait_s,
        history=histories.digest_of(history),
        approximate_since=since_of(history),
        forked=_forked(history, commit.step, began),
        clean=tuple(device for device in state.clean if device not in state.clean_before),
    )


def _forked(history: History, step: int, began: str) -> ForkedState | None:
    """Return with what a rank began the first step after a fork; None of another step."""
    if not began or not history or history[-1].version != step:
        return None
    return ForkedState(fork=digest_of_fork(history[-1]), masters=began)


def replayed_of(
    rank: RankId, replay: Replay | BoundaryReplay, *, seconds: float, num_damaged: int
) -> Replayed:
    """Return what is told of a replay that has succeeded.

    Args:
        rank: that made its state anew.
        replay: what it was to do.
        seconds: how long that took.
        num_damaged: copies that it found damaged.
    """
    if isinstance(replay, BoundaryReplay):
        log, num_steps = LogKind.BOUNDARY, len(replay.steps)
        first, last = replay.window.first, replay.window.last
    else:
        log, num_steps = LogKind.GRADIENTS, len(replay.records)
        states = [unit.state.version for unit in replay.units]
        first, last = min(states), max(states)
    return Replayed(
        stage=rank.stage,
        inner=rank.inner,
        kind=log.value,
        first=first,
        last=last,
        version=replay.version,
        planned_steps=replay.version - replay.first_step,
        steps=num_steps,
        seconds=seconds,
        num_damaged=num_damaged,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryLog:
    """A trainer's last ledger entries, and whether its supervisor mirrors them to the api."""

    entries: tuple[LedgerEntry, ...] = ()
    posts: bool = False
    """Whether the last entry was to be mirrored: this rank speaks for its position."""
    repeats: bool = False
    """Whether the entries are told again with the next one."""

    def takes_over(self) -> EntryLog:
        """Return the log of a rank that speaks for its position from now on.

        Unless it did before, the entries go again with the next one, as the quorum has just
        settled and others wait for this rank.
        """
        return replace(self, repeats=not self.posts)

    def again(self) -> tuple[EntryLog, tuple[LedgerEntry, ...]]:
        """Return the log with nothing to repeat, and the entries to mirror now."""
        return replace(self, repeats=False), self.entries if self.repeats else ()

    def corrected(self, step: int) -> tuple[LedgerEntry, ...]:
        """Return the entry of a step, if it is the last, in the place of one of a bad state."""
        return tuple(replace(e, corrects=True) for e in self.entries[-1:] if e.step == step)

    def add(self, entry: LedgerEntry, *, post: bool) -> EntryLog:
        """Return the log with one more entry; with ``post`` it is mirrored."""
        return replace(self, entries=(*self.entries, entry)[-KEPT_ENTRIES:], posts=post)
