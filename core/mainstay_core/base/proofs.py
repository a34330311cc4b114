"""Proves that a peer knows the job's secret, without sending the secret.

Pods of one job hold one secret. The first message of a connection between pods carries a proof: a
keyed digest (HMAC-SHA256) of what the message asks for. So the secret never travels, and a proof is
good for that one question alone.
"""

from __future__ import annotations

import hashlib
import hmac


def prove(secret: str, *asked: object) -> str:
    """Return a proof of ``secret`` for one question; empty without a secret.

    Args:
        secret: of the job.
        asked: what is asked for, as words and numbers; their order counts.
    """
    if not secret:
        return ""
    # Each part carries its length, so that no two questions are written alike.
    parts = [str(part).encode() for part in asked]
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def is_proved(secret: str, proof: object, *asked: object) -> bool:
    """Return whether ``proof`` proves the secret for this question.

    Without a secret any proof does.
    """
    expected = prove(secret, *asked)
    return not secret or hmac.compare_digest(str(proof).encode(), expected.encode())
