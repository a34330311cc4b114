"""Durable checkpoints: one directory per version, one part per stage.

A version is written beside its final name, by one rank per stage, and renamed
once the votes say that every part is safe (protocol section 10). Tensors are
stored by model-wide name, so a version can be read with another number of
stages. What is torn or does not have its digest is skipped with a warning.

::

    <root>/step-00000020.tmp-<nonce>/stage-0/{part.json, DCP files}
    <root>/step-00000020/{manifest.json, stage-0/, stage-1/}
    <root>/step-00000010.bad/ (damaged: put aside by whoever found it)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from mainstay_core import codec
from mainstay_core.errors import IntegrityError, MainstayError
from mainstay_core.messages import Commit
from mainstay_train import digests
from mainstay_train.heal import masters_digest
from mainstay_train.optimizer import StageState

logger = logging.getLogger(__name__)

MANIFEST, PART = "manifest.json", "part.json"
_COMPLETE = re.compile(r"^step-(\d{8})$")
_UNFINISHED = re.compile(r"^step-(\d{8})\.tmp-")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint says beside its tensors."""

    masters: str
    commit: Commit
    chain: str


class CheckpointDirectory:
    """The durable versions of one job.

    Args:
        root: directory shared by all ranks; made when first written.
        keep: complete versions that are kept; at least two.
    """

    def __init__(self, root: Path, keep: int = 2) -> None:
        self._root, self._keep = root, max(2, keep)

    def newest_complete(self) -> int:
        """Newest version that can be read; 0 when there is none."""
        for version in sorted(self._versions(), reverse=True):
            problem = self._problem(version)
            if problem is None:
                return version
            logger.warning("checkpoint %s is skipped: %s", self._path(version), problem)
        return 0

    def write_part(
        self, version: int, nonce: str, stage: int, state: StageState, commit: Commit, chain: str
    ) -> None:
        """Write and sync this stage's part; an abandoned one of the same name is replaced.

        Raises:
            OSError: the storage refuses.
        """
        part = self._unfinished(version, nonce) / f"stage-{stage}"
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        tensors = {t.id: t.tensor for t in state.state_tensors()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one writer per part is what we want
            dcp.save(tensors, checkpoint_id=str(part), no_dist=True)
        description = {
            "version": version,
            "stage": stage,
            "commit": codec.encode(commit),
            "chain": chain,
            "masters": masters_digest(state),
            "tensors": {n: digests.tensor_digest(n, t).hex() for n, t in tensors.items()},
        }
        (part / PART).write_text(json.dumps(description))
        for path in part.iterdir():
            _sync(path)
        _sync(part)

    def complete(self, version: int, nonce: str, num_stages: int) -> None:
        """All parts are safe: write the manifest and rename; older versions are removed.

        Renaming a version that exists is success: its bits are the same.

        Raises:
            OSError: the storage refuses.
        """
        unfinished, final = self._unfinished(version, nonce), self._path(version)
        if final.exists() or not unfinished.exists():
            return
        stages = [f"stage-{s}" for s in range(num_stages)]
        files = {
            str(path.relative_to(unfinished)): path.stat().st_size
            for name in stages
            for path in sorted((unfinished / name).iterdir())
        }
        manifest = {"version": version, "stages": stages, "files": files}
        (unfinished / MANIFEST).write_text(json.dumps(manifest))
        _sync(unfinished / MANIFEST)
        _sync(unfinished)
        unfinished.rename(final)
        _sync(self._root)
        self._retain(version)

    def load(self, version: int, state: StageState) -> Loaded:
        """Read a version into ``state`` and check every tensor's digest.

        Raises:
            IntegrityError: a tensor is missing or differs; the version is put aside.
            OSError: the storage refuses.
        """
        wanted = {t.id: t.tensor for t in state.state_tensors()}
        missing = set(wanted)
        commit, chain = None, ""
        for name in self._manifest(version)["stages"]:
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
        """Digests by tensor id, the last commit and the digest chain of a part."""
        try:
            description = json.loads((part / PART).read_text())
            commit = codec.decode(Commit, description["commit"])
            return dict(description["tensors"]), commit, str(description["chain"])
        except (ValueError, KeyError, TypeError, MainstayError) as error:
            raise self._refused(version, f"{part / PART} cannot be read: {error}") from error

    def _read(
        self, version: int, part: Path, own: dict[str, torch.Tensor], expected: dict[str, str]
    ) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(own, checkpoint_id=str(part), no_dist=True)
        except (RuntimeError, ValueError, EOFError, dcp.CheckpointException) as error:
            brief = str(error).strip().splitlines()[0]  # the library adds whole tracebacks
            raise self._refused(version, f"{part} cannot be read: {brief}") from error
        for name, tensor in own.items():
            if digests.tensor_digest(name, tensor).hex() != expected[name]:
                raise self._refused(version, f"{part}: {name} does not have its digest")

    def _refused(self, version: int, why: str) -> IntegrityError:
        """Put a damaged version aside, for all ranks: a settle must not choose it again."""
        path = self._path(version)
        aside = path.with_name(f"{path.name}.bad")
        logger.warning("checkpoint %s is damaged and becomes %s: %s", path, aside.name, why)
        with contextlib.suppress(OSError):  # another rank was first
            path.rename(aside)
        return IntegrityError(why)

    def _versions(self) -> list[int]:
        if not self._root.is_dir():
            return []
        found = (_COMPLETE.match(path.name) for path in self._root.iterdir())
        return [int(match[1]) for match in found if match]

    def _problem(self, version: int) -> str | None:
        try:
            manifest = self._manifest(version)
            for name, size in manifest["files"].items():
                if (self._path(version) / name).stat().st_size != size:
                    return f"{name} is torn"
        except (OSError, ValueError, KeyError, MainstayError) as error:
            return str(error)
        return None

    def _manifest(self, version: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self._path(version) / MANIFEST).read_text())
        return content

    def _retain(self, newest: int) -> None:
        kept = sorted(self._versions(), reverse=True)[: self._keep]
        for version in self._versions():
            if version not in kept:
                shutil.rmtree(self._path(version), ignore_errors=True)
        for path in self._root.iterdir():
            match = _UNFINISHED.match(path.name)
            if match and int(match[1]) <= newest:
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._root / f"step-{version:08d}"

    def _unfinished(self, version: int, nonce: str) -> Path:
        return self._root / f"step-{version:08d}.tmp-{nonce}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
