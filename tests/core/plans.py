"""Plans and reports for the tests of the rank's decisions.

A trainer is named by one word, e.g. ``a``: the pod. Its first life is ``a.1``,
and a restarted one ``a.2`` runs on the same slot as another incarnation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous


def slot_of(life: str) -> Slot:
    return Slot(pod=PodUid(life.partition(".")[0]), index=0)


def life_of(member: Member) -> str:
    return str(member.incarnation)


def make_plan(
    chains: Mapping[int, Sequence[str]],
    *,
    followers: Sequence[tuple[str, int]] = (),
    ranks_per_stage: int = 1,
    lanes: int | None = None,
    shards_per_lane: int = 1,
    quorum: int = 1,
    nonce: str = "n",
    planned: bool = False,
    unplanned: int | None = None,
    since: Mapping[str, int] | None = None,
    joining: Sequence[str] = (),
    formed: Mapping[int, QuorumId] | None = None,
) -> Plan:
    """A plan of ``chains`` (replica: lives by position) and ``followers`` (life, position).

    Members are in the coordinator's order: by position, then replica, then followers.
    A type whose own replica is gone is supplied by the others in turn.
    """
    lanes = max(chains, default=0) + 1 if lanes is None else lanes
    seats = [
        (position, False, replica, life)
        for replica, lives in chains.items()
        for position, life in enumerate(lives)
    ]
    seats += [(position, True, 0, life) for life, position in followers]
    agreed = QuorumId(id=quorum, nonce=nonce)
    members = tuple(
        Member(
            index=index,
            rank=RankId(
                replica=None if is_follower else replica,
                stage=position // ranks_per_stage,
                inner=position % ranks_per_stage,
            ),
            slot=slot_of(life),
            incarnation=Incarnation(life),
            address=f"address-of-{life}",
            since=(since or {}).get(life, quorum),
            joining=life in joining,
        )
        for index, (position, is_follower, replica, life) in enumerate(sorted(seats))
    )
    index_of = {life_of(m): m.index for m in members}
    replicas = sorted(chains)
    suppliers = tuple(
        t // shards_per_lane
        if t // shards_per_lane in chains
        else replicas[t % len(replicas)]
        if replicas
        else 0
        for t in range(lanes * shards_per_lane)
    )
    return Plan(
        job=JobUid("job"),
        quorum=agreed,
        planned=planned,
        unplanned_id=quorum if unplanned is None else unplanned,
        method=Method.JOIN if planned else Method.MASK,
        members=members,
        chains=tuple(
            Chain(
                replica=replica,
                cells=tuple(index_of[life] for life in chains[replica]),
                formed_in=(formed or {}).get(replica, agreed),
            )
            for replica in replicas
        ),
        suppliers=suppliers,
        all_reduce_stack=max((suppliers.count(r) for r in replicas), default=0),
        rendezvous=Rendezvous(pod=PodUid("a"), gather="gather", store="store"),
        reason="a test's plan",
    )
