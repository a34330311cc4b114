"""What NCCL's groups are made of, as far as no GPU is needed."""

import gc
import os
import threading
import types
import weakref
from datetime import timedelta

import pytest
import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.comm import nccl
from mainstay_train.comm.group import BACKENDS, Group
from mainstay_train.comm.nccl import Nccl, _Ids


class Ranks:
    """An exchange between threads."""

    def __init__(self, size):
        self._barrier, self._bodies = threading.Barrier(size), [{} for _ in range(size)]

    def of(self, rank):
        def exchange(key, body):
            self._bodies[rank][key] = body
            self._barrier.wait()
            return [bodies[key] for bodies in self._bodies]

        return exchange


def test_one_rank_sets_the_id_of_a_communicator_and_all_others_get_it():
    ranks, got = Ranks(3), {}
    threads = [
        threading.Thread(target=lambda: _Ids(ranks.of(0)).set("0", b"id")),
        *(
            threading.Thread(target=lambda r=r: got.update({r: _Ids(ranks.of(r)).get("0")}))
            for r in (1, 2)
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert got == {1: b"id", 2: b"id"}


class Work:
    """An operation of torch's that has failed: its wait would abort the communicator."""

    def __init__(self):
        self.synchronized = 0

    def synchronize(self):
        self.synchronized += 1

    def wait(self, *_args):
        raise RuntimeError("torch has aborted the communicator")


def test_the_stream_waits_for_an_operation_and_the_host_does_not():
    work = Work()
    Nccl().wait(work, timedelta(seconds=1))
    assert work.synchronized == 1


class Communicator:
    """A process group of torch's over NCCL, on a played GPU; its first sum is over when told."""

    class Options:
        """As torch's: a communicator blocks unless it is told otherwise."""

        def __init__(self):
            self.config = types.SimpleNamespace(blocking=1)

    def __init__(self, store, rank, size, options):
        del rank, size
        self.store = weakref.ref(store)  # as torch, which keeps no object of Python's
        self.options, self.done, self.aborted = options, [], False
        self.settings = dict(os.environ)
        self.met, self.fails_with = threading.Event(), ""

    def eager_connect_single_device(self, device):
        self.done.append(f"connects {device}")

    def allreduce(self, tensors):
        self.done.append(f"sums {len(tensors)}")
        return types.SimpleNamespace(
            is_completed=lambda: self.met.is_set() or self.aborted, wait=self._wait
        )

    def _wait(self, timeout):
        assert timeout
        if self.fails_with:
            raise RuntimeError(self.fails_with)

    def get_error(self):
        return types.SimpleNamespace(name="COMM_ERROR" if self.fails_with else "SUCCESS")

    def abort(self):
        self.aborted = True


@pytest.fixture
def played_gpu(monkeypatch):
    """A GPU for :mod:`nccl`: its communicators, its number, and memory of the host."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(
        nccl, "distributed", types.SimpleNamespace(Store=object, ProcessGroupNCCL=Communicator)
    )
    monkeypatch.setattr(
        nccl,
        "torch",
        types.SimpleNamespace(
            device=torch.device,
            cuda=types.SimpleNamespace(
                current_device=lambda: 3,
                get_device_properties=lambda index: types.SimpleNamespace(uuid=f"uuid-{index}"),
            ),
            zeros=lambda count, device: torch.zeros(count, device=device and "cpu"),
        ),
    )


def make_communicator(connect_s=30, *, backend=None, meet=lambda _, body: [body]):
    return (backend or Nccl()).create(
        meet,
        0,
        1,
        address="127.0.0.1",
        connect=timedelta(seconds=connect_s),
        operation=timedelta(seconds=600),
    )


class Busy(Communicator):
    """One whose ranks are all there, on a device that is busy for longer than an abort waits."""

    def __init__(self, *args):
        super().__init__(*args)
        self.met.set()

    def abort(self):
        super().abort()
        raise RuntimeError("[Rank 0] Future for ProcessGroup abort timed out after 500 ms")


def test_a_group_ends_though_its_operations_do_not_end_in_time(played_gpu, caplog):
    nccl.distributed.ProcessGroupNCCL = Busy
    group = Group(
        name="test",
        meeting=types.SimpleNamespace(wake=lambda: None, meet=lambda _, body, *__: [body]),
        rank=0,
        size=1,
        address="127.0.0.1",
        backend="nccl",
        timeout_s=0.5,
    )
    group.connect()
    group.shutdown("over")
    assert BACKENDS["nccl"].finish_aborts(timedelta(seconds=60))
    assert group.process_group.aborted
    assert group.ended == "over"
    (warning,) = caplog.messages
    assert "timed out after 500 ms" in warning


def test_a_communicator_is_made_so_that_an_abort_can_end_its_initialization(played_gpu):
    group = make_communicator(connect_s=7.4)
    assert group.options.config.blocking == 0
    assert group.options._timeout == timedelta(seconds=600)


def test_ranks_that_share_a_gpu_are_refused_by_name(played_gpu):
    with pytest.raises(InvalidSpecError, match=r"ranks 0 and 1 of a group share GPU uuid-3: use"):
        make_communicator(meet=lambda _, body: [body, body])
    make_communicator(meet=lambda _, body: [body, b"GPU uuid-4", b"", b""])


def test_a_first_message_between_two_ranks_has_the_time_of_an_operation(played_gpu):
    """NCCL connects two ranks when they first talk, and the later one may come long after."""
    settings = make_communicator(connect_s=7.4).settings
    assert settings["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "600"


def test_torch_is_told_to_end_no_process_before_a_communicator_is_made(played_gpu):
    settings = make_communicator().settings
    assert settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert {name: settings[name] for name in nccl.SETTINGS} == nccl.SETTINGS


def test_a_group_that_is_connected_has_a_communicator_over_which_all_have_met(played_gpu):
    backend = Nccl()
    group = make_communicator(backend=backend)
    group.met.set()
    backend.connect(group, timedelta(seconds=60))
    assert group.done == ["connects cuda:3", "sums 1"]


def test_connecting_goes_on_until_all_have_met_or_the_time_is_over(played_gpu):
    backend = Nccl()
    group = make_communicator(backend=backend)
    with pytest.raises(RuntimeError, match=r"not all ranks met within 0\.01 s"):
        backend.connect(group, timedelta(seconds=0.01))


def test_an_error_while_ranks_connect_is_not_taken_for_their_meeting(played_gpu):
    backend = Nccl()
    group = make_communicator(backend=backend)
    group.met.set()
    group.fails_with = "a link is down"
    with pytest.raises(RuntimeError, match="a link is down"):
        backend.connect(group, timedelta(seconds=60))


def test_an_error_that_no_operation_tells_is_told_by_the_group(played_gpu):
    backend = Nccl()
    group = make_communicator(backend=backend)
    assert not backend.problem(group)
    group.fails_with = "a link is down"
    assert backend.problem(group) == "NCCL has met a COMM_ERROR"


def test_an_abort_for_which_there_is_no_thread_is_over_as_well(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    backend, done = Nccl(), []
    group = types.SimpleNamespace(abort=lambda: done.append("aborted"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    backend.abort(group)
    assert done == ["aborted"]
    assert backend.finish_aborts(timedelta(seconds=0))


def test_an_abort_ends_the_connecting(played_gpu):
    backend = Nccl()
    group = make_communicator(backend=backend)
    connects = threading.Thread(target=backend.connect, args=(group, timedelta(seconds=600)))
    connects.start()
    backend.abort(group)
    connects.join()
    assert not group.met.is_set()


def test_the_store_of_a_group_is_there_until_it_connects_and_keeps_nothing_alive(played_gpu):
    """torch calls it when a communicator is made, long after the group was."""

    class Meets:
        def __call__(self, _, body):
            return [body]

    backend, meets = Nccl(), Meets()
    group = make_communicator(backend=backend, meet=meets)
    meeting = weakref.ref(meets)
    del meets
    store = group.store()
    assert store is not None
    assert store.get("0") == b""
    assert not store.check(["a call to dump"])
    group.met.set()
    backend.connect(group, timedelta(seconds=60))
    assert meeting() is None
    with pytest.raises(RuntimeError, match="all ranks have met"):
        store.set("1", b"id")
    gone = weakref.ref(group)
    del group, store
    gc.collect()
    assert gone() is None
    assert not backend._ids
