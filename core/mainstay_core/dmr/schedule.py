"""Says what a trainer does of a plan: which checks wait, and for what, and which recomputes check.

Trainers execute single operators and segments of blocks again while they wait for other stages and
cells, and compare the recomputes of whole blocks with their forwards. Whatever a schedule does not
name is executed again at once. So no schedule leaves anything unchecked; a plan that asks for more
than trainers can do is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mainstay_core.base.errors import InvalidSpecError, MainstayError
from mainstay_core.base.words import quote
from mainstay_core.dmr.coverage import complete, verify_rule
from mainstay_core.dmr.operators import Operator
from mainstay_core.dmr.plan import DEFERRED, Choice, Method, Piece, Plan, read_plan, sum_totals
from mainstay_core.dmr.profiles import WHOLE_WAY, Profile
from mainstay_core.dmr.settings import WAY
from mainstay_core.dmr.static import plan_checks

FIELD = "spec.detection.dmr.plan"
NEXT_RECV_B = "NEXT_RECV_B"
"""The wait behind a passage of the first stage: it waits for the gradient of another micro-batch,
and so in a wait that is the RECV_B of that one."""
NEXT_RECV = "NEXT_RECV"
"""The wait behind a passage where micro-batches take two routes: whichever comes next."""
WAIT_S = 4e-5
"""What it costs to let a check wait, beside its execution: what is shorter is executed at once. Of
a CPU, as all times here; chosen by measurement (docs/benchmarks.md)."""
AGAIN_S, COMPARE_S_PER_BYTE = 4.6e-6, 3e-11
"""What a second execution at once costs beside the kernel, and to compare what it has made."""
POINTWISE_S_PER_BYTE = 8e-11
"""What a kernel that computes element by element takes for each byte that it makes, at least."""
_WAITING = (*DEFERRED, Method.DYNAMIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprintPrice:
    """The price of an imprint of a tensor, on a CPU.

    Where to execute a kernel again costs less, a recompute is not compared with its forward, but
    both are executed twice.
    """

    start_s: float
    s_per_byte: float
    few_bytes: int = 0
    """A tensor of so many bytes or less is digested as it is, and costs another price."""
    few_s: float = 0.0

    def of(self, sizes: Sequence[int]) -> float:
        """Return the seconds for tensors of so many bytes each."""
        more = [size for size in sizes if size > self.few_bytes]
        few = len(sizes) - len(more)
        return few * self.few_s + len(more) * self.start_s + sum(more) * self.s_per_byte


COMPILED_IMPRINT = ImprintPrice(start_s=3e-6, s_per_byte=6e-11)
"""Of one pass over the bytes, in compiled code."""
BATCHED_IMPRINT = ImprintPrice(start_s=2.5e-5, s_per_byte=2e-10, few_bytes=1 << 13, few_s=8e-6)
"""Of products of torch, where no code is compiled; chosen by measurement (docs/benchmarks.md)."""


class RefusedPlanError(MainstayError):
    """A plan that trainers cannot carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """A check that waits."""

    window: str | None
    """In which it is executed at the latest; None: in whichever the dynamic planner has time."""
    expected_s: float
    """Of one execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of an operator in a segment that is replayed."""

    segment: str
    window: str
    """In which it is replayed at the latest."""
    expected_s: float
    """Of a replay of all of it."""
    helps: bool
    """Whether something else checks the operator: it is replayed only to make others' inputs."""
    compared: frozenset[int]
    """Its outputs, by their place, that are compared."""
    is_last: bool
    """Whether all others of the segment are executed before it."""
    in_recompute: bool
    """Whether the segment has the recompute of the operator, not its first execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The part of a plan that is not executed at once."""

    later: Mapping[str, Later]
    """By operator."""
    parts: Mapping[str, Part]
    """By operator."""
    piggyback: frozenset[int]
    """Blocks, by their number in the model, whose recompute is compared with their forward."""
    cheap: frozenset[str]
    """Operators of these blocks that are executed twice at once all the same, in both passes."""
    shares: str
    """How operator time is checked, by method, for people."""


def schedule_of(profile: Profile, plan: Plan, imprint: ImprintPrice = COMPILED_IMPRINT) -> Schedule:
    """Return what a trainer does of a plan.

    Args:
        profile: of the stage in this run.
        plan: keeps the rule of coverage for it.
        imprint: what an imprint costs the trainer.

    Raises:
        RefusedPlanError: a trainer cannot carry it out; the piece is named.
    """
    graph, piggyback, cheap = profile.graph, set[int](), set[str]()
    later: dict[str, Later] = {}
    parts: dict[str, Part] = {}
    for piece in plan.pieces:
        if piece.method is Method.PIGGYBACK:
            piggyback.add(graph.operators[graph.places[piece.operators[0]]].block)
            cheap.update(name for name in piece.operators if _is_cheap(profile, name, imprint))
            continue
        if piece.method not in (Method.INTER, Method.INTRA, Method.DYNAMIC):
            continue
        if piece.method is Method.INTRA:
            raise RefusedPlanError(
                f"{piece.name} waits for {piece.window}, a wait for inner ranks, of which "
                "trainers execute no plan"
            )
        if len(piece.operators) > 1:
            parts |= _parts_of(profile, piece, parts)
            continue
        (name,) = piece.operators
        expected_s = graph.operators[graph.places[name]].median_s
        later[name] = Later(window=piece.window, expected_s=expected_s)
    return Schedule(
        later=later,
        parts=parts,
        piggyback=frozenset(piggyback),
        cheap=frozenset(cheap),
        shares=describe_shares(plan),
    )


def is_twice_cheaper(execution_s: float, sizes: Sequence[int], imprint: ImprintPrice) -> bool:
    """Return whether a kernel is executed twice for less than its imprints cost.

    Args:
        execution_s: of one execution.
        sizes: bytes of each tensor that it makes.
        imprint: what an imprint costs here.
    """
    again_s = execution_s + AGAIN_S + sum(sizes) * COMPARE_S_PER_BYTE
    return again_s < imprint.of(sizes)


def is_pointwise_cheaper(sizes: Sequence[int], imprint: ImprintPrice) -> bool:
    """Return the same of a kernel that computes element by element, and was not measured.

    Without compiled code this is so of every such kernel; with it, of those that make several small
    tensors.
    """
    return is_twice_cheaper(sum(sizes) * POINTWISE_S_PER_BYTE, sizes, imprint)


def _is_cheap(profile: Profile, name: str, imprint: ImprintPrice) -> bool:
    """Return whether an operator is executed twice for less than its imprints cost."""
    graph = profile.graph
    operator = graph.operators[graph.places[name]]
    sizes = [graph.tensors[output].size_bytes for output in operator.outputs]
    return is_twice_cheaper(operator.median_s, sizes, imprint)


def _parts_of(profile: Profile, piece: Piece, known: Mapping[str, Part]) -> dict[str, Part]:
    """Return the parts of a segment's operators.

    Raises:
        RefusedPlanError: an operator is in two segments.
    """
    graph, again = profile.graph, profile.recomputed_at
    places = {name: graph.places[name] for name in piece.operators}
    last = max(places, key=lambda name: (again.get(places[name], places[name]), places[name]))
    compared = {comparison.tensor for comparison in piece.comparisons}
    assert piece.window is not None, "it waits"
    expected_s = math.fsum(graph.operators[place].replay_s for place in places.values())
    found = {}
    for name, place in places.items():
        if name in known:
            raise RefusedPlanError(
                f"{name} is replayed in {known[name].segment} and in {piece.name}, and trainers "
                "replay an operator once"
            )
        outputs = enumerate(graph.operators[place].outputs)
        found[name] = Part(
            segment=piece.name,
            window=piece.window,
            expected_s=expected_s,
            helps=name in piece.helpers,
            compared=frozenset(number for number, output in outputs if output in compared),
            is_last=name == last,
            in_recompute=place in again,
        )
    return found


def describe_shares(plan: Plan) -> str:
    """Return the share of operator time by method, e.g. ``P 38 %, inter 40 %, naive 22 %``.

    Trainers check at once as well what a plan leaves unchecked, as its result does not count.
    """
    total_s = math.fsum(share.operator_s for share in plan.totals.shares)
    told: dict[Method, float] = {}
    for share in plan.totals.shares:
        method = Method.NAIVE if share.method is Method.NONE else share.method
        told[method] = told.get(method, 0.0) + share.operator_s
    return ", ".join(
        f"{method.value} {operator_s / total_s:.0%}".replace("%", " %")
        for method, operator_s in told.items()
        if operator_s > 0
    )


def plan_here(profile: Profile, imprint: ImprintPrice = COMPILED_IMPRINT) -> tuple[Plan, Schedule]:
    """Plan a stage from the profile of its run, and say what a trainer does of that."""
    plan = _timed(profile, demote(profile, plan_checks(profile)))
    return plan, schedule_of(profile, plan, imprint)


def follow(
    profile: Profile, plan: Plan, imprint: ImprintPrice = COMPILED_IMPRINT
) -> tuple[Plan, Schedule]:
    """Take up a plan that was made from another profile of the same stage.

    What waits there for a window that this run has not, or has before, is checked at once.

    Args:
        profile: of the stage in this run.
        plan: from a file.
        imprint: what an imprint costs the trainer.

    Returns:
        The plan with the times of this run, and what a trainer does of it.

    Raises:
        UncoveredError: it breaks the rule of coverage, or is another stage's.
        RefusedPlanError: a trainer cannot carry it out.
    """
    if plan.fingerprint == profile.fingerprint and plan.budget_bytes > profile.budget_bytes:
        raise RefusedPlanError(
            f"it retains up to {plan.budget_bytes} bytes of a micro-batch, and "
            f"detection.dmr.memory leaves {profile.budget_bytes} to each in flight; plan with "
            f"--budget {profile.budget_bytes}"
        )
    ordered = reorder(profile, plan)
    verify_rule(profile, ordered)
    timed = _timed(profile, demote(profile, ordered))
    return timed, schedule_of(profile, timed, imprint)


def _timed(profile: Profile, plan: Plan) -> Plan:
    """Return a plan with the times of a profile."""
    return replace(plan, totals=sum_totals(profile, plan.pieces, plan.choices))


def reorder(profile: Profile, plan: Plan) -> Plan:
    """Return a plan whose operators are in the order of this run.

    In a swapped pipeline weight gradients come sooner or later, by what else a chain computes. What
    comes only after its window is checked at once. A plan of other operators stays as it is.

    Args:
        profile: of the stage in this run.
        plan: from a file.
    """
    ids, places, choice_of = profile.graph.ids, profile.graph.places, plan.choice_of
    named = {name for piece in plan.pieces for name in piece.operators}
    if tuple(choice_of) == ids or sorted(choice_of) != sorted(ids) or not named <= places.keys():
        return plan

    def comes_after(piece: Piece) -> str:
        window = profile.window_of.get(piece.window or "")
        if window is None or places[piece.operators[-1]] < window.after:
            return ""
        return f"{window.name} comes before it in this run"

    pieces = tuple(
        replace(piece, operators=tuple(sorted(piece.operators, key=places.__getitem__)))
        for piece in plan.pieces
    )
    found = replace(plan, pieces=pieces, choices=tuple(choice_of[name] for name in ids))
    ordered = _check_at_once(profile, found, comes_after)
    return replace(ordered, pieces=complete(profile, ordered.pieces))


def demote(profile: Profile, plan: Plan) -> Plan:
    """Return a plan in which nothing waits in vain: it is checked at once, each operator alone.

    A window of no length never came. And what is over sooner than its check could be put aside need
    not wait. The plan keeps the rule of coverage.

    Args:
        profile: of the stage in this run.
        plan: keeps the rule.
    """
    absent = {window.name for window in profile.windows if window.median_s == 0}
    places, operators = profile.graph.places, profile.operators

    def waits_in_vain(piece: Piece) -> str:
        if piece.window in absent:
            return f"{piece.window} does not come in this run"
        if piece.method in _WAITING and _waits_in_vain(operators, places, piece):
            return "it takes less than to let its check wait"
        return ""

    demoted = _check_at_once(profile, plan, waits_in_vain)
    if demoted is not plan:
        verify_rule(profile, demoted)
    return demoted


def _check_at_once(profile: Profile, plan: Plan, why_not: Callable[[Piece], str]) -> Plan:
    """Return a plan in which some pieces do not wait; their operators are checked alone, at once.

    Args:
        profile: of the stage in this run.
        plan: of which some pieces wait.
        why_not: says why a piece does not wait; empty: it stays as it is.
    """
    reasons: dict[str, str] = {}
    pieces = []
    for piece in plan.pieces:
        why = why_not(piece)
        if why:
            reasons |= {name: why for name in piece.operators if name not in piece.helpers}
        else:
            pieces.append(piece)
    if not reasons:
        return plan
    pieces += [
        Piece(name=name, method=Method.NAIVE, operators=(name,), comparisons=()) for name in reasons
    ]
    choices = tuple(
        Choice(operator=choice.operator, method=Method.NAIVE, reason=reasons[choice.operator])
        if choice.operator in reasons
        else choice
        for choice in plan.choices
    )
    return replace(plan, pieces=complete(profile, pieces), choices=choices)


def _waits_in_vain(operators: Sequence[Operator], places: Mapping[str, int], piece: Piece) -> bool:
    """Return whether all that a piece checks is over sooner than its operators are put aside."""
    checked = [name for name in piece.operators if name not in piece.helpers]
    checked_s = math.fsum(operators[places[name]].median_s for name in checked)
    return checked_s < len(piece.operators) * WAIT_S


def read_ordered_plan(text: bytes, path: str, fingerprint: str, way: str = WHOLE_WAY) -> Plan:
    """Return the plan of a file that a job names, if it is of the job.

    Args:
        text: of the file.
        path: of the file, for people.
        fingerprint: of the job.
        way: of the micro-batches that it is wanted for.

    Raises:
        InvalidSpecError: it is torn, no plan, of another fingerprint, or for another way.
    """
    try:
        plan = read_plan(text)
    except InvalidSpecError as error:
        raise InvalidSpecError(FIELD, f"{path} is no plan that can be read: {error}") from error
    if plan.fingerprint != fingerprint:
        raise InvalidSpecError(
            FIELD,
            f"{path} is of the fingerprint {quote(plan.fingerprint)}, and this job has "
            f"{fingerprint}; make a plan from a profile of this job (mainstay dmr profile)",
        )
    if plan.way != way:
        raise InvalidSpecError(
            FIELD,
            f"{path} is for micro-batches of the way {quote(plan.way)}, and is read for those of "
            f"the way {way}; name a file for each way, with {WAY} in the path "
            f"(mainstay dmr profile --way {way})",
        )
    return plan
