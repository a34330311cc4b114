"""Which record of a commit a replay goes by: no damaged one, and never just the first one told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import permutations
from typing import Any

import pytest
from tests.core.rank.replays.test_replaying import (
    GRADIENT,
    LINEAGE,
    STATE,
    key_of,
    pod,
    record_of,
)

from mainstay_core.base.codec import dumps, loads
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays.replaying import Stores
from mainstay_core.rank.replays.told_records import MAX_NAMED, ToldRecords, choose_records
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import Commit, CommitRecord, is_sealed, seal_record

STEP = 4
GOOD = seal_record(
    replace(
        record_of(STEP, forks="f"),
        commit=Commit(
            step=STEP, norm=1.0, scale=0.5, tokens=4, loss=2.0, data="0", data_total="1",
            statistics=(3, 4), norms_sq=(0.5, 0.25),
        ),
    )
)  # fmt: skip


def store(name: str, *records: CommitRecord, lineage: int = LINEAGE) -> StoreReport:
    return StoreReport(pod=PodUid(name), address=f"{name}:1", lineage=lineage, records=records)


def choose(*told: CommitRecord) -> ToldRecords:
    """Have pods a, b and so on tell one record each."""
    reports = [store(name, record) for name, record in zip("abcdef", told, strict=False)]
    return choose_records(reports, LINEAGE)


def flipped(value: Any) -> list[Any]:
    """Return what a value of JSON may be once something of it has flipped."""
    match value:
        case str():
            return [f"{chr(ord(value[0]) ^ 1)}{value[1:]}", value[1:], f"{value}0"]
        case int() | float():
            return [value + 1, value * 2 + 1]
        case list():
            changed = [
                [*value[:at], f, *value[at + 1 :]] for at, v in enumerate(value) for f in flipped(v)
            ]
            return [*changed, value[:-1], value[::-1]]
        case dict():
            changed = [value | {name: f} for name, v in value.items() for f in flipped(v)]
            return [*changed, *({n: v for n, v in value.items() if n != name} for name in value)]
    raise AssertionError(value)


def test_whatever_flips_in_a_record_it_no_longer_has_its_seal() -> None:
    whole = json.loads(dumps(GOOD))
    names = {field.name for kind in (CommitRecord, Commit) for field in fields(kind)}
    assert names == {*whole, *whole["commit"]}, "each field has a value that can flip"
    num_damaged = 0
    for other in flipped(whole):
        try:
            record = loads(CommitRecord, json.dumps(other))
        except MalformedError:
            continue  # found already
        if record != GOOD:
            assert not is_sealed(record), other
            num_damaged += 1
    assert num_damaged > 40


def test_a_record_has_its_seal_wherever_it_is_read_whatever_numbers_its_writer_had() -> None:
    commit = replace(GOOD.commit, norm=1, scale=0, loss=-2, norms_sq=(1, 1e300, 0.1))
    written = seal_record(replace(GOOD, commit=commit))
    read = loads(CommitRecord, dumps(written))
    assert is_sealed(written)
    assert is_sealed(read)
    assert not is_sealed(replace(GOOD, seal=""))


DAMAGE: dict[str, Callable[[CommitRecord], CommitRecord]] = {
    "scale": lambda r: replace(r, commit=replace(r.commit, scale=2 * r.commit.scale)),
    "step": lambda r: replace(r, commit=replace(r.commit, step=STEP ^ 1)),
    "gradients": lambda r: replace(r, gradients=("f" + r.gradients[0][1:], *r.gradients[1:])),
    "states": lambda r: replace(r, states=("f" + r.states[0][1:], *r.states[1:])),
    "lineage": lambda r: replace(r, lineage=r.lineage ^ 1),
    "quorum": lambda r: replace(r, certified_in="q9-n"),
    "chain": lambda r: replace(r, chain="f" + r.chain[1:]),
    "seal": lambda r: replace(r, seal="g" + r.seal[1:]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_record_is_left_out_by_name_and_that_of_the_next_pod_counts(what: str) -> None:
    damaged = DAMAGE[what](GOOD)
    told = choose(damaged, GOOD)
    assert told.chosen == {STEP: GOOD}
    assert told.certified == {STEP: {GOOD.certified_in}}
    assert told.damaged == (("a", damaged.commit.step),)
    said = f"; the record of step {damaged.commit.step} on a is damaged and does not count"
    assert told.faults == said
    # The order in which pods tell is of no concern.
    assert choose_records([store("b", GOOD), store("a", damaged)], LINEAGE) == told
    assert choose(GOOD, damaged).chosen == told.chosen


@pytest.mark.parametrize("what", DAMAGE)
def test_where_no_good_record_is_left_nothing_is_made_anew_over_its_step(what: str) -> None:
    kept = key_of(0, 0, STATE, STEP), key_of(0, 0, GRADIENT, STEP)
    report = replace(pod("a", *kept).report(), records=(DAMAGE[what](GOOD),))
    stores = Stores([report], LINEAGE)
    assert stores.reach(0) == set()
    assert "on a is damaged" in stores.bad_records
    assert stores.plan_replay(0, STEP + 1) is None
    other = replace(pod("b").report(), records=(GOOD,))
    both = Stores([report, other], LINEAGE)
    assert both.reach(0) == {STEP, STEP + 1}
    replay = both.plan_replay(0, STEP + 1)
    assert replay is not None
    assert replay.records == (GOOD,)


def test_only_some_damaged_records_are_named_and_the_others_are_counted() -> None:
    bad = DAMAGE["scale"](GOOD)
    told = choose(*(bad,) * (MAX_NAMED + 2))
    assert told.faults.count("is damaged") == MAX_NAMED
    assert told.faults.endswith("; the same is said of 2 more records")
    assert not choose(GOOD).faults


CONTRADICTIONS = {name: DAMAGE[name] for name in ("scale", "gradients", "states", "chain")}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_records_of_one_quorum_that_as_many_pods_tell_do_not_count(what: str) -> None:
    """Nobody can tell which one is right; the first pod's is no better than the others'."""
    other = seal_record(CONTRADICTIONS[what](GOOD))
    for records in permutations((GOOD, GOOD, other, other)):
        told = choose(*records)
        assert not told.chosen
        assert not told.certified
        assert told.disputed == ((STEP, ("a", "b", "c", "d")),)
        assert told.faults == (
            f"; the records of step {STEP} on a, b, c, d differ, so that none of them counts"
        )


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_the_record_that_most_pods_of_a_quorum_tell_counts_and_the_others_are_named(
    what: str,
) -> None:
    """One pod's wrong record, though it is sealed, takes no step from the replays."""
    other = seal_record(CONTRADICTIONS[what](GOOD))
    older = seal_record(replace(other, certified_in="q0-n"))
    for records in set(permutations((GOOD, GOOD, GOOD, other, older, older))):
        told = choose(*records)
        wrong = "abcdef"[records.index(other)]
        assert told.chosen == {STEP: GOOD}
        assert told.outvoted == ((wrong, STEP),)
        assert told.certified == {STEP: {"q0-n", GOOD.certified_in}}
        assert told.faults == (
            f"; the record of step {STEP} on {wrong} differs from that of most pods and does not "
            "count"
        )


def test_half_of_the_pods_that_know_what_votes_said_are_not_most() -> None:
    bare = seal_record(replace(GOOD, states=(), gradients=()))
    other = seal_record(DAMAGE["states"](GOOD))
    assert not choose(bare, bare, bare, GOOD, other).chosen
    assert choose(bare, GOOD, other, GOOD).chosen == {STEP: GOOD}
    assert choose(bare, GOOD, other, GOOD).outvoted == (("c", STEP),)


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_record_of_the_newer_quorum_counts_where_the_job_went_back(what: str) -> None:
    newer = seal_record(replace(CONTRADICTIONS[what](GOOD), certified_in="q12-n"))
    for records in permutations((GOOD, newer, GOOD)):
        told = choose(*records)
        assert told.chosen == {STEP: newer}
        assert told.certified == {STEP: {"q1-n", "q12-n"}}, "logs count by either"
        assert not told.faults


def test_what_votes_said_is_taken_from_whoever_knows_it_and_agrees() -> None:
    bare = seal_record(replace(GOOD, states=(), gradients=()))
    newer = seal_record(replace(bare, certified_in="q2-n"))
    without = replace(GOOD.commit, norms_sq=())
    older = seal_record(replace(GOOD, commit=without))
    for records, chosen in (
        ((bare, GOOD), GOOD),
        ((bare, bare), bare),
        ((newer, GOOD), GOOD),
        ((newer, older), older),
        ((newer, seal_record(DAMAGE["scale"](GOOD))), newer),
        ((newer, GOOD, seal_record(DAMAGE["states"](GOOD))), newer),
    ):
        for told in permutations(records):
            assert choose(*told).chosen == {STEP: chosen}
            assert not choose(*told).faults


def test_whole_records_of_another_lineage_are_no_fault() -> None:
    told = choose(record_of(STEP, LINEAGE - 1), GOOD)
    assert told.chosen == {STEP: GOOD}
    assert not told.faults
