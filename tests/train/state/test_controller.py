"""What a trainer does about checkpoints: in the background, and whatever the storage does."""

import logging
import resource
import shutil
import threading

import pytest
import torch
from tests.train.state.test_directory import SMALL, make_commit, make_states

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import QuorumId, RankId, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.program import Op
from mainstay_core.rank import events
from mainstay_core.wire.checkpoint_manifest import identity_of
from mainstay_core.wire.plan import Member, Method, Plan, Rendezvous
from mainstay_train.state import verify
from mainstay_train.state.controller import Checkpointing
from mainstay_train.state.heal import masters_digest
from mainstay_train.state.host_copy import HostCopy

FINGERPRINT = {"device": "a cpu"}


class Engine:
    """As much of an engine as checkpoints see."""

    def __init__(self, state):
        self.state = state


def make_config(root, *, seed=3, resume_from="", entrypoint="a:b"):
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
        job="job",
        name="job",
        shape=shape,
        entrypoint=entrypoint,
        workload=SMALL,
        checkpoint_dir=str(root),
        resume_from=str(resume_from),
    )


def make_plan(nonce="5eed"):
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
        quorum=QuorumId(id=1, nonce=nonce),
        planned=False,
        unplanned_id=1,
        method=Method.START,
        members=(member,),
        chains=(),
        suppliers=(0,),
        all_reduce_stack=1,
        rendezvous=Rendezvous(pod="pod", gather="", store=""),
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

    def write(self, version, state, nonce="5eed"):
        action = events.WriteCheckpoint(version, make_commit(version), "chain")
        self.checkpoints.write(
            action, Engine(state), make_plan(nonce), 0, masters_digest(state), self.hook
        )

    def complete(self, version, nonce="5eed"):
        rename = events.RenameCheckpoint(version, nonce)
        self.checkpoints.complete(rename, make_plan(), self.hook)
        self.checkpoints.wait_idle()


@pytest.fixture
def trainer(tmp_path):
    made = Trainer(tmp_path / "store")
    made.checkpoints.start(FINGERPRINT)
    return made


def test_a_copy_has_the_bits_of_its_moment_whatever_the_state_becomes():
    (state,) = make_states(1, seed=3)
    copy = HostCopy(state)
    copy.take()
    before = {t.id: t.tensor.clone() for t in state.state_tensors()}
    state.initialize(4)
    assert all(torch.equal(copied, before[name]) for name, copied in copy.tensors().items())
    assert copy.is_of(state)


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
    assert status.checkpoint_nonce == "5eed"
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
        rename = events.RenameCheckpoint(10, nonce)
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
    names = sorted(path.name for path in root.iterdir())
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
    assert trainer.checkpoints.status().checkpoint_nonce == "beef", "another attempt counts"


def written(root, version=10):
    trainer = Trainer(root)
    trainer.checkpoints.start(FINGERPRINT)
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


def test_an_earlier_runs_versions_are_taken_up_and_never_changed(tmp_path, caplog):
    earlier, own = tmp_path / "earlier", tmp_path / "own"
    written(earlier, 10)
    written(earlier, 20)
    resumed = Trainer(own, resume_from=earlier)
    assert resumed.checkpoints.start(FINGERPRINT) == 20

    (data,) = (earlier / "step-00000020").rglob("*.distcp")
    content = bytearray(data.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(b ^ 0xFF for b in content[middle : middle + 64])
    data.write_bytes(content)
    before = sorted(path.name for path in earlier.iterdir())
    (state,) = make_states(1)
    with caplog.at_level(logging.WARNING):
        assert isinstance(resumed.checkpoints.load(Engine(state), 20), events.LoadFailed)
    assert sorted(path.name for path in earlier.iterdir()) == before
    other = Trainer(own, resume_from=earlier)
    assert other.checkpoints.start(FINGERPRINT) == 10, "every rank takes the older one"
    assert isinstance(other.checkpoints.load(Engine(state), 10), events.StateLoaded)


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


def test_verification_names_the_damaged_tensor(tmp_path):
    written(tmp_path / "store", 10)
    version = tmp_path / "store" / "step-00000010"
    (found,) = verify.verify(version)
    assert found["problems"] == []
    assert found["tensors"] > 0

    part = version / "stage-0-inner-0" / "part.json"
    text = part.read_text()
    start = text.index('"master:')
    end = text.index('"', start + 1)
    digest = text[end + 4 : end + 36]
    part.write_text(text.replace(digest, digest[::-1]))
    (found,) = verify.verify(version)
    (problem,) = found["problems"]
    assert problem.startswith(text[start + 1 : end])


def test_retention_counts_readable_versions_only(tmp_path):
    root = tmp_path / "store"
    for version in (10, 20):
        written(root, version)
    next((root / "step-00000020").rglob("*.distcp")).write_bytes(b"torn")
    written(root, 30)
    assert sorted(path.name for path in root.iterdir()) == [
        "step-00000010",
        "step-00000020",
        "step-00000030",
    ], "a settle may still need 10"
    shutil.rmtree(root / "step-00000020")
    written(root, 40)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000030", "step-00000040"]
