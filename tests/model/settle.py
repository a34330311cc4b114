"""Computes where the members of a plan go on, as each of them does from the same reports."""

from __future__ import annotations

from tests.model import forks, guards
from tests.model.stores import Stores
from tests.model.values import (
    NONE,
    Cfg,
    Plan,
    State,
    Violation,
    complete_rows,
    index,
    is_ok,
    rank_of,
)


def settle(cfg: Cfg, plan: Plan, reports: dict, stores: Stores | None = None) -> tuple:
    """Return where all go on: a function of the gathered reports and of nothing else.

    Members that stayed decide; only if they do not cover every stage do returning members' states
    count too. A stage of which nobody has a state reaches what stores can make anew.

    reports: pod -> (version or -1, lastq, held (own checks passed), mark (quorum key, prepared) or
        None, newest complete durable checkpoint that it sees, quorum_id of the last settle that it
        completed, version before which nothing is needed, history, what an end alone has)
    Returns (T, per pod action: stay | roll | heal | replay | make, per pod heal source or guards of
        what it makes anew, supply table per stage, todo per replica).
    """
    since = {m[2]: q for m, q in zip(plan.members, plan.since, strict=True)}
    stayed = {p: rep for p, rep in reports.items() if rep[5] >= since[p]}
    durable = max(rep[4] for rep in reports.values())
    T, can, made, left = None, {}, set(), ()
    for counted in (reports,) if "no_tiers" in cfg.rules else (stayed, reports):
        T, can, made = newest_common(cfg, plan, counted, stores)
        if T is None or durable <= T or "stores_before_disk" in cfg.rules:
            pass
        elif newest_common(cfg, plan, counted)[0] is None:
            T = None  # it takes stores, and they reach less than the disk
        if T is not None and cfg.guards and guards.END in made:
            left = guards.find(cfg, plan, reports, counted, can, T)
            if not left and "end_without_guard" not in cfg.rules:
                T = None  # what the end alone has is gone
        if T is not None:
            break
    # a returning rank at T already: its commit chain is compared; without determinism it heals
    can = {p: can.get(p, set() if cfg.nondet else {rep[0]} - {-1}) for p, rep in reports.items()}
    return settle_to(cfg, plan, reports, T, can, made, left)


def newest_common(cfg: Cfg, plan: Plan, reports: dict, stores: Stores | None = None) -> tuple:
    """(newest version that every stage reaches or None, versions that each reporter reaches, stages
    that are made anew and so reach every version)."""
    certs = {(v - 1, lq) for v, lq, _h, _m, *_ in reports.values() if v > 0}
    if "no_cert_match" in cfg.rules:
        any_cert = {v for v, _ in certs}

    newest: dict = {}  # two rounds: per version the newest quorum in which somebody prepared it
    for v, _lq, _h, mark, *_ in reports.values():
        if mark is not None and mark[1]:
            newest[v] = max(newest.get(v, -1), mark[0])

    def reach(rep: tuple) -> set:
        v, _lq, _held, mark, *_ = rep
        if v < 0:
            return set()
        out = {v}
        if mark is not None:
            if cfg.mode == "two":
                wanted = {lq for w, lq in certs if w == v} or {newest.get(v)}
                unsure = any(rep[0] == v and rep[3] == (mark[0], False) for rep in reports.values())
                if mark[1] and mark[0] in wanted and ("two_any" in cfg.rules or not unsure):
                    out.add(v + 1)
            elif "no_cert_match" in cfg.rules:
                if v in any_cert:
                    out.add(v + 1)
            elif (v, mark[0]) in certs:
                out.add(v + 1)
        return out

    by_stage: list = [[] for _ in range(cfg.P)]
    for _r, s, p, _i in plan.members:
        if p in reports:
            by_stage[s].append(p)
    can = {p: reach(rep) for p, rep in reports.items()}
    if "roll_if_all_reduced" in cfg.rules:
        live = [p for p in can if reports[p][0] >= 0]
        if live and all(reports[p][3] for p in live) and len({reports[p][0] for p in live}) == 1:
            for p in live:
                can[p].add(reports[p][0] + 1)
    if (
        "issue_literal" in cfg.rules
    ):  # "if any rank applied step t, all had prepared it and roll forward"
        top = max((rep[0] for rep in reports.values()), default=-1)
        for p, rep in reports.items():
            if rep[0] == top - 1:
                if rep[3] is None:
                    raise Violation(
                        "settle: must roll forward a rank that holds no reduced gradient"
                    )
                can[p].add(top)
    common, is_told = None, True
    reached = [set().union(*(can[p] for p in pods)) for pods in by_stage]
    made = forks.made_stages(cfg, plan, {s for s, versions in enumerate(reached) if not versions})
    for stage, stage_can in enumerate(reached):
        if stage in made:
            continue
        if not stage_can and stores is not None:
            stage_can, is_told = stores.reach(stage), False
        common = stage_can if common is None else common & stage_can
    if stores is not None and common and not is_told and "no_record_needed" not in cfg.rules:
        told = {rep[0] for rep in reports.values() if rep[0] >= 0} | {0}
        common = {v for v in common if v in told or v - 1 in stores.records}
    if "fork_older" in cfg.rules and plan.order is not None and common:
        return min(common), can, made
    return (max(common) if common else None), can, made


def settle_to(
    cfg: Cfg, plan: Plan, reports: dict, T: int | None, can: dict, made: set, left: tuple
) -> tuple:
    """Actions, heal sources and the supply table of the step that follows."""
    by_stage: list = [[] for _ in range(cfg.P)]
    for _r, s, p, _i in plan.members:
        by_stage[s].append(p)
    from_disk = T is None
    if T is None:
        T = max(rep[4] for rep in reports.values())

    action, source, valid = {}, {}, {}
    for _r, s, p, _i in plan.members:
        v = reports[p][0]
        if from_disk:
            action[p], source[p] = "heal", -2
        elif s in made:
            action[p], source[p] = "make", left if s == guards.END else ()
        elif T in can[p]:
            action[p] = "stay" if v == T else "roll"
        else:
            some = [x for x in by_stage[s] if T in can[x]]
            action[p] = "heal" if some else "replay"
            source[p] = min(some, default=-3)
        void = bool(made) and not from_disk and "fork_keeps_held" not in cfg.rules
        keeps = action[p] == "stay" and not void
        valid[p] = reports[p][2] if keeps else (NONE,) * cfg.N
    # suppliers of the step that is (re)done: first a living holder, else the least loaded replica
    have, rows = index(plan), complete_rows(plan, cfg.P)
    sup = [[-1] * cfg.N for _ in range(cfg.P)]
    todo: dict = {r: [] for r in rows}
    missing = []
    for x in range(cfg.N):
        for s in range(cfg.P):
            holders = [r for (r, ss), (p, _i) in have.items() if ss == s and is_ok(valid[p][x])]
            if holders:
                sup[s][x] = min(holders)
        if any(sup[s][x] < 0 for s in range(cfg.P)):
            missing.append(x)
    ready = [
        r for r in rows if all(action[have[r, s][0]] in ("stay", "roll") for s in range(cfg.P))
    ] or list(rows)
    for x in missing:
        if not ready:
            break
        r = x if x in ready else min(ready, key=lambda r: (len(todo[r]), r))
        todo[r].append(x)
        for s in range(cfg.P):  # also where somebody has an old copy: nobody checked its inputs
            sup[s][x] = r
    return (
        T,
        action,
        source,
        tuple(map(tuple, sup)),
        {r: tuple(t) for r, t in todo.items()},
        from_disk,
    )


def check_not_lost(cfg: Cfg, st: State, idx: int, reports: dict, T: int, from_disk: bool) -> None:
    """I3: no disk and no commit undone while every stage keeps a rank that stayed a member.

    A rank counts if it once held a valid state under its present membership, even if a heal
    made it drop that state.
    """
    plan = st.plans[idx]
    rank = rank_of(plan)
    since = {m[2]: q for m, q in zip(plan.members, plan.since, strict=False)}
    if (
        "strict_i3" in cfg.rules
        and from_disk
        and {rank[p][1] for p, r in reports.items() if r[0] >= 0} == set(range(cfg.P))
    ):
        raise Violation("strict I3: a living copy of every stage, but of different versions")

    def continuous(p: int, first: int) -> bool:
        ident = rank[p][2]
        return not forks.is_void(st, first, idx) and all(
            p in rank_of(pl) and rank_of(pl)[p][2] == ident
            for pl in st.plans[max(first, 0) : idx + 1]
        )

    stayed = [p for p, rep in reports.items() if rep[5] >= since[p] and continuous(p, rep[1])]
    if not stayed:
        return
    first = max(reports[p][1] for p in stayed)
    kept = [p for p in stayed if continuous(p, first)]
    held = {rank[p][1] for p in kept}
    if held | (plan.order[0] if plan.order else set()) != set(range(cfg.P)):
        return
    lacks_end = cfg.guards > 0 and guards.END not in held
    if from_disk and lacks_end and not guards.is_there(reports, rank, kept):
        return  # nobody is left, or nobody is sure, who has what the end alone had
    top = max(reports[p][0] for p in kept)
    if from_disk or top > T:
        raise Violation(
            f"I3: settle goes to version {T}{' from disk' if from_disk else ''}, members hold {top}"
        )
