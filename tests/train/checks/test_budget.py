"""A budget for checks that wait which no device could hold is refused by its field."""

from __future__ import annotations

import pytest
import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_train.base.device import memory_of
from mainstay_train.checks.budget import check_budget
from mainstay_train.compute import purity
from mainstay_train.model import workload as workloads

GIB = 1 << 30


def test_a_budget_above_what_the_device_has_is_refused_by_the_field() -> None:
    message = "spec.detection.dmr.memory: is 9.0 GiB, but cpu has 8.0 GiB in all; must be at most"
    for plan in (PlanName.DYNAMIC, PlanName.AUTO, PlanName.FILE):
        with pytest.raises(InvalidSpecError, match=message):
            check_budget(9 * GIB, 8 * GIB, "cpu", Mode.FULL, plan)
        check_budget(8 * GIB, 8 * GIB, "cpu", Mode.FULL, plan)
        check_budget(9 * GIB, None, "cpu", Mode.FULL, plan)


def test_where_nothing_waits_no_budget_counts() -> None:
    check_budget(9 * GIB, GIB, "cpu", Mode.FULL, PlanName.NAIVE)
    check_budget(9 * GIB, GIB, "cpu", Mode.PIGGYBACK, PlanName.DYNAMIC)


def test_a_trainer_looks_at_its_device_before_it_tries_its_blocks() -> None:
    has = memory_of(torch.device("cpu"))
    assert has is not None
    assert has > 1 << 28
    llama = workloads.load("mainstay_train.models.llama:workload", {"dim": 16, "heads": 2})
    with pytest.raises(InvalidSpecError, match=r"detection\.dmr\.memory: is "):
        purity.check(
            llama, torch.device("cpu"), Mode.FULL, PlanName.DYNAMIC, memory_bytes=has + (1 << 40)
        )
