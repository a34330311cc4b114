"""Checks of a swapped pipeline, in which a micro-batch may pass a stage twice."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tests.train.checks.step import Ended, Spot, Step
from tests.train.checks.test_flips import draw, has_effect
from tests.train.compute.test_interpreter import Pipe, in_threads

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.base.shape import Order
from mainstay_core.dmr.coverage import verify_plan
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.schedule import NEXT_RECV, plan_here
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import Telling, Told, rule
from mainstay_core.planning.routes import Extent
from mainstay_train.checks.places import Phase
from mainstay_train.checks.planned import WHOLE, Window
from mainstay_train.checks.waiting import WaitingChecks
from mainstay_train.comm.group import Group
from mainstay_train.comm.operations import Pending
from mainstay_train.compute import arrivals
from mainstay_train.dmr.run_planner import RunPlanner

MUCH, LITTLE = 1 << 30, 6000
PROFILED = 2
Setting = tuple[str, float, int, str]
"""Model, recompute, stages, how it is checked."""
QUICK: list[Setting] = [
    ("llama three", 0.0, 3, "Dynamic"),
    ("llama", 1.0, 2, "Auto"),
    ("llama", 1.0, 2, "Piggyback"),
]
ALL: list[Setting] = [
    (model, recompute, stages, how)
    for model, stages in (("llama", 2), ("llama bf16", 2), ("llama three", 3))
    for recompute in (0.0, 0.5, 1.0)
    for how in ("Naive", "Dynamic", "Auto", "Piggyback")
    if recompute or how != "Piggyback"
]
SPLIT = {(0, (Extent.EMBEDDING, Extent.LAYERS)), (1, (Extent.LAYERS, Extent.HEAD))}


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Window, int]]:
    """Messages come after some checks, which the test draws; returns how many were executed."""
    rng, executed = random.Random(5), list[tuple[Window, int]]()
    received = RunPlanner.received

    def late(group: Group, pending: Pending, waiting: WaitingChecks, window: Window) -> None:
        left = iter(range(rng.randrange(60)))
        before = len(waiting._waiting)
        waiting.use(lambda: next(left, None) is not None, window)
        executed.append((window, before - len(waiting._waiting)))
        group.finish(pending)

    def second(self: RunPlanner, window: Window, tensor: torch.Tensor, wait_s: float) -> None:
        del wait_s
        received(self, window, tensor, 1.0)

    monkeypatch.setattr(arrivals, "finish", late)
    monkeypatch.setattr(RunPlanner, "received", second)
    return executed


def make_step(setting: Setting, clock: Callable[[], float] = time.perf_counter) -> Step:
    model, recompute, stages, how = setting
    return Step(
        model,
        recompute=recompute,
        stages=stages,
        micro_batches=2,
        waiting_bytes=0 if how == "Naive" else MUCH,
        profile_steps=PROFILED if how == "Auto" else None,
        order=Order.SWAPPED,
        clock=clock,
    )


def mode_of(setting: Setting) -> Mode:
    return Mode.PIGGYBACK if setting[-1] == "Piggyback" else Mode.FULL


def warm(step: Step, setting: Setting) -> Ended:
    """Take the steps from which a plan is made; return an undisturbed one."""
    clean = step.run(Mode.OFF)
    for _ in range(PROFILED + 2 if setting[-1] == "Auto" else 1):
        ended = step.run(mode_of(setting))
        assert ended.digests == clean.digests
        assert ended.findings == []
        assert ended.num_refused == 0
    return clean


def check_flips(setting: Setting, num_flips: int, flipped: list[bool]) -> Counter[str]:
    """Run steps with one flip each; return how many had an effect, by pass."""
    step, mode = make_step(setting), mode_of(setting)
    clean = warm(step, setting)
    spots: Sequence[Spot] = step.list()
    if mode is Mode.PIGGYBACK:
        known = set(step.list(mode))
        spots = [s for s in spots if s.place.in_pass is Pass.FORWARD and s in known]
    if setting[-1] in ("Dynamic", "Auto"):
        spots = [spot for spot in spots if spot.place.in_pass is not Pass.STEP]
    if setting[-1] == "Auto":
        known = set(step.list(mode))
        spots = [spot for spot in spots if spot in known]
    rng = random.Random(str(setting))
    effective: Counter[str] = Counter()
    for _ in range(num_flips):
        spot, flip = draw(rng, list(spots))
        if setting[-1] in ("Auto", "Piggyback"):
            flip = Flip(**{f: getattr(flip, f) for f in Flip.__slots__} | PRIMARY)
        flipped.clear()
        ended = step.run(mode, flip, spot)
        assert ended.digests == clean.digests, (spot, flip)
        if has_effect(step, clean, spot, flip):
            assert len(ended.findings) == 1, (spot, flip)
            effective[spot.place.in_pass.value] += 1
            effective[spot.place.extent.value] += 1
    return effective


PRIMARY = {"execution": Execution.PRIMARY}


@pytest.mark.parametrize(
    "setting",
    [s if s == QUICK[0] else pytest.param(s, marks=pytest.mark.chaos) for s in ALL],
    ids=str,
)
def test_checks_move_no_bit_and_find_nothing_in_clean_steps_of_a_swapped_pipeline(
    setting: Setting,
) -> None:
    step = make_step(setting)
    clean = warm(step, setting)
    for _ in range(2):
        ended = step.run(mode_of(setting))
        assert (ended.digests, ended.findings, ended.num_refused) == (clean.digests, [], 0)


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_a_flip_is_found_on_either_visit(setting: Setting, flipped: list[bool]) -> None:
    assert sum(check_flips(setting, 4, flipped).values()) > 0


@pytest.mark.chaos
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_of_many_flips_each_effective_one_is_found(setting: Setting, flipped: list[bool]) -> None:
    effective = check_flips(setting, 60, flipped)

    logging.getLogger(__name__).info("%s: %s", setting, dict(effective))
    assert {"whole", "layers"} <= set(effective)


def test_waits_of_either_visit_are_windows(waits: list[tuple[Window, int]]) -> None:
    digests = set()
    for budget in (LITTLE, MUCH):
        step = Step(
            "llama",
            recompute=budget == LITTLE,
            stages=2,
            waiting_bytes=budget,
            order=Order.SWAPPED,
        )
        digests |= {step.run(Mode.OFF).digests, (ended := step.run(Mode.FULL)).digests}
        assert ended.findings == []
        assert ended.num_refused == 0
        for engine in step._engines[Mode.FULL]:
            assert not engine.checks.waiting
            assert 0 < engine.checks.waiting.most_bytes <= budget
    assert len(digests) == 1
    used = {window.name for window, executed in waits if executed}
    assert {"RECV_F.layers", "RECV_B", "RECV_B.layers", "RECV_B.embedding"} <= used


def test_passages_of_two_visits_have_a_plan_of_their_own_that_keeps_the_rule() -> None:
    setting = ("llama", 0.0, 2, "Auto")
    # Each look at the clock takes a millisecond: real kernels so small may be too short to wait.
    step = make_step(setting, partial(next, itertools.count(0.0, 0.001)))
    warm(step, setting)

    assert [told.plan for told in step.told] == ["Auto"] * 2, step.told
    found = set()
    for engine in step._engines[Mode.FULL]:
        planner = engine.checks.planner
        assert isinstance(planner, RunPlanner)
        orders, kept = engine.checks._planned, 0
        for way, profile in planner.profiles.items():
            plan, ordered = plan_here(profile)
            verify_plan(profile, plan)
            kept += len(ordered.later) + len(ordered.parts)
            windows = [window.name for window in profile.windows]
            assert windows[-1] == NEXT_RECV
            if way == WHOLE:
                assert windows[:-1] == (["RECV_B"] if engine.stage == 0 else [])
                continue
            found.add((engine.stage, way))
            first, second = (extent.value for extent in way)
            expected = {
                0: [f"RECV_F.{second}", f"RECV_B.{second}", f"RECV_B.{first}"],
                1: [f"RECV_F.{second}", f"RECV_B.{first}"],
            }
            assert windows[:-1] == expected[engine.stage]
        assert len(orders.later) + len(orders.parts) == kept
        assert {spot.extent for spot in orders.later} > {Extent.WHOLE}
        assert not engine.checks.replays._inside
    assert found == SPLIT


def tell(step: Step, types: Sequence[int], shard_type: int) -> Telling:
    """What a chain tells of a type among others that it computes."""
    engines = step._engines[Mode.OFF]
    watched = []
    for engine in engines:
        engine.drop_held()
        engine.checks.begin_step(0)
        watched.append(engine.watch(shard_type, None))
    pipe = Pipe(len(engines))
    in_threads(
        lambda engine, chain, log: engine.compute(types, 0, chain, None, log),
        [(e, pipe.end_of(e.stage), w) for e, w in zip(engines, watched, strict=True)],
    )
    accounts = [one.account(shard_type) for one in watched]
    return tuple(account for account in accounts if account is not None)


def told(chain: int, attempt: int, telling: Telling) -> Told:
    cells = tuple(Slot(pod=PodUid(f"{'abc'[chain]}{p}"), index=0) for p in range(len(telling)))
    return Told(quorum=1, attempt=attempt, replica=chain, cells=cells, telling=telling)


@pytest.mark.parametrize(("model", "stages"), [("llama", 2), ("llama three", 3)])
def test_a_device_that_is_wrong_on_either_visit_is_named_and_no_other(
    model: str, stages: int
) -> None:
    step = Step(model, recompute=1.0, stages=stages, order=Order.SWAPPED)
    step.run(Mode.OFF)
    right = tell(step, (0, 1, 2), 2)
    assert right == tell(step, (2,), 2), "whatever else the chain computes"
    named = Counter[int]()
    for stage, engine in enumerate(step._engines[Mode.OFF]):
        blocks = range(len(engine.state.blocks))
        for in_pass, phase, block in [
            (Pass.FORWARD, Phase.FORWARD, min(blocks)),
            (Pass.FORWARD, Phase.FORWARD, max(blocks)),
            (Pass.BACKWARD, Phase.BACKWARD, max(blocks)),
        ]:
            about = {"in_pass": in_pass, "block": block, "shard_type": 2, "operator": 0}
            flip = Flip(element=3, bit=30, sticky=True, **about)
            engine.checks.order("sticky", 0, phase, flip)
            wrong = tell(step, (2, 1), 2)
            engine.checks.take_orders(type(engine.checks._orders)())
            if wrong == right:
                continue
            again = [told(c, attempt, wrong if c == 0 else right) for c, attempt in ASKED]
            ruling = rule(again)
            assert ruling.agreed == right
            assert [d.slot.pod for d in ruling.deviations] == [f"a{stage}"], ruling.reason
            assert ruling.deviations[0].verdict is Verdict.DETERMINISTIC
            named[stage] += 1
    assert set(named) == set(range(stages))


ASKED = ((0, 1), (1, 1), (0, 2), (1, 2), (2, 2))
