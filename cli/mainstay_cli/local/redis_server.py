"""The Redis that holds a local run's history: a real server on a Unix socket only."""

from __future__ import annotations

import asyncio
from pathlib import Path


def redis_command(server: Path, directory: Path, socket: Path) -> tuple[str, ...]:
    """Return the command of a redis-server.

    Every write is on disk before it is confirmed, as the protocol asks
    (protocol section 9: ``appendfsync always``).
    """
    return (
        str(server),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
        *("--dir", str(directory), "--daemonize", "no"),
    )


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


async def answers(socket: Path) -> bool:
    """Return whether a Redis serves on a socket."""
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
