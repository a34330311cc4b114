"""Batches come ahead of their micro-batch, by one thread, and never in place of another."""

import gc
import logging
import select
import sqlite3
import threading

import pytest
import torch

from mainstay_core.base.digest import Digest
from mainstay_train.base.crashes import crash_of
from mainstay_train.compute.loader import Loader, Wanted
from mainstay_train.exact.draws import Address
from mainstay_train.model import data
from mainstay_train.model.workload import WorkloadError, user_code


def wanted(micro_batch, step=0, digests=False):
    return Wanted(Address(1, step, 0, micro_batch), digests)


class Samples:
    """Batches that say their address; loading one may wait for the test."""

    def __init__(self):
        self.calls, self.threads = [], set()
        self.begun = {}
        self.gates = {}
        self._inside = threading.Lock()

    def hold(self, micro_batch):
        """Have a batch wait until the returned event is set."""
        self.gates[micro_batch] = threading.Event()
        return self.gates[micro_batch]

    def begins(self, micro_batch):
        """The event of a batch that begins to be loaded."""
        return self.begun.setdefault(micro_batch, threading.Event())

    def batch(self, address):
        assert self._inside.acquire(blocking=False), "one call at a time"
        try:
            self.threads.add(threading.current_thread())
            self.calls.append((address.step, address.micro_batch))
            self.begins(address.micro_batch).set()
            if address.micro_batch in self.gates:
                self.gates[address.micro_batch].wait()
            if address.micro_batch == BAD:
                return read_a_record()
        finally:
            self._inside.release()
        tokens = torch.tensor([[address.step, address.micro_batch]])
        return data.Batch(tokens, torch.where(tokens == 0, -100, tokens))


BAD = 13


def read_a_record():
    return {}["record"]


def place(loaded):
    return tuple(loaded.batch.tokens[0].tolist())


def test_a_batch_is_loaded_while_the_one_before_is_computed():
    samples = Samples()
    loader = Loader(samples)
    gate = samples.hold(1)
    first = loader.take(wanted(0))
    loader.order(wanted(1))
    samples.begins(1).wait()  # nobody has asked for it yet
    assert place(first) == (0, 0)
    gate.set()
    assert place(loader.take(wanted(1))) == (0, 1)
    (thread,) = samples.threads
    assert thread is not threading.current_thread()
    assert samples.calls == [(0, 0), (0, 1)]


def test_what_is_known_of_a_batch_comes_with_it():
    loader = Loader(Samples())
    at = wanted(3, step=0, digests=True)
    loaded = loader.take(at)
    assert loaded.num_tokens == 1, "targets of -100 do not count"
    assert loaded.consumed == data.consumed_digest(at.address, loaded.batch)
    assert loader.take(wanted(3)).consumed == Digest.zero()


def test_a_batch_is_given_to_nobody_who_asks_for_another():
    """A step was interrupted, or the plan has changed: what was ordered is for another address."""
    samples = Samples()
    loader = Loader(samples)
    gate = samples.hold(1)
    loader.take(wanted(0))
    loader.order(wanted(1))
    samples.begins(1).wait()
    loader.order(wanted(2))  # in place of a batch that is just being loaded
    loader.order(wanted(4))  # and of one that is not
    gate.set()
    assert place(loader.take(wanted(5, step=7))) == (7, 5)
    loader.order(wanted(6, step=7))
    assert place(loader.take(wanted(6, step=8))) == (8, 6), "of another step"
    assert (0, 2) not in samples.calls
    assert samples.calls[-1] == (8, 6)
    assert len(samples.threads) == 1


def test_a_batch_that_was_ordered_is_loaded_once():
    samples = Samples()
    loader = Loader(samples)
    loader.order(wanted(0))
    loader.order(wanted(0))
    loader.take(wanted(0))
    loader.order(wanted(1))
    loader.order(wanted(1))
    loader.take(wanted(1))
    assert samples.calls == [(0, 0), (0, 1)]


def test_a_mistake_in_the_data_set_is_told_where_the_batch_is_taken_with_the_users_frames():
    samples = Samples()
    loader = Loader(samples)
    loader.take(wanted(0))
    loader.order(wanted(BAD))
    with (
        pytest.raises(WorkloadError, match="computing step 0: KeyError: 'record'") as told,
        user_code("computing step 0"),
    ):
        loader.take(wanted(BAD))
    crash = crash_of(told.value)
    assert (crash.type, crash.message) == ("KeyError", "'record'")
    assert [frame.rpartition(" in ")[2] for frame in crash.frames][-2:] == [
        "batch",
        "read_a_record",
    ]
    assert place(loader.take(wanted(1))) == (0, 1), "the thread goes on"


class Leaves(Exception):  # noqa: N818 - what a library may raise
    """Not an error by its class's name."""


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), Leaves("x"), MemoryError()])
def test_whatever_the_data_set_raises_is_raised_where_the_batch_is_taken(raised):
    class Raising:
        def batch(self, address):
            del address
            raise raised

        def fingerprint(self):
            return ""

    with pytest.raises(type(raised)) as told:
        Loader(Raising()).take(wanted(0))
    assert told.value is raised


def test_a_mistake_in_a_batch_that_nobody_takes_is_only_logged(caplog):
    samples = Samples()
    loader = Loader(samples)
    gate = samples.hold(BAD)
    loader.take(wanted(0))
    loader.order(wanted(BAD))
    samples.begins(BAD).wait()
    loader.order(wanted(1))
    with caplog.at_level(logging.INFO):
        gate.set()
        assert place(loader.take(wanted(1))) == (0, 1)
    assert "a batch that is not needed did not load" in caplog.text
    assert "read_a_record" in caplog.text


def test_the_thread_ends_with_its_loader():
    samples = Samples()
    loader = Loader(samples)
    gate = samples.hold(1)
    loader.take(wanted(0))
    loader.order(wanted(1))
    (thread,) = samples.threads
    samples.begins(1).wait()
    del loader  # while a batch is being loaded
    gc.collect()
    assert thread.is_alive(), "a call of the user's is not interrupted"
    gate.set()
    thread.join()


def test_a_data_set_that_is_bound_to_its_thread_is_called_there():
    class Rows:
        """As a data base gives them: to the thread that has opened it."""

        def __init__(self):
            self._rows = sqlite3.connect(":memory:")

        def batch(self, address):
            (value,) = self._rows.execute("select ?", (address.micro_batch,)).fetchone()
            return data.Batch(torch.tensor([[value]]), torch.tensor([[value]]))

    rows = Rows()
    with pytest.raises(sqlite3.ProgrammingError):
        Loader(rows).take(wanted(2))
    loader = Loader(rows, ahead=False)
    loader.order(wanted(1))
    assert int(loader.take(wanted(2)).batch.tokens) == 2
    loader.order(wanted(3))


def leave_with_a_batch_on_its_way(pipe):
    samples = Samples()
    loader = Loader(samples)
    samples.hold(0)
    loader.order(wanted(0))
    samples.begins(0).wait()
    pipe.send("on its way")


def test_a_trainer_ends_while_a_batch_is_being_loaded(crew):
    worker = crew.fork(leave_with_a_batch_on_its_way)
    assert worker.hear() == "on its way"
    ended = select.poll()
    ended.register(worker._pidfd, select.POLLIN)
    assert ended.poll(), "the process is gone"


@pytest.mark.parametrize(("device", "by_a_thread"), [("cpu", False), ("meta", True)])
def test_a_data_set_that_waits_for_nothing_is_called_where_its_batches_are_computed(
    device, by_a_thread
):
    samples = Samples()
    samples.in_memory = True
    loader = Loader(samples, device)
    loader.order(wanted(2))
    assert place(loader.take(wanted(2))) == (0, 2)
    assert (samples.threads != {threading.current_thread()}) == by_a_thread
    assert samples.calls == [(0, 2)]
