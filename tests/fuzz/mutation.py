"""Makes inputs out of valid ones: changes of bytes, and changes of values inside of JSON.

Random bytes alone are refused by the first check that they meet. A change of one value of a message
that was right goes as far as the message itself would, so what it finds lies behind those checks.

Nothing here keeps a state: the same draw makes the same input.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

MAX_BYTES = 1 << 18
"""Bound on an input, and on what one change adds to it."""
_RAW = "\x02raw:{}\x03"
"""Stands for a token that no value of Python's is written as, until the JSON is text."""
RAW_TOKENS = (
    "1e999",
    "-1e999",
    "-0",
    "9" * 5000,
    "-" + "9" * 400,
    "1" + "0" * 19,
    "[" * 50_000,
    '{"a":' * 50_000,
    "[" * 70 + "]" * 70,
    "[" + "0," * 20_000 + "0]",
    '"' + "x" * 100_000 + '"',
    '"\\ud800"',
    '{"a":1,"a":2}',
    "",
    "]",
)
NUMBERS = (
    *(-1, 0, 1, 2, 255, 1023, 1025, 65_535, 65_537, 2**20 + 1),
    *(2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400),
    *(-0.0, 0.5, 1e-320, 1e10, 1e13, 1.8e308, -1.8e308, float("nan"), float("inf")),
)
TEXTS = (
    *("", " ", "\x00", "\n", "x" * 40, "x" * 600, "x" * 9000, "../../etc/passwd", "/", "."),
    *("\ud800", "\udfff", "\u00b2", "\u0661", "\U0001f600", "\u202e", "\x1b[2J", "\u00df"),
    "parameters of " * 5000,
    "parameters of r0.s1.i0 on pod-a/\u00b2 differ from the rest of the stage",
    *("0", "-1", "1e999", "NaN", "null", "true", "q7-5eed", "q0-", "127.0.0.1:0", ":", "Auto"),
)
PLAIN = (None, True, False, [], {}, [[]], [{}], {"": None}, [None] * 3)


def change_json(
    value: Any, draw: random.Random, others: Sequence[Any], most: int = 4
) -> tuple[Any, bytes]:
    """Return a JSON value with one to ``most`` changes, and the text that says it.

    Args:
        value: JSON as Python has it; it is changed in place.
        draw: decides.
        others: values of other inputs, parts of which are taken over now and then.
        most: number of changes.
    """
    root = [value]
    for left in reversed(range(draw.randint(1, most))):
        # A list is repeated at the end alone: repeated twice, it would fill the memory.
        _change_once(root, draw, others, may_repeat=left == 0)
    return root[0], write_json(root[0], plain=draw.random() < 0.7)


def write_json(value: Any, *, plain: bool = True) -> bytes:
    """Return the text of a changed value; without ``plain`` it is no ASCII, and may be no UTF-8."""
    text = json.dumps(value, ensure_ascii=plain, separators=(",", ":"))
    if "raw:" in text:
        for number, token in enumerate(RAW_TOKENS):
            mark = json.dumps(_RAW.format(number), ensure_ascii=plain)
            # Once: a long token in a list that was repeated would fill the memory.
            text = text.replace(mark, token, 1).replace(mark, "0")
    return text.encode("utf-8", "surrogatepass")


def _change_once(
    root: list[Any], draw: random.Random, others: Sequence[Any], *, may_repeat: bool
) -> None:
    holder, key = _place(root, draw)
    match draw.randrange(10):
        case 0:
            _remove(holder, key)
        case 1 | 2 | 3:
            holder[key] = _new_value(draw, others)
        case 4:
            holder[key] = _near(holder[key], draw)
        case 5 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case 6 if isinstance(holder, list) and holder is not root and may_repeat:
            most = MAX_BYTES // (1 + len(json.dumps(holder[key])))
            holder.extend([holder[key]] * min(most, draw.choice((1, 100, 2000))))
        case 5 | 6 if isinstance(holder, dict):
            holder[draw.choice((*TEXTS, *_keys(others, draw)))] = holder[key]
        case 7 if isinstance(holder[key], dict):
            holder[key][draw.choice((*TEXTS, *_keys(others, draw)))] = _new_value(draw, others)
        case 8:
            holder[key] = _part_of(draw.choice(others), draw) if others else None
        case _:
            holder[key] = draw.choice(NUMBERS)


def _place(root: list[Any], draw: random.Random) -> tuple[Any, Any]:
    """Return a list or an object below ``root``, and where in it to change something."""
    holder: Any = root
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.85:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
    return holder, key


def _remove(holder: Any, key: Any) -> None:
    if isinstance(holder, dict) or len(holder) > 1:
        del holder[key]
    else:
        holder[key] = None


def _new_value(draw: random.Random, others: Sequence[Any]) -> Any:
    match draw.randrange(5):
        case 0:
            return draw.choice(NUMBERS)
        case 1:
            return draw.choice(TEXTS)
        case 2:
            return _fresh(draw.choice(PLAIN))
        case 3:
            return _RAW.format(draw.randrange(len(RAW_TOKENS)))
        case _:
            return _part_of(draw.choice(others), draw) if others else draw.choice(NUMBERS)


def _near(value: Any, draw: random.Random) -> Any:
    """Return a value that differs a little."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + draw.choice((-1, 1, 2, 1000, -value, -2 * value))
    if isinstance(value, float):
        return value * draw.choice((-1.0, 0.0, 1e300, 1e-300)) + draw.choice((0.0, 1.0))
    if isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        return value[:at] + draw.choice(TEXTS) + value[at + draw.randrange(2) :]
    return list(value) if isinstance(value, dict) else {str(i): v for i, v in enumerate(value)}


def _part_of(value: Any, draw: random.Random) -> Any:
    """Return a copy of a value inside of another one."""
    holder, key = _place([value], draw)
    return _fresh(holder[key])


def _fresh(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, dict | list) else value


def _keys(others: Sequence[Any], draw: random.Random) -> list[str]:
    other = draw.choice(others) if others else {}
    return list(other) if isinstance(other, dict) else []


# Bytes ----------------------------------------------------------------------------------


TOKENS = (
    *(b"\x00", b"\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\r\n"),
    *(b"\x04\x00\x00\x00", b"\x00\x00\x00\x00\x40\x00\x00\x00", b"{", b"}", b"[", b'"', b"\\u"),
    *(b"NaN", b"null", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf", b"\n", b" ", b"-", b"1e9"),
)


def change_bytes(
    data: bytes, draw: random.Random, others: Sequence[bytes] = (), most: int = 3
) -> bytes:
    """Return bytes with one to ``most`` changes."""
    for _ in range(draw.randint(1, most)):
        data = _change_bytes_once(data, draw, others)
    return data[:MAX_BYTES]


def _change_bytes_once(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    start = draw.randrange(len(data) + 1)
    stop = min(len(data), start + draw.choice((1, 1, 2, 4, 8, 50, 5000)))
    match draw.randrange(9):
        case 0 | 1 if start < len(data):
            flipped = data[start] ^ (1 << draw.randrange(8))
            return data[:start] + bytes([flipped]) + data[start + 1 :]
        case 2:
            return data[:start] + data[stop:]
        case 3:
            return data[:stop] + data[start:]
        case 4:
            return data[:start] + draw.choice(TOKENS) + data[start:]
        case 5:
            token = draw.choice(TOKENS)
            return data[:start] + token + data[start + len(token) :]
        case 6:
            return data[:start] + draw.randbytes(draw.randrange(1, 20)) + data[start:]
        case 7:
            return data[:start]
        case _ if others:
            other = draw.choice(others)
            return data[:start] + other[draw.randrange(len(other) + 1) :]
    return data + draw.randbytes(4)


# Smaller inputs that may still show the same -----------------------------------------


def smaller_bytes(data: bytes) -> Iterator[bytes]:
    """Yield shorter versions of an input, the shortest first."""
    size = len(data)
    piece = size // 2
    while piece:
        for start in range(0, size, piece):
            yield data[:start] + data[start + piece :]
        piece //= 2


def smaller_json(value: Any) -> Iterator[Any]:
    """Yield versions of a JSON value with something left out, the largest parts first."""
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
        for key, item in value.items():
            for less in smaller_json(item):
                yield {**value, key: less}
    elif isinstance(value, list):
        if len(value) > 2:
            yield value[: len(value) // 2]
            yield value[len(value) // 2 :]
        for at in range(min(len(value), 20)):
            yield value[:at] + value[at + 1 :]
        for at, item in enumerate(value[:20]):
            for less in smaller_json(item):
                yield [*value[:at], less, *value[at + 1 :]]
    elif isinstance(value, str) and len(value) > 1:
        yield value[: len(value) // 2]
