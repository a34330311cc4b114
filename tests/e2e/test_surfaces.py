"""Every surface of a job of which a stage was made anew says so, and none of any other job."""

import io
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console
from tests.e2e import matrix
from tests.e2e.harness import TINY_MODEL, Layout, LocalJob, local_job, make_job
from tests.e2e.test_approximate import twin
from tests.operator.test_builders import view
from typer.testing import CliRunner

from mainstay_cli.commands import main
from mainstay_cli.views.live import LiveView, render
from mainstay_cli.views.progress import StepLine
from mainstay_core.base import codec
from mainstay_core.job.crd import COLUMNS
from mainstay_core.pool.conditions import ObservedJob
from mainstay_core.wire.page import JobPage
from mainstay_core.wire.routes import read_recoveries
from mainstay_operator import narrator
from mainstay_operator.status import PodRecord, build_status, summary_of

pytestmark = pytest.mark.slow

NUM_STEPS = 12
LOST_AT = 8
SAVED_AT = 6
"""The newest exact checkpoint before."""
SAYS = re.compile(rf'approximate (since )?step {LOST_AT}\b|"approximate_?since": {LOST_AT}\b', re.I)
SAYS_ANYTHING = re.compile(r'approximate (since )?step|"approximate_?since": \d', re.I)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def kill(replica: int, stage: int, step: int) -> dict[str, Any]:
    return {
        "at": {"step": step, "phase": "backward"},
        "target": {"replica": replica, "stage": stage},
        "action": "kill-trainer",
    }


def run_kept(directory: Path, job: dict[str, Any], faults: list[dict[str, Any]]) -> dict[str, str]:
    """Run a job to its end while its api stays; return what each surface shows of it."""
    with local_job(directory, job, faults, "--keep") as running:
        running.wait_until((directory / "report.json").exists)
        return surfaces(running)


def surfaces(running: LocalJob) -> dict[str, str]:
    told = {what: running.fetch(what) for what in ("", "summary", "recoveries", "lineage")}
    entries, events = running.fetch("ledger"), running.fetch("events")
    final = running.fetch("report")["digests"]["final"]
    page = codec.decode(JobPage, told["summary"])
    seen = ObservedJob(initialized=True, summary=summary_of(page))
    status = build_status(view(), seen, page, PodRecord(), 2000.0)
    notes = narrator.of_recoveries(read_recoveries(told["recoveries"]).read, 0.0)
    report = running.directory / "report.json"
    return {
        **{f"GET {what or 'job'}": json.dumps(shown) for what, shown in told.items()},
        "ledger": json.dumps(entries[-1]),
        "history": "\n".join(e["message"] for e in events if e["type"] == "Warning"),
        "metrics": metrics_of(running),
        "REPORT.json": json.dumps({**json.loads(report.read_text()), "events": []}),
        "final digests": json.dumps(final),
        "status": command(running, "status", "tiny"),
        "timeline": command(running, "timeline", "tiny"),
        "lineage": command(running, "lineage", "tiny"),
        "checkpoints ls": command(running, "checkpoints", "ls", "tiny"),
        "checkpoints verify": command(
            running, "checkpoints", "verify", "tiny", "--version", str(NUM_STEPS)
        ),
        "report diff": difference_to_an_exact_run(running, report),
        "lines of the run": (running.directory / "output.log").read_text(),
        "live table": live_table(entries, told["recoveries"]),
        "TrainingJob's status": json.dumps(status["training"]),
        "its last recovery": json.dumps(status["recovery"]["last"]),
        "its conditions": json.dumps(status["conditions"]),
        "Events": "\n".join(n.message for n in notes if n.warning),
        "kubectl get": printed_columns(status),
    }


def difference_to_an_exact_run(running: LocalJob, path: Path) -> str:
    """What ``report diff`` says of a run beside one that would differ from the loss on."""
    report = json.loads(path.read_text())
    since = report["approximate_since"]
    exact = {**report, "exact": True, "approximate_since": None, "lineage": None}
    if since is not None:
        digests = report["digests"]
        kept, differing = digests["steps"][:since], digests["steps"][since:]
        final = {
            name: digests["final"][name] for name in ("params", "masters", "optimizer", "data")
        }
        exact["digests"] = {"steps": kept + [d[::-1] for d in differing], "final": final}
    other = running.directory / "exact.json"
    other.write_text(json.dumps(exact))
    return command(
        running, "report", "diff", str(other), str(path), exit_code=0 if since is None else 1
    )


def metrics_of(running: LocalJob) -> str:
    """The gauge, in the words of the alert."""
    record, token = running.record, (running.state_dir / "token").read_text()
    headers = {"Authorization": f"Bearer {token}"}
    shown = httpx.get(f"{record['url']}/metrics", headers=headers, trust_env=False).text
    (value,) = re.findall(r"^mainstay_job_approximate_since_step{.*} (\d+)", shown, re.M) or [""]
    return f"approximate since step {value}" if value else ""


def command(running: LocalJob, *arguments: str, exit_code: int = 0) -> str:
    """What a command prints, run in this process: each of its own would import all of it anew."""
    done = CliRunner().invoke(main.app, list(arguments), env=running.environment)
    assert done.exit_code == exit_code, done.output
    return done.output


def live_table(entries: list[dict[str, Any]], recoveries: list[dict[str, Any]]) -> str:
    line = StepLine(
        step=entries[-1]["step"],
        num_steps=NUM_STEPS,
        loss=entries[-1]["loss"],
        tokens_per_s=1.0,
        quorum="q1",
        replicas=1,
        approximate_since=entries[-1].get("approximate_since"),
    )
    text = io.StringIO()
    Console(file=text, width=400).print(render(LiveView(line=line, recoveries=tuple(recoveries))))
    return text.getvalue()


def printed_columns(status: dict[str, Any]) -> str:
    """The printer columns that have a value, as ``name step value``."""
    found = []
    for name, _, path, _ in COLUMNS:
        value: Any = {"status": status}
        for key in path.strip(".").split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found.append(f"{name} step {value}")
    return "\n".join(found)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, dict[str, str]]:
    directory = tmp_path_factory.mktemp("forked")
    layout = Layout(stages=4, lanes=1, shards_per_lane=2, spares=1)
    recovery = {"allowApproximate": True, "approximateAfterLostSteps": 0}
    job = make_job(
        layout, NUM_STEPS, corpus, recovery=recovery, checkpoint={"everySteps": SAVED_AT // 2}
    )
    job["spec"]["workload"]["config"] = TINY_MODEL | {"layers": 8, "data": {"path": str(corpus)}}
    return directory, run_kept(directory, job, [kill(0, 1, LOST_AT)])


@pytest.mark.chaos
def test_every_surface_of_an_approximate_job_says_since_when(
    forked: tuple[Path, dict[str, str]],
) -> None:
    _, shown = forked
    silent = [name for name, text in shown.items() if not SAYS.search(text)]
    assert silent == [], shown
    first, second, *_ = shown["report diff"].splitlines()
    assert first.startswith(
        f"first difference: history: exact != approximate since step {LOST_AT} (step {LOST_AT}: "
    )
    assert second.strip().startswith(f"step {LOST_AT}: digest: ")


@pytest.mark.chaos
def test_no_surface_of_a_job_that_was_masked_and_restarted_says_so(
    tmp_path: Path, corpus: Path
) -> None:
    layout = Layout(stages=2, lanes=2, shards_per_lane=2, spares=1)
    job = make_job(layout, NUM_STEPS, corpus, checkpoint={"everySteps": 2})
    faults = [kill(1, 0, 3), kill(0, 1, LOST_AT), kill(1, 1, LOST_AT)]
    shown = run_kept(tmp_path, job, faults)
    methods = {r["method"] for r in json.loads(shown["GET recoveries"])}
    assert {"mask", "restart"} <= methods
    loud = [name for name, text in shown.items() if SAYS_ANYTHING.search(text)]
    assert loud == [], shown


@pytest.mark.chaos
def test_the_newest_exact_checkpoint_is_kept_and_leads_back(
    tmp_path: Path, forked: tuple[Path, dict[str, str]]
) -> None:
    directory, shown = forked
    listed = shown["checkpoints ls"]
    assert re.search(rf"^ +{SAVED_AT} +complete", listed, re.M), listed
    job = yaml.safe_load((directory / "job.yaml").read_text())
    options = ["--resume", str(directory / "state"), "--version", str(SAVED_AT)]
    with local_job(tmp_path, job, [], *options) as running:
        report = running.report()

    assert (report["exact"], report["steps"]["first"]) == (True, SAVED_AT)
    assert report["digests"]["steps"] == twin(directory)[SAVED_AT:]
