"""Derives from the coordinator's state what the ladder is asked."""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.ids import Incarnation
from mainstay_core.coordinator import ladder
from mainstay_core.coordinator.siting import surplus_slots, usable_slots
from mainstay_core.coordinator.state import (
    CoordinatorState,
    all_settled,
    holds_state,
    is_living,
    still_joining,
)
from mainstay_core.coordinator.stores import keeps_segments
from mainstay_core.job.config import ApproximateConfig, JobConfig
from mainstay_core.reinitialisation.guards import (
    GuardingCell,
    ends_of,
    guarded_blocks,
    plan_guards,
)
from mainstay_core.reinitialisation.sources import Left, Policy, policy_of
from mainstay_core.wire.plan import Member, Method
from mainstay_core.wire.reinitialisation import Permission

AT_ONCE = 0
"""Lost steps from which a stage is made anew rather than that the job goes back, where a person has
allowed it: any."""


def lost_stages(state: CoordinatorState) -> tuple[int, ...]:
    """Return the stages of which no living member holds some position's state, ascending."""
    positions = state.plan.positions if state.plan is not None else ()
    empty = [p for p in positions if not any(holds_state(state, member) for member in p)]
    return tuple(sorted({members[0].rank.stage for members in empty}))


def made_again(state: CoordinatorState) -> frozenset[int]:
    """Return the positions of an unfinished fork that have to be made anew, some of them again."""
    plan = state.plan
    if plan is None or plan.fork is None or all_settled(state):
        return frozenset()
    positions = plan.positions
    lost = [p for p in plan.fork.positions if not any(holds_state(state, m) for m in positions[p])]
    return plan.fork.made_with(lost, plan.ranks_per_stage)


def note_guards(state: CoordinatorState) -> CoordinatorState:
    """Return the state with those who guard under its plan: a step was committed in its quorum.

    No guard votes before it has tried to copy what it guards.
    """
    plan = state.plan
    assert plan is not None
    guards = plan_guards(plan, state.outline, state.config.guards)
    cells = tuple(
        GuardingCell(
            end=guard.end,
            incarnation=plan.members[guard.index].incarnation,
            quorum_id=plan.quorum.id,
        )
        for guard in guards
    )
    return replace(state, guards=cells)


def left_of_lost(state: CoordinatorState) -> Left:
    """Return what copies are left of the blocks that ends of the pipeline alone have.

    After a restart all have loaded their states, and guards copy again.
    """
    living: dict[Incarnation, int] = {}
    for member in state.plan.members if state.plan is not None else ():
        if holds_state(state, member):
            living[member.incarnation] = member.rank.stage
    twins = dict(ends_of(state.shape.stages))
    found: dict[tuple[str, int], int] = {}
    for cell in state.guards:
        stage = living.get(cell.incarnation)
        if cell.quorum_id >= state.restarted_id and stage is not None and stage == twins[cell.end]:
            blocks = guarded_blocks(state.outline, cell.end)
            found |= dict.fromkeys(((name, 0) for name in blocks), stage)
    return Left(guards=found)


def rules_of(state: CoordinatorState) -> ApproximateConfig | None:
    """Return by what rules stages may be made anew from others now; None: they may not."""
    if state.config.repeats:
        return None  # it makes the forks of another run, and no others
    permission = permission_of(state)
    if permission is None:
        return state.config.approximate
    return permitted_rules(state.config, permission)


def permission_of(state: CoordinatorState) -> Permission | None:
    """Return the person's permission by which stages may be made anew now; None: by none.

    It counts for the stages that it names. More than these are lost where something has ended
    since. One for the recovery at hand goes first, then the job's policy. So what was given ahead
    is not used where the policy does as well.
    """
    ahead = None if state.config.approximate is not None else state.ahead
    given = (for_recovery_at_hand(state), ahead)
    return next((p for p in given if p is not None and is_permitted(state, p)), None)


def for_recovery_at_hand(state: CoordinatorState) -> Permission | None:
    """Return the permission for the recovery at hand, as far as stages may be made anew by it now.

    One that was given ahead makes none once a suspension or a restart has cut its recovery short:
    what is loaded may have what was made by it.
    """
    given = state.permission
    is_open = state.in_force is not None and state.in_force.fork is not None
    return None if given is not None and given.is_ahead and not is_open else given


def left_ahead(state: CoordinatorState) -> Permission | None:
    """Return the permission ahead of a loss that people are shown as not used yet.

    One of which a recovery was cut short by a suspension or a restart is among them: it counts
    again once all go on, if nothing was made anew by it.
    """
    return state.ahead or (state.permission if for_recovery_at_hand(state) is None else None)


def may_ask(state: CoordinatorState, method: Method) -> bool:
    """Return whether members ask before they load a checkpoint, as row 5 may be another way.

    They ask once, and only where a stage is known to be lost: otherwise the ladder has no answer.
    """
    may = method in (Method.REPLAY, Method.REFORM, Method.MASK) and not state.unreached
    has_stores = state.config.snapshots is not None
    return may and has_stores and bool(lost_stages(state)) and rules_of(state) is not None


def has_asked(state: CoordinatorState) -> bool:
    """Return whether the members of the plan have asked what becomes of a stage that is still lost.

    As they are told not to ask again, no other plan than a fork or a restart may have them meet.
    """
    asks = state.plan is not None and state.plan.asks_first and state.unreached
    return asks and bool(lost_stages(state))


def awaits_outline(state: CoordinatorState) -> bool:
    """Return whether stages may be made anew, and a member is still to tell of the blocks.

    A store that has lost the job is given the plan first, and hears of each trainer later. Before
    that it knows of no block, so row 5 would seem impossible, and all would go back. Every trainer
    tells its blocks with its fingerprint, so the wait ends with the members' next facts.
    """
    if state.plan is None or state.outline or not state.restored or rules_of(state) is None:
        return False
    return any(
        is_living(state, member) and str(member.slot) not in state.fingerprints
        for member in state.plan.members
    )


def is_permitted(state: CoordinatorState, permission: Permission) -> bool:
    """Return whether a permission is for all stages that are lost now."""
    return set(lost_stages(state)) <= set(permission.stages)


def permitted_rules(config: JobConfig, permission: Permission | None = None) -> ApproximateConfig:
    """Return the rules of a job for one recovery that a person allows.

    Who gives a permission ahead says how many lost steps are too many, and does not see the loss:
    holders that are only cut off are waited for as by the job's policy. Otherwise the job waits for
    nobody. Where that limit has all stages go back to whatever checkpoint is young enough, none
    loads one alone.

    Args:
        config: of the job.
        permission: None: one for a recovery that the job waits for.
    """
    rules = config.approximate_rules
    if permission is not None and permission.is_ahead:
        rules = replace(rules, after_lost_steps=permission.after_lost_steps)
        return rules if rules.loads_alone else replace(rules, stale_steps=0)
    return replace(rules, after_lost_steps=AT_ONCE, wait_s=0.0)


def _goes_on_at(state: CoordinatorState) -> int:
    """Return the number of steps that would be lost by a return to the seed, as far as it is known.

    A restart that has not settled yet, or a plan that only repeats it, has given up the steps that
    are counted. What is lost meanwhile has to be loaded again, and no more than that.
    """
    last = state.last_commit
    if last is None or last.quorum_id >= state.restarted_id or all_settled(state):
        return state.step
    if state.settled_step is not None:
        return min(state.step, state.settled_step)
    return min(state.step, state.durable)


def cut_off(state: CoordinatorState) -> tuple[Member, ...]:
    """Return the members that alone have some position's state and are only silent, in index order.

    Their pods count as gone. Should they be heard again, they have what they had.
    """
    positions = state.plan.positions if state.plan is not None else ()
    empty = [p for p in positions if not any(holds_state(state, member) for member in p)]
    return tuple(m for members in empty for m in members if _may_return(state, m))


def _may_return(state: CoordinatorState, member: Member) -> bool:
    slot = state.slot(member.slot)
    if slot is None or still_joining(state, member):
        return False
    # A life that surely ended is remembered. One of a pod that registers again is told next.
    return slot.incarnation is None and member.incarnation not in slot.ended


def waits_until(state: CoordinatorState, rules: ApproximateConfig | None) -> float:
    """Return until when holders that were only cut off are waited for; 0: there are none."""
    if rules is None or not rules.wait_s:
        return 0.0
    noted = [slot.learnt_down_s for m in cut_off(state) if (slot := state.slot(m.slot))]
    return max((noted_s + rules.wait_s for noted_s in noted), default=0.0)


def find_situation(
    state: CoordinatorState, num_lost: int, now_s: float, rules: ApproximateConfig | None
) -> ladder.Situation:
    """Return the ladder's input for this state.

    Args:
        state: of the job.
        num_lost: cells that are gone.
        now_s: wall clock; at infinity nobody is held back.
        rules: by which stages may be made anew from others; None: they may not.
    """
    assert state.plan is not None
    stages, order = [], Policy(order=state.shape.order)
    again = made_again(state)
    # What they keep is of the lineage before, until all have settled with a fork.
    is_open = state.plan.fork is not None and not all_settled(state)
    replayable = keeps_segments(state) and not (state.unreached or is_open)
    for number, position in enumerate(state.plan.positions):
        members = [m for m in position if is_living(state, m)]
        stages.append(
            ladder.StageHolders(
                stage=position[0].rank.stage,
                inner=position[0].rank.inner if state.shape.ranks_per_stage > 1 else None,
                holders=0 if number in again else sum(holds_state(state, m) for m in members),
                living=len(members),
                replayable=replayable,
                unreached=state.unreached,
            )
        )
    return ladder.Situation(
        stages=tuple(stages),
        step=_goes_on_at(state),
        free_slots=len(usable_slots(state, now_s)) + len(surplus_slots(state)),
        lost=num_lost,
        durable_step=state.durable,
        allow_approximate=rules is not None,
        approximate_after_lost_steps=rules.after_lost_steps if rules is not None else None,
        outline=state.outline,
        reinitialisation=policy_of(rules, order) if rules is not None else order,
        left=left_of_lost(state),
        num_forks=state.num_forks,
    )
