"""Checks what forks do to a job: whose states count, what is made of what, and what stays exact.

The states that a job should have follow from the history of its forks alone
(:func:`mainstay_core.sim.terms.true_course`). So a run with forks is compared, step by step, with a
run of the same lineage that meets nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mainstay_core.base import codec
from mainstay_core.base.shape import Order
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.events import (
    Event,
    ReportsGathered,
    SavesGathered,
    StateLoaded,
    VotesGathered,
)
from mainstay_core.rank.forks.courses import of_one_course
from mainstay_core.rank.forks.histories import digest_of, history_at
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.settle import Settlement, StateAction
from mainstay_core.rank.state import RankState, extend_commit_chain
from mainstay_core.reinitialisation.guards import ends_of, guarded_blocks
from mainstay_core.reinitialisation.sources import (
    Left,
    Policy,
    plan_reinitialisation,
    policy_of,
)
from mainstay_core.sim import terms
from mainstay_core.sim.disk import Disk
from mainstay_core.sim.invariants.holding import hold, quorum_number
from mainstay_core.sim.invariants.life import Life
from mainstay_core.sim.invariants.permissions import Permissions
from mainstay_core.sim.invariants.sources import Remains, have_sources
from mainstay_core.sim.terms import Course
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry
from mainstay_core.wire.plan import Method, Plan
from mainstay_core.wire.reinitialisation import Fork, History, digest_of_fork
from mainstay_core.wire.repeated_lineage import read_repeats
from mainstay_core.wire.votes import Commit, GuardedDigest, SettleReport

_JUDGEMENTS = (ReportsGathered, SavesGathered, VotesGathered)
"""Events that may find a state bad."""


def fork_rules(config: JobConfig) -> ForkRules | None:
    """Return by which rules lost stages are made anew; None where none ever is.

    They are there also where the policy is off, as trainers have them then.
    """
    approximate, shape = config.approximate_rules, config.shape
    least = 2 if shape.order is Order.SWAPPED or approximate.stale_steps else 3
    if config.approximate is None and shape.stages < least:
        return None
    return ForkRules(
        outline=terms.outline(config.shape.stages, config.shape.order),
        policy=policy_of(approximate, Policy(order=config.shape.order)),
        guards=config.guards,
        after_lost_steps=approximate.after_lost_steps,
        lr_boost=approximate.lr_boost,
        boost_steps=approximate.boost_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The state with which a rank came to a plan, whatever the rank itself makes of it there."""

    position: int
    version: int
    lineage: int
    settled: int
    certified_in: str | None
    history: History


class Lineages:
    """Watches the forks of a run; raises Violation.

    Args:
        config: of the job.
        course: returns what a run without other faults has, by version and history.
        seen: what happened how often.
    """

    def __init__(
        self, config: JobConfig, course: Callable[[int, History], Course], seen: Counter[str]
    ) -> None:
        self._rules, self._shape = fork_rules(config), config.shape
        self._repeats = read_repeats(config)
        self.permissions = Permissions(config, seen)
        self._course, self._seen = course, seen
        self._held: dict[tuple[str, str], _Held] = {}
        """By quorum and incarnation."""
        self._commits: dict[tuple[str, int], Commit] = {}
        """By the digest of a step's history, and the step."""
        self._histories: dict[str, History] = {"": ()}
        """By digest, those that some state has had."""
        self._of_lineage: defaultdict[int, set[History]] = defaultdict(set)
        """The same, by the lineage of the state."""
        self._chains: dict[tuple[int, str], str] = {}
        self._way_back = 0
        """The newest exact checkpoint; 0 if there is none."""

    @property
    def _may_fork(self) -> bool:
        return self.permissions.may_fork

    # Plans --------------------------------------------------------------------

    def published(self, before: Plan | None, plan: Plan) -> None:
        """A plan is durable; the store has lost nothing since the one before."""
        raised = plan.lineage - (before.lineage if before is not None else 0)
        forks = plan.fork is not None or plan.method is Method.APPROXIMATE
        self._seen["plan with a fork"] += plan.fork is not None
        hold(self._may_fork or not forks, f"I9: {plan.quorum} forks without permission")
        hold(raised >= 0, f"I9: {plan.quorum} goes back to lineage {plan.lineage}")
        hold(
            bool(raised) or plan.fork is None,
            f"I9: {plan.quorum} orders a fork in the lineage before",
        )
        hold(
            not raised or plan.fork is not None or plan.method is Method.RESTART,
            f"I9: {plan.quorum} begins a lineage, and neither forks nor restarts",
        )

    # Ranks --------------------------------------------------------------------

    def moved(self, trainer: Life, before: RankState, event: Event) -> None:
        """A rank's state machine took a step."""
        state = trainer.state
        if state.plan is not None and state.plan is not before.plan and state.index >= 0:
            self._came(trainer, before, event)
        if state.valid:
            self._of_lineage[state.lineage].add(state.history)
        if not state.valid or (state.version, state.history) == (before.version, before.history):
            return
        self._check_history(trainer.name, state.history)
        chain = self._chain(state.version, state.history)
        hold(
            chain is None or state.commit_chain == chain,
            f"I9: {trainer.name} has another commit chain at version {state.version} than a run of "
            "the same lineage",
        )
        made = state.settlement is not None and isinstance(event, StateLoaded)
        if made and state.settlement.actions[state.index] is StateAction.MAKE:  # type: ignore[union-attr]
            self._seen["made anew"] += 1
            hold(
                state.digest == self._truth(state.version, state.history, state.position),
                f"I9: {trainer.name} has made another state of position {state.position} at "
                f"version {state.version} than the sources and weights of its fork give",
            )

    def truths(self, lineage: int, version: int) -> list[tuple[str, ...]]:
        """States of all positions in runs of the histories that a lineage's states have."""
        known = {history_at(history, version) for history in self._of_lineage[lineage]}
        return [self._course(version, history).states for history in known]

    def guarded(
        self, trainer: Life, commit: Commit, copies: Sequence[GuardedDigest], wrong: int | None
    ) -> None:
        """A rank has applied a step to what it guards; of one end that was just made wrong."""
        history = history_at(trainer.state.history, commit.step)
        for copy in copies:
            right = terms.part(self._truth(commit.step + 1, history, copy.stage))
            hold(
                copy.stage == wrong or copy.masters == right,
                f"I9: {trainer.name} goes on with a copy of stage {copy.stage} which a vote has "
                f"found wrong, or which it got too late, after step {commit.step}",
            )

    def _came(self, trainer: Life, before: RankState, event: Event) -> None:
        """Note what a rank had when it came to a plan. What others found bad is nothing."""
        state, loaded = trainer.state, isinstance(event, StateLoaded)
        assert state.plan is not None
        found_bad = isinstance(event, _JUDGEMENTS) and not state.valid
        if found_bad or not (before.valid or loaded):
            return
        assert before.plan is not None
        self._held[str(state.plan.quorum), str(trainer.incarnation)] = _Held(
            position=state.position,
            version=state.version,
            lineage=before.plan.lineage if loaded else before.lineage,
            settled=state.settled,
            certified_in=state.certified_in,
            history=state.history,
        )

    def applied(self, trainer: Life, commit: Commit) -> History:
        """A rank applies a step; return the forks on which the outcome depends."""
        history = history_at(trainer.state.history, commit.step)
        hold(
            not trainer.state.history or self._may_fork,
            f"I9: {trainer.name} has a history of forks, which this job does not allow",
        )
        known = self._commits.setdefault((digest_of(history), commit.step), commit)
        hold(
            known == commit,
            f"I1: {trainer.name} applies step {commit.step} by another certificate than others",
        )
        return history

    def _truth(self, version: int, history: History, position: int) -> str:
        return self._course(version, history).states[position]

    def _chain(self, version: int, history: History) -> str | None:
        """Return the hash of the commits and forks of a course; None if one is not known."""
        key = version, digest_of(history)
        if key in self._chains:
            return self._chains[key]
        earlier = history_at(history, version - 1)
        chain = ""
        if version > 0:
            before = self._chain(version - 1, earlier)
            commit = self._commits.get((digest_of(earlier), version - 1))
            if before is None or commit is None:
                return None
            chain = extend_commit_chain(before, commit)
        for fork in history[len(earlier) :]:
            chain = hashlib.sha256((chain + codec.dumps(fork)).encode()).hexdigest()[:32]
        self._chains[key] = chain
        return chain

    def _check_history(self, who: str, history: History) -> None:
        """Each fork is the one that the rules and the course before it give, and is there once."""
        digest = digest_of(history)
        if digest in self._histories:
            return
        hold(self._may_fork, f"I9: {who} has a history of forks without permission")
        if self._repeats:
            same = history == self._repeats[: len(history)]
            hold(same, f"I9: {who} has another history than the lineage that is repeated")
        for number, fork in enumerate(history):
            before = history[:number]
            last = _places(before[-1]) if before and before[-1].version == fork.version else set()
            hold(
                not last or not (last <= _places(fork) or _places(fork) <= last),
                f"I9: {who} has {sorted(_places(fork))} made twice at version {fork.version}",
            )
            hold(
                not before or before[-1].version <= fork.version,
                f"I9: {who} has its forks out of order",
            )
            hold(  # where all who had applied a step are gone, its commit was not seen here
                self._chain(fork.version, before) in (None, fork.chain),
                f"I9: {who} has a fork at version {fork.version} that follows other commits",
            )
            if not self._repeats:
                self._check_fork(who, fork, before)
        self._histories[digest] = history

    def _guards(self) -> dict[tuple[str, int], int]:
        """Return the stage of the guards of all that guards keep: nothing of it is made else."""
        assert self._rules is not None
        if not self._rules.guards or self._shape.ranks_per_stage > 1:
            return {}
        outline, ends = self._rules.outline, ends_of(self._shape.stages)
        return {(name, 0): twin for end, twin in ends for name in guarded_blocks(outline, end)}

    def _check_fork(self, who: str, fork: Fork, before: History) -> None:
        rules = self._rules
        assert rules is not None
        norms = self._course(fork.version, before).norms_sq
        names = [block.name for stage in rules.outline for block in stage]
        stale = _stale_in(fork)
        # Of an end whose guards are lost, too, its own checkpoint has all.
        whole = {(block.name, inner) for stage, inner in stale for block in rules.outline[stage]}
        guards = {at: twin for at, twin in self._guards().items() if at not in whole}
        right = plan_reinitialisation(
            rules.outline,
            _places(fork),
            version=fork.version,
            norms_sq=dict(zip(names, norms, strict=True)) if norms else {},
            left=Left(guards=guards, stale=stale),
            policy=rules.policy,
            ranks_per_stage=self._shape.ranks_per_stage,
        )
        hold(
            fork.made == right,
            f"I9: {who} has a fork of other sources or weights than the last commit gives",
        )
        same = (fork.lr_boost, fork.boost_steps) == (rules.lr_boost, rules.boost_steps)
        hold(same, f"I9: {who} has a fork with another learning rate")

    # Settles ------------------------------------------------------------------

    def settled(
        self,
        plan: Plan,
        reports: Sequence[SettleReport],
        outcome: Settlement,
        plans: Sequence[Plan],
        lives: dict[str, Life],
    ) -> None:
        """A quorum has settled; ``plans`` are those up to its own."""
        if not self._may_fork:
            return
        by_index = sorted(reports, key=lambda report: report.index)
        self._seen["fork"] += outcome.fork is not None
        self._seen["of another course"] += bool(of_one_course(plan, by_index)[1])
        places = outcome.fork.made.positions if outcome.fork is not None else ()
        self._seen["fork with guards"] += any(b.is_exact for p in places for b in p.blocks)
        if outcome.fork is not None:
            durable = max(r.durable for r in reports)
            hold(
                bool(self._repeats) or not self._is_young(plan, outcome.version, durable),
                f"I9: {plan.quorum} forks at version {outcome.version}, and checkpoint {durable} "
                "is young enough",
            )
            hold(
                not any(outcome.step.kept.values()),
                f"I9: {plan.quorum} keeps what came through a stage that is another one now",
            )
        if not any(life.was_tampered for life in lives.values()):
            self._check_states(plan, reports, outcome)
        if plan.fork is not None and not self._repeats:
            self._check_made(plan, reports, outcome)
            self._check_not_lost(plan, reports, outcome, plans)

    def _is_young(self, plan: Plan, version: int, durable: int) -> bool:
        assert self._rules is not None
        how = plan.fork.how if plan.fork is not None else None
        limit = (how or self._rules).after_lost_steps
        return durable > 0 and (limit is None or version - durable <= limit)

    def _check_states(
        self, plan: Plan, reports: Sequence[SettleReport], outcome: Settlement
    ) -> None:
        """Only states of the course that all go on with count."""
        for report in reports:
            action = outcome.actions[report.index]
            if action not in (StateAction.STAY, StateAction.ROLL):
                continue
            history = history_at(outcome.history, report.version)
            right = self._truth(report.version, history, plan.position_of(report.index))
            hold(
                report.state == right,
                f"I9: {plan.quorum} counts a state of {plan.members[report.index].rank} at version "
                f"{report.version} that has another history",
            )
            for copy in report.guarded:
                hold(
                    copy.masters == terms.part(self._truth(report.version, history, copy.stage)),
                    f"I9: {plan.members[report.index].rank} guards another state of stage "
                    f"{copy.stage} at version {report.version} than a run of the same history has",
                )

    def _holding(self, plan: Plan, index: int) -> _Held | None:
        """Return the state of its position that a member brought, whatever it makes of it."""
        held = self._held.get((str(plan.quorum), str(plan.members[index].incarnation)))
        return held if held is not None and held.position == plan.position_of(index) else None

    def _check_made(self, plan: Plan, reports: Sequence[SettleReport], outcome: Settlement) -> None:
        """A stage of which members hold all that is ordered is not made anew."""
        assert plan.fork is not None
        counted = {
            plan.position_of(report.index)
            for report in reports
            if (held := self._holding(plan, report.index)) is not None
            and held.settled >= plan.members[report.index].since
            and plan.fork.since <= held.lineage
        }
        width = plan.ranks_per_stage
        for index, action in enumerate(outcome.actions):
            stage = plan.position_of(index) // width
            ordered = {p for p in plan.fork.positions if p // width == stage}
            hold(
                action is not StateAction.MAKE or not ordered <= counted,
                f"I9: {plan.quorum} makes stage {stage} anew, which members hold",
            )

    def _check_not_lost(
        self,
        plan: Plan,
        reports: Sequence[SettleReport],
        outcome: Settlement,
        plans: Sequence[Plan],
    ) -> None:
        """I3 with a fork: what is to be made anew need not be held by anybody, if it has sources.

        The coordinator may not know of the newest commits. So the stale copy that it orders may be
        too old for the version that members hold: then all go back, as without the order.
        """
        assert plan.fork is not None
        assert self._rules is not None
        durable = max(r.durable for r in reports)
        holding = {r.index: held for r in reports if (held := self._holding(plan, r.index))}
        newest = max((held.version for held in holding.values()), default=0)
        courses = {held.history for held in holding.values() if held.version == newest}
        guarded = {copy.stage for report in reports for copy in report.guarded}
        for index, held in holding.items():
            if held.certified_in is None:
                continue
            first = quorum_number(held.certified_in)
            kept = {i for i in holding if _stayed(plan, i, first, plans)}
            there = {plan.position_of(i) for i in kept}
            if index not in kept or len(there | set(plan.fork.positions)) < len(plan.positions):
                continue
            if self._is_young(plan, held.version, durable):
                continue  # the ladder's row 4
            left = Remains(durable=durable, histories=courses, guarded=guarded)
            if not have_sources(plan, self._rules, there, newest, left):
                self._seen["fork without sources"] += 1
                continue
            hold(
                StateAction.LOAD not in outcome.actions and outcome.version >= held.version,
                f"I3: {plan.quorum} goes to step {outcome.version} ({outcome.reason}), though "
                f"{plan.members[index].rank} has {held.version} and every position that is not "
                f"made anew kept a member since q{first}",
            )

    def entered(self, entry: LedgerEntry) -> None:
        """The first step after a fork tells of that fork, and with what it began."""
        history = self._histories.get(entry.history, ())
        is_first = bool(history) and history[-1].version == entry.step
        hold(
            is_first or entry.forked is None,
            f"I9: the entry of step {entry.step} tells of a fork, and its states have none there",
        )
        if entry.forked is None:
            return  # it was replayed, or no fork precedes it
        self._seen["told of a fork"] += 1
        position = entry.stage * self._shape.ranks_per_stage + entry.inner
        right = digest_of_fork(history[-1]), self._truth(entry.step, history, position)
        hold(
            (entry.forked.fork, entry.forked.masters) == right,
            f"I9: the entry of step {entry.step} of stage {entry.stage} tells of another fork, or "
            "another state after it",
        )

    # The disk and the end -------------------------------------------------------

    def durable(self, version: int, disk: Disk, lives: dict[str, Life]) -> None:
        """A checkpoint is complete, and older ones are removed."""
        parts = disk.complete[version]
        if not any(life.was_tampered for life in lives.values()):
            for position, part in parts.items():
                hold(
                    part.params == self._truth(version, part.history, position),
                    f"I9: the checkpoint of step {version} has another state of position "
                    f"{position} than its history says",
                )
        is_exact = not any(part.history for part in parts.values())
        hold(is_exact or self._may_fork, "I9: a checkpoint forks without permission")
        self._seen["approximate checkpoint"] += not is_exact
        if is_exact:
            self._way_back = version
        hold(
            is_exact or not self._way_back or disk.is_damaged or self._way_back in disk.complete,
            f"I9: the exact checkpoint of step {self._way_back} is gone, and that of step "
            f"{version} is approximate",
        )

    def finished(self, finals: Sequence[FinalDigests]) -> History:
        """The job is complete; return the history of its final state."""
        digests = {final.history for final in finals}
        hold(len(digests) == 1, "I9: positions end with different histories")
        (digest,) = digests
        hold(digest in self._histories, "I9: the job ends with a history that no state had")
        self._seen["ended approximate"] += bool(digest)
        return self._histories[digest]


def _stale_in(fork: Fork) -> dict[tuple[int, int], int]:
    """Return the versions of their own that positions of a fork were loaded from."""
    return {
        (place.stage, place.inner): source.version
        for place in fork.made.positions
        for block in place.blocks
        for source in block.sources
        if source.version is not None
    }


def _places(fork: Fork) -> set[tuple[int, int]]:
    return {(place.stage, place.inner) for place in fork.made.positions}


def _stayed(plan: Plan, index: int, first: int, plans: Sequence[Plan]) -> bool:
    """Return whether a member has been one since a quorum, and no plan has voided its state."""
    member = plan.members[index]
    since = [other for other in plans if other.quorum.id >= first]
    is_void = any(
        later.lineage > earlier.lineage and later.fork is None
        for earlier, later in itertools.pairwise(since)
    )
    places = (other.member_of(member.slot, member.incarnation) for other in since)
    return not is_void and all(
        known is not None and known.rank.position == member.rank.position for known in places
    )
