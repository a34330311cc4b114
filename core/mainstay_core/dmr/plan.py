"""Describes a plan of checks: what is executed again, when, and which tensors are compared.

A plan is made of *pieces*. A piece is a set of operators that are executed again together, from
tensors that lie outside of it, and of which the tensors that leave it are compared with those of
the first execution. A piece of one operator is the usual case. Larger pieces are AC segments, whose
recompute is the second execution (P-DMR), and AGC segments, which are replayed in a window.
"""

from __future__ import annotations

import bisect
import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from mainstay_core.base import codec
from mainstay_core.base.bounds import Count, Digest, Longest, Name, Seconds, Sentence
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.dmr.operators import MAX_OPERATORS, MAX_TENSORS, OperatorNames, TensorNames
from mainstay_core.dmr.profiles import WHOLE_WAY, Profile, Window, check_kind

PLAN_KIND = "mainstay-dmr-plan"


class Policy(enum.StrEnum):
    """The rules by which a plan was made."""

    PAPER = "paper"
    """SpareTrain's, section 5: the baseline."""
    OWN = "own"


class Method(enum.StrEnum):
    """The way in which an operator is checked."""

    PIGGYBACK = "P"
    """AC's recompute is its second execution (P-DMR)."""
    INTER = "inter"
    """Again in a wait for another stage or replica (D-DMR inter)."""
    INTRA = "intra"
    """Again in a wait for an inner rank (D-DMR intra)."""
    NAIVE = "naive"
    """Again at once."""
    DYNAMIC = "dynamic"
    """The dynamic planner decides between inter, intra and naive when it runs."""
    COMPARED = "compared"
    """Not again: its outputs are compared anyway."""
    NONE = "none"
    """Not at all: its work reaches neither a gradient nor the state."""


DEFERRED = (Method.INTER, Method.INTRA)
"""Methods of pieces that wait for a window."""
CHECKED_ALONE = (Method.NAIVE, Method.DYNAMIC)
"""Methods of pieces of one operator that have no window in the plan."""


class Compared(enum.StrEnum):
    """The way in which two executions' tensors are compared; nothing weaker exists."""

    BITS = "bits"
    """As integers, where both are at hand."""
    DIGEST = "digest"
    """By the ledger's digest, which was taken when the first one was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A tensor of which both executions are compared."""

    tensor: Name
    by: Compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Operators that are executed again together."""

    name: Name
    """Its only operator's, or a segment's."""
    method: Method
    operators: OperatorNames
    """All that are executed again, in order."""
    helpers: OperatorNames = ()
    """Those of them that another piece checks: executed again only to make others' inputs."""
    window: Name | None = None
    """In which it is executed again; None unless the method is inter or intra."""
    comparisons: Annotated[tuple[Comparison, ...], Longest(MAX_TENSORS)]
    copies: TensorNames = ()
    """Tensors that are overwritten before it is executed again, and so copied before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The way in which one operator is checked, with the reason."""

    operator: Name
    method: Method
    window: Name | None = None
    segment: Name | None = None
    """The piece of several operators that it belongs to."""
    reason: Sentence
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The operators of one method."""

    method: Method
    num_operators: Count
    operator_s: Seconds
    """Of one execution each, without communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The sums of a plan, for people and benchmarks."""

    operator_s: Seconds
    """Of one execution of all operators, without communication."""
    shares: Annotated[tuple[Share, ...], Longest(len(Method))]
    exposed_s: Seconds
    """By which checks make a passage longer: naive ones, last operators of AC segments, overruns
    of windows. What the dynamic planner will decide is not in it."""
    overrun_s: Seconds
    """The part of it by which windows are too short."""
    peak_bytes: Count
    """The most that checks retain at any time."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan of checks for one passage of a micro-batch through a stage."""

    kind: Literal["mainstay-dmr-plan"] = "mainstay-dmr-plan"
    format: Literal[1] = 1
    fingerprint: Digest
    """The profile's."""
    policy: Policy
    budget_bytes: Count
    pieces: Annotated[tuple[Piece, ...], Longest(MAX_OPERATORS)]
    choices: Annotated[tuple[Choice, ...], Longest(MAX_OPERATORS)]
    """One of each operator of the profile, in its order."""
    totals: Totals
    way: Name = field(default=WHOLE_WAY, metadata=codec.OMITTED)
    """Of that micro-batch through the stage, as the profile has it."""

    @cached_property
    def choice_of(self) -> dict[str, Choice]:
        """Return the choices by operator."""
        return {choice.operator: choice for choice in self.choices}


def sum_totals(profile: Profile, pieces: tuple[Piece, ...], choices: tuple[Choice, ...]) -> Totals:
    """Return the totals of a plan's pieces and choices. O(operators and their operands).

    Seconds are added by :func:`math.fsum`, here and wherever a plan depends on them: what ``sum``
    makes of floats is not the same in every version of Python.
    """
    graph = profile.graph
    seconds: dict[Method, list[float]] = {method: [] for method in Method}
    for choice, operator in zip(choices, graph.operators, strict=True):
        seconds[choice.method].append(operator.median_s)
    overrun_s = math.fsum(
        max(0.0, load_s - profile.window_of[name].usable_s)
        for name, load_s in sum_loads(profile, pieces).items()
    )
    return Totals(
        operator_s=math.fsum(operator.median_s for operator in graph.operators),
        shares=tuple(
            Share(method=method, num_operators=len(each_s), operator_s=math.fsum(each_s))
            for method, each_s in seconds.items()
            if each_s
        ),
        exposed_s=math.fsum((overrun_s, *(exposed_s(profile, piece) for piece in pieces))),
        overrun_s=overrun_s,
        peak_bytes=max(retained_bytes(profile, pieces), default=0),
    )


def exposed_s(profile: Profile, piece: Piece) -> float:
    """Return by how much a piece without a window makes a passage longer.

    P-DMR costs the operators that AC does not recompute, their communication included (SpareTrain,
    section 5.1). A naive operator that AC recomputes is executed twice each time.
    """
    graph, again = profile.graph, profile.recomputed_at
    places = [graph.places[name] for name in piece.operators]
    if piece.method is Method.PIGGYBACK:
        return math.fsum(graph.operators[place].replay_s for place in places if place not in again)
    if piece.method is Method.NAIVE:
        return math.fsum(
            graph.operators[place].median_s * (2 if place in again else 1) for place in places
        )
    return 0.0


def sum_loads(profile: Profile, pieces: tuple[Piece, ...]) -> dict[str, float]:
    """Return the seconds of checks in each window that has some."""
    graph = profile.graph
    loads: dict[str, list[float]] = {}
    for piece in pieces:
        if piece.window is not None:
            load_s = (graph.operators[graph.places[name]].replay_s for name in piece.operators)
            loads.setdefault(piece.window, []).extend(load_s)
    return {window: math.fsum(load_s) for window, load_s in loads.items()}


def retained_bytes(profile: Profile, pieces: Iterable[Piece]) -> list[int]:
    """Return the bytes that deferred pieces retain when each window opens, in the profile's order.

    A piece retains what it is executed from and what it is compared with, from its first operator
    (for one that AC recomputes: from the recompute) until its window is over. Between two windows
    this only grows, so it is never more than at the later one. Tensors that two pieces retain
    count for each, so the account is never too low.
    """
    found = [0] * len(profile.windows)
    numbers = {window.name: number for number, window in enumerate(profile.windows)}
    for piece in pieces:
        if piece.window is not None:
            size = piece_bytes(profile, piece)
            for number in waited_for(profile, piece.operators, numbers[piece.window]):
                found[number] += size
    return found


def waited_for(profile: Profile, operators: Iterable[str], number: int) -> range:
    """Return the windows, by number, at which a piece of these operators retains its tensors.

    Args:
        profile: of the stage.
        operators: of the piece.
        number: of the window in which it is executed again, the last of them.
    """
    begin = retained_from(profile, operators)
    first = bisect.bisect_left(profile.windows, begin, key=lambda window: window.after)
    return range(min(first, number), number + 1)


def most_retained_bytes(window: Window, budget_bytes: int) -> int:
    """Return the most that checks may retain when a window opens."""
    return min(budget_bytes, window.headroom_bytes)


def piece_bytes(profile: Profile, piece: Piece) -> int:
    """Return the bytes that a deferred piece retains, copies of addressed tensors included."""
    graph = profile.graph
    names = dict.fromkeys(graph.outer_inputs(graph.places[name] for name in piece.operators))
    names |= dict.fromkeys(comparison.tensor for comparison in piece.comparisons)
    until = 0 if piece.window is None else profile.window_of[piece.window].after
    return graph.size_of(names, until)


def retained_from(profile: Profile, operators: Iterable[str]) -> int:
    """Return the number of operators executed from which on a piece of these retains tensors."""
    again = profile.recomputed_at
    places = (profile.graph.places[name] for name in operators)
    return min(again.get(place, place + 1) for place in places)


def read_plan(text: str | bytes) -> Plan:
    """Return the plan that a file describes. It is not yet checked against a profile.

    Args:
        text: JSON.

    Raises:
        InvalidSpecError: it is no JSON (a torn file), no plan, of another format, or a field is
            missing, unfit or out of its bounds; the field is named.
    """
    try:
        data = codec.parse_json(text, "plan")
        check_kind(data, "plan", PLAN_KIND)
        return codec.decode(Plan, data, "plan")
    except MalformedError as error:
        raise InvalidSpecError(error.field, error.problem) from error
