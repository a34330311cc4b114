"""Tries before a trainer starts whether its blocks are pure functions, as checks take them to be.

A kernel that gives other bits each time does so on every device. Executed twice in a step it would
look like a device that computes wrongly. So each kind of block runs here under checks: what differs
at one place again and again, on a device that computes all else the same, is the block's.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_train.checks.calls import UnreliableDeviceError
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.checks.recomputes import FIELD
from mainstay_train.model import trial
from mainstay_train.model.blocks import Block
from mainstay_train.model.workload import Workload

ROUNDS = 5
"""Runs of a block of which some kernel differed; two of one of which none did."""
NEEDED = 3
"""Rounds in which one kernel has to differ. A device is hit once, and at any place."""
TURNS = 20
"""Steps of the calculation that says whether a device computes all else the same."""
SIZE = 64

_Outcome = tuple[dict[str, torch.Tensor], list[Finding]]


def check(model: Workload, device: torch.device, mode: Mode = Mode.FULL) -> None:
    """Run each kind of block some times under checks.

    Args:
        model: what is trained.
        device: where it is.
        mode: of the job, for people.

    Raises:
        InvalidSpecError: a block is no pure function.
        UnreliableDeviceError: it is the device that computes other bits each time.
    """
    batch = model.dataset.batch(trial.ADDRESS)
    x = trial.activation(model, device)
    for number, spec, _ in trial.kinds(model):
        given = batch.tokens.to(device) if number == 0 else x
        targets = batch.targets.to(device) if spec.is_last else None
        (block,) = model.build([number], device)
        block.initialize(0)
        run = partial(_run, block, given, targets)
        rounds = [run(), run()]
        if any(found for _, found in rounds):
            rounds += [run() for _ in range(ROUNDS - len(rounds))]
            _judge([found for _, found in rounds], spec.name, device, mode)
        elif changed := _differing(*(outputs for outputs, _ in rounds)):
            raise _refusal(
                mode, f"block {spec.name!r} gives other bits of {changed} when it is run again"
            )


def _run(block: Block, x: torch.Tensor, targets: torch.Tensor | None) -> _Outcome:
    """Return what one run of a block gives, as far as it comes, and what checks find in it."""
    found: list[Finding] = []
    checks = Checks(Mode.FULL, tell=found.append)
    outputs: dict[str, torch.Tensor] = {}
    try:
        with checks.over(Phase.FORWARD, shard_type=0, micro_batch=0) as scope:

            def enter(in_pass: Pass) -> None:
                scope.enter(in_pass, 0, block.name)

            outputs = trial.run_once(block, x, targets, enter=enter)
    except UnreliableDeviceError:
        assert found, "it was told"
    return outputs, found


def _judge(rounds: list[list[Finding]], name: str, device: torch.device, mode: Mode) -> None:
    """Say who is to blame for what differed in some rounds; once is nobody's fault."""
    places = Counter(place for found in rounds for place in {finding.place for finding in found})
    place, times = places.most_common(1)[0]
    if times < NEEDED:
        return
    if not computes_the_same(device):
        raise UnreliableDeviceError(
            "this device gave other bits for the same inputs again and again, also where no code "
            "of the workload ran"
        )
    raise _refusal(
        mode,
        f"{place} gave other bits for the same inputs in {times} of {len(rounds)} runs, so block "
        f"{name!r} is no pure function",
    )


def _refusal(mode: Mode, what: str) -> InvalidSpecError:
    return InvalidSpecError(
        FIELD,
        f"is {mode.value}, but {what}; make it a function of its inputs and parameters "
        "(draws by address.uniform(shape, site), kernels that are deterministic), or use Off",
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


def _differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> str:
    """Return the name of what differs in two runs; empty: nothing does."""
    return next((name for name in first if not trial.has_bits_of(first[name], second[name])), "")
