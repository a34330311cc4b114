"""What NCCL's groups are made of, as far as no GPU is needed."""

import threading

from mainstay_train.comm.nccl import _Ids


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
