"""Compares strategies for one lost stage, from curves that are kept (CheckFree, figure 2).

A part returns lines of Markdown, and adds its pictures and what it says of the paper's claims.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from support import svg
from support.approximate.curves import Curve
from support.approximate.experiment import Experiment, paired
from support.approximate.losses import LATER_STEPS, columns_of, cost_of
from support.approximate.strategies import (
    BY_NORMS,
    COPIED_END,
    COPY,
    OF_ENDS,
    OF_STATES,
    RANDOM,
    STRATEGIES,
    UNIFORM,
)
from support.intervals import Claim, shown

from mainstay_core.base.shape import Order

TELLING_NATS = 0.05
"""Loss without an inner stage over that of the whole, from which on its loss matters."""


def check(this: Experiment) -> list[str]:
    """Return what it costs to leave a stage out, and whether the setting can tell."""
    curve = this.curves.get(this.setting)
    if curve is None:
        return ["Not run."]
    lines = ["| after step | stage left out | loss over whole |", "| --- | --- | --- |"]
    telling = []
    for step, losses in sorted(curve.without.items()):
        over = {stage: loss - curve.held_out[step] for stage, loss in sorted(losses.items())}
        lines += [f"| {step} | {stage} | {gap:+.4f} |" for stage, gap in over.items()]
        inner = [*over][1:-1]
        telling.append({stage for stage in inner if over[stage] >= TELLING_NATS})
    found = sorted(set.intersection(*telling)) if telling else []
    if len(found) >= 2:
        verdict = f"can tell: at both times stages {', '.join(map(str, found))} cost"
    else:
        verdict = "CANNOT tell, and nothing follows from its averages: not two inner stages cost"
    ends = ", ".join(f"{step}: {curve.held_out[step]:.4f}" for step in sorted(curve.without))
    lines += ["", f"This setting {verdict} {TELLING_NATS} nats or more. Loss of the whole: {ends}."]
    return lines


def jumps(this: Experiment) -> list[str]:
    """Compare what strategies do to the loss of one undisturbed run, at many steps.

    Each loss is tried on a copy of the run's state and undone, so no loss bears on another one.
    """
    lines = []
    claimed: dict[tuple[Order, str], dict[tuple[int, int], float]] = {}
    for setting in (this.setting, this.swapped):
        curve = this.curves.get(setting)
        if curve is None:
            continue
        last = setting.stages - 1
        lines += [f"Pipeline {setting.order}:", "", "| lost | strategy | jump | losses | weights |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for place, ends, strategies in (("inner", False, OF_STATES), ("end", True, OF_ENDS)):
            for strategy in strategies:
                tried = [
                    t
                    for t in curve.tried
                    if t["strategy"] == strategy.name and (t["stage"] in (0, last)) == ends
                ]
                by_key = {(t["step"], t["stage"]): t["after"] - t["before"] for t in tried}
                claimed[setting.order, f"{place} {strategy.name}"] = by_key
                told = shown([*by_key.values()])
                averages = strategy.how in ("plan", "authors")
                weights = _median_weights(tried) if averages else "-"
                lines.append(f"| {place} | {strategy.name} | {told} | {len(tried)} | {weights} |")
        lines.append("")
    in_order = Order.IN_ORDER
    pairs = (
        ("a copy of the stage before jumps less than random", "4.1", COPY, RANDOM),
        ("the average by gradient norms jumps less than a copy", "4.1", BY_NORMS, COPY),
        (
            "weighed by gradient norms it jumps less than a uniform average",
            "4.2",
            BY_NORMS,
            UNIFORM,
        ),
    )
    for says, section, good, bad in pairs:
        one, other = (claimed.get((in_order, f"inner {s.name}"), {}) for s in (good, bad))
        differences = paired(one, other)
        this.claims.append(Claim(says=says, section=section, differences=differences))
    name = f"end {COPIED_END.name}"
    ordered, swapped = (claimed.get((order, name), {}) for order in (in_order, Order.SWAPPED))
    this.claims.append(
        Claim(
            says="an end that is copied from the stage beside it jumps less in a swapped pipeline",
            section="4.3",
            differences=paired(swapped, ordered),
        )
    )
    return lines or ["Not run."]


def _median_weights(tried: Sequence[Mapping[str, Any]]) -> str:
    """Return the middle and the extremes of the weights of the stage before."""
    weights = [w for t in tried for s, w in t["weights"].items() if int(s) < t["stage"]]
    if not weights or {*weights} == {1.0}:
        return "-"
    return f"{statistics.median(weights):.3f} ({min(weights):.3f} to {max(weights):.3f})"


def figure_2(this: Experiment) -> list[str]:
    """Compare strategies on the same losses of inner stages."""
    first = min(max(s.age for s in STRATEGIES), this.setting.steps // 2)
    strategies = [s for s in STRATEGIES if s.age <= first]
    draws = this.draws(this.rates[-1], with_ends=False, first=first)
    twin = this.curves.get(this.setting)
    if twin is None:
        return ["Not run."]
    cells = ("jump", "right after", f"{LATER_STEPS} steps on", "at the end", "losses")
    head = f"| strategy | {' | '.join(cells)} | weight before |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    later: dict[str, dict[tuple[int, int], float]] = {}
    shown_curves: dict[str, Mapping[int, float]] = {"undisturbed": twin.held_out}
    for strategy in strategies:
        runs = this.runs(strategy, draws)
        lines.append(f"| {strategy.name} | {_cells(runs.values(), twin)} |")
        print(lines[-1], flush=True)
        later[strategy.name] = _later(runs, twin)
        if 0 in runs:
            shown_curves[strategy.name] = runs[0].held_out
    this.pictures["figure-2"] = svg.draw(shown_curves, first)
    for says, section, good, bad in (
        ("a copy of the stage before is better than random", "4.1", COPY, RANDOM),
        ("the average by gradient norms is better than a copy", "4.1", BY_NORMS, COPY),
        ("weighing by gradient norms is better than a uniform average", "4.2", BY_NORMS, UNIFORM),
    ):
        this.claims.append(
            Claim(
                says=f"{says} ({LATER_STEPS} steps on)",
                section=section,
                differences=paired(later[good.name], later[bad.name]),
            )
        )
    left_out = [s.name for s in STRATEGIES if s not in strategies]
    return lines + [f"\nNot run: {name}, as no loss is late enough." for name in left_out]


def _cells(runs: Iterable[Curve], twin: Curve) -> str:
    """Return the cells of a strategy: losses on held-out samples over what they would be."""
    costs, ends, weights = [], [], []
    for curve in runs:
        last = max(curve.held_out)
        ends.append(curve.held_out[last] - twin.held_out[last])
        for lost in curve.after:
            costs.append(cost_of(lost, curve.held_out, twin.held_out))
            weights += [w for stage, w in lost["weights"].items() if int(stage) < lost["stage"]]
    median = f"{statistics.median(weights):.3f}" if weights else "-"
    columns = map(shown, (*columns_of(costs), ends))
    return " | ".join((*columns, str(len(costs)), median))


def _later(runs: Mapping[int, Curve], twin: Curve) -> dict[tuple[int, int], float]:
    """Return what a loss costs some steps on, by the seed and the step of the loss."""
    costs = (
        ((seed, lost["step"]), cost_of(lost, curve.held_out, twin.held_out).later)
        for seed, curve in runs.items()
        for lost in curve.after
    )
    return {key: later for key, later in costs if later is not None}
