"""Small files of a checkpoint: nothing in them is parsed before their digests are right."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import pytest

from mainstay_core.base.errors import IntegrityError, InvalidSpecError
from mainstay_core.wire import sealed
from mainstay_core.wire.sealed import MAX_SEALED_BYTES, parse_keys, read_sealed, seal, unseal

KEY, OTHER = b"sixteen bytes or more", b"another key of that size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    number: int


def test_what_is_sealed_is_read_again_and_the_shell_can_check_it() -> None:
    data = seal("manifest", '{"number":3}')
    assert read_sealed(Body, data, "manifest") == Body(number=3)
    header, _, body = data.partition(b"\n")
    assert hashlib.sha256(body).hexdigest() in header.decode()


def test_every_flipped_bit_is_found() -> None:
    data = seal("manifest", '{"number":3}', [KEY])
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(IntegrityError):
                unseal(bytes(damaged), "manifest", [KEY])


def test_every_shortened_file_is_found() -> None:
    data = seal("manifest", '{"number":3}')
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            unseal(data[:length], "manifest")


def test_random_bytes_are_never_anything_else_than_refused() -> None:
    random_bytes = random.Random(7)
    for _ in range(2000):
        data = random_bytes.randbytes(random_bytes.randrange(400))
        with pytest.raises(IntegrityError):
            unseal(data, "manifest")


def test_one_kind_cannot_stand_for_another() -> None:
    data = seal("part", "{}", [KEY])
    with pytest.raises(IntegrityError, match="says that it is a part"):
        unseal(data, "manifest", [KEY])
    renamed = data.replace(b" part ", b" manifest ")
    with pytest.raises(IntegrityError, match="not signed by a key"):
        unseal(renamed, "manifest", [KEY])


def test_a_key_refuses_what_it_has_not_signed_and_an_older_key_still_counts() -> None:
    assert unseal(seal("part", "{}", [KEY]), "part", [OTHER, KEY]) == "{}"
    with pytest.raises(IntegrityError, match="not signed by a key"):
        unseal(seal("part", "{}", [KEY]), "part", [OTHER])
    with pytest.raises(IntegrityError, match="is not signed"):
        unseal(seal("part", "{}"), "part", [KEY])
    assert unseal(seal("part", "{}", [KEY]), "part") == "{}", "without a key the SHA-256 counts"


def test_a_newer_format_is_named() -> None:
    data = seal("part", "{}").replace(b"mainstay-checkpoint 2", b"mainstay-checkpoint 3")
    with pytest.raises(IntegrityError, match="format 3, this version of Mainstay reads 2"):
        unseal(data, "part")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "3",
        "[]",
        "{}",
        '{"number": "3"}',
        '{"number": true}',
        '{"number": 3',
        '{"number": ' + "9" * 5000 + "}",
        '{"number": NaN}',
        "[" * 100_000,
        '{"number": ' + "[" * 100_000,
        '{"\ud800": 1}'.encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    ],
)
def test_a_body_that_is_no_such_value_is_a_documented_error(body: str) -> None:
    with pytest.raises(IntegrityError):
        read_sealed(Body, seal("part", body), "part")


def test_bytes_that_are_no_text_are_a_documented_error() -> None:
    body = b"\xff\xfe"
    header = f"mainstay-checkpoint 2 part sha256:{hashlib.sha256(body).hexdigest()}\n"
    with pytest.raises(IntegrityError, match="no text"):
        unseal(header.encode() + body, "part")


def test_what_would_be_too_long_is_neither_written_nor_read() -> None:
    with pytest.raises(IntegrityError, match="at most"):
        seal("part", "x" * MAX_SEALED_BYTES)
    with pytest.raises(IntegrityError, match="more than"):
        unseal(b"x" * (MAX_SEALED_BYTES + 1), "part")


def test_a_key_file_has_one_key_to_a_line() -> None:
    assert parse_keys(f"{KEY.decode()}\n\n  {OTHER.decode()}\n") == (KEY, OTHER)
    for text in ("", "\n", "short", f"{KEY.decode()}\nshort"):
        with pytest.raises(InvalidSpecError, match=sealed.KEY_FILE_VARIABLE):
            parse_keys(text)
