"""``mainstay snapshots ls|verify`` and the status: what is printed, and when the exit code is 1."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mainstay_cli.base.exits import CliError, ExitCode
from mainstay_cli.commands import snapshot_copies
from mainstay_cli.commands.status import render
from mainstay_cli.local import runs
from mainstay_cli.views.snapshots import describe_summary

SUMMARY: dict[str, Any] = {
    "window": {"first": 8, "length": 4},
    "in_flight": {"first": 12, "length": 4},
    "lag": 2,
    "kinds": [{"kind": "state", "num_segments": 4, "size_bytes": 3 << 20}],
    "memory_bytes": 64 << 20,
    "used_bytes": 4 << 20,
    "fullest": "demo-1",
    "fullest_used_bytes": 3 << 20,
    "fullest_memory_bytes": 32 << 20,
    "num_stores": 2,
    "num_positions": 2,
    "num_covered": 2,
    "replay_steps": 5,
    "short_of": "",
    "coverage": "the loss of any one pod is survived",
}
POSITION = {
    "position": 1, "stage": 1, "inner": 0, "is_covered": True, "why_not": "", "num_members": 1,
    "num_copies": 2, "replay_steps": 5, "pods": ["demo-1"], "domains": ["demo-1", "rack-2"],
}  # fmt: skip
STORE = {
    "name": "demo-1",
    "used_bytes": 3 << 20,
    "memory_bytes": 32 << 20,
    "units": [
        {
            "position": 1,
            "num_units": 4,
            "units": [{"first": 0, "last": 2}],
            "states": [8, 12],
            "gradients": [{"first": 8, "last": 13}],
        }
    ],
}
TOLD: dict[str, Any] = {
    "summary": SUMMARY, "positions": [POSITION], "stores": [STORE], "silent": ["demo-2"],
}  # fmt: skip
GOOD: dict[str, Any] = {
    "check": 1, "told": ["demo-1", "demo-2"], "waiting": [], "num_segments": 12,
    "size_bytes": 6 << 20, "num_compared": 6, "num_alone": 0, "damaged": [],
    "num_records": 8, "damaged_records": [],
}  # fmt: skip
DAMAGED = {
    "pod": "demo-2", "unit_name": "layers.0", "segment": "state of unit 0 of position 1 at 8",
    "why": "it differs from 2 other copies", "key": {},
}  # fmt: skip


class Job:
    """A running job whose api tells what it was given."""

    name, job = "demo", "u"

    def __init__(self) -> None:
        self.told, self.outcomes = copy.deepcopy(TOLD), [copy.deepcopy(GOOD)]
        self.num_checks = 0
        self.later: list[dict[str, Any]] = []

    def is_running(self) -> bool:
        return True

    def connect(self) -> Job:
        return self

    def find(self, name: str | None) -> Job:
        del name
        return self

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def check_snapshots(self, job: str) -> int:
        assert job == self.job
        self.num_checks += 1
        return self.num_checks

    async def fetch(self, job: str, what: str) -> Any:
        assert job == self.job
        if what == "snapshots":
            told, self.told = self.told, self.later.pop(0) if self.later else self.told
            return told
        assert self.num_checks, "a check is asked for first"
        return self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(snapshot_copies, "POLL_S", 0.0)
    monkeypatch.setattr(snapshot_copies, "SETTLED_S", 0.0)
    job = Job()
    before = runs.PLACE.set(job)  # type: ignore[arg-type]
    yield job
    runs.PLACE.reset(before)


def test_before_a_store_has_told_nothing_is_said_of_stores() -> None:
    fresh = SUMMARY | {"num_stores": 0, "kinds": [], "fullest": "", "fullest_used_bytes": 0}
    lines = describe_summary(fresh)
    assert "  no pod has told yet what its store holds" in lines
    assert not any("fullest" in line for line in lines)


def test_what_stores_hold_is_listed_by_position_and_by_store(
    demo: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot_copies.ls("demo")
    shown = capsys.readouterr().out
    assert shown.startswith("snapshots: window 8 to 11 is complete, 12 to 15 is copied; 2 steps")
    assert "state 3.0 MiB in 4.0 MiB of 64.0 MiB; fullest: demo-1, 3.0 MiB of 32.0 MiB" in shown
    assert "  s1             2       5  pod demo-1, domain rack-2\n" in shown
    assert "s1        0-2 of 4 (8, 12; 8-13)" in shown
    assert "demo-2                   has not told anything of its store" in shown

    snapshot_copies.ls("demo", as_json=True)
    assert json.loads(capsys.readouterr().out) == demo.told


def test_a_position_that_is_made_anew_with_others_is_listed_with_them(
    demo: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    first = POSITION | {"position": 0, "stage": 0, "stretch": {"first": 0, "last": 0}}
    demo.told["positions"] = [first, POSITION | {"stretch": {"first": 0, "last": 1}}]
    snapshot_copies.ls("demo")
    shown = capsys.readouterr().out
    assert "  s0             2       5  pod demo-1, domain rack-2\n" in shown
    together = "once lost, made anew with s0 to s1"
    assert f"  s1             2       5  pod demo-1, domain rack-2  {together}\n" in shown


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_members": 0}, "is being made anew with s0 to s1"),
        ({"num_members": 0, "stretch": {"first": 1, "last": 1}}, "is being made anew"),
        ({"num_members": 0, "stretch": None}, "is being made anew"),
        ({"num_members": 1}, "once lost, made anew with s0 to s1"),
        # No store can: whether anything is made anew is for the next row of the ladder.
        ({"num_members": 0, "is_covered": False, "why_not": "gone"}, "NOT COVERED: gone"),
    ],
)
def test_a_position_without_a_state_is_listed_as_what_is_being_made_anew(
    demo: Job, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], told: str
) -> None:
    lost = POSITION | {"stretch": {"first": 0, "last": 1}} | changes
    demo.told["positions"] = [POSITION | {"position": 0, "stage": 0}, lost]
    snapshot_copies.ls("demo")
    line = next(line for line in capsys.readouterr().out.splitlines() if line[2:4] == "s1")
    assert line.split("  ")[-1] == told
    assert "domain rack-2  " + told in line


def test_a_rank_whose_stage_is_made_anew_is_listed_with_it_though_it_has_its_state(
    demo: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    stretch = {"first": 0, "last": 1}
    held = POSITION | {"position": 0, "stage": 0, "stretch": stretch}
    lost = held | {"position": 1, "inner": 1, "num_members": 0}
    demo.told["positions"] = [held, lost]
    for number, what in ((2, "  is being made anew with s0 to s0.i1\n"), (1, "rack-2\n")):
        snapshot_copies.ls("demo")
        shown = capsys.readouterr().out.partition("not survived alone")[2]
        assert shown.partition("store")[0].count(what) == number
        # From gradients each rank is made anew by itself.
        demo.told["positions"] = [p | {"stretch": None} for p in (held, lost)]


def test_boundary_logs_are_listed_with_the_order_of_units(
    demo: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.told["summary"] |= {
        "log": "boundary",
        "ordering": "Popularity",
        "log_reason": "spec.snapshots.replay says Boundary",
    }
    store = demo.told["stores"][0]
    store["units"][0] |= {"gradients": [], "computes": [{"first": 9, "last": 11}]}
    log = {"position": 1, "kind": "input-gradient", "voted_in": "q1-a", "first_type": 0}
    log |= {"last_type": 1, "micro_batches": 2}
    store["logs"] = [
        log | {"first_step": 8, "last_step": 9},
        log | {"first_step": 10, "last_step": 12, "voted_in": "q2-b"},
    ]
    snapshot_copies.ls("demo")
    shown = capsys.readouterr().out
    assert (
        "  units are copied in the order Popularity; a lost state is made anew from boundary logs: "
        "spec.snapshots.replay says Boundary\n" in shown
    )
    assert "s1        0-2 of 4 (8, 12; none; compute weights 9-11)\n" in shown
    assert "s1        input-gradient of steps 8-12\n" in shown


def test_good_copies_are_said_to_be_good(demo: Job, capsys: pytest.CaptureFixture[str]) -> None:
    demo.outcomes.insert(0, GOOD | {"waiting": ["demo-2"]})
    snapshot_copies.verify("demo")
    shown = capsys.readouterr().out
    assert "read 12 segments (6.0 MiB) and 8 commits in 2 stores: copies of 6 compared, " in shown
    assert "all good; the loss of any one pod is survived" in shown


@pytest.mark.parametrize("gaps", [[1], [0, 1]], ids=["one", "one-after-the-other"])
def test_a_position_is_named_only_if_it_stays_uncovered(
    demo: Job, capsys: pytest.CaptureFixture[str], gaps: list[int]
) -> None:
    """Stores tell one by one: for a moment what they hold may not fit together."""
    gap = POSITION | {"is_covered": False, "why_not": "a gap"}
    told = [demo.told | {"positions": [gap | {"position": number}]} for number in gaps]
    demo.told, *demo.later = [*told, demo.told]
    snapshot_copies.verify("demo")
    shown = capsys.readouterr().out
    assert "all good" in shown
    assert "NOT COVERED" not in shown


def break_a_copy(job: Job) -> None:
    job.outcomes = [GOOD | {"damaged": [DAMAGED]}]


def break_a_commit(job: Job) -> None:
    job.outcomes = [GOOD | {"damaged_records": [{"pod": "demo-2", "step": 9}]}]


def uncover(job: Job) -> None:
    why = "unit 3 has no state with all gradients since"
    job.told["positions"] = [POSITION | {"is_covered": False, "why_not": why}]


def silence(job: Job) -> None:
    job.outcomes = [GOOD | {"waiting": ["demo-2"]}]


@pytest.mark.parametrize(
    ("spoil", "problem", "line"),
    [
        (
            break_a_copy,
            "1 copy is damaged",
            "DAMAGED: layers.0 on pod demo-2: state of unit 0 of position 1 at 8: it differs",
        ),
        (
            break_a_commit,
            "1 commit is damaged",
            "DAMAGED: the commit of step 9 on pod demo-2: it does not have the seal",
        ),
        (
            uncover,
            "1 position is not covered",
            "NOT COVERED: s1.i0: unit 3 has no state with all gradients since",
        ),
        (silence, "no answer within 1 s from demo-2 (see --timeout)", "read 12 segments"),
    ],
)
def test_what_is_wrong_is_named_and_the_exit_code_says_so(
    demo: Job,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Job], None],
    problem: str,
    line: str,
) -> None:
    spoil(demo)
    with pytest.raises(CliError) as ended:
        snapshot_copies.verify("demo", timeout=1.0)
    assert (str(ended.value), ended.value.code) == (problem, ExitCode.FAILED)
    shown = capsys.readouterr().out
    assert line in shown
    assert "all good" not in shown
    with pytest.raises(CliError):
        snapshot_copies.verify("demo", timeout=1.0, as_json=True)
    assert json.loads(capsys.readouterr().out)["check"] == 1


def test_the_status_of_a_job_says_what_its_snapshots_cover() -> None:
    job = {"name": "j", "state": "running", "step": 3}
    short = SUMMARY | {"short_of": "pod demo-1: a segment does not fit", "window": None}
    lines = render({"job": job, "snapshots": short}).splitlines()
    assert "  snapshots: no window is complete yet, 12 to 15 is copied; 2 steps since" in lines
    assert "    the loss of any one pod is survived" in lines
    assert "    a replay would take 5 steps now at most" in lines
    assert "    memory is short: pod demo-1: a segment does not fit" in lines
    assert not any("expected" in line for line in lines)
    known = short | {"expected_bytes": 12 << 20, "bound_bytes": 16 << 20}
    told = "    a store is expected to hold up to 12.0 MiB while nobody is lost, "
    told += "and needs room for 16.0 MiB"
    assert told in render({"job": job, "snapshots": known}).splitlines()
    told += "; both are for the longest window that Auto may choose"
    assert told in render({"job": job, "snapshots": known | {"is_auto": True}}).splitlines()


@pytest.mark.parametrize(
    ("left", "told"), [(2, "2 of them still there, which cover nothing"), (0, "none is left")]
)
def test_what_was_found_damaged_is_said_by_number(
    demo: Job, capsys: pytest.CaptureFixture[str], left: int, told: str
) -> None:
    assert not any("damaged" in line for line in describe_summary(SUMMARY))
    summary = SUMMARY | {"num_discarded": 3, "num_damaged": left}
    line = f"  found so far: 3 damaged segments or commits; {told}"
    assert line in describe_summary(summary)

    demo.told["summary"] = summary
    demo.told["stores"][0] |= {"num_damaged": left}
    snapshot_copies.ls("demo")
    shown = capsys.readouterr().out
    assert ("2 damaged segments or commits not counted here" in shown) is (left > 0)


def test_the_status_of_a_job_without_snapshots_says_nothing_of_them() -> None:
    job = {"name": "j", "state": "running", "step": 3}
    assert "snapshots" not in render({"job": job, "snapshots": None})
    assert "snapshots" not in render({"job": job})
