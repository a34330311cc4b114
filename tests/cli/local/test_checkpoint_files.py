"""Which checkpoints a user means, what is seen of them, and which jobs may go on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mainstay_cli.base import state_dir
from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands import main
from mainstay_cli.local import checkpoint_files, manifests
from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid
from mainstay_core.wire.checkpoint_manifest import Manifest, identity_of

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


def write(root: Path, version: int, file: manifests.JobFile) -> Path:
    directory = root / f"step-{version:08d}"
    part = directory / "stage-0-inner-0"
    part.mkdir(parents=True)
    (part / "data").write_bytes(b"x" * 100)
    manifest = Manifest(
        version=version,
        job="tiny",
        parts=("stage-0-inner-0",),
        files={"stage-0-inner-0/data": 100},
        identity=identity_of(file.job.to_job_config(JobUid("u"))),
        fingerprint={},
    )
    (directory / "manifest.json").write_text(codec.dumps(manifest))
    return directory


def test_everything_is_listed_newest_first_with_its_state(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    file = make_file(tmp_path)
    for version in (10, 20):
        write(root, version, file)
    (write(root, 30, file) / "stage-0-inner-0" / "data").write_bytes(b"x")
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
    assert "stage-0-inner-0/data is torn" in result.output
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
        resumed = checkpoint_files.resume_job(file, named, tmp_path / "run")
        assert resumed.job.spec.checkpoint.resume_from == str(root)
        assert resumed.job.spec.checkpoint.every_steps == 10


def test_a_run_in_the_same_place_is_followed_to_where_it_moves(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    run = tmp_path / "run"
    write(run / "checkpoints", 20, file)

    resumed = checkpoint_files.resume_job(file, run, run)
    assert resumed.job.spec.checkpoint.resume_from == str(tmp_path / "run.1" / "checkpoints")


def test_another_jobs_checkpoint_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 20, make_file(tmp_path))
    other = make_file(tmp_path, seed=4, lanes=4)

    with pytest.raises(UsageError) as refusal:
        checkpoint_files.resume_job(other, tmp_path, tmp_path / "run")
    text = str(refusal.value)
    assert "training.seed is 3 in the checkpoint, 4 here" in text
    assert "training.lanes is 2 in the checkpoint, 4 here" in text


def test_more_steps_may_be_trained_but_not_none(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 30, make_file(tmp_path))

    longer = make_file(tmp_path, steps=40)
    assert checkpoint_files.resume_job(longer, tmp_path, tmp_path / "run")
    with pytest.raises(UsageError, match="has all 30 steps"):
        checkpoint_files.resume_job(make_file(tmp_path), tmp_path, tmp_path / "run")


@pytest.mark.parametrize("where", ["/there/is/none", "./neither"])
def test_a_directory_that_is_not_there_is_named(where: str) -> None:
    result = RUNNER.invoke(main.app, ["checkpoints", "ls", where])
    assert isinstance(result.exception, UsageError)
    assert where in str(result.exception)


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    result = RUNNER.invoke(main.app, ["checkpoints", "verify", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "no checkpoint" in str(result.exception)
