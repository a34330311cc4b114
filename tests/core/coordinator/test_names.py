"""Slots and places have names that people know, within the bounds of what is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.worlds.pods import PlayedPods

from mainstay_core.base.bounds import MAX_NAME
from mainstay_core.coordinator.names import named_by_pod, place_name, slot_name
from mainstay_core.coordinator.state import with_pod
from mainstay_core.wire.facts import FactKind

Start = Callable[..., Any]


def called(world: PlayedPods, **names: str) -> None:
    """Give pods, by UID, names of their own."""
    for pod in world.state.pods:
        name = names.get(pod.registration.pod.replace("-", "_"))
        if name is not None:
            known = replace(pod, registration=replace(pod.registration, name=name))
            world.state = with_pod(world.state, known)


def test_a_named_device_of_a_pod_with_a_long_name_can_be_stored(start: Start) -> None:
    world = start(replicas=3, stages=1)
    wrong = world.member(1, 0)
    pod = world.state.pod(wrong.slot.pod)
    long = replace(pod.registration, name="p" * MAX_NAME, domain="n" * MAX_NAME)
    world.state = with_pod(world.state, replace(pod, registration=long))

    world.tell(world.about(FactKind.NAMED, wrong, evidence="why", since=0, step=1))

    (taint,) = world.state.taints
    assert taint.trainer == slot_name(world.state, wrong.slot)
    assert taint.trainer.endswith("p/0")
    assert len(taint.trainer) <= MAX_NAME
    assert len(place_name(world.state, wrong.slot)) <= MAX_NAME
    world.stored()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("one of my-pod-0/0, pod-0/1 is wrong", "one of mine/0, a/1 is wrong"),
        ("(pod-0/0)", "(a/0)"),
        ("pod-1/0 agrees", "pod-0/0 agrees"),
        ("pod-7/0 and pod-0/x", "pod-7/0 and pod-0/x"),
    ],
)
def test_what_a_trainer_tells_of_slots_has_the_names_of_pods(
    new_world: Callable[..., PlayedPods], told: str, expected: str
) -> None:
    world = new_world()
    for uid in ("pod-0", "pod-1", "my-pod-0"):
        world.register(uid)
    called(world, pod_0="a", pod_1="pod-0", my_pod_0="mine")
    assert named_by_pod(world.state, told) == expected
