"""Measures what the size of a quorum costs one member: reading and judging what all others say.

    python benchmarks/quorum.py [--lanes 16 64] [--stages 4] [--types 4] [--rounds 30]

All of it is of values, without a socket: what each member does in a step (all votes) and in a
recovery (the plan, all settle reports). The figures are the processor time of one member's thread
in ms, the least of all rounds: other work on the machine hardly changes it. A quorum pays them once
for each of its members.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence

from mainstay_core.base import codec
from mainstay_core.base.digest import Digest
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.rank.settle import settle
from mainstay_core.rank.steps.step_plan import plan_step
from mainstay_core.rank.votes import judge
from mainstay_core.wire.plan import Chain, Member, Method, Partial, Plan, Rendezvous
from mainstay_core.wire.votes import Commit, SettleReport, TypeStat, Vote

BLOCKS = 2
"""Of a stage."""
VERSION = 100


def make_plan(lanes: int, stages: int, types: int) -> Plan:
    """Return a plan in which every lane has its replica, and every rank a pod."""
    quorum = QuorumId(id=7, nonce="4e4e4e4e")
    hosts = tuple(
        Rendezvous(pod=PodUid(f"job-{i}"), gather=f"10.0.{i // 256}.{i % 256}:40000")
        for i in range(lanes * stages)
    )
    members = tuple(
        Member(
            index=stage * lanes + lane,
            rank=RankId(replica=lane, stage=stage, inner=0),
            slot=Slot(pod=hosts[stage * lanes + lane].pod, index=0),
            incarnation=Incarnation(f"{stage * lanes + lane:032x}"),
            address=hosts[stage * lanes + lane].gather,
            since=1,
        )
        for stage in range(stages)
        for lane in range(lanes)
    )
    return Plan(
        job=JobUid("8d0f5f9e-6f1e-4b1c-8a7e-5d1a6a1f0c11"),
        quorum=quorum,
        planned=False,
        unplanned_id=quorum.id,
        method=Method.MASK,
        members=members,
        chains=tuple(
            Chain(
                replica=lane,
                cells=tuple(stage * lanes + lane for stage in range(stages)),
                formed_in=quorum,
            )
            for lane in range(lanes)
        ),
        suppliers=tuple(t // types for t in range(lanes * types)),
        all_reduce_stack=types,
        rendezvous=hosts[0],
        reason="a benchmark's plan",
        hosts=hosts,
    )


def digest(rng: random.Random) -> str:
    """Return a digest as text."""
    return Digest(rng.getrandbits(64), rng.getrandbits(64)).hex()


def make_votes(plan: Plan, types: int) -> list[Vote]:
    """Return a yes of every member; each supplies its own lane."""
    rng = random.Random(0)
    of_stage = [
        (tuple(rng.random() for _ in range(BLOCKS)), digest(rng), digest(rng))
        for _ in range(plan.num_stages)
    ]
    votes = []
    for member in plan.members:
        stage, lane = member.rank.stage, member.rank.replica
        assert lane is not None
        norms_sq, gradient, state = of_stage[stage]
        last = stage == plan.num_stages - 1
        stats = tuple(
            TypeStat(
                type=t,
                loss_sum=rng.random() if last else None,
                tokens=256 if last else None,
                data=digest(rng) if stage == 0 else None,
            )
            for t in range(lane * types, (lane + 1) * types)
        )
        votes.append(
            Vote(
                step=VERSION,
                attempt=0,
                ok=True,
                norms_sq=norms_sq,
                gradient=gradient,
                state=state,
                stats=stats,
                newest_plan=plan.quorum.id,
                newest_nonce=plan.quorum.nonce,
            )
        )
    return votes


def make_reports(plan: Plan, types: int) -> list[SettleReport]:
    """Return what all hold after a loss in the middle of a step: their lane's first types."""
    rng = random.Random(1)
    commit = Commit(
        step=VERSION - 1,
        norm=0.7,
        scale=0.001,
        tokens=4096,
        loss=2.5,
        data=digest(rng),
        data_total=digest(rng),
    )
    chain, states = digest(rng), [digest(rng) for _ in range(plan.num_stages)]
    return [
        SettleReport(
            index=member.index,
            valid=True,
            version=VERSION,
            certified_in="q6-3d3d3d3d",
            commit=commit,
            chain=chain,
            state=states[member.rank.stage],
            held=(
                Partial(
                    lane=member.rank.replica or 0,
                    first=(member.rank.replica or 0) * types,
                    last=(member.rank.replica or 0) * types + types // 2,
                ),
            ),
            held_in=6,
            settled=6,
            heal_address=member.address,
            pipeline=f"job/q1/r{member.rank.replica}",
            stage_group=f"job/q6/p{member.rank.stage}",
        )
        for member in plan.members
    ]


def least_ms(form: Callable[[], object], rounds: int) -> float:
    """Return the least processor time of some rounds; the first one warms up."""
    times = []
    form()
    for _ in range(rounds):
        began_s = time.thread_time()
        form()
        times.append(time.thread_time() - began_s)
    return min(times) * 1e3


def read(kind: type, texts: Sequence[bytes]) -> list[object]:
    """Return the messages of all members, as a trainer reads them."""
    return [codec.loads(kind, text) for text in texts]


def measure(lanes: int, stages: int, types: int, rounds: int) -> None:
    """Print the rows of one size."""
    plan = make_plan(lanes, stages, types)
    plan_text = codec.dumps(plan).encode()
    votes, reports = make_votes(plan, types), make_reports(plan, types)
    vote_texts = [codec.dumps(vote).encode() for vote in votes]
    report_texts = [codec.dumps(report).encode() for report in reports]
    parts: dict[str, Callable[[], object]] = {
        "a step: parse the votes' JSON": lambda: [json.loads(text) for text in vote_texts],
        "a step: read all votes": lambda: read(Vote, vote_texts),
        "a step: judge them": lambda: judge(plan, votes, 1.0, ""),
        "a step: who computes what": lambda: plan_step(plan, types),
        "a recovery: read the plan": lambda: codec.loads(Plan, plan_text),
        "a recovery: read all reports": lambda: read(SettleReport, report_texts),
        "a recovery: settle": lambda: settle(plan, types, reports),
    }
    for name, form in parts.items():
        print(f"| {len(plan.members)} | {name} | {least_ms(form, rounds):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--types", type=int, default=4, help="shard types of a lane")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print("| members | part | ms |\n| --- | --- | --- |")
    for lanes in args.lanes:
        measure(lanes, args.stages, args.types, args.rounds)


if __name__ == "__main__":
    main()
