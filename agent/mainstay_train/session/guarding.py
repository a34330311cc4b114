"""A session's part in what it has of other stages: copies that it guards, or is made anew of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

from mainstay_core.dmr.findings import Finding
from mainstay_core.rank import events
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.reports import guard_finding
from mainstay_core.rank.serving import CopyOrder, Sources, Wanted
from mainstay_core.rank.session import RankSession
from mainstay_core.wire.reinitialisation import MadePosition
from mainstay_core.wire.votes import GuardedDigest
from mainstay_train.comm.connections import Connections
from mainstay_train.comm.group import Group
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.training import Training
from mainstay_train.exact.optimizer import StageState
from mainstay_train.exact.portions import Portion
from mainstay_train.state.beside import BesideStates
from mainstay_train.state.guards import GuardCopies
from mainstay_train.state.heal import HealClient


class GuardingSession(RankSession[Connections]):
    """A session with copies of what other stages alone have."""

    guard_copies: GuardCopies
    beside: BesideStates

    @abstractmethod
    def tell_finding(self, finding: Finding) -> None:
        """Tell what was found (any thread)."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine of the adopted plan's stage."""

    @abstractmethod
    def compared(self, holders: Sources) -> Sources:
        """Return whose whole states a copy is compared with: nobody's where nothing is checked.

        Args:
            holders: who has the state.
        """

    @abstractmethod
    def _wait_copied(self) -> float:
        """Wait until no copy needs the engine's state as it is."""

    async def begin_beside(
        self,
        client: HealClient,
        made: MadePosition,
        orders: Sequence[CopyOrder],
        *,
        keeps_own: bool,
    ) -> None:
        """Begin to copy other stages' positions, and clear the engine's state meanwhile."""
        self.beside.begin(client, self.plan, orders, self.compared)
        self._wait_copied()
        with self.engine.checks.over_state():
            self.beside.clear(self.engine.state, made, keeps_own=keeps_own)

    async def copy_beside(
        self, client: HealClient, sources: Sources, wanted: Wanted, expected: str
    ) -> str:
        """Copy another stage's position; return the digest of its masters."""
        return self.beside.copy(
            client, self.plan, sources, wanted, expected, holders=self.compared(self.holders)
        )

    def drop_beside(self) -> None:
        """Free what was copied beside the engine's state."""
        self.beside.drop()

    def _make_guard_copies(self, training: Training, rules: ForkRules | None) -> GuardCopies:
        outline = rules.outline if rules is not None else ()
        return GuardCopies(training, outline, lambda: self.engine, lambda: self.state.guarded)

    def _served_part(self, end: int, own: StageState) -> Portion | None:
        """Return what is served of an end's guarded blocks (a thread of the heal server)."""
        return self.guard_copies.served(end, own)

    async def give_guarded(self, group: Group, peers: Sequence[int]) -> None:
        """Send the reduced gradient of what others guard of this stage."""
        self.guard_copies.give(group, peers)

    async def take_guarded(self, group: Group, end: int, peer: int) -> None:
        """Receive the reduced gradient of what is guarded of an end."""
        self.guard_copies.take(group, end, peer)

    async def copy_guarded(
        self, client: HealClient, sources: Sources, wanted: Wanted
    ) -> GuardedDigest:
        """Copy what is guarded of an end; return its digest."""
        return self.guard_copies.copy(client, sources, wanted)

    def keep_guarded(self, ends: Collection[int]) -> None:
        """Let go of the copies of all other ends."""
        self.guard_copies.keep(ends)

    def own_guarded(self) -> GuardedDigest | None:
        """Return the digest of what others guard of this stage; None if that is nothing."""
        return self.guard_copies.own_digest(self.state.version)

    def tell_void_guard(self, action: events.TellVoidGuard) -> None:
        """Tell that a copy is void, as it is another one than the owners have."""
        self.tell_finding(guard_finding(self.state, action))
