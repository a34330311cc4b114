"""Tries before a trainer starts whether its blocks are pure functions, as checks take them to be.

A kernel that gives other bits each time does so on every device. Executed twice in a step it would
look like a device that computes wrongly. So each kind of block runs here under checks: what differs
at one place again and again, on a device that computes all else the same, is the block's.

Checks that wait run once the block has returned. Where a plan lets them, each kind runs with all of
them late, too: a kernel may compute otherwise when what the block has set for it (flags of a
backend, the number of threads) is as before.

With a witness and no checks nothing is executed twice in a step, but replicas are compared. A block
that gives other bits each time would have devices accused. So each kind runs several times here,
without checks: what a witness can do with they may refuse. Compiled blocks have been tried already.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr import schedule
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import CheckRules, Mode, PlanName
from mainstay_train.base.device import memory_of
from mainstay_train.checks.budget import check_budget
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.checks.planned import WHOLE
from mainstay_train.checks.recomputes import FIELD
from mainstay_train.kernels.calls import UnreliableDeviceError
from mainstay_train.model import trial
from mainstay_train.model.blocks import Block
from mainstay_train.model.workload import Workload

ROUNDS = 5
"""Runs of a block of which some kernel differed; :data:`QUIET` of one of which none did."""
QUIET = 2
NEEDED = 3
"""Rounds in which one kernel has to differ. A device is hit once, and at any place."""
TURNS = 20
"""Steps of the calculation that says whether a device computes all else the same."""
SIZE = 64
UNBOUNDED = 1 << 62
"""Bytes that checks of one run of a block may retain."""
WITNESS_FIELD = "spec.detection.witness.everySteps"

_Outcome = tuple[dict[str, torch.Tensor], list[Finding]]


class Trial(enum.Enum):
    """A way in which each kind of block is tried."""

    REPEATED = "repeated"
    """Run several times; without checks, unless it is tried at once as well."""
    AT_ONCE = "at once"
    """Run with each kernel executed twice at once."""
    LATE = "late"
    """Run with all checks late."""


def trials_of(rules: CheckRules) -> frozenset[Trial]:
    """Return how blocks are tried in a job that checks by some rules."""
    if rules.mode is Mode.OFF:
        return frozenset({Trial.REPEATED} if rules.witness_every_steps else ())
    waits = rules.mode is Mode.FULL and rules.plan is not PlanName.NAIVE
    at_once = frozenset({Trial.REPEATED, Trial.AT_ONCE})
    return at_once | {Trial.LATE} if waits else at_once


def try_blocks(
    model: Workload, device: torch.device, rules: CheckRules, *, compiles: bool = False
) -> None:
    """Try each kind of block as the rules of checks ask for it.

    Args:
        model: what is trained.
        device: where it is.
        rules: of the job.
        compiles: whether blocks are compiled. Then nothing is executed twice, and that they repeat
            their bits was seen when they were compiled (:func:`mainstay_train.model.trial.check`).

    Raises:
        InvalidSpecError: a block is no pure function, or the device has too little memory.
        UnreliableDeviceError: it is the device that computes other bits each time.
    """
    trials = trials_of(rules)
    if Trial.AT_ONCE in trials:
        check(model, device, rules.mode, rules.plan, memory_bytes=rules.memory_bytes)
    elif trials and not compiles:
        check_repeats(model, device, rules.witness_every_steps)


def check(
    model: Workload,
    device: torch.device,
    mode: Mode = Mode.FULL,
    plan: PlanName = PlanName.NAIVE,
    *,
    memory_bytes: int = 0,
) -> None:
    """Run each kind of block some times under checks.

    Args:
        model: what is trained.
        device: where it is.
        mode: of the job, for people.
        plan: of the job: whether checks wait.
        memory_bytes: what those that wait may retain.

    Raises:
        InvalidSpecError: a block is no pure function, or the device has less memory than that.
        UnreliableDeviceError: it is the device that computes other bits each time.
    """
    check_budget(memory_bytes, memory_of(device), str(device), mode, plan)
    for kind in trial.prepared(model, device):
        name = kind.spec.name
        run = partial(_run, kind.build(model, device), kind.given, kind.targets, mode)
        rounds = [run() for _ in range(QUIET)]
        if any(found for _, found in rounds):
            rounds += [run() for _ in range(ROUNDS - len(rounds))]
            _judge([found for _, found in rounds], name, device, mode)
        elif changed := trial.differing(*(outputs for outputs, _ in rounds)):
            raise _refusal(
                mode, f"block {name!r} gives other bits of {changed} when it is run again"
            )
        if mode is Mode.FULL and plan is not PlanName.NAIVE:
            _try_late(run, name, device, plan)


def check_repeats(model: Workload, device: torch.device, every_steps: int) -> None:
    """Run each kind of block some times without checks, and compare what it gives.

    Args:
        model: what is trained.
        device: where it is.
        every_steps: between steps with a witness, for people.

    Raises:
        InvalidSpecError: a block is no pure function.
        UnreliableDeviceError: it is the device that computes other bits each time.
    """
    for kind in trial.prepared(model, device):
        block = kind.build(model, device)
        changed = _changes(partial(trial.run_once, block, kind.given, kind.targets))
        if len(changed) < NEEDED:
            continue
        _require_repeating(device)
        what, _ = Counter(changed).most_common(1)[0]
        raise InvalidSpecError(
            WITNESS_FIELD,
            f"is {every_steps}, but block {kind.spec.name!r} gave other bits of {what} when it was "
            f"run again, {len(changed)} of {ROUNDS} times, so it is no pure function and would "
            f"differ on every device; {_ADVICE}, or use 0",
        )


def _changes(run: Callable[[], dict[str, torch.Tensor]]) -> list[str]:
    """Return what differed in runs from the run before: one that is hit differs from two others."""
    changed: list[str] = []
    last = run()
    for number in range(ROUNDS):
        if number == QUIET and not changed:
            break
        now = run()
        if what := trial.differing(last, now):
            changed.append(what)
        last = now
    return changed


def _try_late(
    run: Callable[..., _Outcome], name: str, device: torch.device, plan: PlanName
) -> None:
    """Run a block once more with all checks late, and again where one of them differs."""
    rounds = [found for _, found in (run(is_late=True),)]
    if not any(rounds):
        return
    rounds += [found for _, found in (run(is_late=True) for _ in range(ROUNDS - 1))]
    if (often := _found_often(rounds, device)) is not None:
        place, times = often
        raise InvalidSpecError(
            schedule.FIELD,
            f"is {plan.value}, but {place} gave other bits when it was executed again after block "
            f"{name!r} had returned, in {times} of {len(rounds)} runs: it depends on what the "
            "block sets meanwhile; set no flags and no number of threads inside of a block, or "
            "use Naive",
        )


def _run(
    block: Block,
    x: torch.Tensor,
    targets: torch.Tensor | None,
    mode: Mode,
    *,
    is_late: bool = False,
) -> _Outcome:
    """Return what one run of a block gives, as far as it comes, and what checks find in it.

    Args:
        block: is run.
        x: its input.
        targets: of the last block; None of others.
        mode: of the job, for people.
        is_late: whether all checks wait that may, until the block has returned.
    """
    found: list[Finding] = []
    waiting_bytes = UNBOUNDED if is_late else 0
    checks = Checks(Mode.FULL, tell=found.append, waiting_bytes=waiting_bytes, said=mode)
    checks.begin_program({WHOLE: (0, 0)})
    checks.end_program(completed=True)
    outputs: dict[str, torch.Tensor] = {}
    try:
        with checks.over(Phase.FORWARD, shard_type=0, micro_batch=0) as scope:

            def enter(in_pass: Pass) -> None:
                scope.enter(in_pass, 0, block.name)

            outputs = trial.run_once(block, x, targets, enter=enter)
        checks.settle([0])
        checks.judge([0])
    except UnreliableDeviceError:
        assert found, "it was told"
    return outputs, found


def _judge(rounds: list[list[Finding]], name: str, device: torch.device, mode: Mode) -> None:
    """Say who is to blame for what differed in some rounds; once is nobody's fault."""
    if (often := _found_often(rounds, device)) is not None:
        place, times = often
        raise _refusal(
            mode,
            f"{place} gave other bits for the same inputs in {times} of {len(rounds)} runs, so "
            f"block {name!r} is no pure function",
        )


def _found_often(rounds: list[list[Finding]], device: torch.device) -> tuple[str, int] | None:
    """Return the kernel that differed most, and in how many rounds; None: in too few of them.

    Raises:
        UnreliableDeviceError: it is the device that computes other bits each time.
    """
    places = Counter(place for found in rounds for place in {finding.place for finding in found})
    place, times = places.most_common(1)[0]
    if times < NEEDED:
        return None
    _require_repeating(device)
    return place, times


def _require_repeating(device: torch.device) -> None:
    if not computes_the_same(device):
        raise UnreliableDeviceError(
            "this device gave other bits for the same inputs again and again, also where no code "
            "of the workload ran"
        )


def _refusal(mode: Mode, what: str) -> InvalidSpecError:
    return InvalidSpecError(FIELD, f"is {mode.value}, but {what}; {_ADVICE}, or use Off")


_ADVICE = (
    "make it a function of its inputs and parameters (draws by address.uniform(shape, site), "
    "kernels that are deterministic)"
)


def computes_the_same(device: torch.device) -> bool:
    """Return whether two executions of torch's own kernels have the same bits on a device."""
    found: list[Finding] = []
    start = torch.arange(SIZE * SIZE, dtype=torch.float32, device=device).sin_().view(SIZE, SIZE)
    try:
        with Checks(Mode.FULL, tell=found.append).over(Phase.FORWARD):
            x = start
            for _ in range(TURNS):
                x = torch.tanh(x @ start + x)
    except UnreliableDeviceError:
        assert found, "it was told"
    return not found
