"""Follows a job through the api and reports what is new: steps, recoveries, events."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from mainstay_cli.base.client import ApiClient
from mainstay_cli.views.progress import PlainProgress, StepLine
from mainstay_core.job.phase import TERMINAL
from mainstay_core.wire.api import ApiError

POLL_S = 0.25
"""Between two looks, unless steps take longer: to ask and to answer takes processor time that is
the job's on this machine."""
MAX_POLL_S = 1.0
"""Between two looks at most, however long a step takes."""
LATE_SHARE = 0.05
"""The end of a job may be seen late by this share of the time that it was watched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The state of a job, its reason, and the step that it has reached."""

    state: str
    reason: str
    step: int
    recovering: bool = False
    """Whether something has been done about a fault and is not over."""

    @property
    def ended(self) -> bool:
        """Whether nothing will happen any more."""
        return self.state in TERMINAL


class Pace:
    """Chooses how long to wait between two looks at a job, within bounds.

    That is about a step, and longer the longer the job was watched: a look is several requests.
    """

    def __init__(self) -> None:
        self.wait_s = POLL_S
        self._step = 0
        self._step_s = 0.0
        """How long a step takes; 0 while that is not known."""
        self._at_s = 0.0
        """When the step was seen first."""
        self._since_s: float | None = None
        """When the job was seen first."""

    def see(self, job: JobState, now_s: float) -> None:
        """Take note of the job as it is.

        Args:
            job: as it was looked at.
            now_s: a clock that never jumps.
        """
        if self._since_s is None:
            self._since_s = now_s
        steps = job.step - self._step
        if steps > 0 and self._step > 0:
            self._step_s = (now_s - self._at_s) / steps
        if job.recovering or steps < 0:
            self.wait_s = min(max(POLL_S, self._step_s), MAX_POLL_S)
        elif self._step > 0:
            late_s = LATE_SHARE * (now_s - self._since_s)
            self.wait_s = min(max(POLL_S, self._step_s, late_s), MAX_POLL_S)
        if steps:
            self._step, self._at_s = job.step, now_s


class Monitor:
    """Watches one job until it has ended."""

    def __init__(
        self, client: ApiClient, job: str, num_steps: int, progress: PlainProgress
    ) -> None:
        self._client = client
        self._job = job
        self._num_steps = num_steps
        self._progress = progress
        self._num_shown = 0
        self._num_events = 0
        self._quorum: Any = None
        """Of which all recoveries were shown, to their end."""
        self._unreachable = False

    async def watch(self) -> JobState:
        """Show what happens until the job has ended, and return how it ended."""
        pace = Pace()
        while True:
            try:
                job = await self._look()
            except ApiError as error:
                # Training does not need the api; the run starts it again.
                if not self._unreachable:
                    self._progress.warn(str(error))
                self._unreachable = True
            else:
                self._unreachable = False
                if job.ended:
                    return job
                pace.see(job, time.monotonic())
            await asyncio.sleep(pace.wait_s)

    async def fetch_recoveries(self) -> list[dict[str, Any]]:
        """Return all recoveries, oldest first."""
        return list(await self._client.fetch(self._job, "recoveries"))

    async def show_rest(self) -> None:
        """Show the steps that the ledger has beyond those that were shown."""
        for entry in await self._client.fetch(self._job, f"ledger?since={self._num_shown}"):
            self._show_step(entry)

    async def _look(self) -> JobState:
        data = await self._client.fetch(self._job)
        job = JobState(
            state=str(data["state"]),
            reason=str(data.get("reason", "")),
            step=int(data["step"]),
            recovering=bool(data["recovering"]),
        )
        if job.step > self._num_shown:
            await self.show_rest()
        if self._progress.shows_members:
            self._progress.members(list(await self._client.fetch(self._job, "members")))
        if data["quorum"] != self._quorum or data["recovering"]:
            await self._show_recoveries(data["quorum"])
        if self._progress.shows_events:
            events = list(await self._client.fetch(self._job, "events"))
            for event in events[self._num_events :]:
                self._progress.event(event)
            self._num_events = len(events)
        return job

    async def _show_recoveries(self, quorum: Any) -> None:
        """Show what is new of all recoveries.

        Args:
            quorum: the job's, read before.
        """
        recoveries = await self.fetch_recoveries()
        for recovery in recoveries:
            self._progress.recovery(recovery)
        if all(recovery["done"] for recovery in recoveries):
            self._quorum = quorum

    def _show_step(self, entry: dict[str, Any]) -> None:
        """Show the entry of one committed step; those of its other stages add nothing."""
        step = int(entry["step"])
        if step < self._num_shown:
            return
        self._num_shown = step + 1
        quorum = entry["quorum"]
        seconds = float(entry["step_s"])
        self._progress.step(
            StepLine(
                step=step,
                num_steps=self._num_steps,
                loss=float(entry["loss"]),
                tokens_per_s=entry["tokens"] / seconds if seconds else 0.0,
                quorum=f"q{quorum['id']}",
                replicas=int(entry["replicas"]),
                approximate_since=entry.get("approximate_since"),
            )
        )
