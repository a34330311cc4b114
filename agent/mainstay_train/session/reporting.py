"""Reports a trainer's status, its facts and its stage's ledger entries over the uplink."""

from __future__ import annotations

import time
from dataclasses import replace

from mainstay_core.planning.program import Action
from mainstay_core.rank import machine
from mainstay_core.rank.reports import EntryLog, Status, entry_of
from mainstay_core.rank.state import fact_of
from mainstay_core.wire.facts import Finished, RankFact
from mainstay_core.wire.ledger import FinalDigests, PartialDigest
from mainstay_core.wire.votes import Commit
from mainstay_train.session.uplink import Uplink


class Reporter:
    """Sends a trainer's status, facts and ledger entries to its supervisor.

    Args:
        uplink: the connection to the supervisor.
        status: what the uplink sends periodically.
    """

    def __init__(self, uplink: Uplink, status: Status) -> None:
        self._uplink, self._status = uplink, status
        self._log = EntryLog()
        self._step_began_s = time.monotonic()

    def phase(self, state: machine.RankState) -> None:
        """A transition is done: ``state`` is what holds now."""
        if self._status.moved(state):
            self._uplink.send_status()

    def waits(self) -> None:
        """The trainer is about to block on others."""
        self._status.waits()

    def progress(self, action: Action) -> None:
        """An action of the program is about to run."""
        self._status.begins(action)

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
        now = time.monotonic()
        entry = entry_of(
            state,
            commit,
            gradient=gradient,
            masters=masters,
            partials=partials,
            step_s=now - self._step_began_s,
            now_s=time.time(),
        )
        self._step_began_s = now
        self._repeat()
        self._log = self._log.add(entry, post=post)
        self._uplink.record(entry, post=post)

    def repeat_entries(self) -> None:
        """Post the last entries with the next one, unless this rank has posted them."""
        self._log = self._log.takes_over()

    def _repeat(self) -> None:
        self._log, entries = self._log.again()
        for entry in entries:
            self._uplink.record(entry, post=True)
