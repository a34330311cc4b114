"""Measures the time from the deletion of a pod to the next committed step, on a real cluster.

    sudo python benchmarks/cluster_recovery.py [--times 5]

Three nodes with kubelets and containerd on this machine, the chart installed by Helm, a job of
three replicas with a pod each and a spare. Per round one pod that serves is deleted, by turns

* ``killed``: without grace: its ranks are masked, the spare joins;
* ``told``: with its grace, as by ``kubectl delete pod``: its work is handed over first.

``commit`` is from the request to delete it to the first step that is committed in the quorum
that answers it, ``spare`` to the first step in which the spare counts, ``whole`` until the pool
of pods is ready again; the five times are those of design 13.9. Medians and, in parentheses,
the largest; milliseconds, ``whole`` in seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.spread import median_and_most
from tests.cluster import toolbox
from tests.cluster.cluster import run_cluster
from tests.cluster.release import JOBS, Platform, make_job

from mainstay_core.wire.recoveries import STAGES

NUM_PODS = 4
POLL_S = 0.05
GIVE_UP_S = 300.0


@dataclass(slots=True)
class Row:
    """One way to delete pods; seconds, an entry per pod."""

    commit: list[float] = field(default_factory=list)
    spare: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in STAGES})
    methods: list[str] = field(default_factory=list)
    lost_steps: int = 0


class Job:
    """The job under test."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        job = make_job(platform, "bench", 1_000_000)
        self.uid = str(platform.apply(job)["metadata"]["uid"])

    def recoveries(self) -> list[dict[str, Any]]:
        """All recoveries, oldest first; none while the api does not answer."""
        return self.platform.try_fetch(self.uid, "recoveries") or []

    def wait_whole(self) -> None:
        """Wait until every pod is ready, a spare is free and nothing is being recovered."""

        def is_whole() -> bool:
            status = self.platform.job("bench").get("status", {})
            summary = self.platform.try_fetch(self.uid, "summary")
            return bool(
                status.get("pods", {}).get("ready") == NUM_PODS
                and summary
                and not summary["recovering"]
                and summary["replicas"]["whole"] == summary["replicas"]["wanted"]
                and summary["pods"]["spares_free"] == 1
                and all(r["done"] for r in self.recoveries())
            )

        deadline = time.monotonic() + GIVE_UP_S
        while not is_whole():
            if time.monotonic() > deadline:
                raise RuntimeError("the job is not whole again")
            time.sleep(POLL_S)

    def delete_one(self, *, grace: bool, row: Row) -> None:
        """Delete a pod that serves, wait until all is well again, and note the times."""
        known = {r["quorum"]["id"] for r in self.recoveries()}
        listed = self.platform.fetch(self.uid, "pods")["pods"]
        pod = next(p for p in listed if p["serving"])
        path = f"/api/v1/namespaces/{JOBS}/pods/{pod['name']}"
        at_s = time.time()
        self.platform.api.delete(path, **({} if grace else {"gracePeriodSeconds": "0"}))
        while not any(r["quorum"]["id"] not in known for r in self.recoveries()):
            time.sleep(POLL_S)
        self.wait_whole()
        row.whole.append(time.time() - at_s)
        new = [r for r in self.recoveries() if r["quorum"]["id"] not in known]
        first = new[0]
        last = next(r for r in new if r["method"] in ("join", "hand-over"))
        row.methods.append("+".join(r["method"] for r in new))
        row.commit.append(_committed_s(first) - at_s)
        row.spare.append(_committed_s(last) - at_s)
        row.parts["detect"].append(first["started_at_s"] + first["detect_s"] - at_s)
        for part in STAGES[1:]:
            row.parts[part].append(first[f"{part}_s"])
        row.lost_steps += sum(r["lost_steps"] for r in new)


def _committed_s(recovery: dict[str, Any]) -> float:
    """Wall clock of the first commit in a recovery's quorum: its start and its five times."""
    return float(recovery["started_at_s"] + sum(recovery[f"{part}_s"] for part in STAGES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5, help="pods to delete in each way (5)")
    args = parser.parse_args()
    say = toolbox.say_to_stdout
    with run_cluster(3, say) as cluster:
        platform = Platform(cluster, say)
        platform.install()
        job = Job(platform)
        job.wait_whole()
        rows = {"killed": Row(), "told": Row()}
        print(f"load average: {os.getloadavg()[0]:.1f}", flush=True)
        for _ in range(args.times):
            for how, row in rows.items():
                job.delete_one(grace=how == "told", row=row)
        print(
            "| deleted | pods | commit | spare |", " | ".join(STAGES), "| whole, s | lost steps |"
        )
        print("| --- |" + " --- |" * (5 + len(STAGES)))
        for how, row in rows.items():
            parts = " | ".join(median_and_most(row.parts[part]) for part in STAGES)
            print(
                f"| {how} ({', '.join(sorted(set(row.methods)))}) | {len(row.commit)} "
                f"| **{median_and_most(row.commit)}** | {median_and_most(row.spare)} | {parts} "
                f"| {statistics.median(row.whole):.1f} | {row.lost_steps} |",
                flush=True,
            )
        print(f"load average: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
