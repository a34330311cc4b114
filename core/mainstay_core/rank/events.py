"""Defines a rank's events (what comes in) and actions (what its shell has to do).

Events are the outcomes of actions. The last action of a transition is the one whose outcome is the
next event (:mod:`mainstay_core.rank.machine`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.ids import Slot
from mainstay_core.dmr.witness import Deviation
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.rank.forks.makers import Making
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.facts import RankFact
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.recoveries import Replayed
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.segments import SegmentKind, StoreReport
from mainstay_core.wire.votes import (
    Commit,
    CommitRecord,
    GuardedDigest,
    LastStatus,
    SettleReport,
    Vote,
)

# Events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanSeen:
    """A plan newer than the adopted one has arrived (``state.newest``)."""


@dataclass(frozen=True, slots=True)
class ReportsGathered:
    """All settle reports of the adopted quorum are here."""

    reports: tuple[SettleReport, ...]
    stores: tuple[StoreReport, ...] = ()
    """What the pods' stores of segments hold, if some position has no member that stayed."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step whose outcome came out again in a replay."""

    commit: Commit
    gradient: str
    """Digest of the position's reduced gradient."""
    masters: str
    """Digest of the masters after the step that count for the position in the ledger."""


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The state of the settled version is complete and verified."""

    digest: str
    commit: Commit | None = None
    """The last commit, from the manifest; None unless the state comes from a checkpoint."""
    commit_chain: str | None = None
    history: History | None = None
    """Forks that it contains, from the manifest; None unless the state comes from a checkpoint."""
    replayed: tuple[ReplayedStep, ...] = ()
    """The last steps of a replay, ascending. Whoever applied them first may have died before it
    told the ledger of them."""
    num_damaged: int = 0
    """Copies that a replay found damaged."""
    told: Replayed | None = None
    """What is told of a replay."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """No source had a usable state, or the checkpoint cannot be read."""

    why: str


@dataclass(frozen=True, slots=True)
class TodoDone:
    """All types that the rank's chain has to compute are complete."""

    held: tuple[Partial, ...]


@dataclass(frozen=True, slots=True)
class ComputeBroken:
    """The chain lost a cell or was interrupted. Complete types are kept."""

    held: tuple[Partial, ...]
    why: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduced:
    """The gradient of the rank's position is reduced."""

    guarded: tuple[GuardedDigest, ...] = ()
    """What it guards of other stages, as it is before the step; the gradients are there."""


@dataclass(frozen=True, slots=True)
class VotesGathered:
    """All votes on the step are here."""

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class QuorumLost:
    """A member is gone or the quorum was interrupted."""

    why: str
    suspects: tuple[int, ...] = ()
    was_told: bool = False
    """Whether others ended it, and this rank saw nothing itself."""

    @classmethod
    def of(cls, end: QuorumAborted) -> QuorumLost:
        """Return the event of a gather that has ended."""
        return cls(end.why, end.suspects, end.was_told)


@dataclass(frozen=True, slots=True)
class Applied:
    """The step is applied: ``digest`` is that of the masters after it."""

    digest: str
    commit: Commit
    gradient: str = ""
    """Digest of the reduced gradient that was applied; empty if it is not known."""
    guarded: tuple[GuardedDigest, ...] = ()
    """What it guards of other stages, after the step."""


@dataclass(frozen=True, slots=True)
class SavesGathered:
    """The statuses of all members after the last step are here, in index order."""

    statuses: tuple[LastStatus, ...]


Event = (
    PlanSeen
    | ReportsGathered
    | StateLoaded
    | LoadFailed
    | TodoDone
    | ComputeBroken
    | Reduced
    | VotesGathered
    | QuorumLost
    | Applied
    | SavesGathered
)


# Actions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitForPlan:
    """Block until a plan newer than the adopted one arrives. Outcome: PlanSeen."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Drop the groups of the quorum and the chain's pipeline. Nobody may wait for this rank."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Join the plan's gather and post the report. Outcome: ReportsGathered or QuorumLost."""

    plan: Plan
    report: SettleReport


@dataclass(frozen=True, slots=True)
class SendFact:
    """Send the api a fact through the supervisor. The shell adds the time of the observation."""

    fact: RankFact


@dataclass(frozen=True, slots=True)
class DropHeld:
    """Free all partials. A reduced gradient stays: the rank's mark may still be certified."""


@dataclass(frozen=True, slots=True)
class DropPartials:
    """Free some partials: they are void, or others' copies count."""

    partials: tuple[Partial, ...]


@dataclass(frozen=True, slots=True)
class TellDeviation:
    """Tell people that this device has computed a type otherwise than most chains."""

    step: int
    shard_type: int
    deviation: Deviation
    reason: str
    """For people."""


@dataclass(frozen=True, slots=True)
class TellVoidGuard:
    """Tell people that a copy which guards keep is another one than the owners have.

    The guard tells it; its owners do, too, if nobody knows which of them is wrong.
    """

    step: int
    end: int
    """Stage of the blocks."""
    rivals: tuple[Slot, ...] = ()
    """Others that may be wrong instead; empty if more members agree with the owners."""
    outnumbered: bool = False
    """Whether more guards agree with each other than there are owners."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """Copy the state from a member, read it from a checkpoint, or make it anew.

    Outcome: StateLoaded, LoadFailed or QuorumLost.
    """

    action: StateAction
    version: int
    sources: tuple[int, ...]
    expected: str
    """Digest of the masters at the version, if the reports give it; else empty. Then two sources
    must give the same copy, where there are two."""
    replay: Replay | BoundaryReplay | None = None
    """How the state is made anew, if the action is REPLAY."""
    making: Making | None = None
    """How it is made of others, if the action is MAKE."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the types through the chain. Outcome: TodoDone or ComputeBroken."""

    types: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce the position's gradient by the table, in canonical order.

    Outcome: Reduced or QuorumLost.
    """

    table: tuple[Supply, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class CastVote:
    """Post the vote on the step. Outcome: VotesGathered or QuorumLost."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the reduced gradient, without communication or interruption. Outcome: Applied."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Copy this position's part and write it in the background.

    A later vote says that it is safe.
    """

    version: int
    commit: Commit
    commit_chain: str
    history: History = ()
    clean_at: int | None = None
    """As of :class:`RenameCheckpoint`: room is made before a part is written."""


@dataclass(frozen=True, slots=True)
class RenameCheckpoint:
    """Complete an attempt of which every part is safe, in the background.

    The quorum's first member does so.
    """

    version: int
    nonce: str
    """Nonce of the quorum in which its parts were copied."""
    clean_at: int | None = None
    """Newest version that no device has tainted: one no later than that stays on the disk. None in
    a job without a witness."""


@dataclass(frozen=True, slots=True)
class VoidSave:
    """Never call this rank's part of ``version`` safe: it was copied from a bad state."""

    version: int


@dataclass(frozen=True, slots=True)
class CorrectEntry:
    """Tell the ledger's entry of a step again: who told it had a bad state after that step."""

    step: int


@dataclass(frozen=True, slots=True)
class PlacedUnit:
    """A unit that this rank copies."""

    name: str
    place: int
    """In the order in which the window copies the units of its position."""
    is_full: bool = True
    """Whether its whole state is copied; else its compute weights: its turn is still to come."""

    @property
    def kind(self) -> SegmentKind:
        """Of the segment that holds the copy."""
        return SegmentKind.STATE if self.is_full else SegmentKind.COMPUTE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the window's instalment of ``version`` while the step is computed.

    Apply waits until the copy has left the state; it travels to its holders in the background.
    """

    version: int
    window: Window
    units: tuple[PlacedUnit, ...] = ()
    """Of this rank's part of the instalment, in the window's order."""


@dataclass(frozen=True, slots=True)
class KeepRecord:
    """Give the pod's store the commit that is about to be applied."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class KeepFrom:
    """Tell the pod's store that nothing of a lineage before ``version`` is needed any more."""

    lineage: int
    version: int


@dataclass(frozen=True, slots=True)
class GoBack:
    """Tell the pod's store that the job goes on from ``version``, which may be an older one."""

    lineage: int
    version: int
    drops_later: bool = True
    """Whether nothing later counts, as a checkpoint has the version."""


@dataclass(frozen=True, slots=True)
class ShareSaves:
    """Finish what is being written after the last step, then exchange statuses.

    Outcome: SavesGathered or QuorumLost.
    """

    round: int
    state: str
    """Digest of this rank's state."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Report the final digests: the last step is applied."""


Action = (
    WaitForPlan
    | Leave
    | Settle
    | SendFact
    | DropHeld
    | DropPartials
    | TellDeviation
    | TellVoidGuard
    | LoadState
    | Compute
    | Reduce
    | CastVote
    | Apply
    | WriteCheckpoint
    | RenameCheckpoint
    | VoidSave
    | CorrectEntry
    | Snapshot
    | KeepRecord
    | KeepFrom
    | GoBack
    | ShareSaves
    | Finish
)
