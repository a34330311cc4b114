"""Measures what checks by re-execution add to a step, in time and in memory.

    python benchmarks/dmr.py [--only prices,alone,waits,phases,experts,witness,memory]
        [--clock processor] [--shares 0.55] [--rounds 7] [--quick]

Each part is a table of its own and takes some minutes; ``--quick`` takes a small model, to see that
all of it runs. In a part variants take turns within each round, ratios are medians over the rounds,
and each row names what is aimed at.

- *none*: the interpreter has no scopes of checks, as before there were any
- *Off*: as a job without checks runs
- *Piggyback*: recomputes are compared with their forwards
- *Naive*: each kernel is executed twice, at once (mode Full, plan Naive)
- *Dynamic*: the same, but checks wait for waits
- *Auto*: as the static planner plans it from the stage's first steps

``prices`` is what a kernel that multiplies two tensors costs with its checks, and what the planner
takes for that (``core/mainstay_core/dmr/schedule.py``).

``alone`` is one stage without neighbours: what it computes, reduces alone and applies. In ``waits``
the stage is the first of two, and its neighbour is played: each gradient comes a fixed time after
the stage begins to wait for it, so that waiting is the given share of a step without checks.
``phases`` switches the phases of the static planner on one after the other (SpareTrain, figure 12),
``experts`` is the dynamic planner on a mixture of experts, ``witness`` a step in which a second
replica computes a type, ``memory`` the most resident memory of a process for each variant, beyond
what it had before the stage was built, pages of the libraries' files left out.

With ``--clock processor`` steps are measured in processor time, and nothing sleeps: a wait counts
for what checks have left of it. So ratios hold on a machine that does other work, too.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402
from support.checked_stage import (  # noqa: E402
    AUTO,
    DYNAMIC,
    FILE,
    NAIVE,
    NONE,
    OFF,
    PIGGYBACK,
    PROFILE_STEPS,
    Clock,
    PlayedLink,
    Stage,
    clock_of,
)

from mainstay_core.dmr import schedule  # noqa: E402
from mainstay_core.dmr.operators import Pass  # noqa: E402
from mainstay_core.dmr.settings import Mode  # noqa: E402
from mainstay_core.dmr.static import plan_checks  # noqa: E402
from mainstay_train.base import heap  # noqa: E402
from mainstay_train.checks.checker import Checks  # noqa: E402
from mainstay_train.checks.places import Phase  # noqa: E402
from mainstay_train.checks.recomputes import ForwardRecord  # noqa: E402
from mainstay_train.exact import numerics  # noqa: E402
from mainstay_train.kernels import bits, imprints  # noqa: E402
from mainstay_train.sums import digests  # noqa: E402

Config = dict[str, object]
LARGE: Config = {
    "dim": 256, "layers": 4, "heads": 4, "kvHeads": 2, "hidden": 768, "sequence": 1024,
}  # fmt: skip
ON_A_GPU: Config = {
    "dim": 1024, "layers": 8, "heads": 16, "kvHeads": 4, "hidden": 2816, "sequence": 1024,
    "microBatchSize": 8, "dtype": "bfloat16",
}  # fmt: skip
BYTES_ON_A_GPU = 16 << 30
"""For checks that wait: of this model some hundred results."""
SMALL: Config = {
    "dim": 64, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 160, "sequence": 256,
}  # fmt: skip
MOE = "mainstay_train.models.moe:workload"
EXPERTS: Config = {"denseLayers": 0, "experts": 8, "activeExperts": 2, "sharedExperts": 1}
PARTS = ("prices", "alone", "waits", "phases", "experts", "witness", "memory")
NUM_TYPES = 8
"""Of a step with waits. The last one's gradients are checked behind all waits."""
EVERY, TYPES_OF_LANE = (1, 2, 5), (2, 4)
BUDGETS_MIB = (0, 64)
MEBIBYTE = 1 << 20
MEMORY_SETTINGS = {
    # What is freed goes back at once, so that resident memory is what is held.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

Rows = list[dict[str, float]]
"""Seconds of each variant, by round."""


class Bench:
    """The clock, the model and the number of rounds with which all parts measure.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.clock: Clock = clock_of(args.clock)
        self.device: str = args.device.lower()
        self.config: Config = SMALL if args.quick else LARGE
        if self.device != "cpu" and not args.quick:
            self.config = ON_A_GPU
        self.rounds = 2 if args.quick else args.rounds
        self.shares: list[float] = args.shares

    def turns(self, steps: Mapping[str, Callable[[], float]]) -> Rows:
        """Measure steps in turns; one round before counts for nothing."""
        rows: Rows = []
        names = [*steps]
        for turn in range(self.rounds + 1):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            rows.append({name: steps[name]() for name in order})
        return rows[1:]

    def waiting(
        self, names: Sequence[str], share: float, config: Config, entrypoint: str = ""
    ) -> tuple[PlayedLink, dict[str, Stage]]:
        """Return stages that wait for a share of a step without checks, and the link that waits."""
        link = PlayedLink(self.clock)
        stages = {name: self._waiting_stage(name, link, config, entrypoint) for name in names}
        for stage in stages.values():
            stage.step()
        computes_s = statistics.median(stages[OFF].seconds() for _ in range(3))
        link.delay_s = computes_s * share / (1 - share) / NUM_TYPES
        if AUTO in stages:
            profiled(stages[AUTO])
        return link, stages

    def _waiting_stage(self, name: str, link: PlayedLink, config: Config, entrypoint: str) -> Stage:
        of = {"link": link, "num_types": NUM_TYPES, "entrypoint": entrypoint}
        if self.device != "cpu":
            of |= {"device": self.device, "waiting_bytes": BYTES_ON_A_GPU}
        return Stage(config, name, self.clock, **of)  # type: ignore[arg-type]


def profiled(stage: Stage) -> None:
    """Take the steps of which a plan is made, and the first one by it."""
    for _ in range(PROFILE_STEPS + 2):
        stage.step()


def ratio(rows: Rows, over: str, under: str) -> str:
    """Return the median of a ratio."""
    return f"{statistics.median(row[over] / row[under] for row in rows):.3f}"


def ms(rows: Rows, name: str) -> str:
    """Return a variant's median in milliseconds."""
    return f"{statistics.median(row[name] for row in rows) * 1e3:.0f}"


def table(*columns: str) -> None:
    """Print the head of a table."""
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)


def line(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def findings(stages: Mapping[str, Stage]) -> int:
    """Return how many differences were found: there must be none."""
    return sum(stage.num_findings for stage in stages.values())


def measure_prices(bench: Bench) -> None:
    """One kernel, by the bytes that it makes."""
    table(
        "KiB", "us alone", "twice at once", "with an imprint", "an imprint", "planned",
        "a comparison", "planned",
    )  # fmt: skip
    for kib in (1, 16, 64, 1024, 4096):
        first, second = (torch.randn(256 * kib) for _ in range(2))
        multiply = partial(torch.mul, first, second)
        copy, number = first.clone(), max(5, min(500, 50_000 // kib))
        us = partial(_microseconds, bench.clock, number=number)
        alone = us(multiply)
        full, piggyback = Checks(Mode.FULL), Checks(Mode.PIGGYBACK)
        piggyback.is_cheap = lambda *_: False  # type: ignore[method-assign]
        with torch.no_grad(), full.over(Phase.FORWARD, 0, 0, 0) as scope:
            scope.enter(Pass.FORWARD, 0, "block")
            twice = us(multiply)
        with torch.no_grad(), piggyback.over(Phase.FORWARD, 0, 0, 0) as scope:
            scope.enter(Pass.FORWARD, 0, "block")
            with scope.note(ForwardRecord("block")):
                noted = us(multiply)
        imprint = us(partial(imprints.imprint, first))
        compared = us(partial(bits.are_equal, first, copy))
        planned = imprints.price().of([1024 * kib])
        told = (alone, twice, noted, imprint, planned * 1e6, compared)
        compares = 1024 * kib * schedule.COMPARE_S_PER_BYTE * 1e6
        line(kib, *(f"{each:.1f}" for each in (*told, compares)))


def _microseconds(clock: Clock, do: Callable[[], object], number: int) -> float:
    """Return the median of several means of a call."""
    do()
    means = []
    for _ in range(7):
        began_s = clock.now_s()
        for _ in range(number):
            do()
        means.append((clock.now_s() - began_s) / number * 1e6)
    return statistics.median(means)


def measure_alone(bench: Bench) -> None:
    """One stage that waits for nobody."""
    table(
        "model", "recompute", "none ms", "Off ms", "Off/none (<= 1.01)", "Piggyback ms",
        "Piggyback/Off (<= 1.05)", "Naive ms", "Naive/Off", "Auto ms", "Auto/Off",
        "Naive/Auto (>= 1)", "findings",
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        for recompute in (False, True):
            names = [NONE, OFF, *([PIGGYBACK] if recompute else []), NAIVE, AUTO]
            config = {**bench.config, "dtype": dtype}
            stages = {n: Stage(config, n, bench.clock, recompute=recompute) for n in names}
            profiled(stages[AUTO])
            rows = bench.turns({name: stages[name].seconds for name in names})
            piggyback = ["-", "-"]
            if recompute:
                piggyback = [ms(rows, PIGGYBACK), ratio(rows, PIGGYBACK, OFF)]
            line(
                f"Llama {dtype}", "on" if recompute else "off", ms(rows, NONE), ms(rows, OFF),
                ratio(rows, OFF, NONE), *piggyback, ms(rows, NAIVE),
                ratio(rows, NAIVE, OFF), ms(rows, AUTO), ratio(rows, AUTO, OFF),
                ratio(rows, NAIVE, AUTO), findings(stages),
            )  # fmt: skip


def measure_waits(bench: Bench) -> None:
    """A stage that waits for its neighbour, for several shares of a step."""
    names = [OFF, PIGGYBACK, NAIVE, DYNAMIC, AUTO]
    table(
        "waiting", *(f"{name} ms" for name in names), "Piggyback/Off (<= 1.05)", "Naive/Off",
        "Dynamic/Off", "Auto/Off (<= 1.10)", "Naive/Dynamic (>= 1)", "Naive/Auto (>= 1.25)",
        "most MiB, Dynamic", "most MiB, Auto", "plan of Auto", "findings",
    )  # fmt: skip
    for share in bench.shares:
        _, stages = bench.waiting(names, share, {"dtype": "float32"} | bench.config)
        rows = bench.turns({name: stages[name].seconds for name in names})
        over = (
            *((name, OFF) for name in (PIGGYBACK, NAIVE, DYNAMIC, AUTO)),
            (NAIVE, DYNAMIC),
            (NAIVE, AUTO),
        )
        most = [stages[n].checks.waiting.most_bytes / MEBIBYTE for n in (DYNAMIC, AUTO)]
        line(
            f"{share:.0%}", *(ms(rows, name) for name in names),
            *(ratio(rows, *pair) for pair in over), *(f"{mib:.0f}" for mib in most),
            stages[AUTO].shares, findings(stages),
        )  # fmt: skip


def measure_phases(bench: Bench) -> None:
    """The phases of the static planner, one after the other."""
    config = {**bench.config, "dtype": "float32"}
    link, stages = bench.waiting([OFF, NAIVE, AUTO], 0.55, config)
    planner = stages[AUTO].planner
    assert planner is not None
    (profile,) = planner.profiles.values()
    phases = {
        "P-DMR": plan_checks(profile, replays=False, queues=False),
        "and segments": plan_checks(profile, queues=False),
    }
    for name, plan in phases.items():
        stages[name] = Stage(
            config, FILE, bench.clock, link=link, num_types=NUM_TYPES, ordered=plan
        )
        profiled(stages[name])
    rows = bench.turns({name: stage.seconds for name, stage in stages.items()})
    table("phases", "ms", "over Off", "Naive over it", "shares", "findings")
    for name in (OFF, NAIVE, *phases, AUTO):
        shown = "and the queue (Auto, <= 1.10 of Off)" if name == AUTO else name
        line(
            shown, ms(rows, name), ratio(rows, name, OFF), ratio(rows, NAIVE, name),
            stages[name].shares or "-", stages[name].num_findings,
        )  # fmt: skip


def measure_experts(bench: Bench) -> None:
    """The dynamic planner on a mixture of experts."""
    width = bench.config["dim"]
    config = {**bench.config, **EXPERTS, "expertHidden": width, "dtype": "float32"}
    names = [OFF, NAIVE, DYNAMIC, AUTO]
    table(
        "waiting", *(f"{name} ms" for name in names), "Naive/Off", "Dynamic/Off", "Auto/Off",
        "Naive/Dynamic (>= 1)", "Naive/Auto", "plan of Auto", "findings",
    )  # fmt: skip
    _, stages = bench.waiting(names, 0.55, config, MOE)
    rows = bench.turns({name: stages[name].seconds for name in names})
    pairs = ((NAIVE, OFF), (DYNAMIC, OFF), (AUTO, OFF), (NAIVE, DYNAMIC), (NAIVE, AUTO))
    line(
        "55%", *(ms(rows, name) for name in names), *(ratio(rows, *pair) for pair in pairs),
        stages[AUTO].shares, findings(stages),
    )  # fmt: skip


def measure_witness(bench: Bench) -> None:
    """A step of a replica that computes a type of another one as well."""
    table(
        "c types of a replica", "step ms", "step of the witness ms", "witnessed ms", "n",
        "mean step over step without", "aim: 1 + 1/(c n) + 0.02",
    )  # fmt: skip
    for count in TYPES_OF_LANE:
        config = {**bench.config, "dtype": "float32"}
        stage = Stage(config, OFF, bench.clock, num_types=count, lanes=2)
        stage.step()
        kinds: dict[str, Callable[[], None]] = {
            "plain": stage.step,
            "witness": partial(stage.step, watched=count, is_witness=True),
            "witnessed": partial(stage.step, watched=0),
        }
        rows = bench.turns({name: partial(stage.seconds, kind) for name, kind in kinds.items()})
        slowest = statistics.median(
            max(row["witness"], row["witnessed"]) / row["plain"] for row in rows
        )
        for every in EVERY:
            line(
                count, ms(rows, "plain"), ms(rows, "witness"), ms(rows, "witnessed"), every,
                f"{1 + (slowest - 1) / every:.3f}", f"{1 + 1 / (count * every) + 0.02:.3f}",
            )  # fmt: skip


def measure_memory(bench: Bench, quick: bool) -> None:
    """Peaks of processes of their own."""
    del bench

    def peak(variant: str, budget: int = 0) -> tuple[float, float, float]:
        command = [sys.executable, __file__, "--peak-of", variant, str(budget * MEBIBYTE)]
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **MEMORY_SETTINGS},
        )
        of_process, retained, files = map(float, done.stdout.split())
        return of_process / MEBIBYTE, retained / MEBIBYTE, files / MEBIBYTE

    off, _, files = peak(OFF)
    table(
        "variant", "budget MiB", "peak MiB", "over Off", "aim MiB", "most retained MiB",
        "libraries' files, not counted, MiB",
    )  # fmt: skip
    line(OFF, "-", f"{off:.1f}", "1.000", "-", "-", f"{files:.1f}")
    found, _, files = peak(PIGGYBACK)
    over = f"{found / off:.3f}"
    line(PIGGYBACK, "-", f"{found:.1f}", over, f"{1.02 * off:.1f}", "-", f"{files:.1f}")
    for variant in (DYNAMIC, AUTO):
        for budget in BUDGETS_MIB:
            found, most, files = peak(variant, budget)
            aim = 1.05 * off + budget
            line(variant, budget, f"{found:.1f}", f"{found / off:.3f}", f"{aim:.1f}",
                 f"{most:.1f}", f"{files:.1f}")  # fmt: skip


def print_peak(variant: str, budget_bytes: int, quick: bool) -> None:
    """Print the most memory that a stage takes, and what checks that wait retained of it."""
    config: Config = {**(SMALL if quick else LARGE), "dtype": "float32"}
    clock = clock_of("processor")
    Stage(config, OFF, clock, link=PlayedLink(clock)).step()  # what libraries make once is there
    before, files = _status("VmRSS"), _status("RssFile")
    link = PlayedLink(clock)
    stage = Stage(config, variant, clock, link=link, num_types=4, waiting_bytes=budget_bytes)
    stage.step()
    link.delay_s = stage.seconds() / 4
    profiled(stage)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak begins anew
    files_then = _status("RssFile")
    for _ in range(2):
        stage.step()
    # What checks read first of the libraries' own files is not memory that the stage takes. Of it
    # the peak had at least what was there before and after: pages may come and go around it.
    files = min(files_then, _status("RssFile")) - files
    print(_status("VmHWM") - before - files, stage.checks.waiting.most_bytes, files)


def _status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.3, 0.55, 0.75])
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--device", default="cpu", help="of the part waits: cpu, or cuda:0")
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    numerics.setup(args.device.lower())
    digests.warm_up()
    if args.peak_of:
        print_peak(args.peak_of[0], int(args.peak_of[1]), args.quick)
        return
    heap.keep_freed()  # as a trainer does
    parts = args.only.split(",")
    unknown = sorted({*parts} - {*PARTS})
    if unknown:
        parser.error(f"--only: no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    load = os.getloadavg()[0]
    print(f"load of the machine: {load:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    bench = Bench(args)
    measures: dict[str, Callable[[], None]] = {
        "prices": partial(measure_prices, bench),
        "alone": partial(measure_alone, bench),
        "waits": partial(measure_waits, bench),
        "phases": partial(measure_phases, bench),
        "experts": partial(measure_experts, bench),
        "witness": partial(measure_witness, bench),
        "memory": partial(measure_memory, bench, args.quick),
    }
    for part in parts:
        measures[part]()


if __name__ == "__main__":
    main()
