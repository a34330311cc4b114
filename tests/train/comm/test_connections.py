"""A trainer's device is done with the groups that have ended before the trainer goes on."""

import dataclasses
import os
import threading
import types

import pytest
from tests.train.comm.test_mesh import config_of
from tests.train.crew import ADDRESS

from mainstay_core.rank.connections import QuorumConnections
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.comm import connections
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.ending import EXIT_BLOCKED
from mainstay_train.comm.group import BACKENDS, Group
from mainstay_train.comm.nccl import Nccl


class Held(Nccl):
    """NCCL whose aborts are over when told."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.goes_on = threading.Event(), threading.Event()

    def finish_aborts(self, timeout):
        self.is_asked.set()
        return super().finish_aborts(timeout)


@pytest.fixture(params=[60])
def adopting(monkeypatch, request):
    """The connections of a trainer that enters a quorum, and the backend of its groups.

    The parameter says how long an operation may take.
    """
    backend = Held()
    monkeypatch.setitem(BACKENDS, "held", backend)
    monkeypatch.setattr(QuorumConnections, "adopt", lambda _, plan, index: (plan, index))
    settings = TrainerSettings(
        config=dataclasses.replace(config_of(1, 1), operation_timeout_s=request.param),
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


@pytest.mark.parametrize("adopting", [0.01], indirect=True)
def test_a_trainer_whose_device_does_not_get_there_in_time_ends_itself(adopting, monkeypatch):
    mine, backend = adopting
    ends = []

    def exit_at_once(code):
        ends.append(code)
        backend.goes_on.set()

    monkeypatch.setattr(os, "_exit", exit_at_once)
    backend.abort(types.SimpleNamespace(abort=backend.goes_on.wait))
    mine.adopt("plan", 0)
    assert set(ends) == {EXIT_BLOCKED}


def test_a_kept_pipeline_whose_connections_have_failed_holds_no_device_up(adopting, monkeypatch):
    """It stands on the device in a receive for which nobody sends, before what was aborted."""
    mine, backend = adopting
    monkeypatch.setattr(backend, "create", lambda *_, **__: types.SimpleNamespace(abort=_goes_on))
    monkeypatch.setattr(backend, "connect", lambda *_: None)
    monkeypatch.setattr(backend, "problem", lambda _: "NCCL has met a COMM_ERROR")

    def _goes_on():
        backend.goes_on.set()

    meeting = types.SimpleNamespace(wake=lambda: None, meet=lambda _, body, *__: [body])
    pipeline = Group(
        name="pipeline",
        meeting=meeting,
        rank=0,
        size=1,
        address=ADDRESS,
        backend="held",
        timeout_s=60,
    )
    pipeline.connect()
    mine._pipeline = ChainGroups("chain", pipeline, None)
    backend.abort(types.SimpleNamespace(abort=backend.goes_on.wait))
    assert mine.adopt("plan", 0) == ("plan", 0)
    assert pipeline.ended == "pipeline: NCCL has met a COMM_ERROR"
    assert mine.pipeline_name == "", "the settle is told that this cell has lost it"
