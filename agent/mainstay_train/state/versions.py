"""Looks at one version of a checkpoint on the disk, and removes what is no longer wanted.

A look reads the manifest and compares the files' sizes. Only reading a part compares its digests.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstay_core.base.errors import IntegrityError
from mainstay_core.rank.saving.disk_room import Stored
from mainstay_core.wire.checkpoint_manifest import (
    FORMAT_1,
    MANIFEST,
    MANIFEST_OF_FORMAT_1,
    PART,
    TENSORS,
    FileEntry,
    Manifest,
    ManifestPart,
    PartDescription,
    parse_manifest,
    parse_name,
    parse_part,
    part_name,
    shown,
)
from mainstay_core.wire.plan import Voided, is_void
from mainstay_core.wire.sealed import Keys
from mainstay_train.state.part_files import read_description, read_small, walk_tensors

logger = logging.getLogger(__name__)

NOT_DAMAGE = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EMFILE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
"""What a sound version may answer now and not later: the network or this process is in need."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A version that cannot be gone on from."""

    version: int
    why: str
    format_1: bool = False


def read_manifest(directory: Path, version: int, keys: Keys = ()) -> Manifest:
    """Return the manifest of a version of format 2.

    Raises:
        IntegrityError: it has format 1, or is damaged, or is not signed.
        OSError: it cannot be read.
    """
    if has_format_1(directory):
        raise IntegrityError(FORMAT_1)
    return parse_manifest(read_small(directory / MANIFEST), version, keys)


def has_format_1(directory: Path) -> bool:
    """Return whether a version has format 1, by the name of its manifest alone."""
    names = (directory / MANIFEST_OF_FORMAT_1, directory / MANIFEST)
    return [path.exists() for path in names] == [True, False]


def problem_of(directory: Path, manifest: Manifest) -> str:
    """Return what is wrong with a version at first sight, empty if nothing: files' sizes.

    Raises:
        OSError: a file cannot be looked at.
    """
    for name, entry in manifest.files():
        found = (directory / name).stat().st_size
        if found != entry.size_bytes:
            return f"{name} is torn: {found} bytes, not {entry.size_bytes}"
    return ""


def look_at(directory: Path, version: int, keys: Keys = ()) -> Manifest:
    """Return the manifest of a version that can be gone on from, at first sight.

    Raises:
        IntegrityError: whatever is wrong with it.
    """
    try:
        manifest = read_manifest(directory, version, keys)
        problem = problem_of(directory, manifest)
    except OSError as error:
        raise IntegrityError(reason_of(error, directory)) from error
    if problem:
        raise IntegrityError(problem)
    return manifest


def check_digests(directory: Path, manifest: Manifest, keys: Keys = ()) -> None:
    """Read a version as a whole and compare the SHA-256 of every file.

    Raises:
        IntegrityError: one differs.
        OSError: one cannot be read.
    """
    for part in manifest.parts:
        described = read_description(directory, part, manifest.version, keys)
        for _ in walk_tensors(directory, part, described, lambda _: None):
            pass


def list_part(
    attempt: Path, version: int, nonce: str, place: tuple[int, int], keys: Keys = ()
) -> tuple[ManifestPart, PartDescription]:
    """Return a safely written part of an attempt, as the manifest is to list it.

    The tensors are not read again: their writer has computed the SHA-256 while it wrote them.

    Args:
        attempt: directory of the attempt.
        version: what is attempted.
        nonce: of the quorum in which the attempt was copied.
        place: stage and inner rank of the part.
        keys: one of them must have signed the description, if there are any.

    Raises:
        IntegrityError: the part is damaged, or is that of something else.
        OSError: it cannot be read.
    """
    name = part_name(*place)
    data = read_small(attempt / name / PART)
    described = parse_part(data, keys)
    told = (described.version, described.nonce, (described.stage, described.inner))
    if told != (version, nonce, place):
        raise IntegrityError(f"{name}/{PART} is that of another attempt")
    size_bytes = (attempt / name / TENSORS).stat().st_size
    if size_bytes != described.file.size_bytes:
        raise IntegrityError(
            f"{name}/{TENSORS} is torn: {size_bytes} bytes, not {described.file.size_bytes}"
        )
    entry = FileEntry(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    stage, inner = place
    listed = ManifestPart(stage=stage, inner=inner, part=entry, tensors=described.file)
    return listed, described


def reason_of(error: OSError, directory: Path) -> str:
    """Return what the system says of a file of a version, by its path below the version."""
    name = str(error.filename or "")
    with contextlib.suppress(ValueError):
        name = str(Path(name).relative_to(directory))
    return shown(f"{name}: {error.strerror or error}" if name else str(error))


def remove(path: Path) -> None:
    """Remove a directory that others may be renaming: it leaves its name first, or stays.

    Raises:
        OSError: it cannot be renamed; another process was faster, or the storage refuses.
    """
    named = parse_name(path.name)
    gone = path
    if named is not None and named[1] != "gone":
        gone = path.with_name(f"{path.name.partition('.')[0]}.gone-{secrets.token_hex(6)}")
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def list_good(
    entries: Iterable[tuple[Path, tuple[int, str]]], keys: Keys, voided: Sequence[Voided] = ()
) -> list[Stored]:
    """Return the complete versions that can be read and gone on from, at first sight.

    Args:
        entries: of a directory: path, version and kind of each.
        keys: of keyed digests.
        voided: steps that count no more.
    """
    found = []
    for path, (version, kind) in entries:
        if kind == "":
            with contextlib.suppress(IntegrityError):  # neither counted on nor removed
                manifest = look_at(path, version, keys)
                if is_void(voided, version, manifest.lineage):
                    continue  # it could not be put aside
                found.append(
                    Stored(
                        name=path.name,
                        version=version,
                        size_bytes=manifest.size_bytes,
                        complete=True,
                        exact=not manifest.history,
                    )
                )
    return found


def list_put_aside(entries: Iterable[tuple[Path, tuple[int, str]]]) -> list[Stored]:
    """Return the versions that were put aside as damaged; ``entries`` as of :func:`list_good`."""
    found = []
    for path, (version, kind) in entries:
        if kind == "bad":
            with contextlib.suppress(OSError):
                size_bytes = sum(f.lstat().st_size for f in path.rglob("*"))
                name = path.name
                found.append(
                    Stored(name=name, version=version, size_bytes=size_bytes, complete=False)
                )
    return found


def put_bad_aside(path: Path, why: str) -> None:
    """Give a damaged version another name.

    Raises:
        OSError: the storage refuses.
    """
    aside = path.with_name(f"{path.name}.bad")
    logger.warning("checkpoint %s is damaged and becomes %s: %s", path, aside.name, why)
    if aside.exists():  # a rename would not replace it
        remove(aside)
    path.rename(aside)


def tainted_name(path: Path) -> Path:
    """Return under which name a version is put aside whose steps count no more."""
    return path.with_name(f"{path.name}.tainted-{secrets.token_hex(6)}")


def put_void_aside(
    entries: Iterable[tuple[Path, tuple[int, str]]], voided: Sequence[Voided], keys: Keys
) -> list[tuple[int, str]]:
    """Put the versions aside of steps that count no more.

    They stay on the disk under another name, and are never removed: a person may want to look at
    what was wrong.

    Args:
        entries: as of :func:`list_good`.
        voided: these steps.
        keys: of keyed digests.

    Returns:
        Each version, and what kept it where it is; empty: nothing did.
    """
    found: list[tuple[int, str]] = []
    for path, (version, kind) in entries if voided else ():
        if kind:
            continue
        try:
            manifest = look_at(path, version, keys)
        except IntegrityError:
            continue  # nobody goes on from it
        if not is_void(voided, version, manifest.lineage):
            continue
        problem = ""
        try:
            path.rename(tainted_name(path))
        except OSError as error:
            # Another rank may have been first.
            problem = reason_of(error, path) if path.exists() else ""
        found.append((version, problem))
    return found
