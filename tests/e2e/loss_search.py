"""Searches losses of stages that together have every pair of two values that can meet.

``python -m tests.e2e.loss_search 2`` prints :mod:`tests.e2e.loss_table` anew, from two searches.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

from tests.e2e.loss_factors import (
    RULES,
    SEARCHED,
    VALUES,
    Pair,
    Rule,
    Values,
    all_pairs,
    broken_rules,
    complete,
    pairs,
    possible_pairs,
    rules_of,
)

NUM_TRIED = 24
"""Losses that are drawn for each one that is taken."""


def make_table(seed: int) -> list[dict[str, Any]]:
    """Return losses that have every possible pair: each has most of those that are left, of some
    that were drawn.
    """
    rng, left, found = random.Random(seed), set(possible_pairs()), []
    while left:
        drawn, listed = [], sorted(left, key=str)
        for _ in range(NUM_TRIED):
            values = complete(dict(rng.choice(listed)), rng)
            assert values is not None
            drawn.append(_improved(values, left, rng))
        best = max(drawn, key=lambda values: len(left.intersection(pairs(values))))
        left.difference_update(pairs(best))
        found.append(best)
    return found


def _improved(values: dict[str, Any], left: set[Pair], rng: random.Random) -> dict[str, Any]:
    """Return a loss with one value after the other changed wherever more pairs are had by that."""

    def gain(one: Values) -> int:
        return len(left.intersection(pairs(one)))

    best = gain(values)
    for factor in rng.sample([*VALUES], len(VALUES)):
        for value in VALUES[factor]:
            tried = values | {factor: value}
            if all(rule.allows(tried) for rule in rules_of(factor)) and gain(tried) > best:
                values, best = tried, gain(tried)
    return values


def _why_not(pair: Pair) -> str:
    """Return the rule but for which there would be a loss with a pair; all that are broken else."""
    for number, rule in enumerate(RULES):
        others = RULES[:number] + RULES[number + 1 :]
        if _is_possible_by(others, dict(pair), [n for n in SEARCHED if n not in dict(pair)]):
            return rule.why
    return "; ".join(broken_rules(dict(pair)))


def _is_possible_by(rules: Sequence[Rule], values: Values, open_factors: Sequence[str]) -> bool:
    if not all(rule.allows(values) for rule in rules):
        return False
    if not open_factors:
        return True
    factor, *others = open_factors
    return any(_is_possible_by(rules, {**values, factor: v}, others) for v in VALUES[factor])


def refused_by(rule: Rule) -> dict[str, Any] | None:
    """Return values that a rule alone refuses, of its factors; None if there are none."""
    others = [other for other in RULES if other is not rule]
    for choice in itertools.product(*(VALUES[name] for name in rule.factors)):
        values = dict(zip(rule.factors, choice, strict=True))
        left = [name for name in SEARCHED if name not in values]
        if not rule.allows(values) and _is_possible_by(others, values, left):
            return values
    return None


def main() -> None:
    """Print a table of losses, the smallest of some, and the pairs that none has."""
    table = min((make_table(seed) for seed in range(int(sys.argv[1]))), key=len)
    lines = sorted(" ".join(str(values[name]) for name in VALUES) for values in table)
    lines.append(f"# {len(lines)} losses")
    by_rule: dict[str, list[str]] = {}
    for pair in sorted(all_pairs() - possible_pairs(), key=str):
        line = " ".join(f"{name}={value}" for name, value in pair)
        by_rule.setdefault(_why_not(pair), []).append(line)
    for why, excluded in by_rule.items():
        lines += [f'    "{why}": """', *excluded, '""",']
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
