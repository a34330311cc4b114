"""A relay before the API server that stops to carry what it is given, and tells nobody.

As a half-open connection does, or a proxy that has lost its way: nothing is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

LOOPBACK = "127.0.0.1"


class Relay:
    """Carries connections from a port of its own to another one. Use as a context manager."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listening = threading.Event()
        self._swallowing = False
        self._connections: list[list[bool]] = []
        """Of each: whether it is mute."""

    def __enter__(self) -> Relay:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def mute(self) -> None:
        """Carry nothing more of the connections that there are; new ones work."""
        for connection in self._connections:
            connection[0] = True

    def swallow(self) -> None:
        """Carry nothing of any connection, nor of new ones."""
        self._swallowing = True
        self.mute()

    def carry(self) -> None:
        """Carry new connections again."""
        self._swallowing = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, LOOPBACK, 0))
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mute = [self._swallowing]
        self._connections.append(mute)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target)
            await asyncio.gather(
                self._pump(reader, far_writer, mute), self._pump(far_reader, writer, mute)
            )
            far_writer.close()
        writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mute: list[bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not mute[0]:
                    writer.write(data)
                    await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
