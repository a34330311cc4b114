"""Deliberate mistakes: each removes one rule of the protocol from a running simulation.

A mutant replaces one decision, or one rule of the shells, for the length of a run.
The simulation must find every one of them within a number of seeds, which shows
that it can see what it looks for.
"""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mainstay_core.base.ids import Incarnation, Slot
from mainstay_core.base.shape import Order
from mainstay_core.control_plane.job_store import StoredJob
from mainstay_core.coordinator import repeats
from mainstay_core.gather.frames import Abort, Gathered, Join, Post
from mainstay_core.gather.server import Send, ServerProtocol
from mainstay_core.rank import adoption, checkpoints, connections, reach, settle, votes
from mainstay_core.rank import machine as rank_machine
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.events import Apply, StateLoaded
from mainstay_core.rank.session import RankSession
from mainstay_core.rank.state import RankState
from mainstay_core.sim import Outcome, draw, simulate, terms
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.engine import Sleep
from mainstay_core.sim.gather import GatherClient
from mainstay_core.sim.scenarios.scenario import LASTING, Fault, Scenario
from mainstay_core.sim.trainers.trainer import Trainer
from mainstay_core.supervisor import conversation, outbox, slots
from mainstay_core.supervisor import machine as supervisor_machine
from mainstay_core.wire.facts import Fact
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import SettleReport


def draw_deaths_with_bad_states(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario in which trainers end between a bad state and the vote that would find it.

    Four cells of each position leave a majority when one is bad and another one ends.
    """
    scenario, rng = draw(seed, ("corrupt-state",)), random.Random(f"deaths {seed}")
    shape = replace(
        scenario.config.shape,
        lanes=4,
        replicas=4,
        shards_per_lane=2,
        stages=max(2, scenario.config.shape.stages),
        order=Order.IN_ORDER,
        ranks_per_stage=1,
        ranks_per_pod=1,
        steps=8,
    )
    points = ("REDUCE", "reduced", "VOTE", "vote-posted", "reduce-half")
    faults = []
    for _ in range(2):
        faults.append(Fault(kind="corrupt-state", at_s=rng.random()))
        faults += [
            Fault(kind=rng.choice(kinds), point=rng.choice(points), times=rng.randint(1, 8))
            for _ in range(rng.randint(1, 2))
        ]
    config = replace(scenario.config, shape=shape, spares=1)
    return replace(scenario, config=config, slots_per_pod=1, faults=tuple(faults))


@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule removed.

    ``patches`` are (owner, attribute, replacement); faults are drawn from ``kinds``.
    """

    why: str
    patches: Sequence[tuple[object, str, object]]
    kinds: tuple[str, ...]
    is_rare: bool = False
    """It takes many seeds to meet it."""
    draws: Callable[[int, tuple[str, ...]], Scenario] = draw
    first: int = 0
    """The seed to begin with: a quick test begins near one of the few that meet it."""

    @property
    def seeds(self) -> int:
        """Within so many seeds it must be found."""
        return 600 if self.is_rare else 40


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Break the rule meanwhile."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in mutant.patches]
    try:
        for owner, name, replacement in mutant.patches:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def find(mutant: Mutant) -> Outcome | None:
    """Return the first violation, if a seed has one."""
    with applied(mutant):
        for seed in range(mutant.first, mutant.first + mutant.seeds):
            outcome = simulate(mutant.draws(seed, mutant.kinds))
            # A mutant that does not fit the code any more shows nothing.
            assert not outcome.violation.startswith("TypeError"), outcome.where
            if outcome.violation:
                return outcome
    return None


def _post_without_the_last(server: Any, connection: Any, member: Any, post: Post[Any]) -> Any:
    """A vote that is missing counts as a yes, where somebody else of the position has voted."""
    room = member.room
    if not post.key.startswith("vote/") or room.size < 3 or room.quorum in server._dead:
        return _POST(server, connection, member, post)
    posts = room.posts.setdefault(post.key, {})
    posts[member.index] = post.body
    if len(posts) < room.size - 1:
        return _POST(server, connection, member, post)
    if len(posts) == room.size - 1:
        missing = next(i for i in range(room.size) if i not in posts)
        twins = [posts[i] for i in (missing - 1, missing + 1) if i in posts]
        if len({twin.norms_sq for twin in twins}) > 1:
            return []  # of which position it is cannot be told
        posts[missing] = twins[0]
        bodies = tuple(posts[i] for i in range(room.size))
        return [Send(tuple(room.members.values()), Gathered(key=post.key, bodies=bodies))]
    return []


_POST = vars(ServerProtocol)["_post"]


def _post_by_key_alone(server: Any, connection: Any, member: Any, post: Any) -> Any:
    """What an older quorum has left of a key counts in a newer one."""
    room, left = member.room, vars(server).setdefault("_left_of", {})
    posts = left.setdefault(post.key, {})
    posts[member.index] = post.body
    room.posts[post.key] = {i: body for i, body in posts.items() if i < room.size}
    actions = _POST(server, connection, member, post)
    if post.key not in room.posts:
        del left[post.key]
    return actions


_JOIN = vars(ServerProtocol)["_join"]


def _join_what_has_ended(server: Any, connection: Any, join: Join) -> Any:
    death = server._dead.pop(join.quorum, None)
    try:
        return _JOIN(server, connection, join)
    finally:
        if death is not None:
            server._dead[join.quorum] = death


def _post_to_the_dead(server: Any, connection: Any, member: Any, post: Any) -> Any:
    """A post counts although its quorum has ended."""
    dead, server._dead = server._dead, OrderedDict()
    try:
        return _POST(server, connection, member, post)
    finally:
        server._dead = dead


def _tell_all_but_one(server: Any, quorum: str, death: Abort, spare: Any = None) -> Any:
    return [Send(send.to[:-1], death) for send in _KILL(server, quorum, death, spare)]


_KILL = vars(ServerProtocol)["_kill"]


def _any_life(plan: Plan, slot: Slot, incarnation: Incarnation) -> Member | None:
    return next((m for m in plan.members if m.slot == slot), None)


_SETTLE = settle.settle


def _settle_without_tiers(
    plan: Plan,
    shards_per_lane: int,
    reports: Sequence[SettleReport],
    stores: Sequence[StoreReport] = (),
    *rest: Any,
) -> settle.Settlement:
    members = tuple(replace(m, since=-1) for m in plan.members)
    return _SETTLE(replace(plan, members=members), shards_per_lane, reports, stores, *rest)


def _reach_any_certificate(
    report: SettleReport, lineage: int, certificates: set[tuple[int, str]]
) -> frozenset[int]:
    if not report.valid or report.lineage != lineage:
        return frozenset()
    if report.mark is not None:
        return frozenset({report.version, report.version + 1})
    return frozenset({report.version})


def _told_once(
    waiting: outbox.FactOutbox, batch: tuple[Fact, ...], answer: outbox.Answer
) -> outbox.Told:
    after = _TOLD(waiting, batch, answer)
    if not isinstance(answer, outbox.Away | outbox.Unknown):
        return after
    return replace(after, outbox=replace(after.outbox, waiting=waiting.waiting[len(batch) :]))


_TOLD = outbox.told


def _never(*_: object) -> bool:
    return False


_WAIT = vars(GatherClient)["wait"]


def _wait_a_little(gather: GatherClient, key: str) -> Any:
    """A member that has not come within a moment is gone."""
    yield 0.02
    if not gather._protocol.may_take(key):
        gather.abort("somebody is late")
    return (yield from _WAIT(gather, key))


_REDUCE = vars(Compute)["reduce"]


def _reduce_in_place(compute: Compute, *args: Any) -> Any:
    before = dict(compute.partials)
    try:
        yield from _REDUCE(compute, *args)
    except GroupEnded:
        compute.partials = {p: (terms.term("overwritten", v),) for p, v in before.items()}
        raise


_PERFORM = vars(Trainer)["perform"]


async def _apply_interrupted(trainer: Trainer, action: Any) -> Any:
    outcome = await _PERFORM(trainer, action)
    gather = trainer.connections._gather
    if isinstance(action, Apply) and gather is not None and gather.ended is not None:
        assert trainer.cell is not None
        trainer.cell.params = terms.term("torn", trainer.cell.params)
    return outcome


async def _load_later(trainer: Trainer, action: Any) -> Any:
    """Whoever heals votes before its copy is there."""
    if action.expected and action.sources:
        trainer.made_cell().params = terms.term("not yet", action.expected)
        await Sleep(0.0)
        return StateLoaded(action.expected)
    return await _LOAD_STATE(trainer, action)


_LOAD_STATE = vars(RankSession)["_load_state"]


def _outdated_by_any(plan: Plan | None, fact: Any) -> bool:
    return plan is not None and fact.quorum is not None and plan.quorum.id > fact.quorum.id


def _all_good(plan: Plan, *_: object) -> votes.Verdict:
    return votes.judge_states(plan, {})


def _never_more(*_: object) -> repeats.Escalation:
    return repeats.Escalation(rung=repeats.Rung.AGAIN)


def _stay_always(*_: Any) -> bool:
    """Return that the members of a position are those of its group, whoever they are."""
    return True


def _common_to_who_has_one(reported: Any) -> str:
    """Return the group that those have who have one: a new member has none."""
    return next(iter({*reported} - {""}), "")


MUTANTS = {
    "group-kept-with-a-new-member": Mutant(
        "a position keeps its group although one of its members is new",
        [(settle, "_common", _common_to_who_has_one), (connections, "_stay", _stay_always)],
        ("kill-trainer",),
    ),
    "group-kept-without-a-member": Mutant(
        "a position keeps its group although one of its members has left",
        [(connections, "_stay", _stay_always)],
        ("scale",),
    ),
    "missing-vote-counts": Mutant(
        "a vote that is missing counts as a yes",
        [(ServerProtocol, "_post", _post_without_the_last)],
        ("kill-trainer", "stop"),
    ),
    "old-vote-let-in": Mutant(
        "a vote of an older quorum counts in a newer one",
        [(ServerProtocol, "_post", _post_by_key_alone)],
        ("kill-trainer",),
    ),
    "late-member-let-in": Mutant(
        "a member that comes late enters a quorum that has ended",
        [(ServerProtocol, "_join", _join_what_has_ended)],
        ("kill-trainer",),
    ),
    "late-post-counts": Mutant(
        "a post counts although its quorum has ended",
        [(ServerProtocol, "_post", _post_to_the_dead)],
        ("kill-trainer",),
    ),
    "abort-lost": Mutant(
        "somebody is not told that the quorum has ended",
        [(ServerProtocol, "_kill", _tell_all_but_one)],
        ("kill-trainer",),
    ),
    "no-incarnation": Mutant(
        "membership is bound to the slot, not to the process",
        [(Plan, "member_of", _any_life)],
        ("kill-trainer",),
        first=24,
    ),
    "no-tiers": Mutant(
        "states of returning ranks count like those of members",
        [(rank_machine, "settle", _settle_without_tiers)],
        ("stop-pod", "cut-pod", "kill-trainer", "kill-meeting"),
        is_rare=True,
        first=980,
    ),
    "roll-any-mark": Mutant(
        "a mark is rolled forward without a certificate of its quorum",
        [(settle, "reach", _reach_any_certificate), (reach, "reach", _reach_any_certificate)],
        ("corrupt-gradient", "kill-meeting", "kill-trainer"),
        first=13,
    ),
    "told-once": Mutant(
        "a fault is an event, told once",
        [
            (supervisor_machine, "_unheard", _never),
            (conversation, "told", _told_once),
        ],
        ("kill-trainer", "kill-api", "store-outage", "reset"),
    ),
    "late-is-gone": Mutant(
        "a settle gives up on members that are still on their way",
        [(GatherClient, "wait", _wait_a_little)],
        ("kill-trainer",),
    ),
    "reduce-in-place": Mutant(
        "the reduction overwrites the retained gradients",
        [(Compute, "reduce", _reduce_in_place)],
        ("kill-trainer",),
        first=7,
    ),
    "abort-in-apply": Mutant(
        "an abort interrupts apply",
        [(Trainer, "perform", _apply_interrupted)],
        ("kill-trainer",),
    ),
    "heal-outside": Mutant(
        "the step does not wait for whoever heals",
        [(RankSession, "_load_state", _load_later)],
        ("kill-trainer",),
    ),
    "planned-outdates": Mutant(
        "a planned plan settles what was parked before it",
        [(slots, "outdates", _outdated_by_any)],
        ("kill-trainer", "reset", "cut-one-way"),
        is_rare=True,
    ),
    "keeps-pipeline": Mutant(
        "whoever parks where others may have gone on keeps its pipeline",
        [(adoption, "_MAY_MISS_A_ROUND", frozenset())],
        ("kill-meeting", "reset", "kill-trainer"),
        is_rare=True,
    ),
    "no-compare-and-set": Mutant(
        "two api replicas commit from one base",
        [(StoredJob, "is_current", lambda *_: True)],
        ("kill-trainer", "kill-two"),
        first=13,
    ),
    "pauses-unsaved": Mutant(
        "a rank pauses before its version is on the disk",
        [(checkpoints, "is_open", _never)],
        ("suspend",),
    ),
    "bad-state-is-saved": Mutant(
        "nobody looks at the states that are saved where no step follows",
        [(rank_machine, "judge_states", _all_good), (rank_machine, "judge_reports", _all_good)],
        ("suspend", "corrupt-state"),
        first=20,
    ),
    "bad-state-settles": Mutant(
        "nobody looks at the states that a settle goes on from",
        [(rank_machine, "judge_reports", _all_good)],
        ("kill-trainer",),
        draws=draw_deaths_with_bad_states,
        first=40,
    ),
    "gone-state-keeps-gradients": Mutant(
        "what was computed with a cell that never voted counts",
        [(adoption, "_is_unjudged", _never)],
        ("kill-trainer",),
        is_rare=True,
        draws=draw_deaths_with_bad_states,
    ),
    "joiner-speaks-alone": Mutant(
        "only a position's first member tells the ledger again, though it may just have joined",
        [(RankState, "is_oldest", property(_never))],
        ("kill-trainer", "kill-meeting"),
        is_rare=True,
    ),
    "never-escalates": Mutant(
        "a cause that comes back again and again is met in the same way each time",
        [(repeats, "escalate", _never_more)],
        LASTING,
        first=1,
    ),
}
