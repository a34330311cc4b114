"""What lies in a directory of checkpoints: every number and text from a file has a bound."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError
from mainstay_core.wire.checkpoint_manifest import (
    MAX_FILE_BYTES,
    FileEntry,
    Manifest,
    ManifestPart,
    PartDescription,
    StoredTensor,
    differences,
    parse_manifest,
    parse_name,
    parse_part,
    version_name,
)
from mainstay_core.wire.sealed import seal
from mainstay_core.wire.votes import Commit

GOLDEN = Path(__file__).parent / "golden" / "v2"
ENTRY = FileEntry(size_bytes=24, sha256="a" * 64)
MANIFEST = Manifest(
    version=20,
    lineage=1,
    commit_chain="c" * 32,
    job="demo",
    parts=(ManifestPart(stage=0, inner=1, part=ENTRY, tensors=ENTRY),),
    identity={"training.seed": "3"},
    fingerprint={"device": "a cpu"},
    created_at_s=12.5,
)
PART = PartDescription(
    version=20,
    nonce="5eed",
    stage=0,
    inner=1,
    commit=Commit(step=19, norm=1.5, scale=0.25, tokens=4, loss=2.0, data="0" * 32),
    commit_chain="c" * 32,
    file=ENTRY,
    tensors=(
        StoredTensor(name="master:a", dtype="float32", shape=(2, 2), digest="d" * 32),
        StoredTensor(name="step:a", dtype="float64", shape=(), digest="e" * 32),
    ),
)


def test_files_are_those_of_the_golden_files() -> None:
    assert seal("manifest", codec.dumps(MANIFEST)) == (GOLDEN / "checkpoint-manifest").read_bytes()
    assert seal("part", codec.dumps(PART)) == (GOLDEN / "checkpoint-part").read_bytes()
    assert parse_manifest((GOLDEN / "checkpoint-manifest").read_bytes(), 20) == MANIFEST
    assert parse_part((GOLDEN / "checkpoint-part").read_bytes()) == PART


def test_a_manifest_of_another_version_is_refused() -> None:
    with pytest.raises(IntegrityError, match="of step 20"):
        parse_manifest(seal("manifest", codec.dumps(MANIFEST)), 30)


Change = Callable[[dict[str, Any]], object]

MANIFEST_CHANGES: dict[str, Change] = {
    "a negative size": lambda d: d["parts"][0]["tensors"].update(size_bytes=-1),
    "an enormous size": lambda d: d["parts"][0]["part"].update(size_bytes=MAX_FILE_BYTES + 1),
    "a digest that is a path": lambda d: d["parts"][0]["part"].update(sha256="../../etc/passwd"),
    "a negative stage": lambda d: d["parts"][0].update(stage=-1),
    "an enormous stage": lambda d: d["parts"][0].update(stage=10**30),
    "a stage that is a path": lambda d: d["parts"][0].update(stage="../x"),
    "a part twice": lambda d: d.update(parts=d["parts"] * 2),
    "no part": lambda d: d.update(parts=[]),
    "no parts": lambda d: d.pop("parts"),
    "a negative lineage": lambda d: d.update(lineage=-1),
    "no time": lambda d: d.update(created_at_s=float("nan")),
    "an endless time": lambda d: d.update(created_at_s=float("inf")),
    "an endless name": lambda d: d.update(job="x" * 2000),
    "a lone surrogate": lambda d: d.update(job="\ud800"),
    "a lone surrogate in the identity": lambda d: d.update(identity={"a": "\udfff"}),
    "an identity of numbers": lambda d: d.update(identity={"a": 3}),
    "a list of identities": lambda d: d.update(identity=[]),
}


@pytest.mark.parametrize("change", MANIFEST_CHANGES.values(), ids=MANIFEST_CHANGES)
def test_a_manifest_that_nobody_writes_is_a_documented_error(change: Change) -> None:
    data = copy.deepcopy(codec.encode(MANIFEST))
    change(data)
    with pytest.raises(IntegrityError):
        parse_manifest(seal("manifest", json.dumps(data)), 20)


PART_CHANGES: dict[str, Change] = {
    "an enormous shape": lambda d: d["tensors"][0].update(shape=[2**40, 2**40, 2**40]),
    "a negative shape": lambda d: d["tensors"][0].update(shape=[-2, -2]),
    "a number of endless digits": lambda d: d["tensors"][0].update(shape=[10**400]),
    "too many dimensions": lambda d: d["tensors"][0].update(shape=[2, 2, *[1] * 100]),
    "an unknown type": lambda d: d["tensors"][0].update(dtype="object"),
    "a smaller file": lambda d: d["file"].update(size_bytes=23),
    "a larger file": lambda d: d["file"].update(size_bytes=25),
    "a tensor twice": lambda d: d["tensors"][1].update(name="master:a"),
    "an endless name": lambda d: d["tensors"][1].update(name="x" * 2000),
    "a digest that is none": lambda d: d["tensors"][1].update(digest="x" * 32),
    "a lone surrogate": lambda d: d.update(nonce="\udc00"),
    "an attempt at step 0": lambda d: d.update(version=0),
    "a float beyond all floats": lambda d: d["commit"].update(scale=10**400),
    "a commit that is none": lambda d: d.update(commit=[]),
}


@pytest.mark.parametrize("change", PART_CHANGES.values(), ids=PART_CHANGES)
def test_a_part_that_nobody_writes_is_a_documented_error(change: Change) -> None:
    data = copy.deepcopy(codec.encode(PART))
    change(data)
    with pytest.raises(IntegrityError):
        parse_part(seal("part", json.dumps(data)))


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        (version_name(20), (20, "")),
        ("step-00000020.tmp-5eed", (20, "tmp")),
        ("step-00000020.gone-5eed", (20, "gone")),
        ("step-00000020.bad", (20, "bad")),
        ("step-00000020.tainted-5eed", (20, "tainted")),
        ("step-00000020.tainted", None),
        ("step-00000020.refused", (20, "refused")),
        ("step-00000020.old", (20, "old")),
        ("step-" + "9" * 200, None),
        ("step-\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668", None),
        ("step-00000020.tmp-../x", None),
        ("step-00000020\n", None),
        ("owner-00000001", None),
        ("notes.txt", None),
    ],
)
def test_entries_are_known_by_their_names(name: str, meaning: object) -> None:
    assert parse_name(name) == meaning


def test_differences_can_be_shown_whatever_the_file_says() -> None:
    (told,) = differences({"a": "\x1b[2J" + "x" * 10_000}, {"a": "3"})
    assert told.isprintable()
    assert len(told) < 500


@pytest.mark.parametrize(
    ("theirs", "ours", "is_same"),
    [
        ("4.0", "4", True),
        ("1e+16", "10000000000000000", True),
        ("0.001", "1e-3", True),
        ("4.0", "4.5", False),
        ('"4.0"', "4", False),
        ("true", "1", False),
        ("4", "absent", False),
    ],
)
def test_a_whole_number_is_the_same_with_a_point_and_without(
    theirs: str, ours: str, is_same: bool
) -> None:
    """A release that had 4.0 of a local job's file wrote it so."""
    assert (differences({"a": theirs}, {"a": ours}) == ()) is is_same
    assert (differences({"a": ours}, {"a": theirs}) == ()) is is_same


def test_an_entry_that_one_side_lacks_differs() -> None:
    assert differences({"a": "4"}, {}) == ("a is 4 in the checkpoint, absent here",)
