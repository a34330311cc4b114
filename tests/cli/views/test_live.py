"""The live table, made of values; and what a terminal gets of it."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from mainstay_cli.views.live import LiveProgress, LiveView, render
from mainstay_cli.views.progress import StepLine

LINE = StepLine(step=4, num_steps=10, loss=2.5, tokens_per_s=1234.0, quorum="q3", replicas=2)
RANK: dict[str, Any] = {
    "rank": "r0.s1.i0",
    "slot": "job-2/0",
    "pid": 4711,
    "phase": "healing",
    "step": 0,
    "joining": True,
    "settled": False,
}
RECOVERY: dict[str, Any] = {
    "quorum": {"id": 2, "nonce": "n"},
    "fault": "pod job-3 is gone",
    "method": "mask",
    "exact": True,
    "reason": "every stage still has a living cell",
    "lost_steps": 0,
    "first_commit_after_s": 0.06,
    "done": True,
}
EVENT = {"type": "Warning", "reason": "FaultInjected", "message": "injected fault a\nwith a trace"}


def shown(view: LiveView, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(view, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines()), text
    return str(text)


def test_it_has_the_step_its_ranks_recoveries_and_events() -> None:
    text = shown(
        LiveView(line=LINE, members=(RANK,), recoveries=(RECOVERY,), events=(EVENT,)), width=120
    )
    assert "step  5/10" in text
    assert "q3  2 replicas ===" in text
    assert "r0.s1.i0  job-2/0  4711  healing (joins)  0" in " ".join(text.split("\n")).replace(
        "  " * 2, "  "
    )
    assert "mask (exact): pod job-3 is gone" in text
    assert "FaultInjected: injected fault a" in text
    assert "with a trace" not in text


def test_before_the_first_step_there_is_only_what_is_known() -> None:
    assert shown(LiveView(members=(RANK,))).strip().startswith("rank")
    assert shown(LiveView()).strip() == ""


def test_a_recovery_under_way_is_marked() -> None:
    open_ = RECOVERY | {"done": False, "first_commit_after_s": None}
    assert "  > mask" in shown(LiveView(recoveries=(open_,)))


def test_only_the_newest_recoveries_and_events_stay() -> None:
    recoveries = tuple(RECOVERY | {"fault": f"fault {n}."} for n in range(20))
    text = shown(LiveView(recoveries=recoveries))
    assert "fault 13." not in text
    assert "fault 14." in text
    assert "fault 19." in text


def test_a_narrow_terminal_gets_cut_lines() -> None:
    text = shown(LiveView(line=LINE, recoveries=(RECOVERY,), events=(EVENT,)), width=40)
    assert "…" in text


def test_what_is_said_scrolls_by_above_the_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with LiveProgress(console) as progress:
        progress.step(LINE)
        progress.members([RANK])
        progress.event(EVENT)
        progress.recovery(RECOVERY)
        progress.warn("a pod is gone")
        progress.say("hello")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "warning: a pod is gone" in text
    assert "hello" in text
    assert "job-2/0" in text
