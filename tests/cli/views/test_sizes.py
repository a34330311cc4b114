"""The table of what ranks hold and send."""

from dataclasses import replace

from mainstay_cli.views.sizes import MAX_ROWS, describe_sizes
from mainstay_core.base.shape import JobShape
from mainstay_core.job.sizes import llama_sizes
from mainstay_core.job.sizes.rank_sizes import even_shares, rank_sizes
from mainstay_core.job.sizes.snapshot_traffic import PodTraffic, describe_traffic

CONFIG = {"dim": 64, "layers": 4, "heads": 4, "kvHeads": 2, "hidden": 176, "sequence": 64}


def ranks_of(replicas, stages=1, inner=1, **config):
    shape = JobShape(
        lanes=replicas, shards_per_lane=2, replicas=replicas, min_replicas=1, stages=stages,
        ranks_per_stage=inner, steps=1, seed=0,
    )  # fmt: skip
    return [
        rank
        for index in range(inner)
        for rank in rank_sizes(
            llama_sizes.sizes_of({**CONFIG, **config}, inner, index, accumulates=False),
            shape,
            even_shares(shape),
            recompute=False,
        )
    ]


def test_lines_that_nobody_has_are_left_out():
    heading, row = describe_sizes(ranks_of(1))
    assert heading.split() == [
        "replica", "stage", "parameters", "masters", "moments", "gradients", "partials",
        "reduction", "activations", "memory", "sent",
    ]  # fmt: skip
    assert row.split()[:3] == ["0", "0", "217,664"]
    whole = describe_sizes(ranks_of(2, stages=2, inner=2, dtype="bfloat16"))
    for column in ("inner", "copy", "to stages", "to cells", "in cell"):
        assert column in whole[0]
    assert "to be made" not in whole[0]
    (first, *_) = ranks_of(1, stages=3)
    heading, row = describe_sizes([replace(first, making_bytes=5 << 20)])
    assert "memory  to be made" in heading
    assert "5.0 MiB" in row


def test_ranks_that_are_alike_share_a_line():
    (rank,) = ranks_of(1)
    alike = [replace(rank, replica=number) for number in (0, 1, 2, 5)]
    other = replace(rank, replica=3, partials_bytes=rank.partials_bytes + 1)
    rows = describe_sizes([*alike, other])[1:]
    assert [row.split()[0] for row in rows] == ["0-2,5", "3"]


def test_of_many_ranks_the_largest_of_each_position_is_shown():
    (rank,) = ranks_of(1)
    ranks = [replace(rank, replica=n, partials_bytes=n << 20) for n in range(MAX_ROWS + 1)]
    _, row, note = describe_sizes(ranks)
    assert row.split()[0] == "most"
    assert f"{MAX_ROWS:.1f} MiB" in row
    assert f"{MAX_ROWS + 1} ranks" in note


def test_what_pods_send_is_told_with_logs_and_without():
    traffic = PodTraffic(step_bytes=3 << 20, window_bytes=5 << 20, window=4, is_chosen=False)
    assert describe_traffic(traffic) == (
        "all pods together send each other 3.0 MiB of logs in each step, and 5.0 MiB of copies in "
        "each window of 4 steps"
    )
    chosen = describe_traffic(replace(traffic, is_chosen=True))
    assert "and up to 5.0 MiB of copies in each window, which has 4 steps at most" in chosen
    assert describe_traffic(replace(traffic, step_bytes=0)).endswith("logs stay in their pods")
