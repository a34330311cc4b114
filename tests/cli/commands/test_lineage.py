"""``mainstay approximate``: what is allowed is what was shown."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands import lineage


class Run:
    """A running job whose api takes note of each request."""

    name = job = "demo"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int] | None, bool]] = []
        self.limits: list[int | None] = []

    def connect(self) -> Run:
        return self

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def allow_approximation(
        self,
        job: str,
        stages: list[int] | None,
        *,
        dry_run: bool,
        after_lost_steps: int | None = None,
    ) -> dict[str, Any]:
        assert job == self.job
        self.asked.append((stages, dry_run))
        self.limits.append(after_lost_steps)
        return {"would": "stage 1 is made anew", "stages": [1]}

    async def withdraw_approximation(self, job: str) -> dict[str, Any]:
        assert job == self.job
        return {"withdrawn": "bob takes back what alice has allowed"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run()
    monkeypatch.setattr(lineage.runs, "find_running", lambda _: run)
    return run


def test_the_stages_that_were_shown_are_allowed_and_none_that_is_lost_since(run: Run) -> None:
    lineage.approximate("demo", yes=True)
    assert run.asked == [(None, True), ([1], False)]


def test_nothing_is_allowed_by_a_dry_run_or_where_nobody_can_be_asked(run: Run) -> None:
    lineage.approximate("demo", dry_run=True)
    with pytest.raises(UsageError, match="--yes"):
        lineage.approximate("demo")
    assert [dry_run for _, dry_run in run.asked] == [True, True]


def test_a_permission_is_given_ahead_with_the_most_steps_that_the_job_gives_up(run: Run) -> None:
    lineage.approximate("demo", ahead=True, after_lost_steps=0, yes=True)
    lineage.approximate("demo", stage=[2], ahead=True, after_lost_steps=9, yes=True)
    assert run.asked == [(None, True), (None, False), ([2], True), ([2], False)]
    assert run.limits == [0, 0, 9, 9]


def test_a_permission_is_taken_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    lineage.approximate("demo", withdraw=True)
    assert capsys.readouterr().out == "demo: bob takes back what alice has allowed\n"
    assert not run.asked


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ahead": True}, "--after-lost-steps: is missing"),
        ({"after_lost_steps": 3}, "goes with --ahead alone"),
        ({"withdraw": True, "dry_run": True}, "give no other option"),
        ({"withdraw": True, "stage": [1]}, "give no other option"),
    ],
)
def test_options_that_contradict_are_refused_by_name(
    run: Run, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        lineage.approximate("demo", **options)
    assert not run.asked
