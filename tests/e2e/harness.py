"""Runs ``mainstay local run`` as a user does and reads what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml
from benchmarks.support.census import supervisors

HERE = Path(__file__).parent
MAINSTAY = [sys.executable, "-m", "mainstay_cli.commands.main"]
GIVE_UP_S = 240.0
"""A run this long hangs; it is killed and its logs are shown."""
POLL_S = 0.05
DEVICE = os.environ.get("MAINSTAY_E2E_DEVICE", "CPU")
"""``runtime.device`` of the jobs: with CUDA the same tests run on a GPU, and all ranks share it."""
TINY_MODEL = {"dim": 32, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 64, "sequence": 16}
EXPERTS = {"experts": 4, "activeExperts": 2, "expertHidden": 24, "biasRate": 0.01}
"""What a mixture of experts has besides: its second layer has experts, the first has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One configuration of the matrix."""

    stages: int = 1
    ranks_per_stage: int = 1
    ranks_per_pod: int = 1
    shards_per_lane: int = 1
    lanes: int = 3
    spares: int = 1
    strict: bool = False
    """Whether trainers communicate by the strict backend (:mod:`tests.strict`), else by gloo."""
    experts: bool = False
    """Whether the model is the mixture of experts, else the Llama."""
    bias_rate: float = EXPERTS["biasRate"]
    """How fast its router turns to experts that had few tokens."""
    dtype: str = "float32"
    replicas: int | None = None
    """None: one for each lane."""
    layers: int = TINY_MODEL["layers"]

    @property
    def num_cells(self) -> int:
        return (self.replicas or self.lanes) * self.stages

    @property
    def num_ranks(self) -> int:
        return self.num_cells * self.ranks_per_stage

    @property
    def least(self) -> Layout:
        """The smallest layout with the same bits: they depend neither on stages nor on replicas."""
        return replace(self, stages=1, replicas=1, ranks_per_pod=self.ranks_per_stage, spares=0)

    def __str__(self) -> str:
        inner = f"-inner{self.ranks_per_stage}" if self.ranks_per_stage > 1 else ""
        slots = f"slots{self.ranks_per_pod}-types{self.shards_per_lane}"
        return f"stages{self.stages}{inner}-{slots}" + ("-strict" if self.strict else "")


def make_job(
    layout: Layout,
    steps: int,
    corpus: Path,
    gates: Path | None = None,
    gate_steps: Sequence[int] = (),
    **spec: Any,
) -> dict[str, Any]:
    """Return a job of a tiny model that learns the text files of ``corpus``."""
    workload: dict[str, Any] = {
        "entrypoint": "mainstay_train.models.llama:workload",
        # Key heads are split among the ranks of a cell.
        "config": TINY_MODEL
        | {
            "layers": layout.layers,
            "kvHeads": layout.ranks_per_stage,
            "dtype": layout.dtype,
            "data": {"path": str(corpus)},
        },
    }
    if layout.experts:
        workload["entrypoint"] = "mainstay_train.models.moe:workload"
        workload["config"] |= EXPERTS | {"biasRate": layout.bias_rate}
    if layout.strict:
        workload["entrypoint"] = f"{HERE.parent / 'strict' / 'workload.py'}:workload"
    if gates is not None:
        workload["entrypoint"] = f"{HERE / 'gated_llama.py'}:workload"
        workload["args"] = [str(gates), *map(str, gate_steps)]
    return {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "training": {
                "steps": steps,
                "seed": 11,
                "lanes": layout.lanes,
                "shardsPerLane": layout.shards_per_lane,
            },
            "parallelism": {
                "stages": layout.stages,
                "ranksPerStage": layout.ranks_per_stage,
                "ranksPerPod": layout.ranks_per_pod,
                **({"replicas": layout.replicas} if layout.replicas else {}),
            },
            "spares": {"replicas": layout.spares},
            "runtime": {"device": DEVICE, "backend": "Gloo"},
            "workload": workload,
            **spec,
        },
    }


@dataclass(slots=True)
class LocalJob:
    """One ``mainstay local run`` and its directory."""

    directory: Path
    process: subprocess.Popen[str]
    environment: dict[str, str]
    _deadline_s: float = field(default_factory=lambda: time.monotonic() + GIVE_UP_S)

    @property
    def state_dir(self) -> Path:
        return self.directory / "state"

    @property
    def record(self) -> dict[str, Any]:
        """What the run tells other commands; waits until it is written."""
        path = self.state_dir / "local.json"
        self.wait_until(lambda: path.exists() and path.read_text().endswith("}"))
        return dict(json.loads(path.read_text()))

    def fetch(self, what: str = "", method: str = "GET") -> Any:
        """Return a part of the job as the api shows it, or what it answers to another request."""
        record = self.record
        token = (self.state_dir / "token").read_text()
        url = f"{record['url']}/v1/jobs/{record['job']}" + (f"/{what}" if what else "")
        headers = {"Authorization": f"Bearer {token}"}
        response = httpx.request(method, url, headers=headers, trust_env=False)
        response.raise_for_status()
        return response.json()

    def post(self, what: str, body: dict[str, Any]) -> Any:
        """Ask the api for a change of the job; return what it answers."""
        record = self.record
        token = (self.state_dir / "token").read_text()
        url = f"{record['url']}/v1/jobs/{record['job']}/{what}"
        headers = {"Authorization": f"Bearer {token}"}
        response = httpx.post(url, json=body, headers=headers, trust_env=False)
        response.raise_for_status()
        return response.json()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the run lives; an api that does not answer is no answer."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early\n{self.tails()}")
            self._check_deadline()
            time.sleep(POLL_S)

    def wait_for_members(self, step: int, num_members: int, *, or_joining: bool = False) -> None:
        """Wait until the job stands at a gate before ``step`` with all its places taken.

        Args:
            step: number of committed steps.
            num_members: ranks that it has then.
            or_joining: is content with a rank that joins at the end of this step: another one
                can join only after it.
        """

        def ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                if self.fetch()["step"] != step:
                    return False
                ranks = [m for m in self.fetch("members") if m["rank"] != "spare"]
                if or_joining and any(m["joining"] and not m["settled"] for m in ranks):
                    return True
                # A process is known from its pod's first heartbeat on.
                return len(ranks) == num_members and all(m["pid"] for m in ranks)
            return False

        self.wait_until(ready)

    def wait_until_all_up(self, num_trainers: int) -> None:
        """Wait until so many trainers are up, spares included: their processes are known."""

        def ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return sum(m["pid"] > 0 for m in self.fetch("members")) == num_trainers
            return False

        self.wait_until(ready)

    def kill_one(self, half: str) -> None:
        """Kill -9 the supervisor of the pod of the first rank, or its launcher and all trainers."""
        trainer = int(self.fetch("members")[0]["pid"])
        if half == "launcher":
            # What an out-of-memory kill of the trainer container does.
            os.killpg(os.getpgid(trainer), signal.SIGKILL)
            return
        os.kill(supervisors()[_pod_of(trainer).name], signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the run and return its exit code."""
        while True:
            try:
                return self.process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                self._check_deadline()

    def report(self) -> dict[str, Any]:
        """Return the report of a run that must have completed."""
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self.tails()}"
        report = dict(json.loads((self.directory / "report.json").read_text()))
        assert report["digests"]["final"], self.tails()
        return report

    def tails(self, num_lines: int = 25) -> str:
        """Return the ends of all logs, for the message of a failure."""
        texts = []
        for log in (
            self.directory / "output.log",
            *sorted(self.state_dir.glob("logs/*.log")),
            *sorted(self.state_dir.glob("pods/*/*.log")),
        ):
            lines = log.read_text(errors="replace").splitlines()[-num_lines:]
            texts.append("\n".join([f"--- {log.relative_to(self.directory)}", *lines]))
        return "\n".join(texts)

    def end(self) -> None:
        """Kill what is left of the run, if anything."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline_s:
            tails = self.tails()
            self.end()
            raise AssertionError(f"the run hangs\n{tails}")


@contextlib.contextmanager
def local_job(
    directory: Path,
    job: dict[str, Any],
    faults: Sequence[dict[str, Any]] = (),
    *options: str,
) -> Iterator[LocalJob]:
    """Start a run in ``directory``; kill it at the end if it still lives."""
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    command = [*MAINSTAY, "local", "run", str(directory / "job.yaml"), *options]
    command += ["--state-dir", str(directory / "state")]
    command += ["--report", str(directory / "report.json"), "--ui", "plain"]
    if faults:
        (directory / "faults.yaml").write_text(yaml.safe_dump(list(faults)))
        command += ["--faults", str(directory / "faults.yaml")]
    environment = dict(os.environ) | {"MAINSTAY_HOME": str(directory / "home")}
    with (directory / "output.log").open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    running = LocalJob(directory, process, environment)
    try:
        yield running
    finally:
        running.end()


def run_undisturbed(
    directory: Path, layout: Layout, steps: int, corpus: Path, **spec: Any
) -> dict[str, Any]:
    """Run a job without faults and return its report."""
    with local_job(directory, make_job(layout, steps, corpus, **spec)) as job:
        return job.report()


def run_disturbed(
    directory: Path,
    layout: Layout,
    steps: int,
    corpus: Path,
    faults: Sequence[dict[str, Any]],
    **spec: Any,
) -> dict[str, Any]:
    """Run a job with faults, all places taken again before each, and return its report."""
    gates = directory / "gates"
    gates.mkdir()
    # Two ranks of a lost pod may come back one after the other, each at the end of a step.
    gate_steps = [fault["at"]["step"] - before for fault in faults for before in (4, 3, 2)]
    job = make_job(layout, steps, corpus, gates, gate_steps, **spec)
    with local_job(directory, job, faults) as running:
        for number, step in enumerate(gate_steps):
            last = number % 3 == 2
            running.wait_for_members(step, layout.num_ranks, or_joining=not last)
            (gates / str(step)).touch()
        return running.report()


def processes_of(state_dir: Path) -> list[str]:
    """Return the command lines of processes that belong to a run, by its directory."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (directory / "environ").read_bytes().decode(errors="replace")
            links = " ".join(os.readlink(link) for link in (directory / "fd").iterdir())
            if str(state_dir) in f"{command} {environment} {links}":
                found.append(f"{directory.name} {command}")
    return found


def _pod_of(pid: int) -> Path:
    """Return the directory of a process's pod: its output goes to a file in it."""
    return Path(os.readlink(f"/proc/{pid}/fd/1")).parent
