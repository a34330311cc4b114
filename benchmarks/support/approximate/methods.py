"""Compares whole runs by four methods: the tables and figures 3 to 5b (CheckFree, section 5).

A part returns lines of Markdown, and adds its pictures and what it says of the paper's claims.
Where a curve is missing and may not be computed, a part tells what it can without it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from support import svg
from support.approximate.curves import UNDISTURBED, Curve
from support.approximate.experiment import Experiment
from support.approximate.losses import (
    LATER_STEPS,
    Cost,
    Draw,
    columns_of,
    cost_of,
    reaches,
    restarted,
)
from support.approximate.strategies import CHECKFREE, CHECKFREE_PLUS
from support.intervals import Claim, shown

LEVEL_AT = 2 / 3
"""The share of the steps at which the undisturbed run has the loss that all are to reach."""
FEW_TIMES_LONGER = 6
"""A job with restarts is followed for so many times the steps."""
SLIGHT_NATS = 0.05
SIMILAR = 1.1
"""The paper's perplexities differ by a tenth at most, and are called similar."""
SAVED = 0.12
"""The share of the time that the paper saves at the lowest rate."""


def table_2(this: Experiment) -> list[str]:
    """Compare four methods at three rates: steps and time to a stated loss on held-out samples."""
    twin, times = this.curves.get(this.setting), this.curves.step_times(this.setting, this.rounds)
    if twin is None or times is None:
        return ["Not run."]
    level = level_of(twin)
    exact = reaches(twin.held_out, level)
    assert exact is not None
    lines = [
        f"The loss to reach is {level:.4f}: undisturbed, it is there within {LEVEL_AT:.0%} of the",
        f"steps. Measured seconds of a step: in order {times['in order']:.4f}, swapped",
        f"{times['swapped']:.4f}, with the next stage's forward and half micro-batches",
        f"{times['redundant']:.4f}; to write a copy of the state: {times['copy']:.4f}.",
        "",
        "| rate | method | steps to it | seconds to it | seeds that reach it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rate in this.rates:
        draws = this.draws(rate)
        steps: dict[str, list[int | None]] = {
            "checkpoint restart, every 100": [
                _restarted_until(this, draw, twin, 100, level) for draw in draws
            ],
            "redundant computation": [exact for _ in draws],
            **{
                method.name: [
                    reaches(curve.held_out, level) for curve in this.runs(method, draws).values()
                ]
                for method in (CHECKFREE, CHECKFREE_PLUS)
            },
        }
        step_s = {
            "checkpoint restart, every 100": times["in order"] + times["copy"] / 100,
            "redundant computation": times["redundant"],
            CHECKFREE.name: times["in order"],
            CHECKFREE_PLUS.name: times["swapped"],
        }
        for method, found in steps.items():
            reached = [s for s in found if s is not None]
            mean = statistics.fmean(reached) if reached else math.nan
            told = f"{mean:.0f} | {mean * step_s[method]:.1f}" if reached else "- | -"
            lines.append(f"| {rate} | {method} | {told} | {len(reached)} of {len(found)} |")
        this.claims += _claims_of_table_2(rate, steps, step_s, is_lowest=rate == this.rates[0])
    return lines


def level_of(twin: Curve) -> float:
    """Return the loss that methods are to reach."""
    until = LEVEL_AT * max(twin.held_out)
    return min(loss for step, loss in twin.held_out.items() if step <= until)


def _restarted_until(
    this: Experiment, draw: Draw, twin: Curve, every: int, level: float
) -> int | None:
    curve = restarted_curve(this, draw, twin, every)
    return reaches(curve, level)


def restarted_curve(this: Experiment, draw: Draw, twin: Curve, every: int) -> dict[int, float]:
    """Return the held-out loss of a job that restarts from its newest checkpoint, by iteration."""
    num = FEW_TIMES_LONGER * this.setting.steps
    versions = restarted(draw.losses(this.setting.stages, num), every, num)
    return {
        number: twin.held_out[version]
        for number, version in enumerate(versions, 1)
        if version in twin.held_out
    }


def _claims_of_table_2(
    rate: float,
    steps: Mapping[str, Sequence[int | None]],
    step_s: Mapping[str, float],
    *,
    is_lowest: bool,
) -> Iterator[Claim]:
    def over(method: str, other: str, saved: float) -> list[float]:
        pairs = zip(steps[method], steps[other], strict=False)
        return [
            one * step_s[method] / (two * step_s[other]) - (1 - saved)
            for one, two in pairs
            if one is not None and two is not None
        ]

    restart, redundant = [*steps][:2]
    for method in (CHECKFREE.name, CHECKFREE_PLUS.name):
        if is_lowest:
            yield Claim(
                says=f"{method} saves {SAVED:.0%} of redundant computation's time, rate {rate}",
                section="5.1, table 2",
                differences=over(method, redundant, SAVED),
                unit="of its time",
            )
        yield Claim(
            says=f"{method} takes less time than checkpoint restart, rate {rate}",
            section="5.1, table 2",
            differences=over(method, restart, 0.0),
            unit="of its time",
        )


def figure_3(this: Experiment) -> list[str]:
    """Show the four methods at the middle rate, by steps; and what each place of a loss costs."""
    twin, draws = this.curves.get(this.setting), this.draws(this.middle)
    if twin is None or not draws:
        return ["Not run."]
    steps = this.setting.steps
    restarts = restarted_curve(this, draws[0], twin, 100)
    curves: dict[str, Mapping[int, float]] = {
        "redundant computation": twin.held_out,
        "checkpoint restart, every 100": {s: v for s, v in restarts.items() if s <= steps},
    }
    for method in (CHECKFREE, CHECKFREE_PLUS):
        for curve in [*this.runs(method, draws[:1]).values()]:
            curves[method.name] = curve.held_out
    this.pictures["figure-3"] = svg.draw(curves)
    return [f"Losses at a rate of {this.middle}, the first seed.", "", *_ends(this)]


def _ends(this: Experiment) -> list[str]:
    """Return what a loss costs, by the place of the stage: at once, and some steps on.

    The jump is over the loss just before, the others are over an undisturbed run of the same order
    at that step. Losses at all rates.
    """
    lines = [
        f"| method | stage lost | jump | right after | {LATER_STEPS} steps on | losses |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    jumps: dict[str, dict[tuple[float, int, int, int], float]] = {}
    last = this.setting.stages - 1
    inner = range(1, last)
    places = (("the first", (0,)), ("an inner one", inner), ("the last", (last,)))
    for method, setting in ((CHECKFREE, this.setting), (CHECKFREE_PLUS, this.swapped)):
        twin = this.curves.get(setting)
        undisturbed: Mapping[int, float] = {} if twin is None else twin.held_out
        found: dict[tuple[float, int, int, int], Cost] = {}
        for rate in this.rates:
            for seed, curve in this.runs(method, this.draws(rate)).items():
                for lost in curve.after:
                    key = (rate, seed, lost["step"], lost["stage"])
                    found[key] = cost_of(lost, curve.held_out, undisturbed)
        jumps[method.name] = {key: cost.jump for key, cost in found.items()}
        for name, stages in places:
            there = [cost for key, cost in found.items() if key[3] in stages]
            told = " | ".join(map(shown, columns_of(there)))
            lines.append(f"| {method.name} | {name} | {told} | {len(there)} |")
    ordered, swapped = jumps[CHECKFREE.name], jumps[CHECKFREE_PLUS.name]
    ends = [key for key in sorted(ordered) if key in swapped and key[3] in (0, last)]
    this.claims.append(
        Claim(
            says="an end that is copied from the stage beside it jumps less in a swapped pipeline",
            section="4.3",
            differences=[swapped[key] - ordered[key] for key in ends],
        )
    )
    return lines


def figure_4a(this: Experiment) -> list[str]:
    """Show CheckFree+ at three rates, and without losses."""
    twin = this.curves.get(this.swapped)
    if twin is None:
        return ["Not run."]
    curves: dict[str, Mapping[int, float]] = {"no loss": twin.held_out}
    last = this.setting.steps
    lines = ["| rate | loss at the end over that without losses |", "| --- | --- |"]
    at_end: dict[float, dict[int, float]] = {}
    for rate in this.rates:
        runs = this.runs(CHECKFREE_PLUS, this.draws(rate))
        at_end[rate] = {seed: c.held_out[last] - twin.held_out[last] for seed, c in runs.items()}
        lines.append(f"| {rate} | {shown([*at_end[rate].values()])} |")
        if 0 in runs:
            curves[f"rate {rate}"] = runs[0].held_out
    this.pictures["figure-4a"] = svg.draw(curves)
    low, high = at_end[this.rates[0]], at_end[this.rates[-1]]
    this.claims.append(
        Claim(
            says=f"CheckFree+ at the highest rate ends within {SLIGHT_NATS} nats of the lowest",
            section="5.2, figure 4a",
            differences=[high[s] - low[s] - SLIGHT_NATS for s in sorted(high) if s in low],
        )
    )
    return lines


def figure_4b(this: Experiment) -> list[str]:
    """Compare CheckFree+ with checkpoints every 10, 50 and 100 steps at the middle rate."""
    twin, draws = this.curves.get(this.setting), this.draws(this.middle)
    if twin is None or not draws:
        return ["Not run."]
    level, last = level_of(twin), this.setting.steps
    plus = this.runs(CHECKFREE_PLUS, draws)
    curves: dict[str, Mapping[int, float]] = {}
    lines = ["| method | steps to the loss of table 2 |", "| --- | --- |"]
    found = [s for s in (reaches(c.held_out, level) for c in plus.values()) if s is not None]
    lines.append(f"| CheckFree+ | {_mean(found)}, {len(found)} of {len(draws)} seeds |")
    for every in (10, 50, 100):
        by_seed = {draw.seed: restarted_curve(this, draw, twin, every) for draw in draws}
        steps = {seed: reaches(curve, level) for seed, curve in by_seed.items()}
        reached = [s for s in steps.values() if s is not None]
        name = f"checkpoints every {every}"
        lines.append(f"| {name} | {_mean(reached)}, {len(reached)} of {len(draws)} seeds |")
        curves[name] = {s: v for s, v in by_seed[draws[0].seed].items() if s <= last}
        pairs = [(reaches(c.held_out, level), steps[seed]) for seed, c in plus.items()]
        this.claims.append(
            Claim(
                says=f"CheckFree+ takes fewer steps than checkpoints every {every}",
                section="5.2, figure 4b",
                differences=[a / b - 1 for a, b in pairs if a is not None and b is not None],
                unit="of its steps",
            )
        )
    if (seed := draws[0].seed) in plus:
        curves["CheckFree+"] = plus[seed].held_out
    this.pictures["figure-4b"] = svg.draw(curves)
    return lines


def _mean(values: Sequence[int]) -> str:
    return f"{statistics.fmean(values):.0f}" if values else "-"


def figure_5b(this: Experiment) -> list[str]:
    """Compare a swapped pipeline with one in order, without losses."""
    shown_curves: dict[str, Mapping[int, float]] = {}
    half, last = this.setting.steps // 2, this.setting.steps
    over: dict[int, list[float]] = {half: [], last: []}
    for seed in range(this.num_seeds):
        ordered, swapped = (
            this.curves.get(dataclasses.replace(setting, seed=seed), UNDISTURBED)
            for setting in (this.setting, this.swapped)
        )
        if ordered is None or swapped is None:
            continue
        for step, found in over.items():
            found.append(swapped.held_out[step] - ordered.held_out[step])
        if seed == 0:
            shown_curves = {"in order": ordered.held_out, "swapped": swapped.held_out}
    if not shown_curves:
        return ["Not run."]
    this.pictures["figure-5b"] = svg.draw(shown_curves)
    this.claims.append(
        Claim(
            says="without losses a swapped pipeline converges more slowly (at the end)",
            section="5.2, figure 5b",
            differences=[-difference for difference in over[last]],
        )
    )
    lines = ["| after step | loss of swapped over in order | models |", "| --- | --- | --- |"]
    return lines + [f"| {s} | {shown(found)} | {len(found)} |" for s, found in over.items()]


def table_3(this: Experiment) -> list[str]:
    """Compare the perplexity of an exact run with one of CheckFree, on three held-out texts."""
    twin = this.curves.get(this.setting)
    runs = this.runs(CHECKFREE, this.draws(this.middle))
    if twin is None or not twin.texts:
        return ["Not run: this setting learns no text."]
    lines = [
        f"| text | redundant computation | CheckFree, rate {this.middle} | log of the ratio |",
        "| --- | --- | --- | --- |",
    ]
    for name, loss in twin.texts.items():
        over = [curve.texts[name] - loss for curve in runs.values()]
        mean = f"{math.exp(loss + statistics.fmean(over)):.3f}" if over else "-"
        lines.append(f"| {name} | {math.exp(loss):.3f} | {mean} | {shown(over)} |")
        this.claims.append(
            Claim(
                says=f"CheckFree's perplexity is at most a tenth over the exact one: {name}",
                section="5.3, table 3",
                differences=[difference - math.log(SIMILAR) for difference in over],
            )
        )
    return lines
