"""The rule of coverage: which tensors a plan of checks must compare, and whether it does.

Each execution whose result can reach a gradient or the state has every tensor that leaves its piece
compared with a second execution, made from inputs that are addressed, or compared themselves.

A tensor leaves its piece if somebody uses it whose own piece does not make it again. It is not
enough to compare the last output of a piece: rounding can hide a wrong tensor from it that the
backward reads. So the tensors that a recompute keeps for the backward are compared, too, unless
what reads them is replayed from further back. SpareTrain (section 3.1) compares outputs alone.

By induction over the order of execution: the first wrong execution had right inputs, as had its
second execution; so they differ in a tensor that leaves the piece, or nothing wrong leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mainstay_core.base.errors import MainstayError
from mainstay_core.dmr.operators import Graph, Origin, Pass
from mainstay_core.dmr.plan import (
    CHECKED_ALONE,
    DEFERRED,
    Compared,
    Comparison,
    Method,
    Piece,
    Plan,
    most_retained_bytes,
    retained_bytes,
    sum_totals,
)
from mainstay_core.dmr.profiles import Profile


class UncoveredError(MainstayError):
    """A plan that leaves a wrong result unseen, or cannot be carried out. It must not run.

    Args:
        operator: whose executions it concerns; empty if none.
        tensor: what is not compared or not there any more; empty if none.
        problem: what is wrong.
    """

    def __init__(self, operator: str, tensor: str, problem: str) -> None:
        self.operator = operator
        self.tensor = tensor
        at = " ".join(part for part in (operator, tensor) if part)
        super().__init__(f"{at}: {problem}" if at else problem)


@dataclass(frozen=True, slots=True)
class Coverage:
    """A map of who checks which operator, by places, and what follows from it for tensors."""

    profile: Profile
    makes: Sequence[frozenset[int]]
    """By piece: the operators that it executes again."""
    checked_by: dict[int, int]
    """By operator: the piece that checks it."""

    def find_needed(self) -> dict[str, int]:
        """Return each tensor that must be compared, with a piece or an operator that needs it.

        The value is the place of the first operator that uses it, or -1 if it is a result. Tensors
        of operators that no piece checks are left out. O(operators and their operands).
        """
        graph, needed = self.profile.graph, {}
        for name in self.profile.results:
            if graph.makers.get(name) in self.checked_by:
                needed[name] = -1
        for place in sorted(self.profile.reaching):
            inside = self._makes_for(place)
            for name in graph.operators[place].inputs:
                maker = graph.makers.get(name)
                if maker in self.checked_by and maker not in inside:
                    needed.setdefault(name, place)
        for places in self.makes:
            for name in graph.outer_inputs(places):
                if graph.makers.get(name) in self.checked_by:
                    needed.setdefault(name, min(places))
        return needed

    def _makes_for(self, place: int) -> frozenset[int]:
        """Return what is executed again where an operator is checked."""
        piece = self.checked_by.get(place)
        return frozenset() if piece is None else self.makes[piece]


def cover(profile: Profile, pieces: Iterable[Piece]) -> Coverage:
    """Return who checks which operator.

    Raises:
        UncoveredError: a piece names an unknown operator, or two pieces check the same one.
    """
    graph = profile.graph
    makes: list[frozenset[int]] = []
    checked_by: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        for name in piece.operators:
            if name not in graph.places:
                raise UncoveredError(name, "", f"is in {piece.name}, but not in the profile")
        places = [graph.places[name] for name in piece.operators]
        if not places or places != sorted(set(places)):
            raise UncoveredError(
                piece.name, "", "must have operators, each once, in the order of execution"
            )
        makes.append(frozenset(places))
        for name in piece.operators:
            if name in piece.helpers:
                continue
            if graph.places[name] in checked_by:
                raise UncoveredError(name, "", f"is checked twice, the second time by {piece.name}")
            checked_by[graph.places[name]] = number
    return Coverage(profile, makes, checked_by)


def compare_by(profile: Profile, piece: Piece, tensor: str) -> Compared:
    """Return how a tensor of a piece can be compared.

    The recompute of an AC segment meets the forward's tensor only where something keeps it, and
    nothing has overwritten it by then: a later forward operator for its own backward, or the
    segment itself, which does not recompute it.
    """
    if piece.method is not Method.PIGGYBACK:
        return Compared.BITS
    graph, inside = profile.graph, set(piece.operators)
    recompute_place = max(
        profile.recomputed_at.get(graph.places[name], 0) for name in piece.operators
    )
    if graph.overwriters.get(tensor, recompute_place) < recompute_place:
        return Compared.DIGEST
    recomputed = graph.makers[tensor] in profile.recomputed_at
    for reader in graph.readers[tensor]:
        forward = graph.operators[reader].in_pass is Pass.FORWARD
        if graph.ids[reader] not in inside and (forward or not recomputed):
            return Compared.BITS
    return Compared.DIGEST


def find_copies(graph: Graph, piece: Piece, until: int) -> tuple[str, ...]:
    """Return which tensors of a piece must be copied, as they do not last until it runs again.

    Args:
        graph: of the stage.
        piece: with its comparisons.
        until: number of operators executed before it runs again.
    """
    places = [graph.places[name] for name in piece.operators]
    names = dict.fromkeys(graph.outer_inputs(places))
    names |= dict.fromkeys(comparison.tensor for comparison in piece.comparisons)
    return tuple(name for name in names if graph.overwriters.get(name, until) < until)


def runs_after(profile: Profile, piece: Piece) -> int | None:
    """Return how many operators have been executed when a piece runs again.

    Returns:
        None for a piece whose second execution is AC's own recompute. A profile refuses segments
        that would run again from what is overwritten by then, so these need no copies.
    """
    if piece.window is not None:
        return profile.window_of[piece.window].after
    if piece.method is Method.PIGGYBACK:
        return None
    if piece.method is Method.DYNAMIC:
        # The dynamic planner may keep it until the step's end.
        return len(profile.operators)
    return max(profile.graph.places[name] for name in piece.operators) + 1


def complete(profile: Profile, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return pieces with all comparisons that the rule asks for, no others, and their copies.

    Args:
        profile: of the stage.
        pieces: who checks what; their comparisons and copies are ignored.

    Raises:
        UncoveredError: two pieces check the same operator.
    """
    coverage = cover(profile, pieces)
    graph = profile.graph
    tensors: list[list[str]] = [[] for _ in pieces]
    for name in coverage.find_needed():
        tensors[coverage.checked_by[graph.makers[name]]].append(name)
    found = []
    for piece, names in zip(pieces, tensors, strict=True):
        names.sort(key=lambda name: (graph.makers[name], name))
        comparisons = tuple(
            Comparison(tensor=name, by=compare_by(profile, piece, name)) for name in names
        )
        found.append(_with_copies(profile, piece, comparisons))
    return tuple(found)


def _with_copies(profile: Profile, piece: Piece, comparisons: tuple[Comparison, ...]) -> Piece:
    compared = replace(piece, comparisons=comparisons, copies=())
    until = runs_after(profile, piece)
    copies = () if until is None else find_copies(profile.graph, compared, until)
    return replace(compared, copies=copies)


def verify_plan(profile: Profile, plan: Plan) -> None:
    """Check a plan against the rule of coverage, that it can be carried out, and its totals.

    It is the postcondition of every planner, and stands before every plan that comes from a file.
    O(operators and their operands).

    Raises:
        UncoveredError: see :func:`verify_rule`; or the totals are wrong.
    """
    verify_rule(profile, plan)
    if sum_totals(profile, plan.pieces, plan.choices) != plan.totals:
        raise UncoveredError("", "", "the plan's totals are not the sums of its pieces")


def verify_rule(profile: Profile, plan: Plan) -> None:
    """Check a plan as :func:`verify_plan` does, its totals aside.

    They are sums of times, which no two profiles of one stage have in common.

    Raises:
        UncoveredError: the plan belongs to another job; an operator whose result counts has no
            check, or two; a tensor that leaves its piece is not compared; a piece runs before it
            can or reads what is overwritten by then; the plan's budget exceeds the profile's; or
            the retained bytes exceed the budget or a window's headroom. Operator and tensor are
            named.
    """
    if plan.fingerprint != profile.fingerprint:
        raise UncoveredError(
            "",
            "",
            f"the plan is of the fingerprint {plan.fingerprint}, the profile of "
            f"{profile.fingerprint}; make a plan from this profile",
        )
    if plan.way != profile.way:
        raise UncoveredError(
            "",
            "",
            f"the plan is for micro-batches of the way {plan.way}, the profile of the way "
            f"{profile.way}; make a plan from this profile",
        )
    if plan.budget_bytes > profile.budget_bytes:
        raise UncoveredError(
            "",
            "",
            f"the plan's budget is {plan.budget_bytes} bytes, more than the profile's of "
            f"{profile.budget_bytes}",
        )
    for piece in plan.pieces:
        _check_form(profile, piece)
    coverage = cover(profile, plan.pieces)
    _check_all_checked(profile, plan, coverage)
    _check_compared(profile, plan, coverage)
    for piece in plan.pieces:
        _check_time(profile, piece)
    _check_memory(profile, plan)


def _check_form(profile: Profile, piece: Piece) -> None:
    """Check that a piece is one that its method can execute again."""
    graph, name = profile.graph, piece.name
    if (piece.window is not None) != (piece.method in DEFERRED):
        raise UncoveredError(name, "", f"is {piece.method.value} and has the window {piece.window}")
    if piece.method in (Method.COMPARED, Method.NONE):
        raise UncoveredError(name, "", f"is {piece.method.value}, which executes nothing again")
    if piece.method in CHECKED_ALONE and len(piece.operators) != 1:
        raise UncoveredError(name, "", f"is {piece.method.value} and has several operators")
    if not set(piece.helpers) < set(piece.operators):
        raise UncoveredError(name, "", "its helpers must be some of its operators, and not all")
    known = [operator for operator in piece.operators if operator in graph.places]
    for operator in known:
        may_wait = graph.operators[graph.places[operator]].waits
        if not may_wait and piece.method in (*DEFERRED, Method.DYNAMIC):
            raise UncoveredError(operator, "", "waits, but cannot be executed again later")
        if operator in piece.helpers or piece.method in (Method.PIGGYBACK, Method.NAIVE):
            continue
        if graph.places[operator] in profile.recomputed_at:
            raise UncoveredError(
                operator, "", "AC recomputes it: its check is the recompute, or naive both times"
            )
    if piece.method is not Method.PIGGYBACK:
        return
    if piece.operators not in profile.recomputed_together or piece.helpers:
        raise UncoveredError(name, "", "is P, but not all operators of one AC segment")


def _check_all_checked(profile: Profile, plan: Plan, coverage: Coverage) -> None:
    """Check that each operator has a check if its result counts, and is told as it is."""
    if tuple(choice.operator for choice in plan.choices) != profile.graph.ids:
        raise UncoveredError("", "", "the plan's choices are not those of the profile's operators")
    for place, (choice, operator) in enumerate(zip(plan.choices, profile.operators, strict=True)):
        number = coverage.checked_by.get(place)
        if number is not None:
            piece = plan.pieces[number]
            if (choice.method, choice.window) != (piece.method, piece.window):
                raise UncoveredError(operator.id, "", f"is told otherwise than {piece.name} has it")
        elif operator.compared and place not in profile.recomputed_at:
            # Of one that AC recomputes, nothing compares what the recompute hands to the backward.
            if choice.method is not Method.COMPARED:
                raise UncoveredError(operator.id, "", "its outputs are compared, told otherwise")
        elif place in profile.reaching:
            tensor = operator.outputs[0] if operator.outputs else ""
            raise UncoveredError(operator.id, tensor, "its result counts, and no piece checks it")
        elif choice.method is not Method.NONE:
            raise UncoveredError(operator.id, "", f"is told {choice.method.value}, is in no piece")


def _check_compared(profile: Profile, plan: Plan, coverage: Coverage) -> None:
    """Check that what leaves a piece is compared, and in a way in which it can be."""
    graph = profile.graph
    compared: set[str] = set()
    for number, piece in enumerate(plan.pieces):
        for comparison in piece.comparisons:
            name = comparison.tensor
            maker = graph.makers.get(name)
            if maker is None or coverage.checked_by.get(maker) != number:
                raise UncoveredError(piece.name, name, "is compared, but made elsewhere")
            if (
                comparison.by is Compared.BITS
                and compare_by(profile, piece, name) is Compared.DIGEST
            ):
                raise UncoveredError(
                    piece.name, name, "is compared by bits, but the forward's is not kept"
                )
            compared.add(name)
    for name, user in coverage.find_needed().items():
        if name not in compared:
            maker_id = graph.operators[graph.makers[name]].id
            whom = "is a result" if user < 0 else f"is used by {graph.operators[user].id}"
            raise UncoveredError(maker_id, name, f"leaves its piece ({whom}) and is not compared")


def _check_time(profile: Profile, piece: Piece) -> None:
    """Check that a piece runs after its operators, and that what it reads is there by then."""
    graph = profile.graph
    if piece.window is not None:
        window = profile.window_of.get(piece.window)
        if window is None:
            raise UncoveredError(piece.name, "", f"its window {piece.window} is not in the profile")
        if window.kind.value != piece.method.value:
            raise UncoveredError(
                piece.name, "", f"is {piece.method.value}, its window {window.kind.value}"
            )
        for name in piece.operators:
            if graph.operators[graph.places[name]].communication_s and not window.gathers:
                raise UncoveredError(
                    name, "", f"communicates, which no check may in the window {piece.window}"
                )
    until = runs_after(profile, piece)
    if until is None:
        return
    for name in piece.operators:
        if graph.places[name] >= until:
            raise UncoveredError(name, "", f"is executed only after the window {piece.window}")
    for tensor in find_copies(graph, piece, until):
        by = graph.operators[graph.overwriters[tensor]].id
        origin = graph.tensors[tensor].origin
        if tensor not in piece.copies:
            kind = "" if origin is Origin.MADE else f" ({origin.value})"
            raise UncoveredError(
                piece.name, tensor, f"{by} overwrites it{kind} before its check; not copied"
            )


def _check_memory(profile: Profile, plan: Plan) -> None:
    """Check that what waits for windows fits into memory at each of them."""
    retained = retained_bytes(profile, plan.pieces)
    for window, size_bytes in zip(profile.windows, retained, strict=True):
        if size_bytes > plan.budget_bytes:
            raise UncoveredError(
                window.name,
                "",
                f"checks retain up to {size_bytes} bytes, more than the budget of "
                f"{plan.budget_bytes}",
            )
        if size_bytes > most_retained_bytes(window, plan.budget_bytes):
            raise UncoveredError(
                window.name,
                "",
                f"checks retain {size_bytes} bytes when it opens, more than its headroom of "
                f"{window.headroom_bytes}",
            )
