"""By which rules a trainer checks, from the plan on that it adopts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.worlds.pods import make_config

from mainstay_core.dmr.settings import CheckRules, Mode, PlanName
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


def test_blocks_are_tried_when_a_witness_or_checks_are_switched_on_and_not_again() -> None:
    tried: list[CheckRules] = []
    training: Any = SimpleNamespace(try_blocks=tried.append)
    engine: Any = SimpleNamespace(
        follow=lambda _: None, checks=SimpleNamespace(planner=None), stage=0
    )
    rules = RulesOfChecks(make_config(), training, lambda *_: None)
    witness = CheckRules(witness_every_steps=2)
    naive = CheckRules(mode=Mode.FULL)
    late = CheckRules(mode=Mode.FULL, plan=PlanName.DYNAMIC, witness_every_steps=2)

    for step, wanted in enumerate((witness, CheckRules(), witness, naive, witness, late, naive)):
        rules.follow(wanted, engine, step)

    assert tried == [witness, naive, late]
