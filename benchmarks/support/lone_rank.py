"""Makes the plan and the shape of a job of one rank, for benchmarks in a single process."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.base.ids import Incarnation, JobUid, QuorumId, RankId, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous

JOB = JobUid("bench")
LIFE = Incarnation("life")
QUORUM = QuorumId(id=1, nonce="bench")


def lone_plan(slot: Slot, hosts: tuple[Rendezvous, ...] = ()) -> Plan:
    """Return the plan of one rank.

    Args:
        slot: of the rank.
        hosts: where pods can be met; none in a job whose pods tell each other nothing.
    """
    return chain_plan((slot,), hosts)


def chain_plan(slots: Sequence[Slot], hosts: tuple[Rendezvous, ...]) -> Plan:
    """Return the plan of one replica with a rank for each stage.

    Args:
        slots: of the ranks, by stage.
        hosts: where pods can be met.
    """
    members = tuple(
        Member(
            index=stage,
            rank=RankId(replica=0, stage=stage),
            slot=slot,
            incarnation=LIFE,
            address="",
            since=1,
        )
        for stage, slot in enumerate(slots)
    )
    return Plan(
        job=JOB,
        quorum=QUORUM,
        planned=False,
        unplanned_id=1,
        method=Method.START,
        members=members,
        chains=(Chain(replica=0, cells=tuple(range(len(slots))), formed_in=QUORUM),),
        suppliers=(0,),
        all_reduce_stack=1,
        rendezvous=Rendezvous(pod=slots[0].pod, gather=""),
        reason="",
        hosts=hosts,
    )


def lone_shape(checkpoint_every_steps: int = 0) -> JobShape:
    """Return the shape of a job of one rank, which never ends."""
    return JobShape(
        lanes=1,
        shards_per_lane=1,
        replicas=1,
        min_replicas=1,
        stages=1,
        steps=1 << 30,
        seed=0,
        checkpoint_every_steps=checkpoint_every_steps,
    )
