"""Pods of one job run one version of ours."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.observed import EndCause, ObservedPod, PodPhase, find_example


def pod(index: int, image: str, **fields: Any) -> ObservedPod:
    name = f"demo-{index}"
    return ObservedPod(uid=PodUid(name), name=name, index=index, agent_image=image, **fields)


def image_of(pods: list[ObservedPod]) -> str:
    """The image of a job's next pod; "ours:2" is the newest."""
    example = find_example(pods)
    return "ours:2" if example is None else example.agent_image


def test_a_new_job_gets_the_newest_version() -> None:
    assert image_of([]) == "ours:2"


def test_a_jobs_next_pod_is_like_those_that_it_has() -> None:
    assert image_of([pod(0, "ours:1"), pod(1, "ours:1")]) == "ours:1"


def test_of_several_versions_the_oldest_pods_counts() -> None:
    pods = [pod(0, "ours:2", created_at_s=20.0), pod(3, "ours:1", created_at_s=10.0)]
    assert image_of(pods) == "ours:1"
    assert image_of(pods[::-1]) == "ours:1"


def test_a_pod_that_is_told_to_end_is_met_by_its_successor() -> None:
    assert image_of([pod(0, "ours:1", terminating=True)]) == "ours:1"


@pytest.mark.parametrize(
    "gone",
    [
        {"phase": PodPhase.FAILED},
        {"phase": PodPhase.SUCCEEDED},
        {"stuck": "ErrImagePull"},
        {"terminating": True, "ended_as": EndCause.SUSPENDED},
    ],
)
def test_nobody_meets_a_pod_that_ended_or_cannot_start(gone: dict[str, Any]) -> None:
    assert image_of([pod(0, "ours:1", **gone)]) == "ours:2"


def test_a_pod_without_a_supervisor_says_nothing() -> None:
    assert image_of([pod(0, "")]) == "ours:2"
