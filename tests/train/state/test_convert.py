"""Checkpoints of format 1: converted without running what is in them; export for torch's tools."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tests.train.state.test_directory import (
    flip,
    make_commit,
    make_states,
    newest_complete,
    open_directory,
    tensors,
    tensors_file,
    versions_in,
    write,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError
from mainstay_train.state import format_1
from mainstay_train.state.convert import convert
from mainstay_train.state.export import export
from mainstay_train.sums import digests

KEY = b"a key of sixteen bytes or more"


def write_format_1(root, version, states):
    """A version as format 1 wrote it."""
    directory = root / f"step-{version:08d}"
    files = {}
    for stage, state in enumerate(states):
        part = directory / f"stage-{stage}-inner-0"
        part.mkdir(parents=True)
        stored = {t.id: t.tensor for t in state.state_tensors()}
        sums = {n: digests.tensor_digest(n, t).hex() for n, t in stored.items()}
        dcp.save(dict(stored), storage_writer=dcp.FileSystemWriter(part), no_dist=True)
        description = {
            "version": version,
            "stage": stage,
            "inner": 0,
            "commit": codec.encode(make_commit(version)),
            "chain": f"chain-{version}",
            "masters": "0" * 32,
            "tensors": sums,
        }
        (part / "part.json").write_text(json.dumps(description))
        files |= {str(p.relative_to(directory)): p.stat().st_size for p in part.iterdir()}
    manifest = {
        "version": version,
        "lineage": 0,
        "format": 1,
        "job": "job",
        "parts": [f"stage-{stage}-inner-0" for stage in range(len(states))],
        "files": files,
        "identity": {"seed": "3"},
        "fingerprint": {},
        "created_at_s": 12.5,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


class Program:
    """A pickle that runs a program when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_format_1_is_never_read_by_a_trainer_and_named_with_the_remedy(tmp_path):
    mark = tmp_path / "ran"
    old = write_format_1(tmp_path / "store", 10, make_states(1, seed=3))
    (old / "stage-0-inner-0" / ".metadata").write_bytes(pickle.dumps(Program(mark)))
    newest, (skipped,) = open_directory(tmp_path / "store").look()
    assert newest is None
    assert skipped.format_1
    assert "mainstay checkpoints convert DIR --trusted" in skipped.why
    with pytest.raises(IntegrityError, match="format 1"):
        open_directory(tmp_path / "store").load(10, make_states(1)[0])
    assert not mark.exists()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_converted_version_has_the_same_bits(tmp_path, stages):
    states = make_states(stages, seed=3)
    old = write_format_1(tmp_path, 10, states)
    assert "converted" in convert(old)
    assert versions_in(tmp_path) == ["step-00000010", "step-00000010.old"]
    directory = open_directory(tmp_path)
    (read,) = make_states(1)
    loaded = directory.load(10, read)
    assert (loaded.commit, loaded.commit_chain) == (make_commit(10), "chain-10")
    before, after = tensors(states), tensors([read])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert convert(old) == "nothing to do"


def test_a_program_in_the_metadata_is_refused_and_not_run(tmp_path):
    mark = tmp_path / "ran"
    old = write_format_1(tmp_path, 10, make_states(1, seed=3))
    (old / "stage-0-inner-0" / ".metadata").write_bytes(pickle.dumps(Program(mark)))
    with pytest.raises(IntegrityError, match="not ours"):
        convert(old)
    assert not mark.exists()
    assert (old / "manifest.json").exists(), "it is left as it is"


def test_a_program_in_the_tensors_is_refused_and_not_run(tmp_path):
    mark = tmp_path / "ran"
    old = write_format_1(tmp_path, 10, make_states(1, seed=3))
    for data in (old / "stage-0-inner-0").glob("*.distcp"):
        torch.save(Program(mark), data)
    with pytest.raises(IntegrityError, match="cannot be read"):
        convert(old)
    assert not mark.exists()


@pytest.mark.parametrize("victim", [".metadata", "part.json", "__0_0.distcp"])
def test_flipped_bits_are_never_converted(tmp_path, victim):
    states = make_states(1, seed=3)
    pristine = write_format_1(tmp_path / "pristine", 10, states)
    size_bytes = (pristine / "stage-0-inner-0" / victim).stat().st_size
    expected = tensors(states)
    for position in range(0, size_bytes, max(1, size_bytes // 40)):
        store = tmp_path / str(position)
        shutil.copytree(tmp_path / "pristine", store)
        flip(store / "step-00000010" / "stage-0-inner-0" / victim, position)
        try:
            convert(store / "step-00000010")
        except IntegrityError:
            assert [p.name for p in store.iterdir()] == ["step-00000010"], "nothing takes up room"
            continue
        read = make_states(1)  # the bit meant nothing: names of storages, paddings
        open_directory(store).load(10, read[0])
        assert all(torch.equal(expected[n], t) for n, t in tensors(read).items())


def test_a_conversion_that_was_killed_between_its_renames_is_done_again(tmp_path):
    old = write_format_1(tmp_path, 10, make_states(1, seed=3))
    convert(old)
    shutil.rmtree(old)
    assert "converted" in convert(old)
    assert newest_complete(open_directory(tmp_path)) == 10


def test_unsigned_versions_are_signed(tmp_path):
    states = make_states(2, seed=3)
    write(open_directory(tmp_path), 10, states)
    signed = open_directory(tmp_path, keys=[KEY])
    assert newest_complete(signed) == 0
    assert "signed" in convert(tmp_path / "step-00000010", [KEY])
    assert newest_complete(signed) == 10
    (read,) = make_states(1)
    signed.load(10, read)
    assert all(torch.equal(tensors(states)[n], t) for n, t in tensors([read]).items())
    assert convert(tmp_path / "step-00000010", [KEY]) == "nothing to do"


def test_an_original_is_never_replaced_by_a_later_conversion(tmp_path):
    old = write_format_1(tmp_path, 10, make_states(1, seed=3))
    convert(old)
    with pytest.raises(IntegrityError, match=r"step-00000010.old is there"):
        convert(old, [KEY])
    shutil.rmtree(tmp_path / "step-00000010.old")
    assert "signed" in convert(old, [KEY])


def test_a_damaged_version_is_not_signed(tmp_path):
    write(open_directory(tmp_path), 10, make_states(1, seed=3))
    flip(tensors_file(tmp_path, 10))
    with pytest.raises(IntegrityError, match="SHA-256"):
        convert(tmp_path / "step-00000010", [KEY])
    assert newest_complete(open_directory(tmp_path)) == 10


def test_an_exported_version_is_read_by_torchs_own_tools(tmp_path):
    states = make_states(2, seed=3)
    write(open_directory(tmp_path / "store"), 10, states)
    exported = list(export(tmp_path / "store" / "step-00000010", tmp_path / "out"))
    assert [part["part"] for part in exported] == ["stage-0-inner-0", "stage-1-inner-0"]
    expected = tensors(states)
    for part in exported:
        file = tmp_path / f"{part['part']}.pt"
        dcp_to_torch_save(tmp_path / "out" / part["part"], file)
        for name, tensor in torch.load(file).items():
            assert torch.equal(tensor, expected.pop(name))
    assert not expected


def test_a_damaged_version_is_not_exported(tmp_path):
    write(open_directory(tmp_path / "store"), 10, make_states(1, seed=3))
    flip(tensors_file(tmp_path / "store", 10))
    with pytest.raises(IntegrityError, match="SHA-256"):
        list(export(tmp_path / "store" / "step-00000010", tmp_path / "out"))
    assert not list(tmp_path.rglob("*.distcp"))


class Read:
    """Pickles as what reads an attribute of something."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_a_member_of_an_enum_may_be_written_by_its_name_and_nothing_else_is_read():
    def read(owner, name):
        return format_1._Restricted(io.BytesIO(pickle.dumps(Read(owner, name)))).load()

    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(_MEM_FORMAT_ENCODING, member.name) is member
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "__mro__"), ("a", "join")):
        with pytest.raises((IntegrityError, KeyError)):
            read(owner, name)
