"""``mainstay chaos``: break a job in ways drawn from a seed, and compare the bits."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mainstay_cli.base.exits import CliError, ExitCode, UsageError
from mainstay_cli.base.files import write_whole
from mainstay_cli.chaos import runs as chaos_runs
from mainstay_cli.chaos.verdicts import Judgement, Verdict, judge_run
from mainstay_cli.local import manifests
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.faults import draw, files

ROUNDS = 3
"""What a run did not reach is tried again, in runs of their own; then it counts as unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Settings of a campaign: how many faults to draw, and how to run them."""

    file: Path
    num_faults: int
    seed: int
    per_run: int = 8
    only: str | None = None
    """Id of a fault: its group alone."""
    run: int | None = None
    """Number of the one run to do."""
    steps: int | None = None
    """Instead of the job's."""
    processes: bool = True
    faults: Path | None = None
    """A faults file, instead of draws."""
    out: Path | None = None
    hang_s: float | None = None

    @property
    def command(self) -> str:
        """The command line that draws the same."""
        parts = [f"mainstay chaos {self.file}"]
        if self.faults is not None:
            parts.append(f"--faults-file {self.faults}")
        else:
            parts.append(f"--faults {self.num_faults} --seed {self.seed} --runs-of {self.per_run}")
        if self.steps is not None:
            parts.append(f"--steps {self.steps}")
        if not self.processes:
            parts.append("--no-processes")
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Verdicts in the order of the draws, and where everything is."""

    verdicts: tuple[Verdict, ...]
    directory: Path
    seconds: float
    steps: int
    regressions: tuple[Path, ...]
    """One file per run that broke the promise, to be kept as a test."""

    @property
    def ok(self) -> bool:
        """Whether every fault fired and every digest is equal."""
        return all(verdict.judgement is Judgement.EQUAL for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "ok": self.ok,
            "seconds": self.seconds,
            "steps": self.steps,
            "directory": str(self.directory),
            "regressions": [str(path) for path in self.regressions],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }


class Watcher:
    """Hears how a campaign goes; this base class shows nothing."""

    def starts(self, what: str) -> None:
        """A run starts."""

    def judged(self, verdicts: Sequence[Verdict]) -> None:
        """A run is over."""


def run_campaign(campaign: Campaign, watcher: Watcher) -> Result:
    """Run a job undisturbed, then broken, and judge every fault.

    Raises:
        UsageError: the job, the faults file or what is asked for cannot be used.
        CliError: the job does not even run undisturbed.
    """
    file = manifests.load_job(campaign.file, None)
    manifest = _with_steps(file.manifest, campaign.steps)
    try:
        runs = _plan_runs(campaign, file)
    except InvalidSpecError as error:
        raise UsageError(str(error)) from error
    directory = campaign.out or Path(tempfile.mkdtemp(prefix="mainstay-chaos-"))
    if campaign.out is not None and campaign.out.exists() and any(campaign.out.iterdir()):
        raise UsageError(f"{campaign.out}: is not empty; name another place with --out")
    started_s = time.monotonic()
    search = manifests.search_path(campaign.file)

    def go(name: str, entries: Sequence[dict[str, Any]], bound_s: float) -> chaos_runs.Outcome:
        return chaos_runs.run_once(manifest, entries, directory / name, bound_s, search)

    watcher.starts("undisturbed")
    plain = go("undisturbed", (), campaign.hang_s or 3600.0)
    if plain.problem:
        raise CliError(f"the undisturbed run {plain.problem}", ExitCode.FAILED)

    def bound_s(num_faults: int) -> float:
        return campaign.hang_s or 60 + 5 * plain.seconds + 20 * num_faults

    final: dict[str, Verdict] = {}
    kept: list[Path] = []
    for turn in range(ROUNDS):
        for run in runs:
            name = f"run-{run.number}" if turn == 0 else f"run-{run.number}-again-{turn}"
            watcher.starts(f"{name}: {len(run.entries)} faults")
            outcome = go(name, run.entries, bound_s(len(run.entries)))
            verdicts = judge_run(run.number, run.entries, outcome, plain.report)
            final.update({verdict.fault: verdict for verdict in verdicts})
            watcher.judged(verdicts)
            if any(verdict.bad for verdict in verdicts):
                kept.append(_keep(directory / f"{name}.yaml", manifest, run))
        runs = _unreached(runs, final, campaign.seed + turn + 1)
        if not runs or campaign.faults is not None:
            break
    return Result(
        verdicts=tuple(final.values()),
        directory=directory,
        seconds=time.monotonic() - started_s,
        steps=len(plain.report["digests"]["steps"]),
        regressions=tuple(kept),
    )


def _plan_runs(campaign: Campaign, file: manifests.JobFile) -> tuple[draw.Run, ...]:
    job = file.job
    if campaign.faults is not None:
        data = manifests.load_yaml(campaign.faults)
        points = files.parse_faults(
            data,
            job.shape,
            job.spec.spares.replicas,
            has_snapshots=job.spec.snapshots.enabled,
        )
        entries = tuple(entry | {"id": point.id} for entry, point in zip(data, points, strict=True))
        return (draw.Run(number=0, groups=(), entries=entries),)
    choices = draw.Choices(
        shape=job.shape,
        num_spares=job.spec.spares.replicas,
        heartbeat_timeout_s=float(job.spec.detection.heartbeat_timeout_seconds),
        processes=campaign.processes,
    )
    groups = draw.draw(choices, campaign.num_faults, campaign.seed)
    if campaign.only is not None:
        groups = tuple(g for g in groups if campaign.only in {e["id"] for e in g.entries})
        if not groups:
            raise UsageError(f"--only: {campaign.only} is none of the faults that are drawn")
    runs = draw.pack(groups, campaign.per_run, campaign.seed)
    if campaign.run is not None:
        runs = tuple(run for run in runs if run.number == campaign.run)
        if not runs:
            raise UsageError(f"--run: there is no run {campaign.run}")
    return runs


def _unreached(
    runs: Sequence[draw.Run], final: dict[str, Verdict], seed: int
) -> tuple[draw.Run, ...]:
    """Return runs of what did not fire, with what belongs to it, one group each."""
    groups = [
        group
        for run in runs
        for group in run.groups
        if any(final[e["id"]].judgement is Judgement.NOT_REACHED for e in group.entries)
    ]
    rng = random.Random(f"{seed}/again")
    return tuple(
        draw.Run(number=group.number, groups=(group,), entries=draw.place([group], rng))
        for group in groups
    )


def _with_steps(manifest: dict[str, Any], steps: int | None) -> dict[str, Any]:
    if steps is None:
        return manifest
    training = manifest["spec"]["training"] | {"steps": steps}
    return manifest | {"spec": manifest["spec"] | {"training": training}}


def _keep(path: Path, manifest: dict[str, Any], run: draw.Run) -> Path:
    """Write a run that broke the promise as a regression test (tests/chaos/regressions)."""
    kept = {"job": manifest, "faults": list(run.entries)}
    path.write_text(manifests.dump_yaml(kept))
    return path


def write_json(result: Result, path: Path) -> None:
    """Write a campaign's report."""
    write_whole(path, json.dumps(result.to_json(), indent=1) + "\n")


Say = Callable[[str], None]


def summarize(result: Result, campaign: Campaign, say: Say) -> None:
    """Print what a campaign came to, and how to repeat what went wrong."""
    for verdict in result.verdicts:
        if verdict.judgement is Judgement.EQUAL:
            continue
        say(f"{verdict.judgement}: {verdict.fault} (run {verdict.run}): {verdict.why}")
        if campaign.faults is None:
            say(f"  alone: {campaign.command} --only {verdict.fault}")
            if verdict.bad:
                say(f"  with all of its run: {campaign.command} --run {verdict.run}")
    for path in result.regressions:
        say(f"to keep it as a test: cp {path} tests/chaos/regressions/")
    equal = sum(verdict.judgement is Judgement.EQUAL for verdict in result.verdicts)
    lost = sum(verdict.lost_steps for verdict in result.verdicts)
    say(
        f"{'PASS' if result.ok else 'FAIL'}: {equal} of {len(result.verdicts)} faults fired with "
        f"equal digests in all {result.steps} steps; steps lost: {lost}; {result.seconds:.0f} s; "
        f"everything is in {result.directory}"
    )
