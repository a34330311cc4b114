"""The twin of the choice which copies of shard types count: by its definition, type by type."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mainstay_core.wire.plan import Partial, Plan

Held = Mapping[int, tuple[Partial, ...]]
Makers = Mapping[int, Mapping[int, tuple[int, int]]]
"""By member and type: (quorum, replica)."""
NOBODY = (-1, -1)


def types_in(partial: Partial) -> list[int]:
    """The types of a partial."""
    return list(range(partial.first, partial.last + 1))


def twin_kept(
    plan: Plan, held: Held, makers: Makers, bad: Collection[int]
) -> tuple[dict[int, list[Partial]], set[int]]:
    """By member the partials that count, and the types that nobody has to compute again."""
    kept = {m.index: list(held.get(m.index, ())) for m in plan.members}

    def maker(index: int, t: int) -> tuple[int, int]:
        return tuple(makers.get(index, {}).get(t, NOBODY))  # type: ignore[return-value]

    while True:
        counts: dict[int, tuple[int, int]] = {}
        for t in range(len(plan.suppliers)):
            holders = [
                {maker(m.index, t) for m in ms for p in kept[m.index] if t in types_in(p)}
                for ms in plan.positions
            ]
            complete = [c for c in holders[0] if all(c in others for others in holders)]
            if complete and t not in bad:
                counts[t] = max(complete)
        fit = {
            i: [p for p in ps if all(counts.get(t) == maker(i, t) for t in types_in(p))]
            for i, ps in kept.items()
        }
        if fit == kept:
            return kept, set(counts)
        kept = fit
