"""Describes a directory of durable checkpoints, and decides which jobs may go on from it.

::

    <root>/step-00000020/manifest.json            a durable version
    <root>/step-00000020/stage-0-inner-0/...      its parts, one per position
    <root>/step-00000020.tmp-<nonce>/             being written, or abandoned
    <root>/step-00000010.bad/                     damaged: put aside by whoever found it
    <root>/step-00000005.refused                  the same for a version that is only read here

Any job with the same *identity* can take up a version. The identity is what decides the bits of the
job's steps, but not who computes them: replicas, stages and slots per pod may differ, and so may
the number of steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError, MainstayError
from mainstay_core.job.config import JobConfig

FORMAT = 1
MANIFEST, PART = "manifest.json", "part.json"

_NAME = re.compile(r"step-(\d{8,})(\.tmp-\w+|\.bad|\.refused)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a version. It is written last: a version that has it is durable."""

    version: int
    """Steps applied."""
    lineage: int = 0
    format: int = FORMAT
    job: str = ""
    """Name of the job that wrote it."""
    parts: tuple[str, ...]
    files: dict[str, int]
    """Size in bytes by path below the version's directory."""
    identity: dict[str, str]
    fingerprint: dict[str, str]
    """Numerics fingerprint of the ranks that wrote it."""
    created_at_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Return the size of all parts together."""
        return sum(self.files.values())


def parse_manifest(text: str) -> Manifest:
    """Return the manifest that a file holds.

    Raises:
        IntegrityError: it is none, or of a later format.
    """
    try:
        manifest = codec.loads(Manifest, text)
    except (MainstayError, ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"{MANIFEST} cannot be read: {error}") from error
    if manifest.format > FORMAT:
        why = f"{MANIFEST} has format {manifest.format}, this version reads {FORMAT}"
        raise IntegrityError(why)
    return manifest


def version_name(version: int) -> str:
    """Return the directory name of a durable version."""
    return f"step-{version:08d}"


def part_name(stage: int, inner: int = 0) -> str:
    """Return the directory name of a position's part."""
    return f"stage-{stage}-inner-{inner}"


def parse_name(name: str) -> tuple[int, str] | None:
    """Return (version, kind) of an entry, kind "", "tmp", "bad" or "refused"; None if foreign."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), (match[2] or "").lstrip(".").partition("-")[0]


def identity_of(config: JobConfig) -> dict[str, str]:
    """Return what two jobs must share to compute the same bits, as sorted text entries.

    The model's parameters, the data's content and the arithmetic are in the numerics
    fingerprint, which only a trainer knows.
    """
    shape = config.shape
    entries = {
        "training.seed": str(shape.seed),
        "training.lanes": str(shape.lanes),
        "training.shardsPerLane": str(shape.shards_per_lane),
        "pipeline.microBatches": str(shape.micro_batches),
        "workload.entrypoint": _without_folder(config.entrypoint),
        "workload.args": json.dumps(list(config.args)),
    }
    entries |= _flat("workload.config", config.workload)
    if config.entrypoint.startswith("mainstay_train."):
        # The place of the data does not matter. The fingerprint says what the data is.
        entries.pop("workload.config.data.path", None)
    return dict(sorted(entries.items()))


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> tuple[str, ...]:
    """Return one phrase per entry in which a checkpoint and a job differ, sorted by name."""
    return tuple(
        f"{name} is {theirs.get(name, 'absent')} in the checkpoint, {ours.get(name, 'absent')} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    )


def _without_folder(entrypoint: str) -> str:
    module, colon, function = entrypoint.rpartition(":")
    return f"{module.rpartition('/')[2]}{colon}{function}"


def _flat(path: str, value: Any) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _flat(f"{path}.{key}", item)
        return found
    return {path: json.dumps(value, sort_keys=True)}
