"""Computes a step again and again, each time with a wrong bit drawn from a seed.

``python -m mainstay_train.dmr.flip_trials`` reads a question as JSON and prints the answer
(:mod:`mainstay_core.wire.flip_trials`). The whole model is one stage of one rank here: bits depend
neither on stages nor on replicas. Each step runs with checks and without. Bits on the wire and in
states need several cells, which are played (:mod:`mainstay_train.dmr.cell_trials`).
"""

from __future__ import annotations

import contextlib
import gc
import random
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_core.base.shape import Order
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import MAX_BITS, Execution, Flip, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.reports import Ballot
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.flip_trials import MAX_SHOWN, ClassResult, FlipAnswer, FlipQuestion
from mainstay_core.wire.votes import Commit
from mainstay_train.base.decorator import Loop
from mainstay_train.base.device import choose_device
from mainstay_train.checks.checker import NOWHERE, Checks
from mainstay_train.checks.flips import FlipOrders
from mainstay_train.checks.places import Phase, Place
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.dmr.cell_trials import COMPUTED_WITH, STATE, WIRE, CellTrials, Tried
from mainstay_train.exact import numerics
from mainstay_train.kernels import bits
from mainstay_train.model import compilation
from mainstay_train.model import workload as workloads
from mainstay_train.model.workload import Workload, WorkloadError, user_code

BATCH = "batch"
"""The class of flips in fetches of batches."""
OF_CELLS = {WIRE: Where.WIRE, STATE: Where.STATE}
"""Classes of flips that need several cells, and what these make wrong."""
RECOMPUTE = "recompute"
"""The class of operators that the backward executes once more."""
MAX_TYPES = 3
"""Types of the step: two lie in one lane, so that a partial is a sum."""
OUTPUTS, ELEMENTS = 3, 1 << 20
"""Bounds of what is drawn; modulo what a kernel has."""
SPARE_BYTES = 4 << 30
"""Memory beyond that of a clean step. A wrong size of a tensor asks for any amount of it."""


@dataclass(frozen=True, slots=True)
class Spot:
    """One kernel of a step, or a fetch of a batch."""

    place: Place
    ordinal: int
    kernel: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        if self.kernel == BATCH:
            return BATCH
        place = self.place
        if (place.phase, place.in_pass) == (Phase.BACKWARD, Pass.FORWARD):
            return RECOMPUTE
        if place.in_pass is Pass.STEP:
            return "sums of types" if place.phase is Phase.BACKWARD else place.phase.value
        return f"{place.in_pass.value} pass"

    def flip(self, rng: random.Random) -> Flip:
        """Draw a wrong bit of it."""
        place, is_batch = self.place, self.kernel == BATCH
        return Flip(
            in_pass=place.in_pass,
            shard_type=place.shard_type,
            micro_batch=place.micro_batch,
            block=place.block,
            operator=None if is_batch else self.ordinal,
            output=rng.randrange(OUTPUTS),
            element=rng.randrange(ELEMENTS),
            bit=rng.randrange(MAX_BITS // 2),
            execution=rng.choice([Execution.PRIMARY, Execution.PRIMARY, Execution.CHECKER]),
            where=Where.BATCH if is_batch else Where.COMPUTE,
        )


class _Listing(FlipOrders):
    """Notes every kernel in place of flips."""

    is_empty = False  # so that there is a scope

    def __init__(self) -> None:
        super().__init__()
        self.spots: list[Spot] = []

    def take(
        self, place: Place, ordinal: int | None, kernel: str, where: Where = Where.COMPUTE
    ) -> list[Flip]:
        """Note a kernel."""
        if where is Where.BATCH or ordinal is not None:
            self.spots.append(Spot(place, ordinal or 0, kernel))
        return []


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a step."""

    digests: tuple[str, ...]
    """Of what the vote tells, and of the state after it."""
    findings: tuple[Finding, ...]


class StepTrials:
    """The first step of a job in one process; it can be computed again and again.

    Args:
        workload: of the job.
        config: of the job.
        device: where it computes.
        mode: whether it is checked.
    """

    def __init__(self, workload: Workload, config: JobConfig, device: str, mode: Mode) -> None:
        self._findings: list[Finding] = []
        self.checks = Checks(mode, tell=self._findings.append)
        loader = Loader(workload.dataset, device, ahead=False, twice=mode is Mode.FULL)
        training = BlockTraining(workload=workload, config=config, device=device, loader=loader)
        self._engine: Engine = training.build_engine(0, 1, 0, lambda _: None, self.checks)
        self._engine.state.initialize(config.shape.seed)
        self._first = [flat.tensor.clone() for flat in self._engine.state.flats()]
        self._types = range(min(MAX_TYPES, config.shape.num_types))
        self._learning_rate = workload.learning_rate(0)

    def list(self) -> Sequence[Spot]:
        """Return every kernel of the step, and every batch."""
        listing = _Listing()
        self.checks.take_orders(listing)
        self.run()
        self.checks.take_orders(FlipOrders())
        return listing.spots

    def run(self, flip: Flip | None = None, phase: Phase = Phase.FORWARD) -> Ended:
        """Compute the step from the first state.

        Args:
            flip: is put in; None: nothing is.
            phase: of the flip.
        """
        engine = self._engine
        self._findings.clear()
        for flat, value in zip(engine.state.flats(), self._first, strict=True):
            flat.tensor.copy_(value)
        engine.state.refresh()
        engine.drop_held()
        if flip is not None:
            self.checks.order("drawn", 0, phase, flip)
        try:
            digests = self._step()
        finally:
            if flip is not None:
                self.checks.take_orders(FlipOrders())  # the step may have ended before its kernel
        return Ended(digests, tuple(self._findings))

    def _step(self) -> tuple[str, ...]:
        engine = self._engine
        engine.compute(self._types, 0, None)
        table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
        engine.reduce(None, table, [0], 0)
        ballot = engine.ballot(None, table, 0, NOWHERE, "")
        masters = engine.apply(_commit(ballot), self._learning_rate)
        blocks = [block.compute for block in engine.state.blocks]
        state = bits.digest_of([*(flat.tensor for flat in engine.state.flats()), *blocks])
        return (repr(replace(ballot, rest="")), masters, state)


def _commit(ballot: Ballot) -> Commit:
    """Return a commit with what a ballot says; the norm does not clip."""
    counted = zip(*(stat.statistics for stat in ballot.stats), strict=True)
    tokens = sum(stat.tokens or 0 for stat in ballot.stats)
    return Commit(
        step=0,
        norm=1.0,
        scale=1.0 / max(1, tokens),
        tokens=tokens,
        loss=0.0,
        data="0" * 32,
        statistics=tuple(sum(counts) for counts in counted),
    )


@dataclass(slots=True)
class _Tally:
    """Counts of the flips that were tried, by class, and those that broke the promise."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, tried: Tried, name: str) -> None:
        """Count a flip; ``name`` is that of what it has hit."""
        kind, found = tried.kind, tried.effective and tried.found
        self.counts.update({(kind, "drawn"): 1, (kind, "effective"): int(tried.effective)})
        self.counts.update({(kind, "found"): int(found), (kind, "equal"): int(tried.equal)})
        if tried.is_promised and (not tried.equal or found != tried.effective):
            self.broken.append(f"{name}, {kind}: {tried.flip}")

    def results(self) -> tuple[ClassResult, ...]:
        """Return the counts of each class that was drawn."""
        drawn = sorted(kind for kind, what in self.counts if what == "drawn")
        numbers = ("drawn", "effective", "found", "equal")
        return tuple(
            ClassResult(
                name=kind,
                is_promised=kind != COMPUTED_WITH,
                **{what: self.counts[kind, what] for what in numbers},
            )
            for kind in drawn
        )


def run_trials(question: FlipQuestion, *, bound_memory: bool = False) -> FlipAnswer:
    """Draw flips, and compute a step with each, with checks and without.

    Args:
        question: how many, of which job.
        bound_memory: whether this process may not take much more memory than it has.

    Raises:
        InvalidSpecError: the job cannot be computed so; the field is named.
        WorkloadError: the user's code failed.
    """
    about, tally = _prepare(question.config), _Tally()
    left = _try_alone(question, about, tally, bound_memory=bound_memory)
    if left:
        gc.collect()  # the cells get the memory of what was tried alone
        rng = random.Random(f"{question.seed} cells")
        with closing(_cells_of(*about, bound_memory=bound_memory)) as cells:
            for where in left:
                tally.add(cells.try_one(where, rng), "what cells have")
    return FlipAnswer(classes=tally.results(), broken=tuple(tally.broken[:MAX_SHOWN]))


def _try_alone(
    question: FlipQuestion,
    about: tuple[JobConfig, Workload, str],
    tally: _Tally,
    *,
    bound_memory: bool,
) -> list[Where]:
    """Try the flips for which one cell is enough; return where the others are.

    Raises:
        InvalidSpecError: the blocks are no pure functions.
        WorkloadError: the user's code failed.
    """
    config, workload, device = about
    with user_code("computing step 0"):
        plain, checked = (
            StepTrials(workload, config, device, mode) for mode in (Mode.OFF, Mode.FULL)
        )
        clean, again = plain.run(), checked.run()
    if again.digests != clean.digests or again.findings:
        _refuse(f"the step that no bit was put into has {len(again.findings)} findings, or other")
    spots: dict[str, list[Spot]] = {}
    for spot in plain.list():
        spots.setdefault(spot.kind, []).append(spot)
    if bound_memory:
        _bound_memory()
    rng, left = random.Random(question.seed), []
    kinds = sorted([*spots, *OF_CELLS])  # in turn: products are few among the kernels
    for number in range(question.num_flips):
        kind = kinds[number % len(kinds)]
        if kind in OF_CELLS:
            left.append(OF_CELLS[kind])
            continue
        spot = rng.choice(spots[kind])
        flip = spot.flip(rng)
        ended = checked.run(flip, spot.place.phase)
        tried = Tried(
            kind=kind,
            flip=flip,
            effective=_has_effect(plain, clean, spot, flip),
            found=bool(ended.findings),
            equal=ended.digests == clean.digests,
        )
        tally.add(tried, f"{spot.kernel} (#{spot.ordinal})")
    return left


def _refuse(what: str) -> NoReturn:
    """Refuse a job that does not come to the same with checks as without."""
    raise InvalidSpecError(
        "spec.workload.entrypoint",
        f"{what} digests with checks than without: its blocks are no pure functions",
    )


def _cells_of(
    config: JobConfig, workload: Workload, device: str, *, bound_memory: bool
) -> CellTrials:
    """Return the job's stage in several cells.

    Raises:
        InvalidSpecError: they do not come to the same with checks as without.
        WorkloadError: the user's code failed.
    """

    def build(checks: Checks) -> Engine:
        loader = Loader(workload.dataset, device, ahead=False)
        training = BlockTraining(workload=workload, config=config, device=device, loader=loader)
        return training.build_engine(0, 1, 0, lambda _: None, checks)

    if bound_memory:
        _unbind_memory()
    num_types = min(MAX_TYPES, config.shape.num_types)
    rate = workload.learning_rate(0)
    with user_code("computing the first steps in several cells"):
        cells = CellTrials(build, num_types, config.shape.seed, rate)
    if bound_memory:
        _bound_memory()
    if not cells.is_clean:
        cells.close()
        _refuse("a step of several cells that no bit was put into has findings, or other")
    return cells


def _has_effect(plain: StepTrials, clean: Ended, spot: Spot, flip: Flip) -> bool:
    """Return whether a flip changes a digest where nothing is checked."""
    # Nobody uses the second execution: what the bit does in the first one is asked for.
    flip = replace(flip, execution=Execution.PRIMARY)
    try:
        return plain.run(flip, spot.place.phase).digests != clean.digests
    except (RuntimeError, IndexError, ValueError, MemoryError, WorkloadError):
        return True  # it ended the step


def _prepare(config: JobConfig) -> tuple[JobConfig, Workload, str]:
    """Return the job as one stage of one rank, its model, and where it computes."""
    if config.compile != compilation.OFF:
        raise InvalidSpecError(
            compilation.PATH, "is Blocks: calls of compiled code are no operators; use Off"
        )
    with user_code("calling the entrypoint"):
        function = workloads.find(config.entrypoint)
        if isinstance(function, Loop):
            raise InvalidSpecError(
                "spec.workload.entrypoint",
                f"{config.entrypoint} is a training loop of its own, whose operators are not "
                "known; a model that is brought as blocks can be flipped",
            )
        workload = workloads.call(config.entrypoint, function, config.workload, config.args)
    device = choose_device(config.device, 0)
    with user_code("setting up the device"):
        numerics.setup(device)
    shape = replace(
        config.shape,
        stages=1,
        ranks_per_stage=1,
        replicas=1,
        min_replicas=1,
        ranks_per_pod=1,
        order=Order.IN_ORDER,  # a single stage has nothing to swap
    )
    return replace(config, shape=shape, snapshots=None), workload, device


def _bound_memory() -> None:
    """Let this process take not much more memory: what asks for it gets an error."""
    if torch.cuda.is_available():
        return  # a driver reserves any amount of addresses
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _unbind_memory() -> None:
    """Let this process take as much memory as when it was started."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def answer(question: FlipQuestion, *, bound_memory: bool = False) -> FlipAnswer:
    """Return what became of the flips, or what is wrong with the job."""
    try:
        return run_trials(question, bound_memory=bound_memory)
    except (InvalidSpecError, WorkloadError) as error:
        return FlipAnswer(problem=brief(error))


def main() -> None:
    """Answer the question on standard input."""
    question = codec.loads(FlipQuestion, sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):  # a user's code may print
        found = answer(question, bound_memory=True)
    print(codec.dumps(found))  # noqa: T201 - its output is its result


if __name__ == "__main__":
    main()
