"""What cannot run is refused with one message and an exit code, and leaves nothing running."""

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.harness import MAINSTAY, Layout, local_job, make_job, processes_of

OWN_LOOP = f"{Path(__file__).parents[2] / 'examples' / 'own_loop.py'}:train"
OWN_BLOCKS = f"{Path(__file__).parent / 'gated_llama.py'}:workload"


def refusal(tmp_path: Path, job: object, *options: str, **environment: str) -> tuple[int, str]:
    """Return exit code and standard error of a run that must not start."""
    path = tmp_path / "job.yaml"
    path.write_text(job if isinstance(job, str) else yaml.safe_dump(job))
    done = subprocess.run(
        [*MAINSTAY, "local", "run", str(path), "--state-dir", str(tmp_path / "state"), *options],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"MAINSTAY_HOME": str(tmp_path / "home")} | environment,
        check=False,
    )
    assert processes_of(tmp_path) == []
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    return make_job(Layout(), 2, tmp_path)


def test_bad_yaml(tmp_path: Path) -> None:
    code, message = refusal(tmp_path, "a: [1, 2")
    assert (code, message.count("\n")) == (2, 1)
    assert "job.yaml:1:9: not valid YAML" in message


def test_an_unknown_field(tmp_path: Path, job: dict[str, Any]) -> None:
    job["spec"]["training"]["stepps"] = 3
    code, message = refusal(tmp_path, job)
    assert (code, message.count("\n")) == (2, 1)
    assert "spec.training.stepps: unknown field; did you mean steps?" in message


def test_an_impossible_topology(tmp_path: Path, job: dict[str, Any]) -> None:
    job["spec"]["parallelism"]["replicas"] = 9
    code, message = refusal(tmp_path, job)
    assert (code, message.count("\n")) == (2, 1)
    assert "spec.parallelism.replicas: is 9, but there are only 3 lanes" in message


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"snapshots": {"peers": 5}}, "snapshots.peers: is 5, but the job has 4 pods"),
        ({"protection": {"domains": 5}}, "protection.domains: is 5, but the job has 4 pods"),
        ({"snapshots": {"memory": "1Mi"}}, "snapshots.memory: is 1Mi, but a pod keeps"),
        (
            {"snapshots": {"window": 5}},
            "snapshots.window: is 5, but no stage has more than 4 units",
        ),
        ({"snapshots": {"ordering": "CapacityAware"}}, "snapshots.ordering: is CapacityAware, but"),
        (
            {"snapshots": {"ordering": "SoftCount"}},
            "snapshots.ordering: is SoftCount, but the built",
        ),
        (
            {"pipeline": {"order": "Swapped"}, "snapshots": {"replay": "Boundary"}},
            "pipeline.order: is Swapped, with which this version can only have snapshots.replay",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_snapshots_that_cannot_be(
    tmp_path: Path, sections: dict[str, dict[str, Any]], problem: str
) -> None:
    experts = "ordering" in sections.get("snapshots", {})
    job = make_job(Layout(experts=experts), 2, tmp_path, **sections)
    job["spec"]["snapshots"] = {"enabled": True} | sections.get("snapshots", {})
    code, message = refusal(tmp_path, job)
    assert (code, message.count("\n")) == (2, 1)
    assert problem in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entrypoint", "fields", "problem"),
    [
        pytest.param(
            OWN_LOOP,
            {"replay": "Boundary"},
            "spec.snapshots.replay: is Boundary, but an own loop",
            id="an own loop with boundary logs",
        ),
        pytest.param(
            OWN_BLOCKS,
            {"window": 5},
            "spec.snapshots.window: is 5, but no stage has more than 4 units",
            id="a window above the units of one's own blocks",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_what_trainers_refuse_of_snapshots_ends_the_job_with_one_sentence(
    tmp_path: Path, entrypoint: str, fields: dict[str, Any], problem: str
) -> None:
    job = make_job(Layout(lanes=1, spares=0), 2, tmp_path)
    (tmp_path / "text.txt").write_text(__doc__ * 9)
    job["spec"]["workload"]["entrypoint"] = entrypoint
    if entrypoint == OWN_LOOP:
        job["spec"]["workload"]["config"] = {"width": 32, "sequence": 16, "path": str(tmp_path)}
    else:
        job["spec"]["workload"]["args"] = [str(tmp_path)]
    kept = {"enabled": True, "peers": 0, "memory": "64Mi", **fields}
    job["spec"] |= {"snapshots": kept, "protection": {"domains": 1}}
    with local_job(tmp_path, job) as running:
        assert running.wait() == 1
        told = (tmp_path / "output.log").read_text().strip().splitlines()
    assert problem in told[-1]
    assert not any("Traceback" in line for line in told)
    assert processes_of(running.state_dir) == []


def test_a_missing_entrypoint(tmp_path: Path, job: dict[str, Any]) -> None:
    job["spec"]["workload"]["entrypoint"] = "nowhere:workload"
    code, message = refusal(tmp_path, job)
    assert (code, message.count("\n")) == (2, 1)
    assert "there is no module nowhere" in message


def test_a_bad_faults_file(tmp_path: Path, job: dict[str, Any]) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {at: {step: 1}, target: {replica: 7, stage: 0}, action: kill-pod}")
    code, message = refusal(tmp_path, job, "--faults", str(faults))
    assert (code, message.count("\n")) == (2, 1)
    assert "faults[0].target.replica: is 7" in message


def test_a_port_in_use(tmp_path: Path, job: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, message = refusal(tmp_path, job, "--api-port", str(port))
    assert (code, message.count("\n")) == (3, 1)
    assert f"port {port} of 127.0.0.1 cannot be used" in message


def test_too_little_memory(tmp_path: Path, job: dict[str, Any]) -> None:
    code, message = refusal(tmp_path, job, MAINSTAY_RANK_MEMORY_MIB="10000000")
    assert (code, message.count("\n")) == (3, 1)
    assert "too little memory" in message


def test_too_little_disk(tmp_path: Path, job: dict[str, Any]) -> None:
    code, message = refusal(tmp_path, job, MAINSTAY_DISK_MIB="1000000000")
    assert (code, message.count("\n")) == (3, 1)
    assert "too little disk space" in message


def test_no_redis(tmp_path: Path, job: dict[str, Any]) -> None:
    code, message = refusal(tmp_path, job, MAINSTAY_REDIS_SERVER="/nowhere")
    assert (code, message.count("\n")) == (3, 1)
    assert "no redis-server" in message


def test_a_state_directory_that_is_somebody_elses(tmp_path: Path, job: dict[str, Any]) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "precious").write_text("x")
    code, message = refusal(tmp_path, job)
    assert (code, message.count("\n")) == (2, 1)
    assert (tmp_path / "state" / "precious").read_text() == "x"


def test_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a trainer can tell; it tells once, and is not started again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where there is one
    job = make_job(Layout(lanes=1, spares=0), 2, tmp_path)
    job["spec"]["runtime"]["device"] = "CUDA"
    with local_job(tmp_path, job) as running:
        assert running.wait() == 1
    last = (tmp_path / "output.log").read_text().strip().splitlines()[-1]
    assert "spec.runtime.device: is CUDA, but torch" in last
    assert "use CPU or Auto" in last
    assert processes_of(tmp_path) == []
