"""Boundary logs in a pod's store: what a vote rests on, and who waits for what is being made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.agent.snapshots.conftest import Pod
from tests.core.segments.keys import header_of, record_of

from mainstay_core.segments import frames
from mainstay_core.wire.segments import SegmentHeader, SegmentKey, SegmentKind, boundary_key
from mainstay_train.state.segments import SegmentClient, SegmentMissing

Make = Callable[..., Pod]
MakeClient = Callable[..., SegmentClient]
ACTIVATION = SegmentKind.ACTIVATION
STEP = 3
BYTES = b"an activation"


def flow_of(shard_type: int, micro_batch: int) -> SegmentKey:
    return boundary_key(0, 0, ACTIVATION, STEP, shard_type, micro_batch)


def write(client: SegmentClient, key: SegmentKey, data: bytes = BYTES, **header: Any) -> None:
    room = client.room(len(data))
    room.memory[:] = data
    client.written(room, header_of(key, len(data), **header), (), 0)


def vote(client: SegmentClient, types: tuple[int, ...]) -> str:
    voted = frames.VotedLogs(
        request=0,
        lineage=0,
        position=0,
        step=STEP,
        quorum="q1-abc",
        kinds=(ACTIVATION,),
        types=types,
        micro_batches=2,
    )
    return client.voted_logs(voted)


def test_a_vote_rests_on_logs_only_if_all_are_there(
    make_store: Make, make_client: MakeClient
) -> None:
    client = make_client(make_store())
    for flow in ((0, 0), (0, 1), (1, 0)):
        write(client, flow_of(*flow))
    client.record(record_of(STEP))

    assert str(flow_of(1, 1)) in vote(client, (0, 1))
    assert client.report(0).logs == ()
    assert vote(client, (0,)) == ""

    (log,) = client.report(0).logs
    assert (log.first_type, log.last_type, log.first_step, log.last_step) == (0, 0, STEP, STEP)


def test_no_vote_rests_on_logs_that_their_writer_has_withdrawn(
    make_store: Make, make_client: MakeClient
) -> None:
    client = make_client(make_store())
    for flow in ((0, 0), (0, 1), (1, 0), (1, 1)):
        write(client, flow_of(*flow))
    client.record(record_of(STEP))
    assert vote(client, (0, 1)) == ""

    for number in range(2):
        client.withdraw(flow_of(0, number))

    (log,) = client.report(0).logs
    assert (log.first_type, log.last_type) == (1, 1)
    assert str(flow_of(0, 0)) in vote(client, (0, 1))


class Reader:
    """A thread that reads what is not there yet."""

    def __init__(self, client: SegmentClient, pod: Pod, nonce: str) -> None:
        self.ended = ""
        self.into = bytearray(len(BYTES))
        self.found: SegmentHeader | str = ""
        self._client, self._pod, self._nonce = client, pod, nonce
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        into, holder = memoryview(self.into), self._pod.holder
        try:
            self.found = self._client.fetch_awaited(
                flow_of(0, 0), self._nonce, holder, into, lambda: self.ended
            )
        except SegmentMissing as error:
            self.found = str(error)

    def join(self) -> SegmentHeader | str:
        self._thread.join()
        return self.found


@pytest.mark.parametrize("same_pod", [False, True])
def test_a_reader_gets_what_is_made_in_its_quorum_as_soon_as_it_is_there(
    make_store: Make, make_client: MakeClient, same_pod: bool
) -> None:
    pod = make_store("a")
    writer = make_client(pod)
    write(writer, flow_of(0, 0), b"of an attempt", nonce="earlier")
    assert vote(writer, ()) == ""  # it has come
    reader = Reader(make_client(pod if same_pod else make_store("b")), pod, "abc")

    write(writer, flow_of(0, 0), b"of an attempt", nonce="earlier")
    write(writer, flow_of(0, 1))
    write(writer, flow_of(0, 0))

    assert reader.join() == header_of(flow_of(0, 0), len(BYTES))
    assert bytes(reader.into) == BYTES


def test_a_reader_that_waits_ends_with_its_quorum(
    make_store: Make, make_client: MakeClient
) -> None:
    pod = make_store("a")
    client = make_client(make_store("b"))
    reader = Reader(client, pod, "abc")

    reader.ended = "the quorum has ended"
    client.interrupt()

    assert reader.join() == "the quorum has ended"
