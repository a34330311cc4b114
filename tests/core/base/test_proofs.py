from __future__ import annotations

import pytest

from mainstay_core.base.proofs import is_proved, prove


def test_a_proof_is_good_for_one_secret_and_one_question() -> None:
    proof = prove("s3cret", "join", "q1-a", 0)
    assert is_proved("s3cret", proof, "join", "q1-a", 0)
    assert not is_proved("other", proof, "join", "q1-a", 0)
    assert not is_proved("s3cret", proof, "join", "q1-a", 1)
    assert not is_proved("s3cret", proof, "join", "q1-a0")
    assert "s3cret" not in proof


@pytest.mark.parametrize("proof", ["", None, 7, "\u00e4", "0" * 64])
def test_nonsense_proves_nothing(proof: object) -> None:
    assert not is_proved("s3cret", proof, "join")


def test_a_job_without_a_secret_asks_for_no_proof() -> None:
    assert prove("", "join") == ""
    assert is_proved("", "", "join")
