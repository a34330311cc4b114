"""Defines the moves of a rank: adopt, settle, heal, compute, reduce, vote, apply, park."""

from __future__ import annotations

from tests.model import forks, guards, stores
from tests.model.coordinator import coordinator_steps
from tests.model.settle import check_not_lost, settle
from tests.model.values import (
    BAD,
    BUSY,
    CRASH,
    DEAD,
    FULL,
    GARBAGE,
    GLITCH,
    NONE,
    OK,
    SDC,
    STOP,
    STOPPED,
    TRAINER,
    UP,
    WRONG,
    Cfg,
    Part,
    Plan,
    Pod,
    State,
    Violation,
    default_table,
    index,
    is_ok,
    rank_of,
    setpod,
    spend,
)


def qkey(cfg: Cfg, st: State, idx: int) -> int:
    """Identity of a quorum on the wire: unique (quorum_id + nonce), or only the number (mutant)."""
    return st.plans[idx].qid if "no_nonce" in cfg.rules else idx


def knows(cfg: Cfg, plan: Plan, p: int, pod: Pod) -> bool:
    m = rank_of(plan).get(p)
    return m is not None and (m[2] == pod.inc or "no_incarnation" in cfg.rules)


def gone(cfg: Cfg, st: State, plan: Plan, idx: int, m: int) -> bool:
    """Member m takes no further part in this quorum: dead, silent, replaced, or moved on."""
    p = st.pods[m]
    if p.st != UP or (p.inc != rank_of(plan)[m][2] and "no_incarnation" not in cfg.rules):
        return True
    if p.q == idx:
        return p.ph == "P"
    if "late_is_gone" in cfg.rules:
        return True
    return p.q >= 0 and st.plans[p.q].qid >= plan.qid


def posts(st: State, key: tuple) -> dict:
    return {e[1]: e for e in st.board if e[0] == key}


def gathered(cfg: Cfg, st: State, me: int, key: tuple, members: list) -> dict | None:
    """Payload per pod if every member posted, checking I4 (only this quorum's ranks contribute)."""
    got = posts(st, key)
    plan_idx = st.pods[me].q
    rank = rank_of(st.plans[plan_idx])
    if "heal_outside" in cfg.rules and key[1] != "S":
        members = [m for m in members if st.pods[m].ph != "H"]
    for m in members:
        if m not in got:
            return None
    for m in members:
        _k, _p, inc, idx, _pay = got[m]
        if idx != plan_idx:
            raise Violation("I4: a rank of another quorum contributed to a collective")
        if inc != rank[m][2]:
            raise Violation("I4: another incarnation of a rank contributed to a collective")
    return {m: got[m][4] for m in members}


def prune(cfg: Cfg, st: State) -> State:
    """Drop posts that no living process can still read: that changes no behaviour."""
    if not st.board:
        return st
    at: dict = {}
    for i, p in enumerate(st.pods):
        if p.st != DEAD and p.q >= 0:
            k = qkey(cfg, st, p.q)
            at.setdefault(k, []).append((i, p))
    keep = []
    for e in st.board:
        (k, kind, t, *_rest) = e[0]
        if kind in "SQ":
            plan = st.plans[e[3]]
            want = False
            for m in rank_of(plan):
                pod = st.pods[m]
                if pod.st == DEAD:
                    continue
                if (
                    pod.q < 0
                    or st.plans[pod.q].qid < plan.qid
                    or (pod.q == e[3] and pod.ph in "SQ")
                ):
                    want = True
                    break
            if want:
                keep.append(e)
        elif any(p.ver <= t for _i, p in at.get(k, ())):
            keep.append(e)
    return st if len(keep) == len(st.board) else st._replace(board=frozenset(keep))


def post(cfg: Cfg, st: State, i: int, key: tuple, payload: object) -> State:
    pod = st.pods[i]
    board = frozenset(e for e in st.board if not (e[0] == key and e[1] == i)) | {
        (key, i, pod.inc, pod.q, payload)
    }
    return st._replace(board=board)


def do_apply(cfg: Cfg, pod: Pod, *, rolls: bool = False) -> Pod:
    """version += 1 with the reduced gradient held; I2 and I6 are checked here."""
    key, vals, *_rest = pod.G
    kinds = [x for x, _v, _r in vals]
    if sorted(kinds) != list(range(cfg.N)):
        raise Violation(f"I2: step {pod.ver} applied shard types {sorted(kinds)}")
    if not pod.good or not all(is_ok(v) for _x, v, _r in vals):
        raise Violation(
            f"I6/I1: step {pod.ver} applied a wrong gradient {vals} (state good: {pod.good})"
        )
    hist = pod.hist + ((tuple(v for _x, v, _r in vals),) if cfg.nondet else ())
    if cfg.forks and any(v != forks.right_tag(cfg, pod.ver, pod.forks) for _x, v, _r in vals):
        raise Violation(f"I6: step {pod.ver} of {pod.forks} applied a gradient of another course")
    bits = forks.right_bits(pod.stg, pod.ver + 1, pod.forks)
    part = guards.apply_part(cfg, pod, rolls=rolls)
    pod = pod._replace(ver=pod.ver + 1, held=(NONE,) * cfg.N, G=None, lastq=key, att=0, hist=hist)
    return pod._replace(bits=bits, part=part)


def next_step(cfg: Cfg, plan: Plan, row: int, pod: Pod) -> Pod:
    sup, todo = default_table(plan, cfg.N, cfg.P, cfg.dup)
    return pod._replace(ph="C", sup=sup, todo=todo.get(row, ()))


def row_pods(st: State, plan: Plan, row: int, P: int) -> list | None:
    have = index(plan)
    if any((row, s) not in have for s in range(P)):
        return None
    return [have[row, s][0] for s in range(P)]


def successors(cfg: Cfg, st: State) -> list:
    """[(label, is_fault, state)]; a Violation names the label of its move."""
    out: list = []

    def add(label: str, fault: bool, fn) -> None:
        try:
            nxt = fn()
        except Violation as e:
            raise Violation(f"{e}\n      at: {label}") from None
        if nxt is not None:
            out.append((label, fault, prune(cfg, nxt)))

    for i, pod in enumerate(st.pods):
        if cfg.window:
            stores.store_moves(cfg, st, i, add)
        if pod.st == DEAD:
            if cfg.restarts:
                new = nobody(cfg, pod.inc + 1)
                add(f"restart pod{i} (empty)", False, lambda i=i, new=new: setpod(st, i, new))
            continue
        gone_for_good = nobody(cfg, pod.inc)._replace(st=DEAD)
        where = f"pod{i} in {pod.ph} v{pod.ver}"
        if st.bud[CRASH] > 0:
            add(
                f"CRASH {where}",
                True,
                lambda i=i, new=gone_for_good: spend(
                    stores.lose_pod(cfg, setpod(st, i, new), i), CRASH
                ),
            )
        if st.bud[TRAINER] > 0 and cfg.window:
            add(
                f"TRAINER {where}",
                True,
                lambda i=i, new=gone_for_good: spend(setpod(st, i, new), TRAINER),
            )
        if pod.st == STOPPED:
            add(f"continue pod{i}", True, lambda i=i, pod=pod: setpod(st, i, pod._replace(st=UP)))
            continue
        if st.bud[STOP] > 0:
            add(
                f"STOP {where}",
                True,
                lambda i=i, pod=pod: spend(setpod(st, i, pod._replace(st=STOPPED)), STOP),
            )
        rank_steps(cfg, st, i, pod, add)
    coordinator_steps(cfg, st, add)
    return out


def nobody(cfg: Cfg, inc: int) -> Pod:
    """A trainer that holds nothing."""
    empty = (NONE,) * cfg.N
    return Pod(UP, inc, -1, -1, -1, True, -1, "I", empty, None, (), (), 0, -1, -1, (), -1)


def rank_steps(cfg: Cfg, st: State, i: int, pod: Pod, add) -> None:
    # ---- adopt a plan: any time but between certificate and end of apply
    own = st.plans[pod.q].qid if pod.q >= 0 else -1
    if pod.ph != "K" or "abort_in_apply" in cfg.rules:
        idxs = (
            range(len(st.plans))
            if cfg.reorder
            else {st.store} | {p.q for p in st.pods if p.st == UP}
        )
        for j in idxs:
            if j < 0 or st.plans[j].qid <= own or not knows(cfg, st.plans[j], i, pod):
                continue
            if not st.api_up and not any(p.st == UP and p.q == j for p in st.pods):
                continue  # plans are also passed on by peers that have them
            add(
                f"pod{i} adopts plan{j} (q{st.plans[j].qid}) in {pod.ph}",
                False,
                lambda j=j: adopt(cfg, st, i, pod, j),
            )
    if pod.q < 0 or pod.ph in "IP":
        return
    plan, key = st.plans[pod.q], qkey(cfg, st, pod.q)
    if not knows(cfg, plan, i, pod):
        return
    r, s, _inc = rank_of(plan)[i]
    members = [m for _r, _s, m, _i in plan.members]

    # ---- a blocked collective (or heal) fails
    if pod.ph in "SQRBLVWHYM":
        broken = any(
            gone(cfg, st, plan, pod.q, m) for m in members
        )  # a member that is merely late breaks nothing
        if broken:
            add(f"pod{i} aborts in {pod.ph} (q{plan.qid})", False, lambda: park(cfg, st, i, pod))
        elif st.bud[GLITCH] > 0:
            add(f"GLITCH pod{i} in {pod.ph}", True, lambda: spend(park(cfg, st, i, pod), GLITCH))

    def apply(now: State) -> State:
        return setpod(now, i, applied(cfg, now, i))

    def certified(now: State) -> State:
        """K (may apply) and the apply are one move unless cfg.fine: nobody sees between them."""
        if cfg.fine or now.pods[i].due:
            return setpod(now, i, now.pods[i]._replace(ph="K"))
        return note_seen(cfg, apply(now), i)

    if cfg.window:
        stores.keeper_moves(cfg, st, i, add)
    if cfg.guards and s == guards.TWIN:
        guard_moves(cfg, st, i, key, add)
    if pod.ph == "S":
        add(
            f"pod{i} completes settle of q{plan.qid}",
            False,
            lambda: gather_reports(cfg, st, i, key, members),
        )
    elif pod.ph == "Q":
        add(
            f"pod{i} completes settle of q{plan.qid} with stores",
            False,
            lambda: gather_stores(cfg, st, i, key, members),
        )
    elif pod.ph == "Y":
        add(
            f"pod{i} replays v{pod.tver}",
            False,
            lambda: joined(cfg, stores.replay(cfg, st, i, park), i),
        )
    elif pod.ph == "M":
        beside = (guards.TWIN,) if s == guards.END else (s - 1, s + 1)
        sources = [made_of(st, i, pod, plan, stage) for stage in beside]
        part, is_gone = make_part(cfg, st, pod) if s == guards.END else (None, False)
        if is_gone:
            add(f"pod{i} finds no guard any more", False, lambda: park(cfg, st, i, pod))
        elif all(sources) and (s != guards.END or part is not None):
            add(
                f"pod{i} makes v{pod.tver} anew of pods {sources}",
                False,
                lambda: joined(
                    cfg,
                    setpod(
                        st,
                        i,
                        pod._replace(
                            ver=pod.tver,
                            lastq=pod.src,
                            forks=pod.then,
                            bits=forks.right_bits(s, pod.tver, pod.then),
                            ph="C",
                            src=-1,
                            recipe=(),
                            part=part,
                        ),
                    ),
                    i,
                ),
            )
    elif pod.ph == "H":
        if pod.src == -2:
            add(
                f"pod{i} loads checkpoint v{pod.tver}",
                False,
                lambda: joined(
                    cfg,
                    setpod(
                        st,
                        i,
                        pod._replace(
                            ver=pod.tver,
                            good=st.durable[1],
                            lastq=-1,
                            ph="C",
                            src=-1,
                            forks=(),
                            bits=(),
                            part=guards.loaded(cfg, pod, s),
                        ),
                    ),
                    i,
                ),
            )
        else:
            src = st.pods[pod.src]
            if src.st == UP and src.q == pod.q and src.ver >= pod.tver and src.ph not in BUSY:
                if src.ver != pod.tver:
                    raise Violation(f"heal: source moved on to v{src.ver}, wanted v{pod.tver}")
                add(
                    f"pod{i} heals v{pod.tver} from pod{pod.src}",
                    False,
                    lambda: joined(
                        cfg,
                        setpod(
                            st,
                            i,
                            pod._replace(
                                ver=src.ver,
                                good=src.good,
                                lastq=src.lastq,
                                hist=src.hist,
                                ph="C",
                                src=-1,
                                forks=pod.then,
                                bits=src.bits,
                                part=src.part if s == guards.END else pod.part,
                            ),
                        ),
                        i,
                    ),
                )
    elif pod.ph == "C":
        if pod.ver >= cfg.steps:
            return
        compute_steps(cfg, st, i, pod, plan, r, s, add)
        mine = [x for x in range(cfg.N) if pod.sup[x] == r]
        if (
            min(pod.sup) >= 0
            and all(pod.held[x] for x in mine)
            and all(pod.held[x] for x in pod.todo)
        ):

            def enter_reduce() -> State:
                pay = tuple((x, pod.held[x], r) for x in mine)
                return post(
                    cfg,
                    setpod(st, i, pod._replace(ph="R")),
                    i,
                    (key, "R", pod.ver, pod.att, s),
                    pay,
                )

            add(f"pod{i} posts reduce of step {pod.ver} (q{plan.qid})", False, enter_reduce)
    elif pod.ph == "R":

        def complete_reduce() -> State | None:
            row = [m for rr, ss, m, _i in plan.members if ss == s]
            got = gathered(cfg, st, i, (key, "R", pod.ver, pod.att, s), row)
            if got is None:
                return None
            vals = tuple(sorted(v for pay in got.values() for v in pay))
            bad = tuple(
                (r, x) for x in range(cfg.N) if pod.sup[x] == r and pod.held[x] == BAD
            )  # own checks
            if cfg.window:
                nxt = setpod(st, i, pod._replace(G=(key, vals, False)))
                return stores.log(cfg, nxt, i)
            if cfg.guards:
                return reduced_guarded(cfg, st, i, pod._replace(G=(key, vals, False)))
            nxt = setpod(st, i, pod._replace(ph="V", G=(key, vals, False)))
            return post(cfg, nxt, i, (key, "V", pod.ver, pod.att, 0), bad)

        def miss_log() -> State | None:
            nxt = complete_reduce()
            if nxt is None:
                return None
            me = nxt.pods[i]._replace(unlogged=True, log=())
            return spend(stores.setstore(setpod(nxt, i, me), i, st.stores[i]), FULL)

        add(f"pod{i} completes reduce of step {pod.ver}, votes", False, complete_reduce)
        if cfg.window and st.bud[FULL] > 0:
            add(f"FULL pod{i} logs nothing of step {pod.ver}", True, miss_log)
    elif pod.ph == "L":

        def vote() -> State | None:
            if not stores.is_logged(cfg, st, i):
                return None
            bad = tuple((r, x) for x in range(cfg.N) if pod.sup[x] == r and pod.held[x] == BAD)
            payload = (bad, *stores.ballot(cfg, st, i))
            nxt = setpod(st, i, pod._replace(ph="V"))
            return post(cfg, nxt, i, (key, "V", pod.ver, pod.att, 0), payload)

        add(f"pod{i} votes on step {pod.ver}", False, vote)
    elif pod.ph == "V":

        def complete_vote() -> State | None:
            voters = members
            if "vote_stage_only" in cfg.rules:
                voters = [m for rr, ss, m, _i in plan.members if ss == s]
            elif "vote_replica_only" in cfg.rules:
                voters = [m for rr, ss, m, _i in plan.members if rr == r]
            got = gathered(cfg, st, i, (key, "V", pod.ver, pod.att, 0), voters)
            if got is None:
                return None
            told = {m: pay[1:] for m, pay in got.items()} if cfg.window else {}
            is_pair = cfg.window or cfg.guards
            no = {b for pay in got.values() for b in (pay[0] if is_pair else pay)}
            if no:  # redo in place: who failed its check recomputes those types, all else stays
                held = tuple(NONE if (r, x) in no else pod.held[x] for x in range(cfg.N))
                todo = tuple(x for x in range(cfg.N) if (r, x) in no)
                return setpod(
                    st,
                    i,
                    pod._replace(
                        ph="C",
                        held=held,
                        todo=todo,
                        G=None,
                        att=pod.att + 1,
                        log=(),
                        unlogged=False,
                    ),
                )
            if cfg.mode == "two":
                nxt = setpod(st, i, pod._replace(ph="W", G=(pod.G[0], pod.G[1], True)))
                return post(cfg, nxt, i, (key, "W", pod.ver, pod.att, 0), 1)
            if cfg.guards:
                parts = {m: pay[1] for m, pay in got.items()}
                return certified(setpod(st, i, guards.judged(cfg, plan, i, pod, parts)))
            return certified(kept_commit(cfg, st, i, told) if told else st)

        add(f"pod{i} completes vote on step {pod.ver}", False, complete_vote)
    elif pod.ph == "W":
        add(
            f"pod{i} completes barrier of step {pod.ver}",
            False,
            lambda: (
                None
                if gathered(cfg, st, i, (key, "W", pod.ver, pod.att, 0), members) is None
                else certified(st)
            ),
        )
    elif pod.ph == "K" and not pod.due:
        add(
            f"pod{i} applies step {pod.ver} (q{plan.qid})",
            False,
            lambda: note_seen(cfg, apply(st), i),
        )
    if (
        cfg.ckpt
        and pod.ph == "C"
        and pod.ver > 0
        and pod.ver % cfg.ckpt == 0
        and pod.ver > st.durable[0]
    ):
        tag = -1 if "ckpt_shared_dir" in cfg.rules else pod.q
        ver = 0 if "ckpt_shared_dir" in cfg.rules else pod.ver
        if not any(x[:3] == (tag, ver, s) for x in st.parts):

            def write_part() -> State:
                parts = st.parts | {(tag, ver, s, pod.good, pod.ver)}
                mine = [x for x in parts if x[:2] == (tag, ver)]
                if len({x[2] for x in mine}) < cfg.P:
                    return st._replace(parts=parts)
                if len({x[4] for x in mine}) > 1:
                    raise Violation("checkpoint: renamed with parts of different versions")
                done = (mine[0][4], all(x[3] for x in mine))
                return st._replace(
                    parts=frozenset(x for x in parts if x[4] > done[0]),
                    durable=max(st.durable, done),
                )

            add(f"pod{i} writes checkpoint part v{pod.ver}", False, write_part)


def reduced_guarded(cfg: Cfg, st: State, i: int, pod: Pod) -> State:
    """An owner gives its reduced gradient to its guards and votes; a guard waits for it first."""
    key, plan = qkey(cfg, st, pod.q), st.plans[pod.q]
    me = guards.reduced(cfg, plan, i, pod)
    if pod.stg == guards.END:
        st = post(cfg, st, i, (key, "B", pod.ver, pod.att, 0), 1)
    return cast_guarded(cfg, st, i, me) if me.ph == "V" else setpod(st, i, me)


def cast_guarded(cfg: Cfg, st: State, i: int, me: Pod) -> State:
    """A vote has what the rank keeps of an end, too."""
    row = rank_of(st.plans[me.q])[i][0]
    bad = tuple((row, x) for x in range(cfg.N) if me.sup[x] == row and me.held[x] == BAD)
    key = (qkey(cfg, st, me.q), "V", me.ver, me.att, 0)
    return post(cfg, setpod(st, i, me), i, key, (bad, me.part))


def guard_moves(cfg: Cfg, st: State, i: int, key: int, add) -> None:
    """What a cell beside an end does that guards it."""
    pod = st.pods[i]
    owner = guards.owner_of(cfg, st.plans[pod.q], i)

    def given() -> bool:
        return owner in posts(st, (key, "B", pod.ver, pod.att, 0))

    guards.moves(cfg, st, i, given, lambda me: cast_guarded(cfg, st, i, me), add)


def make_part(cfg: Cfg, st: State, pod: Pod) -> tuple:
    """Return what an end that is made anew gets of its guards, and whether it has to give up."""
    if not pod.recipe:
        return Part(pod.tver, (), WRONG), False  # a rule is left out: it is made of its twin alone
    part = guards.given_by(st, pod, pod.then)
    is_gone = part is None and guards.are_gone(st, pod)
    if is_gone and "make_half" in cfg.rules:
        return Part(pod.tver, (), WRONG), False
    return part, is_gone


def compute_steps(cfg: Cfg, st: State, i: int, pod: Pod, plan: Plan, r: int, s: int, add) -> None:
    """Forward and backward of one shard type through the replica's pipeline."""
    pods = row_pods(st, plan, r, cfg.P)
    if pods is None:
        return
    tag = OK if not cfg.nondet else 10 + 16 * r + pod.q
    if cfg.forks:
        tag = forks.tag_of(tuple(st.pods[m].bits for m in pods))
    x = next((x for x in pod.todo if pod.held[x] == NONE), None)
    if x is None:
        return

    def alive(m: int) -> bool:
        q = st.pods[m]
        return q.st == UP and q.ph == "C" and q.q == pod.q and q.ver == pod.ver and q.att == pod.att

    if cfg.staged:
        later, earlier = pods[s + 1 :], pods[:s]
        if not all(alive(m) for m in earlier):
            return
        done = all(
            (q.q, q.ver, q.att) == (pod.q, pod.ver, pod.att) and q.ph not in BUSY and q.held[x]
            for q in (st.pods[m] for m in later)
        )
        if not done:
            return
        targets, involved = [i], pods
    else:
        if not all(alive(m) for m in pods):
            return
        lacking = [m for m in pods if st.pods[m].held[x] == NONE]
        if i != lacking[0]:
            return
        targets, involved = lacking, pods
    right = all(st.pods[m].good and st.pods[m].ver == pod.ver for m in involved)

    def finish(bad: int | None) -> State:
        nxt = st
        for m in targets:
            h = list(nxt.pods[m].held)
            h[x] = BAD if m == bad else (tag if right else GARBAGE)
            nxt = setpod(nxt, m, nxt.pods[m]._replace(held=tuple(h)))
        return nxt if bad is None else spend(nxt, SDC)

    add(
        f"replica{r} finishes type {x} of step {pod.ver} on pods {targets}",
        False,
        lambda: finish(None),
    )
    if st.bud[SDC] > 0:
        for m in targets:
            add(f"SDC in type {x} of step {pod.ver} on pod{m}", True, lambda m=m: finish(m))


def made_of(st: State, i: int, pod: Pod, plan: Plan, stage: int) -> tuple:
    """Return the first member of a stage that has the version of which a stage is made anew."""
    for _r, s, m, _inc in plan.members:
        src = st.pods[m]
        there = src.st == UP and src.q == pod.q and src.ph not in BUSY
        if s != stage or m == i or not there:
            continue
        if src.ver != pod.tver:
            raise Violation(f"fork: source moved on to v{src.ver}, wanted v{pod.tver}")
        if src.bits != forks.right_bits(stage, pod.tver, pod.then):
            raise Violation(f"I9: pod{m} gives a state of another course to be made anew of")
        return (m,)
    return ()


def adopt(cfg: Cfg, st: State, i: int, pod: Pod, j: int) -> State:
    _r, s, _inc = rank_of(st.plans[j])[i]
    pod = pod if guards.marks(pod) else pod._replace(G=None)
    ver = pod.ver if pod.stg == s else -1
    if ver >= 0 and not forks.counts(cfg, st, pod, st.plans[j], i):
        ver = -1
    held = tuple(
        v if is_ok(v) or (v == GARBAGE) else NONE for v in pod.held
    )  # only what passed its own checks
    if "in_place" in cfg.rules and pod.ph == "R":
        held = tuple(GARBAGE if v else NONE for v in held)
    good = pod.good and not (pod.ph == "K" and "abort_in_apply" in cfg.rules)
    mark = (pod.G[0], pod.G[2]) if pod.G is not None and ver >= 0 else None
    if ver < 0:
        held = (NONE,) * cfg.N
    me = pod._replace(
        q=j,
        ph="S",
        ver=ver,
        good=good,
        held=held,
        G=pod.G if mark else None,
        att=0,
        src=-1,
        tver=-1,
        recipe=(),
        log=(),
        unlogged=False,
        lin=st.plans[j].lineage if ver >= 0 else pod.lin,
        then=(),
        part=pod.part if ver >= 0 else guards.restored(cfg, pod, "heal"),
    )
    claim = tuple(
        OK if v == GARBAGE else v for v in held
    )  # a spoiled buffer does not know that it is spoiled
    nxt = setpod(st, i, me)
    return post(
        cfg,
        nxt,
        i,
        (qkey(cfg, nxt, j), "S", 0, 0, 0),
        (
            ver,
            pod.lastq,
            claim,
            mark,
            st.durable[0],
            pod.settled,
            pod.kept,
            pod.forks,
            guards.report(cfg, i, me, st.plans[pod.q] if pod.q >= 0 else None),
        ),
    )


def park(cfg: Cfg, st: State, i: int, pod: Pod) -> State:
    held = pod.held
    if "in_place" in cfg.rules and pod.ph == "R":
        held = tuple(GARBAGE if v else NONE for v in held)
    mark = pod.G if guards.marks(pod) else None
    parked = pod._replace(ph="P", held=held, G=mark, src=-1, recipe=(), then=())
    return setpod(st, i, parked)._replace(evt=True)


# ------------------------------------------------------------ settles, with and without stores


def gather_reports(cfg: Cfg, st: State, i: int, key: int, members: list) -> State | None:
    """All reports are there: go on from them, or exchange what the stores hold first."""
    got = gathered(cfg, st, i, (key, "S", 0, 0, 0), members)
    if got is None:
        return None
    plan = st.plans[st.pods[i].q]
    if not cfg.window or not stores.needs_stores(plan, got, cfg.P):
        return complete_settle(cfg, st, i, got, {})
    nxt = setpod(st, i, st.pods[i]._replace(ph="Q"))
    return post(cfg, nxt, i, (key, "Q", 0, 0, 0), stores.report(st, i))


def gather_stores(cfg: Cfg, st: State, i: int, key: int, members: list) -> State | None:
    got = gathered(cfg, st, i, (key, "S", 0, 0, 0), members)
    told = gathered(cfg, st, i, (key, "Q", 0, 0, 0), members)
    return None if got is None or told is None else complete_settle(cfg, st, i, got, told)


def complete_settle(cfg: Cfg, st: State, i: int, got: dict, told: dict) -> State:
    me, plan = st.pods[i], st.plans[st.pods[i].q]
    r, s, _inc = rank_of(plan)[i]
    known = stores.Stores(cfg, told) if told else None
    if cfg.forks:
        got = forks.of_one_course(cfg, plan, got)
    T, action, source, sup, todo, disk = settle(cfg, plan, got, known)
    made = {rank_of(plan)[p][1] for p, what in action.items() if what == "make"}
    then = () if disk or not cfg.forks else forks.history_after(cfg, got, T, made)
    forks.check_settled(plan, got, action, (T, then))
    check_not_lost(cfg, st, me.q, got, T, disk)
    is_newest = all(p.q < 0 or st.plans[p.q].qid <= plan.qid for p in st.pods if p.st != DEAD)
    if known is not None and is_newest:  # what a rank settles that slept since harms nobody
        stores.check_kept(cfg, st, plan, got, told, (T, disk))
    if cfg.window:
        st = settle_store(cfg, st, i, got, (T, action[i], disk, "replay" in action.values()))
        me = st.pods[i]
    if action[i] == "roll":
        me = do_apply(cfg, me, rolls=True)
    elif action[i] in ("heal", "replay", "make"):
        replaying = action[i] == "replay"
        me = me._replace(
            ver=-1,
            good=True,
            held=(NONE,) * cfg.N,
            G=None,
            ph={"replay": "Y", "heal": "H", "make": "M"}[action[i]],
            src=source[i],
            tver=T,
            hist=(),
            recipe=known.recipe(s, T) if known is not None and replaying else (),
            part=guards.restored(cfg, me, "load" if disk else "heal"),
        )
        if replaying and known is not None:
            me = me._replace(lastq=known.records.get(T - 1, (True, -1))[1])
    else:
        me = me._replace(G=None)
    me = me._replace(lin=plan.lineage, then=then if action[i] in ("heal", "make") else ())
    if disk and cfg.forks:
        me = me._replace(settled=-1)  # its state went, as that of others could not be had
    if action[i] == "make":
        last = next(rep[1] for rep in got.values() if rep[0] == T)
        me = me._replace(src=last, recipe=source[i])
    keeps = action[i] in ("stay", "roll") and plan.order is not None
    if keeps and "fork_not_in_history" not in cfg.rules:
        me = me._replace(forks=then)
    # a patch type is run by the whole pipeline, also by stages that still hold it
    again = todo.get(r, ()) if "patch_missing_only" not in cfg.rules else ()
    held = tuple(NONE if x in again else v for x, v in enumerate(me.held))
    if made and "fork_keeps_held" not in cfg.rules:
        held = (NONE,) * cfg.N
    me = me._replace(sup=sup[s], todo=todo.get(r, ()), held=held, att=0, stg=s)
    if me.ph not in "HYM":
        me = stores.settled(cfg, me._replace(settled=plan.qid, ph="C"))
    nxt = setpod(st, i, me)
    return note_seen(cfg, nxt, i) if me.ph == "C" else nxt


def settle_store(cfg: Cfg, st: State, i: int, got: dict, goal: tuple) -> State:
    """A rank has its store keep what comes after the settled version, or what it rolls over."""
    T, action, disk, is_anew = goal
    me = st.pods[i]
    if disk:  # all go back: what is newer is promised no more
        left = frozenset(k for k in st.kept if k[3] <= T - (k[2] == "g"))
        st = st._replace(kept=left, seen=tuple(min(v, T) for v in st.seen))
    if disk:
        own = stores.go_back(st.stores[i], T)
    elif action in ("heal", "replay"):
        own = stores.lower(st.stores[i], T)
    else:
        own = st.stores[i]
    st = stores.setstore(st, i, own)
    if action in ("heal", "replay"):
        return setpod(st, i, me._replace(kept=0))
    if action == "roll" and "record_after_apply" not in cfg.rules:
        key = next(rep[1] for rep in got.values() if rep[0] == T)
        st = stores.note_record(st, i, me.ver, False, key)
    # What a stage is made anew from may be older.
    if not is_anew:
        plan = st.plans[me.q]
        since = {m[2]: q for m, q in zip(plan.members, plan.since, strict=True)}
        kept = max((rep[6] for p, rep in got.items() if rep[5] >= since[p]), default=0)
        own = stores.drop_older(st.stores[i], kept)
        st = stores.setstore(setpod(st, i, me._replace(kept=max(kept, me.kept))), i, own)
    return st


def joined(cfg: Cfg, st: State, i: int) -> State:
    """A rank that had no state has one: its settle is complete, and a window begins."""
    me = st.pods[i]
    if me.ph != "C":
        return st
    me = stores.settled(cfg, me._replace(settled=st.plans[me.q].qid))
    return note_seen(cfg, setpod(st, i, me), i)


def applied(cfg: Cfg, st: State, i: int) -> Pod:
    pod = st.pods[i]
    plan = st.plans[pod.q]
    row = rank_of(plan)[i][0]
    return stores.enter_step(cfg, next_step(cfg, plan, row, do_apply(cfg, pod)))


def note_seen(cfg: Cfg, st: State, i: int) -> State:
    """Remember, for the checks alone, which version a pod has had."""
    if not cfg.window:
        return st
    newest = max(st.seen[i], st.pods[i].ver)
    return st._replace(seen=(*st.seen[:i], newest, *st.seen[i + 1 :]))


def kept_commit(cfg: Cfg, st: State, i: int, told: dict) -> State:
    """The votes are in: what is needless goes, and the commit is kept before it is applied."""
    pod, plan = st.pods[i], st.plans[st.pods[i].q]
    st = stores.confirm(cfg, st, i, pod.ver, told)
    before = pod.win
    st = stores.note_copies(cfg, st, i, list(told.values()))
    if before >= 0 and st.pods[i].win < 0:
        st = stores.confirm_window(st, plan, before, told)
    if "record_after_apply" in cfg.rules:
        return st
    return stores.note_record(st, i, pod.ver, True, pod.G[0])
