import os
import socket

from mainstay_core.base.frames import FrameParser, pack
from mainstay_core.base.ids import QuorumId, RankId, Slot
from mainstay_core.dmr.flips import Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.planning.program import Action, Op
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous
from mainstay_train.session.fault_points import FaultPoints
from mainstay_train.session.uplink import Status, Uplink

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
        rendezvous=Rendezvous(pod="pod0", gather="127.0.0.1:1"),
        reason="test",
        faults_fired=fired,
    )


class Supervisor:
    """The other end of a forked trainer's uplink: hears fault points, may tell it to go on."""

    def __init__(self, crew, directory, faults, reached):
        """Fork a trainer that reaches (plan, index, step, action) one after the other."""
        path = os.path.join(directory, "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()
            self.trainer = crew.fork(_trainer, path, faults, reached)
            self._line, _ = listener.accept()
        self._parser, self._frames = FrameParser(), []

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


def _trainer(pipe, path, faults, reached):
    # In a process of its own: the end of the line is the end of the process.
    uplink = Uplink(path, Status(), 3600.0, lambda _: None, lambda: None)
    uplink.start({"slot": 0})
    points = FaultPoints(faults, 1, uplink)
    for number, where in enumerate(reached):
        if isinstance(where, str):
            points.note_fired(where)
        else:
            points.reach(*where)
        pipe.send(f"past {number}")
    pipe.recv()


def backward(micro_batch=0):
    return Action(Op.BACKWARD_INPUT, 1, 0, micro_batch)


def test_a_fault_halts_its_rank_exactly_at_its_action_until_told(crew, tmp_path):
    plan = make_plan()
    reached = [
        (plan, 1, 2, backward()),  # another step
        (plan, 0, 3, Action(Op.BACKWARD_INPUT, 0, 0, 0)),  # another rank
        (plan, 2, 3, backward()),  # a follower of the stage
        (plan, 1, 3, Action(Op.FORWARD, 1, 0, 0)),  # another action
        (plan, 1, 3, backward(0)),  # here
        (plan, 1, 3, backward(1)),  # it fires once
    ]
    supervisor = Supervisor(crew, tmp_path, [KILL], reached)
    heard = supervisor.hear()
    assert (heard["fault"], heard["action"], heard["step"]) == ("f1", "kill-trainer", 3)
    assert heard["rank"] == "r0.s1.i0"
    assert [supervisor.trainer.hear() for _ in range(4)] == [f"past {n}" for n in range(4)]
    assert not supervisor.trainer.pipe.poll()
    supervisor.resume("f1")
    assert [supervisor.trainer.hear() for _ in range(2)] == ["past 4", "past 5"]


def test_a_fault_that_fired_does_not_fire_again(crew, tmp_path):
    reached = [
        (make_plan(fired=("f1",)), 1, 3, backward()),
        (make_plan(), 1, 3, backward()),  # nor under a plan that has forgotten it
    ]
    supervisor = Supervisor(crew, tmp_path, [KILL], reached)
    assert [supervisor.trainer.hear() for _ in range(2)] == ["past 0", "past 1"]


def test_delayed_and_slowing_faults_do_not_halt(crew, tmp_path):
    delayed = FaultPoint(
        id="f2", step=1, action=FaultAction.KILL_TRAINER, delay_ms=5, replica=0, stage=1
    )
    slow = FaultPoint(
        id="f3", step=1, action=FaultAction.SLOW, phase="VOTE", slow_ms=1, replica=0, stage=1
    )
    reached = [
        (make_plan(), 1, 1, backward()),  # without a phase: the step's first action
        (make_plan(), 1, 1, Action(Op.VOTE, 1)),
    ]
    supervisor = Supervisor(crew, tmp_path, [delayed, slow], reached)
    heard = [supervisor.hear(), supervisor.hear()]
    assert [(h["fault"], h["delay_ms"]) for h in heard] == [("f2", 5), ("f3", 0)]
    assert [supervisor.trainer.hear() for _ in range(2)] == ["past 0", "past 1"]


class Told:
    """An uplink that keeps what is told of faults."""

    def __init__(self):
        self.heads = []

    def reach_fault(self, head, *, halt):
        self.heads.append((head["fault"], halt))


def test_a_flip_is_ordered_when_its_step_begins_and_halts_nobody():
    flip = FaultPoint(
        id="f",
        step=1,
        action=FaultAction.FLIP,
        phase="reduce",
        replica=0,
        stage=1,
        flip=Flip(in_pass=Pass.STEP, element=0, bit=0),
    )
    told, ordered = Told(), []
    points = FaultPoints([flip], 1, told, lambda fault, step: ordered.append((fault.id, step)))
    for step, op in ((0, Op.REDUCE), (1, Op.SETTLE), (1, Op.FORWARD), (1, Op.REDUCE)):
        points.reach(make_plan(), 1, step, Action(op, 1))
        assert ordered == [("f", 1)] * (step == 1 and op is not Op.SETTLE)
    assert told.heads == [("f", False)]


def test_a_sticky_flip_of_the_slot_is_ordered_once_by_a_trainer_that_comes_later():
    flip = FaultPoint(
        id="f",
        step=1,
        action=FaultAction.FLIP,
        phase="reduce",
        replica=0,
        stage=0,
        flip=Flip(in_pass=Pass.STEP, element=0, bit=0, sticky=True),
    )
    ordered = []
    points = FaultPoints([flip], 1, Told(), lambda fault, step: ordered.append((fault.id, step)))
    points.add([flip])
    assert ordered == []
    points.add([flip], ["f"])
    points.add([flip], ["f"])
    assert ordered == [("f", 0)]

    first = FaultPoints([flip], 1, Told(), lambda fault, step: ordered.append((fault.id, step)))
    first.reach(make_plan(), 0, 1, Action(Op.FORWARD, 0))
    first.add([flip], ["f"])  # the supervisor tells all its trainers: this one has it already
    assert ordered == [("f", 0), ("f", 1)]


def test_what_follows_a_fault_without_a_plan_waits_two_steps(crew, tmp_path):
    follower = FaultPoint(
        id="b", step=0, action=FaultAction.KILL_TRAINER, after="a", phase="VOTE", replica=0, stage=1
    )
    vote = Action(Op.VOTE, 1)
    reached = [
        (make_plan(), 1, 4, vote),
        "a",
        (make_plan(), 1, 4, vote),
        (make_plan(), 1, 5, vote),
        (make_plan(), 1, 6, vote),
    ]
    supervisor = Supervisor(crew, tmp_path, [follower], reached)
    assert supervisor.hear()["step"] == 6
    assert [supervisor.trainer.hear() for _ in range(4)] == [f"past {n}" for n in range(4)]


def test_a_slow_rank_is_slow_in_what_it_computes_and_for_its_steps(crew, tmp_path):
    slow = FaultPoint(
        id="s",
        step=1,
        action=FaultAction.SLOW,
        replica=0,
        stage=1,
        slow_ms=1e6,
        factor=1,
        num_steps=1,
    )
    reached = [
        (make_plan(), 1, 1, Action(Op.RECV_F, 1)),
        (make_plan(), 1, 1, Action(Op.REDUCE, 1)),  # receiving is waiting: no slower
        (make_plan(), 1, 2, backward()),
        (make_plan(), 1, 2, Action(Op.VOTE, 1)),  # another step: no slower
        (make_plan(), 1, 1, backward()),
    ]
    supervisor = Supervisor(crew, tmp_path, [slow], reached)
    assert supervisor.hear()["fault"] == "s"
    assert [supervisor.trainer.hear() for _ in range(5)] == [f"past {n}" for n in range(5)]
