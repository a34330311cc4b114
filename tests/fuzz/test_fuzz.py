"""What once failed stays mended; valid inputs are accepted; the fuzzer finds what is planted."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.fuzz import runner
from tests.fuzz.mutation import RAW_TOKENS, change_bytes, change_json, smaller_bytes, smaller_json
from tests.fuzz.planted import Planted
from tests.fuzz.targets import NAMES, load

FEW = {"bodies": 100}
"""Inputs of a target in a test; others get ``MANY``."""
MANY = 300
QUICK = [name for name in NAMES if name != "checkpoints"]
"""Targets that get new inputs here: tests/train/state/test_damage.py damages checkpoints."""

target = cache(load)


@pytest.mark.parametrize("name", NAMES)
def test_what_once_failed_ends_as_documented(name: str) -> None:
    for path in sorted((runner.CORPUS / name).glob("*")):
        found = runner.examine(target(name), path.read_bytes())
        assert not isinstance(found, runner.Finding), f"{path}: {found.told}"


def test_every_folder_of_the_corpus_is_that_of_a_target() -> None:
    assert {path.name for path in runner.CORPUS.iterdir()} <= {*NAMES}


@pytest.mark.parametrize("name", QUICK)
def test_valid_inputs_are_accepted_and_others_end_as_documented(name: str) -> None:
    for data in target(name).examples():
        assert runner.examine(target(name), data) is True
    outcomes = set()
    for number in range(FEW.get(name, MANY)):
        data = runner.input_of(target(name), 1, number)
        found = runner.examine(target(name), data)
        assert not isinstance(found, runner.Finding), f"input {number} of seed 1: {found.told}"
        outcomes.add(found)
    assert False in outcomes
    assert True in outcomes, "no change is too small to matter"


@pytest.mark.parametrize("name", QUICK)
def test_an_input_follows_from_the_seed_and_its_number_alone(name: str) -> None:
    first = [runner.input_of(target(name), 7, number) for number in range(20)]
    again = [runner.input_of(target(name), 7, number) for number in reversed(range(20))]
    assert first == again[::-1]
    assert len(set(first)) > 15
    assert [runner.input_of(target(name), 8, number) for number in range(20)] != first
    assert max(map(len, first)) <= runner.MAX_BYTES


def test_json_is_changed_in_as_many_ways_as_there_are_and_every_token_appears() -> None:
    others = [{"a": [1, 2.5, "x", None, {"b": True}]}, [1]]
    texts = b""
    for number in range(3000):
        draw = random.Random(number)
        _, text = change_json({"a": [1, "two", {"b": 0.5}], "c": {}}, draw, others)
        texts += text[:300]
    for token in RAW_TOKENS:
        assert token[:100].encode() in texts


def test_a_finding_is_kept_as_the_smallest_input_that_shows_it(tmp_path: Path) -> None:
    found = runner.examine(Planted(), b"please do not raise this again and again")
    assert isinstance(found, runner.Finding)
    least = runner.shrink(Planted(), found)
    assert least.data == b"raise"
    path = runner.keep(least, "planted", tmp_path)
    assert path.read_bytes() == b"raise"
    assert path.parent == tmp_path / "planted"


def test_smaller_inputs_are_smaller() -> None:
    assert all(len(less) < 40 for less in smaller_bytes(b"x" * 40))
    value = {"a": [1, 2, 3], "b": {"c": "text"}}
    smaller = list(smaller_json(value))
    assert {"b": {"c": "text"}} in smaller
    assert {"a": [1, 2, 3], "b": {}} in smaller
    assert value not in smaller
    assert change_bytes(b"abc", random.Random(3)) == change_bytes(b"abc", random.Random(3))


def test_whatever_an_input_does_to_its_process_is_found_and_the_others_are_judged(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.planted", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.startswith("60 inputs in"), ended.stderr
    kept = {path.name.rpartition("-")[0] for path in (tmp_path / "planted").iterdir()}
    assert kept == {
        "bounderror-it-was-stopped-it-took-too",
        "bounderror-it-took-mib-of-memory",
        "the-worker-ended-with-9",
        "zerodivisionerror-planted",
    }
