"""Ranks of a group meet by the gather alone: a recovery waits for no other service."""

import re

import pytest
import torch
from tests.strict.group import Strict
from tests.train.crew import ADDRESS, ROOT
from torch import distributed

from mainstay_train.comm.group import BACKENDS, Group

SIZE = 3
STORES = ("TCPStore", "FileStore")
"""Stores of torch's that lie elsewhere. The client of the first asks the DNS for the name of whom
it calls: where many ask at once, an answer that was lost cost 5 s of a recovery."""


class PipeMeeting:
    """A rank's side of a meeting whose place is the test."""

    def __init__(self, pipe):
        self._pipe = pipe

    def meet(self, key, body, size, ended):
        del size, ended
        self._pipe.send((key, body))
        return self._pipe.recv()

    def wake(self):
        pass


def _refuse(*_args, **_options):
    raise AssertionError("a store of torch's stands between the ranks")


def _meet_and_exchange(pipe, rank, backend):
    BACKENDS["strict"] = Strict()
    for name in STORES:
        setattr(distributed, name, _refuse)
    group = Group(
        name="test",
        meeting=PipeMeeting(pipe),
        rank=rank,
        size=SIZE,
        address=ADDRESS,
        backend=backend,
        timeout_s=200,
    )
    group.connect()
    received, sent = torch.empty(SIZE), torch.full((SIZE,), float(rank))
    group.finish_exchange(group.start_exchange(received, sent, [1] * SIZE, [1] * SIZE))
    pipe.send(received.tolist())
    pipe.recv()  # it stays until all have what it sent


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_what_ranks_tell_one_meeting_is_all_they_need_to_reach_each_other(crew, backend):
    workers = [crew.fork(_meet_and_exchange, rank, backend) for rank in range(SIZE)]
    told = [worker.hear() for worker in workers]
    assert len({key for key, _ in told}) == 1
    for worker in workers:
        worker.say([body for _, body in told])
    assert [worker.hear() for worker in workers] == [[0.0, 1.0, 2.0]] * SIZE


def test_no_module_of_trainers_names_a_store_that_lies_elsewhere():
    named = {
        path.name: names
        for path in (ROOT / "agent" / "mainstay_train").rglob("*.py")
        if (names := re.findall("|".join([*STORES, "init_process_group"]), path.read_text()))
    }
    assert not named
