"""The wire format, held to one file per message and format.

A golden file is what a peer that writes this format sends. A new field needs a default, so
that the old file still loads; add it to the example and to the newest golden file.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.codec import decode, dumps, encode
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import Hardware, Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import CheckRules, Mode, PlanName
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.job.protections import Protection
from mainstay_core.wire import (
    crashes,
    facts,
    findings,
    ledger,
    page,
    plan,
    recoveries,
    reinitialisation,
    routes,
    segments,
    stores,
    votes,
)
from mainstay_core.wire.facts import Heartbeat, PodRegistration, SlotStatus
from mainstay_core.wire.formats import UnknownFormatError
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry, PartialDigest
from mainstay_core.wire.plan import Method, OtherStore, Partial
from mainstay_core.wire.recoveries import Recovery, StageTimes
from mainstay_core.wire.votes import (
    Commit,
    DoubtedAccount,
    GuardedDigest,
    LastStatus,
    MadeType,
    SaveStatus,
    SettleReport,
    SnapshotStatus,
    TypeStat,
    Vote,
    WitnessAccount,
)
from mainstay_core.wire.windows import Measures, Popularity, WindowBasis

GOLDEN = Path(__file__).parent / "golden"

POD = PodUid("pod-a")
SLOT = Slot(pod=POD, index=1)
QUORUM = QuorumId(id=7, nonce="5eed")
LIFE = Incarnation("life-1")
TRAINER: dict[str, Any] = {"pod": POD, "slot": 1, "incarnation": LIFE}
DIFFER = "parameters of r0.s1.i0 on pod-a/1, f.s1.i0 on pod-b/0 differ from the rest of the stage"
RUN = Partial(lane=1, first=2, last=3)
COMMIT = Commit(
    step=4,
    norm=0.25,
    scale=0.0078125,
    tokens=128,
    loss=2.5,
    data="0" * 31 + "1",
    data_total="0" * 31 + "2",
)
FORK = reinitialisation.Fork(
    version=5,
    chain="0" * 31 + "3",
    made=reinitialisation.Reinitialisation(
        positions=(
            reinitialisation.MadePosition(
                stage=1,
                inner=1,
                blocks=(
                    reinitialisation.MadeBlock(
                        block="layers.0",
                        sources=(
                            reinitialisation.BlockSource(
                                kind=reinitialisation.SourceKind.NEIGHBOUR,
                                stage=0,
                                inner=1,
                                block="layers.1",
                                weight=0.25,
                            ),
                        ),
                    ),
                ),
            ),
        ),
        reason="stage 1 is made anew",
    ),
    lr_boost=1.1,
    boost_steps=100,
)
TOLD_FORK = reinitialisation.ToldFork(
    **{field.name: getattr(FORK, field.name) for field in dataclasses.fields(FORK)}
)
FORK_WITH_NORMS = dataclasses.replace(
    FORK,
    made=dataclasses.replace(
        FORK.made,
        positions=tuple(
            dataclasses.replace(
                place,
                blocks=tuple(
                    dataclasses.replace(block, norms_sq=(0.5, 1.5)) for block in place.blocks
                ),
            )
            for place in FORK.made.positions
        ),
    ),
)
TOLD_HISTORY = reinitialisation.ToldHistory(since=5, num_forks=1, newest=(FORK,), made=True)
RECORD = votes.seal_record(
    votes.CommitRecord(
        lineage=0,
        commit=COMMIT,
        certified_in="q7-5eed",
        chain="c" * 32,
        gradients=("g" * 32, "h" * 32),
        states=("s" * 32, "t" * 32),
    )
)
PLAN = make_plan(
    {0: ["a.1", "b.1"], 1: ["c.1", "d.2"]},
    followers=[("e.1", 1)],
    shards_per_lane=2,
    quorum=7,
    nonce="5eed",
    planned=True,
    unplanned=5,
    since={"a.1": 1, "b.1": 1},
    joining=["d.2"],
    formed={0: QuorumId(id=1, nonce="0ld")},
)
FINAL = FinalDigests(
    stage=1, version=9, params="p" * 32, masters="m" * 32, optimizer="o" * 32, data="d" * 32
)

CRASH = crashes.Crash(
    type="OSError",
    message="no such file",
    frames=("train.py:9 in main", "data.py:3 in read"),
    rank=RankId(replica=1, stage=0),
    quorum=QUORUM,
    step=4,
)

LINE = page.RecoveryLine(
    quorum="q7-5eed",
    method=Method.MASK,
    exact=True,
    fault="pod-a/1 ended",
    reason="every stage has a holder",
    from_step=4,
    lost_steps=1,
    started_at_s=1700000003.5,
    first_commit_after_s=0.5,
    slots=("pod-a/1",),
    detect_s=0.01,
)

REPLAYED = recoveries.Replayed(
    stage=1,
    inner=0,
    kind="gradients",
    first=2,
    last=3,
    version=4,
    planned_steps=2,
    steps=2,
    seconds=0.25,
    num_damaged=1,
)
KEY = segments.SegmentKey(lineage=0, position=1, unit=0, kind=segments.SegmentKind.STATE, version=2)
WINDOW = stores.WindowHeld(first=2, length=2)
KINDS = (stores.SegmentBytes(kind="state", num_segments=3, size_bytes=12288),)
SUMMARY = stores.SnapshotSummary(
    window=WINDOW,
    in_flight=stores.WindowHeld(first=4, length=2),
    lag=1,
    kinds=KINDS,
    memory_bytes=65536,
    used_bytes=12288,
    fullest="demo-0",
    fullest_used_bytes=12288,
    fullest_memory_bytes=65536,
    num_stores=1,
    num_positions=2,
    num_covered=1,
    num_survive_pod=1,
    num_survive_domain=1,
    replay_steps=2,
    num_discarded=1,
    num_refused=3,
    short_of="pod demo-0: a segment does not fit",
    coverage="the loss of 1 pod is not survived: demo-0 (s1)",
    log="boundary",
    ordering="Popularity",
    log_reason="spec.snapshots.replay says Gradients",
)

FOUND = findings.ToldFinding(
    finding=Finding(
        step=4,
        slot=SLOT,
        rank=RankId(replica=1, stage=0),
        in_pass=Pass.WEIGHT,
        shard_type=2,
        micro_batch=0,
        block="layers.3",
        ordinal=4,
        operator="aten.mm",
        num_elements=1,
        verdict=Verdict.PRIMARY_HIT,
        remedy=Remedy.REPAIR,
        reason="the third execution equals the checker",
    ),
    incarnation=LIFE,
    number=3,
    at_s=1700000000.5,
    untold=2,
)
FINDINGS = findings.FindingsPage(
    counts={"primary": 4},
    untold=2,
    findings=(findings.KeptFinding(place=4, told=FOUND),),
)
EXAMPLES: dict[str, Any] = {
    "told-finding": FOUND,
    "findings-page": FINDINGS,
    "job-page-with-findings": page.JobPage(
        state=JobPhase.RUNNING,
        replicas=page.ReplicaCounts(whole=1, wanted=2, min=1, lanes=4, followers=1),
        training=page.Training(step=4, steps=60),
        recovery=page.RecoveryOverview(),
        checkpoint=page.CheckpointState(),
        dmr_coverage="naive 100 %",
        findings=FINDINGS,
    ),
    "job-page-with-snapshots": page.JobPage(
        state=JobPhase.RUNNING,
        replicas=page.ReplicaCounts(whole=1, wanted=2, min=1, lanes=4, followers=1),
        training=page.Training(step=4, steps=60),
        recovery=page.RecoveryOverview(),
        checkpoint=page.CheckpointState(),
        snapshots=True,
        stores=SUMMARY,
    ),
    "store-status": stores.StoreStatus(
        pod=POD,
        address="127.0.0.2:2",
        memory_bytes=65536,
        used_bytes=12288,
        kinds=KINDS,
        lineage=0,
        keep_from=2,
        windows=(WINDOW,),
        units=(
            stores.UnitsHeld(
                position=1,
                num_units=4,
                units=(segments.Run(first=0, last=2),),
                states=(2, 3),
                gradients=(segments.Run(first=2, last=4),),
            ),
        ),
        judged=(segments.Run(first=2, last=4),),
        num_refused=3,
        short_of="a segment does not fit",
        num_discarded=1,
        checked=stores.StoreCheck(
            number=1,
            num_segments=2,
            size_bytes=8192,
            seconds=0.5,
            lineage=0,
            segments=(
                stores.CheckedSegments(
                    key=KEY,
                    unit_name="layer.0",
                    versions=(segments.Run(first=2, last=3),),
                    sums="00000001ffffffff",
                ),
            ),
            changed=(KEY,),
        ),
    ),
    "store-status-of-boundaries": stores.StoreStatus(
        pod=POD,
        memory_bytes=65536,
        used_bytes=12288,
        units=(
            stores.UnitsHeld(
                position=1,
                num_units=2,
                units=(segments.Run(first=0, last=1),),
                states=(3,),
                computes=(segments.Run(first=2, last=2),),
            ),
        ),
        judged=(segments.Run(first=2, last=4),),
        logs=(
            segments.LogsHeld(
                position=1,
                kind=segments.SegmentKind.INPUT_GRADIENT,
                voted_in="q7-beef",
                first_step=2,
                last_step=4,
                first_type=0,
                last_type=3,
                micro_batches=2,
            ),
        ),
        certified=(stores.CommittedSteps(quorum="q7-beef", first=2, last=4),),
    ),
    "store-reply": stores.StoreReply(check=2),
    "store-reply-with-doubts": stores.StoreReply(
        check=3,
        doubts=stores.Doubts(
            check=2,
            keys=(
                segments.SegmentKey(
                    lineage=0, position=1, unit=2, kind=segments.SegmentKind.STATE, version=4
                ),
            ),
        ),
    ),
    "position-coverage": stores.PositionCoverage(
        position=1,
        stage=1,
        inner=0,
        is_covered=False,
        why_not="no store holds unit 3",
        num_members=1,
        num_copies=0,
        replay_steps=0,
        pods=("demo-0",),
        domains=("rack-1",),
        stretch=segments.Run(first=0, last=1),
    ),
    "damaged-copy": stores.DamagedCopy(
        pod="demo-0", key=KEY, unit_name="layer.0", why="it differs from 2 other copies"
    ),
    "plan": dataclasses.replace(
        PLAN,
        faults_fired=("f1",),
        created_at_s=1700000000.5,
        hosts=(PLAN.rendezvous,),
        replicas_wanted=2,
        suspend_wanted=True,
        outgoing=(dataclasses.replace(PLAN.members[0], incarnation=Incarnation("a.0")),),
    ),
    "partial": RUN,
    "vote": Vote(
        step=4,
        attempt=1,
        ok=False,
        problem="a check",
        norms_sq=(1.5, 2.25),
        gradient="g" * 32,
        state="s" * 32,
        stats=(TypeStat(type=2, loss_sum=3.5, tokens=64, data="d" * 32), TypeStat(type=3)),
        newest_plan=8,
        newest_nonce="beef",
        checkpoint_safe=3,
        checkpoint_nonce="beef",
        checkpoint_busy=True,
        durable=2,
    ),
    "vote-with-statistics": Vote(
        step=4,
        attempt=1,
        ok=True,
        norms_sq=(1.5,),
        gradient="g" * 32,
        state="s" * 32,
        stats=(
            TypeStat(type=2, statistics=(3, 0, 5)),
            TypeStat(type=3, loss_sum=3.5, tokens=64, statistics=(1, 2, 5)),
        ),
        newest_plan=8,
        newest_nonce="beef",
    ),
    "vote-with-wrong-types": Vote(
        step=4,
        attempt=0,
        ok=False,
        norms_sq=(1.5,),
        gradient="g" * 32,
        state="s" * 32,
        stats=(),
        newest_plan=8,
        newest_nonce="beef",
        bad=(2, 5),
    ),
    "vote-with-a-witness": Vote(
        step=4,
        attempt=0,
        ok=True,
        norms_sq=(1.5,),
        gradient="g" * 32,
        state="s" * 32,
        stats=(),
        newest_plan=8,
        newest_nonce="beef",
        witness=WitnessAccount(
            type=2, forward=("f" * 32, "0" * 32), backward=("b" * 32,), weights=("e" * 32,)
        ),
    ),
    "vote-with-guards": Vote(
        step=4,
        attempt=0,
        ok=True,
        norms_sq=(1.5,),
        gradient="g" * 32,
        state="s" * 32,
        stats=(),
        newest_plan=8,
        newest_nonce="beef",
        guarded=(GuardedDigest(stage=0, masters="a" * 32, rest="b" * 32),),
    ),
    "vote-with-snapshots": Vote(
        step=4,
        attempt=0,
        ok=True,
        norms_sq=(1.5,),
        gradient="g" * 32,
        state="s" * 32,
        stats=(),
        newest_plan=8,
        newest_nonce="beef",
        snapshots=SnapshotStatus(
            logged=True,
            copied=3,
            measures=Measures(
                copy_bytes_per_s=2_000_000,
                host_bytes_per_s=1_500_000,
                network_bytes_per_s=0,
                step_us=250_000,
            ),
        ),
    ),
    "segment-header": segments.SegmentHeader(
        key=segments.SegmentKey(
            lineage=0, position=1, unit=2, kind=segments.SegmentKind.STATE, version=4
        ),
        job=JobUid("job-1"),
        fingerprint="f" * 32,
        unit_name="blocks.2",
        num_units=3,
        nonce="5eed",
        window=3,
        num_instalments=2,
        size_bytes=1024,
        digest="d" * 32,
        place=1,
    ),
    "holder": segments.Holder(pod=POD, address="10.0.0.1:4000"),
    "store-report": segments.StoreReport(
        pod=POD,
        address="10.0.0.1:4000",
        lineage=0,
        units=(
            segments.UnitHeld(
                position=1,
                unit=2,
                unit_name="blocks.2",
                num_units=3,
                states=(2, 4),
                gradients=(segments.Run(first=2, last=5),),
            ),
        ),
        records=(RECORD,),
        bad=(
            segments.BadSegment(
                key=segments.SegmentKey(
                    lineage=0, position=1, unit=0, kind=segments.SegmentKind.GRADIENT, version=3
                ),
                pod=POD,
            ),
        ),
    ),
    "segment-header-of-boundary-log": segments.SegmentHeader(
        key=segments.SegmentKey(
            lineage=0,
            position=1,
            unit=0,
            kind=segments.SegmentKind.ACTIVATION,
            version=4,
            shard_type=0,
            micro_batch=2,
        ),
        job=JobUid("job-1"),
        fingerprint="f" * 32,
        unit_name="",
        num_units=3,
        nonce="5eed",
        window=3,
        num_instalments=2,
        size_bytes=1024,
        digest="d" * 32,
    ),
    "store-report-with-boundary-logs": segments.StoreReport(
        pod=POD,
        address="10.0.0.1:4000",
        lineage=0,
        is_full=True,
        units=(
            segments.UnitHeld(
                position=1,
                unit=2,
                unit_name="blocks.2",
                num_units=3,
                states=(4,),
                computes=(segments.Run(first=2, last=3),),
            ),
        ),
        logs=(
            segments.LogsHeld(
                position=1,
                kind=segments.SegmentKind.INPUT_GRADIENT,
                voted_in="q7-5eed",
                first_step=2,
                last_step=5,
                first_type=0,
                last_type=3,
                micro_batches=2,
            ),
        ),
    ),
    "told-stores": segments.ToldStores(
        reports=(
            segments.StoreReport(pod=POD, address="10.0.0.1:4000", lineage=0),
            segments.StoreReport(
                pod=POD, address="", lineage=0, problem="it did not answer within 5 s"
            ),
        ),
    ),
    "plan-with-other-stores": dataclasses.replace(
        PLAN, other_stores=(OtherStore(pod=POD, address="10.0.0.1:4000", domain="node-1"),)
    ),
    "plan-that-went-back": dataclasses.replace(
        PLAN,
        lineage=1,
        method=plan.Method.RESTART,
        members=tuple(dataclasses.replace(m, clean_from=12) for m in PLAN.members),
        checks=CheckRules(mode=Mode.FULL, plan=PlanName.AUTO, profile_steps=3, memory_bytes=9),
        voided=(plan.Voided(quorum=7, lineage=1, version=12),),
    ),
    "last-status": LastStatus(checkpoint_safe=3, checkpoint_nonce="beef", durable=2, state="5a"),
    "save-status": SaveStatus(checkpoint_safe=3, checkpoint_nonce="beef", durable=2),
    "commit": COMMIT,
    "commit-with-norms": dataclasses.replace(COMMIT, norms_sq=(0.25, 4.0)),
    "plan-with-a-fork": dataclasses.replace(
        PLAN,
        lineage=2,
        method=plan.Method.APPROXIMATE,
        fork=reinitialisation.ForkOrder(positions=(1, 3), since=1),
    ),
    "plan-with-a-fork-and-its-rules": dataclasses.replace(
        PLAN,
        lineage=2,
        method=plan.Method.APPROXIMATE,
        fork=reinitialisation.ForkOrder(
            positions=(1,),
            since=1,
            how=ApproximateConfig(
                after_lost_steps=3, weights="Uniform", lr_boost=1.25, boost_steps=100
            ),
        ),
    ),
    "fact-settled-after-a-fork": facts.Settled(
        **TRAINER, quorum=QUORUM, step=5, durable=2, history=TOLD_HISTORY
    ),
    "fact-finished-of-an-approximate-job": facts.Finished(
        **TRAINER,
        quorum=QUORUM,
        step=9,
        final=dataclasses.replace(FINAL, history="f" * 32, approximate_since=5),
    ),
    "lineage-page": reinitialisation.LineagePage(
        exact=False,
        approximate_since=5,
        course="approximate since step 5",
        num_forks=1,
        forks=(TOLD_FORK,),
        allowed=True,
        after_lost_steps=3,
        permitted_by="alice",
        stages=(
            reinitialisation.Prospect(stage=0, possible=False, reason="an end"),
            reinitialisation.Prospect(stage=1, possible=True, reason="stages 0 and 2"),
        ),
    ),
    "lineage-page-with-a-permission": reinitialisation.LineagePage(
        exact=True,
        course="exact",
        ahead=reinitialisation.Permission(
            who="alice", at_s=1767225600.5, stages=(0, 1, 2), after_lost_steps=100
        ),
    ),
    "told-fork-with-what-came-of-it": dataclasses.replace(
        TOLD_FORK,
        made=FORK_WITH_NORMS.made,
        outcome=reinitialisation.ForkOutcome(
            quorum=QUORUM,
            states=(
                reinitialisation.PlaceDigest(stage=0, inner=1, masters="a" * 32),
                reinitialisation.PlaceDigest(stage=1, inner=1, masters="b" * 32),
            ),
        ),
    ),
    "settle-report-with-a-weighed-fork": SettleReport(
        index=2, valid=True, version=5, history=(FORK_WITH_NORMS,)
    ),
    "settle-report-with-a-fork": SettleReport(index=2, valid=True, version=5, history=(FORK,)),
    "commit-with-statistics": dataclasses.replace(COMMIT, statistics=(4, 2, 10)),
    "settle-report": SettleReport(
        index=2,
        valid=True,
        lineage=0,
        version=5,
        certified_in="q7-5eed",
        commit=COMMIT,
        chain="c" * 32,
        state="s" * 32,
        held=(RUN,),
        held_in=7,
        refused_in=6,
        mark="q7-5eed",
        settled=7,
        heal_address="127.0.0.2:4000",
        durable=4,
        pipeline="job/q7-5eed/r0",
        stage_group="job/q6-5eed/p1",
    ),
    "settle-report-with-snapshots": SettleReport(
        index=2,
        valid=True,
        basis=WindowBasis(
            version=5,
            bytes_per_s=1_500_000,
            step_us=250_000,
            popularity=Popularity(running=(3, 0), ordered_by=(70, 58)),
        ),
        last_gradient="a" * 32,
        last_masters="b" * 32,
        mark_gradient="d" * 32,
    ),
    "settle-report-with-wrong-types": SettleReport(
        index=2,
        valid=True,
        version=5,
        held=(RUN,),
        held_in=7,
        made=(MadeType(type=4, quorum=7, replica=1), MadeType(type=5, quorum=8, replica=0)),
        bad=(5,),
    ),
    "settle-report-of-a-doubt": SettleReport(
        index=2,
        valid=True,
        version=5,
        bad=(4,),
        doubted=(
            DoubtedAccount(
                quorum=7,
                attempt=1,
                replica=0,
                slot=SLOT,
                account=WitnessAccount(type=4, forward=("f" * 32,), weights=("e" * 32,)),
            ),
        ),
    ),
    "settle-report-of-hardware": SettleReport(
        index=2,
        valid=True,
        version=5,
        bad=(4,),
        doubted=(
            DoubtedAccount(
                quorum=7,
                attempt=1,
                replica=0,
                slot=SLOT,
                account=WitnessAccount(type=4, weights=("e" * 32,)),
                hardware=Hardware(node="node-1", accelerator="GPU-5f3a"),
            ),
        ),
    ),
    "settle-report-of-a-guard": SettleReport(
        index=2,
        valid=True,
        version=5,
        guarded=(
            GuardedDigest(stage=0, masters="a" * 32, rest="b" * 32),
            GuardedDigest(stage=2, masters="c" * 32, rest="d" * 32),
        ),
    ),
    "settle-report-without-state": SettleReport(index=3, valid=False, refused_in=7),
    "ledger-entry": LedgerEntry(
        step=4,
        stage=1,
        quorum=QUORUM,
        gradient="g" * 32,
        masters="m" * 32,
        data="d" * 32,
        loss=2.5,
        norm=0.25,
        tokens=128,
        step_s=0.125,
        replicas=2,
        attempt=1,
        partials=(PartialDigest(partial=RUN, slot=SLOT, digest="p" * 32),),
        committed_at_s=1700000001.5,
        copy_wait_s=0.0625,
    ),
    "ledger-entry-that-corrects": LedgerEntry(
        step=5,
        stage=1,
        quorum=QUORUM,
        gradient="g" * 32,
        masters="m" * 32,
        data="d" * 32,
        loss=2.5,
        norm=0.25,
        tokens=128,
        step_s=0.125,
        replicas=2,
        clean=(ledger.CleanDevice(slot=SLOT, clean_from=4),),
        corrects=True,
    ),
    "ledger-entry-of-an-approximate-job": LedgerEntry(
        step=5,
        stage=1,
        quorum=QUORUM,
        gradient="g" * 32,
        masters="m" * 32,
        data="d" * 32,
        loss=2.5,
        norm=0.25,
        tokens=128,
        step_s=0.125,
        replicas=2,
        history="f" * 32,
        approximate_since=5,
    ),
    "ledger-entry-of-the-first-step-after-a-fork": LedgerEntry(
        step=5,
        stage=1,
        quorum=QUORUM,
        gradient="g" * 32,
        masters="m" * 32,
        data="d" * 32,
        loss=2.5,
        norm=0.25,
        tokens=128,
        step_s=0.125,
        replicas=2,
        history="f" * 32,
        approximate_since=5,
        forked=ledger.ForkedState(fork="e" * 32, masters="b" * 32),
    ),
    "pod-registration": PodRegistration(
        pod=POD,
        name="worker-0",
        address="127.0.0.2",
        gather="127.0.0.2:4001",
        store="127.0.0.2:4002",
        num_slots=2,
        domain="rack-1",
        pid=123,
        supervisor="5f3a",
    ),
    "fact-trainer-up": facts.TrainerUp(
        **TRAINER, fingerprint={"torch": "2.13.0"}, observed_at_s=1700000002.5
    ),
    "fact-trainer-up-on-a-gpu": facts.TrainerUp(**TRAINER, accelerator="GPU-5f3a"),
    "fact-trainer-up-with-an-outline": facts.TrainerUp(
        **TRAINER,
        outline=(
            (reinitialisation.BlockOutline(name="embedding", kind="e" * 32),),
            (
                reinitialisation.BlockOutline(
                    name="layers.0",
                    kind="f" * 32,
                    rule=reinitialisation.Rule.COPY,
                    copied=("norm.weight",),
                ),
            ),
        ),
    ),
    "fact-trainer-down": facts.TrainerDown(**TRAINER, restarting=True, evidence="signal 9"),
    "fact-trainer-down-with-a-crash": facts.TrainerDown(
        **TRAINER, restarting=True, evidence="OSError: no such file", crash=CRASH
    ),
    "fact-pod-gone": facts.PodGone(pod=POD, evidence="its node is lost"),
    "fact-parked": facts.Parked(
        **TRAINER,
        quorum=QUORUM,
        step=4,
        suspects=(Slot(pod=PodUid("pod-b"), index=0),),
        evidence="a reset",
    ),
    "fact-parked-of-who-is-doubted": facts.Parked(
        **TRAINER,
        quorum=QUORUM,
        step=4,
        evidence="replicas 0, 1 have computed a type differently",
        cause=facts.Cause.RESULT,
        doubted=(SLOT, Slot(pod=PodUid("pod-b"), index=0)),
    ),
    "fact-named": facts.Named(
        **TRAINER, quorum=QUORUM, step=4, evidence="computed wrongly: pod-a/0 (deterministic)"
    ),
    "fact-parked-with-a-cause": facts.Parked(
        **TRAINER,
        quorum=QUORUM,
        step=4,
        evidence="the copy has another digest",
        cause=facts.Cause.HEAL,
        sources=(SLOT, Slot(pod=PodUid("pod-b"), index=0)),
        was_told=True,
    ),
    "fact-parked-of-who-differs": facts.Parked(
        **TRAINER,
        quorum=QUORUM,
        step=4,
        differing=(SLOT, Slot(pod=PodUid("pod-b"), index=0)),
        evidence=f"member 3: a check; {DIFFER}",
    ),
    "fact-adopted": facts.Adopted(
        **TRAINER, quorum=QUORUM, step=4, reached=5, evidence="step 4 from all"
    ),
    "fact-settled": facts.Settled(**TRAINER, quorum=QUORUM, step=4, durable=2),
    "fact-settled-by-a-replay": facts.Settled(
        **TRAINER, quorum=QUORUM, step=4, durable=2, replayed=REPLAYED
    ),
    "fact-leaving": facts.Leaving(pod=POD, evidence="told to end by SIGTERM", grace_s=30.0),
    "fact-finished": facts.Finished(**TRAINER, quorum=QUORUM, step=9, final=FINAL),
    "fact-failed": facts.Failed(**TRAINER, evidence="no module named x"),
    "fact-failed-with-a-crash": facts.Failed(
        **TRAINER, evidence="computing step 4: OSError: no such file", crash=CRASH
    ),
    "fact-checks": facts.Checks(
        **TRAINER,
        quorum=QUORUM,
        step=5,
        stage=1,
        plan="Auto",
        shares="P 38 %, inter 40 %, naive 22 %",
        evidence="planned from 3 steps",
    ),
    "fact-missed": facts.Missed(
        **TRAINER,
        quorum=QUORUM,
        step=5,
        fault="fault-0",
        evidence="the nearest names there are aten.mm",
    ),
    "fact-state-refused": facts.StateRefused(
        **TRAINER,
        quorum=QUORUM,
        step=5,
        stage=1,
        inner=0,
        evidence="it is of lineage 0, and others have begun lineage 1 since",
    ),
    "fact-checkpoint": facts.Checkpoint(**TRAINER, quorum=QUORUM, complete=True, durable=4),
    "fact-checkpoint-late": facts.Checkpoint(
        **TRAINER, quorum=QUORUM, complete=False, durable=4, evidence="the disk is full"
    ),
    "fact-named-by-another": facts.Named(
        **TRAINER, quorum=QUORUM, step=9, evidence="why", since=4, device=SLOT
    ),
    "fact-paused": facts.Paused(**TRAINER, quorum=QUORUM, step=9, durable=9),
    "heartbeat": Heartbeat(
        pod=POD,
        slots=(
            SlotStatus(
                index=1,
                incarnation=LIFE,
                pid=124,
                phase="voting",
                waiting=True,
                step=4,
                progress=77,
                quorum=QUORUM,
            ),
            SlotStatus(index=0),
        ),
        quorum=QUORUM,
    ),
    "recovery": Recovery(
        fault="pod-a/1 (r1.s0.i0) ended",
        method=Method.MASK,
        exact=True,
        reason="every stage has a holder",
        quorum=QUORUM,
        from_step=4,
        slots=(SLOT,),
        started_at_s=1700000003.5,
        times=StageTimes(detect_s=0.01, decide_s=0.002),
        first_commit_after_s=0.5,
        lost_steps=0,
        redone_steps=0,
        done=True,
    ),
    "recovery-by-replay": Recovery(
        fault="pod-a/1 (r0.s1.i0) ended",
        method=Method.REPLAY,
        exact=True,
        reason="stage 1 has no living cell",
        quorum=QUORUM,
        from_step=4,
        replays=(REPLAYED,),
    ),
    "job-page": page.JobPage(
        uid="u",
        name="demo",
        namespace="training",
        state=JobPhase.RECOVERING,
        reason="waits",
        recovering=True,
        quorum=QUORUM,
        all_reduce_stack=2,
        replicas=page.ReplicaCounts(whole=1, wanted=2, min=1, lanes=4, followers=1),
        pods=page.PodNumbers(wanted=5, living=4, serving=3, leaving=1, spares_wanted=1),
        training=page.Training(step=4, steps=60, loss=2.5, step_seconds=0.5, goodput=0.75),
        crash=crashes.ToldCrash(crash=CRASH, trainer="demo-1/1", at_s=1700000002.5, times=2),
        recovery=page.RecoveryOverview(
            active=(LINE,), last=LINE, counts={"mask": 2}, lost_steps=1, approximate=0
        ),
        checkpoint=page.CheckpointState(every_steps=10, step=2, problem="the disk is full"),
        held_back=1,
        created_at_s=1700000000.5,
        entry="blocks",
        protections=(Protection("mask", True, "the others go on"),),
    ),
    "job-page-of-an-approximate-job": page.JobPage(
        state=JobPhase.RUNNING,
        replicas=page.ReplicaCounts(whole=1, wanted=1),
        training=page.Training(step=6, steps=60, approximate_since=5),
        recovery=page.RecoveryOverview(
            last=dataclasses.replace(LINE, exact=False, approximate_since=5), approximate=1
        ),
        checkpoint=page.CheckpointState(),
        made_anew="step 5: stage 1 is made anew",
    ),
    "job-page-with-a-refused-state": page.JobPage(
        state=JobPhase.RUNNING,
        replicas=page.ReplicaCounts(whole=1, wanted=1),
        training=page.Training(step=6, steps=60, approximate_since=5),
        recovery=page.RecoveryOverview(),
        checkpoint=page.CheckpointState(),
        refused_states=(
            reinitialisation.RefusedState(
                trainer="demo-1/1",
                incarnation=LIFE,
                place="stage 1",
                step=5,
                reason="it is of lineage 0, and others have begun lineage 1 since",
                at_s=1700000002.5,
            ),
        ),
    ),
    "pods-page": page.PodsPage(
        state=JobPhase.RUNNING,
        num_pods=3,
        leaving=(POD,),
        ending=(POD,),
        pods=(page.PodLine(uid=POD, name="demo-0", address="127.0.0.2", serving=True),),
    ),
    "known-job": page.KnownJob(
        uid=JobUid("0f3a9c21-7d55-4c1e-9a70-1f0d2b6e8c11"), namespace="research"
    ),
    "recovery-that-is-approximate": Recovery(
        fault="trainer pod-a/1 (r0.s1.i0) ended: signal 9",
        method=Method.APPROXIMATE,
        exact=False,
        reason="stage 1 has no exact source; it is made anew from other stages; alice allowed it",
        quorum=QUORUM,
        from_step=5,
        approximate_since=5,
        allowed_by="alice",
    ),
    "recovery-of-who-differs": Recovery(
        fault=f"a collective failed, told by pod-a/1: {DIFFER}",
        method=Method.REFORM,
        exact=True,
        reason="nobody is confirmed gone: the same members meet again",
        quorum=QUORUM,
        from_step=4,
        differing=(SLOT, Slot(pod=PodUid("pod-b"), index=0)),
    ),
}


def newest(name: str) -> Path:
    """The golden file of a message's newest format."""
    return max(GOLDEN.glob(f"v*/{name}.json"), key=lambda path: int(path.parent.name[1:]))


def read(example: Any, data: Any) -> Any:
    """What a program of today understands."""
    if isinstance(example, facts.Fact):
        return facts.read_fact(data)
    return decode(type(example), data)


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_message_is_sent_as_its_golden_file_says(name: str) -> None:
    written = json.loads(newest(name).read_text())

    assert json.loads(dumps(EXAMPLES[name])) == written
    assert written.get("format", 1) == int(newest(name).parent.name[1:])


@pytest.mark.parametrize("name", ["vote", "settle-report", "plan", "job-page", "heartbeat"])
def test_a_job_without_snapshots_sends_not_one_byte_of_them(name: str) -> None:
    """Their golden files are those of the version before, which knew no snapshots."""
    sent = dumps(EXAMPLES[name])

    assert json.loads(sent) == json.loads((GOLDEN / "v1" / f"{name}.json").read_text())
    assert not any(
        word in sent for word in ("snapshot", "instalments", "basis", "domain", "stores")
    )


@pytest.mark.parametrize("name", ["fact-settled", "recovery"])
def test_what_was_not_replayed_is_told_without_a_byte_of_replays(name: str) -> None:
    assert "replay" not in dumps(EXAMPLES[name])


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("v*/*.json")), ids=lambda p: str(p)[-40:])
def test_what_any_format_says_is_understood_alike(path: Path) -> None:
    assert read(EXAMPLES[path.stem], json.loads(path.read_text())) == EXAMPLES[path.stem]


def test_a_pod_without_a_store_says_so_to_an_api_of_the_version_before() -> None:
    registration = dataclasses.replace(EXAMPLES["pod-registration"], store="")
    sent = json.loads(dumps(registration))

    assert sent.pop("store") == ""
    assert decode(facts.PodRegistration, sent) == registration


@pytest.mark.parametrize("name", ["fact-parked", "recovery", "job-page", "pods-page"])
def test_a_format_that_nobody_knows_yet_is_refused_by_name(name: str) -> None:
    data = encode(EXAMPLES[name])
    known = data["format"]
    data["format"] = known + 1
    told = f"comes in format {known + 1}, known here are 1 to {known}"
    with pytest.raises(UnknownFormatError, match=told):
        read(EXAMPLES[name], data)
    for nothing in ("2", 0, True):
        with pytest.raises(RemoteProtocolError, match="is no format"):
            read(EXAMPLES[name], {**data, "format": nothing})


@pytest.mark.parametrize("name", ["job-page", "pods-page"])
def test_an_api_of_the_version_before_names_no_format(name: str) -> None:
    data = encode(EXAMPLES[name])
    del data["format"]
    assert read(EXAMPLES[name], data) == EXAMPLES[name]


def test_one_recovery_that_cannot_be_read_takes_no_other_along() -> None:
    known = recoveries.show_recovery(EXAMPLES["recovery"])
    newer = {**known, "format": recoveries.RECOVERY_FORMAT + 1}
    listed = routes.read_recoveries([known, {**known, "method": "rebuild"}, newer, known])

    assert listed.read == (EXAMPLES["recovery"],) * 2
    method, form = listed.unread
    told = "recovery 2 of 4: Recovery.method: 'rebuild' is not one of 'start', "
    assert method.startswith(told)
    assert form.startswith("recovery 3 of 4: Recovery comes in format 3")
    with pytest.raises(RemoteProtocolError, match="expected a list"):
        routes.read_recoveries({"detail": "no"})


def test_a_page_may_show_a_method_that_only_a_newer_api_knows() -> None:
    data = encode(EXAMPLES["job-page"])
    data["recovery"]["active"] = [{**encode(LINE), "method": "rebuild"}]
    (line,) = read(EXAMPLES["job-page"], data).recovery.active
    assert line.method == "rebuild"


@pytest.mark.parametrize("name", ["job-page", "pods-page"])
def test_a_phase_that_only_a_newer_api_knows_is_refused_by_name(name: str) -> None:
    data = encode(EXAMPLES[name]) | {"state": "dreaming"}
    with pytest.raises(RemoteProtocolError, match=r"Page\.state: 'dreaming' is not"):
        read(EXAMPLES[name], data)


@pytest.mark.parametrize("data", [[], {}, {"kind": "up"}, {"kind": "pod-gone"}, {"kind": ["x"]}])
def test_what_is_no_fact_is_refused(data: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=r"Fact\.kind|PodGone\.pod"):
        facts.read_fact(data)


def test_a_trainer_cannot_speak_for_its_pod() -> None:
    with pytest.raises(RemoteProtocolError, match="a trainer cannot tell pod-gone"):
        facts.read_rank_fact(encode(EXAMPLES["fact-pod-gone"]))


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_newer_peer_may_say_more_anywhere(name: str) -> None:
    def extended(data: Any) -> Any:
        if isinstance(data, dict):
            return {k: extended(v) for k, v in data.items()} | {"from_the_future": [1]}
        return [extended(item) for item in data] if isinstance(data, list) else data

    example = EXAMPLES[name]
    data = extended(encode(example))
    if name.startswith("fact-trainer-up"):
        del data["fingerprint"]["from_the_future"]  # free text, not fields
    if name.startswith("job-page"):
        del data["recovery"]["counts"]["from_the_future"]  # by method
    for page_of in (data, data.get("findings")):
        if isinstance(page_of, dict) and "untold" in page_of and "counts" in page_of:
            del page_of["counts"]["from_the_future"]  # by verdict

    assert read(example, data) == example


def test_every_message_has_a_golden_file() -> None:
    kinds: set[type] = set()

    def collect(value: Any) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kinds.add(type(value))
            for field in dataclasses.fields(value):
                collect(getattr(value, field.name))
        elif isinstance(value, tuple):
            for item in value:
                collect(item)

    for example in EXAMPLES.values():
        collect(example)
    wanted = {
        kind
        for room in (
            plan,
            reinitialisation,
            votes,
            segments,
            stores,
            ledger,
            recoveries,
            crashes,
            page,
            findings,
        )
        for kind in vars(room).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == room.__name__
    }
    assert wanted | set(typing.get_args(facts.Fact)) <= kinds
    assert {p.stem for p in GOLDEN.glob("v*/*.json")} == set(EXAMPLES)


def test_what_follows_from_a_plans_members_is_no_part_of_it() -> None:
    """It is found once, when it is first asked for."""
    plan = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, ranks_per_stage=2)
    untouched, text = (
        make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, ranks_per_stage=2),
        dumps(plan),
    )

    assert plan.ranks_per_stage == 2
    assert [[m.index for m in members] for members in plan.positions] == [[0, 1], [2, 3]]

    assert plan == untouched
    assert hash(plan) == hash(untouched)
    assert dumps(plan) == text
    fewer = dataclasses.replace(plan, members=plan.members[:2])
    assert [len(members) for members in fewer.positions] == [2]
    assert fewer.ranks_per_stage == 1


def test_a_plan_knows_its_members_by_slot_and_life() -> None:
    member = PLAN.members[0]

    assert PLAN.member_of(member.slot, member.incarnation) == member
    assert PLAN.member_of(member.slot, LIFE) is None
    assert PLAN.chain_of(member.index) == PLAN.chains[0]
    follower = next(m for m in PLAN.members if m.rank.replica is None)
    assert PLAN.chain_of(follower.index) is None
    assert PLAN.num_stages == 2
    assert [m.index for m in PLAN.position_members(1)] == [2, 3, 4]
    assert [[m.index for m in members] for members in PLAN.positions] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("slot", ["\u00b2", "9" * 5000, "-1", "x"])
def test_a_sentence_of_format_1_that_names_no_slot_says_nothing(slot: str) -> None:
    evidence = f"parameters of r0.s1.i0 on pod-a/{slot} differ from the rest of the stage"
    told = {"kind": "parked", "pod": "p", "slot": 0, "incarnation": "i", "evidence": evidence}
    assert facts.read_rank_fact(told).differing == ()  # type: ignore[union-attr]


def test_a_sentence_of_format_1_takes_no_longer_to_read_than_the_longest_one() -> None:
    told = {**encode(EXAMPLES["fact-parked"]), "evidence": "parameters of " * 1_000_000}
    del told["format"]
    with pytest.raises(RemoteProtocolError, match=r"Parked\.evidence: has a length"):
        facts.read_rank_fact(told)
