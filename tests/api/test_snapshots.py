"""What pods tell of their stores of segments, and what people are shown of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.conftest import MANIFEST, Job

from mainstay_api.snapshot_metrics import JobLabels
from mainstay_core.job.model_sizes import MAX_CUTS

WINDOW = {"first": 4, "length": 2}
RUN = {"first": 4, "last": 7}
SUMS = "0000000a0000000b"


@pytest.fixture
def snapshot_job(api: Any) -> Job:
    """A job of one replica of two stages, whose pods keep snapshots: pod-0 has stage 0."""
    return make_job(api, "kept")


def make_job(api: Any, name: str, workload: Any = None, stages: int = 2, **snapshots: Any) -> Job:
    manifest = copy.deepcopy(MANIFEST)
    manifest["metadata"]["name"] = name
    manifest["spec"]["workload"] = workload or manifest["spec"]["workload"]
    manifest["spec"]["parallelism"] = {"stages": stages, "replicas": 1}
    spec = {"enabled": True, "memory": "64Mi", "peers": 1, **snapshots}
    manifest["spec"]["snapshots"] = spec
    job = Job(api, manifest)
    for pod in (f"pod-{number}" for number in range(stages)):
        job.register(pod, snapshots=f"{pod}:2", domain=f"node-of-{pod}")
        job.up(pod)
    job.settle()
    return job


def status(pod: str, *positions: int, **fields: Any) -> dict[str, Any]:
    """A store that has everything of some positions."""
    groups = [
        {
            "position": position,
            "num_units": 2,
            "units": [{"first": 0, "last": 1}],
            "states": [4, 5],
            "gradients": [RUN],
        }
        for position in positions
    ]
    return {
        "pod": pod,
        "memory_bytes": 64 << 20,
        "used_bytes": 1 << 20,
        "kinds": [{"kind": "state", "num_segments": 4, "size_bytes": 4096}],
        "windows": [WINDOW],
        "units": groups,
        "judged": [RUN],
        **fields,
    }


def checked(number: int, sums: str) -> dict[str, Any]:
    key = {"lineage": 0, "position": 0, "unit": 0, "kind": "state", "version": 4}
    line = {
        "key": key,
        "unit_name": "layers.0",
        "versions": [{"first": 4, "last": 5}],
        "sums": sums,
    }
    return {
        "number": number,
        "num_segments": 2,
        "size_bytes": 8192,
        "lineage": 0,
        "segments": [line],
    }


def test_what_stores_tell_says_which_losses_are_survived(snapshot_job: Job) -> None:
    job = snapshot_job
    assert job.api.get(f"{job.path}/snapshots")["silent"] == ["pod-0", "pod-1"]
    assert job.agent("store", status("pod-0", 0)) == {"check": 0}
    assert job.agent("store", status("pod-1", 0, 1)) == {"check": 0}

    shown = job.api.get(f"{job.path}/snapshots")
    first, second = shown["positions"]
    assert (first["num_copies"], first["pods"], first["replay_steps"]) == (2, [], 3)
    assert (second["is_covered"], second["pods"]) == (True, ["pod-1"])
    assert second["domains"] == ["node-of-pod-1"]
    assert [store["name"] for store in shown["stores"]] == ["pod-0", "pod-1"]

    page = job.api.get(f"{job.path}/summary")["stores"]
    assert page == shown["summary"]
    assert "expected_bytes" not in page  # of a model of the user's own
    assert (page["window"], page["lag"]) == (WINDOW, 3)
    assert "the loss of 1 pod is not survived: pod-1 (s1)" in page["coverage"]
    series = series_of(job)
    assert series["mainstay_job_snapshot_lag"] == {"": 3.0}
    assert series["mainstay_job_snapshot_window"] == {"": 2.0}
    assert series["mainstay_job_snapshot_refused"] == {"": 0.0}
    assert series["mainstay_job_replay_steps"] == {"": 3.0}
    assert series["mainstay_job_snapshot_bytes"] == {"state": 8192.0}
    assert series["mainstay_job_positions"] == {
        "all": 2.0,
        "covered": 2.0,
        "survive_pod": 1.0,
        "survive_domain": 1.0,
    }
    memory = series["mainstay_job_snapshot_memory_bytes"]
    assert memory["least_free"] == 63 << 20
    assert memory["limit"] == 128 << 20


def test_a_built_in_model_says_how_much_a_store_may_hold_and_needs_room_for(
    api: Any,
) -> None:
    llama = {
        "entrypoint": "mainstay_train.models.llama:workload",
        "config": {"dim": 16, "layers": 2, "heads": 4, "kvHeads": 2, "hidden": 32},
    }
    told = [
        job.api.get(f"{job.path}/summary")["stores"]
        for job in (
            make_job(api, f"sized-{window}".lower(), llama, window=window)
            for window in (1, 2, "Auto")
        )
    ]
    assert all(0 < page["expected_bytes"] < page["bound_bytes"] for page in told)
    assert told[0]["bound_bytes"] < told[1]["bound_bytes"]
    # No stage has more than two blocks.
    assert told[2] == told[1] | {"is_auto": True}


def test_a_built_in_model_that_is_too_deep_to_be_cut_says_nothing_of_it(api: Any) -> None:
    config = {"dim": 16, "layers": 1022, "heads": 4, "kvHeads": 2, "hidden": 32}
    llama = {"entrypoint": "mainstay_train.models.llama:workload", "config": config}
    assert 4 * (config["layers"] + 2) ** 2 > MAX_CUTS
    job = make_job(api, "deep", llama, stages=4, memory="64Gi", window=1)
    page = job.api.get(f"{job.path}/summary")["stores"]
    assert "expected_bytes" not in page
    assert "bound_bytes" not in page
    assert job.api.get(f"{job.path}/snapshots")["summary"] == page
    assert series_of(job)["mainstay_job_snapshot_lag"] == {"": page["lag"]}


def test_what_the_store_before_a_restart_told_counts_no_more(snapshot_job: Job) -> None:
    job = snapshot_job
    job.agent("store", status("pod-0", 0, address="pod-0:2"))
    job.agent("store", status("pod-1", 0, 1, address="pod-1:2"))
    assert job.api.get(f"{job.path}/summary")["stores"]["num_covered"] == 2

    job.register("pod-1", pid=2, snapshots="pod-1:3", domain="node-of-pod-1")
    shown = job.api.get(f"{job.path}/snapshots")
    assert shown["silent"] == ["pod-1"]
    assert [position["is_covered"] for position in shown["positions"]] == [True, False]

    # What it told last may come late.
    job.agent("store", status("pod-1", 0, 1, address="pod-1:2"))
    assert job.api.get(f"{job.path}/summary")["stores"]["num_covered"] == 1
    job.agent("store", status("pod-1", 0, 1, address="pod-1:3"))
    assert job.api.get(f"{job.path}/summary")["stores"]["num_covered"] == 2


def test_what_stores_tell_of_boundary_logs_covers_the_stages_beside_them(api: Any) -> None:
    job = make_job(api, "logged", replay="Boundary", ordering="BackToFront")
    log = {
        "voted_in": "q1-a", "first_step": 4, "last_step": 7, "first_type": 0,
        "last_type": 3, "micro_batches": 1,
    }  # fmt: skip
    told = {
        "pod-0": log | {"position": 0, "kind": "activation"},
        "pod-1": log | {"position": 1, "kind": "input-gradient"},
    }
    for pod, held in told.items():
        sent = status(pod, 0, 1, logs=[held], certified=[{"quorum": "q1-a", **RUN}])
        for group in sent["units"]:
            group |= {"gradients": [], "computes": [{"first": 4, "last": 4}]}
        assert job.agent("store", sent) == {"check": 0}

    shown = job.api.get(f"{job.path}/snapshots")
    assert [(p["is_covered"], p["pods"]) for p in shown["positions"]] == [(True, [])] * 2
    assert [p["replay_steps"] for p in shown["positions"]] == [3, 3]
    assert (shown["summary"]["log"], shown["summary"]["ordering"]) == ("boundary", "BackToFront")
    assert "all trainers of any one stage" in shown["summary"]["coverage"]
    assert series_of(job)["mainstay_job_positions"]["survive_pod"] == 2.0


def series_of(job: Job) -> dict[str, dict[str, float]]:
    """A job's series by name, and by their own label, if they have one."""
    job.beat("pod-0")
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(job.api.client.get("/metrics").text):
        for sample in family.samples:
            if sample.labels.get("job") == job.uid:
                own = {k: v for k, v in sample.labels.items() if k not in JobLabels._fields}
                found.setdefault(sample.name, {})["/".join(own.values())] = sample.value
    return found


def test_a_check_names_the_copy_that_differs(snapshot_job: Job) -> None:
    job = snapshot_job
    number = job.api.post(f"{job.path}/snapshots/check")["check"]
    assert job.agent("store", status("pod-0", 0))["check"] == number
    found = job.api.get(f"{job.path}/snapshots/check")
    assert (found["told"], found["waiting"]) == ([], ["pod-0", "pod-1"])

    job.agent("store", status("pod-0", 0, checked=checked(number, SUMS)))
    job.agent("store", status("pod-1", 0, checked=checked(number, SUMS[:-1] + "c")))

    found = job.api.get(f"{job.path}/snapshots/check")
    assert (found["told"], found["waiting"]) == (["pod-0", "pod-1"], [])
    assert [(d["pod"], d["key"]["version"]) for d in found["damaged"]] == [
        ("pod-0", 5),
        ("pod-1", 5),
    ]
    assert found["damaged"][0]["unit_name"] == "layers.0"
    # Each store hears what is damaged there, so that it counts no more.
    for pod in ("pod-0", "pod-1"):
        reply = job.agent("store", status(pod, 0))
        assert reply["doubts"]["check"] == number
        assert [key["version"] for key in reply["doubts"]["keys"]] == [5]
    # A later check begins anew: nobody has answered it yet.
    job.api.post(f"{job.path}/snapshots/check")
    assert job.api.get(f"{job.path}/snapshots/check")["damaged"] == []
    for pod in ("pod-0", "pod-1"):
        job.agent("store", status(pod, 0, checked=checked(number + 1, SUMS)))
    assert job.api.get(f"{job.path}/snapshots/check")["waiting"] == []
    assert job.agent("store", status("pod-0", 0)) == {"check": number + 1}


def test_what_was_found_damaged_is_told_by_number_and_by_name(snapshot_job: Job) -> None:
    job = snapshot_job
    damaged = {"num_discarded": 3, "num_damaged": 2, "judged": [{"first": 4, "last": 6}]}
    job.agent("store", status("pod-0", 0, 1, **damaged))
    job.agent("store", status("pod-1", 0, 1, num_discarded=1))

    page = job.api.get(f"{job.path}/summary")["stores"]
    assert (page["num_discarded"], page["num_damaged"]) == (4, 2)
    assert series_of(job)["mainstay_job_snapshot_damaged"] == {"": 2.0}

    number = job.api.post(f"{job.path}/snapshots/check")["check"]
    key = checked(number, SUMS)["segments"][0]["key"]
    bad = {"bad_records": [7], "num_records": 4, "doubted": [key]}
    job.agent("store", status("pod-0", 0, checked=checked(number, SUMS) | bad))
    job.agent("store", status("pod-1", 0, checked=checked(number, SUMS) | {"num_records": 4}))
    found = job.api.get(f"{job.path}/snapshots/check")
    assert found["num_records"] == 8
    assert found["damaged_records"] == [{"pod": "pod-0", "step": 7}]
    assert [(d["pod"], d["segment"]) for d in found["damaged"]] == [
        ("pod-0", "state of unit 0 of position 0 at 4")
    ]
    # The store knows it: what has come in its place since has the same header, and is good.
    assert job.agent("store", status("pod-0", 0)) == {"check": number}


def test_a_copy_that_no_key_finds_is_named_and_no_good_one_is_doubted_for_it(
    snapshot_job: Job,
) -> None:
    job = snapshot_job
    number = job.api.post(f"{job.path}/snapshots/check")["check"]
    key = checked(number, SUMS)["segments"][0]["key"]
    job.agent("store", status("pod-0", 0, checked=checked(number, SUMS) | {"lost": [key]}))
    job.agent("store", status("pod-1", 0, checked=checked(number, SUMS)))

    (named,) = job.api.get(f"{job.path}/snapshots/check")["damaged"]
    assert (named["pod"], named["unit_name"], named["key"]) == ("pod-0", "layers.0", key)
    assert job.agent("store", status("pod-0", 0)) == {"check": number}


def test_a_pod_that_is_gone_has_no_store(snapshot_job: Job) -> None:
    job = snapshot_job
    job.agent("store", status("pod-1", 0, 1))
    gone = {"kind": "pod-gone", "pod": "pod-1", "evidence": "killed"}
    job.api.post(f"{job.path}/provider/facts", {"facts": [gone]})

    assert job.agent("store", status("pod-1", 0, 1), status=409)["error"] == "unregistered"
    shown = job.api.get(f"{job.path}/snapshots")
    assert (shown["stores"], shown["silent"]) == ([], ["pod-0"])


def test_a_job_without_snapshots_says_so_and_shows_nothing_of_them(job: Job) -> None:
    job.start()
    for method, path in (("get", ""), ("get", "/check"), ("post", "/check")):
        answer = getattr(job.api, method)(f"{job.path}/snapshots{path}", status=404)
        assert answer["error"] == "no-snapshots"
        assert "spec.snapshots.enabled" in answer["detail"]
    page = job.api.get(f"{job.path}/summary")
    assert not {"stores", "snapshots"} & page.keys()
    series = series_of(job)
    assert "mainstay_job_step" in series
    assert not any("snapshot" in name or "positions" in name for name in series)
