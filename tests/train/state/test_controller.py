"""What a trainer does about checkpoints: in the background, and whatever the storage does."""

import errno
import logging
import os
import random
import resource
import shutil
import threading
from collections import deque
from dataclasses import replace

import pytest
import torch
from tests.train.checks.wrong_once import WrongOnce
from tests.train.state.test_directory import (
    SMALL,
    build_states,
    flip,
    make_commit,
    make_states,
    tensors_file,
    versions_in,
)

from mainstay_core.base.bounds import MIN_COPY_BYTES
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import QuorumId, RankId, Slot
from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy
from mainstay_core.job.config import COPY_BYTES, JobConfig
from mainstay_core.planning.program import Op
from mainstay_core.rank import events
from mainstay_core.wire.checkpoint_manifest import differences, identity_of
from mainstay_core.wire.plan import Member, Method, Plan, Rendezvous
from mainstay_train.checks.checker import Checks
from mainstay_train.exact import fingerprint
from mainstay_train.model import workload
from mainstay_train.state import verify
from mainstay_train.state.controller import Checkpointing
from mainstay_train.state.heal import masters_digest
from mainstay_train.state.host_copy import CopyGivenUpError, HostCopy, Ring

FINGERPRINT = {"device": "a cpu"}


class Engine:
    """As much of an engine as checkpoints see."""

    def __init__(self, state, checks=None):
        self.state = state
        self.checks = checks or Checks()


def make_config(root, *, seed=3, resume_from="", entrypoint="a:b", **job):
    shape = JobShape(
        lanes=1,
        shards_per_lane=1,
        replicas=1,
        min_replicas=1,
        stages=1,
        steps=100,
        seed=seed,
        checkpoint_every_steps=10,
    )
    return JobConfig(
        job=job.get("uid", "job"),
        name=job.get("name", "job"),
        checkpoint_signed=job.get("signed", False),
        shape=shape,
        entrypoint=entrypoint,
        workload=SMALL,
        checkpoint_dir=str(root),
        checkpoint_copy_bytes=job.get("checkpoint_copy_bytes", COPY_BYTES),
        hang_s=job.get("hang_s", 300.0),
        resume_from=str(resume_from),
        resume_version=job.get("resume_version", 0),
    )


def make_plan(nonce="5eed", quorum=1):
    member = Member(
        index=0,
        rank=RankId(replica=0, stage=0),
        slot=Slot(pod="pod", index=0),
        incarnation="life",
        address="",
        since=1,
    )
    return Plan(
        job="job",
        quorum=QuorumId(id=quorum, nonce=nonce),
        planned=False,
        unplanned_id=1,
        method=Method.START,
        members=(member,),
        chains=(),
        suppliers=(0,),
        all_reduce_stack=1,
        rendezvous=Rendezvous(pod="pod", gather=""),
        reason="",
    )


class Trainer:
    """Checkpoints of one stage, and what they tell."""

    def __init__(self, root, **config):
        self.told = []
        self.config = make_config(root, **config)
        self.checkpoints = Checkpointing(self.config, lambda *said: self.told.append(said))
        self.reached = []
        self.halt_at, self.halted = None, threading.Event()
        self.go_on = threading.Event()

    def hook(self, op):
        self.reached.append(op)
        if op is self.halt_at:
            self.halted.set()
            self.go_on.wait()

    def write(self, version, state, nonce="5eed", quorum=1):
        action = events.WriteCheckpoint(version, make_commit(version), "chain")
        self.checkpoints.write(
            action, Engine(state), make_plan(nonce, quorum), 0, masters_digest(state), self.hook
        )

    def complete(self, version, nonce="5eed"):
        rename = events.RenameCheckpoint(version, f"1_{nonce}")
        self.checkpoints.complete(rename, make_plan(), self.hook)
        self.checkpoints.wait_idle()


@pytest.fixture
def trainer(tmp_path):
    made = Trainer(tmp_path / "store")
    made.checkpoints.start(FINGERPRINT)
    return made


@pytest.mark.parametrize("limit_bytes", [4096, 5 * 2048, 1 << 30])
def test_a_copy_has_the_bits_of_its_moment_and_the_state_changes_when_they_have_left(limit_bytes):
    (state,) = make_states(1, seed=3)
    copy = HostCopy(state, limit_bytes, 2048)
    assert copy.memory_bytes <= limit_bytes
    for round_ in range(2):  # the memory is used again
        before = {t.id: t.tensor.clone().reshape(-1) for t in state.state_tensors()}
        copy.begin()
        has_changed = threading.Event()

        def change(seed=round_, has_changed=has_changed):
            copy.wait_left(60)
            state.initialize(seed)
            has_changed.set()

        threading.Thread(target=change).start()
        if limit_bytes > copy.size_bytes:
            assert has_changed.wait(60), "nobody waits for whoever reads"
        for chunk, copied in copy.chunks():
            assert torch.equal(copied, before[chunk.flat.id][chunk.start : chunk.stop])
            before[chunk.flat.id][chunk.start : chunk.stop] = float("nan")
        copy.end()
        assert has_changed.wait(60)
        assert all(tensor.isnan().all() for tensor in before.values()), "all of it, once"
    assert copy.is_of(state)
    assert not copy.is_of(make_states(1)[0])


def test_places_in_a_ring_hold_one_chunk_at_a_time():
    """Against the list of who is where, for drawn sizes in a drawn order."""
    draw = random.Random(5)
    for _ in range(300):
        size = draw.randrange(1, 200)
        ring, there = Ring(size), deque()
        for _ in range(60):
            wanted = draw.randrange(1, size + 1)
            start = ring.take(wanted) if draw.random() < 0.6 else None
            if start is not None:
                assert 0 <= start <= start + wanted <= size
                assert all(start + wanted <= a or b <= start for a, b in there)
                there.append((start, start + wanted))
            elif there:
                ring.free()
                there.popleft()
            if not there:
                assert ring.take(size) == 0, "what is empty has room for all"
                ring.free()


def test_a_copy_that_must_wait_too_long_is_given_up_and_its_reader_told():
    (state,) = make_states(1, seed=3)
    copy = HostCopy(state, 4096, 2048)
    copy.begin()
    chunks = copy.chunks()
    next(chunks)
    assert copy.wait_left(0), "for the rest, which did not come"
    with pytest.raises(CopyGivenUpError, match=r"waited 0 s .* raise checkpoint\.copyMebibytes"):
        list(chunks)
    copy.end()
    assert not copy.wait_left(60), "nothing is left to wait for"
    copy.begin()
    copied = sum(chunk.size_bytes for chunk, _ in copy.chunks())
    assert copied == copy.size_bytes


LARGE = {"dim": 128, "layers": 4, "heads": 2, "kvHeads": 1, "hidden": 512, "sequence": 8}
"""A model whose state is larger than the least memory for its copy."""


@pytest.mark.parametrize("storage", ["slow", "full"])
def test_a_storage_that_does_not_take_a_large_state_holds_up_the_step_within_bounds(
    tmp_path, storage
):
    (state,) = build_states(LARGE)
    assert sum(t.tensor.nbytes for t in state.state_tensors()) > MIN_COPY_BYTES
    trainer = Trainer(tmp_path / "store", checkpoint_copy_bytes=MIN_COPY_BYTES, hang_s=0.1)
    trainer.checkpoints.start(FINGERPRINT)
    assert trainer.checkpoints.wait_copied() == 0, "nothing is copied"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if storage == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    else:
        trainer.halt_at = Op.CHECKPOINT_WRITE
    try:
        trainer.write(10, state)
        waited_s = trainer.checkpoints.wait_copied()
        state.initialize(4)
        trainer.go_on.set()
        trainer.checkpoints.wait_idle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ((_, why),) = trainer.told
    assert ("copyMebibytes" in why, "File too large" in why) == (
        storage == "slow", storage == "full"
    )  # fmt: skip
    assert waited_s > 0 or storage == "full"
    assert trainer.checkpoints.status().checkpoint_safe is None
    assert versions_in(tmp_path / "store") == []
    trainer.halt_at = None
    trainer.write(20, state)
    trainer.checkpoints.wait_idle()
    assert trainer.checkpoints.status().checkpoint_safe == 20


def test_a_version_is_written_while_the_state_goes_on_changing(trainer, tmp_path):
    (state,) = make_states(1, seed=3)
    masters = masters_digest(state)
    trainer.halt_at = Op.CHECKPOINT_WRITE
    trainer.write(10, state)
    trainer.halted.wait()
    status = trainer.checkpoints.status()
    assert (status.checkpoint_busy, status.checkpoint_safe) == (True, None)
    state.initialize(5)  # the next steps
    trainer.go_on.set()
    trainer.checkpoints.wait_idle()

    status = trainer.checkpoints.status()
    assert (status.checkpoint_busy, status.checkpoint_safe) == (False, 10)
    assert status.checkpoint_nonce == "1_5eed"
    trainer.complete(10)
    assert trainer.checkpoints.status().durable == 10
    assert trainer.told == [(10, "")]
    loaded = trainer.checkpoints.load(Engine(state), 10)
    assert loaded.digest == masters
    assert trainer.reached == [
        Op.CHECKPOINT_WRITE,
        Op.CHECKPOINT_SYNC,
        Op.CHECKPOINT_SAFE,
        Op.CHECKPOINT_RENAME,
        Op.CHECKPOINT_RENAMED,
    ]


def interrupted(root, op, nonce):
    """A writer, and renamer, that stops for ever at an action: killed there, for the disk."""
    dead = Trainer(root)
    dead.checkpoints.start(FINGERPRINT)
    dead.halt_at = op
    (state,) = make_states(1, seed=3)
    dead.write(10, state, nonce)
    if op in (Op.CHECKPOINT_RENAME, Op.CHECKPOINT_RENAMED):
        dead.checkpoints.wait_idle()
        rename = events.RenameCheckpoint(10, f"1_{nonce}")
        dead.checkpoints.complete(rename, make_plan(), dead.hook)
    dead.halted.wait()


WRITER_OPS = [op for op in Op if op.value.startswith("CHECKPOINT_")]


@pytest.mark.parametrize("op", WRITER_OPS)
def test_a_writer_killed_at_any_action_leaves_either_the_version_or_nothing(op, tmp_path):
    root = tmp_path / "store"
    interrupted(root, op, "first")
    other = Trainer(root)
    newest = other.checkpoints.start(FINGERPRINT)
    assert newest == (10 if op is Op.CHECKPOINT_RENAMED else 0)

    (state,) = make_states(1, seed=3)
    other.write(11, state, "second")
    other.checkpoints.wait_idle()
    other.complete(11, "second")
    names = versions_in(root)
    assert names[-1] == "step-00000011"
    assert not [name for name in names if ".tmp-" in name], "what was abandoned is gone"
    assert other.checkpoints.newest_complete() == 11


def test_a_file_in_the_way_costs_the_checkpoint_only_and_says_why(tmp_path):
    root = tmp_path / "store"
    root.write_text("not a directory")
    trainer = Trainer(root)
    trainer.checkpoints.start(FINGERPRINT)
    (state,) = make_states(1, seed=3)
    trainer.write(10, state)
    trainer.checkpoints.wait_idle()

    ((durable, why),) = trainer.told
    assert durable == 0
    assert "step 10" in why
    assert "Not a directory" in why
    status = trainer.checkpoints.status()
    assert (status.checkpoint_safe, status.checkpoint_busy) == (None, False)
    root.unlink()
    trainer.write(20, state)
    trainer.checkpoints.wait_idle()
    assert trainer.checkpoints.status().checkpoint_safe == 20, "as soon as the storage is back"


def test_a_disk_that_is_full_in_the_middle_of_a_file_costs_the_checkpoint_only(trainer):
    (state,) = make_states(1, seed=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        trainer.write(10, state)
        trainer.checkpoints.wait_idle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ((_, why),) = trainer.told
    assert "File too large" in why
    trainer.write(20, state)
    trainer.checkpoints.wait_idle()
    assert trainer.checkpoints.status().checkpoint_safe == 20


def test_a_copy_that_does_not_have_the_states_digest_is_never_safe(trainer):
    (state,) = make_states(1, seed=3)
    action = events.WriteCheckpoint(10, make_commit(10), "chain")
    trainer.checkpoints.write(action, Engine(state), make_plan(), 0, "0" * 32, trainer.hook)
    trainer.checkpoints.wait_idle()
    assert trainer.checkpoints.status().checkpoint_safe is None
    assert "digest" in trainer.told[0][1]


def test_a_part_whose_state_is_found_bad_is_never_safe(trainer):
    (state,) = make_states(1, seed=3)
    trainer.write(10, state)
    trainer.checkpoints.wait_idle()
    trainer.checkpoints.void(10)
    assert trainer.checkpoints.status().checkpoint_safe is None
    trainer.halt_at = Op.CHECKPOINT_SAFE
    trainer.write(12, state)
    trainer.halted.wait()
    trainer.checkpoints.void(12)
    trainer.halt_at = None
    trainer.go_on.set()
    trainer.checkpoints.wait_idle()
    assert trainer.checkpoints.status().checkpoint_safe is None
    trainer.write(12, state, nonce="beef")
    trainer.checkpoints.wait_idle()
    assert trainer.checkpoints.status().checkpoint_nonce == "1_beef", "another attempt counts"


def written(root, version=10, fingerprint=FINGERPRINT):
    trainer = Trainer(root)
    trainer.checkpoints.start(fingerprint)
    (state,) = make_states(1, seed=3)
    trainer.write(version, state)
    trainer.checkpoints.wait_idle()
    trainer.complete(version)
    return trainer


def test_another_jobs_checkpoints_are_refused_with_every_difference(tmp_path):
    written(tmp_path / "store")
    with pytest.raises(InvalidSpecError, match=r"training.seed is 3 in the checkpoint, 4 here"):
        Trainer(tmp_path / "store", seed=4).checkpoints.start(FINGERPRINT)
    with pytest.raises(InvalidSpecError, match="device is a cpu in the checkpoint, another here"):
        Trainer(tmp_path / "store").checkpoints.start({"device": "another"})


def test_a_checkpoint_of_other_arithmetic_is_refused_with_each_difference(tmp_path):
    """One from before losses went in chunks, products were summed in fp32, attention was fused,

    and norms had an order of their own.
    """
    loaded = workload.load("", SMALL)
    extra = loaded.fingerprint(torch.device("cpu"))
    new = fingerprint.fingerprint("cpu", dtype=loaded.dtype, extra=extra)
    changed = ("attention", "loss", "norm", "weight_gradients")
    before = {name: value for name, value in new.items() if name not in changed}
    written(tmp_path / "store", fingerprint=before)
    with pytest.raises(InvalidSpecError) as refused:
        Trainer(tmp_path / "store").checkpoints.start(new)
    for name in changed:
        assert f"{name} is absent in the checkpoint, {new[name]} here" in str(refused.value)


@pytest.mark.parametrize(("version", "kernel"), [(0, "aten.normal_"), (0, "aten.copy_"), (10, "")])
def test_a_wrong_bit_in_first_values_or_in_the_cast_behind_a_load_is_repaired(
    trainer, version, kernel
):
    (state,) = make_states(1, seed=3)
    trainer.write(10, state)
    trainer.complete(10)
    narrow = {**SMALL, "dtype": "bfloat16"}
    ((right,), (hit,)), findings = (build_states(narrow) for _ in range(2)), []
    trainer.checkpoints.load(Engine(right), version)
    wrong = WrongOnce(kernel) if kernel else WrongOnce("aten.copy_", torch.bfloat16)

    with wrong:
        trainer.checkpoints.load(Engine(hit, Checks(Mode.FULL, tell=findings.append)), version)

    assert wrong.was_wrong
    for one, other in zip(right.everything(), hit.everything(), strict=True):
        assert torch.equal(one.tensor, other.tensor), one.id
    (finding,) = findings
    assert (finding.operator, finding.remedy) == (kernel or "aten.copy_", Remedy.REPAIR)


def test_an_earlier_runs_versions_are_taken_up_and_never_changed(tmp_path, caplog):
    earlier, own = tmp_path / "earlier", tmp_path / "own"
    written(earlier, 10)
    written(earlier, 20)
    resumed = Trainer(own, resume_from=earlier)
    assert resumed.checkpoints.start(FINGERPRINT) == 20

    flip(tensors_file(earlier, 20))
    before = sorted(path.name for path in earlier.iterdir())
    (state,) = make_states(1)
    with caplog.at_level(logging.WARNING):
        assert isinstance(resumed.checkpoints.load(Engine(state), 20), events.LoadFailed)
    assert sorted(path.name for path in earlier.iterdir()) == before
    other = Trainer(own, resume_from=earlier)
    assert other.checkpoints.start(FINGERPRINT) == 10, "every rank takes the older one"
    assert isinstance(other.checkpoints.load(Engine(state), 10), events.StateLoaded)


def test_a_version_to_go_back_to_wants_a_storage_without_those_of_an_earlier_job(tmp_path):
    """They would count first, without a word."""
    earlier, own = tmp_path / "earlier", tmp_path / "own"
    for version in (10, 20):
        written(earlier, version)
    back = Trainer(own, resume_from=earlier, resume_version=10)
    assert back.checkpoints.start(FINGERPRINT) == 10
    written(own, 20)
    again = Trainer(own, resume_from=earlier, resume_version=10)
    assert again.checkpoints.start(FINGERPRINT) == 20, "the very job goes on from its own"

    other = Trainer(own, resume_from=earlier, resume_version=10, uid="applied-again")
    with pytest.raises(InvalidSpecError, match="has checkpoints of an earlier job"):
        other.checkpoints.start(FINGERPRINT)


def test_a_run_that_should_go_on_never_begins_again_in_silence(tmp_path):
    (tmp_path / "earlier").mkdir()
    resumed = Trainer(tmp_path / "own", resume_from=tmp_path / "earlier")
    with pytest.raises(InvalidSpecError, match="has no checkpoint"):
        resumed.checkpoints.start(FINGERPRINT)
    with pytest.raises(InvalidSpecError, match="is good"):
        resumed.checkpoints.load(Engine(make_states(1)[0]), 0)


def test_identity_is_what_decides_the_bits_and_not_where_things_lie(tmp_path):
    here = make_config(tmp_path, entrypoint="/here/model.py:workload")
    there = make_config(tmp_path / "x", entrypoint="/there/model.py:workload")
    assert identity_of(here) == identity_of(there)


def test_identity_has_the_stages_of_a_swapped_pipeline_alone(tmp_path):
    config = make_config(tmp_path)
    more = replace(config, shape=replace(config.shape, stages=4))
    assert identity_of(more) == identity_of(config)
    swapped = replace(more, shape=replace(more.shape, order=Order.SWAPPED, cut=Cut.EQUAL))
    assert differences(identity_of(swapped), identity_of(config)) == (
        "parallelism.stages is 4 in the checkpoint, absent here",
        "pipeline.cut is Equal in the checkpoint, absent here",
        "pipeline.order is Swapped in the checkpoint, absent here",
    )
    fewer = replace(swapped, shape=replace(swapped.shape, stages=2))
    (told,) = differences(identity_of(swapped), identity_of(fewer))
    assert told == "parallelism.stages is 4 in the checkpoint, 2 here"


def test_verification_names_the_damaged_tensor(tmp_path):
    written(tmp_path / "store", 10)
    version = tmp_path / "store" / "step-00000010"
    (found,) = verify.verify(version)
    assert found["problems"] == []
    assert found["tensors"] > 0

    flip(tensors_file(tmp_path / "store", 10), 0)
    (found,) = verify.verify(version)
    first, whole = found["problems"]
    assert first.startswith("master:embedding"), first
    assert "SHA-256" in whole


def test_retention_counts_readable_versions_only(tmp_path):
    root = tmp_path / "store"
    for version in (10, 20):
        written(root, version)
    tensors_file(root, 20).write_bytes(b"torn")
    written(root, 30)
    assert versions_in(root) == [
        "step-00000010",
        "step-00000020",
        "step-00000030",
    ], "a settle may still need 10"
    shutil.rmtree(root / "step-00000020")
    written(root, 40)
    assert versions_in(root) == ["step-00000030", "step-00000040"]


def test_two_jobs_on_one_storage_are_one_too_many(tmp_path):
    root = tmp_path / "store"
    first = Trainer(root, uid="u1", name="first")
    first.checkpoints.start(FINGERPRINT)
    with pytest.raises(InvalidSpecError, match=r"job second .*belongs to job first \(uid u1\)"):
        Trainer(root, uid="u2", name="second").checkpoints.start(FINGERPRINT)


def test_a_job_whose_storage_was_taken_over_saves_nothing_more_and_says_whose_it_is(tmp_path):
    root = tmp_path / "store"
    (state,) = make_states(1, seed=3)
    earlier = Trainer(root, uid="u1")
    earlier.checkpoints.start(FINGERPRINT)
    earlier.write(10, state, "n1")
    earlier.checkpoints.wait_idle()
    later = Trainer(root, uid="u2")
    later.checkpoints.start(FINGERPRINT)

    earlier.complete(10, "n1")
    ((durable, why),) = earlier.told
    assert durable == 0, "nothing of the earlier job is called complete"
    assert "job job (uid u2), submitted later" in why
    assert earlier.checkpoints.status().durable == 0
    earlier.write(20, state, "n1")
    earlier.checkpoints.wait_idle()
    assert "uid u2" in earlier.told[1][1]
    assert not (root / "step-00000020.tmp-1_n1").exists()


def test_versions_of_format_1_stop_a_job_with_the_remedy(tmp_path):
    old = tmp_path / "store" / "step-00000010"
    old.mkdir(parents=True)
    (old / "manifest.json").write_bytes(b"\xff never read")
    remedy = "mainstay checkpoints convert DIR --trusted"
    with pytest.raises(InvalidSpecError, match=f"checkpoint.storage.*step 10.*{remedy}"):
        Trainer(tmp_path / "store").checkpoints.start(FINGERPRINT)
    with pytest.raises(InvalidSpecError, match=f"checkpoint.resumeFrom.*step 10.*{remedy}"):
        Trainer(tmp_path / "own", resume_from=tmp_path / "store").checkpoints.start(FINGERPRINT)


def test_a_flipped_bit_in_the_newest_manifest_is_told_once_and_the_older_version_taken(tmp_path):
    root = tmp_path / "store"
    written(root, 10)
    written(root, 20)
    flip(root / "step-00000020" / "manifest")
    trainer = Trainer(root)
    assert trainer.checkpoints.start(FINGERPRINT) == 10
    assert trainer.checkpoints.newest_complete() == 10
    ((durable, why),) = trainer.told
    assert durable == 10
    assert why.startswith("the checkpoint of step 20 is skipped: the manifest is damaged")
    assert isinstance(trainer.checkpoints.load(Engine(make_states(1)[0]), 10), events.StateLoaded)


def test_damage_that_only_reading_finds_is_told(tmp_path):
    root = tmp_path / "store"
    written(root, 10)
    written(root, 20)
    flip(tensors_file(root, 20))
    trainer = Trainer(root)
    assert trainer.checkpoints.start(FINGERPRINT) == 20
    failed = trainer.checkpoints.load(Engine(make_states(1)[0]), 20)
    assert isinstance(failed, events.LoadFailed)
    assert "SHA-256" in failed.why
    assert ["step 20 is skipped" in why for _, why in trainer.told] == [True]
    assert trainer.checkpoints.newest_complete() == 10


def test_a_version_of_another_job_is_neither_gone_on_from_nor_touched(tmp_path):
    root = tmp_path / "store"
    written(root, 10)
    for claim in root.glob("owner-*"):
        claim.unlink()
    other = Trainer(root, seed=4, name="other", uid="u2")
    with pytest.raises(InvalidSpecError, match="another job's"):
        other.checkpoints.start(FINGERPRINT)
    written(tmp_path / "others", 20)
    assert versions_in(root) == ["step-00000010"]


def test_a_failed_attempt_is_removed_at_once(trainer, tmp_path):
    (state,) = make_states(1, seed=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        trainer.write(10, state)
        trainer.checkpoints.wait_idle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert versions_in(tmp_path / "store") == []


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some room"), (errno.EMFILE, "ulimit -n")]
)
def test_a_shortage_is_told_with_what_to_do(trainer, number, remedy):
    trainer.checkpoints._failed(10, "r0.s0", OSError(number, os.strerror(number), "/store/x"))
    ((_, why),) = trainer.told
    assert f"{os.strerror(number)} (/store/x); " in why
    assert remedy in why


def test_the_next_attempt_removes_what_a_dead_writer_left_before_it_writes(tmp_path):
    root = tmp_path / "store"
    interrupted(root, Op.CHECKPOINT_SYNC, "first")
    assert versions_in(root) == ["step-00000010.tmp-1_first"]
    trainer = Trainer(root)
    trainer.checkpoints.start(FINGERPRINT)
    trainer.halt_at = Op.CHECKPOINT_SYNC
    trainer.write(11, make_states(1, seed=3)[0], "second", quorum=2)
    trainer.halted.wait()
    assert versions_in(root) == ["step-00000011.tmp-2_second"], "not only once it is complete"
    trainer.go_on.set()
    trainer.checkpoints.wait_idle()


def test_an_attempt_that_was_given_up_by_another_rank_is_no_problem_of_this_one(tmp_path):
    root = tmp_path / "store"
    trainer = Trainer(root)
    trainer.checkpoints.start(FINGERPRINT)
    trainer.halt_at = Op.CHECKPOINT_SYNC
    (state,) = make_states(1, seed=3)
    trainer.write(10, state, "n1")
    trainer.halted.wait()
    shutil.rmtree(root / "step-00000010.tmp-1_n1")
    trainer.go_on.set()
    trainer.checkpoints.wait_idle()
    assert trainer.told == [], "whoever gave it up has told why"
    assert trainer.checkpoints.status().checkpoint_safe is None
    assert versions_in(root) == []


def test_a_part_whose_state_is_found_bad_takes_no_room(trainer, tmp_path):
    (state,) = make_states(1, seed=3)
    trainer.write(10, state)
    trainer.checkpoints.wait_idle()
    assert versions_in(tmp_path / "store") == ["step-00000010.tmp-1_5eed"]
    trainer.checkpoints.void(10)
    trainer.checkpoints.wait_idle()
    assert versions_in(tmp_path / "store") == []


KEY = "a key of sixteen bytes or more\n"


def test_a_job_that_wants_signed_checkpoints_needs_a_key_and_takes_no_others(tmp_path, monkeypatch):
    written(tmp_path / "store", 10)
    signed = Trainer(tmp_path / "store", signed=True)
    with pytest.raises(InvalidSpecError, match="MAINSTAY_CHECKPOINT_KEY_FILE"):
        signed.checkpoints.start(FINGERPRINT)
    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_KEY_FILE", str(tmp_path / "key"))
    assert signed.checkpoints.start(FINGERPRINT) == 0
    assert "not signed" in signed.told[0][1]
    (state,) = make_states(1, seed=3)
    signed.write(20, state)
    signed.checkpoints.wait_idle()
    signed.complete(20)
    other = Trainer(tmp_path / "store", signed=True)
    assert other.checkpoints.start(FINGERPRINT) == 20
    assert isinstance(other.checkpoints.load(Engine(state), 20), events.StateLoaded)
