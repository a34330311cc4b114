"""Measures how long the static planner of checks takes, and what its plans leave exposed.

    python benchmarks/dmr_plan.py [--quick]

A stage of equal blocks with times that differ a little, every second block recomputed, and windows
of both kinds between its passes. The aim is 10,000 operators and 200 windows in less than 2 s.
Times are of the processor: a planner waits for nothing.
``exposed`` is what checks add to a passage, as a share of one execution of all operators.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from mainstay_core.dmr.operators import Operator, Origin, Pass, Tensor
from mainstay_core.dmr.plan import Policy
from mainstay_core.dmr.profiles import AcSegment, Profile, Window, WindowKind
from mainstay_core.dmr.static import plan_checks

AIM_S = 2.0
LAYERS_PER_BLOCK = 84
"""Calls of a block's forward; each has one in the backward and most have a weight gradient."""


def draw_stage(num_operators: int, num_windows: int, seed: int) -> Profile:
    """Return a profile with about as many operators and windows as asked for."""
    rng = random.Random(seed)
    blocks = max(1, num_operators // (3 * LAYERS_PER_BLOCK))
    layers = max(1, num_operators // (3 * blocks))
    operators: list[Operator] = []
    sizes: dict[str, int] = {}

    def add(block: int, in_pass: Pass, layer: int, inputs: list[str], output: str) -> None:
        sizes[output] = rng.choice([4, 16, 64]) << 20
        operators.append(
            Operator(
                block=block,
                in_pass=in_pass,
                ordinal=layer,
                name="call",
                inputs=tuple(inputs),
                outputs=(output,),
                median_s=rng.uniform(1e-5, 2e-3),
                communication_s=5e-4 if layer % 16 == 15 and in_pass is not Pass.WEIGHT else 0.0,
            )
        )

    for block in range(blocks):
        for layer in range(layers):
            at = block * layers + layer
            add(block, Pass.FORWARD, layer, [f"a{at}"], f"a{at + 1}")
    for block in reversed(range(blocks)):
        for layer in reversed(range(layers)):
            at = block * layers + layer
            add(block, Pass.BACKWARD, layer, [f"d{at + 1}", f"a{at}"], f"d{at}")
            add(block, Pass.WEIGHT, layer, [f"d{at + 1}", f"a{at}"], f"w{at}")
    last = blocks * layers
    given = [
        Tensor(name=name, size_bytes=16 << 20, origin=Origin.RECEIVED)
        for name in ("a0", f"d{last}")
    ]
    return Profile(
        fingerprint="benchmark",
        stage=0,
        budget_bytes=8 << 30,
        tensors=(*given, *(Tensor(name=name, size_bytes=size) for name, size in sizes.items())),
        operators=tuple(operators),
        results=(f"a{last}", "d0", *(f"w{at}" for at in range(last))),
        ac_segments=tuple(
            AcSegment(
                name=f"ac-{block}",
                operators=tuple(f"{block}/forward/{layer}" for layer in range(layers)),
                kept=(),
            )
            for block in range(0, blocks, 2)
        ),
        windows=draw_windows(rng, len(operators), num_windows),
    )


def draw_windows(rng: random.Random, num_operators: int, number: int) -> tuple[Window, ...]:
    """Return windows over the passage, one in four a wait for another stage."""
    places = sorted(rng.randint(1, num_operators) for _ in range(number - 1))
    found = []
    for at, after in enumerate([*places, num_operators]):
        inter = at % 4 == 0 or after == num_operators
        length_s = rng.uniform(0.01, 0.1) if inter else rng.uniform(0.0005, 0.004)
        found.append(
            Window(
                name=f"window-{at}",
                after=after,
                kind=WindowKind.INTER if inter else WindowKind.INTRA,
                median_s=length_s,
                least_s=0.8 * length_s,
                static=rng.random() < 0.9,
                headroom_bytes=4 << 30,
            )
        )
    return tuple(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one plan of each row")
    turns = 1 if parser.parse_args().quick else 5
    print(f"{'operators':>9}{'windows':>9}{'policy':>8}{'plan s':>9}{'/aim':>7}{'exposed':>9}")
    for num_operators, num_windows in ((500, 10), (2000, 50), (10_000, 200)):
        for policy in Policy:
            times_s, shares = [], []
            for seed in range(turns):
                profile = draw_stage(num_operators, num_windows, seed)
                start = time.process_time()
                totals = plan_checks(profile, policy).totals
                times_s.append(time.process_time() - start)
                shares.append(totals.exposed_s / totals.operator_s)
            median_s = statistics.median(times_s)
            print(
                f"{num_operators:9}{num_windows:9}{policy.value:>8}{median_s:9.2f}"
                f"{median_s / AIM_S:7.2f}{statistics.median(shares):9.1%}"
            )


if __name__ == "__main__":
    main()
