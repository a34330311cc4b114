"""Compares what a replay makes with what votes said of it."""

from __future__ import annotations

from mainstay_core.rank.events import ReplayedStep
from mainstay_core.wire.segments import SegmentKind
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.compute.engine import Engine
from mainstay_train.snapshots.good_copies import GoodCopies, Unusable


class VoteChecks:
    """The comparisons of one replay, and the ledger entries of the steps that it has made.

    Args:
        engine: whose state is made.
        copies: from which it is made; they are blamed where a digest differs.
        position: of this state.
    """

    def __init__(self, engine: Engine, copies: GoodCopies, position: int) -> None:
        self._engine, self._copies, self._position = engine, copies, position
        self._num_checks = 0
        self.steps: list[ReplayedStep] = []
        """Those after which the masters were whole."""

    def digest_masters(self, before: CommitRecord | None) -> str:
        """Return the digest of the masters, which are whole.

        Args:
            before: record of the step after which they are so; None if no ledger needs it.
        """
        masters = self._engine.state.masters_digest().whole.hex()
        if before is not None:
            gradient = before.gradients[self._position]
            counted = self._engine.counted_masters(masters)
            self.steps.append(ReplayedStep(before.commit, gradient, counted))
        return masters

    def compare_masters(self, record: CommitRecord, masters: str) -> None:
        """Compare masters with what the votes on the step at their version said.

        Raises:
            Unusable: they differ, though each segment is as it was written.
        """
        self._compare(record, "masters", masters, record.states[self._position])
        # Of a state at this very version the moments have not shown yet.
        self._copies.acquit(lambda key: key.version < record.commit.step)

    def compare_gradient(self, record: CommitRecord) -> None:
        """Compare the reduced gradient with what the votes on its step said; raises likewise."""
        found, told = self._engine.gradient_digest(), record.gradients[self._position]
        self._compare(record, "reduced gradient", found, told)
        step, states = record.commit.step, (SegmentKind.STATE, SegmentKind.COMPUTE)
        self._copies.acquit(lambda key: key.version <= step and key.kind not in states)

    def require_one(self) -> None:
        """Refuse a state of which nothing was compared.

        Raises:
            Unusable: nothing was.
        """
        if not self._num_checks:
            raise Unusable("no vote has told what the state must be: nothing can be compared")

    def _compare(self, record: CommitRecord, what: str, found: str, told: str) -> None:
        if found != told:
            self._copies.blame()
            raise Unusable(
                f"replayed step {record.commit.step}: the {what} have digest {found}, its votes "
                f"told {told}"
            )
        self._num_checks += 1
