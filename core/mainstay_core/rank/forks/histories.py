"""Says what a history of forks comes to: its digest, the boosts, and what was made at a version."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from mainstay_core.base import codec
from mainstay_core.reinitialisation.sources import Position
from mainstay_core.wire.reinitialisation import (
    MAX_TOLD_FORKS,
    Fork,
    History,
    ToldHistory,
    since_of,
)
from mainstay_core.wire.votes import SettleReport


def tell_history(history: History, *, made: bool) -> ToldHistory | None:
    """Return what is told of a state's history; None of an exact one.

    Args:
        history: of the state.
        made: whether its quorum, or one whose order it repeats, has made the last fork.
    """
    since = since_of(history)
    if since is None:
        return None
    newest = history[-MAX_TOLD_FORKS:]
    return ToldHistory(since=since, num_forks=len(history), newest=newest, made=made)


def boosts_of(history: History, step: int, inner: int) -> dict[str, float]:
    """Return an inner rank's factors of the learning rate in a step, by block.

    The factor is 1 for what is not named. What other inner ranks made anew is theirs alone: where
    they hold copies of each other's parameters, all are made anew together. A second loss of the
    same position sets a block's factor again; it does not compound. What a guard had is as it was.
    """
    boosts: dict[str, float] = {}
    for fork in history_at(history, step):
        lasts = fork.boost_steps is None or step < fork.version + fork.boost_steps
        places = (place for place in fork.made.positions if place.inner == inner)
        blocks = (made.block for place in places for made in place.blocks if not made.is_exact)
        boosts |= dict.fromkeys(blocks, fork.lr_boost if lasts else 1.0)
    return boosts


def history_at(history: History, step: int) -> History:
    """Return the forks on which a step's outcome depends: the history itself, if all do."""
    if not history or history[-1].version <= step:
        return history  # they come in the order of their versions
    return tuple(fork for fork in history if fork.version <= step)


def digest_of(history: History) -> str:
    """Return a short text that differs where histories do; empty if there is no fork.

    Each step of a rank asks for it, mostly of the same tuple, and with a hundred forks to encode
    them takes longer than a short step.
    """
    if not history:
        return ""
    global _newest
    known, digest = _newest
    if known is not history:
        digest = hashlib.sha256(codec.dumps(history).encode()).hexdigest()[:32]
        _newest = history, digest
    return digest


_newest: tuple[History, str] = (), ""
"""The history that was digested last, the very tuple, and its digest."""


def last_known(reports: Sequence[SettleReport]) -> tuple[History, str]:
    """Return (history, commit chain) of the states at a version.

    A member that missed the quorum of a fork at this very version does not know of it; its state is
    the same with and without. Who has settled last knows the newest: a fork takes the place of
    those that it repeats, so a longer history may be older. Of several who settled in one quorum
    the newest history names the most positions at this version.
    """
    if not reports:
        return (), ""
    newest = max(
        reports,
        key=lambda r: (r.settled, len(_made_at(r.history, r.version)), len(r.history)),
    )
    return newest.history, newest.chain


def _made_at(history: History, version: int) -> set[Position]:
    return {place for fork in history if fork.version == version for place in places_of(fork)}


def is_made_once_more(history: History, lost: Collection[Position], version: int) -> bool:
    """Return whether what is lost was made at this very version, and is made of the same again.

    Args:
        history: of the states there.
        lost: positions.
        version: at which all go on.
    """
    return bool(history) and history[-1].version == version and set(lost) <= places_of(history[-1])


def before_fork(
    history: History, chain: str, lost: Collection[Position], version: int
) -> tuple[History, str]:
    """Return history and commit chain to which a fork is added that makes what is lost.

    A fork at this very version that did not come to an end is repeated by it, not added to.

    Args:
        history: of the states at the version.
        chain: their commit chain.
        lost: positions.
        version: at which all go on.
    """
    while history and history[-1].version == version and places_of(history[-1]) <= set(lost):
        history, chain = history[:-1], history[-1].chain
    return history, chain


def places_of(fork: Fork) -> set[Position]:
    """Return the positions that a fork makes anew."""
    return {(made.stage, made.inner) for made in fork.made.positions}
