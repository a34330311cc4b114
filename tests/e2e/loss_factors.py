"""The factors of losses of stages, and which of their values can meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.e2e.harness import EXPERTS

Values = Mapping[str, Any]
"""A value for each factor, or for some of them."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two factors with a value each, in the order of :data:`VALUES`."""

VALUES: dict[str, tuple[Any, ...]] = {
    "lost": ("trainer", "pod", "all", "stage", "adjacent", "apart"),
    "at": (
        "forward",
        "snapshot",
        "snapshot-copied",
        "snapshot-held",
        "log",
        "logged",
        "vote",
        "apply",
    ),
    "place": ("first", "middle", "last", "early"),
    "window": (1, 2, 3, "Auto"),
    "model": ("llama", "moe"),
    "dtype": ("float32", "bfloat16"),
    "stages": (1, 2, 4),
    "replicas": (1, 2),
    "slots": (1, 2),
    "inner": (1, 2),
    "replay": ("Gradients", "Boundary"),
    "which": ("first", "middle", "last"),
    "further": ("nothing", "inside", "pod", "beside", "apart", "holder", "api"),
    "during": ("nothing", "replay", "replay-read", "replay-write", "replayed"),
    "order": ("fixed", "changing"),
}
"""The factors of the matrix.

- lost: a trainer of a stage; its pod; all trainers of the job, while their pods live; every copy of
  a stage; those of two neighbouring stages of four; those of two that are not neighbours.
- at: the action at which it happens.
- place: the instalment of the window; ``early``: the first window is not complete.
- slots: ranks of a pod. inner: ranks of a stage.
- replay: from what a lost state is made anew.
- which: the stage of a lost trainer or pod, or of lost copies; the other losses have theirs.
- further: what else is lost while a state is made anew. ``inside``: the trainer that does it.
  ``pod``: that trainer's pod, which is the spare after the loss of a pod. ``beside``: all copies
  of a stage beside it, which joins it in a replay from boundary logs; ``apart``: of a stage that is
  not beside it. Of two replicas one is masked by then: lost is the other's cell of that stage, and
  the masked one's computes in its place. ``holder``: a pod that has copies, or with boundary logs
  the logs of the stage beside it. ``api``: the api, which comes back.
- during: the action of the replay at which that happens. Where it is another one that is lost, the
  trainer that replays stands still there meanwhile.
- order: of the units; ``changing``: it is another one in the window before the loss than in that
  before it.
"""


@cache
def num_units(model: str, stages: int) -> tuple[int, ...]:
    """Return the units of each stage: embedding, two layers and head lie in one, two or four
    stages, and the second layer of the mixture has experts, a router and the rest of it.
    """
    units = [1, 1, EXPERTS["experts"] + 2 if model == "moe" else 1, 1]
    size = len(units) // stages
    return tuple(sum(units[n : n + size]) for n in range(0, len(units), size))


def stage_of_experts(stages: int) -> int:
    """Return the stage whose layer has the experts of a mixture."""
    return stages // 2


def length_of(window: int | str) -> int:
    """Return how long a window is taken to be: with ``Auto``, all is copied at once."""
    return window if isinstance(window, int) else 1


def num_pods(stages: int, replicas: int, inner: int, slots: int) -> int:
    """Return the pods with ranks."""
    return -(-stages * replicas * inner // slots)


def num_peers(stages: int, replicas: int, inner: int, slots: int) -> int:
    """Return the other pods that get each copy."""
    return min(2, num_pods(stages, replicas, inner, slots) - 1)


def stage_of(which: str, stages: int) -> int:
    """Return the stage of which one is lost."""
    return {"first": 0, "middle": stages // 2, "last": stages - 1}[which]


def lost_stages(lost: str, which: str, stages: int) -> tuple[int, ...]:
    """Return the stages that lose something."""
    known = {"all": tuple(range(stages)), "adjacent": (1, 2), "apart": (0, 2)}
    return known.get(lost, (stage_of(which, stages),))


def further_stage(further: str, replay: str, lost: Sequence[int], stages: int) -> int | None:
    """Return the stage that is lost in the midst of the replay of others; None if there is none.

    Args:
        further: ``beside``, ``apart`` or ``holder``.
        replay: from what the lost states are made anew.
        lost: the stages that are.
        stages: of the pipeline.
    """
    left = [stage for stage in range(stages) if stage not in lost]
    beside = [stage for stage in left if {stage - 1, stage + 1} & {*lost}]
    if further == "apart":
        return next((stage for stage in left if stage not in beside), None)
    if further == "beside" or replay == "Boundary":
        return next(iter(beside), None)
    # Copies lie away from the stage and its neighbours, if there are such pods.
    return 0 if lost[0] else stages - 1


# What is possible ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that some values must meet, and why.

    Attributes:
        why: there is no such loss otherwise, or nothing can be done about it.
        holds: whether the values of the factors that its arguments name meet it.
    """

    why: str
    holds: Callable[..., bool]

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of which it speaks."""
        code = self.holds.__code__
        return code.co_varnames[: code.co_argcount]

    def allows(self, values: Values) -> bool:
        """Return whether values meet it; those that lack a factor of it do."""
        if any(name not in values for name in self.factors):
            return True
        return self.holds(*(values[name] for name in self.factors))


WHOLE = ("all", "stage", "adjacent", "apart")
"""Losses of every copy of a stage, however many replicas there are."""
FLOWS = ("replay-read", "replay-write")
OTHERS = ("beside", "apart", "holder")
"""Further losses that are not of the trainer that replays, nor of its pod."""


def _has_units(at: str, place: str, window: Any, lost: str, which: str, model: str, stages: int,
               replicas: int) -> bool:  # fmt: skip
    """Whether each author of the lost stages copies something at the place of the loss."""
    if at != "snapshot-held":
        return True
    units = [num_units(model, stages)[n] for n in lost_stages(lost, which, stages) if n < stages]
    if place == "first":
        return all(number >= replicas for number in units)
    # Of three instalments the last one may be empty, and one author's share is not known here.
    is_split = replicas == 1 and all(number > 1 for number in units)
    return is_split and (place == "middle" or length_of(window) == 2)


RULES = (
    Rule("with one replica each copy of a stage is one trainer",
         lambda lost, replicas: lost != "stage" or replicas == 2),
    Rule("the mixture has one rank to a stage",
         lambda inner, model: inner == 1 or model == "llama"),
    Rule("a pod has no more ranks than the job",
         lambda slots, stages, replicas, inner: slots <= stages * replicas * inner),
    Rule("a window is no longer than the stage with the most units",
         lambda window, model, stages: length_of(window) <= max(num_units(model, stages))),
    Rule("of a pod's loss another pod is left",
         lambda lost, stages, replicas, inner, slots:
         lost != "pod" or num_pods(stages, replicas, inner, slots) > 1),
    Rule("the window has no such instalment",
         lambda place, window:
         length_of(window) > {"first": 0, "middle": 2, "last": 1, "early": 1}[place]),
    # Before its copy begins, the second instalment of the first window is nowhere.
    Rule("only before it is copied a part of the first window is nowhere",
         lambda place, at: place != "early" or at == "snapshot"),
    Rule("a living cell has all that a first window lacks",
         lambda place, lost, replicas: place != "early" or lost in WHOLE or replicas == 1),
    Rule("where each author copies one unit, the first instalment has all",
         lambda place, lost, which, model, stages, replicas: place != "early" or any(
             num_units(model, stages)[n] > replicas
             for n in lost_stages(lost, which, stages) if n < stages)),
    Rule("an instalment without units is not sent to anybody", _has_units),
    # What is lost meanwhile.
    Rule("what is lost meanwhile is lost at an action, and at no action nothing is",
         lambda further, during: (further == "nothing") == (during == "nothing")),
    Rule("before the first window is complete nothing is made anew from it",
         lambda place, further: place != "early" or further == "nothing"),
    Rule("with a cell left the state is copied from it, and nobody makes it anew",
         lambda further, lost, replicas:
         further == "nothing" or lost in WHOLE or replicas == 1),
    Rule("gradients have nothing that crossed a border",
         lambda during, replay: during not in FLOWS or replay == "Boundary"),
    Rule("a single stage has no border",
         lambda during, stages: during not in FLOWS or stages > 1),
    Rule("no other stage is left there",
         lambda further, replay, lost, which, stages: further not in OTHERS or
         further_stage(further, replay, lost_stages(lost, which, stages), stages) is not None),
    Rule("a rank of a cell that was broken has no name until it has a cell again",
         lambda further, replicas, inner: further == "nothing" or replicas * inner < 4),
    Rule("the only rank of a job is alone in each quorum",
         lambda during, stages, replicas, inner:
         during in ("nothing", "replay") or stages * replicas * inner > 1),
    Rule("a further pod with copies may be lost where three have them",
         lambda further, stages, replicas, inner, slots:
         further != "holder" or num_peers(stages, replicas, inner, slots) == 2),
    Rule("of the loss of the pod that replays another pod is left",
         lambda further, stages, replicas, inner, slots:
         further != "pod" or num_pods(stages, replicas, inner, slots) > 1),
    Rule("the spare that replays may have the only copy that was left beside the lost pod's",
         lambda further, lost, stages, replicas, inner, slots: further != "pod" or
         lost != "pod" or num_peers(stages, replicas, inner, slots) == 2),
    Rule("the logs that a masked cell has sent go with its pod, and nobody computes them again",
         lambda further, replay, replicas, slots:
         replay != "Boundary" or replicas == 1 or further not in ("holder", "pod") or
         (further == "pod" and slots == 1)),
    Rule("a lost pod takes the stage beside along where it has both",
         lambda further, lost, slots: lost != "pod" or further not in OTHERS or slots == 1),
    # What is copied in another order.
    Rule("layers have one order",
         lambda order, model: order == "fixed" or model == "moe"),
    Rule("the first window has no order before it",
         lambda order, place: order == "fixed" or place != "early"),
    Rule("a stage without experts has one order",
         lambda order, lost, which, stages: order == "fixed" or
         stage_of_experts(stages) in lost_stages(lost, which, stages)),
    # Last, as a pair has the first reason but for which some loss had it.
    Rule("there is no such stage",
         lambda which, stages: stages > ("last", "first", "middle").index(which)),
    Rule("two of four stages are lost, neighbours or not",
         lambda lost, stages: lost not in ("adjacent", "apart") or stages == 4),
    Rule("the other losses have their stages",
         lambda which, lost: which == "last" or lost in ("trainer", "pod", "stage")),
)  # fmt: skip
"""The conditions of a loss that is possible."""

SEARCHED = (
    "stages", "lost", "which", "model", "replicas", "inner", "slots", "further", "during",
    "replay", "order", "window", "place", "at", "dtype",
)  # fmt: skip
"""The factors in the order in which the search sets them: those that most rules name come first."""


@cache
def rules_of(factor: str) -> tuple[Rule, ...]:
    """Return the rules that speak of a factor."""
    return tuple(rule for rule in RULES if factor in rule.factors)


def broken_rules(values: Values) -> list[str]:
    """Return why there is no such loss; nothing if there is one."""
    return [rule.why for rule in RULES if not rule.allows(values)]


def complete(values: Values, rng: random.Random | None = None) -> dict[str, Any] | None:
    """Return a possible loss that has some values; None if there is none.

    Args:
        values: that it has.
        rng: draws the others; None: the first that do.
    """
    if broken_rules(values):
        return None
    return _completed(dict(values), [name for name in SEARCHED if name not in values], rng)


def _completed(
    values: dict[str, Any], open_factors: Sequence[str], rng: random.Random | None
) -> dict[str, Any] | None:
    if not open_factors:
        return values
    factor, *others = open_factors
    choices = list(VALUES[factor])
    if rng is not None:
        rng.shuffle(choices)
    for value in choices:
        tried = values | {factor: value}
        if all(rule.allows(tried) for rule in rules_of(factor)):
            found = _completed(tried, others, rng)
            if found is not None:
                return found
    return None


def pairs(values: Values) -> Iterable[Pair]:
    """Return all pairs of two factors' values that a loss has."""
    return itertools.combinations([(name, values[name]) for name in VALUES], 2)


def all_pairs() -> set[Pair]:
    """Return all pairs of two factors' values, possible or not."""
    return {
        ((one, a), (other, b))
        for one, other in itertools.combinations(VALUES, 2)
        for a, b in itertools.product(VALUES[one], VALUES[other])
    }


@cache
def possible_pairs() -> frozenset[Pair]:
    """Return all pairs that some possible loss has."""
    found: set[Pair] = set()
    for pair in sorted(all_pairs(), key=str):
        if pair in found:
            continue
        values = complete(dict(pair))
        if values is not None:
            found.update(pairs(values))
    return frozenset(found)


def parse(line: str) -> dict[str, Any]:
    """Return the values of a line: in the order of :data:`VALUES`, then as ``factor=value``."""
    words = line.split()
    in_order = [word for word in words if "=" not in word]
    named = dict(zip(VALUES, in_order, strict=False))
    named |= dict(word.split("=") for word in words if "=" in word)
    return {
        name: next(value for value in VALUES[name] if str(value) == word)
        for name, word in named.items()
    }
