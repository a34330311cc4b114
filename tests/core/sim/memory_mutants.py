"""Deliberate mistakes in what is kept in the memory of pods, and in what is made anew from it.

As in :mod:`tests.core.sim.mutants`: each removes one rule from a running simulation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.core.sim.mutants import Mutant

from mainstay_core.base.shape import Order
from mainstay_core.rank import machine as rank_machine
from mainstay_core.rank import recheck, session, settle, windows
from mainstay_core.rank.events import KeepFrom
from mainstay_core.rank.replays.replaying import Stores
from mainstay_core.rank.settle import Settlement
from mainstay_core.rank.state import RankState
from mainstay_core.segments import index
from mainstay_core.segments.evictions import Kept
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.sim import draw
from mainstay_core.sim.scenarios.fault_draws import draw_losses
from mainstay_core.sim.scenarios.scenario import Fault, Scenario
from mainstay_core.sim.segments import SegmentStore
from mainstay_core.sim.trainers import keeper
from mainstay_core.sim.trainers.keeper import SegmentKeeper
from mainstay_core.snapshots import recopies
from mainstay_core.snapshots.recopies import Recopies, Recopy
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.segments import SegmentKind
from mainstay_core.wire.votes import Commit, SnapshotStatus, Vote
from mainstay_core.wire.windows import WindowBasis


def draw_snapshots(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario with snapshots in memory that meets faults of some kinds only.

    Four cells of each position leave a majority when one of them has a bad state.
    """
    scenario, rng = draw(seed, ("damage-segment",)), random.Random(f"snapshots of {kinds} {seed}")
    shape = replace(
        scenario.config.shape,
        lanes=4,
        replicas=4,
        stages=rng.choice((1, 2)),
        order=Order.IN_ORDER,
        ranks_per_stage=1,
        ranks_per_pod=1,
        steps=10,
    )
    faults = [f for _ in range(2) for f in draw_losses(rng, shape.num_ranks, kinds, kinds)]
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, memory_bytes=1 << 32, num_instalments=rng.choice((1, 2)))
    config = replace(scenario.config, shape=shape, snapshots=snapshots)
    return replace(scenario, config=config, slots_per_pod=1, faults=tuple(faults))


def draw_short(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario whose stores are just too small, and that meets no fault."""
    assert not kinds, "there are none"
    scenario, rng = draw_snapshots(seed, ("damage-segment",)), random.Random(f"short {seed}")
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    shape = replace(scenario.config.shape, lanes=2, replicas=2, steps=14)
    # Two windows with their logs take 18 pages of a pod, and as many for each other pod.
    snapshots = replace(
        snapshots,
        memory_bytes=PAGE_BYTES * rng.randint(12, 24),
        num_instalments=2,
        peers=rng.choice((0, 1)),
    )
    config = replace(scenario.config, shape=shape, snapshots=snapshots)
    return replace(scenario, config=config, units=2, faults=())


def draw_lone_pod(seed: int) -> Scenario:
    """Return a job of one rank that loses the pod of this rank, and has spares with copies."""
    scenario, rng = draw_snapshots(seed, ("damage-segment",)), random.Random(f"lone {seed}")
    shape = replace(scenario.config.shape, lanes=1, replicas=1, stages=1)
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, peers=rng.choice((1, 2)), boundary=False)
    config = replace(scenario.config, shape=shape, snapshots=snapshots, spares=2, redundancy=None)
    loss = Fault(kind="kill-pod", point=rng.choice(("LOG", "vote-posted")), times=rng.randint(5, 8))
    return replace(scenario, config=config, apis=1, units=2, faults=(loss,))


def draw_few_stores(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a job of two pods and a spare that loses two pods: plans lack stores for a while."""
    scenario, rng = draw_snapshots(seed, kinds), random.Random(f"few {seed}")
    shape = replace(scenario.config.shape, lanes=2, replicas=2, stages=1, steps=20)
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, peers=2, domains=1, num_instalments=4, boundary=False)
    config = replace(scenario.config, shape=shape, snapshots=snapshots, spares=1, redundancy=None)
    losses = (
        Fault(kind="kill-pod", point="vote-posted", times=rng.randint(3, 12)) for _ in range(2)
    )
    return replace(scenario, config=config, units=2, faults=tuple(losses))


def _complete_at_once(
    state: RankState, votes: Sequence[Vote]
) -> tuple[RankState, tuple[KeepFrom, ...]]:
    """A window is complete once its last instalment is due, wherever its copies are."""
    told = [
        replace(v, snapshots=replace(v.snapshots, copied=state.version + 1))
        for v in votes
        if v.snapshots
    ]
    return _NOTE_COPIES(state, told)


_NOTE_COPIES = windows.note_copies


def _own_length(state: RankState) -> RankState:
    """Each rank spreads its snapshot as it likes."""
    if state.snapshots is None:
        return state
    window = Window(first=state.version, length=1 + state.index % 3)
    return replace(state, window=window)


def _own_clock(state: RankState, commit: Commit, votes: Sequence[Vote]) -> RankState:
    """Each rank plans its next window from what it has measured itself."""
    return _NOTE_COMMIT(state, commit, votes[state.index : state.index + 1])


_NOTE_COMMIT = windows.note_commit


def _own_basis(state: RankState, outcome: Settlement) -> WindowBasis:
    """Whoever settles goes on with what it has measured and counted: a joiner with nothing."""
    del outcome
    return state.basis


_WRITE = vars(SegmentKeeper)["_write"]


def _write_once(own: Any, plan: Any, holders: Any, key: Any, whole: str) -> None:
    """What an attempt before has written of a gradient counts."""
    if key.kind is SegmentKind.GRADIENT and own._client.is_held(key):
        return
    _WRITE(own, plan, holders, key, whole)


_LOG = vars(SegmentKeeper)["log"]


async def _log_without_holders(
    own: Any, wait: Any, plan: Any, index: int, lineage: int, step: int, types: Sequence[int]
) -> bool:
    """A rank votes that its gradient is kept as soon as it has sent it."""
    if own.logs_boundaries:
        return bool(await _LOG(own, wait, plan, index, lineage, step, types))
    reduced = own._owner.made_cell().reduced
    for key in own.duty(plan, index, lineage, step):
        own._write(plan, own._authorship(plan, index).holders, key, reduced)
    return True


_NOTE_CLEAN, _REFUSED = recheck.note_clean, vars(rank_machine)["_refused"]
_VOTES: list[Sequence[Vote]] = []


def _note_clean_and_remember(state: RankState, votes: Sequence[Vote]) -> RankState:
    """Each rank comes here with the votes that it has judged."""
    _VOTES[:] = [votes]
    return _NOTE_CLEAN(state, votes)


def _refused_counts_copies(state: RankState, verdict: Any, prefix: Any, *rest: Any) -> Any:
    """Copies of states that a vote has found bad complete a window."""
    counts: tuple[KeepFrom, ...] = ()
    if verdict.state_bad and _VOTES and state.phase is rank_machine.Phase.VOTING:
        state, counts = windows.note_copies(state, _VOTES[0])
    return _REFUSED(state, verdict, (*prefix, *counts), *rest)


def _newest_without_commits(plan: Any, reports: Any, stores: Stores | None = None) -> int | None:
    """A gradient that is kept is one of a step that was committed."""
    if stores is None:
        return _NEWEST(plan, reports)
    known = stores.records
    stores.records = dict.fromkeys(range(100), next(iter(known.values()), None))  # type: ignore[arg-type]
    try:
        return _NEWEST(plan, reports, stores)
    finally:
        stores.records = known


_NEWEST = settle.newest


def _status_at_once(own: Any, version: int, *, logged: bool) -> SnapshotStatus:
    """A rank tells that its states are copied once it has begun to copy them."""
    return replace(_STATUS(own, version, logged=logged), copied=version + 1)


_STATUS = vars(SegmentKeeper)["status"]


def _nothing_again(*_: Any, **__: Any) -> list[Recopy]:
    """What lies at the holders that are left is enough."""
    return []


_ADOPT = vars(Recopies)["adopt"]


def _adopt_and_forget(own: Any, *args: Any, **named: Any) -> None:
    """Whatever is on its way when a plan comes is sent under that one, too."""
    own._sent = {}
    _ADOPT(own, *args, **named)


_PLAN_EVICTIONS = index.plan_evictions


def _evict_what_is_needed(kept: Any, *, window: int, complete: int, is_broken: bool) -> Any:
    """Copies of the window in flight go like those of windows that were given up."""
    older = [Kept(key, written_in - (written_in == window)) for key, written_in in kept]
    return _PLAN_EVICTIONS(older, window=window, complete=complete, is_broken=is_broken)


_TAKE_ROOM = vars(SegmentStore)["_take_room_of_others"]


def _evict_at_one_store(own: Any, header: Any) -> Any:
    """One store drops what the window in flight needs, and the other holders keep it."""
    index.plan_evictions = _evict_what_is_needed if own._pod == "pod1" else _PLAN_EVICTIONS
    try:
        return _TAKE_ROOM(own, header)
    finally:
        index.plan_evictions = _PLAN_EVICTIONS


_IN_MEMORY = ("damage-segment",)

MEMORY_MUTANTS = {
    "window-dropped-too-early": Mutant(
        "the window before is dropped while states of this one are on their way",
        [(windows, "note_copies", _complete_at_once)],
        _IN_MEMORY,
        first=8,
    ),
    "copied-once-begun": Mutant(
        "a state counts as copied before its holders have it",
        [(SegmentKeeper, "status", _status_at_once)],
        _IN_MEMORY,
        first=8,
    ),
    "own-window-length": Mutant(
        "each rank spreads its snapshot over as many versions as it likes",
        [(windows, "begin_window", _own_length)],
        _IN_MEMORY,
    ),
    "own-clock": Mutant(
        "each rank plans its next window from what it has measured itself",
        [(windows, "note_commit", _own_clock)],
        _IN_MEMORY,
        first=53,
    ),
    "own-order": Mutant(
        "a rank that joins does not learn what the others have measured and counted",
        [(windows, "settled_basis", _own_basis)],
        _IN_MEMORY,
        first=20,
    ),
    "log-of-another-attempt": Mutant(
        "the gradient of an attempt that was refused counts as that of the step",
        [(SegmentKeeper, "_write", _write_once)],
        ("corrupt-gradient",),
        draws=draw_snapshots,
    ),
    "refused-state-counts": Mutant(
        "copies of states that a vote has found bad complete a window",
        [
            (recheck, "note_clean", _note_clean_and_remember),
            (rank_machine, "_refused", _refused_counts_copies),
        ],
        ("corrupt-state",),
        draws=draw_snapshots,
        first=13,
    ),
    "voted-before-logged": Mutant(
        "a rank votes that its gradient is kept as soon as it has sent it",
        [(SegmentKeeper, "log", _log_without_holders)],
        _IN_MEMORY,
    ),
    "damage-not-looked-for": Mutant(
        "nobody compares a segment with the digest that it was written with",
        [(keeper, "is_whole", lambda *_: True)],
        ("damage-segment", "damage-segment", "kill-stage", "kill-all"),
        draws=draw_snapshots,
        first=69,
    ),
    "needed-goes-for-room": Mutant(
        "a full store drops what the window in flight needs",
        [(index, "plan_evictions", _evict_what_is_needed)],
        (),
        draws=draw_short,
        first=8,
    ),
    "needed-goes-for-room-at-one": Mutant(
        "one of several holders drops what the window in flight needs",
        [(SegmentStore, "_take_room_of_others", _evict_at_one_store)],
        (),
        draws=draw_short,
        first=20,
    ),
    "others-not-asked": Mutant(
        "nobody asks the stores of pods without a member",
        [(session, "others_to_ask", lambda *_: ())],
        _IN_MEMORY,
        first=4,
    ),
    "not-sent-again": Mutant(
        "what has lost a holder stays with those that are left until the next window is complete",
        [(recopies, "plan_recopies", _nothing_again)],
        _IN_MEMORY,
    ),
    "sent-twice": Mutant(
        "what is on its way to a store again is sent there once more when a plan comes",
        [(Recopies, "adopt", _adopt_and_forget)],
        ("damage-segment", "kill-stage", "kill-all", "kill-pod"),
        draws=draw_snapshots,
        first=8,
    ),
    "not-looked-at-as-it-comes": Mutant(
        "what a quorum writes that has a successor is not sent to that one's stores",
        [(Recopies, "came", lambda *_: None)],
        _IN_MEMORY,
        draws=draw_few_stores,
    ),
    "replay-without-commit": Mutant(
        "a gradient that is kept is applied again whether or not its step was committed",
        [(settle, "newest", _newest_without_commits)],
        _IN_MEMORY,
        first=50,
    ),
}
