"""Phase 1 of the static planner: which AC segments are checked by their own recompute (P-DMR).

The recompute of an AC segment is a second execution of all that it recomputes. What is left to do
is to execute its last operators again, whose outputs AC keeps, and to compare (SpareTrain, section
5.1). The exception is a segment whose last operators gather their operands by a communication that
takes at least twice as long as the recompute: to execute everything twice at once gathers them only
once. (The paper's poster prints the inequality the wrong way round.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mainstay_core.dmr.plan import Method, Piece
from mainstay_core.dmr.profiles import AcSegment, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PiggybackChoice:
    """The decision for one AC segment."""

    segment: AcSegment
    method: Method
    """Piggyback, or naive for all of its operators."""
    reason: str


def choose_piggyback(profile: Profile, segment: AcSegment) -> PiggybackChoice:
    """Return whether an AC segment's recompute is its check.

    P-DMR adds ``communication + last``, naive checks ``2 x recompute + last``: in the forward and
    in the recompute. So P-DMR is chosen unless ``2 x recompute <= communication``. A segment
    with operators of unknown times gets it always, as there is nothing to compare.
    """
    graph, kept = profile.graph, set(segment.kept)
    operators = [graph.operators[graph.places[name]] for name in segment.operators]
    recompute_s = math.fsum(operator.median_s for operator in operators if operator.id not in kept)
    gather_s = math.fsum(operator.communication_s for operator in operators if operator.id in kept)
    if not all(operator.static for operator in operators):
        return PiggybackChoice(
            segment=segment,
            method=Method.PIGGYBACK,
            reason="its recompute checks it; some of its operators have no fixed times",
        )
    if gather_s > 0 and 2 * recompute_s <= gather_s:
        return PiggybackChoice(
            segment=segment,
            method=Method.NAIVE,
            reason=f"twice its recompute ({2 * recompute_s:.6g} s) takes no longer than to gather "
            f"the last operands again ({gather_s:.6g} s)",
        )
    return PiggybackChoice(
        segment=segment,
        method=Method.PIGGYBACK,
        reason=f"its recompute checks it: twice that ({2 * recompute_s:.6g} s) is more than to "
        f"gather the last operands again ({gather_s:.6g} s)",
    )


def plan_piggyback(profile: Profile) -> tuple[list[Piece], dict[str, str]]:
    """Return the pieces of all AC segments, and the reason of each of their operators.

    The pieces have no comparisons yet.
    """
    pieces: list[Piece] = []
    reasons: dict[str, str] = {}
    for segment in profile.ac_segments:
        choice = choose_piggyback(profile, segment)
        if choice.method is Method.PIGGYBACK:
            pieces.append(
                Piece(
                    name=segment.name,
                    method=choice.method,
                    operators=segment.operators,
                    comparisons=(),
                )
            )
        else:
            pieces += [
                Piece(name=name, method=choice.method, operators=(name,), comparisons=())
                for name in segment.operators
            ]
        reasons |= dict.fromkeys(segment.operators, f"AC segment {segment.name}: {choice.reason}")
    return pieces, reasons
