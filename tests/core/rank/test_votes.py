"""What all votes of a step say together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.codec import dumps, loads
from mainstay_core.base.digest import Digest
from mainstay_core.rank.saving.saves import Attempt
from mainstay_core.rank.state import extend_commit_chain
from mainstay_core.rank.votes import (
    CLIP_EPSILON,
    Verdict,
    clip,
    judge,
    judge_states,
    norms_by_block,
)
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import Commit, TypeStat, Vote

GRID = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, quorum=3)
"""Members 0 and 1 hold stage 0, 2 and 3 stage 1; the even ones are of replica 0."""


def digest(number: int) -> str:
    return Digest(number, number).hex()


def votes_of(plan: Plan = GRID, **fields: object) -> list[Vote]:
    """Votes of yes: each replica supplies its own type."""
    votes = []
    for member in plan.members:
        stage, replica = member.rank.stage, member.rank.replica
        assert replica is not None
        stat = TypeStat(
            type=replica,
            loss_sum=None if stage == 0 else 6.0 + replica,
            tokens=None if stage == 0 else 5,
            data=digest(10 + replica) if stage == 0 else None,
        )
        given: dict[str, object] = {
            "step": 4,
            "attempt": 0,
            "ok": True,
            "norms_sq": (1.0, 3.0) if stage == 0 else (5.0,),
            "gradient": f"gradient of stage {stage}",
            "state": f"state of stage {stage}",
            "stats": (stat,),
            "newest_plan": plan.quorum.id,
            "newest_nonce": "n",
        }
        votes.append(Vote(**(given | fields)))  # type: ignore[arg-type]
    return votes


def judged(votes: list[Vote], clip_norm: float | None = None, before: str = "") -> Verdict:
    """As in a run: every vote was decoded from bytes of its own."""
    return judge(GRID, [loads(Vote, dumps(v)) for v in votes], clip_norm, before)


def changed(index: int, **fields: object) -> list[Vote]:
    votes = votes_of()
    votes[index] = replace(votes[index], **fields)  # type: ignore[arg-type]
    return votes


# The certificate ------------------------------------------------------------


def test_a_step_that_all_agree_on_is_committed_with_one_norm_loss_and_data_digest() -> None:
    commit = judged(votes_of(), before=digest(100)).commit

    assert commit is not None
    assert (commit.step, commit.tokens, commit.loss) == (4, 10, 1.3)
    assert commit.norm == 3.0 / 10
    assert (commit.data, commit.data_total) == (digest(21), digest(121))


def test_a_count_of_tokens_is_believed_as_one_rank_tells_it() -> None:
    """So nothing shows that it is wrong; a witness or two fetches of the batch do."""
    votes = votes_of()
    votes[2] = replace(votes[2], stats=tuple(replace(s, tokens=4) for s in votes[2].stats))

    commit = judged(votes).commit

    assert commit is not None
    assert (commit.tokens, commit.scale) == (9, 1 / 9)


def test_without_clipping_the_scale_only_divides_by_the_tokens() -> None:
    commit = judged(votes_of()).commit

    assert commit is not None
    assert commit.scale == 1 / 10


def test_a_norm_above_the_bound_is_clipped_as_torch_does() -> None:
    commit = judged(votes_of(), clip_norm=0.1).commit

    assert commit is not None
    assert commit.scale == 0.1 / (0.3 + CLIP_EPSILON) / 10


def test_a_norm_below_the_bound_is_left_alone() -> None:
    commit = judged(votes_of(), clip_norm=1.0).commit

    assert commit is not None
    assert commit.scale == 1 / 10


def test_a_type_that_two_report_counts_once() -> None:
    votes = votes_of()
    doubled = replace(votes[3], stats=(*votes[2].stats, *votes[3].stats))

    commit = judged([*votes[:3], doubled]).commit

    assert commit is not None
    assert commit.tokens == 10


def counted(*by_member: tuple[int, ...]) -> list[Vote]:
    """Votes whose types carry statistics."""
    return [
        replace(vote, stats=tuple(replace(s, statistics=told) for s in vote.stats))
        for vote, told in zip(votes_of(), by_member, strict=True)
    ]


def test_statistics_are_added_over_types_and_stand_in_the_order_of_stages() -> None:
    commit = judged(counted((1, 2, 3), (10, 20, 30), (7,), (5,))).commit

    assert commit is not None
    assert commit.statistics == (11, 22, 33, 12)


def test_statistics_of_a_type_that_two_report_count_once_whatever_its_supplier() -> None:
    votes = counted((1, 2), (10, 20), (7,), (5,))
    doubled = replace(votes[3], stats=(*votes[2].stats, *votes[3].stats))
    moved = replace(votes[3], stats=(*votes[3].stats, *votes[2].stats))
    without = replace(votes[2], stats=())

    for last in ([votes[2], doubled], [without, moved]):
        commit = judged([*votes[:2], *last]).commit
        assert commit is not None
        assert commit.statistics == (11, 22, 12)


def test_suppliers_that_count_differently_stop_the_step() -> None:
    for other in ((5,), ()):
        verdict = judged(counted((1, 2), other, (), ()))
        assert (verdict.commit, verdict.hopeless) == (None, False)
        assert "stage 0: its cells tell" in verdict.reason


def test_a_job_that_counts_nothing_sends_and_hashes_what_it_did_before_there_were_statistics() -> (
    None
):
    votes = votes_of()
    commit = judged(votes).commit

    assert commit is not None
    assert commit.statistics == ()
    assert "statistics" not in dumps(votes[0]) + dumps(commit)


def test_the_first_commit_of_a_history_begins_the_total_of_its_data() -> None:
    commit = judged(votes_of()).commit

    assert commit is not None
    assert commit.data_total == commit.data


# No certificate -------------------------------------------------------------


def test_one_vote_of_no_is_enough_and_its_problem_is_named() -> None:
    verdict = judged(changed(2, ok=False, problem="a checksum of its gradient"))

    assert (verdict.commit, verdict.hopeless, verdict.state_bad) == (None, False, ())
    assert verdict.reason == "member 2: a checksum of its gradient"


@pytest.mark.parametrize("field", [{"gradient": "other"}, {"norms_sq": (1.0, 3.5)}])
def test_cells_of_a_stage_that_disagree_stop_the_step(field: dict[str, object]) -> None:
    verdict = judged(changed(1, **field))

    assert (verdict.commit, verdict.hopeless) == (None, False)
    assert "stage 0: its cells disagree" in verdict.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_hopeless_and_says_that_the_model_diverged(bad: float) -> None:
    """Every cell sees the same NaN, though NaN differs from itself."""
    votes = [
        replace(v, norms_sq=(bad, 3.0)) if GRID.members[i].rank.stage == 0 else v
        for i, v in enumerate(votes_of())
    ]

    verdict = judged(votes, clip_norm=1.0)

    assert (verdict.commit, verdict.hopeless) == (None, True)
    assert "diverged" in verdict.reason


def test_a_nan_that_only_one_cell_has_is_a_disagreement_and_tried_again() -> None:
    verdict = judged(changed(0, norms_sq=(math.nan, 3.0)))

    assert (verdict.commit, verdict.hopeless) == (None, False)


# States ---------------------------------------------------------------------


def test_the_minority_of_a_stage_is_bad() -> None:
    plan = make_plan({r: [f"{'abc'[r]}.1"] for r in range(3)})
    votes = votes_of(plan, stats=(TypeStat(type=0, loss_sum=1.0, tokens=1),))
    votes[1] = replace(votes[1], state="other")

    verdict = judge(plan, votes, None, "")

    assert (verdict.state_bad, verdict.commit, verdict.hopeless) == ((1,), None, False)
    assert "b/0" in verdict.reason


def test_of_two_that_differ_nobody_can_be_believed() -> None:
    verdict = judged(changed(3, state="other"))

    assert (verdict.state_bad, verdict.undecided, verdict.hopeless) == ((2, 3), True, False)


def test_a_tie_of_two_camps_leaves_nobody_even_beside_a_third_opinion() -> None:
    plan = make_plan({r: [f"{'abcde'[r]}.1"] for r in range(5)})
    votes = [
        replace(v, state=state)
        for v, state in zip(votes_of(plan), ["x", "x", "y", "y", "z"], strict=True)
    ]

    verdict = judge(plan, votes, None, "")

    assert (verdict.state_bad, verdict.undecided) == ((0, 1, 2, 3, 4), True)


# Planned plans and checkpoints ----------------------------------------------


def test_states_are_judged_alone_where_no_step_follows() -> None:
    plan = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"], 2: ["e.1", "f.1"]})
    good = ["x", "x", "x", "y", "y", "y"]
    assert judge_states(plan, dict(enumerate(good))).state_bad == ()
    verdict = judge_states(plan, dict(enumerate([*good[:4], "bad", "y"])))
    assert (verdict.state_bad, verdict.undecided, verdict.commit) == ((4,), False, None)
    assert verdict.differing == (plan.members[4].slot,)
    assert judge_states(plan, dict(enumerate(good))).differing == ()
    split = judge_states(GRID, dict(enumerate(["x", "bad", "y", "y"])))
    assert (split.undecided, split.differing) == (True, ()), "nobody can be believed"


def test_a_planned_plan_is_adopted_only_when_all_have_seen_the_same() -> None:
    seen = votes_of(newest_plan=4)
    late = [*seen[:3], replace(seen[3], newest_plan=3)]
    other = [*seen[:3], replace(seen[3], newest_nonce="m")]

    assert judged(seen).adopt_planned
    assert not judged(late).adopt_planned
    assert not judged(other).adopt_planned
    assert not judged(votes_of()).adopt_planned, "it is in that quorum already"


def test_a_checkpoint_is_safe_once_every_stage_has_its_part() -> None:
    votes = votes_of()
    one = [replace(votes[0], checkpoint_safe=4), *votes[1:]]
    both = [*one[:2], replace(votes[2], checkpoint_safe=4), votes[3]]

    assert judged(one).saves.safe is None
    assert judged(both).saves.safe == Attempt(version=4, nonce="")


def test_parts_of_different_versions_are_never_combined() -> None:
    votes = votes_of()
    votes[0] = replace(votes[0], checkpoint_safe=4)
    votes[2] = replace(votes[2], checkpoint_safe=5)

    assert judged(votes).saves.safe is None


def test_parts_of_one_version_copied_in_different_quorums_are_never_combined() -> None:
    votes = votes_of()
    votes[0] = replace(votes[0], checkpoint_safe=4, checkpoint_nonce="one")
    votes[2] = replace(votes[2], checkpoint_safe=4, checkpoint_nonce="other")

    assert judged(votes).saves.safe is None


def test_an_attempt_of_an_older_quorum_counts_when_all_its_parts_are_safe() -> None:
    part = {"checkpoint_safe": 4, "checkpoint_nonce": "older"}
    votes = [replace(v, **part) for v in votes_of()]

    assert judged(votes).saves.safe == Attempt(version=4, nonce="older")


@pytest.mark.parametrize(("version", "is_safe"), [(3, True), (4, False), (5, False), (6, False)])
def test_a_version_whose_states_differ_is_not_completed_nor_the_one_before(
    version: int, is_safe: bool
) -> None:
    plan = make_plan({r: [f"{'abc'[r]}.1"] for r in range(3)})
    part = {"checkpoint_safe": version, "checkpoint_nonce": "n"}
    votes = [replace(v, step=5, **part) for v in votes_of(plan)]

    assert judge(plan, votes, None, "").saves.safe is not None
    votes[0] = replace(votes[0], state="other")
    assert (judge(plan, votes, None, "").saves.safe is not None) is is_safe


def test_votes_say_who_still_writes_and_which_version_is_durable() -> None:
    votes = votes_of()
    votes[1] = replace(votes[1], checkpoint_busy=True)
    votes[2] = replace(votes[2], durable=6)

    assert judged(votes).saves.busy == (1,)
    assert judged(votes).saves.durable == 6


def test_clipping_scales_the_mean_gradient() -> None:
    assert clip([9.0, 16.0], 10, None) == (0.5, 0.1)
    assert clip([9.0, 16.0], 10, 1.0) == (0.5, 0.1)
    assert clip([9.0, 16.0], 10, 0.25)[1] == pytest.approx(0.05, rel=1e-5)
    assert clip([0.0], 4, 1.0) == (0.0, 0.25)


@pytest.mark.parametrize(("norms_sq", "tokens"), [([1.0, math.nan], 10), ([1.0], 0)])
def test_what_has_no_norm_has_no_scale(norms_sq: list[float], tokens: int) -> None:
    assert all(math.isnan(value) for value in clip(norms_sq, tokens, 1.0))


# Inner ranks ----------------------------------------------------------------
# The same four members as one stage of two inner ranks: 0 and 1 are inner rank 0.

CELLS = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, quorum=3, ranks_per_stage=2)


def votes_of_cells() -> list[Vote]:
    stat = TypeStat(type=0, loss_sum=6.0, tokens=10, data=digest(1))
    votes = [
        replace(v, gradient=f"gradient {i // 2}", state=f"state {i // 2}", stats=(), copies="same")
        for i, v in enumerate(votes_of())
    ]
    votes = [replace(v, norms_sq=((1.0, 2.0), (4.0, 9.0))[i // 2]) for i, v in enumerate(votes)]
    return [replace(votes[0], stats=(stat,)), *votes[1:]]


def test_norms_add_up_by_block_and_then_by_inner_rank() -> None:
    tiny, huge = 2.0**-53, 1.0
    votes = votes_of_cells()
    votes = [replace(v, norms_sq=((huge, tiny), (tiny, tiny))[i // 2]) for i, v in enumerate(votes)]

    commit = judge(CELLS, votes, None, "").commit

    in_order = math.sqrt(((huge + tiny) + tiny) + tiny) / 10
    assert commit is not None
    assert commit.norm == in_order
    assert judge(CELLS, votes_of_cells(), None, "").commit is not None


def test_inner_ranks_have_other_gradients_and_states_their_likes_have_not() -> None:
    votes = votes_of_cells()
    other = [replace(votes[0], gradient="other"), *votes[1:]]

    assert judge(CELLS, votes, None, "").commit is not None
    assert "disagree on the reduced gradient" in judge(CELLS, other, None, "").reason


def test_what_inner_ranks_hold_in_copies_must_be_equal_on_all_of_them() -> None:
    votes = votes_of_cells()
    votes[2:] = [replace(v, copies="other") for v in votes[2:]]

    verdict = judge(CELLS, votes, None, "")

    assert (verdict.commit, verdict.hopeless, verdict.state_bad) == (None, False, ())
    assert "inner ranks disagree on what they hold in copies" in verdict.reason


def test_a_state_that_differs_beside_its_masters_is_as_bad_as_one_whose_masters_do() -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]}, quorum=3)
    stat = TypeStat(type=0, loss_sum=6.0, tokens=5, data=digest(10))
    votes = [
        replace(vote, stats=(stat,), norms_sq=(1.0,), rest=digest(7)) for vote in votes_of(plan)
    ]
    assert judge(plan, votes, None, "").state_bad == ()

    votes[1] = replace(votes[1], rest=digest(8))
    verdict = judge(plan, votes, None, "")

    assert (verdict.state_bad, verdict.commit, verdict.hopeless) == ((1,), None, False)
    assert verdict.differing == (plan.members[1].slot,)
    assert verdict.reason == (
        f"the optimizer's moments, or the weights that are computed with, of r1.s0.i0 on "
        f"{plan.members[1].slot} differ from the rest of the stage"
    )


def test_norms_of_inner_ranks_add_up_by_block() -> None:
    plan = make_plan({0: ["a.1", "b.1", "c.1", "d.1"]}, ranks_per_stage=2)
    told = [(1.0, 2.0), (0.5, 0.0), (3.0,), (0.25,)]
    votes = [
        Vote(
            step=0,
            attempt=0,
            ok=True,
            norms_sq=norms,
            gradient="",
            state="",
            stats=(),
            newest_plan=1,
            newest_nonce="n",
        )
        for norms in told
    ]

    assert norms_by_block(plan, votes) == (1.5, 2.0, 3.25)


def test_the_chain_of_commits_is_of_what_is_told_and_not_of_what_equals_it() -> None:
    """Ranks with equal numbers of other bytes would have other certificates."""
    commit = Commit(step=1, norm=0.0, scale=1.0, tokens=1, loss=1.0, data="0" * 32)
    chains = [extend_commit_chain("x", replace(commit, norm=norm)) for norm in (0.0, -0.0)]
    assert chains[0] != chains[1]


def test_norms_are_no_part_of_the_commit_chain() -> None:
    with_norms = Commit(
        step=3, norm=1.0, scale=1.0, tokens=1, loss=1.0, data="0" * 32, norms_sq=(1.0, 2.0)
    )

    assert extend_commit_chain("x", with_norms) == extend_commit_chain(
        "x", replace(with_norms, norms_sq=())
    )
