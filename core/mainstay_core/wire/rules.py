"""Numbers the rules by which trainers decide: all trainers of a job must have the same number.

Each rank of a quorum decides by itself what a settle, a vote or a witness comes to, and all come to
the same, as they are given the same. Trainers of two releases may not: one would reduce what the
other computes again. So the number is told beside the numerics fingerprint, and a trainer with
another one than the job's gets no place. It is no part of what a checkpoint must share with a job:
the bits do not depend on it.

Whoever changes a decision raises the number. ``tests/core/rank/test_rules.py`` digests some
decisions, so that nobody forgets.
"""

from __future__ import annotations

from collections.abc import Mapping

KEY = "rules"
"""Entry beside those of the numerics fingerprint."""
NUMBER = 7
"""To be raised with each change after which ranks decide otherwise from the same reports, votes or
plans than the release before."""


def with_rules(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return what a trainer says of itself: its arithmetic, and by which rules it decides."""
    return {**fingerprint, KEY: str(NUMBER)}


def without_rules(told: Mapping[str, str]) -> dict[str, str]:
    """Return the numerics fingerprint alone: what bits depend on."""
    return {key: value for key, value in told.items() if key != KEY}
