"""The paper's experiments about lost stages, each from curves that are kept (CheckFree, section 5).

A part returns lines of Markdown, and adds its pictures and what it says of the paper's claims.
Where a curve is missing and may not be computed, a part tells what it can without it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support import svg
from support.curves import LATER_STEPS, UNDISTURBED, Curve, Curves
from support.intervals import Claim, shown
from support.losses import Draw, reaches, restarted
from support.staged_model import Strategy
from support.staged_setting import Setting
from support.strategies import (
    BY_NORMS,
    CHECKFREE,
    CHECKFREE_PLUS,
    COPIED_END,
    COPY,
    OF_ENDS,
    OF_STATES,
    RANDOM,
    STRATEGIES,
    UNIFORM,
)

from mainstay_core.base.shape import Order

TELLING_NATS = 0.05
"""Loss without an inner stage over that of the whole, from which on its loss matters."""
LEVEL_AT = 2 / 3
"""The share of the steps at which the undisturbed run has the loss that all are to reach."""
FEW_TIMES_LONGER = 6
"""A job with restarts is followed for so many times the steps."""
SLIGHT_NATS = 0.05
SIMILAR = 1.1
"""The paper's perplexities differ by a tenth at most, and are called similar."""
SAVED = 0.12
"""The share of the time that the paper saves at the lowest rate."""


@dataclass(slots=True, kw_only=True)
class Experiment:
    """A setting, what is drawn in it, and what has come of it so far."""

    curves: Curves
    setting: Setting
    rates: Sequence[float]
    """Losses per stage and step, ascending: the paper's 5, 10 and 16 %."""
    num_seeds: int
    """Of losses, and of models where nothing is lost."""
    rounds: int
    """In which steps are timed."""
    claims: list[Claim] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)

    @property
    def swapped(self) -> Setting:
        """The same with a swapped pipeline."""
        return dataclasses.replace(self.setting, order=Order.SWAPPED)

    @property
    def middle(self) -> float:
        """The middle one of the rates."""
        return self.rates[len(self.rates) // 2]

    def draws(self, rate: float, *, with_ends: bool = True, first: int = 1) -> list[Draw]:
        """Return one draw of losses for each seed that has any."""
        drawn = [
            Draw(rate=rate, seed=seed, first=first, with_ends=with_ends)
            for seed in range(self.num_seeds)
        ]
        return [draw for draw in drawn if draw.losses(self.setting.stages, self.setting.steps)]

    def runs(self, strategy: Strategy, draws: Sequence[Draw]) -> dict[int, Curve]:
        """Return the curves of a strategy, by the seed of their losses."""
        setting = self.swapped if strategy is CHECKFREE_PLUS else self.setting
        found = ((draw.seed, self.curves.get(setting, strategy, draw)) for draw in draws)
        return {seed: curve for seed, curve in found if curve is not None}


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
        differences = _paired(one, other)
        this.claims.append(Claim(says=says, section=section, differences=differences))
    name = f"end {COPIED_END.name}"
    ordered, swapped = (claimed.get((order, name), {}) for order in (in_order, Order.SWAPPED))
    this.claims.append(
        Claim(
            says="an end that is copied from the stage beside it jumps less in a swapped pipeline",
            section="4.3",
            differences=_paired(swapped, ordered),
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
                differences=_paired(later[good.name], later[bad.name]),
            )
        )
    left_out = [s.name for s in STRATEGIES if s not in strategies]
    return lines + [f"\nNot run: {name}, as no loss is late enough." for name in left_out]


def _cells(runs: Iterable[Curve], twin: Curve) -> str:
    """Return the cells of a strategy: losses on held-out samples over what they would be.

    The jump is over the loss just before, the others are over an undisturbed twin at that step.
    """
    jumps, at_once, later, ends, weights = [], [], [], [], []
    for curve in runs:
        last = max(curve.held_out)
        ends.append(curve.held_out[last] - twin.held_out[last])
        for lost in curve.after:
            jumps.append(lost["after"] - lost["before"])
            at_once.append(lost["after"] - twin.held_out[lost["step"]])
            then = lost["step"] + LATER_STEPS
            if then in curve.held_out:
                later.append(curve.held_out[then] - twin.held_out[then])
            weights += [w for stage, w in lost["weights"].items() if int(stage) < lost["stage"]]
    median = f"{statistics.median(weights):.3f}" if weights else "-"
    return " | ".join((*map(shown, (jumps, at_once, later, ends)), str(len(jumps)), median))


def _later(runs: Mapping[int, Curve], twin: Curve) -> dict[tuple[int, int], float]:
    """Return what a loss costs some steps on, by the seed and the step of the loss."""
    found = {}
    for seed, curve in runs.items():
        for lost in curve.after:
            then = lost["step"] + LATER_STEPS
            if then in curve.held_out:
                found[seed, lost["step"]] = curve.held_out[then] - twin.held_out[then]
    return found


def _paired(
    one: Mapping[tuple[int, int], float], other: Mapping[tuple[int, int], float]
) -> list[float]:
    return [one[key] - other[key] for key in sorted(one) if key in other]


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
    """Return the jump at a loss, by the place of the stage; losses at all rates."""
    lines = ["| method | stage lost | jump | losses |", "| --- | --- | --- | --- |"]
    jumps: dict[str, dict[tuple[float, int, int, int], float]] = {}
    last = this.setting.stages - 1
    inner = range(1, last)
    places = (("the first", (0,)), ("an inner one", inner), ("the last", (last,)))
    for method in (CHECKFREE, CHECKFREE_PLUS):
        found = jumps.setdefault(method.name, {})
        for rate in this.rates:
            for seed, curve in this.runs(method, this.draws(rate)).items():
                for lost in curve.after:
                    key = (rate, seed, lost["step"], lost["stage"])
                    found[key] = lost["after"] - lost["before"]
        for name, stages in places:
            there = [jump for key, jump in found.items() if key[3] in stages]
            lines.append(f"| {method.name} | {name} | {shown(there)} | {len(there)} |")
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


PARTS: dict[str, tuple[str, Callable[[Experiment], list[str]]]] = {
    "check": ("Can this setting tell?", check),
    "jumps": ("Right after a loss: strategies on the same states", jumps),
    "figure2": ("Figure 2: strategies for an inner stage", figure_2),
    "table2": ("Table 2: four methods", table_2),
    "figure3": ("Figure 3: four methods by steps, and what ends cost", figure_3),
    "figure4a": ("Figure 4a: CheckFree+ at three rates", figure_4a),
    "figure4b": ("Figure 4b: how often checkpoints are made", figure_4b),
    "figure5b": ("Figure 5b: swapped without losses", figure_5b),
    "table3": ("Table 3: perplexity on three texts", table_3),
}
"""The parts by name: title, and what makes it. They run in this order."""
