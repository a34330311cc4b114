"""Has wrong bits put into steps of a job by a process with torch, and shows what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mainstay_cli.base.exits import UsageError
from mainstay_cli.local import manifests, preflight, torch_process
from mainstay_core.base.ids import JobUid
from mainstay_core.wire.flip_trials import ClassResult, FlipAnswer, FlipQuestion

HEADINGS = ("class", "drawn", "effective", "found", "digests equal")


def run_flips(path: Path, num_flips: int, seed: int) -> FlipAnswer:
    """Return what became of drawn flips, by class of operators.

    Raises:
        UsageError: the job cannot be computed so, or its blocks fail.
        MachineError: there is no torch here, or too little memory.
    """
    file = manifests.load_job(path)
    search = manifests.search_path(path)
    preflight.check_entrypoint(file.job, search)
    question = FlipQuestion(
        config=file.job.to_job_config(JobUid("flips")), num_flips=num_flips, seed=seed
    )
    found = torch_process.ask(
        "mainstay_train.dmr.flip_trials",
        question,
        search,
        FlipAnswer,
        problem="flips cannot be tried here",
        takes="three times the model with its optimizer",
    )
    if found.problem:
        raise UsageError(f"{path}: {found.problem}")
    return found


def keeps_promise(found: FlipAnswer) -> bool:
    """Return whether every effective flip was found, and no digest is another one."""
    return not found.broken


def describe(found: FlipAnswer) -> list[str]:
    """Return a table by class, the sum of those of which all is promised, and what broke that."""
    rows = [HEADINGS, *(_row(result.name, [result]) for result in found.classes)]
    promised = [result for result in found.classes if result.is_promised]
    beside = [result.name for result in found.classes if not result.is_promised]
    rows.append(_row(f"all but {', '.join(beside)}" if beside else "all", promised))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    lines += [
        f"{name}: what has come of a wrong bit before the next vote finds it cannot be undone, so "
        "nothing is promised of it"
        for name in beside
    ]
    lines += [f"BROKEN: {flip}" for flip in found.broken]
    lines.append(
        f"PASS: with detection.dmr.mode Full every effective flip{_but(beside)} was found, and "
        "every step has the undisturbed digests"
        if keeps_promise(found)
        else "FAIL"
    )
    return lines


def _but(names: Sequence[str]) -> str:
    return f" but of {', '.join(names)}" if names else ""


def _row(name: str, results: Sequence[ClassResult]) -> tuple[str, ...]:
    drawn = sum(result.drawn for result in results)
    effective = sum(result.effective for result in results)
    found = sum(result.found for result in results)
    equal = sum(result.equal for result in results)
    return name, str(drawn), str(effective), str(found), str(equal)
