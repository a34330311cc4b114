"""``python -m mainstay_api``: serve until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from mainstay_api.app import create_app, create_metrics_app
from mainstay_api.limits import KEEP_ALIVE_S
from mainstay_api.redis_client import RedisLogin
from mainstay_api.settings import Settings
from mainstay_api.store import RedisStore
from mainstay_core.base.admission import Bounds
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.logs import start_logging
from mainstay_net.acceptor import listen, raise_descriptor_limit
from mainstay_net.http import HEAD_BYTES, HttpEntrance

BOUNDS = Bounds(total=1024)
"""On connections without an admitted request: more than on others, since every pod of every job
calls here, all at once when the api comes back."""
METRICS_BOUNDS = Bounds(total=64, per_address=32, answer_s=10.0)
"""On connections to the port of the metrics: a few scrapers call, and nobody proves anything."""
EXIT_USAGE = 2
GRACE_S = 1
"""For requests in flight at the end; streams are ended at once."""


class Server(uvicorn.Server):
    """A server that bounds strangers, and whose open streams end with the signal.

    Args:
        app: of the api.
        bounds: on connections without an admitted request.
        metrics_listener: where the metrics are served without a token; None: nowhere.
    """

    def __init__(
        self,
        app: FastAPI,
        bounds: Bounds = BOUNDS,
        metrics_listener: socket.socket | None = None,
    ) -> None:
        super().__init__(_config(app))
        self._bounds = bounds
        self._metrics_listener = metrics_listener
        self._metrics_app = create_metrics_app(app)
        self._streams = app.state.streams
        self._connections = app.state.connections
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start without listening, then accept within bounds: the base class knows none."""
        await super().startup(sockets=[])
        make = partial(self._make_protocol, self.config)
        self._connections.entrances = [
            HttpEntrance(listener, make, self._bounds) for listener in sockets or ()
        ]
        if self._metrics_listener is not None:
            config = _config(self._metrics_app)
            config.load()
            make = partial(self._make_protocol, config)
            entrance = HttpEntrance(self._metrics_listener, make, METRICS_BOUNDS, HEAD_BYTES)
            self._metrics_app.state.connections.entrances = [entrance]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more, and let what is connected end."""
        scraped = self._metrics_app.state.connections
        for entrance in (*self._connections.entrances, *scraped.entrances):
            entrance.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in good order and with code 0: the base class would raise the signal again."""
        del frame
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._streams.close)
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    def _make_protocol(self, config: uvicorn.Config) -> asyncio.Protocol:
        # As the base class does for its own listeners.
        make = cast(Callable[..., asyncio.Protocol], config.http_protocol_class)
        return make(config=config, server_state=self.server_state, app_state=self.lifespan.state)


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        # The loop that the tests and figures are of, wherever another one is installed.
        loop="asyncio",
        ws="none",
        # The one that bounds a request's head, wherever another one is installed.
        http="h11",
        h11_max_incomplete_event_size=HEAD_BYTES,
        # Who asks is known by the token, never by a header; and a connection by its own address.
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the api and return its exit code: 0 after a signal, 2 when it cannot start."""
    parser = argparse.ArgumentParser(
        prog="python -m mainstay_api",
        description="Serve the api. Settings come from MAINSTAY_* variables: REDIS_URL, "
        "REDIS_PASSWORD, REDIS_SENTINEL_PASSWORD, REDIS_CA_FILE, REDIS_CERT_FILE, REDIS_KEY_FILE, "
        "REDIS_TIMEOUT_S, MAX_BODY_MIB, API_HOST, API_PORT, METRICS_PORT, FAULT_INJECTION, "
        "POD_REQUESTS_PER_S, JOB_REQUESTS_PER_S, JOB_MIB_PER_S, PERSON_REQUESTS_PER_S, "
        "STREAMS_PER_POD, MAX_EVENTS, MAX_EVENTS_MIB, LOG_LEVEL; AUTH=token with TOKEN (or "
        "ADMIN_TOKEN and AGENT_TOKEN); AUTH=kubernetes with OPERATOR_USER, REVIEW_CACHE_S, and "
        "outside a pod KUBE_URL, KUBE_TOKEN_FILE, KUBE_CA_FILE.",
    )
    parser.add_argument("--port-file", type=Path, help="write the port there once it is bound")
    options = parser.parse_args(arguments)
    raise_descriptor_limit()
    try:
        settings = Settings.from_environment(os.environ)
        app = create_app(settings, open_store(settings))
        listener = _bind("MAINSTAY_API_PORT", settings.host, settings.port)
        metrics = settings.metrics_port
        scraped = _bind("MAINSTAY_METRICS_PORT", settings.host, metrics) if metrics else None
    except InvalidSpecError as error:
        sys.stderr.write(f"mainstay-api: {error}\n")
        return EXIT_USAGE
    start_logging(settings.log_level)
    # A line for each request that is none would fill the disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    port = listener.getsockname()[1]
    if options.port_file is not None:
        _write_whole(options.port_file, f"{port}\n")
    logging.getLogger(__name__).info("serving on http://%s:%d", settings.host, port)
    if scraped is not None:
        logging.getLogger(__name__).info("metrics are on port %d", scraped.getsockname()[1])
    # What is there now stays. To look through it for garbage again and again would hold all
    # requests up, for a tenth of a second each time.
    gc.collect()
    gc.freeze()
    Server(app, metrics_listener=scraped).run(sockets=[listener])
    return 0


def open_store(settings: Settings) -> RedisStore:
    """Return the store that the settings name; nothing is connected yet.

    Raises:
        InvalidSpecError: its url cannot be used.
    """
    login = RedisLogin(
        password=settings.redis_password,
        sentinel_password=settings.redis_sentinel_password,
        ca_file=settings.redis_ca_file,
        cert_file=settings.redis_cert_file,
        key_file=settings.redis_key_file,
    )
    return RedisStore(
        settings.redis_url,
        max_events=settings.max_events,
        max_events_bytes=settings.max_events_mib << 20,
        timeout_s=settings.redis_timeout_s,
        login=login,
    )


def _bind(variable: str, host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        InvalidSpecError: the address cannot be had.
    """
    try:
        return listen(host, port)
    except OSError as error:
        raise InvalidSpecError(
            variable,
            f"cannot listen on {host}:{port} ({error.strerror}); "
            "choose another port, or 0 for a free one",
        ) from error


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half-written."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text)
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
