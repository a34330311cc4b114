"""Has the ranks of a cell plan from one profile: each tells what it has measured to the others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mainstay_core.base import codec
from mainstay_core.base.bounds import Name, Sentence
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.dmr.merging import merge_profiles
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.schedule import RefusedPlanError
from mainstay_train.comm.mesh import InnerMesh, exchange_all


@dataclass(frozen=True, slots=True, kw_only=True)
class CellProfile:
    """The profile of one rank of a cell, as it tells the others."""

    problem: Sentence = ""
    """Why it has none; empty: it has one."""
    ordered: Name = ""
    """Says which plan its file holds; empty without a file."""
    profile: Profile | None = None


def agreed(mine: CellProfile, inner: InnerMesh) -> Profile:
    """Return the profile from which all ranks of a cell plan. All of them call it at once.

    Args:
        mine: of this rank.
        inner: its place in the cell.

    Raises:
        RefusedPlanError: a rank has no profile, or too large a one, or they are not alike.
        RuntimeError: the cell's group has ended.
    """
    try:
        bodies = exchange_all(codec.dumps(mine).encode(), inner)
    except RemoteProtocolError as error:
        raise RefusedPlanError(str(error)) from error
    told = [codec.loads(CellProfile, body) for body in bodies]
    profiles = []
    for rank, each in enumerate(told):
        if each.problem or each.profile is None:
            raise RefusedPlanError(f"inner rank {rank}: {each.problem}")
        profiles.append(each.profile)
    if len({each.ordered for each in told}) > 1:
        raise RefusedPlanError("the ranks of a cell have read files with different plans")
    return merge_profiles(profiles)


def number_of(plan: Plan) -> int:
    """Return a number that tells a plan from others; never 0."""
    return 1 + int(hashlib.sha256(codec.dumps(plan).encode()).hexdigest()[:12], 16)
