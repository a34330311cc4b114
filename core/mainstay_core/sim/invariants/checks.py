"""Checks the invariants after every event: protocol section 11, and the coordinator's own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from mainstay_core.base.ids import Incarnation
from mainstay_core.coordinator.events import Announce, PublishPlan, Transition
from mainstay_core.coordinator.invariants import check_invariants
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.rank.events import Event, ReportsGathered
from mainstay_core.rank.settle import Settlement, StateAction
from mainstay_core.rank.state import RankState
from mainstay_core.sim import terms
from mainstay_core.sim.disk import Disk
from mainstay_core.sim.engine import Violation
from mainstay_core.sim.invariants.holding import hold, quorum_number
from mainstay_core.sim.invariants.kept import Kept
from mainstay_core.sim.invariants.kept_boundaries import KeptBoundaries
from mainstay_core.sim.invariants.life import Life
from mainstay_core.sim.invariants.lineages import Lineages
from mainstay_core.sim.invariants.named import NamedDevices
from mainstay_core.sim.invariants.quorum_ends import QuorumEnds
from mainstay_core.sim.invariants.voided import check_not_void
from mainstay_core.wire.facts import Named, Phase
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.plan import Method, Plan
from mainstay_core.wire.reinitialisation import History, since_of
from mainstay_core.wire.votes import Commit, SettleReport

MISMATCHES = ("LedgerMismatch", "DigestMismatch")

ROOM_BYTES = 1 << 30
"""A store of so much has room for all that any job here writes."""


class Checks:
    """Watches a run; raises Violation.

    Args:
        config: of the job.
        max_plans: more than so many plans are a storm.
        disk: with the durable checkpoints.
        num_units: returns the units of a position.
    """

    def __init__(
        self, config: JobConfig, max_plans: int, disk: Disk, num_units: Callable[[int], int]
    ) -> None:
        shape, snapshots = config.shape, config.snapshots
        self._shape, self._max_plans, self._disk = shape, max_plans, disk
        self.boundaries: KeptBoundaries | None = None
        if snapshots is not None and snapshots.boundary:
            # A lost stage logs again while it is replayed, and little room may not do for that.
            has_room = snapshots.memory_bytes >= ROOM_BYTES
            self.boundaries = KeptBoundaries(shape.micro_batches, promises=has_room)
        self._saved = 0
        """Version with which the job was suspended last."""
        self.plans: list[Plan] = []
        """Every plan that became durable, in order; after a restoration those before it."""
        self.fell_back = False
        """Whether the store has lost something: ids may come again, with other nonces."""
        self._by_name: dict[str, Plan] = {}
        self.ends = QuorumEnds(self._by_name)
        self._reports: dict[str, tuple[SettleReport, ...]] = {}
        self._decisions: dict[int, tuple[CoordinatorState, CoordinatorState]] = {}
        """States before and after each decision that is not durable yet, by id of the latter."""
        self._lives: dict[str, Life] = {}
        self._named = NamedDevices()
        self._appliers: defaultdict[tuple[int, tuple[int, int]], list[Life]] = defaultdict(list)
        """Who has applied a step at a position."""
        self._adopted: dict[str, int] = {}
        self._reordered: set[int] = set()
        """Positions whose units some member has copied in another order than before."""
        self._connected: defaultdict[str, set[Incarnation]] = defaultdict(set)
        """Whom a group connects, by its name."""
        self.seen: Counter[str] = Counter()
        """What happened how often: transitions of ranks, methods of plans, actions of settles."""
        self._lineages = Lineages(config, self._course, self.seen)
        self.guarded, self.permissions = self._lineages.guarded, self._lineages.permissions
        self.kept = Kept(num_units, self._lineages.truths, self.boundaries)
        self.undecided = False
        """Whether ranks gave up as half of a position's copies, or more, were bad."""
        self._given_up: set[str] = set()
        """Lives whose right state was void with all the others, as no majority told them apart."""
        self.num_checks = self._num_plans = 0

    # Plans ------------------------------------------------------------------

    def decided(self, before: CoordinatorState, outcome: Transition) -> None:
        """The coordinator took a step."""
        self.num_checks += 1
        if outcome.state is not before:
            self._decisions[id(outcome.state)] = before, outcome.state
        check_invariants(outcome.state)
        plans = [a.plan for a in outcome.actions if isinstance(a, PublishPlan)]
        hold(len(plans) <= 1, "two plans for one event")
        hold(outcome.state.last_id >= before.last_id, "quorum ids went back")
        for action in outcome.actions:
            if isinstance(action, Announce):
                self.seen["state refused"] += action.code == "StateRefused"
            if not isinstance(action, Announce) or action.code not in MISMATCHES:
                continue
            if not any(life.was_tampered for life in self._lives.values()):
                raise Violation(f"I6: {action.message}")
        for plan in plans:
            known = str(plan.quorum) in self._by_name  # restored, whatever is wanted since
            most = max(outcome.state.wanted, len(before.plan.chains) if before.plan else 0)
            hold(known or len(plan.chains) <= most, f"{plan.quorum} has more than {most} replicas")

    def committed(self, before: CoordinatorState, after: CoordinatorState) -> None:
        """Decisions are durable."""
        self.permissions.committed(after)
        for old, new in self._steps_between(before, after):
            if new.phase is JobPhase.SUSPENDED and old.phase is not JobPhase.SUSPENDED:
                self.seen["suspended"] += 1
                if old.plan is not None:
                    self.seen["suspended while " + old.phase] += 1
                    self._check_saved(old)

    def _steps_between(
        self, before: CoordinatorState, after: CoordinatorState
    ) -> list[tuple[CoordinatorState, CoordinatorState]]:
        """Return the decisions that one change makes durable, the newest first."""
        steps = []
        while after is not before and (step := self._decisions.pop(id(after), None)):
            steps.append(step)
            after = step[0]
        return steps

    def _check_saved(self, before: CoordinatorState) -> None:
        """Nobody ends before what it has is on the disk, unless some stage had nothing to save."""
        plan = before.plan
        assert plan is not None
        newest = max(self._disk.complete, default=0)
        self._saved = self._disk.newest_complete()
        nobody = before.phase in (JobPhase.WAITING, JobPhase.FORMING)
        if nobody or self._disk.is_damaged:
            return
        hold(plan.pause, f"suspended in {plan.quorum}, in which nobody pauses")
        for life in self._lives.values():
            here = life.quorum == plan.quorum and life.state.index >= 0
            if life.alive and here and life.state.valid:
                hold(
                    life.state.version <= newest,
                    f"suspended with the checkpoint of step {newest}, though {life.name} has "
                    f"{life.state.version}",
                )

    def published(self, plan: Plan) -> None:
        """A plan is durable."""
        name = str(plan.quorum)
        self.seen[f"plan {plan.method}"] += 1
        self.seen["unplanned"] += not plan.planned
        known = self._by_name.get(name)
        if known is not None and self.fell_back:
            hold(known == plan, f"I4: {name} is restored as another plan")
            self.seen["plan restored"] += 1
            self.plans = self.plans[: self.plans.index(known) + 1] if known in self.plans else []
            self.plans = self.plans or [plan]
            return
        hold(known is None, f"I4: {name} is published twice")
        if self.plans and not self.fell_back:
            last = self.plans[-1]
            hold(plan.quorum.id == last.quorum.id + 1, f"I4: {plan.quorum} follows {last.quorum}")
            self._check_since(last, plan)
        if not self.fell_back:
            self._lineages.published(self.plans[-1] if self.plans else None, plan)
        self.permissions.published(plan)
        self.plans.append(plan)
        self._by_name[name] = plan
        self._num_plans += 1
        hold(
            self._num_plans <= self._max_plans,
            f"I5: a storm of {self._num_plans} plans, the last one: {plan.reason}",
        )

    @staticmethod
    def _check_since(last: Plan, plan: Plan) -> None:
        for member in plan.members:
            before = last.member_of(member.slot, member.incarnation)
            stayed = before is not None and before.rank.position == member.rank.position
            since = before.since if before is not None and stayed else plan.quorum.id
            hold(
                member.since == since,
                f"I3: {member.rank} of {plan.quorum} is a member since {since}, not {member.since}",
            )

    # Ranks ------------------------------------------------------------------

    def adopts(self, trainer: Life, plan: Plan) -> None:
        """A trainer enters a quorum."""
        self.num_checks += 1
        life = str(trainer.incarnation)
        self._lives[life] = trainer
        hold(str(plan.quorum) in self._by_name, f"{plan.quorum} was never durable")
        newest = self._adopted.get(life, -1)
        hold(newest < plan.quorum.id, f"I4: {life} goes back from {newest} to {plan.quorum}")
        self._adopted[life] = plan.quorum.id

    def moved(self, trainer: Life, before: RankState, event: Event) -> None:
        """A rank's state machine took a step."""
        self.num_checks += 1
        self.seen[f"{before.phase} {type(event).__name__}"] += 1
        self._lineages.moved(trainer, before, event)
        self._note_order(trainer, before)
        plan, outcome = trainer.state.plan, trainer.state.settlement
        if trainer.state.phase is Phase.FAILED and before.phase is not Phase.FAILED:
            assert plan is not None
            self._gave_up(plan, before.version)
        is_parked = trainer.state.phase is Phase.PARKED
        if before.valid and not trainer.state.valid and is_parked and not trainer.was_tampered:
            self._void(before)
            self._given_up.add(str(trainer.incarnation))
        if isinstance(event, ReportsGathered) and outcome is not None:  # None: moved on at once
            assert before.plan is not None  # the reports' own: it may be in a newer one at once
            self._settled(before.plan, event, outcome)

    def _note_order(self, trainer: Life, before: RankState) -> None:
        """Count windows that begin with another order of units than those before."""
        old, new = before.basis.popularity.ordered_by, trainer.state.basis.popularity.ordered_by
        if old and new and old != new and before.window != trainer.state.window:
            self.seen["reordered"] += 1
            self._reordered.add(trainer.state.member_position)

    def _void(self, before: RankState) -> None:
        """A rank gives a right state up: that is right only where most copies are not."""
        assert before.plan is not None
        members = before.plan.positions[before.member_position]
        lives = [self._lives.get(str(m.incarnation)) for m in members]
        self.undecided |= len(members) <= 2 * sum(x.was_tampered for x in lives if x)
        hold(self.undecided, f"I5: a right state is given up in {before.plan.quorum}")

    def _gave_up(self, plan: Plan, version: int) -> None:
        """A rank fails the job: that is right only where most copies are not."""
        for members in plan.positions:
            lives = [self._lives.get(str(m.incarnation)) for m in members]
            copies = [x for x in lives if x and x.state.valid and x.state.version == version]
            self.undecided |= 0 < len(copies) <= 2 * sum(x.tampered for x in copies)
        hold(self.undecided, f"I5: ranks of {plan.quorum} give up, though most copies are right")

    def _settled(self, plan: Plan, event: ReportsGathered, outcome: Settlement) -> None:
        name, reports = str(plan.quorum), event.reports
        if name in self._reports:
            hold(self._reports[name] == reports, f"I2: two sets of reports in {name}")
            return
        self._reports[name] = reports
        for action in outcome.actions:
            self.seen[f"settle {action}"] += 1
        for members, group in zip(plan.positions, outcome.stage_groups, strict=True):
            self.seen["group kept"] += bool(group)
            hold(
                not group or {m.incarnation for m in members} == self._connected[group],
                f"{plan.quorum} keeps {group}, which connects {sorted(self._connected[group])}",
            )
        if plan.method is Method.START and not (self.fell_back or self._disk.is_damaged):
            hold(
                outcome.version >= self._saved,
                f"{plan.quorum} goes on from step {outcome.version}, the checkpoint is of "
                f"{self._saved}",
            )
        check_not_void(plan, outcome, self._disk, self.seen)
        self._check_not_lost(plan, reports, outcome)
        self._check_not_wrong(plan, reports, outcome)
        plans = self.plans[: self.plans.index(plan) + 1] if plan in self.plans else []
        self._lineages.settled(plan, reports, outcome, plans, self._lives)
        if self.boundaries is not None:
            self.seen.update(self.boundaries.replays(outcome))
        if event.stores:
            self.seen["stores asked"] += 1
            self.kept.settled(plan, reports, event.stores, outcome)

    def _check_not_wrong(
        self, plan: Plan, reports: tuple[SettleReport, ...], outcome: Settlement
    ) -> None:
        """What a member knows to be wrong does not count, whoever else has a copy."""
        computed = {t for types in outcome.step.todo.values() for t in types}
        for member in (plan.members[report.index] for report in reports):
            stays = outcome.actions[member.index] is StateAction.STAY
            wrong = set(self._lives[str(member.incarnation)].known_wrong) if stays else set()
            self.seen["settle with wrong types"] += bool(wrong)
            counted = sorted(wrong - computed)
            hold(not counted, f"I2: {member.rank} knows that types {counted} are wrong: they count")

    def replayed(self, trainer: Life, version: int, params: str, history: History) -> None:
        """A rank has made the state of its position anew, of a history of forks."""
        position = trainer.state.member_position
        self.seen["replayed"] += 1
        self.seen["replayed after a fork"] += bool(history)
        self.seen["replayed after another order"] += position in self._reordered
        hold(
            params == self.truth(version, history)[position],
            f"I6: {trainer.name} has made another state of position {position} at version "
            f"{version} than the failure-free run",
        )

    def accused(self, trainer: Life, verdict: Verdict) -> None:
        """The votes have named a device that computed wrongly."""
        self.seen[f"named {verdict}"] += 1
        self._named.note(trainer, verdict)
        hold(trainer.was_wrong, f"I8: {trainer.name} is named {verdict}, and was never wrong")

    def void_guard(self, name: str, end: int) -> None:
        """A member tells that a guard has another copy of an end's blocks than the owners."""
        hold(
            any(life.was_tampered for life in self._lives.values()),
            f"I9: {name} tells that a copy of stage {end} is void, though no copy was ever wrong",
        )

    def replay_differs(self, trainer: Life, why: str) -> None:
        """A rank has computed something else than votes told."""
        hold(
            any(life.was_tampered for life in self._lives.values()),
            f"I6: {trainer.name}: {why}, though no state was ever bad",
        )

    def connected(self, trainer: Life, name: str) -> None:
        """A rank has connected a group: again, if a planned plan left all its members together."""
        plan, index = trainer.state.plan, trainer.state.index
        assert plan is not None
        self._connected[name].add(trainer.incarnation)
        self.seen["group connected"] += 1
        kind = name.rpartition("/")[2][0]
        if kind == "g":
            self.seen["guards connected"] += 1
            return  # these end with their quorum
        mine = _formations(plan, index)[kind]
        settled = {r.settled for r in self._reports[str(plan.quorum)] if r.index in mine}
        # A store that forgot may give a number twice: the newest plan of it with this rank counts.
        before, own = next(
            (
                (p, m.index)
                for p in reversed(self.plans)
                for m in p.members
                if {p.quorum.id} == settled and m.incarnation == trainer.incarnation
            ),
            (None, -1),
        )
        stayed = before and all(plan.members[i].since <= before.quorum.id for i in mine)
        if plan.planned and before and stayed:
            same = _lives(before, _formations(before, own)[kind]) == _lives(plan, mine)
            self.seen["group connected again"] += same

    def _check_not_lost(
        self, plan: Plan, reports: tuple[SettleReport, ...], outcome: Settlement
    ) -> None:
        """I3, as the model checker has it: from membership alone, not from ``since``."""
        if self.fell_back and plan not in self.plans:
            return  # of a branch that nobody follows any more
        position = self.plans.index(plan)
        history = self.plans[: position + 1]
        for report in reports:
            life = self._lives[str(plan.members[report.index].incarnation)]
            stayed = life.state.settled >= plan.members[report.index].since
            if not report.valid or not stayed or report.certified_in is None:
                continue
            first = quorum_number(report.certified_in)
            kept = [
                r
                for r in reports
                if self._continuous(plan, r.index, first, history) and self._kept(plan, r)
            ]
            covered = {plan.members[r.index].rank.position for r in kept}
            if report not in kept or len(covered) < len(self._shape.positions):
                continue
            lost = StateAction.LOAD in outcome.actions or outcome.version < report.version
            hold(
                outcome.actions[report.index] is not StateAction.HEAL,
                f"I3: {plan.members[report.index].rank} has to heal in {plan.quorum}, but stayed",
            )
            hold(
                not lost,
                f"I3: {plan.quorum} goes to step {outcome.version} ({outcome.reason}), though "
                f"{plan.members[report.index].rank} has {report.version} and every position kept "
                f"a member since q{first}",
            )

    def _kept(self, plan: Plan, report: SettleReport) -> bool:
        member = plan.members[report.index]
        life = self._lives[str(member.incarnation)]
        # A state that was given up, as it was corrupt or was not told from one, is no copy.
        is_given_up = life.was_tampered or str(member.incarnation) in self._given_up
        return life.state.settled >= member.since and (report.valid or not is_given_up)

    def _continuous(self, plan: Plan, index: int, first: int, history: list[Plan]) -> bool:
        member = plan.members[index]
        return all(
            (known := p.member_of(member.slot, member.incarnation)) is not None
            and known.rank.position == member.rank.position
            for p in history
            if p.quorum.id >= first
        )

    def applied(self, trainer: Life, commit: Commit, params: str) -> None:
        """A rank has applied a step."""
        self.num_checks += 1
        step, position = trainer.state.version, trainer.state.member_position
        self._appliers[step, self._shape.positions[position]].append(trainer)
        history = self._lineages.applied(trainer, commit)
        hold(commit.step == step, f"I1: {trainer.name} applies another step than {step}")
        hold(
            commit.statistics == _counted(self._shape.num_types, self._shape.stages, step),
            f"I2: step {step} is committed with {commit.statistics}, not each type's counts once",
        )
        hold(
            params == self.truth(step + 1, history)[position] or trainer.tampered,
            f"I6: {trainer.name} applied another gradient than the failure-free run, step {step} "
            f"of position {position}",
        )

    def same_entry(self, old: LedgerEntry, new: LedgerEntry) -> None:
        """A step is told again."""
        tampered = any(life.was_tampered for life in self._lives.values())
        hold(
            old.masters == new.masters or tampered,
            f"I6: step {new.step} of stage {new.stage} came out differently in {new.quorum}",
        )

    def entered(self, entries: Sequence[LedgerEntry]) -> None:
        """Entries are told to the ledger."""
        if not any(life.was_tampered for life in self._lives.values()):
            for entry in entries:
                self._lineages.entered(entry)

    def durable(self, version: int) -> None:
        """A checkpoint is complete."""
        self.seen["checkpoint"] += 1
        self._lineages.durable(version, self._disk, self._lives)

    def finished(self, state: CoordinatorState, named: Iterable[Named]) -> None:
        """The job is complete; these words of named devices were told by supervisors who live."""
        history = self._lineages.finished(state.finals)
        since, told = since_of(history), state.approximate_since
        hold(told == since, f"I9: approximate since {since}, and the job says since {told}")
        right = self.truth(self._shape.steps, history)
        for final in state.finals:
            position = final.stage * self._shape.ranks_per_stage + final.inner
            hold(
                final.params == right[position] and final.version == self._shape.steps,
                f"I6: the final state of stage {final.stage} is another",
            )
        hold(len(state.finals) == len(self._shape.positions), "a position without final digests")
        self._named.check(state, named, self._shape.steps, self.seen)

    def mirrored(self, ledger: Mapping[LedgerKey, LedgerEntry]) -> None:
        """All is told: of each position the ledger has all steps up to the last one that it has.

        Where a position has lost every member, or the store its memory, nobody could tell; nor
        where all who had applied a step ended one after the other, before the api heard the next.
        """
        again = (Method.START, Method.RESTART, Method.REPLAY, Method.APPROXIMATE)
        if self.fell_back or any(plan.method in again for plan in self.plans[1:]):
            return
        for position in self._shape.positions:
            told = [step for step in range(self._shape.steps) if (step, *position) in ledger]
            missing = sorted({*range(max(told, default=0))} - {*told})
            lives = [t.name for step in missing for t in self._appliers[step, position] if t.alive]
            hold(
                not lives,
                f"the ledger of position {position} has a hole: it has the steps {told}, and "
                f"{', '.join(lives)} could tell the others",
            )

    def truth(self, version: int, history: History = ()) -> tuple[str, ...]:
        """States of all positions in a run without failures but for its forks."""
        return self._course(version, history).states

    def _course(self, version: int, history: History) -> terms.Course:
        shape = self._shape
        width, order = shape.ranks_per_stage, shape.order
        return terms.true_course(
            shape.num_types, shape.micro_batches, shape.stages, width, version, history, order
        )


@lru_cache(maxsize=256)
def _counted(num_types: int, stages: int, step: int) -> tuple[int, ...]:
    """What the blocks of all stages count in a step, each type once."""
    types = range(num_types)
    return tuple(
        sum(counts)
        for stage in range(stages)
        for counts in zip(*(terms.counted(stage, step, t) for t in types), strict=True)
    )


def _formations(plan: Plan, index: int) -> dict[str, tuple[int, ...]]:
    """Return the members of a member's position, "p", and those of its chain, "r"."""
    chain = plan.chain_of(index)
    members = plan.position_members(plan.position_of(index))
    return {"p": tuple(m.index for m in members), "r": chain.cells if chain else ()}


def _lives(plan: Plan, indices: Sequence[int]) -> set[tuple[Incarnation, tuple[int, int]]]:
    return {(plan.members[i].incarnation, plan.members[i].rank.position) for i in indices}
