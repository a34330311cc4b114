"""Plans the checks of a stage before it runs: the three phases of SpareTrain, section 5."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.coverage import UncoveredError, complete, verify_plan
from mainstay_core.dmr.piggyback import plan_piggyback
from mainstay_core.dmr.plan import (
    Choice,
    Method,
    Piece,
    Plan,
    Policy,
    most_retained_bytes,
    retained_bytes,
    sum_loads,
    sum_totals,
)
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.queue import Item, Wait, plan_queue
from mainstay_core.dmr.segments import plan_segments

Planned = tuple[list[Piece], dict[str, str]]
"""Pieces, and the reason of each operator that they check."""


def plan_checks(
    profile: Profile,
    policy: Policy = Policy.OWN,
    budget_bytes: int | None = None,
    *,
    replays: bool = True,
    queues: bool = True,
) -> Plan:
    """Return how and when each operator of a stage is executed again.

    Equal arguments give equal plans. The plan passes :func:`verify_plan`.

    Args:
        profile: of the stage.
        policy: the paper's rules, or ours.
        budget_bytes: the most that checks retain at any time; the profile's if left out. With 0
            nothing waits for a window.
        replays: whether AGC segments are replayed (phase 2).
        queues: whether single operators wait (phase 3).

    Raises:
        InvalidSpecError: the budget is more than the profile's.
    """
    budget = profile.budget_bytes if budget_bytes is None else budget_bytes
    if budget > profile.budget_bytes:
        raise InvalidSpecError(
            "budget", f"is {budget} bytes, must be at most the profile's, {profile.budget_bytes}"
        )
    pieces, reasons = plan_piggyback(profile)
    if replays:
        pieces_of, why = _plan_segments(profile, pieces, policy, budget)
        pieces += pieces_of
        reasons |= why
    pieces_of, why = _plan_rest(profile, pieces, policy, budget, queues=queues)
    pieces += pieces_of
    reasons |= why
    completed = complete(profile, pieces)
    choices = _choose(profile, completed, reasons)
    plan = Plan(
        fingerprint=profile.fingerprint,
        policy=policy,
        budget_bytes=budget,
        pieces=completed,
        choices=choices,
        totals=sum_totals(profile, completed, choices),
        way=profile.way,
    )
    try:
        verify_plan(profile, plan)
    except UncoveredError as error:
        raise AssertionError(f"the planner made a plan that must not run: {error}") from error
    return plan


def _find_unchecked(profile: Profile, pieces: Sequence[Piece]) -> frozenset[int]:
    """Return the operators that need a check and have none yet."""
    places = profile.graph.places
    checked = {
        places[name] for piece in pieces for name in piece.operators if name not in piece.helpers
    }
    return frozenset(
        place
        for place in profile.reaching
        if place not in checked and not profile.operators[place].compared
    )


def _plan_segments(
    profile: Profile, pieces: Sequence[Piece], policy: Policy, budget: int
) -> Planned:
    return plan_segments(profile, _find_unchecked(profile, pieces), policy, budget)


def _plan_rest(
    profile: Profile, pieces: Sequence[Piece], policy: Policy, budget: int, *, queues: bool
) -> Planned:
    """Put each operator that is left into a window, or check it at once (phase 3).

    Args:
        profile: of the stage.
        pieces: of the phases before.
        policy: the paper's rules, or ours.
        budget: the most that checks retain.
        queues: whether any of them waits whose shapes and times are known.
    """
    graph = profile.graph
    places = sorted(_find_unchecked(profile, pieces))
    items = [
        _item(profile, place)
        for place in places
        if profile.operators[place].static and profile.operators[place].waits
    ]
    waits = _waits(profile, pieces, budget) if queues else []
    assignment = plan_queue(items, waits, policy)
    window_of = {
        item.place: profile.windows[number]
        for item, number in zip(items, assignment, strict=True)
        if number is not None
    }
    item_of = {item.place: item for item in items}
    found: list[Piece] = []
    reasons: dict[str, str] = {}
    for place in places:
        operator, window = graph.operators[place], window_of.get(place)
        if window is not None:
            method = Method(window.kind.value)
            reason = f"waits for {window.name}, {window.usable_s:.6g} s long"
        elif not operator.waits:
            method, reason = Method.NAIVE, "it cannot be executed again later"
        elif operator.static and queues:
            method, reason = Method.NAIVE, _why_naive(profile, item_of[place], budget)
        elif operator.static:
            method, reason = Method.NAIVE, "single operators do not wait"
        else:
            method = Method.DYNAMIC
            reason = "has no fixed shapes or times; the dynamic planner has it when it runs"
        found.append(
            Piece(
                name=operator.id,
                method=method,
                operators=(operator.id,),
                window=None if window is None else window.name,
                comparisons=(),
            )
        )
        reasons[operator.id] = reason
    return found, reasons


def _item(profile: Profile, place: int) -> Item:
    operator = profile.operators[place]
    # It may wait until the last window, and is not to retain more than it is counted for.
    until = profile.windows[-1].after if profile.windows else 0
    return Item(
        place=place,
        naive_s=operator.median_s,
        later_s=operator.replay_s,
        size_bytes=profile.graph.size_of((*operator.inputs, *operator.outputs), until),
    )


def _waits(profile: Profile, pieces: Sequence[Piece], budget: int) -> list[Wait]:
    """Return what segments leave of each window: of its time, and of memory when it opens."""
    completed = complete(profile, pieces)
    loads = sum_loads(profile, completed)
    return [
        Wait(
            after=window.after,
            free_s=max(0.0, window.usable_s - loads.get(window.name, 0.0)),
            limit_bytes=max(0, most_retained_bytes(window, budget) - retained),
            gathers=window.gathers,
        )
        for window, retained in zip(
            profile.windows, retained_bytes(profile, completed), strict=True
        )
    ]


def _why_naive(profile: Profile, item: Item, budget: int) -> str:
    if item.size_bytes > budget:
        return f"retains {item.size_bytes} bytes, more than the budget of {budget}"
    if not profile.windows or profile.windows[-1].after <= item.place:
        return "no window comes after it"
    return "no later window has time and memory left for it"


def _choose(
    profile: Profile, pieces: Sequence[Piece], reasons: dict[str, str]
) -> tuple[Choice, ...]:
    piece_of = {
        name: piece for piece in pieces for name in piece.operators if name not in piece.helpers
    }
    found = []
    for place, (name, operator) in enumerate(
        zip(profile.graph.ids, profile.operators, strict=True)
    ):
        piece = piece_of.get(name)
        if piece is not None:
            choice = Choice(
                operator=name,
                method=piece.method,
                window=piece.window,
                segment=piece.name if len(piece.operators) > 1 else None,
                reason=reasons[name],
            )
        elif operator.compared:
            choice = Choice(
                operator=name,
                method=Method.COMPARED,
                reason="its outputs are compared anyway",
            )
        else:
            assert place not in profile.reaching, "phase 3 leaves out nothing whose result counts"
            choice = Choice(
                operator=name,
                method=Method.NONE,
                reason="its work reaches neither a gradient nor the state",
            )
        found.append(choice)
    return tuple(found)
