"""What a trainer does about durable checkpoints, for its session.

The session's state machine says when (:mod:`mainstay_core.rank`), the directory
knows how they lie on the disk (:mod:`mainstay_train.checkpoints`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from mainstay_core import rank_events
from mainstay_core.errors import IntegrityError
from mainstay_core.messages import Plan
from mainstay_train.checkpoints import CheckpointDirectory
from mainstay_train.engine import Engine
from mainstay_train.heal import masters_digest

logger = logging.getLogger(__name__)


class Checkpointing:
    """The durable versions of a job, as one of its trainers uses them.

    Args:
        directory: where they are; empty for a job without any.
        seed: of the initial state, which is version 0.
    """

    def __init__(self, directory: str, seed: int) -> None:
        self._directory = CheckpointDirectory(Path(directory)) if directory else None
        self._seed = seed
        self._safe: tuple[int, str] | None = None

    @property
    def enabled(self) -> bool:
        """Whether the job has a place for checkpoints."""
        return self._directory is not None

    def newest_complete(self) -> int:
        """Newest version that can be read; 0 is the seed's initial state."""
        return self._directory.newest_complete() if self._directory else 0

    def settle(self) -> None:
        """Another quorum settles: what was written in the last one is abandoned."""
        self._safe = None

    def safe_in(self, nonce: str) -> int | None:
        """Newest version of which this rank has safely written its part in this quorum."""
        return self._safe[0] if self._safe and self._safe[1] == nonce else None

    def load(self, engine: Engine, version: int) -> rank_events.Event:
        """Read a version into the engine's state: Restored or RestoreFailed."""
        if version == 0:
            engine.state.initialize(self._seed)
            return rank_events.Restored(masters_digest(engine.state), None, "")
        assert self._directory is not None
        try:
            loaded = self._directory.load(version, engine.state)
        except (IntegrityError, OSError) as error:
            logger.warning("checkpoint %d is skipped: %s", version, error)
            return rank_events.RestoreFailed(str(error))
        return rank_events.Restored(loaded.masters, loaded.commit, loaded.chain)

    def write(self, action: rank_events.WriteCheckpoint, engine: Engine, nonce: str) -> None:
        """Write this rank's part; the next vote says that it is safe."""
        assert self._directory is not None
        try:
            self._directory.write_part(
                action.version, nonce, engine.stage, engine.state, action.commit, action.chain
            )
        except OSError as error:
            logger.warning("checkpoint %d is not written: %s", action.version, error)
            return
        self._safe = (action.version, nonce)

    def complete(self, version: int, plan: Plan) -> None:
        """Every part of the version is safe: rename it."""
        assert self._directory is not None
        try:
            self._directory.complete(version, plan.quorum.nonce, plan.num_stages)
        except OSError as error:
            logger.warning("checkpoint %d is not completed: %s", version, error)
