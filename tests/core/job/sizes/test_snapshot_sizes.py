"""The memory of pods for snapshots: what it must hold, and which settings are refused."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.core.segments.keys import JOB, header_of, key_of, record_of

from mainstay_core.base.bounds import MAX_COPY_BYTES
from mainstay_core.base.dealing import divide_by_weight
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.base.shape import JobShape
from mainstay_core.job import spec
from mainstay_core.job.config import LAG_STEPS
from mainstay_core.job.model_sizes import MOE
from mainstay_core.job.sizes import snapshot_sizes
from mainstay_core.job.sizes.block_sizes import BlockSizes, ModelSizes
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.llama_sizes import padded, sizes_of
from mainstay_core.job.stages import stage_blocks
from mainstay_core.job.types import show_quantity, whole_quantity
from mainstay_core.segments.evictions import needed_in
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.snapshots.copies import CopyDemand, StorePod, plan_copies
from mainstay_core.snapshots.units import Position
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.segments import SegmentKind

SMALL = {"dim": 16, "layers": 6, "heads": 4, "kvHeads": 2, "hidden": 32}
LLAMA = "mainstay_train.models.llama:workload"


def job_of(snapshots: dict[str, Any] | None, **sections: Any) -> spec.TrainingJob:
    return spec.parse_training_job(
        {
            "apiVersion": spec.API_VERSION,
            "kind": spec.KIND,
            "metadata": {"name": "demo"},
            "spec": {
                "training": {"steps": 60, "lanes": 4},
                "parallelism": {"stages": 2},
                "workload": {"entrypoint": LLAMA, "config": SMALL},
            }
            | ({} if snapshots is None else {"snapshots": snapshots})
            | copy.deepcopy(sections),
        }
    )


def problem(snapshots: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(InvalidSpecError) as caught:
        job_of(snapshots, **sections).check_beginning()
    return str(caught.value)


def shape_of(**changes: Any) -> JobShape:
    values = {
        "lanes": 4, "shards_per_lane": 2, "replicas": 4, "min_replicas": 1, "stages": 2,
        "steps": 1, "seed": 0,
    }  # fmt: skip
    return JobShape(**(values | changes))


# --- What a pod keeps -------------------------------------------------------------------------


def keep(
    model: ModelSizes,
    shape: JobShape,
    window: int,
    peers: int,
    num_domains: int,
    replicas: int,
    lag: int = LAG_STEPS,
) -> dict[str, int]:
    """Deal out all that is kept by the rules by which trainers do.

    Args:
        model: on ranks of an inner mesh of one.
        shape: of the job.
        window: steps of a window.
        peers: other pods that keep each part.
        num_domains: failure domains, which pods lie in in turn.
        replicas: that are there.
        lag: of each window.

    Returns:
        Bytes by pod.
    """
    cuts = stage_blocks([b.cost for b in model.blocks], shape.stages)
    ranks = [(r, s) for r in range(shape.replicas) for s in range(shape.stages)]
    pod_of = {rank: PodUid(f"p{n // shape.ranks_per_pod:03d}") for n, rank in enumerate(ranks)}
    pod_of = {rank: pod for rank, pod in pod_of.items() if rank[0] < replicas}
    stores = [
        StorePod(
            pod=pod,
            domain=f"d{number % num_domains}",
            stages=tuple(sorted({s for (_, s), p in pod_of.items() if p == pod})),
        )
        for number, pod in enumerate(sorted(set(pod_of.values())))
    ]
    shares = {(Position(stage=s, inner=0), pod) for (_, s), pod in pod_of.items()}
    demands = [CopyDemand(position=p, pod=pod, size_bytes=1) for p, pod in sorted(shares)]
    plan = plan_copies(stores, demands, peers=peers, domains=min(2, peers + 1))
    holders = {(c.position.stage, c.pod): c.holders for c in plan.copies}
    held = {store.pod: 0 for store in stores}
    for stage, cut in enumerate(cuts):
        width = [4 * sum(map(padded, model.blocks[i].parameters)) for i in cut]
        states = [w + model.blocks[i].moments_bytes for w, i in zip(width, cut, strict=True)]
        steps = snapshot_sizes.max_log_steps(window, lag)
        for replica, units in enumerate(divide_by_weight(states, range(replicas))):
            size = sum(2 * states[unit] + steps * width[unit] for unit in units)
            for pod in holders[stage, pod_of[replica, stage]]:
                held[pod] += size
    return held


@pytest.mark.parametrize("seed", range(200))
def test_no_pod_keeps_more_than_is_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    stages, replicas = rng.randrange(1, 9), rng.randrange(1, 7)
    config = {
        **SMALL,
        "layers": rng.randrange(max(2, stages - 2), 16),
        "hidden": 16 * rng.randrange(1, 9),
        "vocab": rng.choice([256, 1024, 4096]),
    }
    model = sizes_of(config, 1, 0, accumulates=False)
    shape = shape_of(
        lanes=replicas,
        replicas=replicas,
        stages=stages,
        ranks_per_pod=rng.choice([n for n in (1, 2, 4) if n <= stages * replicas]),
    )
    num_pods = -(-stages * replicas // shape.ranks_per_pod)
    window, peers = rng.randrange(1, 9), rng.randrange(0, min(4, num_pods))
    least = snapshot_sizes.store_bytes([model], shape, window=window, peers=peers)
    expected = snapshot_sizes.expected_store_bytes([model], shape, window=window, peers=peers)
    assert 0 < expected < least
    num_domains = rng.randrange(1, 4)
    for there in {replicas, max(1, replicas - 1)}:
        held = keep(model, shape, window, peers, num_domains, there)
        assert max(held.values()) <= least
    held = keep(model, shape, window, peers, num_domains, replicas, lag=0)
    assert max(held.values()) <= expected


def block_of(num_parameters: int) -> BlockSizes:
    return BlockSizes(
        name="all", cost=1.0, parameters=(num_parameters,), moments_bytes=8 * num_parameters,
        output_bytes=0, kept_bytes=0, pending_bytes=0, plain_forward_bytes=0, forward_bytes=0,
        backward_bytes=0, weights_bytes=0, constant_bytes=0,
    )  # fmt: skip


def model_of(*blocks: BlockSizes) -> ModelSizes:
    return ModelSizes(inner=0, width_bytes=4, tokens_bytes=8, targets_bytes=8, blocks=blocks)


def play(
    blocks: Sequence[BlockSizes],
    turns: Sequence[int],
    length: int,
    lags: Sequence[int],
    memory: int,
) -> int:
    """Keep windows and logs in a store's index, as the trainer of a lone pod does.

    Args:
        blocks: a unit each.
        turns: of each unit, the instalment that copies it.
        length: of a window.
        lags: of each window, the steps from its last instalment to the commit that completes it.
        memory: of the store; nothing may be refused, and nothing may go to make room.

    Returns:
        The most bytes that are taken at a time.
    """
    index, step, most = SegmentIndex(JOB, memory), 0, 0
    for lag in lags:
        window = Window(first=step, length=length)
        is_complete = False
        while not is_complete:
            due = [
                (SegmentKind.STATE, unit, 12 * sum(block.parameters))
                for unit, block in enumerate(blocks)
                if window.number_of(step) == turns[unit]
            ]
            due += [
                (SegmentKind.GRADIENT, unit, 4 * sum(block.parameters))
                for unit, block in enumerate(blocks)
            ]
            for kind, unit, size in due:
                key = key_of(step, unit, kind)
                room = index.take_room(size, needed_in(key, window.first))
                assert room is not None
                index.put(header_of(key, size, window=window.first), room)
            most = max(most, memory - index.free_bytes)
            index.record(record_of(step))
            is_complete = step >= window.last + lag
            step += 1
        index.keep_from(0, window.first)
    assert (index.num_refused, index.num_evicted) == (0, 0)
    return most


@pytest.mark.parametrize("seed", range(20))
def test_stores_come_to_the_bound_in_the_worst_course_and_to_what_is_expected_in_the_best(
    seed: int,
) -> None:
    """Of all courses of three windows, each complete within the lag that there is room for."""
    rng = random.Random(seed)
    length = rng.randrange(1, 5)
    blocks = [block_of(1024 * rng.randrange(32, 256)) for _ in range(rng.randrange(length, 6))]
    turns = [rng.randrange(length) for _ in blocks]
    model, shape = model_of(*blocks), shape_of(lanes=1, replicas=1, stages=1)

    def expected(lag: int) -> int:
        return snapshot_sizes.expected_store_bytes(
            [model], shape, window=length, peers=0, lag=lag
        ) - gaps(lag)

    def gaps(lag: int) -> int:
        """Segments begin at whole pages; here they also end there."""
        segments = 2 + snapshot_sizes.max_log_steps(length, lag)
        return segments * len(blocks) * snapshot_sizes.PAGE_BYTES

    bound = snapshot_sizes.store_bytes([model], shape, window=length, peers=0)
    memory = bound + bound // snapshot_sizes.MARGIN
    courses = list(itertools.product(range(LAG_STEPS + 1), repeat=3))
    held = {c: play(blocks, turns, length, c, memory // PAGE_BYTES * PAGE_BYTES) for c in courses}

    assert max(held.values()) == held[(LAG_STEPS,) * 3] == bound - gaps(LAG_STEPS)
    assert min(held.values()) == held[0, 0, 0] == expected(0)
    for lag in range(LAG_STEPS + 1):
        assert held[(lag,) * 3] == expected(lag)
    assert bound - gaps(LAG_STEPS) > 0.95 * bound


def test_a_single_unit_is_kept_as_the_docstring_says() -> None:
    block = block_of(1 << 20)
    model = model_of(block)
    shape = shape_of(lanes=1, replicas=1, stages=1)
    # Two states of 12 MiB, and 2 x 3 + 4 gradients of 4 MiB; each begins at a page of its own.
    least = ((24 + 40) << 20) + 12 * snapshot_sizes.PAGE_BYTES
    assert snapshot_sizes.store_bytes([model], shape, window=3, peers=0) == least
    # With Auto a window has as many steps as there are units.
    model = replace(model, blocks=(replace(block, num_units=3),))
    lines = (2 * snapshot_sizes.KINDS + 10) * snapshot_sizes.ALIGNMENT_BYTES
    least += 2 * 12 * snapshot_sizes.PAGE_BYTES + lines
    assert snapshot_sizes.store_bytes([model], shape, window=0, peers=0) == least


@pytest.mark.parametrize(("num_units", "replicas", "most"), [(1, 4, 1), (4, 4, 4), (4, 3, 2)])
def test_what_is_expected_deals_out_whole_units(num_units: int, replicas: int, most: int) -> None:
    """Of four units three cells get two at most, and of one unit a cell gets all."""
    model = model_of(replace(block_of(1 << 20), num_units=num_units))

    def expected(replicas: int) -> int:
        shape = shape_of(lanes=replicas, replicas=replicas, stages=1)
        return snapshot_sizes.expected_store_bytes([model], shape, window=1, peers=0)

    assert expected(replicas) == expected(1) // most


def test_more_peers_steps_or_ranks_in_a_pod_take_more_and_more_replicas_less() -> None:
    model = sizes_of({**SMALL, "layers": 30}, 1, 0, accumulates=False)

    def least(window: int = 4, peers: int = 1, **shape: Any) -> int:
        changed = shape_of(**{"lanes": 16, "replicas": 16} | shape)
        return snapshot_sizes.store_bytes([model], changed, window=window, peers=peers)

    assert least() < least(window=5)
    assert least() < least(peers=2)
    assert least() < least(ranks_per_pod=2)
    assert least() > least(replicas=16, lanes=16, stages=4)
    assert least() < least(replicas=8)


# --- What reaches the pods ---------------------------------------------------------------------


def test_without_snapshots_pods_are_told_of_none() -> None:
    assert job_of(None).to_job_config(JobUid("u")).snapshots is None
    assert job_of({"peers": 16}).to_job_config(JobUid("u")).snapshots is None


def test_auto_has_a_quarter_more_than_the_least_that_is_accepted() -> None:
    config = job_of({"enabled": True}).to_job_config(JobUid("u")).snapshots
    assert config is not None
    assert (config.num_instalments, config.peers, config.domains) == (0, 2, 2)
    assert (config.ordering, config.decay) == ("Popularity", 1 << 15)
    least = int(config.memory_bytes / 1.25)
    told = problem({"enabled": True, "memory": least - 5})
    assert told.startswith(f"spec.snapshots.memory: is {least - 5}, but a pod keeps ")
    named = told.partition("use at least ")[2]
    accepted = job_of({"enabled": True, "memory": named}).plan_snapshots()
    assert accepted is not None
    assert accepted.memory_bytes == whole_quantity(named)


@pytest.mark.parametrize(
    ("snapshots", "sections", "words"),
    [
        ({"window": 1025}, {}, "snapshots.window: is 1025, must be at most 1024 steps, or Auto"),
        # Embedding, six layers and head lie on two stages.
        ({"window": 6}, {}, "snapshots.window: is 6, but no stage has more than 4 units of which"),
        ({"window": 6}, {}, "use at most 4, or Auto"),
        (
            {"window": 2},
            {"parallelism": {"stages": 8}},
            "snapshots.window: is 2, but no stage has more than 1 unit of which a step could copy",
        ),
        (
            {"ordering": "CapacityAware"},
            {"workload": {"entrypoint": MOE}},
            "snapshots.ordering: is CapacityAware, but the experts of the built-in mixture have no",
        ),
        (
            {"ordering": "SoftCount"},
            {"workload": {"entrypoint": MOE}},
            "spec.workload.config.counts to probabilities, or use Popularity",
        ),
        ({"peers": 8}, {}, "snapshots.peers: is 8, but the job has 8 pods, spares included, so"),
        (
            {},
            {"parallelism": {"stages": 2, "replicas": 1, "ranksPerPod": 2}},
            "has 1 pod, spares included, so each has 0 beside it; use at most 0, or more spares",
        ),
        ({"peers": 11}, {"spares": {"replicas": 3}}, "is 11, but the job has 11 pods"),
        ({}, {"protection": {"domains": 9}}, "protection.domains: is 9, but the job has 8 pods"),
        (
            {},
            {"workload": {"entrypoint": "mine:model"}},
            "snapshots.memory: is Auto, but how much memory the model of mine:model takes is not",
        ),
        ({"memory": "0"}, {"workload": {"entrypoint": "mine:model"}}, "use at least 1Mi"),
        ({"memory": "2Ti"}, {}, "is 2Ti, which makes 2.0 TiB of a pod; use at most 1.0 TiB"),
        ({}, {"parallelism": {"stages": 9}}, "spec.parallelism.stages: stages is 9 but the model"),
        (
            {},
            {"workload": {"entrypoint": LLAMA, "config": {"layer": 3}}},
            "spec.workload.config.layer: is unknown",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_would_be_right(
    snapshots: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    assert words in problem({"enabled": True} | snapshots, **sections)


def test_a_model_of_ones_own_is_kept_in_the_memory_that_is_given() -> None:
    job = job_of({"enabled": True, "memory": "6G"}, workload={"entrypoint": "mine:model"})
    config = job.plan_snapshots()
    assert config is not None
    assert config.memory_bytes == 6 * 10**9 < MAX_COPY_BYTES


def test_an_amount_is_judged_by_as_many_replicas_as_there_are_lanes_since_it_cannot_change() -> (
    None
):
    """`kubectl scale` passes the API server: whoever refuses the rest has lost a running job."""
    deep = {"workload": {"entrypoint": LLAMA, "config": SMALL | {"layers": 30}}}
    degrees = {"training": {"steps": 60, "lanes": 8}, "spares": {"replicas": 3}}

    def kept(replicas: int, memory: str) -> spec.TrainingJob:
        parallelism = {"stages": 2, "replicas": replicas}
        return job_of(
            {"enabled": True, "memory": memory}, parallelism=parallelism, **deep, **degrees
        )

    told = problem(
        {"enabled": True, "memory": "1Ki"},
        parallelism={"stages": 2, "replicas": 2},
        **deep,
        **degrees,
    )
    least = told.rpartition("use at least ")[2]
    words = []
    for replicas in (8, 7, 4, 1):
        job = kept(replicas, least)
        config = job.plan_snapshots()
        assert config is not None
        assert config.memory_bytes == whole_quantity(least)
        words.append(
            snapshot_sizes.describe_shortage(job.spec.snapshots, job.spec.workload, job.shape)
        )
    assert words[0] == ""
    assert words[1].startswith(
        f"spec.snapshots.memory: is {least}, but with 7 replicas a pod keeps "
    )
    assert words[3].startswith(
        f"spec.snapshots.memory: is {least}, but with 1 replica a pod keeps "
    )
    enough = words[3].partition("use ")[2].partition(" ")[0]
    job = kept(1, enough)
    assert not snapshot_sizes.describe_shortage(job.spec.snapshots, job.spec.workload, job.shape)


def test_a_window_may_have_a_step_for_each_unit_of_the_largest_stage() -> None:
    """Another stage may have fewer: some of its steps copy nothing then."""
    mixture = {"entrypoint": MOE, "config": SMALL | {"experts": 5, "activeExperts": 2}}
    model = built_in_sizes(MOE, mixture["config"], 1, 0, accumulates=False)
    for workload, stages in (
        (mixture, 4),
        (mixture, 2),
        ({"entrypoint": LLAMA, "config": SMALL}, 3),
    ):
        told = problem(
            {"enabled": True, "window": 1000}, workload=workload, parallelism={"stages": stages}
        )
        most = int(told.rpartition("use at most ")[2].partition(",")[0])
        kept = {"enabled": True, "window": most}
        assert job_of(kept, workload=workload, parallelism={"stages": stages}).plan_snapshots()
        if workload is mixture:
            cuts = stage_blocks([b.cost for b in model.blocks], stages)
            units = [sum(model.blocks[i].num_units for i in cut) for cut in cuts]
            assert min(units) < most == max(units)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("7", 7), ("1500m", 2), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 3 << 29),
        ("2e3", 2000), ("0.1", 1), ("3Ei", 3 << 60), ("12M", 12_000_000),
    ],
)  # fmt: skip
def test_amounts_are_read_as_kubernetes_reads_them(text: str, number: int) -> None:
    assert whole_quantity(text) == number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (7, "7"), (1000, "1k"), (1024, "1Ki"), (3 << 29, "1536Mi"), (8 << 30, "8Gi"),
        (6 * 10**9, "6G"), (12_000_000, "12M"), (10**9 + 1, "1000000001"),
    ],
)  # fmt: skip
def test_amounts_are_shown_as_users_write_them(number: int, text: str) -> None:
    assert show_quantity(number) == text
    assert whole_quantity(text) == number
