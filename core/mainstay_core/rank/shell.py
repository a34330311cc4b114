"""Defines what a trainer's session asks of its shell: time, messages, arithmetic and the disk.

The shell of a trainer has sockets, threads and torch; that of the simulation has none of them.
:mod:`mainstay_core.rank.session` says in which order the methods are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from mainstay_core.dmr.witness import Account
from mainstay_core.planning.program import Action
from mainstay_core.rank import events, machine
from mainstay_core.rank.connections import Ends
from mainstay_core.rank.reports import AppliedStep, Ballot
from mainstay_core.rank.serving import CopyOrder, Sources, Wanted
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.facts import RankFact
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry
from mainstay_core.wire.plan import Partial
from mainstay_core.wire.reinitialisation import MadePosition
from mainstay_core.wire.segments import ToldStores
from mainstay_core.wire.votes import (
    Commit,
    GuardedDigest,
    LastStatus,
    SaveStatus,
    SettleReport,
    Vote,
)

MessageT = TypeVar("MessageT", SettleReport, ToldStores, Vote, LastStatus)
T = TypeVar("T")
Message = SettleReport | ToldStores | Vote | LastStatus


def run_blocking(procedure: Coroutine[Any, Any, T]) -> T:
    """Run a procedure whose shell blocks instead of suspending; return its result."""
    try:
        procedure.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    procedure.close()
    raise AssertionError("a procedure of a blocking shell was suspended")


class RankShell(ABC):
    """The methods that a session calls, and that its shell defines."""

    # What the shell does: time and messages ---------------------------------------

    @abstractmethod
    def now_s(self) -> float:
        """Return the wall clock, in seconds."""

    @abstractmethod
    def lap_s(self) -> float:
        """Return the seconds since this was asked before, or since the start."""

    @abstractmethod
    def send_status(self) -> None:
        """Send the status to the supervisor."""

    @abstractmethod
    def send_fact(self, fact: RankFact) -> None:
        """Send a fact to the supervisor."""

    @abstractmethod
    def send_entry(self, entry: LedgerEntry, *, post: bool) -> None:
        """Send a ledger entry to the supervisor; with ``post`` it mirrors the entry to the api."""

    @abstractmethod
    def moved(self, before: machine.RankState, event: events.Event, reason: str) -> None:
        """Take note of a transition of the state machine."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Log that one of several attempts failed."""

    # What the shell does: others --------------------------------------------------

    @abstractmethod
    async def wait_newer(self, known: int) -> None:
        """Wait for a plan whose quorum has an id above ``known``."""

    @abstractmethod
    async def post(self, key: str, message: Message) -> None:
        """Give a message to all members.

        Raises:
            QuorumAborted: the quorum ended first.
        """

    @abstractmethod
    async def gathered(self, key: str, kind: type[MessageT]) -> tuple[MessageT, ...]:
        """Wait for the messages that all members gave for ``key``, in index order.

        Raises:
            QuorumAborted: the quorum ended first.
        """

    @abstractmethod
    async def connect(self, groups: Any) -> None:
        """Connect groups that are not connected yet.

        Raises:
            GroupEnded: somebody is gone, or the groups were shut meanwhile.
        """

    @abstractmethod
    async def connect_cell(self, groups: Any) -> None:
        """Connect what joins the ranks of this rank's cell, unless it is connected.

        Args:
            groups: of the chain; :meth:`connect` connects the rest of it.

        Raises:
            GroupEnded: somebody is gone, or the groups were shut meanwhile.
        """

    @abstractmethod
    def make_heal_client(self) -> Ends:
        """Return what copies a state for :meth:`copy`."""

    @abstractmethod
    async def copy(self, client: Any, sources: Sources, wanted: Wanted, expected: str) -> str:
        """Copy other cells' state into this one; return the digest of its masters.

        Args:
            client: ends with the quorum.
            sources: who has the state. If one fails, the others send the rest.
            wanted: the state that is asked for.
            expected: the masters' digest that the reports name; "" if none does.

        Raises:
            HealFailed: no source is left, or the copy has another digest.
        """

    @abstractmethod
    async def begin_beside(
        self, client: Any, made: MadePosition, orders: Sequence[CopyOrder], *, keeps_own: bool
    ) -> None:
        """Begin to copy states of other stages, all at the same time where that is possible.

        This rank's own state is void from here on. :meth:`copy_beside` follows for each of them.

        Args:
            client: ends with the quorum.
            made: what is made of them.
            orders: what is copied.
            keeps_own: as of :meth:`make_anew`.
        """

    @abstractmethod
    async def copy_beside(
        self, client: Any, sources: Sources, wanted: Wanted, expected: str
    ) -> str:
        """Copy the masters of a position of another stage; return their digest.

        They are kept beside this one's state until :meth:`drop_beside`. The arguments and the error
        are those of :meth:`copy`.
        """

    @abstractmethod
    async def make_anew(self, made: MadePosition, *, keeps_own: bool) -> str:
        """Write this rank's state from what was copied beside it; return its masters' digest.

        Args:
            made: its blocks, and of what they are made.
            keeps_own: whether blocks that guards would give stay as they are here.
        """

    @abstractmethod
    def drop_beside(self) -> None:
        """Free what was copied beside this rank's state: it is made of it, or will not be."""

    @abstractmethod
    async def give_guarded(self, group: Any, peers: Sequence[int]) -> None:
        """Send the reduced gradient of what others guard of this rank's stage.

        Args:
            group: of owners and guards.
            peers: the guards' numbers there.

        Raises:
            GroupEnded: a guard is gone.
        """

    @abstractmethod
    async def take_guarded(self, group: Any, end: int, peer: int) -> None:
        """Receive the reduced gradient of what this rank guards of an end; arguments likewise."""

    @abstractmethod
    async def copy_guarded(self, client: Any, sources: Sources, wanted: Wanted) -> GuardedDigest:
        """Copy what is guarded of an end; return its digest. Arguments and error as of ``copy``."""

    @abstractmethod
    def keep_guarded(self, ends: Collection[int]) -> None:
        """Let go of the copies of all other ends."""

    @abstractmethod
    def own_guarded(self) -> GuardedDigest | None:
        """Return the digest of what others guard of this rank's stage; None if that is nothing."""

    @abstractmethod
    def tell_void_guard(self, action: events.TellVoidGuard) -> None:
        """Tell that a copy is void, as it is another one than the owners have."""

    @abstractmethod
    def serve(self, served: Wanted | None) -> None:
        """Answer joiners who ask for ``served``: the state is complete; None: nobody for now."""

    # What the shell does: arithmetic and disk ---------------------------------------

    @abstractmethod
    async def reach(self, action: Action) -> None:
        """Take note that an action of the program is about to run."""

    @abstractmethod
    def prepare(self) -> None:
        """Allocate what computes the adopted plan's stage, and check by the rules of the plan."""

    @abstractmethod
    async def compute_types(self, types: Sequence[int], groups: Any, early: Any) -> None:
        """Run types through this cell; complete ones are held, whatever happens.

        Args:
            types: in this order.
            groups: of the chain; None where a chain is a single rank.
            early: an EarlyReduction that begins meanwhile, or None; given up if the chain breaks.

        Raises:
            GroupEnded: the chain broke.
        """

    @abstractmethod
    def held(self, *, judged: bool = False) -> tuple[Partial, ...]:
        """Return the complete partials.

        Args:
            judged: once a device behind its host is done, and all checks of them are over.
        """

    @abstractmethod
    def bad_types(self) -> tuple[int, ...]:
        """Return the complete types that checks have found to be wrong; asked after ``held``."""

    @abstractmethod
    def account(self, shard_type: int) -> Account | None:
        """Return what left this rank while it computed a type; None: that was not kept."""

    @abstractmethod
    def tell_deviation(self, action: events.TellDeviation) -> None:
        """Tell that this device has computed a type otherwise than most chains."""

    @abstractmethod
    def drop_held(self) -> None:
        """Free all partials."""

    @abstractmethod
    def drop_partials(self, partials: Sequence[Partial]) -> None:
        """Free some partials: what checks have found of their types is told."""

    @abstractmethod
    async def reduce(self, group: Any, table: Sequence[Supply], members: Sequence[int]) -> None:
        """Reduce the position's gradient in canonical order.

        Args:
            group: the position's members; None where there is one only.
            table: supplies in canonical order.
            members: indices of the members, in the group's order.

        Raises:
            GroupEnded: a member is gone; partials are as before.
        """

    @abstractmethod
    def gradient_digest(self) -> str:
        """Return the digest of the reduced gradient."""

    @abstractmethod
    def make_ballot(self, step: int, table: Sequence[Supply]) -> Ballot:
        """Return the results that enter the vote on ``step``; the table credits its types."""

    @abstractmethod
    async def apply(self, commit: Commit) -> AppliedStep:
        """Apply the reduced gradient."""

    @abstractmethod
    def final_digests(self, data: str) -> FinalDigests:
        """Return the digests at the end of the job; ``data`` is that of all samples consumed."""

    @abstractmethod
    def rest_digest(self) -> str:
        """Return a digest of this rank's state beside the masters; "" if it checks nothing."""

    @abstractmethod
    async def load(self, version: int) -> events.StateLoaded | events.LoadFailed:
        """Read a version from the disk; version 0 is the seed's initial state."""

    @abstractmethod
    def write_part(self, action: events.WriteCheckpoint) -> None:
        """Copy this position's part now and write it in the background."""

    @abstractmethod
    def rename(self, action: events.RenameCheckpoint) -> None:
        """Complete an attempt in the background; :meth:`tell_checkpoint` says what came of it."""

    @abstractmethod
    async def wait_written(self) -> SaveStatus:
        """Wait until nothing is being written; return what to say of it then."""
