"""What a rank says of its checkpoints, of its ledger entries, and when its state may be copied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.ids import QuorumId
from mainstay_core.rank.reports import KEPT_ENTRIES, EntryLog
from mainstay_core.rank.saving.own_saves import OwnSaves
from mainstay_core.rank.serving import (
    MAX_TOGETHER,
    Wanted,
    copy_attempts,
    copy_problem,
    may_copy,
)
from mainstay_core.wire.ledger import LedgerEntry


def test_a_part_is_safe_once_it_is_written_and_named_after_its_attempt() -> None:
    saves = OwnSaves().begin(4, "n")
    assert saves.told(busy=True).checkpoint_safe is None
    told = saves.written(4, "n").told(busy=False)
    assert (told.checkpoint_safe, told.checkpoint_nonce, told.checkpoint_busy) == (4, "n", False)


@pytest.mark.parametrize("written_first", [True, False])
def test_a_part_copied_from_a_bad_state_is_never_safe_written_or_not(written_first: bool) -> None:
    saves = OwnSaves().begin(4, "n")
    saves = saves.written(4, "n").void(4) if written_first else saves.void(4).written(4, "n")
    assert saves.told(busy=False).checkpoint_safe is None
    again = saves.begin(4, "m").written(4, "m").told(busy=False)
    assert (again.checkpoint_safe, again.checkpoint_nonce) == (4, "m")


def test_a_version_that_is_void_leaves_an_older_one_safe() -> None:
    saves = OwnSaves().begin(2, "n").written(2, "n").begin(4, "n2").void(4)
    assert saves.told(busy=False).checkpoint_safe == 2


def test_an_older_version_that_is_renamed_late_does_not_hide_a_newer_one() -> None:
    assert OwnSaves().renamed(6).renamed(4).status.durable == 6


def entry(step: int) -> LedgerEntry:
    return LedgerEntry(
        step=step, stage=0, quorum=QuorumId(id=1, nonce="a"), gradient="g", masters="m", data="d",
        loss=1.0, norm=1.0, tokens=1, step_s=0.1, replicas=1,
    )  # fmt: skip


def test_who_takes_over_telling_tells_its_last_entries_once_with_the_next() -> None:
    log = EntryLog()
    for step in range(KEPT_ENTRIES + 2):
        log = log.add(entry(step), post=False)
    log, entries = log.takes_over().again()
    assert [e.step for e in entries] == list(range(2, KEPT_ENTRIES + 2))
    assert log.again()[1] == ()


def test_who_told_its_entries_before_does_not_tell_them_again() -> None:
    assert EntryLog().add(entry(1), post=True).takes_over().again()[1] == ()


def test_a_joiner_waits_until_the_state_is_there_and_no_longer_than_the_quorum_lasts() -> None:
    plan = make_plan({0: ("a.1",)}, quorum=5)
    wanted = Wanted(str(plan.quorum), 0, 7)
    assert may_copy(wanted, None, plan) is None
    assert may_copy(wanted, replace(wanted, version=6), plan) is None
    assert may_copy(wanted, replace(wanted), plan) is True
    assert may_copy(wanted, None, make_plan({0: ("a.1",)}, quorum=6)) is False


def test_a_copy_is_good_with_the_masters_that_the_quorum_knows() -> None:
    assert copy_problem("masters", "masters") == ""
    assert copy_problem("masters", "") == ""
    assert copy_problem("masters", "others")


def test_sources_are_asked_together_first_and_alone_where_copies_are_compared() -> None:
    assert copy_attempts((4, 5, 6), "known") == ((4, 5, 6), (4,), (5,), (6,))
    assert copy_attempts(tuple(range(9)), "known")[0] == tuple(range(MAX_TOGETHER))
    assert copy_attempts((4, 5), "") == ((4,), (5,))
    assert copy_attempts((4,), "known") == ((4,),)
    assert copy_attempts((), "known") == ()
