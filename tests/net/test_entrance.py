"""The way in for pods of the job, on real sockets, beside strangers."""

from __future__ import annotations

import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from mainstay_core.base.admission import Bounds
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.proofs import ANSWER_BYTES, NONCE_BYTES, CallerProof, Purpose
from mainstay_net.acceptor import listen
from mainstay_net.caller import prove
from mainstay_net.entrance import Entrance, Proved

HOST = "127.0.0.1"
SECRET = "known to the job's pods"


@dataclass
class Served:
    """An entrance that a thread serves, and what came in."""

    bounds: Bounds
    proved: list[Proved] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    callers: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entrance = Entrance(listen(HOST), SECRET, (Purpose.MEET, Purpose.HEAL), self.bounds)
        self._told_to_end, self._ends = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            wait_s = self.entrance.wait_s()
            ready, _, _ = select.select([self.entrance, self._told_to_end], [], [], wait_s)
            if self._told_to_end in ready:
                return
            with self.changed:
                self.proved += self.entrance.turn()
                self.changed.notify_all()

    def call(self, local: str = HOST) -> socket.socket:
        host, _, port = self.entrance.address.rpartition(":")
        caller = socket.create_connection((host, int(port)), source_address=(local, 0))
        caller.settimeout(30)
        self.callers.append(caller)
        return caller

    def enter(self, secret: str = SECRET, purpose: Purpose = Purpose.MEET) -> Proved:
        """Call and prove the secret; return the other end."""
        caller = self.call()
        prove(caller, secret, self.entrance.address, purpose)
        with self.changed:

            def mine() -> list[Proved]:
                name = caller.getsockname()
                return [p for p in self.proved if p.socket.getpeername() == name]

            self.changed.wait_for(mine, timeout=30)
            return mine()[0]

    def wait_for_strangers(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.entrance.num_unproved == number, timeout=30)

    def close(self) -> None:
        self._ends.send(b"x")
        self._thread.join()
        self.entrance.close()
        ends = [self._ends, self._told_to_end, *self.callers, *(p.socket for p in self.proved)]
        for each in ends:
            each.close()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(getattr(request, "param", Bounds()))
    yield made
    made.close()


def test_a_pod_gets_in_and_what_it_says_next_is_not_touched(served: Served) -> None:
    proved = served.enter(purpose=Purpose.HEAL)
    assert (proved.purpose, proved.address) == (Purpose.HEAL, HOST)
    served.callers[-1].sendall(b"a request")
    assert select.select([proved.socket], [], [], 30)[0]
    assert proved.socket.recv(100) == b"a request"


def test_what_comes_together_with_the_proof_is_not_lost(served: Served) -> None:
    caller = served.call()
    mine = CallerProof(SECRET, b"n" * NONCE_BYTES, served.entrance.address, Purpose.MEET)
    caller.sendall(mine.hello)
    caller.sendall(mine.answered(caller.recv(ANSWER_BYTES)) + b"at once")
    with served.changed:
        assert served.changed.wait_for(lambda: served.proved, timeout=30)
    assert select.select([served.proved[0].socket], [], [], 30)[0]
    assert served.proved[0].socket.recv(100) == b"at once"


@pytest.mark.parametrize("secret", ["", "another job's"])
def test_a_stranger_does_not(served: Served, secret: str) -> None:
    with pytest.raises(RemoteProtocolError, match="gave no proof"):
        served.enter(secret)
    served.callers[-1].sendall(b"\0" * 32)
    assert served.callers[-1].recv(1) == b""
    assert served.proved == []


@pytest.mark.parametrize(
    "said",
    [
        b"\0\0\0\x02\0\0\0\0\x80\0\0\0{}" + b"x" * 100,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"MSTY\x02\x02" + b"n" * 32,
        b"\x16\x03\x01",
    ],
)
def test_who_says_anything_else_is_closed_at_once(served: Served, said: bytes) -> None:
    caller = served.call()
    caller.sendall(said)
    try:
        while caller.recv(1000):
            pass
    except ConnectionResetError:
        pass
    served.wait_for_strangers(0)
    assert served.enter().purpose is Purpose.MEET


@pytest.mark.parametrize("served", [Bounds(prove_s=0.05)], indirect=True)
def test_who_says_nothing_or_half_of_it_is_closed_in_time(served: Served) -> None:
    silent, half = served.call(), served.call()
    half.sendall(b"MSTY\x02\x01" + b"n" * 20)
    assert silent.recv(1) == b""
    assert half.recv(1) == b""


def test_many_idle_strangers_keep_no_pod_out(served: Served) -> None:
    """Ten times as many as are let wait, from many addresses, and pods in the midst of them."""
    for number in range(10):
        for _ in range(26):
            for last in range(10):
                served.call(f"127.0.{number}.{10 + last}")
        assert served.enter().purpose is Purpose.MEET
        assert served.entrance.num_unproved <= served.bounds.total
        for caller in served.callers:
            caller.close()
        served.callers.clear()


def test_pods_that_call_all_at_once_all_get_in(served: Served) -> None:
    with ThreadPoolExecutor(max_workers=40) as pool:
        came = list(pool.map(lambda _: served.enter(), range(40)))
    assert len(came) == 40
    served.wait_for_strangers(0)


FEW = """
import resource, select, sys
from mainstay_core.base.admission import Bounds
from mainstay_core.base.proofs import Purpose
from mainstay_net.acceptor import listen
from mainstay_net.entrance import Entrance
entrance = Entrance(listen("127.0.0.1"), "s", (Purpose.MEET,), Bounds(per_address=256))
# Bounds were made for more than there are now.
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(entrance.address, flush=True)
poll = select.poll()
poll.register(entrance.fileno(), select.POLLIN)
while True:
    wait_s = entrance.wait_s()
    poll.poll(None if wait_s is None else 1000 * wait_s + 1)
    for proved in entrance.turn():
        proved.socket.send(b"welcome")
        proved.socket.close()
"""


def test_a_process_without_descriptors_goes_on() -> None:
    """260 idle connections, and 64 descriptors: whoever has the secret gets in all the same."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", FEW], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            host, _, port = address.rpartition(":")
            idle = [socket.create_connection((host, int(port))) for _ in range(260)]
            for _ in range(3):
                said = b""
                while said != b"welcome":
                    # Whoever comes in the moment without a descriptor is turned away: again then.
                    with socket.create_connection((host, int(port))) as caller:
                        caller.settimeout(30)
                        try:
                            prove(caller, "s", address, Purpose.MEET)
                            said = caller.recv(7)
                        except ConnectionError:
                            continue
            for each in idle:
                each.close()
        finally:
            process.kill()
