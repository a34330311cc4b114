"""What a rank tells of the collectives of its cell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mainstay_core.dmr.operators import Pass
from mainstay_train.checks.places import Phase, Place
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.compute.watched import WatchedType

PLACE = Place(step=0, phase=Phase.FORWARD, shard_type=0, micro_batch=0, block=0)


def told_of(inner: int, *, is_shared: bool) -> tuple[str, str]:
    checks: Any = SimpleNamespace(shows_kernels=True, hears=None)
    nothing: Any = None
    mesh = InnerMesh(size=2, index=inner)
    watched = WatchedType(0, nothing, nothing, None, checks, mesh)
    zeros = torch.zeros(4)
    watched.exchanged(PLACE, [zeros], zeros, is_shared=is_shared)
    (((_, given, made),),) = watched._exchanged.values()
    assert set(watched._exchanged) == {(0, None, Pass.FORWARD)}
    return given, made


def test_equal_parts_of_a_sum_do_not_look_like_what_all_ranks_get() -> None:
    first, second = (told_of(inner, is_shared=False) for inner in range(2))
    assert first[0] == second[0]
    assert first[1] != second[1], "zeros, but each rank's own"
    first, second = (told_of(inner, is_shared=True) for inner in range(2))
    assert first == second
