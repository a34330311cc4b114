import os
import socket
import threading

import pytest

from mainstay_core.faults import FaultAction, FaultPoint
from mainstay_core.frames import FrameParser, pack
from mainstay_core.ids import QuorumId, RankId, Slot
from mainstay_core.messages import Chain, Member, Method, Plan, Rendezvous
from mainstay_core.program import Action, Op
from mainstay_train.fault_points import FaultPoints
from mainstay_train.uplink import Status, Uplink

KILL = FaultPoint(
    id="f1", step=3, action=FaultAction.KILL_TRAINER, phase="backward", replica=0, stage=1
)


def make_plan(fired=()):
    """Two stages, one replica; member 1 is r0.s1, member 2 a follower of stage 1."""
    ranks = (RankId(replica=0, stage=0), RankId(replica=0, stage=1), RankId(replica=None, stage=1))
    quorum = QuorumId(id=1, nonce="n")
    return Plan(
        job="j",
        quorum=quorum,
        planned=False,
        unplanned_id=1,
        method=Method.START,
        members=tuple(
            Member(
                index=i,
                rank=rank,
                slot=Slot(pod=f"pod{i}", index=0),
                incarnation=f"inc{i}",
                address="127.0.0.1",
                since=1,
            )
            for i, rank in enumerate(ranks)
        ),
        chains=(Chain(replica=0, cells=(0, 1), formed_in=quorum),),
        suppliers=(0,),
        all_reduce_stack=1,
        rendezvous=Rendezvous(pod="pod0", gather="127.0.0.1:1", store="127.0.0.1:2"),
        reason="test",
        faults_fired=fired,
    )


class Supervisor:
    """The other end of the uplink: hears fault points, may tell the trainer to go on."""

    def __init__(self, directory):
        path = os.path.join(directory, "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()
            self.uplink = Uplink(path, Status(), 3600.0, lambda _: None, lambda: None)
            self._line, _ = listener.accept()
        self._parser, self._frames = FrameParser(), []
        self.uplink.start({"slot": 0})

    def hear(self):
        """The next fault point."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.kind == "fault-point":
                    return frame.head
            self._frames += self._parser.feed(self._line.recv(65536))

    def resume(self, fault):
        self._line.sendall(pack({"kind": "resume", "fault": fault}))


@pytest.fixture
def supervisor(tmp_path):
    return Supervisor(tmp_path)


def backward(micro_batch=0):
    return Action(Op.BACKWARD_INPUT, 1, 0, micro_batch)


def test_a_fault_halts_its_rank_exactly_at_its_action_until_told(supervisor):
    points = FaultPoints([KILL], supervisor.uplink)
    plan = make_plan()
    # Not its step, not its rank, not its action: nothing happens.
    points.reach(plan, 1, 2, backward())
    points.reach(plan, 0, 3, Action(Op.BACKWARD_INPUT, 0, 0, 0))
    points.reach(plan, 2, 3, Action(Op.REDUCE, 1))
    points.reach(plan, 1, 3, Action(Op.FORWARD, 1, 0, 0))
    halted = threading.Thread(target=points.reach, args=(plan, 1, 3, backward()))
    halted.start()
    heard = supervisor.hear()
    assert (heard["fault"], heard["action"], heard["step"]) == ("f1", "kill-trainer", 3)
    assert heard["rank"] == "r0.s1.i0"
    assert halted.is_alive()
    supervisor.resume("f1")
    halted.join()
    points.reach(plan, 1, 3, backward(1))  # it fires once


def test_a_fault_that_fired_does_not_fire_again(supervisor):
    points = FaultPoints([KILL], supervisor.uplink)
    points.reach(make_plan(fired=("f1",)), 1, 3, backward())
    points.reach(make_plan(), 1, 3, backward())  # nor under a plan that has forgotten it


def test_delayed_and_slowing_faults_do_not_halt(supervisor):
    delayed = FaultPoint(
        id="f2", step=1, action=FaultAction.KILL_TRAINER, delay_ms=5, replica=0, stage=1
    )
    slow = FaultPoint(
        id="f3", step=1, action=FaultAction.SLOW, phase="VOTE", delay_ms=1, replica=0, stage=1
    )
    points = FaultPoints([delayed, slow], supervisor.uplink)
    points.reach(make_plan(), 1, 1, backward())  # without a phase: the step's first action
    points.reach(make_plan(), 1, 1, Action(Op.VOTE, 1))
    heard = [supervisor.hear(), supervisor.hear()]
    assert [(h["fault"], h["delay_ms"]) for h in heard] == [("f2", 5), ("f3", 1)]


def test_a_fault_of_a_replica_does_not_meet_its_followers(supervisor):
    points = FaultPoints([KILL], supervisor.uplink)
    points.reach(make_plan(), 2, 3, backward())
