"""``mainstay local demo``: one job undisturbed and with two kill -9, the bits compared."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from mainstay_cli.base import comparison
from mainstay_cli.base.exits import CliError, ExitCode, UsageError
from mainstay_cli.commands import timeline
from mainstay_cli.local import manifests
from mainstay_cli.local import run as local_run
from mainstay_cli.views.progress import PlainProgress
from mainstay_core.base.words import count

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(progress: PlainProgress, examples: Path = EXAMPLES) -> None:
    """Run the demo and print its verdict.

    Raises:
        CliError: a run failed, or the two differ.
    """
    job_file, faults_file = examples / "demo.yaml", examples / "demo-faults.yaml"
    if not job_file.is_file():
        raise UsageError(f"{job_file} is missing: the demo runs in a checkout of the repository")
    job = manifests.load_job(job_file, None).job
    faults = manifests.load_faults(faults_file, job)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mainstay-demo-") as directory:
        results = {}
        for name, points in (("undisturbed", ()), ("disturbed", faults)):
            steps, to_come = count(job.shape.steps, "step"), count(len(points), "fault")
            progress.say(f"== {name}: {steps}, {to_come} to come")
            file = manifests.load_job(job_file, f"demo-{name}")
            options = local_run.RunOptions(state_dir=Path(directory) / name)
            results[name] = local_run.run_job(file, points, options, progress)
            if results[name].state != "complete":
                raise CliError(
                    f"the {name} run {results[name].state}: {results[name].reason}",
                    ExitCode.FAILED,
                )
    undisturbed, disturbed = results["undisturbed"], results["disturbed"]
    progress.say("\n== what happened in the disturbed run")
    progress.say(timeline.render(disturbed.recoveries))
    progress.say("\n== digests of the final state: undisturbed, disturbed")
    finals = [result.report["digests"]["final"] for result in (undisturbed, disturbed)]
    for key in finals[0]:
        progress.say(f"{key:<9} {finals[0][key]}  {finals[1].get(key)}")
    problems = judge(undisturbed, disturbed, len(faults))
    progress.say(f"\ntook {time.monotonic() - started_s:.0f} s")
    if problems:
        raise CliError("FAIL: " + "; ".join(problems), ExitCode.FAILED)
    progress.say(
        f"PASS: {count(len(faults), 'kill')}, "
        f"{count(len(disturbed.recoveries), 'recovery', 'recoveries')}, 0 steps lost, "
        f"all {count(len(undisturbed.report['digests']['steps']), 'step')} and the final state "
        "equal bit for bit"
    )


def judge(
    undisturbed: local_run.RunResult, disturbed: local_run.RunResult, num_faults: int
) -> list[str]:
    """Return what is wrong; nothing means that the demo shows what it claims."""
    differences = comparison.compare_reports(undisturbed.report, disturbed.report)
    problems = [f"the runs differ, first at {differences[0]}"] if differences else []
    if not undisturbed.report["digests"]["steps"]:
        problems.append("the report has no digests of steps, nothing was compared")
    if _num_faults(undisturbed) != 0:
        problems.append("the undisturbed run had to recover")
    if _num_faults(disturbed) < num_faults:
        problems.append(f"recovered from: {_num_faults(disturbed)} of {count(num_faults, 'fault')}")
    lost = disturbed.report["steps"]["lost"]
    if lost:
        problems.append(f"steps lost: {lost}")
    return problems


def _num_faults(result: local_run.RunResult) -> int:
    recoveries: list[dict[str, Any]] = result.recoveries
    return sum(recovery["method"] not in ("start", "join") for recovery in recoveries)
