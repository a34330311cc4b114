"""Proves two ends of a connection to each other: both know the job's secret.

Pods of one job hold one secret. Whoever calls another pod (a member its gather server, a supervisor
another one, a joiner its source) and whoever listens prove it to each other before anything else is
said. Three messages of fixed size, the three-pass mutual authentication by a keyed digest of
ISO/IEC 9798-4::

    caller   -> listener   magic, version, purpose, caller's nonce
    listener -> caller     magic, version, listener's nonce, digest from the listener
    caller   -> listener   digest from the caller

Each digest (HMAC-SHA256) covers both nonces, who gives it, the purpose, and the address that the
caller has called. So the secret never travels, and a proof is good for one connection, in one
direction, for one purpose and to one listener: who listens cannot use it anywhere else, neither
later nor by passing messages on meanwhile. What follows the proof is plain.

No IO and no randomness: nonces are arguments, bytes come in and go out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Collection
from enum import IntEnum

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import PREFIX, pack

VERSION = 3
"""Of the protocol between pods. In version 1 the first frame carried a proof of its own; in version
2 the ranks of a group did not meet by the gather."""
NONCE_BYTES = 32
"""As long as the digest: no two connections of a job's life draw the same."""
DIGEST_BYTES = 32
_MAGIC = b"MSTY"
"""A frame of version 1 begins with the size of its head; as one this is beyond every bound."""
_HELLO = struct.Struct(f"!4sBB{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"!4sB{NONCE_BYTES}s{DIGEST_BYTES}s")
ANSWER_BYTES = _ANSWER.size
HELLO_BYTES = _HELLO.size
"""The most that a listener holds of a peer that has proved nothing."""
_OLD_HEAD_BYTES = 1 << 16
"""No first frame of version 1 had a longer head, but for plans."""


class Purpose(IntEnum):
    """The purposes for which one pod calls another."""

    MEET = 1
    """A member joins the gather of its quorum."""
    GOSSIP = 2
    """A supervisor offers a plan to another one."""
    HEAL = 3
    """A joiner copies the state of a living cell."""
    SNAPSHOT = 4
    """A store of segments sends some to another one, or a trainer reads some."""


class RefusedPeerError(RemoteProtocolError):
    """A peer that calls has not proved what it must, or does not speak the protocol.

    Args:
        why: the reason in one sentence.
        answer: bytes to send before the connection is closed.
    """

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


class CallerProof:
    """The caller's side of one connection: send :attr:`hello`, read the answer, send the proof.

    Args:
        secret: of the job; empty for a job without one, which is then everybody's.
        nonce: random bytes, drawn for this connection alone.
        listener: the address that is called, as plans and reports name it.
        purpose: what is wanted.
    """

    def __init__(self, secret: str, nonce: bytes, listener: str, purpose: Purpose) -> None:
        self._secret, self._nonce = secret, nonce
        self._listener, self._purpose = listener, purpose
        self.hello = _HELLO.pack(_MAGIC, VERSION, purpose, nonce)
        """What is sent first."""

    def answered(self, answer: bytes) -> bytes:
        """Return the caller's proof, to be sent next; the listener has proved itself.

        Args:
            answer: the first ``ANSWER_BYTES`` bytes that came.

        Raises:
            RemoteProtocolError: the listener speaks another version, or does not know the secret.
        """
        magic, version, nonce, digest = _ANSWER.unpack(answer)
        if magic != _MAGIC:
            raise RemoteProtocolError(_other_version("an older version or something else"))
        if version != VERSION:
            raise RemoteProtocolError(_other_version(f"version {version}"))
        parts = (self._purpose, self._listener, self._nonce, nonce)
        if not hmac.compare_digest(digest, _digest(self._secret, "listener", *parts)):
            raise RemoteProtocolError("the listener gave no proof of the job's secret")
        return _digest(self._secret, "caller", *parts)


class ListenerProof:
    """The listener's side of one connection. It holds at most ``HELLO_BYTES`` bytes.

    Args:
        secret: of the job.
        nonce: random bytes, drawn for this connection alone.
        address: of the listener, as plans and reports name it.
        purposes: for which it may be called.
    """

    def __init__(
        self, secret: str, nonce: bytes, address: str, purposes: Collection[Purpose]
    ) -> None:
        self._secret, self._nonce, self._address = secret, nonce, address
        self._purposes = purposes
        self._buffer = b""
        self._expected: bytes | None = None
        self._asked: Purpose | None = None
        self.purpose: Purpose | None = None
        """What the caller wants, once it has proved that it knows the secret."""

    @property
    def wanted(self) -> int:
        """Number of bytes to read next: never more, what follows the proof is not ours."""
        size = HELLO_BYTES if self._expected is None else DIGEST_BYTES
        return size - len(self._buffer)

    def received(self, data: bytes) -> bytes:
        """Take at most ``wanted`` bytes and return what to send.

        Raises:
            RefusedPeerError: the peer is to be closed, after it was sent the error's answer.
        """
        self._buffer += data
        if self._expected is None and self._buffer[:4] != _MAGIC[: len(self._buffer)]:
            if len(self._buffer) < PREFIX.size and self._buffer[:1] == b"\0":
                return b""
            raise RefusedPeerError("it does not speak as a pod does", self._word_to_old())
        if self.wanted:
            return b""
        taken, self._buffer = self._buffer, b""
        if self._expected is None:
            return self._challenge(taken)
        if not hmac.compare_digest(taken, self._expected):
            raise RefusedPeerError("no proof of the job's secret")
        self.purpose = self._asked
        return b""

    def _challenge(self, hello: bytes) -> bytes:
        _, version, purpose, nonce = _HELLO.unpack(hello)
        if version != VERSION:
            known = _ANSWER.pack(_MAGIC, VERSION, b"", b"")
            raise RefusedPeerError(_other_version(f"version {version}"), known)
        if purpose not in self._purposes:
            raise RefusedPeerError(f"nobody listens here for purpose {purpose}")
        self._asked = Purpose(purpose)
        parts = (self._asked, self._address, nonce, self._nonce)
        self._expected = _digest(self._secret, "caller", *parts)
        mine = _digest(self._secret, "listener", *parts)
        return _ANSWER.pack(_MAGIC, VERSION, self._nonce, mine)

    def _word_to_old(self) -> bytes:
        """Return what version 1 understands as a refusal, if that is what the peer speaks."""
        if len(self._buffer) < PREFIX.size:
            return b""
        head_size, body_size = PREFIX.unpack_from(self._buffer)
        if body_size or not 0 < head_size < _OLD_HEAD_BYTES:
            return b""
        return pack({"kind": "abort", "why": _other_version("version 1"), "suspects": []})


def _other_version(told: str) -> str:
    return (
        f"the other pod speaks {told} of the protocol between pods, this one version {VERSION}: "
        "pods of one job run one version; suspend the job and resume it"
    )


def _digest(
    secret: str, giver: str, purpose: Purpose, address: str, caller: bytes, listener: bytes
) -> bytes:
    # As JSON, so that no two sets of parts are written alike.
    parts = ["mainstay", VERSION, giver, purpose.name, address, caller.hex(), listener.hex()]
    return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).digest()
