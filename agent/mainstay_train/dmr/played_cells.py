"""Plays the cells of a stage in one process: they reduce, vote, and heal what differs.

Each cell has its own state and computes types of its own, as in trainers. Exchanges of reductions
go through memory. What votes come to is decided as in trainers (:mod:`mainstay_core.rank.votes`),
and followed: cells reduce again, compute again, or copy the state of a cell of the majority.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.dmr.flips import Flip, StatePart
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.reports import Ballot
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.rank.votes import Verdict, judge
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous
from mainstay_core.wire.votes import Commit, Vote
from mainstay_train.checks.flips import FlipOrders
from mainstay_train.checks.places import Phase
from mainstay_train.comm.group import Group
from mainstay_train.compute import at_rest
from mainstay_train.compute.engine import Engine
from mainstay_train.dmr.played_exchanges import PlayedExchanges, PlayedGroup
from mainstay_train.exact.optimizer import REST_PARTS
from mainstay_train.model.workload import WorkloadError

NUM_CELLS = 3
"""With so many a majority says which state is wrong."""
FOLLOWED_STEPS = REST_PARTS + 2
"""Steps after which it is known what a wrong bit of a state has led to: by then every part of the
state was compared."""
MAX_TRIES = 4
"""A step is tried so often before it counts as failed."""
NO_DIGEST = "0" * 32

States = tuple[str, ...]
"""Digests of the states of all cells."""


class StepStuckError(MainstayError):
    """The votes on a step cannot agree, or would end the job."""


FAILURES = (StepStuckError, WorkloadError, RuntimeError, IndexError, ValueError, MemoryError)
"""What a wrong bit may have a step end with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The outcome of a step of all cells."""

    told: tuple[str, ...]
    """What each cell has told in its vote."""
    states: States
    """After the step."""
    refusals: tuple[str, ...]
    """Why votes before the last one were refused."""

    @property
    def digests(self) -> tuple[str, ...]:
        """All of it that does not depend on how often it was tried."""
        return *self.told, *self.states


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The outcome of a wrong bit in the state of a cell."""

    found: bool
    """Whether a vote was refused for it."""
    equal: bool
    """Whether the cells have come to the states of an undisturbed run."""
    why: str = ""
    """If they have not."""


class PlayedCells:
    """The cells of a stage, which take the steps of a job together, again and again.

    Args:
        engines: of the cells; all have the same state.
        types: that each cell computes, in its order.
        learning_rate: of each step.
    """

    def __init__(
        self, engines: Sequence[Engine], types: Sequence[Sequence[int]], learning_rate: float
    ) -> None:
        self.engines, self._types = tuple(engines), tuple(tuple(each) for each in types)
        self._learning_rate = learning_rate
        self._plan = _plan_of(self._types)
        self._threads = ThreadPoolExecutor(len(self.engines), "cell")
        self._masters = [""] * len(self.engines)
        self.keep()

    def keep(self, of: PlayedCells | None = None) -> None:
        """Let the state of the first cell be the one to which :meth:`reset` goes back.

        Args:
            of: other cells of the same stage, whose state is kept in place of theirs.
        """
        state = (of or self).engines[0].state
        self._first = [flat.tensor.clone() for flat in state.flats()]
        self._first_masters = state.masters_digest().whole.hex()

    def reset(self) -> None:
        """Go back to the first state; nothing is ordered or held."""
        for engine in self.engines:
            for flat, value in zip(engine.state.flats(), self._first, strict=True):
                flat.tensor.copy_(value)
            engine.state.refresh()
            engine.drop_held()
            engine.checks.void.clear()
            engine.checks.take_orders(FlipOrders())
        self._masters = [self._first_masters] * len(self.engines)

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown()

    def run(self, step: int, *, votes_count: bool = True) -> StepEnd:
        """Take a step.

        Args:
            step: its number.
            votes_count: whether cells do what their votes say. Without, they apply what they have
                come to.

        Raises:
            StepStuckError: the votes cannot agree, or would end the job.
            WorkloadError: blocks have failed.
            UnreliableDeviceError: a check says so.
        """
        refusals: list[str] = []
        self._compute(step)
        ballots = self._reduce(step)
        while votes_count:
            verdict = self._judge(step, ballots)
            if verdict.commit is not None:
                break
            refusals.append(verdict.reason)
            if verdict.hopeless or verdict.undecided or len(refusals) == MAX_TRIES:
                raise StepStuckError(verdict.reason)
            if verdict.state_bad or verdict.bad:
                self._drop_held()
                self._heal(verdict.state_bad)
                self._compute(step)
            ballots = self._reduce(step)
        commit = _commit(step, ballots)
        self._masters = [engine.apply(commit, self._learning_rate) for engine in self.engines]
        self._drop_held()
        states = zip(self.engines, self._masters, strict=True)
        return StepEnd(
            told=tuple(repr(replace(ballot, rest="")) for ballot in ballots),
            states=tuple(f"{m} {at_rest.digest(e, step + 1, m)}" for e, m in states),
            refusals=tuple(refusals),
        )

    def undisturbed(self) -> tuple[States, ...]:
        """Take as many steps from the first state as flips are followed; return the states."""
        self.reset()
        return tuple(self.run(step).states for step in range(FOLLOWED_STEPS))

    def follow(self, cell: int, flip: Flip, expected: Sequence[States]) -> Followed:
        """Put a wrong bit into the state of a cell, and see what comes of it.

        Args:
            cell: its number.
            flip: of the first state.
            expected: what :meth:`undisturbed` has returned.
        """
        self.reset()
        self.engines[cell].checks.order("drawn", 0, Phase.FORWARD, flip)
        for step, undisturbed in enumerate(expected):
            try:
                ended = self.run(step)
            except FAILURES as error:
                return Followed(found=False, equal=False, why=str(error))
            is_equal = ended.states == undisturbed
            if is_equal or ended.refusals:
                why = "" if is_equal else "digests differ"
                return Followed(found=bool(ended.refusals), equal=is_equal, why=why)
            if len(set(ended.states)) == 1:
                break  # no vote will find that
        return Followed(found=False, equal=False, why="digests differ")

    def changes(self, cell: int, flip: Flip, expected: Sequence[States]) -> bool:
        """Return whether a wrong bit in a state changes one after a step, whatever votes say."""
        self.reset()
        self.engines[cell].checks.order("drawn", 0, Phase.FORWARD, flip)
        try:
            return self.run(0, votes_count=False).states != expected[0]
        except FAILURES:
            return True

    def _compute(self, step: int) -> None:
        for engine, types in zip(self.engines, self._types, strict=True):
            engine.checks.begin_step(step)
            at_rest.put_flips(engine.checks, engine.state)
            engine.compute(types, step, None)

    def _reduce(self, step: int) -> list[Ballot]:
        """Reduce in all cells at once; return what enters their votes."""
        held = [(p, n) for n, engine in enumerate(self.engines) for p in engine.store.held()]
        table = [Supply(partial=partial, index=number) for partial, number in sorted(held)]
        exchanges, members = PlayedExchanges(len(self.engines)), range(len(self.engines))

        def reduce(number: int) -> None:
            group = cast(Group, PlayedGroup(exchanges, number))
            try:
                self.engines[number].reduce(group, table, members, number)
            except BaseException as error:
                exchanges.end(f"cell {number}: {error}")
                raise

        _at_once(self._threads, [partial(reduce, number) for number in members])
        slots = [member.slot for member in self._plan.members]
        return [
            engine.ballot(None, table, number, slots[number], self._masters[number], step)
            for number, engine in enumerate(self.engines)
        ]

    def _judge(self, step: int, ballots: Sequence[Ballot]) -> Verdict:
        quorum = self._plan.quorum
        votes = [
            Vote(
                step=step,
                attempt=0,
                ok=not (ballot.problem or ballot.bad),
                problem=ballot.problem,
                bad=ballot.bad,
                norms_sq=ballot.norms_sq,
                gradient=ballot.gradient,
                state=masters,
                rest=ballot.rest,
                copies=ballot.copies,
                stats=ballot.stats,
                newest_plan=quorum.id,
                newest_nonce=quorum.nonce,
            )
            for ballot, masters in zip(ballots, self._masters, strict=True)
        ]
        return judge(self._plan, votes, None, "")

    def _heal(self, wrong: Sequence[int]) -> None:
        """Copy the state of a cell that is not wrong to those that are."""
        source = next(n for n in range(len(self.engines)) if n not in wrong)
        flats = self.engines[source].state.flats()
        for number in wrong:
            state = self.engines[number].state
            for mine, theirs in zip(state.flats(), flats, strict=True):
                mine.tensor.copy_(theirs.tensor)
            state.refresh()
            self._masters[number] = self._masters[source]

    def _drop_held(self) -> None:
        for engine in self.engines:
            engine.drop_held()


def parts_of(engine: Engine) -> list[tuple[int, StatePart]]:
    """Return each block of a stage with each part of its state that a wrong bit can be in."""
    return [
        (number, part)
        for number, block in enumerate(engine.state.blocks)
        for part in StatePart
        # In fp32 there is no copy to compute with.
        if part is not StatePart.COMPUTE or block.compute is not block.masters
    ]


def is_computed_with(engine: Engine, number: int, part: StatePart) -> bool:
    """Return whether gradients are computed with a part of a block's state.

    If it is wrong they are, before a vote can find that, and what has come of it is not undone.
    """
    if part is StatePart.MOMENTS:
        return False
    block = engine.state.blocks[number]
    return part is StatePart.COMPUTE or block.compute is block.masters


def _at_once(threads: ThreadPoolExecutor, work: Sequence[Callable[[], None]]) -> None:
    """Do something in each thread.

    Raises:
        Exception: what one of them raised; that of the cell which has ended the others, if one has.
    """
    done = [threads.submit(each) for each in work]
    errors = [error for each in done if (error := each.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, GroupEnded)), errors[0])


def _plan_of(types: Sequence[Sequence[int]]) -> Plan:
    """Return the plan of a quorum in which each cell is a replica."""
    quorum = QuorumId(id=1, nonce="played")
    members = tuple(
        Member(
            index=number,
            rank=RankId(replica=number, stage=0),
            slot=Slot(pod=PodUid(f"cell-{number}"), index=0),
            incarnation=Incarnation(f"cell-{number}"),
            address="",
            since=1,
        )
        for number in range(len(types))
    )
    makers = {t: number for number, each in enumerate(types) for t in each}
    return Plan(
        job=JobUid("played"),
        quorum=quorum,
        planned=False,
        unplanned_id=1,
        method=Method.START,
        members=members,
        chains=tuple(Chain(replica=n, cells=(n,), formed_in=quorum) for n in range(len(types))),
        suppliers=tuple(makers.get(t, 0) for t in range(1 + max(makers))),
        all_reduce_stack=max(map(len, types)),
        rendezvous=Rendezvous(pod=members[0].slot.pod, gather=""),
        reason="cells are played",
    )


def _commit(step: int, ballots: Sequence[Ballot]) -> Commit:
    """Return a commit with what ballots say; the norm does not clip."""
    stats = [stat for ballot in ballots for stat in ballot.stats]
    counted = zip(*(stat.statistics for stat in stats), strict=True)
    tokens = sum(stat.tokens or 0 for stat in stats)
    return Commit(
        step=step,
        norm=1.0,
        scale=1.0 / max(1, tokens),
        tokens=tokens,
        loss=0.0,
        data=NO_DIGEST,
        statistics=tuple(sum(counts) for counts in counted),
    )
