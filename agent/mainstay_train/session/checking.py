"""Has a trainer check by the rules that its plan says, from the step on at which it adopts it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mainstay_core.dmr.settings import CheckRules
from mainstay_core.job.config import JobConfig
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.purity import trials_of
from mainstay_train.compute.training import Training
from mainstay_train.dmr.run_planner import Told, plan_stage

logger = logging.getLogger(__name__)


class RulesOfChecks:
    """The rules by which one trainer checks what it computes.

    Args:
        config: of the job, as it was when the trainer was started.
        training: has the blocks.
        tell: called with a stage and which checks its plan has executed.
    """

    def __init__(
        self, config: JobConfig, training: Training, tell: Callable[[int, Told], None]
    ) -> None:
        self._config, self._training, self._tell = config, training, tell
        self._rules = config.checks
        self._tried = trials_of(config.checks)
        self.fingerprint = ""
        """Digest of what this trainer's bits depend on, once it has said hello."""

    def plan(self, engine: Engine, *, starts: bool) -> None:
        """Have the checks of an engine's stage planned, if the rules say so.

        Args:
            engine: of the stage.
            starts: whether the job starts: then a plan that cannot be used fails it.
        """
        config = self._config.with_checks(self._rules)
        stage, tell = engine.stage, self._tell
        engine.checks.planner = plan_stage(
            config, engine, self.fingerprint, lambda told: tell(stage, told), starts=starts
        )

    def follow(self, rules: CheckRules | None, engine: Engine, step: int) -> None:
        """Check by the rules of the adopted plan from now on: the same on all its members.

        Args:
            rules: of the plan; None: those of the start.
            engine: of the stage at hand, between two programs.
            step: the step at hand, for people.

        Raises:
            InvalidSpecError: a block is no pure function, as is tried when checks or a witness are
                switched on.
        """
        if rules is None or rules == self._rules:
            return
        if not trials_of(rules) <= self._tried:
            self._training.try_blocks(rules)
            self._tried |= trials_of(rules)
        logger.info("from step %d on: %s", step, rules.describe())
        self._rules = rules
        engine.follow(rules)
        self.plan(engine, starts=False)
