"""What happens to a rank, and what its shell is told to do.

Events are the outcomes of actions; the last action of a transition is the one
whose outcome is the next event (:mod:`mainstay_core.rank.machine`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.rank.settle import StateAction, Supply
from mainstay_core.wire.facts import RankFact
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.votes import Commit, LastStatus, SettleReport, Vote

# Events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanSeen:
    """A plan newer than the adopted one is there (``state.newest``)."""


@dataclass(frozen=True, slots=True)
class ReportsGathered:
    """All settle reports of the adopted quorum."""

    reports: tuple[SettleReport, ...]


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The state of the settled version is complete and verified."""

    digest: str
    commit: Commit | None = None
    """From the manifest, when loaded from a checkpoint."""
    commit_chain: str | None = None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """No source had a usable state, or the quorum ended meanwhile."""

    why: str


@dataclass(frozen=True, slots=True)
class TodoDone:
    """All types of the list are complete."""

    held: tuple[Partial, ...]


@dataclass(frozen=True, slots=True)
class ComputeBroken:
    """The chain lost a cell or was interrupted; complete types are kept."""

    held: tuple[Partial, ...]
    why: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduced:
    """The stage's gradient is reduced."""


@dataclass(frozen=True, slots=True)
class VotesGathered:
    """All votes of the step."""

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class QuorumLost:
    """A member is gone or the quorum was interrupted."""

    why: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Applied:
    """The step is applied: ``digest`` is that of the masters after it."""

    digest: str
    commit: Commit


@dataclass(frozen=True, slots=True)
class SavesGathered:
    """All members' statuses after the last step, in index order."""

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
    """Block until a plan newer than the adopted one has been seen: PlanSeen."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Drop all groups of the quorum, the chain's pipeline too: nobody may wait for this rank."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Join the plan's gather, post the report: ReportsGathered or QuorumLost."""

    plan: Plan
    report: SettleReport


@dataclass(frozen=True, slots=True)
class SendFact:
    """Tell the api a fact, through the supervisor; when it was observed is the shell's to add."""

    fact: RankFact


@dataclass(frozen=True, slots=True)
class DropHeld:
    """Free all partials and the reduced gradient."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """Heal from a source or load a version: StateLoaded or LoadFailed."""

    action: StateAction
    version: int
    sources: tuple[int, ...]
    expected: str
    """Digest of the masters at the version, where a report knows it; else empty."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the types through the chain: TodoDone or ComputeBroken."""

    types: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Canonical reduction of the stage by the table: Reduced or QuorumLost."""

    table: tuple[Supply, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class CastVote:
    """Post the vote of the step: VotesGathered or QuorumLost."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the reduced gradient; uninterruptible, no communication: Applied."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Copy this position's part and write it in the background; later votes say that it is safe."""

    version: int
    commit: Commit
    commit_chain: str


@dataclass(frozen=True, slots=True)
class RenameCheckpoint:
    """Every part of the attempt is safe: make it complete, in the background (lowest member)."""

    version: int
    nonce: str
    """Of the quorum in which its parts were copied."""


@dataclass(frozen=True, slots=True)
class VoidSave:
    """Never call this rank's part of ``version`` safe: it was copied from a bad state."""

    version: int


@dataclass(frozen=True, slots=True)
class ShareSaves:
    """After the last step: finish what is being written, then exchange statuses.

    SavesGathered or QuorumLost.
    """

    round: int
    state: str
    """Digest of this rank's state."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The last step is applied: report the final digests."""


Action = (
    WaitForPlan
    | Leave
    | Settle
    | SendFact
    | DropHeld
    | LoadState
    | Compute
    | Reduce
    | CastVote
    | Apply
    | WriteCheckpoint
    | RenameCheckpoint
    | VoidSave
    | ShareSaves
    | Finish
)
