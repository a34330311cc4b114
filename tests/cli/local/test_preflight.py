import random
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mainstay_cli.base import network
from mainstay_cli.base.exits import ExitCode, MachineError, UsageError
from mainstay_cli.local import manifests, preflight
from mainstay_core.job.spec import TrainingJob, parse_training_job
from mainstay_core.wire.checkpoint_manifest import version_name


def job(entrypoint: str = "mainstay_train.models.llama:workload", **spec: object) -> TrainingJob:
    return parse_training_job(
        {
            "apiVersion": "mainstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "demo"},
            "spec": {
                "training": {"steps": 6, "lanes": 2},
                "workload": {"entrypoint": entrypoint},
                **spec,
            },
        }
    )


def test_too_little_memory_is_told_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTAY_RANK_MEMORY_MIB", "100000000")
    with pytest.raises(MachineError, match="2 pods with 2 ranks need about 2000007") as caught:
        preflight.check_memory(job(), preflight.Needs.from_environment())
    assert caught.value.code is ExitCode.ENVIRONMENT


def test_the_memory_for_snapshots_is_needed_in_each_pod() -> None:
    snapshots = {"enabled": True, "memory": "100Gi", "peers": 1}
    kept = job(snapshots=snapshots, spares={"replicas": 1})
    alone = preflight.Needs(base_memory_mib=1, pod_memory_mib=1, rank_memory_mib=1)
    wanted = 3 * 102_400 + 7
    with pytest.raises(MachineError) as caught:
        preflight.check_memory(kept, alone)
    told = "102400 MiB of each pod for snapshots (spec.snapshots.memory)"
    assert f"3 pods with 3 ranks need about {wanted} MiB, {told}, " in str(caught.value)


def test_enough_memory_passes() -> None:
    preflight.check_memory(job(), preflight.Needs(base_memory_mib=1, rank_memory_mib=1))


def test_too_little_disk_is_told(tmp_path: Path) -> None:
    preflight.check_disk(job(), tmp_path, preflight.Needs(disk_mib=1))
    with pytest.raises(MachineError, match="too little disk space"):
        preflight.check_disk(job(), tmp_path, preflight.Needs(disk_mib=10**12))


def test_checkpoints_need_room_where_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = tmp_path / "storage"
    free = {tmp_path: 100, storage: 89}
    monkeypatch.setattr(preflight, "free_mib", free.__getitem__)
    needs = preflight.Needs(disk_mib=10, copy_memory_mib=15)
    parts = {"parallelism": {"stages": 2}, "training": {"steps": 60, "lanes": 2}}
    every = {"everySteps": 5}
    # Three versions of two parts, the one that is being written included.
    preflight.check_disk(job(**parts, checkpoint=every), tmp_path, needs)
    free[tmp_path] = 99
    with pytest.raises(MachineError, match="has 99 MiB free, a run needs about 100 MiB"):
        preflight.check_disk(job(**parts, checkpoint=every), tmp_path, needs)
    elsewhere = job(**parts, checkpoint=every | {"storage": str(storage)})
    with pytest.raises(MachineError, match=f"{storage} has 89 MiB free, checkpoints of 2 parts"):
        preflight.check_disk(elsewhere, tmp_path, needs)
    free |= {tmp_path: 10, storage: 90}
    preflight.check_disk(elsewhere, tmp_path, needs)
    # A version that is there goes when the one after the next comes.
    for version, more in ((5, 60), (10, 30), (15, 30)):
        (storage / version_name(version)).mkdir(parents=True)
        free[storage] = more
        preflight.check_disk(elsewhere, tmp_path, needs)
        free[storage] = more - 1
        with pytest.raises(MachineError, match="checkpoints of 2 parts"):
            preflight.check_disk(elsewhere, tmp_path, needs)
    free[storage] = 0
    preflight.check_disk(job(checkpoint={"storage": str(storage)}), tmp_path, needs)  # none written


@pytest.mark.parametrize(("steps", "versions"), [(5, 1), (6, 2), (10, 2), (11, 3), (60, 3)])
def test_a_short_run_needs_room_for_no_more_versions_than_it_writes(
    steps: int, versions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = job(training={"steps": steps, "lanes": 2}, checkpoint={"everySteps": 5})
    needs = preflight.Needs(disk_mib=10, copy_memory_mib=15)
    monkeypatch.setattr(preflight, "free_mib", lambda _: 10 + 15 * versions)
    preflight.check_disk(short, tmp_path, needs)
    monkeypatch.setattr(preflight, "free_mib", lambda _: 9 + 15 * versions)
    with pytest.raises(MachineError, match="too little disk space"):
        preflight.check_disk(short, tmp_path, needs)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, None),  # enough
        (146, 146, None),
        (100, 4096, (4096, 4096)),
        (100, 146, (146, 146)),
        (100, resource.RLIM_INFINITY, (146, resource.RLIM_INFINITY)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_a_low_limit_of_descriptors_is_raised_as_far_as_it_may_be(
    soft: int, hard: int, raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    preflight.check_descriptors(job(), preflight.Needs(base_descriptors=130))
    assert limits == ([raised] if raised else [])


def test_too_few_descriptors_are_told_with_the_command_that_allows_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 145))
    with pytest.raises(MachineError, match="2 pods with 2 ranks need 146") as caught:
        preflight.check_descriptors(job(), preflight.Needs(base_descriptors=130))
    assert "145 are allowed; allow more with ulimit -n 146" in str(caught.value)


def test_an_estimate_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTAY_DISK_MIB", "lots")
    with pytest.raises(UsageError, match="MAINSTAY_DISK_MIB: is 'lots'"):
        preflight.Needs.from_environment()


def test_a_port_in_use_is_told_and_a_free_one_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} of 127.0.0.1 cannot be used"):
            preflight.choose_port(port)
    assert preflight.choose_port(0) > 0


def test_a_redis_server_is_found_or_its_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.find_redis_server().is_file()
    monkeypatch.setenv("MAINSTAY_REDIS_SERVER", "/nowhere/redis-server")
    with pytest.raises(MachineError, match="/nowhere/redis-server is not a program"):
        preflight.find_redis_server()


def test_a_built_in_entrypoint_is_found_without_importing_it() -> None:
    script = """
import sys
from mainstay_cli.local import preflight
from mainstay_core.job.spec import parse_training_job
preflight.check_entrypoint(parse_training_job(%r), ())
sys.exit("torch" in sys.modules or "mainstay_train.models.llama" in sys.modules)
"""
    manifest = job().model_dump(mode="json", by_alias=True, exclude_none=True)
    # In a process of its own: in this one another test may have imported them.
    subprocess.run([sys.executable, "-c", script % manifest], check=True)


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("no_such_module:workload", "there is no module no_such_module"),
        ("__main__:workload", "there is no module __main__"),
        ("mainstay_train.models.lama:workload", "there is no module mainstay_train.models.lama"),
        (
            "mainstay_train.models.llama:worklod",
            "did you mean mainstay_train.models.llama:workload",
        ),
    ],
)
def test_a_missing_entrypoint_is_told_with_the_closest_one(entrypoint: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"spec\.workload\.entrypoint") as caught:
        preflight.check_entrypoint(job(entrypoint), ())
    assert words in str(caught.value)


def test_a_user_module_beside_the_job_is_found_and_its_syntax_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("if True:\n    from x import workload\n")
    preflight.check_entrypoint(job("mine:workload"), manifests.search_path(tmp_path / "job.yaml"))
    (tmp_path / "mine.py").write_text("def workload(:\n")
    with pytest.raises(UsageError, match=r"mine\.py:1: "):
        preflight.check_entrypoint(job("mine:workload"), (tmp_path,))
    (tmp_path / "mine.py").write_bytes(b"def workload(): '\xff'\n")
    with pytest.raises(UsageError, match=r"mine\.py is no Python source: "):
        preflight.check_entrypoint(job("mine:workload"), (tmp_path,))


def test_two_runs_get_two_networks() -> None:
    one, one_claim = network.claim_network(random.Random(1))
    other, other_claim = network.claim_network(random.Random(1))
    with one_claim, other_claim:
        assert one != other
        assert one.startswith("127.")
