"""A device that was named leaves and its steps are told, whenever the store loses the job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.worlds.pods import PlayedPods

from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import PlanReported, StoreReopened, Tick
from mainstay_core.coordinator.intake import facts as intake_facts
from mainstay_core.coordinator.intake import store_recovery
from mainstay_core.coordinator.intake.store_recovery import is_behind
from mainstay_core.coordinator.state import CoordinatorState, is_living
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Fact, FactKind
from mainstay_core.wire.plan import Member, Plan

Start = Callable[..., Any]
SINCE, NAMED_IN, SEEDS, NUM_STEPS = 3, 5, 120, 200


class Run:
    """A job of which a device is named, whose store loses it, and whose members train on."""

    def __init__(self, world: PlayedPods, rng: random.Random, *, repeats: bool = True) -> None:
        self.world, self._rng, self._repeats = world, rng, repeats
        self.step = NAMED_IN
        self.wrong = rng.choice(world.plan.members)
        self.served_until = NAMED_IN
        """First step in which the device took no part any more, as far as it has trained."""
        self._named: dict[PodUid, list[Fact]] = {}
        """What supervisors remember that their trainers have told."""
        self._former: list[CoordinatorState] = []
        self._unseen: Plan | None = None
        """The plan before the newest one, if no supervisor has that yet."""
        self._num_new = 0

    def name(self) -> None:
        """The device tells of itself, and so does the first other member, in either order."""
        world, members = self.world, self.world.plan.members
        own = world.about(FactKind.NAMED, self.wrong, evidence="why", since=SINCE, step=NAMED_IN)
        told = [own]
        others = [m for m in members if m.slot != self.wrong.slot]
        if others:
            fields = {"since": SINCE, "step": NAMED_IN, "device": self.wrong.slot}
            told.append(world.about(FactKind.NAMED, others[0], evidence="why", **fields))
        self._rng.shuffle(told)
        for fact in told:
            self._named.setdefault(fact.pod, []).append(fact)
            before = world.plan
            world.tell(fact)
            if world.plan is not before:
                self._unseen = before

    def train(self) -> None:
        """All go on in the newest plan, and commit a step."""
        world, plan = self.world, self.world.plan
        self._unseen = None
        if self.step >= NUM_STEPS or world.state.phase is JobPhase.WAITING:
            return
        if plan.voided and plan.voided[-1].quorum == plan.quorum.id:
            self.step = min(self.step, plan.voided[-1].version)
        world.settle(self.step)
        plan = world.plan
        world.commit(self.step)
        self.step += 1
        if self.wrong.slot in {m.slot for m in plan.members}:
            self.served_until = self.step

    def come(self) -> None:
        """A new pod is up."""
        self._num_new += 1
        pod = f"new-{self._num_new}"
        self.world.register(pod)
        self.world.up(pod)

    def lose_pod(self) -> None:
        """A pod is gone without which each stage still has a member, other than the device."""
        members = self.world.plan.members
        able = [m for m in members if m.slot != self.wrong.slot and self._is_spare(m)]
        if able:
            pod = self._rng.choice(able).slot.pod
            self._named.pop(pod, None)
            self.world.pod_gone(pod)

    def _is_spare(self, member: Member) -> bool:
        twins = [m for m in self.world.plan.members if m.rank.position == member.rank.position]
        return any(not m.joining and m.slot not in (member.slot, self.wrong.slot) for m in twins)

    def restart_supervisor(self) -> None:
        """The supervisor of the device's pod ends and comes back: it has forgotten all."""
        world, pod = self.world, self.wrong.slot.pod
        known = world.state.pod(pod)
        if known is None or known.gone or known.placeholder:
            return
        if not any(self._is_spare(m) for m in world.plan.members):
            return  # the device is the last of its stage: nobody would have the state
        self._named.pop(pod, None)
        world.register(pod, pid=known.registration.pid + 1)
        world.up(pod)

    def lose_store(self) -> None:
        """The store is empty, or back with what it had a while ago; pods tell all again."""
        world, state = self.world, self.world.state
        held = self._unseen or world.plan
        lives = {
            s.slot: s.incarnation
            for s in state.slots
            if s.incarnation is not None and not state.pod(s.slot.pod).gone
        }
        if self._former and self._rng.random() < 0.5:
            world.state = self._rng.choice(self._former)
            world.send(StoreReopened(server=f"s{self._rng.random()}"))
        else:
            world.state = machine.initial(state.config, world.now_s)
        self._former, self._unseen = [], None
        teller = next(m.slot.pod for m in held.members if m.slot in lives)
        if is_behind(world.state, held.quorum):
            world.send(PlanReported(pod=teller, plan=held, step=self.step))
        pods = [*dict.fromkeys(slot.pod for slot in lives)]
        self._rng.shuffle(pods)
        for pod in pods:
            world.register(pod, pid=state.pod(pod).registration.pid)
            ups = [
                world.fact(FactKind.TRAINER_UP, pod, slot.index, incarnation=life)
                for slot, life in lives.items()
                if slot.pod == pod
            ]
            named = self._named.get(pod, []) if self._repeats else []
            world.tell(*named, *ups)
        gone = {m.slot.pod for m in world.plan.members if m.slot not in lives}
        world.send(Tick(heard=world.state.unheard))
        for pod in sorted(gone):
            world.pod_gone(pod)

    def remember(self) -> None:
        """Keep what the store has now, to fall back to."""
        self._former = [*self._former[-3:], self.world.state]


def play(start: Start, seed: int, *, repeats: bool = True) -> None:
    rng = random.Random(seed)
    stages, replicas = rng.choice(((1, 1), (1, 2), (2, 1), (2, 3), (1, 3)))
    world = start(
        replicas=replicas,
        stages=stages,
        steps=NUM_STEPS,
        spares=rng.choice((0, 0, 1)),
        goes_back=rng.random() < 0.4,
        restart_grace_s=0.0,
    )
    for step in range(NAMED_IN):
        world.commit(step)
    run = Run(world, rng, repeats=repeats)
    run.remember()
    run.name()
    for _ in range(rng.randint(1, 8)):
        run.remember()
        ops = (run.train, run.come, run.lose_pod, run.lose_pod, run.restart_supervisor)
        rng.choice((*ops, run.lose_store, run.lose_store))()
    for _ in range(2 + len(world.state.shape.positions)):
        run.come()
    for _ in range(8):
        run.train()
    members = [m for m in world.plan.members if is_living(world.state, m)]
    assert run.wrong.slot not in {m.slot for m in members}, "it serves at the end"
    told = [t for t in world.state.taints if t.slot == run.wrong.slot]
    assert told, "its steps are not told"
    assert min(t.since for t in told) <= SINCE
    counting = [t for t in told if t.counts]
    if world.state.config.goes_back:
        assert not counting, "the job has not gone back"
        assert world.plan.voided
    assert all(t.until is not None and t.until >= run.served_until for t in counting)


def play_all(start: Start, *, repeats: bool = True) -> None:
    for seed in range(SEEDS):
        try:
            play(start, seed, repeats=repeats)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_it_leaves_and_its_steps_are_told_whenever_the_store_loses_the_job(start: Start) -> None:
    play_all(start)


@contextmanager
def broken(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Have one rule be left out meanwhile."""
    before = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


MUTANTS: dict[str, tuple[Any, str, object]] = {
    "plans tell of no taints": (store_recovery, "recovered", lambda state, _: state),
    "a named device registers as a spare": (
        intake_facts,
        "with_reason",
        lambda _state, pod, _now_s: pod,
    ),
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_each_rule_is_needed(start: Start, name: str) -> None:
    with broken(*MUTANTS[name]), pytest.raises(AssertionError):
        play_all(start)


def test_without_what_supervisors_remember_a_naming_is_lost(start: Start) -> None:
    with pytest.raises(AssertionError):
        play_all(start, repeats=False)
