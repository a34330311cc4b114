"""Reads and writes the files of one part of a checkpoint: raw tensors, and what describes them.

The file of the tensors has nothing to parse: the bytes of one tensor follow those of the one
before. It is read once, from its beginning to its end. Its SHA-256 is computed on the way, and
whoever reads uses no tensor of it before that is right.

What goes to a device, and what is written of a state, passes in pieces: neither way needs host
memory that grows with a tensor.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from mainstay_core.base.digest import Digest
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
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.sealed import MAX_SEALED_BYTES, Keys
from mainstay_core.wire.votes import Commit
from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment
from mainstay_train.exact.optimizer import StateTensor
from mainstay_train.state.chunks import Chunk
from mainstay_train.sums import digests

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
    digest = digests.tensor_digest(name, tensor).hex()
    return StoredTensor(
        name=name, dtype=_stored_type(name, tensor), shape=tuple(tensor.shape), digest=digest
    )


def _stored_type(name: str, tensor: torch.Tensor) -> str:
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise IntegrityError(f"{name} has elements of type {tensor.dtype}, which are not stored")
    return dtype


class Describing:
    """Computes the digests of a state's tensors from chunks that pass on their way to a file.

    Args:
        tensors: the state; only their names, types and shapes are used.

    Raises:
        IntegrityError: elements of some tensor have a type that is not stored.
    """

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self._tensors = {t.id: t for t in tensors}
        self._types = {t.id: _stored_type(t.id, t.tensor) for t in tensors}
        self._digests = {t.id: Digest.zero() for t in tensors}
        self._passed = dict.fromkeys(self._tensors, 0)
        """Elements of each tensor that have passed."""
        self._masters = Digest.zero()

    def passing(self, chunks: Iterable[tuple[Chunk, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Yield the copy of each chunk, once it is described."""
        for chunk, copied in chunks:
            name = chunk.flat.id
            tensor = self._tensors[name]
            digest = digests.tensor_digest(name, copied, chunk.start)
            self._digests[name] += digest
            self._passed[name] += copied.numel()
            if tensor.kind == "master":
                if tensor.part is not None:
                    digest = tensor.part.piece_digest(tensor.kind, copied, chunk.start)
                self._masters += digest
            yield copied

    @property
    def masters(self) -> str:
        """Digest of the masters that have passed."""
        return self._masters.hex()

    def stored(self) -> tuple[StoredTensor, ...]:
        """Return the entries of the tensors, in their order.

        Raises:
            IntegrityError: not all of their elements have passed.
        """
        for name, passed in self._passed.items():
            if passed != self._tensors[name].tensor.numel():
                raise IntegrityError(f"{name} was copied in part: {passed} elements of it")
        return tuple(
            StoredTensor(
                name=name,
                dtype=self._types[name],
                shape=tuple(tensor.tensor.shape),
                digest=self._digests[name].hex(),
            )
            for name, tensor in self._tensors.items()
        )


def write_tensors(path: Path, tensors: Iterable[torch.Tensor]) -> FileEntry:
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


class Passage:
    """Host memory of two pieces before a device: one is filled while the other is copied there.

    Args:
        device: where the pieces go.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._both = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)
        ]
        self._gone: list[Moment | None] = [None, None]
        self._turn = 0

    def memory(self, size_bytes: int) -> memoryview:
        """Return the memory for the next piece, once what was there is on the device."""
        self._turn = 1 - self._turn
        gone = self._gone[self._turn]
        if gone is not None:
            gone.wait()
        return _bytes_of(self._both[self._turn][:size_bytes])

    def send(self, place: torch.Tensor) -> None:
        """Copy the piece to its place; the device may do so later."""
        piece = self._both[self._turn][: place.numel() * place.element_size()]
        with torch.no_grad():
            place.copy_(piece.view(place.dtype), non_blocking=True)
        self._gone[self._turn] = devices.moment(place.device)


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
    passages: dict[torch.device, Passage] = {}
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
                _fill(file, place, sha256.update, name, passages)
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
    file: FileIO,
    place: torch.Tensor,
    update: Callable[[memoryview], None],
    name: str,
    passages: dict[torch.device, Passage],
) -> None:
    assert place.is_contiguous(), "a state's tensors are, and those that are made for reading"
    if place.device.type != "cpu":
        if place.device not in passages:
            passages[place.device] = Passage(place.device)
        read_through(file, place, update, name, passages[place.device])
        return
    for piece in _pieces(_bytes_of(place)):
        _read_all(file, piece, name)
        update(piece)


def read_through(
    file: FileIO,
    place: torch.Tensor,
    update: Callable[[memoryview], None],
    name: str,
    passage: Passage,
) -> None:
    """Fill a tensor of a device from a file, by way of host memory.

    Args:
        file: at the tensor's first byte.
        place: contiguous.
        update: is given each piece.
        name: of the file.
        passage: before the device.

    Raises:
        IntegrityError: the file ends first.
        OSError: it cannot be read.
    """
    flat = place.detach().reshape(-1)
    step = PIECE_BYTES // place.element_size()
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        piece = passage.memory(part.numel() * part.element_size())
        _read_all(file, piece, name)
        update(piece)
        passage.send(part)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One position's share of a version."""

    stage: int
    inner: int = 0
    tensors: Sequence[StateTensor]
    """Their names, types and shapes; their elements where ``chunks`` does not have these."""
    chunks: Iterable[tuple[Chunk, torch.Tensor]] | None = None
    """Their elements on the host, in their order; None: those of ``tensors``, which do not change
    while they are written."""
    commit: Commit
    """Of the last step applied."""
    commit_chain: str
    masters: str
    """Digest that the masters among the tensors must have."""
    history: History = ()
    """Forks that the state contains."""
