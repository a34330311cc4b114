"""Draws what to break, as a pure function of a job's shape and a seed (docs/faults.md).

Faults come in groups: one alone, several at once, all cells of a replica, one more in the recovery
from the first, the control plane in mid-recovery. The groups of a run wait for each other: the next
one begins once all replicas are back (``after``). So each recovery can finish, however long a step
takes here. Some overlap on purpose. The result has the form of a faults file, so that any part of
it can be kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.shape import JobShape, Order
from mainstay_core.faults.points import SENDS_BACK, SENDS_ON

Entry = dict[str, Any]

ALWAYS = ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "REDUCE", "VOTE", "APPLY")
"""Actions that every rank of a chain takes in every step."""
FIRST_STEP = 2
STEPS_BETWEEN = 3
"""Least number of steps between two groups. The recovery before has to be over as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The bounds of a draw for a job."""

    shape: JobShape
    num_spares: int
    heartbeat_timeout_s: float
    """A stop or a cut that lasts longer makes a pod a returning one."""
    processes: bool = True
    """Whether the api and Redis may be broken, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Faults that belong together. The first one is the anchor of the others."""

    number: int
    entries: tuple[Entry, ...]

    @property
    def anchor(self) -> str:
        """Return the id of the fault for which the others and the next group wait."""
        return str(self.entries[0]["id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The faults of one run, in the form of a faults file."""

    number: int
    groups: tuple[Group, ...]
    entries: tuple[Entry, ...]


def draw(choices: Choices, num_faults: int, seed: int) -> tuple[Group, ...]:
    """Return groups with ``num_faults`` faults in all. The same seed draws the same groups.

    Anchors have no place in time yet: :func:`pack` gives them one.
    """
    # Each job and seed has a text of its own, so that the draws of neighbours are unrelated.
    rng = random.Random(f"{seed}/{choices.shape}")
    groups: list[Group] = []
    left = num_faults
    while left > 0:
        number = len(groups)
        entries = _draw_group(rng, choices, number)[:left]
        groups.append(Group(number=number, entries=tuple(entries)))
        left -= len(entries)
    return tuple(groups)


def pack(groups: Sequence[Group], per_run: int, seed: int) -> tuple[Run, ...]:
    """Return runs of about ``per_run`` faults each."""
    rng = random.Random(f"{seed}/pack")
    packed: list[list[Group]] = [[]]
    for group in groups:
        size = sum(len(g.entries) for g in packed[-1])
        if packed[-1] and size + len(group.entries) > per_run:
            packed.append([])
        packed[-1].append(group)
    return tuple(
        Run(number=number, groups=tuple(members), entries=place(members, rng))
        for number, members in enumerate(packed)
        if members
    )


def place(groups: Sequence[Group], rng: random.Random) -> tuple[Entry, ...]:
    """Return the groups' faults, with anchors that follow each other."""
    placed: list[Entry] = []
    for index, group in enumerate(groups):
        step = FIRST_STEP + STEPS_BETWEEN * index
        anchor, *others = group.entries
        at: Entry = {"step": step}
        if index > 0:
            # One back is the rule; two back overlaps with the group between.
            back = 2 if index > 1 and rng.random() < 0.15 else 1
            at["after"] = groups[index - back].anchor
        placed.append(anchor | {"at": at | anchor["at"]})
        placed += others
    return tuple(placed)


def _draw_group(rng: random.Random, choices: Choices, number: int) -> list[Entry]:
    shape = choices.shape
    kinds: list[tuple[Callable[[random.Random, Choices, Callable[[], str]], list[Entry]], int]]
    kinds = [(_alone, 9)]
    if shape.replicas > 1:
        kinds += [(_at_once, 4), (_in_recovery, 5)]
    if shape.replicas > 1 and shape.stages > 1:
        kinds.append((_whole_replica, 1))
    if choices.processes:
        kinds.append((_control_plane, 2))
    if choices.num_spares:
        kinds.append((_with_a_spare, 1))
    (kind,) = rng.choices([k for k, _ in kinds], [weight for _, weight in kinds])
    names = iter(f"g{number}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    return kind(rng, choices, lambda: next(names))


def _alone(rng: random.Random, choices: Choices, name: Callable[[], str]) -> list[Entry]:
    target = _rank(rng, choices.shape)
    action = rng.choices(
        ("kill-trainer", "kill-pod", "stop", "slow", "disconnect"), (6, 4, 3, 2, 3)
    )[0]
    return [_entry(rng, choices, name(), target, action, {})]


def _at_once(rng: random.Random, choices: Choices, name: Callable[[], str]) -> list[Entry]:
    """Draw two ranks in one step, now and then in the same pod or of one stage."""
    first = _rank(rng, choices.shape)
    second = _other_rank(rng, choices.shape, first)
    one = _entry(rng, choices, name(), first, _kill(rng), {})
    return [one, _entry(rng, choices, name(), second, _kill(rng), {"with": one["id"]})]


def _whole_replica(rng: random.Random, choices: Choices, name: Callable[[], str]) -> list[Entry]:
    replica = rng.randrange(choices.shape.replicas)
    entries: list[Entry] = []
    for stage in range(choices.shape.stages):
        at = {"with": entries[0]["id"]} if entries else {}
        target = {"replica": replica, "stage": stage}
        entries.append(_entry(rng, choices, name(), target, _kill(rng), at))
    return entries


def _in_recovery(rng: random.Random, choices: Choices, name: Callable[[], str]) -> list[Entry]:
    """Draw a kill, and another one during the recovery from it."""
    target = _rank(rng, choices.shape)
    one = _entry(rng, choices, name(), target, _kill(rng), {})
    during = rng.choice(("settle", "mask", "heal", "heal-source"))
    second = dict(target)
    if during == "heal-source":
        # The lowest cell of the stage that has the state is the source.
        second["replica"] = 1 if target["replica"] == 0 else 0
    elif during != "heal":
        second = _other_rank(rng, choices.shape, target)
    at = {"during": during, "of": one["id"]}
    return [one, {"id": name(), "at": at, "target": second, "action": _kill(rng)}]


def _control_plane(rng: random.Random, choices: Choices, name: Callable[[], str]) -> list[Entry]:
    """Draw a kill, and the loss of the api or Redis during the recovery from it."""
    one = _entry(rng, choices, name(), _rank(rng, choices.shape), _kill(rng), {})
    process, action = rng.choice((("api", "kill"), ("api", "stop"), ("redis", "kill")))
    at: Entry = {"with": one["id"]}
    if rng.random() < 0.5:
        at["delayMs"] = rng.choice((20, 60, 200))
    entry: Entry = {"id": name(), "at": at, "target": {"process": process}, "action": action}
    if action == "stop":
        entry["forSeconds"] = rng.choice((0.5, 2))
    return [one, entry]


def _with_a_spare(rng: random.Random, choices: Choices, name: Callable[[], str]) -> list[Entry]:
    """Draw a kill, and with it the loss of a spare that would have helped."""
    one = _entry(rng, choices, name(), _rank(rng, choices.shape), _kill(rng), {})
    spare = {"spare": rng.randrange(choices.num_spares)}
    return [one, {"id": name(), "at": {"with": one["id"]}, "target": spare, "action": "kill-pod"}]


def _entry(
    rng: random.Random, choices: Choices, name: str, target: Entry, action: str, at: Entry
) -> Entry:
    at = at | {"phase": _phase(rng, choices.shape, int(target["stage"]))}
    entry: Entry = {"id": name, "at": at, "target": target, "action": action}
    if action == "slow":
        return entry | {"factor": rng.choice((2, 5)), "steps": rng.choice((1, 3))}
    if rng.random() < 0.35:
        at["delayMs"] = rng.choice((1, 5, 20, 60))
    if action in ("stop", "disconnect"):
        # The stop is mostly short. Sometimes the pod is given up and comes back.
        long_s = choices.heartbeat_timeout_s + 1
        entry["forSeconds"] = rng.choices((0.3, 1.0, long_s), (3, 3, 1))[0]
    return entry


def _phase(rng: random.Random, shape: JobShape, stage: int) -> str:
    ops = list(ALWAYS)
    is_swapped = shape.order is not Order.IN_ORDER
    if is_swapped or stage < shape.stages - 1:
        ops += SENDS_ON
    if is_swapped or stage > 0:
        ops += SENDS_BACK
    return rng.choice(ops)


def _kill(rng: random.Random) -> str:
    return rng.choice(("kill-trainer", "kill-pod"))


def _rank(rng: random.Random, shape: JobShape) -> Entry:
    target = {"replica": rng.randrange(shape.replicas), "stage": rng.randrange(shape.stages)}
    if shape.ranks_per_stage > 1:
        target["inner"] = rng.randrange(shape.ranks_per_stage)
    return target


def _other_rank(rng: random.Random, shape: JobShape, target: Entry) -> Entry:
    others = [r for r in range(shape.replicas) if r != target["replica"]]
    return _rank(rng, shape) | {"replica": rng.choice(others)}
