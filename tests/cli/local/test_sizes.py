"""``mainstay local run --dry-run``: mistakes are told as by a run, and nothing is started."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands.local import app
from mainstay_cli.local import manifests, sizes
from mainstay_core.job.sizes import llama_sizes

ROOT = Path(__file__).parents[3]
QUICKSTART = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())


def computed(tmp_path, path, value):
    job = yaml.safe_load(yaml.safe_dump(QUICKSTART))
    *parents, last = path.split(".")
    section = job["spec"]
    for name in parents:
        section = section[name]
    section[last] = value
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return sizes.compute_sizes(manifests.load_job(file))


def test_every_rank_of_the_first_plan_is_told(tmp_path):
    found = computed(tmp_path, "parallelism.stages", 3)
    assert not found.is_measured
    assert [(r.replica, r.stage) for r in found.ranks] == [
        (r, s) for r in (0, 1) for s in (0, 1, 2)
    ]
    assert sum(r.num_parameters for r in found.ranks[:3]) == 217_664


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("parallelism.stages", 7, "spec.parallelism.stages: is 7, but the model has 6 blocks"),
        ("workload.config.dim", 30, "spec.workload.config.heads: is 4, must be a divisor of dim"),
        ("workload.config.layer", 3, "spec.workload.config.layer: is unknown"),
        ("workload.config.dtype", ["a"], "spec.workload.config.dtype: is a value of type list"),
        ("workload.config.dropout", True, "spec.workload.config.dropout: is True"),
        ("workload.config.microBatchSize", 0, "spec.workload.config.microBatchSize: is 0"),
        ("parallelism.ranksPerStage", 4, "spec.workload.config.kvHeads: is 2, must be a multiple"),
        ("workload.config.vocab", 200, "spec.workload.config.vocab: is 200, must be at least 256"),
        ("workload.args", ["x"], "spec.workload.args"),
        ("workload.entrypoint", "nowhere:model", "spec.workload.entrypoint: there is no module"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(tmp_path, path, value, problem):
    with pytest.raises(UsageError, match=r"job\.yaml|entrypoint") as refused:
        computed(tmp_path, path, value)
    assert problem in str(refused.value)


def test_the_memory_for_snapshots_is_told(tmp_path):
    found = computed(tmp_path, "snapshots", {"enabled": True, "memory": "1Gi", "peers": 1})
    store = found.store
    assert store.memory_bytes == 1 << 30 > store.least_bytes > store.expected_bytes > 0
    assert not found.store.problem
    assert found.store.traffic.step_bytes == 4 * 217_664
    assert found.store.traffic.window_bytes == pytest.approx(12 * 217_664, rel=0.01)
    assert computed(tmp_path, "training.steps", 3).store is None


def test_the_memory_of_checks_that_wait_is_told(tmp_path):
    assert computed(tmp_path, "training.steps", 3).waiting_bytes == 0
    for plan, told, expected in (("Dynamic", "3Mi", 3 << 20), ("Auto", "Auto", 256 << 20)):
        dmr = {"mode": "Full", "plan": plan, "memory": told}
        assert computed(tmp_path, "detection", {"dmr": dmr}).waiting_bytes == expected


def test_a_measured_model_is_compared_with_what_is_asked_for_snapshots(tmp_path, monkeypatch):
    config = QUICKSTART["spec"]["workload"]["config"]
    model = llama_sizes.sizes_of(config, 1, 0, accumulates=False)
    monkeypatch.setattr(sizes, "_measure", lambda _: (model,))
    monkeypatch.setattr(sizes.preflight, "check_entrypoint", lambda *_: None)
    file = tmp_path / "job.yaml"
    job = yaml.safe_load(yaml.safe_dump(QUICKSTART))
    job["spec"]["workload"]["entrypoint"] = "mine:model"
    for fields, problem in (
        ({"memory": "1Ki"}, r"spec.snapshots.memory: is 1Ki, but a pod keeps .* MiB"),
        ({"memory": "1Gi", "window": 7}, r"snapshots.window: is 7, but no stage has more than . u"),
    ):
        job["spec"]["snapshots"] = {"enabled": True, "peers": 1, **fields}
        file.write_text(yaml.safe_dump(job))
        with pytest.raises(UsageError, match=problem):
            sizes.compute_sizes(manifests.load_job(file))


def test_lines_of_snapshots_and_checks_are_printed_and_in_the_json(tmp_path):
    job = yaml.safe_load(yaml.safe_dump(QUICKSTART))
    job["spec"]["snapshots"] = {"enabled": True, "peers": 1}
    job["spec"]["detection"] = {"dmr": {"mode": "Full", "plan": "Dynamic", "memory": "3Mi"}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))

    def run(*options):
        found = CliRunner().invoke(app, ["run", str(file), "--dry-run", *options])
        assert found.exit_code == 0, found.output
        return found.output

    text, told = run(), json.loads(run("--json"))
    assert "spec.snapshots: all pods together send each other" in text
    assert "spec.detection.dmr.memory: checks that wait keep up to 3.0 MiB in each rank" in text
    assert told["snapshots"]["traffic"]["step_bytes"] == 4 * 217_664
    assert told["checks"] == {"waiting_bytes": 3 << 20}
