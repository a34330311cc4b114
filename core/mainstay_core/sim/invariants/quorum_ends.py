"""Checks that nobody enters a quorum that has ended, and that its members are told of the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mainstay_core.sim.engine import Violation
from mainstay_core.wire.plan import Plan


class QuorumEnds:
    """Watches the gather servers of a run; raises Violation.

    Args:
        plans: every durable plan, by the name of its quorum; it grows.
    """

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans = plans
        self._over: set[str] = set()
        """Quorums that a member has ended, as its gather server knows."""
        self._told: set[tuple[str, int]] = set()
        """Who was told so, by quorum and index."""

    def joined(self, quorum: str, index: int, incarnation: str) -> None:
        """A gather server lets somebody into a room."""
        member = self._plans[quorum].members[index]
        if member.incarnation != incarnation:
            raise Violation(
                f"I4: {incarnation} enters {quorum} as {member.rank}, which is {member.incarnation}"
            )
        if quorum in self._over:
            raise Violation(f"I4: {incarnation} enters {quorum}, which has ended")

    def posted(self, quorum: str, key: str, *, refused: bool) -> None:
        """A member has posted a key, and its gather server has answered."""
        if quorum in self._over and not refused:
            raise Violation(f"I4: a post of {key} counts in {quorum}, which has ended")

    def told(self, quorum: str, index: int) -> None:
        """A gather server tells a member that its quorum has ended."""
        self._told.add((quorum, index))

    def ended(self, quorum: str, others: Sequence[int]) -> None:
        """A member has ended its quorum; ``others`` are the members that have not."""
        self._over.add(quorum)
        for index in others:
            if (quorum, index) not in self._told:
                raise Violation(
                    f"I5: member {index} of {quorum} is not told that the quorum has ended"
                )
