"""What a status says of a job's checks: what is executed twice, by whom, and what is not."""

from __future__ import annotations

import itertools

import pytest

from mainstay_core.dmr import settings
from mainstay_core.dmr.settings import (
    Mode,
    PlanName,
    StageChecks,
    Witnessed,
    describe_coverage,
    uncovered,
)

STAGE = StageChecks(stage=0, plan="Auto", shares="P 60 %, inter 40 %", reason="planned")


def test_a_job_without_checks_and_witness_says_nothing() -> None:
    assert describe_coverage(Mode.OFF) == ""
    assert describe_coverage(Mode.OFF, is_loop=True) == ""


def test_what_is_not_covered_is_named() -> None:
    assert describe_coverage(Mode.FULL) == (
        "transient faults: naive 100 %; shares are of all that torch computes in a step; "
        "deterministic ones: nothing; not covered: faults that repeat themselves on a device, what "
        "travels between stages, collectives in place, what torch's dispatcher does not show, the "
        "state at rest until a vote compares it, what the host computes"
    )
    assert describe_coverage(Mode.FULL, is_loop=True) == (
        "transient faults: naive 100 %; works are compared by gradient and loss, all else by "
        "kernels; deterministic ones: nothing; not covered: faults that "
        "repeat themselves on a device, the state at rest until a vote compares it, "
        "what the host computes"
    )


def test_the_shares_of_a_plan_are_of_the_passes_that_it_is_about() -> None:
    told = describe_coverage(Mode.FULL, PlanName.AUTO, [STAGE])
    assert told.startswith(
        "transient faults: stage 0: P 60 %, inter 40 %; shares are of the operator time of a "
        "micro-batch's passes; sums, norms, apply, the cast and the batch are executed twice at "
        "once besides; deterministic ones: nothing; not "
    )
    before = describe_coverage(Mode.FULL, PlanName.AUTO)
    assert "; shares are of all that torch computes in a step; " in before


def test_a_witness_says_how_many_devices_it_agreed_with_and_leaves_less_uncovered() -> None:
    told = describe_coverage(
        Mode.OFF, witness_every_steps=50, witnessed=Witnessed(num_clean=5, num_devices=6)
    )
    assert told == (
        "transient and deterministic faults: a witness computes a shard type again in one of 50 "
        "steps, 5 of 6 devices witnessed in the last round; not covered: all "
        "shard types that no witness compares, sums of types and of "
        "cells, the cast and moments, the state at rest until a vote compares it"
    )
    both = describe_coverage(
        Mode.FULL, witness_every_steps=1, witnessed=Witnessed(num_clean=0, num_devices=1)
    )
    assert both.startswith("transient faults: naive 100 %; shares are of all that torch computes")
    assert (
        "; deterministic ones: a witness computes a shard type again in each step, 0 of 1 device "
        "witnessed in the last round; not covered: "
    ) in both
    assert (
        "not covered: faults that repeat themselves on a device, but for the shard types that a "
        "witness compares, what travels between stages"
    ) in both


@pytest.mark.parametrize("mode", list(Mode))
def test_whatever_is_checked_something_is_not(mode: Mode) -> None:
    for every, is_loop in itertools.product((0, 3), (False, True)):
        missing = uncovered(mode, witness_every_steps=every, is_loop=is_loop)
        assert missing
        assert len(set(missing)) == len(missing)
        assert (settings.BETWEEN_STAGES in missing) is (mode is not Mode.OFF and not is_loop)
