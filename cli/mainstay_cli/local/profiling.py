"""Has the operators of a stage recorded, by a process with torch; nothing of the job is started."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_cli.base.exits import MachineError, UsageError
from mainstay_cli.local import manifests, preflight, torch_process
from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.ids import JobUid
from mainstay_core.dmr.profiles import Profile
from mainstay_core.wire.profiling import ProfileAnswer, ProfileQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wishes for a profile: what to record, and what is told instead of measured."""

    stage: int
    steps: int
    window_s: float
    budget_bytes: int


def record(file: manifests.JobFile, wanted: Wanted) -> Profile:
    """Return the profile of a stage of a job.

    Raises:
        UsageError: the job cannot be profiled, or its blocks fail.
        MachineError: there is no torch here, or too little memory.
    """
    search = manifests.search_path(file.path)
    preflight.check_entrypoint(file.job, search)
    question = ProfileQuestion(
        config=file.job.to_job_config(JobUid("profile")),
        stage=wanted.stage,
        steps=wanted.steps,
        window_s=wanted.window_s,
        budget_bytes=wanted.budget_bytes,
    )
    reply = torch_process.ask("mainstay_train.dmr.answer", codec.dumps(question), search)
    try:
        found = codec.loads(ProfileAnswer, reply.answer)
    except MalformedError as error:
        raise MachineError(
            f"the stage cannot be profiled here: {reply.last_words} (it takes a Python with torch, "
            "extra `train`, and the memory of one stage)"
        ) from error
    if found.profile is None:
        raise UsageError(f"{file.path}: {found.problem}")
    return found.profile
