"""Defines guards in the model: who keeps what an end of the pipeline alone has, and what counts.

Stage 0 is the end of a swapped pipeline. What it alone has (its *part*) is kept by cells of stage 1
as well: they get its reduced gradient in each step, apply it themselves, and tell in their votes
what they have. Its layers are made anew of stage 1. A part is (version, forks that went into it,
whether it is right). It is bit for bit what it was through a fork of its own stage, so of forks at
its very version there are none in it.

A wrong copy that no vote has compared yet may be the last one, and then it is taken as it is, like
the last copy of any state. Against another copy it must not count.
"""

from __future__ import annotations

from collections import Counter

from tests.model.values import (
    BUSY,
    DAMAGE,
    DEAD,
    FULL,
    RIGHT,
    UNJUDGED,
    UP,
    WRONG,
    Cfg,
    Part,
    Plan,
    Pod,
    State,
    Violation,
    index,
    rank_of,
    setpod,
    spend,
)

END, TWIN = 0, 1
"""The stage whose part is guarded, and the stage of the guards."""


def right_part(version: int, history: tuple, right: int = RIGHT) -> Part:
    """Return what an end alone has, in a run of this history."""
    return Part(version, tuple(f for f in history if f[0] < version), right)


def guards_of(cfg: Cfg, plan: Plan) -> tuple:
    """Return (guard, owner) under a plan: those that have been members of stage 1 for longest."""
    since = {m[2]: q for m, q in zip(plan.members, plan.since, strict=True)}
    cells = sorted((m for _r, s, m, _i in plan.members if s == TWIN), key=lambda m: (since[m], m))
    owners = sorted((m for _r, s, m, _i in plan.members if s == END), key=lambda m: (since[m], m))
    have, rows = index(plan), {m: r for r, _s, m, _i in plan.members}
    return tuple(
        (m, have[rows[m], END][0] if (rows[m], END) in have else owners[turn % len(owners)])
        for turn, m in enumerate(cells[: cfg.guards])
    )


def owner_of(cfg: Cfg, plan: Plan, pod: int) -> int | None:
    """Return who gives a guard its gradient; None if it is none."""
    return dict(guards_of(cfg, plan)).get(pod)


# ------------------------------------------------------------ a step


def reduced(cfg: Cfg, plan: Plan, i: int, pod: Pod) -> Pod:
    """Return a rank that has reduced its own gradient: a guard needs that of the end as well."""
    if owner_of(cfg, plan, i) is None:
        keeps = rank_of(plan)[i][1] == END or "guard_not_relieved" in cfg.rules
        return pod._replace(ph="V", part=pod.part if keeps else None)
    return pod._replace(ph="B")


def copies(st: State, i: int, plan: Plan) -> list:
    """Return the owners from which a guard may copy the part now."""
    me = st.pods[i]
    found = []
    for _r, s, m, _inc in plan.members:
        src = st.pods[m]
        there = src.st == UP and src.q == me.q and src.ph not in BUSY
        if s == END and there and src.part is not None:
            found.append(m)
    return found


def moves(cfg: Cfg, st: State, i: int, given, vote, add) -> None:
    """Add what a guard can do: copy the part, take the gradient and vote, and what may go wrong.

    Args:
        cfg: of the model.
        st: what is.
        i: the rank.
        given: returns whether the owner has given the gradient of this step.
        vote: returns the state in which the rank has cast its vote.
        add: adds a move.
    """
    pod, plan = st.pods[i], st.plans[st.pods[i].q]
    late = "guard_late_copy" in cfg.rules and pod.ph in "CV"
    is_guard = owner_of(cfg, plan, i) is not None
    if is_guard and pod.part is None and (pod.ph == "B" or late):
        for m in copies(st, i, plan):

            def copied(m: int = m) -> State:
                src = st.pods[m]
                if src.ver != pod.ver and not late:
                    raise Violation(f"a guard at v{pod.ver} copies of an owner at v{src.ver}")
                return setpod(st, i, pod._replace(part=src.part))

            add(f"pod{i} copies the part of pod{m} at v{pod.ver}", False, copied)
    if pod.ph != "B":
        return
    if pod.part is not None and pod.part.right == RIGHT and st.bud[DAMAGE] > 0:
        bad = pod._replace(part=pod.part._replace(right=UNJUDGED))
        add(f"DAMAGE copy of pod{i} at v{pod.ver}", True, lambda: spend(setpod(st, i, bad), DAMAGE))

    def take() -> State | None:
        if "guard_late_gradient" in cfg.rules:
            return vote(pod._replace(ph="V"))
        if not given():
            return None
        return vote(pod._replace(ph="V", G=(*pod.G[:3], True)))

    if pod.part is not None or "guard_late_copy" in cfg.rules:
        add(f"pod{i} takes the gradient of step {pod.ver}, votes", False, take)
    elif st.bud[FULL] > 0:

        def lacks() -> State | None:
            nxt = take()
            return None if nxt is None else spend(nxt, FULL)

        add(f"FULL pod{i} has no copy in step {pod.ver}, votes", True, lacks)


def judged(cfg: Cfg, plan: Plan, i: int, pod: Pod, parts: dict) -> Pod:
    """Return a rank that has all votes: a guard's copy that no owner has is void.

    Args:
        cfg: of the model.
        plan: of the quorum.
        i: the rank.
        pod: that it is.
        parts: what each member has told.
    """
    mine = parts[i]
    if mine is None or rank_of(plan)[i][1] != TWIN:
        return pod
    if mine in {parts[m] for _r, s, m, _inc in plan.members if s == END}:
        return pod
    if "guard_kept_when_bad" in cfg.rules:
        return pod._replace(part=mine._replace(right=WRONG))
    return pod._replace(part=None)


def marks(pod: Pod) -> bool:
    """Return whether the gradient that a rank has reduced is its mark: it has what it guards."""
    return pod.ph != "B"


def apply_part(cfg: Cfg, pod: Pod, *, rolls: bool) -> Part | None:
    """Return the part after the step at hand: an owner has its gradient, a guard was given it."""
    part = pod.part
    if part is None:
        return None
    is_given = pod.stg == END or len(pod.G) > 3
    if not is_given and (rolls or "guard_late_gradient" not in cfg.rules):
        return part
    if rolls and pod.stg == TWIN and "guard_not_rolled" in cfg.rules:
        return part
    went_in = tuple(f for f in pod.forks if f[0] == pod.ver)
    return Part(part.ver + 1, part.bits + went_in, part.right)


# ------------------------------------------------------------ a settle


def restored(cfg: Cfg, pod: Pod, way: str) -> Part | None:
    """Return what a rank has of a part while it is given another state: nothing.

    Args:
        cfg: of the model.
        pod: before.
        way: heal or load.
    """
    keeps = f"guard_survives_{way}" in cfg.rules and pod.part is not None
    return pod.part if keeps and pod.stg == TWIN else None


def loaded(cfg: Cfg, pod: Pod, stage: int) -> Part | None:
    """Return what a rank has of a part that has loaded a checkpoint: an end has its own."""
    return Part(pod.tver, (), RIGHT) if cfg.guards and stage == END else pod.part


def report(cfg: Cfg, i: int, pod: Pod, before: Plan | None) -> Part | None:
    """Return what a rank tells of a part when it settles.

    Args:
        cfg: of the model.
        i: the rank.
        pod: that it is, with the state that counts.
        before: the plan that it has left.
    """
    if pod.ver < 0:
        return None
    begun = before is not None and owner_of(cfg, before, i) is not None and pod.part is None
    if begun and "guard_counts_early" in cfg.rules and i in rank_of(before):
        return Part(pod.ver, (), WRONG)  # the room for it, in which nothing is yet
    return pod.part


def find(cfg: Cfg, plan: Plan, reports: dict, counted: dict, can: dict, version: int) -> tuple:
    """Return the guards whose copies count at a version: the most frequent ones, of those there.

    Args:
        cfg: of the model.
        plan: of the quorum.
        reports: of all members.
        counted: of those whose states count.
        can: versions that each of these reaches.
        version: at which all go on.
    """
    rank = rank_of(plan)
    wide = "guard_anywhere" in cfg.rules
    there = {
        p: rep[8]
        for p, rep in (reports if wide else counted).items()
        if rank[p][1] == TWIN and rep[8] is not None and (wide or version in can.get(p, ()))
    }
    staying = {p: part for p, part in there.items() if wide or reports[p][0] == version}
    told = staying or there
    ranked = Counter(told.values()).most_common()
    if not ranked:
        return ()
    is_even = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
    if is_even and "guard_any" not in cfg.rules:
        return ()
    most = told[min(told)] if is_even else ranked[0][0]
    chosen = tuple(sorted(p for p, part in told.items() if part == most))
    if most.right == WRONG:
        raise Violation(f"I9: the copies of pods {chosen} count, in which nothing is yet")
    if most.right != RIGHT and any(part.right == RIGHT for part in told.values()):
        raise Violation(f"I9: the copies of pods {chosen} count, which others contradict")
    return chosen


def is_there(reports: dict, rank: dict, kept: list) -> bool:
    """Return whether a right copy is left beyond doubt, in a member that stayed; for the checks."""
    parts = {p: rep[8] for p, rep in reports.items() if rank[p][1] == TWIN and rep[8] is not None}
    if any(part.right != RIGHT for part in parts.values()):
        return False
    return any(p in kept for p in parts)


def given_by(st: State, pod: Pod, history: tuple) -> Part | None:
    """Return the part that a maker gets of the first guard that has it; None: wait, or give up.

    Args:
        st: what is.
        pod: the maker; ``recipe`` are the guards that count.
        history: that it will have.
    """
    for m in pod.recipe:
        src = st.pods[m]
        if src.st != UP or src.q != pod.q or src.ph in BUSY or src.part is None:
            continue
        if src.ver != pod.tver:
            raise Violation(f"fork: guard moved on to v{src.ver}, wanted v{pod.tver}")
        if src.part != right_part(pod.tver, history, src.part.right) or src.part.right == WRONG:
            raise Violation(f"I9: pod{m} gives {src.part}, which a run of {history} has not")
        return src.part
    return None


def are_gone(st: State, pod: Pod) -> bool:
    """Return whether no guard of a maker has a copy any more, and none will have one."""
    for m in pod.recipe:
        src = st.pods[m]
        comes = src.q != pod.q and st.plans[src.q].qid < st.plans[pod.q].qid
        has = src.q == pod.q and src.ph != "P" and (src.ph in BUSY or src.part is not None)
        if src.st == UP and (comes or has):
            return False
    return True


def check_parts(st: State) -> None:
    """Every part is that of a run of its cell's history, at the version of its cell's state."""
    for i, p in enumerate(st.pods):
        if p.st == DEAD or p.ver < 0 or p.part is None or p.ph == "K":
            continue
        if p.part.right == WRONG or p.part != right_part(p.ver, p.forks, p.part.right):
            raise Violation(
                f"I9: pod{i} keeps {p.part} of stage {END}, and its state is of version {p.ver} "
                f"and {p.forks}"
            )
    for i, p in enumerate(st.pods):
        lacks = p.st != DEAD and p.stg == END and p.ver >= 0 and p.ph not in "HM" and p.part is None
        if lacks:
            raise Violation(f"I9: pod{i} has a state of stage {END} without what it alone has")
