import contextlib
import random
import socket
import threading

import pytest
import torch
from tests.train.crew import ADDRESS, make_group
from torch.distributed import PrefixStore, TCPStore

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.state import heal

SIZE = 4


def swap(group, received, sent, received_sizes, sent_sizes):
    group.finish_exchange(group.start_exchange(received, sent, received_sizes, sent_sizes))


def exchange(group, value=0):
    """All-to-all of one number to each; returns what came."""
    sent = torch.tensor([float(value + 10 * peer) for peer in range(group.size)])
    received = torch.empty(group.size)
    swap(group, received, sent, [1] * group.size, [1] * group.size)
    return received.tolist()


def _exchange_unequal(pipe, store, rank):
    group = make_group(store, rank, 3)
    group.connect()
    sizes = [[1, 2, 0], [3, 0, 1], [2, 2, 2]]  # [source][destination]
    sent = torch.cat([torch.full((n,), float(10 * rank + to)) for to, n in enumerate(sizes[rank])])
    incoming = [sizes[source][rank] for source in range(3)]
    received = torch.empty(sum(incoming))
    swap(group, received, sent, incoming, sizes[rank])
    pipe.send(received.tolist())


def test_exchange_cuts_by_destination_and_joins_by_source(crew):
    workers = [crew.fork(_exchange_unequal, crew.store, rank) for rank in range(3)]
    assert [w.hear() for w in workers] == [
        [0.0, 10.0, 10.0, 10.0, 20.0, 20.0],
        [1.0, 1.0, 21.0, 21.0],
        [12.0, 22.0, 22.0],
    ]


def _exchange_several_at_once(pipe, store, rank):
    group = make_group(store, rank, 3)
    group.connect()
    started = []
    for number in range(5):
        sent = torch.arange(6.0) + 10 * rank + 100 * number
        started.append(group.start_exchange(torch.empty(6), sent, [2] * 3, [2] * 3))
    for exchange in reversed(started):
        group.finish_exchange(exchange)
    pipe.send([exchange.received.tolist() for exchange in started])


def test_exchanges_that_are_on_their_way_together_do_not_mix(crew):
    workers = [crew.fork(_exchange_several_at_once, crew.store, rank) for rank in range(3)]
    for rank, worker in enumerate(workers):
        assert worker.hear() == [
            [100.0 * n + 10 * peer + 2 * rank + i for peer in range(3) for i in range(2)]
            for n in range(5)
        ]


def _abandon(pipe, store, rank):
    """Rank 1 never answers; rank 0 lets go of what it has started, and ends in good order."""
    group = make_group(store, rank, 2)
    group.connect()
    if rank == 0:
        started = [
            group.start_exchange(torch.empty(2), torch.zeros(2), [1, 1], [1, 1]) for _ in range(3)
        ]
        group.abandon(started)
        pipe.send([exchange.work.is_completed() for exchange in started])
    pipe.recv()


def test_abandoned_exchanges_end(crew):
    workers = [crew.fork(_abandon, crew.store, rank) for rank in range(2)]
    assert workers[0].hear() == [True, True, True]
    for worker in workers:
        worker.say()


def _send_under_two_tags(pipe, store, rank):
    group = make_group(store, rank, 2)
    group.connect()
    if rank == 0:
        works = [group.send(torch.full((SIZE,), float(tag)), 1, tag) for tag in (5, 6)]
        for work in works:
            group.finish(work)
        pipe.send(None)
    else:
        got = {}
        for tag in (6, 5):
            got[tag] = torch.empty(SIZE)
            group.receive(got[tag], 0, tag)
        pipe.send({tag: tensor[0].item() for tag, tensor in got.items()})


def test_tags_keep_messages_apart(crew):
    workers = [crew.fork(_send_under_two_tags, crew.store, rank) for rank in range(2)]
    assert [w.hear() for w in workers] == [None, {5: 5.0, 6: 6.0}]


def _block_until_shut(pipe, store, operation):
    """Rank 0 of two: block in ``operation`` until told over the pipe to shut the group."""
    group = make_group(store, 0, 2)

    def shut():
        pipe.recv()
        group.shutdown("the test says so")

    threading.Thread(target=shut, daemon=True).start()
    if operation != "connect":
        group.connect()
    pipe.send("blocks now")
    blocking = {
        "connect": group.connect,
        "exchange": lambda: exchange(group),
        "receive": lambda: group.receive(torch.empty(SIZE), 1, 0),
    }
    with pytest.raises(GroupEnded, match="the test says so"):
        blocking[operation]()
    later = [
        *blocking.values(),
        lambda: group.send(torch.zeros(SIZE), 1, 0),
    ]
    for operation_after in later:
        with pytest.raises(GroupEnded, match="the test says so"):
            operation_after()
    pipe.send(group.ended)


def _be_silent(pipe, store):
    group = make_group(store, 1, 2)
    group.connect()
    pipe.recv()  # alive and connected, but it never takes part
    group.shutdown("the test is over")


@pytest.mark.parametrize("operation", ["connect", "exchange", "receive"])
def test_a_shutdown_from_another_thread_ends_what_blocks_and_all_that_follows(crew, operation):
    if operation != "connect":
        crew.fork(_be_silent, crew.store)
    worker = crew.fork(_block_until_shut, crew.store, operation)
    assert worker.hear() == "blocks now"
    worker.say("shut")
    assert worker.hear() == "the test says so"


def _lose_a_peer(pipe, store, rank):
    group = make_group(store, rank, 3)
    group.connect()
    pipe.send("connected")
    if rank == 2:
        pipe.recv()  # never: it is killed here
    with pytest.raises(GroupEnded):
        exchange(group) if rank == 0 else group.receive(torch.empty(SIZE), 2, 0)
    pipe.send("ended")


def test_a_killed_peer_ends_the_operations_of_all_others(crew):
    workers = [crew.fork(_lose_a_peer, crew.store, rank) for rank in range(3)]
    assert {w.hear() for w in workers} == {"connected"}
    workers[2].kill()
    assert {w.hear() for w in workers[:2]} == {"ended"}


def _form_twice(pipe, store, rank):
    first = make_group(store, rank, 2, "first")
    first.connect()
    exchange(first)  # both are connected
    first.shutdown("replaced")
    second = make_group(store, rank, 2, "second")
    second.connect()
    pipe.send(exchange(second, rank))


def test_a_group_forms_anew_under_another_name_after_a_shutdown(crew):
    workers = [crew.fork(_form_twice, crew.store, rank) for rank in range(2)]
    assert [w.hear() for w in workers] == [[0.0, 1.0], [10.0, 11.0]]


class Echo:
    """A TCP server in a thread that sends back what comes."""

    def __init__(self):
        self._listener = socket.create_server((ADDRESS, 0))
        self.address = f"{ADDRESS}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        while data := connection.recv(100):
            connection.sendall(data)


def answers(connection):
    connection.sendall(b"hello")
    return connection.recv(100) == b"hello"


def _shut_beside_other_sockets(pipe, store, echo):
    group = make_group(store, 0, 2)
    host, _, port = echo.rpartition(":")
    before = socket.create_connection((host, int(port)))
    assert answers(before)
    opened = []

    def open_meanwhile():
        # The socket of a heal, opened by another thread while the group connects.
        opened.append(heal.open_registered(echo, ADDRESS))
        pipe.send("opened")

    helper = threading.Thread(target=open_meanwhile)
    helper.start()  # the peer is only started once this has opened its socket
    group.connect()
    helper.join()
    group.shutdown("over")
    pipe.send([answers(before), answers(opened[0])])


def _connect_and_wait(pipe, store):
    make_group(store, 1, 2).connect()
    pipe.recv()


def test_sockets_of_others_survive_a_shutdown(crew):
    echo = Echo()
    worker = crew.fork(_shut_beside_other_sockets, crew.store, echo.address)
    assert worker.hear() == "opened"
    crew.fork(_connect_and_wait, crew.store)
    assert worker.hear() == [True, True]


def _shut_after_numbers_were_reused(pipe, store, echo):
    group = make_group(store, 0, 2)
    group.connect()
    pipe.send("connected")
    with pytest.raises(GroupEnded):
        exchange(group)
    # gloo has closed the failed connection: its number is free again.
    host, _, port = echo.rpartition(":")
    later = [socket.create_connection((host, int(port))) for _ in range(8)]
    group.shutdown("over")
    pipe.send([answers(connection) for connection in later])


def _connect_and_be_killed(pipe, store):
    make_group(store, 1, 2).connect()
    pipe.send("connected")
    pipe.recv()  # never: it is killed here


def test_a_socket_that_got_the_number_of_a_closed_one_survives(crew):
    echo = Echo()
    worker = crew.fork(_shut_after_numbers_were_reused, crew.store, echo.address)
    victim = crew.fork(_connect_and_be_killed, crew.store)
    assert worker.hear() == victim.hear() == "connected"
    victim.kill()
    assert worker.hear() == [True] * 8


def _connect_without_the_peer(pipe, store):
    host, _, port = store.rpartition(":")
    group = make_group(store, 0, 2, connect_s=0.5)
    peer = PrefixStore(group.name, TCPStore(host, int(port), is_master=False))
    peer.set("ready/1", "1")
    try:
        group.connect()
    except GroupEnded as end:
        pipe.send(str(end))


def test_a_peer_that_was_there_and_never_calls_ends_the_connecting(crew):
    """It may have been told to leave, or died, just before it connected."""

    assert crew.fork(_connect_without_the_peer, crew.store).hear().startswith("test: ")


def _form_three_times(pipe, store, rank):
    former: list[tuple[str, int]] = []
    for number in range(3):
        group = make_group(store, rank, 2, f"group-{number}", former=former)
        group.connect()
        exchange(group)
        group.shutdown("over")
        former = [(group.name, rank)]
    pipe.send(None)


def test_what_a_former_group_left_in_the_store_is_deleted(crew):
    workers = [crew.fork(_form_three_times, crew.store, rank) for rank in range(2)]
    assert [w.hear() for w in workers] == [None, None]
    host, _, port = crew.store.rpartition(":")
    keys = TCPStore(host, int(port), None, False, wait_for_workers=False).list_keys()
    assert sorted({key.partition("/")[0] for key in keys}) == ["group-2"]


def _exchange_until_shut(pipe, store, rank, rounds, seed):
    """Exchange without a pause while another thread shuts the group at any moment."""
    shared, delays = random.Random(seed), random.Random(f"{seed}/{rank}")
    for number in range(rounds):
        group = make_group(store, rank, 2, name=f"shut{number}")
        group.connect()
        pipe.send("connected")
        pipe.recv()
        delay_s = shared.random() * 0.01 + delays.random() * 0.002
        timer = threading.Timer(delay_s, group.shutdown, ("over",))
        timer.start()
        sent, received = torch.zeros(3000), torch.zeros(3000)
        sizes = [0, 3000] if rank == 0 else [3000, 0]
        with contextlib.suppress(GroupEnded):
            while True:
                swap(group, received, sent, sizes, sizes)
        timer.join()
        pipe.send("ended")
        pipe.recv()


def test_an_exchange_ends_whenever_its_group_is_shut(crew):
    """gloo loses an operation that its event thread was about to write: nobody waits for it."""
    workers = [crew.fork(_exchange_until_shut, crew.store, rank, 25, 3) for rank in (0, 1)]
    for _ in range(25):
        for expected in ("connected", "ended"):
            for worker in workers:
                assert worker.hear() == expected
            for worker in workers:
                worker.say()
