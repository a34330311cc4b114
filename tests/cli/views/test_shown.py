"""What is printed: recoveries, steps, status, and the demo's verdict."""

import io
from typing import Any

from mainstay_cli.commands import demo, status, timeline
from mainstay_cli.local.run import RunResult
from mainstay_cli.views.progress import PlainProgress, StepLine

RECOVERY: dict[str, Any] = {
    "fault": "pod demo-3 with r1.s0.i0 is gone",
    "method": "mask",
    "exact": True,
    "reason": "every stage still has a living cell",
    "quorum": {"id": 2, "nonce": "n"},
    "from_step": 20,
    "times": {
        "detect_s": 0.01,
        "decide_s": 0.002,
        "fence_s": 0.03,
        "load_s": 0.004,
        "resume_s": None,
    },
    "first_commit_after_s": 0.05,
    "lost_steps": 0,
    "done": True,
}


def result(steps: int = 3, final: str = "f", **changes: Any) -> RunResult:
    report = {
        "digests": {"final": {"params": final}, "steps": [{"step": i} for i in range(steps)]},
        "steps": {"committed": steps, "redone": 0, "lost": 0},
    }
    values = {"state": "complete", "reason": "", "report": report, "recoveries": []} | changes
    return RunResult(**values)


def test_events_show_how_long_after_the_first_they_came() -> None:
    events = [
        {"at_s": 1000.0, "type": "Normal", "message": "pod a registered"},
        {"at_s": 1002.5, "type": "Warning", "message": "pod a is gone"},
    ]
    first, second = timeline.render_events(events).splitlines()
    assert first.endswith("+   0.000 s  Normal   pod a registered")
    assert second.endswith("+   2.500 s  Warning  pod a is gone")
    assert timeline.render_events([]) == "no events"


def test_a_timeline_has_method_reason_five_times_and_lost_steps() -> None:
    text = timeline.render([RECOVERY])
    assert "step 20: pod demo-3 with r1.s0.i0 is gone" in text
    assert "mask (exact): every stage still has a living cell" in text
    assert "detect 0.010 s  decide 0.002 s  fence 0.030 s  load 0.004 s  resume -" in text
    assert "steps lost = 0" in text
    assert timeline.render([]) == "no recoveries"


def test_an_approximate_recovery_is_shouted() -> None:
    assert "APPROXIMATE" in timeline.render([RECOVERY | {"exact": False}])


def test_a_recovery_is_printed_once_and_only_when_it_is_over() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream=stream)
    progress.recovery(RECOVERY | {"done": False})
    assert stream.getvalue() == ""
    progress.recovery(RECOVERY)
    progress.recovery(RECOVERY)
    assert stream.getvalue().count("mask (exact)") == 1
    assert stream.getvalue().count("\n") == 1


def test_a_step_is_one_line() -> None:
    stream = io.StringIO()
    line = StepLine(step=6, num_steps=60, loss=4.5, tokens_per_s=1234.5, quorum="q2", replicas=3)
    PlainProgress(stream=stream).step(line)
    assert stream.getvalue() == "step  7/60  loss   4.5000      1,234 tok/s  q2  3 replicas\n"


def test_a_quiet_run_prints_nothing() -> None:
    stream = io.StringIO()
    PlainProgress(quiet=True, stream=stream).say("x")
    assert stream.getvalue() == ""


def test_the_demo_passes_only_if_it_shows_what_it_claims() -> None:
    two = [RECOVERY, RECOVERY]
    assert demo.judge(result(), result(recoveries=two), 2) == []
    assert "the runs differ" in demo.judge(result(), result(final="x", recoveries=two), 2)[0]
    assert demo.judge(result(), result(recoveries=[RECOVERY]), 2) == [
        "recovered from: 1 of 2 faults"
    ]
    assert demo.judge(result(recoveries=two), result(recoveries=two), 2) == [
        "the undisturbed run had to recover"
    ]
    assert "nothing was compared" in demo.judge(result(0), result(0, recoveries=two), 2)[0]
    joined = [*two, RECOVERY | {"method": "join"}]
    assert demo.judge(result(), result(recoveries=joined), 2) == []


def test_a_status_says_who_leaves_and_who_is_held_back() -> None:
    job = {
        "name": "demo",
        "state": "running",
        "step": 7,
        "replicas": 2,
        "replicas_wanted": 3,
        "leaving": [
            {"pod": "demo-2", "uid": "u", "reason": "SIGTERM", "left_s": 12.2, "waits": "no spare"}
        ],
        "held_back": [{"what": "demo-4/0", "failures": 3, "left_s": 1.9, "reason": "code 1"}],
    }
    text = status.render({"job": job, "members": []})
    assert "whole: 2 of 3 replicas" in text
    assert "pod demo-2 hands its work over: SIGTERM, 12 s left, waits: no spare" in text
    assert "demo-4/0 is held back for 2 s: it ended 3 times in a row" in text
    assert "approximate" not in text
    approximate = status.render({"job": job | {"approximate_since": 5}, "members": []})
    assert "\n  approximate since step 5\n" in approximate


def test_a_status_has_ranks_with_slots_and_pids() -> None:
    text = status.render(
        {
            "job": {"name": "demo", "state": "running", "step": 7, "quorum": {"id": 3}},
            "members": [
                {
                    "rank": "r0.s0.i0",
                    "slot": "demo-1/0",
                    "pid": 123,
                    "phase": "computing",
                    "step": 7,
                },
                {"rank": "spare", "slot": "demo-2/0", "pid": 0, "phase": "unknown", "step": 0},
            ],
            "recoveries": [RECOVERY],
        }
    )
    assert "demo: running, 7 steps committed, quorum q3" in text
    assert "r0.s0.i0" in text
    assert "123" in text
    assert next(line for line in text.splitlines() if "spare" in line).split()[2] == "-"
    assert "mask (exact)" in text
