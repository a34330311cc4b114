"""Defines the states of the model: ranks, plans, posts, stores, and what may fail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

UP, STOPPED, DEAD = "U", "S", "D"
# Phases of a rank: I idle or spare, P parked (waits for a plan), S settle report posted, Q report
# of its store posted, H healing, Y replaying, M making its state anew of others, C computing, R
# reduce posted, B waiting for what it guards, L logging, V vote
# posted (holds G), W prepared and barrier posted (two rounds), K may apply.
NONE, OK, BAD, GARBAGE = (
    0,
    1,
    2,
    3,
)  # a gradient buffer; values >= 10 are OK with a tag (cfg.nondet, cfg.forks)


BUSY = "SQHYMP"
"""Phases in which a rank has no state that others may copy."""


def is_ok(v: int) -> bool:
    return v == OK or v >= 10


class Part(NamedTuple):
    ver: int  # version of what is in it: that of its cell's state, unless a rule is left out
    bits: tuple  # forks that went into it
    right: int


RIGHT, WRONG, UNJUDGED = 1, 0, 2
"""What a part is. UNJUDGED: it is wrong, and no vote has compared it since."""


class Pod(NamedTuple):
    st: str
    inc: int  # incarnation of the process: a restart is another one
    q: int  # plan that it adopted (index into state.plans), -1 none
    ver: int  # parameter version that it holds complete, -1 none
    stg: int  # stage of that state
    good: bool  # the version's one right value?
    lastq: int  # quorum key in which version ver-1 -> ver was certified
    ph: str
    held: tuple  # per shard type: gradient buffer for step ver
    G: tuple | None  # (quorum key, contributions, prepared) reduced gradient of step ver
    sup: tuple  # per shard type: replica that supplies it at this stage in this step
    todo: tuple  # shard types that this replica computes in this step
    att: int  # attempt of this step inside this quorum (a NO vote starts the next)
    src: int  # H: pod to heal from, -2 the durable checkpoint
    tver: int  # H: version to heal to
    hist: tuple  # cfg.nondet: every gradient applied
    settled: int  # quorum_id of the last settle that it completed
    win: int = -1  # first version of the window of snapshots in flight
    due: bool = False  # its instalment of version ver is not copied yet
    copies: tuple = ()  # states of the window that it wrote: (unit, version, places)
    unheld: bool = False  # some holder of a state of the window is gone, or its store was full
    log: tuple = ()  # gradients of step ver that it wrote: (unit, places)
    unlogged: bool = False  # some holder of them is gone, or its store was full
    recipe: tuple = ()  # Y: what it reads: per unit (state, holders), (step, holders)
    bad: frozenset = frozenset()  # copies that it has found damaged: (pod, stage, unit, kind, at)
    kept: int = 0  # version before which votes found nothing needed
    lin: int = 0  # lineage of its state
    forks: tuple = ()  # its history, as it says: (version, stages)
    bits: tuple = ()  # the forks that its state is made of
    then: tuple = ()  # H, M: the history that it will have
    part: Part | None = None  # what an end alone has: its own, or a guard's copy


class Plan(NamedTuple):
    qid: int
    members: tuple  # of (replica, stage, pod, inc)
    since: (
        tuple  # per member: quorum_id at which it (re)joined; a member of every plan from then on
    )
    lineage: int = 0
    order: tuple | None = None  # a fork: (stages to make anew, lineage from which on states count)


class Segment(NamedTuple):
    stage: int
    unit: int
    kind: str  # s a state, g a reduced gradient
    at: int  # version of the state, step of the gradient
    good: bool  # the one right value?
    window: int  # first version of the window in which it was written
    whole: bool  # has its bytes' digest


class Store(NamedTuple):
    life: int  # grows when the pod is lost with all that it holds
    segments: frozenset
    records: frozenset  # commits: (step, whether it has the digests that votes told, quorum key)
    floor: int
    parcels: frozenset  # on their way: (Segment, holder, life of the holder, floor of the author)


class State(NamedTuple):
    pods: tuple
    board: frozenset  # posts: (key, pod, inc, plan index, payload)
    plans: tuple
    store: int  # plan that Redis holds, -1 nothing
    apis: tuple  # per api replica: None or (store seen, proposed Plan)
    api_up: bool
    bud: tuple  # faults left, by kind
    evt: bool  # edge-triggered fault event pending (mutant only)
    durable: tuple  # (version, good) of the newest complete checkpoint
    parts: frozenset  # checkpoint parts written: (plan, version, stage, good)
    stores: tuple = ()  # per pod, if the job has snapshots
    kept: frozenset = frozenset()  # what votes confirmed: (stage, unit, kind, at, places)
    seen: tuple = ()  # per pod: newest version that a trainer had there in this life of the pod


CRASH, STOP, GLITCH, SDC, OUTAGE, LOSS, SUSPECT, TRAINER, FULL, DAMAGE = range(10)


@dataclass(frozen=True)
class Cfg:
    name: str = ""
    N: int = 2
    P: int = 2
    spares: int = 0
    steps: int = 2
    bud: tuple = (1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    mode: str = "one"  # one: vote = norm exchange; two: vote, then a barrier before apply
    apis: int = 1
    reorder: bool = False  # an older plan may be delivered after a newer one
    staged: bool = False  # backward finishes stage by stage, not at once
    fine: bool = False  # a separate state between "may apply" and "applied"
    dup: bool = False  # every replica also computes the next shard type (all-reduce stack 2)
    nondet: bool = (
        False  # recomputation gives other bits (breaks rule: for comparing one / two rounds)
    )
    ckpt: int = 0  # every k versions
    grow: bool = False  # a plan after a fault may already take in spares and returning pods
    restarts: bool = True  # a dead pod comes back empty (repair, costs no budget)
    max_plans: int = 7
    window: int = 0  # versions of a window of snapshots; 0: the job has none
    units: int = 1  # of each stage
    peers: int = 1  # other pods that hold each segment
    forks: bool = False  # whether stages may be made anew of others
    guards: int = 0  # cells of stage 1 that keep what stage 0 alone has
    until_calm: bool = False  # explore no further where no fault is left and all go on as one
    rules: frozenset = frozenset()
    secs: float = 1e9  # own time limit
    prefix: tuple = ()  # beginnings of the labels that lead to the first state


class Violation(Exception):  # noqa: N818 - it is what is looked for, no failure
    """An invariant does not hold."""


@cache
def index(plan: Plan) -> dict:
    return {(r, s): (p, i) for r, s, p, i in plan.members}


@cache
def rank_of(plan: Plan) -> dict:
    return {p: (r, s, i) for r, s, p, i in plan.members}


@cache
def complete_rows(plan: Plan, P: int) -> tuple:
    have = index(plan)
    return tuple(sorted({r for r, _ in have if all((r, s) in have for s in range(P))}))


@cache
def default_table(plan: Plan, N: int, P: int, dup: bool) -> tuple:
    """(supplier per type, types to compute per replica) of an undisturbed step."""
    rows = complete_rows(plan, P)
    if not rows:
        return (-1,) * N, {}
    sup = tuple(x if x in rows else rows[x % len(rows)] for x in range(N))
    todo = {r: [x for x in range(N) if sup[x] == r] for r in rows}
    if dup:
        for r in rows:
            nxt = (max(todo[r], default=r) + 1) % N
            if nxt not in todo[r]:
                todo[r].append(nxt)
    return sup, {r: tuple(t) for r, t in todo.items()}


def initial(cfg: Cfg) -> State:
    members, pods = [], []
    for r in range(cfg.N):
        for s in range(cfg.P):
            members.append((r, s, len(members), 0))
    plan = Plan(1, tuple(members), (1,) * len(members))
    sup, todo = default_table(plan, cfg.N, cfg.P, cfg.dup)
    empty = (NONE,) * cfg.N
    for r, s, _p, _i in members:
        rank = Pod(UP, 0, 0, 0, s, True, 0, "C", empty, None, sup, todo[r], 0, -1, -1, (), 1)
        rank = rank._replace(win=0, due=True) if cfg.window else rank
        pods.append(rank._replace(part=Part(0, (), RIGHT)) if cfg.guards and s == 0 else rank)
    spare = Pod(UP, 0, -1, -1, -1, True, -1, "I", empty, None, (), (), 0, -1, -1, (), -1)
    pods += [spare] * cfg.spares
    return State(
        tuple(pods),
        frozenset(),
        (plan,),
        0,
        (None,) * cfg.apis,
        True,
        cfg.bud,
        False,
        (0, True),
        frozenset(),
        tuple(Store(0, frozenset(), frozenset(), 0, frozenset()) for _ in pods if cfg.window),
        frozenset(),
        (0,) * len(pods) if cfg.window else (),
    )


def setpod(st: State, i: int, pod: Pod) -> State:
    return st._replace(pods=(*st.pods[:i], pod, *st.pods[i + 1 :]))


def spend(st: State, what: int) -> State:
    b = list(st.bud)
    b[what] -= 1
    return st._replace(bud=tuple(b))
