"""Checks that what a person allows ahead of a loss is used once, and within its limit."""

from __future__ import annotations

from collections import Counter

from mainstay_core.coordinator.state import CoordinatorState, all_settled
from mainstay_core.job.config import JobConfig
from mainstay_core.sim.invariants.holding import hold
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import Fork


class Permissions:
    """Counts the permissions that were asked for, and the recoveries that forked by one.

    What the coordinator remembers of permissions it does not look at. A question without an answer
    may have been granted, at any later time.

    Args:
        config: of the job.
        seen: what happened how often.
    """

    def __init__(self, config: JobConfig, seen: Counter[str]) -> None:
        self._seen = seen
        self._needs_none = config.approximate is not None or bool(config.repeats)
        self._num_granted = self._num_used = 0
        self._limits: set[int] = set()
        self._is_open = False
        """Whether a recovery forks, and it is not known yet that the job goes on from it."""
        self._forks: set[Fork] = set()
        """Those that the job knew when it forked last."""
        self._unsure = False
        self._state: CoordinatorState | None = None

    @property
    def may_fork(self) -> bool:
        """Whether the job has a policy, or somebody has allowed something."""
        return self._needs_none or bool(self._limits)

    def asked(self, after_lost_steps: int) -> None:
        """A person is about to give a permission."""
        self._num_granted += 1
        self._limits.add(after_lost_steps)

    def answered(self, *, granted: bool, refused: bool) -> None:
        """The api has answered, or nobody knows."""
        self._num_granted -= refused
        self._unsure |= not (granted or refused)
        self._seen["permission"] += granted

    def withdrawn(self) -> None:
        """The api has said that nothing is allowed any more."""
        self._seen["permission withdrawn"] += 1
        if not self._unsure:
            self._num_granted = self._num_used

    def committed(self, state: CoordinatorState) -> None:
        """A decision is durable."""
        self._state = state
        if not self._is_open or not (state.commits or all_settled(state)):
            return
        self._is_open = False
        if not state.commits and state.is_history_told and set(state.history) <= self._forks:
            # Nothing was made anew, so that the permission counts again.
            self._num_used -= 1
            self._seen["permission counts again"] += 1

    def published(self, plan: Plan) -> None:
        """A plan is durable."""
        if self._needs_none or plan.fork is None:
            return
        how, state = plan.fork.how, self._state
        limit = None if how is None else how.after_lost_steps
        hold(limit in self._limits, f"I9: {plan.quorum} forks by the limit {limit}: nobody gave it")
        if self._is_open:
            return
        assert state is not None
        self._is_open = True
        self._forks = set(state.history)
        self._num_used += 1
        self._seen["permission used"] += 1
        hold(
            self._num_used <= self._num_granted,
            f"I9: {plan.quorum} is recovery {self._num_used} that forks, and "
            f"{self._num_granted} were allowed",
        )
        assert limit is not None
        lost_steps = state.step - state.durable
        hold(
            lost_steps > limit,
            f"I9: {plan.quorum} forks rather than lose {lost_steps} steps, and {limit} are allowed",
        )
