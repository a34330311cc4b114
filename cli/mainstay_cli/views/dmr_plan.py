"""Shows a stage's profile and a plan of checks by re-execution as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mainstay_core.base.words import count, show_bytes
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.plan import Choice, Method, Plan, sum_loads
from mainstay_core.dmr.profiles import WHOLE_WAY, Profile

MAX_LISTED = 10
"""Windows, and naive operators, that are listed by name."""
MEANINGS = {
    Method.PIGGYBACK: "the recompute is the second execution",
    Method.INTER: "again in a wait for another stage or replica",
    Method.INTRA: "again in a wait for an inner rank",
    Method.NAIVE: "again at once",
    Method.DYNAMIC: "decided while the step runs",
    Method.COMPARED: "its outputs are compared anyway",
    Method.NONE: "its result does not count",
}


def _name_stage(profile: Profile) -> str:
    way = "" if profile.way == WHOLE_WAY else f", way {profile.way}"
    return f"stage {profile.stage}{way}"


def describe_profile(profile: Profile) -> list[str]:
    """Return the lines of a profile: operators, their time and what they make, by pass."""
    rows = [["pass", "operators", "without fixed shapes", "time", "makes"]]
    for in_pass in Pass:
        operators = [operator for operator in profile.operators if operator.in_pass is in_pass]
        made = (name for operator in operators for name in operator.outputs)
        if operators:
            rows.append(
                [
                    in_pass.value,
                    str(len(operators)),
                    str(sum(not operator.static for operator in operators)),
                    _show_s(sum(operator.median_s for operator in operators)),
                    show_bytes(sum(profile.graph.tensors[name].size_bytes for name in made)),
                ]
            )
    recomputed = len(profile.recomputed_at)
    waits = [f"{window.name} {_show_s(window.usable_s)}" for window in profile.windows]
    return [
        (
            f"{_name_stage(profile)}: {count(len(profile.operators), 'operator')}, {recomputed} of "
            f"them recomputed; memory for checks of a micro-batch "
            f"{show_bytes(profile.budget_bytes)}"
        ),
        *_align(rows),
        f"waits, as they were told: {', '.join(waits) or 'none'}",
    ]


def describe_plan(profile: Profile, plan: Plan) -> list[str]:
    """Return the lines of a plan: shares by method, what is exposed, windows, and naive operators.

    Args:
        profile: of the stage that the plan is for.
        plan: checked against it.
    """
    totals = plan.totals
    lines = [
        (
            f"{_name_stage(profile)}: {count(len(profile.operators), 'operator')}, "
            f"{_show_s(totals.operator_s)} a passage; {count(len(profile.windows), 'window')}; "
            f"{count(len(profile.ac_segments), 'AC segment')}"
        ),
        f"policy {plan.policy.value}, memory for checks {show_bytes(plan.budget_bytes)}",
        "",
    ]
    rows = [["method", "operators", "time", "share", ""]]
    rows += [
        [
            share.method.value,
            str(share.num_operators),
            _show_s(share.operator_s),
            _show_share(share.operator_s, totals.operator_s),
            MEANINGS[share.method],
        ]
        for share in totals.shares
    ]
    lines += _align(rows)
    lines += [
        "",
        (
            f"exposed: {_show_s(totals.exposed_s)} a passage "
            f"({_show_share(totals.exposed_s, totals.operator_s)} of its operators), of it "
            f"{_show_s(totals.overrun_s)} as windows are too short"
        ),
        f"retained: at most {show_bytes(totals.peak_bytes)}",
    ]
    return [*lines, *_describe_windows(profile, plan), *_describe_naive(profile, plan)]


def describe_sweep(planned: Sequence[tuple[str, Profile, Plan]]) -> list[str]:
    """Return a table of profiles that recompute different shares of a stage, each with its plan.

    Args:
        planned: name, profile and plan of each.
    """
    rows = [["profile", "recomputed", "operators", "again", "exposed", "passage", "retained"]]
    passages_s = []
    for name, profile, plan in planned:
        totals, again = plan.totals, profile.recomputed_at
        again_s = math.fsum(profile.operators[place].median_s for place in again)
        passages_s.append(totals.operator_s + again_s + totals.exposed_s)
        rows.append(
            [
                name,
                str(len(again)),
                _show_s(totals.operator_s),
                _show_s(again_s),
                _show_s(totals.exposed_s),
                _show_s(passages_s[-1]),
                show_bytes(totals.peak_bytes),
            ]
        )
    best = planned[passages_s.index(min(passages_s))][0]
    return [*_align(rows), f"shortest with its checks: {best}"]


def describe_stages(coverage: str, stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines about the checks of a job: of each stage that was planned, and why.

    Args:
        coverage: of the job, in short; empty: nothing is checked.
        stages: what trainers have told, as JSON.
    """
    if not coverage:
        return ["nothing is checked: spec.detection.dmr.mode is Off, and there is no witness"]
    if not stages:
        return [f"checks: {coverage}"]
    lines = []
    for stage in stages:
        lines += [
            f"stage {stage['stage']}: plan {stage['plan']}, {stage['shares']}",
            f"  {stage['reason']}",
        ]
    return lines


def describe_choice(profile: Profile, plan: Plan, choice: Choice) -> list[str]:
    """Return the lines about one operator: its method and reason, and what is compared."""
    operator = profile.operators[profile.graph.places[choice.operator]]
    lines = [
        (
            f"{choice.operator} ({operator.name}), {_show_s(operator.median_s)}: "
            f"{choice.method.value}, {MEANINGS[choice.method]}"
        ),
        f"  why: {choice.reason}",
    ]
    for piece in plan.pieces:
        if choice.operator in piece.operators and choice.operator not in piece.helpers:
            compared = [
                f"{comparison.tensor} (by {comparison.by.value})"
                for comparison in piece.comparisons
                if comparison.tensor in operator.outputs
            ]
            lines.append(
                f"  compared: {', '.join(compared) or 'nothing: no output leaves its piece'}"
            )
            if len(piece.operators) > 1:
                lines.append(f"  with: {', '.join(piece.operators)}")
            if piece.copies:
                lines.append(f"  copied before they are overwritten: {', '.join(piece.copies)}")
    return lines


def _describe_windows(profile: Profile, plan: Plan) -> list[str]:
    loads = sum_loads(profile, plan.pieces)
    used = [window for window in profile.windows if window.name in loads]
    if not used:
        return ["windows: none is used"]
    used.sort(key=lambda window: -loads[window.name])
    rows = [["window", "kind", "length", "checks", "too long by"]]
    rows += [
        [
            window.name,
            window.kind.value,
            _show_s(window.usable_s),
            _show_s(loads[window.name]),
            _show_s(max(0.0, loads[window.name] - window.usable_s)),
        ]
        for window in used[:MAX_LISTED]
    ]
    more = [f"and {len(used) - MAX_LISTED} more"] if len(used) > MAX_LISTED else []
    return ["", *_align(rows), *more]


def _describe_naive(profile: Profile, plan: Plan) -> list[str]:
    """List the naive operators, the longest first, with the reason of each."""
    naive = [
        (operator, choice)
        for operator, choice in zip(profile.operators, plan.choices, strict=True)
        if choice.method is Method.NAIVE
    ]
    if not naive:
        return ["", "naive: none"]
    naive.sort(key=lambda pair: -pair[0].median_s)
    lines = ["", f"naive: {count(len(naive), 'operator')}, the longest first"]
    lines += [
        f"  {choice.operator} ({operator.name}), {_show_s(operator.median_s)}: {choice.reason}"
        for operator, choice in naive[:MAX_LISTED]
    ]
    return [*lines, *([f"  and {len(naive) - MAX_LISTED} more"] if len(naive) > MAX_LISTED else [])]


def _show_s(seconds: float) -> str:
    """Return a time for people, e.g. 1.25 ms."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _show_share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the columns of words to the left, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if rows[-1][at][:1].isdigit() else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
