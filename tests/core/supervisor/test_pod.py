"""A pod offers its newest plan to others unless its trainer has met them in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.ids import Incarnation, JobUid, PodUid
from mainstay_core.supervisor.conversation import ApiPort
from mainstay_core.supervisor.events import FactSeen, Forked, Hello, LauncherUp, PlanReceived
from mainstay_core.supervisor.events import Registered as JobRegistered
from mainstay_core.supervisor.pod import Pod
from mainstay_core.supervisor.state import SupervisorLimits
from mainstay_core.wire.facts import Adopted
from mainstay_core.wire.plan import Plan

POD = PodUid("pod-0")
PLAN = make_plan({0: ("a.1",)}, quorum=4)


class Flag:
    def set(self) -> None:
        """Nobody waits."""

    def clear(self) -> None:
        """Nobody waits."""


class Port:
    """A way to an api that is never asked."""

    def flag(self) -> Flag:
        return Flag()

    def lock(self) -> None:
        """Nobody registers."""


class Offering(Pod):
    """A pod whose offers are counted, and whose timers are run by the test."""

    def __init__(self) -> None:
        super().__init__(JobUid("job"), POD, 1, cast(ApiPort, Port()))
        self.num_offers = 0
        self.timers: list[Callable[[], None]] = []

    def now_s(self) -> float:
        return 1000.0

    def draw_nonce(self) -> str:
        return "n"

    def call_later(self, delay_s: float, call: Callable[[Plan], None], plan: Plan) -> None:
        del delay_s
        self.timers.append(lambda: call(plan))

    def offer(self) -> None:
        self.num_offers += 1

    def _nothing(self, *_: Any) -> Any:
        """What these do changes no offer."""

    wake_at = spawn = hold = offer_to = send_trainers = send_launcher = leave = _nothing
    registration = welcomed = log = _nothing

    async def wait_quiet(self) -> None:
        """Nobody leaves."""


def adopts(pod: Offering, plan: Plan) -> None:
    life = pod.state.slots[0].incarnation or Incarnation("")
    fact = Adopted(pod=POD, slot=0, incarnation=life, quorum=plan.quorum)
    pod.feed(FactSeen(0, life, fact))


def with_trainer() -> Offering:
    pod = Offering()
    pod.feed(LauncherUp())
    pod.feed(JobRegistered(SupervisorLimits()))
    life = pod.state.slots[0].incarnation or Incarnation("")
    pod.feed(Forked(0, life, 10))
    pod.feed(Hello(0, life, 10, {}))
    return pod


@pytest.mark.parametrize(("has_met", "num_offers"), [(False, 1), (True, 0)])
def test_a_plan_is_offered_unless_its_members_have_met(has_met: bool, num_offers: int) -> None:
    pod = with_trainer()
    pod.feed(PlanReceived(PLAN))
    if has_met:
        adopts(pod, PLAN)
    for timer in pod.timers:
        timer()
    assert pod.num_offers == num_offers


def test_that_a_former_plans_members_have_met_does_not_count() -> None:
    pod = with_trainer()
    pod.feed(PlanReceived(PLAN))
    adopts(pod, PLAN)
    pod.feed(PlanReceived(make_plan({0: ("a.1",)}, quorum=5)))
    for timer in pod.timers:
        timer()
    assert pod.num_offers == 1


@pytest.mark.parametrize(("has_met", "num_offers"), [(False, 1), (True, 0)])
def test_the_end_of_the_stream_has_a_plan_offered_that_may_be_here_alone(
    has_met: bool, num_offers: int
) -> None:
    pod = with_trainer()
    pod.stream_ended()
    assert pod.num_offers == 0, "there is no plan"
    pod.feed(PlanReceived(PLAN))
    if has_met:
        adopts(pod, PLAN)
    pod.stream_ended()
    assert pod.num_offers == num_offers


@pytest.mark.parametrize(("has_met", "num_offers"), [(False, 1), (True, 0)])
def test_a_plan_that_the_stream_has_not_brought_is_offered_at_once_if_it_is_news(
    has_met: bool, num_offers: int
) -> None:
    pod = with_trainer()
    pod.conversation.stands = True
    pod.feed(PlanReceived(PLAN))
    pod.learn_passed(PLAN)
    pod.learn_passed(make_plan({0: ("a.1",)}, quorum=3))
    assert pod.num_offers == 0, "it was no news"
    if has_met:
        adopts(pod, make_plan({0: ("a.1",)}, quorum=5))
    pod.learn_passed(make_plan({0: ("a.1",)}, quorum=5))
    assert pod.num_offers == num_offers
