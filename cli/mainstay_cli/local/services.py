"""Redis and the api of a local run: started, and started again when they end.

Training does not need them between faults (protocol section 9), so the end of
one is a warning and a restart on the same data, not the end of the run.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mainstay_cli.base import guard
from mainstay_cli.base.client import ApiClient
from mainstay_cli.base.exits import CliError, ExitCode, MachineError
from mainstay_cli.base.logs import last_line
from mainstay_cli.local.processes import Child, ChildProcesses
from mainstay_cli.local.redis_server import flush_redis, start_redis

logger = logging.getLogger(__name__)

READY_INTERVAL_S = 0.05
MAX_RESTARTS = 5
"""Of each service in one run; more ends have a cause that another start will not mend."""


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
        self._children = children
        self._client = client
        self._settings = settings
        self._redis: Child | None = None
        self._api: Child | None = None

    async def start(self) -> None:
        """Start both and return when the api is ready.

        Raises:
            MachineError: one of them ended instead.
        """
        await self._start_redis()
        await self._start_api()

    async def keep(self) -> None:
        """Start again what ends, until cancelled.

        Raises:
            CliError: one of them ended too often.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_redis())
            group.create_task(self._keep_api())

    def signal(self, name: str, number: int) -> Child:
        """Send a signal to ``redis`` or the ``api``, for an injected fault; return the process."""
        child = {"redis": self._redis, "api": self._api}[name]
        assert child is not None
        child.signal_group(number)
        return child

    async def flush(self) -> None:
        """Make Redis forget everything, for an injected fault."""
        await flush_redis(self._settings.redis_socket)

    async def _keep_redis(self) -> None:
        for _ in range(MAX_RESTARTS):
            assert self._redis is not None
            await asyncio.shield(self._redis.ended)
            logger.warning("Redis ended; training goes on; starting it again")
            await self._start_redis()
        raise CliError(f"Redis ended too often (see {self._log('redis')})", ExitCode.FAILED)

    async def _keep_api(self) -> None:
        for _ in range(MAX_RESTARTS):
            assert self._api is not None
            await asyncio.shield(self._api.ended)
            logger.warning("the api ended; training goes on; starting it again")
            await self._start_api()
        raise CliError(f"the api ended too often (see {self._log('api')})", ExitCode.FAILED)

    async def _start_redis(self) -> None:
        settings = self._settings
        self._redis = await start_redis(
            self._children,
            settings.redis_server,
            settings.redis_directory,
            settings.redis_socket,
            self._log("redis"),
            settings.environment,
        )

    async def _start_api(self) -> None:
        command = [
            *(sys.executable, "-I", "-S", guard.__file__),
            *(sys.executable, "-m", "mainstay_api"),
        ]
        log = self._log("api")
        self._api = self._children.spawn(command, log=log, environment=self._settings.environment)
        while not await self._client.is_ready():
            if self._api.ended.done():
                raise MachineError(f"the api ended at once: {last_line(log)} (see {log})")
            await asyncio.wait([self._api.ended], timeout=READY_INTERVAL_S)

    def _log(self, name: str) -> Path:
        return self._settings.logs / f"{name}.log"
