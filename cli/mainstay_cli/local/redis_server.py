"""Starts the Redis that holds a local run's history: a real server on a Unix socket only."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from mainstay_cli.base import guard
from mainstay_cli.base.exits import MachineError
from mainstay_cli.base.logs import last_line
from mainstay_cli.local.processes import Child, ChildProcesses

PING_INTERVAL_S = 0.02


async def start_redis(
    children: ChildProcesses,
    server: Path,
    directory: Path,
    socket: Path,
    log: Path,
    env: Mapping[str, str],
) -> Child:
    """Start redis-server and return it once it answers.

    Every write is on disk before it is confirmed, as the protocol asks
    (protocol section 9: ``appendfsync always``).

    Raises:
        MachineError: it ended instead.
    """
    command = [
        *(sys.executable, "-I", "-S", guard.__file__),
        str(server),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
        *("--dir", str(directory), "--daemonize", "no"),
    ]
    child = children.spawn(command, log=log, environment=env)
    while not child.ended.done():
        if await _answers(socket):
            return child
        await asyncio.wait([child.ended], timeout=PING_INTERVAL_S)
    raise MachineError(f"redis-server ended at once: {last_line(log)} (see {log})")


async def flush_redis(socket: Path) -> None:
    """Empty the store, as somebody does who mistakes it for a cache.

    Raises:
        OSError: it is not reached.
    """
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        writer.write(b"FLUSHALL SYNC\r\n")
        await writer.drain()
        await reader.readline()
    finally:
        writer.close()


async def _answers(socket: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()
