"""Holds everything that a rank knows, and says what a newer plan means for it.

These are the values of the trainer's state machine (:mod:`mainstay_core.rank.machine`) and the
questions that other threads ask of them. Plans arrive at any time. The shell stores the newest one
with :func:`saw_plan`, and asks :func:`interrupts` which connections it must shut so that the main
thread comes back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mainstay_core.base.codec import dumps
from mainstay_core.base.ids import Incarnation, Slot
from mainstay_core.base.values import replace
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import Told
from mainstay_core.job.config import LogKind
from mainstay_core.rank.events import Action, PlacedUnit
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.settle import Settlement
from mainstay_core.rank.steps.doubts import Watched, doubted_of
from mainstay_core.rank.steps.step_plan import Compared, StepPlan
from mainstay_core.reinitialisation.guards import Guard, plan_guards
from mainstay_core.snapshots.job_units import JobUnits
from mainstay_core.snapshots.orderings import ONE, Ordering
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.facts import Phase, RankFact
from mainstay_core.wire.ledger import CleanDevice
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.reinitialisation import ForkOutcome, History
from mainstay_core.wire.votes import Commit, GuardedDigest, MadeType, SettleReport
from mainstay_core.wire.windows import WindowBasis

F = TypeVar("F", bound=RankFact)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRules:
    """The settings of snapshots by which ranks decide."""

    num_instalments: int = 0
    """Versions over which one snapshot is spread; 0: as few as fit into a step, by what all ranks
    have measured."""
    peers: int = 0
    """Other pods to which each copy goes, where there are as many."""
    ordering: Ordering = Ordering.POPULARITY
    decay: int = ONE // 2
    """Alpha of a decayed popularity, in fixed point."""
    units: JobUnits | None = None
    """Of all positions; None copies nothing."""
    log: LogKind = LogKind.GRADIENTS
    """From what a lost state is made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Everything on which a rank's decisions depend."""

    slot: Slot
    incarnation: Incarnation
    num_steps: int
    shards_per_lane: int
    clip_norm: float | None
    heal_address: str
    max_attempts: int = 3
    """Bound on reductions of the same partials, and then on computations of the whole step. After
    these the rank gives up."""
    checkpoint_every_steps: int = 0
    """Steps between durable checkpoints; 0: none are written."""
    phase: Phase = Phase.IDLE
    plan: Plan | None = None
    index: int = -1
    newest: Plan | None = None
    adopt_next: bool = False
    """Whether the votes agreed to adopt the newest plan once the step is applied."""
    valid: bool = False
    position: int = -1
    """Number of the position whose state this is, while ``valid``."""
    lineage: int = 0
    version: int = 0
    certified_in: str | None = None
    commit: Commit | None = None
    commit_chain: str = ""
    digest: str = ""
    """Digest of the masters at ``version``."""
    last_gradient: str = ""
    """Digest of the position's reduced gradient of the step before ``version``; empty if it is not
    known, or nobody needs it."""
    last_masters: str = ""
    """Digest of the masters before that step, likewise."""
    held: tuple[Partial, ...] = ()
    held_in: int = 0
    """Quorum in which the oldest of ``held`` was begun."""
    held_with: frozenset[tuple[Slot, Incarnation]] = frozenset()
    """The cells, this one among them, of the chains that computed ``held``."""
    made: tuple[MadeType, ...] = ()
    """By which chains the types of ``held`` were computed."""
    tells_makers: bool = True
    """Whether settle reports say so. Where nothing is checked all copies of a type are equal."""
    bad: tuple[int, ...] = ()
    """Types of the step that votes have called wrong since the last settle."""
    bad_chains: tuple[int, ...] = ()
    """Replicas of this quorum whose cells have called a type wrong, once for each vote."""
    compares_last: bool = False
    """Whether the states after the last step are compared before the job is complete, also where
    nothing is saved then."""
    witness_every_steps: int = 0
    """In each step that is a multiple of it a second chain computes a type; 0: in none."""
    clean_from: int | None = None
    """First step in which no witness has agreed with this device yet: the one after that in which
    one did last, or the first that this trainer has computed; None before it has computed any."""
    all_clean_at: int | None = None
    """Newest version that no device of the quorum has tainted, whichever is named, by the votes;
    None in a job without a witness."""
    clean: tuple[CleanDevice, ...] = ()
    """Devices of this rank's position, as the newest votes tell of them."""
    clean_before: tuple[CleanDevice, ...] = ()
    """The same by the votes before: what the ledger knows."""
    told: tuple[Told, ...] = ()
    """What chains have told of the compared type in earlier attempts at the step, as they differ;
    and in quorums before this one."""
    told_of: int | None = None
    """That type; None while nothing is told."""
    named_as: Verdict | None = None
    """As what this device was named in the step at hand; None: it was not."""
    watched: Watched | None = None
    """The compared type, once this rank's chain has computed it, until a vote has heard of it."""
    refused_in: int = -1
    """Newest quorum known to have refused a step over a bad state."""
    mark: str | None = None
    settled: int = -1
    attempt: int = 0
    recomputed: int = 0
    """How often the step at ``version`` was computed again, as no reduction was agreed on."""
    durable: int = 0
    """Newest version that is known to be durable."""
    safe: int = 0
    """Newest version of which this quorum knows every part to be written. It becomes durable if
    its first member lives to rename it."""
    safe_nonce: str = ""
    """Which attempt that was."""
    tried: int = 0
    """Newest version that this quorum has begun to write."""
    writers_free: bool = False
    """Whether nobody was writing, according to the last votes."""
    told_busy: bool = False
    """Whether this rank has reported that a due version waits for one that is being written."""
    save_round: int = 0
    """Number of exchanges of statuses since the last step."""
    settlement: Settlement | None = None
    step_plan: StepPlan | None = None
    fork_rules: ForkRules | None = None
    """None in a job that must not go on approximately."""
    history: History = ()
    """Forks that the state contains; empty: it is exact."""
    repeats: History = ()
    """The forks of another run that this one makes again, each at its version."""
    outcomes: tuple[ForkOutcome | None, ...] = ()
    """What is known of the states that these led to, by the number of the fork."""
    guarded: tuple[GuardedDigest, ...] = ()
    """What it guards of other stages, at ``version``."""
    snapshots: SnapshotRules | None = None
    """None in a job without snapshots."""
    window: Window | None = None
    """The window in flight; None between a complete one and the next."""
    share: tuple[tuple[PlacedUnit, ...], ...] = ()
    """What this rank copies in it, by instalment."""
    basis: WindowBasis = field(default_factory=WindowBasis)
    """What the next window is planned from: all members of a quorum have the same."""
    kept_from: int = 0
    """First version of the newest window that votes completed: nothing older is needed."""

    @property
    def member_stage(self) -> int:
        """Stage in the adopted plan."""
        assert self.plan is not None
        return self.plan.members[self.index].rank.stage

    def computes(self, compared: Compared) -> bool:
        """Return whether this rank's chain is one of those that compute a compared type."""
        chain = self.plan.chain_of(self.index) if self.plan else None
        return chain is not None and chain.replica in compared.replicas

    @property
    def is_lowest(self) -> bool:
        """Return whether this is the first member of its position. It writes the ledger."""
        assert self.plan is not None
        return self.plan.position_members(self.member_position)[0].index == self.index

    @property
    def is_oldest(self) -> bool:
        """Return whether this is the member of its position that has been one for the longest.

        Of several the first one. Of all members it holds the most ledger entries.
        """
        assert self.plan is not None
        members = self.plan.position_members(self.member_position)
        return min(members, key=lambda m: m.since).index == self.index

    @property
    def agreed_pipeline(self) -> str:
        """Return the pipeline group that this rank's chain keeps; "" for a new one."""
        chain = self.plan.chain_of(self.index) if self.plan else None
        return self.settlement.pipelines[chain.replica] if self.settlement and chain else ""

    @property
    def agreed_stage_group(self) -> str:
        """Return the group that this rank's position keeps; "" for a new one."""
        return self.settlement.stage_groups[self.member_position] if self.settlement else ""

    @property
    def step_at_hand(self) -> int:
        """Return the step at hand: ``version``, or the settled version during a heal."""
        if self.phase is Phase.HEALING and self.settlement is not None:
            return self.settlement.version
        return self.version

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Return who guards what ends of the pipeline alone have, under the adopted plan."""
        rules = self.fork_rules
        plan = self.plan
        if rules is None or plan is None:
            return ()
        outline, number = rules.outline, rules.guards
        return plan.guards_by(outline, number, lambda: plan_guards(plan, outline, number))

    @property
    def is_guarded(self) -> bool:
        """Return whether others guard some of this rank's stage."""
        return any(guard.end == self.member_stage for guard in self.guards)

    @property
    def member_inner(self) -> int:
        """Inner rank in the adopted plan."""
        assert self.plan is not None
        return self.plan.members[self.index].rank.inner

    @property
    def member_position(self) -> int:
        """Number of its position in the adopted plan: by stage, then by inner rank."""
        assert self.plan is not None
        return self.plan.position_of(self.index)


@dataclass(frozen=True, slots=True)
class Transition:
    """The outcome of one event: the new state, the actions, and a reason."""

    state: RankState
    actions: tuple[Action, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The connections that a newer plan makes useless."""

    quorum: bool
    pipeline: bool


def saw_plan(state: RankState, plan: Plan) -> RankState:
    """Return the state with ``plan`` as the newest seen, if it is newer."""
    if state.newest is not None and state.newest.quorum.id >= plan.quorum.id:
        return state
    return replace(state, newest=plan)


def saw_durable(state: RankState, version: int) -> RankState:
    """Return the state with ``version`` as the newest durable version that can be read."""
    return replace(state, durable=version)


def interrupts(
    adopted: Plan | None, index: int, newest: Plan, *, connected: bool = True
) -> Interrupt:
    """Return what ``newest`` interrupts of member ``index`` of the adopted plan.

    A planned plan interrupts nobody. An unplanned one ends the quorum at once. But a chain that it
    leaves intact goes on computing (protocol section 3) if its pipeline is ``connected``: otherwise
    a cell that never began may be among those waited for.
    """
    if adopted is None or newest.unplanned_id <= adopted.quorum.id:
        return Interrupt(quorum=False, pipeline=False)
    chain = adopted.chain_of(index)
    if chain is None:
        return Interrupt(quorum=True, pipeline=False)
    identity = adopted.chain_identity(chain)
    intact = any(
        c.formed_in == chain.formed_in and newest.chain_identity(c) == identity
        for c in newest.chains
    )
    return Interrupt(quorum=True, pipeline=not (intact and connected))


def must_adopt(state: RankState) -> bool:
    """Return whether an unplanned plan newer than the adopted one is known."""
    if state.newest is None:
        return False
    return state.plan is None or state.newest.unplanned_id > state.plan.quorum.id


def report_of(state: RankState) -> SettleReport:
    """Return the rank's settle report. Of an invalid state it says only that it is invalid."""
    report = SettleReport(
        index=state.index,
        valid=state.valid,
        heal_address=state.heal_address,
        durable=state.durable,
        refused_in=state.refused_in,
    )
    if not state.valid:
        return report
    return replace(
        report,
        lineage=state.lineage,
        version=state.version,
        certified_in=state.certified_in,
        commit=state.commit,
        chain=state.commit_chain,
        state=state.digest,
        held=state.held,
        held_in=state.held_in,
        made=state.made if state.held and state.tells_makers else (),
        bad=state.bad,
        mark=state.mark,
        settled=state.settled,
        basis=state.basis if state.snapshots is not None and state.is_oldest else None,
        kept_from=state.kept_from,
        last_gradient=state.last_gradient,
        last_masters=state.last_masters,
        history=state.history,
        guarded=state.guarded,
        doubted=doubted_of(state.told, state.told_of, state.member_position),
    )


def extend_commit_chain(commit_chain: str, commit: Commit) -> str:
    """Return the commit chain after one more commit.

    It is the same whether or not a job has the norms told that only a fork needs.
    """
    commit = replace(commit, norms_sq=())
    return hashlib.sha256((commit_chain + dumps(commit)).encode()).hexdigest()[:32]


def fact_of(state: RankState, kind: type[F], **fields: Any) -> F:
    """Return a fact of this rank, with its identity, quorum and version filled in."""
    about: dict[str, Any] = {
        "pod": state.slot.pod,
        "slot": state.slot.index,
        "incarnation": state.incarnation,
        "quorum": state.plan.quorum if state.plan else None,
        "step": state.version,
    }
    return kind(**{**about, **fields})
