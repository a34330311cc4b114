"""Checks that wait: bits, flips, memory and order are as they should be, whatever the windows."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.train.checks.step import MODELS, Step
from tests.train.checks.test_flips import draw, has_effect

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.checks import checker
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.checks.planned import Window
from mainstay_train.checks.waiting import Waiting, WaitingChecks
from mainstay_train.comm.group import Group
from mainstay_train.comm.operations import Pending
from mainstay_train.compute import arrivals
from mainstay_train.kernels.dispatch import key_of
from mainstay_train.models import attention

Setting = tuple[str, bool, int, int]
"""Model, recompute, stages, budget."""
MUCH, LITTLE = 1 << 30, 3000
QUICK: list[Setting] = [("llama bf16", True, 2, LITTLE), ("moe", False, 2, MUCH)]
ALL: list[Setting] = [
    (model, recompute, stages, budget)
    for model in MODELS
    for recompute in (False, True)
    for stages in (1, 2)
    for budget in (LITTLE, MUCH)
]


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Messages come after some checks, which the test draws; returns how many were executed."""
    rng = random.Random(5)
    executed: list[int] = []

    def late(group: Group, pending: Pending, waiting: WaitingChecks, window: Window) -> None:
        left = iter(range(rng.randrange(60)))
        before = len(waiting._waiting)
        waiting.use(lambda: next(left, None) is not None, window)
        executed.append(before - len(waiting._waiting))
        group.finish(pending)

    monkeypatch.setattr(arrivals, "finish", late)
    return executed


def check_flips(setting: Setting, num_flips: int, flipped: list[bool]) -> Counter[str]:
    """Run steps with one flip each; return how many have an effect without checks, by pass."""
    model, recompute, stages, budget = setting
    step = Step(model, recompute=recompute, stages=stages, waiting_bytes=budget)
    clean = step.run(Mode.OFF)
    spots = [spot for spot in step.list() if spot.place.in_pass is not Pass.STEP]
    rng = random.Random(str(setting))
    effective: Counter[str] = Counter()
    for _ in range(num_flips):
        spot, flip = draw(rng, spots)
        flipped.clear()
        ended = step.run(Mode.FULL, flip, spot)
        assert ended.digests == clean.digests, (spot, flip)
        if has_effect(step, clean, spot, flip):
            effective[spot.place.in_pass.value] += 1
            assert len(ended.findings) == 1, (spot, flip)
        for finding in ended.findings:
            assert (finding.operator, finding.ordinal) == (spot.kernel, spot.ordinal)
            assert finding.block == spot.place.name
            if flip.execution is Execution.CHECKER:
                assert (finding.verdict, finding.remedy) == (Verdict.CHECKER_HIT, Remedy.NOTHING)
            else:
                assert finding.verdict is Verdict.PRIMARY_HIT
            assert ended.num_refused == (finding.remedy is Remedy.VOID_TYPE)
    return effective


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_a_flip_is_found_however_long_its_check_waits(
    setting: Setting, flipped: list[bool]
) -> None:
    assert sum(check_flips(setting, 8, flipped).values()) > 0


@pytest.mark.chaos
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_of_many_flips_each_effective_one_is_found(setting: Setting, flipped: list[bool]) -> None:
    effective = check_flips(setting, 60, flipped)

    logging.getLogger(__name__).info("%s: %s", setting, dict(effective))
    assert sum(effective.values()) >= 10


@pytest.mark.parametrize("model", ["llama", "moe bf16"])
def test_bits_do_not_depend_on_budget_and_order_and_nothing_is_found(
    model: str, waits: list[int]
) -> None:
    digests = set()
    for budget in (0, LITTLE, MUCH):
        step = Step(model, recompute=budget == LITTLE, stages=2, waiting_bytes=budget)
        digests.add(step.run(Mode.OFF).digests)
        ended = step.run(Mode.FULL)
        digests.add(ended.digests)
        assert ended.findings == []
        assert ended.num_refused == 0
        for engine in step._engines[Mode.FULL]:
            waiting = engine.checks.waiting
            assert not waiting
            assert waiting.most_bytes <= budget
            assert (waiting.most_bytes > 0) == (budget > 0)
    assert len(digests) == 1
    assert sum(waits) > 0


def test_what_blocks_make_once_and_keep_is_right_before_it_is_kept() -> None:
    def clear() -> None:
        attention._rotations.cache_clear()
        attention._causal_mask.cache_clear()

    clear()
    step = Step("llama", recompute=False, waiting_bytes=MUCH, is_warm=False)
    spot = next(
        spot
        for spot in step.list(Mode.FULL)
        if (spot.kernel, spot.place.block, spot.place.in_pass) == ("aten._to_copy", 1, Pass.FORWARD)
    )
    clean = step.run(Mode.OFF)
    clear()
    step = Step("llama", recompute=False, waiting_bytes=MUCH, is_warm=False)
    flip = spot.flip(element=5, bit=27, execution=Execution.PRIMARY)

    first, second = step.run(Mode.FULL, flip, spot), step.run(Mode.FULL)

    assert [finding.remedy for finding in first.findings] == [Remedy.REPAIR]
    assert (first.num_refused, first.digests) == (0, clean.digests)
    assert (second.findings, second.digests) == ([], clean.digests)
    (engine,) = step._engines[Mode.FULL]
    assert engine.checks.waiting.most_bytes > 0, "in the second step"


def test_what_is_written_into_memory_that_a_kernel_is_given_is_checked_late_in_any_pass() -> None:
    """Each half of SwiGLU's gradient is written into memory of both."""
    step = Step("llama", recompute=False, waiting_bytes=MUCH, micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = [s for s in step.list(Mode.FULL) if s.place.in_pass is Pass.BACKWARD]
    spot = next(s for s in spots if s.kernel == "aten.silu_backward")

    for execution in (Execution.PRIMARY, Execution.CHECKER):
        ended = step.run(Mode.FULL, spot.flip(element=3, bit=30, execution=execution), spot)

        assert ended.digests == clean.digests
        (finding,) = ended.findings
        assert (finding.operator, finding.ordinal) == (spot.kernel, spot.ordinal)
        is_primary = execution is Execution.PRIMARY
        assert finding.remedy is (Remedy.VOID_TYPE if is_primary else Remedy.NOTHING)


def passage(
    work: Callable[[], Any], in_pass: Pass, flip: Flip | None = None, gradient: int = 0
) -> tuple[Checks, list[Finding]]:
    """Do some work in a block's pass, of which checks wait if they may."""
    findings: list[Finding] = []
    checks = Checks(Mode.FULL, tell=findings.append, waiting_bytes=MUCH)
    checks._is_warm, checks.gradient = True, gradient
    if flip is not None:
        checks.order("flip", 0, Phase.BACKWARD, flip)
    scope = checks.over(Phase.BACKWARD, shard_type=0, micro_batch=0)
    with scope, torch.no_grad():
        scope.enter(in_pass, 0, "block")
        work()
    return checks, findings


REFRESHED: dict[str, Callable[[torch.Tensor], Any]] = {
    "aten.copy_": lambda kept: kept.copy_(torch.ones(8, 8)),
    "aten.fill_": lambda kept: kept.fill_(1.0),
    "aten.zero_": lambda kept: kept.zero_(),
    "aten.mul": lambda kept: torch.mul(torch.ones(8, 8), 3.0, out=kept),
}


@pytest.mark.parametrize("in_pass", [Pass.BACKWARD, Pass.WEIGHT])
@pytest.mark.parametrize("kernel", REFRESHED)
def test_a_buffer_that_a_block_sets_is_right_at_once(kernel: str, in_pass: Pass) -> None:
    """Its wrong bits would outlive the type, and what is computed again."""
    kept, right = torch.full((8, 8), 7.0), torch.full((8, 8), 7.0)
    REFRESHED[kernel](right)
    flip = Flip(in_pass=in_pass, operator=kernel, element=5, bit=29)
    gradient = torch.zeros(8, 8)

    checks, findings = passage(
        lambda: REFRESHED[kernel](kept), in_pass, flip, gradient=key_of(gradient)
    )

    assert torch.equal(kept, right)
    assert [finding.remedy for finding in findings] == [Remedy.REPAIR]
    checks.settle([0])
    assert len(findings) == 1
    assert not checks.void


@pytest.mark.parametrize("kernel", REFRESHED)
def test_what_fills_memory_that_the_pass_has_made_waits(kernel: str) -> None:
    flip = Flip(in_pass=Pass.BACKWARD, operator=kernel, element=5, bit=29)

    checks, findings = passage(lambda: REFRESHED[kernel](torch.empty(8, 8)), Pass.BACKWARD, flip)

    assert findings == []
    checks.settle([0])
    assert [finding.remedy for finding in findings] == [Remedy.VOID_TYPE]


def test_in_a_pass_of_weights_all_memory_but_the_gradients_counts() -> None:
    x, gradient = torch.ones(8, 8), torch.zeros(16, 8)
    size_bytes = x.untyped_storage().nbytes()

    def work(make: Callable[[], torch.Tensor]) -> int:
        checks, findings = passage(
            lambda: torch.mul(x, 2.0, out=make()), Pass.WEIGHT, gradient=key_of(gradient)
        )
        counted = checks.waiting.size_bytes
        checks.settle([0])
        assert findings == []
        return counted

    assert work(lambda: gradient[8:]) == size_bytes, "the input's"
    assert work(lambda: torch.empty(8, 8)) == 2 * size_bytes


def test_what_is_about_to_be_overwritten_is_checked_before() -> None:
    order: list[str] = []
    waiting = WaitingChecks(100)
    for name, key in (("a", 1), ("b", 2), ("c", 1)):
        waiting.add(Waiting(0, frozenset({key}), 10, partial(order.append, name)))

    waiting.overwrite([1])

    assert order == ["a", "c"]
    waiting.overwrite([1])
    waiting.settle(1)
    assert order == ["a", "c"]
    waiting.settle(0)
    assert order == ["a", "c", "b"]
    assert not waiting


def test_the_budget_is_kept_by_executing_some() -> None:
    order: list[int] = []
    waiting = WaitingChecks(25)
    for number in range(5):
        waiting.add(Waiting(0, frozenset(), 10, partial(order.append, number)))
    waiting.add(Waiting(0, frozenset(), 26, lambda: order.append(9)))

    assert len(order) == 4
    assert 9 in order
    assert waiting.most_bytes == 20


class Late:
    """A group whose message comes when a number of checks were executed, or never."""

    def __init__(self, error: Exception | None) -> None:
        self.come, self._error = threading.Event(), error

    def finish(self, pending: object) -> None:
        del pending
        assert self.come.wait(30)
        if self._error is not None:
            raise self._error


@pytest.fixture
def real_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages come when they come."""
    monkeypatch.undo()


@pytest.mark.parametrize("error", [None, GroupEnded("the peer is gone")])
@pytest.mark.usefixtures("real_finish")
def test_checks_are_executed_until_the_message_comes_or_the_group_ends(
    error: Exception | None,
) -> None:
    group, order = Late(error), []
    waiting = WaitingChecks(1000)

    def execute() -> None:
        order.append(threading.get_ident())
        if len(order) == 3:
            group.come.set()

    for _ in range(3):
        waiting.add(Waiting(0, frozenset(), 1, execute))
    if error is None:
        arrivals.finish(group, None, waiting)  # type: ignore[arg-type]
    else:
        with pytest.raises(GroupEnded, match="the peer is gone"):
            arrivals.finish(group, None, waiting)  # type: ignore[arg-type]

    assert order == [threading.get_ident()] * 3


@pytest.mark.usefixtures("real_finish")
def test_a_chain_of_two_stages_uses_its_waits() -> None:
    step = Step("llama", recompute=False, stages=2, waiting_bytes=MUCH)

    assert step.run(Mode.FULL).digests == step.run(Mode.OFF).digests


def test_modes_but_full_let_nothing_wait() -> None:
    for mode in (Mode.OFF, Mode.PIGGYBACK):
        assert not checker.Checks(mode, waiting_bytes=MUCH).waiting.is_used


class NoMemoryError(RuntimeError):
    """The device has no memory for a second execution."""


def test_checks_behind_one_that_raises_still_wait_and_so_does_that_one() -> None:
    order: list[str] = []
    fails = [True]

    def second() -> None:
        if fails[0]:
            raise NoMemoryError
        order.append("b")

    waiting = WaitingChecks(100)
    for name, key in (("a", 1), ("b", 2), ("c", 3)):
        execute = second if name == "b" else partial(order.append, name)
        waiting.add(Waiting(0, frozenset({key}), 10, execute))

    with pytest.raises(NoMemoryError):
        waiting.settle(0)
    assert order == ["a"]
    assert waiting
    fails.clear()
    fails.append(False)
    waiting.settle(0)

    assert order == ["a", "b", "c"]
    assert not waiting


def test_a_window_in_which_a_check_raises_is_closed() -> None:
    order: list[str] = []

    def broken() -> None:
        raise NoMemoryError

    waiting = WaitingChecks(100)
    waiting.add(Waiting(0, frozenset({1}), 10, broken))
    with pytest.raises(NoMemoryError):
        waiting.use(lambda: True)

    waiting.add(Waiting(1, frozenset({2}), 10, partial(order.append, "later")))
    waiting.settle(1)
    assert order == ["later"]


def test_a_type_whose_checks_cannot_be_executed_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("llama", recompute=False, waiting_bytes=MUCH, micro_batches=1)
    (engine,) = step._engines[Mode.FULL]
    settle, settled = WaitingChecks.settle, list[int]()

    def fail(self: WaitingChecks, shard_type: int) -> None:
        settled.append(shard_type)
        if shard_type == 0:
            raise NoMemoryError
        settle(self, shard_type)

    monkeypatch.setattr(WaitingChecks, "settle", fail)
    engine.compute((0, 1, 2), 0, None)
    with pytest.raises(NoMemoryError):
        engine.judge_held()

    assert settled == [0, 1, 2]
    assert engine.types.bad() == (0,)
    assert not engine.checks.waiting


class ToldAtOnce(WaitingChecks):
    """Its queue hears of every event at once."""

    def _lengthen(self, event: Any, size_bytes: int) -> None:
        del size_bytes
        self._take(event)
        self.most_bytes = max(self.most_bytes, self.size_bytes)


@pytest.mark.parametrize("seed", range(60))
def test_a_queue_that_hears_of_events_in_time_decides_as_if_it_had_heard_at_once(
    seed: int,
) -> None:
    outcomes = []
    for kind in (WaitingChecks, ToldAtOnce):
        rng, order = random.Random(seed), list[object]()
        waiting = kind(100)
        pieces: list[str] = []
        for number in range(60):
            size, keys = rng.randrange(1, 30), {rng.randrange(8)}
            check = Waiting(rng.randrange(3), keys, size, partial(order.append, number))
            match rng.randrange(7):
                case 0 | 1:
                    waiting.add(check)
                case 2:
                    check.size_bytes = 0
                    pieces.append(waiting.begin(check))
                case 3 if pieces and waiting.waits(pieces[-1]):
                    waiting.grow(pieces[-1], {rng.randrange(8)}, size)
                case 4 if pieces and waiting.waits(pieces[-1]):
                    waiting.complete(pieces.pop())
                case 5:
                    waiting.overwrite([rng.randrange(8)])
                case 6:
                    moments = iter([True] * rng.randrange(4) + [False] * 99)
                    waiting.use(partial(next, moments))
            order.append((waiting.size_bytes, waiting.most_bytes))
        for shard_type in range(3):
            waiting.settle(shard_type)
        outcomes.append((order, waiting.size_bytes, bool(waiting)))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) > 60, "something was executed"
