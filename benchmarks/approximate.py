"""Measures what it costs to make a lost stage anew of others: CheckFree's and CheckFree+'s figures.

    python benchmarks/approximate.py [FOLDER] [--quick] [--parts check,figure2] [--seeds 3]

One process holds all stages (support/approximate). First comes the check that the setting can
tell: the loss on held-out samples with an inner stage's layers left out. Where that hardly matters,
nothing follows from the comparisons, and the report says so. All methods meet the same losses,
drawn from a seed. Differences are to an undisturbed twin at the same step, with 95 % intervals.

A curve is kept in FOLDER by its parameters, so a run that was stopped goes on where it was.
``--kept`` computes nothing and names what is missing. FOLDER gets ``report.md`` and a picture for
each figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from support.approximate.curves import Curves
from support.approximate.experiment import Experiment
from support.approximate.parts import PARTS
from support.approximate.staged_setting import BOTH, TASKS, Setting

RATES = (0.0009, 0.002, 0.004)
"""Of losses, per stage and step: the paper's 5, 10 and 16 % an hour, as in its authors' code."""
QUICK_RATES = (0.005, 0.01, 0.03)
QUICK = Setting(
    data="stdlib",
    layers=6,
    dim=32,
    heads=2,
    sequence=32,
    micro_batch_size=4,
    types=2,
    steps=60,
    validation_batches=2,
)
TOLD = Setting(
    data="stdlib",
    task=BOTH,
    layers=6,
    dim=32,
    sequence=32,
    micro_batch_size=16,
    types=2,
    lr=0.005,
    places=3,
    reset_share=0.15,
)
"""The setting of docs/benchmarks.md."""


def run(this: Experiment, folder: Path, parts: Sequence[str], command: str) -> str:
    """Compute or take up all curves of some parts, write the report, and return it."""
    setting = this.setting
    lines = ["# Stages made anew: what it costs", "", f"Setting: `{setting}`", ""]
    lines += [f"Rates of losses per stage and step: {this.rates}; seeds: {this.num_seeds}.", ""]
    for name in parts:
        title, make = PARTS[name]
        found = make(this)
        lines += [f"## {title}", "", *found, ""]
        print("\n".join([f"== {title}", *found]), flush=True)
    if this.claims:
        lines += ["## Claims", "", "A difference below 0 agrees with the claim.", ""]
        lines += ["| section | claim | difference | verdict |", "| --- | --- | --- | --- |"]
        lines += [claim.row() for claim in this.claims]
        lines.append("")
    if missing := [*dict.fromkeys(this.curves.missing)]:
        took_s = this.curves.median_cpu_s()
        lines += ["## Not run", "", f"`{command}` computes it, {took_s:.0f} s of CPU each:", ""]
        lines += [f"- {words}" for words in missing]
        lines.append("")
    text = "\n".join(lines)
    (folder / "report.md").write_text(text)
    for name, picture in this.pictures.items():
        (folder / f"{name}.svg").write_text(picture)
    return text


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(__file__).parent / "results" / "approximate"
    parser.add_argument(
        "folder", type=Path, nargs="?", default=default, help="where curves and report are kept"
    )
    parser.add_argument("--quick", action="store_true", help="a small setting: minutes")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of the parts, with commas")
    parser.add_argument("--kept", action="store_true", help="compute nothing; name what is missing")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of losses")
    parser.add_argument("--rates", help="three, ascending, with commas: losses per stage and step")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--task", choices=TASKS, help="what is learnt")
    parser.add_argument("--data", help='a folder of text, or "stdlib"')
    parser.add_argument("--lr", type=float, help="learning rate")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the setting")
    given = parser.parse_args()
    unknown = sorted(set(given.parts.split(",")) - set(PARTS))
    if unknown:
        parser.error(f"--parts: {unknown} are none of {', '.join(PARTS)}")
    return given


SIZES = ("layers", "dim", "heads", "steps", "sequence", "types", "micro_batch_size", "stages")


def main() -> None:
    given = _parsed()
    torch.set_num_threads(given.threads)
    names = (*SIZES, "task", "data", "lr")
    chosen = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    setting = dataclasses.replace(QUICK if given.quick else TOLD, **chosen)
    if setting.layers % setting.stages:
        raise SystemExit(f"--layers: must be a multiple of {setting.stages}: stages are alike")
    rates: tuple[float, ...] = QUICK_RATES if given.quick else RATES
    if given.rates:
        rates = tuple(sorted(float(rate) for rate in given.rates.split(",")))
    given.folder.mkdir(parents=True, exist_ok=True)
    curves = Curves(given.folder, may_compute=not given.kept)
    this = Experiment(curves=curves, setting=setting, rates=rates, num_seeds=given.seeds, rounds=10)
    asked = given.parts.split(",")
    again = [argument for argument in sys.argv[1:] if argument != "--kept"]
    command = shlex.join(["python", "benchmarks/approximate.py", *again])
    run(this, given.folder, [name for name in PARTS if name in asked], command)


if __name__ == "__main__":
    main()
