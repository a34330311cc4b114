"""Ranks of a cell plan from one profile: of the longest operators and the shortest windows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.core.dmr.stages import RandomStage

from mainstay_core.base import codec
from mainstay_core.dmr.merging import merge_profiles
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.schedule import RefusedPlanError
from mainstay_core.dmr.static import plan_checks


def measured(profile: Profile, rng: random.Random) -> Profile:
    """The same stage, as another rank of its cell measures it."""
    return replace(
        profile,
        budget_bytes=rng.randint(0, 100),
        tensors=tuple(replace(t, size_bytes=rng.randint(0, 9)) for t in profile.tensors),
        operators=tuple(
            replace(o, median_s=rng.random(), static=rng.random() < 0.9, waits=rng.random() < 0.9)
            for o in profile.operators
        ),
        windows=tuple(
            replace(
                w,
                median_s=1 + rng.random(),
                least_s=rng.random(),
                headroom_bytes=rng.randint(0, 99),
            )
            for w in profile.windows
        ),
    )


@pytest.mark.parametrize("seed", range(30))
def test_whatever_each_rank_has_measured_all_make_the_same_plan(seed: int) -> None:
    rng = random.Random(seed)
    first = RandomStage(seed).draw()
    profiles = [measured(first, rng) for _ in range(rng.randint(2, 4))]

    merged = merge_profiles(profiles)

    for place, operator in enumerate(merged.operators):
        of = [profile.operators[place] for profile in profiles]
        assert operator.median_s == max(o.median_s for o in of)
        assert (operator.static, operator.waits) == (
            all(o.static for o in of),
            all(o.waits for o in of),
        )
    for place, window in enumerate(merged.windows):
        assert window.least_s == min(profile.windows[place].least_s for profile in profiles)
        assert window.headroom_bytes == min(p.windows[place].headroom_bytes for p in profiles)
    for place, tensor in enumerate(merged.tensors):
        assert tensor.size_bytes == max(p.tensors[place].size_bytes for p in profiles)
    assert merged.budget_bytes == min(profile.budget_bytes for profile in profiles)
    again = codec.loads(Profile, codec.dumps(merged))
    assert plan_checks(again) == plan_checks(merge_profiles(profiles))


def test_ranks_that_execute_other_operators_are_refused_and_the_first_is_named() -> None:
    profile = RandomStage(1).draw()
    assert merge_profiles([profile]) == profile

    last = replace(profile.operators[-1], name="another")
    other = replace(profile, operators=(*profile.operators[:-1], last))
    with pytest.raises(RefusedPlanError, match="inner ranks 0 and 1 have other operators"):
        merge_profiles([profile, other])
    with pytest.raises(RefusedPlanError, match="have other results"):
        merge_profiles([profile, replace(profile, results=profile.results[:-1])])
