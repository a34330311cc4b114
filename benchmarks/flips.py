"""Draws wrong bits over all settings of a job, and counts which of them checks find.

    python benchmarks/flips.py [--flips 2000] [--piggyback 500] [--clean 5000] [--seed 1] [--quick]

A flip is put into one step of a chain: Llama and mixture of experts, fp32 and bf16, one stage and
two, one rank to a stage and two, in order and swapped, recompute of none, half and all of the
blocks, and a training loop of one's own. The step is computed with checks, and without any: a flip
that changes a digest there, or that ends the step, is *effective*. Flips of a second execution are
put into the first one for that. Stages are threads of one process; where a stage has several ranks,
each is a process.

What cells send each other, and their states, can be wrong as well. So a stage of three cells is
drawn in, too: they reduce in memory, their votes are judged as in a job, and cells do what follows.
After a flip of a state steps are taken until a vote finds it, or until nothing is left to find.

The table says of each class of operators how many flips were drawn, effective, found, and with how
many the checked step came to the digests of an undisturbed one. Of state that gradients are
computed with nothing is promised (docs/silent-corruption.md): its row is counted apart. Then steps
without a flip follow, each from the state that the one before has left, from a step on that the
seed says: nothing may be found in them. Exit code 1 if an effective flip was not found, digests
differ, or something was found in a clean step.

``mainstay chaos FILE --flips N`` draws flips for a job of yours.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import torch  # noqa: E402
from benchmarks.support.flips.cells import CellsChain  # noqa: E402
from benchmarks.support.flips.chains import (  # noqa: E402
    Chain,
    ProcessChain,
    StepFailedError,
    ThreadChain,
    run_step,
)
from benchmarks.support.flips.loops import LoopChain  # noqa: E402
from benchmarks.support.flips.rank import (  # noqa: E402
    LITTLE,
    MUCH,
    PROFILED,
    Outcome,
    Setting,
    Spot,
    Variant,
    prepare_torch,
    variants_of,
)
from tests.train.crew import Nursery  # noqa: E402

from mainstay_core.base.shape import Order  # noqa: E402
from mainstay_core.dmr.flips import Execution, Flip, Where  # noqa: E402
from mainstay_core.dmr.operators import Pass  # noqa: E402
from mainstay_core.job.config import BUCKET_BYTES  # noqa: E402
from mainstay_train.dmr.cell_trials import COMPUTED_WITH, Tried  # noqa: E402
from mainstay_train.dmr.played_cells import NUM_CELLS  # noqa: E402

SPARE_BYTES = 6 << 30
"""Memory beyond that of the start. A wrong size of a tensor asks for any amount of it."""
DTYPES = {"own loop fp32": torch.float32, "own loop bf16": torch.bfloat16}
CELLS = tuple(
    Setting(model=model, recompute=share, stages=stages, inner=2)
    for model, share, stages in (
        ("Llama fp32", 0.0, 1),
        ("Llama fp32", 1.0, 2),
        ("Llama bf16", 0.5, 2),
        ("Llama bf16", 1.0, 1),
    )
)
CHAINS = tuple(
    Setting(
        model=model,
        recompute=share,
        stages=stages,
        # A type of several micro-batches adds up in place, and few bytes let few checks wait.
        micro_batches=2 if share == 0.5 else 1,
        waiting_bytes=LITTLE if stages == 1 else MUCH,
    )
    for model, share, stages in (
        *product(
            ("Llama fp32", "Llama bf16", "experts fp32", "experts bf16"), (0.0, 0.5, 1.0), (1, 2)
        ),
        ("Llama dropout", 0.0, 2),
        ("Llama dropout", 1.0, 1),
    )
)
SWAPPED = tuple(
    Setting(
        model=model,
        recompute=share,
        stages=stages,
        inner=inner,
        micro_batches=2,
        waiting_bytes=MUCH if share else LITTLE,
        order=Order.SWAPPED,
    )
    for model, share, stages, inner in (
        ("Llama fp32", 0.0, 2, 1),
        ("Llama fp32", 1.0, 3, 1),
        ("Llama bf16", 0.5, 2, 1),
        ("experts fp32", 1.0, 2, 1),
        ("Llama fp32", 1.0, 2, 2),
    )
)
REPLICAS = tuple(
    Setting(
        model=model,
        recompute=share,
        cells=NUM_CELLS,
        micro_batches=2 if share == 0.5 else 1,
        waiting_bytes=LITTLE if share == 1.0 else MUCH,
        bucket_bytes=bucket_bytes,
    )
    for model, share, bucket_bytes in (
        ("Llama fp32", 0.0, BUCKET_BYTES),
        ("Llama bf16", 0.5, 1),
        ("experts fp32", 1.0, 1),
        ("experts bf16", 0.0, BUCKET_BYTES),
    )
)
"""With buckets of one byte each block is reduced by itself."""
LOOPS = (Setting(model="own loop fp32"), Setting(model="own loop bf16"))
SETTINGS = (*CELLS, *CHAINS, *SWAPPED, *LOOPS, *REPLICAS)
ALL = f"all but {COMPUTED_WITH}"
MOST_STEPS = 1 << 19
"""Clean steps begin with one below it."""


Take = Callable[[Variant, str], None]
"""Takes steps of a chain in a variant, which is called so."""


@dataclass(slots=True)
class Tally:
    """Counts of a variant's flips, by class, and of its clean steps."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_clean: int = 0
    num_alarms: int = 0
    broken: list[str] = field(default_factory=list)


def variants(setting: Setting) -> list[Variant]:
    """Return how a setting can be checked."""
    return [Variant.NAIVE] if setting.model in DTYPES else [*variants_of(setting)]


def build(setting: Setting, nursery: Nursery) -> Chain:
    """Return what computes a setting."""
    if setting.model in DTYPES:
        return LoopChain(DTYPES[setting.model])
    if setting.cells > 1:
        return CellsChain(setting)
    return ProcessChain(setting, nursery) if setting.inner > 1 else ThreadChain(setting)


def try_flips(
    chain: Chain, variant: Variant, num_flips: int, rng: random.Random, tally: Tally, where: str
) -> None:
    """Put flips into the step 0 of a chain, one after the other."""
    chain.reset(Variant.OFF)
    clean, _ = run_step(chain, Variant.OFF)
    warm(chain, variant)
    by_kind = spots_of(chain, variant)
    kinds = sorted(by_kind)
    start = rng.randrange(len(kinds))
    for number in range(num_flips):
        kind = kinds[(start + number) % len(kinds)]
        spot = rng.choice(by_kind[kind])
        flip = spot.flip(rng, first_only=variant.first_only)
        if isinstance(chain, CellsChain) and spot.where is Where.STATE:
            tried, why = chain.try_state(variant, spot, flip), ""
        else:
            tried, why = try_flip(chain, variant, clean, spot, flip)
        found = tried.effective and tried.found
        tally.counts.update({(kind, "drawn"): 1, (kind, "effective"): int(tried.effective)})
        tally.counts.update({(kind, "found"): int(found), (kind, "equal"): int(tried.equal)})
        if tried.is_promised and (not tried.equal or found != tried.effective):
            why = why or ("not found" if tried.equal else "digests differ")
            tally.broken.append(f"{where}: {spot.kernel} (#{spot.ordinal}), {kind}: {flip}: {why}")
            print(f"BROKEN: {tally.broken[-1]}", flush=True)


def try_flip(
    chain: Chain, variant: Variant, clean: Outcome, spot: Spot, flip: Flip
) -> tuple[Tried, str]:
    """Compute the step with a flip, with checks and without; return why it failed, too."""
    effective, found, equal, why = has_effect(chain, clean, spot, flip), False, False, ""
    try:
        ended, _ = step_with(chain, variant, spot, flip)
        equal, found = ended[0] == clean[0], bool(ended[1])
    except StepFailedError as error:
        why = str(error)
    return Tried(kind=spot.kind, flip=flip, effective=effective, found=found, equal=equal), why


def warm(chain: Chain, variant: Variant) -> None:
    """Take the steps from which a plan is made, and the first that follows it."""
    if variant is Variant.AUTO:
        for _ in range(PROFILED + 2):
            chain.reset(variant)
            run_step(chain, variant)


def spots_of(chain: Chain, variant: Variant) -> dict[str, list[Spot]]:
    """Return where flips can be put in, by class; with Piggyback only what that covers."""
    found: dict[str, list[Spot]] = {}
    covered = variant is Variant.PIGGYBACK
    unchecked = chain.list_spots(Variant.OFF)
    known = set(unchecked)
    # A forward whose recompute is compared with it calls more kernels, which have no like without.
    listed = chain.list_spots(variant) if variant.first_only else unchecked
    for spot in listed:
        if spot in known and (not covered or spot.place.in_pass is Pass.FORWARD):
            found.setdefault(spot.kind, []).append(spot)
    return found


def step_with(chain: Chain, variant: Variant, spot: Spot, flip: Flip) -> tuple[Outcome, int]:
    """Compute the step 0 with a flip."""
    chain.reset(variant)
    chain.order(variant, flip, spot)
    return run_step(chain, variant)


def has_effect(chain: Chain, clean: Outcome, spot: Spot, flip: Flip) -> bool:
    """Return whether a flip changes a digest where nothing is checked, or ends the step."""
    flip = replace(flip, execution=Execution.PRIMARY)  # nobody uses a second execution
    try:
        ended, _ = step_with(chain, Variant.OFF, spot, flip)
    except StepFailedError:
        return True
    return ended[0] != clean[0]


class Undisturbed:
    """The steps of a chain without checks, each computed once.

    Args:
        chain: nobody else has it compute without checks meanwhile.
        first: number of the first step.
    """

    def __init__(self, chain: Chain, first: int) -> None:
        self._chain, self.first = chain, first
        self._known: list[tuple[str, ...]] = []
        chain.reset(Variant.OFF)

    def digests(self, number: int) -> tuple[str, ...]:
        """Return the digests after so many steps and one."""
        while len(self._known) <= number:
            ended, _ = run_step(self._chain, Variant.OFF, self.first + len(self._known))
            self._known.append(ended[0])
        return self._known[number]


def take_clean_steps(
    chain: Chain,
    variant: Variant,
    num_steps: int,
    tally: Tally,
    where: str,
    expected: Undisturbed | None = None,
) -> None:
    """Take steps without a flip, beside the same ones without checks.

    Of a cell of several ranks one begins anew meanwhile, as a trainer that has just come.
    """
    expected = expected or Undisturbed(chain, 0)
    warm(chain, variant)
    chain.reset(variant)
    for number in range(num_steps):
        if isinstance(chain, ProcessChain) and number == num_steps // 2:
            chain.renew(variant, 1)
        step = expected.first + number
        ended, num_refused = run_step(chain, variant, step)
        tally.num_clean += 1
        if ended[1] or num_refused or ended[0] != expected.digests(number):
            tally.num_alarms += 1
            tally.broken.append(f"{where}: clean step {step}: {ended[1][:2]}")
            print(f"BROKEN: {tally.broken[-1]}", flush=True)
            return


def show(tallies: dict[Variant, Tally], seconds: float) -> None:
    """Print the table."""
    columns = ("drawn", "effective", "found", "equal")
    kinds = sorted({kind for tally in tallies.values() for kind, _ in tally.counts})
    heads = [f"{v.value}: {' / '.join(columns)}" for v in tallies]
    print(f"\n| class | {' | '.join(heads)} |")
    print("|" + " --- |" * (1 + len(heads)))
    promised = [kind for kind in kinds if kind != COMPUTED_WITH]
    for kind in (*kinds, ALL):
        cells = []
        for tally in tallies.values():
            chosen = promised if kind == ALL else [kind]
            numbers = [sum(tally.counts[k, column] for k in chosen) for column in columns]
            cells.append(" / ".join(map(str, numbers)) if any(numbers) else "-")
        print(f"| {kind} | {' | '.join(cells)} |")
    for variant, tally in tallies.items():
        print(f"{variant.value}: {tally.num_clean} clean steps, {tally.num_alarms} false alarms")
    print(f"{seconds:.0f} s")


def share(total: int, number: int, parts: int) -> int:
    """Return one of the parts of a total that differ by 1 at most."""
    return total * (number + 1) // parts - total * number // parts


def run(args: argparse.Namespace) -> bool:
    """Go through the settings; return whether nothing broke."""
    chosen = [setting for setting in SETTINGS if re.search(args.only, str(setting))]
    cases = [(s, v) for s in chosen for v in variants(s)]
    alike = {
        variant: [case for case in cases if (case[1] is Variant.PIGGYBACK) == is_piggyback]
        for variant in Variant
        for is_piggyback in [variant is Variant.PIGGYBACK]
    }
    tallies = {variant: Tally() for variant in Variant if variant is not Variant.OFF}
    began_s = time.monotonic()

    def go_through(what: str, take: Callable[[Chain, Setting], Take]) -> None:
        for setting in chosen:
            with closing(build(setting, nursery)) as chain:
                take_by = take(chain, setting)
                for variant in variants(setting):
                    where = f"{setting}, {variant.value}"
                    take_by(variant, where)
                    at_s = time.monotonic() - began_s
                    print(f"{at_s:.0f} s: {what}: {where}", file=sys.stderr, flush=True)

    def flips(chain: Chain, setting: Setting) -> Take:
        def take(variant: Variant, where: str) -> None:
            total = args.piggyback if variant is Variant.PIGGYBACK else args.flips
            others, rng = alike[variant], random.Random(f"{args.seed} {where}")
            num_flips = share(total, others.index((setting, variant)), len(others))
            try_flips(chain, variant, num_flips, rng, tallies[variant], where)

        return take

    def clean(chain: Chain, setting: Setting) -> Take:
        first = random.Random(f"{args.seed} {setting}").randrange(MOST_STEPS)
        expected = Undisturbed(chain, first)

        def take(variant: Variant, where: str) -> None:
            num_steps = share(args.clean, cases.index((setting, variant)), len(cases))
            take_clean_steps(chain, variant, num_steps, tallies[variant], where, expected)

        return take

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either one ends it with a table
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Nursery() as nursery, contextlib.suppress(KeyboardInterrupt):
        bound_memory()
        if args.flips or args.piggyback:
            go_through("flips", flips)
            show(tallies, time.monotonic() - began_s)
        go_through("clean steps", clean)
    show(tallies, time.monotonic() - began_s)
    return not any(tally.broken for tally in tallies.values())


def bound_memory() -> None:
    """Let this process take not much more memory: what asks for it gets an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=2000, help="with Full, over all settings")
    parser.add_argument("--piggyback", type=int, default=500, help="flips with Piggyback")
    parser.add_argument("--clean", type=int, default=5000, help="steps without a flip")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="settings, by a regular expression")
    parser.add_argument("--quick", action="store_true", help="a few of each")
    args = parser.parse_args()
    if args.quick:
        args.flips, args.piggyback, args.clean = 120, 40, 120
    prepare_torch()
    if not run(args):
        sys.exit(1)


if __name__ == "__main__":
    main()
