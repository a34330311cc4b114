"""Says what a history of forks comes to: its digest, the boosts, and what is told of it."""

from __future__ import annotations

import hashlib

from mainstay_core.base import codec
from mainstay_core.wire.reinitialisation import (
    MAX_TOLD_FORKS,
    History,
    ToldHistory,
    since_of,
)


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
    """Return the forks on which a step's outcome depends."""
    return tuple(fork for fork in history if fork.version <= step)


def digest_of(history: History) -> str:
    """Return a short text that differs where histories do; empty if there is no fork."""
    if not history:
        return ""
    return hashlib.sha256(codec.dumps(history).encode()).hexdigest()[:32]
