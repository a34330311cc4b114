"""Redis and the api of a local run: started, and started again when they end.

Training does not need them between faults (protocol section 9), so the end of
one is a warning and a restart on the same data, not the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mainstay_cli.base import guard
from mainstay_cli.base.client import ApiClient
from mainstay_cli.local.keeper import Keeper
from mainstay_cli.local.processes import Child, ChildProcesses
from mainstay_cli.local.redis_server import answers, flush_redis, redis_command

GUARD = (sys.executable, "-I", "-S", guard.__file__)
"""Ends what it runs when we are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Addresses and directories of a run's services."""

    redis_server: Path
    redis_directory: Path
    redis_socket: Path
    logs: Path
    environment: Mapping[str, str]


class Services:
    """Redis and the api of one run."""

    def __init__(
        self, children: ChildProcesses, client: ApiClient, settings: ServiceSettings
    ) -> None:
        self._socket = settings.redis_socket

        def spawn(*command: str, log: Path) -> Child:
            return children.spawn([*GUARD, *command], log=log, environment=settings.environment)

        redis = redis_command(settings.redis_server, settings.redis_directory, self._socket)
        redis_log, api_log = self.logs = (settings.logs / "redis.log", settings.logs / "api.log")
        self._redis = Keeper(
            title="Redis",
            log=redis_log,
            places=(settings.redis_directory,),
            spawn=lambda: spawn(*redis, log=redis_log),
            serves=lambda: answers(self._socket),
        )
        self._api = Keeper(
            title="the api",
            log=api_log,
            places=(settings.logs,),
            spawn=lambda: spawn(sys.executable, "-m", "mainstay_api", log=api_log),
            serves=client.is_ready,
        )

    async def start(self) -> None:
        """Start both and return when the api is ready.

        Raises:
            MachineError: one of them ended instead.
        """
        await self._redis.start()
        await self._api.start()

    async def keep(self) -> None:
        """Start again what ends, until cancelled.

        Raises:
            CliError: one of them ended too often.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._redis.keep())
            group.create_task(self._api.keep())

    async def signal(self, name: str, number: int) -> Child:
        """Send a signal to ``redis`` or the ``api``, for an injected fault; return the process.

        One that is just away gets it once it serves again.
        """
        child = await {"redis": self._redis, "api": self._api}[name].wait_up()
        child.signal_group(number)
        return child

    async def flush(self) -> None:
        """Make Redis forget everything, for an injected fault; once it serves, if it is away."""
        while True:
            child = await self._redis.wait_up()
            with contextlib.suppress(OSError):
                await flush_redis(self._socket)
                return
            await asyncio.shield(child.ended)  # whoever does not answer has just ended
            await asyncio.sleep(0)  # its keeper takes note of that
