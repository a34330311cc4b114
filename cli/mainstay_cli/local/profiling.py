"""Has the operators of a stage recorded, by a process with torch; nothing of the job is started."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_cli.base.exits import UsageError
from mainstay_cli.local import manifests, preflight, torch_process
from mainstay_core.base.ids import JobUid
from mainstay_core.dmr.profiles import Profile
from mainstay_core.wire.profiling import ProfileAnswer, ProfileQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wishes for a profile: what to record, and what is told instead of measured."""

    stage: int
    way: str
    steps: int
    window_s: float
    budget_bytes: int


def record(file: manifests.JobFile, wanted: Wanted) -> Profile:
    """Return the profile of a stage of a job.

    Raises:
        UsageError: the job cannot be profiled, or its blocks fail.
        MachineError: there is no torch here, or too little memory.
    """
    stages = file.job.shape.stages
    if wanted.stage >= stages:  # told at once: the process with torch takes seconds
        raise UsageError(
            f"{file.path}: --stage: is {wanted.stage}, must be between 0 and {stages - 1}: the job "
            f"has spec.parallelism.stages: {stages}"
        )
    search = manifests.search_path(file.path)
    preflight.check_entrypoint(file.job, search)
    question = ProfileQuestion(
        config=file.job.to_job_config(JobUid("profile")),
        stage=wanted.stage,
        way=wanted.way,
        steps=wanted.steps,
        window_s=wanted.window_s,
        budget_bytes=wanted.budget_bytes,
    )
    found = torch_process.ask(
        "mainstay_train.dmr.answer",
        question,
        search,
        ProfileAnswer,
        problem="the stage cannot be profiled here",
        takes="one stage",
    )
    if found.profile is None:
        raise UsageError(f"{file.path}: {found.problem}")
    return found.profile
