import contextlib
import os
import random
import signal
import socket
import threading
import types
import weakref

import pytest
import torch
from tests.train.crew import ADDRESS, make_group

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm import group as group_module
from mainstay_train.comm import registered
from mainstay_train.comm.group import BACKENDS, Group
from mainstay_train.comm.operations import Message

SIZE = 4
LONG_S = 60.0
"""More than any wait that is to be ended."""
both = pytest.mark.parametrize("backend", ["gloo", "strict"])


def receive(group, tensor, peer, tag=0):
    group.finish(group.receive(Message(tensor, peer, tag)))


def swap(group, received, sent, received_sizes, sent_sizes):
    group.finish_exchange(group.start_exchange(received, sent, received_sizes, sent_sizes))


def exchange(group, value=0):
    """All-to-all of one number to each; returns what came."""
    sent = torch.tensor([float(value + 10 * peer) for peer in range(group.size)])
    received = torch.empty(group.size)
    swap(group, received, sent, [1] * group.size, [1] * group.size)
    return received.tolist()


def _exchange_unequal(pipe, store, rank, backend):
    group = make_group(store, rank, 3, backend=backend)
    group.connect()
    sizes = [[1, 2, 0], [3, 0, 1], [2, 2, 2]]  # [source][destination]
    sent = torch.cat([torch.full((n,), float(10 * rank + to)) for to, n in enumerate(sizes[rank])])
    incoming = [sizes[source][rank] for source in range(3)]
    received = torch.empty(sum(incoming))
    swap(group, received, sent, incoming, sizes[rank])
    pipe.send(received.tolist())


@both
def test_exchange_cuts_by_destination_and_joins_by_source(crew, backend):
    workers = [crew.fork(_exchange_unequal, crew.store, rank, backend) for rank in range(3)]
    assert [w.hear() for w in workers] == [
        [0.0, 10.0, 10.0, 10.0, 20.0, 20.0],
        [1.0, 1.0, 21.0, 21.0],
        [12.0, 22.0, 22.0],
    ]


def _exchange_several_at_once(pipe, store, rank, backend):
    group = make_group(store, rank, 3, backend=backend)
    group.connect()
    started = []
    for number in range(5):
        sent = torch.arange(6.0) + 10 * rank + 100 * number
        started.append(group.start_exchange(torch.empty(6), sent, [2] * 3, [2] * 3))
    for exchange in reversed(started):
        group.finish_exchange(exchange)
    pipe.send([exchange.received.tolist() for exchange in started])


@both
def test_exchanges_that_are_on_their_way_together_do_not_mix(crew, backend):
    workers = [crew.fork(_exchange_several_at_once, crew.store, rank, backend) for rank in range(3)]
    for rank, worker in enumerate(workers):
        assert worker.hear() == [
            [100.0 * n + 10 * peer + 2 * rank + i for peer in range(3) for i in range(2)]
            for n in range(5)
        ]


def _abandon(pipe, store, rank, backend):
    """Rank 1 never answers; rank 0 lets go of what it has started, and ends in good order."""
    group = make_group(store, rank, 2, backend=backend)
    group.connect()
    if rank == 0:
        started = [
            group.start_exchange(torch.empty(2), torch.zeros(2), [1, 1], [1, 1]) for _ in range(3)
        ]
        group.abandon(started)
        for work in (exchange.work for exchange in started):
            while not work.is_completed():  # it is not for long that an exchange is waited for
                with contextlib.suppress(RuntimeError):
                    work.wait()
        pipe.send("ended")
    pipe.recv()


@both
def test_abandoned_exchanges_end(crew, backend):
    workers = [crew.fork(_abandon, crew.store, rank, backend) for rank in range(2)]
    assert workers[0].hear() == "ended"
    for worker in workers:
        worker.say()


def _let_go_of_an_operation(pipe, store, rank):
    """Rank 1 never answers; rank 0 is told of the end between a start and its wait."""
    group = make_group(store, rank, 2)
    group.connect()
    if rank == 0:
        started = group.start_exchange(torch.empty(2), torch.zeros(2), [1, 1], [1, 1])
        group_module.shut = lambda *_, **__: (
            None
        )  # as if gloo had lost it: nothing ends it any more
        group.shutdown("over")
        with pytest.raises(GroupEnded):
            group.finish_exchange(started)
        del group
        pipe.send(started.work.is_completed())
    pipe.recv()


def test_a_group_is_let_go_though_an_operation_of_it_is_lost(crew):
    """gloo's destructor waits for it, until its own timeout."""
    workers = [crew.fork(_let_go_of_an_operation, crew.store, rank) for rank in range(2)]
    assert workers[0].hear() is False


def _let_go_of_a_group(pipe, store, rank):
    group = make_group(store, rank, 2)
    group.connect()
    exchange(group)
    destroyed = threading.Event()
    weakref.finalize(group._group, destroyed.set)
    group.shutdown("over")
    del group
    pipe.send(destroyed.wait(LONG_S))


def test_a_group_that_is_let_go_is_destroyed(crew):
    workers = [crew.fork(_let_go_of_a_group, crew.store, rank) for rank in range(2)]
    assert [w.hear() for w in workers] == [True, True]


class Stuck:
    """A backend whose operations end when the process does; and what it makes, for one rank."""

    ends_by_sockets = False
    waits_can_hang = False
    tells_sent = False

    def __init__(self):
        self.process_ends = threading.Event()

    def create(self, *_, **__):
        return self

    def connect(self, *_):
        pass

    def abort(self, _):
        pass

    def finish_aborts(self, _):
        return True

    def staged(self, tensor):
        return tensor

    def recv(self, *_):
        return None

    def wait(self, *_):
        if self.process_ends.wait(LONG_S):
            raise SystemExit
        raise RuntimeError("nobody ended the process")


def test_an_operation_that_begins_while_its_group_ends_is_watched_too(monkeypatch):
    """Between the look whether the group has ended, and the wait."""
    backend = Stuck()
    monkeypatch.setitem(BACKENDS, "stuck", backend)
    monkeypatch.setattr(os, "_exit", lambda _: backend.process_ends.set())
    group = Group(
        name="test",
        meeting=types.SimpleNamespace(wake=lambda: None),
        rank=0,
        size=1,
        address=ADDRESS,
        backend="stuck",
        timeout_s=LONG_S,
        unblock_s=0.0,
    )
    group.connect()
    pending = group.receive(Message(torch.empty(1), 0, 0))
    check = group.check

    def checks_and_is_shut():
        check()
        monkeypatch.setattr(group, "check", check)
        group.shutdown("just then")

    monkeypatch.setattr(group, "check", checks_and_is_shut)
    with pytest.raises(SystemExit):
        group.finish(pending)


class Waiting:
    """A backend that waits for other ranks at a socket of its own, and whose abort waits for that.

    As NCCL's does: while a communicator is initialized, torch holds its lock.
    """

    ends_by_sockets = False
    waits_can_hang = False
    tells_sent = False

    def __init__(self):
        self.listens, self.has_left = threading.Event(), threading.Event()

    def create(self, *_, **__):
        return self

    def connect(self, *_):
        try:
            with socket.create_server((ADDRESS, 0)) as listener:
                self.listens.set()
                listener.accept()
        except OSError as error:
            raise RuntimeError("nobody came") from error
        finally:
            self.has_left.set()

    def abort(self, _):
        assert self.has_left.wait(LONG_S), "the abort waits for who connects"

    def finish_aborts(self, _):
        return True


def test_a_group_that_ends_while_it_waits_for_ranks_leaves_them_before_it_aborts(monkeypatch):
    backend = Waiting()
    monkeypatch.setitem(BACKENDS, "waiting", backend)
    group = Group(
        name="test",
        meeting=types.SimpleNamespace(wake=lambda: None),
        rank=0,
        size=2,
        address=ADDRESS,
        backend="waiting",
        timeout_s=LONG_S,
    )

    def end():
        backend.listens.wait(LONG_S)
        group.shutdown("over")

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(GroupEnded, match="over"):
        group.connect()
    thread.join()


class Meets(Waiting):
    """One whose ranks tell each other where they are, as NCCL's do, before one waits for them."""

    def create(self, meet, *_, **__):
        meet("id", b"")
        return self


def test_connecting_has_a_bound_from_when_all_ranks_are_there(monkeypatch):
    backend = Meets()
    monkeypatch.setitem(BACKENDS, "waiting", backend)
    meeting = types.SimpleNamespace(wake=lambda: None, meet=lambda _, body, size, __: [body] * size)
    group = Group(
        name="test",
        meeting=meeting,
        rank=0,
        size=2,
        address=ADDRESS,
        backend="waiting",
        timeout_s=LONG_S,
        connect_s=0.05,
    )
    with pytest.raises(GroupEnded, match=r"test: not all ranks met within 0\.05 s"):
        group.connect()
    assert backend.has_left.is_set()


class Unmet(Meets):
    """One whose peer is gone before they have met."""

    def connect(self, *_):
        raise RuntimeError("the peer is gone")

    def abort(self, _):
        pass


def test_an_end_of_a_group_that_never_met_spares_sockets_that_were_opened_since(monkeypatch):
    monkeypatch.setitem(BACKENDS, "unmet", Unmet())
    group = Group(
        name="test",
        meeting=types.SimpleNamespace(wake=lambda: None, meet=lambda _, body, *__: [body]),
        rank=0,
        size=1,
        address=ADDRESS,
        backend="unmet",
        timeout_s=LONG_S,
    )
    with pytest.raises(GroupEnded, match="the peer is gone"):
        group.connect()
    with socket.create_server((ADDRESS, 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with mine, theirs:
            group.shutdown("the members of the position have changed")
            theirs.sendall(b"x")
            assert mine.recv(1) == b"x"
            with socket.create_connection(listener.getsockname()):
                listener.accept()[0].close()


class MeetsAtOnce(Stuck):
    """One whose ranks are all there at once."""

    def create(self, meet, *_, **__):
        meet("id", b"")
        return self


def test_a_group_that_is_connected_outlives_the_bound(monkeypatch):
    monkeypatch.setitem(BACKENDS, "stuck", MeetsAtOnce())
    meeting = types.SimpleNamespace(wake=lambda: None, meet=lambda _, body, *__: [body])
    group = Group(
        name="test",
        meeting=meeting,
        rank=0,
        size=1,
        address=ADDRESS,
        backend="stuck",
        timeout_s=LONG_S,
    )
    group.connect()
    assert group._bound.finished.is_set(), "its thread has nothing more to do"
    group._end_late()  # it may have begun just then
    assert group.connected


def _send_under_two_tags(pipe, store, rank):
    group = make_group(store, rank, 2)
    group.connect()
    if rank == 0:
        works = [group.send(Message(torch.full((SIZE,), float(tag)), 1, tag)) for tag in (5, 6)]
        for work in works:
            group.finish(work)
        pipe.send(None)
    else:
        got = {}
        for tag in (6, 5):
            got[tag] = torch.empty(SIZE)
            receive(group, got[tag], 0, tag)
        pipe.send({tag: tensor[0].item() for tag, tensor in got.items()})


def test_tags_keep_messages_apart(crew):
    workers = [crew.fork(_send_under_two_tags, crew.store, rank) for rank in range(2)]
    assert [w.hear() for w in workers] == [None, {5: 5.0, 6: 6.0}]


def _send_and_receive(pipe, store, rank, backend):
    group = make_group(store, rank, 2, backend=backend)
    group.connect()
    # More than a socket takes in: without a receive of the peer no send would end.
    got = torch.empty(1 << 22)
    given = torch.full_like(got, float(rank))
    pending = group.send_and_receive(Message(given, 1 - rank, 0), Message(got, 1 - rank, 0))
    for each in pending:
        group.finish(each)
    assert all(each.is_over for each in pending) or backend == "gloo"
    pipe.send(got.unique().tolist())


@both
def test_neighbours_send_to_each_other_at_the_same_time(crew, backend):
    workers = [crew.fork(_send_and_receive, crew.store, rank, backend) for rank in range(2)]
    assert [w.hear() for w in workers] == [[1.0], [0.0]]


def _be_left_by_a_peer(pipe, store, rank):
    group = make_group(store, rank, 2, backend="strict")
    group.connect()
    pipe.send("connected")
    if rank == 1:
        pipe.recv()  # never: it is killed here

    def end_when_told():
        pipe.recv()
        group.shutdown("the gather has lost it")

    threading.Thread(target=end_when_told, daemon=True).start()
    try:
        receive(group, torch.empty(SIZE), 1)
    except GroupEnded as ended:
        pipe.send(ended.why)


def test_a_result_of_an_aborted_operation_does_not_count(crew):
    """As with NCCL: the operation ends without an error, and its output is garbage."""
    workers = [crew.fork(_be_left_by_a_peer, crew.store, rank) for rank in range(2)]
    assert {w.hear() for w in workers} == {"connected"}
    workers[1].kill()
    workers[0].say("the peer is lost")
    assert workers[0].hear() == "the gather has lost it"


def _block_until_shut(pipe, store, operation, backend):
    """Rank 0 of two: block in ``operation`` until told over the pipe to shut the group."""
    group = make_group(store, 0, 2, backend=backend)

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
        "receive": lambda: receive(group, torch.empty(SIZE), 1),
        "send": lambda: group.finish(group.send(Message(torch.zeros(1 << 22), 1, 0))),
    }
    with pytest.raises(GroupEnded, match="the test says so"):
        blocking[operation]()
    for operation_after in blocking.values():
        with pytest.raises(GroupEnded, match="the test says so"):
            operation_after()
    pipe.send(group.ended)


def _be_silent(pipe, store, backend):
    group = make_group(store, 1, 2, backend=backend)
    group.connect()
    pipe.recv()  # alive and connected, but it never takes part
    group.shutdown("the test is over")


@both
@pytest.mark.parametrize("operation", ["connect", "exchange", "receive", "send"])
def test_a_shutdown_from_another_thread_ends_what_blocks_and_all_that_follows(
    crew, operation, backend
):
    if operation != "connect":
        crew.fork(_be_silent, crew.store, backend)
    worker = crew.fork(_block_until_shut, crew.store, operation, backend)
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
        exchange(group) if rank == 0 else receive(group, torch.empty(SIZE), 2)
    pipe.send("ended")


def test_a_killed_peer_ends_the_operations_of_all_others(crew):
    workers = [crew.fork(_lose_a_peer, crew.store, rank) for rank in range(3)]
    assert {w.hear() for w in workers} == {"connected"}
    workers[2].kill()
    assert {w.hear() for w in workers[:2]} == {"ended"}


def _form_twice(pipe, store, rank, backend):
    first = make_group(store, rank, 2, "first", backend=backend)
    first.connect()
    exchange(first)  # both are connected
    first.shutdown("replaced")
    second = make_group(store, rank, 2, "second", backend=backend)
    second.connect()
    pipe.send(exchange(second, rank))


@both
def test_a_group_forms_anew_under_another_name_after_a_shutdown(crew, backend):
    workers = [crew.fork(_form_twice, crew.store, rank, backend) for rank in range(2)]
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
        opened.append(registered.open_registered(echo, ADDRESS))
        pipe.send("opened")

    helper = threading.Thread(target=open_meanwhile)
    helper.start()  # the peer is only started once this has opened its socket
    group.connect()
    helper.join()
    group.shutdown("over")
    pipe.send([answers(before), answers(opened[0])])


def _connect_and_wait(pipe, store):
    group = make_group(store, 1, 2)  # kept: it would close its connections while the peer connects
    group.connect()
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


def _meet_and_be_killed(pipe, store, backend):
    group = make_group(store, 1, 2, backend=backend)
    meeting, told = group._meeting, []

    class Tells:
        def meet(self, key, body, size, ended):
            def posted():
                if not told:
                    told.append(pipe.send("its address is known"))
                return ended()

            return meeting.meet(key, body, size, posted)

    group._meeting = Tells()
    group.connect()


def _connect_without_the_peer(pipe, store, backend):
    group = make_group(store, 0, 2, connect_s=0.5, backend=backend)
    try:
        group.connect()
    except GroupEnded as end:
        pipe.send(str(end))


@both
def test_a_peer_that_was_there_and_never_calls_ends_the_connecting(crew, backend):
    """It may have been told to leave, or died, just before it connected."""
    peer = crew.fork(_meet_and_be_killed, crew.store, backend)
    assert peer.hear() == "its address is known"
    peer.kill()

    worker = crew.fork(_connect_without_the_peer, crew.store, backend)

    assert worker.hear().startswith("test: ")


def _connect_until_shut(pipe, store):
    group = make_group(store, 0, 2, connect_s=100, backend="strict")
    connect = BACKENDS["strict"].connect

    def tell(process_group, bound):
        pipe.send("connects")
        connect(process_group, bound)

    BACKENDS["strict"].connect = tell
    threading.Thread(target=lambda: (pipe.recv(), group.shutdown("shut")), daemon=True).start()
    try:
        group.connect()
    except GroupEnded as end:
        pipe.send(str(end))


def test_connecting_that_waits_for_a_peer_is_ended_by_an_abort(crew):
    """As with NCCL, whose communicator is initialized without blocking for this."""
    peer = crew.fork(_meet_and_be_killed, crew.store, "strict")
    assert peer.hear() == "its address is known"
    peer.signal(signal.SIGSTOP)
    worker = crew.fork(_connect_until_shut, crew.store)
    assert worker.hear() == "connects"

    worker.say("shut")

    assert worker.hear() == "shut"


def _exchange_until_shut(pipe, store, rank, rounds, seed, backend):
    """Exchange without a pause while another thread shuts the group at any moment."""
    shared, delays = random.Random(seed), random.Random(f"{seed}/{rank}")
    for number in range(rounds):
        group = make_group(store, rank, 2, name=f"shut{number}", backend=backend)
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


@both
def test_an_exchange_ends_whenever_its_group_is_shut(crew, backend):
    """gloo loses an operation that its event thread was about to write: nobody waits for it."""
    workers = [crew.fork(_exchange_until_shut, crew.store, rank, 25, 3, backend) for rank in (0, 1)]
    for _ in range(25):
        for expected in ("connected", "ended"):
            for worker in workers:
                assert worker.hear() == expected
            for worker in workers:
                worker.say()
