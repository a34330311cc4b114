"""``mainstay sim``: whole jobs in simulated time, one per seed, on all cores."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from mainstay_cli.base.exits import UsageError
from mainstay_core.sim import KINDS, Outcome, Scenario, draw, simulate

SEEDS_PER_TASK = 20
MAX_FAILURES = 5
"""After so many failing seeds no more are started: one is enough to look at."""
TRACE_LINES = 400
FORKED = (
    "fork",
    "made anew",
    "approximate checkpoint",
    "ended approximate",
    "permission",
    "permission used",
    "permission withdrawn",
)
"""What is counted of jobs that go on approximately."""
PROGRESS_S = 2.0
AHEAD = "ahead"
PERMISSIONS = {"drawn": None, "on": True, "off": False, AHEAD: False}
"""Whether stages may be made anew of others, as a command says it: by the job's policy. AHEAD: its
policy is off, and a person allows it for one recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The scenarios of a command, by seed."""

    faults: str = "all"
    approximate: str = "drawn"

    def __post_init__(self) -> None:
        parse_kinds(self.faults)
        if self.approximate not in PERMISSIONS:
            known = ", ".join(PERMISSIONS)
            raise UsageError(f"--approximate is {self.approximate!r}, must be one of {known}")

    def scenario(self, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        permission = PERMISSIONS[self.approximate]
        ahead = self.approximate == AHEAD
        return draw(seed, parse_kinds(self.faults), approximate=permission, ahead=ahead)

    @property
    def options(self) -> str:
        """Return the options that draw the same."""
        faults = "" if self.faults == "all" else f" --faults {self.faults}"
        drawn = self.approximate == "drawn"
        return faults + ("" if drawn else f" --approximate {self.approximate}")


def parse_seeds(text: str) -> range:
    """Return the seeds of ``FIRST:END``, or of one number.

    Raises:
        UsageError: it is neither.
    """
    first, colon, end = text.partition(":")
    try:
        seeds = range(int(first), int(end)) if colon else range(int(first), int(first) + 1)
    except ValueError as error:
        raise UsageError(f"--seeds is {text!r}, must be like 0:10000") from error
    if not seeds:
        raise UsageError(
            f"--seeds is {text!r}, which are no seeds; FIRST must be below END, like 0:10000"
        )
    return seeds


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of faults of a comma-separated list; all of them for ``all``.

    Raises:
        UsageError: a kind is unknown.
    """
    if text == "all":
        return KINDS
    kinds = tuple(k for k in text.split(",") if k and k != "none")
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        known = ", ".join(KINDS)
        raise UsageError(f"--faults has {', '.join(unknown)}, must be all, none or of {known}")
    return kinds


def run_one(seed: int, draws: Draws, *, trace: bool) -> bool:
    """Run one seed and print what happened; return whether everything held."""
    scenario = draws.scenario(seed)
    outcome = simulate(scenario, tracing=trace)
    print(scenario.describe())
    if len(outcome.trace) > TRACE_LINES:
        print(f"  ... {len(outcome.trace) - TRACE_LINES} lines earlier ...")
    for line in outcome.trace[-TRACE_LINES:]:
        print(line)
    if outcome.violation:
        _print_failure(outcome, draws)
        print(outcome.where)
        return False
    print(
        f"seed {seed}: all invariants held after {outcome.num_events} events, "
        f"{outcome.num_plans} plans, {outcome.finished_s:.1f} simulated seconds"
    )
    return True


def run_many(seeds: range, draws: Draws, jobs: int) -> bool:
    """Run all seeds on ``jobs`` processes; return whether everything held in all of them."""
    began_s = shown_s = time.monotonic()
    total: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    failures: list[Outcome] = []
    for outcomes in _results(seeds, draws, jobs):
        for outcome in outcomes:
            total.update(seeds=1, events=outcome.num_events, checks=outcome.num_checks)
            seen.update(outcome.seen)
            faults.update(outcome.faults)
            if outcome.violation:
                failures.append(outcome)
                _print_failure(outcome, draws)
        if time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            rate = total["seeds"] / (shown_s - began_s)
            text = f"{total['seeds']} of {len(seeds)} seeds, {rate:.0f} per s, {len(failures)} fail"
            print(text, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
        if len(failures) >= MAX_FAILURES:
            break
    _print_summary(total, seen, faults, time.monotonic() - began_s)
    print(f"{len(failures)} of {total['seeds']} seeds fail" if failures else "all invariants held")
    return not failures


def _results(seeds: range, draws: Draws, jobs: int) -> Iterator[Sequence[Outcome]]:
    parts = [seeds[i : i + SEEDS_PER_TASK] for i in range(0, len(seeds), SEEDS_PER_TASK)]
    if jobs == 1:
        for part in parts:
            yield _run_part(part, draws)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures: list[Future[list[Outcome]]] = [pool.submit(_run_part, p, draws) for p in parts]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _run_part(seeds: range, draws: Draws) -> list[Outcome]:
    return [simulate(draws.scenario(seed)) for seed in seeds]


def _print_failure(outcome: Outcome, draws: Draws) -> None:
    print(f"seed {outcome.seed} fails: {outcome.violation}")
    print(f"  faults: {', '.join(outcome.faults) or 'none'}")
    print(f"  repeat: mainstay sim --seed {outcome.seed} --trace{draws.options}", flush=True)


def _print_summary(
    total: Counter[str], seen: Counter[str], faults: Counter[str], seconds: float
) -> None:
    print(
        f"{total['seeds']} seeds, {total['events']} events, {total['checks']} checks, "
        f"{faults.total()} faults in {seconds:.0f} s"
    )
    plans = {k.removeprefix("plan "): n for k, n in seen.items() if k.startswith("plan ")}
    settles = {k.removeprefix("settle "): n for k, n in seen.items() if k.startswith("settle ")}
    forks = {k: seen[k] for k in FORKED if seen[k]}
    listings = {"plans": plans, "settles": settles, "faults": faults}
    for what, counts in (listings | ({"forks": forks} if forks else {})).items():
        listed = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        print(f"  {what}: {', '.join(f'{n} {name}' for name, n in listed) or 'none'}")


def default_jobs() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
