from mainstay_cli.commands.status import render


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
