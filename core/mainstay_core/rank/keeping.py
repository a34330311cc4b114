"""Defines what a session asks of its shell for the two places that keep its state.

These are durable checkpoints on storage, and segments in the memory of pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mainstay_core.rank.connections import Ends
from mainstay_core.rank.events import LoadFailed, Snapshot, StateLoaded
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay
from mainstay_core.wire.plan import OtherStore, Plan, Voided
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import CommitRecord, SaveStatus, SnapshotStatus


class Writer(Protocol):
    """The writer of a trainer's checkpoints, as far as steps do not wait for it."""

    def newest_complete(self) -> int:
        """Look at the disk; return the newest version that can be read, 0 without one."""

    def status(self) -> SaveStatus:
        """Return what to say of this rank's writing in a vote."""

    def void(self, version: int) -> None:
        """Never call the part of a version safe."""

    def go_back(self, voided: Sequence[Voided], *, puts_aside: bool) -> None:
        """Count no version, written or not, of steps that count no more.

        Args:
            voided: these steps, as the plan tells them; each plan tells them again.
            puts_aside: whether this rank puts such versions aside, for all.
        """


class Keeper(Protocol):
    """The writer and reader of a trainer's segments."""

    async def report(self, lineage: int, *, whole: bool) -> StoreReport:
        """Return which segments this trainer has found damaged, and what its pod's store holds.

        Args:
            lineage: of the plan.
            whole: whether to tell of the store; else another member of the pod does.
        """

    async def ask_others(
        self, wait: Any, lineage: int, others: Sequence[OtherStore]
    ) -> tuple[StoreReport, ...]:
        """Return what stores of other pods hold, in the order of ``others``.

        One that does not answer in time is told as empty, with the reason.

        Args:
            wait: of :meth:`begin_wait`.
            lineage: of the plan.
            others: to ask.
        """

    def snapshot(self, plan: Plan, index: int, lineage: int, action: Snapshot) -> None:
        """Begin to copy this member's units of an instalment, in the background.

        Args:
            plan: that is adopted; it says who copies what, and who holds it.
            index: of this member.
            lineage: of the state.
            action: which instalment.
        """

    def begin_wait(self) -> Ends:
        """Return what ends a wait of this keeper, from any thread."""

    async def log(
        self, wait: Any, plan: Plan, index: int, lineage: int, step: int, types: Sequence[int]
    ) -> bool:
        """Wait until this member's logs of a step are at their holders.

        These are its part of the reduced gradient, which is copied now. In a job that logs
        boundaries it is what it gave its neighbours for some types; a vote rests on that from now
        on (:class:`VotedLogs <mainstay_core.segments.frames.VotedLogs>`).

        Args:
            wait: that may end this.
            plan: that is adopted.
            index: of this member.
            lineage: of the state.
            step: that is voted on.
            types: shard types that the step's table takes from this member.

        Returns:
            Whether they do: a store without room, or a holder that is gone, stops no step.
        """

    def status(self, version: int, *, logged: bool) -> SnapshotStatus:
        """Return what to say of segments in the vote on the step at ``version``."""

    def record(self, record: CommitRecord) -> None:
        """Give the pod's store a commit, before it is applied."""

    def keep_from(self, lineage: int, version: int) -> None:
        """Tell the pod's store that nothing before ``version`` is needed any more."""

    def go_back(self, lineage: int, version: int, *, drops_later: bool) -> None:
        """Tell the pod's store that the job goes on from a version that may be an older one.

        Args:
            lineage: of the plan.
            version: that is settled.
            drops_later: whether nothing later counts.
        """

    async def replay(
        self, wait: Any, plan: Plan, index: int, replay: Replay | BoundaryReplay, chain: Any
    ) -> StateLoaded | LoadFailed:
        """Make the state anew; every replayed step has the digests that its votes told.

        Args:
            wait: that may end this.
            plan: that is adopted.
            index: of this member.
            replay: what is read and computed.
            chain: groups by which the ranks of a cell compute it; None where each is alone.

        Raises:
            GroupEnded: another rank of the cell is gone, or has given up.
        """
