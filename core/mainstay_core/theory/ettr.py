"""Computes the effective training time ratio in closed form (MoEvement, section 2.4, appendix C).

ETTR is the share of wall-clock time that computes steps which count: no stalls for snapshots, no
recovery. Failures are a Poisson process.
"""

from __future__ import annotations

import math


def ettr(overhead: float, recovery_s: float, mtbf_s: float) -> float:
    """Return ``1 / (1 + overhead) * 1 / (1 + E[R] / MTBF)``.

    Args:
        overhead: stalls for snapshots, as a share of the time of steps.
        recovery_s: expected seconds from a failure to where it struck, E[R].
        mtbf_s: mean seconds between failures, above 0.
    """
    return 1 / (1 + overhead) / (1 + recovery_s / mtbf_s)


def run_ettr(overhead: float, recovery_s: float, run_s: float) -> float:
    """Return ``(1 - recoveries / run) / (1 + overhead)``: what a run of known length has left.

    :func:`ettr` counts failures while steps are computed, this one those in all of the run's time.
    The two differ by the square of ``E[R] / MTBF``.

    Args:
        overhead: stalls for snapshots, as a share of the time of steps.
        recovery_s: all recoveries of the run, downtimes included; at most ``run_s``.
        run_s: its length, above 0.
    """
    return (1 - recovery_s / run_s) / (1 + overhead)


def dense_recovery_s(interval: int, step_s: float, rollback_factor: float = 1.0) -> float:
    """Return the expected replay of a dense snapshot: half of its interval (section 3.6).

    Args:
        interval: steps between two snapshots.
        step_s: seconds of a step.
        rollback_factor: seconds that the rollback costs for each second of steps that it redoes.
    """
    return rollback_factor * interval / 2 * step_s


def sparse_recovery_s(window: int, step_s: float) -> float:
    """Return the expected replay of a sparse snapshot: ``3/2 W T_iter`` (section 3.6).

    W steps convert the window, and half a window on average has passed since its end.
    """
    return 1.5 * window * step_s


def plan_interval(
    stall_s: float, step_s: float, mtbf_s: float, downtime_s: float, rollback_factor: float = 1.0
) -> int:
    """Return the interval of dense snapshots with the greatest ETTR: Gemini's oracle.

    ETTR falls on both sides of ``I^2 = 2 C (MTBF + d) / (k T^2)``, so the better of the two
    integers around it is the best of all.

    Args:
        stall_s: what one snapshot stalls, C.
        step_s: seconds of a step, T, above 0.
        mtbf_s: mean seconds between failures, above 0.
        downtime_s: seconds from a failure to the first replayed step, d.
        rollback_factor: seconds that a rollback costs for each second that it redoes, k.

    Returns:
        Steps between two snapshots, at least 1; the smaller of two that are equally good.
    """
    if rollback_factor == 0:
        return 1
    best = math.sqrt(2 * stall_s * (mtbf_s + downtime_s) / rollback_factor) / step_s
    candidates = {max(1, math.floor(best)), max(1, math.ceil(best))}

    def loss(interval: int) -> float:
        recovery_s = downtime_s + dense_recovery_s(interval, step_s, rollback_factor)
        return -ettr(stall_s / (interval * step_s), recovery_s, mtbf_s)

    return min(sorted(candidates), key=loss)


def plan_capped_interval(stall_s: float, step_s: float, cap: float) -> int:
    """Return the shortest interval whose stalls stay within a share of the time: CheckFreq's.

    Args:
        stall_s: what one snapshot stalls.
        step_s: seconds of a step, above 0.
        cap: the share, above 0.
    """
    return max(1, math.ceil(stall_s / (cap * step_s)))
