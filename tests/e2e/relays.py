"""An api process that a test ends and starts, and relays that keep what it sends from some pods."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from tests.api.conftest import Redis
from tests.e2e.harness import POLL_S

TOKEN = "one-token"
READ_BYTES = 1 << 16


class Relays:
    """One TCP relay per pod, all in one event loop of a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Relay:
    """Stands between one pod and the api."""

    def __init__(self, relays: Relays, api_port: int) -> None:
        self._relays = relays
        self._api_port = api_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows, self._hears = asyncio.Event(), asyncio.Event()
        self._flows.set()
        self._hears.set()
        self._server = relays.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hold(self) -> None:
        """Keep what the api sends from the pod; what the pod sends goes through."""
        self._relays.run(self._set(flows=False, hears=True))

    def silence(self) -> None:
        """Let nothing through in either direction; no connection ends."""
        self._relays.run(self._set(flows=False, hears=False))

    def drop(self) -> None:
        """End all connections with what they held; new ones are let through again."""
        self._relays.run(self._drop())

    async def _set(self, *, flows: bool, hears: bool) -> None:
        (self._flows.set if flows else self._flows.clear)()
        (self._hears.set if hears else self._hears.clear)()

    async def _drop(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self._set(flows=True, hears=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, away = await asyncio.open_connection("127.0.0.1", self._api_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, away}
        await asyncio.gather(
            self._pump(reader, away, self._hears), self._pump(there, writer, self._flows)
        )
        self._writers -= {writer, away}

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        flows: asyncio.Event,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class ApiProcess:
    """An api process on a port that it keeps."""

    def __init__(self, redis: Redis, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._environment = os.environ | {
            "MAINSTAY_REDIS_URL": redis.url,
            "MAINSTAY_TOKEN": TOKEN,
            "MAINSTAY_API_PORT": str(self.port),
            "MAINSTAY_REDIS_TIMEOUT_S": "1",
        }
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            trust_env=False,
            timeout=30,
        )

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "mainstay_api"]
            self.process = subprocess.Popen(command, env=self._environment, stderr=log)
        while not self._answers():
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(POLL_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/healthz").is_success
        return False
