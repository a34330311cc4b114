"""Makes the account of a cell that has computed a type which other chains compute, too.

What a chain computes beside the type decides the order in which a cell sends what belongs to it. So
an account has it sorted: cells that have sent the same give the same account.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.witness import Account, Exchanged, Sent


def make_account(
    sent: Sequence[Sent],
    exchanged: Iterable[Exchanged],
    weights: tuple[str, ...],
    *,
    in_order: bool,
    is_partial: bool = False,
) -> Account:
    """Return what a cell tells of a type that it has computed.

    Args:
        sent: to other stages, in any order.
        exchanged: with the ranks of the cell, in any order.
        weights: digests of the gradient.
        in_order: whether all micro-batches pass the stages in order.
        is_partial: whether it has taken part in collectives of which it does not tell.
    """
    ordered = sorted(sent, key=lambda one: (one.micro_batch, one.visit, one.in_pass))
    by_pass = {
        in_pass: tuple(one.digest for one in ordered if one.in_pass is in_pass and in_order)
        for in_pass in (Pass.FORWARD, Pass.BACKWARD)
    }
    return Account(
        forward=by_pass[Pass.FORWARD],
        backward=by_pass[Pass.BACKWARD],
        sent=() if in_order else tuple(ordered),
        weights=weights,
        exchanged=tuple(sorted(exchanged, key=lambda e: (e.micro_batch, e.visit, e.in_pass))),
        is_partial=is_partial,
    )
