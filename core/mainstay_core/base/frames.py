"""Packs and parses length-prefixed frames for sockets: a small JSON head, then raw bytes.

Layout of one frame, big-endian: ``u32 head size, u64 body size, head, body``. The head is a JSON
object with at least ``kind``. The body is opaque (tensors travel here, never pickled). The parser
does no IO: feed it bytes, take frames.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.base.errors import RemoteProtocolError

PREFIX = struct.Struct("!IQ")
MAX_HEAD_BYTES = 64 * 1024 * 1024
"""Bound on a head. The longest is the plan of a job with 100,000 ranks: 25 MB."""
MAX_BODY_BYTES = 1 << 30
"""Bound on a body. The longest is what 100,000 ranks say in a vote or a settle: hundreds of MB."""
FIRST_HEAD_BYTES = 64 * 1024
"""Bound on the first frame of a peer that has not said yet who it is: a few names."""


_compact = json.JSONEncoder(separators=(",", ":"))
"""Made once: ``json.dumps`` makes one for each head that is not written in its own way."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: ``head`` carries kind and values, ``body`` raw bytes."""

    head: dict[str, Any]
    body: bytes = b""

    @property
    def kind(self) -> str:
        """Return the kind of the message. Every protocol lists its kinds."""
        return str(self.head.get("kind", ""))


def pack_head(head: dict[str, Any], body_size: int = 0) -> bytes:
    """Return prefix and head of a frame whose body of ``body_size`` bytes follows."""
    return pack_json(_compact.encode(head), body_size)


def pack_json(head: str, body_size: int = 0) -> bytes:
    """Return prefix and head of a frame; the head is JSON already."""
    raw = head.encode()
    return PREFIX.pack(len(raw), body_size) + raw


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a whole frame as bytes."""
    return pack_head(head, len(body)) + body


def parse_prefix(
    raw: bytes, max_head: int = MAX_HEAD_BYTES, max_body: int = MAX_BODY_BYTES
) -> tuple[int, int]:
    """Return (head size, body size) in bytes.

    Args:
        raw: the first ``PREFIX.size`` bytes of a frame.
        max_head: bound on the head, in bytes.
        max_body: bound on the body, in bytes.

    Raises:
        RemoteProtocolError: the sizes are out of bounds.
    """
    head_size, body_size = PREFIX.unpack(raw)
    if head_size > max_head or body_size > max_body:
        raise RemoteProtocolError(f"frame of {head_size} + {body_size} bytes refused")
    return head_size, body_size


def parse_head(raw: bytes) -> dict[str, Any]:
    """Return a frame's head.

    Raises:
        RemoteProtocolError: it is no JSON object.
    """
    try:
        head = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"frame head is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise RemoteProtocolError("frame head is not an object")
    return head


@dataclass(slots=True)
class FrameParser:
    """Incremental parser: ``feed`` bytes as they come, get whole frames.

    Args:
        max_head: bound on a head, in bytes; may be changed between frames.
        max_body: bound on a body, in bytes; may be changed between frames.
    """

    max_head: int = MAX_HEAD_BYTES
    max_body: int = MAX_BODY_BYTES
    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames completed by ``data``, in order.

        Raises:
            RemoteProtocolError: the bytes are not frames.
        """
        return list(self.drain(data))

    def drain(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames completed by ``data``, one by one: bounds may change in between.

        Raises:
            RemoteProtocolError: the bytes are not frames.
        """
        self._buffer += data
        while len(self._buffer) >= PREFIX.size:
            head_size, body_size = parse_prefix(
                bytes(self._buffer[: PREFIX.size]), self.max_head, self.max_body
            )
            end = PREFIX.size + head_size + body_size
            if len(self._buffer) < end:
                return
            head = parse_head(bytes(self._buffer[PREFIX.size : PREFIX.size + head_size]))
            body = bytes(self._buffer[PREFIX.size + head_size : end])
            del self._buffer[:end]
            yield Frame(head, body)
