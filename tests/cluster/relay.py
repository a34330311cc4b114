"""Carries connections of a listening socket to an address in this process's network namespace.

The socket is made in the caller's namespace and inherited: a port on the host's loopback leads into
a cluster whose addresses exist nowhere else. ``python relay.py FD HOST PORT``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
) -> None:
    with contextlib.suppress(OSError):
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        far_writer.close()
    writer.close()


async def serve(listening: socket.socket, host: str, port: int) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: carry(reader, writer, host, port), sock=listening
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
