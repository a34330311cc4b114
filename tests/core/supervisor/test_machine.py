"""A supervisor's decisions, event by event."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.job.config import JobConfig
from mainstay_core.supervisor.events import (
    Committed,
    Crashed,
    Ended,
    Event,
    Exited,
    FactSeen,
    Fork,
    Forked,
    Forward,
    HeartbeatDue,
    Hello,
    LauncherLost,
    LauncherUp,
    Leave,
    LeaveAcknowledged,
    LeaveRequested,
    PlanReceived,
    Registered,
    Release,
    SendFact,
    Signal,
    SocketEnded,
    StatusSeen,
    StopTrainers,
    Tick,
)
from mainstay_core.supervisor.machine import initial, next_due_s, readiness, step
from mainstay_core.supervisor.slots import line_of
from mainstay_core.supervisor.state import GOES_ON_S, LATER_S, SlotPhase, SupervisorLimits
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import (
    Adopted,
    Cause,
    FactKind,
    Failed,
    Finished,
    Parked,
    Settled,
    SlotStatus,
)
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous
from mainstay_core.wire.recoveries import Replayed

POD = PodUid("pod-1")
REPLAYED = Replayed(
    stage=0,
    inner=0,
    kind="gradients",
    first=1,
    last=2,
    version=3,
    planned_steps=2,
    steps=2,
    seconds=1.0,
)
SETTINGS = SupervisorLimits(
    max_restarts=3, hang_s=100.0, silence_s=40.0, backoff_s=1.0, backoff_max_s=3.0
)


class Pod:
    """A supervisor's state with a clock; remembers what it was told to do."""

    def __init__(self, num_slots: int = 1) -> None:
        self.state = initial(POD, num_slots)
        self.now_s = 1000.0
        self.nonce = 0
        self.reason = ""

    def feed(self, event: Event, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        self.nonce += 1
        done = step(self.state, event, self.now_s, f"n{self.nonce}")
        self.state, self.reason = done.state, done.reason
        return list(done.actions)

    def life(self, slot: int = 0) -> Incarnation:
        incarnation = self.state.slots[slot].incarnation
        assert incarnation is not None
        return incarnation

    def phase(self, slot: int = 0) -> SlotPhase:
        return self.state.slots[slot].phase

    def bring_up(self) -> Pod:
        self.feed(LauncherUp())
        self.feed(Registered(SETTINGS))
        for slot in range(len(self.state.slots)):
            self.say_hello(slot)
        return self

    def say_hello(self, slot: int = 0) -> list[Any]:
        self.feed(Forked(slot, self.life(slot), 10 + slot))
        return self.feed(Hello(slot, self.life(slot), 10 + slot, {"torch": "2"}))

    def status(self, *, progress: int, waiting: bool = False, after_s: float = 0.0) -> list[Any]:
        status = SlotStatus(index=0, phase="computing", step=7, progress=progress, waiting=waiting)
        return self.feed(StatusSeen(0, self.life(), status), after_s)

    def wait_until_due(self, until_s: float) -> None:
        """Let time pass, with the ticks that are due before then, none of which does anything."""
        while (due_s := next_due_s(self.state)) is not None and due_s < until_s:
            assert self.feed(Tick(), due_s - self.now_s) == []
        self.now_s = until_s

    def finish(self) -> Finished:
        """Have slot 0's trainer say that it has finished; return what it said."""
        fact = Finished(pod=POD, slot=0, incarnation=self.life())
        assert self.feed(FactSeen(0, self.life(), fact)) == [SendFact(fact)]
        return fact

    def crash(self, code: int | None = 1, number: int | None = None) -> list[Any]:
        return self.feed(Exited(0, self.life(), code, number))


def plan(number: int, lives: Iterable[tuple[int, str]] = ()) -> Plan:
    members = tuple(
        Member(
            index=index,
            rank=RankId(replica=index, stage=0),
            slot=Slot(pod=POD, index=slot),
            incarnation=Incarnation(life),
            address="127.0.0.1",
            since=number,
        )
        for index, (slot, life) in enumerate(lives)
    )
    quorum = QuorumId(id=number, nonce="x")
    return Plan(
        job=JobUid("job"),
        quorum=quorum,
        planned=False,
        unplanned_id=number,
        method=Method.START,
        members=members,
        chains=tuple(Chain(replica=m.index, cells=(m.index,), formed_in=quorum) for m in members),
        suppliers=(0,),
        all_reduce_stack=1,
        rendezvous=Rendezvous(pod=POD, gather="127.0.0.1:1"),
        reason="a test",
    )


def told(actions: list[Any]) -> list[tuple[FactKind, int | None, bool]]:
    facts = [action.fact for action in actions if isinstance(action, SendFact)]
    return [(f.kind, getattr(f, "slot", None), getattr(f, "restarting", False)) for f in facts]


def of(actions: list[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def parked(life: Incarnation, number: int) -> Parked:
    quorum = QuorumId(id=number, nonce="x")
    return Parked(pod=POD, slot=0, incarnation=life, quorum=quorum)


def hearsay(life: Incarnation, number: int) -> Parked:
    return replace(parked(life, number), was_told=True)


def adopted(life: Incarnation, number: int) -> Adopted:
    quorum = QuorumId(id=number, nonce="x")
    return Adopted(pod=POD, slot=0, incarnation=life, quorum=quorum)


@pytest.mark.parametrize("launcher_first", [True, False])
def test_every_slot_is_forked_once_launcher_and_job_are_known(launcher_first: bool) -> None:
    pod = Pod(2)
    events: list[Event] = [LauncherUp(), Registered(SETTINGS)]
    first, second = events if launcher_first else events[::-1]
    assert pod.feed(first) == []
    forks = pod.feed(second)
    assert [fork.slot for fork in forks] == [0, 1]
    assert len({fork.incarnation for fork in forks}) == 2


def test_a_trainer_that_says_hello_is_told_and_gets_the_newest_plan() -> None:
    pod = Pod()
    pod.feed(LauncherUp())
    pod.feed(Registered(SETTINGS))
    pod.feed(PlanReceived(plan(3)))
    up, forward = pod.say_hello()
    assert up.fact.kind is FactKind.TRAINER_UP
    assert up.fact.fingerprint == {"torch": "2"}
    assert up.fact.observed_at_s == pod.now_s
    assert (forward.plan.quorum.id, forward.slots) == (3, (0,))


def test_a_second_registration_tells_of_all_trainers_again() -> None:
    pod = Pod(2).bring_up()
    assert told(pod.feed(Registered(SETTINGS))) == [
        (FactKind.TRAINER_UP, 0, False),
        (FactKind.TRAINER_UP, 1, False),
    ]


def test_a_newer_plan_goes_to_all_trainers_and_an_older_one_to_none() -> None:
    pod = Pod(2).bring_up()
    assert pod.feed(PlanReceived(plan(5))) == [Forward(plan(5), (0, 1))]
    assert pod.feed(PlanReceived(plan(4))) == []
    assert pod.feed(PlanReceived(plan(5))) == []
    assert pod.state.plan == plan(5)


def test_hello_may_arrive_before_the_launcher_says_that_it_forked() -> None:
    pod = Pod()
    pod.feed(LauncherUp())
    pod.feed(Registered(SETTINGS))
    pod.feed(Hello(0, pod.life(), 10, {}))
    assert pod.feed(Forked(0, pod.life(), 10)) == []
    assert pod.phase() is SlotPhase.UP


def test_the_end_of_a_socket_is_told_at_once_and_the_restart_waits_for_the_process() -> None:
    pod = Pod().bring_up()
    actions = pod.feed(SocketEnded(0, pod.life()))
    assert told(actions) == [(FactKind.TRAINER_DOWN, 0, True)]
    assert of(actions, Signal) == [Signal(0, pod.life(), 9)]
    assert pod.phase() is SlotPhase.ENDING
    first = pod.life()
    (fork,) = pod.crash(None, 9)
    assert isinstance(fork, Fork)
    assert fork.incarnation != first


def test_an_exit_that_is_reaped_before_its_socket_ends_is_told_once() -> None:
    pod = Pod().bring_up()
    life = pod.life()
    actions = pod.crash(None, 9)
    assert told(actions) == [(FactKind.TRAINER_DOWN, 0, True)]
    assert len(of(actions, Fork)) == 1
    assert pod.feed(SocketEnded(0, life)) == []
    assert "former life" in pod.reason


@pytest.mark.parametrize("code", [0, 10])
def test_a_trainer_that_is_done_is_not_restarted(code: int) -> None:
    pod = Pod().bring_up()
    assert told(pod.feed(SocketEnded(0, pod.life()))) == [(FactKind.TRAINER_DOWN, 0, True)]
    actions = pod.crash(code)
    assert told(actions) == [(FactKind.TRAINER_DOWN, 0, False)], "the promise is taken back"
    assert of(actions, Fork) == []
    assert pod.phase() is SlotPhase.GIVEN_UP


def test_who_said_that_it_failed_is_not_restarted_whatever_its_code() -> None:
    pod = Pod().bring_up()
    fact = Failed(pod=POD, slot=0, incarnation=pod.life())
    assert pod.feed(FactSeen(0, pod.life(), fact)) == [SendFact(fact)]
    assert told(pod.feed(SocketEnded(0, pod.life()))) == [(FactKind.TRAINER_DOWN, 0, False)]
    assert pod.crash(1) == []
    assert pod.phase() is SlotPhase.GIVEN_UP


def test_who_said_that_it_finished_is_restarted_while_the_job_goes_on() -> None:
    """The others may die before they finish, and go back to a checkpoint together with it."""
    pod = Pod().bring_up()
    life = pod.finish().incarnation
    assert told(pod.feed(SocketEnded(0, life))) == [(FactKind.TRAINER_DOWN, 0, True)]
    assert len(of(pod.crash(None, 9), Fork)) == 1
    pod = Pod().bring_up()
    pod.finish()
    pod.feed(LauncherLost())
    assert len(of(pod.feed(LauncherUp()), Fork)) == 1


def test_who_said_that_it_finished_is_not_restarted_once_the_job_is_over() -> None:
    pod = Pod().bring_up()
    pod.finish()
    pod.feed(Ended("all steps are applied", 0))
    assert of(pod.crash(None, 9), Fork) == []
    assert pod.phase() is SlotPhase.GIVEN_UP


def test_that_a_trainer_finished_is_repeated_when_another_one_has_taken_its_slot() -> None:
    """An api that lost it would have that position computed once more."""
    pod = Pod().bring_up()
    finished = pod.finish()
    pod.crash(None, 9)
    pod.say_hello()
    up, again = pod.feed(Registered(SETTINGS))
    assert (up.fact.kind, up.fact.incarnation) == (FactKind.TRAINER_UP, pod.life())
    assert again == SendFact(finished)
    pod.feed(LauncherLost())
    assert SendFact(finished) in pod.feed(Registered(SETTINGS))


def test_last_words_that_are_read_after_the_exit_still_count() -> None:
    pod = Pod().bring_up()
    life = pod.life()
    pod.crash(0)
    finished = Finished(pod=POD, slot=0, incarnation=life)
    assert pod.feed(FactSeen(0, life, finished)) == [SendFact(finished)]
    pod = Pod().bring_up()
    life = pod.life()
    pod.crash(1)
    assert pod.life() != life
    assert pod.feed(FactSeen(0, life, finished)) == [SendFact(finished)]
    assert pod.feed(FactSeen(0, life, parked(life, 1))) == []
    assert pod.feed(Registered(SETTINGS))[0] == SendFact(finished), "and are repeated"


def test_restarts_are_delayed_twice_as_long_each_time_then_given_up() -> None:
    pod = Pod().bring_up()
    assert len(of(pod.crash(), Fork)) == 1, "the first one waits for nothing"
    for delay_s in (1.0, 2.0):
        pod.say_hello()
        assert of(pod.crash(), Fork) == []
        assert next_due_s(pod.state) == pod.now_s + delay_s
        assert pod.feed(Tick(), delay_s / 2) == []
        assert len(pod.feed(Tick(), delay_s / 2)) == 1
    pod.say_hello()
    assert told(pod.crash()) == [(FactKind.TRAINER_DOWN, 0, False)]
    assert pod.phase() is SlotPhase.GIVEN_UP
    assert next_due_s(pod.state) is None


def test_a_trainer_that_commits_two_new_steps_starts_the_count_of_restarts_anew() -> None:
    pod = Pod().bring_up()
    for number in range(10):
        assert len(of(pod.crash(), Fork)) == 1
        pod.say_hello()
        for version in (2 * number, 2 * number + 1):
            pod.feed(Committed(0, pod.life(), version))


def count_lives(pod: Pod, *lives: Iterable[int]) -> int:
    """Return how many lives a slot gets, each of which commits these steps and ends."""
    for number, steps in enumerate(lives):
        if pod.phase() is SlotPhase.GIVEN_UP:
            return number
        for version in steps:
            pod.feed(Committed(0, pod.life(), version))
        pod.crash()
        pod.feed(Tick(), 100.0)
        if pod.phase() is SlotPhase.FORKING:
            pod.say_hello()
    return len(lives)


def test_steps_that_are_done_again_do_not_start_the_count_anew() -> None:
    # The job restarts from step 0 each time, and fails in step 5.
    assert count_lives(Pod().bring_up(), *[range(5)] * 20) == 1 + SETTINGS.max_restarts


def test_the_step_in_which_a_trainer_joins_does_not_start_the_count_anew() -> None:
    # It computes nothing in the step in which it joins, and fails in the next.
    joins = [[3 * number] for number in range(20)]
    assert count_lives(Pod().bring_up(), *joins) == 1 + SETTINGS.max_restarts
    working = [[3 * number, 3 * number + 1] for number in range(20)]
    assert count_lives(Pod().bring_up(), *working) == len(working)


STAYS = (
    "; recovery.maxRestarts is 1, so the slot stays empty: "
    "its pod is kept as it is, and another is made once that is gone"
)
CRASH = Crash(type="OSError", message="gone", frames=("train.py:3 in read",), step=4)


def test_the_end_of_a_trainer_names_the_exception_that_it_told() -> None:
    pod = Pod().bring_up()
    life = pod.life()
    assert pod.feed(Crashed(0, life, CRASH)) == []
    (down,) = (a.fact for a in pod.feed(SocketEnded(0, life)) if isinstance(a, SendFact))
    assert (down.crash, down.evidence) == (CRASH, CRASH.describe())
    pod.crash(1)
    pod.say_hello()
    (down,) = (a.fact for a in pod.crash(9) if isinstance(a, SendFact))
    assert down.crash is None, "the next life is another one"


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_an_exception_that_is_read_after_the_exit_is_told_with_the_end(max_restarts: int) -> None:
    pod = Pod().bring_up()
    pod.feed(Registered(replace(SETTINGS, max_restarts=max_restarts)))
    life = pod.life()
    (before,) = (a.fact for a in pod.crash(1) if isinstance(a, SendFact))
    assert before.crash is None
    assert (pod.life() != life) is (max_restarts > 0)
    (tell,) = pod.feed(Crashed(0, life, CRASH))
    assert (tell.fact.incarnation, tell.fact.crash) == (life, CRASH)
    assert tell.fact.restarting is before.restarting
    assert pod.feed(Crashed(0, Incarnation("never was"), CRASH)) == []


def test_the_end_that_uses_up_the_restarts_says_what_becomes_of_the_pod() -> None:
    pod = Pod().bring_up()
    pod.feed(Registered(replace(SETTINGS, max_restarts=1)))
    first = pod.life()
    (down,) = (a.fact for a in pod.feed(SocketEnded(0, first)) if isinstance(a, SendFact))
    pod.crash(1)
    assert "maxRestarts" not in down.evidence
    pod.say_hello()
    second = pod.life()
    (down,) = (a.fact for a in pod.feed(SocketEnded(0, second)) if isinstance(a, SendFact))
    assert down.evidence == f"the socket of pid 10 ended{STAYS}"
    assert pod.crash(1) == [], "it is told"
    (tell,) = pod.feed(Crashed(0, second, CRASH))
    assert tell.fact.evidence == f"{CRASH.describe()}{STAYS}"


def test_a_trainer_that_has_finished_has_used_up_nothing() -> None:
    pod = Pod().bring_up()
    pod.feed(Registered(replace(SETTINGS, max_restarts=0)))
    pod.finish()
    (down,) = (a.fact for a in pod.feed(SocketEnded(0, pod.life())) if isinstance(a, SendFact))
    assert down.evidence == "the socket of pid 10 ended"


def test_a_trainer_that_fails_before_hello_names_its_exception_too() -> None:
    pod = Pod()
    pod.feed(LauncherUp())
    pod.feed(Registered(SETTINGS))
    pod.feed(Crashed(0, pod.life(), CRASH))
    (down,) = (a.fact for a in pod.crash(1) if isinstance(a, SendFact))
    assert down.crash == CRASH
    assert down.evidence == f"{CRASH.describe()} (code 1)"


def test_a_trainer_that_ends_before_hello_is_told_too() -> None:
    pod = Pod()
    pod.feed(LauncherUp())
    pod.feed(Registered(SETTINGS))
    actions = pod.crash(10)
    assert told(actions) == [(FactKind.TRAINER_DOWN, 0, False)]
    assert "code 10" in actions[0].fact.evidence


def test_a_running_rank_without_progress_is_killed_and_the_reason_is_told() -> None:
    pod = Pod().bring_up()
    pod.status(progress=5)
    moved_s = pod.now_s
    for _ in range(4):
        pod.status(progress=5, after_s=24.0)
        assert pod.feed(Tick()) == []
    pod.status(progress=5, after_s=14.0)
    assert pod.feed(Tick()) == [Signal(0, pod.life(), 9)]
    assert pod.feed(Tick(), 1.0) == [], "once"
    (tell, _) = pod.feed(SocketEnded(0, pod.life()))
    assert tell.fact.evidence == "killed: no progress for 100 s in step 7, computing"
    assert tell.fact.observed_at_s == moved_s, "others have waited for it since then"
    assert pod.crash(None, 9)
    pod.say_hello()
    (tell, _) = pod.feed(SocketEnded(0, pod.life()), 5.0)
    assert tell.fact.observed_at_s == pod.now_s, "that is not said of its next life"


def test_a_trainer_in_another_container_is_shown_by_the_pid_that_it_says() -> None:
    """The kernel tells no pid of another container's process: the status comes with 0."""
    pod = Pod().bring_up()
    assert line_of(pod.state.slots[0]).pid == 10, "before its first status"
    pod.status(progress=5)
    line = line_of(pod.state.slots[0])
    assert (line.pid, line.phase, line.step) == (10, "computing", 7)
    seen = SlotStatus(index=0, phase="computing", pid=4711)
    pod.feed(StatusSeen(0, pod.life(), seen))
    assert line_of(pod.state.slots[0]) == seen
    pod.crash(10)
    assert line_of(pod.state.slots[0]).phase == "given-up"


def test_a_rank_that_waits_for_others_is_not_blamed() -> None:
    pod = Pod().bring_up()
    for _ in range(20):
        pod.status(progress=5, waiting=True, after_s=50.0)
        assert pod.feed(Tick()) == []
    for _ in range(5):
        pod.status(progress=5, after_s=24.0)
        assert pod.feed(Tick()) == [], "the end of the wait starts the count"
    pod.status(progress=5, after_s=30.0)
    assert len(pod.feed(Tick())) == 1


def test_a_process_that_says_nothing_at_all_is_killed_even_if_it_waited() -> None:
    pod = Pod().bring_up()
    pod.status(progress=5, waiting=True)
    heard_s = pod.now_s
    pod.wait_until_due(heard_s + 40.0)
    assert pod.feed(Tick(), 0.001) == [Signal(0, pod.life(), 9)]
    assert "no sign of life" in pod.reason
    (tell, *_) = pod.crash(None, 9)
    assert tell.fact.observed_at_s == heard_s


@pytest.mark.parametrize("stood_still_s", [30.0, 41.0, 1000.0])
def test_a_pod_that_stood_still_as_a_whole_does_not_kill_who_goes_on_with_it(
    stood_still_s: float,
) -> None:
    """Nobody has read meanwhile what the trainer said, and it said nothing."""
    pod = Pod().bring_up()
    pod.status(progress=5)
    assert pod.feed(Tick(), stood_still_s) == []
    pod.status(progress=6, after_s=1.0)
    heard_s = pod.now_s
    pod.wait_until_due(heard_s + 40.0)
    assert pod.feed(Tick(), 0.001) == [Signal(0, pod.life(), 9)], "it counts from then on"


def test_a_pod_that_stood_still_does_not_kill_who_is_in_a_long_action_as_it_goes_on() -> None:
    """It gives signs of life, and has a while of its own for progress."""
    pod = Pod().bring_up()
    pod.status(progress=5)
    assert pod.feed(Tick(), 1000.0) == []
    for _ in range(33):
        assert pod.status(progress=5, after_s=1.0) + pod.feed(Tick()) == []
    pod.status(progress=6)
    moved_s = pod.now_s
    while pod.now_s < moved_s + 99.0:
        assert pod.status(progress=6, after_s=1.0) + pod.feed(Tick()) == []
    pod.status(progress=6, after_s=2.0)
    assert pod.feed(Tick()) == [Signal(0, pod.life(), 9)], "it counts from then on"


def test_who_makes_no_progress_after_a_pod_stood_still_is_killed_a_while_later() -> None:
    pod = Pod().bring_up()
    pod.status(progress=5)
    assert pod.feed(Tick(), 1000.0) == []
    went_on_s = pod.now_s
    while not pod.status(progress=5, after_s=1.0) + pod.feed(Tick(), 0.001):
        assert pod.now_s < went_on_s + 35.0
    assert "no progress for 100 s" in pod.reason
    assert pod.now_s > went_on_s + 100.0 / 3


def test_a_stopped_trainer_of_a_pod_that_stood_still_is_killed_a_while_later() -> None:
    pod = Pod().bring_up()
    heard_s = pod.now_s
    assert pod.feed(Tick(), 1000.0) == []
    assert pod.feed(Tick(), 13.0) == []
    assert pod.feed(Tick(), 1.0) == [Signal(0, pod.life(), 9)]
    (tell, *_) = pod.crash(None, 9)
    assert tell.fact.observed_at_s == heard_s


def test_a_parked_quorum_is_repeated_with_every_heartbeat_until_a_newer_plan() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4)))
    fact = parked(pod.life(), 4)
    assert pod.feed(FactSeen(0, pod.life(), fact)) == [SendFact(fact)]
    for _ in range(3):
        assert pod.feed(HeartbeatDue()) == [SendFact(fact)]
    pod.feed(PlanReceived(plan(5)))
    assert pod.feed(HeartbeatDue()) == []
    assert pod.feed(FactSeen(0, pod.life(), fact)) == [], "a plan answers it already"


def test_a_parked_quorum_is_told_until_a_plan_that_was_not_planned() -> None:
    """A planned plan interrupts nobody, so it does not reach a parked rank either."""
    pod = Pod().bring_up()
    join = replace(plan(5), planned=True, unplanned_id=4)
    pod.feed(PlanReceived(join))
    fact = parked(pod.life(), 4)
    assert pod.feed(FactSeen(0, pod.life(), fact)) == [SendFact(fact)]
    assert pod.feed(HeartbeatDue()) == [SendFact(fact)]
    pod.feed(PlanReceived(plan(6)))
    assert pod.feed(HeartbeatDue()) == []


def test_that_a_trainer_parked_as_others_told_it_waits_for_the_plan_that_outdates_it() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4)))
    fact = hearsay(pod.life(), 4)
    assert pod.feed(FactSeen(0, pod.life(), fact)) == []
    assert next_due_s(pod.state) == pod.now_s + LATER_S
    pod.feed(PlanReceived(plan(5)))
    assert pod.feed(Tick(), after_s=2 * LATER_S) == []
    assert pod.feed(HeartbeatDue()) == []


@pytest.mark.parametrize(
    ("members", "waits"),
    [([9, 0, 1], False), ([9, 1, 0], True), ([0, 9, 1], False), ([1, 0, 9], True)],
)
def test_the_first_member_that_is_not_suspected_tells_at_once_what_nobody_else_may_have_told(
    members: list[int], waits: bool
) -> None:
    """A quorum that ended with the connection of a member: a pod that is gone tells nothing."""
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4, [(slot, f"life{slot}") for slot in members])))
    fact = replace(hearsay(pod.life(), 4), suspects=(Slot(pod=POD, index=9),))
    told = pod.feed(FactSeen(0, pod.life(), fact))
    assert told == ([] if waits else [SendFact(fact)])
    assert pod.feed(Tick(), after_s=LATER_S + 0.001) == ([SendFact(fact)] if waits else [])


@pytest.mark.parametrize(
    ("before", "suspects", "cause", "waits"),
    [
        ([], [], Cause.REDUCTION, False),
        ([7], [], Cause.REDUCTION, False),
        ([7, 8], [], Cause.REDUCTION, True),
        ([7, 8, 9], [], Cause.REDUCTION, True),
        ([7, 8], [8], Cause.REDUCTION, False),
        ([7, 8, 9], [9], Cause.REDUCTION, True),
        ([7, 8, 9], [], Cause.MEETING, False),
        ([7, 8, 9], [], Cause.CHAIN, False),
        ([7, 8, 9], [], Cause.STATE, False),
        ([7, 8, 9], [], None, False),
    ],
)
def test_of_those_who_see_a_reduction_end_the_first_two_tell_it_at_once(
    before: list[int], suspects: list[int], cause: Cause | None, waits: bool
) -> None:
    pod = Pod().bring_up()
    members = [(slot, f"life{slot}") for slot in before]
    pod.feed(PlanReceived(plan(4, [*members, (0, pod.life()), (10, "life10")])))
    slots = tuple(Slot(pod=POD, index=slot) for slot in suspects)
    fact = replace(parked(pod.life(), 4), cause=cause, suspects=slots)
    assert pod.feed(FactSeen(0, pod.life(), fact)) == ([] if waits else [SendFact(fact)])
    later = pod.feed(Tick(), after_s=LATER_S + 0.001)
    assert later == ([SendFact(fact)] if waits else [])


def test_who_sees_the_reduction_of_another_quorum_end_tells_it_at_once() -> None:
    pod = Pod().bring_up()
    members = [(slot, f"life{slot}") for slot in (7, 8, 9)]
    newer = plan(4, [*members, (0, pod.life())])
    pod.feed(PlanReceived(replace(newer, planned=True, unplanned_id=3)))
    fact = replace(parked(pod.life(), 3), cause=Cause.REDUCTION)
    assert pod.feed(FactSeen(0, pod.life(), fact)) == [SendFact(fact)]


@pytest.mark.parametrize("make", [hearsay, adopted])
def test_a_fact_that_can_wait_is_told_once_a_little_later(
    make: Callable[[Incarnation, int], Adopted | Parked],
) -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4)))
    fact = make(pod.life(), 4)
    assert pod.feed(FactSeen(0, pod.life(), fact)) == []
    assert next_due_s(pod.state) == pod.now_s + LATER_S
    assert pod.feed(Tick(), after_s=LATER_S / 2) == []
    assert pod.feed(Tick(), after_s=LATER_S / 2 + 0.001) == [SendFact(fact)]
    assert pod.feed(Tick(), after_s=LATER_S) == []
    repeated = [SendFact(fact)] if isinstance(fact, Parked) else []
    assert pod.feed(HeartbeatDue()) == repeated


def test_a_heartbeat_that_comes_first_tells_who_parked_instead() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4)))
    fact = hearsay(pod.life(), 4)
    pod.feed(FactSeen(0, pod.life(), fact))
    assert pod.feed(HeartbeatDue()) == [SendFact(fact)]
    assert pod.feed(Tick(), after_s=2 * LATER_S) == []


def test_that_a_member_adopted_a_plan_is_told_with_its_next_fact() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4)))
    first = adopted(pod.life(), 4)
    pod.feed(FactSeen(0, pod.life(), first))
    next_one = Settled(pod=POD, slot=0, incarnation=pod.life(), quorum=first.quorum)
    told = pod.feed(FactSeen(0, pod.life(), next_one))
    assert told == [SendFact(first), SendFact(next_one)]
    assert pod.feed(Tick(), after_s=2 * LATER_S) == []


def goes_on(pod: Pod, *, number: int = 4, **told: Any) -> list[Any]:
    """Have slot 0's trainer, the last of three members, adopt the plan and go on."""
    fact = adopted(pod.life(), number)
    assert pod.feed(FactSeen(0, pod.life(), fact)) == []
    settled = Settled(pod=POD, slot=0, incarnation=pod.life(), quorum=fact.quorum, **told)
    return told_by(pod.feed(FactSeen(0, pod.life(), settled)))


def told_by(actions: list[Any]) -> list[FactKind]:
    return [action.fact.kind for action in actions if isinstance(action, SendFact)]


def loss_seen(life: Callable[[Pod], list[tuple[int, str]]], **changes: Any) -> Pod:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(replace(plan(4, life(pod)), method=Method.MASK, **changes)))
    return pod


def last_of_three(pod: Pod) -> list[tuple[int, str]]:
    return [(7, "life7"), (8, "life8"), (0, pod.life())]


BOTH = [FactKind.ADOPTED, FactKind.SETTLED]


@pytest.mark.parametrize("method", [Method.MASK, Method.REFORM])
def test_that_a_member_goes_on_after_a_loss_is_told_with_its_first_step(method: Method) -> None:
    pod = loss_seen(last_of_three)
    pod.feed(PlanReceived(replace(plan(5, last_of_three(pod)), method=method)))
    assert goes_on(pod, number=5) == []
    assert told_by(pod.feed(Tick(), after_s=GOES_ON_S / 2)) == []
    assert told_by(pod.feed(Committed(0, pod.life(), 7))) == BOTH
    assert told_by(pod.feed(Committed(0, pod.life(), 8))) == []
    assert told_by(pod.feed(Tick(), after_s=2 * GOES_ON_S)) == []


def test_that_a_member_goes_on_after_a_loss_is_told_before_a_step_that_takes_long() -> None:
    pod = loss_seen(last_of_three)
    assert goes_on(pod) == []
    assert next_due_s(pod.state) == pod.now_s + GOES_ON_S
    assert told_by(pod.feed(Tick(), after_s=GOES_ON_S + 0.001)) == BOTH
    assert told_by(pod.feed(Committed(0, pod.life(), 7))) == []


def test_who_goes_on_and_parks_tells_both_in_their_order() -> None:
    pod = loss_seen(last_of_three)
    assert goes_on(pod) == []
    told = told_by(pod.feed(FactSeen(0, pod.life(), parked(pod.life(), 4))))
    assert told == [*BOTH, FactKind.PARKED]


@pytest.mark.parametrize(
    ("members", "changes", "fields"),
    [
        (lambda pod: [(0, pod.life()), (7, "life7")], {}, {}),
        (last_of_three, {"planned": True}, {}),
        (last_of_three, {"method": Method.START}, {}),
        (last_of_three, {"method": Method.REPLAY}, {}),
        (last_of_three, {}, {"replayed": REPLAYED}),
    ],
)
def test_what_others_may_wait_for_is_told_when_a_member_goes_on(
    members: Callable[[Pod], list[tuple[int, str]]], changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    pod = Pod().bring_up()
    newest = replace(plan(4, members(pod)), **{"method": Method.MASK, **changes})
    pod.feed(PlanReceived(newest))
    assert goes_on(pod, **fields) == BOTH


def test_who_copied_a_state_first_tells_at_once_that_it_goes_on() -> None:
    pod = loss_seen(last_of_three)
    fact = adopted(pod.life(), 4)
    pod.feed(FactSeen(0, pod.life(), fact))
    assert told_by(pod.feed(Tick(), after_s=LATER_S + 0.001)) == [FactKind.ADOPTED]
    settled = Settled(pod=POD, slot=0, incarnation=pod.life(), quorum=fact.quorum)
    assert told_by(pod.feed(FactSeen(0, pod.life(), settled))) == [FactKind.SETTLED]


def test_what_waited_of_a_trainer_that_ends_is_told_no_more() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4)))
    pod.feed(FactSeen(0, pod.life(), adopted(pod.life(), 4)))
    pod.feed(SocketEnded(0, pod.life()))
    assert of(pod.feed(Tick(), after_s=2 * LATER_S), SendFact) == []


def test_the_api_hears_what_could_wait_within_the_time_that_it_leaves_for_it() -> None:
    assert JobConfig.__dataclass_fields__["probe_s"].default > 2 * LATER_S


def test_a_pod_whose_trainer_has_adopted_a_plan_knows_that_all_supervisors_have_it() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4)))
    assert pod.state.met is None
    pod.feed(FactSeen(0, pod.life(), adopted(pod.life(), 4)))
    assert pod.state.met == plan(4).quorum


def test_who_had_finished_and_adopts_a_newer_plan_is_restarted_when_it_dies() -> None:
    pod = Pod().bring_up()
    life = pod.finish().incarnation
    pod.feed(FactSeen(0, life, Adopted(pod=POD, slot=0, incarnation=life)))
    assert len(of(pod.crash(None, 9), Fork)) == 1


def test_the_end_of_a_trainer_is_repeated_while_the_newest_plan_names_it() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(4, [(0, pod.life())])))
    pod.crash(None, 9)
    pod.say_hello()
    assert told(pod.feed(HeartbeatDue())) == [(FactKind.TRAINER_DOWN, 0, True)]
    pod.feed(PlanReceived(plan(5)))
    assert pod.feed(HeartbeatDue()) == []


def test_without_its_launcher_every_trainer_is_down_and_a_new_launcher_forks_anew() -> None:
    pod = Pod(2).bring_up()
    lives = {pod.life(0), pod.life(1)}
    actions = pod.feed(LauncherLost())
    assert told(actions) == [(FactKind.TRAINER_DOWN, 0, False), (FactKind.TRAINER_DOWN, 1, False)]
    forks = pod.feed(LauncherUp())
    assert len(forks) == 2
    assert not lives & {fork.incarnation for fork in forks}


def test_a_launchers_end_takes_back_the_restart_that_its_trainers_ends_promised() -> None:
    pod = Pod(2).bring_up()
    assert told(pod.feed(SocketEnded(0, pod.life(0)))) == [(FactKind.TRAINER_DOWN, 0, True)]
    actions = pod.feed(LauncherLost())
    assert told(actions) == [(FactKind.TRAINER_DOWN, 0, False), (FactKind.TRAINER_DOWN, 1, False)]
    assert all("launcher of its pod ended" in tell.fact.evidence for tell in of(actions, SendFact))


def test_launchers_that_end_again_and_again_are_counted_as_restarts() -> None:
    pod = Pod().bring_up()
    for _ in range(SETTINGS.max_restarts):
        pod.feed(LauncherLost())
        pod.feed(LauncherUp())
        pod.say_hello()
    pod.feed(LauncherLost())
    assert pod.feed(LauncherUp()) == []
    assert pod.phase() is SlotPhase.GIVEN_UP


def test_a_pod_is_ready_while_every_slot_has_a_trainer() -> None:
    pod = Pod(2)
    assert readiness(pod.state) == "no launcher is connected"
    pod.bring_up()
    assert readiness(pod.state) == ""
    pod.feed(SocketEnded(1, pod.life(1)))
    assert readiness(pod.state) == "slot 1 is ending"
    pod.feed(LeaveRequested("drained"))
    assert readiness(pod.state) == "it leaves"


def test_at_the_jobs_end_trainers_are_stopped_and_the_pod_leaves_when_they_have_ended() -> None:
    pod = Pod(2).bring_up()
    assert pod.feed(Ended("the job is complete")) == [StopTrainers((0, 1))]
    assert pod.feed(Exited(0, pod.life(0), 0, None))[1:] == []
    assert Leave(0) in pod.feed(Exited(1, pod.life(1), 1, None))
    assert pod.feed(Tick()) == []


def test_a_crash_after_the_jobs_end_is_not_restarted() -> None:
    pod = Pod().bring_up()
    pod.feed(Ended("stopped"))
    assert of(pod.crash(1), Fork) == []


def test_a_trainer_that_does_not_stop_is_killed() -> None:
    pod = Pod().bring_up()
    pod.feed(Ended("the job is complete"))
    due_s = next_due_s(pod.state)
    assert due_s is not None
    assert pod.feed(Tick(), due_s - pod.now_s + 0.1) == [Signal(0, pod.life(), 9)]
    assert Leave(0) in pod.crash(None, 9)


def test_a_trainer_that_comes_up_after_the_end_is_stopped() -> None:
    pod = Pod()
    pod.feed(LauncherUp())
    pod.feed(Registered(SETTINGS))
    pod.feed(Ended("told to end", 143))
    assert pod.say_hello() == [StopTrainers((0,))]
    assert Leave(143) in pod.crash(0)


def test_a_pod_without_trainers_leaves_at_once() -> None:
    assert Pod().feed(Ended("told to end", 143)) == [Leave(143)]


def leaving_pod(number: int = 1) -> Pod:
    """A pod whose trainer serves in a plan, told to end a moment ago."""
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(number, [(0, pod.life())])))
    pod.feed(LeaveRequested("SIGTERM"))
    return pod


def idle(pod: Pod, number: int) -> list[Any]:
    status = SlotStatus(index=0, phase="idle", quorum=QuorumId(id=number, nonce="x"))
    return pod.feed(StatusSeen(0, pod.life(), status))


def test_a_pod_that_leaves_serves_until_its_trainer_has_adopted_a_plan_without_it() -> None:
    pod = Pod().bring_up()
    pod.feed(PlanReceived(plan(1, [(0, pod.life())])))
    (tell,) = pod.feed(LeaveRequested("SIGTERM"))
    assert (tell.fact.kind, tell.fact.grace_s) == (FactKind.LEAVING, 30.0)
    assert pod.feed(PlanReceived(plan(2, [(0, pod.life())]))) == [
        Forward(plan(2, [(0, pod.life())]), (0,))
    ]
    assert pod.feed(LeaveAcknowledged()) == []
    assert pod.feed(PlanReceived(plan(3))) == [Forward(plan(3), (0,))]
    assert pod.status(progress=1) == [], "the others still need its vote"
    assert idle(pod, 3) == [Release()]
    assert idle(pod, 3) == []
    assert pod.feed(Ended("handed over")) == [StopTrainers((0,))]
    assert Leave(0) in pod.crash(0)


def test_an_old_word_of_an_idle_trainer_does_not_release_its_pod() -> None:
    pod = Pod().bring_up()
    idle(pod, 1)
    pod.feed(PlanReceived(plan(2, [(0, pod.life())])))
    pod.feed(LeaveRequested("SIGTERM"))
    pod.feed(LeaveAcknowledged())
    assert pod.feed(PlanReceived(plan(3))) == [Forward(plan(3), (0,))]
    assert idle(pod, 3) == [Release()]


def test_a_spare_leaves_once_the_api_has_heard() -> None:
    pod = Pod().bring_up()
    idle(pod, 1)
    pod.feed(PlanReceived(plan(1)))
    assert told(pod.feed(LeaveRequested("SIGTERM"))) == [(FactKind.LEAVING, None, False)]
    assert pod.feed(LeaveAcknowledged()) == [Release()]


def test_a_second_word_changes_nothing() -> None:
    pod = leaving_pod()
    before = pod.state
    assert pod.feed(LeaveRequested("SIGTERM"), 3.0) == []
    assert pod.state == before


def test_that_it_leaves_is_repeated_with_every_heartbeat() -> None:
    pod = leaving_pod()
    assert told(pod.feed(HeartbeatDue())) == [(FactKind.LEAVING, None, False)]


def test_a_trainer_that_ends_in_a_leaving_pod_is_not_restarted() -> None:
    pod = leaving_pod()
    actions = pod.crash(None, 9)
    assert told(actions) == [(FactKind.TRAINER_DOWN, 0, False)]
    assert of(actions, Fork) == []
    pod.feed(LeaveAcknowledged())
    assert pod.feed(PlanReceived(plan(2))) == [Release()]


def test_after_the_deadline_the_pod_ends_as_it_is() -> None:
    pod = leaving_pod()
    pod.wait_until_due(pod.now_s + 29.0)
    assert next_due_s(pod.state) == pod.now_s + 1.0
    assert pod.feed(Tick(), 1.0) == [StopTrainers((0,))]
    assert Leave(143) in pod.crash(0)


def test_without_a_grace_or_before_it_is_registered_a_pod_ends_at_once() -> None:
    pod = Pod()
    pod.feed(LauncherUp())
    assert pod.feed(LeaveRequested("SIGTERM")) == [Leave(143)]
    pod = Pod().bring_up()
    pod.feed(Registered(replace(SETTINGS, handover_s=0.0)))
    assert pod.feed(LeaveRequested("SIGTERM")) == [StopTrainers((0,))]


def test_an_event_that_the_phase_does_not_accept_is_refused() -> None:
    pod = Pod().bring_up()
    before = pod.state
    with pytest.raises(LocalProtocolError, match="Hello while up"):
        pod.feed(Hello(0, pod.life(), 10, {}))
    with pytest.raises(LocalProtocolError, match="slot 7"):
        pod.feed(SocketEnded(7, pod.life()))
    assert pod.state == before


def test_a_step_depends_on_its_arguments_alone() -> None:
    state = replace(initial(POD, 2), launcher_up=True)
    assert step(state, Registered(SETTINGS), 1.0, "n") == step(
        state, Registered(SETTINGS), 1.0, "n"
    )
