import math
from pathlib import Path

import pytest
import yaml

from mainstay_cli.base.exits import ExitCode, UsageError
from mainstay_cli.local import manifests
from mainstay_core.job.spec import parse_training_job

JOB = """
apiVersion: mainstay.dev/v1alpha1
kind: TrainingJob
metadata: {name: demo}
spec:
  training: {steps: 6, lanes: 2}
  workload: {entrypoint: ENTRYPOINT}
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


def write(directory: Path, text: str, name: str = "job.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def message(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        manifests.load_job(path, None)
    assert caught.value.code is ExitCode.USAGE
    return str(caught.value)


def test_a_job_is_read_and_can_be_given_another_name(tmp_path: Path) -> None:
    path = write(tmp_path, JOB.replace("ENTRYPOINT", "a.b:c"))
    file = manifests.load_job(path, "other")
    assert file.job.metadata.name == "other"
    assert file.manifest["metadata"]["name"] == "other"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2", "job.yaml:2:2: not valid YAML"),
        ("a: 1\na: 2", "job.yaml:2:1: not valid YAML: the key 'a' is given twice"),
        ("- 1", "expected a TrainingJob"),
        ("", "found nothing"),
        (JOB.replace("steps", "step"), "spec.training.step: unknown field; did you mean steps?"),
        ("? [1]\n: 2", "not valid YAML"),
        ("!!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_a_bad_file_is_one_message_that_names_it(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    assert words in message(path)
    assert str(path) in message(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "activeDeadlineSeconds: 60",
            "spec.activeDeadlineSeconds: is kept by a cluster's",
        ),
        ("suspend: true", "spec.suspend: is true: there is nothing to run"),
    ],
)
def test_what_a_local_run_would_miss_without_an_operator_is_refused(
    tmp_path: Path, line: str, words: str
) -> None:
    assert words in message(write(tmp_path, JOB.replace("ENTRYPOINT", "a.b:c") + f"  {line}\n"))


@pytest.mark.parametrize(
    ("lines", "backend"),
    [
        ("  runtime: {device: CUDA}", "Gloo"),
        ("", "Gloo"),
        ("  runtime: {device: CPU}", "Auto"),
        ("  runtime: {backend: Gloo}", "Gloo"),
        ("  parallelism: {ranksPerPod: 2}", "Auto"),
        ("  parallelism: {ranksPerPod: 2}\n  runtime: {device: CUDA, backend: NCCL}", "NCCL"),
        ("  parallelism: {ranksPerPod: 2}\n  spares: {replicas: 1}", "Gloo"),
    ],
)
def test_pods_of_a_local_run_talk_by_gloo_where_they_may_share_a_gpu(
    tmp_path: Path, lines: str, backend: str
) -> None:
    """Each pod sees all GPUs of the machine, and its first slot takes the first one."""
    path = write(tmp_path, JOB.replace("ENTRYPOINT", "a.b:c") + f"{lines}\n")
    file = manifests.load_job(path)
    assert file.job.spec.runtime.backend == backend
    assert parse_training_job(file.manifest) == file.job


@pytest.mark.parametrize("lines", ["", "  parallelism: {ranksPerPod: 2}\n  spares: {replicas: 1}"])
def test_nccl_between_pods_of_a_local_run_is_refused(tmp_path: Path, lines: str) -> None:
    job = JOB.replace("ENTRYPOINT", "a.b:c") + f"  runtime: {{backend: NCCL}}\n{lines}\n"
    assert (
        "spec.runtime.backend: is NCCL, which takes one rank on each GPU; the 2 pods of a local "
        "run (spares included) share this machine's GPUs: use Gloo or Auto, or one pod"
    ) in message(write(tmp_path, job))


def test_what_concerns_a_cluster_alone_is_left_alone_in_a_local_run(tmp_path: Path) -> None:
    fields = """
  managedBy: somebody.else/controller
  ttlSecondsAfterFinished: 60
  priorityClassName: high
  template: {spec: {containers: [{name: trainer, image: some-image}]}}
  recovery: {window: {seconds: 60, maxRepairs: 3}, quarantine: {mode: Taint}}
  scheduling: {replicaTopologyKey: rack, spreadTopologyKey: kubernetes.io/hostname}
"""
    path = write(tmp_path, JOB.replace("ENTRYPOINT", "a.b:c") + fields)
    assert manifests.load_job(path).job.metadata.name == "demo"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1.0e-3", 1e-3),
        ("2.5e4", 25_000),
        ("-1E+2", -100),
        (".5e1", 5),
        ("-.5", -0.5),
        ("4.0", 4),
        ("-0.0", 0),
        ("0.1", 0.1),
        ("3.0e+1", 30),
        ("1.0e+3", 1000),
        ("1_000.0", 1000),
        ("1e16", 10_000_000_000_000_000),
        ("1.2345678901234567e+18", 1_234_567_890_123_456_800),
        ("-9223372036854775808.0", -9_223_372_036_854_776_000.0),
        ("9.2e18", 9_200_000_000_000_000_000),
        ("9.3e18", 9.3e18),
        ("1e30", 1e30),
        ("1e-4567", 0),
        ("12e4567", "12e4567"),
        ("1.0e+4567", "1.0e+4567"),
        ("-12e4567", "-12e4567"),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("1e", "1e"),
        ("e3", "e3"),
        ("1e3x", "1e3x"),
        ("'1e-3'", "1e-3"),
    ],
)
def test_numbers_are_read_as_kubectl_reads_them(
    tmp_path: Path, text: str, value: float | str
) -> None:
    found = manifests.load_yaml(write(tmp_path, f"k: {text}\n"))["k"]
    assert (found, type(found)) == (value, type(value))


def test_no_number_is_no_number_of_yaml(tmp_path: Path) -> None:
    assert math.isnan(manifests.load_yaml(write(tmp_path, "k: .nan\n"))["k"])
    assert "not valid YAML" in message(write(tmp_path, "k: !!float x\n"))


@pytest.mark.parametrize(
    "value",
    ["1e-3", "12e4567", "1e3", "-.5", "+.5e3", "4.0", "null", "2026-11-26", 1e-3, 1e30, 4, -0.5],
)
def test_what_is_written_is_read_back_as_the_same(tmp_path: Path, value: float | str) -> None:
    data = {"labels": {"git-sha": value}, "lr": [value]}
    text = manifests.dump_yaml(data)
    found = manifests.load_yaml(write(tmp_path, text))
    assert (found, type(found["lr"][0])) == (data, type(value))
    assert yaml.safe_load(text) == data, "other readers of YAML"


def test_what_a_run_keeps_of_its_job_is_the_job(tmp_path: Path) -> None:
    config = "{lr: '1e-3', rate: 1e-3}"
    text = JOB.replace("{name: demo}", "{name: demo, labels: {git-sha: '12e4567'}}")
    text = text.replace("ENTRYPOINT", f"a.b:c, config: {config}")
    file = manifests.load_job(write(tmp_path, text))
    again = write(tmp_path, manifests.dump_yaml(file.manifest), "again.yaml")
    assert manifests.load_job(again).manifest == file.manifest


def test_a_name_is_given_to_no_job_whose_metadata_are_none(tmp_path: Path) -> None:
    path = write(tmp_path, JOB.replace("{name: demo}", "[demo]"))
    with pytest.raises(UsageError, match=r"metadata: expected fields .*, found list"):
        manifests.load_job(path, "other")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{layer: 2}", "spec.workload.config.layer: is unknown"),
        ("{lr: fast}", "spec.workload.config.lr: is 'fast', must be a number above 0"),
        ("{layers: 100000000000}", "layers: is 100000000000, must be at most 65536"),
    ],
)
def test_a_built_in_model_is_judged_before_anything_starts(
    tmp_path: Path, config: str, words: str
) -> None:
    job = JOB.replace("ENTRYPOINT", f"'mainstay_train.models.llama:workload', config: {config}")
    assert words in message(write(tmp_path, job))


def test_a_file_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    assert "No such file or directory" in message(tmp_path / "missing.yaml")
    assert "Is a directory" in message(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in message(tmp_path / "binary.yaml")


def test_a_file_entrypoint_is_found_beside_the_job(tmp_path: Path) -> None:
    write(tmp_path, "def workload(config, args): ...", "model.py")
    file = manifests.load_job(write(tmp_path, JOB.replace("ENTRYPOINT", "'model.py:workload'")))
    assert file.job.spec.workload.entrypoint == f"{tmp_path}/model.py:workload"
    assert file.manifest["spec"]["workload"]["entrypoint"] == f"{tmp_path}/model.py:workload"


def test_a_file_entrypoint_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    assert "there is no model.py in" in message(
        write(tmp_path, JOB.replace("ENTRYPOINT", "'model.py:workload'"))
    )


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_can_be_read(path: Path) -> None:
    if "faults" in path.name:
        job = manifests.load_job(EXAMPLES / path.name.replace("-faults", "")).job
        assert manifests.load_faults(path, job)
    else:
        assert manifests.load_job(path).job.metadata.name


def test_the_demo_is_what_the_readme_says() -> None:
    job = manifests.load_job(EXAMPLES / "demo.yaml").job
    shape = job.shape
    assert (shape.lanes, shape.stages, shape.shards_per_lane, shape.steps) == (4, 2, 4, 60)
    assert job.num_pods == 9
    faults = manifests.load_faults(EXAMPLES / "demo-faults.yaml", job)
    assert [(fault.step, fault.action.value) for fault in faults] == [
        (20, "kill-pod"),
        (40, "kill-trainer"),
    ]
