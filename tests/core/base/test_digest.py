import itertools
import random
import struct
from array import array

import pytest

from mainstay_core.base import digest
from mainstay_core.base.digest import CHUNK, Digest


def _words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(32) for _ in range(count)]


def _mix(tensor: str, index: int, bits: int, mixer: int) -> int:
    key = digest.chunk_key(tensor, index // CHUNK, mixer)
    return key * digest.element_keys(mixer)[index % CHUNK] * (bits + 1) % 2**64


def test_digest_is_the_sum_that_the_definition_states():
    words = _words(300, seed=1)
    start = CHUNK - 120  # crosses a chunk boundary
    expected = [sum(_mix("w", start + i, word, m) for i, word in enumerate(words)) for m in (0, 1)]
    found = digest.digest_words("w", words, start)
    assert found == Digest(expected[0] % 2**64, expected[1] % 2**64)


def test_slices_add_up_whatever_the_cut():
    words = _words(3000, seed=2)
    whole = digest.digest_words("w", words, 64_000)
    rng = random.Random(3)
    for _ in range(50):
        cuts = sorted({0, 3000, *(rng.randrange(3000) for _ in range(rng.randrange(8)))})
        parts = [
            digest.digest_words("w", words[a:b], 64_000 + a) for a, b in itertools.pairwise(cuts)
        ]
        rng.shuffle(parts)
        assert digest.total(parts) == whole


def test_every_single_flip_is_found_by_both_mixers():
    words = _words(64, seed=4)
    whole = digest.digest_words("w", words)
    for index in range(64):
        for bit in range(32):
            flipped = words.copy()
            flipped[index] ^= 1 << bit
            found = digest.digest_words("w", flipped)
            assert found.first != whole.first
            assert found.second != whole.second


def test_two_flipped_signs_do_not_cancel_in_32_or_64_bits():
    rng = random.Random(5)
    for item_size in (4, 8):
        data = bytearray(rng.randbytes(item_size * 40))
        whole = digest.digest_bytes("w", data, item_size)
        for _ in range(200):
            flipped = bytearray(data)
            for index in rng.sample(range(40), 2):
                flipped[index * item_size + item_size - 1] ^= 0x80
            assert digest.digest_bytes("w", flipped, item_size) != whole


def test_name_place_and_length_count():
    words = _words(10, seed=6)
    assert digest.digest_words("a", words) != digest.digest_words("b", words)
    assert digest.digest_words("a", words) != digest.digest_words("a", words, 1)
    assert digest.digest_words("a", [*words, 0]) != digest.digest_words("a", words)
    assert digest.digest_words("a", [1, 2]) != digest.digest_words("a", [2, 1])
    assert digest.digest_words("a", []) == Digest.zero()


def test_bytes_are_read_as_unsigned_little_endian_elements():
    data = struct.pack("<4i", -1, 0, 1, -(2**31))
    expected = digest.digest_words("w", [2**32 - 1, 0, 1, 2**31], 7)
    assert digest.digest_bytes("w", data, 4, offset=7) == expected
    assert digest.digest_bytes("w", data, 8, offset=7) == digest.digest_words(
        "w", [2**32 - 1, 0, 1, 2**31], 14
    )


def test_bytes_refuse_torn_elements_and_odd_sizes():
    with pytest.raises(ValueError, match="no whole number of 4-byte elements"):
        digest.digest_bytes("w", b"abcde", 4)
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes, not 3"):
        digest.digest_bytes("w", b"abc", 3)


def test_hex_round_trips_and_refuses_other_text():
    value = digest.digest_words("w", _words(5, seed=7))
    assert Digest.parse(value.hex()) == value
    assert len(str(value)) == 32
    for text in ("", "0" * 31, "g" * 32, " " + "0" * 31):
        with pytest.raises(ValueError, match="32 hexadecimal digits"):
            Digest.parse(text)


def test_subtraction_undoes_addition():
    a, b = (digest.digest_words(name, _words(5, seed=8)) for name in "ab")
    assert a + b - b == a
    assert Digest.zero() + a == a


def test_keys_are_odd_distinct_and_never_change():
    for mixer in (0, 1):
        keys = digest.element_keys(mixer)
        assert len(set(keys)) == CHUNK
        assert all(key & 1 for key in keys)
    # A change of these values would make every stored ledger and checkpoint unreadable.
    assert digest.digest_words("layers.0.norm", array("I", [1, 2, 3])).hex() == GOLDEN


GOLDEN = "e417a4acd6c420911e9f8f20caeb204b"
