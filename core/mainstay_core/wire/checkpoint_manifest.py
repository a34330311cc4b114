"""Describes a directory of durable checkpoints, and decides which jobs may go on from them.

::

    <root>/owner-00000001                         the job that may write here
    <root>/step-00000020/manifest                 a durable version
    <root>/step-00000020/stage-0-inner-0/part     describes a position's part
    <root>/step-00000020/stage-0-inner-0/tensors  the bytes of its tensors, one behind the other
    <root>/step-00000020.tmp-<nonce>/             being written, or abandoned
    <root>/step-00000010.bad/                     damaged: put aside by whoever found it
    <root>/step-00000005.refused                  the same for a version that is only read here
    <root>/step-00000005.old/                     what a version was before it was converted
    <root>/step-00000005.gone-<random>/           being removed

``owner-``, ``manifest`` and ``part`` are sealed (:mod:`mainstay_core.wire.sealed`). The manifest
holds the SHA-256 of every other file of its version. No file names another one: names follow from
numbers.

Any job with the same *identity* can take up a version. The identity is what decides the bits of the
job's steps, but not who computes them: replicas, stages and slots per pod may differ, and so may
the number of steps. In a swapped pipeline the stages decide bits: there order, cut and number of
stages are part of the identity.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any

from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    Count,
    Digest,
    Instant,
    Labels,
    Longest,
    Name,
    Range,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import IntegrityError
from mainstay_core.base.shape import Order
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.sealed import Keys, read_sealed
from mainstay_core.wire.votes import Commit

MANIFEST, PART, TENSORS = "manifest", "part", "tensors"
MANIFEST_OF_FORMAT_1 = "manifest.json"
CONVERT = "mainstay checkpoints convert DIR --trusted"
FORMAT_1 = f"has format 1, whose files may run programs when they are read; see: {CONVERT}"

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element, by torch's name of the type."""

MAX_VERSION = 10**15 - 1
MAX_PLACE = 1 << 20
"""Stages of a pipeline, and ranks of a stage."""
MAX_FILE_BYTES = 1 << 50
MAX_DIMS = 16
MAX_NAME_CHARS = 1000
MAX_TENSORS = 1 << 18
"""More than fit in a part's description."""
Place = Annotated[int, Range(0, MAX_PLACE)]
SHOWN_CHARS = 200

_NAME = re.compile(r"step-(\d{8,15})(\.(?:tmp|gone|tainted)-\w+|\.(?:bad|refused|old))?", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?([eE][-+]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """The size and the SHA-256 of a file."""

    size_bytes: Count
    sha256: Digest

    def check(self, what: str) -> None:
        """Raise IntegrityError unless both are possible."""
        _require(
            0 <= self.size_bytes <= MAX_FILE_BYTES, f"{what} cannot have {self.size_bytes} bytes"
        )
        _require(_SHA256.fullmatch(self.sha256) is not None, f"{what} has no SHA-256")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPart:
    """One position's part, as the manifest lists it."""

    stage: Place
    inner: Place
    part: FileEntry
    tensors: FileEntry

    @property
    def name(self) -> str:
        """Return the part's directory."""
        return part_name(self.stage, self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a version. It is written last: a version that has it is durable."""

    version: Count
    """Steps applied."""
    lineage: Count = 0
    commit_chain: Digest = ""
    """Hash of all commits up to the version: two versions with the same one have the same bits."""
    job: Name = ""
    """Name of the job that wrote it."""
    parts: Annotated[tuple[ManifestPart, ...], Longest(MAX_MEMBERS)]
    identity: Labels
    fingerprint: Labels
    """Numerics fingerprint of the ranks that wrote it."""
    created_at_s: Instant = 0.0
    history: History = field(default=(), metadata=OMITTED)
    """Forks that the version contains; empty: it is exact."""

    @property
    def size_bytes(self) -> int:
        """Return the size of all parts together."""
        return sum(entry.size_bytes for _, entry in self.files())

    def files(self) -> Iterator[tuple[str, FileEntry]]:
        """Yield path below the version's directory, and entry, of every file but the manifest."""
        for part in self.parts:
            yield f"{part.name}/{PART}", part.part
            yield f"{part.name}/{TENSORS}", part.tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a part: row-major, little-endian, right behind the one before it."""

    name: Annotated[str, Longest(MAX_NAME_CHARS)]
    dtype: Name
    shape: Annotated[tuple[Count, ...], Longest(MAX_DIMS)]
    digest: Digest
    """As of :mod:`mainstay_core.base.digest`."""

    @property
    def size_bytes(self) -> int:
        """Return the length of its bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDescription:
    """The description of one position's part of an attempt."""

    version: Count
    nonce: Name
    """Of the quorum in which the attempt was copied."""
    stage: Place
    inner: Place
    commit: Commit
    """Of the last step applied."""
    commit_chain: Digest
    file: FileEntry
    """The file of the tensors."""
    tensors: Annotated[tuple[StoredTensor, ...], Longest(MAX_TENSORS)]
    history: History = field(default=(), metadata=OMITTED)
    """Forks that the version contains."""


def parse_manifest(data: bytes, version: int, keys: Keys = ()) -> Manifest:
    """Return the manifest that a file holds.

    Args:
        data: the whole file.
        keys: one of them must have signed it, if there are any.
        version: the one that its directory is named after.

    Raises:
        IntegrityError: it is damaged, not signed, of another format, or of another version.
    """
    found = read_sealed(Manifest, data, MANIFEST, keys)
    _require(found.version == version, f"the manifest is of step {found.version}")
    _require(0 <= found.lineage <= MAX_VERSION, "the manifest has no lineage")
    _require(math.isfinite(found.created_at_s), "the manifest has no time")
    places = [(part.stage, part.inner) for part in found.parts]
    _require(len(set(places)) == len(places) > 0, "the manifest lists a part twice, or none")
    for part in found.parts:
        _check_place(part.stage, part.inner)
        part.part.check(f"{part.name}/{PART}")
        part.tensors.check(f"{part.name}/{TENSORS}")
    _check_texts(found.job, found.commit_chain, *found.identity, *found.fingerprint)
    _check_texts(*found.identity.values(), *found.fingerprint.values(), longest=1 << 20)
    return found


def parse_part(data: bytes, keys: Keys = ()) -> PartDescription:
    """Return the description of a part that a file holds.

    Raises:
        IntegrityError: it is damaged, not signed, of another format, or contradicts itself.
    """
    found = read_sealed(PartDescription, data, PART, keys)
    _require(0 < found.version <= MAX_VERSION, f"the part is of step {found.version}")
    _check_place(found.stage, found.inner)
    found.file.check("the part's tensors")
    _check_texts(found.nonce, found.commit_chain, *(t.name for t in found.tensors))
    for tensor in found.tensors:
        _require(tensor.dtype in DTYPE_BYTES, f"{tensor.name} has an unknown type of elements")
        _require(len(tensor.shape) <= MAX_DIMS, f"{tensor.name} has {len(tensor.shape)} dimensions")
        _require(all(0 <= n <= MAX_FILE_BYTES for n in tensor.shape), f"{tensor.name} has no shape")
        _require(_DIGEST.fullmatch(tensor.digest) is not None, f"{tensor.name} has no digest")
    names = {t.name for t in found.tensors}
    _require(len(names) == len(found.tensors), "the part lists a tensor twice")
    size_bytes = sum(t.size_bytes for t in found.tensors)
    _require(size_bytes == found.file.size_bytes, f"the part's tensors have {size_bytes} bytes")
    return found


def version_name(version: int) -> str:
    """Return the directory name of a durable version."""
    return f"step-{version:08d}"


def part_name(stage: int, inner: int = 0) -> str:
    """Return the directory name of a position's part."""
    return f"stage-{stage}-inner-{inner}"


def parse_name(name: str) -> tuple[int, str] | None:
    """Return (version, kind) of an entry: "", "tmp", "gone", "tainted", "bad", "refused", "old".

    None: the entry is foreign.
    """
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
    if shape.order is not Order.IN_ORDER:
        # What goes into a layer depends on the stage in which it lies.
        entries |= {
            "parallelism.stages": str(shape.stages),
            "pipeline.cut": shape.cut.value,
            "pipeline.order": shape.order.value,
        }
    if config.entrypoint.startswith("mainstay_train."):
        # The place of the data does not matter. The fingerprint says what the data is.
        entries.pop("workload.config.data.path", None)
    return dict(sorted(entries.items()))


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> tuple[str, ...]:
    """Return one phrase per entry in which a checkpoint and a job differ, sorted by name."""
    return tuple(
        f"{shown(name)} is {shown(theirs.get(name, 'absent'))} in the checkpoint, "
        f"{shown(ours.get(name, 'absent'))} here"
        for name in sorted({*theirs, *ours})
        if not is_same_entry(theirs.get(name), ours.get(name))
    )


def is_same_entry(theirs: object, ours: object) -> bool:
    """Return whether two entries say the same: a whole number may be written as 4 or as 4.0."""
    if theirs == ours:
        return True
    if not (isinstance(theirs, str) and isinstance(ours, str)):
        return False
    if not (_NUMBER.fullmatch(theirs) and _NUMBER.fullmatch(ours)):
        return False
    return Decimal(theirs) == Decimal(ours)


def shown(text: str) -> str:
    """Return text from a file as a terminal may show it: short, and without control characters."""
    safe = text if text.isprintable() else ascii(text)
    return safe if len(safe) <= SHOWN_CHARS else f"{safe[:SHOWN_CHARS]}..."


def _check_place(stage: int, inner: int) -> None:
    _require(0 <= stage < MAX_PLACE and 0 <= inner < MAX_PLACE, f"no part is {stage}, {inner}")


def _check_texts(*texts: str, longest: int = MAX_NAME_CHARS) -> None:
    for text in texts:
        _require(len(text) <= longest, f"a text has {len(text)} characters, at most {longest}")
        # A lone surrogate could be neither printed nor sent on.
        _require(text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text), "no text")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(shown(otherwise))


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
