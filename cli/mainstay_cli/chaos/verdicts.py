"""Judges each fault of a chaos campaign by the reports of its runs: pure functions."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mainstay_cli.base import comparison
from mainstay_cli.chaos.runs import Outcome
from mainstay_cli.views.faults import at_text, fired_text, target_text

CLOCK_SLACK_S = 0.05
"""A death may be dated a little before its fault was recorded: two processes, two clocks."""


class Judgement(enum.StrEnum):
    """The verdict on one fault."""

    EQUAL = "equal"
    DIFFERS = "DIFFERS"
    FAILED = "FAILED"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One fault of a campaign and what came of it."""

    run: int
    fault: str
    action: str
    target: str
    at: str
    judgement: Judgement
    why: str = ""
    fired_on: str = ""
    method: str = ""
    """Of the first recovery from it; empty if nobody had to recover."""
    lost_steps: int = 0
    first_commit_after_s: float | None = None

    @property
    def bad(self) -> bool:
        """Whether the promise is broken."""
        return self.judgement in (Judgement.DIFFERS, Judgement.FAILED)


def judge_run(
    number: int,
    entries: Sequence[Mapping[str, Any]],
    outcome: Outcome,
    undisturbed: dict[str, Any],
) -> tuple[Verdict, ...]:
    """Return a verdict for each fault of a run.

    Args:
        number: of the run.
        entries: its faults, as in a faults file.
        outcome: how it went.
        undisturbed: report of the same job without faults.
    """
    problem = outcome.problem
    differences = [] if problem else comparison.compare_reports(undisturbed, outcome.report)
    listed = {fault["id"]: fault for fault in outcome.faults}
    verdicts = []
    for entry in entries:
        fault = listed.get(entry["id"])
        fired = fault["fired"] if fault else None
        if problem:
            judgement, why = Judgement.FAILED, problem
        elif differences:
            judgement, why = Judgement.DIFFERS, str(differences[0])
        elif fired is None:
            judgement, why = Judgement.NOT_REACHED, _why_not(fault, listed)
        else:
            judgement, why = Judgement.EQUAL, ""
        brief = entry["action"] == "disconnect"
        recovery = _recovery_from(fired, outcome.report, brief=brief) if fired else None
        shown: Mapping[str, Any] = fault or {**entry["target"], **entry["at"]}
        verdicts.append(
            Verdict(
                run=number,
                fault=str(entry["id"]),
                action=str(entry["action"]),
                target=target_text(dict(shown)) if fault else str(entry["target"]),
                at=at_text(dict(shown)) if fault else str(entry["at"]),
                judgement=judgement,
                why=why,
                fired_on=fired_text(fired) if fired else "",
                method=str(recovery["method"]) if recovery else "",
                lost_steps=int(recovery["lost_steps"]) if recovery else 0,
                first_commit_after_s=recovery["first_commit_after_s"] if recovery else None,
            )
        )
    return tuple(verdicts)


def _why_not(fault: Mapping[str, Any] | None, listed: Mapping[str, Any]) -> str:
    if fault is None:
        return "the run does not know it"
    for relation, words in (("after", "comes after"), ("beside", "comes with")):
        other = fault.get(relation)
        if other and not listed.get(other, {}).get("fired"):
            return f"it {words} {other}, which was not reached"
    if fault.get("spare") is not None:
        return f"there was no spare {fault['spare']} at that time"
    if fault.get("during"):
        return f"its rank had no part in a {fault['during']} after {fault['of']}"
    return "the job ended before its rank came to the action"


def _recovery_from(
    fired: Mapping[str, Any], made: Mapping[str, Any], *, brief: bool
) -> dict[str, Any] | None:
    """Return the first recovery after a fault that lost a slot of its pod.

    Args:
        fired: where and when the fault fired.
        made: the run's report.
        brief: whether the fault may be over before anybody is given up: then the same
            members meet again, which is under nobody's name.
    """
    later = [
        recovery
        for recovery in made.get("recoveries", [])
        if recovery["method"] not in ("start", "join")
        and recovery["started_at_s"] >= fired["at_s"] - CLOCK_SLACK_S
    ]
    pods: Mapping[str, str] = made.get("pods", {})
    same_pod = [
        recovery
        for recovery in later
        if any(pods.get(slot["pod"]) == fired["pod"] for slot in recovery["slots"])
    ]
    met_again = [recovery for recovery in later if brief and recovery["method"] == "re-form"]
    return min(same_pod[:1] + met_again[:1], key=lambda r: float(r["started_at_s"]), default=None)
