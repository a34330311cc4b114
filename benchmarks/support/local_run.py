"""Drives a local run for a benchmark, which kills from outside, at a known time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
import yaml
from support.census import supervisors

POLL_S = 0.25
"""How often the api is asked about what is waited for. Each answer takes the api some milliseconds
of the processors that the job is measured on."""
GIVE_UP_S = 300.0
"""Nothing that is waited for here takes longer, unless the run hangs."""
LATE_STEPS = 200
TINY_LLAMA = {"dim": 32, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 64, "sequence": 16}
# A local run makes few pods and restarts for a lost one; a benchmark kills many times.
LOCAL_RUN = """
import sys
from mainstay_cli.commands import main
from mainstay_cli.local import run
run.REPLACEMENTS_PER_POD = {replacements}
sys.exit(main.main())
"""


def make_job(name: str, **spec: Any) -> dict[str, Any]:
    """Return a job that goes on until it is ended; ``spec`` wins over what is here."""
    workload = {"entrypoint": "mainstay_train.models.llama:workload", "config": TINY_LLAMA}
    defaults: dict[str, Any] = {
        "training": {"steps": 1_000_000, "seed": 7, "lanes": 3, "shardsPerLane": 1},
        "parallelism": {"stages": 1},
        "recovery": {"maxRestarts": 1000},
        "runtime": {"device": "CPU", "backend": "Gloo"},
        "workload": workload,
    }
    return {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": defaults | spec,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One committed step: the last of its stages' entries."""

    step: int
    quorum: int
    committed_at_s: float
    step_s: float
    """How long it took the slowest stage."""
    replicas: int


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """One ``mainstay local run``; ends with its ``with`` block."""

    directory: Path
    process: subprocess.Popen[bytes]
    stages: int
    client: httpx.Client
    poll_s: float = POLL_S
    url: str = ""
    steps: dict[int, Step] = field(default_factory=dict)
    """What was read of the ledger so far."""

    def fetch(self, what: str = "", **query: Any) -> Any:
        """Return a part of the job as the api shows it."""
        url = f"{self.url}/{what}" if what else self.url
        return self.client.get(url, params=query).raise_for_status().json()

    def until(self, condition: Callable[[], Any], what: str, give_up_s: float = GIVE_UP_S) -> Any:
        """Return the first true result of ``condition``.

        Raises:
            RuntimeError: the run ended, or ``give_up_s`` seconds were not enough.
        """
        deadline_s = time.monotonic() + give_up_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if result := condition():
                    return result
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                log = (self.directory / "output.log").read_text()[-3000:]
                raise RuntimeError(f"waited in vain for {what}\n{log}")
            time.sleep(self.poll_s)

    def read_ledger(self) -> None:
        """Read what is new in the ledger."""
        # Stages are told by different pods: what is missing may only be late.
        newest = max(self.steps, default=0)
        late = (n for n in range(max(0, newest - LATE_STEPS), newest) if n not in self.steps)
        since = next(late, max(0, newest - 3))
        by_step: dict[int, list[dict[str, Any]]] = {}
        for entry in self.fetch("ledger", since=since):
            by_step.setdefault(entry["step"], []).append(entry)
        for number, entries in by_step.items():
            if len(entries) == self.stages:
                self.steps[number] = Step(
                    step=number,
                    quorum=max(e["quorum"]["id"] for e in entries),
                    committed_at_s=max(e["committed_at_s"] for e in entries),
                    step_s=max(e["step_s"] for e in entries),
                    replicas=min(e["replicas"] for e in entries),
                )

    def newest(self) -> int:
        """Return the newest step of the ledger, -1 before the first."""
        self.read_ledger()
        return max(self.steps, default=-1)

    def go_on(self, num_steps: int) -> None:
        """Wait for so many further steps."""
        target = self.newest() + num_steps
        self.until(lambda: self.newest() >= target, f"step {target}")

    def members(self, num_cells: int) -> list[dict[str, Any]]:
        """Wait until the job is whole and all its processes are known; return its ranks."""

        def whole() -> list[dict[str, Any]] | None:
            job = self.fetch()
            ranks = [m for m in self.fetch("members") if m["rank"] != "spare"]
            at_work = all(
                m["settled"] and m["pid"] and os.path.exists(f"/proc/{m['pid']}") for m in ranks
            )
            ready = len(ranks) == num_cells and at_work and not job["recovering"]
            return ranks if ready else None

        return list(self.until(whole, f"{num_cells} ranks at work"))

    def recoveries(self) -> list[dict[str, Any]]:
        """Return all recoveries, by quorum."""
        return list(self.fetch("recoveries"))


def kill_trainer(member: Mapping[str, Any]) -> float:
    """Kill -9 a rank's process; return the wall clock just before."""
    at_s = time.time()
    os.kill(int(member["pid"]), signal.SIGKILL)
    return at_s


def kill_pod(member: Mapping[str, Any]) -> float:
    """Kill -9 every process of a rank's pod, as a lost node would; return the wall clock before."""
    launcher = os.getpgid(int(member["pid"]))
    supervisor = supervisors()[str(member["pod"])]
    at_s = time.time()
    os.killpg(launcher, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    return at_s


@contextlib.contextmanager
def _running(directory: Path, replacements: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the ``job.yaml`` of a directory, with its ``faults.yaml``; end it with the block."""
    code = LOCAL_RUN.format(replacements=replacements)
    command = [sys.executable, "-c", code, "local", "run", str(directory / "job.yaml")]
    command += ["--faults", str(directory / "faults.yaml")]
    command += ["--state-dir", str(directory / "state"), "--ui", "plain"]
    with (directory / "output.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"MAINSTAY_HOME": str(directory / "home")},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)


@contextlib.contextmanager
def local_run(
    job: Mapping[str, Any],
    replacements: int = 1000,
    faults: Sequence[Mapping[str, Any]] = (),
    poll_s: float = POLL_S,
) -> Iterator[LocalRun]:
    """Run a job in a directory of its own, until the block ends, by a SIGTERM too.

    Args:
        job: the TrainingJob.
        replacements: pods that are made for lost ones, for each pod of the job.
        faults: entries of a faults file.
        poll_s: seconds between two looks at what is waited for.
    """
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        (directory / "job.yaml").write_text(yaml.safe_dump(dict(job)))
        (directory / "faults.yaml").write_text(yaml.safe_dump([dict(fault) for fault in faults]))
        with (
            _running(directory, replacements) as process,
            httpx.Client(trust_env=False, timeout=20) as client,
        ):
            stages = job["spec"]["parallelism"]["stages"]
            run = LocalRun(
                directory=directory, process=process, stages=stages, client=client, poll_s=poll_s
            )
            _find(run)
            yield run


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _find(run: LocalRun) -> None:
    state = run.directory / "state"

    def found() -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((state / "local.json").read_text())
            token = (state / "token").read_text()
            run.client.headers["Authorization"] = f"Bearer {token}"
            run.url = f"{record['url']}/v1/jobs/{record['job']}"
            return True
        return False

    run.until(found, "the run's record")
