"""The fault language beyond ranks and steps; tests/core/job/test_spec.py has its basics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import RankId
from mainstay_core.base.shape import JobShape
from mainstay_core.dmr.flips import Execution, Flip, StatePart, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.faults import files
from mainstay_core.faults.points import During, FaultAction, FaultPoint, View

SHAPE = JobShape(lanes=3, shards_per_lane=1, replicas=3, min_replicas=1, stages=2, steps=30, seed=1)
RANK = {"replica": 1, "stage": 0}


def entry(**changes: Any) -> dict[str, Any]:
    given = {"at": {"step": 4, "phase": "reduce"}, "target": RANK, "action": "kill-trainer"}
    return {key: value for key, value in (given | changes).items() if value is not None}


def parse(*entries: dict[str, Any]) -> tuple[FaultPoint, ...]:
    return files.parse_faults(list(entries), SHAPE, num_spares=1)


def refusal(*entries: object, **job: Any) -> str:
    with pytest.raises(InvalidSpecError) as caught:
        files.parse_more(list(entries), files.Job(shape=SHAPE, num_spares=1, **job))
    return str(caught.value)


def test_a_process_of_the_control_plane_can_be_hit_at_a_step() -> None:
    (fault,) = parse(
        entry(at={"step": 4}, target={"process": "redis"}, action="stop", forSeconds=2)
    )
    assert (fault.process, fault.action, fault.for_s) == ("redis", FaultAction.STOP, 2.0)
    assert not fault.is_due(3, View())
    # Whoever watches the job from outside may miss a step.
    assert fault.is_due(7, View())
    assert not fault.matches(4, RankId(replica=1, stage=0), "REDUCE")


def test_a_slow_rank_says_how_slow_and_for_how_long() -> None:
    (fault,) = parse(entry(action="slow", factor=3, delayMs=5, steps=4))
    assert (fault.factor, fault.slow_ms, fault.num_steps) == (3.0, 5.0, 4)


def test_a_fault_during_a_recovery_waits_for_a_plan_that_knows_of_the_other() -> None:
    _, fault = parse(
        entry(id="a"),
        entry(at={"during": "heal", "of": "a"}),
    )
    rank = RankId(replica=1, stage=0)
    assert (fault.during, fault.of) == (During.HEAL, "a")
    assert not fault.matches(9, rank, "HEAL", View())
    assert fault.matches(9, rank, "HEAL", View(fired=("a",)))
    assert not fault.matches(9, rank, "FORWARD", View(fired=("a",)))


def test_during_mask_is_the_interrupted_step_in_a_quorum_that_nobody_planned() -> None:
    _, fault = parse(entry(id="a"), entry(at={"during": "mask", "of": "a", "phase": "vote"}))
    rank = RankId(replica=1, stage=0)
    assert fault.matches(4, rank, "VOTE", View(fired=("a",), planned=False))
    assert not fault.matches(4, rank, "VOTE", View(fired=("a",), planned=True))
    assert not fault.matches(4, rank, "REDUCE", View(fired=("a",), planned=False))


def test_after_a_fault_means_once_all_replicas_are_back() -> None:
    _, fault = parse(entry(id="a"), entry(at={"after": "a", "step": 6, "phase": "reduce"}))
    rank = RankId(replica=1, stage=0)
    assert not fault.matches(7, rank, "REDUCE", View(fired=("a",), whole=False))
    assert not fault.matches(5, rank, "REDUCE", View(fired=("a",)))
    assert not fault.matches(7, rank, "REDUCE", View())
    assert fault.matches(7, rank, "REDUCE", View(fired=("a",)))
    # Not every fault leads to a new plan: one that is over will do.
    assert fault.matches(7, rank, "REDUCE", View(over=("a",)))


def test_with_a_fault_means_its_step_or_if_late_its_recovery() -> None:
    _, fault = parse(entry(id="a"), entry(at={"with": "a", "phase": "vote"}))
    rank = RankId(replica=1, stage=0)
    assert fault.matches(4, rank, "VOTE", View())
    assert not fault.matches(5, rank, "VOTE", View())
    assert fault.matches(5, rank, "VOTE", View(fired=("a",), planned=False, whole=False))


def test_with_a_fault_of_a_recovery_only_that_one_says_when() -> None:
    *_, fault = parse(
        entry(id="a"),
        entry(id="b", at={"during": "settle", "of": "a"}),
        entry(id="c", at={"with": "b"}, target={"replica": 2, "stage": 0}),
    )
    rank = RankId(replica=2, stage=0)
    assert not any(fault.matches(step, rank, "FORWARD", View(fired=("a",))) for step in range(30))
    assert fault.matches(4, rank, "FORWARD", View(fired=("a", "b")))


def test_without_a_phase_neither_settling_nor_serving_is_meant() -> None:
    (fault,) = parse(entry(at={"step": 4}))
    assert not fault.matches(4, RankId(replica=1, stage=0), "SETTLE")
    assert not fault.matches(4, RankId(replica=1, stage=0), "SERVE")


def test_a_running_job_takes_faults_for_its_next_step_by_default() -> None:
    job = files.Job(shape=SHAPE, num_spares=0, at_step=12)
    (fault,) = files.parse_more([entry(at=None)], job)
    assert (fault.id, fault.step, fault.soon) == ("injected-0", 12, True)
    assert not fault.matches(11, RankId(replica=1, stage=0), "FORWARD")
    assert fault.matches(15, RankId(replica=1, stage=0), "FORWARD")


def test_only_a_local_run_takes_faults_on_processes() -> None:
    flush = entry(target={"process": "redis"}, action="flush", at={"step": 4})
    for local in (True, False):
        job = files.Job(shape=SHAPE, num_spares=0, local=local)
        if local:
            assert files.parse_more([flush], job)[0].process == "redis"
        else:
            with pytest.raises(InvalidSpecError, match=r"target\.process: is for local runs"):
                files.parse_more([flush], job)


def test_faults_survive_the_wire() -> None:
    faults = parse(
        entry(id="a"),
        entry(at={"during": "mask", "of": "a"}, action="slow", factor=2),
        entry(at={"step": 3}, target={"process": "api"}, action="kill"),
        flip(operator=5, execution="both"),
    )
    assert codec.loads(tuple[FaultPoint, ...], codec.dumps(faults)) == faults


def flip(at: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    place = {"element": 7, "bit": 30} | changes
    place = {key: value for key, value in place.items() if value is not None}
    return entry(action="flip", at=at or {"step": 4, "phase": "forward"}, flip=place)


def test_a_flip_needs_no_more_than_its_bit_and_is_of_the_first_operator_then() -> None:
    (fault,) = parse(flip())
    assert fault.flip == Flip(in_pass=Pass.FORWARD, element=7, bit=30)


def test_a_flip_names_pass_type_micro_batch_block_operator_output_and_execution() -> None:
    at = {"step": 4, "phase": "backward"}
    place: dict[str, Any] = {"pass": "weight", "type": 2, "microBatch": 0, "block": 1, "output": 1}
    (fault,) = parse(flip(at, **place, operator="aten.mm", execution="checker"))
    assert fault.flip == Flip(
        in_pass=Pass.WEIGHT,
        shard_type=2,
        micro_batch=0,
        block=1,
        operator="aten.mm",
        output=1,
        element=7,
        bit=30,
        execution=Execution.CHECKER,
    )
    assert fault.matches(4, RankId(replica=1, stage=0), "BACKWARD_WEIGHT")
    (of_step,) = parse(flip({"step": 4, "phase": "apply"}, operator=3))
    assert of_step.flip is not None
    assert (of_step.flip.in_pass, of_step.flip.operator) == (Pass.STEP, 3)


def test_a_sticky_flip_is_in_every_execution_and_others_say_what_they_make_wrong() -> None:
    (fault,) = parse(flip(operator="aten.mm", sticky=True))
    assert fault.flip is not None
    assert (fault.flip.sticky, fault.flip.execution) == (True, Execution.BOTH)
    wire, state, batch = parse(
        flip({"step": 4, "phase": "reduce"}, where="wire"),
        flip({"step": 4}, where="state", part="moments", output=1, block=2),
        flip(where="batch", microBatch=0, execution="checker"),
    )
    assert wire.flip == Flip(in_pass=Pass.STEP, where=Where.WIRE, element=7, bit=30)
    assert state.flip == Flip(
        in_pass=Pass.STEP,
        where=Where.STATE,
        part=StatePart.MOMENTS,
        output=1,
        block=2,
        element=7,
        bit=30,
    )
    assert batch.flip is not None
    assert (batch.flip.where, batch.flip.execution) == (Where.BATCH, Execution.CHECKER)
    assert codec.loads(tuple[FaultPoint, ...], codec.dumps((wire, state))) == (wire, state)
    (masters,) = parse(flip({"step": 4}, where="state"))
    assert masters.flip is not None
    assert masters.flip.part is StatePart.MASTERS


PHASES_OF_FLIPS = "must be one of forward, backward, reduce, vote, apply, for a flip"
A = entry(id="a")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            [entry(at={"step": 1}, target={"process": "etcd"})],
            "faults[0].target.process: is 'etcd', must be one of api, redis",
        ),
        (
            [entry(at={"step": 1}, target={"process": "api"}, action="flush")],
            "faults[0].action: is 'flush', must be one of kill, stop, for the process api",
        ),
        (
            [entry(at={"step": 1}, target={"process": "api"}, action="stop")],
            "faults[0].forSeconds: is missing: stop must end some time",
        ),
        (
            [entry(target={"process": "api"}, action="kill")],
            "faults[0].at.phase: the process api runs no program",
        ),
        (
            [A, entry(target={"process": "api"}, action="kill", at={"during": "mask", "of": "a"})],
            "faults[1].at.during: the process api takes no part in a recovery; say when by with",
        ),
        ([entry(target=RANK | {"process": "api"})], "names a process and replica and stage"),
        ([entry(action="disconnect")], "faults[0].forSeconds: is missing: disconnect must end"),
        (
            [entry(action="disconnect", forSeconds=0)],
            "faults[0].forSeconds: is 0, must be seconds, more than 0",
        ),
        ([entry(forSeconds=1)], "faults[0].forSeconds: means nothing to kill-trainer, only to"),
        ([entry(action="slow")], "faults[0].delayMs: is missing: how slow is said by"),
        ([entry(action="slow", factor=0.5)], "faults[0].factor: is 0.5, must be times as long, 1"),
        ([entry(action="slow", delayMs=float("nan"))], "faults[0].delayMs: is nan"),
        ([entry(action="slow", factor=2, steps=0)], "faults[0].steps: is 0, must be a whole"),
        ([entry(factor=2)], "faults[0].factor: means nothing to kill-trainer, only to slow"),
        (
            [entry(action="slow", factor=2, at={"step": 1, "delayMs": 3})],
            "faults[0].at.delayMs: a rank is slow from the action on",
        ),
        (
            [entry(at={"step": 1}, target={"spare": 0}, action="slow", factor=2)],
            "faults[0].action: is 'slow', must be one of kill-trainer, kill-pod",
        ),
        ([entry(at={"during": "heal"})], "faults[0].at.of: is missing"),
        ([A, entry(at={"of": "a"})], "faults[1].at.during: is missing"),
        ([entry(at={"during": "heal", "of": "a"})], "faults[0].at.of: is 'a', but there is no"),
        ([A, entry(at={"during": "heal", "of": "b"})], "faults[1].at.of: is 'b', must be one of a"),
        ([A, entry(at={"during": "sleep", "of": "a"})], "faults[1].at.during: is 'sleep', must be"),
        (
            [A, entry(at={"during": "heal", "of": "a", "step": 3})],
            "faults[1].at.step: during says when; leave the step out",
        ),
        (
            [A, entry(at={"during": "heal", "of": "a", "phase": "vote"})],
            "faults[1].at.phase: during heal there is no other; leave it out",
        ),
        ([A, entry(at={"with": "a", "after": "a"})], "faults[1].at.after: and with say both when"),
        (
            [entry(at={"step": 2, "phase": "checkpoint"})],
            "faults[0].at.phase: the job writes no checkpoints",
        ),
        ([entry(action="stop", forSeconds=1e11)], "forSeconds: is 100000000000.0, must be seconds"),
        ([entry(action="stop", forSeconds=10**400)], "is an integer of 1329 bits, must be seconds"),
        ([entry(action="stop", forSeconds=float("nan"))], "faults[0].forSeconds: is nan, must be"),
        (
            [entry(action="flip")],
            "faults[0].flip: is missing: which bit is wrong (type, microBatch",
        ),
        ([entry(flip={})], "faults[0].flip: means nothing to kill-trainer, only to flip"),
        ([flip(sticky="yes")], "faults[0].flip.sticky: is 'yes', must be true or false"),
        (
            [flip(sticky=True, execution="both")],
            "faults[0].flip.execution: means nothing with sticky: every execution is wrong",
        ),
        (
            [flip(where="disk")],
            "faults[0].flip.where: is 'disk', must be one of compute, wire, state, batch",
        ),
        (
            [flip({"step": 4}, where="state", sticky=True)],
            "faults[0].flip.sticky: means nothing with where: state; valid here: where, block",
        ),
        (
            [flip(where="state")],
            "faults[0].at.phase: means nothing to the state, which is hit before the step computes",
        ),
        (
            [flip(where="wire")],
            "faults[0].at.phase: is 'forward', must be reduce, for a flip with where: wire",
        ),
        (
            [flip({"step": 4}, where="batch")],
            "faults[0].at.phase: is missing, must be forward, for a flip with where: batch",
        ),
        (
            [flip({"step": 4}, where="state", part="moment")],
            "flip.part: is 'moment', must be one of masters, moments, compute (did you mean",
        ),
        ([flip(part="moments")], "flip.part: means nothing with where: compute; valid here: type"),
        ([flip(bit=None)], "faults[0].flip.bit: is missing"),
        ([flip(element=None)], "faults[0].flip.element: is missing"),
        ([flip(bit=128)], "faults[0].flip.bit: is 128, must be a whole number from 0 to 127"),
        ([flip(element=-1)], "faults[0].flip.element: is -1, must be a whole number from 0"),
        ([flip(type=3)], "faults[0].flip.type: is 3, must be a whole number from 0 to 2, as the"),
        ([flip(microBatch=1)], "faults[0].flip.microBatch: is 1, must be a whole number from 0 to"),
        ([flip(operators=1)], "faults[0].flip.operators: unknown field; did you mean operator?"),
        ([flip(operator=True)], "faults[0].flip.operator: is True, must be a whole number from 0"),
        ([flip(operator="")], "faults[0].flip.operator: is '', must be a text that names a kernel"),
        ([flip(execution="third")], "execution: is 'third', must be one of primary, checker, both"),
        ([flip(**{"pass": "weight"})], "flip.pass: is 'weight', must be one of forward, for phase"),
        ([flip({"step": 1})], f"faults[0].at.phase: is missing, {PHASES_OF_FLIPS}"),
        (
            [flip({"step": 1, "phase": "settle"})],
            f"faults[0].at.phase: is 'settle', {PHASES_OF_FLIPS}",
        ),
        (
            [flip({"step": 1, "phase": "forward", "delayMs": 1})],
            "faults[0].at.delayMs: means nothing to flip: the operator says when; leave it out",
        ),
        (
            [A, flip({"during": "mask", "of": "a", "phase": "forward"})],
            "faults[1].at.during: a wrong bit is put into a step; say when by step, after or with",
        ),
        (
            [flip({"step": 1, "phase": "apply"}, block=0)],
            "faults[0].flip.block: means nothing in phase apply, which is once a step",
        ),
        (
            [entry(at={"step": 1}, target={"spare": 0}, action="flip")],
            "faults[0].action: is 'flip', must be one of kill-trainer, kill-pod",
        ),
        ([entry(id="x" * 513)], "must be UTF-8 of at most 512 characters"),
        ([entry(id="\ud800")], "must be UTF-8 of at most 512 characters"),
        ([entry(target={"replica": 16**5000, "stage": 0})], "replica: is an integer of 20001 bits"),
        ([{"\ud800": 1}], "unknown field"),
    ],
)
def test_what_can_never_be_is_refused_by_its_path(bad: list[object], message: str) -> None:
    assert message in refusal(*bad)


def test_a_running_job_refuses_a_step_that_is_over_and_an_id_that_is_taken() -> None:
    assert "is 4, but the job has committed 9 steps already" in refusal(entry(), at_step=9)
    known = {fault.id: fault for fault in parse(A)}
    taken = refusal(entry(id="a", at=None), at_step=9, known=known)
    assert "faults[0].id: is 'a', which the job has already" in taken


def test_a_stage_of_one_rank_has_no_other_to_wait_for() -> None:
    at = {"step": 2, "phase": "inner-wait"}
    assert "faults[0].at.phase: a stage has one rank" in refusal(entry(at=at))
    cells = replace(SHAPE, ranks_per_stage=2, ranks_per_pod=2)
    (fault,) = files.parse_faults([entry(at=at)], cells, num_spares=1)
    assert fault.matches(2, RankId(replica=1, stage=0), "INNER_WAIT")


SNAPSHOT_PHASES = (
    "snapshot",
    "snapshot-copied",
    "snapshot-held",
    "log",
    "logged",
    "replay",
    "replayed",
)


@pytest.mark.parametrize("phase", [*SNAPSHOT_PHASES, "LOG", "REPLAYED"])
def test_a_job_without_snapshots_never_comes_to_their_actions(phase: str) -> None:
    at = {"step": 2, "phase": phase}
    assert "the job keeps no snapshots (spec.snapshots.enabled)" in refusal(entry(at=at))
    (fault,) = files.parse_faults([entry(at=at)], SHAPE, num_spares=1, has_snapshots=True)
    op = phase.upper().replace("-", "_")
    assert fault.matches(2, RankId(replica=1, stage=0), op)


def test_a_replay_is_a_part_of_a_recovery_where_there_are_snapshots() -> None:
    bad = [entry(id="a"), entry(at={"during": "replay", "of": "a"})]
    assert "faults[1].at.during: the job keeps no snapshots" in refusal(*bad)
    _, fault = files.parse_faults(bad, SHAPE, num_spares=1, has_snapshots=True)
    rank = RankId(replica=1, stage=0)
    assert fault.matches(9, rank, "REPLAY", View(fired=("a",)))
    assert not fault.matches(9, rank, "HEAL", View(fired=("a",)))


def test_the_other_stages_of_one_replica_go_on_where_a_lost_one_is_made_anew() -> None:
    shape = JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=2, steps=9, seed=1
    )
    target = {"replica": 0, "stage": 0}
    during = entry(at={"during": "mask", "of": "a"}, target=target)
    entries = [entry(id="a", target=target), during]
    assert len(files.parse_faults(entries, shape, num_spares=1, has_snapshots=True)) == 2
    with pytest.raises(InvalidSpecError, match="has nobody left"):
        files.parse_faults(entries, shape, num_spares=1)


def test_one_replica_alone_has_nobody_to_recover_with() -> None:
    shape = JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=1, steps=9, seed=1
    )
    target = {"replica": 0, "stage": 0}
    bad = [entry(id="a", target=target), entry(at={"during": "mask", "of": "a"}, target=target)]
    with pytest.raises(InvalidSpecError, match="has nobody left"):
        files.parse_faults(bad, shape, num_spares=1)
