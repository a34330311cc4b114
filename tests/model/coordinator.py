"""Defines the moves of the api: it proposes plans, loses them, and stores them."""

from __future__ import annotations

from tests.model import forks
from tests.model.values import (
    BUSY,
    DEAD,
    LOSS,
    OUTAGE,
    STOPPED,
    SUSPECT,
    UP,
    Cfg,
    Plan,
    State,
    complete_rows,
    spend,
)


def propose(
    cfg: Cfg,
    st: State,
    blind: bool,
    ignore_stopped: bool,
    suspect: int,
    grow: bool,
    hears: bool = True,
) -> Plan | None:
    """Pure decision: (plan in the store, what agents report) -> next plan or None."""
    base = st.plans[st.store]
    qids = [st.plans[p.q].qid for p in st.pods if p.st == UP and p.q >= 0]
    qid = (base.qid if blind or "no_nonce" in cfg.rules else max([base.qid, *qids])) + 1
    bad = set()
    for _r, _s, m, inc in base.members:
        p = st.pods[m]
        stopped = p.st == STOPPED and not ignore_stopped
        other = p.inc != inc and "no_incarnation" not in cfg.rules
        if p.st == DEAD or stopped or other or m == suspect:
            bad.add(m)
    troubled = any(
        st.pods[m].st == UP
        and m not in bad
        and (
            (st.pods[m].ph == "P" and st.pods[m].q == st.store)
            or (
                st.pods[m].q >= 0
                and st.pods[m].q != st.store
                and st.plans[st.pods[m].q].qid >= base.qid
            )
        )
        for _r, _s, m, _i in base.members
    )
    if ("edge" in cfg.rules and not st.evt) and (bad or troubled):
        return None
    grid = {(r, s): (m, inc) for r, s, m, inc in base.members if m not in bad}
    fault = bool(bad or troubled)
    rows = [r for r in range(cfg.N) if all((r, s) in grid for s in range(cfg.P))]
    if (
        fault and not rows
    ):  # no whole replica: mate the remains of several into one (same version, same bits)
        best = {
            s: next((grid[r, s] for r in range(cfg.N) if (r, s) in grid), None)
            for s in range(cfg.P)
        }
        if all(best.values()):
            for s in range(cfg.P):
                where = next(r for r in range(cfg.N) if grid.get((r, s)) == best[s])
                a, b = grid.get((0, s)), grid[where, s]
                grid[0, s] = b
                if where != 0:
                    grid.pop((where, s))
                    if a is not None:
                        grid[where, s] = a
            rows = [0]
    taken = {m for m, _ in grid.values()}
    # a pod that was suspected is a candidate again once its own report came after the exclusion
    free = [m for m, p in enumerate(st.pods) if p.st == UP and m not in taken and m not in bad]
    if "no_incarnation" not in cfg.rules:
        free += [m for m in sorted(bad) if st.pods[m].st == UP and m != suspect]
    holes = [(r, s) for r in range(cfg.N) for s in range(cfg.P) if (r, s) not in grid]
    if (not fault or grow or not rows) and holes and free:
        if not fault and any(
            st.pods[m].ph in BUSY or st.pods[m].q != st.store for m, _ in grid.values()
        ):
            pass  # joins wait until the last plan has settled
        else:
            # whole replicas first; a returning pod that holds the stage is preferred
            holes.sort(key=lambda h: (sum((h[0], s) not in grid for s in range(cfg.P)), h))
            for h in holes:
                pick = next((m for m in free if st.pods[m].stg == h[1]), None)
                if pick is None:
                    pick = next(iter(free), None)
                if pick is None:
                    break
                free.remove(pick)
                grid[h] = (pick, st.pods[pick].inc)
    members = tuple(sorted((r, s, m, inc) for (r, s), (m, inc) in grid.items()))
    joined = {(m[2], m[3]): q for m, q in zip(base.members, base.since, strict=True)}
    plan = Plan(qid, members, tuple(joined.get((m, inc), qid) for _r, _s, m, inc in members))
    if not complete_rows(plan, cfg.P):
        return None  # wait for a pod: training of the job pauses, nothing is dropped
    if not fault and members == base.members:
        return None
    return forks.ordered(cfg, st, base, plan, not fault, hears) if cfg.forks else plan


def coordinator_steps(cfg: Cfg, st: State, add) -> None:
    if st.bud[OUTAGE] > 0 and st.api_up:
        add(
            "OUTAGE api down (pending decisions lost)",
            True,
            lambda: spend(st._replace(api_up=False, apis=(None,) * cfg.apis), OUTAGE),
        )
    if not st.api_up:
        add("api back", False, lambda: st._replace(api_up=True))
        return
    if st.bud[LOSS] > 0:
        for back in [-1, *list(range(st.store))]:
            add(
                f"LOSS Redis falls back to plan{back}",
                True,
                lambda back=back: spend(st._replace(store=back), LOSS),
            )
    if st.store < 0:  # rebuild from what agents hold; a partial answer may miss the newest plan
        known = sorted({p.q for p in st.pods if p.st == UP and p.q >= 0})
        for j in known:
            add(f"api rebuilds from plan{j}", False, lambda j=j: st._replace(store=j))
        if not known and "edge" not in cfg.rules:
            add(
                "api rebuilds: nobody holds a plan",
                False,
                lambda: st._replace(store=len(st.plans) - 1),
            )
        return
    newer = {
        p.q
        for p in st.pods
        if p.st == UP and p.q >= 0 and st.plans[p.q].qid > st.plans[st.store].qid
    }
    if newer and not cfg.rules & {
        "old_base",
        "no_nonce",
    }:  # Redis fell back: restore, never decide from the older plan
        for j in newer:
            add(f"api restores plan{j}", False, lambda j=j: st._replace(store=j))
    if len(st.plans) >= cfg.max_plans:
        return
    options = [(False, False, -1, False)]
    if cfg.apis > 1 or any(cfg.bud[k] for k in (OUTAGE, LOSS)):
        options += [(False, True, -1, False)]
    if cfg.grow:
        options += [(False, False, -1, True)]
        if (
            st.store < len(st.plans) - 1
        ):  # restored from too few agents: may reuse a number that others already hold
            options += [(True, False, -1, False)]
    if st.bud[SUSPECT] > 0:
        options += [(False, False, m, False) for _r, _s, m, _i in st.plans[st.store].members]
    if newer and not cfg.rules & {"old_base", "no_nonce"}:
        options = [o for o in options if o[0]]
    for a in range(cfg.apis):
        pending = st.apis[a]
        if pending is None:
            seen = set()
            for option, hears in ((o, h) for o in options for h in (True, False)[: 1 + cfg.forks]):
                blind, ign, susp, grow = option
                plan = propose(cfg, st, blind, ign, susp, grow, hears)
                if plan is None or plan in seen:
                    continue
                seen.add(plan)

                def read(a=a, plan=plan, susp=susp) -> State:
                    nxt = st if susp < 0 else spend(st, SUSPECT)
                    nxt = nxt._replace(evt=False)
                    if cfg.apis == 1 and "edge" not in cfg.rules:
                        return commit(cfg, nxt, plan)
                    apis = list(nxt.apis)
                    apis[a] = (nxt.store, plan)
                    return nxt._replace(apis=tuple(apis))

                add(
                    f"api{a} decides q{plan.qid} {[(r, s, m) for r, s, m, _ in plan.members]}",
                    susp >= 0,
                    read,
                )
        else:

            def cas(a=a, pending=pending) -> State:
                apis = list(st.apis)
                apis[a] = None
                nxt = st._replace(apis=tuple(apis))
                if pending[0] != nxt.store and "no_cas" not in cfg.rules:
                    return nxt  # lost the race: read again
                return commit(cfg, nxt, pending[1])

            add(f"api{a} commits q{pending[1].qid}", False, cas)


def commit(cfg: Cfg, st: State, plan: Plan) -> State:
    return st._replace(plans=(*st.plans, plan), store=len(st.plans))
