"""Every cell of a stage is lost, and the job goes on from the memory of pods, with the same bits.

The bits are those of an undisturbed run *without* snapshots. ``make chaos`` has every pair of what
is lost, when, and in which layout (:mod:`tests.e2e.stage_losses`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix, stage_losses
from tests.e2e.harness import Layout, LocalJob, local_job, make_job
from tests.e2e.pod_stores import has_changed, orders_of, store_of, versions_of
from tests.e2e.stage_losses import Loss

from mainstay_core.wire.segments import SegmentKey, SegmentKind, UnitHeld, seal
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model import workload as workloads
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.state.segments import SegmentClient

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
RUNS = {
    "a-stage-of-two": ["trainer log last 2", "pod vote first 2", "all apply first 2"],
    "stages-of-four": [
        "adjacent apply first 1 moe bfloat16 4 1 2",
        "apart snapshot first 1 moe bfloat16 4 1 2",
        "trainer vote first 1 moe bfloat16 4 1 2 further=inside during=replay",
    ],
    "every-copy": [
        "stage logged first Auto llama float32 1 2",
        "all forward first Auto llama float32 1 2",
        "stage snapshot first Auto llama float32 1 2",
        "all snapshot-copied first Auto llama float32 1 2",
        "stage snapshot-held first Auto llama float32 1 2",
    ],
    "a-holder-too": ["trainer vote first 3 moe bfloat16 4 further=holder during=replay"],
    "before-a-window": ["trainer snapshot early 2 moe bfloat16"],
    "by-boundary-logs": [
        "adjacent vote middle 3 moe bfloat16 4 1 2 1 Boundary",
        "trainer apply first 3 moe bfloat16 4 1 2 1 Boundary",
        "apart log last 3 moe bfloat16 4 1 2 1 Boundary",
    ],
    "a-stage-of-two-by-boundary-logs": [
        "trainer log last 2 llama float32 2 1 1 1 Boundary",
        "all apply first 2 llama float32 2 1 1 1 Boundary",
    ],
    "a-rank-of-a-cell-by-boundary-logs": [
        "trainer log last 2 llama bfloat16 2 1 1 2 Boundary",
        "all apply first 2 llama bfloat16 2 1 1 2 Boundary",
    ],
}
"""Losses of a run, one after the other; what is left out has its default."""
LOSSES = {name: [stage_losses.parse(line) for line in lines] for name, lines in RUNS.items()}
FURTHER = {
    "by-boundary-logs": [
        stage_losses.killed_again(LOSSES["by-boundary-logs"][0], 0, "replay"),
        stage_losses.killed_again(LOSSES["by-boundary-logs"][1], 1, "replay-read"),
        stage_losses.killed_again(LOSSES["by-boundary-logs"][1], 1, "replayed"),
        stage_losses.killed_again(LOSSES["by-boundary-logs"][2], 2, "replay-write"),
        stage_losses.lost_meanwhile(2, 1),
    ],
}
"""What is lost while a lost stage is made anew. Of the runs of `make test` together each action of
snapshots, logs and replays has a kill, and a stage between two that are replayed is lost, too."""
SLOW = (
    "a-stage-of-two",
    "a-holder-too",
    "before-a-window",
    "stages-of-four",
    "a-rank-of-a-cell-by-boundary-logs",
    "a-stage-of-two-by-boundary-logs",
)
"""What is run by `make chaos` alone: `make test` has a time."""
HELD_AT = 6
"""The step before which segments are damaged."""
STAGE_LOST = 1
FLIPPED = 0x01


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


class Undisturbed(dict[Any, Any]):
    """Reports of runs without snapshots and faults, by their bits; made when they are asked for."""

    def __init__(self, make: Callable[[Loss], Any]) -> None:
        self._make = make

    def __missing__(self, bits: Any) -> Any:
        example = next(x[0] for x in LOSSES.values() if stage_losses.bits(x[0]) == bits)
        return self.setdefault(bits, self._make(example))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[Any, Any]:
    """Reports of undisturbed runs, as many as tests ask for."""
    steps = max(map(stage_losses.num_steps, LOSSES.values()))
    place = tmp_path_factory.mktemp
    return Undisturbed(
        lambda loss: stage_losses.undisturbed(place("undisturbed"), loss, steps, corpus)
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.chaos if n in SLOW else ()) for n in LOSSES]
)
def test_lost_stages_leave_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any], name: str
) -> None:
    losses, further = LOSSES[name], FURTHER.get(name, [])
    expected = undisturbed[stage_losses.bits(losses[0])]
    report = stage_losses.check_losses(tmp_path, losses, corpus, expected, further)
    if name == "by-boundary-logs":
        assert {0, 1, 2} in stage_losses.replayed_stages(report)


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ["replay", "replay-read", "replay-write", "replayed"])
def test_a_rank_that_ends_in_the_midst_of_a_replay_of_its_cell_ends_it_for_the_others(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any], phase: str
) -> None:
    loss = stage_losses.parse("trainer vote last 2 llama bfloat16 2 1 1 2 Boundary")
    survivor = {
        "id": "survivor",
        "at": {"during": "mask", "of": "loss-0-0", "phase": phase},
        "target": {"replica": 0, "stage": 1, "inner": 1},
        "action": "kill-trainer",
    }
    report = stage_losses.check_losses(
        tmp_path, [loss], corpus, undisturbed[stage_losses.bits(loss)], [survivor]
    )
    assert [recovery["method"] for recovery in report["recoveries"]] == ["replay", "replay"]


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ["replay", "replay-read", "replay-write", "replayed"])
def test_a_trainer_that_ends_at_an_action_of_its_replay_is_replayed_again(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any], phase: str
) -> None:
    loss = stage_losses.parse("adjacent apply middle 3 moe bfloat16 4 1 2 1 Boundary")
    again = stage_losses.killed_again(loss, 0, phase)
    expected = undisturbed[stage_losses.bits(loss)]
    report = stage_losses.check_losses(tmp_path, [loss], corpus, expected, [again])
    assert [recovery["method"] for recovery in report["recoveries"]] == ["replay", "replay"]


@pytest.mark.chaos
@pytest.mark.parametrize("replay", ["Gradients", "Boundary"])
@pytest.mark.parametrize("further", [1, 0], ids=["beside it", "apart"])
def test_a_stage_that_is_lost_beside_a_replay_joins_it_and_one_apart_does_not(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any], further: int, replay: str
) -> None:
    """Then the trainer ends that makes it anew. From gradients the first may be whole by then."""
    loss = stage_losses.parse(f"trainer vote middle 3 moe bfloat16 4 1 1 1 {replay} middle")
    meanwhile = stage_losses.lost_meanwhile(0, further)
    again = {
        "id": "again",
        "at": {"during": "replay", "of": meanwhile["id"]},
        "target": {"replica": 0, "stage": further, "inner": 0},
        "action": "kill-trainer",
    }
    expected = undisturbed[stage_losses.bits(loss)]
    report = stage_losses.check_losses(tmp_path, [loss], corpus, expected, [meanwhile, again])
    assert len(report["recoveries"]) == 3, report["recoveries"]
    replayed = stage_losses.replayed_stages(report)
    assert set().union(*replayed) == {*loss.lost_stages, further}
    assert further in replayed[-1]
    if replay == "Boundary" and abs(further - loss.lost_stages[0]) == 1:
        # They are one stretch, which begins anew.
        assert replayed[-1] == {*loss.lost_stages, further}


@pytest.mark.chaos
def test_a_lost_own_loop_leaves_no_trace_in_the_bits(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(lanes=2, replicas=2, spares=0)
    workload = {
        "entrypoint": f"{EXAMPLE}:train",
        "config": {"width": 32, "sequence": 16, "samples": 2, "path": str(corpus)},
    }
    snapshots = {"enabled": True, "window": 2, "peers": 1, "memory": stage_losses.MEMORY}
    faults = [
        {"at": {"step": 5, "phase": "vote"}, "target": target, "action": "kill-trainer"}
        for target in ({"replica": 0, "stage": 0}, {"replica": 1, "stage": 0})
    ]
    reports = []
    for name, spec, kills in (
        ("plain", {"parallelism": {"replicas": 1}}, []),
        ("lost", {"snapshots": snapshots}, faults),
    ):
        (tmp_path / name).mkdir()
        job = make_job(layout, 9, corpus, **spec)
        job["spec"]["workload"] = workload
        with local_job(tmp_path / name, job, kills) as running:
            reports.append(running.report())
    plain, lost = reports
    assert lost["digests"] == plain["digests"]
    assert {fault["state"] for fault in lost["faults"]} == {"fired"}
    assert lost["steps"]["lost"] == 0
    assert "replay" in {recovery["method"] for recovery in lost["recoveries"]}


# Segments that are damaged while they lie in memory ------------------------------------------


def states_of(client: SegmentClient) -> tuple[UnitHeld, ...]:
    """What a store holds of the lost stage."""
    return tuple(u for u in client.report(0).units if u.position == STAGE_LOST)


def wait_for_states(job: LocalJob, pods: list[str], version: int) -> None:
    """Wait until all stores have all states of a version."""
    with ExitStack() as stack:
        stores = [stack.enter_context(store_of(job, pod)) for pod in pods]
        job.wait_until(
            lambda: all(
                (units := store.report(0).units)
                and len(units) == sum({u.position: u.num_units for u in units}.values())
                and all(version in u.states for u in units)
                for store in stores
            )
        )


def damage(job: LocalJob, pod: str, units: UnitBytes | None = None) -> str:
    """Flip a bit in each state of the first unit of the lost stage; return the unit's name.

    Args:
        job: that stands.
        pod: whose copies are damaged.
        units: of the stage; then the copies get the digest of what they hold, as if they had been
            written wrong.
    """
    with store_of(job, pod) as client:
        unit = next(u for u in states_of(client) if HELD_AT in u.states)
        for version in unit.states:
            key = SegmentKey(
                lineage=0,
                position=STAGE_LOST,
                unit=unit.unit,
                kind=SegmentKind.STATE,
                version=version,
            )
            with client._reading(key) as found:
                assert found is not None
                client._store.arena[found.offset] ^= FLIPPED
                header = found.header
                wrong = bytes(client._store.arena[found.offset :][: header.size_bytes])
            if units is not None:
                digest = seal(key, units.digest(unit.unit, SegmentKind.STATE, memoryview(wrong)))
                assert digest != header.digest
                room = client.room(len(wrong))
                room.memory[:] = wrong
                client.written(room, replace(header, digest=digest), (), 0)
                assert client.wait_held([key]) == ""
        return unit.unit_name


def units_of(job: dict[str, Any]) -> UnitBytes:
    """The segments of the lost stage."""
    model = workloads.load(
        "mainstay_train.models.llama:workload", job["spec"]["workload"]["config"]
    )
    state = StageState(model.build(model.stages(2)[STAGE_LOST]), model.optimizer)
    return UnitBytes(state, state.layout.allocate())


def run_damaged(
    directory: Path, corpus: Path, *, everywhere: bool, is_sealed: bool = False
) -> tuple[dict[str, Any], str]:
    """Lose a stage after some of its copies were damaged; return the report and the unit's name."""
    loss = Loss(lost="trainer", at="vote", place="first", window=1)
    (directory / "gates").mkdir()
    steps = range(HELD_AT + 1)
    job = make_job(loss.layout, 9, corpus, directory / "gates", steps, **loss.spec)
    with local_job(directory, job, loss.faults(HELD_AT)) as running:
        running.wait_for_members(0, 2)
        members = sorted(running.fetch("members"), key=lambda member: str(member["rank"]))
        pods = [str(member["slot"]).partition("/")[0] for member in members]
        for step in steps:
            # A window begins when the votes find the one before at its holders: so at every step.
            running.wait_for_members(step, 2)
            wait_for_states(running, pods, step)
            if step < HELD_AT:
                (directory / "gates" / str(step)).touch()
        units = units_of(job) if is_sealed else None
        damaged = pods if everywhere else pods[STAGE_LOST:]
        names = [damage(running, pod, units) for pod in damaged]
        if not everywhere and not is_sealed:
            check_stores(running, pods, names[0])
        (directory / "gates" / str(HELD_AT)).touch()
        return running.report(), names[0]


def check_stores(running: LocalJob, pods: list[str], unit: str) -> None:
    """What a user is told while the job stands: the damaged copies, and what is survived."""
    running.fetch("snapshots/check", "POST")
    running.wait_until(lambda: not running.fetch("snapshots/check")["waiting"])
    found = running.fetch("snapshots/check")
    assert found["told"] == sorted(pods)
    assert found["num_alone"] == 0
    # Of two copies that differ nobody can tell which is right.
    assert {copy["pod"] for copy in found["damaged"]} == set(pods)
    assert {copy["unit_name"] for copy in found["damaged"]} == {unit}
    assert {copy["key"]["position"] for copy in found["damaged"]} == {STAGE_LOST}

    told = running.fetch("snapshots")
    assert [p["is_covered"] for p in told["positions"]] == [True, True]
    assert [p["num_copies"] for p in told["positions"]] == [2, 2]
    assert told["summary"]["num_survive_pod"] == 2
    assert told["summary"]["window"]["length"] == 1
    assert running.fetch("summary")["stores"]["coverage"] == told["summary"]["coverage"]


@pytest.mark.chaos
@pytest.mark.parametrize("replay", ["Gradients", "Boundary"])
def test_a_state_that_is_lost_where_the_order_of_its_units_changes_is_made_anew(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any], replay: str
) -> None:
    loss = stage_losses.parse(f"trainer vote first 2 moe bfloat16 1 1 1 1 {replay}")
    (tmp_path / "gates").mkdir()
    steps = stage_losses.num_steps([loss])
    # Blocks are tried with the first batch before a trainer is up: that has no gate.
    held = range(1, steps)
    job = make_job(loss.layout, steps, corpus, tmp_path / "gates", held, **loss.spec)
    with local_job(tmp_path, job, loss.faults(loss.step)) as running:
        for step in held[: loss.step]:
            running.wait_for_members(step, 1)
            (pod,) = {str(m["slot"]).partition("/")[0] for m in running.fetch("members")}
            with store_of(running, pod) as client:
                # A window whose copies are there is complete with the next commit.
                running.wait_until(lambda c=client, s=step: s in versions_of(c))
                if step == loss.step:
                    orders = orders_of(client, 0)
            (tmp_path / "gates" / str(step)).touch()
        for step in held[loss.step :]:
            (tmp_path / "gates" / str(step)).touch()
        report = running.report()
    assert has_changed({first: orders[first] for first in (loss.step - 2, loss.step)})
    expected = undisturbed[stage_losses.bits(loss)]
    stage_losses.check_report(report, [loss], expected, names=["loss"])


def logs_of(directory: Path) -> str:
    return "".join(log.read_text() for log in directory.glob("state/pods/*/trainer-*.log"))


@pytest.mark.chaos
def test_a_damaged_copy_is_found_and_a_good_one_is_used(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any]
) -> None:
    report, _ = run_damaged(tmp_path, corpus, everywhere=False)
    expected = undisturbed["llama", "float32", 1]["digests"]["steps"]
    assert report["digests"]["steps"] == expected[:9]
    assert [r["method"] for r in report["recoveries"]] == ["replay"]
    assert report["steps"]["lost"] == 0
    assert "has not the digest that it was written with" in logs_of(tmp_path)
    (recovery,) = report["recoveries"]
    (replay,) = recovery["replays"]
    assert (replay["stage"], replay["kind"], replay["version"]) == (STAGE_LOST, "gradients", 6)
    assert replay["steps"] == replay["planned_steps"]
    assert replay["num_damaged"] > 0
    assert "found damaged" in recovery["reason"]
    told = [event["message"] for event in report["events"]]
    assert any(message.endswith(recovery["reason"].rpartition("; s1")[2]) for message in told)


@pytest.mark.chaos
def test_a_copy_that_was_written_wrong_is_found_by_what_votes_told_of_its_unit(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any]
) -> None:
    """It has the digest of its bytes, and pods keep what the votes' digests are made of."""
    report, unit = run_damaged(tmp_path, corpus, everywhere=False, is_sealed=True)
    expected = undisturbed["llama", "float32", 1]["digests"]["steps"]
    assert report["digests"]["steps"] == expected[:9]
    assert [r["method"] for r in report["recoveries"]] == ["replay"], (
        "the next copy is used at once"
    )
    assert report["steps"]["lost"] == 0
    assert f"is wrong as it was written: the masters of unit {unit} have digest" in logs_of(
        tmp_path
    )
    (recovery,) = report["recoveries"]
    (replay,) = recovery["replays"]
    assert replay["num_damaged"] == 1


@pytest.mark.chaos
def test_without_a_good_copy_the_next_row_is_taken_and_its_reason_names_the_unit(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any]
) -> None:
    report, unit = run_damaged(tmp_path, corpus, everywhere=True)
    expected = undisturbed["llama", "float32", 1]["digests"]["steps"]
    assert report["digests"]["steps"] == expected[:9]
    assert "restart" in [r["method"] for r in report["recoveries"]]
    assert report["steps"]["lost"] == HELD_AT
    assert any(unit in recovery["reason"] for recovery in report["recoveries"])
    # From there on everything is kept again.
    assert "is not kept" not in logs_of(tmp_path)


@contextmanager
def held_beside_a_spare(
    directory: Path, corpus: Path, loss: Loss, spec: dict[str, Any]
) -> Iterator[tuple[LocalJob, dict[str, str]]]:
    """A job with a spare that stands before a step, and the pods of its ranks and of the spare."""
    gates, num_ranks = directory / "gates", loss.layout.num_ranks
    gates.mkdir()
    steps = range(HELD_AT + 1)
    job = make_job(loss.layout, 9, corpus, gates, steps, **spec)
    with local_job(directory, job, loss.faults(HELD_AT)) as running:
        running.wait_until_all_up(num_ranks + 1)
        for step in steps:
            running.wait_for_members(step, num_ranks)
            if step < HELD_AT:
                (gates / str(step)).touch()
        members = running.fetch("members")
        yield running, {str(m["rank"]): str(m["slot"]).partition("/")[0] for m in members}


def test_a_spare_that_holds_the_only_copy_gives_a_lost_stage_its_state(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any]
) -> None:
    loss = Loss(lost="pod", at="vote", place="first", window=1)
    with held_beside_a_spare(tmp_path, corpus, loss, loss.spec) as (running, pods):
        survivor, spare = pods["r0.s0.i0"], pods["spare"]
        with store_of(running, survivor) as kept, store_of(running, spare) as copies:
            running.wait_until(lambda: bool(states_of(copies)))
            assert states_of(kept) == ()
        (tmp_path / "gates" / str(HELD_AT)).touch()
        report = running.report()

    expected = undisturbed["llama", "float32", 1]["digests"]["steps"]
    assert report["digests"]["steps"] == expected[:9]
    assert [r["method"] for r in report["recoveries"] if r["method"] != "join"] == ["replay"]
    assert report["steps"]["lost"] == 0


@pytest.mark.chaos
def test_a_job_goes_on_from_its_spare_when_every_pod_with_a_trainer_is_lost(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any]
) -> None:
    loss = Loss(lost="pod", at="vote", place="first", window=1, stages=1)
    spec = loss.spec
    spec["snapshots"]["peers"] = 1
    with held_beside_a_spare(tmp_path, corpus, loss, spec) as (running, pods):
        with store_of(running, pods["spare"]) as copies:
            # No step waits until a spare has its commit.
            running.wait_until(
                lambda: HELD_AT - 1 in {r.commit.step for r in copies.report(0).records}
            )
        (tmp_path / "gates" / str(HELD_AT)).touch()
        report = running.report()

    expected = undisturbed["llama", "float32", 1]["digests"]["steps"]
    assert report["digests"]["steps"] == expected[:9]
    assert [r["method"] for r in report["recoveries"] if r["method"] != "join"] == ["replay"]
    assert report["steps"]["lost"] == 0
