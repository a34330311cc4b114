"""By which rules a trainer checks, from the plan on that it adopts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.worlds.pods import make_config

from mainstay_core.dmr.settings import CheckRules, Mode
from mainstay_train.session.checking import RulesOfChecks
from mainstay_train.session.session import Session


def test_a_trainer_that_only_heals_checks_by_the_plan_that_it_adopts() -> None:
    followed: list[CheckRules] = []
    checks = SimpleNamespace(planner=None)
    engine = SimpleNamespace(
        computes=lambda *_: True, follow=followed.append, checks=checks, stage=0
    )
    training: Any = SimpleNamespace(try_blocks=lambda _: None)
    rules = CheckRules(mode=Mode.FULL)
    session: Any = object.__new__(Session)
    session.state = SimpleNamespace(
        plan=SimpleNamespace(checks=rules, num_stages=1),
        member_stage=0,
        member_inner=0,
        step_at_hand=7,
    )
    session._engine = engine
    session._rules = RulesOfChecks(make_config(), training, lambda *_: None)

    session.prepare()
    session.prepare()

    assert followed == [rules], "before it copies a state, and once"
