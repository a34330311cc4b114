"""What was computed over a chain counts if the device was done before the chain ended."""

import threading

import pytest

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm import mesh as comm_mesh
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.group import Group
from mainstay_train.comm.nccl import Nccl


class PlayedMoment:
    """A point in the work of a device that is done when the test says so."""

    def __init__(self):
        self.over, self.waits = threading.Event(), threading.Event()
        self.failed = False

    def is_over(self):
        if self.failed:
            raise RuntimeError("the device has failed")
        return self.over.is_set()

    def wait(self, timeout_s=None):
        self.waits.set()
        if not self.over.wait(timeout_s):
            raise TimeoutError("too slow")


class PlayedGroup:
    """A group that aborts what a device does when it is ended."""

    def __init__(self, *moments, timeout_s=None):
        self._moments, self._timeout_s = moments, timeout_s
        self._ended = None
        self.failure = ""
        self.waits = threading.Event()

    def check(self):
        if self._ended is not None:
            raise GroupEnded(self._ended)

    @property
    def problem(self):
        return self._ended or self.failure

    def wait_for(self, moment):
        self.check()
        self.waits.set()
        try:
            moment.wait(self._timeout_s)
        except TimeoutError as error:
            raise GroupEnded(str(error)) from error
        self.check()

    def shutdown(self, why):
        self._ended = self._ended or why
        for moment in self._moments:  # an operation that is aborted ends like one that is done
            moment.over.set()


def make_chain(*moments, **options):
    group = PlayedGroup(*moments, **options)
    return ChainGroups("chain", group, None), group


def test_what_the_device_has_done_before_the_chain_ends_counts_and_nothing_else():
    done, doing, waiting = (PlayedMoment() for _ in range(3))
    chain, _ = make_chain(doing, waiting)
    marks = [chain.mark(moment) for moment in (done, doing, waiting)]
    assert [mark.counts for mark in marks] == [None, None, None]
    done.over.set()
    chain.shutdown("a cell is gone")
    assert [mark.counts for mark in marks] == [True, False, False]
    assert doing.over.is_set(), "it was aborted, and ended"
    chain.judge()
    chain.shutdown("again")
    assert [mark.counts for mark in marks] == [True, False, False]


def test_a_chain_that_has_ended_takes_no_mark():
    chain, _ = make_chain()
    chain.shutdown("a cell is gone")
    with pytest.raises(GroupEnded, match="a cell is gone"):
        chain.mark(PlayedMoment())


def test_whoever_judges_waits_for_the_device_and_any_thread_ends_that():
    first, second = PlayedMoment(), PlayedMoment()
    chain, group = make_chain(first, second)
    marks = [chain.mark(first), chain.mark(second)]
    judges = threading.Thread(target=chain.judge)
    judges.start()
    group.waits.wait()
    first.over.set()
    chain.shutdown("a newer plan takes it apart")
    judges.join()
    assert [mark.counts for mark in marks] == [True, False]


def test_everything_counts_of_a_chain_that_stands():
    moment = PlayedMoment()
    chain, group = make_chain()
    mark = chain.mark(moment)
    judges = threading.Thread(target=chain.judge)
    judges.start()
    group.waits.wait()
    assert mark.counts is None
    moment.over.set()
    judges.join()
    assert mark.counts
    chain.judge()


def test_a_device_that_does_not_get_there_ends_the_chain():
    chain, _ = make_chain(timeout_s=0.01)
    mark = chain.mark(PlayedMoment())
    chain.judge()
    assert mark.counts is False
    with pytest.raises(GroupEnded, match="too slow"):
        chain.check()


def test_of_a_device_that_has_failed_nothing_counts():
    moment = PlayedMoment()
    chain, _ = make_chain()
    mark = chain.mark(moment)
    moment.failed = True
    chain.shutdown("a cell is gone")  # by any thread: it learns nothing of the device
    assert mark.counts is False


def test_nothing_counts_of_which_it_is_not_known_when_a_connection_has_failed():
    """What is over then may be over for that, and hold whatever lay in memory."""
    known, over, waiting = (PlayedMoment() for _ in range(3))
    chain, group = make_chain(waiting)
    known.over.set()
    marks = [chain.mark(moment) for moment in (known, over, waiting)]
    group.failure = "a connection has failed"
    over.over.set()
    with pytest.raises(GroupEnded, match="a connection has failed"):
        chain.mark(PlayedMoment())
    chain.shutdown("the chain broke")
    assert [mark.counts for mark in marks] == [True, False, False]


def test_a_connection_that_has_failed_when_the_device_gets_there_ends_the_chain():
    moment = PlayedMoment()
    chain, group = make_chain()
    mark = chain.mark(moment)
    moment.over.set()
    group.failure = "a connection has failed"
    chain.judge()
    assert mark.counts is False
    with pytest.raises(GroupEnded, match="a connection has failed"):
        chain.check()


def _over():
    moment = PlayedMoment()
    moment.over.set()
    return moment


class Nobody:
    """A meeting to which nobody comes."""

    def wake(self):
        pass


def make_group(timeout_s):
    return Group(
        name="g",
        meeting=Nobody(),
        rank=0,
        size=1,
        address="127.0.0.1",
        backend="gloo",
        timeout_s=timeout_s,
    )


def test_a_group_that_ends_while_the_device_is_waited_for_says_so():
    group, moment = make_group(100), PlayedMoment()

    def end():
        group.shutdown("a peer is gone")
        moment.over.set()

    ends = threading.Thread(target=end)
    ends.start()
    with pytest.raises(GroupEnded, match="a peer is gone"):
        group.wait_for(moment)
    ends.join()


def test_a_device_that_is_busy_when_its_group_ends_is_waited_for_as_long_as_it_takes():
    """It may have a step's work in its queue: that the trainer waits is no reason to end it."""
    group, moment, ended = make_group(100), PlayedMoment(), []
    before = set(threading.enumerate())

    def wait():
        try:
            group.wait_for(moment)
        except GroupEnded as end:
            ended.append(end.why)

    waits = threading.Thread(target=wait)
    waits.start()
    assert moment.waits.wait(60)
    group.shutdown("a peer is gone")
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if isinstance(thread, threading.Timer)]
    assert not ended
    moment.over.set()
    waits.join()
    assert ended == ["a peer is gone"]


def test_a_group_that_is_not_connected_yet_is_not_asked_for_its_connections():
    """A replay computes within the cell, and waits for the device, before the pipeline is made."""
    group = make_group(100)
    group._backend = Nccl()
    group.wait_for(_over())
    assert not group.problem


def test_a_device_that_is_not_done_in_time_ends_the_wait_of_its_group():
    # The time is that of an operation, of which the moment hears one look at a time.
    with pytest.raises(GroupEnded, match=r"^g: the device was not done within 0\.12 s$"):
        make_group(0.12).wait_for(PlayedMoment())


def test_a_device_that_has_failed_is_no_end_of_its_group():
    class Failed(PlayedMoment):
        def wait(self, timeout_s=None):
            del timeout_s
            raise RuntimeError("the device has failed")

    with pytest.raises(RuntimeError, match="the device has failed"):
        make_group(100).wait_for(Failed())


class PlayedMesh(PlayedGroup):
    """A group that meets its ranks, and notes in which order of all it did."""

    def __init__(self, met, name):
        super().__init__()
        self._met, self._name = met, name

    @property
    def connected(self):
        return self._name in self._met

    def connect(self):
        self._met.append(self._name)


def test_a_cell_meets_before_the_rest_of_its_chain_and_once(monkeypatch):
    met = []
    monkeypatch.setattr(comm_mesh, "enter", lambda _: met.append("entered"))
    chain = ChainGroups("chain", PlayedMesh(met, "pipeline"), PlayedMesh(met, "mesh"))
    chain.connect_cell()
    assert not chain.connected
    chain.connect()
    assert chain.connected
    assert met == ["mesh", "entered", "pipeline"]
