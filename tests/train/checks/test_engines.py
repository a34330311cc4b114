"""Checks where a plain step does not come to: an engine's other thread, and its end."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from tests.train.checks.single import flip_of
from tests.train.checks.test_checker import Worn
from tests.train.compute.test_early import Cells, build, early_for, run, same
from tests.train.compute.test_engine import TYPES

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks.checker import Checks, UnreliableDeviceError
from mainstay_train.checks.places import Phase
from mainstay_train.checks.sums import SUM
from mainstay_train.compute.engine import Engine
from mainstay_train.model.workload import WorkloadError


def checked(tell: Any) -> Engine:
    engine: Engine = build(0, 1)
    engine.checks = Checks(Mode.FULL, tell=tell)
    assert engine.interpreter is not None
    engine.interpreter._checks = engine.checks
    return engine


KERNELS = {
    "compiled": (0, 9, "mainstay.row_sums", "mainstay.squares", "aten.addcmul"),
    "torch": (0, 9, "aten.copy_", "aten.add_", "aten.mul"),
}
"""Of a reduction, its digest and its norms, by the form of both."""


@pytest.mark.parametrize(
    ("form", "kernel"),
    [(form, kernel) for form, kernels in KERNELS.items() for kernel in kernels],
    indirect=["form"],
)
def test_a_reduction_that_begins_early_is_checked_in_its_own_thread(
    form: str, kernel: int | str
) -> None:
    del form
    found: list[tuple[Finding, threading.Thread]] = []
    expected = run(build(0, 1), TYPES, Cells(), None)
    engine = checked(lambda finding: found.append((finding, threading.current_thread())))
    engine.checks.order("flip", 0, Phase.REDUCE, flip_of(kernel, bit=22))
    cells = Cells()

    ballot, *others = run(engine, TYPES, cells, early_for(TYPES, cells))

    ((finding, thread),) = found
    assert finding.verdict is Verdict.PRIMARY_HIT
    assert thread is not threading.current_thread()
    assert bool(ballot.problem) == (finding.operator == SUM)
    if ballot.problem:  # others have got it: all reduce again
        assert finding.remedy is Remedy.REDUCE_AGAIN
        ballot, *others = run(engine, (), cells, None)
        assert len(found) == 1
    else:
        assert kernel in (finding.ordinal, finding.operator)
    assert ballot.rest  # only who checks compares that
    same((replace(ballot, rest=""), *others), expected)


def test_an_unreliable_device_ends_a_reduction_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, cells = checked(lambda _: None), Cells()
    engine.compute(TYPES[:-1], 0, None)
    compute = engine.checks.over

    def worn_in_reduce(phase: Phase, *args: Any) -> Any:
        if phase is Phase.REDUCE:
            Worn(monkeypatch)
        return compute(phase, *args)

    monkeypatch.setattr(engine.checks, "over", worn_in_reduce)
    with pytest.raises(UnreliableDeviceError):
        run(engine, TYPES[-1:], cells, early_for(TYPES, cells))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_an_unreliable_device_is_no_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    """It is no WorkloadError, which would fail the job: another device may do."""
    engine = checked(lambda _: None)
    over = engine.checks.over

    def worn(at: Phase, *args: Any) -> Any:
        if at is phase:
            Worn(monkeypatch)
        return over(at, *args)

    monkeypatch.setattr(engine.checks, "over", worn)
    with pytest.raises(UnreliableDeviceError, match=f"{phase.value} of"):
        engine.compute(TYPES, 0, None)
    assert not issubclass(UnreliableDeviceError, WorkloadError)
