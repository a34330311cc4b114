"""Measures what it costs to make a lost stage anew of its neighbours: CheckFree's figure 2.

    python benchmarks/approximate.py FOLDER [--quick] [--data TEXT] [--seeds 3] [--rate 0.004]

One process holds all stages (support/staged_model.py). First comes the check that the setting can
tell: the loss on held-out text with an inner stage's layers left out. Where that hardly matters,
nothing follows from the comparison, and the report says so. Then each strategy meets the same
losses, drawn from a seed: inner stages alone, as an end has no two neighbours in order.

A curve is kept in FOLDER by its parameters, so a run that was stopped goes on where it was. FOLDER
gets ``report.md`` and ``losses.svg``. Differences are to an undisturbed twin at the same step, with
95 % intervals over all losses of all seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.staged_model import Setting, StagedModel, Strategy

from mainstay_core.reinitialisation.weights import Weighting

QUICK = Setting(
    data="stdlib",
    layers=6,
    dim=32,
    heads=2,
    sequence=32,
    micro_batch_size=4,
    types=1,
    steps=60,
    validation_batches=2,
)
UNDISTURBED = Strategy(name="undisturbed", boost=1.0)
STRATEGIES = (
    Strategy(name="random", how="random"),
    Strategy(name="copy of the stage before", weighting=Weighting.COPY),
    Strategy(name="uniform average", weighting=Weighting.UNIFORM),
    Strategy(name="average by gradient norms"),
    Strategy(name="average by the authors' code", how="authors"),
    Strategy(name="stale copy of 50 steps", how="stale", age=50, boost=1.0),
    Strategy(name="stale copy of 100 steps", how="stale", age=100, boost=1.0),
    Strategy(name="by gradient norms, moments averaged", averages_moments=True),
    Strategy(name="by gradient norms, boost 1.0", boost=1.0),
    Strategy(name="by gradient norms, boost 1.2", boost=1.2),
)
"""Those of figure 2, the weights of its authors' code, and what the product could do instead."""
TELLING_NATS = 0.05
"""Loss without an inner stage over that of the whole, from which on its loss matters."""
LATER_STEPS = 100
COLOURS = ("#444444", "#c0392b", "#2980b9", "#27ae60", "#8e44ad", "#f39c12", "#16a085")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A stage that loses every copy after so many steps."""

    step: int
    stage: int


def draw_losses(setting: Setting, rate: float, seed: int, first: int) -> tuple[Loss, ...]:
    """Return the losses of inner stages, each with a rate per step, never two at a time."""
    rng = random.Random(f"losses/{seed}")
    found = []
    for step in range(first, setting.steps):
        lost = [s for s in range(1, setting.stages - 1) if rng.random() < rate]
        if lost:
            found.append(Loss(step=step, stage=rng.choice(lost)))
    return tuple(found)


class Curves:
    """Curves that are kept in a folder by their parameters.

    Args:
        folder: of the user.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "curves").mkdir(parents=True, exist_ok=True)

    def get(
        self, setting: Setting, strategy: Strategy, losses: Sequence[Loss], seen: Sequence[int]
    ) -> dict[str, Any]:
        """Return a curve: the one that is kept, or one that is computed and kept now.

        Args:
            setting: what is trained.
            strategy: how lost stages are made anew.
            losses: that happen.
            seen: steps after which the loss on held-out text is measured.
        """
        about = {
            "setting": dataclasses.asdict(setting),
            "strategy": dataclasses.asdict(strategy) if losses else None,
            "losses": [dataclasses.asdict(loss) for loss in losses],
            "seen": list(seen),
        }
        text = json.dumps(about, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = self._folder / "curves" / f"{key}.json"
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text())["curve"]
            return kept
        # As it will be read: JSON has texts for keys.
        curve = json.loads(json.dumps(self._compute(setting, strategy, losses, set(seen))))
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({**about, "curve": curve}))
        unfinished.rename(path)
        return curve

    def _compute(
        self, setting: Setting, strategy: Strategy, losses: Sequence[Loss], seen: set[int]
    ) -> dict[str, Any]:
        model = StagedModel.of(setting, self._folder)
        at = {loss.step: loss.stage for loss in losses}
        to_copy = {loss.step - strategy.age: loss for loss in losses if strategy.how == "stale"}
        stale: dict[int, Any] = {}
        held_out: dict[int, float] = {}
        after: list[dict[str, Any]] = []
        without: dict[str, Any] = {}
        digests = []
        for step in range(setting.steps):
            if step in to_copy:
                stale[to_copy[step].step] = model.copy_of(to_copy[step].stage)
            if step in at:
                before = model.validate()
                weights = model.lose(at[step], step, strategy, stale.pop(step, {}))
                told = {"step": step, "stage": at[step], "weights": weights, "before": before}
                after.append({**told, "after": model.validate()})
            model.step(step)
            digests.append(model.masters_digest())
            if step + 1 in seen:
                held_out[step + 1] = model.validate()
            if not losses and step + 1 in (setting.steps // 2, setting.steps):
                without[str(step + 1)] = {
                    stage: model.validate(model.layers_of(stage)) for stage in range(setting.stages)
                }
        return {
            "held_out": held_out,
            "after": after,
            "without": without,
            "digest": hashlib.sha256("".join(digests).encode()).hexdigest(),
        }


def mean_and_interval(values: Sequence[float]) -> str:
    """Return the mean and its 95 % interval, as text."""
    if not values:
        return "none"
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.4f} (one loss)"
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.4f} ± {half:.4f}"


def describe_check(curve: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return what it costs to leave a stage out, and whether the setting can tell."""
    lines = ["| after step | stage left out | loss over whole |", "| --- | --- | --- |"]
    telling: list[set[int]] = []
    for step, losses in sorted(curve["without"].items(), key=lambda item: int(item[0])):
        whole = curve["held_out"][step]
        over = {int(stage): loss - whole for stage, loss in losses.items()}
        lines += [f"| {step} | {stage} | {gap:+.4f} |" for stage, gap in sorted(over.items())]
        last = max(over)
        telling.append({s for s, gap in over.items() if 0 < s < last and gap >= TELLING_NATS})
    can_tell = bool(telling) and len(set.intersection(*telling)) >= 2
    verdict = "can tell" if can_tell else "CANNOT tell: nothing follows from what comes below"
    return [
        *lines,
        "",
        f"This setting {verdict} (two inner stages of {TELLING_NATS} nats).",
    ], can_tell


def compare(curves: Iterable[Mapping[str, Any]], twin: Mapping[str, Any]) -> str:
    """Return the cells of a strategy: losses on held-out text over what they would be.

    The jump is over the loss just before, the others are over an undisturbed twin at that step.
    """
    jumps, at_once, later, weights = [], [], [], []
    for curve in curves:
        for lost in curve["after"]:
            jumps.append(lost["after"] - lost["before"])
            at_once.append(lost["after"] - twin["held_out"][str(lost["step"])])
            then = str(lost["step"] + LATER_STEPS)
            if then in curve["held_out"]:
                later.append(curve["held_out"][then] - twin["held_out"][then])
            weights += [w for stage, w in lost["weights"].items() if int(stage) < lost["stage"]]
    median = f"{statistics.median(weights):.3f}" if weights else "-"
    cells = (*map(mean_and_interval, (jumps, at_once, later)), str(len(jumps)), median)
    return " | ".join(cells)


def draw_svg(curves: Mapping[str, Mapping[str, float]]) -> str:
    """Return a picture of curves: loss on held-out text by step."""
    points = [(int(s), v) for curve in curves.values() for s, v in curve.items()]
    low, high = min(v for _, v in points), max(v for _, v in points)
    last, width, height = max(s for s, _ in points), 720, 360
    span = (high - low) or 1.0
    drawn = []
    for number, (name, curve) in enumerate(curves.items()):
        places = " ".join(
            f"{40 + int(s) / last * (width - 60):.1f},{20 + (high - v) / span * (height - 60):.1f}"
            for s, v in sorted(curve.items(), key=lambda item: int(item[0]))
        )
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<polyline points="{places}" fill="none" stroke="{colour}"/>')
        drawn.append(
            f'<text x="{width - 300}" y="{30 + 14 * number}" fill="{colour}">{name}</text>'
        )
    axis = f'<text x="40" y="{height - 8}">step 0 to {last}; loss {low:.3f} to {high:.3f}</text>'
    body = "\n".join([*drawn, axis])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">\n{body}\n</svg>\n'
    )


def run(folder: Path, setting: Setting, rate: float, num_seeds: int) -> str:
    """Compute or take up all curves, write the report, and return it."""
    curves = Curves(folder)
    first = min(max(s.age for s in STRATEGIES), setting.steps // 2)
    strategies = [s for s in STRATEGIES if s.age <= first]
    drawn = [draw_losses(setting, rate, seed, first) for seed in range(num_seeds)]
    steps = {loss.step for losses in drawn for loss in losses}
    seen = {n for n in range(0, setting.steps + 1, max(1, setting.steps // 30)) if n}
    seen |= {setting.steps // 2, setting.steps} | steps
    seen |= {step + LATER_STEPS for step in steps if step + LATER_STEPS <= setting.steps}
    ordered = sorted(seen)

    twin = curves.get(setting, UNDISTURBED, (), ordered)
    check, _ = describe_check(twin)
    lines = ["# Stages made anew: figure 2", "", f"Setting: `{setting}`", ""]
    lines += [f"Rate of losses: {rate} per inner stage and step; seeds of losses: {num_seeds}.", ""]
    lines += ["## Can this setting tell?", "", *check, "", "## Strategies", ""]
    print("\n".join(check), flush=True)
    lines += [
        f"| strategy | jump | right after | {LATER_STEPS} steps on | losses | weight before |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    shown = {"undisturbed": twin["held_out"]}
    for strategy in strategies:
        found = [curves.get(setting, strategy, losses, ordered) for losses in drawn if losses]
        lines.append(f"| {strategy.name} | {compare(found, twin)} |")
        if found:
            shown[strategy.name] = found[0]["held_out"]
        print(lines[-1], flush=True)
    left_out = [s.name for s in STRATEGIES if s not in strategies]
    lines += ["", "![loss on held-out text](losses.svg)", "", "## Not run", ""]
    lines += [f"- {name}: no loss is late enough for such a copy" for name in left_out]
    lines += ["- out-of-order pipelines, table 2, figures 3 to 5, table 3: not in this program"]
    text = "\n".join(lines) + "\n"
    (folder / "report.md").write_text(text)
    (folder / "losses.svg").write_text(draw_svg(shown))
    return text


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where curves and the report are kept")
    parser.add_argument("--quick", action="store_true", help="a small setting: minutes")
    parser.add_argument("--data", default="stdlib", help='a folder of text, or "stdlib"')
    parser.add_argument("--seeds", type=int, default=3, help="seeds of losses")
    parser.add_argument("--rate", type=float, default=0.004, help="losses per stage and step")
    for name in ("layers", "dim", "steps", "sequence", "types"):
        parser.add_argument(f"--{name}", type=int, help="of the setting")
    given = parser.parse_args()
    setting = QUICK if given.quick else Setting(data=given.data)
    chosen = {
        name: getattr(given, name)
        for name in ("layers", "dim", "steps", "sequence", "types")
        if getattr(given, name) is not None
    }
    setting = dataclasses.replace(setting, data=given.data, **chosen)
    if setting.layers < setting.stages - 2:
        parser.error(f"--layers must be at least {setting.stages - 2}: one to each inner stage")
    given.folder.mkdir(parents=True, exist_ok=True)
    rate = max(given.rate, 0.02) if given.quick else given.rate
    run(given.folder, setting, rate, given.seeds)


if __name__ == "__main__":
    main()
