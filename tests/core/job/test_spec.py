import copy
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import Order
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.faults import files
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.job import model_sizes, spec
from mainstay_core.job.config import ApproximateConfig, JobConfig

SMALLEST: dict[str, Any] = {
    "apiVersion": "mainstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "demo"},
    "spec": {
        "training": {"steps": 60, "lanes": 4},
        "workload": {"entrypoint": "mainstay_train.models.llama:workload"},
    },
}


def job_with(path: str, value: object) -> dict[str, Any]:
    data = copy.deepcopy(SMALLEST)
    *parents, last = path.split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return data


def problem(data: object) -> InvalidSpecError:
    with pytest.raises(InvalidSpecError) as caught:
        spec.parse_training_job(data)
    return caught.value


def test_the_smallest_job_gets_every_default() -> None:
    config = spec.parse_training_job(SMALLEST).to_job_config(JobUid("u"))
    assert config.name == "demo"
    assert (config.shape.lanes, config.shape.replicas, config.shape.min_replicas) == (4, 4, 1)
    assert (config.shape.stages, config.shape.ranks_per_pod, config.shape.micro_batches) == (
        1,
        1,
        1,
    )
    assert (config.device, config.backend, config.redundancy) == ("auto", "auto", None)
    assert config.checkpoint_dir == ""


@pytest.mark.parametrize(
    ("changes", "path", "right"),
    [
        ({"config": {"experts": 0}}, "workload.config.experts", "a whole number above 0"),
        ({"config": {"sharedExperts": -1}}, "workload.config.sharedExperts", "0 or above"),
        (
            {"config": {"experts": 3, "activeExperts": 4}},
            "workload.config.activeExperts",
            "at most",
        ),
        (
            {"config": {"layers": 2, "denseLayers": 2}},
            "workload.config.denseLayers",
            "below layers",
        ),
        ({"ranks": 2}, "parallelism.ranksPerStage", "use 1, and more stages"),
    ],
)
def test_a_mixture_of_experts_that_cannot_be_is_refused_before_it_runs(
    changes: dict[str, Any], path: str, right: str
) -> None:
    data = copy.deepcopy(SMALLEST)
    data["spec"]["workload"] = {
        "entrypoint": model_sizes.MOE,
        "config": {"dim": 24, "heads": 2, "kvHeads": 1} | changes.get("config", {}),
    }
    data["spec"]["parallelism"] = {"ranksPerStage": changes.get("ranks", 1)}
    found = problem(data)
    assert found.field == f"spec.{path}"
    assert right in str(found)


def test_defaults_of_the_model_and_of_the_config_agree() -> None:
    config = spec.parse_training_job(SMALLEST).to_job_config(JobUid("u"))
    plain = JobConfig(
        job=JobUid("u"),
        name="demo",
        shape=config.shape,
        entrypoint=config.entrypoint,
        workload={},
    )
    assert config == plain


def template_with(mount: dict[str, Any]) -> dict[str, Any]:
    """A pod template with a volume, and ``mount`` after another one."""
    mounts = [{"name": "data", "mountPath": "/data"}, mount]
    container = {"name": "trainer", "image": "torch:1", "volumeMounts": mounts}
    return {"spec": {"containers": [container], "volumes": [{"name": "data", "emptyDir": {}}]}}


@pytest.mark.parametrize(
    ("lanes", "expected"), [(1, 1), (2, 1), (3, 2), (4, 3), (17, 16), (64, 16)]
)
def test_auto_spreads_a_lost_lane_evenly_up_to_16_types(lanes: int, expected: int) -> None:
    job = spec.parse_training_job(job_with("spec.training.lanes", lanes))
    assert job.shape.shards_per_lane == expected


def test_every_setting_reaches_the_config() -> None:
    data = copy.deepcopy(SMALLEST)
    data["spec"] |= {
        "training": {"steps": 9, "seed": 7, "lanes": 3, "shardsPerLane": 4},
        "parallelism": {"replicas": 2, "minReplicas": 2, "stages": 2, "ranksPerPod": 3},
        "redundancy": 2,
        "pipeline": {"schedule": "1F1B", "microBatches": 2, "order": "InOrder"},
        "workload": {"entrypoint": "a:b", "args": ["x"], "config": {"dim": 8}},
        "runtime": {"device": "CUDA", "backend": "Gloo", "compile": "Blocks"}
        | {"recompute": True, "bucketMebibytes": 8, "connectSeconds": 30},
        "template": {"spec": {"anything": [1]}},
        "spares": {"replicas": 1},
        "detection": {
            "hangSeconds": 900,
            "heartbeatSeconds": 2,
            "heartbeatTimeoutSeconds": 20,
        },
        "checkpoint": {
            "storage": "/data",
            "everySteps": 5,
            "keep": 3,
            "copyMebibytes": 64,
            "resumeFrom": "/earlier",
            "keySecret": "checkpoint-key",
        },
        "snapshots": {
            "enabled": True,
            "window": 7,
            "peers": 1,
            "ordering": "TimeDecayed",
            "decayPercent": 75,
            "replay": "Gradients",
            "memory": "1.5Gi",
        },
        "protection": {"domains": 1},
        "recovery": {
            "maxRestarts": 3,
            "escalateAfter": 4,
            "restartGraceSeconds": 0,
            "handoverSeconds": 45,
            "holdBackSeconds": 2,
            "holdBackMaxSeconds": 60,
        },
        "scheduling": {"startupDeadlineSeconds": 30},
    }
    job = spec.parse_training_job(data)
    fault = FaultPoint(id="f", step=1, action=FaultAction.KILL_POD, replica=0, stage=0)
    config = job.to_job_config(JobUid("u"), (fault,), "/unused")
    assert codec.encode(config) == {
        "job": "u",
        "name": "demo",
        "namespace": "",
        "shape": {
            "lanes": 3,
            "shards_per_lane": 4,
            "replicas": 2,
            "min_replicas": 2,
            "stages": 2,
            "ranks_per_stage": 1,
            "ranks_per_pod": 3,
            "micro_batches": 2,
            "steps": 9,
            "seed": 7,
            "checkpoint_every_steps": 5,
        },
        "entrypoint": "a:b",
        "args": ["x"],
        "workload": {"dim": 8},
        "device": "cuda",
        "backend": "gloo",
        "compile": "blocks",
        "recompute": True,
        "bucket_bytes": 8 * 1024 * 1024,
        "redundancy": 2,
        "checkpoint_dir": "/data",
        "checkpoint_keep": 3,
        "checkpoint_copy_bytes": 64 * 1024 * 1024,
        "checkpoint_signed": True,
        "resume_from": "/earlier",
        "heartbeat_s": 2.0,
        "heartbeat_timeout_s": 20.0,
        "hang_s": 900.0,
        "operation_timeout_s": 3600.0,
        "connect_s": 30.0,
        "probe_s": 0.3,
        "restart_grace_s": 0.0,
        "startup_deadline_s": 30.0,
        "max_restarts": 3,
        "escalate_after": 4,
        "suspend": False,
        "handover_s": 45.0,
        "hold_back_s": 2.0,
        "hold_back_max_s": 60.0,
        "spares": 1,
        "snapshots": {
            "memory_bytes": 3 << 29,
            "num_instalments": 7,
            "peers": 1,
            "domains": 1,
            "ask_s": 5.0,
            "ordering": "TimeDecayed",
            "decay": 49152,
            "log_reason": "spec.snapshots.replay says Gradients",
        },
        "permitted": {
            "after_lost_steps": None,
            "weights": "GradientNorm",
            "lr_boost": 1.1,
            "boost_steps": None,
            "stale_steps": 100,
        },
        "faults": [codec.encode(fault)],
    }
    assert codec.decode(JobConfig, codec.encode(config)) == config
    # 2 replicas x 2 stages on pods of 3 slots, and a spare.
    assert (job.num_worker_pods, job.num_pods) == (2, 3)


def test_local_mode_chooses_the_checkpoint_directory_when_the_job_names_none() -> None:
    job = spec.parse_training_job(job_with("spec.checkpoint.everySteps", 5))
    assert job.to_job_config(JobUid("u"), (), "/state/checkpoints").checkpoint_dir == (
        "/state/checkpoints"
    )


def test_checks_reach_the_trainers_and_a_job_without_them_has_the_bytes_of_before() -> None:
    plain = spec.parse_training_job(SMALLEST).to_job_config(JobUid("u"))
    checked = spec.parse_training_job(job_with("spec.detection.dmr.mode", "Full"))
    config = checked.to_job_config(JobUid("u"))

    assert "dmr" not in codec.encode(plain)
    assert codec.encode(config)["dmr"] == "Full"
    assert codec.loads(JobConfig, codec.dumps(config)).dmr is Mode.FULL


@pytest.mark.parametrize(
    ("memory", "size_bytes"), [({}, 256 << 20), ({"memory": "1Gi"}, 1 << 30), ({"memory": 0}, 0)]
)
def test_the_memory_of_checks_that_wait_reaches_the_trainers(
    memory: dict[str, Any], size_bytes: int
) -> None:
    dmr = {"mode": "Full", "plan": "Dynamic", **memory}
    config = spec.parse_training_job(job_with("spec.detection.dmr", dmr)).to_job_config(JobUid("u"))

    assert (config.dmr_plan, config.dmr_memory_bytes) == (PlanName.DYNAMIC, size_bytes)
    naive = spec.parse_training_job(job_with("spec.detection.dmr.mode", "Full"))
    assert naive.to_job_config(JobUid("u")).dmr_memory_bytes == 0


@pytest.mark.parametrize(
    ("plan", "name", "file", "steps"),
    [
        ("Naive", PlanName.NAIVE, "", 0),
        ("Auto", PlanName.AUTO, "", 3),
        ("/plans/{stage}.json", PlanName.FILE, "/plans/{stage}.json", 3),
    ],
)
def test_the_plan_of_checks_reaches_the_trainers(
    plan: str, name: PlanName, file: str, steps: int
) -> None:
    dmr = {"mode": "Full", "plan": plan}
    config = spec.parse_training_job(job_with("spec.detection.dmr", dmr)).to_job_config(JobUid("u"))

    told = config.dmr_plan, config.dmr_plan_file, config.dmr_profile_steps
    assert told == (name, file, steps)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("spec.training.lane", 4, "unknown field; did you mean lanes? valid here: steps, seed,"),
        ("spec.paralelism", {}, "unknown field; did you mean parallelism?"),
        ("spec.training.lanes", "4", "is '4', must be a valid integer"),
        ("spec.training.lanes", True, "must be a valid integer"),
        ("spec.training.steps", 0, "is 0, must be greater than or equal to 1"),
        ("spec.training.shardsPerLane", "auto", "must be a whole number from 1 to 65536, or Auto"),
        ("spec.training.seed", -1, "is -1, must be"),
        ("spec.parallelism.replicas", 5, "there are only 4 lanes"),
        ("spec.parallelism.minReplicas", 5, "must be at most the replicas (4)"),
        ("spec.parallelism.ranksPerPod", 5, "the job has only 4 ranks"),
        ("spec.parallelism.ranksPerStage", 0, "is 0, must be greater than or equal to 1"),
        ("spec.redundancy", 5, "at most one host per lane, and 28 in all; use at most 4, or Auto"),
        ("spec.pipeline.order", "Swapped", "a single stage has nothing to swap; use InOrder, or"),
        ("spec.pipeline.order", "Reverse", "must be 'InOrder' or 'Swapped'"),
        ("spec.pipeline.cut", "Even", "must be 'Balanced' or 'Equal'"),
        ("spec.pipeline.schedule", "GPipe", "must be '1F1B'"),
        ("spec.workload.entrypoint", "llama", "must be module:function"),
        ("spec.snapshots", {"enable": True}, "unknown field; did you mean enabled?"),
        ("spec.snapshots.ordering", "Popular", "must be 'Popularity', 'SoftCount'"),
        ("spec.snapshots.replay", "Both", "must be 'Auto', 'Gradients' or 'Boundary'"),
        ("spec.snapshots.window", 0, "must be a whole number from 1 to 65536, or Auto"),
        ("spec.snapshots.peers", -1, "is -1, must be greater than or equal to 0"),
        ("spec.snapshots.memory", "a lot", "is 'a lot', must be an amount as in a pod's"),
        ("spec.snapshots.memory", -1, "is -1, must be an amount as in a pod's resources"),
        ("spec.protection.domains", 0, "is 0, must be greater than or equal to 1"),
        ("spec.protection.domain", 2, "unknown field; did you mean domains?"),
        ("spec.detection.dmr.mode", "Piggyback", "set runtime.recompute, or use Full"),
        (
            "spec.detection.dmr.mode",
            False,
            "must be 'Off', 'Piggyback' or 'Full'; YAML reads Off without quotes",
        ),
        ("spec.runtime.compile", False, "is false, must be 'Off' or 'Blocks'; YAML reads Off"),
        ("spec.detection.dmr.plan", "Auto", "is Auto, but no check waits in this mode; use Naive"),
        ("spec.detection.dmr.plan", "Dynamic", "no check waits in this mode; use Naive, or mode"),
        (
            "spec.detection.dmr.plan",
            "plan.json",
            "must be Naive, Dynamic, Auto, or the absolute path",
        ),
        ("spec.detection.dmr.profileSteps", 0, "is 0, must be greater than or equal to 1"),
        ("spec.detection.dmr.memory", "1Gi", "is for checks that wait; use another plan than"),
        (
            "spec.detection.dmr",
            {"mode": "Full", "plan": "Auto", "memory": "1Ei"},
            "is '1Ei', must be at most what the device has beside the training, and 90071992547",
        ),
        ("spec.detection.dmr.memory", "a lot", "is 'a lot', must be an amount as in a pod's"),
        ("spec.detection.witness.everySteps", -1, "is -1, must be greater than or equal to 0"),
        (
            "spec",
            SMALLEST["spec"]
            | {"parallelism": {"replicas": 1}, "detection": {"witness": {"everySteps": 5}}},
            "is 5, but the job has 1 replica, so that nobody else computes the same; use 0, or 2",
        ),
        ("spec.recovery.onTaint", "Undo", "must be 'Report' or 'Restart'"),
        (
            "spec",
            SMALLEST["spec"]
            | {"runtime": {"compile": "Blocks"}, "detection": {"dmr": {"mode": "Full"}}},
            "is Full, but of compiled blocks the operators are not seen; use runtime.compile Off",
        ),
        ("spec.detection.heartbeatTimeoutSeconds", 2, "must be at least 3"),
        ("spec.checkpoint.storage", "s3://bucket", "must be the absolute path of a directory"),
        ("spec.checkpoint.copyMebibytes", 7, "is 7, must be greater than or equal to 8"),
        (
            "spec.checkpoint.resumeVersion",
            6,
            "is for jobs that go on from an earlier run; name its",
        ),
        ("spec.checkpoint.resumeVersion", 0, "must be greater than"),
        (
            "spec.checkpoint",
            {"resumeVersion": 6, "resumeFrom": "/ckpt/a", "storage": "/ckpt/a"},
            "goes back in the directory that is the job's own storage",
        ),
        ("spec.checkpoint.keySecret", "My Key", "must be the name of an object of the cluster"),
        ("spec.recovery.allowApproximate", True, "with 1 stage no stage has two neighbours"),
        ("spec.recovery.approximateAfterLostSteps", -1, "must be greater than or equal to 0"),
        ("spec.recovery.approximate.guards", 17, "must be less than or equal to 16"),
        ("spec.recovery.approximate.guards", 2, "is 2, but in order no stage is an end's twin"),
        ("spec.recovery.approximate", {"staleSteps": 9}, "is 9, but the job keeps no checkpoint"),
        ("spec.recovery.approximate", {"staleSteps": -1}, "must be greater than or equal to 0"),
        ("spec.recovery.approximate", {"waitSeconds": -1}, "must be greater than or equal to 0"),
        ("spec.recovery.approximate", {"lrBoostPercent": 99}, "greater than or equal to 100"),
        ("spec.recovery.approximate", {"weights": "Norm"}, "must be 'GradientNorm', 'Uniform'"),
        ("spec.recovery.approximate", {"optimizerState": "Copy"}, "must be 'Zero' or 'Average'"),
        ("spec.recovery.onHostsLost", "Restart", "use Rehost"),
        ("spec.runtime", {"device": "CPU", "backend": "NCCL"}, "needs CUDA"),
        (
            "spec",
            SMALLEST["spec"]
            | {"runtime": {"compile": "Blocks"}, "parallelism": {"ranksPerStage": 2}},
            "is Blocks, but blocks that are spread over several ranks are not compiled; use Off",
        ),
        ("spec.runtime.compile", "Model", "must be 'Off' or 'Blocks'"),
        ("spec.runtime.bucketMebibytes", 0, "is 0, must be greater than or equal to 1"),
        ("spec.runtime.bucketMebibytes", 1025, "is 1025, must be less than or equal to 1024"),
        ("spec.runtime.bucketMebibytes", "4Mi", "is '4Mi', must be a valid integer"),
        ("spec.runtime.connectSeconds", 0, "is 0, must be greater than or equal to 1"),
        ("spec.template", {"metadata": {}}, "has no spec, must be a pod template"),
        ("spec.template", {"spec": {}, "kind": "Pod"}, "has kind, must be a pod template"),
        (
            "spec.template",
            template_with({"name": "own", "mountPath": "/dev/shm/"}),
            "volumeMounts[1] at /dev/shm of volume 'own', must name one of spec.volumes; or leave",
        ),
        (
            "spec.template",
            template_with({"name": "data", "mountPath": "/dev/shm", "readOnly": True}),
            "has spec.containers[0].volumeMounts[1] at /dev/shm read-only, must be writable",
        ),
        ("spec.workload.config.layers", 0, "is 0, must be a whole number above 0"),
        ("spec.workload.config.dim", "64", "is '64', must be a whole number above 0"),
        ("spec.recovery", {"holdBackSeconds": 9, "holdBackMaxSeconds": 8}, "least holdBackSeconds"),
        ("spec.recovery.window.maxRepairs", 0, "must be a whole number from 1 to 65536, or Auto"),
        ("spec.recovery.quarantine.mode", "On", "must be 'Off', 'DryRun', 'Avoid' or 'Taint'"),
        ("spec.recovery.quarantine.maxNodesPercent", 101, "must be less than or equal to 100"),
        ("spec.spares.mode", "Cold", "spares are always warm in this version; use Warm"),
        ("spec.managedBy", "somebody", "must be a domain and a path"),
        ("spec.priorityClassName", "High", "must be the name of an object of the cluster"),
        ("spec.activeDeadlineSeconds", 0, "must be greater than or equal to 1"),
        ("spec.scheduling.gang", "Kueue", "is not available"),
        ("spec.scheduling.replicaTopologyKey", "a b", "must be the key of a node's label"),
        (
            "spec.scheduling",
            {"replicaTopologyKey": "rack", "spreadTopologyKey": "rack"},
            "kept together and apart",
        ),
        (
            "spec.parallelism",
            {"stages": 4096, "ranksPerStage": 4096},
            "makes 67108864 ranks (4 replicas x 4096 stages x 4096 ranks); a plan has at most",
        ),
        ("spec.workload.config", {"x": float("inf")}, "contains inf, which is not a finite number"),
        ("spec.training.steps", 10**30, "spec.training.steps: contains an integer of more than 64"),
        ("spec.workload.config", {"x": 10**30}, "contains an integer of more than 64 bits"),
        ("spec.workload.config", {"\ud800": 1}, "half of a surrogate pair"),
        ("spec.template", {"spec": {"x": ["\ud800"]}}, "half of a surrogate pair"),
        ("spec.training", None, "expected fields (steps, seed, lanes, shardsPerLane)"),
        ("metadata.name", "Demo_1", "must be at most 40 lower-case letters"),
        ("kind", "Job", "must be 'TrainingJob'"),
        ("apiVersion", "v1", "must be 'mainstay.dev/v1alpha1'"),
    ],
)
def test_a_mistake_is_named_with_its_path_and_what_is_right(
    path: str, value: object, words: str
) -> None:
    error = problem(job_with(path, value))
    assert error.field.startswith(path)
    assert words in str(error)


def test_a_shard_type_has_no_more_hosts_than_the_planner_can_spread() -> None:
    data = job_with("spec.training", {"steps": 1, "lanes": 40})
    for redundancy, is_good in ((28, True), (29, False)):
        data["spec"] |= {"redundancy": redundancy, "parallelism": {"replicas": 2}}
        if is_good:
            spec.parse_training_job(data)
        else:
            assert "is 29, but a shard type has at most one host per lane, and 28" in str(
                problem(data)
            )


def approximate_job(**spec: Any) -> dict[str, Any]:
    data = job_with("spec.recovery", {"allowApproximate": True})
    data["spec"] |= {"parallelism": {"stages": 3}, **spec}
    return data


def test_permission_for_an_approximate_recovery_reaches_the_processes() -> None:
    how = {"lrBoostPercent": 125, "boostSteps": 100, "weights": "Uniform", "staleSteps": 40}
    how |= {"waitSeconds": 9, "optimizerState": "Average"}
    data = approximate_job(checkpoint={"everySteps": 5})
    data["spec"]["recovery"] |= {"approximateAfterLostSteps": 0, "approximate": how}
    config = spec.parse_training_job(data).to_job_config(JobUid("u"))

    assert config.approximate == ApproximateConfig(
        after_lost_steps=0,
        weights="Uniform",
        lr_boost=1.25,
        boost_steps=100,
        stale_steps=40,
        wait_s=9.0,
        optimizer_state="Average",
    )
    assert (config.permitted, config.approximate_rules) == (None, config.approximate)
    assert codec.loads(JobConfig, codec.dumps(config)) == config
    data["spec"]["recovery"] = {"approximate": how}
    off = spec.parse_training_job(data).to_job_config(JobUid("u"))
    allowed = replace(config.approximate_rules, after_lost_steps=None)
    assert (off.approximate, off.permitted, off.approximate_rules) == (None, allowed, allowed)
    assert codec.loads(JobConfig, codec.dumps(off)) == off
    plain = codec.encode(spec.parse_training_job(SMALLEST).to_job_config(JobUid("u")))
    assert not {"approximate", "permitted"} & plain.keys()


def test_a_limit_on_lost_steps_may_stay_where_the_permission_is_switched_off() -> None:
    """``kubectl patch`` may switch that off alone: the job must stay one that can be used."""
    data = approximate_job()
    data["spec"]["recovery"]["approximateAfterLostSteps"] = 3
    allowed = spec.parse_training_job(data).to_job_config(JobUid("u"))
    data["spec"]["recovery"]["allowApproximate"] = False
    off = spec.parse_training_job(data).to_job_config(JobUid("u"))

    assert off.approximate is None
    assert off.approximate_rules == allowed.approximate


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(
    ("every_steps", "limit", "said", "stale_steps"),
    [
        (5, 0, None, 100),
        (5, 3, None, 100),
        (5, None, None, 0),
        (0, 3, None, 0),
        (0, None, None, 0),
        (5, 3, 0, 0),
        (0, 3, 0, 0),
        (5, 3, 7, 7),
        (5, None, 7, 7),
    ],
)
def test_a_stage_loads_its_own_young_checkpoint_unless_the_job_says_otherwise(
    every_steps: int, limit: int | None, said: int | None, stale_steps: int, allowed: bool
) -> None:
    """The rules hold the number that counts. What a person allows has its own limit."""
    data = approximate_job(checkpoint={"everySteps": every_steps})
    recovery = data["spec"]["recovery"]
    recovery |= {"allowApproximate": allowed, "approximateAfterLostSteps": limit}
    recovery["approximate"] = {"staleSteps": said}
    config = spec.parse_training_job(data).to_job_config(JobUid("u"))

    permitted = 100 if every_steps and said is None else said or 0
    assert config.approximate_rules.stale_steps == (stale_steps if allowed else permitted)
    assert (config.approximate is not None) == allowed
    assert codec.loads(JobConfig, codec.dumps(config)) == config


def test_two_stages_in_order_may_go_on_approximately_from_their_own_checkpoints() -> None:
    def two(**recovery: Any) -> dict[str, Any]:
        data = approximate_job(parallelism={"stages": 2}, checkpoint={"everySteps": 5})
        data["spec"]["recovery"] |= recovery
        return data

    for limit in (0, 99):
        assert spec.parse_training_job(two(approximateAfterLostSteps=limit))
    late = two(approximateAfterLostSteps=100)
    off = two(approximateAfterLostSteps=0, approximate={"staleSteps": 0})
    for refused in (two(), late, off):
        assert "with 2 stages no stage has two neighbours" in str(problem(refused))


def test_permission_that_could_never_be_used_is_refused() -> None:
    assert "more stages" in str(problem(approximate_job(parallelism={"stages": 1})))
    both_ends = {"parallelism": {"stages": 2}}
    assert "or checkpoints (checkpoint.everySteps)" in str(problem(approximate_job(**both_ends)))
    for kept in ({"checkpoint": {"everySteps": 5}}, {"snapshots": {"enabled": True}}):
        found = problem(approximate_job(**both_ends, **kept))
        assert found.field == "spec.recovery.allowApproximate"
        assert "approximate.staleSteps, so that a stage loads a checkpoint of its own" in str(found)
    data = approximate_job(**both_ends, checkpoint={"everySteps": 5})
    data["spec"]["recovery"]["approximate"] = {"staleSteps": 9}
    for limit, is_used in ((None, False), (9, False), (8, True), (0, True)):
        data["spec"]["recovery"]["approximateAfterLostSteps"] = limit
        if is_used:
            assert spec.parse_training_job(data)
        else:
            found = problem(data)
            assert found.field == "spec.recovery.allowApproximate"
            assert "approximateAfterLostSteps below approximate.staleSteps" in str(found)
    spec.parse_training_job(approximate_job(snapshots={"enabled": True}))


def test_a_step_has_no_more_shard_types_than_a_plan_can_name() -> None:
    data = job_with("spec.training", {"steps": 1, "lanes": 65_536, "shardsPerLane": 17})
    assert str(problem(data)) == (
        "spec.training.shardsPerLane: makes 1114112 shard types (65536 lanes x 17); "
        "a step has at most 1048576"
    )


@pytest.mark.parametrize("key", ["\ud800", "x" * 1_000_000])
def test_a_mistake_can_be_told_whatever_the_user_wrote(key: str) -> None:
    for data in ({key: 1}, job_with("apiVersion", [key] * 3), job_with("kind", key)):
        assert len(str(problem(data)).encode()) < 40_000


def test_a_document_that_refers_to_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert str(problem(job_with("spec.workload.config.x", endless))) == (
        "spec.workload.config: is nested deeper than 64"
    )


def test_all_mistakes_are_told_at_once() -> None:
    data = job_with("spec.training.lanes", 0)
    data["spec"]["spares"] = {"replica": 1}
    text = str(problem(data))
    assert "spec.training.lanes: is 0" in text
    assert "spec.spares.replica: unknown field; did you mean replicas?" in text


def test_a_missing_field_is_named() -> None:
    data = copy.deepcopy(SMALLEST)
    del data["spec"]["workload"]
    assert str(problem(data)) == "spec.workload: is missing"


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_something_else_than_a_job_is_refused(data: object) -> None:
    assert "expected a TrainingJob" in str(problem(data))


def test_what_kubernetes_adds_is_accepted() -> None:
    data = copy.deepcopy(SMALLEST)
    data["metadata"] |= {"uid": "1", "resourceVersion": "2", "labels": {"a": "b"}}
    data["status"] = {"conditions": []}
    assert spec.parse_training_job(data).metadata.labels == {"a": "b"}


def test_the_schema_for_the_crd_has_the_names_that_users_write() -> None:
    schema = spec.TrainingJob.model_json_schema(by_alias=True)
    assert set(schema["$defs"]["Training"]["properties"]) == {
        "steps",
        "seed",
        "lanes",
        "shardsPerLane",
    }
    assert schema["$defs"]["Training"]["additionalProperties"] is False


# --- FAULTS.yaml ----------------------------------------------------------------------------------

SHAPE = spec.parse_training_job(job_with("spec.parallelism.stages", 2)).shape


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "at": {"step": 20, "phase": "backward", "delayMs": 5},
        "target": {"replica": 1, "stage": 1},
        "action": "kill-pod",
    } | changes


def test_faults_are_read_in_order_with_an_id_each() -> None:
    faults = files.parse_faults(
        [entry(), entry(id="mine", at={"step": 0}, target={"spare": 0}, action="kill-trainer")],
        SHAPE,
        num_spares=1,
    )
    assert faults == (
        FaultPoint(
            id="fault-0",
            step=20,
            action=FaultAction.KILL_POD,
            phase="backward",
            delay_ms=5.0,
            replica=1,
            stage=1,
        ),
        FaultPoint(id="mine", step=0, action=FaultAction.KILL_TRAINER, spare=0),
    )


def test_an_empty_faults_file_has_no_faults() -> None:
    assert files.parse_faults(None, SHAPE, num_spares=0) == ()
    assert files.parse_faults([], SHAPE, num_spares=0) == ()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"faults": []}, "faults: expected a list of faults, found dict"),
        ([3], "faults[0]: expected fields (at, target, action, id, "),
        ([entry(), entry(wen=1)], "faults[1].wen: unknown field; valid here"),
        ([entry(at={"phase": "vote"})], "faults[0].at.step: is missing"),
        ([entry(at={"step": 60})], "faults[0].at.step: is 60, must be a whole number from 0 to 59"),
        ([entry(at={"step": 1, "phase": "votes"})], "(did you mean vote?)"),
        (
            [entry(at={"step": 1, "phase": "RECV_F"}, target={"replica": 0, "stage": 0})],
            "faults[0].at.phase: stage 0 of 2 never comes to RECV_F",
        ),
        ([entry(at={"step": 1, "delayMs": -1})], "faults[0].at.delayMs: is -1"),
        ([entry(target={"replica": 4, "stage": 0})], "faults[0].target.replica: is 4"),
        ([entry(target={"replica": 1})], "faults[0].target.stage: is missing"),
        ([entry(target={"replica": 1, "stage": 0, "inner": 1})], "faults[0].target.inner: is 1"),
        ([entry(target={"spare": 0, "stage": 0})], "names a spare and stage; use either one"),
        ([entry(target={"spare": 0})], "faults[0].at.phase: a spare runs no program"),
        ([entry(target={"spare": 1}, at={"step": 1})], "faults[0].target.spare: is 1"),
        (
            [entry(action="kill")],
            "faults[0].action: is 'kill', must be one of kill-trainer, kill",
        ),
        ([{"at": {"step": 1}, "action": "stop"}], "faults[0].target: is missing"),
        ([entry(id="a"), entry(id="a")], "faults[1].id: is 'a', which entry 0 has already"),
    ],
)
def test_a_bad_fault_is_named_with_entry_and_field(bad: object, message: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        files.parse_faults(bad, SHAPE, num_spares=1)
    assert message in str(caught.value)


def test_the_ends_of_a_swapped_pipeline_send_and_receive_both_ways() -> None:
    swapped = replace(SHAPE, order=Order.SWAPPED)
    for phase, stage in (("RECV_F", 0), ("SEND_B", 0), ("SEND_F", 1), ("RECV_B", 1)):
        bad = entry(at={"step": 1, "phase": phase}, target={"replica": 0, "stage": stage})
        with pytest.raises(InvalidSpecError, match=f"stage {stage} of 2 never comes to {phase}"):
            files.parse_faults([bad], SHAPE, num_spares=1)
        (fault,) = files.parse_faults([bad], swapped, num_spares=1)
        assert fault.phase == phase


def test_a_spare_cannot_be_hit_in_a_job_without_spares() -> None:
    with pytest.raises(InvalidSpecError, match="the job has no spares"):
        files.parse_faults([entry(target={"spare": 0}, at={"step": 1})], SHAPE, num_spares=0)


def swapped_with(changes: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(SMALLEST)
    data["spec"] |= {"parallelism": {"stages": 4}, "pipeline": {"order": "Swapped"}} | changes
    return data


def test_a_swapped_pipeline_is_cut_into_equal_numbers_of_layers() -> None:
    found = {
        (order, cut): spec.parse_training_job(
            swapped_with({"pipeline": {"order": order} | ({"cut": cut} if cut else {})})
        ).shape
        for order in ("InOrder", "Swapped")
        for cut in (None, "Balanced", "Equal")
        # Balanced, the head weighs as much as some layers.
        if (order, cut) != ("Swapped", "Balanced")
    }
    assert {key: shape.cut.value for key, shape in found.items()} == {
        ("InOrder", None): "Balanced",
        ("InOrder", "Balanced"): "Balanced",
        ("InOrder", "Equal"): "Equal",
        ("Swapped", None): "Equal",
        ("Swapped", "Equal"): "Equal",
    }
    assert all(shape.order.value == order for (order, _), shape in found.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"detection": {"dmr": {"mode": "Full", "plan": "/plans/{stage}.json"}}},
            "can only have {way} in the path of detection.dmr.plan; use that, or InOrder",
        ),
        (
            {
                "detection": {"dmr": {"mode": "Full", "plan": "/plans/{stage}-{way}.json"}},
                "pipeline": {"order": "Swapped", "microBatches": 3},
            },
            "can only have one micro-batch or an even number (microBatches) with a file as",
        ),
        ({"runtime": {"compile": "Blocks"}}, "can only have runtime.compile Off; use that, or"),
        (
            {"training": {"steps": 9, "lanes": 1, "shardsPerLane": 1}},
            "a step has a single micro-batch, which takes one of the two ways; use InOrder, or",
        ),
        (
            {"snapshots": {"enabled": True, "replay": "Boundary"}},
            "can only have snapshots.replay Gradients",
        ),
        (
            {"parallelism": {"stages": 3}},
            "stage 1, 3; with pipeline.cut Equal, 3 stages can swap with 6 or 9 layers of one kind",
        ),
        (
            {
                "workload": {
                    "entrypoint": model_sizes.MOE,
                    "config": {"dim": 24, "heads": 2, "kvHeads": 1, "denseLayers": 2},
                },
                "parallelism": {"stages": 4},
            },
            "stage 0 and its twin, stage 1, have layers of other kinds",
        ),
    ],
)
def test_what_a_swapped_pipeline_cannot_have_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    found = problem(swapped_with(changes))
    assert found.field == "spec.pipeline.order"
    assert words in str(found)


@pytest.mark.parametrize("plan", ["Naive", "Dynamic", "Auto", "/plans/{stage}-{way}.json"])
def test_a_swapped_pipeline_may_be_checked_and_witnessed(plan: str) -> None:
    detection = {"dmr": {"mode": "Full", "plan": plan}, "witness": {"everySteps": 3}}
    job = spec.parse_training_job(swapped_with({"detection": detection}))
    assert (job.shape.order.value, job.spec.detection.dmr.plan) == ("Swapped", plan)


@pytest.mark.parametrize(
    ("changes", "guards", "words"),
    [
        (
            {},
            5,
            "is 5, but the stage beside an end has one cell for each lane at most; use at most as",
        ),
        ({"parallelism": {"stages": 4, "replicas": 2}}, 5, "use at most as many: 4"),
        ({"parallelism": {"stages": 4, "ranksPerStage": 2}}, 1, "use 0, or parallelism.ranksPer"),
    ],
)
def test_guards_that_would_be_of_no_use_are_refused(
    changes: dict[str, Any], guards: int, words: str
) -> None:
    recovery = {"recovery": {"approximate": {"guards": guards}}}
    found = problem(swapped_with(changes | recovery))
    assert found.field == "spec.recovery.approximate.guards"
    assert words in str(found)


def test_a_swapped_pipeline_has_two_guards_for_each_end_unless_told_otherwise() -> None:
    def guards(data: dict[str, Any]) -> int:
        return spec.parse_training_job(data).to_job_config(JobUid("uid")).guards

    inner = {"parallelism": {"stages": 4, "ranksPerStage": 2}}
    assert guards(SMALLEST) == 0
    assert guards(swapped_with({})) == 2
    assert guards(swapped_with({"recovery": {"approximate": {"guards": 0}}})) == 0
    assert guards(swapped_with({"recovery": {"allowApproximate": True}})) == 2
    assert guards(swapped_with(inner)) == 0
    kept: dict[str, Any] = {"snapshots": {"enabled": True, "peers": 1}}
    assert guards(swapped_with(kept)) == 0, "jobs that exist were stored with none"
    asked: dict[str, Any] = {"recovery": {"approximate": {"guards": 2}}}
    assert guards(swapped_with(kept | asked)) == 2


@pytest.mark.parametrize("replicas", [4, 2, 1])
def test_guards_stay_what_they_are_when_the_job_is_scaled(replicas: int) -> None:
    """Their number cannot change in a running job, and that of replicas can."""
    scaled = {"parallelism": {"stages": 4, "replicas": replicas}}
    job = spec.parse_training_job(
        swapped_with(scaled | {"recovery": {"approximate": {"guards": 3}}})
    )
    assert job.to_job_config(JobUid("uid")).guards == 3


def test_two_stages_may_go_on_approximately_where_each_is_the_others_twin() -> None:
    two = {"parallelism": {"stages": 2}, "recovery": {"allowApproximate": True}}
    assert spec.parse_training_job(swapped_with(two))
    in_order = problem(swapped_with(two | {"pipeline": {"order": "InOrder"}}))
    assert "with 2 stages no stage has two neighbours" in str(in_order)


def test_two_stages_that_nobody_may_guard_are_not_made_anew() -> None:
    changes = {"parallelism": {"stages": 2, "ranksPerStage": 2}}

    def two(checkpoint: dict[str, Any] | None = None, **approximate: Any) -> dict[str, Any]:
        allowed = {"allowApproximate": True, "approximate": approximate}
        own = {"checkpoint": checkpoint} if checkpoint else {}
        return swapped_with({"recovery": allowed, **own} | changes)

    found = problem(two())
    assert found.field == "spec.recovery.allowApproximate"
    assert "with several ranks to a stage" in str(found)
    assert (
        "(checkpoint.everySteps) and approximateAfterLostSteps below approximate.staleSteps"
        in str(found)
    )
    assert problem(two({"everySteps": 5})).field == "spec.recovery.allowApproximate"
    for limit, is_used in ((None, False), (9, False), (8, True)):
        alone = two({"everySteps": 5}, staleSteps=9)
        alone["spec"]["recovery"]["approximateAfterLostSteps"] = limit
        if is_used:
            assert spec.parse_training_job(alone)
        else:
            assert problem(alone).field == "spec.recovery.allowApproximate"
    assert spec.parse_training_job(two(guards=0)), (
        "each stage has a like block for all of the other"
    )
    more = {"parallelism": changes["parallelism"] | {"stages": 4}}
    assert spec.parse_training_job(two() | {"spec": two()["spec"] | more})


def test_two_swapped_stages_with_snapshots_are_made_anew_only_with_guards_that_are_asked_for() -> (
    None
):
    """Beside snapshots there are none unless the job says so, and then neither end comes back."""

    def two(approximate: dict[str, Any], **others: Any) -> dict[str, Any]:
        recovery = {"allowApproximate": True, "approximate": approximate}
        kept = {"snapshots": {"enabled": True, "peers": 1}}
        return swapped_with({"parallelism": {"stages": 2}, "recovery": recovery, **kept, **others})

    found = problem(two({}))
    assert found.field == "spec.recovery.allowApproximate"
    assert "with snapshots there are no guards unless they are asked for" in found.message
    assert "set approximate.guards (2, or 0 if no stage has a kind of block" in found.message
    stale = two({"staleSteps": 9}, checkpoint={"everySteps": 5})
    assert problem(stale).field == "spec.recovery.allowApproximate", "all go back"
    stale["spec"]["recovery"]["approximateAfterLostSteps"] = 8
    by_default = two({}, checkpoint={"everySteps": 5})
    by_default["spec"]["recovery"]["approximateAfterLostSteps"] = 0
    for right in (two({"guards": 2}), two({"guards": 0}), stale, by_default):
        assert spec.parse_training_job(right)
    none = two({"staleSteps": 0}, checkpoint={"everySteps": 5})
    none["spec"]["recovery"]["approximateAfterLostSteps"] = 0
    assert problem(none).field == "spec.recovery.allowApproximate"
    without = two({}, snapshots={"enabled": False})
    assert spec.parse_training_job(without).to_job_config(JobUid("uid")).guards == 2
    off = two({}, recovery={"allowApproximate": False})
    assert spec.parse_training_job(off)


def test_auto_logs_gradients_in_a_swapped_pipeline() -> None:
    data = swapped_with({"snapshots": {"enabled": True, "peers": 1}})
    data["spec"]["training"] |= {"lanes": 1, "shardsPerLane": 2}
    snapshots = spec.parse_training_job(data).plan_snapshots()
    assert snapshots is not None
    assert not snapshots.boundary
    assert "in a swapped pipeline" in snapshots.log_reason
