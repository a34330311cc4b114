"""Profiles: files are read as they were written, and contradictions are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.core.dmr.stages import RandomStage, linear_stage, window_of

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.coverage import UncoveredError, verify_plan
from mainstay_core.dmr.operators import Graph, Operator, Origin, Pass, Tensor
from mainstay_core.dmr.plan import Compared, Method, read_plan
from mainstay_core.dmr.profiles import AcSegment, Profile, read_profile
from mainstay_core.dmr.static import plan_checks


def stage() -> Profile:
    return linear_stage(2, 2, recomputed=1, window_s=3, headroom=9)


def test_profiles_and_plans_are_read_as_they_were_written() -> None:
    for seed in range(20):
        profile = RandomStage(seed).draw()
        plan = plan_checks(profile)

        assert read_profile(codec.dumps(profile)) == profile
        assert read_plan(codec.dumps(plan)) == plan


def refusal(change: Any) -> str:
    """What is said of the stage's JSON after a change."""
    data = codec.encode(stage())
    change(data)
    with pytest.raises(InvalidSpecError) as error:
        read_profile(json.dumps(data))
    return str(error.value)


def first(data: Any) -> Any:
    return data["operators"][0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.pop("fingerprint"), "profile.fingerprint: missing"),
        (lambda d: d.update(kind="mainstay-dmr-plan"), "must be 'mainstay-dmr-profile'"),
        (lambda d: d.update(format=2), "profile.format: 2 is not 1"),
        (lambda d: d.update(budget_bytes=-1), "profile.budget_bytes: -1 is not between 0"),
        (lambda d: first(d).update(median_s=-1.0), "profile.operators[0].median_s: -1.0"),
        (lambda d: first(d).update(median_s=float("nan")), "operators[0].median_s: nan is not"),
        (lambda d: first(d).update(inputs=["x"]), "operators[0].inputs: 'x' is not in tensors"),
        (lambda d: first(d).update(inputs=["A3"]), "A3 is read before any operator has made it"),
        (lambda d: first(d).update(outputs=["A0"]), "A0 has the origin received, not made"),
        (lambda d: d["operators"].append(first(d)), "0/forward/0 is there twice"),
        (lambda d: first(d).update(overwrites=["A1"]), "A1 is none of its inputs"),
        (lambda d: first(d).update(overwrites=["A0"]), "A0 is read after 0/forward/0 has"),
        (lambda d: d["operators"].pop(), "has the origin made, but no operator makes it"),
        (lambda d: d["tensors"].append(d["tensors"][0]), "'A0' is twice there"),
        (lambda d: d["results"].append("x"), "results[6]: 'x' is not in tensors"),
        (lambda d: d["windows"][0].update(after=99), "windows[0].after: is 99, must be between"),
        (lambda d: d["windows"][0].update(least_s=9.0), "windows[0].least_s: is 9.0, more than"),
        (lambda d: d["windows"].append(d["windows"][0]), "windows[1].name: 'wait' is there twice"),
    ],
)
def test_a_field_that_contradicts_is_refused_by_name(change: Any, told: str) -> None:
    assert told in refusal(change)


@pytest.mark.parametrize(
    ("operators", "kept", "told"),
    [
        (("0/forward/9",), (), "operators: '0/forward/9' is not in operators"),
        (("0/weight/0",), (), "0/weight/0 is not of a forward pass"),
        (("0/forward/1", "0/forward/0"), (), "not in the order of execution"),
        (("0/forward/1", "1/forward/0"), (), "of several blocks"),
        (("0/forward/1",), ("0/forward/1",), "kept: must be some of its operators, and not all"),
        ((), (), "kept: must be some of its operators"),
        (("0/forward/0", "0/forward/1"), ("0/forward/0",), "is recomputed from A1, which is not"),
    ],
)
def test_an_ac_segment_that_cannot_be_recomputed_is_refused(
    operators: tuple[str, ...], kept: tuple[str, ...], told: str
) -> None:
    segment = AcSegment(name="ac", operators=operators, kept=kept)

    with pytest.raises(InvalidSpecError) as error:
        replace(stage(), ac_segments=(segment,))

    assert told in str(error.value)


def test_an_operator_belongs_to_one_ac_segment() -> None:
    segment = AcSegment(name="again", operators=("0/forward/0",), kept=())

    with pytest.raises(InvalidSpecError, match="0/forward/0 is in ac-0 already"):
        replace(stage(), ac_segments=(*stage().ac_segments, segment))
    with pytest.raises(InvalidSpecError, match="'ac-0' is there twice"):
        replace(stage(), ac_segments=(*stage().ac_segments, replace(segment, name="ac-0")))


def test_a_tensor_that_is_overwritten_before_its_recompute_is_refused() -> None:
    plain = linear_stage(1, 2, recomputed=0, window_s=3, headroom=9)
    first, second, *rest = plain.operators
    # Its weight gradient would read A0 as well; it is of no use here.
    rest = [operator for operator in rest if "A0" not in operator.inputs]
    late = replace(second, inputs=("A0", "A1"), overwrites=("A0",))
    operators = (first, late, *rest)
    made = {name for operator in operators for name in operator.outputs}
    stage = replace(
        plain,
        operators=operators,
        tensors=tuple(t for t in plain.tensors if t.origin is not Origin.MADE or t.name in made),
        results=("A2",),
        windows=(),
    )

    with pytest.raises(InvalidSpecError, match="executed again from A0, which 0/forward/1 has"):
        replace(stage, ac_segments=(AcSegment(name="ac", operators=("0/forward/0",), kept=()),))


def small_stage(
    *operators: tuple[Pass, str, str, str], results: tuple[str, ...], kept: tuple[str, ...] = ()
) -> Profile:
    """A block of operators, told by pass, inputs, output and what they overwrite.

    The first two forward operators are its AC segment.
    """
    given = {"x", "g"}
    made = {output for _, _, output, _ in operators}
    found = tuple(
        Operator(
            block=0,
            in_pass=in_pass,
            ordinal=number,
            name="op",
            inputs=tuple(inputs),
            outputs=(output,),
            median_s=1.0,
            overwrites=tuple(overwrites),
        )
        for number, (in_pass, inputs, output, overwrites) in enumerate(operators)
    )
    return Profile(
        fingerprint="job",
        stage=0,
        budget_bytes=0,
        tensors=(
            *(Tensor(name=name, size_bytes=1, origin=Origin.RECEIVED) for name in sorted(given)),
            *(Tensor(name=name, size_bytes=1) for name in sorted(made)),
        ),
        operators=found,
        results=results,
        ac_segments=(AcSegment(name="ac", operators=("0/forward/0", "0/forward/1"), kept=kept),),
    )


def test_a_segment_whose_kept_operator_destroys_what_it_runs_again_from_is_refused() -> None:
    # The kept operator adds onto g, in place. Its second execution would add onto the sum.
    operators = (
        (Pass.FORWARD, "x", "a", ""),
        (Pass.FORWARD, "ag", "b", "g"),
        (Pass.BACKWARD, "ab", "d", ""),
    )
    told = "ac_segments.0..operators: are executed again from g, which 0/forward/1 has overwritten"
    with pytest.raises(InvalidSpecError, match=told):
        small_stage(*operators, results=("d",), kept=("0/forward/1",))


def test_a_segment_with_operators_behind_its_recompute_is_refused() -> None:
    operators = (
        (Pass.FORWARD, "x", "a", ""),
        (Pass.FORWARD, "a", "b", ""),
        (Pass.BACKWARD, "ag", "d", ""),
    )
    profile = small_stage(*operators, results=("b", "d"))
    first, second, third = profile.operators

    with pytest.raises(InvalidSpecError, match="0/forward/1 is executed after 0/backward/2"):
        replace(profile, operators=(first, third, second))


def test_a_result_that_is_overwritten_is_refused() -> None:
    operators = (
        (Pass.FORWARD, "x", "a", ""),
        (Pass.FORWARD, "a", "b", ""),
        (Pass.BACKWARD, "ag", "d", ""),
        (Pass.STEP, "d", "e", "d"),
    )
    small_stage(*operators, results=("b", "e"))

    with pytest.raises(InvalidSpecError, match=r"results\[1\]: d is overwritten by 0/step/3; name"):
        small_stage(*operators, results=("b", "d"))


def test_a_kept_output_that_is_overwritten_before_the_recompute_is_compared_by_digest() -> None:
    # The third operator adds in place onto b, which the segment's second, kept one has made.
    operators = (
        (Pass.FORWARD, "x", "a", ""),
        (Pass.FORWARD, "a", "b", ""),
        (Pass.FORWARD, "b", "c", "b"),
        (Pass.BACKWARD, "agc", "d", ""),
    )
    for kept in ((), ("0/forward/1",)):
        profile = small_stage(*operators, results=("c", "d"), kept=kept)
        plan = plan_checks(profile)

        (piece,) = [piece for piece in plan.pieces if piece.method is Method.PIGGYBACK]
        assert [(c.tensor, c.by) for c in piece.comparisons] == [
            ("a", Compared.DIGEST),
            ("b", Compared.DIGEST),
        ]
        by_bits = tuple(replace(c, by=Compared.BITS) for c in piece.comparisons[1:])
        changed = replace(piece, comparisons=(piece.comparisons[0], *by_bits))
        pieces = tuple(changed if other == piece else other for other in plan.pieces)
        with pytest.raises(UncoveredError, match="ac b: is compared by bits, but the forward's"):
            verify_plan(profile, replace(plan, pieces=pieces))


def test_a_torn_file_is_refused() -> None:
    text = codec.dumps(stage())

    with pytest.raises(InvalidSpecError, match="profile: not JSON"):
        read_profile(text[: len(text) // 2])
    with pytest.raises(InvalidSpecError, match="plan: not JSON"):
        read_plan(text[: len(text) // 2])
    with pytest.raises(InvalidSpecError, match="another kind of file"):
        read_plan(text)
    with pytest.raises(InvalidSpecError, match="another kind of file"):
        read_profile("[]")


def test_a_window_of_unknown_length_counts_as_its_least() -> None:
    known, unknown = window_of("a", 1, 4.0), window_of("b", 1, 4.0, static=False)

    assert (known.usable_s, unknown.usable_s) == (4.0, 2.0)


def test_what_reaches_a_result_is_found_as_by_following_every_path() -> None:
    for seed in range(50):
        profile = RandomStage(seed, blocks=1).draw()
        graph = profile.graph

        def reaches(place: int, profile: Profile = profile, graph: Graph = graph) -> bool:
            return any(
                name in profile.results or any(reaches(reader) for reader in graph.readers[name])
                for name in graph.operators[place].outputs
            )

        assert profile.reaching == {p for p in range(len(profile.operators)) if reaches(p)}


def test_addressed_tensors_cost_no_memory() -> None:
    profile = stage()
    weight = Tensor(name="w", size_bytes=5, origin=Origin.ADDRESSED)
    graph = Graph((*profile.tensors, weight), profile.operators)

    assert graph.size_of(["w", "A0", "A1"]) == 2
