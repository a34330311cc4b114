"""Stores that hold a new plan send again what has lost holders, and say what they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.agent.snapshots.conftest import HOST, Pod
from tests.agent.snapshots.test_store import PAGE, flush, write
from tests.core.plans import make_plan
from tests.core.segments.keys import header_of, key_of, record_of

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.wire.plan import OtherStore, Plan, Rendezvous
from mainstay_core.wire.segments import Holder
from mainstay_train.state.segment_reader import SegmentReader
from mainstay_train.state.segments import SegmentClient

Make = Callable[..., Pod]
MakeClient = Callable[..., SegmentClient]
GONE = Holder(pod=PodUid("gone"), address=f"{HOST}:1")


def plan_of(member: Pod, *others: Pod) -> Plan:
    host = Rendezvous(pod=member.holder.pod, gather="", snapshots=member.holder.address)
    return replace(
        make_plan({0: [f"{member.uid}.1"]}),
        hosts=(host,),
        other_stores=tuple(OtherStore(pod=o.holder.pod, address=o.holder.address) for o in others),
    )


def versions_at(client: SegmentClient) -> list[int]:
    return [version for unit in client.report(0).units for version in unit.states]


def wait_for(client: SegmentClient, versions: list[int]) -> None:
    """Ask a store until it has the states; each question waits for its answer."""
    while versions_at(client) != versions:
        pass


def test_what_lost_its_holder_comes_to_a_spare_which_sends_it_on_when_it_is_the_last(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b, c = make_store("a"), make_store("b"), make_store("c")
    clients = {pod: make_client(pod) for pod in (a, b, c)}
    write(clients[a], key_of(3), b"bytes", [GONE])
    assert "gone" in clients[a].wait_held([key_of(3)])

    a.store.adopt(plan_of(a, b), peers=1, domains=1)
    wait_for(clients[b], [3])
    b.store.adopt(plan_of(c, b), peers=1, domains=1)
    wait_for(clients[c], [3])

    a.store.adopt(plan_of(c, b), peers=1, domains=1)
    flush(clients[a])
    assert versions_at(clients[a]) == [3], "a pod without a place in the plan keeps what it has"


def test_a_store_that_hears_later_that_a_window_is_complete_sends_that_again_too(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    writer, other = make_client(a), make_client(b)
    write(writer, key_of(3), b"older", [GONE])
    write(writer, key_of(4), b"newer", [GONE], window=4)
    a.store.adopt(plan_of(a, b), peers=1, domains=1)
    wait_for(other, [3])

    writer.keep_from(0, 4)

    wait_for(other, [3, 4])


def test_what_comes_under_the_plan_before_is_sent_to_a_store_that_the_newest_one_names(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    writer, other = make_client(a), make_client(b)
    write(writer, key_of(3), b"before", [GONE])
    a.store.adopt(plan_of(a, b), peers=1, domains=1)
    wait_for(other, [3])

    write(writer, key_of(4), b"after", [GONE])

    wait_for(other, [3, 4])


@pytest.mark.parametrize("full", ["b", "c"])
def test_what_a_full_store_does_not_take_goes_to_one_that_has_room(
    make_store: Make, make_client: MakeClient, full: str
) -> None:
    sizes = {"a": 8 * PAGE, "b": 8 * PAGE, "c": 8 * PAGE, full: PAGE}
    pods = {pod: make_store(pod, size) for pod, size in sizes.items()}
    clients = {pod: make_client(pods[pod]) for pod in pods}
    (roomy,) = {"b", "c"} - {full}
    write(clients["a"], key_of(3), bytes(2 * PAGE), [GONE])

    pods["a"].store.adopt(plan_of(*pods.values()), peers=1, domains=1)

    wait_for(clients[roomy], [3])
    assert versions_at(clients[full]) == []


def test_a_store_that_starts_again_in_its_pod_gets_again_what_the_one_before_had(
    make_store: Make, make_client: MakeClient
) -> None:
    a, before = make_store("a"), make_store("b")
    writer = make_client(a)
    write(writer, key_of(3), b"bytes", [before.holder])
    assert writer.wait_held([key_of(3)]) == ""

    again = make_store("b")
    a.store.adopt(plan_of(a, again), peers=1, domains=1)
    wait_for(make_client(again), [3])


def test_what_is_sent_again_never_takes_the_place_of_something_newer(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b, c = make_store("a"), make_store("b"), make_store("c")
    first, second, third = make_client(a), make_client(b), make_client(c)
    write(first, key_of(3), b"stale", [GONE])
    write(first, key_of(4), b"alone", [GONE])
    write(second, key_of(3), b"fresh", [c.holder])
    assert second.wait_held([key_of(3)]) == ""

    a.store.adopt(plan_of(a, b), peers=1, domains=1)
    wait_for(second, [3, 4])

    into = bytearray(5)
    second.fetch(key_of(3), (), memoryview(into))
    assert bytes(into) == b"fresh"
    assert versions_at(third) == [3]


def test_what_is_sent_again_takes_the_place_of_what_an_older_quorum_wrote(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    first, second = make_client(a), make_client(b)
    write(second, key_of(3), b"wrong", quorum=5, digest="w")
    write(first, key_of(3), b"right", [GONE], quorum=6)
    write(first, key_of(4), b"after", [GONE], quorum=6)

    a.store.adopt(plan_of(a, b), peers=1, domains=1)
    wait_for(second, [3, 4])

    into = bytearray(5)
    second.fetch(key_of(3), (), memoryview(into))
    assert bytes(into) == b"right"


def test_commits_come_to_a_spare_with_a_plan_and_as_they_are_told(
    make_store: Make, make_client: MakeClient
) -> None:
    """Else its copies make nothing anew where all pods with trainers are lost together."""
    a, b, spare = make_store("a"), make_store("b"), make_store("s")
    member, other, reader = make_client(a), make_client(b), make_client(spare)
    # That of a model of many experts is longer than what a stranger may say.
    many = record_of(4, gradients=("g" * 32,) * 4096)
    member.record(record_of(3))
    member.record(many)
    flush(member)

    a.store.adopt(plan_of(a, spare), peers=1, domains=1)
    b.store.adopt(plan_of(a, spare), peers=1, domains=1)
    while [r.commit.step for r in reader.report(0).records] != [3, 4]:
        pass
    other.record(record_of(9))
    member.record(record_of(5))
    while len(reader.report(0).records) < 3:
        pass

    assert list(reader.report(0).records) == [record_of(3), many, record_of(5)]


def test_another_pods_trainer_hears_what_a_store_keeps(
    make_store: Make, make_client: MakeClient
) -> None:
    a = make_store("a")
    client, reader = make_client(a), SegmentReader(HOST)
    write(client, key_of(3), b"bytes")
    flush(client)

    assert reader.report(a.holder.address, 0, 60.0) == client.report(0)
    assert reader.report(a.holder.address, 1, 60.0).units == ()
    with pytest.raises(OSError):
        reader.report(GONE.address, 0, 60.0)
    reader.shutdown("over")


def test_states_of_a_window_in_flight_are_not_sent_again() -> None:
    index = SegmentIndex(header_of(key_of(0)).job, 1 << 20)
    for key, window in (
        (key_of(2), 2),
        (key_of(3), 2),
        (key_of(4), 4),
        (key_of(4, kind="gradient"), 4),
    ):
        header = header_of(key, window=window)
        room = index.take_room(header.size_bytes)
        assert room is not None
        index.put(header, room)
        index.keep_from(0, 2)

    assert [segment.header.key for segment in index.needed(0)] == [
        key_of(4, kind="gradient"),
        key_of(2),
        key_of(3),
    ]
    assert index.needed(1) == []
