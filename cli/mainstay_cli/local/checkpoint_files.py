"""Finds durable checkpoints, and says whether a job may go on from them. Reads; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from mainstay_cli.base import state_dir
from mainstay_cli.base.exits import UsageError
from mainstay_cli.local.manifests import JobFile
from mainstay_core.base.errors import InvalidSpecError, MainstayError
from mainstay_core.base.ids import JobUid
from mainstay_core.job import spec
from mainstay_core.wire.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    differences,
    identity_of,
    parse_manifest,
    parse_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One entry of a directory of checkpoints."""

    path: Path
    version: int
    state: str
    """complete, torn, damaged or unfinished."""
    problem: str = ""
    manifest: Manifest | None = None


def find_root(where: str | None) -> Path:
    """Return the directory of checkpoints that a user means.

    Args:
        where: a directory of checkpoints, one of its versions, a run's state directory,
            the name of a local job, or None for the newest job.

    Raises:
        UsageError: there are none.
    """
    if where is not None and ("/" in where or Path(where).is_dir()):
        path = Path(where).absolute()
        if not path.is_dir():
            raise UsageError(f"{where}: there is no such directory")
        if (path / "checkpoints").is_dir():
            return path / "checkpoints"
        return path.parent if (path / MANIFEST).is_file() else path
    record = state_dir.find_record(where)
    return _root_of_run(Path(record.state_dir))


def _root_of_run(directory: Path) -> Path:
    """Return where a run keeps its checkpoints: what its job names, else its own directory."""
    try:
        job = spec.parse_training_job(yaml.safe_load((directory / "job.yaml").read_text()))
    except (OSError, yaml.YAMLError, InvalidSpecError):
        return directory / "checkpoints"
    storage = job.spec.checkpoint.storage
    return Path(storage) if storage else directory / "checkpoints"


def list_versions(root: Path) -> list[Found]:
    """Return everything in a directory of checkpoints, newest first; sizes are looked at."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        named = parse_name(path.name)
        if named is None or named[1] == "refused":
            continue
        version, kind = named
        if kind == "tmp":
            found.append(Found(path=path, version=version, state="unfinished"))
        elif kind == "bad":
            found.append(Found(path=path, version=version, state="damaged", problem="put aside"))
        else:
            found.append(_look_at(path, version))
    return sorted(found, key=lambda f: (-f.version, f.path.name))


def _look_at(path: Path, version: int) -> Found:
    try:
        manifest = parse_manifest((path / MANIFEST).read_text())
        torn = [
            f"{name} is torn"
            for name, size in manifest.files.items()
            if (path / name).stat().st_size != size
        ]
    except (OSError, MainstayError) as error:
        return Found(path=path, version=version, state="torn", problem=str(error))
    return Found(
        path=path,
        version=version,
        state="torn" if torn else "complete",
        problem="; ".join(torn),
        manifest=manifest,
    )


def resume_job(file: JobFile, resume: Path, run_directory: Path) -> JobFile:
    """Return the job made to go on from the newest good checkpoint of an earlier run.

    Args:
        file: the job.
        resume: what the user names: see :func:`find_root`.
        run_directory: state directory of the new run; an earlier run in it moves aside.

    Raises:
        UsageError: there is none, or it is another job's.
    """
    root = find_root(str(resume.absolute()))
    good = [f for f in list_versions(root) if f.state == "complete" and f.manifest]
    if not good:
        raise UsageError(
            f"--resume: {root} has no complete checkpoint; see: mainstay checkpoints ls {root}"
        )
    manifest = good[0].manifest
    assert manifest is not None
    wrong = differences(manifest.identity, identity_of(file.job.to_job_config(JobUid("resumed"))))
    if wrong:
        listed = "".join(f"\n  {difference}" for difference in wrong)
        raise UsageError(
            f"--resume: {good[0].path} cannot be gone on from, since this job computes other "
            f"bits:{listed}\nReplicas, stages, ranks per pod and the number of steps may differ."
        )
    steps = file.job.spec.training.steps
    if manifest.version >= steps:
        raise UsageError(
            f"--resume: {good[0].path} has all {steps} steps of this job already; raise "
            "spec.training.steps to train on"
        )
    directory = run_directory.absolute()
    if root.is_relative_to(directory):
        root = state_dir.aside_name(directory) / root.relative_to(directory)
    body = file.manifest["spec"]
    checkpoint = (body.get("checkpoint") or {}) | {"resumeFrom": str(root)}
    changed = file.manifest | {"spec": body | {"checkpoint": checkpoint}}
    return replace(file, manifest=changed, job=spec.parse_training_job(changed))
