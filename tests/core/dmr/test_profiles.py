"""Profiles: files are read as they were written, and contradictions are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.core.dmr.stages import RandomStage, linear_stage, window_of

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.operators import Graph, Origin, Tensor
from mainstay_core.dmr.plan import read_plan
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

    with pytest.raises(InvalidSpecError, match="recomputed from A0, which 0/forward/1 has"):
        replace(stage, ac_segments=(AcSegment(name="ac", operators=("0/forward/0",), kept=()),))


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
