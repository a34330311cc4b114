import os
import socket
import subprocess
import sys
import threading

import pytest
import torch
from tests.train.crew import ADDRESS
from tests.train.stages import build_stage

from mainstay_core.base.frames import pack, pack_head
from mainstay_core.base.proofs import (
    ANSWER_BYTES,
    HELLO_BYTES,
    ListenerProof,
    Purpose,
)
from mainstay_core.rank.serving import HealFailed
from mainstay_net.caller import prove
from mainstay_train.base import job_secret
from mainstay_train.model import workload
from mainstay_train.state.heal import HealClient, HealServer, masters_digest, read_frame

SMALL = {"dim": 16, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
WANTED = {"quorum": "q2-abc", "position": 1, "version": 7}


def make_state(seed=None, dtype="float32"):
    """A stage's state; with a seed it has been trained a little."""
    state = build_stage(workload.load("", {**SMALL, "dtype": dtype}), 2, 1)
    if seed is not None:
        state.initialize(seed)
        gradient = state.layout.allocate()
        gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed)))
        state.apply(state.layout.block_views(gradient), 1.0, 1e-3)
    return state


def same(a, b):
    pairs = zip(a.flats(), b.flats(), strict=True)
    return all(torch.equal(x.tensor, y.tensor) for x, y in pairs) and all(
        torch.equal(x.compute, y.compute) for x, y in zip(a.blocks, b.blocks, strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_equals_its_source_also_in_the_next_step(dtype):
    source, joiner = make_state(1, dtype), make_state(None, dtype)
    asked = []

    def state_at(*request):
        asked.append(request)
        return source

    server = HealServer(ADDRESS, state_at)
    expected = masters_digest(source)
    copied = HealClient(ADDRESS).copy(joiner, peer=server.address, expected=expected, **WANTED)
    assert copied == expected
    assert asked == [("q2-abc", 1, 7)]
    assert same(source, joiner)
    gradient = torch.ones(source.layout.size)
    for state in (source, joiner):
        state.apply(state.layout.block_views(gradient), 0.5, 1e-3)
    assert same(source, joiner)


def test_a_copy_waits_until_the_source_is_there():
    source, joiner, ready = make_state(1), make_state(), threading.Event()

    def state_at(*request):
        del request
        asked.set()
        ready.wait()
        return source

    asked = threading.Event()
    server = HealServer(ADDRESS, state_at)
    copy = threading.Thread(
        target=HealClient(ADDRESS).copy,
        args=(joiner,),
        kwargs={"peer": server.address, "expected": "", **WANTED},
    )
    copy.start()
    asked.wait()
    assert copy.is_alive()
    ready.set()
    copy.join()
    assert same(source, joiner)


def test_a_source_that_has_moved_on_refuses():
    server = HealServer(ADDRESS, lambda *_: None)
    with pytest.raises(HealFailed, match="q2-abc is over here"):
        HealClient(ADDRESS).copy(make_state(), peer=server.address, expected="", **WANTED)


def test_another_state_than_the_quorum_expects_is_not_taken():
    source = make_state(1)
    server = HealServer(ADDRESS, lambda *_: source)
    expected = masters_digest(make_state(2))
    with pytest.raises(HealFailed, match=f"has digest {masters_digest(source)}, not {expected}"):
        HealClient(ADDRESS).copy(make_state(), peer=server.address, expected=expected, **WANTED)


def test_a_state_of_another_shape_is_not_taken():
    other = build_stage(workload.load("", {**SMALL, "dim": 32}), 2, 1)
    server = HealServer(ADDRESS, lambda *_: other)
    with pytest.raises(HealFailed, match="another shape"):
        HealClient(ADDRESS).copy(make_state(), peer=server.address, expected="", **WANTED)


class Relay:
    """Stands between joiner and source; ``change`` may alter or end the bytes of the state."""

    def __init__(self, server, change):
        self._server, self._change = server, change
        self._listener = socket.create_server((ADDRESS, 0))
        self.address = f"{ADDRESS}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        joiner, _ = self._listener.accept()
        # A pod of the job that has gone bad: it knows the secret.
        proof = ListenerProof("", bytes(32), self.address, (Purpose.HEAL,))
        while proof.purpose is None:
            joiner.sendall(proof.received(joiner.recv(proof.wanted)))
        request, _ = read_frame(joiner)
        host, _, port = self._server.address.rpartition(":")
        with joiner, socket.create_connection((host, int(port))) as source:
            prove(source, "", self._server.address, Purpose.HEAL)
            source.sendall(pack(request))
            head, _ = read_frame(source)
            body = bytearray(b"".join(iter(lambda: source.recv(1 << 16), b"")))
            joiner.sendall(pack_head(head))
            joiner.sendall(self._change(body))


def flip(body):
    body[len(body) // 2] ^= 0x10
    return body


@pytest.mark.parametrize("expected", ["", "from the source"])
def test_a_single_wrong_bit_fails_the_copy(expected):
    source = make_state(1)
    relay = Relay(HealServer(ADDRESS, lambda *_: source), flip)
    with pytest.raises(HealFailed, match="digest"):
        HealClient(ADDRESS).copy(
            make_state(),
            peer=relay.address,
            expected=masters_digest(source) if expected else "",
            **WANTED,
        )


def test_a_source_that_dies_in_the_middle_fails_the_copy():
    source = make_state(1)
    relay = Relay(HealServer(ADDRESS, lambda *_: source), lambda body: body[:1000])
    with pytest.raises(HealFailed, match="closed the connection"):
        HealClient(ADDRESS).copy(make_state(), peer=relay.address, expected="", **WANTED)


def test_nobody_listens_where_the_source_was():
    with socket.create_server((ADDRESS, 0)) as gone:
        address = f"{ADDRESS}:{gone.getsockname()[1]}"
    with pytest.raises(HealFailed, match=address):
        HealClient(ADDRESS).copy(make_state(), peer=address, expected="", **WANTED)


def test_a_shutdown_from_another_thread_ends_a_copy_that_waits_and_later_ones():
    asked, never = threading.Event(), threading.Event()

    def state_at(*request):
        del request
        asked.set()
        never.wait()

    server, client = HealServer(ADDRESS, state_at), HealClient(ADDRESS)

    def end():
        asked.wait()
        client.shutdown("the quorum ended")

    helper = threading.Thread(target=end)
    helper.start()
    for _ in range(2):
        with pytest.raises(HealFailed, match="the quorum ended"):
            client.copy(make_state(), peer=server.address, expected="", **WANTED)
    helper.join()
    never.set()


def test_a_state_is_given_to_pods_of_the_job_only(monkeypatch):
    source, joiner = make_state(1), make_state(None)
    asked = []

    def state_at(*request):
        asked.append(request)
        return source

    monkeypatch.setattr(job_secret, "read", lambda: "the job's")
    server = HealServer(ADDRESS, state_at)
    monkeypatch.setattr(job_secret, "read", lambda: "another job's")
    with pytest.raises(HealFailed, match="no proof of the job's secret"):
        HealClient(ADDRESS).copy(joiner, peer=server.address, expected="", **WANTED)
    assert asked == []
    monkeypatch.setattr(job_secret, "read", lambda: "the job's")
    HealClient(ADDRESS).copy(joiner, peer=server.address, expected="", **WANTED)
    assert same(source, joiner)


def test_a_source_that_does_not_know_the_secret_is_asked_for_nothing(monkeypatch):
    """Its bits would be noticed, but what is asked for would be told."""
    monkeypatch.setattr(job_secret, "read", lambda: "the job's")
    joiner = make_state(None)
    with socket.create_server((ADDRESS, 0)) as listener:
        address = f"{ADDRESS}:{listener.getsockname()[1]}"
        heard = []

        def listen():
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(1000))
                connection.sendall(bytes(ANSWER_BYTES))
                heard.append(connection.recv(1000))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(HealFailed, match="older version or something else"):
            HealClient(ADDRESS).copy(joiner, peer=address, expected="", **WANTED)
        thread.join()
    assert [len(said) for said in heard] == [HELLO_BYTES, 0]


FEW = """
import resource, sys
from mainstay_train.state.heal import HealServer
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
print(HealServer("127.0.0.1", lambda *_: None).address, flush=True)
sys.stdin.read()
"""


def test_idle_strangers_do_not_end_a_source():
    """With 256 descriptors, 260 of them ended it for good: nobody accepted any more."""
    child = subprocess.Popen(
        [sys.executable, "-c", FEW],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    address = child.stdout.readline().strip()
    host, _, port = address.rpartition(":")
    threads = len(os.listdir(f"/proc/{child.pid}/task"))
    idle = [socket.create_connection((host, int(port))) for _ in range(260)]
    try:
        with pytest.raises(HealFailed, match="q2-abc is over here"):
            HealClient(ADDRESS).copy(make_state(), peer=address, expected="", **WANTED)
        assert len(os.listdir(f"/proc/{child.pid}/task")) <= threads + 1, "a thread for the joiner"
    finally:
        for each in idle:
            each.close()
        child.communicate()
