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
from mainstay_core.base import codec
from mainstay_core.base.words import printable, show_bytes
from mainstay_core.wire.checkpoint_manifest import shown, version_name
from mainstay_core.wire.reinitialisation import describe_course, describe_fork, since_of

app = typer.Typer(
    help="List, verify, convert and export durable checkpoints.", no_args_is_help=True
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
    "rank that died; the next attempt removes it. tainted: a device that others named had "
    "computed it; nothing goes on from it, and nothing removes it. old: what a version was before "
    "it was converted; can be deleted. format-1: not read; see convert. With "
    "MAINSTAY_CHECKPOINT_KEY_FILE, what is not signed by that key is torn.\n\n"
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
        print_history(item, "            ")


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
    chosen = _choose(root, version, ("complete", "torn", "format-1"))
    verdicts = [_verify(item) for item in chosen]
    if not all(verdicts):
        raise CliError(
            f"{verdicts.count(False)} of {len(verdicts)} checkpoints are damaged or not read",
            ExitCode.FAILED,
        )


@app.command(
    "convert",
    help="Make checkpoints of format 1 ones that can be read: they are written anew in format 2. "
    "With MAINSTAY_CHECKPOINT_KEY_FILE, checkpoints that nobody has signed are checked and signed. "
    "The originals stay beside them (.old). No job may use the directory meanwhile.\n\n"
    "The files of format 1 are pickles: even though only the classes that belong there are "
    "accepted, convert them only if you trust whoever could write to the directory.\n\n"
    "Example: mainstay checkpoints convert /data/checkpoints --trusted",
)
def convert(
    where: Annotated[str, typer.Argument(help="A directory of checkpoints.", metavar="DIR")],
    trusted: Annotated[
        bool, typer.Option("--trusted", help="You trust whoever could write to DIR.")
    ] = False,
) -> None:
    root = checkpoint_files.find_root(where)
    if not trusted:
        raise UsageError(
            f"whoever could write to {root} decides what is in these checkpoints; say --trusted if "
            "you trust them"
        )
    chosen = _choose(root, None, ("complete", "torn", "format-1", "old"))
    versions = sorted({item.version for item in chosen})
    failed = 0
    for version in versions:
        result = _run("convert", str(root / version_name(version)))
        lines = result.stdout.splitlines()
        said = json.loads(lines[-1])["done"] if lines else _last_line(result.stderr)
        failed += result.returncode != 0
        print(f"step {version}: {said}")
    if failed:
        raise CliError(
            f"{failed} of {len(versions)} checkpoints are left as they are", ExitCode.FAILED
        )


@app.command(
    "export",
    help="Write a checkpoint as directories of torch.distributed.checkpoint, one for each part, "
    "for torch's own tools. Every digest is checked.\n\n"
    "Example: mainstay checkpoints export demo --to /data/exported",
)
def export(
    to: Annotated[Path, typer.Option(help="A directory that is not there yet.")],
    where: Annotated[str | None, WHERE] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Which one; the newest complete one if left out.")
    ] = None,
) -> None:
    root = checkpoint_files.find_root(where)
    item = _choose(root, version, ("complete",))[0]
    if to.exists():
        raise UsageError(f"--to: {to} is there already")
    result = _run("export", str(item.path), str(to))
    if result.returncode != 0:
        raise CliError(f"step {item.version}: {_last_line(result.stderr)}", ExitCode.FAILED)
    parts = [json.loads(line) for line in result.stdout.splitlines()]
    num_tensors = sum(part["tensors"] for part in parts)
    print(f"step {item.version}: {num_tensors} tensors in {len(parts)} parts, in {to}")


def _choose(root: Path, version: int | None, states: tuple[str, ...]) -> list[Found]:
    """Return what is listed in one of the states, newest first.

    Raises:
        UsageError: there is none.
    """
    chosen = [
        f
        for f in checkpoint_files.list_versions(root)
        if f.state in states and version in (None, f.version)
    ]
    if not chosen:
        what = "no checkpoint" if version is None else f"no checkpoint of step {version}"
        raise UsageError(f"{what} in {root}; see: mainstay checkpoints ls {root}")
    return chosen


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Have a process with torch work on checkpoints: this one has none.

    Raises:
        MachineError: there is no Python with torch here, or it was killed.
    """
    command = [sys.executable, "-m", f"mainstay_train.state.{module}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1) or (result.returncode and "Traceback" in result.stderr):
        raise MachineError(
            f"{module} does not work here: {_last_line(result.stderr)}; it takes a Python with "
            "torch (extra `train`)"
        )
    return result


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no detail"])[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    num_tensors: int
    problems: tuple[str, ...]


def _verify(item: Found) -> bool:
    if item.state == "format-1":
        print(f"step {item.version}: NOT READ: {item.problem}")
        return False
    if item.state == "torn":
        print(f"step {item.version}: DAMAGED: {printable(item.problem)}")
        return False
    verdict = _digests_of(item.path)
    if not verdict.problems:
        course = describe_course(since_of(item.manifest.history)) if item.manifest else "exact"
        tensors = f"{verdict.num_tensors} tensors have their digests"
        print(f"step {item.version}: good, {tensors}; {course}")
        print_history(item, "  ")
        return True
    print(f"step {item.version}: DAMAGED")
    for problem in verdict.problems[:SHOWN_PROBLEMS]:
        print(f"  {printable(problem)}")
    if len(verdict.problems) > SHOWN_PROBLEMS:
        print(f"  and {len(verdict.problems) - SHOWN_PROBLEMS} more")
    return False


def _digests_of(directory: Path) -> _Verdict:
    """Return what a whole reading of a version finds."""
    result = _run("verify", str(directory))
    parts: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    problems = tuple(
        f"{part['part']}: {problem}" if part["part"] else str(problem)
        for part in parts
        for problem in part["problems"]
    )
    return _Verdict(num_tensors=sum(p["tensors"] for p in parts), problems=problems)


def print_history(item: Found, indent: str) -> None:
    """Print a line for each fork that a version contains; nothing of an exact one."""
    for fork in item.manifest.history if item.manifest else ():
        print(f"{indent}{shown(describe_fork(fork))}")


def _line(item: Found) -> str:
    manifest = item.manifest
    age = _age(time.time() - manifest.created_at_s) if manifest else ""
    size = show_bytes(manifest.size_bytes) if manifest else ""
    parts = str(len(manifest.parts)) if manifest else ""
    job = shown(manifest.job) if manifest else item.path.name
    if manifest:
        lanes = manifest.identity.get("training.lanes", "?")
        seed = manifest.identity.get("training.seed", "?")
        job += f" (seed {shown(seed)}, {shown(lanes)} lanes)"
    since = since_of(manifest.history) if manifest else None
    if since is not None:
        job += f"; {describe_course(since)}"
    problem = f": {item.problem}" if item.problem else ""
    said = f"{item.version:>8}  {item.state:<10} {age:>8} {size:>10} {parts:>5}  {job}{problem}"
    return printable(said)


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
        "parts": [part.name for part in manifest.parts] if manifest else [],
        "identity": manifest.identity if manifest else {},
        "fingerprint": manifest.fingerprint if manifest else {},
        "approximate_since": since_of(manifest.history) if manifest else None,
        "history": codec.encode(manifest.history) if manifest else [],
    }


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
