"""Accepting within bounds, on real sockets and a clock that the test turns."""

from __future__ import annotations

import errno
import resource
import select
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from mainstay_core.base.admission import Bounds
from mainstay_net import acceptor as acceptor_module
from mainstay_net.acceptor import (
    NO_ROOM_PAUSE_S,
    Accepted,
    Acceptor,
    PlainSockets,
    address_of,
    fit,
    listen,
)

HOST = "127.0.0.1"


class FailingSockets(PlainSockets):
    """Sockets whose next accepts fail as they are told to."""

    def __init__(self) -> None:
        self.errors: list[int] = []

    def accept(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        if self.errors:
            raise OSError(self.errors.pop(0), "as told")
        return super().accept(listener)


@dataclass
class Played:
    """An acceptor, whoever calls it, and what it has accepted and closed."""

    bounds: Bounds = field(default_factory=Bounds)
    now_s: float = 100.0
    sockets: FailingSockets = field(default_factory=FailingSockets)
    accepted: dict[int, Accepted] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    callers: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.acceptor = Acceptor(
            listen(HOST), self._drop, self.bounds, self.sockets, lambda: self.now_s
        )
        self.address = address_of(self.acceptor._listener)

    def _drop(self, key: int) -> None:
        self.dropped.append(key)
        self.accepted.pop(key).socket.close()

    def call(self, local: str = HOST) -> socket.socket:
        """Call, and wait until the listener's queue has the caller."""
        host, _, port = self.address.rpartition(":")
        before = self._num_waiting()
        caller = socket.create_connection((host, int(port)), source_address=(local, 0))
        caller.settimeout(30)
        self.callers.append(caller)
        while self._num_waiting() == before:
            pass
        return caller

    def _num_waiting(self) -> int:
        # Of a listener, tcpi_unacked is the length of its queue.
        info = self.acceptor._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)
        return int.from_bytes(info[24:28], sys.byteorder)

    def turn(self) -> list[int]:
        new = self.acceptor.turn()
        self.accepted |= {each.key: each for each in new}
        return [each.key for each in new]

    def close(self) -> None:
        self.acceptor.drop_all()
        self.acceptor.close()
        for each in [*self.callers, *(a.socket for a in self.accepted.values())]:
            each.close()


@pytest.fixture
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    made = Played(getattr(request, "param", Bounds()))
    yield made
    made.close()


def test_who_calls_is_accepted_and_named(played: Played) -> None:
    caller = played.call("127.0.0.9")
    assert select.select([played.acceptor], [], [], 30)[0]
    (key,) = played.turn()
    accepted = played.accepted[key]
    assert (accepted.address, accepted.port) == caller.getsockname()
    assert not accepted.socket.getblocking()
    assert played.acceptor.num_unproved == 1
    played.acceptor.proved(key)
    assert played.acceptor.num_unproved == 0


def test_who_proves_nothing_is_closed_in_time(played: Played) -> None:
    caller = played.call()
    played.turn()
    assert played.acceptor.wait_s() == played.bounds.prove_s
    played.now_s += played.bounds.prove_s
    assert played.acceptor.wait_s() == 0.0
    played.turn()
    assert played.dropped == [1]
    assert caller.recv(1) == b""
    assert played.acceptor.wait_s() is None


@pytest.mark.parametrize("played", [Bounds(total=4, per_address=2)], indirect=True)
def test_there_is_always_room_for_another_address(played: Played) -> None:
    for local in ("127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"):
        played.call(local)
        played.turn()
    assert played.dropped == [1, 2]
    assert played.acceptor.num_unproved == 4
    present = {each.address for each in played.accepted.values()}
    assert present == {f"127.0.0.{last}" for last in (2, 3, 4, 5)}


@pytest.mark.parametrize("played", [Bounds(total=2, per_address=2)], indirect=True)
def test_those_that_come_all_at_once_are_bounded_as_well(played: Played) -> None:
    for _ in range(5):
        played.call()
    assert played.turn() == [4, 5]
    assert played.dropped == [], "who was never handed over is closed here"
    assert played.callers[0].recv(1) == b""


@pytest.mark.parametrize("played", [Bounds(accepts_per_s=10.0, burst=2)], indirect=True)
def test_a_flood_is_accepted_at_a_pace(played: Played) -> None:
    for _ in range(4):
        played.call()
    assert played.turn() == [1, 2]
    assert played.acceptor.wait_s() == pytest.approx(0.1)
    assert select.select([played.acceptor], [], [], 0)[0] == [], "the listener is not looked at"
    assert played.turn() == []
    played.now_s += 0.11
    assert played.turn() == [3]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_descriptors_it_makes_room_and_goes_on(played: Played, code: int) -> None:
    for _ in range(3):
        played.call()
    played.turn()
    waiting = played.call()
    played.sockets.errors = [code]
    assert played.turn() == []
    assert played.dropped == [1, 2]
    # The one in the queue was taken on the reserve, and told by its end.
    assert waiting.recv(1) == b""
    assert played.acceptor.wait_s() == pytest.approx(NO_ROOM_PAUSE_S)
    played.now_s += NO_ROOM_PAUSE_S
    played.call()
    assert played.turn() == [4]


def test_without_descriptors_for_long_it_goes_on_as_long(played: Played) -> None:
    played.call()
    for _ in range(50):
        played.sockets.errors = [errno.EMFILE, errno.EMFILE]
        assert played.turn() == []
        played.now_s += NO_ROOM_PAUSE_S
    assert played.turn() == [1]


@pytest.mark.parametrize("code", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN])
def test_an_error_of_the_peer_is_no_end(played: Played, code: int) -> None:
    played.call()
    played.sockets.errors = [code] * 3
    assert played.turn() == [1]


def test_a_closed_listener_is_an_end(played: Played) -> None:
    played.sockets.errors = [errno.EBADF]
    with pytest.raises(OSError, match="as told"):
        played.turn()


def test_strangers_get_a_share_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert (fit(Bounds()).total, fit(Bounds()).asked) == (64, 64)
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard))
        assert fit(Bounds()).per_address == acceptor_module.MIN_TOTAL
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_are_told_of_once_a_minute(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        played.acceptor.ended(0, "it does not speak as a pod does")
    assert len(caplog.records) == 1
    played.now_s += 60.0
    played.acceptor.ended(0, "it does not speak as a pod does")
    assert "101 connections were turned away" in caplog.text
