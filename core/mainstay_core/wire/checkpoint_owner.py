"""Decides which job may write to a directory of checkpoints.

A job *claims* the directory with a file ``owner-<generation>``, which is made atomically and never
changed. The newest claim counts. A job that was deleted and submitted again has the same name and
another uid: it takes the directory over with the next generation, and what may be left of the
earlier one is refused from then on. A job of another name is refused, and is told whose it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.base.bounds import Instant, Name
from mainstay_core.base.errors import IntegrityError
from mainstay_core.wire.checkpoint_manifest import MAX_NAME_CHARS, shown
from mainstay_core.wire.sealed import read_sealed

OWNER = "owner"
KEPT_CLAIMS = 16
"""Older claims are removed. They are kept at all so that an earlier job is known as such."""

_NAME = re.compile(r"owner-(\d{8})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The job that a claim names."""

    uid: Name
    name: Name
    namespace: Name = ""
    claimed_at_s: Instant = 0.0

    def __str__(self) -> str:
        where = f"{self.namespace}/" if self.namespace else ""
        return shown(f"{where}{self.name} (uid {self.uid})")


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim on a directory."""

    generation: int
    owner: Owner | None
    """None: the file is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judgement of one job: whether it may write to a directory."""

    refused: str = ""
    """Why it may not write; empty if it may."""
    take: int = 0
    """Generation that it has to claim first; 0 if the directory is its own already."""


def judge_claims(claims: Sequence[Claim], me: Owner) -> Judgement:
    """Return whether ``me`` may write, by the claims on the directory in any order."""
    ordered = sorted(claims, key=lambda claim: claim.generation)
    newest = ordered[-1].generation if ordered else 0
    readable = [(claim.generation, claim.owner) for claim in ordered if claim.owner is not None]
    if not readable:
        return Judgement(take=newest + 1)
    generation, owner = readable[-1]
    if owner.uid == me.uid:
        # A newer claim that is damaged could be anybody's: a claim above it is our own again.
        return Judgement(take=0 if generation == newest else newest + 1)
    if (owner.namespace, owner.name) != (me.namespace, me.name):
        return Judgement(refused=f"it belongs to job {owner}")
    if any(earlier.uid == me.uid for _, earlier in readable):
        return Judgement(refused=f"job {owner}, submitted later under the same name, has taken it")
    return Judgement(take=newest + 1)


def claim_name(generation: int) -> str:
    """Return the file name of a claim."""
    return f"{OWNER}-{generation:08d}"


def parse_claim_name(name: str) -> int | None:
    """Return the generation of a claim's file; None if the entry is no claim."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def parse_owner(data: bytes) -> Owner:
    """Return the owner that a claim's file names.

    Raises:
        IntegrityError: the file is damaged.
    """
    owner = read_sealed(Owner, data, OWNER)
    texts = (owner.uid, owner.name, owner.namespace)
    if max(map(len, texts)) > MAX_NAME_CHARS or not math.isfinite(owner.claimed_at_s):
        raise IntegrityError("the owner is none")
    return owner
