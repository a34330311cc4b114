"""Slots that may be one device have one voice, so that a broken device never confirms itself."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from mainstay_core.base.ids import Hardware, PodUid, Slot
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import Account, Ruling, Told, rule

RIGHT = (Account(weights=("right",)),)
WRONG = (Account(weights=("wrong",)),)


@dataclass(frozen=True)
class Played:
    """A slot, and what the plan says that it runs on."""

    pod: str
    node: str = ""
    accelerator: str = ""

    @property
    def slot(self) -> Slot:
        return Slot(pod=PodUid(self.pod), index=0)

    def tells(self, quorum: int, attempt: int, telling: tuple[Account, ...]) -> Told:
        return Told(
            quorum=quorum,
            attempt=attempt,
            replica=0,
            cells=(self.slot,),
            telling=telling,
            hardware=(Hardware(node=self.node, accelerator=self.accelerator),),
        )


def named(ruling: Ruling) -> dict[str, Verdict]:
    return {d.slot.pod: d.verdict for d in ruling.deviations}


GOOD = Played("good", "node-0")


def replaced(broken: Played, again: Played, second: tuple[Account, ...] = WRONG) -> Ruling:
    """A pod with a wrong device is lost, and another one computes the type after it."""
    return rule(
        [
            GOOD.tells(1, 0, RIGHT),
            broken.tells(1, 0, WRONG),
            GOOD.tells(2, 0, RIGHT),
            again.tells(3, 0, second),
        ]
    )


def test_a_pod_made_in_place_of_a_lost_one_does_not_confirm_it() -> None:
    broken, again = Played("broken", "node-1"), Played("again", "node-1")
    ruling = replaced(broken, again)
    assert (ruling.agreed, named(ruling)) == (None, {})
    assert ruling.doubted == (again.slot, broken.slot, GOOD.slot)


def test_a_pod_made_in_place_of_a_lost_one_takes_its_word_back() -> None:
    ruling = replaced(Played("broken", "node-1"), Played("again", "node-1"), RIGHT)
    assert (ruling.agreed, named(ruling)) == (RIGHT, {"broken": Verdict.TRANSIENT})


@pytest.mark.parametrize(
    "again",
    [
        Played("again", "node-2", "gpu-9"),
        Played("again", "node-1", "gpu-9"),
        Played("again", "node-2"),
    ],
)
def test_another_device_judges(again: Played) -> None:
    ruling = replaced(Played("broken", "node-1", "gpu-1"), again, RIGHT)
    assert (ruling.agreed, named(ruling)) == (RIGHT, {"broken": Verdict.TRANSIENT})
    assert replaced(Played("broken", "node-1", "gpu-1"), again).agreed == WRONG


def asked_twice(*told: tuple[Played, tuple[Account, ...]]) -> Ruling:
    return rule([who.tells(1, attempt, telling) for attempt in (0, 1) for who, telling in told])


def test_pods_that_share_a_gpu_have_one_voice() -> None:
    shared = [Played(name, "node-1", "gpu-7") for name in "ab"]
    good = [Played(name, "node-1", f"gpu-{name}") for name in "cd"]
    wrong = [(who, WRONG) for who in shared]
    assert asked_twice(*wrong, (good[0], RIGHT)).agreed is None
    ruling = asked_twice(*wrong, *((who, RIGHT) for who in good))
    assert (ruling.agreed, set(named(ruling))) == (RIGHT, {"a", "b"})


def test_pods_that_serve_on_one_node_at_a_time_have_a_voice_each() -> None:
    one, two, three = (Played(name, "node-0") for name in "abc")
    ruling = asked_twice((one, RIGHT), (two, WRONG), (three, RIGHT))
    assert named(ruling) == {"b": Verdict.DETERMINISTIC}


def test_where_all_share_one_accelerator_each_slot_has_a_voice() -> None:
    one, two, three = (Played(name, "", "gpu-0") for name in "abc")
    ruling = asked_twice((one, RIGHT), (two, WRONG), (three, RIGHT))
    assert named(ruling) == {"b": Verdict.DETERMINISTIC}


@pytest.mark.parametrize("seed", range(100))
def test_no_slot_of_a_right_device_is_ever_named(seed: int) -> None:
    """Pods come and go on a few nodes, each with one device; that of one node is always wrong."""
    rng = random.Random(seed)
    says_uuid, num_nodes = rng.random() < 0.5, rng.randint(2, 4)
    bad, told, num_pods = rng.randrange(num_nodes), [], 0
    lives: dict[int, Played] = {}
    for quorum in range(8):
        for node in rng.sample(range(num_nodes), rng.randint(1, min(2, num_nodes))):
            if node not in lives or rng.random() < 0.5:
                num_pods += 1
                uuid = f"gpu-{node}" if says_uuid else ""
                lives[node] = Played(f"p{num_pods}", f"n{node}", uuid)
            told.append(lives[node].tells(quorum, 0, WRONG if node == bad else RIGHT))
        ruling = rule(told)
        right = {t.cells[0].pod for t in told if t.telling == RIGHT}
        assert not right & set(named(ruling))


def test_on_one_node_a_third_pod_judges_two_that_serve_beside_it() -> None:
    """Who is displaced by the judge stays a follower: a node gives no device to two at a time."""
    wrong, right, judge = (Played(name, "node-0") for name in "abc")
    told = [who.tells(1, n, t) for n in (0, 1) for who, t in ((wrong, WRONG), (right, RIGHT))]
    told += [wrong.tells(2, 0, WRONG), judge.tells(2, 0, RIGHT)]
    assert rule(told).agreed is None, "it may have the device of one that is gone"
    ruling = rule(told, members=[wrong.slot, right.slot, judge.slot])
    assert (ruling.agreed, named(ruling)) == (RIGHT, {"a": Verdict.DETERMINISTIC})


def test_uuids_join_also_slots_that_serve_at_a_time() -> None:
    shared = [Played(name, "node-0", "gpu-0") for name in "ab"]
    good = Played("c", "node-0", "gpu-1")
    told = [who.tells(1, n, WRONG) for n in (0, 1) for who in shared]
    told += [good.tells(1, n, RIGHT) for n in (0, 1)]
    slots = [who.slot for who in (*shared, good)]
    assert rule(told, members=slots).agreed is None


@pytest.mark.parametrize("seed", range(60))
def test_no_right_device_is_named_on_one_node_however_often_the_pods_of_a_wrong_one_are_made_anew(
    seed: int,
) -> None:
    """Nothing tells which of the node's devices a pod has that is gone: it has no voice then."""
    rng = random.Random(seed)
    num_devices, told, num_pods = rng.randint(2, 3), [], 0
    lives: dict[int, Played] = {}
    for quorum in range(8):
        for device in range(num_devices):
            if device not in lives or rng.random() < 0.4:
                num_pods += 1
                lives[device] = Played(f"p{num_pods}", "n0")
        told += [
            lives[device].tells(quorum, 0, RIGHT if device else WRONG)
            for device in rng.sample(range(num_devices), 2)
        ]
        ruling = rule(told, members=[life.slot for life in lives.values()])
        right = {t.cells[0].pod for t in told if t.telling == RIGHT}
        assert not right & set(named(ruling))


def test_a_third_pod_of_a_node_judges_though_the_pod_of_a_wrong_device_was_made_anew() -> None:
    gone, again, right, judge = (Played(name, "node-0") for name in "abcd")
    told = [who.tells(1, n, t) for n in (0, 1) for who, t in ((gone, WRONG), (right, RIGHT))]
    told += [again.tells(2, 0, WRONG), judge.tells(2, 0, RIGHT)]
    ruling = rule(told, members=[again.slot, right.slot, judge.slot])
    assert (ruling.agreed, set(named(ruling))) == (RIGHT, {"a", "b"})
