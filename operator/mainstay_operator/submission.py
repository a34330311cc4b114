"""Tells the api of a job: that it is there, what changed in it, where its nodes are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from mainstay_core.pool.observed import SeenNode, SeenPod
from mainstay_operator.api_client import ApiError, ApiLine
from mainstay_operator.resources import JobView
from mainstay_operator.state import Memory

RESTORE_S = 30.0
"""A store that lost a running job is restored by its supervisors; after so long the job is
submitted anew."""


async def submit(view: JobView, memory: Memory, api: ApiLine) -> None:
    """Make the job known, or what changed in it; what is refused is shown, not repeated.

    Raises:
        ApiError: the api was not reached, or is not able to.
    """
    if memory.submitted == view.generation:
        return
    try:
        await api.submit(view.uid, view.namespace, view.manifest)
        memory.refused = ""
    except ApiError as error:
        if not error.refused:
            raise
        memory.refused = str(error)
    memory.submitted = view.generation
    memory.wishes_at_s = 0.0


def note_unknown(memory: Memory, pods: Iterable[SeenPod]) -> None:
    """The api does not know the job: its supervisors restore it, else it is submitted anew."""
    now_s = time.time()
    if memory.refused:
        return
    memory.unknown_since_s = memory.unknown_since_s or now_s
    nobody = not any(p.ready for p in pods)
    if nobody or now_s - memory.unknown_since_s > RESTORE_S:
        memory.submitted = -1
        memory.unknown_since_s = 0.0


async def tell_topology(
    view: JobView,
    memory: Memory,
    api: ApiLine,
    *,
    pods: Iterable[SeenPod],
    nodes: Mapping[str, SeenNode] | None,
    again_s: float,
) -> None:
    """Tell where the nodes of pods are, before their supervisors come; and again, now and then,
    as the store may have been lost.

    Raises:
        ApiError: the api was not reached, or refused.
    """
    now_s = time.time()
    places = view.places(pods, nodes)
    late = now_s - memory.topology_at_s > again_s
    if places and (places != memory.topology or late):
        await api.tell_topology(view.uid, places)
        memory.topology, memory.topology_at_s = places, now_s
