from dataclasses import replace

from tests.core.wire.test_messages import FOUND

from mainstay_cli.commands import findings
from mainstay_cli.commands.status import render
from mainstay_core.base import codec
from mainstay_core.wire.findings import FindingsPage, KeptFinding

PAGE = FindingsPage(
    counts={"primary": 1},
    findings=(KeptFinding(place=1, told=replace(FOUND, trainer="demo-1/1")),),
)
SENTENCE = (
    "step 4 of r1.s0.i0 on demo-1/1: two executions of aten.mm (#4) in the weight pass of layers.3 "
    "differ in 1 element; the third execution equals the checker; it was repaired before anybody "
    "read it"
)


def test_a_status_lists_what_protects_the_job_and_why_the_rest_does_not() -> None:
    protections = [
        {"name": "mask", "given": True, "why": "the others go on"},
        {"name": "ledger", "given": True, "why": "digests"},
        {"name": "replay", "given": False, "why": "needs blocks"},
    ]
    job = {"name": "j", "state": "running", "step": 3, "entry": "loop", "protections": protections}
    lines = render({"job": job}).splitlines()
    assert "  protected by (loop): mask, ledger" in lines
    assert "    no replay  needs blocks" in lines


def test_before_a_trainer_is_up_nothing_is_promised() -> None:
    job = {"name": "j", "state": "forming", "entry": None, "protections": []}
    assert "protected" not in render({"job": job})


def test_the_exception_that_ended_a_trainer_is_shown_with_its_lines() -> None:
    crash = {
        "type": "OSError",
        "message": "the shard is not there\nlook at the mount",
        "frames": ["train.py:9 in main", "data.py:3 in read"],
        "rank": "r1.s0.i0",
        "step": 4,
        "trainer": "demo-1/0",
        "times": 2,
    }
    shown = render({"job": {"name": "j", "state": "running", "crash": crash}}).splitlines()
    assert shown[1:] == [
        "  trainer demo-1/0 (r1.s0.i0) ended in step 4 with OSError, 2 tries ended like this:",
        "    the shard is not there",
        "    look at the mount",
        "    at train.py:9 in main",
        "    at data.py:3 in read",
    ]


def test_a_job_with_checks_says_how_much_is_checked_and_what_was_found() -> None:
    job = {"name": "j", "state": "running", "dmr_coverage": "naive 100 %"}
    page = codec.encode(PAGE)
    assert render({"job": job, "findings": page}).splitlines()[1:] == [
        "  checks: 1 finding (primary 1); naive 100 %",
        f"    {SENTENCE}",
    ]
    assert render({"job": job}).splitlines()[1:] == ["  checks: 0 findings; naive 100 %"]
    assert "checks" not in render({"job": {"name": "j", "state": "running"}})


def test_findings_are_listed_with_their_time_and_how_many_there_were() -> None:
    more = replace(PAGE, counts={"checker": 2, "primary": 1}, untold=4)
    first, line = findings.render(more, 5, is_checked=True).splitlines()
    assert first == "3 findings (checker 2, primary 1), and 4 that were only counted"
    assert line.endswith(f"  {SENTENCE}")
    assert findings.render(FindingsPage(), 5, is_checked=True) == "0 findings"
    off = findings.render(FindingsPage(), 5, is_checked=False)
    assert off.startswith("nothing is checked: spec.detection.dmr.mode is Off")
