"""Finds durable checkpoints, and says whether a job may go on from them. Reads; changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from mainstay_cli.base import state_dir
from mainstay_cli.base.exits import UsageError
from mainstay_cli.local.manifests import JobFile
from mainstay_core.base.errors import IntegrityError, InvalidSpecError, MainstayError
from mainstay_core.base.ids import JobUid
from mainstay_core.job import spec
from mainstay_core.wire.checkpoint_manifest import (
    FORMAT_1,
    MANIFEST,
    MANIFEST_OF_FORMAT_1,
    Manifest,
    differences,
    identity_of,
    parse_manifest,
    parse_name,
    shown,
    version_name,
)
from mainstay_core.wire.sealed import (
    KEY_FILE_VARIABLE,
    MAX_KEY_FILE_BYTES,
    MAX_SEALED_BYTES,
    Keys,
    parse_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One entry of a directory of checkpoints."""

    path: Path
    version: int
    state: str
    """complete, torn, damaged, unfinished, old or format-1."""
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
        return path.parent if parse_name(path.name) is not None else path
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


def read_keys() -> Keys:
    """Return the keys that have to have signed checkpoints, none if no file is named.

    Raises:
        UsageError: the file cannot be read, or holds no key.
    """
    path = os.environ.get(KEY_FILE_VARIABLE, "")
    if not path:
        return ()
    try:
        with Path(path).open() as file:
            return parse_keys(file.read(MAX_KEY_FILE_BYTES))
    except InvalidSpecError as error:
        raise UsageError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{KEY_FILE_VARIABLE}: {path} cannot be read: {error}") from error


def list_versions(root: Path) -> list[Found]:
    """Return everything in a directory of checkpoints, newest first; sizes are looked at.

    Raises:
        UsageError: the directory cannot be listed.
    """
    if not root.is_dir():
        return []
    keys, found = read_keys(), []
    try:
        paths = list(root.iterdir())
    except OSError as error:
        raise UsageError(f"{root} cannot be listed: {error}") from error
    for path in paths:
        named = parse_name(path.name)
        if named is None or named[1] in ("refused", "gone"):
            continue
        version, kind = named
        if kind == "tmp":
            found.append(Found(path=path, version=version, state="unfinished"))
        elif kind == "bad":
            found.append(Found(path=path, version=version, state="damaged", problem="put aside"))
        elif kind == "tainted":
            why = "put aside: a device had computed wrongly"
            found.append(Found(path=path, version=version, state="tainted", problem=why))
        elif kind == "old":
            why = f"what {version_name(version)} was before it was converted"
            found.append(Found(path=path, version=version, state="old", problem=why))
        else:
            found.append(_look_at(path, version, keys))
    return sorted(found, key=lambda f: (-f.version, f.path.name))


def _look_at(path: Path, version: int, keys: Keys) -> Found:
    if not (path / MANIFEST).exists() and (path / MANIFEST_OF_FORMAT_1).exists():
        return Found(path=path, version=version, state="format-1", problem=FORMAT_1)
    try:
        manifest = parse_manifest(_read_small(path / MANIFEST), version, keys)
        torn = [
            f"{name} is torn"
            for name, entry in manifest.files()
            if (path / name).stat().st_size != entry.size_bytes
        ]
    except (OSError, MainstayError) as error:
        return Found(path=path, version=version, state="torn", problem=shown(str(error)))
    return Found(
        path=path,
        version=version,
        state="torn" if torn else "complete",
        problem="; ".join(torn),
        manifest=manifest,
    )


def _read_small(path: Path) -> bytes:
    """Return the content of a file; only one byte more than it may have is ever read."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise IntegrityError(f"{path.name} is no file")
    with path.open("rb") as file:
        return file.read(MAX_SEALED_BYTES + 1)


def resume_job(
    file: JobFile,
    resume: Path,
    run_directory: Path,
    tell: Callable[[str], None],
    version: int | None = None,
) -> JobFile:
    """Return the job made to go on from the newest good checkpoint of an earlier run.

    Args:
        file: the job.
        resume: what the user names: see :func:`find_root`.
        run_directory: state directory of the new run; an earlier run in it moves aside.
        tell: told why a version newer than the chosen one is skipped.
        version: the only one to go on from; None: the newest good one.

    Raises:
        UsageError: there is none, it has format 1, or it is another job's.
    """
    root = find_root(str(resume.absolute()))
    found = [f for f in list_versions(root) if version in (None, f.version)]
    good = [f for f in found if f.state == "complete" and f.manifest]
    newest = good[0].version if good else 0
    for item in found:
        if item.state == "format-1" and item.version > newest:
            raise UsageError(f"--resume: {item.path} {item.problem}")
        if item.state == "torn" and item.version > newest:
            tell(f"--resume: step {item.version} is skipped: {item.problem}")
    if not good:
        of_step = "" if version is None else f" of step {version}"
        raise UsageError(
            f"--resume: {root} has no complete checkpoint{of_step}; see: mainstay checkpoints ls "
            f"{root}"
        )
    manifest = good[0].manifest
    assert manifest is not None
    wrong = differences(manifest.identity, identity_of(file.job.to_job_config(JobUid("resumed"))))
    if wrong:
        listed = "".join(f"\n  {difference}" for difference in wrong)
        raise UsageError(
            f"--resume: {good[0].path} cannot be gone on from, since this job computes other "
            f"bits:{listed}\nReplicas, ranks per pod and the number of steps may differ; "
            "so may stages, with pipeline.order InOrder."
        )
    steps = file.job.spec.training.steps
    if manifest.version >= steps:
        raise UsageError(
            f"--resume: {good[0].path} has all {steps} steps of this job already; raise "
            "spec.training.steps to train on"
        )
    storage = file.job.spec.checkpoint.storage
    if version is not None and storage is not None and Path(storage).resolve() == root.resolve():
        raise UsageError(
            f"--version: {root} is the job's own spec.checkpoint.storage, whose newest version it "
            "takes up; name another storage to go back"
        )
    directory = run_directory.absolute()
    if root.is_relative_to(directory):
        root = state_dir.aside_name(directory) / root.relative_to(directory)
    body = file.manifest["spec"]
    chosen = {"resumeFrom": str(root)} | ({"resumeVersion": version} if version else {})
    checkpoint = (body.get("checkpoint") or {}) | chosen
    changed = file.manifest | {"spec": body | {"checkpoint": checkpoint}}
    return replace(file, manifest=changed, job=spec.parse_training_job(changed))
