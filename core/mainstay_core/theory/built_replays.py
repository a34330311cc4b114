"""Plans replays of a profiled job's lost stages with the code that plans them in a running job.

One stage is lost with all its cells, at every version at which that may happen. It computes its
steps again from the newest complete window, without its neighbours: what they sent is in the logs.
So a replayed step has no bubble, and takes a stage's time for each micro-batch. Losses that leave a
living cell of each stage are no replays in a running job: others mask them in the same step, and
the cell's successor copies its state. A forecast takes every failure for the loss of a stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from mainstay_core.base.errors import InfeasiblePlanError
from mainstay_core.base.ids import PodUid
from mainstay_core.rank.windows import is_complete
from mainstay_core.snapshots.boundary_replay import BoundaryReplay, plan_boundary_replay
from mainstay_core.snapshots.inventory import Direction, HeldBoundary, HeldUnit, NoReplay, Store
from mainstay_core.snapshots.schedule import WindowPlan
from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.snapshots.units import Position, Unit, UnitKind
from mainstay_core.snapshots.windows import Window
from mainstay_core.theory.built import step_stall_s
from mainstay_core.theory.model_units import build_units
from mainstay_core.theory.profiles import JobProfile
from mainstay_core.theory.replay_lengths import WEIGHT_GRADIENT_SHARE
from mainstay_core.wire.votes import SnapshotStatus

NUM_TYPES = 1
"""Shard types of a step here: their number does not change a replay's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPolicy:
    """Sparse snapshots as they are built: the replays of each version of a period of windows.

    Attributes:
        name: what tables call it.
        window: steps of a window, W.
        lag: steps from a window's end until all know that its copies have arrived; the next
            window begins then.
        step_stall_s: what each step stalls.
        step_s: seconds of a step.
        replays_s: seconds of a replay from the version on at which a window is complete, one for
            each version until the next one is: ``W + lag`` of them.
    """

    name: str
    window: int
    lag: int
    step_stall_s: float
    step_s: float
    replays_s: tuple[float, ...]

    @property
    def mean_replay_s(self) -> float:
        """Return the mean time of a replay, with half of the step that was interrupted."""
        return sum(self.replays_s) / len(self.replays_s) + self.step_s / 2

    def stall_s(self, lost: float) -> float:
        """Return what each step stalls."""
        del lost
        return self.step_stall_s

    def replay_s(self, done: float) -> float:
        """Return the time of the replay, and of the step that was interrupted."""
        version = math.floor(done)
        since_complete = version - self.window - self.lag
        if since_complete < 0:
            return done * self.step_s
        phase = since_complete % len(self.replays_s)
        return self.replays_s[phase] + (done - version) * self.step_s

    def loses(self, done: float, lost: float) -> float:
        """Return 0: every step is computed again."""
        del done, lost
        return 0.0


def plan_built_policy(profile: JobProfile, plan: WindowPlan, lag: int) -> BuiltPolicy:
    """Return sparse snapshots of a job as they are built.

    Args:
        profile: the job.
        plan: its window.
        lag: steps from a window's end until the vote that says that its copies have arrived.
    """
    period = plan.window.length + lag
    held = _held_units(plan)
    by_stage: dict[int, list[Unit]] = {}
    for unit in build_units(profile):
        by_stage.setdefault(unit.position.stage, []).append(unit)
    shortest_s = whole_s = 0.0
    for stage, units in sorted(by_stage.items()):
        # At each later version one more step is replayed, with all units active.
        replay = _plan_replay(profile, plan.window, stage, held[stage], period)
        spared = _spared_steps(replay, _stage_shares(profile, units))
        passes_s, update_s = _replayed_step_s(profile, stage)
        shortest_s += passes_s * (replay.num_steps - spared) + update_s * replay.num_steps
        whole_s += passes_s + update_s
    return BuiltPolicy(
        name="ours, as built",
        window=plan.window.length,
        lag=lag,
        step_stall_s=step_stall_s(profile, plan),
        step_s=profile.step_s,
        replays_s=tuple(
            (shortest_s + number * whole_s) / len(by_stage) for number in range(period)
        ),
    )


def _plan_replay(
    profile: JobProfile,
    window: Window,
    stage: int,
    held: tuple[HeldUnit, ...],
    version: int,
) -> BoundaryReplay:
    """Return the replay of one stage up to a version.

    Raises:
        InfeasiblePlanError: the window does not hold what a replay takes.
    """
    num_stages = profile.shape.num_stages
    borders = [(stage - 1, Direction.ACTIVATION), (stage + 1, Direction.GRADIENT)]
    store = Store(
        pod=PodUid("peer"),
        domain="peer",
        units=held,
        boundaries=tuple(
            HeldBoundary(
                sender=Position(stage=sender),
                direction=direction,
                first_type=0,
                stop_type=NUM_TYPES,
                first_step=window.first,
                stop_step=version,
            )
            for sender, direction in borders
            if 0 <= sender < num_stages
        ),
    )
    answer = plan_boundary_replay(
        Stretch(first=stage, last=stage),
        {Position(stage=stage): [unit.unit for unit in held]},
        [store],
        window,
        version,
        num_stages=num_stages,
        num_types=NUM_TYPES,
    )
    if isinstance(answer, NoReplay):
        raise InfeasiblePlanError(answer.reason)
    return answer


def _held_units(plan: WindowPlan) -> dict[int, tuple[HeldUnit, ...]]:
    """Return by stage the copies that a window's authors have made."""
    full: dict[tuple[Position, str], list[int]] = {}
    compute: dict[tuple[Position, str], list[int]] = {}
    for one in plan.assignments:
        for instalment in one.instalments:
            version = plan.window.version_of(instalment.number)
            for name in instalment.full:
                full.setdefault((one.position, name), []).append(version)
            for name in instalment.compute:
                compute.setdefault((one.position, name), []).append(version)
    held: dict[int, list[HeldUnit]] = {}
    for (position, name), versions in full.items():
        unit = HeldUnit(
            position=position,
            unit=name,
            full=tuple(versions),
            compute=tuple(compute.get((position, name), ())),
        )
        held.setdefault(position.stage, []).append(unit)
    return {stage: tuple(units) for stage, units in held.items()}


def _stage_shares(profile: JobProfile, units: list[Unit]) -> dict[str, float]:
    """Return each unit's share of its stage's computation, if all experts are equally popular."""
    experts = [unit for unit in units if unit.kind is UnitKind.EXPERT]
    rest = sum(unit.num_elements for unit in units if unit.kind is not UnitKind.EXPERT)
    share = profile.model.expert_compute_share
    return {
        unit.name: share / len(experts)
        if unit.kind is UnitKind.EXPERT
        else (1 - share) * unit.num_elements / rest
        for unit in units
    }


def _spared_steps(replay: BoundaryReplay, shares: Mapping[str, float]) -> float:
    """Return what frozen units' weight gradients spare of a replay, in passes of a step."""
    frozen = sum(shares[name] for one in replay.frozen for name in one.units)
    return WEIGHT_GRADIENT_SHARE * frozen


def _replayed_step_s(profile: JobProfile, stage: int) -> tuple[float, float]:
    """Return what the passes and the update of one replayed step take: without bubbles."""
    times = profile.times
    stage_s = max(pipeline[stage] for pipeline in times.stage_s)
    return times.num_micro_batches * stage_s, times.update_s


def list_replays(length: int, lag: int, num_windows: int) -> tuple[int, ...]:
    """Return the steps of a replay for each version at which a failure may strike.

    The windows are those of a running job: the next one begins when the one before is complete,
    and it is complete once all its copies have arrived and votes have said so. A replay computes
    every step since the first version of the newest complete window.

    Args:
        length: of each window, W.
        lag: steps from the end of a window until the vote that says that its copies have arrived.
        num_windows: windows over which versions are listed, from the first complete one on.
    """
    window, complete = None, None
    replays: list[int] = []
    for version in itertools.count():
        if complete is not None:
            if version >= (length + lag) * (num_windows + 1):
                break
            replays.append(version - complete.first)
        if window is None:
            window = Window(first=version, length=length)
        copied = version + 1 if version >= window.last + lag else window.first
        if is_complete(window, version, [SnapshotStatus(logged=True, copied=copied)]):
            complete, window = window, None
    return tuple(replays)
