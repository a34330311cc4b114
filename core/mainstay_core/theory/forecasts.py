"""Forecasts what each policy makes of a job: its intervals, stalls, recoveries and ETTR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.theory.built_replays import BuiltPolicy
from mainstay_core.theory.ettr import (
    dense_recovery_s,
    ettr,
    plan_capped_interval,
    plan_interval,
    sparse_recovery_s,
)
from mainstay_core.theory.model_units import find_printed_window
from mainstay_core.theory.policies import (
    CHECKFREQ_CAP,
    DensePolicy,
    Policy,
    SparsePolicy,
    plan_moc,
)
from mainstay_core.theory.profiles import JobProfile
from mainstay_core.theory.runs import simulate_run
from mainstay_core.theory.sizes import (
    frozen_bytes_per_param,
    gemini_bytes_per_param,
    instalment_bytes,
    log_bytes,
)

MOC_BUDGET_STEPS = 20.0
"""Tokens that MoC may lose, in steps' tokens. The MoEvement paper prints no budget; this one is
fitted to figure 10 (:mod:`mainstay_core.theory.figure_sections`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The stalls, recoveries and ETTR of a job under one policy.

    Attributes:
        policy: its name.
        interval: steps between two snapshots, or of a window; 1 for MoC.
        stall_s: what a step stalls, in the mean; MoC's at first.
        recovery_s: mean seconds of a recovery, the downtime included; MoC's is one step.
        closed_ettr: ETTR in closed form; None for MoC, whose stall grows.
        ettr: mean ETTR of the simulated runs.
        lost_steps: mean of the tokens lost in a run, in steps' tokens.
    """

    policy: str
    interval: int
    stall_s: float
    recovery_s: float
    closed_ettr: float | None
    ettr: float
    lost_steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The host memory that sparse snapshots of a job take, over all accelerators.

    Attributes:
        window: of MoEvement's algorithm 1, in steps.
        num_active: units that an instalment holds in full.
        num_units: units of the model.
        first_bytes: the first and largest instalment, over all stages.
        dense_bytes: a dense snapshot.
        copies_bytes: a complete window and one in the making, as table 6 counts them.
        log_steps: steps that the logs reach back.
        log_bytes: the logs of all stage borders.
    """

    window: int
    num_active: int
    num_units: int
    first_bytes: float
    dense_bytes: float
    copies_bytes: float
    log_steps: int
    log_bytes: float


def plan_needs(profile: JobProfile) -> Needs:
    """Return what sparse snapshots take, planned from the job."""
    window = find_printed_window(profile)
    params, num_units = profile.model.num_params, profile.model.num_units
    active = params * window.num_active / num_units
    frozen = frozen_bytes_per_param(profile.types, window.num_active / num_units, window.length)
    log_steps = 2 * window.length - 1
    return Needs(
        window=window.length,
        num_active=window.num_active,
        num_units=num_units,
        first_bytes=instalment_bytes(profile.types, active, params - active),
        dense_bytes=instalment_bytes(profile.types, params, 0),
        copies_bytes=params * (gemini_bytes_per_param(profile.types) + frozen),
        log_steps=log_steps,
        log_bytes=log_bytes(profile.shape, profile.types, log_steps),
    )


def forecast_job(
    profile: JobProfile,
    mtbf_s: float,
    traces_s: Sequence[Sequence[float]],
    horizon_s: float,
    built: BuiltPolicy,
) -> tuple[Forecast, ...]:
    """Return what each policy makes of a job.

    Args:
        profile: the job.
        mtbf_s: mean seconds between failures, above 0: the closed form's, and the oracle's.
        traces_s: failures of each run, at least one run.
        horizon_s: length of each run, above 0.
        built: its sparse snapshots as they are built.
    """
    step_s, downtime_s = profile.step_s, profile.downtime_s
    oracle = plan_interval(profile.stall_s, step_s, mtbf_s, downtime_s, profile.rollback_factor)
    window = find_printed_window(profile)
    forecasts = []
    for name, interval in (
        ("CheckFreq", plan_capped_interval(profile.stall_s, step_s, CHECKFREQ_CAP)),
        ("Gemini, oracle", oracle),
    ):
        dense = DensePolicy(
            name=name,
            interval=interval,
            snapshot_stall_s=profile.stall_s,
            step_s=step_s,
            rollback_factor=profile.rollback_factor,
        )
        mean_s = dense_recovery_s(interval, step_s, profile.rollback_factor)
        forecasts.append(_forecast(dense, interval, mean_s, profile, mtbf_s, traces_s, horizon_s))
    equal = (1 / profile.model.num_experts,) * profile.model.num_experts
    moc = plan_moc(profile, equal, MOC_BUDGET_STEPS, least_stall_s=0.0)
    forecasts.append(_forecast(moc, 1, None, profile, mtbf_s, traces_s, horizon_s))
    sparse = SparsePolicy(
        name="MoEvement",
        window=window.length,
        step_stall_s=_printed_stall_s(profile),
        step_s=step_s,
        period=window.length,
    )
    mean_s = sparse_recovery_s(window.length, step_s)
    forecasts.append(_forecast(sparse, window.length, mean_s, profile, mtbf_s, traces_s, horizon_s))
    forecasts.append(
        _forecast(built, built.window, built.mean_replay_s, profile, mtbf_s, traces_s, horizon_s)
    )
    return tuple(forecasts)


def _printed_stall_s(profile: JobProfile) -> float:
    """Return what algorithm 1's largest instalment leaves of a step to wait for, as a rule 0."""
    needs = plan_needs(profile)
    return max(0.0, needs.first_bytes / profile.snapshot_bytes_per_s - profile.step_s)


def _forecast(
    policy: Policy,
    interval: int,
    replay_s: float | None,
    profile: JobProfile,
    mtbf_s: float,
    traces_s: Sequence[Sequence[float]],
    horizon_s: float,
) -> Forecast:
    """Return a policy's forecast; without a mean replay it has no closed form."""
    step_s, downtime_s = profile.step_s, profile.downtime_s
    runs = [simulate_run(policy, step_s, downtime_s, trace, horizon_s) for trace in traces_s]
    stall_s = policy.stall_s(0.0)
    recovery_s = downtime_s + (step_s if replay_s is None else replay_s)
    closed = None if replay_s is None else ettr(stall_s / step_s, recovery_s, mtbf_s)
    return Forecast(
        policy=policy.name,
        interval=interval,
        stall_s=stall_s,
        recovery_s=recovery_s,
        closed_ettr=closed,
        ettr=sum(run.ettr for run in runs) / len(runs),
        lost_steps=sum(run.lost for run in runs) / len(runs),
    )
