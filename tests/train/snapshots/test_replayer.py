"""A replay by gradients goes on over the end of its quorum, and comes to the same state."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.core.segments.keys import key_of, record_of
from tests.train.checks.wrong_once import WrongOnce

from mainstay_core.base.ids import PodUid
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.settings import Mode
from mainstay_core.rank.events import LoadFailed, StateLoaded
from mainstay_core.rank.replays.replaying import Replay, UnitReplay
from mainstay_core.wire.reinitialisation import Fork, MadeBlock, MadePosition, Reinitialisation
from mainstay_core.wire.segments import Holder, SegmentKey, SegmentKind, seal
from mainstay_core.wire.votes import Commit
from mainstay_train.checks.checker import Checks
from mainstay_train.snapshots.good_copies import GoodCopies
from mainstay_train.snapshots.replayer import Replayer
from mainstay_train.snapshots.unit_checks import Differing, UnitChecks
from mainstay_train.state.segments import Fetched, SegmentMissing

HOLDER = Holder(pod=PodUid("far"), address="far:1")
NUM_UNITS = 3
SIZE = 16


def digest(*parts: object) -> str:
    return hashlib.md5(repr(parts).encode(), usedforsecurity=False).hexdigest()


def content(key: SegmentKey) -> bytes:
    """The bytes of a good segment: of a state what all steps before have made of it."""
    if key.kind is SegmentKind.GRADIENT:
        return bytes.fromhex(digest("gradient", key.unit, key.version))
    state = bytes.fromhex(digest("seed", key.unit))
    for step in range(key.version):
        gradient = content(key_of(step, key.unit, "gradient"))
        state = bytes.fromhex(digest(state, gradient, step))
    return state


def record(step: int) -> Any:
    units = range(NUM_UNITS)
    gradients = [content(key_of(step, unit, "gradient")) for unit in units]
    return record_of(
        step,
        states=(digest([content(key_of(step, unit)) for unit in units]),),
        gradients=(digest(gradients),),
    )


class Stage:
    """A stage whose units are a few bytes each: its engine and its units in one."""

    def __init__(self) -> None:
        self.states = [b"\0" * SIZE] * NUM_UNITS
        self.reduced = [b"\0" * SIZE] * NUM_UNITS
        self.parameters = [(f"u{unit}",) for unit in range(NUM_UNITS)]
        self.boosts: dict[int, dict[str, float]] = {}
        """By step, those with which it was applied last."""
        self.checks = Checks()
        self.state = SimpleNamespace(refresh=lambda: None, masters_digest=self.masters_digest)

    def size_bytes(self, unit: int, kind: SegmentKind) -> int:
        del unit, kind
        return SIZE

    def digest(self, unit: int, kind: SegmentKind, memory: memoryview) -> str:
        del unit, kind
        return bytes(memory).hex()

    def read(self, unit: int, kind: SegmentKind, memory: memoryview) -> None:
        into = self.reduced if kind is SegmentKind.GRADIENT else self.states
        into[unit] = bytes(memory)

    def masters_digest(self) -> Any:
        return SimpleNamespace(whole=bytes.fromhex(digest(self.states)))

    def gradient_digest(self) -> str:
        return digest(self.reduced)

    def counted_masters(self, masters: str) -> str:
        return masters

    def apply_again(
        self, commit: Commit, rate: float, names: Sequence[str], boosts: Mapping[str, float]
    ) -> None:
        del rate
        self.boosts[commit.step] = dict(boosts)
        for name in names:
            unit = int(name[1:])
            made = digest(self.states[unit], self.reduced[unit], commit.step)
            self.states[unit] = bytes.fromhex(made)


class Stores:
    """The store that has all. Its quorum ends when so many segments were read."""

    def __init__(self) -> None:
        self.num_left = 0
        self.reads: Counter[SegmentKey] = Counter()
        self.interrupt = lambda: None
        self.wrong: SegmentKey | None = None
        """A segment that was written wrong: it has the digest of its bytes."""
        self.doubted: list[Holder] = []

    @property
    def ended(self) -> str:
        return "" if self.num_left > 0 else "another pod is gone"

    def fetch(
        self, key: SegmentKey, holders: Sequence[Holder], into: memoryview, *, own: bool
    ) -> Fetched:
        assert not own
        assert holders == [HOLDER]
        self.reads[key] += 1
        self.num_left -= 1
        if self.num_left == 0:
            raise SegmentMissing("it was interrupted")
        into[:] = bytes(SIZE) if key == self.wrong else content(key)
        return Fetched(cast(Any, SimpleNamespace(digest=seal(key, bytes(into).hex()))), HOLDER)

    def doubt(self, holder: Holder, header: Any) -> bool:
        assert header.digest
        self.doubted.append(holder)
        return True


class NothingTold:
    """Stores that know nothing of units: the whole is compared, as far as it is there."""

    def is_known(self, _record: Any) -> bool:
        return False

    def differing_masters(self, _record: Any, _units: Any) -> list[Differing]:
        return []

    def differing_gradients(self, _record: Any, _units: Any) -> list[Differing]:
        return []

    def why_wrong(self, _record: Any, _key: SegmentKey) -> str:
        return ""

    def prove(self, _record: Any, _key: SegmentKey) -> bool:
        return False


TOLD = cast(UnitChecks, NothingTold())


def plan_replay(version: int, states: Sequence[int]) -> Replay:
    return Replay(
        position=0,
        version=version,
        units=tuple(
            UnitReplay(
                unit=unit,
                name=f"layer.{unit}",
                state=key_of(state, unit),
                state_holders=(HOLDER,),
                gradients=tuple(
                    (key_of(step, unit, "gradient"), (HOLDER,)) for step in range(state, version)
                ),
            )
            for unit, state in enumerate(states)
        ),
        records=tuple(record(step) for step in range(min(states), version)),
        last=record(version - 1),
        next=record(version),
    )


def make_replayer(stage: Stage, stores: Stores) -> Replayer:
    copies = GoodCopies(cast(Any, stores), PodUid("own"), lambda: stores.ended)
    any_stage = cast(Any, stage)
    return Replayer(any_stage, any_stage, copies, lambda _: 0.1, lineage=0, position=0)


def expected(version: int) -> list[bytes]:
    return [content(key_of(version, unit)) for unit in range(NUM_UNITS)]


def test_a_wrong_bit_in_the_cast_of_states_that_were_read_is_repaired() -> None:
    findings: list[Finding] = []
    stage, stores = Stage(), Stores()
    masters, compute = torch.arange(8.0), torch.zeros(8, dtype=torch.bfloat16)
    stage.checks = Checks(Mode.FULL, tell=findings.append)
    stage.state.refresh = lambda: compute.copy_(masters)
    stores.num_left = 1000

    with WrongOnce("aten.copy_", dtype=torch.bfloat16) as wrong:
        assert isinstance(
            make_replayer(stage, stores).run(plan_replay(4, [2] * NUM_UNITS), TOLD), StateLoaded
        )

    assert wrong.was_wrong
    assert torch.equal(compute, masters.bfloat16())
    assert len(findings) == 1


def test_what_was_made_anew_learns_as_fast_when_its_steps_are_applied_again() -> None:
    """From its fork on, and as long as the boost lasts."""
    block = MadeBlock(block="layer", sources=())
    made = Reinitialisation(positions=(MadePosition(stage=0, blocks=(block,)),), reason="so")
    fork = Fork(version=3, chain="c", made=made, lr_boost=1.25, boost_steps=2)
    stage, stores = Stage(), Stores()
    stores.num_left = 1000
    replay = replace(plan_replay(6, [2] * NUM_UNITS), history=(fork,))

    assert isinstance(make_replayer(stage, stores).run(replay, TOLD), StateLoaded)
    assert stage.boosts == {2: {}, 3: {"layer": 1.25}, 4: {"layer": 1.25}, 5: {"layer": 1.0}}


@pytest.mark.parametrize("seed", range(40))
def test_a_replay_goes_on_where_it_was_when_something_else_was_lost(seed: int) -> None:
    rng = random.Random(seed)
    stage, stores = Stage(), Stores()
    states = [rng.randint(2, 5) for _ in range(NUM_UNITS)]
    version, newest = rng.randint(5, 9), max(states)
    replayer = make_replayer(stage, stores)
    num_ends = 0
    while True:
        stores.num_left = rng.randint(1, 9)
        outcome = replayer.run(replay := plan_replay(version, states), TOLD)
        if isinstance(outcome, StateLoaded):
            break
        num_ends += 1
        # Another pod had the newest copy of a unit: an older one counts now.
        states[0] -= rng.random() < 0.2 and states[0] > 1
        assert replayer.can_go_on(cast(Any, stage), 0, plan_replay(version, states))

    assert stage.states == expected(version)
    assert outcome.digest == record(version).states[0]
    # Of each quorum at most the segment that was on its way is read again, and its step's others.
    assert (
        stores.reads.total()
        <= len({key for u in replay.units for key in (u.state, *(g for g, _ in u.gradients))})
        + NUM_UNITS * num_ends
    )
    told = [made.commit.step for made in outcome.replayed]
    assert told == [*range(told[0], version)], "each step is told once"
    assert told[0] <= newest


def test_what_another_lineage_or_a_later_version_left_is_not_gone_on_with() -> None:
    stage, stores = Stage(), Stores()
    replayer = make_replayer(stage, stores)
    stores.num_left = 2 * NUM_UNITS + 2  # in the middle of the step at version 3
    assert isinstance(replayer.run(plan_replay(6, [2, 2, 2]), TOLD), LoadFailed)

    anywhere = cast(Any, stage)
    assert replayer.can_go_on(anywhere, 0, plan_replay(6, [2, 2, 2]))
    assert replayer.can_go_on(anywhere, 0, plan_replay(3, [2, 2, 3]))
    assert not replayer.can_go_on(anywhere, 1, plan_replay(6, [2, 2, 2]))
    assert not replayer.can_go_on(cast(Any, Stage()), 0, plan_replay(6, [2, 2, 2]))
    assert not replayer.can_go_on(anywhere, 0, replace(plan_replay(6, [2, 2, 2]), position=1))
    assert not replayer.can_go_on(anywhere, 0, plan_replay(2, [1, 1, 1]))
    assert not replayer.can_go_on(anywhere, 0, plan_replay(6, [2, 2, 4]))


def test_a_copy_that_was_read_for_a_quorum_before_is_blamed_like_any_other() -> None:
    stage, stores = Stage(), Stores()
    stores.wrong = key_of(3, 1)
    replayer = make_replayer(stage, stores)
    stores.num_left = NUM_UNITS + 1
    replay = plan_replay(5, [3, 3, 3])
    assert isinstance(replayer.run(replay, TOLD), LoadFailed)
    assert replayer.copies.bad == []

    stores.num_left = 100
    outcome = replayer.run(replay, TOLD)

    assert isinstance(outcome, LoadFailed)
    assert "the masters have digest" in outcome.why
    assert key_of(3, 1) in [bad.key for bad in replayer.copies.bad]
    assert stores.doubted == [HOLDER] * len(replayer.copies.bad), "each covers nothing any more"
    assert not replayer.can_go_on(cast(Any, stage), 0, replay)
