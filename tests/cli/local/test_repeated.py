"""The lineage of another run is taken as a whole, and of the same job alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mainstay_cli.base.exits import UsageError
from mainstay_cli.local.repeated import load_lineage
from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid
from mainstay_core.job.spec import TrainingJob, parse_training_job
from mainstay_core.wire.reinitialisation import (
    BlockSource,
    Fork,
    MadeBlock,
    MadePosition,
    Reinitialisation,
    SourceKind,
)
from mainstay_core.wire.repeated_lineage import show_lineage_of


def job(stages: int = 3, **spec: Any) -> TrainingJob:
    return parse_training_job(
        {
            "apiVersion": "mainstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "tiny"},
            "spec": {
                "training": {"steps": 20, "seed": spec.pop("seed", 1), "lanes": 1},
                "parallelism": {"stages": stages},
                "workload": {"entrypoint": "mine:workload"},
                **spec,
            },
        }
    )


def fork(version: int, stage: int = 1) -> Fork:
    made = Reinitialisation(positions=(MadePosition(stage=stage, blocks=()),), reason="so")
    return Fork(version=version, chain="c", made=made)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def report(*forks: Fork, of: TrainingJob | None = None, **changes: Any) -> Path:
        config = (of or job()).to_job_config(JobUid("first"))
        lineage = show_lineage_of(config, len(forks), forks) | changes.pop("lineage", {})
        path = tmp_path / "report.json"
        told = {"digests": {}, "exact": not forks, "lineage": lineage} | changes
        path.write_text(json.dumps(told))
        return path

    return report


def test_a_report_has_the_forks_that_a_run_of_the_same_job_makes_again(write: Write) -> None:
    """Replicas are not part of what must be the same; the steps after the forks are neither."""
    forks = fork(4), fork(9, stage=2)

    loaded = load_lineage(write(*forks), job(checkpoint={"everySteps": 5}))

    assert tuple(codec.decode(Fork, told) for told in loaded) == forks


@pytest.mark.parametrize(
    ("path", "run", "said"),
    [
        pytest.param({}, {}, "the run is exact, there is no fork", id="exact"),
        pytest.param(
            {"forks": [4], "lineage": {"num_forks": 3}}, {}, "has 1 of 3 forks", id="not all"
        ),
        pytest.param(
            {"forks": [4], "lineage": {"num_forks": 0, "forks": []}},
            {},
            "has 0 of 1 fork,",
            id="none of them",
        ),
        pytest.param({"forks": [21]}, {}, "is of step 21, and the job has 20", id="too late"),
        pytest.param({"forks": [9, 4]}, {}, "is of step 4, the one before", id="no order"),
        pytest.param(
            {"forks": [4]}, {"stages": 4}, "parallelism.stages is 3 in the report, 4 here", id="cut"
        ),
        pytest.param(
            {"forks": [4]}, {"seed": 2}, "training.seed is 1 in the report, 2 here", id="seed"
        ),
        pytest.param(
            {"forks": [4], "lineage": {"of": {}}},
            {},
            "training.seed is absent in the report",
            id="an older report",
        ),
        pytest.param(
            {"forks": [4]},
            {"checkpoint": {"resumeFrom": "/ckpt"}},
            "begins from the seed",
            id="resumed",
        ),
        pytest.param(
            {"forks": [4], "lineage": {"forks": [{"version": 4}]}},
            {},
            r"not understood: report\.lineage\.forks\[0\]\.chain: missing",
            id="no forks",
        ),
    ],
)
def test_another_lineage_is_refused_with_what_is_wrong(
    write: Write, path: dict[str, Any], run: dict[str, Any], said: str
) -> None:
    versions = path.pop("forks", [])
    report = write(*map(fork, versions), **path)

    with pytest.raises(UsageError, match=said):
        load_lineage(report, job(**run))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_forks": "x"}, ".num_forks: expected int, got str"),
        ({"num_forks": [1]}, ".num_forks: expected int, got list"),
        ({"num_forks": -1}, ".num_forks: -1 is not between 0 and"),
        ({"forks": {"a": 1}}, ".forks: expected a list, got dict"),
        ({"forks": ["a"]}, ".forks[0]: expected an object, got str"),
        ({"of": ["a"]}, ".of: expected an object, got list"),
        ({"of": "abc"}, ".of: expected an object, got str"),
        ({"of": {"training.seed": 1}}, ".of.'training.seed': expected str, got int"),
    ],
)
def test_a_record_that_is_none_is_refused_by_its_field(
    write: Write, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(f"not understood: report.lineage{said}")):
        load_lineage(write(fork(4), lineage=changes), job())


def test_a_fork_of_stages_that_there_are_not_is_refused(write: Write) -> None:
    with pytest.raises(UsageError, match="names rank 0 of stage 7, and the job has 3 stages of 1"):
        load_lineage(write(fork(4, stage=7)), job())


def test_a_stage_that_was_loaded_from_a_checkpoint_takes_checkpoints(write: Write) -> None:
    source = BlockSource(kind=SourceKind.STALE_COPY, stage=1, block="b", version=3)
    place = MadePosition(stage=1, blocks=(MadeBlock(block="b", sources=(source,)),))
    made = Reinitialisation(positions=(place,), reason="so")
    report = write(replace(fork(4), made=made))

    with pytest.raises(UsageError, match=r"of step 3, so this run has to keep the same ones"):
        load_lineage(report, job())
    assert load_lineage(report, job(checkpoint={"everySteps": 3}))
