"""Durable checkpoints on the disk: one directory per version, one part per position.

A version is written beside its final name, each part by one rank, and renamed once
the votes say that every part is safe (protocol section 10). Tensors are stored by
model-wide name, so a version can be read with another number of stages. What is torn or
does not have its digest is skipped, and the reason is told.
:mod:`mainstay_core.wire.checkpoint_manifest` says what lies where.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError, OwnershipError
from mainstay_core.planning.program import Op
from mainstay_core.rank.saving.disk_room import Stored, find_clean, find_way_back, plan_room
from mainstay_core.rank.saving.saves import ends_attempt, find_outdated
from mainstay_core.wire.checkpoint_manifest import (
    MANIFEST,
    PART,
    TENSORS,
    Manifest,
    PartDescription,
    differences,
    parse_manifest,
    parse_name,
    part_name,
    shown,
    version_name,
)
from mainstay_core.wire.checkpoint_owner import Owner
from mainstay_core.wire.plan import Voided, is_void
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.sealed import Keys, seal
from mainstay_core.wire.votes import Commit
from mainstay_train.checks.scopes import UNCHECKED, Scope
from mainstay_train.exact.optimizer import StageState
from mainstay_train.state import owner
from mainstay_train.state.chunks import cut_tensors
from mainstay_train.state.heal import masters_digest
from mainstay_train.state.part_files import (
    Describing,
    Part,
    read_description,
    read_tensors,
    sync,
    write_tensors,
)
from mainstay_train.state.versions import (
    NOT_DAMAGE,
    Skipped,
    check_digests,
    has_format_1,
    list_good,
    list_part,
    list_put_aside,
    look_at,
    put_bad_aside,
    put_void_aside,
    read_manifest,
    reason_of,
    remove,
    tainted_name,
)

logger = logging.getLogger(__name__)

_REMOVABLE = ("", "tmp", "gone", "bad")
"""Kinds of entries that go once they are older than what is kept."""

Reached = Callable[[Op], None]
"""Called before each action of a writer."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of a checkpoint that are not tensors."""

    masters: str
    commit: Commit
    commit_chain: str
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class Whose:
    """The job that uses a directory, as its checkpoints name it."""

    owner: Owner
    identity: Mapping[str, str]
    fingerprint: Mapping[str, str]


class AbandonedError(Exception):
    """An attempt was given up, and removed, while this rank still wrote its part."""


def _nothing(_: Op) -> None:
    return None


class CheckpointDirectory:
    """The durable versions of one job.

    Args:
        root: directory shared by all ranks; made when first written.
        whose: the job.
        keep: complete versions that are kept; at least two.
        base: another directory of versions to go on from; only read.
        base_version: the only one there that counts; 0: all do.
        keys: of keyed digests; empty: nothing is signed.
    """

    def __init__(
        self,
        root: Path,
        whose: Whose,
        keep: int = 2,
        base: Path | None = None,
        keys: Keys = (),
        base_version: int = 0,
    ) -> None:
        self._root, self._whose, self._keep = root, whose, max(2, keep)
        self._base, self._base_version, self._keys = base, base_version, keys
        self._unreadable: set[int] = set()
        """Versions found damaged here that could not be put aside."""
        self.voided: tuple[Voided, ...] = ()
        """Steps that count no more: versions of them are passed over."""
        self.clean_at: int | None = None
        """Newest version that no device has tainted: one no later than that stays."""

    def claim(self) -> None:
        """Return once this job may write to the directory.

        Raises:
            OwnershipError: the directory is another job's.
            OSError: the storage refuses.
        """
        owner.claim(self._root, self._whose.owner)

    def look(self, *, anybodys: bool = False) -> tuple[Manifest | None, tuple[Skipped, ...]]:
        """Return the newest version that can be read, and why each newer one is skipped.

        Args:
            anybodys: whether a version of another job counts too.
        """
        skipped: list[Skipped] = []
        for version in self._versions():
            try:
                if version in self._unreadable:
                    raise IntegrityError("it was found damaged, and cannot be put aside")
                manifest = look_at(self._path(version), version, self._keys)
                if not anybodys:
                    self._check_ours(manifest)
                if is_void(self.voided, version, manifest.lineage):
                    continue
                return manifest, tuple(skipped)
            except IntegrityError as error:
                path = self._path(version)
                logger.warning("checkpoint %s is skipped: %s", path, error)
                skipped.append(Skipped(version, str(error), has_format_1(path)))
        return None, tuple(skipped)

    def _check_ours(self, manifest: Manifest) -> None:
        """Raise IntegrityError unless this job can go on from a version, with every difference."""
        wrong = differences(manifest.identity, self._whose.identity)
        wrong = wrong or differences(manifest.fingerprint, self._whose.fingerprint)
        if wrong:
            raise IntegrityError(f"it is of job {shown(manifest.job)}: {'; '.join(wrong)}")

    def write_part(
        self,
        version: int,
        nonce: str,
        part: Part,
        reached: Reached = _nothing,
        room_bytes: int = 0,
    ) -> None:
        """Write and sync a part; an abandoned one of the same name is replaced.

        Every other attempt that this one ends (see
        :func:`~mainstay_core.rank.saving.saves.ends_attempt`) is removed first. If this one fails,
        it is abandoned and removed: without this part it is worth nothing.

        Args:
            version: which one.
            nonce: of the quorum in which the part was copied.
            part: what to write.
            reached: called before each action.
            room_bytes: size of the whole attempt, for which to make room; 0 leaves that to another
                rank.

        Raises:
            OSError: the storage refuses.
            IntegrityError: the tensors do not have the state's digest.
            OwnershipError: the directory is another job's.
            AbandonedError: another rank has given the attempt up meanwhile.
        """
        attempt = self._unfinished(version, nonce)
        reached(Op.CHECKPOINT_WRITE)
        self.claim()
        self._remove_attempts(attempt, lambda other: ends_attempt(nonce, other))
        if room_bytes:
            self._make_room(room_bytes, attempt)
        directory = attempt / part_name(part.stage, part.inner)
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        try:
            self._write_files(directory, version, nonce, part, reached)
        except (OSError, IntegrityError) as error:
            was_there = attempt.exists()
            self.abandon(version, nonce)
            if not was_there:
                raise AbandonedError(f"{attempt.name} is gone") from error
            raise
        reached(Op.CHECKPOINT_SAFE)

    def _write_files(
        self, directory: Path, version: int, nonce: str, part: Part, reached: Reached
    ) -> None:
        describing, chunks = Describing(part.tensors), part.chunks
        if chunks is None:
            chunks = ((chunk, chunk.tensor) for chunk in cut_tensors(part.tensors))
        file = write_tensors(directory / TENSORS, describing.passing(chunks))
        tensors, masters = describing.stored(), describing.masters
        if masters != part.masters:
            raise IntegrityError(f"the copy of version {version} has digest {masters}, not its own")
        description = PartDescription(
            version=version,
            nonce=nonce,
            stage=part.stage,
            inner=part.inner,
            commit=part.commit,
            commit_chain=part.commit_chain,
            tensors=tensors,
            file=file,
            history=part.history,
        )
        (directory / PART).write_bytes(seal(PART, codec.dumps(description), self._keys))
        reached(Op.CHECKPOINT_SYNC)
        for path in (directory / TENSORS, directory / PART, directory, directory.parent):
            sync(path)

    def abandon(self, version: int, nonce: str) -> None:
        """Remove an attempt that can never become complete."""
        with contextlib.suppress(OSError):  # another rank was first
            remove(self._unfinished(version, nonce))

    def _remove_attempts(self, attempt: Path, ends: Callable[[str], bool]) -> None:
        """Remove the other attempts that an attempt ends, by their nonces."""
        for path, (_, kind) in self._entries(self._root):
            if kind == "tmp":
                is_over = path != attempt and ends(path.name.partition(".tmp-")[2])
            else:
                is_over = kind == "gone"
            if is_over:
                with contextlib.suppress(OSError):  # another rank was first
                    remove(path)

    def _make_room(self, needed_bytes: int, attempt: Path) -> None:
        """Remove what stands in the way of the next attempt (``rank/saving/disk_room``).

        Only one rank of a quorum may do this, before it writes.

        Args:
            needed_bytes: of the attempt, as far as this rank knows; the newest version may tell
                more.
            attempt: the one that begins.
        """
        newest, _ = self.look()
        needed_bytes = max(needed_bytes, newest.size_bytes if newest else 0)
        if shutil.disk_usage(self._root).free < needed_bytes:
            # One of a newer quorum may be left from an earlier run: quorums are counted anew then.
            self._remove_attempts(attempt, lambda _: True)
        free_bytes = shutil.disk_usage(self._root).free
        plan = plan_room(
            [*self._good(), *list_put_aside(self._entries(self._root))],
            needed_bytes,
            free_bytes,
            self.clean_at,
        )
        if not plan.remove:
            return
        logger.warning("%s: to make room, %s", plan.reason, ", ".join(plan.remove))
        sound = not plan.verify_first or self._is_sound(newest)
        for name in plan.remove:
            if sound or name.endswith(".bad"):
                with contextlib.suppress(OSError):
                    remove(self._root / name)

    def _is_sound(self, manifest: Manifest | None) -> bool:
        """Whether a version has all its digests; it is read as a whole."""
        if manifest is None:
            return False
        try:
            check_digests(self._path(manifest.version), manifest, self._keys)
        except (IntegrityError, OSError) as error:
            logger.warning("no room is made: checkpoint %d is damaged: %s", manifest.version, error)
            return False
        return True

    def _good(self) -> list[Stored]:
        """The complete versions of this directory that can be read, and count, at first sight."""
        return list_good(self._entries(self._root), self._keys, self.voided)

    def complete(
        self,
        version: int,
        nonce: str,
        places: Sequence[tuple[int, int]],
        lineage: int = 0,
        reached: Reached = _nothing,
    ) -> None:
        """All parts are safe: write the manifest and rename; older versions are removed.

        If the same version of the same history is there already, that is success. One that is
        damaged is put aside.

        Args:
            version: which one.
            nonce: of the quorum in which its parts were copied.
            places: (stage, inner rank) of every part.
            lineage: of the state.
            reached: called before each action.

        Raises:
            OSError: the storage refuses, or the parts are not there.
            IntegrityError: a part is damaged, or is that of another attempt.
            OwnershipError: the directory, or the version in it, is another job's.
            AbandonedError: its steps count no more; the attempt is removed.
        """
        attempt, final = self._unfinished(version, nonce), self._root / version_name(version)
        if is_void(self.voided, version, lineage):
            self.abandon(version, nonce)
            raise AbandonedError("its steps are tainted, and count no more")
        reached(Op.CHECKPOINT_RENAME)
        self.claim()
        parts = [list_part(attempt, version, nonce, place, self._keys) for place in places]
        if len({described.commit_chain for _, described in parts}) != 1:
            raise IntegrityError(f"the parts of {attempt.name} are of different commits")
        manifest = Manifest(
            version=version,
            lineage=lineage,
            commit_chain=parts[0][1].commit_chain,
            job=self._whose.owner.name,
            parts=tuple(listed for listed, _ in parts),
            identity=dict(self._whose.identity),
            fingerprint=dict(self._whose.fingerprint),
            created_at_s=time.time(),
            history=parts[0][1].history,
        )
        data = seal(MANIFEST, codec.dumps(manifest), self._keys)
        parse_manifest(data, version, self._keys)  # what nobody could read is not written
        if self._is_there(final, manifest):
            self.abandon(version, nonce)
            return
        (attempt / MANIFEST).write_bytes(data)
        sync(attempt / MANIFEST)
        sync(attempt)
        attempt.rename(final)
        sync(self._root)
        reached(Op.CHECKPOINT_RENAMED)
        self.put_void_aside()  # one that could not be when the job went back, perhaps
        self._retain()

    def _is_there(self, final: Path, ours: Manifest) -> bool:
        """Whether the very version is there; what else has its name is put aside.

        Raises:
            OwnershipError: it is another job's.
        """
        if not final.exists():
            return False
        try:
            theirs = look_at(final, ours.version, self._keys)
        except IntegrityError as error:
            put_bad_aside(final, str(error))
            return False
        try:
            self._check_ours(theirs)
        except IntegrityError as error:
            raise OwnershipError(f"{final} stands in the way: {error}") from error
        if is_void(self.voided, theirs.version, theirs.lineage):
            final.rename(tainted_name(final))
            return False
        if (theirs.lineage, theirs.commit_chain) != (ours.lineage, ours.commit_chain):
            put_bad_aside(final, "it has another history of commits")
            return False
        return True

    def put_void_aside(self) -> list[tuple[int, str]]:
        """Put versions aside of steps that count no more (:func:`put_void_aside`)."""
        return put_void_aside(self._entries(self._root), self.voided, self._keys)

    def load(self, version: int, state: StageState, within: Scope = UNCHECKED) -> Loaded:
        """Read a version into ``state``, check every digest, and cast ``within`` a scope.

        Raises:
            IntegrityError: it is damaged, and is put aside now.
            OSError: the storage is in need just now, or another rank has put the version aside.
        """
        path = self._path(version)
        try:
            return self._load(path, version, state, within)
        except IntegrityError as error:
            raise self._refused(version, str(error)) from error
        except OSError as error:
            if error.errno in NOT_DAMAGE or not path.exists():
                raise
            raise self._refused(version, reason_of(error, path)) from error

    def _load(self, path: Path, version: int, state: StageState, within: Scope) -> Loaded:
        manifest = read_manifest(path, version, self._keys)
        wanted = {t.id: t.tensor for t in state.state_tensors()}
        missing = set(wanted)
        commits: dict[str, tuple[Commit, str, History]] = {}
        for listed in manifest.parts:
            described = read_description(path, listed, version, self._keys)
            told = (described.commit, described.commit_chain, described.history)
            commits[codec.dumps(told)] = told
            own = {t.name: wanted[t.name] for t in described.tensors if t.name in wanted}
            if own:
                read_tensors(path, listed, described, own)
                missing -= set(own)
        if missing:
            raise IntegrityError(f"it lacks {sorted(missing)[:3]}")
        if len(commits) != 1:
            raise IntegrityError("its parts are of different commits")
        with within:
            state.refresh()
        return Loaded(masters_digest(state), *next(iter(commits.values())))

    def _refused(self, version: int, why: str) -> IntegrityError:
        """Put a damaged version aside, for all ranks: a settle must not choose it again."""
        path = self._path(version)
        try:
            if path.parent == self._root:
                put_bad_aside(path, why)
            else:
                self._root.mkdir(parents=True, exist_ok=True)
                (self._root / f"{path.name}.refused").write_text(why)
        except OSError as error:
            if path.exists():
                logger.warning("%s cannot be put aside: %s", path, error)
                self._unreadable.add(version)
        return IntegrityError(why)

    def _entries(self, root: Path) -> list[tuple[Path, tuple[int, str]]]:
        """What lies in a directory and has a name of ours; nothing if it cannot be listed."""
        try:
            found = [(path, parse_name(path.name)) for path in root.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            logger.warning("%s cannot be listed: %s", root, error)
            return []
        return [(path, named) for path, named in found if named is not None]

    def _versions(self) -> list[int]:
        """Of both directories, newest first, whatever is in them."""
        own = {version for _, (version, kind) in self._entries(self._root) if kind == ""}
        if self._base is None:
            return sorted(own, reverse=True)
        refused = {v for _, (v, kind) in self._entries(self._root) if kind in ("refused", "bad")}
        only = self._base_version
        base = {v for _, (v, kind) in self._entries(self._base) if not kind and only in (0, v)}
        return sorted(own | (base - refused), reverse=True)

    def _retain(self) -> None:
        """Remove what no settle can choose any more: older than all that are kept, and readable.

        A torn version does not count as kept.
        """
        good = self._good()  # an earlier run's stand in until there are enough of our own
        outdated = find_outdated([s.version for s in good], self._keep)
        stay = {find_way_back(good), find_clean(good, self.clean_at)}
        for path, (version, kind) in self._entries(self._root):
            limit = outdated.unfinished if kind in ("tmp", "gone") else outdated.complete
            stays = kind == "" and version in stay
            if not stays and version <= limit and kind in _REMOVABLE:
                with contextlib.suppress(OSError):
                    remove(path)

    def _path(self, version: int) -> Path:
        """Where a version is: here, or where it was taken over from."""
        own = self._root / version_name(version)
        if self._base is None or own.exists():
            return own
        return self._base / version_name(version)

    def _unfinished(self, version: int, nonce: str) -> Path:
        return self._root / f"{version_name(version)}.tmp-{nonce}"
