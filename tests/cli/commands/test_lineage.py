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

    def connect(self) -> Run:
        return self

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def allow_approximation(
        self, job: str, stages: list[int] | None, *, dry_run: bool
    ) -> dict[str, Any]:
        assert job == self.job
        self.asked.append((stages, dry_run))
        return {"would": "stage 1 is made anew", "stages": [1]}


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
