import errno
import logging
import subprocess
from pathlib import Path

import pytest
import torch
from tests.train.stages import build_stage

from mainstay_core.base.errors import IntegrityError, OwnershipError
from mainstay_core.wire.checkpoint_manifest import (
    DTYPE_BYTES,
    ManifestPart,
    PartDescription,
    StoredTensor,
)
from mainstay_core.wire.checkpoint_owner import Owner
from mainstay_core.wire.plan import Voided
from mainstay_core.wire.reinitialisation import Fork, Reinitialisation
from mainstay_core.wire.votes import Commit
from mainstay_train.exact.optimizer import Shared, StateTensor
from mainstay_train.exact.slices import Slice
from mainstay_train.model import workload
from mainstay_train.state.directory import AbandonedError, CheckpointDirectory, Whose
from mainstay_train.state.heal import masters_digest
from mainstay_train.state.part_files import (
    PIECE_BYTES,
    Part,
    Passage,
    describe,
    new_tensor,
    open_file,
    read_description,
    read_tensors,
    read_through,
    write_tensors,
)

SMALL = {"dim": 16, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}


def build_states(config, stages=1, entrypoint=""):
    model = workload.load(entrypoint, config)
    return [build_stage(model, stages, s) for s in range(stages)]


def make_states(stages, seed=None, steps=2):
    """The states of all stages; with a seed they have been trained ``steps`` steps."""
    states = build_states(SMALL, stages)
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


def make_whose(uid="u1", name="job", seed="3"):
    return Whose(owner=Owner(uid=uid, name=name), identity={"seed": seed}, fingerprint={})


def open_directory(root, keep=2, base=None, keys=(), **whose):
    return CheckpointDirectory(root, make_whose(**whose), keep, base, keys)


def newest_complete(directory):
    manifest, _ = directory.look()
    return manifest.version if manifest else 0


def versions_in(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("step-"))


def tensors_file(root, version, stage=0):
    return root / f"step-{version:08d}" / f"stage-{stage}-inner-0" / "tensors"


def part_file(root, version, stage=0):
    return root / f"step-{version:08d}" / f"stage-{stage}-inner-0" / "part"


def flip(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 0x04
    path.write_bytes(content)


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


def write_part(directory, version, nonce, stage, state, chain="", room=0, history=()):
    part = Part(
        stage=stage,
        tensors=state.state_tensors(),
        commit=make_commit(version),
        commit_chain=chain,
        masters=masters_digest(state),
        history=history,
    )
    directory.write_part(version, nonce, part, room_bytes=room)


def complete(directory, version, nonce, stages):
    directory.complete(version, nonce, [(stage, 0) for stage in range(stages)])


def write(directory, version, states, nonce="n1"):
    for stage, state in enumerate(states):
        write_part(directory, version, nonce, stage, state, f"chain-{version}")
    complete(directory, version, nonce, len(states))


def tensors(states):
    return {t.id: t.tensor for state in states for t in state.state_tensors()}


def test_parameters_that_the_optimizer_leaves_alone_are_saved_without_its_state(tmp_path):
    config = {**SMALL, "experts": 4, "expertHidden": 8, "sequence": 8}
    moe = "mainstay_train.models.moe:workload"
    bias = "master:layers.1.mixture.router.bias"
    written = build_states(config, 2, moe)
    for state in written:
        state.initialize(3)
    values = torch.tensor([0.25, -1.0, 0.0, 3e-3])
    tensors(written)[bias].copy_(values)
    directory = open_directory(tmp_path / "job")
    write(directory, 20, written)
    (read,) = build_states(config, 1, moe)
    directory.load(20, read)
    before, after = tensors(written), tensors([read])
    assert before.keys() == after.keys()
    assert [name for name in after if name.endswith("router.bias")] == [bias]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(read.blocks[2].module.mixture.router.bias, values)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_version_written_by_two_stages_is_read_by_any_number(tmp_path, stages):
    written = make_states(2, seed=3)
    directory = open_directory(tmp_path / "job")
    assert newest_complete(directory) == 0
    write(directory, 20, written)
    assert newest_complete(directory) == 20
    read = make_states(stages)
    for state in read:
        loaded = directory.load(20, state)
        assert (loaded.commit, loaded.commit_chain) == (make_commit(20), "chain-20")
        assert loaded.masters == masters_digest(state)
    before, after = tensors(written), tensors(read)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_parts_alone_are_no_version(tmp_path):
    directory = open_directory(tmp_path)
    states = make_states(2, seed=3)
    write_part(directory, 5, "n1", 0, states[0])
    write_part(directory, 5, "n1", 1, states[1])
    assert newest_complete(directory) == 0
    with pytest.raises(FileNotFoundError):
        complete(directory, 5, "another quorum", 2)  # it has no parts
    assert newest_complete(directory) == 0
    complete(directory, 5, "n1", 2)
    assert newest_complete(directory) == 5


def test_renaming_the_very_version_again_is_success(tmp_path):
    states = make_states(2, seed=3)
    first, second = open_directory(tmp_path), open_directory(tmp_path)
    write(first, 5, states, "n1")
    manifest = (tmp_path / "step-00000005" / "manifest").read_bytes()
    write(second, 5, states, "n2")
    assert (tmp_path / "step-00000005" / "manifest").read_bytes() == manifest
    second.load(5, make_states(1)[0])
    assert versions_in(tmp_path) == ["step-00000005"], "the second attempt is of no more use"


def test_a_torn_version_in_the_way_is_put_aside_and_written_anew(tmp_path):
    states = make_states(2, seed=3)
    directory = open_directory(tmp_path)
    write(directory, 5, states)
    tensors_file(tmp_path, 5).write_bytes(b"torn")
    write(directory, 5, states, "n2")
    assert versions_in(tmp_path) == ["step-00000005", "step-00000005.bad"]
    directory.load(5, make_states(1)[0])


def test_a_version_of_another_history_in_the_way_is_put_aside(tmp_path):
    directory = open_directory(tmp_path)
    write_part(directory, 5, "n1", 0, make_states(1, seed=3)[0], "one history")
    complete(directory, 5, "n1", 1)
    write(directory, 5, make_states(1, seed=3, steps=1), "n2")
    assert directory.load(5, make_states(1)[0]).commit_chain == "chain-5"


def test_another_jobs_version_in_the_way_is_named_and_stays(tmp_path):
    theirs = open_directory(tmp_path, seed="4", name="theirs")
    write(theirs, 5, make_states(1, seed=4))
    for claim in tmp_path.glob("owner-*"):
        claim.unlink()
    ours = open_directory(tmp_path)
    with pytest.raises(OwnershipError, match=r"theirs.*seed is 4 in the checkpoint, 3 here"):
        write(ours, 5, make_states(1, seed=3))
    assert newest_complete(theirs) == 5
    assert newest_complete(ours) == 0


def test_parts_of_another_attempt_make_no_version(tmp_path):
    directory = open_directory(tmp_path)
    states = make_states(2, seed=3)
    write_part(directory, 5, "n1", 0, states[0])
    write_part(directory, 5, "n1", 1, states[1])
    attempt = tmp_path / "step-00000005.tmp-n1"
    attempt.rename(tmp_path / "step-00000005.tmp-n2")
    with pytest.raises(IntegrityError, match="another attempt"):
        complete(directory, 5, "n2", 2)
    assert newest_complete(directory) == 0


def test_an_abandoned_part_is_replaced(tmp_path):
    directory = open_directory(tmp_path)
    old, new = make_states(1, seed=1), make_states(1, seed=2)
    write_part(directory, 5, "n1", 0, old[0], "old")
    write(directory, 5, new)
    read = make_states(1)
    assert directory.load(5, read[0]).commit_chain == "chain-5"
    assert masters_digest(read[0]) == masters_digest(new[0])


@pytest.mark.parametrize("damage", ["shortened", "missing", "no manifest"])
def test_a_torn_version_is_skipped_with_a_warning(tmp_path, caplog, damage):
    directory = open_directory(tmp_path)
    states = make_states(2, seed=3)
    write(directory, 5, states)
    write(directory, 10, states)
    newest = tmp_path / "step-00000010"
    victim = newest / "stage-1-inner-0" / "tensors"
    match damage:
        case "shortened":
            victim.write_bytes(victim.read_bytes()[:-7])
        case "missing":
            victim.unlink()
        case "no manifest":
            (newest / "manifest").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_complete(directory) == 5
    assert any("step-00000010 is skipped" in record.message for record in caplog.records)


def test_wrong_bits_are_refused_and_the_older_version_is_taken(tmp_path, caplog):
    directory = open_directory(tmp_path)
    states = make_states(2, seed=3)
    write(directory, 5, states)
    write(directory, 10, states)
    flip(tensors_file(tmp_path, 10))
    assert newest_complete(directory) == 10  # sizes are right: only reading shows it
    reader = make_states(2)
    other = open_directory(tmp_path)
    wrong = pytest.raises(IntegrityError, match="tensors does not have its SHA-256")
    with caplog.at_level(logging.WARNING), wrong:
        directory.load(10, reader[0])
    assert any("step-00000010.bad" in record.getMessage() for record in caplog.records)
    assert newest_complete(directory) == 5
    assert newest_complete(other) == 5, "put aside for every rank, not only who found it"
    directory.load(5, reader[0])
    assert masters_digest(reader[0]) == masters_digest(states[0])


def test_a_damaged_description_is_refused(tmp_path):
    directory = open_directory(tmp_path)
    write(directory, 10, make_states(1, seed=3))
    flip(part_file(tmp_path, 10))
    with pytest.raises(IntegrityError, match="part does not have its SHA-256"):
        directory.load(10, make_states(1)[0])
    assert newest_complete(directory) == 0


def test_a_version_damaged_twice_is_put_aside_twice(tmp_path):
    directory = open_directory(tmp_path)
    states = make_states(1, seed=3)
    for nonce in ("n1", "n2"):
        write(directory, 10, states, nonce)
        flip(tensors_file(tmp_path, 10))
        with pytest.raises(IntegrityError):
            directory.load(10, make_states(1)[0])
        assert newest_complete(directory) == 0


def test_a_tensors_file_that_cannot_be_read_is_damage(tmp_path):
    directory = open_directory(tmp_path)
    states = make_states(1, seed=3)
    write(directory, 5, states)
    write(directory, 10, states)
    description = part_file(tmp_path, 10)
    description.unlink()
    description.mkdir()  # reading it is an error of the system
    assert [s.version for s in directory.look()[1]] == [10]
    assert newest_complete(directory) == 5


def test_two_versions_are_kept_and_abandoned_parts_go(tmp_path):
    directory = open_directory(tmp_path)
    states = make_states(1, seed=3)
    write_part(directory, 5, "dead", 0, states[0])
    for version in (5, 10, 15):
        write(directory, version, states)
    write_part(directory, 20, "running", 0, states[0])
    assert versions_in(tmp_path) == [
        "step-00000010",
        "step-00000015",
        "step-00000020.tmp-running",
    ]


def test_a_version_says_what_forks_it_contains_and_the_way_back_is_kept(tmp_path):
    directory = open_directory(tmp_path)
    states = make_states(1, seed=3)
    fork = Fork(version=12, chain="", made=Reinitialisation(positions=(), reason="made anew"))
    for version in (5, 10):
        write(directory, version, states)
    for version in (15, 20, 25):
        write_part(directory, version, "n1", 0, states[0], f"chain-{version}", history=(fork,))
        complete(directory, version, "n1", 1)

    assert versions_in(tmp_path) == ["step-00000010", "step-00000020", "step-00000025"]
    newest, _ = directory.look()
    assert newest.history == (fork,)
    assert directory.load(25, states[0]).history == (fork,)
    assert directory.load(10, states[0]).history == ()


def test_a_job_goes_on_from_the_one_version_of_an_earlier_run_that_it_names(tmp_path):
    states = make_states(1, seed=3)
    fork = Fork(version=12, chain="", made=Reinitialisation(positions=(), reason="made anew"))
    earlier = open_directory(tmp_path / "earlier")
    write(earlier, 10, states)
    write_part(earlier, 15, "n1", 0, states[0], "chain-15", history=(fork,))
    complete(earlier, 15, "n1", 1)

    def newest(version):
        run = CheckpointDirectory(
            tmp_path / f"run-{version}",
            make_whose(),
            base=tmp_path / "earlier",
            base_version=version,
        )
        found, _ = run.look()
        return found.version if found else None

    assert [newest(version) for version in (0, 10, 15, 11)] == [15, 10, 15, None]


def test_parts_of_tensors_are_written_and_read_again(tmp_path):
    """As inner ranks hold them: the digest of masters is that of their place in the whole."""
    whole = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    cut = Slice(name="w", shape=(8, 4), start=(4, 0), size=(4, 4))
    tensors = [
        StateTensor("w", "master", whole[4:].clone(), cut),
        StateTensor("w", "step", torch.tensor(3.0, dtype=torch.float64)),
        StateTensor("b", "master", torch.ones(3, dtype=torch.bfloat16), copy=True),
    ]
    directory = open_directory(tmp_path)
    part = Part(
        stage=0,
        inner=1,
        tensors=tensors,
        commit=make_commit(5),
        commit_chain="chain",
        masters=Shared.of(t for t in tensors if t.kind == "master").whole.hex(),
    )
    directory.write_part(5, "n1", part)
    directory.complete(5, "n1", [(0, 1)])
    manifest, _ = directory.look()
    (listed,) = manifest.parts
    version = tmp_path / "step-00000005"
    described = read_description(version, listed, 5)
    wanted = {t.id: torch.empty_like(t.tensor) for t in tensors}
    read_tensors(version, listed, described, wanted)
    assert all(torch.equal(wanted[t.id], t.tensor) for t in tensors)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_type_of_elements_is_read_as_it_was_written(tmp_path, dtype):
    if not hasattr(torch, dtype):
        pytest.skip("this torch has no such type")
    bits = torch.arange(48, dtype=torch.uint8) % 2
    written = bits.view(getattr(torch, dtype)).reshape(-1, 1)
    entry = write_tensors(tmp_path / "tensors", [written, written[:0]])
    (tmp_path / "stage-0-inner-0").mkdir()
    (tmp_path / "tensors").rename(tmp_path / "stage-0-inner-0" / "tensors")
    stored = (describe("a", written), describe("b", written[:0]))
    described = PartDescription(
        version=5,
        nonce="n",
        stage=0,
        inner=0,
        commit=make_commit(5),
        commit_chain="",
        file=entry,
        tensors=stored,
    )
    listed = ManifestPart(stage=0, inner=0, part=entry, tensors=entry)
    read = {tensor.name: new_tensor(tensor) for tensor in stored}
    read_tensors(tmp_path, listed, described, read)
    assert torch.equal(read["a"].view(torch.uint8), written.view(torch.uint8))
    assert read["b"].shape == written[:0].shape


def test_a_tensor_of_several_pieces_comes_through_memory_of_two(tmp_path):
    written = torch.randn(3 * PIECE_BYTES // 4 + 5)
    (tmp_path / "tensors").write_bytes(written.numpy().tobytes())
    read, seen = torch.empty_like(written), []
    with open_file(tmp_path / "tensors") as file:
        passage = Passage(read.device)
        read_through(file, read, lambda piece: seen.append(len(piece)), "tensors", passage)
        assert torch.equal(read, written)
        assert seen == [PIECE_BYTES] * 3 + [20]
        with pytest.raises(IntegrityError, match="tensors is torn"):
            read_through(file, read, seen.append, "tensors", passage)


def test_a_shape_whose_strides_overflow_is_a_documented_error():
    shape = (0, 1 << 49, 1 << 49)
    with pytest.raises(IntegrityError, match="no possible shape"):
        new_tensor(StoredTensor(name="a", dtype="float32", shape=shape, digest="0" * 32))


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 1 MiB."""
    root = tmp_path / "disk"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root], check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield root
    subprocess.run(["umount", root], check=True)


@pytest.mark.root
def test_on_a_disk_for_two_versions_and_a_half_saving_goes_on(small_disk, tmp_path):
    states = make_states(2, seed=3)
    size_bytes = sum(t.tensor.nbytes for s in states for t in s.state_tensors())
    (small_disk / "somebody elses").write_bytes(bytes((1 << 20) - size_bytes * 5 // 2))
    directory = open_directory(small_disk / "store")
    for version in (5, 10, 15, 20):
        nonce = f"n{version}"
        for stage, state in enumerate(states):
            write_part(directory, version, nonce, stage, state, room=(not stage) * size_bytes)
        complete(directory, version, nonce, 2)
        directory.load(version, make_states(1)[0])
    assert versions_in(small_disk / "store") == ["step-00000015", "step-00000020"]


@pytest.mark.root
def test_a_full_disk_costs_no_version_that_is_sound_and_leaves_nothing_behind(small_disk):
    states = make_states(1, seed=3)
    size_bytes = sum(t.tensor.nbytes for t in states[0].state_tensors())
    directory = open_directory(small_disk / "store")
    write(directory, 5, states)
    write(directory, 10, states)
    filler = small_disk / "somebody elses"
    with pytest.raises(OSError, match="No space left"), filler.open("wb") as file:
        file.write(bytes(1 << 20))
    flip(tensors_file(small_disk / "store", 10))  # not seen by a look
    for nonce in ("n1", "n2"):
        with pytest.raises(OSError, match="No space left"):
            write_part(directory, 15, nonce, 0, states[0], room=size_bytes)
        assert versions_in(small_disk / "store") == ["step-00000005", "step-00000010"]
    filler.unlink()
    write_part(directory, 15, "n3", 0, states[0], room=size_bytes)
    complete(directory, 15, "n3", 1)
    assert newest_complete(directory) == 15


def test_a_rank_that_was_given_up_removes_no_attempt_of_a_newer_quorum(tmp_path):
    states = make_states(2, seed=3)
    directory = open_directory(tmp_path / "job")

    def attempts():
        return sorted(p.name for p in (tmp_path / "job").iterdir() if ".tmp-" in p.name)

    write_part(directory, 6, "10_new", 0, states[0])
    write_part(directory, 7, "9_old", 0, states[0])
    assert attempts() == ["step-00000006.tmp-10_new", "step-00000007.tmp-9_old"]
    write_part(directory, 6, "10_new", 1, states[1])
    assert attempts() == ["step-00000006.tmp-10_new"]

    # The store fell back, and another quorum got the same id: neither removes what the other wrote.
    for nonce in ("10_other", "10_new"):
        write_part(directory, 6, nonce, 0, states[0])
        assert attempts() == ["step-00000006.tmp-10_new", "step-00000006.tmp-10_other"]
    complete(directory, 6, "10_new", 2)
    assert attempts() == []


@pytest.mark.root
def test_what_an_earlier_run_left_makes_room_though_its_quorum_had_a_higher_number(small_disk):
    states = make_states(1, seed=3)
    size_bytes = sum(t.tensor.nbytes for t in states[0].state_tensors())
    (small_disk / "somebody elses").write_bytes(bytes((1 << 20) - size_bytes * 5 // 2))
    directory = open_directory(small_disk / "store")
    write_part(directory, 300, "57_x", 0, states[0])
    for version, nonce in ((5, "1_y"), (10, "2_z")):
        write_part(directory, version, nonce, 0, states[0], room=size_bytes)
        complete(directory, version, nonce, 1)
    assert versions_in(small_disk / "store")[-1] == "step-00000010"


def test_versions_of_tainted_steps_count_no_more_and_stay_beside_the_others(tmp_path):
    states = build_states(SMALL, 1)
    for state in states:
        state.initialize(3)
    directory = open_directory(tmp_path / "job", keep=4)
    for version in (10, 20, 30):
        write(directory, version, states)
    directory.voided = (Voided(quorum=5, lineage=1, version=15),)
    assert newest_complete(directory) == 10, "also before they are put aside"

    assert sorted(directory.put_void_aside()) == [(20, ""), (30, "")]

    names = versions_in(tmp_path / "job")
    assert names[0] == "step-00000010"
    assert [name.partition(".tainted-")[0] for name in names[1:]] == [
        "step-00000020",
        "step-00000030",
    ]
    assert directory.put_void_aside() == []
    write_part(directory, 20, "n2", 0, states[0], "chain-20")
    with pytest.raises(AbandonedError, match="tainted"):
        directory.complete(20, "n2", [(0, 0)], 0)
    for version in (20, 30, 40, 50):
        write_part(directory, version, "n3", 0, states[0], f"chain-{version}b")
        directory.complete(version, "n3", [(0, 0)], 1)
    assert newest_complete(directory) == 50
    assert len([n for n in versions_in(tmp_path / "job") if ".tainted-" in n]) == 2


def test_a_void_version_that_cannot_be_put_aside_does_not_count_and_is_put_aside_later(
    tmp_path, monkeypatch
):
    states = make_states(1, seed=3)
    for version in (10, 20, 30):
        write(open_directory(tmp_path / "job", keep=4), version, states)
    directory = open_directory(tmp_path / "job", keep=2)
    directory.voided = (Voided(quorum=5, lineage=1, version=12),)

    def refuse(path, target):
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        assert [version for version, _ in sorted(directory.put_void_aside())] == [20, 30]
    assert [stored.version for stored in directory._good()] == [10]

    write_part(directory, 20, "n3", 0, states[0], "chain-20b")
    directory.complete(20, "n3", [(0, 0)], 1)

    assert newest_complete(directory) == 20
    names = [
        name.rpartition("-")[0] if "tainted" in name else name
        for name in versions_in(tmp_path / "job")
    ]
    assert sorted(names) == [
        "step-00000010",
        "step-00000020",
        "step-00000020.tainted",
        "step-00000030.tainted",
    ]


def test_a_version_that_no_device_has_tainted_outlives_those_that_are_kept(tmp_path):
    states = build_states(SMALL, 1)
    for state in states:
        state.initialize(3)
    directory = open_directory(tmp_path / "job")
    directory.clean_at = 12
    for version in (5, 10, 20, 30, 40):
        write(directory, version, states)
    assert versions_in(tmp_path / "job") == ["step-00000010", "step-00000030", "step-00000040"]
