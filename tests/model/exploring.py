"""Explores the model: every reachable state of a small one, random walks through a large one."""

from __future__ import annotations

import random
import time
from collections import deque

from tests.model import forks, guards
from tests.model.ranks import successors
from tests.model.values import DEAD, UP, Cfg, State, Violation, initial, rank_of


def check_state(cfg: Cfg, st: State) -> None:
    if cfg.forks:
        forks.check_states(cfg, st)
    if cfg.guards:
        guards.check_parts(st)
    for i, p in enumerate(st.pods):
        if (
            p.st != DEAD
            and p.ver >= 0
            and p.ph != "S"
            and not p.good
            and "abort_in_apply" not in cfg.rules
        ):
            raise Violation(f"I6: pod{i} holds a wrong version {p.ver}")
    if cfg.nondet:
        live = [(i, p) for i, p in enumerate(st.pods) if p.st != DEAD and p.ver >= 0]
        for a in range(len(live)):
            for b in range(a):
                (i, p), (j, q) = live[a], live[b]
                if p.stg == q.stg:
                    n = min(len(p.hist), len(q.hist))
                    if p.hist[:n] != q.hist[:n]:
                        raise Violation(
                            f"I1: pods {i} and {j} applied different gradients for stage {p.stg}"
                        )


def goal(cfg: Cfg, st: State) -> bool:
    if st.store < 0:
        return False
    plan = st.plans[st.store]
    rank = rank_of(plan)
    up = [m for m in rank if st.pods[m].st == UP and st.pods[m].inc == rank[m][2]]
    done = {
        (rank[m][0], rank[m][1])
        for m in up
        if st.pods[m].ver == cfg.steps and st.pods[m].stg == rank[m][1]
    }
    return any(all((r, s) in done for s in range(cfg.P)) for r in range(cfg.N))


def is_calm(cfg: Cfg, st: State) -> bool:
    """Whether a job with snapshots goes on as if nothing had happened, and nothing will."""
    if not cfg.until_calm or any(st.bud) or st.store < 0:
        return False
    rank = rank_of(st.plans[st.store])
    members = [st.pods[m] for m in rank]
    return (
        all(p.st == UP and p.q == st.store and p.ph == "C" for p in members)
        and len({p.ver for p in members}) == 1
        and all(p.inc == rank[m][2] for m, p in zip(rank, members, strict=True))
    )


def trace_of(parent: dict, st: State) -> list:
    path = []
    while parent[st] is not None:
        st, label = parent[st]
        path.append(label)
    return path[::-1]


def explore(cfg: Cfg, limit: int = 3_000_000, deadline: float = 1e9) -> dict:
    """Breadth first; returns counts, or the shortest violating trace."""
    t0 = time.time()
    s0 = initial(cfg)
    for want in cfg.prefix:
        s0 = next(nxt for label, _f, nxt in successors(cfg, s0) if label.startswith(want))
    parent: dict = {s0: None}
    number: dict = {s0: 0}
    order = [s0]
    edges: list = []  # non-fault edges, for the progress check
    ends = []
    transitions = 0
    queue = deque([s0])
    truncated = 0
    while queue:
        st = queue.popleft()
        n = number[st]
        if goal(cfg, st):
            ends.append(n)
        if is_calm(cfg, st):
            ends.append(n)
            continue
        if len(st.plans) >= cfg.max_plans:
            truncated += 1
            ends.append(n)
        try:
            succ = successors(cfg, st)
            for label, fault, nxt in succ:
                transitions += 1
                if nxt not in number:
                    number[nxt] = len(order)
                    order.append(nxt)
                    parent[nxt] = (st, label)
                    check_state(cfg, nxt)
                    queue.append(nxt)
                if not fault:
                    edges.append((n, number[nxt]))
        except Violation as e:
            return {
                "ok": False,
                "what": str(e),
                "trace": trace_of(parent, st),
                "states": len(order),
                "secs": time.time() - t0,
            }
        if len(order) > limit or time.time() - t0 > deadline:
            return {
                "ok": True,
                "complete": False,
                "states": len(order),
                "transitions": transitions,
                "secs": time.time() - t0,
            }
    back: dict = {}
    for a, b in edges:
        back.setdefault(b, []).append(a)
    good = set(ends)
    todo = list(ends)
    while todo:
        b = todo.pop()
        for a in back.get(b, ()):
            if a not in good:
                good.add(a)
                todo.append(a)
    if len(good) < len(order):
        stuck = next(n for n in range(len(order)) if n not in good)
        return {
            "ok": False,
            "what": "I5: from here the job can never finish, though faults stopped",
            "trace": trace_of(parent, order[stuck]),
            "states": len(order),
            "secs": time.time() - t0,
            "stuck": order[stuck],
        }
    return {
        "ok": True,
        "complete": True,
        "states": len(order),
        "transitions": transitions,
        "truncated": truncated,
        "secs": time.time() - t0,
    }


def note(cover: dict, label: str, old: State, new: State) -> None:
    """Count the behaviours of a run: a check that never sees them proves nothing."""

    def hit(what: str) -> None:
        cover[what] = cover.get(what, 0) + 1

    if not label.startswith("pod"):
        if " commits q" in label and len(new.plans) == len(old.plans):
            hit("lost CAS races")
        return
    i = int(label[3:].split()[0])
    a, b = old.pods[i], new.pods[i]
    if "completes settle" in label:
        hit(
            "rolled forward in settle"
            if b.ver > a.ver >= 0
            else "sent to heal"
            if b.ph == "H"
            else "redo: kept version"
        )
        if b.ph == "C" and b.ver == a.ver and any(b.held):
            hit("retained gradients used")
        if b.ph == "H" and a.ver >= 0:
            hit("held another version before")
        if b.ph == "M":
            hit("sent to make anew")
    elif "completes vote" in label:
        hit("redo in place (NO vote)" if b.att > a.att else "steps applied")
        if b.ver > a.ver and a.q != old.store:
            hit("applied in an outdated quorum")
    elif " makes " in label:
        hit("made of others")
    elif " replays " in label:
        hit("made anew" if b.ph == "C" else "made anew in vain")
    elif "loads checkpoint" in label:
        hit("loaded from disk")
    elif " heals " in label:
        hit("healed from a peer")
    elif "aborts" in label:
        hit("aborted collectives")


def walk(cfg: Cfg, seed: int, cover: dict, patience: int = 900) -> dict:
    """One random run: faults while the budget lasts, then a fair schedule that ends."""
    rng = random.Random(seed)
    st = initial(cfg)
    path: list = []
    rate = rng.choice((0.02, 0.06, 0.15))
    calm = 0
    before = st
    try:
        for _ in range(patience * 3):
            succ = successors(cfg, st)
            faults = [x for x in succ if x[1]]
            steps = [x for x in succ if not x[1]]
            spent = sum(st.bud) == 0 or len(path) > patience
            if goal(cfg, st) and (spent or rng.random() < 0.2):
                return {"ok": True, "length": len(path), "faults": sum(cfg.bud) - sum(st.bud)}
            if faults and not spent and (rng.random() < rate or not steps):
                # the kind of fault first, so that the many crash labels do not drown the others
                kinds: dict = {}
                for x in faults:
                    kinds.setdefault(x[0].split()[0], []).append(x)
                label, _f, st = rng.choice(kinds[rng.choice(sorted(kinds))])
            elif spent and any(x[0].startswith("continue") for x in faults) and rng.random() < 0.05:
                label, _f, st = rng.choice([x for x in faults if x[0].startswith("continue")])
            elif steps:
                label, _f, st = rng.choice(steps)
            elif goal(cfg, st):
                return {"ok": True, "length": len(path), "faults": sum(cfg.bud) - sum(st.bud)}
            else:
                cont = [x for x in faults if x[0].startswith("continue")]
                if not cont:
                    raise Violation("I5: nothing can happen any more")
                label, _f, st = rng.choice(cont)
            path.append(label)
            note(cover, label, before, st)
            before = st
            check_state(cfg, st)
            calm = calm + 1 if spent else 0
            if len(st.plans) >= cfg.max_plans:
                return {
                    "ok": True,
                    "length": len(path),
                    "faults": sum(cfg.bud) - sum(st.bud),
                    "cut": True,
                }
            if calm > patience * 2:
                raise Violation("I5: no progress after faults stopped")
    except Violation as e:
        return {"ok": False, "what": str(e), "trace": path, "seed": seed, "stuck": st}
    return {"ok": False, "what": "I5: run did not end", "trace": path, "seed": seed, "stuck": st}


def simulate(cfg: Cfg, seed: int, runs: int, deadline: float = 1e9, first: int = 0) -> dict:
    t0 = time.time()
    steps = faults = cut = done = 0
    cover: dict = {}
    for k in range(first, first + runs):
        res = walk(cfg, seed * 1_000_003 + k, cover)
        if not res["ok"]:
            res.update(runs=k + 1, secs=time.time() - t0)
            return res
        steps += res["length"]
        faults += res["faults"]
        cut += bool(res.get("cut"))
        done += 1
        if time.time() - t0 > deadline:
            break
    return {
        "ok": True,
        "runs": done,
        "transitions": steps,
        "faults": faults,
        "cut": cut,
        "cover": cover,
        "secs": time.time() - t0,
    }
