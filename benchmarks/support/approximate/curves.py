"""Curves of training with lost stages, each kept in a folder by its parameters.

A curve that was computed once is never computed again, so a run that was stopped goes on where it
was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from support.approximate.losses import LATER_STEPS, LOOK_STEPS, Draw, Loss
from support.approximate.staged_model import Snapshot, StagedModel, Strategy
from support.approximate.staged_setting import (
    WALKS,
    Setting,
    dataset_of,
    held_out_texts,
    model_of,
    split_text,
)
from support.approximate.strategies import OF_ENDS, OF_STATES

from mainstay_core.base.shape import Order
from mainstay_train.model.data import Dataset

GRID_STEPS = 10
"""Steps between two looks at held-out loss in a run with losses."""
TRIALS = 16
"""Steps of an undisturbed run at which losses are tried."""
FORMAT = 2
"""Of kept curves: what else they hold than their parameters say."""
UNDISTURBED = Strategy(name="undisturbed", boost=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The course of one training."""

    held_out: Mapping[int, float]
    """Mean loss on held-out samples, by the number of steps trained."""
    after: Sequence[Mapping[str, Any]] = ()
    """Of every loss: step, stage, weights, and held-out loss just before and just after it."""
    without: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Held-out loss with a stage's layers left out, by steps trained and stage."""
    tried: Sequence[Mapping[str, Any]] = ()
    """Of every loss that was tried on an undisturbed run and undone: the same, and the strategy."""
    texts: Mapping[str, float] = field(default_factory=dict)
    """Mean loss on texts that were never trained on, at the end."""
    digest: str = ""
    """Of the masters of all steps."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Curve:
        """Return the curve that a file holds."""
        return cls(
            held_out={int(step): loss for step, loss in found["held_out"].items()},
            after=found["after"],
            without={
                int(step): {int(stage): loss for stage, loss in losses.items()}
                for step, losses in found["without"].items()
            },
            tried=found["tried"],
            texts=found["texts"],
            digest=found["digest"],
        )


class _Trials:
    """Losses that are tried on an undisturbed run and undone: no bit of it changes.

    Args:
        model: in training.
        setting: its own.
        samples: to measure with, and in how many batches.
    """

    def __init__(self, model: StagedModel, setting: Setting, samples: tuple[Dataset, int]) -> None:
        self._model, self._samples, self._setting = model, samples, setting
        self.found: list[dict[str, Any]] = []
        oldest = max(strategy.age for strategy in OF_STATES)
        every = max(1, (setting.steps - oldest) // TRIALS)
        self._at = range(oldest + every, setting.steps + 1, every)
        ages = {strategy.age for strategy in OF_STATES if strategy.age}
        self._to_copy = {step - age for step in self._at for age in ages}
        self._copies: dict[int, Snapshot] = {}

    def look(self, step: int) -> None:
        """Try losses after so many steps, if it is time."""
        if step in self._to_copy:
            self._copies[step] = self._model.snapshot()
        if step not in self._at:
            return
        whole, before = self._model.snapshot(), self._model.validate(*self._samples)
        last = self._setting.stages - 1
        for stage in range(self._setting.stages):
            for strategy in OF_ENDS if stage in (0, last) else OF_STATES:
                stale = self._copies[step - strategy.age].flats if strategy.age else {}
                weights = self._model.lose(stage, step, strategy, stale)
                told = {"step": step, "stage": stage, "strategy": strategy.name}
                losses = {"before": before, "after": self._model.validate(*self._samples)}
                self.found.append({**told, "weights": weights, **losses})
                self._model.go_back(whole)
        later = [s for s in self._copies if s > step - max(s.age for s in OF_STATES)]
        self._copies = {s: self._copies[s] for s in later}


class Curves:
    """The curves of a folder.

    Args:
        folder: of the user.
        may_compute: whether a curve that is not there is computed.
    """

    def __init__(self, folder: Path, *, may_compute: bool = True) -> None:
        self._folder, self._may_compute = folder, may_compute
        self.missing: list[str] = []
        """The curves that were asked for and not computed, in words."""
        (folder / "curves").mkdir(parents=True, exist_ok=True)

    def get(
        self, setting: Setting, strategy: Strategy = UNDISTURBED, draw: Draw | None = None
    ) -> Curve | None:
        """Return a curve: the one that is kept, or one that is computed and kept now.

        Args:
            setting: what is trained.
            strategy: how lost stages are made anew.
            draw: of the losses that happen; None: nothing is lost.

        Returns:
            The curve; None if it is not there and may not be computed.
        """
        losses = draw.losses(setting.stages, setting.steps) if draw is not None else ()
        how = {k: v for k, v in dataclasses.asdict(strategy).items() if k != "name"}
        about = {
            "setting": dataclasses.asdict(setting),
            "strategy": how if losses else None,
            "losses": [dataclasses.asdict(loss) for loss in losses],
            "format": FORMAT,
        }

        def compute() -> dict[str, Any]:
            return dataclasses.asdict(self._compute(setting, strategy, losses))

        words = f"{strategy.name}, {setting.order}, model seed {setting.seed}"
        if draw is not None:
            words += f", rate {draw.rate}, losses' seed {draw.seed}"
        found = self.keep(about, words, compute)
        return None if found is None else Curve.of(found)

    def keep(
        self, about: Mapping[str, Any], words: str, compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return what is kept of something, or compute and keep it.

        Args:
            about: everything on which it depends.
            words: the same for people.
            compute: makes it.
        """
        text = json.dumps(about, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = self._folder / "curves" / f"{key}.json"
        if not path.exists():
            if not self._may_compute:
                self.missing.append(words)
                return None
            began_s = time.process_time()
            made = compute()
            took_s = time.process_time() - began_s
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            unfinished.write_text(json.dumps({**about, "cpu_s": took_s, "found": made}))
            unfinished.rename(path)
            print(f"computed in {took_s:.0f} s of CPU: {words}", flush=True)
        found: dict[str, Any] = json.loads(path.read_text())["found"]
        return found

    def _compute(self, setting: Setting, strategy: Strategy, losses: Sequence[Loss]) -> Curve:
        model = model_of(setting, self._folder)
        _, held_out = split_text(setting.data, self._folder)
        samples = dataset_of(setting, held_out), setting.validation_batches
        # Runs with losses are compared with an undisturbed one, at any look.
        seen = {*range(0, setting.steps + 1, GRID_STEPS if losses else LOOK_STEPS)}
        seen |= {setting.steps // 2, setting.steps}
        seen |= {loss.step + LATER_STEPS for loss in losses}
        at = {loss.step: loss.stage for loss in losses}
        trials = _Trials(model, setting, samples)
        to_copy = {loss.step - strategy.age: loss for loss in losses if strategy.how == "stale"}
        stale: dict[int, dict[str, torch.Tensor]] = {}
        curve: dict[int, float] = {}
        without: dict[int, dict[int, float]] = {}
        after: list[dict[str, Any]] = []
        digest = hashlib.sha256()
        for step in range(setting.steps):
            if step in to_copy:
                stale[to_copy[step].step] = model.copy_of(to_copy[step].stage)
            if step in at:
                before = model.validate(*samples)
                weights = model.lose(at[step], step, strategy, stale.pop(step, {}))
                told = {"step": step, "stage": at[step], "weights": weights, "before": before}
                after.append({**told, "after": model.validate(*samples)})
            model.step(step)
            digest.update(model.masters_digest().encode())
            if step + 1 in seen:
                curve[step + 1] = model.validate(*samples)
            if not losses:
                trials.look(step + 1)
            if not losses and step + 1 in (setting.steps // 2, setting.steps):
                without[step + 1] = {
                    stage: model.validate(*samples, model.layers_of(stage))
                    for stage in range(setting.stages)
                }
        texts = {
            name: model.validate(text, 4 * setting.validation_batches)
            for name, text in held_out_texts(setting, held_out).items()
            if setting.task != WALKS
        }
        return Curve(
            held_out=curve,
            after=after,
            without=without,
            tried=trials.found,
            texts=texts,
            digest=digest.hexdigest(),
        )

    def median_cpu_s(self) -> float:
        """Return the median seconds of CPU that a kept curve took."""
        kept = [json.loads(p.read_text()) for p in (self._folder / "curves").glob("*.json")]
        return statistics.median([one["cpu_s"] for one in kept] or [0.0])

    def step_times(self, setting: Setting, rounds: int) -> dict[str, float] | None:
        """Return the median seconds of a step of each method, measured by turns in one process.

        All go through the blocks in the same way. A redundant stage computes the next one's forward
        as well, in half micro-batches, as it holds twice the state. ``copy`` is the time in which a
        copy of the whole state is written to the disk.
        """
        about = {"setting": dataclasses.asdict(setting), "rounds": rounds, "measures": "steps"}

        def compute() -> dict[str, Any]:
            halved = dataclasses.replace(
                setting,
                micro_batch_size=setting.micro_batch_size // 2,
                micro_batches=2 * setting.micro_batches,
            )
            swapped = dataclasses.replace(setting, order=Order.SWAPPED)
            models = {
                "in order": model_of(setting, self._folder, by_routes=True),
                "swapped": model_of(swapped, self._folder),
                "redundant": model_of(halved, self._folder, redundant=True),
            }
            times: dict[str, list[float]] = {name: [] for name in models}
            for number in range(rounds + 2):
                for name in [*islice([*models, *models], number % 3, number % 3 + 3)]:
                    began_s = time.perf_counter()
                    models[name].step(number)
                    if number > 1:  # what is allocated once is not counted
                        times[name].append(time.perf_counter() - began_s)
            medians = {name: statistics.median(found) for name, found in times.items()}
            return medians | {"copy": self._write(models["in order"])}

        found = self.keep(about, "times of steps", compute)
        return None if found is None else {name: float(s) for name, s in found.items()}

    def _write(self, model: StagedModel) -> float:
        path, taken = self._folder / "copy.pt", []
        for _ in range(3):
            began_s = time.perf_counter()
            with path.open("wb") as file:
                torch.save(model.snapshot().flats, file)
                file.flush()
                os.fsync(file.fileno())
            taken.append(time.perf_counter() - began_s)
        path.unlink()
        return statistics.median(taken)
