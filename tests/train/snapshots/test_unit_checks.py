"""What a replayed step makes of a unit is compared at that step, while other units are frozen."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.core.plans import make_plan
from tests.train.snapshots.test_boundary_replayer import HOLDERS, STAGE, Case
from tests.train.snapshots.test_keeper import keeper_of
from tests.train.snapshots.trained_chain import LENGTH, RATE, STEPS, train

from mainstay_core.base.ids import PodUid
from mainstay_core.rank.events import LoadFailed, StateLoaded
from mainstay_core.rank.replays.boundaries import Relay
from mainstay_core.rank.replays.replaying import Replay, UnitReplay
from mainstay_core.wire.segments import BadSegment, SegmentKind, boundary_key, seal
from mainstay_core.wire.unit_digests import UnitDigests, seal_digests, why_void
from mainstay_core.wire.votes import Commit, CommitRecord
from mainstay_train.compute.engine import Engine
from mainstay_train.snapshots import boundary_replayer
from mainstay_train.snapshots.good_copies import GoodCopies
from mainstay_train.snapshots.replayer import Replayer
from mainstay_train.snapshots.sent_log import flow_digest
from mainstay_train.snapshots.unit_checks import holders_of

KINDS = [("moe", "bfloat16"), ("moe", "float32"), ("llama", "bfloat16"), ("llama", "float32")]
STATE, GRADIENT, COMPUTE = SegmentKind.STATE, SegmentKind.GRADIENT, SegmentKind.COMPUTE
NEAR, FAR = (holder.pod for holder in HOLDERS)
trained_once = cache(train)


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(boundary_replayer, "logged_again", lambda *_: (1, 3))
    model, dtype = request.param
    return Case(trained_once(model, dtype), model, dtype)


def turn(unit: int) -> int:
    """The version at which a window copies a unit: the first alone, most of them last."""
    return 0 if unit == 0 else LENGTH - 1


def by_gradients(case: Case) -> Replay:
    """A replay of which the first unit alone is applied until the window's last version."""
    units = []
    for unit, name in enumerate(case.units.names):
        first = turn(unit)
        state = case.load(unit, STATE, first)
        gradients = []
        for step in range(first, STEPS):
            key = replace(state.key, kind=GRADIENT, version=step)
            data = case.trained.unit_gradients[STAGE][step][unit]
            digest = case.units.digest(unit, GRADIENT, memoryview(data))
            case.shelf.put(key, bytes(data), seal(key, digest))
            gradients.append((key, HOLDERS))
        units.append(
            UnitReplay(
                unit=unit,
                name=name,
                state=state.key,
                state_holders=HOLDERS,
                gradients=tuple(gradients),
            )
        )
    return Replay(
        position=STAGE,
        version=STEPS,
        units=tuple(units),
        records=tuple(case.record(step) for step in range(STEPS)),
        last=case.record(STEPS - 1),
        next=case.record(STEPS),
    )


def run(case: Case, replay: Replay) -> StateLoaded | LoadFailed:
    replayer = Replayer(
        case.engine, case.units, case.copies, lambda _: RATE, lineage=0, position=STAGE
    )
    return replayer.run(replay, case.told())


def is_right(case: Case, outcome: StateLoaded | LoadFailed) -> bool:
    return isinstance(outcome, StateLoaded) and outcome.digest == case.record(STEPS).states[STAGE]


def bad(case: Case) -> list[BadSegment]:
    return case.copies.bad


def in_a_moment(case: Case, unit: int) -> dict[str, int]:
    """A bit of a moment in a unit's state that no rounding hides: the highest of an exponent."""
    tensors = [p for p in case.units._pieces[STATE][unit] if p.id.startswith("exp_avg:")]
    return {"byte": tensors[0].offset + 3, "bit": 6}


def test_units_are_those_that_votes_told(case: Case) -> None:
    outcome = run(case, by_gradients(case))

    assert is_right(case, outcome)
    assert bad(case) == []
    assert set(case.knows.here) == set(range(STEPS + 1)), "this pod keeps them, too"
    assert {address for address, _ in case.knows.asked} == {HOLDERS[0].address}


@pytest.mark.parametrize("kind", [STATE, GRADIENT])
def test_a_copy_that_was_written_wrong_is_named_and_the_next_one_is_used(
    case: Case, kind: SegmentKind
) -> None:
    """One bit, while most units are frozen; the copy has the digest of its bytes."""
    replay = by_gradients(case)
    key = replay.units[0].state if kind is STATE else replay.units[0].gradients[1][0]
    case.shelf.write_wrong(key, case.digest(key), NEAR)

    outcome = run(case, replay)

    assert is_right(case, outcome)
    assert bad(case) == [BadSegment(key=key, pod=NEAR)]
    assert case.shelf.doubted == [NEAR]


@pytest.mark.parametrize("kind", [STATE, GRADIENT])
def test_without_a_copy_that_is_right_the_replay_ends_where_it_reads_it(
    case: Case, kind: SegmentKind
) -> None:
    replay = by_gradients(case)
    key = replay.units[0].state if kind is STATE else replay.units[0].gradients[1][0]
    case.shelf.write_wrong(key, case.digest(key), NEAR, FAR)

    outcome = run(case, replay)

    assert isinstance(outcome, LoadFailed)
    assert f"the copy of {key} on {NEAR} is wrong as it was written" in outcome.why
    assert f"the copy of {key} on {FAR} is wrong as it was written" in outcome.why
    assert f"unit {case.units.names[0]} " in outcome.why
    assert bad(case) == [BadSegment(key=key, pod=pod) for pod in (NEAR, FAR)]


def test_a_wrong_moment_is_found_by_the_step_that_uses_it(case: Case) -> None:
    """Votes do not tell of moments: the first step shows it, and that unit's copy alone is bad."""
    replay = by_gradients(case)
    key = replay.units[1].state
    case.shelf.write_wrong(key, case.digest(key), NEAR, **in_a_moment(case, 1))

    outcome = run(case, replay)

    assert isinstance(outcome, LoadFailed)
    assert f"replayed step {LENGTH - 1}: the masters of unit {case.units.names[1]} " in outcome.why
    assert f"made of the {key} on {NEAR}" in outcome.why
    assert bad(case) == [BadSegment(key=key, pod=NEAR)]
    assert case.copies.differs


def computes_with_masters(case: Case) -> bool:
    block = case.engine.state.blocks[0]
    return block.compute is block.masters


def log_wrong(case: Case, step: int) -> None:
    """Put a wrong bit into the near copy of a step's first activation."""
    key = boundary_key(0, STAGE - 1, SegmentKind.ACTIVATION, step, 0, 0)

    def digest(memory: memoryview) -> str:
        tensor = case.trained.logs[STAGE - 1].kept[step, "F", 0, 0].clone()
        tensor.view(-1).view(dtype=torch.uint8).numpy()[:] = memory
        return flow_digest(key, tensor)

    case.shelf.write_wrong(key, digest, NEAR)


# Replays from boundary logs ---------------------------------------------------------------


def test_a_step_is_compared_while_units_are_frozen(case: Case) -> None:
    """What a frozen unit computes with is wrong: its digest does not tell, the gradient does."""
    replay = case.replay()
    key = next(load.key for load in replay.steps[0].loads if load.key.kind is COMPUTE)
    case.shelf.write_wrong(key, case.digest(key), NEAR, byte=1)

    outcome = case.run(replay)

    if computes_with_masters(case):
        # In fp32 it computes with the masters, which votes told: the next copy is used.
        assert is_right(case, outcome)
        assert bad(case) == [BadSegment(key=key, pod=NEAR)]
        return
    assert isinstance(outcome, LoadFailed)
    assert "replayed step 0: the reduced gradient of unit " in outcome.why
    assert NEAR in outcome.why
    assert key in {b.key for b in bad(case)}
    assert {(b.key.version, b.pod) for b in bad(case)} == {(0, NEAR)}
    assert STATE not in {b.key.kind for b in bad(case)}, "their masters are as votes told"


def test_a_message_that_was_logged_wrong_is_found_by_its_step(case: Case) -> None:
    replay = case.replay()
    log_wrong(case, 0)

    outcome = case.run(replay)

    assert isinstance(outcome, LoadFailed)
    assert "replayed step 0: the reduced gradient of unit " in outcome.why
    assert BadSegment(key=case.first_input, pod=NEAR) in bad(case)
    if computes_with_masters(case):
        assert COMPUTE not in {b.key.kind for b in bad(case)}, "votes told all of these"


def test_where_only_a_neighbour_can_be_wrong_the_next_replay_is_another_one(case: Case) -> None:
    """The second time: without a void copy the same replay would be tried for ever."""
    ends = ((STAGE - 1, SegmentKind.ACTIVATION), (STAGE + 1, SegmentKind.INPUT_GRADIENT))
    relays = (Relay(position=at, kind=kind, holders=(HOLDERS[0],) * 4) for at, kind in ends)
    replay = replace(case.replay(), relays=tuple(relays))
    last = max(load.key.version for step in replay.steps for load in step.loads)
    log_wrong(case, last)  # no unit is frozen, and of moments votes have told nothing

    outcome = case.run(replay)

    assert isinstance(outcome, LoadFailed)
    assert f"replayed step {last}: the reduced gradient of unit " in outcome.why
    assert {b.key.kind for b in bad(case)} == {STATE}


def test_a_gradient_that_votes_told_is_not_blamed_for_what_they_did_not_tell(case: Case) -> None:
    """No store knows the units of the steps after the first."""
    replay = by_gradients(case)
    for told in case.knows.there.values():
        for step in range(1, STEPS + 1):
            del told[step]
    key = replay.units[0].gradients[1][0]
    case.shelf.write_wrong(key, case.digest(key), NEAR, byte=3, bit=7)  # a sign

    outcome = run(case, replay)

    assert isinstance(outcome, LoadFailed)
    assert BadSegment(key=key, pod=NEAR) in bad(case)
    assert replay.units[0].gradients[0][0] not in {b.key for b in bad(case)}


def test_a_wrong_moment_is_found_by_the_computed_step_that_uses_it(case: Case) -> None:
    replay = case.replay()
    load = next(load for load in replay.steps[0].loads if load.key.kind is STATE)
    bit = in_a_moment(case, load.key.unit)
    case.shelf.write_wrong(load.key, case.digest(load.key), NEAR, **bit)

    outcome = case.run(replay)

    assert isinstance(outcome, LoadFailed)
    assert f"replayed step 0: the masters of unit {load.name} " in outcome.why
    assert bad(case) == [BadSegment(key=load.key, pod=NEAR)]


def apply_wrongly(case: Case, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Apply one step with another rate than it was taken with."""
    apply = Engine.apply_again

    def wrong(engine: Engine, commit: Commit, rate: float, *more: Any) -> None:
        assert engine is case.engine
        apply(engine, commit, rate * (2.0 if commit.step == at else 1.0), *more)

    monkeypatch.setattr(Engine, "apply_again", wrong)


def begin_again(case: Case, *, has_differed: bool) -> None:
    """Read for the next attempt, as its quorum does."""
    case.copies = GoodCopies(cast(Any, case.shelf), PodUid("own"), lambda: "")
    case.copies.has_differed = has_differed


@pytest.mark.parametrize("log", ["gradients", "boundaries"])
def test_a_step_that_was_applied_wrongly_to_all_units_voids_no_copy_the_first_time(
    case: Case, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    def attempt() -> StateLoaded | LoadFailed:
        return run(case, by_gradients(case)) if log == "gradients" else case.run(case.replay())

    with monkeypatch.context() as mistaken:
        apply_wrongly(case, mistaken, LENGTH - 1)
        outcome = attempt()
        assert isinstance(outcome, LoadFailed)
        assert f"replayed step {LENGTH - 1}: the masters of unit " in outcome.why
        assert outcome.why.endswith("how the step was applied may be what is wrong")
        assert (bad(case), case.shelf.doubted) == ([], [])
        assert case.copies.differs

        # Else the same would be tried for ever.
        begin_again(case, has_differed=True)
        assert isinstance(attempt(), LoadFailed)
        states = {key for key in case.shelf.digests if key.kind is STATE}
        # The step before has proven older ones.
        assert {b.key for b in bad(case)} == {k for k in states if k.version == LENGTH - 1}

    begin_again(case, has_differed=True)
    assert is_right(case, attempt())
    assert bad(case) == []


def test_a_trainer_that_applies_wrongly_twice_gives_the_copies_up(case: Case) -> None:
    shelf = case.shelf
    client = SimpleNamespace(
        fetch=shelf.fetch, doubt=shelf.doubt, interrupt=shelf.interrupt, digests=case.knows
    )
    keeper = keeper_of(case.engine, client)
    keeper._learning_rate = lambda step: RATE * (2.0 if step == LENGTH - 1 else 1.0)
    replay, plan = by_gradients(case), make_plan({0: ["pod.1"]})

    def attempt() -> StateLoaded | LoadFailed:
        return asyncio.run(keeper.replay(keeper.begin_wait(), plan, 0, replay, None))

    assert isinstance(attempt(), LoadFailed)
    assert keeper._bad == []
    assert isinstance(attempt(), LoadFailed)
    assert {(b.key.kind, b.key.version) for b in keeper._bad} == {(STATE, LENGTH - 1)}


def test_a_unit_that_comes_out_wrong_alone_was_copied_wrong_as_far_as_can_be_told(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = by_gradients(case)
    apply_wrongly(case, monkeypatch, 0)  # to the first unit, as the others are not there yet

    assert isinstance(run(case, replay), LoadFailed)

    assert bad(case) == [BadSegment(key=replay.units[0].state, pod=NEAR)]


def test_masters_that_were_copied_wrong_are_read_from_the_next_copy(case: Case) -> None:
    replay = case.replay()
    key = next(load.key for load in replay.steps[1].loads if load.key.kind is STATE)
    case.shelf.write_wrong(key, case.digest(key), NEAR)

    assert is_right(case, case.run(replay))
    assert bad(case) == [BadSegment(key=key, pod=NEAR)]


# Whom stores are believed ------------------------------------------------------------------


def test_who_tells_what_votes_did_not_is_passed_over(case: Case) -> None:
    replay = by_gradients(case)
    near = case.knows.there[HOLDERS[0].address]
    for step, told in near.items():
        wrong = f"{int(told.masters[0], 16) ^ 1:x}{told.masters[1:]}"
        near[step] = seal_digests(replace(told, masters=wrong))

    assert is_right(case, run(case, replay))
    assert bad(case) == []
    assert case.knows.asked[-1][0] == HOLDERS[1].address


def test_who_does_not_answer_is_asked_once(case: Case) -> None:
    case.knows.silent.add(HOLDERS[0].address)

    assert is_right(case, run(case, by_gradients(case)))
    assert [a for a, _ in case.knows.asked].count(HOLDERS[0].address) == 1


def test_where_nobody_knows_the_whole_is_compared_as_soon_as_it_is_there(case: Case) -> None:
    case.knows.there = {address: {} for address in case.knows.there}
    replay = by_gradients(case)
    key = replay.units[0].gradients[0][0]
    case.shelf.write_wrong(key, case.digest(key), NEAR, FAR, byte=3, bit=7)  # a sign

    outcome = run(case, replay)

    assert isinstance(outcome, LoadFailed)
    assert f"replayed step {LENGTH - 1}: the masters have digest" in outcome.why


def test_holders_are_asked_in_the_order_of_the_copies(case: Case) -> None:
    assert holders_of(by_gradients(case)) == HOLDERS
    assert holders_of(case.replay()) == HOLDERS


# What trainers tell ------------------------------------------------------------------------


def test_a_commit_goes_to_the_store_with_what_its_step_made_of_units(case: Case) -> None:
    """Of a step that this rank has not reduced, or whose masters it has not, it tells nothing."""
    engine = case.trained.engines[STAGE]  # at the last version, after the step before it
    assert engine.read is not None
    last, masters = case.record(STEPS - 1), case.record(STEPS).states[STAGE]
    kept: list[UnitDigests] = []
    digests = SimpleNamespace(keep=lambda told, _holders: kept.append(told))
    records: list[CommitRecord] = []
    keeper = keeper_of(engine, SimpleNamespace(record=records.append, digests=digests))
    reduced_here = replace(last, gradients=(last.gradients[STAGE],), states=(masters,))

    keeper.record(reduced_here)
    assert kept == [], "it is no member yet"
    keeper._place(make_plan({0: ["pod.1"]}), 0, 0)
    keeper.record(replace(last, gradients=(last.gradients[STAGE],), states=("0" * 32,)))
    keeper.record(replace(reduced_here, gradients=("0" * 32,)))
    keeper.record(replace(reduced_here, gradients=(), states=()))
    assert kept == []
    keeper.record(reduced_here)

    assert [why_void(told, reduced_here, 0, len(case.units.names)) for told in kept] == [""]
    assert len(records) == 5


def test_digests_of_a_trained_step_are_parts_of_what_its_votes_told(case: Case) -> None:
    for step, told in enumerate(case.trained.told[STAGE]):
        assert why_void(told, case.record(step), STAGE, len(case.units.names)) == ""
