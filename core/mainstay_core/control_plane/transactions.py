"""Applies events to one job in the store: load, decide, compare-and-set.

A replica of the api holds nothing that another one would need: the state is in a store that
all replicas share, and a change of it names the revision from which it was decided. Whoever
lost that race loads again and decides again (protocol section 8).

The procedures await nothing but a store (:mod:`mainstay_core.control_plane.job_store`) and what a
subclass of :class:`JobTransactions` defines, so asyncio drives them in the api, and simulated time
in the simulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mainstay_core.base.errors import MainstayError, RemoteProtocolError, StoreConflictError
from mainstay_core.base.ids import QuorumId
from mainstay_core.base.shape import JobShape
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.control_plane.job_store import (
    BeatReply,
    JobStore,
    Snapshot,
    UnknownJobError,
    change_of,
)
from mainstay_core.coordinator.events import (
    Event,
    PlanStored,
    StepsCommitted,
    StoreReopened,
    Tick,
    Transition,
)
from mainstay_core.coordinator.intake.store_recovery import is_behind, refuse_behind
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.plan import Voided

MAX_TOGETHER = 128
"""Events that are decided in one transaction. A thousand pods that lose a peer tell it at once."""
ENTRIES_AT_ONCE = 128
"""Entries of the ledger that are looked up at a time, or those of one step if it has more: to ask
for each of a request's steps by itself would be a way to the store and back for each."""
MAX_ANNOUNCED = 8
"""Contradictions of one request that are announced: one is enough to act upon."""

# Ledger entries --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerNews:
    """The news in the ledger entries that a supervisor tells."""

    fresh: tuple[LedgerEntry, ...]
    """Entries to write."""
    contradictions: tuple[tuple[LedgerEntry, LedgerEntry], ...]
    """(old, new) where a step was committed before and has come to other bits."""


def find_news(
    known: Mapping[LedgerKey, LedgerEntry],
    told: Sequence[LedgerEntry],
    voided: Sequence[Voided] = (),
) -> LedgerNews:
    """Return what is new in ``told``; of two quorums' entries the newer one's stands.

    Args:
        known: entries of the same steps.
        told: entries.
        voided: steps that count no more: what comes in their place may have other bits.
    """
    fresh, contradictions = [], []
    for entry in told:
        old = known.get(entry.key)
        if old is not None and (old.agrees_with(entry) or old.quorum.id > entry.quorum.id):
            continue
        if old is not None and old.corrects and old.quorum == entry.quorum and not entry.corrects:
            continue  # told again by the cell whose state was bad
        if old is not None and _contradict(old, entry, voided):
            contradictions.append((old, entry))
        fresh.append(entry)
    return LedgerNews(fresh=tuple(fresh), contradictions=tuple(contradictions))


def _contradict(old: LedgerEntry, new: LedgerEntry, voided: Sequence[Voided]) -> bool:
    """Return whether two commits of a step, the older one first, should have had the same bits."""
    corrected = new.corrects and new.quorum == old.quorum
    if old.history != new.history or old.masters == new.masters or corrected:
        return False
    return not any(
        old.quorum.id < v.quorum <= new.quorum.id and old.step >= v.version for v in voided
    )


def check_entries(shape: JobShape, entries: Sequence[LedgerEntry]) -> None:
    """Check that entries of the ledger are of steps and positions that the job has.

    Raises:
        RemoteProtocolError: one is not; the message names its field.
    """
    for entry in entries:
        places = (
            ("step", entry.step, shape.steps),
            ("stage", entry.stage, shape.stages),
            ("inner", entry.inner, shape.ranks_per_stage),
        )
        for field, value, bound in places:
            if value >= bound:
                raise RemoteProtocolError(
                    f"LedgerEntry.{field}: {value} is none of the job's {bound}"
                )


def newest_of(entries: Sequence[LedgerEntry]) -> LedgerEntry:
    """Return the entry of a step that speaks for all its positions."""
    return max(entries, key=lambda e: (e.quorum.id, e.stage, e.inner))


def _whole(entries: Sequence[LedgerEntry | None]) -> tuple[LedgerEntry, ...]:
    """Return the entries of a step; none if one is not there yet."""
    there = tuple(entry for entry in entries if entry is not None)
    return there if len(there) == len(entries) else ()


def _committed(entries: Sequence[LedgerEntry]) -> StepsCommitted:
    """Return the event of a step whose entries are all there."""
    newest = newest_of(entries)
    return StepsCommitted(
        step=newest.step,
        quorum=newest.quorum,
        committed_at_s=max(e.committed_at_s for e in entries),
        step_s=max(e.step_s for e in entries),
        loss=newest.loss,
        clean=tuple(device for entry in entries for device in entry.clean),
        approximate_since=newest.approximate_since,
    )


# JobTransactions ----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Waiting:
    """An event that waits for its turn."""

    event: Event
    held: QuorumId | None
    outcome: Transition | Exception | None = None
    """What was decided, or why nothing was; None until then."""


_Decided = tuple[_Waiting, Transition | Exception]
"""An event and what was decided, or why nothing was."""


class JobTransactions(ABC):
    """One job as one replica of the api serves it.

    Events that come while a transaction runs wait, and the next one decides on all of them in
    their order: what a transaction costs, to read and to write the whole state, is paid once.

    Args:
        store: where the job is.
        max_conflicts: races lost in a row, after which an event is given up.
    """

    def __init__(self, store: JobStore, max_conflicts: int) -> None:
        self._store, self._max_conflicts = store, max_conflicts
        self._waiting: list[_Waiting] = []

    @abstractmethod
    async def step(self, state: CoordinatorState, event: Event) -> Transition:
        """Have the coordinator decide; a decision about a large job may take its time."""

    @abstractmethod
    def now_s(self) -> float:
        """Return the wall clock."""

    @abstractmethod
    def decided(self, before: CoordinatorState, outcome: Transition) -> None:
        """Take note of a decision that is stored: no other replica has taken it as well."""

    @abstractmethod
    def conflicted(self) -> None:
        """Take note of a lost race."""

    @abstractmethod
    def note_later(self, procedure: Callable[[], Coroutine[Any, Any, None]]) -> object:
        """Run a procedure in the background, once a plan is on its way to the supervisors."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Log that something was not recorded."""

    @abstractmethod
    def turn(self) -> AbstractAsyncContextManager[object]:
        """Hold off all others of this process until it is left: one transaction at a time."""

    @abstractmethod
    async def contradicted(self, old: LedgerEntry, new: LedgerEntry) -> None:
        """Announce that a step came out differently the second time."""

    @abstractmethod
    def entered(self, state: CoordinatorState, entries: Sequence[LedgerEntry]) -> None:
        """Take note of entries that are new in the ledger."""

    async def load(self) -> Snapshot:
        """Return the job's state.

        Raises:
            UnknownJobError: the store has lost the job.
        """
        snapshot = await self._store.load()
        if snapshot is None:
            raise self.unknown_job()
        return snapshot

    @abstractmethod
    def unknown_job(self) -> UnknownJobError:
        """Return the error of a job that the store has lost."""

    async def apply(self, event: Event, held: QuorumId | None = None) -> Transition:
        """Decide on an event, store the outcome and make it visible, and return it.

        Args:
            event: what was learnt.
            held: the quorum of the newest plan that the teller holds.

        Raises:
            ProtocolError: the job does not accept the event; nothing changed.
            StoreBehindError: the teller's plan is not known here; nothing changed.
            StoreConflictError: others decided first, too often in a row.
            StoreUnavailableError: nothing is known to have changed; repeat.
            UnknownJobError: the store has lost the job.
        """
        return (await self._apply_all([event], held))[0]

    async def _apply_all(self, events: Sequence[Event], held: QuorumId | None) -> list[Transition]:
        """Do as :meth:`apply` does for several events that were learnt together, in their order.

        Each is decided, whatever comes of the others; then the first error is raised.
        """
        outcomes = await self.in_turn(events, held)
        for outcome in outcomes:
            if isinstance(outcome, Transition) and outcome.plan is not None:
                stored = PlanStored(quorum=outcome.plan.quorum, at_s=self.now_s())
                self.note_later(partial(self._note_stored, stored))
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Transition)]

    async def in_turn(
        self, events: Sequence[Event], held: QuorumId | None
    ) -> list[Transition | Exception]:
        """Wait for the events' turn and decide on them, with those that wait beside them."""
        own = [_Waiting(event, held) for event in events]
        self._waiting += own
        try:
            async with self.turn():
                while any(waiting.outcome is None for waiting in own):
                    await self._decide_next()
        finally:
            # Given up: whoever told them is answered already.
            self._waiting = [waiting for waiting in self._waiting if waiting not in own]
        return [waiting.outcome for waiting in own if waiting.outcome is not None]

    async def _note_stored(self, event: PlanStored) -> None:
        """Record when a plan was stored: the plan is out by then, so nobody waits for this."""
        try:
            await self.apply(event)
        except MainstayError as error:
            self.warn(f"the time of {event.quorum} is not recorded: {error}")

    async def _decide_next(self) -> None:
        """Decide on the events that have waited longest; what they come to is one change."""
        decided: Sequence[_Decided]
        try:
            decided = await self._decide()
        except MainstayError as error:
            decided = [(waiting, error) for waiting in self._waiting[:MAX_TOGETHER]]
        for waiting, outcome in decided:
            waiting.outcome = outcome
        self._waiting = [waiting for waiting in self._waiting if waiting.outcome is None]

    async def _decide(self) -> Sequence[_Decided]:
        """Return what the first of those that wait came to, stored."""
        conflict: StoreConflictError | None = None
        for _ in range(self._max_conflicts):
            try:
                before = await self.load()
                if before.state.server != before.server:
                    reopened = await self.step(before.state, StoreReopened(server=before.server))
                    await self._commit(before, reopened)
                    before = await self.load()
                # Those too that came meanwhile; some may give up before it is stored.
                decided, whole = await self._step_all(before.state, self._waiting[:MAX_TOGETHER])
                await self._commit(before, whole)
                return decided
            except StoreConflictError as error:
                self.conflicted()
                conflict = error
        raise StoreConflictError(f"{self._max_conflicts} races lost in a row") from conflict

    async def _step_all(
        self, state: CoordinatorState, together: Sequence[_Waiting]
    ) -> tuple[list[_Decided], Transition]:
        """Return what each event came to, and all of it as one transition.

        The first one that publishes a plan is the last: supervisors get every plan, and a change
        has one at most.
        """
        decided: list[_Decided] = []
        whole = Transition(state=state)
        for waiting in together:
            try:
                refuse_behind(whole.state, waiting.held)
                outcome = await self.step(whole.state, waiting.event)
            except Exception as error:  # its teller gets it, the others are decided all the same
                decided.append((waiting, error))
                continue
            decided.append((waiting, outcome))
            whole = whole.then(outcome)
            if outcome.plan is not None:
                break
        return decided, whole

    async def _commit(self, before: Snapshot, outcome: Transition) -> None:
        if outcome.actions or outcome.state != before.state:
            change = change_of(before.state, outcome, self.now_s())
            await self._store.commit(before.revision, change)
            self.decided(before.state, outcome)

    async def beat(self, heartbeat: Heartbeat) -> BeatReply:
        """Note that a pod is alive.

        Raises:
            StoreBehindError: it holds a plan that is not known here.
            UnknownJobError: the store has lost the job.
        """
        reply = await self._store.beat(heartbeat)
        if reply.phase is None:
            raise self.unknown_job()
        if heartbeat.quorum is not None and heartbeat.quorum != reply.quorum:
            refuse_behind((await self.load()).state, heartbeat.quorum)
        return reply

    async def add_to_ledger(
        self, entries: Sequence[LedgerEntry], held: QuorumId | None = None
    ) -> None:
        """Write entries; a step whose positions are all there is committed for the coordinator.

        A step that was committed before must come to the same bits: a difference is announced
        and the newer quorum's entry stands. Entries are written before their step is committed. So
        of a step that is not committed, entries that are there already count as well: whoever wrote
        them may have died before the commit, and a store may have fallen back to between the two.

        Raises:
            StoreBehindError: the teller's plan is not known here; nothing was written.
            RemoteProtocolError: an entry is of no step or position of the job; likewise.
        """
        state = (await self.load()).state
        refuse_behind(state, held)
        check_entries(state.shape, entries)
        voided = state.plan.voided if state.plan is not None else ()
        known = await self._store.fetch_ledger([e.key for e in entries])
        news = find_news(known, entries, voided)
        for old, new in news.contradictions[:MAX_ANNOUNCED]:
            await self.contradicted(old, new)
        await self._store.put_ledger(news.fresh)
        self.entered(state, news.fresh)
        positions = state.shape.positions
        restarted_id = state.restarted_id
        ahead = [e for e in entries if e.step >= state.step and e.quorum.id >= restarted_id]
        steps = sorted({e.step for e in (*news.fresh, *ahead)})
        at_once = max(1, ENTRIES_AT_ONCE // len(positions))
        for first in range(0, len(steps), at_once):
            together = steps[first : first + at_once]
            found = await self._store.fetch_ledger([(n, *p) for n in together for p in positions])
            whole = [[found.get((n, *p)) for p in positions] for n in together]
            events = [_committed(step) for step in map(_whole, whole) if step]
            if events:
                await self._apply_all(events, None)

    async def look(self, silence: HeartbeatLag) -> Transition | None:
        """Have the coordinator know who is silent, and who was heard that it waits for.

        Args:
            silence: what was counted so far; only one replica at a time may count.

        Returns:
            What follows; None of a job that has ended.
        """
        state = (await self.load()).state
        if state.terminal:
            return None
        asked_at_s = self.now_s()
        seen = await self._store.fetch_seen()
        behind_s = silence.update(dict(seen.at_us), state.config.heartbeat_s)
        wanted = sorted(silence.heard.intersection(state.unheard))
        held = await self._store.fetch_held(wanted) if wanted else {}
        # Whoever holds a plan that the store does not know has to tell it first.
        heard = tuple(pod for pod in wanted if pod in held and not is_behind(state, held[pod]))
        heard_at_s = seen.by_clock(asked_at_s)
        return await self.apply(Tick(behind_s=behind_s, heard_at_s=heard_at_s, heard=heard))
