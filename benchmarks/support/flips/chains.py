"""Chains whose steps are computed again and again: ranks are threads here, or processes."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from benchmarks.support.flips.rank import (
    Outcome,
    RankTrials,
    Setting,
    Spot,
    Variant,
    prepare_torch,
    variants_of,
)
from benchmarks.support.groups import make_group
from tests.train.compute.test_interpreter import Pipe, in_threads
from tests.train.crew import Crew, Nursery, Worker

from mainstay_core.dmr.flips import Flip
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.witness import Account
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.checks.planned import Standing
from mainstay_train.comm import mesh
from mainstay_train.comm.chains import ChainGroups

MAX_REFUSED = 3
"""A step is computed so often again before it counts as failed."""
COLLECTIVE_S = 30.0
"""Of one collective of a rank that waits for another one which has failed."""


class StepFailedError(Exception):
    """A step did not come to its end."""


class Chain(Protocol):
    """All ranks of a chain; each call is made on each of them."""

    def reset(self, variant: Variant) -> None:
        """Go back to the first state."""

    def order(self, variant: Variant, flip: Flip, spot: Spot) -> None:
        """Have a flip put in."""

    def compute(self, variant: Variant, step: int) -> bool:
        """Compute all types; return whether one is void.

        Raises:
            StepFailedError: a rank has failed.
        """

    def drop(self, variant: Variant) -> None:
        """Forget what was computed."""

    def finish(self, variant: Variant, step: int) -> list[Outcome]:
        """Reduce, vote and apply."""

    def list_spots(self, variant: Variant) -> list[Spot]:
        """Return every place of the step 0 where a flip can be put in."""

    def close(self) -> None:
        """End what was started."""


def run_step(chain: Chain, variant: Variant, step: int = 0) -> tuple[Outcome, int]:
    """Compute a step until no type of it is void.

    Returns:
        What all ranks came to, and how often the step was computed again.

    Raises:
        StepFailedError: a rank has failed, or types stay void.
    """
    num_refused = 0
    while chain.compute(variant, step):
        num_refused += 1
        if num_refused > MAX_REFUSED:
            raise StepFailedError("types stay void")
        chain.drop(variant)
    outcomes = chain.finish(variant, step)
    digests = tuple(digest for told, _ in outcomes for digest in told)
    return (digests, tuple(found for _, told in outcomes for found in told)), num_refused


class ThreadChain:
    """A chain with one rank to a stage: stages are threads, and messages queues."""

    def __init__(self, setting: Setting) -> None:
        self._ranks = {
            variant: [RankTrials(setting, rank, variant) for rank in range(setting.stages)]
            for variant in (Variant.OFF, *variants_of(setting))
        }

    def reset(self, variant: Variant) -> None:
        for rank in self._ranks[variant]:
            rank.reset()

    def order(self, variant: Variant, flip: Flip, spot: Spot) -> None:
        self._ranks[variant][spot.rank].order(flip, spot.place.phase)

    def compute(self, variant: Variant, step: int) -> bool:
        ranks = self._ranks[variant]
        pipe = Pipe(len(ranks))
        errors: list[Exception] = []
        void: list[bool] = []

        def compute(rank: RankTrials, group: Any) -> None:
            try:
                void.append(rank.compute(group, step))
            except Exception as error:
                errors.append(error)
                pipe.shutdown()

        if len(ranks) == 1:
            compute(ranks[0], None)
        else:
            in_threads(compute, [(rank, pipe.end_of(n)) for n, rank in enumerate(ranks)])
        # Who finds the end of a chain tells nothing of what has ended it.
        first = [error for error in errors if not isinstance(error, GroupEnded)] or errors
        if first:
            raise StepFailedError(f"{type(first[0]).__name__}: {first[0]}") from first[0]
        return any(void)

    def drop(self, variant: Variant) -> None:
        for rank in self._ranks[variant]:
            rank.drop()

    def finish(self, variant: Variant, step: int) -> list[Outcome]:
        try:
            return [rank.finish(step) for rank in self._ranks[variant]]
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error

    def list_spots(self, variant: Variant) -> list[Spot]:
        self.reset(variant)
        for rank in self._ranks[variant]:
            rank.listen()
        run_step(self, variant)
        return [spot for rank in self._ranks[variant] for spot in rank.heard()]

    def close(self) -> None:
        """Nothing is kept."""


class ProcessChain:
    """A chain with several ranks to a stage, each a process: their sums go through gloo.

    Args:
        setting: of the chain.
        nursery: forks the processes.
    """

    def __init__(self, setting: Setting, nursery: Nursery) -> None:
        self._crew = crew = Crew(nursery)
        self._num_formed = 0
        num_ranks = setting.stages * setting.inner
        self._workers = [
            crew.fork(work_rank, setting, rank, crew.store) for rank in range(num_ranks)
        ]
        self._connect()

    def _connect(self) -> None:
        self._num_formed += 1
        self._all("connect", f"flips-{id(self)}-{self._num_formed}")

    def _all(self, name: str, *args: Any) -> list[Any]:
        """Have all ranks do something; return their answers.

        Raises:
            StepFailedError: one of them has failed.
        """
        for worker in self._workers:
            worker.say((name, args))
        answers = [worker.hear() for worker in self._workers]
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            self._connect()
            raise StepFailedError(
                next((why for why in failed if "GroupEnded" not in why), failed[0])
            )
        return [answer[0] for answer in answers]

    def reset(self, variant: Variant) -> None:
        self._all("reset", variant)

    def order(self, variant: Variant, flip: Flip, spot: Spot) -> None:
        worker: Worker = self._workers[spot.rank]
        worker.say(("order", (variant, flip, spot.place.phase)))
        worker.hear()

    def compute(self, variant: Variant, step: int) -> bool:
        return any(self._all("compute", variant, step))

    def drop(self, variant: Variant) -> None:
        self._all("drop", variant)

    def finish(self, variant: Variant, step: int) -> list[Outcome]:
        return self._all("finish", variant, step)

    def list_spots(self, variant: Variant) -> list[Spot]:
        self.reset(variant)
        self._all("listen", variant)
        run_step(self, variant)
        return [spot for spots in self._all("heard", variant) for spot in spots]

    def tell(self, variant: Variant, shard_type: int) -> tuple[Account, ...]:
        """Compute a type of step 0 as a witness does; return what each rank tells of it."""
        return tuple(self._all("tell", variant, 0, shard_type))

    def standings(self, variant: Variant) -> list[Standing]:
        """Return how far each rank has come with its plan."""
        return self._all("standing", variant)

    def renew(self, variant: Variant, rank: int, plan: Plan | None = None) -> None:
        """Have a rank be as one that has just come: it has called no block, and made no plan.

        Args:
            variant: of its checks.
            rank: of the chain.
            plan: one that was made offline, for it to follow; None: it makes one.
        """
        self._workers[rank].say(("renew", (variant, plan)))
        self._workers[rank].hear()

    def close(self) -> None:
        """End the processes."""
        self._crew.end()


class _Rank:
    """One rank in a process of its own, which does what it is told."""

    def __init__(self, setting: Setting, rank: int, store: str) -> None:
        self._setting, self._rank, self._store = setting, rank, store
        self._trials = {
            variant: RankTrials(setting, rank, variant)
            for variant in (Variant.OFF, *variants_of(setting))
        }
        self._chain: ChainGroups | None = None

    def connect(self, name: str) -> None:
        """Form the chain anew."""
        self.shut("a new one is formed")
        setting, rank = self._setting, self._rank
        stage, inner = divmod(rank, setting.inner)
        pipeline = None
        if setting.stages > 1:
            size = setting.stages * setting.inner
            pipeline = make_group(f"{name}/p", self._store, rank, size, COLLECTIVE_S)
        cell = make_group(f"{name}/c{stage}", self._store, inner, setting.inner, COLLECTIVE_S)
        self._chain = ChainGroups(name, pipeline, cell)
        self._chain.connect()

    def shut(self, why: str) -> None:
        """Let the others know that this rank has left the chain."""
        if self._chain is not None:
            self._chain.shutdown(why)
            self._chain = None

    def compute(self, variant: Variant, step: int) -> bool:
        return self._trials[variant].compute(self._chain, step)

    def tell(self, variant: Variant, step: int, shard_type: int) -> Account | None:
        return self._trials[variant].tell(self._chain, step, shard_type)

    def do(self, name: str, args: Sequence[Any]) -> Any:
        """Do what the parent says."""
        if name in ("connect", "compute", "tell"):
            return getattr(self, name)(*args)
        variant, *others = args
        return getattr(self._trials[variant], name)(*others)


def work_rank(pipe: Connection, setting: Setting, rank: int, store: str) -> None:
    """Run the process of one rank until it is killed."""
    prepare_torch()
    mine = _Rank(setting, rank, store)
    while True:
        name, args = pipe.recv()
        try:
            answer: Any = (mine.do(name, args),)
        except Exception as error:
            mine.shut(f"rank {rank} has failed")
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2000:]}"
        pipe.send(answer)


def warm_up() -> None:
    """Import what every rank needs, once."""
    torch.set_num_threads(1)
    mesh.warm_up()
