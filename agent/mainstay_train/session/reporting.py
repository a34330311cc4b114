"""Tells the supervisor a trainer's status, its facts and its stage's ledger entries."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from mainstay_core.planning.program import Action, Op
from mainstay_core.rank import machine
from mainstay_core.rank.state import fact_of
from mainstay_core.wire.facts import Finished, RankFact
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry, PartialDigest
from mainstay_core.wire.votes import Commit
from mainstay_train.session.uplink import Status, Uplink

WAITING_OPS = frozenset({Op.RECV_F, Op.RECV_B, Op.REDUCE, Op.VOTE, Op.HEAL})
KEPT_ENTRIES = 32
"""Ledger entries told again by a rank that takes over telling them: who did so before may be gone,
with what it had not told yet. Under load that is more than the last one."""


class Reporter:
    """Puts a trainer's state into words and sends them up.

    Args:
        uplink: the line to the supervisor.
        status: what the uplink sends periodically.
    """

    def __init__(self, uplink: Uplink, status: Status) -> None:
        self._uplink, self._status = uplink, status
        self._entries: deque[LedgerEntry] = deque(maxlen=KEPT_ENTRIES)
        self._posts = self._repeats = False
        self._step_began_s = time.monotonic()

    def phase(self, state: machine.RankState) -> None:
        """A transition is done: ``state`` is what holds now."""
        status = self._status
        status.phase, status.step = state.phase.value, state.version
        # Of a trainer without a rank: the newest plan, in which it has no place.
        status.quorum = state.plan.quorum if state.plan else None
        status.waiting = state.phase in (machine.Phase.IDLE, machine.Phase.PARKED)
        if state.phase is machine.Phase.IDLE:
            # A pod that leaves waits for just this, and nobody else is kept from anything.
            self._uplink.send(status.head())

    def waits(self) -> None:
        """The trainer is about to block on others."""
        self._status.waiting = True

    def progress(self, action: Action) -> None:
        """An action of the program is about to run."""
        self._status.progress += 1
        self._status.waiting = action.op in WAITING_OPS

    def send_fact(self, fact: RankFact) -> None:
        """Tell the api, through the supervisor, what was learnt just now."""
        self._uplink.send_fact(replace(fact, observed_at_s=time.time()))

    def finished(self, state: machine.RankState, final: FinalDigests) -> None:
        """Tell that the last step is applied."""
        self._repeat()
        self.send_fact(fact_of(state, Finished, final=final))

    def record(
        self,
        state: machine.RankState,
        commit: Commit,
        *,
        gradient: str,
        masters: str,
        partials: tuple[PartialDigest, ...],
        post: bool,
    ) -> None:
        """Give the ledger the entry of a step that this cell has applied.

        Args:
            state: as it was while the step was applied.
            commit: the step's certificate.
            gradient: digest of the stage's reduced gradient.
            masters: digest of the stage's masters after the step.
            partials: what this cell sent into the reduction.
            post: whether the supervisor mirrors the entry to the api.
        """
        plan = state.plan
        assert plan is not None
        now = time.monotonic()
        entry = LedgerEntry(
            step=commit.step,
            stage=state.member_stage,
            inner=state.member_inner,
            quorum=plan.quorum,
            gradient=gradient,
            masters=masters,
            data=commit.data,
            loss=commit.loss,
            norm=commit.norm,
            tokens=commit.tokens,
            step_s=now - self._step_began_s,
            replicas=len(plan.chains),
            attempt=state.attempt,
            partials=partials,
            committed_at_s=time.time(),
        )
        self._step_began_s = now
        self._repeat()
        self._entries.append(entry)
        self._posts = post
        self._uplink.record(entry, post=post)

    def repeat_entries(self) -> None:
        """Post the last entries, unless this rank did: its supervisor has what is to be told.

        They go with the next one, as the quorum has just settled and others wait for this rank.
        """
        self._repeats = not self._posts

    def _repeat(self) -> None:
        if self._repeats:
            for entry in self._entries:
                self._uplink.record(entry, post=True)
        self._repeats = False
