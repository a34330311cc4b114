"""Says which pods have stores of segments in a plan, and whether copies lack some."""

from __future__ import annotations

from collections import Counter

from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.copies import StorePod
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder


def store_addresses(plan: Plan) -> dict[PodUid, str]:
    """Return where each store of segments that a plan names listens, by its pod."""
    found = {host.pod: host.snapshots for host in plan.hosts if host.snapshots}
    return found | {other.pod: other.address for other in plan.other_stores}


def store_domains(plan: Plan) -> dict[PodUid, str]:
    """Return the failure domain of each pod with a store that a plan names, where it is known."""
    places = [(host.pod, host.domain) for host in plan.hosts if host.snapshots]
    places += [(other.pod, other.domain) for other in plan.other_stores]
    return {pod: domain for pod, domain in places if domain}


def plan_record_line(plan: Plan, pod: PodUid) -> tuple[Holder, ...]:
    """Return the stores to which a pod's store passes commits on.

    No trainer tells pods without a member any. Each gets them from the store of one pod with a
    member, which all serve about as many: by uid in turn. A pod whose members all join has no part
    in what the quorum before still commits while a planned plan is held already: it passes on only
    if all are such. Then those who leave are the last that know these commits, and their pods may
    be ended next: they pass them on as well, to the pods of those who join, too.
    """
    addresses = store_addresses(plan)
    others = sorted(other.pod for other in plan.other_stores)
    stores = sorted(host.pod for host in plan.hosts if host.snapshots)
    there = {member.slot.pod for member in plan.members if not member.joining}
    staying = [store for store in stores if store in there]
    mine = _dealt(others, staying or stores, pod)
    if not staying:
        leaving = sorted(addresses.keys() & {member.slot.pod for member in plan.outgoing})
        mine += _dealt(sorted(addresses.keys() - set(leaving)), leaving, pod)
    return tuple(Holder(pod=other, address=addresses[other]) for other in sorted({*mine}))


def _dealt(stores: list[PodUid], senders: list[PodUid], pod: PodUid) -> list[PodUid]:
    """Return the stores that a sender gets if they are dealt out in turn; none to another pod."""
    return stores[senders.index(pod) :: len(senders)] if pod in senders else []


def store_pods(plan: Plan, *, peers: int) -> list[StorePod]:
    """Return the pods with a store that a plan names, those without a member among them.

    One without a member takes no more copies than other pods have memory for: those of the members
    of one pod, of ``peers`` others, and of one more
    (:func:`mainstay_core.job.sizes.snapshot_sizes.store_bytes`).
    """
    stages: dict[PodUid, set[int]] = {}
    for member in plan.members:
        stages.setdefault(member.slot.pod, set()).add(member.rank.stage)
    num_members = Counter(member.slot.pod for member in plan.members)
    room = (2 + peers) * max(num_members.values(), default=1)
    domains = store_domains(plan)
    return [
        StorePod(
            pod=pod,
            domain=domains.get(pod, ""),
            stages=tuple(sorted(stages.get(pod, ()))),
            room=None if pod in stages else room,
        )
        for pod in sorted(store_addresses(plan))
    ]


def lacks_holders(plan: Plan, *, peers: int, domains: int) -> bool:
    """Return whether more stores than a plan names may let its copies lie better.

    That is so while there are fewer stores than a copy has holders, or fewer failure domains; or
    while, for some stage, no store is outside of it and of its neighbours, or no more than
    ``peers`` are outside of its neighbours. It takes one look at each member.
    """
    pods = store_pods(plan, peers=peers)
    if len(pods) <= peers or len({p.failure_domain for p in pods}) < min(domains, peers + 1):
        return True
    near: Counter[int] = Counter()
    beside: Counter[int] = Counter()
    for pod in pods:
        neighbours = {stage + step for stage in pod.stages for step in (-1, 1)}
        beside.update(neighbours)
        near.update(neighbours.union(pod.stages))
    return peers > 0 and any(
        near[stage] == len(pods) or len(pods) - beside[stage] <= peers
        for stage in range(plan.num_stages)
    )
