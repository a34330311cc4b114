"""Says which pods have stores of segments in a plan, and whether copies lack some."""

from __future__ import annotations

from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.copies import StorePod
from mainstay_core.wire.plan import Plan


def store_addresses(plan: Plan) -> dict[PodUid, str]:
    """Return where each store of segments that a plan names listens, by its pod."""
    found = {host.pod: host.snapshots for host in plan.hosts if host.snapshots}
    return found | {other.pod: other.address for other in plan.other_stores}


def store_pods(plan: Plan) -> list[StorePod]:
    """Return the pods with a store that a plan names, those without a member among them."""
    stages: dict[PodUid, set[int]] = {}
    for member in plan.members:
        stages.setdefault(member.slot.pod, set()).add(member.rank.stage)
    hosts = [(host.pod, host.domain) for host in plan.hosts if host.snapshots]
    others = [(other.pod, other.domain) for other in plan.other_stores]
    return [
        StorePod(pod=pod, domain=domain, stages=tuple(sorted(stages.get(pod, ()))))
        for pod, domain in sorted([*hosts, *others])
    ]


def lacks_holders(plan: Plan, *, peers: int, domains: int) -> bool:
    """Return whether more stores than a plan names would let its copies lie better.

    That is so while there are fewer stores than a copy has holders, or fewer failure domains, or
    while some stage has members in all pods with a store.
    """
    pods = store_pods(plan)
    few = len(pods) <= peers or len({p.failure_domain for p in pods}) < min(domains, peers + 1)
    common = [set(pod.stages) for pod in pods]
    return few or (peers > 0 and bool(common) and bool(set.intersection(*common)))
