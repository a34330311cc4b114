"""Segments that trainers write are kept by their pod and by other pods, and are read again."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.agent.snapshots.conftest import HOST, MIB, Pod, done_check
from tests.core.segments.keys import header_of, key_of, record_of

from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.snapshots.checks import CheckVerdict, judge
from mainstay_core.wire.segments import Holder, Run, SegmentKey
from mainstay_core.wire.stores import Doubts
from mainstay_train.state.rooms import StoreFull
from mainstay_train.state.segments import Fetched, SegmentClient, SegmentMissing
from mainstay_train.state.store_connection import StoreGone

Make = Callable[..., Pod]
MakeClient = Callable[..., SegmentClient]
PAGE = 4096


def write(
    client: SegmentClient,
    key: SegmentKey,
    data: bytes,
    holders: Sequence[Holder] = (),
    keep_from: int = 0,
    **header: Any,
) -> None:
    room = client.room(len(data), header.get("window", 0))
    room.memory[:] = data
    client.written(room, header_of(key, len(data), **header), holders, keep_from)


def read(
    client: SegmentClient, key: SegmentKey, holders: Sequence[Holder], size: int
) -> tuple[Fetched, bytes]:
    into = bytearray(size)
    return client.fetch(key, holders, memoryview(into)), bytes(into)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A socket that lets everybody connect and never says anything."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener


def holder_at(listener: socket.socket) -> Holder:
    return Holder(pod=PodUid("silent"), address=f"{HOST}:{listener.getsockname()[1]}")


def flush(client: SegmentClient, lineage: int = 0) -> Any:
    """Return the store's report: whatever was said to it before has happened."""
    return client.report(lineage)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 10 * MIB])
def test_a_segment_is_at_every_holder_with_the_bytes_that_were_written(
    make_store: Make, make_client: MakeClient, size: int
) -> None:
    pods = [make_store(name, 12 * MIB) for name in "abc"]
    data, key = random.Random(size).randbytes(size), key_of(3)
    writer = make_client(pods[0])
    holders = [pod.holder for pod in pods]

    write(writer, key, data, holders)

    assert writer.wait_held([key]) == ""
    assert writer.pending() == {}
    for pod in pods:
        assert read(make_client(pod), key, (), size) == (Fetched(header_of(key, size), None), data)
    stranger = make_client(make_store("d"))
    expected = Fetched(header_of(key, size), pods[2].holder)
    assert read(stranger, key, [pods[2].holder, pods[0].holder], size) == (expected, data)


def test_a_reader_asks_the_next_holder_and_says_in_the_end_who_was_asked(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b, c = make_store("a"), make_store("b"), make_store("c")
    gone = Holder(pod=PodUid("gone"), address=f"{HOST}:1")
    write(make_client(c), key_of(3), b"bytes")
    flush(make_client(c))
    reader = make_client(a)

    assert read(reader, key_of(3), [gone, b.holder, c.holder], 5)[1] == b"bytes"
    with pytest.raises(SegmentMissing) as missing:
        read(reader, key_of(4), [gone, b.holder], 5)

    said = str(missing.value)
    assert "state of unit 0 of position 0 at 4 of lineage 0" in said
    assert "this pod: it does not have it" in said
    assert "gone (127.0.0.1:1): [Errno 111] Connection refused" in said
    assert f"b ({b.holder.address}): it does not have it" in said


def test_a_segment_of_another_size_than_the_reader_expects_is_not_taken(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    write(make_client(b), key_of(3), b"bytes")
    flush(make_client(b))

    with pytest.raises(SegmentMissing, match="has 5 bytes, not 7"):
        read(make_client(a), key_of(3), [b.holder], 7)
    with pytest.raises(SegmentMissing, match="this pod"):
        read(make_client(b), key_of(3), (), 7)


def test_bad_bytes_are_kept_no_more_once_a_reader_says_so(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    writer = make_client(a)
    write(writer, key_of(3), b"bytes", [b.holder])
    assert writer.wait_held([key_of(3)]) == ""

    writer.discard(key_of(3))

    assert read(writer, key_of(3), [b.holder], 5)[0].holder == b.holder


def test_a_full_store_says_so_and_has_room_again_when_something_goes(
    make_store: Make, make_client: MakeClient
) -> None:
    client = make_client(make_store("a", 4 * PAGE))
    for version in range(4):
        write(client, key_of(version), b"x")
    with pytest.raises(StoreFull, match=r"of its 16384 bytes 0 are free.*spec.snapshots.memory"):
        client.room(1)

    client.keep_from(0, 2)

    room = client.room(2 * PAGE)
    client.give_back(room)
    with pytest.raises(StoreFull, match="8192 are free"):
        client.room(3 * PAGE)


def test_room_that_was_asked_for_ahead_and_is_not_wanted_goes_to_others(
    make_store: Make, make_client: MakeClient
) -> None:
    client = make_client(make_store("a", 2 * PAGE))
    asked = [client.ask_room(PAGE) for _ in range(3)]
    assert client.take_room(asked[0]).memory.nbytes == PAGE
    for left in asked[1:]:  # of which the last one had no room
        client.decline_room(left)

    client.give_back(client.room(PAGE))
    client.shutdown("over")  # and nothing is left open that the store would wait for
    assert client._store._rooms == {asked[0].number}


def test_a_holder_that_is_full_refuses_with_a_sentence_and_goes_on(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b", 4 * PAGE)
    writer = make_client(a)

    write(writer, key_of(3), bytes(MIB), [b.holder])
    write(writer, key_of(4), b"small", [b.holder])

    assert writer.wait_held([key_of(4)]) == ""
    why_not = writer.wait_held([key_of(4), key_of(3)])
    assert why_not.startswith(
        "state of unit 0 of position 0 at 3 is not at b: a segment of 1048576"
    )
    assert list(writer.pending()) == [key_of(3)]
    assert [u.states for u in make_client(b).report(0).units] == [(4,)]


def test_full_stores_drop_older_logs_for_the_window_in_flight_and_say_so(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a", 4 * PAGE), make_store("b", 4 * PAGE)
    client = make_client(a)
    for version in range(4):  # of the complete window, whose copy is elsewhere
        write(client, key_of(version, kind="gradient"), b"x", [b.holder])
    assert client.wait_held([key_of(3, kind="gradient")]) == ""

    for pod in (a, b):  # the window's first step is committed
        trainer = make_client(pod)
        trainer.record(record_of(4))
        assert trainer.report(0).records

    state = key_of(4)
    write(client, state, b"y", [b.holder], window=4)

    assert client.wait_held([state]) == ""
    for pod in (a, b):
        (unit,) = make_client(pod).report(0).units
        assert unit.states == (4,)
        assert [(run.first, run.last) for run in unit.gradients] == [(1, 3)]
        status = pod.store.ask().result()
        assert status.num_refused == 1
        assert "window that begins at version 4: 1 log and 0 copies" in status.short_of
    # What a replay logs again is older than the window, and takes nothing's place.
    with pytest.raises(StoreFull):
        client.room(1)


@pytest.mark.parametrize(
    ("key", "header", "why"),
    [
        (key_of(5, lineage=1), {"job": JobUid("job-2")}, "is of job 'job-2'"),
        (key_of(5, lineage=0), {}, "is of lineage 0, this store is at lineage 1"),
        (key_of(5, lineage=1), {"fingerprint": "f2"}, "has the fingerprint 'f2'"),
    ],
)
def test_a_segment_that_does_not_belong_is_refused_by_name(
    make_store: Make, make_client: MakeClient, key: SegmentKey, header: Any, why: str
) -> None:
    job = header.get("job", "job-1")
    a, b = make_store("a", job=job), make_store("b")
    owner, writer = make_client(b), make_client(a)
    write(owner, key_of(4, lineage=1), b"first")
    owner.keep_from(1, 2)
    flush(owner)

    write(writer, key, b"bytes", [b.holder], **header)

    assert why in writer.wait_held([key])
    assert [u.states for u in flush(owner, 1).units] == [(4,)]
    write(owner, key, b"bytes", (), **header)
    assert why in owner.wait_held([key])


def test_what_a_writer_keeps_no_more_goes_from_its_holders_with_the_next_segment(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    writer, other = make_client(a), make_client(b)
    for version in range(3):
        write(writer, key_of(version, kind="gradient"), b"old", [b.holder])
        other.record(record_of(version))
    write(writer, key_of(3), b"new", [b.holder], keep_from=2)

    assert writer.wait_held([key_of(3)]) == ""
    (unit,) = other.report(0).units
    assert (unit.states, unit.gradients) == ((3,), (Run(first=2, last=2),))
    assert [r.commit.step for r in other.report(0).records] == [2]
    assert writer.report(0).units[0].gradients == (Run(first=0, last=2),)


def test_a_segment_whose_holder_is_gone_says_so(make_store: Make, make_client: MakeClient) -> None:
    writer = make_client(make_store("a"))
    gone = Holder(pod=PodUid("gone"), address=f"{HOST}:1")

    write(writer, key_of(3), b"bytes", [gone])

    assert "is not at gone" in writer.wait_held([key_of(3)])
    assert "refused" in writer.pending()[key_of(3)]


def test_trainers_of_one_pod_write_and_read_at_the_same_time(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a", 32 * MIB), make_store("b", 32 * MIB)
    failed: list[BaseException] = []

    def work(slot: int) -> None:
        try:
            client, rng = make_client(a, slot), random.Random(slot)
            for version in range(25):
                key = key_of(version, unit=slot)
                data = rng.randbytes(rng.choice([1, PAGE, 100_000]))
                write(client, key, data, [b.holder])
                assert read(client, key, (), len(data))[1] == data
                assert client.wait_held([key]) == ""
                client.discard(key)
                assert read(client, key, [b.holder], len(data))[1] == data
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_shutdown_ends_every_wait_and_every_later_call(
    make_store: Make, make_client: MakeClient, silent: socket.socket
) -> None:
    a = make_store("a")
    client = make_client(a)
    write(client, key_of(3), b"bytes", [holder_at(silent)])
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(client.wait_held([key_of(3)])))
    thread.start()

    client.shutdown("the quorum is over")

    thread.join()
    assert said == ["the quorum is over"]
    with pytest.raises(StoreGone, match="the quorum is over"):
        client.room(1)
    with pytest.raises(StoreGone, match="the quorum is over"):
        client.report(0)


def test_a_wait_ends_when_its_condition_does(
    make_store: Make, make_client: MakeClient, silent: socket.socket
) -> None:
    client, over = make_client(make_store("a")), threading.Event()
    write(client, key_of(3), b"bytes", [holder_at(silent)])
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(client.wait_held([key_of(3)], over.is_set))
    )
    thread.start()

    over.set()
    client.poke()

    thread.join()
    assert "was not waited for any longer" in said[0]
    assert "was not written here" in client.wait_held([key_of(7)])


def test_a_shutdown_ends_a_read_from_another_pod(
    make_store: Make, make_client: MakeClient, silent: socket.socket
) -> None:
    client, said = make_client(make_store("a")), []

    def fetch() -> None:
        with pytest.raises(StoreGone) as gone:
            read(client, key_of(3), [holder_at(silent)], 5)
        said.append(str(gone.value))

    thread = threading.Thread(target=fetch)
    thread.start()
    caller, _ = silent.accept()
    client.shutdown("the quorum is over")

    thread.join()
    caller.close()
    assert said == ["the quorum is over"]


def test_a_room_stays_its_writers_until_the_writer_is_done_with_it(
    make_store: Make, make_client: MakeClient
) -> None:
    """A thread may still write into it when another one ends the client."""
    a = make_store("a", 2 * PAGE)
    first, second = make_client(a), make_client(a)
    room = first.room(2 * PAGE)

    first.shutdown("the quorum is over")

    with pytest.raises(StoreFull):
        second.room(1)
    room.memory[:] = bytes(2 * PAGE)
    with pytest.raises(StoreGone):
        first.written(room, header_of(key_of(3), 2 * PAGE), (), 0)
    second.give_back(take_when_free(second, 2 * PAGE))


def take_when_free(client: SegmentClient, size: int) -> Any:
    """Return room as soon as the store has seen that the connection before has ended."""
    while True:
        try:
            return client.room(size)
        except StoreFull:
            client.report(0)


@pytest.mark.parametrize("seed", range(5))
def test_a_report_is_that_of_a_twin_after_random_operations(
    make_store: Make, make_client: MakeClient, seed: int
) -> None:
    rng = random.Random(seed)
    pods = [make_store(name, 32 * MIB) for name in "ab"]
    clients = [make_client(pod) for pod in pods]
    held: list[dict[SegmentKey, bytes]] = [{}, {}]
    floors = [0, 0]
    for _ in range(150):
        at, version = rng.randrange(2), rng.randrange(20)
        key = key_of(version, rng.randrange(3), rng.choice(["state", "gradient"]))
        action = rng.choice(["write", "write", "send", "discard", "keep"])
        if action in ("write", "send"):
            data = rng.randbytes(rng.choice([0, 5, PAGE, 3 * PAGE + 1]))
            floor = rng.choice([0, floors[at]])
            holders = [pods[1 - at].holder] if action == "send" else []
            write(clients[at], key, data, holders, floor)
            refused = clients[at].wait_held([key])
            assert refused == ""
            held[at][key] = data
            if holders:
                there = 1 - at
                if floor > floors[there]:
                    floors[there] = floor
                    drop_older(held[there], floor)
                held[there][key] = data
        elif action == "discard":
            clients[at].discard(key)
            held[at].pop(key, None)
        elif rng.random() < 0.3:
            back = rng.random() < 0.3
            clients[at].keep_from(0, floor := version // 2, may_go_back=back)
            if back:
                held[at] = {k: data for k, data in held[at].items() if k.version <= floor}
                floors[at] = min(floors[at], floor)
            elif floor > floors[at]:
                drop_older(held[at], floor)
                floors[at] = floor
    for client, kept in zip(clients, held, strict=True):
        told = {
            key_of(version, unit.unit, kind)
            for unit in client.report(0).units
            for kind, versions in (
                ("state", unit.states),
                ("gradient", [s for r in unit.gradients for s in range(r.first, r.last + 1)]),
            )
            for version in versions
        }
        assert told == set(kept)
        for key, data in kept.items():
            assert read(client, key, (), len(data))[1] == data


def drop_older(kept: dict[SegmentKey, bytes], version: int) -> None:
    for key in [key for key in kept if key.version < version]:
        del kept[key]


# What is told of a store, and checks of it -----------------------------------------------------


def test_a_store_says_in_short_what_it_holds_and_what_it_lacked_room_for(
    make_store: Make, make_client: MakeClient
) -> None:
    pod = make_store("a", 2 * PAGE)
    client = make_client(pod)
    write(client, key_of(3), bytes(PAGE))
    write(client, key_of(3, kind="gradient"), bytes(PAGE))
    with pytest.raises(StoreFull):
        client.room(PAGE)
    client.record(record_of(3))
    flush(client)

    told = pod.store.ask().result()

    assert (told.pod, told.memory_bytes, told.used_bytes) == ("a", 2 * PAGE, 2 * PAGE)
    assert [(k.kind, k.size_bytes) for k in told.kinds] == [("gradient", PAGE), ("state", PAGE)]
    (group,) = told.units
    assert (group.states, group.gradients) == ((3,), (Run(first=3, last=3),))
    assert told.num_refused == 1
    assert "spec.snapshots.memory" in told.short_of
    assert told.checked is None


def test_a_check_reads_every_segment_and_finds_the_copy_with_a_flipped_bit(
    make_store: Make, make_client: MakeClient
) -> None:
    pods = [make_store(name, 32 * MIB) for name in "abc"]
    writers = [make_client(pod) for pod in pods]
    sizes = {key_of(3): 10 * MIB, key_of(4): 5, key_of(4, kind="gradient"): 0, key_of(5): PAGE}
    for key, size in sizes.items():
        write(writers[0], key, random.Random(size).randbytes(size), [pod.holder for pod in pods])
    assert writers[0].wait_held([*sizes]) == ""
    assert checked(pods, 1).damaged == ()

    flip(writers[1], key_of(3), 7 * MIB)

    (found,) = checked(pods, 2).damaged
    assert (found.pod, found.key) == ("b", key_of(3))
    assert found.unit_name == "layer.0"
    # It had been read before, so even a store alone knows that its copy has changed.
    assert [d.key for d in checked(pods[1:2], 3).damaged] == [key_of(3)]
    assert checked(pods, 4).num_compared == len(sizes)


def test_a_copy_that_was_found_damaged_covers_nothing_until_it_is_written_again(
    make_store: Make, make_client: MakeClient
) -> None:
    pods = [make_store(name) for name in "abc"]
    writers = [make_client(pod) for pod in pods]
    for version in (3, 4):
        write(writers[0], key_of(version), b"bytes", [pod.holder for pod in pods])
    assert writers[0].wait_held([key_of(3), key_of(4)]) == ""

    # A trainer of another pod reads one of them.
    found, _ = read(writers[0], key_of(3), (), 5)
    writers[0].doubt(pods[1].holder, found.header)
    assert states_of(pods[1]) == [(4,)]
    # A check finds the other one.
    flip(writers[1], key_of(4), 0)
    # Beside that it names the one that is known, until it is written again.
    damaged = [(d.pod, d.key) for d in checked(pods, 1).damaged]
    assert damaged == [("b", key_of(3)), ("b", key_of(4))]
    pods[1].store.doubt(Doubts(check=1, keys=(key_of(4),)))
    assert states_of(pods[1]) == []
    assert pods[1].store.ask().result().num_discarded == 2

    # One that is sent again takes its place, though one of the same key is there.
    write(writers[0], key_of(4), b"bytes", [pods[1].holder])
    assert writers[0].wait_held([key_of(4)]) == ""
    assert states_of(pods[1]) == [(4,)]
    assert [states_of(pod) for pod in (pods[0], pods[2])] == [[(3, 4)]] * 2


def test_a_check_names_a_damaged_commit_which_covers_nothing_until_it_is_written_again(
    make_store: Make, make_client: MakeClient
) -> None:
    pod = make_store("a")
    client = make_client(pod)
    for step in (3, 4):
        client.record(record_of(step))
    flush(client)
    done = done_check(pod, 1)
    assert (done.num_records, done.bad_records) == (2, ())

    # The store itself takes no damaged one.
    commits = pod.store._index.commits
    commits.put(replace(record_of(4), chain="x"))

    done = done_check(pod, 2)
    assert (done.num_records, done.bad_records) == (2, (4,))
    told = pod.store.ask().result()
    assert told.judged == (Run(first=3, last=3),)
    assert (told.num_discarded, told.num_damaged) == (1, 1)

    client.record(record_of(4))
    flush(client)
    told = pod.store.ask().result()
    assert told.judged == (Run(first=3, last=4),)
    assert (told.num_discarded, told.num_damaged) == (1, 0)
    assert done_check(pod, 3).bad_records == ()


def test_a_copy_that_a_reader_has_found_damaged_is_named_by_the_next_check(
    make_store: Make, make_client: MakeClient
) -> None:
    pods = [make_store(name) for name in "ab"]
    writer = make_client(pods[0])
    write(writer, key_of(3), b"bytes", [pod.holder for pod in pods])
    assert writer.wait_held([key_of(3)]) == ""
    found, _ = read(writer, key_of(3), (), 5)
    writer.doubt(pods[1].holder, found.header)

    (damaged,) = checked(pods, 1).damaged
    assert (damaged.pod, damaged.key, damaged.unit_name) == ("b", key_of(3), "layer.0")
    write(writer, key_of(3), b"bytes", [pods[1].holder])
    assert writer.wait_held([key_of(3)]) == ""
    assert checked(pods, 2).damaged == ()


def states_of(pod: Pod) -> list[tuple[int, ...]]:
    """The versions of states that a store tells the api of."""
    return [group.states for group in pod.store.ask().result().units]


def checked(pods: Sequence[Pod], number: int) -> CheckVerdict:
    """What a check of stores has found."""
    return judge({pod.uid: done_check(pod, number) for pod in pods})


def flip(client: SegmentClient, key: SegmentKey, at: int) -> None:
    """Change a bit of a segment where it lies in its pod's memory."""
    with client._reading(key) as found:
        assert found is not None
        client._store.arena[found.offset + at] ^= 1


def test_segments_that_go_while_they_are_checked_take_nothing_along(
    make_store: Make, make_client: MakeClient
) -> None:
    pod = make_store("a", 64 * MIB)
    client = make_client(pod)
    for version in range(3):
        write(client, key_of(version), bytes(16 * MIB))
    pod.store.ask(1).result()
    client.keep_from(0, 3)
    flush(client)

    while (told := pod.store.ask(1).result()).checked is None:
        pass

    assert told.checked.num_segments <= 3
    assert (told.used_bytes, told.units) == (0, ())
