"""Whoever ends in the middle, whether trainer, holder or stranger, leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.agent.snapshots.conftest import HOST, MIB, SECRET, Pod
from tests.agent.snapshots.test_store import PAGE, read, take_when_free, write
from tests.core.segments.keys import header_of, key_of

from mainstay_agent.snapshots import callers, holders, store
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import PREFIX, pack, parse_head
from mainstay_core.base.proofs import ANSWER_BYTES, NONCE_BYTES, CallerProof, Purpose
from mainstay_core.segments import frames
from mainstay_core.wire.segments import MAX_SEGMENT_BYTES, Holder
from mainstay_net.caller import prove
from mainstay_train.state.rooms import StoreFull
from mainstay_train.state.segments import SegmentClient
from mainstay_train.state.store_connection import StoreGone

Make = Callable[..., Pod]
MakeClient = Callable[..., SegmentClient]

WRITER = f"""
import sys, time
from mainstay_train.state.segments import SegmentClient
client = SegmentClient(sys.argv[1], 0, "life", "{HOST}")
room = client.room(int(sys.argv[2]))
room.memory[:100] = bytes(100)
print("half", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def calling(pod: Pod) -> Any:
    """Be a pod that has called the store and has proved itself."""
    host, _, port = pod.holder.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as caller:
        prove(caller, SECRET, pod.holder.address, Purpose.SNAPSHOT)
        yield caller


def answer_of(caller: socket.socket) -> dict[str, Any]:
    """Return the head of the next frame."""
    stream = caller.makefile("rb")
    head_size, _ = PREFIX.unpack(stream.read(PREFIX.size))
    return parse_head(stream.read(head_size))


def has_ended(caller: socket.socket) -> bool:
    """Wait until the store says something, and return whether it closes instead."""
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def segment(size: int, version: int = 3) -> bytes:
    return frames.encode(frames.Segment(header=header_of(key_of(version), size)), size)


@pytest.mark.parametrize("older", [None, b"older"])
def test_what_goes_while_it_comes_again_is_not_confirmed(
    make_store: Make, make_client: MakeClient, older: bytes | None
) -> None:
    """Its body was not taken, since the segment was there; an older one may have come instead."""
    pod = make_store("a", 8 * MIB)
    client, key = make_client(pod), key_of(3)
    write(client, key, bytes(MIB), quorum=6)
    assert client.wait_held([key]) == ""
    again = frames.Segment(header=header_of(key, MIB, quorum=6), is_again=True)
    sent = frames.encode(again, MIB) + bytes(MIB)
    with calling(pod) as caller:
        caller.sendall(sent)
        assert answer_of(caller)["kind"] == "stored"
        # More than the two sockets have room for: whoever has sent it knows that the head was read.
        long = frames.Segment(header=header_of(key, 32 * MIB, quorum=6), is_again=True)
        caller.sendall(frames.encode(long, 32 * MIB) + bytes(31 * MIB))
        client.withdraw(key)
        assert client.report(0).units == ()
        if older is not None:
            write(client, key, older, quorum=5, digest="o")
            assert client.wait_held([key]) == ""
        caller.sendall(bytes(MIB))
        answer = answer_of(caller)
    assert (answer["kind"], answer["why"]) == ("refused", f"{key} went while it came again")


def test_a_writer_that_is_killed_in_the_middle_leaves_no_segment_and_its_room_is_free(
    make_store: Make, make_client: MakeClient
) -> None:
    pod = make_store("a", 4 * PAGE)
    other = make_client(pod)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, pod.path, str(4 * PAGE)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    with pytest.raises(StoreFull):
        other.room(1)

    writer.kill()
    writer.communicate()

    other.give_back(take_when_free(other, 4 * PAGE))
    assert other.report(0).units == ()


def test_what_a_trainer_has_written_outlasts_it(make_store: Make, make_client: MakeClient) -> None:
    a, b = make_store("a"), make_store("b")
    writer = make_client(a)
    write(writer, key_of(3), b"bytes", [b.holder])
    writer.report(0)

    writer.shutdown("killed")

    assert read(make_client(a), key_of(3), (), 5)[1] == b"bytes"
    reader = make_client(b)
    while not reader.report(0).units:
        pass
    assert read(reader, key_of(3), (), 5)[1] == b"bytes"


def test_a_holder_that_is_killed_is_named_and_the_others_hold_on(
    make_store: Make, start_store: Make, make_client: MakeClient
) -> None:
    a, b, dies = make_store("a"), make_store("b"), start_store("dies")
    writer = make_client(a)
    write(writer, key_of(3), b"first", [b.holder, dies.holder])
    assert writer.wait_held([key_of(3)]) == ""
    dies.store.send_signal(signal.SIGSTOP)
    write(writer, key_of(4), bytes(3 * MIB), [b.holder, dies.holder])
    assert list(writer.pending().values()) == [""]

    dies.store.kill()

    why_not = writer.wait_held([key_of(4)])
    assert "is not at dies" in why_not
    assert "b:" not in why_not
    assert read(writer, key_of(4), [dies.holder, b.holder], 3 * MIB)[0].holder is None
    assert [u.states for u in make_client(b).report(0).units] == [(3, 4)]


def test_a_reader_goes_on_when_its_source_is_killed_between_two_segments(
    make_store: Make, start_store: Make, make_client: MakeClient
) -> None:
    a, b, dies = make_store("a"), make_store("b"), start_store("dies")
    writer = make_client(b)
    for version in (3, 4):
        write(writer, key_of(version), b"bytes", [dies.holder])
    assert writer.wait_held([key_of(3), key_of(4)]) == ""
    reader = make_client(a)
    assert read(reader, key_of(3), [dies.holder, b.holder], 5)[0].holder == dies.holder

    dies.store.kill()
    dies.store.wait()

    assert read(reader, key_of(4), [dies.holder, b.holder], 5)[0].holder == b.holder


def test_a_trainer_hears_that_the_store_of_its_pod_has_ended(
    start_store: Make, make_client: MakeClient, make_store: Make
) -> None:
    dies, b = start_store("dies"), make_store("b")
    client = make_client(dies)
    write(client, key_of(3), b"bytes", [b.holder])
    assert client.wait_held([key_of(3)]) == ""

    dies.store.kill()
    dies.store.wait()

    with pytest.raises(StoreGone):
        client.report(0)


def test_a_peer_that_ends_in_the_middle_of_a_segment_leaves_none_and_its_room_is_free(
    make_store: Make, make_client: MakeClient
) -> None:
    pod = make_store("a", 4 * PAGE)
    client = make_client(pod)
    with calling(pod) as caller:
        fetch = frames.encode(frames.Fetch(key=key_of(9)))
        caller.sendall(fetch + segment(4 * PAGE) + bytes(100))
        assert answer_of(caller) == {"kind": "missing"}
        with pytest.raises(StoreFull):
            client.room(1)

    client.give_back(take_when_free(client, 4 * PAGE))
    assert client.report(0).units == ()


def test_a_caller_on_which_nothing_moves_is_cut_off_and_its_room_is_free(
    make_store: Make, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "IDLE_S", 0.05)
    pod = make_store("a", 4 * PAGE)
    client = make_client(pod)
    with calling(pod) as caller:
        caller.sendall(segment(4 * PAGE) + bytes(PAGE))
        assert has_ended(caller)

    client.give_back(take_when_free(client, 4 * PAGE))


def test_a_holder_that_answers_nothing_is_given_up(
    make_store: Make, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "STALL_S", 0.05)
    with socket.create_server((HOST, 0)) as silent:
        address = f"{HOST}:{silent.getsockname()[1]}"
        client = make_client(make_store("a"))
        write(client, key_of(3), b"bytes", [Holder(pod="silent", address=address)])

        assert "nothing moves any more" in client.wait_held([key_of(3)])


def test_a_connection_that_hung_up_after_a_while_is_opened_again(
    make_store: Make, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LINGER_S", 0.01)
    monkeypatch.setattr(callers, "IDLE_S", 0.05)
    a, b = make_store("a"), make_store("b")
    writer, reader = make_client(a), make_client(make_store("c"))
    for version in range(2):
        write(writer, key_of(version), b"bytes", [b.holder])
        assert writer.wait_held([key_of(version)]) == ""
        assert read(reader, key_of(version), [b.holder], 5)[1] == b"bytes"
        with calling(b) as idle:
            assert has_ended(idle)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(pack({"kind": "nonsense"}), id="another kind"),
        pytest.param(PREFIX.pack(frames.MAX_PEER_HEAD_BYTES + 1, 0), id="a long head"),
        pytest.param(PREFIX.pack(10, MAX_SEGMENT_BYTES + 1), id="a long body"),
        pytest.param(PREFIX.pack(0, 10), id="no head"),
        pytest.param(
            segment(10)[: PREFIX.size - 1] + b"\7" + segment(10)[PREFIX.size :], id="size"
        ),
        pytest.param(pack({"kind": "fetch", "key": {"lineage": -1}}), id="a bad key"),
    ],
)
def test_a_peer_that_does_not_keep_to_the_protocol_is_cut_off(
    make_store: Make, make_client: MakeClient, said: bytes
) -> None:
    pod = make_store("a")
    client = make_client(pod)
    with calling(pod) as caller:
        caller.sendall(said)
        assert has_ended(caller)
    assert client.report(0).units == ()


@pytest.mark.parametrize(
    "said",
    [
        frames.encode(frames.TakeRoom(request=1, size=1)),
        pack({"kind": "nonsense"}),
        frames.encode(frames.Hello(slot=0, incarnation="a")) * 2,
        frames.encode(frames.Hello(slot=0, incarnation="a"))
        + frames.encode(frames.GiveBack(request=7)),
        frames.encode(frames.Hello(slot=0, incarnation="a"))
        + frames.encode(frames.TakeRoom(request=1, size=1))
        + frames.encode(
            frames.Written(request=1, header=header_of(key_of(3), 2), holders=(), keep_from=0)
        ),
    ],
)
def test_a_trainer_that_does_not_keep_to_the_protocol_is_cut_off(
    make_store: Make, make_client: MakeClient, said: bytes
) -> None:
    pod = make_store("a", PAGE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(pod.path)
        line.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while line.recv(65536):
                pass
    client = make_client(pod)
    client.give_back(take_when_free(client, PAGE))


@pytest.mark.parametrize("purpose", [Purpose.SNAPSHOT, Purpose.HEAL])
def test_a_stranger_gets_nothing(
    make_store: Make, make_client: MakeClient, purpose: Purpose
) -> None:
    pod = make_store("a")
    client = make_client(pod)
    write(client, key_of(3), b"bytes")
    host, _, port = pod.holder.address.rpartition(":")
    secret = "guessed" if purpose is Purpose.SNAPSHOT else SECRET
    with socket.create_connection((host, int(port)), 60) as stranger:
        mine = CallerProof(secret, bytes(NONCE_BYTES), pod.holder.address, purpose)
        stranger.sendall(mine.hello)
        answer = stranger.recv(ANSWER_BYTES)
        if answer:
            with pytest.raises(RemoteProtocolError, match="no proof of the job's secret"):
                mine.answered(answer)
            stranger.sendall(bytes(32) + frames.encode(frames.Fetch(key=key_of(3))))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_store_without_its_network_calls_nobody_and_lets_nobody_in(
    make_store: Make, make_client: MakeClient
) -> None:
    cut, b = make_store("a", is_cut=lambda: True), make_store("b")
    client = make_client(cut)

    write(client, key_of(3), b"bytes", [b.holder])

    assert "the network is cut" in client.wait_held([key_of(3)])
    with calling(cut) as caller:
        assert caller.recv(1) == b""


def test_more_callers_than_a_store_serves_are_turned_away(
    make_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CALLERS", 1)
    pod = make_store("a")
    with calling(pod) as first:
        first.sendall(frames.encode(frames.Fetch(key=key_of(3))))
        assert answer_of(first) == {"kind": "missing"}
        with calling(pod) as second:
            assert second.recv(1) == b""


def test_a_socket_that_a_former_supervisor_left_is_replaced(
    make_store: Make, make_client: MakeClient, directory: Path
) -> None:
    make_store("a")
    again = make_store("a")

    assert make_client(again).report(0).address == again.holder.address
    assert (directory / "a" / "snapshots.sock").stat().st_mode & 0o777 == 0o700


def test_a_trainer_waits_while_the_store_has_no_descriptor_left(
    make_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, pod = threading.Event(), make_store("a")
    monkeypatch.setattr(store.logger, "warning", lambda *_: seen.set())
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    free = os.dup(line.fileno())
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with line:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            line.connect(pod.path)
            seen.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        line.sendall(frames.encode(frames.Hello(slot=0, incarnation="a")))

        assert frames.decode_to_trainer(answer_of(line)) == frames.Arena(size=4 * MIB)
