import contextlib
import logging
import os
import random
import socket
import struct
import subprocess
import sys
import threading

import pytest
import torch
from tests.train.crew import ADDRESS
from tests.train.stages import build_stage

from mainstay_core.base.digest import total
from mainstay_core.base.frames import PREFIX, pack, pack_head
from mainstay_core.base.proofs import (
    ANSWER_BYTES,
    HELLO_BYTES,
    ListenerProof,
    Purpose,
)
from mainstay_core.rank.serving import HealFailed, Source, Wanted
from mainstay_net.caller import prove
from mainstay_train.base import job_secret
from mainstay_train.comm.registered import (
    close_registered,
    open_registered,
    read_exactly,
    read_frame,
)
from mainstay_train.exact.optimizer import StateTensor
from mainstay_train.model import workload
from mainstay_train.state.chunks import CHUNK_BYTES, Staging, cut, shape_of
from mainstay_train.state.heal import HealClient, HealServer, masters_digest
from mainstay_train.sums import digests

SMALL = {"dim": 16, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
WANTED = Wanted("q2-abc", 1, 7)
REQUEST = {"kind": "heal", "quorum": "q2-abc", "position": 1, "version": 7}


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


def copy(joiner, *addresses, expected="", client=None):
    """Copy from sources on the slots a/0, b/0 and so on."""
    sources = [Source(f"{pod}/0", at) for pod, at in zip("abcd", addresses, strict=False)]
    client = client or HealClient(ADDRESS)
    return client.copy(joiner, sources=sources, wanted=WANTED, expected=expected)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_equals_its_sources_also_in_the_next_step(dtype, count):
    source, joiner = make_state(1, dtype), make_state(None, dtype)
    asked = set()

    def state_at(*request):
        asked.add(request)
        return source

    servers = [HealServer(ADDRESS, state_at) for _ in range(count)]
    expected = masters_digest(source)
    assert copy(joiner, *(s.address for s in servers), expected=expected) == expected
    assert asked == {("q2-abc", 1, 7)}
    assert same(source, joiner)
    gradient = torch.ones(source.layout.size)
    for state in (source, joiner):
        state.apply(state.layout.block_views(gradient), 0.5, 1e-3)
    assert same(source, joiner)


def test_chunks_cover_a_state_and_their_digests_add_up_to_its_own():
    flats = make_state(1).flats()
    flats.append(StateTensor("block", "step", torch.arange(1000, dtype=torch.int64)))
    flats.append(StateTensor("block", "none", torch.empty(0)))
    chunks = cut(flats, 1024)
    assert max(chunk.size_bytes for chunk in chunks) == 1024
    for flat in flats:
        mine = [chunk.tensor for chunk in chunks if chunk.flat is flat]
        assert torch.equal(torch.cat([flat.tensor[:0], *mine]), flat.tensor)
    whole = digests.digest_tensors((flat.id, flat.tensor) for flat in flats)
    assert total(digests.Digest.parse(chunk.digest()) for chunk in chunks) == whole
    assert shape_of(chunks) == shape_of(cut(flats, 1024))
    assert shape_of(chunks) != shape_of(cut(flats[1:], 1024))
    assert shape_of(chunks) != shape_of(cut(flats, 2048)), "another version cuts otherwise"


def test_staged_bytes_are_those_of_the_chunk():
    state, other = make_state(1), make_state()
    staging = Staging(torch.device("cpu"), 1024)
    for here, there in zip(cut(state.flats(), 1024), cut(other.flats(), 1024), strict=True):
        staging.memory(here.size_bytes)[:] = staging.read(here)
        staging.write(there)
    other.refresh()
    assert same(state, other)


def test_a_copy_waits_until_a_source_is_there():
    source, joiner, ready = make_state(1), make_state(), threading.Event()

    def state_at(*request):
        del request
        asked.set()
        ready.wait()
        return source

    asked = threading.Event()
    server = HealServer(ADDRESS, state_at)
    thread = threading.Thread(target=copy, args=(joiner, server.address))
    thread.start()
    asked.wait()
    assert thread.is_alive()
    ready.set()
    thread.join()
    assert same(source, joiner)


def test_a_source_that_has_moved_on_refuses():
    server = HealServer(ADDRESS, lambda *_: None)
    with pytest.raises(HealFailed, match="q2-abc is over here"):
        copy(make_state(), server.address)


def test_a_source_that_moves_on_in_the_middle_names_no_digest_of_what_it_read():
    """What it reads then may be of another version."""
    source, answers = make_state(1), iter([True] * 4)
    server = HealServer(ADDRESS, lambda *_: source if next(answers, False) else None)
    with pytest.raises(HealFailed, match="q2-abc is over here"):
        copy(make_state(), server.address)


def test_another_state_than_the_quorum_expects_is_not_taken():
    source = make_state(1)
    server = HealServer(ADDRESS, lambda *_: source)
    expected = masters_digest(make_state(2))
    with pytest.raises(
        HealFailed, match=f"a/0 has digest {masters_digest(source)}, not {expected}"
    ):
        copy(make_state(), server.address, expected=expected)


def test_a_state_of_another_shape_is_not_taken():
    other = build_stage(workload.load("", {**SMALL, "dim": 32}), 2, 1)
    server = HealServer(ADDRESS, lambda *_: other)
    with pytest.raises(HealFailed, match="another shape"):
        copy(make_state(), server.address)


def let_in(listener, address):
    """Accept a joiner as a pod of the job that has gone bad: it knows the secret."""
    joiner, _ = listener.accept()
    proof = ListenerProof("", bytes(32), address, (Purpose.HEAL,))
    while proof.purpose is None:
        joiner.sendall(proof.received(joiner.recv(proof.wanted)))
    return joiner


class Relay:
    """Stands between joiner and source; ``change`` may alter, hold or drop a chunk's bytes."""

    def __init__(self, server, change):
        self._server, self._change = server, change
        self._listener = socket.create_server((ADDRESS, 0))
        self.address = f"{ADDRESS}:{self._listener.getsockname()[1]}"
        self.num_asked = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with contextlib.suppress(OSError):  # the joiner needs it no longer
            self._pass_on()

    def _pass_on(self):
        joiner = let_in(self._listener, self.address)
        host, _, port = self._server.address.rpartition(":")
        with joiner, socket.create_connection((host, int(port))) as source:
            prove(source, "", self._server.address, Purpose.HEAL)
            source.sendall(pack(read_frame(joiner, CHUNK_BYTES)[0]))
            joiner.sendall(pack(read_frame(source, CHUNK_BYTES)[0]))
            while joiner.recv(1, socket.MSG_PEEK):
                source.sendall(pack(read_frame(joiner, CHUNK_BYTES)[0]))
                self.num_asked += 1
                head, size = read_frame(source, CHUNK_BYTES)
                body = bytearray(size)
                read_exactly(source, memoryview(body))
                changed = self._change(body)
                if changed is None:
                    return
                joiner.sendall(
                    pack_head(head, size) + changed + pack(read_frame(source, CHUNK_BYTES)[0])
                )


def flip(body):
    body[len(body) // 2] ^= 0x10
    return body


def dies_after(count):
    left = iter(range(count))
    return lambda body: None if next(left, None) is None else body


@pytest.mark.parametrize("expected", ["", "from the source"])
def test_a_single_wrong_bit_fails_the_copy(expected):
    source = make_state(1)
    relay = Relay(HealServer(ADDRESS, lambda *_: source), flip)
    with pytest.raises(HealFailed, match=f"a/0 .{relay.address}.: chunk 0 has digest"):
        copy(make_state(), relay.address, expected=masters_digest(source) if expected else "")


@pytest.mark.parametrize("change", [flip, dies_after(0), dies_after(1)])
def test_a_source_that_fails_is_named_and_the_others_send_the_rest(change):
    source, joiner, named = make_state(1), make_state(), threading.Event()

    class Named(logging.Handler):
        def emit(self, record):
            if f"copy from a/0 ({relay.address})" in record.getMessage():
                named.set()

    relay = Relay(HealServer(ADDRESS, lambda *_: source), change)
    # The other one begins once the first has failed.
    server = HealServer(ADDRESS, lambda *_: named.wait() and source)
    logger, handler = logging.getLogger("mainstay_train.state.heal"), Named()
    logger.addHandler(handler)
    try:
        copy(joiner, relay.address, server.address, expected=masters_digest(source))
    finally:
        logger.removeHandler(handler)
    assert same(source, joiner)


def test_a_source_that_dies_in_the_middle_fails_the_copy_if_there_is_no_other():
    source = make_state(1)
    relay = Relay(HealServer(ADDRESS, lambda *_: source), dies_after(2))
    with pytest.raises(HealFailed, match=r"closed the connection|reset by peer"):
        copy(make_state(), relay.address)


def test_a_slow_source_holds_up_nobody_and_what_it_sends_late_is_not_written():
    source, joiner = make_state(1), make_state()
    asked, over = threading.Event(), threading.Event()

    def held(body):
        asked.set()
        over.wait()
        return flip(body)

    slow = Relay(HealServer(ADDRESS, lambda *_: source), held)
    # The quick one begins once the slow one owes a chunk.
    quick = HealServer(ADDRESS, lambda *_: asked.wait() and source)
    copy(joiner, slow.address, quick.address, expected=masters_digest(source))
    assert slow.num_asked == 1
    over.set()
    assert same(source, joiner)


def test_chunks_are_asked_of_all_sources():
    source, joiner = make_state(1), make_state()
    meet = threading.Barrier(2)
    firsts = [iter([True]) for _ in range(2)]

    def together(first):
        def change(body):
            if next(first, False):
                meet.wait()  # nobody goes on before the other was asked as well
            return body

        return change

    relays = [Relay(HealServer(ADDRESS, lambda *_: source), together(f)) for f in firsts]
    copy(joiner, *(relay.address for relay in relays), expected=masters_digest(source))
    assert all(relay.num_asked for relay in relays)
    assert same(source, joiner)


HUGE = 1 << 40


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (PREFIX.pack(1 << 31, 0), "refused"),
        (PREFIX.pack(2, HUGE), "refused"),
        (pack_head({"kind": "chunk", "number": 0}, CHUNK_BYTES + 1), "refused"),
        (pack_head({"kind": "chunk", "number": 0}, CHUNK_BYTES), "not chunk 0 with"),
        (pack_head({"kind": "chunk", "number": 1}, 64), "not chunk 0 with"),
        (pack({"kind": "digest", "digest": "0"}), "not the chunk that was asked for"),
        (pack({"kind": "refused", "why": "x" * 60_000}), "a/0 .*: x{200}$"),
        (pack_head({"kind": "refused"}, 9) + b"[" * 9, "None"),
        (b"no frame at all, but long enough for one", "refused|JSON"),
    ],
)
def test_a_hostile_source_makes_a_joiner_hold_no_more_than_a_chunk(said, why):
    joiner = make_state()
    with socket.create_server((ADDRESS, 0)) as listener:
        address = f"{ADDRESS}:{listener.getsockname()[1]}"

        def answer():
            with let_in(listener, address) as connection:
                assert read_frame(connection, CHUNK_BYTES)[0] == REQUEST
                connection.sendall(pack({"kind": "state", "shape": shape_of(cut(joiner.flats()))}))
                read_frame(connection, CHUNK_BYTES)
                connection.sendall(said)
                with contextlib.suppress(OSError):
                    connection.recv(1 << 10)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HealFailed, match=why):
            copy(joiner, address)
        thread.join()


@pytest.mark.parametrize(
    "said",
    [
        pack({"kind": "chunk", "number": -1}),
        pack({"kind": "chunk", "number": 1 << 70}),
        pack({"kind": "chunk", "number": True}),
        pack({"kind": "chunk", "number": 0}, b"a body"),
        pack({"kind": "chunk"}),
        PREFIX.pack(1 << 31, 0),
        random.Random(1).randbytes(64),
    ],
)
def test_a_hostile_joiner_gets_its_own_connection_ended(said):
    source = make_state(1)
    server = HealServer(ADDRESS, lambda *_: source)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as joiner:
        prove(joiner, "", server.address, Purpose.HEAL)
        joiner.sendall(pack(REQUEST))
        assert read_frame(joiner, CHUNK_BYTES)[0]["kind"] == "state"
        joiner.sendall(said)
        with contextlib.suppress(ConnectionResetError):  # what it had not read is gone
            assert joiner.recv(1) == b""
    good = make_state()
    copy(good, server.address)
    assert same(source, good)


def test_a_joiner_that_is_gone_without_a_word_costs_a_source_no_thread_for_ever():
    source = make_state(1)
    server = HealServer(ADDRESS, lambda *_: source, idle_s=0.05)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as joiner:
        prove(joiner, "", server.address, Purpose.HEAL)
        joiner.sendall(pack(REQUEST))
        assert read_frame(joiner, CHUNK_BYTES)[0]["kind"] == "state"
        assert joiner.recv(1) == b""


def test_a_joiner_that_leaves_before_it_has_all_that_it_asked_for_is_no_fault(caplog):
    """As at the end of a copy from two sources: a faster one has sent what the other owed."""
    source = make_state(1)
    caplog.set_level(logging.INFO, "mainstay_train.state.heal")
    reached, left = threading.Event(), threading.Event()

    def on_serve():
        reached.set()
        left.wait()

    server = HealServer(ADDRESS, lambda *_: source, on_serve)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as joiner:
        prove(joiner, "", server.address, Purpose.HEAL)
        joiner.sendall(pack(REQUEST))
        assert read_frame(joiner, CHUNK_BYTES)[0]["kind"] == "state"
        joiner.sendall(pack({"kind": "chunk", "number": 0}))
        reached.wait()
        joiner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left.set()
    for thread in threading.enumerate():
        if thread.name == "heal-source":
            thread.join()
    assert caplog.text == ""


def test_what_a_joiner_asks_for_is_sent_at_once():
    """Else its request waits until the source has acknowledged the proof before it, 40 ms later."""
    server = HealServer(ADDRESS, lambda *_: None)
    connection = open_registered(server.address, ADDRESS)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    close_registered(connection)


def test_nobody_listens_where_the_source_was():
    with socket.create_server((ADDRESS, 0)) as gone:
        address = f"{ADDRESS}:{gone.getsockname()[1]}"
    with pytest.raises(HealFailed, match=address):
        copy(make_state(), address)


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
            copy(make_state(), server.address, client=client)
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
        copy(joiner, server.address)
    assert asked == []
    monkeypatch.setattr(job_secret, "read", lambda: "the job's")
    copy(joiner, server.address)
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
            copy(joiner, address)
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
            copy(make_state(), address)
        assert len(os.listdir(f"/proc/{child.pid}/task")) <= threads + 1, "a thread for the joiner"
    finally:
        for each in idle:
            each.close()
        child.communicate()
