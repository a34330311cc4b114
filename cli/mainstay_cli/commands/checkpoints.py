"""``mainstay checkpoints``: what durable checkpoints there are, and whether they are good."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import CliError, ExitCode, MachineError, UsageError
from mainstay_cli.local import checkpoint_files
from mainstay_cli.local.checkpoint_files import Found

app = typer.Typer(
    help="List and verify durable checkpoints. Nothing is changed.", no_args_is_help=True
)
WHERE = typer.Argument(
    help="A directory of checkpoints, a run's state directory, or the name of a local job; the "
    "newest job if left out.",
    metavar="[DIR|JOB]",
)
SHOWN_PROBLEMS = 5


@app.command(
    "ls",
    help="List checkpoints: version, age, size, parts, state and whose they are.\n\n"
    "complete: can be gone on from. torn: a file is missing or has another size. damaged: a "
    "trainer found wrong digests and put it aside. unfinished: being written, or abandoned by a "
    "rank that died; the next complete checkpoint removes it.\n\n"
    "Example: mainstay checkpoints ls demo",
)
def ls(
    where: Annotated[str | None, WHERE] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    root = checkpoint_files.find_root(where)
    found = checkpoint_files.list_versions(root)
    if as_json:
        print(json.dumps([_as_json(f) for f in found], indent=1))
        return
    if not found:
        print(f"no checkpoints in {root}")
        return
    print(f"{root}")
    print(f"  {'step':>8}  {'state':<10} {'age':>8} {'size':>10} {'parts':>5}  job")
    for item in found:
        print(f"  {_line(item)}")


@app.command(
    "verify",
    help="Read checkpoints and compute every digest anew. Exit code 1, and the tensor's name, if "
    "one is damaged.\n\n"
    "Examples:\n\n"
    "  mainstay checkpoints verify demo\n\n"
    "  mainstay checkpoints verify /data/checkpoints --version 20",
)
def verify(
    where: Annotated[str | None, WHERE] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Only this one; all if left out.")
    ] = None,
) -> None:
    root = checkpoint_files.find_root(where)
    chosen = [
        f
        for f in checkpoint_files.list_versions(root)
        if f.state in ("complete", "torn") and version in (None, f.version)
    ]
    if not chosen:
        what = "no checkpoint" if version is None else f"no checkpoint of step {version}"
        raise UsageError(f"{what} in {root}; see: mainstay checkpoints ls {root}")
    verdicts = [_verify(item) for item in chosen]
    if not all(verdicts):
        raise CliError(
            f"{verdicts.count(False)} of {len(verdicts)} checkpoints are damaged", ExitCode.FAILED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    num_tensors: int
    problems: tuple[str, ...]


def _verify(item: Found) -> bool:
    if item.state == "torn":
        print(f"step {item.version}: DAMAGED: {item.problem}")
        return False
    verdict = _digests_of(item.path)
    if not verdict.problems:
        print(f"step {item.version}: good, {verdict.num_tensors} tensors have their digests")
        return True
    print(f"step {item.version}: DAMAGED")
    for problem in verdict.problems[:SHOWN_PROBLEMS]:
        print(f"  {problem}")
    if len(verdict.problems) > SHOWN_PROBLEMS:
        print(f"  and {len(verdict.problems) - SHOWN_PROBLEMS} more")
    return False


def _digests_of(directory: Path) -> _Verdict:
    """Have a process with torch read a version: this one has none."""
    command = [sys.executable, "-m", "mainstay_train.state.verify", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    parts: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    if result.returncode not in (0, 1) or not parts:
        last = (result.stderr.strip().splitlines() or ["no detail"])[-1]
        raise MachineError(
            f"{directory} cannot be verified here: {last}; it takes a Python with torch "
            "(extra `train`)"
        )
    problems = tuple(
        f"{part['part']}: {problem}" if part["part"] else str(problem)
        for part in parts
        for problem in part["problems"]
    )
    return _Verdict(num_tensors=sum(p["tensors"] for p in parts), problems=problems)


def _line(item: Found) -> str:
    manifest = item.manifest
    age = _age(time.time() - manifest.created_at_s) if manifest else ""
    size = _size(manifest.size_bytes) if manifest else ""
    parts = str(len(manifest.parts)) if manifest else ""
    job = manifest.job if manifest else item.path.name
    if manifest:
        lanes = manifest.identity.get("training.lanes", "?")
        seed = manifest.identity.get("training.seed", "?")
        job += f" (seed {seed}, {lanes} lanes)"
    problem = f": {item.problem}" if item.problem else ""
    return f"{item.version:>8}  {item.state:<10} {age:>8} {size:>10} {parts:>5}  {job}{problem}"


def _as_json(item: Found) -> dict[str, Any]:
    manifest = item.manifest
    return {
        "version": item.version,
        "state": item.state,
        "problem": item.problem,
        "path": str(item.path),
        "job": manifest.job if manifest else None,
        "created_at_s": manifest.created_at_s if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "parts": list(manifest.parts) if manifest else [],
        "identity": manifest.identity if manifest else {},
        "fingerprint": manifest.fingerprint if manifest else {},
    }


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
