"""Which losses are survived, against a twin that tries every state, and against a settle's rule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays.replaying import Stores
from mainstay_core.snapshots.coverage import CoveredPod, cover, describe, summarize
from mainstay_core.wire.segments import Run, StoreReport, UnitHeld, runs_of
from mainstay_core.wire.stores import SegmentBytes, StoreStatus, UnitsHeld, WindowHeld
from mainstay_core.wire.votes import Commit, CommitRecord, seal_record

TWO_STAGES = ((0, 0), (1, 0))
NUM_UNITS = 2


def held(
    position: int = 0,
    units: tuple[int, ...] = (0, 1),
    states: tuple[int, ...] = (8,),
    steps: tuple[int, int] = (8, 11),
) -> UnitsHeld:
    return UnitsHeld(
        position=position,
        num_units=NUM_UNITS,
        units=tuple(runs_of(units)),
        states=states,
        gradients=(Run(first=steps[0], last=steps[1]),),
    )


def pod(name: str, *groups: UnitsHeld, serves: int | None = None, domain: str = "") -> CoveredPod:
    """A pod that has told of its store, up to step 11."""
    store = StoreStatus(
        pod=PodUid(name),
        memory_bytes=100,
        used_bytes=60,
        kinds=(SegmentBytes(kind="state", num_segments=1, size_bytes=40),),
        windows=(WindowHeld(first=8, length=2),),
        units=groups,
        judged=(Run(first=8, last=11),),
    )
    positions = frozenset() if serves is None else frozenset({serves})
    return CoveredPod(
        uid=PodUid(name), name=name, domain=domain or name, positions=positions, store=store
    )


def test_a_position_with_one_copy_elsewhere_survives_each_pod_but_not_both_domains() -> None:
    pods = [
        pod("a", held(), serves=0, domain="rack-1"),
        pod("b", held(), serves=1, domain="rack-1"),
    ]
    first, second = cover(TWO_STAGES, pods, 0)

    assert (first.is_covered, first.num_copies, first.replay_steps) == (True, 2, 4)
    assert first.pods == ()
    assert first.domains == ("rack-1",)
    assert (second.is_covered, second.pods) == (False, ("b",))
    assert second.why_not == "no store holds anything of it"
    told = describe((first, second))
    assert "the loss of 1 pod is not survived: b (s1)" in told
    assert "the loss of 1 failure domain is not survived: rack-1 (s0, s1)" in told
    assert "no store can make these anew: s1: no store holds anything of it" in told


def test_another_living_cell_is_as_good_as_a_copy() -> None:
    pods = [pod("a", serves=0), pod("b", serves=0)]
    (only,) = cover(((0, 0),), pods, 0)
    assert not only.is_covered
    assert only.pods == ()


def test_what_gradients_make_anew_is_joined_by_no_further_loss() -> None:
    pods = [pod("a", held(0), held(1)), pod("b", held(0), held(1), serves=1)]
    told = cover(TWO_STAGES, pods, 0)
    assert [position.stretch for position in told] == [None, None]
    assert "s0 is being made anew; no further loss would join it" in describe(told)
    both = [replace(one, positions=frozenset()) for one in pods]
    said = describe(cover(TWO_STAGES, both, 0))
    assert "s0, s1 are being made anew; no further loss would join them" in said
    whole = [replace(pods[0], positions=frozenset({0})), pods[1]]
    assert "made anew" not in describe(cover(TWO_STAGES, whole, 0))


def test_pods_cover_a_position_together_and_then_need_each_other() -> None:
    pods = [
        pod("a", held(units=(0,))),
        pod("b", held(units=(1,))),
        pod("c", serves=0),
    ]
    (only,) = cover(((0, 0),), pods, 0)
    assert (only.is_covered, only.num_copies) == (True, 0)
    assert only.pods == ()  # c's member goes on where a or b is lost
    lost = [replace(p, positions=frozenset()) for p in pods]
    assert cover(((0, 0),), lost, 0)[0].pods == ("a", "b")


def test_a_state_without_all_gradients_since_covers_nothing() -> None:
    broken = UnitsHeld(
        position=0,
        num_units=NUM_UNITS,
        units=(Run(first=0, last=1),),
        states=(8,),
        gradients=(Run(first=8, last=8), Run(first=10, last=11)),
    )
    (only,) = cover(((0, 0),), [pod("a", broken, serves=0), pod("b")], 0)
    assert not only.is_covered
    assert only.why_not == "unit 0 has no state with all gradients since"
    assert only.pods == ("a",)


def test_stores_that_told_at_different_times_are_each_measured_by_their_own_steps() -> None:
    early = pod("a", held(states=(2,), steps=(2, 6)), serves=0)
    assert early.store is not None
    early = replace(early, store=replace(early.store, judged=(Run(first=2, last=6),)))
    late = pod("b", held())
    (only,) = cover(((0, 0),), [early, late], 0)
    assert (only.is_covered, only.pods, only.num_copies) == (True, (), 2)


def told_until(told: CoveredPod, first: int, last: int) -> CoveredPod:
    assert told.store is not None
    return replace(told, store=replace(told.store, judged=(Run(first=first, last=last),)))


def test_a_store_to_which_nobody_copies_any_more_does_not_hide_what_is_lacking() -> None:
    """A spare has a window of long ago; of the steps since one gradient found no room."""
    spare = told_until(pod("spare", held()), 8, 11)
    broken = held(states=(90,), steps=(90, 92))
    member = told_until(pod("a", broken, serves=0), 90, 95)

    (only,) = cover(((0, 0),), [spare, member], 0)

    assert (only.is_covered, only.num_copies) == (False, 0)
    assert only.pods == ("a",)
    assert not cover(((0, 0),), [spare, told_until(pod("a", serves=0), 90, 95)], 0)[0].is_covered


def test_old_copies_in_a_store_that_is_left_behind_count_with_the_gradients_since() -> None:
    old = told_until(pod("spare", held(states=(8,), steps=(8, 11))), 8, 11)
    since = told_until(pod("a", held(states=(), steps=(12, 95)), serves=0), 8, 95)
    (only,) = cover(((0, 0),), [old, since], 0)
    assert (only.is_covered, only.num_copies, only.replay_steps) == (True, 0, 88)


def test_commits_are_lost_with_the_only_pod_that_knows_them() -> None:
    spare = pod("spare", held())
    assert spare.store is not None
    spare = replace(spare, store=replace(spare.store, judged=()))
    (only,) = cover(((0, 0),), [pod("a", held(), serves=0), spare], 0)
    assert (only.is_covered, only.pods) == (True, ("a",))

    both = [pod("a", held(), serves=0), pod("b", serves=1), spare]
    assert cover(TWO_STAGES, both, 0)[0].pods == ()


def test_a_store_that_told_after_those_that_know_the_commits_still_counts() -> None:
    spare = pod("spare", held(steps=(8, 14)))
    assert spare.store is not None
    spare = replace(spare, store=replace(spare.store, judged=()))
    pods = [pod("a", held(), serves=0), pod("b", serves=1), spare]
    assert cover(TWO_STAGES, pods, 0)[0].pods == ()


def test_a_store_of_another_lineage_holds_nothing() -> None:
    assert not cover(((0, 0),), [pod("a", held(), serves=0)], 1)[0].is_covered


def test_before_anything_is_held_nothing_is_promised() -> None:
    assert describe(cover(TWO_STAGES, [pod("a")], 0)) == "nothing holds a state yet"


def test_a_summary_names_the_complete_window_the_next_one_and_the_fullest_store() -> None:
    both = (held(0, states=(8, 10)), held(1, states=(9,)))
    first, second = pod("a", *both, serves=0), pod("b", *both, serves=1)
    assert second.store is not None
    windows = (WindowHeld(first=8, length=2), WindowHeld(first=10, length=2))
    tight = replace(second.store, windows=windows, used_bytes=90, short_of="no room")
    pods = [first, replace(second, store=tight)]
    summary = summarize(cover(TWO_STAGES, pods, 0), pods, 0)

    assert summary.window == windows[0]
    assert summary.in_flight == windows[1]
    assert summary.lag == 12 - 9
    assert (summary.fullest, summary.fullest_used_bytes) == ("b", 90)
    assert summary.short_of == "pod b: no room"
    assert summary.kinds == (SegmentBytes(kind="state", num_segments=2, size_bytes=80),)
    assert (summary.num_covered, summary.num_survive_pod) == (2, 2)


# Against twins ------------------------------------------------------------------------------


def draw(rng: random.Random) -> tuple[list[CoveredPod], list[StoreReport], int]:
    """Stores of a few pods that all told after the same step, and what they say in a settle."""
    newest = rng.randint(4, 9)
    records = tuple(_record(step) for step in range(newest + 1) if rng.random() < 0.95)
    judged = tuple(runs_of(r.commit.step for r in records))
    pods, reports = [], []
    for name in "abcd"[: rng.randint(1, 4)]:
        lines, groups = [], []
        for unit in range(NUM_UNITS):
            if rng.random() < 0.2:
                continue
            states = tuple(v for v in range(newest + 1) if rng.random() < 0.3)
            steps = [s for s in range(newest + 1) if rng.random() < 0.85]
            runs = tuple(runs_of(steps))
            lines.append(
                UnitHeld(
                    position=0, unit=unit, unit_name=f"u{unit}", num_units=NUM_UNITS,
                    states=states, gradients=runs,
                )
            )  # fmt: skip
            groups.append(
                UnitsHeld(
                    position=0, num_units=NUM_UNITS, units=(Run(first=unit, last=unit),),
                    states=states, gradients=runs,
                )
            )  # fmt: skip
        reports.append(
            StoreReport(
                pod=PodUid(name), address=f"{name}:1", lineage=0, units=tuple(lines),
                records=records,
            )
        )  # fmt: skip
        made = pod(name, *groups, serves=0 if rng.random() < 0.2 else None, domain=rng.choice("xy"))
        assert made.store is not None
        # Pods that never had a member know no commit.
        knows = bool(made.positions) or rng.random() < 0.7
        pods.append(replace(made, store=replace(made.store, judged=judged if knows else ())))
        reports[-1] = replace(reports[-1], records=records if knows else ())
    return pods, reports, newest


def _record(step: int) -> CommitRecord:
    commit = Commit(step=step, norm=1.0, scale=1.0, tokens=1, loss=1.0, data="d")
    record = CommitRecord(
        lineage=0, commit=commit, certified_in="q1-a", chain="c", gradients=("g",), states=("s",)
    )
    return seal_record(record)


def reaches(pods: list[CoveredPod]) -> bool:
    """Whether every unit comes to the newest step of some store with it: all paths are tried."""
    stores = [p.store for p in pods if p.store is not None]
    judged = {s for store in stores for r in store.judged for s in range(r.first, r.last + 1)}
    for unit in range(NUM_UNITS):
        having = [
            (store, group) for store in stores for group in store.units if unit in group.numbers
        ]
        if not having:
            return False
        steps = {
            s for _, g in having for r in g.gradients for s in range(r.first, r.last + 1)
        } & judged
        newest = min(
            max(
                [r.last for r in store.judged]
                + [r.last for group in store.units for r in group.gradients],
                default=-1,
            )
            for store, _ in having
        )
        of_members = [r.last for p in pods if p.positions and p.store for r in p.store.judged]
        newest = min(newest, max(of_members)) if of_members else newest
        ends = [
            end
            for _, group in having
            for state in group.states
            if state in judged
            for end in range(state, 12)
            if set(range(state, end)) <= steps and end >= newest
        ]
        if not ends:
            return False
    return True


@pytest.mark.parametrize("seed", range(20))
def test_coverage_is_what_trying_everything_says(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        pods, _, _ = draw(rng)
        (told,) = cover(((0, 0),), pods, 0)
        assert told.is_covered == reaches(pods)
        for losses, named in ((told.pods, "name"), (told.domains, "domain")):
            for name in {getattr(p, named) for p in pods}:
                left = [p for p in pods if getattr(p, named) != name]
                lost = [p for p in pods if getattr(p, named) == name]
                touched = any(
                    p.positions or (p.store and p.store.units) or is_missed(p, pods) for p in lost
                )
                survives = any(p.positions for p in left) or reaches(left)
                assert (name in losses) == (touched and not survives)


def is_missed(one: CoveredPod, pods: list[CoveredPod]) -> bool:
    """Whether a pod knows of commits that no other one knows."""
    others = [p for p in pods if p is not one and p.store and p.store.judged]
    return bool(one.store and one.store.judged and not others)


@pytest.mark.parametrize("wrong", [1, 7])
@pytest.mark.parametrize("num_types", [0, 1])
def test_one_wrong_number_of_units_does_not_hide_the_copies_of_other_stores(
    num_types: int, wrong: int
) -> None:
    """As in a settle, which would use these."""

    def covers(*groups: UnitsHeld) -> tuple[bool, int, bool]:
        pods = [pod("a", *groups), pod("b", held()), pod("c", held())]
        told = cover(((0, 0),), pods, 0, num_types)
        summary = summarize(told, pods, 0)
        return told[0].is_covered, told[0].num_copies, summary.window is not None

    assert covers(held()) == (True, 3, True)
    torn = [held(units=(0,)), replace(held(units=(1,)), num_units=wrong)]
    assert covers(*torn) == (True, 2, True)
    assert covers(replace(held(), num_units=wrong)) == (True, 2, True)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_settle_can_make_anew_counts_as_covered(seed: int) -> None:
    """After the newest step a settle finds the version; so the status must not deny it."""
    rng = random.Random(1000 + seed)
    found = 0
    for _ in range(150):
        pods, reports, newest = draw(rng)
        if newest + 1 in Stores(reports, 0).reach(0):
            assert cover(((0, 0),), pods, 0)[0].is_covered
            found += 1
    assert found
