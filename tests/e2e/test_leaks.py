"""What survives many recoveries holds no more threads and descriptors than after the first ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.support.census import Holding, hold, roles
from tests.e2e import matrix
from tests.e2e.harness import Layout, LocalJob, local_job, make_job

LAYOUT = Layout(lanes=3, spares=0)
WARM_UP = 2
KILLS = 7
POOLED = ("api", "redis", "local run", "supervisor")
"""Clients keep a few connections open, more or fewer by how requests happened to meet; Redis has
the other ends of the api's."""
SLACK_SOCKETS = 3
SLACK_THREADS = {"api": 3}
"""Its pool for long work grows with what happens to come at once, up to a bound."""


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


def excess(now: dict[str, Holding], least: dict[str, Holding]) -> list[str]:
    found = []
    for role, holding in now.items():
        slack = SLACK_SOCKETS if role.partition(" r")[0] in POOLED else 0
        before = least[role]
        assert holding.pid == before.pid, f"{role} did not survive"
        for what, count, bound in (
            ("threads", holding.threads, before.threads + SLACK_THREADS.get(role, 0)),
            ("sockets", holding.sockets, before.sockets + slack),
            ("files", holding.fds - holding.sockets, before.fds - before.sockets),
        ):
            if count > bound:
                found.append(f"{role}: {count} {what}, {bound} after the first recoveries")
    return found


def test_threads_and_descriptors_level_off(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = matrix.write_corpus(tmp_path_factory.mktemp("corpus"))
    job_spec = make_job(LAYOUT, 1_000_000, corpus)
    kinds: list[Callable[[LocalJob, dict[str, Any]], None]] = [kill_trainer, kill_pod]
    with local_job(tmp_path, job_spec) as job:
        whole(job)
        for number in range(KILLS):
            if number == WARM_UP:
                least = survivors(job)
            victims = [m for m in whole(job) if m["replica"] != 0]
            known = len(job.fetch("recoveries"))
            kinds[number % 2](job, victims[number // 2 % len(victims)])
            job.wait_until(lambda known=known: rejoined(job, known))
        # A thread or a connection of the last recovery may still be about to end.
        last: list[str] = []

        def level() -> bool:
            last[:] = excess(survivors(job), least)
            return not last

        try:
            job.wait_until(level)
        except AssertionError as error:
            raise AssertionError(f"never level again: {last}") from error
