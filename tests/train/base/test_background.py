"""The thread for what a trainer does while it trains."""

import gc
import threading
import weakref

from mainstay_train.base.background import Background


class Tensors:
    """What a job is about."""


def submit(background: Background) -> weakref.ref[Tensors]:
    tensors = Tensors()
    background.submit(lambda: repr(tensors) and None)
    return weakref.ref(tensors)


def test_jobs_run_in_their_order_and_one_that_fails_ends_no_other() -> None:
    background, done = Background("jobs in order"), []
    background.submit(lambda: done.append(1))
    background.submit(lambda: [][0])
    background.submit(lambda: done.append(2))
    background.end()
    assert done == [1, 2]


def test_the_thread_ends_after_its_jobs_once_nobody_has_it_any_more() -> None:
    background, go_on, done = Background("jobs of nobody"), threading.Event(), threading.Event()
    background.submit(lambda: go_on.wait() and None)
    background.submit(done.set)
    (thread,) = [each for each in threading.enumerate() if each.name == "jobs of nobody"]
    del background
    gc.collect()
    assert thread.is_alive()
    go_on.set()
    thread.join()
    assert done.is_set()


def test_a_job_that_has_run_is_not_kept() -> None:
    background = Background("jobs with tensors")
    kept = submit(background)
    background.wait_idle()
    gc.collect()
    assert kept() is None
    background.end()
