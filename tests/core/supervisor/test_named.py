"""What a supervisor remembers of devices that its trainers have named as wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.core.supervisor.test_machine import POD, SETTINGS, Pod

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.supervisor.events import Exited, FactSeen, Registered, SendFact, SocketEnded
from mainstay_core.supervisor.state import MAX_NAMED
from mainstay_core.wire.facts import Named


def named(pod: Pod, device: Slot | None, *, since: int, step: int) -> Named:
    return Named(
        pod=POD, slot=0, incarnation=pod.life(), since=since, step=step, device=device, evidence="w"
    )


def told(actions: list[Any]) -> list[Any]:
    return [action.fact for action in actions if isinstance(action, SendFact)]


def test_who_was_named_is_told_to_an_api_that_lost_it_whatever_became_of_the_teller() -> None:
    pod = Pod().bring_up()
    device = Slot(pod=PodUid("pod-9"), index=0)
    first = named(pod, device, since=5, step=7)
    assert first in told(pod.feed(FactSeen(0, pod.life(), first)))
    again = named(pod, device, since=6, step=8)
    pod.feed(FactSeen(0, pod.life(), again))
    own = named(pod, None, since=3, step=8)
    pod.feed(FactSeen(0, pod.life(), own))
    pod.feed(SocketEnded(0, pod.life()))

    repeated = [fact for fact in told(pod.feed(Registered(SETTINGS))) if isinstance(fact, Named)]

    assert repeated == [replace(again, since=5), own]


def test_a_trainer_whose_process_was_reaped_first_has_named_a_device_all_the_same() -> None:
    pod = Pod().bring_up()
    fact, life = named(pod, None, since=3, step=8), pod.life()
    pod.feed(Exited(0, life, 1, None))
    assert fact in told(pod.feed(FactSeen(0, life, fact)))
    assert pod.state.named == (fact,)


def test_a_pod_remembers_the_devices_that_were_named_last() -> None:
    pod = Pod().bring_up()
    for number in range(MAX_NAMED + 3):
        device = Slot(pod=PodUid(f"other-{number}"), index=0)
        pod.feed(FactSeen(0, pod.life(), named(pod, device, since=1, step=2)))
    assert len(pod.state.named) == MAX_NAMED
    assert pod.state.named[-1].named.pod == f"other-{MAX_NAMED + 2}"
