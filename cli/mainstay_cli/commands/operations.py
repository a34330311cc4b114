"""``mainstay scale``, ``drain``, ``suspend``, ``resume``: planned changes of a running job."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from mainstay_cli.commands.arguments import RUNNING_JOB
from mainstay_cli.local import runs
from mainstay_core.base.words import count, printable

DRAIN_HELP = """Hand a pod's work over to others and end it: a spare takes its place first, or \
others take its shard types. No step is lost or done again, and a new pod is made. The same \
happens when the pod itself is told to end (SIGTERM of its supervisor). For a whole node of a \
cluster, kubectl drain does it for each of the node's pods.

Example: mainstay drain demo demo-3; kubectl mainstay drain llama-tiny llama-tiny-3"""


def scale(job: str, replicas: int) -> None:
    """Ask for another number of replicas.

    Raises:
        UsageError: there is no such running job.
        CliError: the api refused, e.g. a number outside minReplicas..lanes.
    """
    shown = asyncio.run(_scale(runs.find_running(job), replicas))
    now, wanted = shown["replicas"], shown["replicas_wanted"]
    print(f"{shown['name']}: {count(wanted, 'replica')} wanted, {now} now")


def drain(
    job: RUNNING_JOB,
    pod: Annotated[str, typer.Argument(help="Name of the pod, as in status.")],
) -> None:
    """Ask that a pod's work is handed over.

    Raises:
        UsageError: there is no such running job.
        CliError: the api refused, e.g. there is no such pod.
    """
    shown = asyncio.run(_drain(runs.find_running(job), pod))
    for leaving in shown["leaving"]:
        if pod in (leaving["pod"], leaving["uid"]):
            print(f"{shown['name']}: {describe_leaving(leaving)}")
            return
    print(f"{shown['name']}: pod {pod} serves no rank and gets none any more")


def suspend(job: str, *, wanted: bool) -> None:
    """Ask that a job writes a checkpoint and stands still, or that it goes on.

    Raises:
        UsageError: there is no such running job.
        CliError: the api refused, e.g. the job writes no checkpoints.
    """
    shown = asyncio.run(_suspend(runs.find_running(job), wanted))
    saved = shown["checkpoint"]["step"]
    if not wanted:
        where = f"from the checkpoint of step {saved}" if saved else "from the start"
        now = shown["state"]
        print(f"{shown['name']}: goes on" + (f" {where}" if now == "forming" else f", is {now}"))
    elif shown["state"] == "suspended":
        kept = f"the checkpoint of step {saved} is durable" if saved else "there is no checkpoint"
        print(f"{shown['name']}: suspended, {kept}")
    else:
        print(
            f"{shown['name']}: writes a checkpoint and stops; mainstay status says when it stands"
        )


def describe_leaving(leaving: dict[str, Any]) -> str:
    """Return one leaving pod's line, as a terminal may show it."""
    left_s = leaving["left_s"]
    limit = f", {left_s:.0f} s left" if left_s is not None else ""
    waits = f", waits: {leaving['waits']}" if leaving["waits"] else ""
    reason = f"{leaving['reason']}{limit}{waits}"
    return printable(f"pod {leaving['pod']} hands its work over: {reason}")


async def _scale(run: runs.Run, replicas: int) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.scale_job(run.job, replicas)


async def _suspend(run: runs.Run, wanted: bool) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.suspend_job(run.job, suspend=wanted)


async def _drain(run: runs.Run, pod: str) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.drain_pod(run.job, pod)
