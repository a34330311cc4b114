"""Seals the small files of a checkpoint: they are checked before anything in them is parsed.

A sealed file is one line of ASCII and a body of JSON (UTF-8)::

    mainstay-checkpoint 2 manifest sha256:<64 digits> hmac-sha256:<64 digits>
    {"version": 20, ...}

The SHA-256 is that of the body; ``tail -n +2 FILE | sha256sum`` computes it. It finds damage. The
keyed digest (HMAC-SHA256, RFC 2104) is there if the writer had a key. It covers the kind and the
body, so nobody without the key can make a file, or pass one kind for another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from typing import TypeVar

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError, InvalidSpecError, MainstayError, brief

T = TypeVar("T")
Keys = Sequence[bytes]
"""Keys of keyed digests: the first signs, each may have signed. Empty: nothing is signed."""

FORMAT = 2
MAX_SEALED_BYTES = 16 << 20
"""A manifest of 40,000 parts, or a part of 100,000 tensors, fits. Parsing takes some twenty times
as much memory."""
MIN_KEY_BYTES = 16
MAX_KEY_FILE_BYTES = 1 << 16
KEY_FILE_VARIABLE = "MAINSTAY_CHECKPOINT_KEY_FILE"
"""Environment variable with the path of the key file, for trainers and commands alike."""
_MAX_HEADER_BYTES = 256
_HEADER = re.compile(
    rb"mainstay-checkpoint ([1-9]\d{0,8}) ([a-z]{1,16}) sha256:([0-9a-f]{64})"
    rb"(?: hmac-sha256:([0-9a-f]{64}))?"
)


def seal(kind: str, body: str, keys: Keys = ()) -> bytes:
    """Return a sealed file.

    Args:
        kind: what it is, in small letters; a reader asks for the same.
        body: JSON.
        keys: the first one signs.

    Raises:
        IntegrityError: the body is too long for a reader.
    """
    content = body.encode()
    header = f"mainstay-checkpoint {FORMAT} {kind} sha256:{hashlib.sha256(content).hexdigest()}"
    if keys:
        header += f" hmac-sha256:{_keyed(keys[0], kind, content)}"
    data = header.encode() + b"\n" + content
    if len(data) > MAX_SEALED_BYTES:
        raise IntegrityError(f"the {kind} would have {len(data)} bytes, at most {MAX_SEALED_BYTES}")
    return data


def unseal(data: bytes, kind: str, keys: Keys = ()) -> str:
    """Return the body of a sealed file whose digests are right.

    Args:
        data: the whole file.
        kind: what it must be.
        keys: one of them must have signed it, if there are any.

    Raises:
        IntegrityError: it is no such file, it is damaged, or no key of ours has signed it.
    """
    if len(data) > MAX_SEALED_BYTES:
        raise IntegrityError(f"the {kind} has more than {MAX_SEALED_BYTES} bytes")
    header, newline, content = data.partition(b"\n")
    match = _HEADER.fullmatch(header) if newline and len(header) <= _MAX_HEADER_BYTES else None
    if match is None:
        raise IntegrityError(f"the {kind} is damaged: its first line is none of ours")
    if int(match[1]) != FORMAT:
        raise IntegrityError(
            f"the {kind} has format {int(match[1])}, this version of Mainstay reads {FORMAT}"
        )
    if match[2] != kind.encode():
        raise IntegrityError(f"the {kind} is damaged: it says that it is a {match[2].decode()}")
    if hashlib.sha256(content).hexdigest().encode() != match[3]:
        raise IntegrityError(f"the {kind} is damaged: it does not have its SHA-256")
    _check_signature(content, kind, match[4], keys)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise IntegrityError(f"the {kind} is no text: {error.reason}") from error


def is_signed(data: bytes) -> bool:
    """Return whether a sealed file carries a keyed digest, right or wrong."""
    match = _HEADER.fullmatch(data[:_MAX_HEADER_BYTES].partition(b"\n")[0])
    return match is not None and match[4] is not None


def read_sealed(cls: type[T], data: bytes, kind: str, keys: Keys = ()) -> T:
    """Return the value in a sealed file, its types checked.

    Raises:
        IntegrityError: see :func:`unseal`; or the body is no such value.
    """
    body = unseal(data, kind, keys)
    try:
        return codec.decode(cls, json.loads(body))
    except (MainstayError, ValueError, ArithmeticError, RecursionError) as error:
        raise IntegrityError(f"the {kind} cannot be read: {brief(error)[:200]}") from error


def parse_keys(text: str) -> tuple[bytes, ...]:
    """Return the keys in the text of a key file: one per line, the one that signs first.

    Raises:
        InvalidSpecError: there is none, or one is too short to be a secret.
    """
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line.encode() for line in lines if line)
    if not keys or any(len(key) < MIN_KEY_BYTES for key in keys):
        raise InvalidSpecError(
            KEY_FILE_VARIABLE,
            f"a key is a line of at least {MIN_KEY_BYTES} bytes; the first line signs, further "
            "lines are older keys",
        )
    return keys


def _keyed(key: bytes, kind: str, content: bytes) -> str:
    context = f"mainstay-checkpoint {FORMAT} {kind}\n".encode()
    return hmac.new(key, context + content, hashlib.sha256).hexdigest()


def _check_signature(content: bytes, kind: str, told: bytes | None, keys: Keys) -> None:
    if not keys:
        return
    if told is None:
        raise IntegrityError(f"the {kind} is not signed, and a key is given that should have")
    expected = [_keyed(key, kind, content).encode() for key in keys]
    # No early end: the time must not tell which key comes near.
    if not any([hmac.compare_digest(one, told) for one in expected]):  # noqa: C419
        raise IntegrityError(f"the {kind} is not signed by a key that is given")
