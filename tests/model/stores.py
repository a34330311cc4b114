"""Models the stores of segments: what ranks copy and log, what holders keep, what can be made anew.

As in ``core/mainstay_core/rank/{windows,replaying}.py`` and ``segments/index.py``. A pod has one
rank and one store. The store outlives the rank (a trainer's death) and goes with the pod. What a
rank writes is in its own store at once, and reaches each holder in a move of its own, or never.
Copies of states begin with the step, and end at any time before the apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.model.values import (
    DAMAGE,
    FULL,
    UP,
    Cfg,
    Plan,
    Pod,
    Segment,
    State,
    Store,
    Violation,
    index,
    is_ok,
    rank_of,
    setpod,
    spend,
)

EMPTY: frozenset = frozenset()


def fresh(life: int) -> Store:
    return Store(life, EMPTY, EMPTY, 0, EMPTY)


def setstore(st: State, i: int, store: Store) -> State:
    return st._replace(stores=(*st.stores[:i], store, *st.stores[i + 1 :]))


def lose_pod(cfg: Cfg, st: State, i: int) -> State:
    """The pod is gone with its store; a trainer that dies alone leaves it."""
    if not cfg.window:
        return st
    seen = (*st.seen[:i], 0, *st.seen[i + 1 :])
    return setstore(st._replace(seen=seen), i, fresh(st.stores[i].life + 1))


# --------------------------------------------------------------------------------- who writes what


def own_units(cfg: Cfg, plan: Plan, i: int) -> list:
    """The units of its stage of which a member is the author."""
    s = rank_of(plan)[i][1]
    members = [p for (_r, ss), (p, _i) in sorted(index(plan).items()) if ss == s]
    return [u for u in range(cfg.units) if members[u % len(members)] == i]


def holders(cfg: Cfg, plan: Plan, i: int) -> list:
    """The other pods that keep what a member writes: those behind it in the plan."""
    members = [m[2] for m in plan.members]
    at = members.index(i)
    return (members[at + 1 :] + members[:at])[: cfg.peers]


def write(cfg: Cfg, st: State, i: int, kind: str, units: list, good: bool) -> tuple:
    """Return the state after a rank has written segments, and where they are to be then."""
    pod, plan = st.pods[i], st.plans[st.pods[i].q]
    own = st.stores[i]
    news = [Segment(pod.stg, u, kind, pod.ver, good, pod.win, True) for u in units]
    for new in news:
        own = keep(cfg, own, new)
    places = tuple((h, st.stores[h].life) for h in holders(cfg, plan, i))
    keys = {new[:4] for new in news}
    left = frozenset(p for p in own.parcels if p[0][:4] not in keys)
    own = own._replace(parcels=left | {(n, h, life, pod.kept) for n in news for h, life in places})
    return setstore(st, i, own), ((i, own.life), *places)


def keep(cfg: Cfg, store: Store, new: Segment) -> Store:
    """Keep a segment, in place of one of its key; states of windows that were given up go."""
    left = {s for s in store.segments if s[:4] != new[:4]}
    if new.kind == "s":
        states = {s for s in left if s.kind == "s" and s[:2] == new[:2]}
        old = {s for s in states if store.floor < s.window < new.window}
        judged = {s.at for s in old} & {step for step, told, _key in store.records if told}
        if all(s.window > store.floor for s in states):
            old = {s for s in old if s.at != max(judged, default=-1)}
        left -= old
    if "older_dropped_early" in cfg.rules and new.kind == "s":
        left = {s for s in left if s.kind != "s" or s[:2] != new[:2] or s.window >= new.window}
    return store._replace(segments=frozenset(left | {new}))


def drop_older(store: Store, floor: int) -> Store:
    if floor <= store.floor:
        return store
    return store._replace(
        segments=frozenset(s for s in store.segments if s.at >= floor),
        records=frozenset(r for r in store.records if r[0] >= floor),
        floor=floor,
    )


def go_back(store: Store, version: int) -> Store:
    return store._replace(
        segments=frozenset(s for s in store.segments if s.at <= version),
        records=frozenset(r for r in store.records if r[0] < version),
        floor=min(store.floor, version),
    )


def lower(store: Store, version: int) -> Store:
    """The job was at an older version while nobody told this store: that is kept again, too."""
    return store._replace(floor=min(store.floor, version))


def note_record(st: State, i: int, step: int, told: bool, key: int) -> State:
    """A commit is in the store of its pod before it is applied."""
    own = st.stores[i]
    if step < own.floor:
        return st
    left = frozenset(r for r in own.records if r[0] != step)
    return setstore(st, i, own._replace(records=left | {(step, told, key)}))


# --------------------------------------------------------------------------------------- windows


def begin_window(cfg: Cfg, pod: Pod) -> Pod:
    if not cfg.window:
        return pod
    return pod._replace(win=pod.ver, due=True, copies=(), unheld=False)


def settled(cfg: Cfg, pod: Pod) -> Pod:
    """Every settle begins a window, so that all have the same."""
    return begin_window(cfg, pod._replace(log=(), unlogged=False))


def due(cfg: Cfg, pod: Pod) -> bool:
    return pod.win >= 0 and pod.win <= pod.ver < pod.win + cfg.window


def enter_step(cfg: Cfg, pod: Pod) -> Pod:
    """Begin a step after an apply: the window goes on, or the next one begins."""
    if not cfg.window:
        return pod
    pod = pod._replace(log=(), unlogged=False)
    return begin_window(cfg, pod) if pod.win < 0 else pod._replace(due=due(cfg, pod))


def ballot(cfg: Cfg, st: State, i: int) -> tuple:
    """What a vote says of snapshots: logged, copied; and, for the checks alone, where all is."""
    pod = st.pods[i]
    waits = [p[0] for p in st.stores[i].parcels if p[0].kind == "s" and p[0].window == pod.win]
    late = [s.at for s in waits] + ([pod.ver] if pod.due else [])
    copied = pod.win if pod.unheld else min(late, default=pod.ver + 1)
    if "copied_once_begun" in cfg.rules:
        copied = pod.ver + 1
    return not pod.unlogged, copied, pod.log, pod.copies


def note_copies(cfg: Cfg, st: State, i: int, told: list) -> State:
    """A rank takes note of the votes of a committed step: is the window complete?"""
    pod = st.pods[i]
    last = pod.win + cfg.window - 1
    if pod.win < 0 or pod.ver < last:
        return st
    if not all(copied > last for _logged, copied, _log, _copies in told) and (
        "complete_at_once" not in cfg.rules
    ):
        return st
    st = setstore(st, i, drop_older(st.stores[i], pod.win))
    return setpod(st, i, pod._replace(win=-1, kept=max(pod.kept, pod.win)))


def confirm(cfg: Cfg, st: State, i: int, step: int, got: dict) -> State:
    """Remember, for the checks alone, what the votes of a committed step promise, and to whom."""
    plan = st.plans[st.pods[i].q]
    del cfg
    seen = (-1, -1, "votes", step, ((i, st.stores[i].life),), i)
    kept = {*st.kept, seen}
    for m, (logged, _copied, log, _copies) in got.items():
        s = rank_of(plan)[m][1]
        kept = {k for k in kept if not (k[2] == "g" and k[3] == step and k[0] == s and k[5] == m)}
        if logged:
            kept |= {(s, u, "g", step, places, m) for u, places in log}
    return st._replace(kept=frozenset(kept))


def confirm_window(st: State, plan: Plan, first: int, got: dict) -> State:
    kept = {k for k in st.kept if k[3] >= first}
    for m, (_logged, _copied, _log, copies) in got.items():
        s = rank_of(plan)[m][1]
        kept |= {(s, u, "s", at, places, m) for u, at, places in copies if at >= first}
    return st._replace(kept=frozenset(kept))


# ------------------------------------------------------------------------------------------ moves


def store_moves(cfg: Cfg, st: State, i: int, add: Callable) -> None:
    """What travels arrives, or its holder is gone."""
    own = st.stores[i]
    for kind, at, holder in sorted({(p[0].kind, p[0].at, p[1]) for p in own.parcels}):
        some = [p for p in own.parcels if (p[0].kind, p[0].at, p[1]) == (kind, at, holder)]
        add(f"pod{holder} gets {kind}{at} of pod{i}", False, lambda a=some: deliver(cfg, st, i, a))
    if st.bud[DAMAGE] > 0:
        for seg in sorted(own.segments):
            hurt = own._replace(segments=own.segments - {seg} | {seg._replace(whole=False)})
            add(
                f"DAMAGE {seg.kind}{seg.at} unit {seg.unit} of stage {seg.stage} on pod{i}",
                True,
                lambda hurt=hurt: spend(setstore(st, i, hurt), DAMAGE),
            )


def deliver(cfg: Cfg, st: State, i: int, parcels: list) -> State:
    st = setstore(st, i, st.stores[i]._replace(parcels=st.stores[i].parcels - set(parcels)))
    for seg, holder, life, floor in parcels:
        if seg[:4] not in {s[:4] for s in st.stores[i].segments}:
            continue  # it was dropped before it was sent
        there = st.stores[holder]
        if there.life == life:
            if "floor_comes_last" in cfg.rules:
                there = drop_older(keep(cfg, there, seg), floor)
            else:
                there = keep(cfg, drop_older(there, floor), seg)
            st = setstore(st, holder, there)
        elif st.pods[i].st == UP:
            st = setpod(st, i, not_held(st.pods[i], seg))
    return st


def not_held(pod: Pod, seg: Segment) -> Pod:
    if seg.kind == "g":
        return pod._replace(unlogged=True) if pod.ph == "L" and pod.ver == seg.at else pod
    return pod._replace(unheld=True) if pod.win == seg.window else pod


def keeper_moves(cfg: Cfg, st: State, i: int, add: Callable) -> None:
    """A rank copies its state beside its step, and its gradient between reduction and vote."""
    pod, plan = st.pods[i], st.plans[st.pods[i].q]
    if pod.due and pod.ph in "CRLVK":
        part = pod.ver - pod.win
        units = [u for u in own_units(cfg, plan, i) if u * cfg.window // cfg.units == part]

        def copy() -> State:
            nxt, places = write(cfg, st, i, "s", units, pod.good)
            copies = pod.copies + tuple((u, pod.ver, places) for u in units)
            return setpod(nxt, i, pod._replace(due=False, copies=copies))

        add(f"pod{i} copies v{pod.ver}", False, copy)
        if st.bud[FULL] > 0:
            missed = pod._replace(due=False, unheld=True)
            add(f"FULL pod{i} copies nothing of v{pod.ver}", True,
                lambda: spend(setpod(st, i, missed), FULL))  # fmt: skip


def log(cfg: Cfg, st: State, i: int) -> State:
    """The reduced gradient is there: it goes to the holders before the vote."""
    pod, plan = st.pods[i], st.plans[st.pods[i].q]
    units = own_units(cfg, plan, i)
    good = pod.good and all(is_ok(v) for _x, v, _r in pod.G[1])
    nxt, places = write(cfg, st, i, "g", units, good)
    return setpod(nxt, i, pod._replace(ph="L", log=tuple((u, places) for u in units)))


def is_logged(cfg: Cfg, st: State, i: int) -> bool:
    if "vote_before_log" in cfg.rules:
        return True
    return not any(p[0].kind == "g" for p in st.stores[i].parcels)


# ---------------------------------------------------------------------------- what can be made anew


def report(st: State, i: int) -> tuple:
    """What the member of a pod tells of its store, and which copies it has found damaged."""
    own = st.stores[i]
    return (
        frozenset((*s[:4], s.window) for s in own.segments),
        own.records,
        own.life,
        st.pods[i].bad,
    )


def needs_stores(plan: Plan, reports: dict, num_stages: int) -> bool:
    since = {m[2]: q for m, q in zip(plan.members, plan.since, strict=True)}
    stayed = {rank_of(plan)[p][1] for p, r in reports.items() if r[0] >= 0 and r[5] >= since[p]}
    return stayed != set(range(num_stages))


class Stores:
    """The contents of all stores of a plan's members, by their reports."""

    def __init__(self, cfg: Cfg, told: dict) -> None:
        self._cfg = cfg
        bad = {b for t in told.values() for b in t[3]}
        self.held: dict = {}  # (stage, unit, kind, at) -> [(pod, life)]
        self.records: dict = {}
        for p, (segments, records, life, _bad) in sorted(told.items()):
            for seg in segments:
                if (p, life, *seg[:4]) not in bad:
                    self.held.setdefault(seg[:4], []).append((p, life))
            for step, digests, key in records:
                if step not in self.records or not self.records[step][0]:
                    self.records[step] = (digests, key)

    def is_judged(self, step: int) -> bool:
        if "no_record_needed" in self._cfg.rules:
            return True
        return bool(self.records.get(step, (False,))[0])

    def starts(self, stage: int, unit: int, version: int) -> list:
        """The versions of a unit's state from which it comes to a version."""
        return [
            v
            for s, u, kind, v in self.held
            if (s, u, kind) == (stage, unit, "s")
            and v <= version
            and self.is_judged(v)
            and all(
                (stage, unit, "g", t) in self.held and self.is_judged(t) for t in range(v, version)
            )
        ]

    def reach(self, stage: int) -> set:
        top = max((at for *_x, at in self.held), default=-1) + 1
        return {
            v
            for v in range(top + 1)
            if all(self.starts(stage, u, v) for u in range(self._cfg.units))
        }

    def recipe(self, stage: int, version: int) -> tuple:
        """Per unit: the state to begin with, and the gradients since, each with its holders."""
        units = []
        for u in range(self._cfg.units):
            first = max(self.starts(stage, u, version))
            keys = [(stage, u, "s", first)]
            keys += [(stage, u, "g", t) for t in range(first, version)]
            units.append(tuple((key, tuple(self.held[key])) for key in keys))
        return tuple(units)


def replay(cfg: Cfg, st: State, i: int, park: Callable) -> State:
    """Read, apply, compare; what comes out wrong names all that it read."""
    pod = st.pods[i]
    bad, read, values = set(pod.bad), set(), {}
    for keys in pod.recipe:
        for key, places in keys:
            for p, life in places:
                seg = next((s for s in st.stores[p].segments if s[:4] == key), None)
                if st.stores[p].life != life or seg is None:
                    continue
                if not seg.whole and "no_digest" not in cfg.rules:
                    bad.add((p, life, *key))
                    continue
                read.add((p, life, *key))
                values[key] = seg.good and seg.whole
                break
            if key not in values:
                return give_up(cfg, st, i, bad, park)
    good, is_compared = True, False
    first = max(keys[0][0][3] for keys in pod.recipe)
    for version in range(first, pod.tver + 1):
        # All units are there: the votes told the digests of masters and gradient.
        so_far = [v for k, v in values.items() if k[2] == "s" or k[3] <= version]
        if version in {k[3] for k in values if k[2] == "g"} or version == pod.tver:
            good, is_compared = good and all(so_far), True
    right = all(values.values())
    if "no_compare" not in cfg.rules and not (good and is_compared):
        return give_up(cfg, st, i, bad | read, park)
    new = pod._replace(ver=pod.tver, good=right, ph="C", src=-1, recipe=(), bad=frozenset(bad))
    return setpod(st, i, new)


def give_up(cfg: Cfg, st: State, i: int, bad: Iterable, park: Callable) -> State:
    if "bad_not_told" in cfg.rules:
        bad = ()
    st = setpod(st, i, st.pods[i]._replace(bad=frozenset(bad), recipe=()))
    return park(cfg, st, i, st.pods[i])


# ------------------------------------------------------------------------------------- invariants


def promised(cfg: Cfg, st: State, plan: Plan, reports: dict, told: dict) -> int:
    """The newest version that somebody here had, and that members or promises of stores cover.

    It follows from what votes confirmed, not from what stores report.
    """
    since = {m[2]: q for m, q in zip(plan.members, plan.since, strict=True)}
    stayed = {p: r for p, r in reports.items() if r[0] >= 0 and r[5] >= since[p]}
    here = {(p, life) for p, (_s, _r, life, _b) in told.items() if st.stores[p].life == life}
    bad = {b for t in told.values() for b in t[3]}
    hurt = {(p, *s[:4]) for p, store in enumerate(st.stores) for s in store.segments if not s.whole}
    rank = rank_of(plan)
    is_strict = "strict_records" in cfg.rules

    def keeps(stage: int, unit: int, kind: str, at: int) -> bool:
        key = stage, unit, kind, at
        return any(
            k[:4] == key
            and any(
                (p, life) in here and (p, life, *key) not in bad and (p, *key) not in hurt
                for p, life in k[4]
            )
            for k in st.kept
        )

    def covers(stage: int, version: int) -> bool:
        mine = [r[0] for p, r in stayed.items() if rank[p][1] == stage]
        if mine:
            return version in mine
        return all(
            any(
                keeps(stage, u, "s", at)
                and all(
                    keeps(stage, u, "g", t) and (is_strict or keeps(-1, -1, "votes", t))
                    for t in range(at, version)
                )
                for at in range(version)
            )
            for u in range(cfg.units)
        )

    top = max([r[0] for r in stayed.values()] + [st.seen[p] for p, _life in here], default=0)
    known = {r[0] for r in stayed.values()} | {st.seen[p] for p, _life in here}
    for version in range(top, 0, -1):
        if version in known and all(covers(s, version) for s in range(cfg.P)):
            return version
    return 0


def check_kept(cfg: Cfg, st: State, plan: Plan, reports: dict, told: dict, outcome: tuple) -> None:
    """I7: no settle goes behind what votes and stores confirmed to keep."""
    T, from_disk = outcome
    durable = max(r[4] for r in reports.values())
    least = promised(cfg, st, plan, reports, told)
    if durable > T:
        raise Violation(f"I7: v{T} is made anew though the checkpoint of v{durable} is complete")
    if least > durable and (from_disk or least > T):
        where = " from disk" if from_disk else ""
        raise Violation(f"I7: settle goes to v{T}{where}, memory was told to keep v{least}")
