"""Holds what the api has not confirmed: facts until each is answered, ledger entries in batches.

Facts decide how fast a recovery starts, so all that wait are told in one request. A fact that
the api refuses must not take the others along: the batch is then told again one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.values import replace
from mainstay_core.wire.facts import Fact
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

RETRY_FIRST_S = 0.01
"""A server may close an idle connection just when it is used: that must not cost time."""
RETRY_MAX_S = 1.0
"""Retries are this far apart at most: a recovery must not wait long for an api that is back."""
MAX_LEDGER = 4096
"""Ledger entries held here, posted or not. The api mirrors them; ours answer when it forgets."""
MAX_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The delay before the next attempt, in seconds; doubled by each one up to a bound."""

    next_s: float = RETRY_FIRST_S

    def after_one(self) -> Backoff:
        """Return the delay after one more attempt in vain."""
        return Backoff(next_s=min(RETRY_MAX_S, self.next_s * 2))


# What the api made of a batch of facts -------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """The api has acknowledged the batch."""

    plan: Plan | None
    """The plan in force, if the answer names one."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The api does not take the batch, and repeating it will not help."""

    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The api does not know the pod, its job or its plan: the pod registers first."""


@dataclass(frozen=True, slots=True)
class Away:
    """The api gave no answer that counts."""

    wait_s: float = 0.0
    """How long it asks to wait at least."""


Answer = Heard | Refused | Unknown | Away


# Facts -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FactOutbox:
    """Facts in order, each until it is acknowledged or refused by itself."""

    waiting: tuple[Fact, ...] = ()
    num_asked: int = 0
    """The first so many are in a request that has no answer yet."""
    num_singly: int = 0
    """The first so many are told one by one: a batch with them was refused."""
    backoff: Backoff = Backoff()

    def put(self, fact: Fact) -> FactOutbox:
        """Return the outbox with a fact added at the end.

        A pod that registers again repeats what it has told. The api may have refused what is in a
        request already, and what waits longer may come before what it builds on: so a repeated fact
        is told last, and twice at most.
        """
        asked, later = self.waiting[: self.num_asked], self.waiting[self.num_asked :]
        if fact in later:
            first = later.index(fact) + 1
            later = (*later[:first], *(f for f in later[first:] if f != fact))
            if later[-1] == fact:
                return replace(self, waiting=(*asked, *later))
        return replace(self, waiting=(*asked, *later, fact))

    def ask(self) -> tuple[FactOutbox, tuple[Fact, ...]]:
        """Return the outbox with the next request under way, and its facts; none if none wait."""
        batch = self.waiting[: 1 if self.num_singly else MAX_BATCH]
        return replace(self, num_asked=len(batch)), batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The consequences of the api's answer to a batch, in this order."""

    outbox: FactOutbox
    register: bool = False
    """The pod registers again first."""
    wait_s: float = 0.0
    """Seconds to wait before the next attempt."""
    plan: Plan | None = None
    """A plan that the answer names."""
    heard: tuple[Fact, ...] = ()
    """Facts that were acknowledged."""
    reason: str


def told(outbox: FactOutbox, batch: tuple[Fact, ...], answer: Answer) -> Told:
    """Return what follows from an answer.

    Args:
        outbox: as it is now; facts may have been added since the batch was sent.
        batch: what was sent, from :meth:`FactOutbox.ask`: the first that wait.
        answer: what became of it.
    """
    outbox = replace(outbox, num_asked=0)
    if isinstance(answer, Away | Unknown):
        wait_s = outbox.backoff.next_s
        if isinstance(answer, Away):
            wait_s = max(wait_s, answer.wait_s)
        # After a failure all that waits is told in one request again.
        later = replace(outbox, num_singly=0, backoff=outbox.backoff.after_one())
        register = isinstance(answer, Unknown)
        why = "the api does not know the pod" if register else "the api does not answer"
        return Told(outbox=later, register=register, wait_s=wait_s, reason=why)
    if isinstance(answer, Refused) and len(batch) > 1:
        alone = replace(outbox, num_singly=len(batch))
        return Told(outbox=alone, reason="refused together: told one by one")
    rest = FactOutbox(
        waiting=outbox.waiting[len(batch) :], num_singly=max(0, outbox.num_singly - 1)
    )
    if isinstance(answer, Refused):
        return Told(outbox=rest, plan=answer.plan, reason="refused")
    return Told(outbox=rest, plan=answer.plan, heard=batch, reason="heard")


# Ledger entries --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOutbox:
    """The newest ledger entries of a pod, and which of them the api has not mirrored yet."""

    held: tuple[LedgerEntry, ...] = ()
    waiting: tuple[LedgerEntry, ...] = ()

    def put(self, entry: LedgerEntry, *, post: bool) -> LedgerOutbox:
        """Return the outbox that holds an entry; with ``post`` the api is to mirror it."""
        held = (*self.held, entry)[-MAX_LEDGER:]
        waiting = (*self.waiting, entry)[-MAX_LEDGER:] if post else self.waiting
        return LedgerOutbox(held=held, waiting=waiting)

    @property
    def approximate_since(self) -> int | None:
        """Since which step the job is approximate, as the newest entry says; None: it is exact."""
        return self.held[-1].approximate_since if self.held else None

    def repeat(self) -> LedgerOutbox:
        """Return the outbox from which all is mirrored once more: the api has lost what it had."""
        return replace(self, waiting=self.held)

    def take(self) -> tuple[LedgerOutbox, tuple[LedgerEntry, ...]]:
        """Return the outbox without the next batch, and that batch."""
        return replace(self, waiting=self.waiting[MAX_BATCH:]), self.waiting[:MAX_BATCH]
