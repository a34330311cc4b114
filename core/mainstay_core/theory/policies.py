"""Describes when a job takes snapshots, and what a failure costs under each such policy.

A policy is a value. A run (:mod:`mainstay_core.theory.runs`) asks it what a step stalls and what a
failure replays. Moments are counted in steps and may lie inside of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from mainstay_core.theory.profiles import JobProfile

CHECKFREQ_CAP = 0.03
"""Share of the time of steps that CheckFreq's stalls may take (MoEvement, section 5.2)."""
MOC_FIRST_SHARE = 1 / 8
"""Share of the experts in MoC's first snapshots (MoEvement, figure 10c)."""


class Policy(Protocol):
    """The questions that a run asks a policy."""

    @property
    def name(self) -> str:
        """Return what tables call it."""

    def stall_s(self, lost: float) -> float:
        """Return what a step stalls on average, once this many steps' tokens have been lost."""

    def replay_s(self, done: float) -> float:
        """Return what a failure after so many steps replays, in seconds."""

    def loses(self, done: float, lost: float) -> float:
        """Return the tokens that a failure after so many steps loses, in steps' tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePolicy:
    """A snapshot of the whole state every so many steps: CheckFreq and Gemini.

    Attributes:
        name: what tables call it.
        interval: steps between two snapshots.
        snapshot_stall_s: what one snapshot stalls.
        step_s: seconds of a step.
        rollback_factor: seconds that a rollback costs for each second of steps that it redoes.
    """

    name: str
    interval: int
    snapshot_stall_s: float
    step_s: float
    rollback_factor: float = 1.0

    def stall_s(self, lost: float) -> float:
        """Return the share of a snapshot's stall that falls to one step."""
        del lost
        return self.snapshot_stall_s / self.interval

    def replay_s(self, done: float) -> float:
        """Return the time of the steps since the last snapshot."""
        return self.rollback_factor * math.fmod(done, self.interval) * self.step_s

    def loses(self, done: float, lost: float) -> float:
        """Return 0: every step is computed again."""
        del done, lost
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePolicy:
    """A part of the state in every step, all of it in each window: MoEvement.

    Attributes:
        name: what tables call it.
        window: steps in which each unit is snapshotted once, W.
        step_stall_s: what each step stalls.
        step_s: seconds of a step.
        period: steps from the beginning of a window to that of the next one: W in the paper.
        lag: steps from the end of a window to the moment from which it can be loaded.
    """

    name: str
    window: int
    step_stall_s: float
    step_s: float
    period: int
    lag: int = 0

    def stall_s(self, lost: float) -> float:
        """Return what each step stalls."""
        del lost
        return self.step_stall_s

    def replay_s(self, done: float) -> float:
        """Return the time of the steps since the newest window began that can be loaded.

        Its own steps make it dense; with those since then it is where the failure struck.
        """
        return self.replay_steps(done) * self.step_s

    def replay_steps(self, done: float) -> float:
        """Return the replay's length in steps: everything, if no window can be loaded yet."""
        number = math.floor((done - self.window - self.lag) / self.period)
        return done - self.period * max(0, number)

    def loses(self, done: float, lost: float) -> float:
        """Return 0: every step is computed again."""
        del done, lost
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPolicy:
    """Some of the experts in every step, in turn: MoC, with a budget of lost tokens.

    An expert that a failure sends back to its last snapshot loses the tokens since. Each time that
    half of what was left of the budget is lost, twice as many experts are snapshotted. The paper
    does not say when MoC doubles them; this rule is ours. It makes the three doublings of figure
    10c follow each other after about as many failures each.

    Attributes:
        name: what tables call it.
        popularity: share of the tokens of each expert; their sum is 1.
        first_num: experts in a snapshot at first; it divides the number of experts.
        budget: tokens that may be lost, in steps' tokens; all experts are snapshotted once seven
            eighths of it are gone, if there are three doublings.
        fixed_share: share of the parameters that are no routed experts', in every snapshot.
        dense_s: seconds for a snapshot of everything to leave the accelerators.
        least_stall_s: what a step stalls however little leaves.
        step_s: seconds of a step.
    """

    name: str
    popularity: tuple[float, ...]
    first_num: int
    budget: float
    fixed_share: float
    dense_s: float
    least_stall_s: float
    step_s: float

    def num_experts(self, lost: float) -> int:
        """Return how many experts each snapshot holds, once so much has been lost."""
        chosen, left = self.first_num, self.budget / 2
        while lost > self.budget - left and chosen < len(self.popularity):
            chosen, left = 2 * chosen, left / 2
        return min(chosen, len(self.popularity))

    def stall_s(self, lost: float) -> float:
        """Return what does not leave beside the passes of a step."""
        share = self.num_experts(lost) / len(self.popularity)
        leaves_s = self.dense_s * (self.fixed_share + (1 - self.fixed_share) * share)
        return max(self.least_stall_s, leaves_s - self.step_s)

    def replay_s(self, done: float) -> float:
        """Return the time of one step: the last snapshot is that of the step before."""
        del done
        return self.step_s

    def loses(self, done: float, lost: float) -> float:
        """Return the tokens that experts have met since each was in a snapshot."""
        chosen = self.num_experts(lost)
        turns = math.ceil(len(self.popularity) / chosen)
        now = math.floor(done)
        return sum(
            tokens * ((now - expert // chosen) % turns)
            for expert, tokens in enumerate(self.popularity)
        )


def plan_moc(
    profile: JobProfile, popularity: tuple[float, ...], budget: float, least_stall_s: float
) -> PartialPolicy:
    """Return MoC for a job, which first snapshots an eighth of the experts in each step."""
    first_num = max(1, round(profile.model.num_experts * MOC_FIRST_SHARE))
    return PartialPolicy(
        name="MoC",
        popularity=popularity,
        first_num=first_num,
        budget=budget,
        fixed_share=1 - profile.model.expert_share,
        dense_s=profile.types.full_bytes / profile.rate_per_param,
        least_stall_s=least_stall_s,
        step_s=profile.step_s,
    )
