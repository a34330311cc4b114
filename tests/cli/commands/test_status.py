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
