"""Damaged checkpoints: the documented error, the next older version, and never a wrong tensor."""

import shutil

import pytest
import torch
from tests.train.state import damage

NUM_SEEDS = 100
PAST_FAILURES = ()
"""Seeds beyond those that once found a bug."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine") / "store"
    return root, damage.write_versions(root)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_whatever_is_damaged_nothing_wrong_is_loaded_and_something_older_is_found(
    first, pristine, tmp_path
):
    root, written = pristine
    for seed in (*range(first, first + 50), *PAST_FAILURES):
        copy = tmp_path / str(seed)
        shutil.copytree(root, copy)
        damage.look(copy, written, seed)
        shutil.rmtree(copy, ignore_errors=True)


def test_what_somebody_without_a_key_writes_is_a_documented_error_at_worst(pristine, tmp_path):
    root, _ = pristine
    for seed in range(50):
        copy = tmp_path / str(seed)
        shutil.copytree(root, copy)
        damage.read(copy, damage.forge(copy, seed))
        shutil.rmtree(copy)


def test_with_a_key_nothing_that_somebody_else_wrote_is_loaded(tmp_path):
    root, key = tmp_path / "store", b"a key of sixteen bytes or more"
    written = damage.write_versions(root, [key])
    for seed in range(50):
        copy = tmp_path / str(seed)
        shutil.copytree(root, copy)
        told = damage.forge(copy, seed)
        newest, loaded = damage.read(copy, told, [key])
        expected = written.get(newest, {})
        assert all(torch.equal(loaded[name], expected[name]) for name in expected), told
        shutil.rmtree(copy)
