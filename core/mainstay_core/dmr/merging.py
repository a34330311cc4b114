"""Merges what the ranks of a cell have measured, so that all of them make the same plan.

They execute the same program together: a recompute with a collective in it is compared with its
forward on all of them, or executed twice on all. So each plans from the same profile: of each
operator the longest time and the most bytes, of each window the shortest (SpareTrain, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from mainstay_core.dmr.operators import Operator, Tensor
from mainstay_core.dmr.profiles import Profile, Window
from mainstay_core.dmr.schedule import RefusedPlanError


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Return the profile from which all ranks of a cell plan.

    Args:
        profiles: of its ranks, by inner rank.

    Raises:
        RefusedPlanError: they do not execute the same operators; the first that differs is named.
    """
    first = profiles[0]
    for inner, other in enumerate(profiles[1:], 1):
        _check_alike(first, other, inner)
    columns = zip(*(profile.tensors for profile in profiles), strict=True)
    tensors = tuple(_merge_tensors(of) for of in columns)
    operators = tuple(
        _merge_operators(of) for of in zip(*(p.operators for p in profiles), strict=True)
    )
    windows = tuple(_merge_windows(of) for of in zip(*(p.windows for p in profiles), strict=True))
    return replace(
        first,
        budget_bytes=min(profile.budget_bytes for profile in profiles),
        tensors=tensors,
        operators=operators,
        windows=windows,
    )


def _merge_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return replace(tensors[0], size_bytes=max(t.size_bytes for t in tensors))


def _merge_operators(operators: Sequence[Operator]) -> Operator:
    return replace(
        operators[0],
        median_s=max(o.median_s for o in operators),
        communication_s=max(o.communication_s for o in operators),
        static=all(o.static for o in operators),
        compared=all(o.compared for o in operators),
        waits=all(o.waits for o in operators),
    )


def _merge_windows(windows: Sequence[Window]) -> Window:
    return replace(
        windows[0],
        median_s=min(w.median_s for w in windows),
        least_s=min(w.least_s for w in windows),
        static=all(w.static for w in windows),
        headroom_bytes=min(w.headroom_bytes for w in windows),
    )


def _check_alike(one: Profile, other: Profile, inner: int) -> None:
    """Raise unless two ranks execute the same operators on the same tensors."""

    def compare(what: str, mine: Iterable[object], others: Iterable[object]) -> None:
        for a, b in zip_longest(mine, others):
            if a != b:
                raise RefusedPlanError(
                    f"inner ranks 0 and {inner} have other {what}, first {a} and {b}, and ranks of "
                    "a cell plan alike"
                )

    compare(
        "operators",
        ((o.id, o.name) for o in one.operators),
        ((o.id, o.name) for o in other.operators),
    )
    for mine, theirs in zip(one.operators, other.operators, strict=True):
        compare(f"operands of {mine.id}", _operands(mine), _operands(theirs))
    compare(
        "tensors",
        ((t.name, t.origin) for t in one.tensors),
        ((t.name, t.origin) for t in other.tensors),
    )
    compare("results", one.results, other.results)
    compare("segments that run again", one.ac_segments, other.ac_segments)
    compare(
        "windows",
        ((w.name, w.after, w.kind) for w in one.windows),
        ((w.name, w.after, w.kind) for w in other.windows),
    )


def _operands(operator: Operator) -> tuple[tuple[str, ...], ...]:
    return operator.inputs, operator.outputs, operator.overwrites
