"""Fuzzes frames: what pods say to each other, from the proof of the secret to votes and plans.

An input is a line that names who reads, and pieces: a connection's number, a length, bytes.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

from tests.core.wire.test_messages import EXAMPLES
from tests.fuzz.mutation import change_bytes, change_json, smaller_bytes
from tests.fuzz.texts import check_error, join, split

from mainstay_agent.gather import GatherServer, _Connection
from mainstay_agent.gossip import PlanGossip
from mainstay_core.base import codec
from mainstay_core.base.errors import MainstayError, RemoteProtocolError
from mainstay_core.base.frames import PREFIX, FrameParser, pack
from mainstay_core.base.proofs import (
    ANSWER_BYTES,
    NONCE_BYTES,
    CallerProof,
    ListenerProof,
    Purpose,
    RefusedPeerError,
)
from mainstay_core.gather.client import ClientProtocol
from mainstay_core.gather.frames import (
    Abort,
    Gathered,
    Join,
    Leave,
    Newer,
    Post,
    decode_for_member,
    encode,
)
from mainstay_core.wire.plan import Plan

PLAN: Plan = EXAMPLES["plan"]
QUORUM = str(PLAN.quorum)
NUM_CONNECTIONS = 3
_PIECE = struct.Struct("!BH")
Pieces = list[tuple[int, bytes]]


def _join(index: int, quorum: str = QUORUM, size: int = NUM_CONNECTIONS) -> bytes:
    return encode(Join(quorum=quorum, index=index, size=size, incarnation=f"life-{index}"))


def _post(key: str) -> bytes:
    return encode(Post(key=key, body=b'{"ok":true}'))


JOINS: Pieces = [(i, _join(i)) for i in range(NUM_CONNECTIONS)]
POSTS: Pieces = [(i, _post("vote/7/0")) for i in range(NUM_CONNECTIONS)]
HOLDS = {"kind": "holds", "quorum": codec.encode(PLAN.quorum)}
SECRET, ADDRESS = "a secret", "127.0.0.1:1"
NONCES = b"c" * NONCE_BYTES, b"l" * NONCE_BYTES
CALLER = CallerProof(SECRET, NONCES[0], ADDRESS, Purpose.MEET)


def _listener() -> ListenerProof:
    return ListenerProof(SECRET, NONCES[1], ADDRESS, (Purpose.MEET, Purpose.GOSSIP))


VALID: dict[str, list[Pieces]] = {
    "server": [
        [*JOINS, *POSTS, *((i, encode(Leave())) for i in range(NUM_CONNECTIONS))],
        [*JOINS, POSTS[0], (1, encode(Abort(why="a reset", suspects=(2, 0))))],
        [(0, _join(0, size=1)), POSTS[0], (1, _join(0, "q1-old")), (2, _join(0, size=2))],
    ],
    "gossip": [
        [(0, pack(HOLDS)), (0, pack({"kind": "plan", "plan": codec.encode(PLAN)}))],
        [(0, pack({**HOLDS, "quorum": {"id": 1, "nonce": "old"}}))],
    ],
    "member": [
        [
            (0, encode(Gathered(key="vote/7/0", bodies=(b"", b"ab", b"c")))),
            (0, encode(Newer(plan=codec.encode(PLAN)))),
            (0, encode(Abort(why="all members have moved on"))),
        ]
    ],
    "listener": [[(0, CALLER.hello + CALLER.answered(_listener().received(CALLER.hello)))]],
    "caller": [[(0, _listener().received(CALLER.hello))]],
}


class _Transport(asyncio.Transport):
    """One end of a connection: what is written to it, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class Frames:
    """Streams of bytes as other pods may send them."""

    name = "frames"

    def __init__(self) -> None:
        self._valid = [(name, pieces) for name, many in VALID.items() for pieces in many]
        self._parsed = {data: _heads(data) for _, pieces in self._valid for _, data in pieces}
        self._heads = [head for heads in self._parsed.values() for head in heads]
        self._bytes = [data for _, pieces in self._valid for _, data in pieces]

    def examples(self) -> list[bytes]:
        return [_write(name, pieces) for name, pieces in self._valid]

    def make(self, draw: random.Random) -> bytes:
        name, pieces = draw.choice(self._valid)
        pieces = list(pieces)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(pieces))
            number, data = pieces[at]
            match draw.randrange(6):
                case 0:
                    pieces.insert(draw.randrange(len(pieces) + 1), pieces[at])
                case 1:
                    pieces[at] = (draw.randrange(NUM_CONNECTIONS), data)
                case 2:
                    pieces[at] = (number, change_bytes(data, draw, self._bytes))
                case _:
                    pieces[at] = (number, self._changed(data, draw))
        return _write(name, pieces)

    def judge(self, data: bytes) -> bool:
        name, rest = split(data)
        pieces = list(_read(rest))
        match name:
            case "server":
                return _serve(pieces, Purpose.MEET)
            case "gossip":
                return _serve(pieces, Purpose.GOSSIP)
            case "member":
                return _follow(b"".join(piece for _, piece in pieces))
            case "listener":
                return _let_in(b"".join(piece for _, piece in pieces))
            case "caller":
                return _call(b"".join(piece for _, piece in pieces))
        return False

    def smaller(self, data: bytes) -> Iterator[bytes]:
        name, rest = split(data)
        pieces = list(_read(rest))
        for at in range(len(pieces)):
            yield _write(name, pieces[:at] + pieces[at + 1 :])
        for at, (number, piece) in enumerate(pieces):
            for less in smaller_bytes(piece):
                # A frame whose head became shorter still says how long it is.
                body = less[PREFIX.size :]
                for other in (less, PREFIX.pack(len(body), 0) + body):
                    yield _write(name, [*pieces[:at], (number, other), *pieces[at + 1 :]])

    def _changed(self, data: bytes, draw: random.Random) -> bytes:
        """Return a frame whose head differs; the sizes in front fit, as a rule."""
        heads = self._parsed.get(data)
        if not heads:  # it was changed before
            return change_bytes(data, draw, self._bytes)
        value = json.loads(json.dumps(draw.choice(heads)))
        _, head = change_json(value, draw, self._heads)
        body = draw.choice((b"", b"ab", b"x" * 600))
        sizes = (len(head), len(body))
        if draw.random() < 0.1:
            sizes = (draw.choice((0, len(head) + 1, 2**32 - 1)), draw.choice((0, 5, 2**63)))
        return PREFIX.pack(*sizes) + head + body


def _heads(data: bytes) -> list[Any]:
    """Return the heads of the frames in valid bytes; none if they are proofs."""
    try:
        return [frame.head for frame in FrameParser().feed(data)]
    except RemoteProtocolError:
        return []


def _write(name: str, pieces: Pieces) -> bytes:
    packed = [
        _PIECE.pack(number, len(part)) + part
        for number, data in pieces
        for part in ([data[i : i + 0xFFFF] for i in range(0, len(data), 0xFFFF)] or [b""])
    ]
    return join(name, b"".join(packed))


def _read(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _PIECE.size:
        number, size = _PIECE.unpack_from(data)
        yield number % NUM_CONNECTIONS, data[_PIECE.size : _PIECE.size + size]
        data = data[_PIECE.size + size :]


def _serve(pieces: Pieces, purpose: Purpose) -> bool:
    """Give a gather server what several connections send; what it answers must be frames."""
    learnt: list[Plan] = []
    server = GatherServer(answer=PlanGossip(lambda: PLAN, learnt.append).answer)
    server.hold(PLAN)
    lines = [(_Connection(server, purpose), _Transport()) for _ in range(NUM_CONNECTIONS)]
    for connection, transport in lines:
        server._opened(connection)
        connection.connection_made(transport)
    for number, data in pieces:
        connection, transport = lines[number]
        if not transport.closed:
            connection.data_received(data)
    accepted = not any(transport.closed for _, transport in lines)
    for connection, transport in lines:
        connection.connection_lost(None)
        for frame in FrameParser().feed(bytes(transport.written)):
            if purpose is Purpose.MEET:
                decode_for_member(frame)
            assert frame.kind in ("gathered", "abort", "plan", "want", "thanks")
    assert server._protocol.is_quiet
    assert not server._protocol._rooms, "a room is left behind"
    return accepted


def _follow(data: bytes) -> bool:
    """Give a member what its gather server sends, as its reader does."""
    client: ClientProtocol[bytes] = ClientProtocol(
        Join(quorum=QUORUM, index=0, size=3, incarnation="life")
    )
    client.opened()
    try:
        for frame in FrameParser().feed(data):
            told = client.received(decode_for_member(frame))
            if isinstance(told, Newer):
                codec.decode(Plan, told.plan)
    except MainstayError as error:
        check_error(error)
        return False
    return True


def _let_in(data: bytes) -> bool:
    """Give a listener what somebody sends who calls, as its entrance does."""
    proof = _listener()
    answer = b""
    try:
        while data and proof.purpose is None:
            wanted = proof.wanted
            assert 0 < wanted <= ANSWER_BYTES
            answer = proof.received(data[:wanted])
            data = data[wanted:]
    except RefusedPeerError as error:
        check_error(error)
        answer = error.answer
    assert len(answer) < 1000, "a stranger is answered at length"
    if proof.purpose is not None:
        assert proof.purpose is Purpose.MEET, "a proof is good for another purpose"
    return proof.purpose is not None


def _call(data: bytes) -> bool:
    """Give a caller what a listener answers."""
    if len(data) < ANSWER_BYTES:
        return False
    try:
        CALLER.answered(data[:ANSWER_BYTES])
    except RemoteProtocolError as error:
        check_error(error)
        return False
    return True


TARGET = Frames
