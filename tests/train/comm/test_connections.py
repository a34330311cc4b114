"""A trainer's device is done with the groups that have ended before the trainer goes on."""

import os
import threading
import types

import pytest
from tests.train.comm.test_mesh import config_of
from tests.train.crew import ADDRESS

from mainstay_core.rank.connections import QuorumConnections
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.comm import connections
from mainstay_train.comm.ending import EXIT_BLOCKED
from mainstay_train.comm.group import BACKENDS
from mainstay_train.comm.nccl import Nccl


class Held(Nccl):
    """NCCL whose aborts are over when told."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.goes_on = threading.Event(), threading.Event()

    def finish_aborts(self, timeout):
        self.is_asked.set()
        return super().finish_aborts(timeout)


@pytest.fixture
def adopting(monkeypatch):
    """The connections of a trainer that enters a quorum, and the backend of its groups."""
    backend = Held()
    monkeypatch.setitem(BACKENDS, "held", backend)
    monkeypatch.setattr(QuorumConnections, "adopt", lambda _, plan, index: (plan, index))
    settings = TrainerSettings(
        config=config_of(1, 1),
        pod="a",
        slot=0,
        incarnation="a.1",
        address=ADDRESS,
        socket="",
        work_dir="",
    )
    return connections.Connections(settings, "held"), backend


def test_a_trainer_enters_a_quorum_once_its_device_is_done_with_what_was_aborted(adopting):
    mine, backend = adopting
    backend.abort(types.SimpleNamespace(abort=backend.goes_on.wait))
    entered = []
    enters = threading.Thread(target=lambda: entered.append(mine.adopt("plan", 0)))
    enters.start()
    assert backend.is_asked.wait(60)
    assert not entered
    backend.goes_on.set()
    enters.join()
    assert entered == [("plan", 0)]


def test_a_trainer_whose_device_does_not_get_there_in_time_ends_itself(adopting, monkeypatch):
    mine, backend = adopting
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(backend, "finish_aborts", lambda timeout: timeout.total_seconds() < 1800)
    mine.adopt("plan", 0)
    assert ends == [EXIT_BLOCKED]
