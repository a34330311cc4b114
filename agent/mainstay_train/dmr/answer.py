"""Profiles a stage of a job in a process of its own.

``python -m mainstay_train.dmr.answer`` reads a question as JSON and prints the answer
(:mod:`mainstay_core.wire.profiling`). It waits for nobody: there are no other stages and replicas,
so the lengths of waits are told to it. Where a stage has several ranks it is each of them in turn,
and the profile is merged as the ranks of a cell merge theirs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time

import torch

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.base.words import quote
from mainstay_core.dmr.merging import merge_profiles
from mainstay_core.dmr.profiles import Profile, Window
from mainstay_core.dmr.schedule import NEXT_RECV, RefusedPlanError
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.program import compile_compute
from mainstay_core.planning.routes import Way, name_of, ways_of
from mainstay_core.wire.profiling import ProfileAnswer, ProfileQuestion
from mainstay_train.base.decorator import Loop
from mainstay_train.base.device import choose_backend, choose_device
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.compute.cell_checks import firsts_of
from mainstay_train.compute.measure import play_collectives
from mainstay_train.dmr.passage import StagePasses
from mainstay_train.dmr.profiler import (
    WAITS,
    fullest_of,
    make_profile,
    plan_routed_windows,
    plan_windows,
)
from mainstay_train.dmr.recorder import Passage
from mainstay_train.dmr.run_planner import PlannedStage
from mainstay_train.dmr.timers import Clock, timer_of
from mainstay_train.exact import fingerprint, numerics
from mainstay_train.model import compilation, pipeline
from mainstay_train.model import workload as workloads
from mainstay_train.model.workload import Workload, WorkloadError, user_code


def answer(question: ProfileQuestion, clock: Clock) -> ProfileAnswer:
    """Return a stage's profile, or what is wrong with the job.

    Args:
        question: which stage of which job.
        clock: returns seconds that only grow.
    """
    try:
        return ProfileAnswer(profile=profile_stage(question, clock))
    except (InvalidSpecError, WorkloadError) as error:
        return ProfileAnswer(problem=brief(error))


def profile_stage(question: ProfileQuestion, clock: Clock) -> Profile:
    """Return the profile of a stage, recorded here.

    Raises:
        InvalidSpecError: the job cannot be profiled; the field is named.
        WorkloadError: the user's code failed.
    """
    config, shape = question.config, question.config.shape
    way = _refuse(question)
    name = choose_device(config.device, 0)
    with user_code("setting up the device"):
        device = numerics.setup(name)
    workload = _load(config)
    meshes = [
        InnerMesh(size=shape.ranks_per_stage, index=index, device_type=device.type)
        for index in range(shape.ranks_per_stage)
    ]
    # Before anything is recorded: it refuses a mesh that no block uses.
    fingerprint = _fingerprint(config, workload, device, meshes[0])
    profiles = [
        _profile_rank(question, way, workload, device, fingerprint, mesh, clock) for mesh in meshes
    ]
    try:
        return merge_profiles(profiles)
    except RefusedPlanError as error:
        raise InvalidSpecError("spec.parallelism.ranksPerStage", str(error)) from error


def _profile_rank(
    question: ProfileQuestion,
    way: Way,
    workload: Workload,
    device: torch.device,
    fingerprint: str,
    inner: InnerMesh,
    clock: Clock,
) -> Profile:
    """Return what one rank of a stage executes; the others of its cell are played.

    Its collectives send nothing, so what it gets from them has other values. Kernels and sizes do
    not depend on these, and a collective is no operator of a plan.
    """
    config, shape = question.config, question.config.shape
    play_collectives(inner)
    passes = StagePasses(
        workload,
        stage=question.stage,
        num_stages=shape.stages,
        cut=shape.cut,
        seed=shape.seed,
        recompute=config.recomputed,
        device=device,
        inner=inner,
        order=shape.order,
        types=_types_with(way, question.stage, shape),
        micro_batches=shape.micro_batches,
        way=way,
    )
    passes.run(0)  # the first one makes constants
    passages: list[Passage] = []
    for step in range(question.steps):
        _, passage = passes.run(step, timer_of(device, clock))
        assert passage is not None
        passages.append(passage)
    planned = PlannedStage(
        shape=shape,
        stage=question.stage,
        fingerprint=fingerprint,
        profile_steps=question.steps,
        memory_bytes=question.budget_bytes,
    )
    return make_profile(
        passages,
        fingerprint=fingerprint,
        stage=question.stage,
        budget_bytes=planned.budget_bytes,
        windows=_plan_windows(fullest_of(passages), planned, question.window_s),
        way=name_of(way),
    )


def _types_with(way: Way, stage: int, shape: JobShape) -> range:
    """Return the types of the first chain some of whose micro-batches pass a stage on a way."""
    num_types = math.ceil(shape.num_types / shape.replicas)
    for first in range(0, shape.num_types, num_types):
        types = range(first, min(first + num_types, shape.num_types))
        program = compile_compute(types, shape.micro_batches, stage, shape.stages, shape.order)
        if way in firsts_of(program):
            return types
    raise AssertionError("a job has micro-batches of either way")


def _plan_windows(passage: Passage, planned: PlannedStage, window_s: float) -> tuple[Window, ...]:
    """Return the waits of a stage in one passage, all of one length."""
    shape, lengths = planned.shape, dict.fromkeys(WAITS, (window_s, window_s))
    if shape.order is not Order.IN_ORDER:
        named = (NEXT_RECV, *(name for name, _ in passage.waits))
        return plan_routed_windows(
            passage,
            num_passages=planned.num_passages,
            replicas=shape.replicas,
            lengths=lengths | dict.fromkeys(named, (window_s, window_s)),
            headroom_bytes=planned.budget_bytes,
        )
    return plan_windows(
        passage,
        stage=planned.stage,
        num_stages=shape.stages,
        num_passages=planned.num_passages,
        replicas=shape.replicas,
        lengths=lengths,
        headroom_bytes=planned.budget_bytes,
    )


def _refuse(question: ProfileQuestion) -> Way:
    """Return the way that is to be profiled.

    Raises:
        InvalidSpecError: it cannot be.
    """
    config, shape = question.config, question.config.shape
    if question.stage >= shape.stages:
        raise InvalidSpecError(
            "--stage",
            f"is {question.stage}, must be between 0 and {shape.stages - 1}: the job has "
            f"spec.parallelism.stages: {shape.stages}",
        )
    ways = {name_of(way): way for way in ways_of(shape.order, question.stage, shape.stages)}
    if question.way not in ways:
        raise InvalidSpecError(
            "--way",
            f"is {quote(question.way)}, must be {' or '.join(ways)}: so micro-batches pass stage "
            f"{question.stage} with spec.pipeline.order: {shape.order.value}",
        )
    if config.compile != compilation.OFF:
        raise InvalidSpecError(
            compilation.PATH,
            "is Blocks: calls of compiled code are no operators yet, so such a job cannot be "
            "profiled; use Off",
        )
    return ways[question.way]


def _load(config: JobConfig) -> Workload:
    with user_code("calling the entrypoint"):
        function = workloads.find(config.entrypoint)
        if isinstance(function, Loop):
            raise InvalidSpecError(
                "spec.workload.entrypoint",
                f"{config.entrypoint} is a training loop of its own, whose passes are not known; "
                "a model that is brought as blocks can be profiled",
            )
        return workloads.call(config.entrypoint, function, config.workload, config.args)


def _fingerprint(
    config: JobConfig, workload: Workload, device: torch.device, inner: InnerMesh
) -> str:
    """Return the digest of the fingerprint that the job has on this machine."""
    backend = choose_backend(config.backend, device.type, config.shape.ranks_per_pod)
    extra = workload.identify(device, inner, backend)
    extra |= pipeline.identify(workload, config.shape, inner)
    return fingerprint.digest_of(fingerprint.fingerprint(device, dtype=workload.dtype, extra=extra))


def main() -> None:
    """Answer the question on standard input."""
    question = codec.loads(ProfileQuestion, sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):  # a user's code may print
        found = answer(question, time.perf_counter)
    print(codec.dumps(found))  # noqa: T201 - its output is its result


if __name__ == "__main__":
    main()
