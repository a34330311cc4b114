"""What is printed: recoveries, steps, status, and the demo's verdict."""

import io
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from mainstay_cli.base.comparison import compare_reports
from mainstay_cli.base.entry import run_app
from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands import (
    demo,
    faults,
    kubectl,
    lineage,
    local,
    operations,
    status,
    timeline,
)
from mainstay_cli.local.run import RunResult
from mainstay_cli.views.live import LiveProgress
from mainstay_cli.views.progress import PlainProgress, StepLine
from mainstay_core.base import codec
from mainstay_core.wire.reinitialisation import LineagePage

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


def test_an_approximate_recovery_says_since_when_the_job_is_so() -> None:
    made = RECOVERY | {"method": "approximate", "exact": False}
    assert "approximate (approximate): every" in timeline.render([made])
    told = timeline.render([made | {"approximate_since": 8}])
    assert "approximate (approximate since step 8): every" in told
    assert "approximate" not in timeline.render([RECOVERY])


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
    assert (
        replace(line, approximate_since=5)
        .text()
        .endswith("q2  3 replicas  approximate since step 5")
    )


def test_a_quiet_run_prints_nothing() -> None:
    stream = io.StringIO()
    PlainProgress(quiet=True, stream=stream).say("x")
    assert stream.getvalue() == ""


def test_a_flip_that_changed_nothing_is_told_to_who_injected_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip = {"operator": "aten.mmm", "element": 5, "bit": 30, "execution": "primary"}
    fired = {"pod": "demo-0", "slot": 0, "rank": "r0.s0.i0", "at_s": 1.0}
    put = {"id": "a", "action": "flip", "step": 3, "replica": 0, "stage": 0, "phase": "forward"}
    put |= {"flip": flip, "state": "fired", "fired": fired}
    missed = put | {"id": "b", "state": "missed", "problem": "the nearest names there are aten.mm"}

    shown = faults.render([put, missed]).splitlines()
    ended = result()
    ended.report["faults"] = [put, missed]
    local.summarize(ended, tmp_path, PlainProgress(quiet=True))

    assert shown[1].endswith("primary  fired on demo-0/0")
    assert shown[2].endswith("primary  missed: the nearest names there are aten.mm")
    said = "warning: fault b changed nothing: the nearest names there are aten.mm\n"
    assert capsys.readouterr().err == said


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


FORK = {
    "version": 5,
    "chain": "0" * 32,
    "made": {"positions": [], "reason": "stage 1 is made anew from 0.5 of stage 0, 0.5 of stage 2"},
    "lr_boost": 1.1,
    "boost_steps": 100,
}
LINEAGE = {
    "exact": False,
    "approximate_since": 5,
    "course": "approximate since step 5",
    "num_forks": 3,
    "forks": [FORK],
    "allowed": True,
    "after_lost_steps": 2,
    "permitted_by": "alice",
    "stages": [
        {"stage": 0, "possible": False, "reason": "it has no two neighbours"},
        {"stage": 1, "possible": True, "reason": "stages 0 and 2"},
    ],
}


def test_a_lineage_has_each_fork_and_what_each_stage_could_be_made_anew_from() -> None:
    page = codec.decode(LineagePage, LINEAGE)
    assert lineage.render("demo", page).splitlines() == [
        "demo: approximate since step 5",
        "  2 earlier: not known in full here",
        (
            "  step 5: stage 1 is made anew from 0.5 of stage 0, 0.5 of stage 2; learning rate "
            "x 1.1 for 100 steps"
        ),
        (
            "  if every copy of a stage is lost (recovery.allowApproximate is true, "
            "approximateAfterLostSteps 2; alice allows the next recovery):"
        ),
        "    stage 0: no, it has no two neighbours",
        "    stage 1: from stages 0 and 2",
    ]
    given = {"who": "bob", "at_s": 1767225600.0, "stages": [1], "after_lost_steps": 100}
    ahead = lineage.render("demo", codec.decode(LineagePage, LINEAGE | {"ahead": given}))
    assert (
        "  permission: given by bob at 2026-01-01 00:00:00+00:00, for one recovery of stage 1 that "
        "would lose more than 100 steps otherwise; has no effect while recovery.allowApproximate "
        "is on"
    ) in ahead.splitlines()
    off = LINEAGE | {"ahead": given | {"who": "bob\x1b[2J"}, "allowed": False}
    (line,) = (
        each
        for each in lineage.render("demo", codec.decode(LineagePage, off)).splitlines()
        if "permission" in each
    )
    assert line.isprintable()
    assert line.endswith("would lose more than 100 steps otherwise")
    job = {"name": "demo", "state": "running", "step": 7, "approximate_since": 5}
    told = status.render({"job": job, "members": [], "lineage": LINEAGE})
    assert "    stage 1: from stages 0 and 2" in told


def test_a_fork_is_shown_with_its_norms_and_what_came_of_it() -> None:
    block = {"block": "layers.1", "sources": [], "norms_sq": [0.125, 0.375]}
    place = {"stage": 1, "blocks": [block, block | {"block": "layers.2"}]}
    states = [{"stage": s, "masters": str(s) * 32} for s in range(3)]
    fork = FORK | {
        "made": FORK["made"] | {"positions": [place]},
        "outcome": {"quorum": {"id": 7, "nonce": "5eed"}, "states": states},
    }
    page = codec.decode(LineagePage, LINEAGE | {"forks": [fork], "num_forks": 1, "stages": []})
    assert lineage.render("demo", page).splitlines()[2:] == [
        "    weighed by squared gradient norms 0.125 of stage 0 and 0.375 of stage 2",
        "    committed in quorum q7-5eed, with masters of",
        f"      stage 0: {'0' * 32}",
        f"      stage 1: {'1' * 32} (made anew)",
        f"      stage 2: {'2' * 32}",
    ]


def test_what_trainers_have_told_reaches_a_terminal_without_control_characters(
    tmp_path: Path,
) -> None:
    """A reason, or the name of a block, may be anything."""
    evil = "\x1b[2J\x1b]0;own\x07"
    shown = r"\x1b[2J\x1b]0;own\x07"
    fork = FORK | {"made": {"positions": [], "reason": f"{evil}\nexact"}}
    stages = [{"stage": 0, "possible": False, "reason": f"{evil} has no like block"}]
    page = codec.decode(LineagePage, LINEAGE | {"forks": [fork], "stages": stages})
    assert rf"  step 5: {shown}\nexact; learning" in lineage.render("demo", page)
    history = {"approximate_since": 5, "lineage": {"num_forks": 1, "forks": [fork]}}
    stream = io.StringIO()
    local.summarize(
        result(final="f", report={"digests": {}, **history}), tmp_path, PlainProgress(stream=stream)
    )
    event = {"at_s": 0.0, "type": "Warning", "message": evil}
    recovery = RECOVERY | {"reason": evil, "fault": evil}
    (difference,) = compare_reports({"digests": {}}, {"digests": {}, **history})
    texts = [
        lineage.render("demo", page),
        stream.getvalue(),
        timeline.render_events([event]),
        timeline.render([recovery]),
        status.render(
            {
                "job": {"name": "demo", "state": "running"},
                "members": [],
                "lineage": LINEAGE | {"stages": stages},
                "recoveries": [recovery],
            }
        ),
        str(difference),
    ]
    for text in texts:
        assert shown in text
        assert text.replace("\n", "").isprintable()


def test_what_ended_a_job_reaches_a_terminal_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception's message, a reason and what a pod tells may be anything; lines stay lines."""
    evil, shown = "\x1b[2Jone\r\n\ttwo\x9b31m", ("\\x1b[2Jone\\r", "two\\x9b31m")
    crash = {"trainer": "demo-1/0", "type": evil, "message": evil, "frames": [evil]}
    job = {
        "name": "demo",
        "state": "failed",
        "reason": evil,
        "crash": crash,
        "checkpoint": {"problem": evil},
        "tainted": [{"told": evil}],
        "leaving": [{"pod": evil, "reason": evil, "left_s": None, "waits": evil}],
        "protections": [{"name": "a", "given": False, "why": evil}],
        "entry": evil,
    }
    member = {"rank": evil, "slot": evil, "pid": 1, "phase": evil, "step": 0}
    fault = {"id": evil, "action": evil, "process": evil, "step": 1, "state": evil, "problem": evil}
    stream, wide = io.StringIO(), io.StringIO()
    table = LiveProgress(Console(file=wide, width=400))
    for progress in (PlainProgress(stream=stream), table):
        progress.say(evil)
        progress.warn(evil)
        local.summarize(result(report={"crash": crash}), tmp_path, progress)
    table.members([member])
    table.event({"type": "Warning", "reason": "Failed", "message": evil})
    condition = {"type": "Failed", "status": "True", "reason": "Failed", "message": evil}
    manifest = {
        "metadata": {"namespace": "n", "name": "demo"},
        "status": {"state": "Failed", "conditions": [condition]},
    }

    def fail() -> None:
        raise UsageError(evil)

    commands = typer.Typer()
    commands.command()(fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        run_app(commands, [], "mainstay")
    told = capsys.readouterr()
    texts = [
        status.render({"job": job, "members": [member]}),
        faults.render([fault]),
        kubectl.render_object(manifest),
        operations.describe_leaving(job["leaving"][0]),
        stream.getvalue(),
        wide.getvalue(),
        told.err,
    ]
    for text in texts:
        assert all(part in text for part in shown)
        assert text.replace("\n", "").isprintable()
    lines = texts[0].splitlines()
    reason = lines.index("  \\x1b[2Jone\\r")
    assert lines[reason + 1].strip() == "two\\x9b31m"


def test_the_end_of_an_approximate_run_says_so_with_each_fork() -> None:
    stream = io.StringIO()
    report = result().report | {
        "approximate_since": 5,
        "lineage": {"num_forks": 1, "forks": [FORK]},
    }
    local.summarize(result(report=report), Path("run"), PlainProgress(stream=stream))
    assert "\n  approximate since step 5\n  step 5: stage 1 is made anew" in stream.getvalue()


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
