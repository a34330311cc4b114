"""Reads and writes the files of one part of a checkpoint: raw tensors, and what describes them.

The file of the tensors has nothing to parse: the bytes of one tensor follow those of the one
before. It is read once, from its beginning to its end. Its SHA-256 is computed on the way, and
whoever reads uses no tensor of it before that is right.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path

import torch

from mainstay_core.base.errors import IntegrityError, brief
from mainstay_core.wire.checkpoint_manifest import (
    DTYPE_BYTES,
    PART,
    TENSORS,
    FileEntry,
    ManifestPart,
    PartDescription,
    StoredTensor,
    parse_part,
)
from mainstay_core.wire.sealed import MAX_SEALED_BYTES, Keys
from mainstay_train.exact import digests

PIECE_BYTES = 4 << 20
"""Read, written and hashed at a time. It stays in a cache; system calls cost nothing beside it."""

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPE_BYTES if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

assert sys.byteorder == "little", "checkpoints hold the bytes of little-endian machines"


def read_small(path: Path, limit: int = MAX_SEALED_BYTES) -> bytes:
    """Return the content of a sealed file.

    Raises:
        IntegrityError: it is no ordinary file, or longer than ``limit`` bytes.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise IntegrityError(f"{path.name} has more than {limit} bytes")
    return data


def open_file(path: Path) -> FileIO:
    """Open an ordinary file for reading; anything else is refused without waiting for it.

    Raises:
        IntegrityError: it is a directory, a pipe or a device.
        OSError: it cannot be opened.
    """
    # A pipe without a writer would block in open(), and a directory is no file to Python.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IntegrityError(f"{path.name} is no file")
    return os.fdopen(descriptor, "rb", buffering=0)


def describe(name: str, tensor: torch.Tensor) -> StoredTensor:
    """Return the entry of a tensor that is to be written: its digest is computed.

    Raises:
        IntegrityError: its elements have a type that is not stored.
    """
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise IntegrityError(f"{name} has elements of type {tensor.dtype}, which are not stored")
    digest = digests.tensor_digest(name, tensor).hex()
    return StoredTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), digest=digest)


def write_tensors(path: Path, tensors: Sequence[torch.Tensor]) -> FileEntry:
    """Write the bytes of tensors, one behind the other; returns what the manifest says of the file.

    Raises:
        OSError: the storage refuses.
    """
    sha256, size_bytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            for piece in _pieces(_bytes_of(tensor)):
                sha256.update(piece)
                _write_all(file, piece)
            size_bytes += tensor.numel() * tensor.element_size()
    return FileEntry(size_bytes=size_bytes, sha256=sha256.hexdigest())


def read_description(
    directory: Path, listed: ManifestPart, version: int, keys: Keys = ()
) -> PartDescription:
    """Return the description of a part whose bytes are those that the manifest lists.

    Raises:
        IntegrityError: it is damaged, or is that of another part.
        OSError: it cannot be read.
    """
    path = directory / listed.name / PART
    data = read_small(path)
    if len(data) != listed.part.size_bytes:
        raise IntegrityError(
            f"{listed.name}/{PART} is torn: {len(data)} bytes, not {listed.part.size_bytes}"
        )
    if hashlib.sha256(data).hexdigest() != listed.part.sha256:
        raise IntegrityError(f"{listed.name}/{PART} does not have its SHA-256")
    found = parse_part(data, keys)
    place = (found.version, found.stage, found.inner, found.file)
    if place != (version, listed.stage, listed.inner, listed.tensors):
        raise IntegrityError(f"{listed.name}/{PART} is that of another part")
    return found


def read_tensors(
    directory: Path,
    listed: ManifestPart,
    described: PartDescription,
    wanted: Mapping[str, torch.Tensor],
) -> None:
    """Read the tensors of a part, once, and fill those that are wanted, in place.

    Raises:
        IntegrityError: a shape or type is not that of the wanted one, or the file is damaged. What
            is in ``wanted`` is void then.
        OSError: it cannot be read.
    """
    for tensor in described.tensors:
        if tensor.name in wanted and not _fits(tensor, wanted[tensor.name]):
            raise IntegrityError(f"{listed.name}: {tensor.name} has another shape or type")

    def place_of(tensor: StoredTensor) -> torch.Tensor | None:
        return wanted.get(tensor.name)

    for _ in walk_tensors(directory, listed, described, place_of):
        pass
    for tensor in described.tensors:
        if tensor.name in wanted:
            digest = digests.tensor_digest(tensor.name, wanted[tensor.name]).hex()
            if digest != tensor.digest:
                raise IntegrityError(f"{listed.name}: {tensor.name} does not have its digest")


def walk_tensors(
    directory: Path,
    listed: ManifestPart,
    described: PartDescription,
    place_of: Callable[[StoredTensor], torch.Tensor | None],
) -> Iterator[tuple[StoredTensor, torch.Tensor | None]]:
    """Read the file of a part's tensors from its beginning; yields each with where it was put.

    Args:
        directory: of the version.
        listed: the part, as the manifest lists it.
        described: the part, as it describes itself.
        place_of: returns the tensor to fill; None skips the bytes.

    Raises:
        IntegrityError: at the end: the file does not have its SHA-256; everything that was yielded
            is void.
        OSError: it cannot be read.
    """
    name = f"{listed.name}/{TENSORS}"
    sha256 = hashlib.sha256()
    scratch = bytearray(min(PIECE_BYTES, listed.tensors.size_bytes))
    with open_file(directory / name) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != listed.tensors.size_bytes:
            raise IntegrityError(
                f"{name} is torn: {size_bytes} bytes, not {listed.tensors.size_bytes}"
            )
        for tensor in described.tensors:
            place = place_of(tensor)
            if place is None:
                _skip(file, tensor.size_bytes, scratch, sha256.update, name)
            else:
                _fill(file, place, sha256.update, name)
            yield tensor, place
    if sha256.hexdigest() != listed.tensors.sha256:
        raise IntegrityError(f"{name} does not have its SHA-256")


def new_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return an empty tensor for what is stored.

    Raises:
        IntegrityError: this torch has no such type, or no tensor of that shape.
    """
    if stored.dtype not in _DTYPES:
        raise IntegrityError(f"{stored.name} has elements of type {stored.dtype}, unknown here")
    try:
        return torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
    except RuntimeError as error:  # no bytes, but strides beyond all numbers
        raise IntegrityError(f"{stored.name} has no possible shape: {brief(error)}") from error


def sync(path: Path) -> None:
    """Return once a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fits(stored: StoredTensor, place: torch.Tensor) -> bool:
    return stored.shape == tuple(place.shape) and stored.dtype == _NAMES.get(place.dtype)


def _fill(
    file: FileIO, place: torch.Tensor, update: Callable[[memoryview], None], name: str
) -> None:
    direct = place.device.type == "cpu" and place.is_contiguous()
    target = place.detach() if direct else torch.empty(place.shape, dtype=place.dtype)
    for piece in _pieces(_bytes_of(target)):
        _read_all(file, piece, name)
        update(piece)
    if not direct:
        with torch.no_grad():
            place.copy_(target)


def _skip(
    file: FileIO,
    size_bytes: int,
    scratch: bytearray,
    update: Callable[[memoryview], None],
    name: str,
) -> None:
    while size_bytes:
        piece = memoryview(scratch)[: min(size_bytes, len(scratch))]
        _read_all(file, piece, name)
        update(piece)
        size_bytes -= len(piece)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, in row-major order; a view if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _read_all(file: FileIO, target: memoryview, name: str) -> None:
    while target:
        count = file.readinto(target)
        if not count:
            raise IntegrityError(f"{name} is torn: it ended while it was read")
        target = target[count:]
