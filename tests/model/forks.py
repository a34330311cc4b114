"""Defines forks in the model: what states consist of, whose count, and what is made anew.

A fork is (version, stages). The bits of a state are the forks that went into them: all of earlier
versions, as activations pass through every stage, and of one at the very version those that made
its own stage. A gradient's bits are those of the states through which it was computed.
"""

from __future__ import annotations

import itertools

from tests.model.values import DEAD, NONE, OK, Cfg, Plan, Pod, State, Violation, rank_of

_TAGS: dict[tuple, int] = {}
"""Numbers of gradients, by the bits of the states of all stages."""


def right_bits(stage: int, version: int, history: tuple) -> tuple:
    """Return the bits that a state has in a run of this history."""
    return tuple(f for f in history if f[0] < version or (f[0] == version and stage in f[1]))


def tag_of(bits: tuple) -> int:
    """Return the buffer of a gradient that was computed through states with these bits."""
    return 10 + _TAGS.setdefault(bits, len(_TAGS)) if any(bits) else OK


def right_tag(cfg: Cfg, version: int, history: tuple) -> int:
    return tag_of(tuple(right_bits(s, version, history) for s in range(cfg.P)))


def since_of(plan: Plan, i: int) -> int:
    return next(q for m, q in zip(plan.members, plan.since, strict=True) if m[2] == i)


def counts(cfg: Cfg, st: State, pod: Pod, plan: Plan, i: int) -> bool:
    """Return whether a rank's state counts in the lineage of a plan that it adopts."""
    if "fork_counts_all" in cfg.rules:
        return True
    if plan.order is None or "fork_voids_all" in cfg.rules:
        return pod.lin == plan.lineage
    since = plan.order[1]
    stayed = pod.q >= 0 and st.plans[pod.q].qid >= since_of(plan, i)
    is_first = pod.lin == since == plan.lineage - 1
    came = stayed or is_first or "fork_counts_away" in cfg.rules
    return came and since <= pod.lin <= plan.lineage


def of_one_course(cfg: Cfg, plan: Plan, reports: dict) -> dict:
    """Return reports in which a state does not count that has not the forks of those who stayed.

    Of these the course is that of who settled last. Whose stage it made anew at the very version of
    a state, or at the next, must have that fork.
    """
    told = {p: rep for p, rep in reports.items() if rep[0] >= 0}
    if "fork_other_course" in cfg.rules or not any(rep[7] for rep in told.values()):
        return reports
    stayed = {p: rep[5] >= since_of(plan, p) for p, rep in told.items()}
    first = max(told, key=lambda p: (stayed[p], told[p][5], len(told[p][7]), -p))
    course, rank, counted = told[first][7], rank_of(plan), dict(reports)
    for p, rep in told.items():
        below, theirs = (tuple(f for f in h if f[0] < rep[0])[-1:] for h in (rep[7], course))
        made = {f for f in course if f[0] in (rep[0], rep[0] + 1) and rank[p][1] in f[1]}
        if below != theirs or not made <= set(rep[7]):
            counted[p] = (-1, rep[1], (NONE,) * cfg.N, None, *rep[4:8], None)
    return counted


def made_stages(cfg: Cfg, plan: Plan, lost: set) -> set:
    """Return the stages that are made anew of others, of those that nobody holds."""
    if plan.order is None:
        return set()
    return set(plan.order[0]) if "made_though_held" in cfg.rules and lost else lost & plan.order[0]


def history_after(cfg: Cfg, reports: dict, version: int, made: set) -> tuple:
    """Return the history with which all go on: the newest that is known, with the fork."""
    there = [rep[7] for rep in reports.values() if rep[0] == version]
    known = max(there, key=lambda h: (_num_made(h, version), len(h)), default=())
    if not made:
        return known
    if "fork_twice" in cfg.rules:
        return (*known, (version, frozenset(made)))
    if known and known[-1][0] == version and made <= known[-1][1]:
        return known
    while known and known[-1][0] == version and known[-1][1] <= made:
        known = known[:-1]
    return (*known, (version, frozenset(made)))


def _num_made(history: tuple, version: int) -> int:
    return len({s for v, stages in history if v == version for s in stages})


def check_settled(plan: Plan, reports: dict, action: dict, outcome: tuple) -> None:
    """A stage is made anew only if no member holds it, and no fork is remembered twice."""
    version, history = outcome
    rank = rank_of(plan)
    made = {rank[p][1] for p, what in action.items() if what == "make"}
    for p, rep in reports.items():
        if rank[p][1] in made and rep[0] >= 0 and rep[5] >= since_of(plan, p):
            raise Violation(f"I9: stage {rank[p][1]} is made anew, and pod{p} holds it")
    for (v, before), (at, stages) in itertools.pairwise(history):
        if at == v and (stages <= before or before <= stages):
            raise Violation(f"I9: the history at version {version} has a fork twice")


def check_states(cfg: Cfg, st: State) -> None:
    """Every state is that of a run of its history."""
    for i, p in enumerate(st.pods):
        if p.st == DEAD or p.ver < 0:
            continue
        if p.bits != right_bits(p.stg, p.ver, p.forks):
            raise Violation(
                f"I9: pod{i} has a state of stage {p.stg} at version {p.ver} with the forks "
                f"{p.bits}, and says {p.forks}"
            )


def is_void(st: State, first: int, idx: int) -> bool:
    """Return whether a plan since one has voided all states: a restart of a job that has forked."""
    plans = st.plans[max(first, 0) : idx + 1]
    return any(b.lineage > a.lineage and b.order is None for a, b in itertools.pairwise(plans))


def _has_others(cfg: Cfg, stage: int, lost: set) -> bool:
    """Return whether the stages are left of which a lost one is made anew."""
    if stage == 0:
        return cfg.guards > 0 and 1 not in lost
    return stage < cfg.P - 1 and not {stage - 1, stage + 1} & lost


def ordered(cfg: Cfg, st: State, base: Plan, plan: Plan, is_planned: bool, hears: bool) -> Plan:
    """Return a plan with its lineage, and the order to make anew what nobody is known to hold.

    Args:
        cfg: of the model.
        st: what is.
        base: the plan before.
        plan: with its members.
        is_planned: whether it comes between faults.
        hears: whether the coordinator has heard who has settled in the plan before.
    """
    if is_planned:
        return plan._replace(lineage=base.lineage)
    joined = {(m[2], m[3]): q for m, q in zip(base.members, base.since, strict=True)}
    living = {(i, p.inc): p for i, p in enumerate(st.pods) if p.st != DEAD}
    settled = {who: hears and who in living and living[who].settled >= base.qid for who in joined}
    holds = {
        who for who, q in joined.items() if q < base.qid or base is st.plans[0] or settled[who]
    }
    covered = {m[1] for m in plan.members if (m[2], m[3]) in holds}
    lost = set(range(cfg.P)) - covered
    is_open = base.order is not None and not all(settled[who] for who in joined if who in living)
    is_open = is_open or (base.order is not None and not hears)
    possible = all(_has_others(cfg, s, lost) for s in lost)
    up = 0 if "fork_same_lineage" in cfg.rules else 1
    since = base.order[1] if is_open and base.order is not None else base.lineage
    if lost and not possible:
        has_forked = base.lineage > 0 and "restart_same_lineage" not in cfg.rules
        return plan._replace(lineage=base.lineage + has_forked)
    if not lost and not is_open:
        return plan._replace(lineage=base.lineage)
    stages = frozenset(lost) if lost or base.order is None else base.order[0]
    return plan._replace(lineage=base.lineage + up, order=(stages, since))
