"""Loads and writes durable checkpoints for a trainer's session.

The state machine says when (:mod:`mainstay_core.rank.checkpoints`), the directory knows how
they lie on the disk (:mod:`mainstay_train.state.directory`), a thread writes
(:mod:`mainstay_train.base.background`). Storage that refuses costs a checkpoint, never a
step: it is told, and training goes on.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mainstay_core.base.errors import IntegrityError, InvalidSpecError, OwnershipError, brief
from mainstay_core.job.config import JobConfig
from mainstay_core.rank import events
from mainstay_core.rank.saving.own_saves import OwnSaves
from mainstay_core.rank.saving.saves import name_attempt
from mainstay_core.wire.checkpoint_manifest import FORMAT_1, differences, identity_of
from mainstay_core.wire.checkpoint_owner import Owner
from mainstay_core.wire.plan import Plan, Voided
from mainstay_core.wire.sealed import KEY_FILE_VARIABLE
from mainstay_core.wire.votes import SaveStatus
from mainstay_train.base import checkpoint_key
from mainstay_train.base.background import Background
from mainstay_train.compute.engine import Engine
from mainstay_train.state.directory import (
    AbandonedError,
    CheckpointDirectory,
    Reached,
    Whose,
)
from mainstay_train.state.heal import masters_digest
from mainstay_train.state.host_copy import HostCopy
from mainstay_train.state.owner import has_versions_of_others
from mainstay_train.state.part_files import Part

logger = logging.getLogger(__name__)

_REMEDIES = {
    errno.ENOSPC: "; free some room there",
    errno.EDQUOT: "; free some room there, or raise the quota",
    errno.EMFILE: "; allow trainers more descriptors (ulimit -n)",
    errno.ENFILE: "; allow this machine more descriptors (fs.file-max)",
}
"""What to do about a storage's refusal, where its own words do not say."""

OnOutcome = Callable[[int, str], None]
"""(newest complete version, why one is late or failed: empty when it is complete)."""


class Checkpointing:
    """The durable versions of a job, as one of its trainers uses them.

    Args:
        config: the job; says where they are.
        report: called, in the writing thread, with what became of a version.
    """

    def __init__(self, config: JobConfig, report: OnOutcome) -> None:
        self._config, self._report = config, report
        self._directory: CheckpointDirectory | None = None
        self._told: set[int] = set()
        """Versions that were told to be skipped."""
        self._background = Background("checkpoints")
        self._copy: HostCopy | None = None
        self._saves = OwnSaves()
        self._went_back = 0
        """Lineage of the newest steps that count no more: parts of later ones count."""
        self._changing = threading.Lock()

    @property
    def every_steps(self) -> int:
        """Steps between two versions; 0 for a job that writes none."""
        return self._config.shape.checkpoint_every_steps if self._config.checkpoint_dir else 0

    def start(self, fingerprint: Mapping[str, str]) -> int:
        """Take up what is there, if it fits this job; returns the newest version.

        Args:
            fingerprint: numerics fingerprint of this trainer.

        Raises:
            InvalidSpecError: the directory is another job's, or holds another job's checkpoints or
                ones of format 1, or there is none to go on from, or the key is missing.
        """
        if not self._config.checkpoint_dir:
            return 0
        self._directory = directory = self._open(fingerprint)
        field = "checkpoint.resumeFrom" if self._config.resume_from else "checkpoint.storage"
        where = self._config.resume_from or self._config.checkpoint_dir
        storage = Path(self._config.checkpoint_dir)
        if self._config.resume_version and has_versions_of_others(storage, self._owner()):
            raise InvalidSpecError(
                "checkpoint.storage",
                f"{storage} has checkpoints of an earlier job, which would "
                f"count before step {self._config.resume_version} of {where}; with resumeVersion "
                "give the job a storage without any",
            )
        newest, skipped = directory.look(anybodys=True)
        for older in skipped:
            if older.format_1:
                raise InvalidSpecError(field, f"step {older.version} in {where} {FORMAT_1}")
        if newest is None and self._config.resume_from:
            why = "".join(f"; step {s.version}: {s.why}" for s in skipped)
            wanted = self._config.resume_version
            of_step = f" of step {wanted}" if wanted else ""
            raise InvalidSpecError(
                field, f"{where} has no checkpoint{of_step} that can be read{why}"
            )
        if newest is not None:
            wrong = differences(newest.identity, identity_of(self._config))
            wrong = wrong or differences(newest.fingerprint, fingerprint)
            if wrong:
                raise InvalidSpecError(
                    field,
                    f"step {newest.version} in {where} is another job's: {'; '.join(wrong)}; only "
                    "a job that computes the same bits can go on from it",
                )
        if self.every_steps:
            self._claim(directory)
        return self.newest_complete()

    def _open(self, fingerprint: Mapping[str, str]) -> CheckpointDirectory:
        config, keys = self._config, checkpoint_key.read()
        if config.checkpoint_signed and not keys:
            raise InvalidSpecError(
                "checkpoint.keySecret",
                f"asks for signed checkpoints, and this trainer has no key: {KEY_FILE_VARIABLE} "
                "must name a file with one",
            )
        return CheckpointDirectory(
            Path(config.checkpoint_dir),
            Whose(
                owner=self._owner(),
                identity=identity_of(config),
                fingerprint=fingerprint,
            ),
            config.checkpoint_keep,
            Path(config.resume_from) if config.resume_from else None,
            keys,
            config.resume_version,
        )

    def _owner(self) -> Owner:
        config = self._config
        return Owner(
            uid=config.job,
            name=config.name,
            namespace=config.namespace,
            claimed_at_s=time.time(),
        )

    def _claim(self, directory: CheckpointDirectory) -> None:
        try:
            directory.claim()
        except OwnershipError as error:
            raise InvalidSpecError("checkpoint.storage", str(error)) from error
        except OSError as error:  # each attempt to write will try again, and tell
            logger.warning("%s is not claimed: %s", self._config.checkpoint_dir, error)

    def newest_complete(self) -> int:
        """Newest version that can be read; 0 is the seed's initial state.

        A newer one that cannot be read is told, once.
        """
        manifest, skipped = self._directory.look() if self._directory else (None, ())
        newest = manifest.version if manifest else 0
        self._note(lambda saves: saves.found(newest))
        for version in skipped:
            self._tell_skipped(version.version, version.why)
        return newest

    def _tell_skipped(self, version: int, why: str) -> None:
        if version not in self._told:
            self._told.add(version)
            text = f"the checkpoint of step {version} is skipped: {why}"
            self._report(self._saves.status.durable, text)

    def status(self) -> SaveStatus:
        """What to say of this rank's writing in a vote."""
        busy = self._background.busy  # first: what it did until now is then in the status
        return self._saves.told(busy=busy)

    def wait_idle(self) -> SaveStatus:
        """Return what to say once nothing is being written any more."""
        self._background.wait_idle()
        return self.status()

    def load(self, engine: Engine, version: int) -> events.StateLoaded | events.LoadFailed:
        """Read a version into the engine's state: StateLoaded or LoadFailed.

        Raises:
            InvalidSpecError: the job should have gone on from an earlier run's version, and
                none of them is good.
        """
        self.wait_copied()
        if version == 0 and self._config.resume_from:
            raise InvalidSpecError(
                "checkpoint.resumeFrom",
                f"no checkpoint in {self._config.resume_from} is good; see what `mainstay "
                "checkpoints verify` says of them",
            )
        if version == 0:
            with engine.checks.over_state():
                engine.state.initialize(self._config.shape.seed)
            return events.StateLoaded(masters_digest(engine.state), None, "", ())
        assert self._directory is not None
        try:
            loaded = self._directory.load(version, engine.state, engine.checks.over_state())
        except (IntegrityError, OSError) as error:
            self._tell_skipped(version, str(error))
            return events.LoadFailed(str(error))
        return events.StateLoaded(
            loaded.masters, loaded.commit, loaded.commit_chain, loaded.history
        )

    def write(
        self,
        action: events.WriteCheckpoint,
        engine: Engine,
        plan: Plan,
        index: int,
        masters: str,
        reached: Reached,
    ) -> None:
        """Copy this position's part, as it is now, and write it in the background.

        Whoever changes the state afterwards calls :meth:`wait_copied` first.

        Args:
            action: version, last commit and commit chain.
            engine: has the state.
            plan: names the attempt.
            index: of this rank in the plan.
            masters: digest that the state's masters have at the version.
            reached: called before each action of the writer.
        """
        rank, nonce = plan.members[index].rank, name_attempt(plan.quorum)
        try:
            if self._copy is None or not self._copy.is_of(engine.state):
                self._copy = HostCopy(engine.state, self._config.checkpoint_copy_bytes)
            self._copy.begin()
        except (RuntimeError, MemoryError) as error:  # no memory for the copy
            self._copy = None
            self._failed(action.version, str(rank), error)
            return
        copy = self._copy
        self._note(lambda saves: saves.begin(action.version, nonce))
        # One rank of the quorum makes room, for all parts: each of them is about as large.
        parts_bytes = copy.size_bytes * len(plan.positions) if index == 0 else 0

        directory, clean_at = self._directory, action.clean_at
        assert directory is not None

        def job() -> None:
            directory.clean_at = clean_at
            try:
                part = Part(
                    stage=rank.stage,
                    inner=rank.inner,
                    tensors=copy.tensors,
                    chunks=copy.chunks(),
                    commit=action.commit,
                    commit_chain=action.commit_chain,
                    masters=masters,
                    history=action.history,
                )
                self._write(action.version, nonce, part, reached, parts_bytes)
            except AbandonedError as error:  # who gave it up has told why
                logger.warning("the part of step %d is not written: %s", action.version, error)
                return
            except (OSError, IntegrityError, OwnershipError, RuntimeError) as error:
                self._failed(action.version, str(rank), error)
                return
            finally:
                copy.end()
            self._note(lambda saves: saves.written(action.version, nonce))

        self._background.submit(job)

    def wait_copied(self) -> float:
        """Return once the state may change; the seconds that took.

        It waits while a part of the state has still to be copied, as there is not memory for all of
        it at once. Half of what counts as a hang is the most: then the checkpoint is given up.
        """
        if self._copy is None:
            return 0.0
        began_s = time.monotonic()
        waited = self._copy.wait_left(self._config.hang_s / 2)
        return time.monotonic() - began_s if waited else 0.0

    def forget_state(self) -> None:
        """Keep no more of a state that is about to be freed; waits as :meth:`wait_copied` does."""
        self.wait_copied()
        self._copy = None

    def void(self, version: int) -> None:
        """Never call the part of a version safe, written or not: its state was found bad."""
        begun, nonce = self._saves.begun
        self._note(lambda saves: saves.void(version))
        directory = self._directory
        if begun == version and directory is not None:
            self._background.submit(lambda: directory.abandon(version, nonce))

    def go_back(self, voided: Sequence[Voided], *, puts_aside: bool) -> None:
        """Count no version, written or not, of steps that count no more."""
        directory = self._directory
        if directory is None or not voided:
            return
        newest, directory.voided = voided[-1], tuple(voided)
        if newest.lineage > self._went_back:
            self._went_back = newest.lineage
            begun, nonce = self._saves.begun
            self._note(lambda saves: saves.void_after(newest.version))
            if begun > newest.version:
                self._background.submit(lambda: directory.abandon(begun, nonce))
        if not puts_aside:
            return
        for version, problem in directory.put_void_aside():
            text = f"the checkpoint of step {version} is of tainted steps, and "
            if problem:
                self._report(self._saves.status.durable, f"{text}cannot be put aside: {problem}")
            else:
                logger.warning("%sis put aside", text)

    def _write(
        self, version: int, nonce: str, part: Part, reached: Reached, parts_bytes: int
    ) -> None:
        assert self._directory is not None
        self._directory.write_part(version, nonce, part, reached, parts_bytes)

    def complete(self, action: events.RenameCheckpoint, plan: Plan, reached: Reached) -> None:
        """Every part of the version is safe: rename it, in the background."""
        directory = self._directory
        assert directory is not None
        places = [members[0].rank.position for members in plan.positions]

        def job() -> None:
            try:
                directory.clean_at = action.clean_at
                directory.complete(action.version, action.nonce, places, plan.lineage, reached)
            except AbandonedError as error:
                logger.warning("the checkpoint of step %d is dropped: %s", action.version, error)
                return
            except (OSError, IntegrityError, OwnershipError) as error:
                self._failed(action.version, "the renamer", error)
                return
            self._note(lambda saves: saves.renamed(action.version))
            self._told.discard(action.version)  # if this one is damaged too, that is news
            durable = self._saves.status.durable
            self._report(durable, "")

        self._background.submit(job)

    def _note(self, change: Callable[[OwnSaves], OwnSaves]) -> None:
        """Change what the next vote says (any thread)."""
        with self._changing:
            self._saves = change(self._saves)

    def _failed(self, version: int, who: str, error: BaseException) -> None:
        if isinstance(error, OSError) and error.strerror:
            where = error.filename or self._config.checkpoint_dir
            cause = f"{error.strerror} ({where}){_REMEDIES.get(error.errno or 0, '')}"
        else:
            cause = brief(error)
        why = f"the checkpoint of step {version} is not written by {who}: {cause}"
        logger.warning("%s", why)
        self._report(self._saves.status.durable, why)
