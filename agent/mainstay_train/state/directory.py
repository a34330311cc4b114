"""Durable checkpoints on the disk: one directory per version, one part per position.

A version is written beside its final name, each part by one rank, and renamed once
the votes say that every part is safe (protocol section 10). Tensors are stored by
model-wide name with torch.distributed.checkpoint, so a version can be read with
another number of stages. What is torn or does not have its digest is skipped with a
warning. :mod:`mainstay_core.wire.checkpoint_manifest` says what lies where.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mainstay_core.base import codec
from mainstay_core.base.digest import total
from mainstay_core.base.errors import IntegrityError, MainstayError, brief
from mainstay_core.planning.program import Op
from mainstay_core.rank.saves import find_outdated
from mainstay_core.wire.checkpoint_manifest import (
    MANIFEST,
    PART,
    Manifest,
    parse_manifest,
    parse_name,
    part_name,
    version_name,
)
from mainstay_core.wire.votes import Commit
from mainstay_train.exact import digests
from mainstay_train.exact.optimizer import StageState
from mainstay_train.state.heal import masters_digest

logger = logging.getLogger(__name__)

# One process per part is what we want; the library warns of it at each call.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")

Reached = Callable[[Op], None]
"""Called before each action of a writer."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of a checkpoint that are not tensors."""

    masters: str
    commit: Commit
    commit_chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One position's share of a version."""

    stage: int
    inner: int = 0
    tensors: Mapping[str, torch.Tensor]
    """By id; on the host, unchanging while they are written."""
    commit: Commit
    """Of the last step applied."""
    commit_chain: str
    masters: str
    """Digest that the masters among the tensors must have."""


def _nothing(_: Op) -> None:
    return None


class CheckpointDirectory:
    """The durable versions of one job.

    Args:
        root: directory shared by all ranks; made when first written.
        keep: complete versions that are kept; at least two.
        base: another directory of versions to go on from; only read.
    """

    def __init__(self, root: Path, keep: int = 2, base: Path | None = None) -> None:
        self._root, self._keep, self._base = root, max(2, keep), base

    def newest_complete(self) -> int:
        """Newest version that can be read; 0 when there is none."""
        for version in sorted(self._versions(), reverse=True):
            problem = self._problem(version)
            if problem is None:
                return version
            logger.warning("checkpoint %s is skipped: %s", self._path(version), problem)
        return 0

    def manifest(self, version: int) -> Manifest:
        """Return a version's manifest.

        Raises:
            IntegrityError: it cannot be read.
            OSError: it is not there.
        """
        return parse_manifest((self._path(version) / MANIFEST).read_text())

    def write_part(self, version: int, nonce: str, part: Part, reached: Reached = _nothing) -> None:
        """Write and sync a part; an abandoned one of the same name is replaced.

        Raises:
            OSError: the storage refuses.
            IntegrityError: the tensors do not have the state's digest.
        """
        directory = self._unfinished(version, nonce) / part_name(part.stage, part.inner)
        reached(Op.CHECKPOINT_WRITE)
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        # Before they are written: the library turns what it is given into its own entries.
        sums = {n: digests.tensor_digest(n, t) for n, t in part.tensors.items()}
        masters = total(d for n, d in sums.items() if n.startswith("master:")).hex()
        if masters != part.masters:
            raise IntegrityError(f"the copy of version {version} has digest {masters}, not its own")
        writer = dcp.FileSystemWriter(directory, sync_files=False)
        try:
            dcp.save(dict(part.tensors), storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:  # the library's wrapping of what it met
            causes = [failure[0] for failure in error.failures.values()]
            raise _refusal(causes) from error
        description = {
            "version": version,
            "stage": part.stage,
            "inner": part.inner,
            "commit": codec.encode(part.commit),
            "chain": part.commit_chain,
            "masters": masters,
            "tensors": {n: d.hex() for n, d in sums.items()},
        }
        (directory / PART).write_text(json.dumps(description))
        reached(Op.CHECKPOINT_SYNC)
        for path in directory.iterdir():
            _sync(path)
        _sync(directory)
        _sync(directory.parent)
        reached(Op.CHECKPOINT_SAFE)

    def complete(
        self, version: int, nonce: str, manifest: Manifest, reached: Reached = _nothing
    ) -> None:
        """All parts are safe: write the manifest and rename; older versions are removed.

        Renaming a version that exists is success: its bits are the same.

        Args:
            version: which one.
            nonce: of the quorum in which its parts were copied.
            manifest: names the parts and the job; sizes and time are filled in here.
            reached: called before each action.

        Raises:
            OSError: the storage refuses, or the parts are not there.
        """
        unfinished, final = self._unfinished(version, nonce), self._root / version_name(version)
        reached(Op.CHECKPOINT_RENAME)
        if final.exists():
            return
        files = {
            str(path.relative_to(unfinished)): path.stat().st_size
            for name in manifest.parts
            for path in sorted((unfinished / name).iterdir())
        }
        manifest = replace(manifest, version=version, files=files, created_at_s=time.time())
        (unfinished / MANIFEST).write_text(codec.dumps(manifest))
        _sync(unfinished / MANIFEST)
        _sync(unfinished)
        unfinished.rename(final)
        _sync(self._root)
        reached(Op.CHECKPOINT_RENAMED)
        self._retain()

    def load(self, version: int, state: StageState) -> Loaded:
        """Read a version into ``state`` and check every tensor's digest.

        Raises:
            IntegrityError: a tensor is missing or differs; the version is put aside.
            OSError: the storage refuses.
        """
        wanted = {t.id: t.tensor for t in state.state_tensors()}
        missing = set(wanted)
        commit, chain = None, ""
        for name in self.manifest(version).parts:
            part = self._path(version) / name
            expected, commit, chain = self._description(version, part)
            own = {n: wanted[n] for n in expected if n in wanted}
            if own:
                self._read(version, part, own, expected)
                missing -= set(own)
        if missing or commit is None:
            raise self._refused(version, f"checkpoint {version} lacks {sorted(missing)[:3]}")
        state.refresh()
        return Loaded(masters_digest(state), commit, chain)

    def _description(self, version: int, part: Path) -> tuple[dict[str, str], Commit, str]:
        try:
            return read_description(part)
        except IntegrityError as error:
            raise self._refused(version, str(error)) from error

    def _read(
        self, version: int, part: Path, own: dict[str, torch.Tensor], expected: dict[str, str]
    ) -> None:
        try:
            read_tensors(part, own)
        except IntegrityError as error:
            raise self._refused(version, str(error)) from error
        for name, tensor in own.items():
            if digests.tensor_digest(name, tensor).hex() != expected[name]:
                raise self._refused(version, f"{part}: {name} does not have its digest")

    def _refused(self, version: int, why: str) -> IntegrityError:
        """Put a damaged version aside, for all ranks: a settle must not choose it again."""
        path = self._path(version)
        own = path.parent == self._root
        aside = self._root / f"{path.name}.{'bad' if own else 'refused'}"
        logger.warning("checkpoint %s is damaged and becomes %s: %s", path, aside.name, why)
        if own:
            with contextlib.suppress(OSError):  # another rank was first
                path.rename(aside)
        else:
            self._root.mkdir(parents=True, exist_ok=True)
            aside.write_text(why)
        return IntegrityError(why)

    def _entries(self, root: Path, kind: str) -> list[int]:
        if not root.is_dir():
            return []
        named = (parse_name(path.name) for path in root.iterdir())
        return [version for version, what in filter(None, named) if what == kind]

    def _versions(self) -> set[int]:
        """Of both directories, whatever is in them."""
        own = set(self._entries(self._root, ""))
        if self._base is None:
            return own
        refused = {*self._entries(self._root, "refused"), *self._entries(self._root, "bad")}
        return own | (set(self._entries(self._base, "")) - refused)

    def _problem(self, version: int) -> str | None:
        try:
            return problem_of(self._path(version), self.manifest(version))
        except (OSError, MainstayError) as error:
            return str(error)

    def _retain(self) -> None:
        """Remove what no settle can choose any more: older than all that are kept, and readable.

        A torn version does not count as kept.
        """
        good = [v for v in self._entries(self._root, "") if self._problem(v) is None]
        # An earlier run's versions stand in until there are enough of our own.
        outdated = find_outdated(good, self._keep)
        for path in self._root.iterdir():
            version, kind = parse_name(path.name) or (-1, "")
            limit = outdated.unfinished if kind == "tmp" else outdated.complete
            if 0 <= version <= limit and kind in ("", "tmp", "bad"):
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, version: int) -> Path:
        """Where a version is: here, or where it was taken over from."""
        own = self._root / version_name(version)
        if self._base is None or own.exists():
            return own
        return self._base / version_name(version)

    def _unfinished(self, version: int, nonce: str) -> Path:
        return self._root / f"{version_name(version)}.tmp-{nonce}"


def problem_of(directory: Path, manifest: Manifest) -> str | None:
    """Return what is wrong with a version at first sight: a file that is missing or torn.

    Raises:
        OSError: a file cannot be looked at.
    """
    for name, size in manifest.files.items():
        found = (directory / name).stat().st_size
        if found != size:
            return f"{name} is torn: {found} bytes, not {size}"
    return None


def read_description(part: Path) -> tuple[dict[str, str], Commit, str]:
    """Return digests by tensor id, the last commit and the commit chain of a part.

    Raises:
        IntegrityError: it cannot be read.
    """
    try:
        description = json.loads((part / PART).read_text())
        commit = codec.decode(Commit, description["commit"])
        return dict(description["tensors"]), commit, str(description["chain"])
    except (OSError, ValueError, KeyError, TypeError, MainstayError) as error:
        raise IntegrityError(f"{part / PART} cannot be read: {error}") from error


def read_tensors(part: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Read tensors of a part into ``wanted``, in place.

    Raises:
        IntegrityError: they cannot be read.
    """
    try:
        dcp.load(wanted, checkpoint_id=str(part), no_dist=True)
    except (RuntimeError, ValueError, EOFError, KeyError, dcp.CheckpointException) as error:
        raise IntegrityError(f"{part} cannot be read: {brief(error)}") from error


def stored_tensors(part: Path) -> dict[str, torch.Tensor]:
    """Return empty tensors of all ids, shapes and types that a part's own metadata names.

    Raises:
        IntegrityError: it cannot be read.
    """
    try:
        metadata = dcp.FileSystemReader(part).read_metadata()
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except Exception as error:  # unpickling damaged bytes raises anything
        raise IntegrityError(f"{part} has no readable metadata: {error}") from error


def new_manifest(
    job: str,
    positions: Iterable[tuple[int, int]],
    identity: Mapping[str, str],
    fingerprint: Mapping[str, str],
    lineage: int = 0,
) -> Manifest:
    """Return a manifest whose version, sizes and time are not known yet."""
    parts: Sequence[str] = [part_name(stage, inner) for stage, inner in positions]
    return Manifest(
        version=0,
        lineage=lineage,
        job=job,
        parts=tuple(parts),
        files={},
        identity=dict(identity),
        fingerprint=dict(fingerprint),
    )


def _refusal(causes: Sequence[BaseException]) -> OSError:
    """The storage's own error under those that a library raised on the way."""
    for cause in causes:
        found: BaseException | None = cause
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        if found is not None:
            return found
    return OSError(brief(causes[0]) if causes else "the checkpoint library failed")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
