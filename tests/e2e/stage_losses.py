"""Losses of whole stages in jobs with snapshots: what is lost, when, in which layout.

Whatever is lost, the job's bits are those of an undisturbed run *without* snapshots, and no step is
lost once a first snapshot is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.harness import EXPERTS, Layout, local_job, make_job

NUM_LANES = 2
"""The bits depend on the lanes; one or two replicas serve them."""
FIRST_LOSS = 6
"""A step at which a window of 1, 2 or 3 versions begins, if none was late."""
STEPS_BETWEEN = 5
STEPS_AFTER = 3
MEMORY = "64Mi"
"""Of a pod's store. How much a workload with gates needs is not known before it runs."""

VALUES: dict[str, tuple[Any, ...]] = {
    "lost": ("trainer", "pod", "all", "stage", "adjacent", "apart"),
    "at": (
        "forward",
        "snapshot",
        "snapshot-copied",
        "log",
        "logged",
        "vote",
        "apply",
        "itself",
        "holder",
    ),
    "place": ("first", "middle", "last", "early"),
    "window": (1, 2, 3, "Auto"),
    "model": ("llama", "moe"),
    "dtype": ("float32", "bfloat16"),
    "stages": (1, 2, 4),
    "replicas": (1, 2),
    "slots": (1, 2),
    "inner": (1, 2),
    "replay": ("Gradients", "Boundary"),
    "which": ("first", "middle", "last"),
}
"""The factors of the matrix.

- lost: a trainer of a stage; its pod; all trainers of the job, while their pods live; every copy of
  a stage; those of two neighbouring stages of four; those of two that are not neighbours.
- at: the action at which it happens. ``itself``: at its vote, and the trainer that makes the state
  anew dies at that. ``holder``: at its vote, and a pod that has copies dies meanwhile.
- place: the instalment of the window; ``early``: the first window is not complete.
- slots: ranks of a pod. inner: ranks of a stage.
- replay: from what a lost state is made anew.
- which: the stage of a lost trainer or pod, or of lost copies; the other losses have theirs.
"""

TABLE = """
adjacent apply first 1 moe float32 4 1 2 1 Boundary last
adjacent forward first Auto llama bfloat16 4 2 1 2 Boundary last
adjacent itself middle 3 moe float32 4 1 2 1 Gradients last
adjacent log last 3 moe float32 4 1 2 1 Boundary last
adjacent logged first Auto moe float32 4 2 1 1 Boundary last
adjacent snapshot early 3 moe float32 4 1 2 1 Boundary last
adjacent snapshot-copied last 2 moe bfloat16 4 2 1 1 Gradients last
adjacent vote middle 3 moe float32 4 1 2 1 Boundary last
all apply middle 3 moe float32 2 1 2 1 Gradients last
all forward first Auto moe float32 1 1 1 1 Boundary last
all itself last 2 moe float32 2 1 2 1 Boundary last
all log first 3 moe float32 2 2 2 1 Gradients last
all logged middle 3 llama bfloat16 1 2 2 2 Gradients last
all snapshot early 3 moe float32 1 1 1 1 Gradients last
all snapshot first 1 moe bfloat16 1 1 1 1 Boundary last
all snapshot middle 3 moe float32 4 1 2 1 Boundary last
all snapshot-copied middle 3 llama bfloat16 1 1 1 1 Boundary last
all vote last 2 moe bfloat16 1 1 1 1 Gradients last
apart apply middle 3 moe float32 4 1 2 1 Boundary last
apart forward first Auto moe float32 4 1 2 1 Gradients last
apart itself middle 3 moe float32 4 1 2 1 Boundary last
apart log first 1 llama float32 4 2 2 2 Boundary last
apart logged middle 3 moe float32 4 1 2 1 Boundary last
apart snapshot early 3 moe bfloat16 4 1 1 1 Boundary last
apart snapshot-copied last 2 moe float32 4 2 1 1 Boundary last
apart vote first 1 moe float32 4 2 2 1 Gradients last
pod apply first Auto llama bfloat16 4 1 1 2 Gradients last
pod apply last 2 moe bfloat16 4 1 2 1 Boundary middle
pod forward last 3 moe float32 1 2 1 1 Boundary last
pod itself first 2 moe float32 4 1 2 1 Boundary first
pod log first Auto llama float32 4 1 2 2 Gradients first
pod logged first 1 llama bfloat16 4 2 1 1 Gradients middle
pod logged first Auto moe bfloat16 2 1 1 1 Gradients first
pod snapshot early 3 moe float32 2 1 1 1 Boundary last
pod snapshot-copied first Auto llama float32 4 1 2 2 Gradients middle
pod vote middle 3 moe float32 4 2 1 1 Gradients first
stage apply last 2 moe float32 2 2 2 1 Boundary first
stage forward middle 3 moe float32 1 2 2 1 Gradients last
stage holder first 1 moe float32 4 2 2 1 Boundary last
stage holder middle 3 llama bfloat16 1 2 1 2 Gradients last
stage itself first Auto llama bfloat16 1 2 2 2 Gradients last
stage log last 2 llama float32 2 2 2 2 Boundary last
stage log middle 3 moe bfloat16 4 2 2 1 Gradients middle
stage logged middle 3 moe float32 1 2 2 1 Boundary last
stage snapshot early 2 moe float32 4 2 1 1 Gradients middle
stage snapshot last 2 llama bfloat16 2 2 2 1 Boundary last
stage snapshot-copied first 1 moe bfloat16 2 2 1 1 Boundary first
stage vote first 1 llama float32 1 2 1 2 Gradients last
stage vote first 1 llama float32 4 2 1 1 Boundary middle
trainer apply first Auto moe float32 1 2 2 1 Boundary last
trainer forward first 1 llama bfloat16 4 2 1 1 Boundary middle
trainer forward last 2 llama bfloat16 2 1 1 2 Boundary first
trainer holder first 3 moe float32 4 1 1 1 Gradients middle
trainer holder first Auto moe float32 4 1 1 1 Boundary last
trainer holder last 2 llama float32 2 1 1 2 Gradients first
trainer itself first 1 llama bfloat16 4 1 2 1 Gradients middle
trainer itself middle 3 moe float32 1 1 1 1 Boundary last
trainer log first 1 moe float32 1 1 1 1 Boundary last
trainer logged last 2 moe float32 4 1 2 1 Boundary last
trainer snapshot early 2 llama float32 1 1 2 2 Gradients last
trainer snapshot early 2 moe bfloat16 2 1 2 1 Gradients first
trainer snapshot first Auto moe float32 1 1 1 1 Boundary last
trainer snapshot-copied last 2 moe bfloat16 4 2 1 1 Boundary middle
trainer vote first Auto moe float32 2 1 2 1 Boundary last
"""
"""Losses with every pair of two values that is possible, found by a greedy search; in the order of
:data:`VALUES`."""


@cache
def num_units(model: str, stages: int) -> tuple[int, ...]:
    """Return the units of each stage: embedding, two layers and head lie in one, two or four
    stages, and the second layer of the mixture has experts, a router and the rest of it.
    """
    units = [1, 1, EXPERTS["experts"] + 2 if model == "moe" else 1, 1]
    size = len(units) // stages
    return tuple(sum(units[n : n + size]) for n in range(0, len(units), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss, and the layout of the job."""

    lost: str
    at: str
    place: str
    window: int | str
    model: str = "llama"
    dtype: str = "float32"
    stages: int = 2
    replicas: int = 1
    slots: int = 1
    inner: int = 1
    replay: str = "Gradients"
    which: str = "last"

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    @property
    def num_pods(self) -> int:
        return -(-self.num_ranks // self.slots)

    @property
    def num_ranks(self) -> int:
        return self.stages * self.replicas * self.inner

    @property
    def peers(self) -> int:
        return min(2, self.num_pods - 1)

    @property
    def layout(self) -> Layout:
        # Only a lost pod needs another one.
        needs_spare = self.lost == "pod" or self.at == "holder"
        return Layout(
            stages=self.stages,
            ranks_per_stage=self.inner,
            ranks_per_pod=self.slots,
            lanes=NUM_LANES,
            replicas=self.replicas,
            spares=int(needs_spare),
            experts=self.model == "moe",
            dtype=self.dtype,
        )

    @property
    def step(self) -> int:
        """The step of the loss."""
        if self.place == "early":
            return 1
        number = {"first": 0, "middle": 1, "last": 2}[self.place]
        length = self.window if isinstance(self.window, int) else 1
        return FIRST_LOSS + min(number, length - 1)

    @property
    def stage(self) -> int:
        """The stage of which one is lost."""
        return {"first": 0, "middle": self.stages // 2, "last": self.stages - 1}[self.which]

    @property
    def is_possible(self) -> bool:
        """Whether there is such a loss, and snapshots can do something about it."""
        length = self.window if isinstance(self.window, int) else 1
        whole = self.lost in ("all", "stage", "adjacent", "apart")
        return all(
            (
                self.lost not in ("adjacent", "apart") or self.stages == 4,
                self.lost != "stage" or self.replicas == 2,
                self.inner == 1 or self.model == "llama",
                self.slots <= self.num_ranks,
                length <= max(num_units(self.model, self.stages)),
                self.which == "last" or self.lost in ("trainer", "pod", "stage"),
                self.which != "first" or self.stages > 1,
                self.which != "middle" or self.stages > 2,
                # Of a pod's loss its peers are left.
                self.lost != "pod" or self.num_pods > 1,
                self.place != "middle" or length > 2,
                self.place != "last" or length > 1,
                # Before its copy begins, the second instalment of the first window is nowhere. But
                # a part with one unit has it in the first, and a living cell has everything.
                self.place != "early" or (length > 1 and self.at == "snapshot"),
                self.place != "early" or whole or self.replicas == 1,
                self.place != "early" or self._has_many_units,
                # With a cell left the state is healed and nobody makes it anew.
                self.at not in ("itself", "holder") or whole or self.replicas == 1,
                # One pod of three with copies, not that of the lost stage, can go.
                self.at != "holder" or (self.peers == 2 and self.lost in ("trainer", "stage")),
            )
        )

    @property
    def _has_many_units(self) -> bool:
        """Whether some author of a lost stage copies several units."""
        units = num_units(self.model, self.stages)
        return any(units[n] > self.replicas for n in self._stages if n < self.stages)

    @property
    def _stages(self) -> tuple[int, ...]:
        """The stages that lose something."""
        return {"all": tuple(range(self.stages)), "adjacent": (1, 2), "apart": (0, 2)}.get(
            self.lost, (self.stage,)
        )

    def faults(self, step: int, first_id: str = "loss") -> list[dict[str, Any]]:
        """Return the faults file of this loss at a step."""
        stages = self._stages
        cells = (0,) if self.lost in ("trainer", "pod") else range(self.replicas)
        inner = (0,) if self.lost in ("trainer", "pod") else range(self.inner)
        targets = [
            {"replica": replica, "stage": stage, "inner": rank}
            for replica, stage, rank in itertools.product(cells, stages, inner)
        ]
        faults: list[dict[str, Any]] = []
        for number, target in enumerate(targets):
            phase = "vote" if self.at in ("itself", "holder") else self.at
            if phase == "forward" and target["stage"] > min(stages):
                phase = "RECV_F"  # what comes to its forward is computed by a stage that is lost
            fault = {"id": f"{first_id}-{number}", "at": {"step": step, "phase": phase}}
            action = "kill-pod" if self.lost == "pod" else "kill-trainer"
            faults.append(fault | {"target": target, "action": action})
        last = faults[-1]
        if self.at == "itself":
            at = {"during": "replay", "of": last["id"]}
            faults.append({"at": at, "target": last["target"], "action": "kill-trainer"})
        if self.at == "holder":
            at = {"during": "mask", "of": last["id"]}
            stage = 0 if self.stage else self.stages - 1
            target = {"replica": 0, "stage": stage, "inner": 0}
            faults.append({"at": at, "target": target, "action": "kill-pod"})
        return faults

    @property
    def spec(self) -> dict[str, Any]:
        """What the job's spec says beside its layout."""
        return {
            "snapshots": {
                "enabled": True,
                "window": self.window,
                "peers": self.peers,
                "memory": MEMORY,
                "replay": self.replay,
            },
            "protection": {"domains": min(2, self.num_pods)},
        }

    @property
    def gate_steps(self) -> list[int]:
        """Last versions of the windows before the loss: held, a window is never late."""
        length = self.window if isinstance(self.window, int) else 1
        return list(range(length - 1, self.step, length)) if length > 1 else []

    @property
    def methods(self) -> set[str]:
        """The methods of recovery one of which the report must name."""
        if self.place == "early":
            return {"restart"}
        if self.lost in ("trainer", "pod") and self.replicas == 2:
            # Both cells of a stage may live in one pod.
            return {"mask"} if self.lost == "trainer" or self.slots == 1 else {"mask", "replay"}
        if self.replicas == 2 and self.inner == 2:
            # Its cell broken first, an inner rank becomes a follower: no fault names it any more.
            return {"replay", "mask"}
        return {"replay"}


def table() -> list[Loss]:
    """Return the losses of :data:`TABLE`."""
    return [parse(line) for line in TABLE.strip().splitlines()]


def parse(line: str) -> Loss:
    """Return a loss from its values, in the order of :data:`VALUES`; the last may be left out."""
    known = {str(value): value for values in VALUES.values() for value in values}
    return Loss(**{n: known[word] for n, word in zip(VALUES, line.split(), strict=False)})


def undisturbed(directory: Path, loss: Loss, steps: int, corpus: Path) -> dict[str, Any]:
    """Return the report of a run without snapshots and losses, in one stage: the bits are these."""
    layout = Layout(
        lanes=NUM_LANES,
        replicas=1,
        ranks_per_stage=loss.inner,
        ranks_per_pod=loss.inner,
        spares=0,
        experts=loss.model == "moe",
        dtype=loss.dtype,
    )
    with local_job(directory, make_job(layout, steps, corpus)) as job:
        return job.report()


def bits(loss: Loss) -> tuple[str, str, int]:
    """Return on what the bits of a run depend."""
    return loss.model, loss.dtype, loss.inner


def num_steps(losses: Sequence[Loss]) -> int:
    """Return the steps of a run with losses one after the other."""
    return losses[0].step + STEPS_BETWEEN * (len(losses) - 1) + STEPS_AFTER


def killed_again(loss: Loss, number: int, phase: str) -> dict[str, Any]:
    """Return the fault that ends the trainer which makes a lost state anew, at an action of that.

    Args:
        loss: of which the last state is made anew.
        number: of the loss in its run.
        phase: the action.
    """
    lost = loss.faults(0, f"loss-{number}")[-1]
    at = {"during": "mask", "of": lost["id"], "phase": phase}
    name = f"loss-{number}-at-{phase}"
    return {"id": name, "at": at, "target": lost["target"], "action": "kill-trainer"}


def lost_meanwhile(number: int, stage: int) -> dict[str, Any]:
    """Return the fault that takes a stage as soon as it goes on beside a replay.

    Args:
        number: of the loss that is replayed in its run.
        stage: another one, with one cell.
    """
    at = {"during": "mask", "of": f"loss-{number}-0"}
    target = {"replica": 0, "stage": stage, "inner": 0}
    name = f"loss-{number}-meanwhile-{stage}"
    return {"id": name, "at": at, "target": target, "action": "kill-trainer"}


def replayed_stages(report: dict[str, Any]) -> list[set[int]]:
    """Return the stages that each recovery by replay has made anew, in order."""
    return [
        {replay["stage"] for replay in recovery.get("replays", ())}
        for recovery in report["recoveries"]
        if recovery["method"] == "replay"
    ]


def check_losses(
    directory: Path,
    losses: Sequence[Loss],
    corpus: Path,
    expected: dict[str, Any],
    further: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Run a job with losses, one after the other, and compare it with an undisturbed run.

    Args:
        directory: an empty one.
        losses: in one layout. The job is whole before each of them.
        corpus: what the model learns.
        expected: report of a run that may be longer.
        further: faults beside the losses.
    """
    first, gates = losses[0], directory / "gates"
    gates.mkdir()
    layout = replace(first.layout, spares=max(loss.layout.spares for loss in losses))
    steps = [first.step + STEPS_BETWEEN * number for number in range(len(losses))]
    faults = [
        f
        for n, (loss, at) in enumerate(zip(losses, steps, strict=True))
        for f in loss.faults(at, f"loss-{n}")
    ]
    faults += further
    before = [step - back for step in steps[1:] for back in (2, 1)]
    held = sorted({*first.gate_steps, *before})
    job = make_job(layout, num_steps(losses), corpus, gates, held, **first.spec)
    with local_job(directory, job, faults) as running:
        for step in held:
            running.wait_for_members(step, layout.num_ranks, or_joining=step + 1 in held)
            (gates / str(step)).touch()
        report = running.report()
    check_report(report, losses, expected)
    return report


def check_report(report: dict[str, Any], losses: Sequence[Loss], expected: dict[str, Any]) -> None:
    """Compare a run's report with that of an undisturbed run, step by step."""
    steps = report["digests"]["steps"]
    assert len(steps) == num_steps(losses)
    for step, (ours, theirs) in enumerate(zip(steps, expected["digests"]["steps"], strict=False)):
        assert ours == theirs, f"step {step} differs"
    if len(steps) == len(expected["digests"]["steps"]):
        assert report["digests"]["final"] == expected["digests"]["final"]
    recoveries = [r for r in report["recoveries"] if r["method"] not in ("start", "join")]
    found = {recovery["method"] for recovery in recoveries}
    for loss in losses:
        assert found & loss.methods, (str(loss), recoveries)
    lost = losses[0].step if losses[0].place == "early" else 0
    assert report["steps"]["lost"] == lost, recoveries
    assert all(recovery["exact"] for recovery in recoveries)


def pairs(loss: Loss) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return all pairs of two factors' values that a loss has."""
    values = [(name, getattr(loss, name)) for name in VALUES]
    return itertools.combinations(values, 2)


def possible_pairs() -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return all pairs that some possible loss has."""
    found: set[tuple[tuple[str, Any], tuple[str, Any]]] = set()
    for values in itertools.product(*VALUES.values()):
        loss = Loss(**dict(zip(VALUES, values, strict=True)))
        if loss.is_possible:
            found.update(pairs(loss))
    return found
