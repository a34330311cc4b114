"""Reads checkpoints of format 1, whose metadata are pickles, without running what is in them.

A version of format 1 is a directory of ``torch.distributed.checkpoint`` for each part. The pickle
of its metadata may name only the classes that this library writes, and these do nothing but hold
values. Tensors are read with ``torch.load(weights_only=True)``. Only ``mainstay checkpoints convert
--trusted`` comes here.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError, MainstayError, brief
from mainstay_core.base.words import quote
from mainstay_core.wire.checkpoint_manifest import MANIFEST_OF_FORMAT_1, MAX_FILE_BYTES
from mainstay_core.wire.votes import Commit
from mainstay_train.state.part_files import open_file, read_small
from mainstay_train.sums import digests

T = TypeVar("T")

PART_OF_FORMAT_1, METADATA = "part.json", ".metadata"

_PART_NAME = re.compile(r"stage-(\d{1,6})-inner-(\d{1,6})", re.ASCII)
_FILE_NAME = re.compile(r"__\d{1,6}_\d{1,6}\.distcp", re.ASCII)
_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
}
"""Everything that a pickle of this library names, by module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOfFormat1:
    """The manifest of a version, as format 1 had it."""

    version: int
    lineage: int = 0
    format: int = 1
    job: str = ""
    parts: tuple[str, ...]
    identity: dict[str, str]
    fingerprint: dict[str, str]
    created_at_s: float = 0.0

    def places(self) -> list[tuple[int, int]]:
        """Return stage and inner rank of every part.

        Raises:
            IntegrityError: a name is no part's.
        """
        found = [_PART_NAME.fullmatch(name) for name in self.parts]
        if None in found:
            raise IntegrityError("the manifest names what is no part")
        return [(int(match[1]), int(match[2])) for match in found if match is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfFormat1:
    """The description of a part, as format 1 had it."""

    version: int
    commit: Commit
    chain: str
    tensors: dict[str, str]
    """Digests by name."""


def read_manifest(directory: Path) -> ManifestOfFormat1:
    """Return the manifest of a version.

    Raises:
        IntegrityError: it is damaged.
        OSError: it cannot be read.
    """
    manifest = _read_json(ManifestOfFormat1, directory / MANIFEST_OF_FORMAT_1)
    if manifest.format != 1:
        raise IntegrityError(f"{MANIFEST_OF_FORMAT_1} has format {manifest.format}, not 1")
    return manifest


def read_part(part: Path) -> tuple[PartOfFormat1, dict[str, torch.Tensor]]:
    """Return a part's description, and its tensors by name, whose digests are right.

    Raises:
        IntegrityError: it is damaged, or names what may not be in it.
        OSError: it cannot be read.
    """
    described = _read_json(PartOfFormat1, part / PART_OF_FORMAT_1)
    tensors = dict(_read_tensors(part))
    if tensors.keys() != described.tensors.keys():
        raise IntegrityError(f"{part.name} does not hold the tensors that it describes")
    for name, tensor in tensors.items():
        if digests.tensor_digest(name, tensor).hex() != described.tensors[name]:
            raise IntegrityError(f"{part.name}: {name} does not have its digest")
    # In the order of the description: that of the model.
    return described, {name: tensors[name] for name in described.tensors}


class _Restricted(pickle.Unpickler):
    """An unpickler that knows the library's classes and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        # Some versions of Python write a member of an enum as getattr(the enum, the name).
        if (module_name, global_name) == ("builtins", "getattr"):
            return _get_member
        if global_name not in _KNOWN.get(module_name, ()):
            raise IntegrityError(f"the metadata name {module_name}.{global_name}: not ours")
        return super().find_class(module_name, global_name)


def _get_member(kind: object, name: object) -> enum.Enum:
    """Return the member of an enum, and nothing else that an object might have."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str):
        return kind[name]
    raise IntegrityError(f"the metadata reads {quote(name)} of {quote(kind)}: not ours")


def _read_tensors(part: Path) -> Iterator[tuple[str, torch.Tensor]]:
    content = read_small(part / METADATA)
    try:
        metadata = _Restricted(io.BytesIO(content)).load()
        entries = list(metadata.state_dict_metadata.items())
        places = {i.fqn: info for i, info in metadata.storage_data.items() if _is_whole(i)}
    except MainstayError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise IntegrityError(f"{part.name} has no readable metadata: {brief(error)}") from error
    for name, entry in entries:
        if not isinstance(entry, TensorStorageMetadata) or name not in places:
            raise IntegrityError(f"{part.name} holds something that is no tensor")
        yield name, _read_tensor(part, places[name])


def _is_whole(index: MetadataIndex) -> bool:
    return index.offset is None or not any(index.offset)


def _read_tensor(part: Path, info: Any) -> torch.Tensor:
    # A damaged pickle makes objects that lack what they have by their class.
    name: Any = getattr(info, "relative_path", None)
    offset: Any = getattr(info, "offset", None)
    length: Any = getattr(info, "length", None)
    wrong = not (isinstance(name, str) and _FILE_NAME.fullmatch(name))
    wrong = wrong or not (type(offset) is int and type(length) is int)
    if wrong or min(offset, length) < 0 or max(offset, length) > MAX_FILE_BYTES:
        raise IntegrityError(f"{part.name} has metadata that no writer makes")
    with open_file(part / name) as file:
        file.seek(offset)
        # Never more than there is: read() allocates what it is asked for.
        available = max(0, (part / name).stat().st_size - offset)
        content = file.read(min(length, available))
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader of damaged bytes raises anything
        raise IntegrityError(f"{part.name}/{name} cannot be read: {brief(error)}") from error
    if not isinstance(tensor, torch.Tensor):
        raise IntegrityError(f"{part.name}/{name} holds something that is no tensor")
    return tensor


def _read_json(cls: type[T], path: Path) -> T:
    try:
        return codec.decode(cls, json.loads(read_small(path)))
    except (MainstayError, ValueError, ArithmeticError, RecursionError) as error:
        raise IntegrityError(f"{path.name} cannot be read: {brief(error)}") from error
