"""Has the api forget the jobs that are no more.

No deletion waits for it: not that of a job, nor that of its namespace, whether the operator and the
api are there or not. A record is under the job's uid, so one that stays for a while harms nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from mainstay_core.base.logs import about
from mainstay_core.wire.api import ApiError
from mainstay_core.wire.page import KnownJob
from mainstay_core.wire.routes import JobApi

logger = logging.getLogger(__name__)

AGAIN_S = 5.0
"""An api that is away is back in seconds, and nothing but room in its store waits for it."""


class Records:
    """Asks the api to forget jobs, for as long as it takes.

    Args:
        api: client of the api.
        again_s: so long after the api has not done it, it is asked again.
    """

    def __init__(self, api: JobApi, again_s: float = AGAIN_S) -> None:
        self._api = api
        self._again_s = again_s
        self._gone: set[str] = set()
        self._wake = asyncio.Event()

    def forget(self, uid: str) -> None:
        """Learn that a job is no more, or is being deleted."""
        self._gone.add(uid)
        self._wake.set()

    async def fetch_known(self) -> tuple[KnownJob, ...] | None:
        """Return the jobs that the api knows; None if it does not say."""
        try:
            return await self._api.fetch_known_jobs()
        except ApiError as error:
            logger.info("which jobs the api knows is not known: %s", error)
            return None

    async def run(self) -> None:
        """Have the api forget what is gone, for ever; what goes wrong is logged and tried again."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                is_done = await self._ask()
            except Exception:
                logger.exception("records")
                is_done = False
            if not is_done:
                await asyncio.sleep(self._again_s)
                self._wake.set()

    async def _ask(self) -> bool:
        """Ask once for each job; return whether the api has done it all."""
        is_done = True
        for uid in sorted(self._gone):
            try:
                await self._api.delete_job(uid)
            except ApiError as error:
                logger.warning(
                    "the job is no more, but its record is: %s", error, extra=about(uid=uid)
                )
                is_done = False
                if error.is_away:
                    break
            else:
                self._gone.discard(uid)
                fields = about(uid=uid, decision="Forget")
                logger.info("the api has forgotten the job", extra=fields)
        return is_done


def find_orphans(
    known: Iterable[KnownJob], there: Collection[str], namespaces: Collection[str]
) -> list[str]:
    """Return the uids of jobs that the api knows and that are in their namespace no more.

    Args:
        known: jobs that the api knew before the cluster was asked: one that was made since then
            is not among them, and one whose record has been there all the time had its object.
        there: uids of the jobs that the cluster has.
        namespaces: those that the cluster was asked for; empty: all.
    """
    return sorted(
        job.uid
        for job in known
        if job.namespace
        and job.uid not in there
        and (not namespaces or job.namespace in namespaces)
    )
