"""Which checkpoints a user means, what is seen of them, and which jobs may go on from them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mainstay_cli.base import state_dir
from mainstay_cli.base.exits import CliError, UsageError
from mainstay_cli.commands import main
from mainstay_cli.local import checkpoint_files, manifests
from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid
from mainstay_core.wire.checkpoint_manifest import FileEntry, Manifest, ManifestPart, identity_of
from mainstay_core.wire.reinitialisation import Fork, History, Reinitialisation
from mainstay_core.wire.sealed import Keys, seal

RUNNER = CliRunner()


def make_file(tmp_path: Path, **training: object) -> manifests.JobFile:
    job: dict[str, Any] = {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "training": {"steps": 30, "seed": 3, "lanes": 2} | training,
            "workload": {"entrypoint": "mainstay_train.models.llama:workload", "config": {}},
            "checkpoint": {"everySteps": 10},
        },
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return manifests.load_job(path)


def write(
    root: Path, version: int, file: manifests.JobFile, keys: Keys = (), history: History = ()
) -> Path:
    directory = root / f"step-{version:08d}"
    part = directory / "stage-0-inner-0"
    part.mkdir(parents=True)
    for name in ("part", "tensors"):
        (part / name).write_bytes(b"x" * 100)
    entry = FileEntry(size_bytes=100, sha256=hashlib.sha256(b"x" * 100).hexdigest())
    manifest = Manifest(
        version=version,
        job="tiny",
        parts=(ManifestPart(stage=0, inner=0, part=entry, tensors=entry),),
        identity=identity_of(file.job.to_job_config(JobUid("u"))),
        fingerprint={},
        history=history,
    )
    (directory / "manifest").write_bytes(seal("manifest", codec.dumps(manifest), keys))
    return directory


def write_format_1(root: Path, version: int) -> Path:
    """As much of a version of format 1 as may be looked at: the name of its manifest."""
    directory = root / f"step-{version:08d}"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_bytes(b"\xff never read")
    return directory


def resume(file: manifests.JobFile, where: Path, run: Path) -> manifests.JobFile:
    return checkpoint_files.resume_job(file, where, run, TOLD.append)


TOLD: list[str] = []


def test_everything_is_listed_newest_first_with_its_state(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    file = make_file(tmp_path)
    for version in (10, 20):
        write(root, version, file)
    (write(root, 30, file) / "stage-0-inner-0" / "tensors").write_bytes(b"x")
    (root / "step-00000040.tmp-5eed").mkdir()
    (root / "step-00000005.bad").mkdir()
    (root / "notes.txt").write_text("not ours")

    found = checkpoint_files.list_versions(root)
    assert [(f.version, f.state) for f in found] == [
        (40, "unfinished"),
        (30, "torn"),
        (20, "complete"),
        (10, "complete"),
        (5, "damaged"),
    ]
    result = RUNNER.invoke(main.app, ["checkpoints", "ls", str(tmp_path)])
    assert result.exit_code == 0
    assert "stage-0-inner-0/tensors is torn" in result.output
    shown = RUNNER.invoke(main.app, ["checkpoints", "ls", str(root), "--json"])
    assert [line["version"] for line in json.loads(shown.output)] == [40, 30, 20, 10, 5]


def test_a_run_of_that_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTAY_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    with state_dir.StateDir(run) as state:
        state.write_record(
            state_dir.RunRecord(
                name="tiny", job="u", url="", state_dir=str(run), pid=1, started_at_s=1.0
            )
        )
    assert checkpoint_files.find_root("tiny") == run / "checkpoints"
    assert checkpoint_files.find_root(None) == run / "checkpoints"
    assert checkpoint_files.find_root(str(run)) == run


def test_a_job_goes_on_from_the_newest_complete_version(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    root = tmp_path / "earlier" / "checkpoints"
    newest = write(root, 20, file)

    for named in (tmp_path / "earlier", root, newest):
        resumed = resume(file, named, tmp_path / "run")
        assert resumed.job.spec.checkpoint.resume_from == str(root)
        assert resumed.job.spec.checkpoint.every_steps == 10


def test_a_run_in_the_same_place_is_followed_to_where_it_moves(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    run = tmp_path / "run"
    write(run / "checkpoints", 20, file)

    resumed = resume(file, run, run)
    assert resumed.job.spec.checkpoint.resume_from == str(tmp_path / "run.1" / "checkpoints")


def test_another_jobs_checkpoint_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 20, make_file(tmp_path))
    other = make_file(tmp_path, seed=4, lanes=4)

    with pytest.raises(UsageError) as refusal:
        resume(other, tmp_path, tmp_path / "run")
    text = str(refusal.value)
    assert "training.seed is 3 in the checkpoint, 4 here" in text
    assert "training.lanes is 2 in the checkpoint, 4 here" in text


def test_more_steps_may_be_trained_but_not_none(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 30, make_file(tmp_path))

    longer = make_file(tmp_path, steps=40)
    assert resume(longer, tmp_path, tmp_path / "run")
    with pytest.raises(UsageError, match="has all 30 steps"):
        resume(make_file(tmp_path), tmp_path, tmp_path / "run")


@pytest.mark.parametrize("where", ["/there/is/none", "./neither"])
def test_a_directory_that_is_not_there_is_named(where: str) -> None:
    result = RUNNER.invoke(main.app, ["checkpoints", "ls", where])
    assert isinstance(result.exception, UsageError)
    assert where in str(result.exception)


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    result = RUNNER.invoke(main.app, ["checkpoints", "verify", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "no checkpoint" in str(result.exception)


def test_a_flipped_bit_in_the_newest_manifest_is_told_and_the_older_version_is_taken(
    tmp_path: Path,
) -> None:
    file = make_file(tmp_path)
    root = tmp_path / "checkpoints"
    write(root, 10, file)
    newest = write(root, 20, file) / "manifest"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 0x80  # no text any more
    newest.write_bytes(content)
    TOLD.clear()
    resumed = resume(file, root, tmp_path / "run")
    assert resumed.job.spec.checkpoint.resume_from == str(root)
    assert any("step 20 is skipped" in line and "SHA-256" in line for line in TOLD)
    listed = RUNNER.invoke(main.app, ["checkpoints", "ls", str(root)])
    assert listed.exit_code == 0
    assert "SHA-256" in listed.output
    verified = RUNNER.invoke(main.app, ["checkpoints", "verify", str(root), "--version", "20"])
    assert "step 20: DAMAGED" in verified.output
    assert isinstance(verified.exception, CliError)


def test_format_1_is_named_and_never_read(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    root = tmp_path / "checkpoints"
    write(root, 10, file)
    write_format_1(root, 20)
    remedy = "mainstay checkpoints convert DIR --trusted"
    listed = RUNNER.invoke(main.app, ["checkpoints", "ls", str(root)])
    assert listed.exit_code == 0
    assert remedy in listed.output
    verified = RUNNER.invoke(main.app, ["checkpoints", "verify", str(root), "--version", "20"])
    assert remedy in verified.output
    assert isinstance(verified.exception, CliError)
    with pytest.raises(UsageError, match="--trusted"):
        resume(file, root, tmp_path / "run")


def test_format_1_is_not_converted_before_somebody_says_that_it_is_trusted(tmp_path: Path) -> None:
    write_format_1(tmp_path / "checkpoints", 20)
    refused = RUNNER.invoke(main.app, ["checkpoints", "convert", str(tmp_path)])
    assert isinstance(refused.exception, UsageError)
    assert "--trusted" in str(refused.exception)


def test_with_a_key_only_what_it_has_signed_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_file(tmp_path)
    root = tmp_path / "checkpoints"
    key = tmp_path / "key"
    key.write_text("a key of the job's owner\n")
    write(root, 10, file, [b"a key of the job's owner"])
    write(root, 20, file)
    write(root, 30, file, [b"a key of somebody else"])
    monkeypatch.setenv("MAINSTAY_CHECKPOINT_KEY_FILE", str(key))
    found = {f.version: f for f in checkpoint_files.list_versions(root)}
    assert [found[v].state for v in (10, 20, 30)] == ["complete", "torn", "torn"]
    assert "not signed" in found[20].problem
    assert "not signed by a key that is given" in found[30].problem

    key.write_text("short")
    with pytest.raises(UsageError, match="at least 16 bytes"):
        checkpoint_files.list_versions(root)


def test_text_from_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    directory = write(tmp_path / "checkpoints", 10, file)
    manifest = Manifest(
        version=10,
        job="\x1b[2Jevil",
        parts=(
            ManifestPart(
                stage=0,
                inner=0,
                part=FileEntry(size_bytes=100, sha256="0" * 64),
                tensors=FileEntry(size_bytes=100, sha256="0" * 64),
            ),
        ),
        identity={"training.seed": "\x1b]0;title\x07"},
        fingerprint={},
    )
    (directory / "manifest").write_bytes(seal("manifest", codec.dumps(manifest)))
    result = RUNNER.invoke(main.app, ["checkpoints", "ls", str(tmp_path)])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    with pytest.raises(UsageError) as refusal:
        resume(file, tmp_path, tmp_path / "run")
    assert "\x1b" not in str(refusal.value)


def test_a_pipe_in_place_of_a_manifest_is_no_reason_to_wait(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    directory = write(tmp_path / "checkpoints", 10, file)
    (directory / "manifest").unlink()
    os.mkfifo(directory / "manifest")
    (found,) = checkpoint_files.list_versions(tmp_path / "checkpoints")
    assert (found.state, found.problem) == ("torn", "manifest is no file")


def test_a_version_before_the_newest_is_chosen_by_its_step(tmp_path: Path) -> None:
    file, root = make_file(tmp_path), tmp_path / "checkpoints"
    for version in (10, 20):
        write(root, version, file)

    def resumed(version: int, storage: str | None = None) -> manifests.JobFile:
        job = make_file(tmp_path)
        if storage:
            job.manifest["spec"]["checkpoint"]["storage"] = storage
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.manifest))
            job = manifests.load_job(tmp_path / "job.yaml")
        run = tmp_path / "run"
        return checkpoint_files.resume_job(job, root, run, TOLD.append, version)

    chosen = resumed(10).job.spec.checkpoint
    assert (chosen.resume_from, chosen.resume_version) == (str(root), 10)
    assert resumed(10).job.to_job_config(JobUid("u")).resume_version == 10
    with pytest.raises(UsageError, match="no complete checkpoint of step 15"):
        resumed(15)
    with pytest.raises(UsageError, match=r"--version: .* is the job's own"):
        resumed(10, str(root))
    alone = RUNNER.invoke(main.app, ["local", "run", str(tmp_path / "job.yaml"), "--version", "1"])
    assert isinstance(alone.exception, UsageError)
    assert "--version: is for --resume DIR" in str(alone.exception)


def test_what_was_made_anew_is_listed_with_the_version_that_contains_it(tmp_path: Path) -> None:
    file, root = make_file(tmp_path), tmp_path / "checkpoints"
    write(root, 10, file)
    made = Reinitialisation(positions=(), reason="stage 1 is made anew")
    write(root, 20, file, history=(Fork(version=12, chain="", made=made, lr_boost=1.1),))

    shown = RUNNER.invoke(main.app, ["checkpoints", "ls", str(root)]).output.splitlines()
    assert "approximate since step 12" in shown[2]
    assert shown[3].strip() == "step 12: stage 1 is made anew; learning rate x 1.1"
    assert "approximate" not in shown[4]
    newest, exact = json.loads(
        RUNNER.invoke(main.app, ["checkpoints", "ls", str(root), "--json"]).output
    )
    assert (newest["approximate_since"], newest["history"][0]["version"]) == (12, 12)
    assert (exact["approximate_since"], exact["history"]) == (None, [])
