"""Measures how a lost stage comes back: from snapshots in memory, and from a checkpoint on disk.

    python benchmarks/replay.py [--quick] [--kills 6] [--only steps|boundary|order|kills]
                                [--rounds 12] [--device-s 0 2]

``steps``: one process trains a stage of the demo's model with a window over all units, and makes
its state anew from what two stores hold: the time of each step that is applied again, over the time
of a step in the same run. The masters that come out must have the digest that they had.

``boundary``: one process trains the middle stage of three, a mixture of experts, and computes its
steps again from copies and from the boundary logs of its neighbours. Once all units are active, and
once experts with two thirds of the multiply-adds are frozen, in turns: the time of a step over that
of the stage's own compute in training, in the same run. All digests must come out again.

``order``: the same stage with more experts and a window of four versions. All its units come as the
window's copies, one instalment a version, and the three steps until all are active are computed
again: with experts by ascending popularity, as jobs order them, and by descending popularity. The
experts that most tokens reach are copied last, so they are frozen the longest, and a frozen expert
has no weight gradient to compute (MoEvement, section 3.5). In pairs, the first one in turns, with
routers that are biased to some experts and with routers that are not: there the order can give
nothing. What is told is the time by ascending over that by descending popularity.

``kills``: real local runs of one replica with two stages, whose second stage's trainer is killed
with -9, in turns: with a window of two steps, with the whole state copied in every step, and
without snapshots with a checkpoint in every step. That is the interval that is best for a restart,
whatever it costs the steps. What counts is the time from the kill to the commit of the step that
was at hand; steps that are lost are in it. A table for each ``--device-s``: for how many seconds of
a step the device is busy, played by sleep; 0 is a tiny model on the CPU. Steps of all runs must
have the same digests.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import demo
from support.boundary_stage import MICRO_BATCHES, STAGE, BoundaryStage, now, units_of_two_thirds
from support.intervals import interval_of
from support.local_run import LocalRun, kill_trainer, local_run, make_job
from support.segment_stage import LINEAGE, SegmentStage, running_stores

from mainstay_core.job.config import MAX_AUTO_WINDOW
from mainstay_core.rank.events import LoadFailed
from mainstay_core.rank.replays.authors import author_of
from mainstay_core.rank.replays.replaying import Stores
from mainstay_core.rank.shell import run_blocking
from mainstay_core.snapshots.orderings import Ordering
from mainstay_core.snapshots.schedule import PositionState, assign
from mainstay_core.snapshots.units import Position
from mainstay_core.theory.popularity import skewness_of
from mainstay_train.exact import numerics
from mainstay_train.sums import digests

HERE = Path(__file__).resolve().parent
MIB = 2**20
TOKENS = 64
"""Of a step, where the device is played."""
MEMORY_BYTES = 2048 * MIB
STEPS_BETWEEN = 12
"""Steps between two kills: more than two windows of the tiny model."""
EXPERTS = "mainstay_train.models.moe:workload"
EXPERTS_CONFIG: dict[str, Any] = {
    "dim": 256,
    "layers": 6,
    "heads": 4,
    "kvHeads": 2,
    "hidden": 512,
    "sequence": 256,
    "microBatchSize": 2,
    "denseLayers": 0,
    "experts": 8,
    "activeExperts": 2,
    "sharedExperts": 0,
    "expertHidden": 768,
}
"""Of the mixture whose middle third is computed again."""
BOUNDARY_STEPS = 3
BOUNDARY_MEMORY_BYTES = 640 * MIB
MANY_EXPERTS: dict[str, Any] = EXPERTS_CONFIG | {
    "experts": 16,
    "expertHidden": 384,
    "microBatchSize": 8,
}
"""As many parameters, in twice as many experts, and tokens enough that products take the time."""
ORDER_MEMORY_BYTES = 1024 * MIB
BIAS = 0.06
"""By how much the scores of the n-th expert of a layer are lowered, times the logarithm of n: about
as skewed as if it had a share of 1/n of the tokens."""
SPECS: dict[str, dict[str, Any]] = {
    "replay from memory": {
        "snapshots": {"enabled": True, "window": 2, "peers": 1, "memory": "256Mi"}
    },
    "dense copies in memory": {
        "snapshots": {"enabled": True, "window": 1, "peers": 1, "memory": "256Mi"}
    },
    "restart from disk": {"checkpoint": {"everySteps": 1}},
}
"""Dense copies and checkpoints in every step: the interval after which a restart loses least."""


def measure_steps(turns: int) -> None:
    """Print the time of a replayed step over that of a step, for the demo's model."""
    with tempfile.TemporaryDirectory(prefix="bench-") as corpus, running_stores(MEMORY_BYTES) as at:
        (Path(corpus) / "text.txt").write_text(Path(__file__).read_text() * 40)
        stage = SegmentStage("", demo.MODEL | {"data": {"path": corpus}}, at)
        length = min(MAX_AUTO_WINDOW, len(stage.units().names))
        for _ in range(2 * length + 1):
            stage.step(length)
        ratios, reads_s, replays_s, steps_s, applied = [], [], [], [], []
        for turn in range(turns):
            # Ends within a window, each time at another instalment.
            began_s = time.perf_counter()
            for _ in range(length + 1):
                stage.step(length)
            steps_s.append((time.perf_counter() - began_s) / (length + 1))
            stage.keeper.wait_copied()
            report = stage.client.report(LINEAGE)
            replay = Stores([report], LINEAGE).plan_replay(0, stage.version)
            if replay is None:
                raise RuntimeError(f"turn {turn}: the stores do not reach {stage.version}")
            expected = stage.masters
            began_s = time.perf_counter()
            states = replace(replay, records=(), last=None)
            run_blocking(stage.replay(states))
            reads_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            outcome = run_blocking(stage.replay(replay))
            replays_s.append(time.perf_counter() - began_s)
            if isinstance(outcome, LoadFailed) or outcome.digest != expected:
                raise RuntimeError(f"turn {turn}: not the same bits: {outcome}")
            applied.append(len(replay.records))
            beyond_s = replays_s[-1] - reads_s[-1]
            ratios.append(beyond_s / len(replay.records) / steps_s[-1])
    print(
        f"window of {length}; {turns} replays of {min(applied)} to {max(applied)} steps, all with "
        "the bits of the state that was there\n"
        f"a step: {1e3 * statistics.median(steps_s):.0f} ms; a replay: "
        f"{1e3 * statistics.median(replays_s):.0f} ms, {1e3 * statistics.median(reads_s):.0f} ms "
        f"of it to read the states; a replayed step: {statistics.median(ratios):.3f} of a step "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


def measure_boundary(turns: int) -> None:
    """Print the time of a step from boundary logs, with frozen experts and without."""
    own: list[float] = []
    whole: list[float] = []
    skipping: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in ("whole", "frozen", "skipping")}
    cpu: dict[str, list[float]] = {name: [] for name in ratios}
    share, logged, totals_s = 0.0, 0, []
    for _ in range(turns):
        with running_stores(BOUNDARY_MEMORY_BYTES) as at:
            stage = BoundaryStage(EXPERTS, EXPERTS_CONFIG, at, num_steps=BOUNDARY_STEPS)
            frozen, share = _two_thirds(stage)
            stage.replay({})  # what is made once is there
            full, full_s = stage.replay({})
            part, part_s = stage.replay(dict.fromkeys(frozen, BOUNDARY_STEPS))
            logged = 2 * stage.engine.make_activation().nbytes * MICRO_BATCHES
            totals_s.append((full_s, part_s))
        for times, kept in ((stage.own, own), (full, whole), (part, skipping)):
            kept.append(statistics.median(times.wall_s))
        ratios["whole"].append(whole[-1] / own[-1])
        ratios["frozen"].append(skipping[-1] / own[-1])
        ratios["skipping"].append(skipping[-1] / whole[-1])
        cpus = [statistics.median(times.cpu_s) for times in (stage.own, full, part)]
        cpu["whole"].append(cpus[1] / cpus[0])
        cpu["frozen"].append(cpus[2] / cpus[0])
        cpu["skipping"].append(cpus[2] / cpus[1])
    print(
        f"{turns} turns of {BOUNDARY_STEPS} steps, all with the bits of training; "
        f"{len(frozen)} experts with {share:.3f} of the multiply-adds frozen, so skipping can give "
        f"{1 - share / 3:.3f}; logs of a step: {logged / MIB:.1f} MiB\n"
        f"the stage's own compute in a step: {1e3 * statistics.median(own):.0f} ms; all of a "
        f"replay: {statistics.median(s for s, _ in totals_s):.2f} s, with frozen units "
        f"{statistics.median(s for _, s in totals_s):.2f} s"
    )
    names = {
        "whole": "a replayed step over the stage's own compute",
        "frozen": "with frozen experts, over the stage's own compute",
        "skipping": "with frozen experts over without",
    }
    print("| | wall, median (range) | CPU of the process, median (range) |")
    print("| --- | --- | --- |")
    for name, told in names.items():
        cells = [
            f"{statistics.median(of):.3f} ({min(of):.3f}-{max(of):.3f})"
            for of in (ratios[name], cpu[name])
        ]
        print(f"| {told} | {cells[0]} | {cells[1]} |")


def _two_thirds(stage: BoundaryStage) -> tuple[list[str], float]:
    """Return experts with about two thirds of the stage's multiply-adds, and their share."""
    config = EXPERTS_CONFIG
    names = [name for name in stage.units.names if ".experts." in name]
    dim, heads = config["dim"], config["heads"]
    kept = dim * config["kvHeads"] // heads
    attention = dim * (2 * dim + 2 * kept) + config["sequence"] * dim
    tokens = BOUNDARY_STEPS * MICRO_BATCHES * config["sequence"] * config["microBatchSize"]
    layers = len(stage.counted) // config["experts"]
    return units_of_two_thirds(
        names,
        stage.counted.tolist(),
        tokens=tokens,
        dim=dim,
        hidden=config["expertHidden"],
        rest=layers * (attention + dim * config["experts"]),
    )


def measure_order(rounds: int) -> None:
    """Print what the order by popularity gives, with routers that are biased and that are not."""
    print(f"a window of {BOUNDARY_STEPS + 1} versions, {rounds} pairs of replays")
    print(
        "| skewness | weight gradients of experts left out: ascending, descending | all of a "
        "replay, ascending over descending: wall, CPU | its steps: wall, CPU | ascending, s |"
    )
    print("| --- | --- | --- | --- | --- |")
    for bias in (0.0, BIAS):
        experts = list(range(1, MANY_EXPERTS["experts"] + 1))
        random.Random(0).shuffle(experts)  # popular ones have no numbers of their own
        biases = [-bias * math.log(number) for number in experts]
        with running_stores(ORDER_MEMORY_BYTES) as at:
            stage = BoundaryStage(
                EXPERTS,
                MANY_EXPERTS,
                at,
                num_steps=BOUNDARY_STEPS,
                biases=biases,
                has_all_states=True,
            )
            _compare_orders(stage, rounds)


def _compare_orders(stage: BoundaryStage, rounds: int) -> None:
    """Print one row: replays by ascending and by descending popularity, in pairs."""
    tokens = _tokens_of(stage)
    ascending, descending = (_plan_copies(stage, tokens, is_ascending=up) for up in (True, False))
    orders = {"ascending": ascending, "descending": descending}
    for active_from in orders.values():
        stage.replay(active_from)  # what is made once is there
    took: dict[str, list[tuple[float, ...]]] = {name: [] for name in orders}
    for turn in range(rounds):
        for name in sorted(orders, reverse=bool(turn % 2)):
            begun_s = now()
            steps, _ = stage.replay(orders[name])
            whole_s = [end - begin for end, begin in zip(now(), begun_s, strict=True)]
            took[name].append((*whole_s, sum(steps.wall_s), sum(steps.cpu_s)))
    ratios = [
        [up / down for up, down in zip(*pair, strict=True)]
        for pair in zip(took["ascending"], took["descending"], strict=True)
    ]
    cells = []
    for column in zip(*ratios, strict=True):
        found = interval_of(column)
        cells.append("-" if found is None else f"{found.mean:.3f} ± {found.half:.3f}")
    spared = ", ".join(f"{_share_left_out(of, tokens):.2f}" for of in orders.values())
    counts = list(tokens.values())
    size = MANY_EXPERTS["experts"]
    of_layers = [counts[at : at + size] for at in range(0, len(counts), size)]
    shares = [[count / sum(of) for count in of] for of in of_layers]
    skewness = statistics.fmean(skewness_of(tuple(of)) for of in shares)
    median_s = statistics.median(seconds for seconds, *_ in took["ascending"])
    print(
        f"| {skewness:.2f} | {spared} | {cells[0]}, {cells[1]} | {cells[2]}, {cells[3]} "
        f"| {median_s:.2f} |"
    )


def _tokens_of(stage: BoundaryStage) -> dict[str, int]:
    """Return the tokens of each of the stage's experts, by its unit, layer after layer."""
    names = [e.unit for e in stage.job_units.experts if e.unit in stage.units.numbers]
    return dict(zip(names, stage.counted.tolist(), strict=True))


def _plan_copies(
    stage: BoundaryStage, tokens: dict[str, int], *, is_ascending: bool
) -> dict[str, int]:
    """Return the version at which a window copies each unit in full, as a job's ranks plan it."""
    most = max(tokens.values())
    scores = {name: n if is_ascending else most - n for name, n in tokens.items()}
    ordered_by = tuple(scores.get(expert.unit, 0) for expert in stage.job_units.experts)
    units, ordering = stage.job_units, Ordering.POPULARITY
    order = units.order(STAGE, ordering, ordered_by, with_compute=True)
    author = author_of(stage.plan.members[STAGE])
    state = PositionState(position=Position(stage=STAGE), order=order, authors=(author,))
    instalments = assign(state, author, BOUNDARY_STEPS + 1).instalments
    return {name: one.number for one in instalments for name in one.full}


def _share_left_out(active_from: dict[str, int], tokens: dict[str, int]) -> float:
    """Return the share of the experts' weight gradients that are not computed, by tokens."""
    frozen = sum(active_from[name] * count for name, count in tokens.items())
    return frozen / (BOUNDARY_STEPS * sum(tokens.values()))


def measure_kills(kills: int, device_s: float) -> None:
    """Print the time from a kill to the commit of the step at hand, in turns.

    Args:
        kills: of each kind.
        device_s: seconds of a step for which the device is busy; 0: a tiny model on the CPU.
    """
    played = {"deviceMillisecondsPerToken": device_s * 1e3 / TOKENS, "sequence": TOKENS}
    emulated = {"entrypoint": f"{HERE / 'emulated_accelerator.py'}:workload", "config": played}
    taken: dict[str, list[float]] = {name: [] for name in SPECS}
    steps_s: dict[str, list[float]] = {name: [] for name in SPECS}
    lost: dict[str, int] = dict.fromkeys(SPECS, 0)
    bits: dict[str, dict[int, str]] = {}
    for _ in range(kills):
        for name, spec in SPECS.items():
            job = make_job(
                name.replace(" ", "-"),
                training={"steps": 1_000_000, "seed": 7, "lanes": 1, "shardsPerLane": 1},
                parallelism={"stages": 2},
                **({"workload": emulated} if device_s else {}),
                **spec,
            )
            with local_run(job) as run:
                taken_s, step_s = _kill_once(run)
                taken[name].append(taken_s)
                steps_s[name].append(step_s)
                lost[name] += sum(r["lost_steps"] for r in run.recoveries())
                _compare(bits.setdefault("all", {}), run)
    print(f"\ndevice busy for {device_s:g} s of a step")
    print("| after a kill | kills | to the commit, median (range) s | a step s | steps lost |")
    print("| --- | --- | --- | --- | --- |")
    for name, seconds in taken.items():
        print(
            f"| {name} | {kills} | {statistics.median(seconds):.2f} "
            f"({min(seconds):.2f}-{max(seconds):.2f}) | {statistics.median(steps_s[name]):.2f} "
            f"| {lost[name]} |"
        )
    memory, *others = taken.items()
    for name, seconds in others:
        ratios = [a / b for a, b in zip(memory[1], seconds, strict=True)]
        print(f"{memory[0]} over {name}, median of pairs: {statistics.median(ratios):.2f}")


def _kill_once(run: LocalRun) -> tuple[float, float]:
    """Return the seconds from a kill to the commit of the step at hand, and those of a step."""
    run.members(2)
    run.go_on(STEPS_BETWEEN)
    victim = next(m for m in run.members(2) if ".s1." in str(m["rank"]))
    known = len(run.recoveries())
    at_s = kill_trainer(victim)
    run.until(lambda: len(run.recoveries()) > known, "the recovery")
    run.until(lambda: all(r["done"] for r in run.recoveries()), "the next commit")
    run.go_on(3)
    before = max(s.step for s in run.steps.values() if s.committed_at_s < at_s)
    after = min(s.step for s in run.steps.values() if s.committed_at_s > at_s)
    # A restart commits older steps again: the ledger has the newer entry of them.
    again = run.steps[max(before, after)]
    usual_s = statistics.median(s.step_s for s in run.steps.values() if s.committed_at_s < at_s)
    return again.committed_at_s - at_s, usual_s


def _compare(known: dict[int, str], run: LocalRun) -> None:
    """Compare a run's steps with those of the runs before.

    Raises:
        RuntimeError: a step has another digest.
    """
    entries: dict[int, list[str]] = {}
    for entry in run.fetch("ledger", since=0):
        entries.setdefault(entry["step"], []).append(f"{entry['stage']}:{entry['masters']}")
    for step, masters in entries.items():
        if len(masters) == 2:
            told = " ".join(sorted(masters))
            if known.setdefault(step, told) != told:
                raise RuntimeError(f"step {step} has other bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two turns of each")
    parser.add_argument("--kills", type=int, default=6, help="of each kind")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of replays in two orders")
    parser.add_argument("--only", choices=("steps", "boundary", "order", "kills"))
    parser.add_argument("--device-s", type=float, nargs="+", default=[0.0, 2.0])
    options = parser.parse_args()
    turns = 2 if options.quick else options.kills
    torch.set_num_threads(1)
    numerics.setup("cpu")
    digests.warm_up()
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    if options.only in (None, "steps"):
        measure_steps(turns)
    if options.only in (None, "boundary"):
        measure_boundary(turns)
    if options.only in (None, "order"):
        measure_order(2 if options.quick else options.rounds)
    if options.only in (None, "kills"):
        for device_s in options.device_s:
            measure_kills(turns, device_s)


if __name__ == "__main__":
    main()
