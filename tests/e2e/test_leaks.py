"""What survives many recoveries holds no more threads and descriptors than after the first ones."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.support.census import Holding, hold, quiet, roles
from tests.e2e import matrix
from tests.e2e.harness import Layout, LocalJob, local_job, make_job

LAYOUT = Layout(lanes=3, spares=0)
WARM_UP = 2
KILLS = 5
"""In a round: more than the slack, so that what leaks once in each recovery is seen."""
ROUNDS = 3
LOOKS = 3
POOLED = ("api", "redis", "local run", "supervisor")
"""Clients keep as many connections open as requests have ever met, and Redis has the other ends of
the api's, whose threads for long work are kept too. On a busy machine there may be several more of
them in one round, and never in each."""
POOL_SLACK = 3


def rejoined(job: LocalJob, known: int) -> bool:
    recoveries = job.fetch("recoveries")[known:]
    return any(r["method"] == "join" for r in recoveries) and all(r["done"] for r in recoveries)


def whole(job: LocalJob) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = []

    def ready() -> bool:
        ranks[:] = [m for m in job.fetch("members") if m["rank"] != "spare"]
        alive = all(m["settled"] and m["pid"] and _lives(m["pid"]) for m in ranks)
        return len(ranks) == LAYOUT.num_cells and alive and not job.fetch()["recovering"]

    job.wait_until(ready)
    return ranks


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def kill_trainer(job: LocalJob, member: dict[str, Any]) -> None:
    os.kill(member["pid"], signal.SIGKILL)


def kill_pod(job: LocalJob, member: dict[str, Any]) -> None:
    pids = roles(job.process.pid, [member])
    os.killpg(os.getpgid(member["pid"]), signal.SIGKILL)
    os.kill(next(pid for role, pid in pids.items() if "supervisor" in role), signal.SIGKILL)


def survivors(job: LocalJob) -> dict[str, Holding]:
    """What lasts: the pod of the first lane, which nobody kills, and the run's own processes."""
    pids = roles(job.process.pid, [m for m in whole(job) if m["replica"] == 0])
    return {role: hold(pid) for role, pid in pids.items()}


Counts = dict[tuple[str, str], int]


def count(holdings: dict[str, Holding]) -> tuple[Counts, Counts]:
    """Return what must level off at once, and what is kept in pools, by role and kind."""
    fixed, pooled = Counts(), Counts()
    for role, holding in holdings.items():
        kind = role.partition(" r")[0]
        (pooled if kind in POOLED else fixed)[role, "sockets"] = holding.sockets
        (pooled if kind == "api" else fixed)[role, "threads"] = holding.threads
        fixed[role, "files"] = holding.fds - holding.sockets
        fixed[role, "pid"] = holding.pid
    return fixed, pooled


def least(job: LocalJob) -> tuple[Counts, Counts]:
    looks = [survivors(job) for _ in range(LOOKS)]
    return count({role: quiet([look[role] for look in looks]) for role in looks[-1]})


def excess(now: Counts, before: Counts, slack: int = 0) -> list[str]:
    """Return what there is more of than before."""
    for (role, what), pid in now.items():
        assert what != "pid" or pid == before[role, what], f"{role} did not survive"
    return [
        f"{role}: {number} {what}, {before[role, what]} before"
        for (role, what), number in now.items()
        if number > before[role, what] + slack
    ]


@pytest.mark.chaos
def test_threads_and_descriptors_level_off(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = matrix.write_corpus(tmp_path_factory.mktemp("corpus"))
    job_spec = make_job(LAYOUT, 1_000_000, corpus)
    kinds: list[Callable[[LocalJob, dict[str, Any]], None]] = [kill_trainer, kill_pod]
    kills = itertools.count()

    def recover(num_times: int) -> None:
        for number in itertools.islice(kills, num_times):
            victims = [m for m in whole(job) if m["replica"] != 0]
            known = len(job.fetch("recoveries"))
            kinds[number % 2](job, victims[number // 2 % len(victims)])
            job.wait_until(lambda known=known: rejoined(job, known))

    with local_job(tmp_path, job_spec) as job:
        recover(WARM_UP)
        fixed, pooled = least(job)
        last: list[str] = []

        def level() -> bool:
            last[:] = excess(count(survivors(job))[0], fixed)
            return not last

        for _ in range(ROUNDS):
            recover(KILLS)
            # A thread or a connection of the last recovery may still be about to end.
            try:
                job.wait_until(level)
            except AssertionError as error:
                raise AssertionError(f"never level again: {last}") from error
            now = least(job)[1]
            grown = excess(now, pooled, POOL_SLACK)
            if not grown:
                break
            pooled = now
        assert not grown, f"more in each of {ROUNDS} rounds: {grown}"
