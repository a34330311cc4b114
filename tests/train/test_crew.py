"""Workers start as the product's trainers do, whatever the tests' process has open or locked."""

import ctypes
import os
import socket
import threading
import time
from functools import partial

import pytest
from tests.train.crew import ADDRESS

from mainstay_train.base import sockets


def _tell_what_is_inherited(pipe):
    descriptors = {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")  # the listing's own is closed again
    }
    pipe.send((len(os.listdir("/proc/self/task")), descriptors - {0, 1, 2, pipe.fileno()}))


def test_a_worker_starts_with_one_thread_and_nothing_open_but_its_pipe(crew):
    crew.store  # noqa: B018 - another worker is there, and has threads
    never = threading.Event()
    with socket.create_server((ADDRESS, 0)):
        threading.Thread(target=never.wait, daemon=True).start()
        assert crew.fork(_tell_what_is_inherited).hear() == (1, set())
    never.set()


def _try_to_take_a_lock(pipe):
    pipe.send(sockets.socket_lock.acquire(blocking=False))


def test_a_lock_that_a_thread_holds_when_a_worker_is_forked_is_free_in_it(crew):
    held, over = threading.Event(), threading.Event()

    def hold():
        with sockets.socket_lock:  # what connecting a group takes
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert crew.fork(_try_to_take_a_lock).hear()
    finally:
        over.set()
        holder.join()


def _take_the_librarys_lock(pipe):
    time.localtime()
    pipe.send("took it")


def test_a_lock_of_the_c_library_that_a_thread_holds_is_free_in_a_worker(
    crew, tmp_path, monkeypatch
):
    """The library keeps a lock for each of its tables, which no fork frees. One of them is held as
    long as the file of the time zone is read. That of the resolver is held for an instant: whenever
    torch's store tells who calls it, and whenever a rank calls."""
    zone = tmp_path / "zone"
    os.mkfifo(zone)
    monkeypatch.setenv("TZ", str(zone))
    holder = threading.Thread(target=ctypes.CDLL(None).tzset)  # unlike time.tzset it frees the GIL
    holder.start()
    writer = os.open(zone, os.O_WRONLY)  # the holder has opened it now, and waits for its bytes
    try:
        assert crew.fork(_take_the_librarys_lock).hear() == "took it"
    finally:
        os.write(writer, bytes(64))  # more than its header, and no zone's: the holder goes on
        os.close(writer)
        holder.join()
        monkeypatch.undo()
        time.tzset()


def _fail(pipe):
    raise LookupError("said by the worker")


def test_a_test_hears_why_its_worker_failed(crew):
    with pytest.raises(AssertionError, match="LookupError: said by the worker"):
        crew.fork(_fail).hear()


def test_a_test_hears_why_no_worker_can_be_forked(crew):
    run = partial(_fail)
    run.__module__ = "tests.train.nowhere"
    with pytest.raises(AssertionError, match=r"No module named .tests\.train\.nowhere"):
        crew.fork(run)
    with pytest.raises(AssertionError, match="said by the worker"):
        crew.fork(_fail).hear()


def _wait(pipe):
    pipe.recv()


def test_a_worker_that_was_killed_is_gone_and_can_be_killed_again(crew):
    worker = crew.fork(_wait)
    worker.kill()
    with pytest.raises(AssertionError, match="it was ended by SIGKILL"):
        worker.hear()
    worker.kill()


def _leave(pipe):
    del pipe
    os._exit(3)


def test_a_test_hears_how_its_worker_ended(crew):
    with pytest.raises(AssertionError, match="it ended with code 3"):
        crew.fork(_leave).hear()
