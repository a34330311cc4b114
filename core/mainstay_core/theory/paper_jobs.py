"""Holds the jobs of the MoEvement paper as profiles: what it prints of them, and what we add.

The paper prints models (table 2), parallelism (sections 5.1, 5.4 and 5.7), batch and sequence. Its
step times follow from its overheads, which are given in seconds and in percent. The rest it does
not print; each such number has a comment here, and can be changed in a profile of your own.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.snapshots.prices import StateTypes
from mainstay_core.theory.iteration import StepTimes
from mainstay_core.theory.profiles import JobProfile, Model, Shape

HOUR_S = 3600.0
RUN_S = 12 * HOUR_S
"""Length of the runs of tables 3 and 7, and of figure 16."""
WIDTH = 2048
"""Elements of a token at a stage's border. The paper does not print it; it is DeepSeek-MoE's."""
MICRO_BATCH = 32
SEQUENCES = 512
FP16_FP32 = StateTypes(compute_bytes=2, master_bytes=4, optimizer_bytes=(4, 4))

DOWNTIME_TABLE_3_S = 21.0
"""Seconds from a failure to the first replayed step on the cluster of table 3. The paper prints
none; 20 to 22 s fit its 20 rows of ETTR best."""
DOWNTIME_TABLE_7_S = 15.0
"""The same on the cluster of table 7."""

MODELS = {
    "MoE-LLaVa": Model(
        num_params=2.9e9, num_active_params=2.0e9, num_layers=32, num_experts=4, num_routed=2
    ),
    "GPT-MoE": Model(
        num_params=7.3e9, num_active_params=1.6e9, num_layers=12, num_experts=32, num_routed=6
    ),
    "QWen-MoE": Model(
        num_params=14.3e9, num_active_params=2.7e9, num_layers=24, num_experts=64, num_routed=8
    ),
    "DeepSeek-MoE": Model(
        num_params=16.4e9, num_active_params=3.7e9, num_layers=28, num_experts=64, num_routed=8
    ),
}
"""Table 2. DeepSeek-MoE's two shared experts belong to the rest of a layer."""


def _shape(stages: int, pipelines: int) -> Shape:
    return Shape(
        num_stages=stages,
        num_pipelines=pipelines,
        expert_ways=8,
        sequences=SEQUENCES,
        sequence_length=2048,
        width=WIDTH,
    )


def _times(step_s: float, shape: Shape) -> StepTimes:
    """Return times of equal stages that make a step of this length.

    The paper prints no parts of a step, so that the all-reduce and the update are in the stages.
    """
    num_micro_batches = shape.sequences // MICRO_BATCH // shape.num_pipelines
    stage_s = step_s / (num_micro_batches + shape.num_stages - 1)
    return StepTimes(
        num_micro_batches=num_micro_batches,
        stage_s=((stage_s,) * shape.num_stages,) * shape.num_pipelines,
    )


def _table_3(
    name: str, stages: int, pipelines: int, *, step_s: float, rate: float, stall_s: float, k: float
) -> JobProfile:
    shape = _shape(stages, pipelines)
    return JobProfile(
        name=name,
        model=MODELS[name],
        types=FP16_FP32,
        shape=shape,
        times=_times(step_s, shape),
        snapshot_bytes_per_s=rate,
        dense_stall_s=stall_s,
        rollback_factor=k,
        downtime_s=DOWNTIME_TABLE_3_S,
    )


# The rates are such that Algorithm 1 gives the printed windows and, but for DeepSeek-MoE, the
# printed frozen copies. The stalls are such that the oracle's intervals come near the printed ones,
# k such that the totals of recovery do.
TABLE_3 = {
    job.name: job
    for job in (
        _table_3("MoE-LLaVa", 6, 2, step_s=1.69, rate=9.2e9, stall_s=2.2, k=4.02),
        _table_3("GPT-MoE", 3, 4, step_s=2.11, rate=18.5e9, stall_s=4.2, k=2.77),
        _table_3("QWen-MoE", 6, 2, step_s=2.51, rate=24.4e9, stall_s=5.3, k=1.43),
        _table_3("DeepSeek-MoE", 12, 1, step_s=2.90, rate=21e9, stall_s=5.8, k=1.0),
    )
}

TABLE_7_RATE_PER_PARAM = 1.28
"""Bytes per parameter and second of snapshots, one for all rows of table 7. None is printed."""
TABLE_7_ROLLBACK_FACTOR = 1.45
CHECKFREQ_RATE_TABLE_7 = 0.68 * 16.4e9
"""Bytes per second of CheckFreq's snapshots, one for all rows of table 7: its intervals follow from
what does not leave beside a step. The paper prints none."""
CHECKFREQ_RATE_TABLE_3 = 14e9
"""The same on the cluster of table 3."""


def _table_7(
    name: str, compute: int, master: int, optimizer: tuple[int, int], step_s: float
) -> JobProfile:
    shape = _shape(8, 2)
    model = MODELS["DeepSeek-MoE"]
    return JobProfile(
        name=name,
        model=model,
        types=StateTypes(compute_bytes=compute, master_bytes=master, optimizer_bytes=optimizer),
        shape=shape,
        times=_times(step_s, shape),
        snapshot_bytes_per_s=TABLE_7_RATE_PER_PARAM * model.num_params,
        rollback_factor=TABLE_7_ROLLBACK_FACTOR,
        downtime_s=DOWNTIME_TABLE_7_S,
    )


# Names: formats of compute weights, masters and optimizer states.
TABLE_7 = {
    job.name: job
    for job in (
        _table_7("FP16/FP16/FP16+FP16", 2, 2, (2, 2), 3.0),
        _table_7("FP8/FP32/FP32+FP32", 1, 4, (4, 4), 2.3),
        _table_7("FP8/FP16/FP32+FP32", 1, 2, (4, 4), 2.1),
        _table_7("FP8/FP16/FP8+FP16", 1, 2, (1, 2), 1.9),
        _table_7("FP8/FP8/FP8+FP16", 1, 1, (1, 2), 1.7),
    )
}

SCALED_RATE_PER_ACCELERATOR = 0.65e9
"""Bytes of snapshots per second and accelerator of one pipeline in figure 11. Fitted: 671B's window
becomes 5, which gives its printed 0.86. The cluster of table 3 has a third of it."""
SCALED_OVERHEAD = 0.02
"""Stalls of sparse snapshots in figure 11: the most that section 5.2 prints."""
RESTART_S_PER_NODE = 0.145
"""What a rollback of all workers adds to the downtime, per node of 8 accelerators. Fitted to
Gemini's printed 0.55 for 671B; nothing else is."""
ACCELERATORS_PER_NODE = 8


def _scaled(name: str, params: float, stages: int, pipelines: int) -> JobProfile:
    """Return a job of figure 11: each stage takes what one of DeepSeek-MoE's takes in table 3.

    Each pipeline gets a batch of 512, as DeepSeek-MoE's one pipeline does. No stage is without a
    layer.
    """
    base = TABLE_3["DeepSeek-MoE"]
    shape = replace(
        base.shape,
        num_stages=stages,
        num_pipelines=pipelines,
        sequences=SEQUENCES * pipelines,
    )
    stage_s = base.times.stage_s[0][0]
    growth = params / base.model.num_params
    return replace(
        base,
        name=name,
        model=replace(
            base.model,
            num_layers=max(base.model.num_layers, stages),
            num_params=params,
            num_active_params=base.model.num_active_params * growth,
        ),
        shape=shape,
        times=replace(base.times, stage_s=((stage_s,) * stages,) * pipelines),
        snapshot_bytes_per_s=SCALED_RATE_PER_ACCELERATOR * stages * shape.expert_ways,
        dense_stall_s=None,
    )


FIGURE_11 = {
    job.name: job
    for job in (
        _scaled("DeepSeek 32B", 32e9, 16, 4),
        _scaled("DeepSeek 67B", 67e9, 24, 8),
        _scaled("DeepSeek 145B", 145e9, 32, 16),
        _scaled("DeepSeek 671B", 671e9, 64, 32),
    )
}
"""Section 5.4."""
