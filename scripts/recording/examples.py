"""Runs of the examples by ``mainstay local run``: their bits, and the REST answers beside them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from recording.conversation import STREAM
from recording.masks import find_fields, mask, mask_metrics

GIVE_UP_S = 900.0
POLL_S = 0.2
MAX_TAIL = 2000
LOCAL = ("incarnation",)
"""What a local run draws beside the rest."""


def kill(action: str, step: int, replica: int, stage: int, **more: Any) -> dict[str, Any]:
    """Return a fault as a faults file has it."""
    return {
        "at": {"step": step, **more},
        "target": {"replica": replica, "stage": stage},
        "action": action,
    }


TWO_STAGES = (
    kill("kill-trainer", 8, 1, 1, phase="backward"),
    kill("kill-pod", 16, 0, 0, phase="forward"),
)
OWN_LOOP = (kill("kill-trainer", 10, 1, 0), kill("kill-pod", 30, 2, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example, and how it is run."""

    file: str
    faults: tuple[dict[str, Any], ...] | str = ()
    """As in a faults file, or the name of one."""
    training: dict[str, Any] = field(default_factory=dict)
    """What is different in its ``spec.training``: a run should take seconds."""
    workload: dict[str, Any] = field(default_factory=dict)
    """What takes the place of its ``spec.workload``."""

    def manifest(self, folder: Path) -> dict[str, Any]:
        """Return the TrainingJob."""
        job = copy.deepcopy(yaml.safe_load((folder / self.file).read_text()))
        job["spec"]["training"] |= self.training
        if self.workload:
            job["spec"]["workload"] = self.workload
        return dict(job)

    def list_faults(self, folder: Path) -> list[dict[str, Any]]:
        """Return the faults."""
        if isinstance(self.faults, str):
            return list(yaml.safe_load((folder / self.faults).read_text()))
        return list(self.faults)


CUSTOM = {"entrypoint": "examples/custom_model.py:workload", "config": {"width": 64, "layers": 4}}
EXAMPLES = {
    "quickstart": Example(file="quickstart.yaml"),
    "quickstart broken": Example(file="quickstart.yaml", faults=TWO_STAGES),
    "demo": Example(file="demo.yaml"),
    "demo broken": Example(file="demo.yaml", faults="demo-faults.yaml"),
    "inner": Example(file="inner.yaml"),
    "inner broken": Example(file="inner.yaml", faults=TWO_STAGES),
    "moe": Example(file="moe.yaml"),
    "moe broken": Example(file="moe.yaml", faults=TWO_STAGES),
    "own loop": Example(file="own-loop.yaml"),
    "own loop broken": Example(file="own-loop.yaml", faults=OWN_LOOP),
    "custom model": Example(file="quickstart.yaml", workload=CUSTOM),
    "custom model broken": Example(file="quickstart.yaml", workload=CUSTOM, faults=TWO_STAGES),
    "llama-tiny": Example(file="llama-tiny.yaml", training={"steps": 40}),
    "chaos": Example(file="chaos.yaml", training={"steps": 120}),
    "chaos broken": Example(file="chaos.yaml", training={"steps": 120}, faults=TWO_STAGES),
}


def record_run(name: str, tree: Path) -> dict[str, Any]:
    """Return the bits of an example, and how it got there."""
    with _started(tree, EXAMPLES[name]) as run:
        code = run.process.wait(GIVE_UP_S)
        report = _read(run.directory / "report.json")
        if code != 0:
            sys.stderr.write(run.output()[-MAX_TAIL:])
    # Which pod has which place is chance.
    known = dict.fromkeys(sorted(report.get("pods", {}).values(), key=len, reverse=True), "POD")
    return {
        "exit": code,
        "version": report.get("version"),
        "state": report.get("state"),
        "reason": mask(report.get("reason", "")),
        "digests": report.get("digests"),
        "losses": report.get("losses"),
        "steps": report.get("steps", {}) | {"redone": "depends on time"},
        "faults": mask([{**f, "fired": bool(f["fired"])} for f in report.get("faults", [])]),
        # A join's step depends on how long a process takes to start.
        "recoveries": mask(
            [
                {key: r[key] for key in ("method", "exact", "fault", "reason", "from_step")}
                for r in report.get("recoveries", [])
                if r["method"] != "join"
            ],
            known,
        ),
    }


def record_rest(tree: Path) -> dict[str, Any]:
    """Return the answers of all GET routes beside a broken run, and after one that was not."""
    fields: dict[str, set[str]] = {}
    with _started(tree, EXAMPLES["quickstart broken"], "--keep") as run, run.connect() as client:
        while not run.has_ended():
            known = run.names(client)
            for path, reply in run.ask(client):
                found = find_fields(mask(reply, known, LOCAL)) if reply else set()
                fields.setdefault(path, set()).update(found)
            time.sleep(POLL_S)
    with _started(tree, EXAMPLES["quickstart"], "--keep") as run, run.connect() as client:
        while not run.has_ended():
            time.sleep(POLL_S)
        known = run.names(client) | {str(run.directory): "DIRECTORY", str(tree): "TREE"}
        after = {path: mask(reply, known, LOCAL) for path, reply in run.ask(client)}
    return {"during": {path: sorted(found) for path, found in fields.items()}, "after": after}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A local run, and what is asked of its api."""

    directory: Path
    process: subprocess.Popen[bytes]

    def output(self) -> str:
        return (self.directory / "output.log").read_text()

    def has_ended(self) -> bool:
        """Return whether the job has ended; the api goes on."""
        assert self.process.poll() is None, self.output()
        return bool(_read(self.directory / "report.json"))

    @property
    def record(self) -> dict[str, Any]:
        return _read(self.directory / "state/local.json")

    def connect(self) -> httpx.Client:
        """Return a client of the run's api, once there is a job."""
        while not self.record:
            assert self.process.poll() is None, self.output()
            time.sleep(POLL_S)
        token = (self.directory / "state/token").read_text()
        headers = {"Authorization": f"Bearer {token}"}
        url = self.record["url"]
        return httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60)

    def names(self, client: httpx.Client) -> dict[str, str]:
        """Return a word for each name of this run: which pod comes first is chance."""
        job = self.record["job"]
        pods = client.get(f"/v1/jobs/{job}/report").json()["pods"]
        return {job: "JOB"} | {text: "POD" for pair in pods.items() for text in pair}

    def ask(self, client: httpx.Client) -> Iterator[tuple[str, Any]]:
        """Yield the answer of each GET route, by its path."""
        document = client.get("/openapi.json").json()
        for path, methods in document["paths"].items():
            if "get" in methods and path != STREAM:
                reply = client.get(path.replace("{job}", self.record["job"]))
                is_json = reply.headers["content-type"].startswith("application/json")
                yield path, reply.json() if is_json else mask_metrics(reply.text)


@contextlib.contextmanager
def _started(tree: Path, example: Example, *options: str) -> Iterator[Run]:
    """Start a local run; end it as Ctrl-C does, if it still lives."""
    folder = tree / "examples"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rec-")))
        (directory / "job.yaml").write_text(yaml.safe_dump(example.manifest(folder)))
        command = [str(tree / ".venv/bin/mainstay"), "local", "run", str(directory / "job.yaml")]
        command += ["--state-dir", str(directory / "state"), "--ui", "plain"]
        command += ["--report", str(directory / "report.json"), *options]
        if faults := example.list_faults(folder):
            (directory / "faults.yaml").write_text(yaml.safe_dump(faults))
            command += ["--faults", str(directory / "faults.yaml")]
        output = stack.enter_context((directory / "output.log").open("w"))
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | {"MAINSTAY_HOME": str(directory / "home")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        stack.callback(process.wait, GIVE_UP_S)
        stack.callback(process.send_signal, signal.SIGINT)
        yield Run(directory=directory, process=process)


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON file that may not be whole yet."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}
