import json
import logging

import pytest
import torch
from tests.train.stages import build_stage

from mainstay_core.base.errors import IntegrityError
from mainstay_core.wire.votes import Commit
from mainstay_train.model import workload
from mainstay_train.state.directory import CheckpointDirectory, Part, new_manifest
from mainstay_train.state.heal import masters_digest

SMALL = {"dim": 16, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}


def make_states(stages, seed=None, steps=2):
    """The states of all stages; with a seed they have been trained ``steps`` steps."""
    model = workload.load("", SMALL)
    states = [build_stage(model, stages, s) for s in range(stages)]
    for state in states if seed is not None else ():
        state.initialize(seed)
        for step in range(steps):
            for block in state.blocks:  # by name: the same gradient whatever the cut
                generator = torch.Generator().manual_seed(hash((step, len(block.name))) & 0xFFFF)
                block_gradient = torch.randn(block.layout.size, generator=generator)
                gradients[block.name] = block_gradient
            state.apply([gradients[b.name] for b in state.blocks], 0.1, 1e-3)
    return states


gradients: dict[str, torch.Tensor] = {}


def make_commit(version):
    return Commit(
        step=version - 1,
        norm=1.5,
        scale=0.25,
        tokens=4,
        loss=2.0,
        data="0" * 32,
        data_total="1" * 32,
    )


def write_part(directory, version, nonce, stage, state, chain=""):
    part = Part(
        stage=stage,
        tensors={t.id: t.tensor for t in state.state_tensors()},
        commit=make_commit(version),
        commit_chain=chain,
        masters=masters_digest(state),
    )
    directory.write_part(version, nonce, part)


def complete(directory, version, nonce, stages):
    positions = [(stage, 0) for stage in range(stages)]
    directory.complete(version, nonce, new_manifest("job", positions, {"seed": "3"}, {}))


def write(directory, version, states, nonce="n1"):
    for stage, state in enumerate(states):
        write_part(directory, version, nonce, stage, state, f"chain-{version}")
    complete(directory, version, nonce, len(states))


def tensors(states):
    return {t.id: t.tensor for state in states for t in state.state_tensors()}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_version_written_by_two_stages_is_read_by_any_number(tmp_path, stages):
    written = make_states(2, seed=3)
    directory = CheckpointDirectory(tmp_path / "job")
    assert directory.newest_complete() == 0
    write(directory, 20, written)
    assert directory.newest_complete() == 20
    read = make_states(stages)
    for state in read:
        loaded = directory.load(20, state)
        assert (loaded.commit, loaded.commit_chain) == (make_commit(20), "chain-20")
        assert loaded.masters == masters_digest(state)
    before, after = tensors(written), tensors(read)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_parts_alone_are_no_version(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    states = make_states(2, seed=3)
    write_part(directory, 5, "n1", 0, states[0])
    write_part(directory, 5, "n1", 1, states[1])
    assert directory.newest_complete() == 0
    with pytest.raises(FileNotFoundError):
        complete(directory, 5, "another quorum", 2)  # it has no parts
    assert directory.newest_complete() == 0
    complete(directory, 5, "n1", 2)
    assert directory.newest_complete() == 5


def test_renaming_a_version_that_exists_is_success(tmp_path):
    states = make_states(2, seed=3)
    first, second = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    write(first, 5, states, "n1")
    manifest = (tmp_path / "step-00000005" / "manifest.json").read_text()
    write(second, 5, states, "n2")
    complete(second, 5, "n2", 2)
    assert (tmp_path / "step-00000005" / "manifest.json").read_text() == manifest
    second.load(5, make_states(1)[0])


def test_an_abandoned_part_is_replaced(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    old, new = make_states(1, seed=1), make_states(1, seed=2)
    write_part(directory, 5, "n1", 0, old[0], "old")
    write(directory, 5, new)
    read = make_states(1)
    assert directory.load(5, read[0]).commit_chain == "chain-5"
    assert masters_digest(read[0]) == masters_digest(new[0])


@pytest.mark.parametrize("damage", ["shortened", "missing", "no manifest"])
def test_a_torn_version_is_skipped_with_a_warning(tmp_path, caplog, damage):
    directory = CheckpointDirectory(tmp_path)
    states = make_states(2, seed=3)
    write(directory, 5, states)
    write(directory, 10, states)
    newest = tmp_path / "step-00000010"
    victim = next(iter(sorted((newest / "stage-1-inner-0").glob("*.distcp"))))
    match damage:
        case "shortened":
            victim.write_bytes(victim.read_bytes()[:-7])
        case "missing":
            victim.unlink()
        case "no manifest":
            (newest / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert directory.newest_complete() == 5
    assert any("step-00000010 is skipped" in record.message for record in caplog.records)


def test_wrong_bits_are_refused_and_the_older_version_is_taken(tmp_path, caplog):
    directory = CheckpointDirectory(tmp_path)
    states = make_states(2, seed=3)
    write(directory, 5, states)
    write(directory, 10, states)
    part = tmp_path / "step-00000010" / "stage-0-inner-0" / "part.json"
    description = json.loads(part.read_text())
    name = next(iter(description["tensors"]))
    digest = description["tensors"][name]
    description["tensors"][name] = ("0" if digest[0] != "0" else "1") + digest[1:]
    part.write_text(json.dumps(description))
    assert directory.newest_complete() == 10  # sizes are right: only reading shows it
    reader = make_states(2)
    other = CheckpointDirectory(tmp_path)
    wrong = pytest.raises(IntegrityError, match=f"{name} does not have its digest")
    with caplog.at_level(logging.WARNING), wrong:
        directory.load(10, reader[0])
    assert any("step-00000010.bad" in record.getMessage() for record in caplog.records)
    assert directory.newest_complete() == 5
    assert other.newest_complete() == 5, "put aside for every rank, not only who found it"
    directory.load(5, reader[0])
    assert masters_digest(reader[0]) == masters_digest(states[0])


def test_flipped_bytes_in_a_tensors_file_are_refused(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    write(directory, 10, make_states(1, seed=3))
    (file,) = (tmp_path / "step-00000010" / "stage-0-inner-0").glob("*.distcp")
    content = bytearray(file.read_bytes())
    for position in range(len(content) // 2, len(content) // 2 + 64):
        content[position] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(IntegrityError):
        directory.load(10, make_states(1)[0])
    assert directory.newest_complete() == 0


def test_a_damaged_description_is_refused(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    write(directory, 10, make_states(1, seed=3))
    part = tmp_path / "step-00000010" / "stage-0-inner-0" / "part.json"
    text = part.read_text()
    part.write_text("?" + text[1:])  # of the right size
    with pytest.raises(IntegrityError):
        directory.load(10, make_states(1)[0])
    assert directory.newest_complete() == 0


def test_two_versions_are_kept_and_abandoned_parts_go(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    states = make_states(1, seed=3)
    write_part(directory, 5, "dead", 0, states[0])
    for version in (5, 10, 15):
        write(directory, version, states)
    write_part(directory, 20, "running", 0, states[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000010",
        "step-00000015",
        "step-00000020.tmp-running",
    ]
