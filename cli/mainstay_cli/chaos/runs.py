"""One run of a campaign: ``mainstay local run`` as a process of its own, with a bound on its time.

A process of its own, because a run that hangs must be ended whatever it hangs in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstay_cli.base import client, state_dir
from mainstay_cli.base.logs import last_line
from mainstay_cli.local.manifests import dump_yaml
from mainstay_core.base.errors import MainstayError

END_S = 15.0
"""How long an interrupted run may take to end its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run. ``report`` is empty unless the run came to its end."""

    seconds: float
    code: int | None
    """Exit code; None when the run exceeded its bound and was ended."""
    report: dict[str, Any]
    faults: list[dict[str, Any]]
    """As ``GET /v1/jobs/{job}/faults`` lists them at the end, or when it hung."""
    last_words: str = ""

    @property
    def problem(self) -> str:
        """Why there is nothing to compare; empty if there is."""
        if self.code is None:
            return f"hangs: not at its end after {self.seconds:.0f} s; {self.last_words}"
        if self.code != 0:
            return f"failed with exit code {self.code}: {self.last_words}"
        return ""


def run_once(
    manifest: Mapping[str, Any],
    faults: Sequence[Mapping[str, Any]],
    directory: Path,
    bound_s: float,
    search: Sequence[Path],
) -> Outcome:
    """Run a job with faults and return how it went.

    Args:
        manifest: the job; what it names by path is absolute or in ``search``.
        faults: in the form of a faults file.
        directory: for everything of the run; made here.
        bound_s: longer than this, the run hangs and is ended.
        search: where modules of the user's are looked for.
    """
    directory.mkdir(parents=True)
    job, report, state = directory / "job.yaml", directory / "report.json", directory / "state"
    job.write_text(dump_yaml(dict(manifest)))
    command = [*(sys.executable, "-m", "mainstay_cli.commands.main", "local", "run", str(job))]
    command += ["--state-dir", str(state), "--report", str(report), "--ui", "plain"]
    if faults:
        (directory / "faults.yaml").write_text(dump_yaml(list(faults)))
        command += ["--faults", str(directory / "faults.yaml")]
    environment = dict(os.environ) | {"MAINSTAY_HOME": str(directory / "home")}
    paths = [*map(str, search), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    started_s = time.monotonic()
    with (directory / "output.log").open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    seen: list[dict[str, Any]] = []
    try:
        code: int | None = process.wait(bound_s)
    except subprocess.TimeoutExpired:
        code = None
        seen = _ask_faults(directory)
    finally:
        _end(process)
    made = json.loads(report.read_text()) if code == 0 and report.exists() else {}
    return Outcome(
        seconds=time.monotonic() - started_s,
        code=code,
        report=made,
        faults=made.get("faults", seen),
        last_words=last_line(directory / "output.log"),
    )


def _ask_faults(directory: Path) -> list[dict[str, Any]]:
    """Return what became of the faults of a run that hangs, if its api still answers."""

    async def ask(record: state_dir.RunRecord) -> list[dict[str, Any]]:
        async with asyncio.timeout(5), client.connect(record) as api:
            return list(await api.fetch(record.job, "faults"))

    with contextlib.suppress(MainstayError, OSError, ValueError, TypeError, TimeoutError):
        text = (directory / "state" / "local.json").read_text()
        return asyncio.run(ask(state_dir.RunRecord(**json.loads(text))))
    return []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run twice, which kills all that it started; then the run itself."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            # The second one counts only if the first was noticed.
            time.sleep(0.2)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
