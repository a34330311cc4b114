"""Simulates a run over a trace of failures: what of its time a policy leaves for training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.theory.policies import Policy
from mainstay_core.theory.traces import draw_poisson


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of a run over a trace.

    Attributes:
        horizon_s: its length.
        num_failures: failures before its end.
        done: steps committed; the last one may be unfinished.
        step_s: seconds of a step without stalls.
        stalled_s: what snapshots took.
        recovery_s: what failures took: downtime and replay.
        lost: tokens that were never learnt from, in steps' tokens.
    """

    horizon_s: float
    num_failures: int
    done: float
    step_s: float
    stalled_s: float
    recovery_s: float
    lost: float

    @property
    def ettr(self) -> float:
        """Return the share of the time that computed steps which count."""
        return self.done * self.step_s / self.horizon_s


def simulate_run(
    policy: Policy, step_s: float, downtime_s: float, failures_s: Sequence[float], horizon_s: float
) -> Run:
    """Run a job over a trace.

    A failure in the middle of a recovery begins that recovery anew (MoEvement, appendix A): its
    downtime and its replay.

    Args:
        policy: when snapshots are taken, and what a failure costs.
        step_s: seconds of a step without stalls, above 0.
        downtime_s: seconds from a failure to the first replayed step.
        failures_s: the trace, ascending; what is not before the horizon is left out.
        horizon_s: the run's length, above 0.
    """
    ready_s = done = lost = stalled_s = recovery_s = replay_s = 0.0
    num_failures = 0
    for failure_s in failures_s:
        if failure_s >= horizon_s:
            break
        num_failures += 1
        if failure_s >= ready_s:
            stall_s = policy.stall_s(lost)
            steps = (failure_s - ready_s) / (step_s + stall_s)
            done += steps
            stalled_s += steps * stall_s
            replay_s = policy.replay_s(done)
            lost += policy.loses(done, lost)
            recovery_s += downtime_s + replay_s
        else:
            recovery_s += failure_s + downtime_s + replay_s - ready_s
        ready_s = failure_s + downtime_s + replay_s
    if ready_s < horizon_s:
        stall_s = policy.stall_s(lost)
        steps = (horizon_s - ready_s) / (step_s + stall_s)
        done += steps
        stalled_s += steps * stall_s
    else:
        recovery_s -= ready_s - horizon_s
    return Run(
        horizon_s=horizon_s,
        num_failures=num_failures,
        done=done,
        step_s=step_s,
        stalled_s=stalled_s,
        recovery_s=recovery_s,
        lost=lost,
    )


def mean_ettr(
    policy: Policy,
    step_s: float,
    downtime_s: float,
    mtbf_s: float,
    horizon_s: float,
    seeds: range,
) -> float:
    """Return the mean ETTR of runs over Poisson traces, one for each seed.

    Args:
        policy: when snapshots are taken, and what a failure costs.
        step_s: seconds of a step without stalls, above 0.
        downtime_s: seconds from a failure to the first replayed step.
        mtbf_s: mean seconds between failures, above 0.
        horizon_s: length of each run, above 0.
        seeds: of the traces, at least one.
    """
    total = 0.0
    for seed in seeds:
        failures_s = draw_poisson(random.Random(seed), mtbf_s, horizon_s)
        total += simulate_run(policy, step_s, downtime_s, failures_s, horizon_s).ettr
    return total / len(seeds)
