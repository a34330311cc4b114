"""Losses of whole stages in jobs with snapshots: what is lost, when, in which layout.

Whatever is lost, the job's bits are those of an undisturbed run *without* snapshots, and no step is
lost once a first snapshot is complete. The values are those of :mod:`tests.e2e.loss_factors`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tests.e2e import loss_factors, loss_table
from tests.e2e.harness import Layout, LocalJob, local_job, make_job
from tests.e2e.loss_factors import OTHERS, WHOLE, length_of, lost_stages
from tests.e2e.pod_stores import has_changed, orders_of, pods_of, store_of

Fault = dict[str, Any]
"""An entry of a faults file."""
NUM_LANES = 2
"""The bits depend on the lanes; one or two replicas serve them."""
FIRST_LOSS = 6
"""A step at which a window of 1, 2 or 3 versions begins, if none was late."""
STEPS_BETWEEN = 5
STEPS_AFTER = 3
MEMORY = "64Mi"
"""Of a pod's store. How much a workload with gates needs is not known before it runs."""

HELD_S = 1.5
"""How long a trainer stands still in the midst of a replay, so that what is lost meanwhile is."""
MEANWHILE_MS = 500
"""How long after it has gone on beside a replay a stage is lost: that one stands still by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss, what is lost while it is mended, and the layout of the job."""

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
    further: str = "nothing"
    during: str = "nothing"
    order: str = ""
    """Empty: the job's default, which may change or not."""

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    @property
    def num_pods(self) -> int:
        return loss_factors.num_pods(self.stages, self.replicas, self.inner, self.slots)

    @property
    def peers(self) -> int:
        return loss_factors.num_peers(self.stages, self.replicas, self.inner, self.slots)

    @property
    def layout(self) -> Layout:
        # Only a lost pod needs another one.
        needs_spare = self.lost == "pod" or self.further in ("pod", "holder")
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
        length = length_of(self.window)
        # Nothing is counted before the first window: it has another order than the second one.
        first = 2 * length if self.order == "changing" else FIRST_LOSS
        return first + min(number, length - 1)

    @property
    def lost_stages(self) -> tuple[int, ...]:
        """The stages that lose something."""
        return lost_stages(self.lost, self.which, self.stages)

    @property
    def further_stage(self) -> int | None:
        """The stage that is lost in the midst of the replay of others."""
        if self.further not in OTHERS:
            return None
        lost = self.lost_stages
        return loss_factors.further_stage(self.further, self.replay, lost, self.stages)

    def kills(self, step: int, first_id: str = "loss") -> list[Fault]:
        """Return the faults of what is lost at a step."""
        is_one = self.lost in ("trainer", "pod")
        targets = [
            {"replica": replica, "stage": stage, "inner": rank}
            for replica, stage, rank in itertools.product(
                (0,) if is_one else range(self.replicas),
                self.lost_stages,
                (0,) if is_one else range(self.inner),
            )
        ]
        faults: list[Fault] = []
        for number, target in enumerate(targets):
            phase = self.at
            if phase == "forward" and target["stage"] > min(self.lost_stages):
                phase = "RECV_F"  # what comes to its forward is computed by a stage that is lost
            fault = {"id": f"{first_id}-{number}", "at": {"step": step, "phase": phase}}
            action = "kill-pod" if self.lost == "pod" else "kill-trainer"
            faults.append(fault | {"target": target, "action": action})
        return faults

    def cascade(self, first_id: str = "loss") -> list[Fault]:
        """Return the faults of what is lost meanwhile: one strikes who replays, or holds it up."""
        if self.further == "nothing":
            return []
        last = self.kills(0, first_id)[-1]
        at = {"during": "mask", "of": last["id"]}
        action = {"inside": "kill-trainer", "pod": "kill-pod"}.get(self.further, "stop")
        held: Fault = {"at": at | {"phase": self.during}, "action": action}
        if self.layout.num_ranks == 1:
            held["at"] = {"during": "replay", "of": last["id"]}  # nobody else goes on meanwhile
        if action == "stop":
            held["forSeconds"] = HELD_S
        # Of two replicas' trainers either may be the one that makes the state anew first.
        replicas = range(self.replicas)
        faults = [
            held | {"id": f"{first_id}-replaying-{r}", "target": last["target"] | {"replica": r}}
            for r in replicas
        ]
        if self.further == "api":
            faults += [
                {
                    "id": f"{first_id}-further-{r}",
                    "at": {"with": faults[r]["id"]},
                    "target": {"process": "api"},
                    "action": "kill",
                }
                for r in replicas
            ]
        if self.further_stage is not None:
            action = "kill-pod" if self.further == "holder" else "kill-trainer"
            faults += [
                {
                    "id": f"{first_id}-further-{replica}",
                    "at": at | {"delayMs": MEANWHILE_MS},
                    "target": {"replica": replica, "stage": self.further_stage, "inner": 0},
                    "action": action,
                }
                for replica in (replicas if self.further != "holder" else range(1))
            ]
        return faults

    def faults(self, step: int, first_id: str = "loss") -> list[Fault]:
        """Return the faults file of this loss at a step."""
        return [*self.kills(step, first_id), *self.cascade(first_id)]

    def needed(self, first_id: str = "loss") -> list[set[str]]:
        """Return ids of faults, of each set of which one at least must have fired."""
        groups: dict[Any, set[str]] = {}
        for fault in self.kills(0, first_id):
            target, name = fault["target"], fault["id"]
            # Its cell broken first, an inner rank becomes a follower: no fault names it any more.
            is_cell = self.replicas == self.inner == 2
            group = (target["replica"], target["stage"]) if is_cell else name
            groups.setdefault(group, set()).add(name)
        for fault in self.cascade(first_id):
            name = fault["id"]
            # Of two replicas one is masked by then, and no fault names its cells.
            is_one = "-replaying-" in name or self.further == "api" or self.replicas == 2
            group = name.rpartition("-")[0] if is_one else name
            groups.setdefault(group, set()).add(name)
        return [*groups.values()]

    @property
    def spec(self) -> dict[str, Any]:
        """What the job's spec says beside its layout."""
        orders = {"changing": "Popularity", "fixed": "BackToFront"}
        return {
            "snapshots": {
                "enabled": True,
                "window": self.window,
                "peers": self.peers,
                "memory": MEMORY,
                "replay": self.replay,
                **({"ordering": orders[self.order]} if self.order else {}),
            },
            "protection": {"domains": min(2, self.num_pods)},
        }

    @property
    def gate_steps(self) -> list[int]:
        """Last versions of the windows before the loss: held, a window is never late."""
        length = length_of(self.window)
        # Blocks are tried with the first batch before a trainer is up: that has no gate.
        gates = range(max(1, length - 1), self.step, length)
        is_needed = length > 1 or self.at.startswith("snapshot")
        is_read = self.order == "changing"
        return sorted({*(gates if is_needed else ()), *([self.step - 1] if is_read else ())})

    @property
    def methods(self) -> set[str]:
        """The methods of recovery one of which the report must name."""
        if self.place == "early":
            return {"restart"}
        if self.lost not in WHOLE and self.replicas == 2:
            # Both cells of a stage may live in one pod.
            return {"mask"} if self.lost == "trainer" or self.slots == 1 else {"mask", "replay"}
        if self.replicas == 2 and self.inner == 2:
            # Its cell broken first, an inner rank becomes a follower: no fault names it any more.
            return {"replay", "mask"}
        return {"replay"}


def table() -> list[Loss]:
    """Return the losses of :data:`loss_table.TABLE`."""
    return [parse(line) for line in loss_table.TABLE.strip().splitlines()]


def parse(line: str) -> Loss:
    """Return a loss from a line of values (:func:`loss_factors.parse`); some may be left out."""
    return Loss(**loss_factors.parse(line))


def undisturbed(directory: Path, loss: Loss, steps: int, corpus: Path) -> dict[str, Any]:
    """Return the report of a run without snapshots and losses, in one stage: the bits are these."""
    with local_job(directory, make_job(loss.layout.least, steps, corpus)) as job:
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
    lost = loss.kills(0, f"loss-{number}")[-1]
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
    further: Sequence[Fault] = (),
) -> dict[str, Any]:
    """Run a job with losses, one after the other, and compare it with an undisturbed run.

    Args:
        directory: an empty one.
        losses: in one layout. The job is whole before each of them.
        corpus: what the model learns.
        expected: report of a run that may be longer.
        further: faults beside the losses; all of them must fire.
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
            if first.order == "changing" and step == first.step - 1:
                wait_for_another_order(running, loss_factors.stage_of_experts(first.stages))
            (gates / str(step)).touch()
        report = running.report()
    check_report(report, losses, expected, [fault["id"] for fault in further])
    return report


def wait_for_another_order(job: LocalJob, position: int) -> None:
    """Wait until stores have two windows with copies of a position in different orders."""
    with ExitStack() as stack:
        stores = [stack.enter_context(store_of(job, pod)) for pod in pods_of(job)]
        job.wait_until(lambda: any(has_changed(orders_of(store, position)) for store in stores))


def check_report(
    report: dict[str, Any],
    losses: Sequence[Loss],
    expected: dict[str, Any],
    further: Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> None:
    """Compare a run's report with that of an undisturbed run, step by step.

    Args:
        report: of the run.
        losses: that it had.
        expected: the other report.
        further: ids of other faults that must have fired.
        names: first part of the ids of each loss's faults; left out: ``loss-0``, and so on.
    """
    steps = report["digests"]["steps"]
    assert len(steps) == num_steps(losses)
    for step, (ours, theirs) in enumerate(zip(steps, expected["digests"]["steps"], strict=False)):
        assert ours == theirs, f"step {step} differs"
    if len(steps) == len(expected["digests"]["steps"]):
        assert report["digests"]["final"] == expected["digests"]["final"]
    for loss, name in zip(losses, names or [f"loss-{n}" for n in range(len(losses))], strict=True):
        check_fired(report, [*loss.needed(name), *({fault} for fault in further)])
    recoveries = [r for r in report["recoveries"] if r["method"] not in ("start", "join")]
    found = {recovery["method"] for recovery in recoveries}
    for loss in losses:
        assert found & loss.methods, (str(loss), recoveries)
        check_cascade(report, loss)
    lost = losses[0].step if losses[0].place == "early" else 0
    assert report["steps"]["lost"] == lost, recoveries
    assert all(recovery["exact"] for recovery in recoveries)


def check_fired(report: dict[str, Any], groups: Sequence[set[str]]) -> None:
    """Check that of each group of faults one has fired: a run that nothing hit proves nothing."""
    states = {fault["id"]: fault["state"] for fault in report["faults"]}
    fired = {name for name, state in states.items() if state == "fired"}
    for group in groups:
        assert fired & group, f"of {sorted(group)} none has fired: {states}"


def check_cascade(report: dict[str, Any], loss: Loss) -> None:
    """Check that what was lost meanwhile was made anew too, and what joins it together with it."""
    replayed = replayed_stages(report)
    if loss.further not in ("nothing", "api"):
        assert len(replayed) > 1, report["recoveries"]
    if loss.further not in ("beside", "apart"):
        return
    if loss.replicas == 2:  # the masked cell of that stage has the state, and computes from then on
        assert loss.further_stage not in set().union(*replayed), report["recoveries"]
        return
    assert loss.further_stage in set().union(*replayed), report["recoveries"]
    # Who stands at the end of its replay may have the state by then, and is lost no more.
    joins = loss.further == "beside" and loss.replay == "Boundary" and loss.during != "replayed"
    if joins:
        together = {*loss.lost_stages, loss.further_stage}
        if loss.lost == "apart":  # it joins one of them, and lies between both if it joins two
            together = {s for s in together if s is not None and _joins(s, loss)}
        assert any(together <= stages for stages in replayed), report["recoveries"]


def _joins(stage: int, loss: Loss) -> bool:
    """Whether a stage is the one that is lost meanwhile, or beside that."""
    assert loss.further_stage is not None
    return abs(stage - loss.further_stage) < 2
