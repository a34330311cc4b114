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
    carrying: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Held here: the loop itself lets go of tasks that still wait.
        task = asyncio.create_task(carry(reader, writer, host, port))
        carrying.add(task)
        task.add_done_callback(carrying.discard)

    server = await asyncio.start_server(accept, sock=listening)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
