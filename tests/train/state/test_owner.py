"""Claims on a directory of checkpoints: atomic, and another job is refused by name."""

import pytest

from mainstay_core.base.errors import OwnershipError
from mainstay_core.wire.checkpoint_owner import KEPT_CLAIMS, Owner
from mainstay_train.state.owner import claim

A, B = Owner(uid="a", name="first"), Owner(uid="b", name="second")


def claims_in(root):
    return sorted(path.name for path in root.iterdir())


def test_a_claim_is_made_once_and_refuses_another_job_by_name(tmp_path):
    claim(tmp_path, A)
    claim(tmp_path, A)
    assert claims_in(tmp_path) == ["owner-00000001"]
    with pytest.raises(OwnershipError, match=r"second.*belongs to job first \(uid a\)"):
        claim(tmp_path, B)


def test_a_job_submitted_again_takes_over(tmp_path):
    claim(tmp_path, A)
    again = Owner(uid="a2", name="first")
    claim(tmp_path, again)
    with pytest.raises(OwnershipError, match="submitted later"):
        claim(tmp_path, A)
    claim(tmp_path, again)


def test_a_damaged_claim_is_replaced_by_whom_it_named(tmp_path):
    claim(tmp_path, A)
    (tmp_path / "owner-00000001").write_bytes(b"\xff")
    claim(tmp_path, A)
    with pytest.raises(OwnershipError):
        claim(tmp_path, B)


def test_old_claims_are_forgotten(tmp_path):
    for number in range(KEPT_CLAIMS + 5):
        claim(tmp_path, Owner(uid=str(number), name="first"))
    assert len(claims_in(tmp_path)) <= KEPT_CLAIMS + 1


def _claim_when_told(pipe, number):
    while True:
        root = pipe.recv()
        try:
            claim(root, Owner(uid=f"u{number}", name=f"job-{number}"))
            pipe.send("owns it")
        except OwnershipError:
            pipe.send("refused")


def test_of_many_jobs_that_come_at_once_one_owns_the_directory(tmp_path, crew):
    jobs = [crew.fork(_claim_when_told, number) for number in range(4)]
    for turn in range(20):
        for job in jobs:
            job.say(tmp_path / str(turn))
        outcomes = sorted(job.hear() for job in jobs)
        assert outcomes == ["owns it", "refused", "refused", "refused"]
