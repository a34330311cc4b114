"""Certificates of a test's own authority, and a relay that speaks TLS before a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from pathlib import Path

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(folder: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)


class Certificates:
    """An authority, a server's and a client's certificate that it signed, and a stranger's."""

    def __init__(self, folder: Path, names: str = "IP:127.0.0.1") -> None:
        self.folder = folder
        self.authority = self._make_authority("ca")
        self.stranger = self._make_authority("stranger")
        self.server, self.server_key = self._sign("server", names)
        self.client, self.client_key = self._sign("client", "DNS:client")

    def _make_authority(self, name: str) -> Path:
        files = ("-keyout", f"{name}.key", "-out", f"{name}.crt")
        _openssl(
            self.folder, "req", "-x509", *_CURVE, "-days", "30", *files, "-subj", f"/CN={name}"
        )
        return self.folder / f"{name}.crt"

    def _sign(self, name: str, names: str) -> tuple[Path, Path]:
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        _openssl(self.folder, "req", "-new", *_CURVE, *files, "-subj", f"/CN={name}")
        about = f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        (self.folder / f"{name}.ext").write_text(about)
        by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30")
        told = ("-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", f"{name}.ext")
        _openssl(self.folder, "x509", "-req", *told, *by)
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"


class TlsRelay:
    """A TLS server on loopback that passes everything on to a Unix socket; callers need the
    client's certificate."""

    def __init__(self, certificates: Certificates, target: Path) -> None:
        self._target = target
        self._context = ssl.create_default_context(
            ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.authority)
        )
        self._context.load_cert_chain(certificates.server, certificates.server_key)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self.address = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0, ssl=self._context)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(self._target))
        ways = [_copy(reader, inner_writer), _copy(inner_reader, writer)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for each in (writer, inner_writer):
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
