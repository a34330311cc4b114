"""Which job may write to a directory of checkpoints."""

from __future__ import annotations

import itertools

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError
from mainstay_core.wire.checkpoint_owner import (
    Claim,
    Owner,
    claim_name,
    judge_claims,
    parse_claim_name,
    parse_owner,
)
from mainstay_core.wire.sealed import seal

A = Owner(uid="a", name="train", namespace="ns")
AGAIN = Owner(uid="a2", name="train", namespace="ns")
B = Owner(uid="b", name="other", namespace="ns")


def test_an_unclaimed_directory_is_taken() -> None:
    assert judge_claims((), A).take == 1


def test_the_owner_needs_no_other_claim() -> None:
    judged = judge_claims([Claim(1, A)], A)
    assert (judged.take, judged.refused) == (0, "")


def test_another_job_is_refused_by_name() -> None:
    assert "job ns/train (uid a)" in judge_claims([Claim(1, A)], B).refused


def test_a_namespace_is_part_of_the_name() -> None:
    assert judge_claims([Claim(1, A)], Owner(uid="c", name="train", namespace="elsewhere")).refused


def test_a_job_submitted_again_takes_over_and_the_earlier_one_is_refused_for_good() -> None:
    assert judge_claims([Claim(1, A)], AGAIN).take == 2
    claims = [Claim(1, A), Claim(2, AGAIN)]
    assert "submitted later" in judge_claims(claims, A).refused
    assert judge_claims(claims, AGAIN).take == 0


def test_a_damaged_claim_says_nothing_and_the_one_before_it_counts() -> None:
    claims = [Claim(1, A), Claim(2, None)]
    assert judge_claims(claims, A).take == 3, "it may have been another's: a newer claim is sure"
    assert judge_claims(claims, B).refused
    assert judge_claims([Claim(1, None)], B).take == 2


def test_the_order_of_the_claims_does_not_matter_and_at_most_one_job_may_write() -> None:
    jobs = (A, AGAIN, B)
    owners = (A, AGAIN, B, None)
    for chosen in itertools.product(owners, repeat=3):
        claims = [Claim(generation, owner) for generation, owner in enumerate(chosen, 1)]
        judged = {job.uid: judge_claims(claims, job) for job in jobs}
        for order in itertools.permutations(claims):
            assert {job.uid: judge_claims(order, job) for job in jobs} == judged
        settled = [uid for uid, j in judged.items() if not j.refused and j.take == 0]
        assert settled == ([chosen[-1].uid] if chosen[-1] else [])
        assert all(j.take in (0, 4) for j in judged.values())


def test_claims_are_known_by_their_names() -> None:
    assert parse_claim_name(claim_name(12)) == 12
    assert parse_claim_name("owner-../../x") is None
    assert parse_claim_name("owner-" + "9" * 100) is None


def test_a_damaged_owner_is_a_documented_error() -> None:
    data = seal("owner", codec.dumps(A))
    assert parse_owner(data) == A
    for damaged in (b"", data[:-1], seal("owner", "{}"), seal("owner", '{"uid":3,"name":"x"}')):
        with pytest.raises(IntegrityError):
            parse_owner(damaged)
