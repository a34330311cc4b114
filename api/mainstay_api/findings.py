"""Says what the findings of a job's checks come to: for its history, its page and its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mainstay_api.store_protocol import Store
from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.coordinator.names import named_by_pod, place_name
from mainstay_core.coordinator.state import CoordinatorState, is_gone
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.settings import Mode
from mainstay_core.wire.findings import MAX_NEWEST, FindingsPage, KeptFinding, ToldFinding

FINDING_CODE = "WrongResult"
"""Reason of the line in a job's history, and of the Event."""
MAX_IN_HISTORY = 1000
"""Findings of a job of which its history tells. A device that computes wrongly all the time would
fill the history with itself."""


def check_finding(state: CoordinatorState, finding: Finding) -> None:
    """Check that a finding is of a step and a pod that the job has.

    Raises:
        RemoteProtocolError: its step is not.
        UnregisteredPodError: its pod is not, or counts as gone.
    """
    if finding.step >= state.shape.steps:
        raise RemoteProtocolError(
            f"Finding.step: {finding.step} is none of the job's {state.shape.steps}"
        )
    pod = finding.slot.pod
    if state.pod(pod) is None or is_gone(state, pod):
        raise UnregisteredPodError(f"pod {pod} is unknown or counts as gone")


def with_names(state: CoordinatorState, told: Sequence[ToldFinding]) -> tuple[ToldFinding, ...]:
    """Return findings with the names of pods and nodes, as the job's history has them."""
    return tuple(
        replace(
            one,
            trainer=place_name(state, one.finding.slot),
            finding=replace(one.finding, reason=named_by_pod(state, one.finding.reason)),
        )
        for one in told
    )


def describe_findings(fresh: Sequence[ToldFinding]) -> str:
    """Return one sentence for findings that came together, the first one in full."""
    return fresh[0].describe() + (f"; and {len(fresh) - 1} more" if len(fresh) > 1 else "")


def read_findings(texts: Mapping[int, str | None], numbers: Mapping[str, str]) -> FindingsPage:
    """Return a job's findings from what the store has of them.

    Args:
        texts: JSON by place; None of one that was dropped meanwhile.
        numbers: ``verdict:`` and its name, or ``untold``: how many.
    """
    kept = [
        KeptFinding(place=place, told=codec.loads(ToldFinding, text))
        for place, text in sorted(texts.items())
        if text is not None
    ]
    counts = {
        name.removeprefix("verdict:"): int(number)
        for name, number in sorted(numbers.items())
        if name.startswith("verdict:")
    }
    untold = int(numbers.get("untold", 0))
    return FindingsPage(counts=counts, untold=untold, findings=tuple(kept))


async def fetch_newest(store: Store, state: CoordinatorState) -> FindingsPage | None:
    """Return how many findings a job has, with the newest; None where nothing is checked."""
    if state.config.dmr is Mode.OFF and not state.config.witness_every_steps:
        return None
    return await store.fetch_findings(state.config.job, newest=MAX_NEWEST)
