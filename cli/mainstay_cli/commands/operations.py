"""``mainstay scale``, ``drain``, ``suspend``, ``resume``: planned changes of a running job."""

from __future__ import annotations

import asyncio
from typing import Any

from mainstay_cli.base.exits import UsageError
from mainstay_cli.local import runs


def scale(job: str, replicas: int) -> None:
    """Ask for another number of replicas.

    Raises:
        UsageError: there is no such running job.
        CliError: the api refused, e.g. a number outside minReplicas..lanes.
    """
    shown = asyncio.run(_scale(_running(job), replicas))
    now, wanted = shown["replicas"], shown["replicas_wanted"]
    print(f"{shown['name']}: {wanted} replicas wanted, {now} now")


def drain(job: str, pod: str) -> None:
    """Ask that a pod's work is handed over.

    Raises:
        UsageError: there is no such running job.
        CliError: the api refused, e.g. there is no such pod.
    """
    shown = asyncio.run(_drain(_running(job), pod))
    for leaving in shown["leaving"]:
        if pod in (leaving["pod"], leaving["uid"]):
            print(f"{shown['name']}: {describe_leaving(leaving)}")
            return
    print(f"{shown['name']}: pod {pod} serves no rank and gets none any more")


def suspend(job: str, *, wanted: bool) -> None:
    """Ask that a job stands still, its state saved, or that it goes on.

    Raises:
        UsageError: there is no such running job.
        CliError: the api refused, e.g. the job writes no checkpoints.
    """
    shown = asyncio.run(_suspend(_running(job), wanted))
    saved = shown["checkpoint"]["step"]
    if not wanted:
        where = f"from the checkpoint of step {saved}" if saved else "from the start"
        now = shown["state"]
        print(f"{shown['name']}: goes on" + (f" {where}" if now == "forming" else f", is {now}"))
    elif shown["state"] == "suspended":
        print(f"{shown['name']}: suspended, the checkpoint of step {saved} is complete")
    else:
        print(f"{shown['name']}: saves its state and stops; mainstay status says when it stands")


def describe_leaving(leaving: dict[str, Any]) -> str:
    """Return one leaving pod's line."""
    left_s = leaving["left_s"]
    limit = f", {left_s:.0f} s left" if left_s is not None else ""
    waits = f", waits: {leaving['waits']}" if leaving["waits"] else ""
    return f"pod {leaving['pod']} hands its work over: {leaving['reason']}{limit}{waits}"


def _running(job: str) -> runs.Run:
    run = runs.find(job)
    if not run.is_running():
        raise UsageError(f"job {job} is not running")
    return run


async def _scale(run: runs.Run, replicas: int) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.scale_job(run.job, replicas)


async def _suspend(run: runs.Run, wanted: bool) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.suspend_job(run.job, suspend=wanted)


async def _drain(run: runs.Run, pod: str) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.drain_pod(run.job, pod)
