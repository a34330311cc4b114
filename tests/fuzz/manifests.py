"""Fuzzes the sealed files of checkpoints: manifests, descriptions of parts, owners, key files.

An input is a line that names the kind of file, and the file. Changes of what is in it are sealed
anew, as somebody would who writes such files on purpose; without that none passes its digest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.core.wire.test_checkpoint_manifest import MANIFEST, PART
from tests.fuzz.mutation import change_bytes, change_json, smaller_bytes, smaller_json, write_json
from tests.fuzz.texts import check_error, join, split

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError, InvalidSpecError
from mainstay_core.wire.checkpoint_manifest import (
    differences,
    parse_manifest,
    parse_name,
    parse_part,
)
from mainstay_core.wire.checkpoint_owner import (
    Claim,
    Owner,
    judge_claims,
    parse_claim_name,
    parse_owner,
)
from mainstay_core.wire.sealed import is_signed, parse_keys, seal, unseal

KEY = b"a key of sixteen bytes or more"
OWNER = Owner(uid="u1", name="demo", namespace="research", claimed_at_s=12.5)
VALID = {"manifest": MANIFEST, "part": PART, "owner": OWNER}
NAMES = (b"step-00000020", b"step-00000020.tmp-5eed", b"step-00000005.bad", b"owner-00000001")


class Manifests:
    """Sealed files as somebody may have written them who can write to the storage."""

    name = "manifests"

    def __init__(self) -> None:
        self._bodies = {kind: codec.dumps(value) for kind, value in VALID.items()}
        self._values = [json.loads(body) for body in self._bodies.values()]
        self._files = [
            (kind, seal(kind, body, keys))
            for kind, body in self._bodies.items()
            for keys in ((), (KEY,))
        ]

    def examples(self) -> list[bytes]:
        files = [join(kind, data) for kind, data in self._files]
        return [*files, join("keys", KEY + b"\n"), *(join("name", name) for name in NAMES)]

    def make(self, draw: random.Random) -> bytes:
        if draw.random() < 0.04:
            return join("keys", change_bytes(KEY + b"\n" + KEY, draw))
        if draw.random() < 0.04:
            return join("name", change_bytes(draw.choice(NAMES), draw, NAMES))
        kind, data = draw.choice(self._files)
        if draw.random() < 0.1:
            return join(kind, change_bytes(data, draw, [other for _, other in self._files]))
        value = json.loads(self._bodies[kind])
        _, body = change_json(value, draw, self._values)
        return join(kind, _seal(kind, body, draw.random() < 0.2))

    def judge(self, data: bytes) -> bool:
        kind, content = split(data)
        if kind == "keys":
            try:
                return bool(parse_keys(content.decode(errors="replace")))
            except InvalidSpecError as error:
                check_error(error)
                return False
        if kind == "name":
            name = content.decode(errors="replace")
            return (parse_name(name) or parse_claim_name(name)) is not None
        keys = (KEY,) if is_signed(content) else ()
        try:
            _read(kind, content, keys)
        except IntegrityError as error:
            check_error(error, shown=True)
            return False
        return True

    def smaller(self, data: bytes) -> Iterator[bytes]:
        kind, content = split(data)
        try:
            value: Any = json.loads(unseal(content, kind))
        except (IntegrityError, ValueError, RecursionError):
            yield from (join(kind, less) for less in smaller_bytes(content))
        else:
            for less in smaller_json(value):
                yield join(kind, _seal(kind, write_json(less), is_signed(content)))


def _seal(kind: str, body: bytes, signed: bool) -> bytes:
    """Return a sealed file, whether or not its body is text."""
    return seal(kind, body.decode("utf-8", "replace"), (KEY,) if signed else ())


def _read(kind: str, content: bytes, keys: tuple[bytes, ...]) -> None:
    if kind == "manifest":
        manifest = parse_manifest(content, MANIFEST.version, keys)
        assert manifest.size_bytes >= 0
        assert all(".." not in name and name.isprintable() for name, _ in manifest.files())
        told = differences(manifest.identity, MANIFEST.identity)
        assert all(phrase.isprintable() for phrase in told)
        again = seal(kind, codec.dumps(manifest), keys)
        assert parse_manifest(again, MANIFEST.version, keys) == manifest
    elif kind == "part":
        part = parse_part(content, keys)
        assert sum(tensor.size_bytes for tensor in part.tensors) == part.file.size_bytes
        assert parse_part(seal(kind, codec.dumps(part), keys), keys) == part
    else:
        owner = parse_owner(content)
        assert str(owner).isprintable()
        judged = judge_claims([Claim(1, owner), Claim(2, None)], OWNER)
        assert judged.refused.isprintable()


TARGET = Manifests
