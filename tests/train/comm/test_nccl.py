"""What NCCL's groups are made of, as far as no GPU is needed."""

import threading
from datetime import timedelta

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
    """A collective of torch's; with a timeout its wait would hold the host."""

    def __init__(self):
        self.waits = []

    def wait(self, *args):
        self.waits.append(args)


def test_the_stream_waits_for_an_operation_and_the_host_does_not():
    work = Work()
    Nccl().wait(work, timedelta(seconds=1))
    assert work.waits == [()]
