"""Which type a second chain computes, who joins when they differ, and what a rank makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.core.plans import make_plan, slot_of
from tests.core.rank.test_machine import adopting, computing, follow, report, vote

from mainstay_core.base.ids import Hardware, PodUid, Slot
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import CheckRules, Mode
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import Account, Deviation, Difference, Told, rule
from mainstay_core.rank import machine
from mainstay_core.rank.events import (
    Applied,
    Apply,
    Compute,
    DropPartials,
    PlanSeen,
    Reduce,
    Reduced,
    SendFact,
    TellDeviation,
    TodoDone,
    VotesGathered,
)
from mainstay_core.rank.machine import RankState
from mainstay_core.rank.recheck import is_agreed_with
from mainstay_core.rank.reports import finding_of
from mainstay_core.rank.settle import Settlement, settle
from mainstay_core.rank.state import report_of
from mainstay_core.rank.steps.doubts import Doubt, cells_of, compared_of, open_doubt, slots_of
from mainstay_core.rank.steps.step_plan import Compared, Supply, plan_step
from mainstay_core.rank.steps.witness import compared_in
from mainstay_core.wire.facts import Named, Parked
from mainstay_core.wire.ledger import CleanDevice
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.votes import Commit, DoubtedAccount, SettleReport, Vote, WitnessAccount

PLAN = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]}, shards_per_lane=2)
RUNS = [Partial(lane=lane, first=2 * lane, last=2 * lane + 1) for lane in range(3)]
COPY = Partial(lane=0, first=0, last=0)


def told(weights: str, shard_type: int = 0) -> Vote:
    account = WitnessAccount(type=shard_type, weights=(weights,))
    return vote(witness=account, stats=())


def voting(life: str, *held: Partial, **fields: object) -> RankState:
    """A rank whose chain has computed step 0, in which replica 1 witnesses replica 0."""
    state = computing(PLAN, shards_per_lane=2, witness_every_steps=1, **fields)
    assert life == "a.1"
    return follow(state, TodoDone(held), Reduced()).state


@pytest.mark.parametrize("lanes", [3, 4, 5])
def test_in_a_round_each_replica_is_witnessed_by_each_other_in_types_of_its_own(
    lanes: int,
) -> None:
    plan = make_plan({r: [f"{'abcde'[r]}.1"] for r in range(lanes)}, shards_per_lane=2)
    pairs: Counter[tuple[int, ...]] = Counter()
    for step in range(lanes * (lanes - 1)):
        compared = compared_in(plan, step, 1, 2)
        assert compared is not None
        assert plan.suppliers[compared.type] == compared.replicas[0]
        assert compared.type % 2 == 0, "no run begins with a witness's copy"
        pairs[compared.replicas] += 1
    assert len(pairs) == lanes * (lanes - 1)
    assert set(pairs.values()) == {1}


def test_a_witness_computes_the_type_last_and_its_copy_does_not_count() -> None:
    compared = Compared(type=0, replicas=(0, 1))
    step = plan_step(PLAN, 2, compared=compared)
    assert step.todo == {0: (0, 1), 1: (2, 3, 0), 2: (4, 5)}
    assert step.compared == compared
    assert step.table == plan_step(PLAN, 2).table
    assert step.holdings == plan_step(PLAN, 2).holdings


def test_another_chain_can_supply_what_is_compared() -> None:
    step = plan_step(PLAN, 2, compared=Compared(type=0, replicas=(2, 0, 1)))
    assert step.todo == {0: (1, 0), 1: (2, 3, 0), 2: (4, 5, 0)}
    assert Supply(partial=COPY, index=2) in step.table[0]


def test_nobody_witnesses_a_type_that_is_held_already() -> None:
    held = {0: (RUNS[0],)}
    step = plan_step(PLAN, 2, held, compared=Compared(type=0, replicas=(0, 1)))
    assert step.compared is None
    assert step.todo == {0: (), 1: (2, 3), 2: (4, 5)}


def witness_of(plan: Plan = PLAN) -> RankState:
    """The state of replica 1's rank, which computes type 0 behind its own."""
    state = computing(plan, shards_per_lane=2, witness_every_steps=1)
    return replace(state, index=1)


def test_a_witness_drops_its_copy_before_the_reduction() -> None:
    done = machine.step(witness_of(), TodoDone((COPY, RUNS[1])))
    assert done.actions[0] == DropPartials((COPY,))
    assert isinstance(done.actions[1], Reduce)
    assert done.state.held == (RUNS[1],)


def test_a_step_in_which_two_chains_agree_is_committed() -> None:
    outcome = machine.step(
        voting("a.1", RUNS[0]), VotesGathered((told("same"), told("same"), vote(stats=())))
    )
    assert "differently" not in outcome.reason


def test_a_disagreement_refuses_the_step_and_a_third_chain_computes_the_type() -> None:
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))

    outcome = machine.step(voting("a.1", RUNS[0]), differ)

    assert "replicas 0, 1 have computed a type differently" in outcome.reason
    assert outcome.actions == (DropPartials((RUNS[0],)), Compute((1, 0)))
    step = outcome.state.step_plan
    assert step is not None
    assert step.compared == Compared(type=0, replicas=(2, 0, 1))


@pytest.mark.parametrize(
    ("second", "verdict"), [("y", Verdict.TRANSIENT), ("x", Verdict.DETERMINISTIC)]
)
def test_the_device_that_most_contradict_tells_of_itself(second: str, verdict: Verdict) -> None:
    single = Partial(lane=0, first=1, last=1)
    tokens = vote().stats
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    agree = VotesGathered(tuple(replace(told(word), stats=tokens) for word in (second, "y", "y")))

    outcome = follow(voting("a.1", RUNS[0]), differ, TodoDone((COPY, single)), Reduced(), agree)

    (tell,) = [a for a in outcome.actions if isinstance(a, TellDeviation)]
    assert (tell.step, tell.shard_type, tell.deviation.verdict) == (0, 0, verdict)
    assert isinstance(outcome.actions[-1], Apply)
    other = replace(outcome.state, phase=machine.Phase.VOTING, index=1, slot=slot_of("b.1"))
    assert not [a for a in machine.step(other, agree).actions if isinstance(a, TellDeviation)]


def named_in(state: RankState, *events: VotesGathered) -> list[Named]:
    """The devices that a rank names in each of these votes on what it holds."""
    facts = [a.fact for event in events for a in machine.step(state, event).actions if is_told(a)]
    return [fact for fact in facts if isinstance(fact, Named)]


def is_told(action: object) -> bool:
    return isinstance(action, SendFact)


def test_the_first_other_member_names_a_device_that_insists_as_well() -> None:
    """It may be gone, or may lose the gather in which the others hear of it."""
    single = Partial(lane=0, first=1, last=1)
    tokens = vote().stats
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    agree = VotesGathered(
        tuple(replace(told(word), stats=tokens, clean_from=7) for word in ("x", "y", "y"))
    )
    asked = follow(voting("a.1", RUNS[0]), differ, TodoDone((COPY, single)), Reduced()).state
    names = {}
    for index, life in enumerate(("a.1", "b.1", "c.1")):
        state = replace(asked, index=index, slot=slot_of(life), clean_from=7)
        names[life] = [(fact.named, fact.since) for fact in named_in(state, agree)]
    assert names == {"a.1": [(slot_of("a.1"), 7)], "b.1": [(slot_of("a.1"), 7)], "c.1": []}


def test_a_device_is_named_though_another_type_is_bad_in_the_same_vote_and_only_once() -> None:
    single = Partial(lane=0, first=1, last=1)
    tokens = vote().stats
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    words = [replace(told(word), stats=tokens) for word in ("x", "y", "y")]
    beside = VotesGathered((words[0], replace(words[1], bad=(2,), ok=False), words[2]))

    asked = follow(voting("a.1", RUNS[0]), differ, TodoDone((COPY, single)), Reduced()).state
    refused = machine.step(asked, beside)

    (tell,) = [a for a in refused.actions if isinstance(a, TellDeviation)]
    assert tell.deviation.verdict is Verdict.DETERMINISTIC
    (named,) = [a.fact for a in refused.actions if isinstance(a, SendFact)]
    assert named == replace(named, device=None)
    assert refused.state.phase is machine.Phase.COMPUTING
    assert refused.state.named_as is Verdict.DETERMINISTIC

    again = replace(refused.state, phase=machine.Phase.VOTING, attempt=1)
    later = machine.step(again, VotesGathered(tuple(words)))
    assert isinstance(later.actions[-1], Apply)
    assert not [a for a in later.actions if isinstance(a, TellDeviation | SendFact)]


def test_since_when_a_device_may_be_wrong_is_since_a_witness_agreed_with_it_last() -> None:
    tokens = vote().stats
    state = voting("a.1", RUNS[0])
    assert state.clean_from == 0
    same = VotesGathered(tuple(replace(told("x"), stats=tokens) for _ in range(3)))
    clean = machine.step(replace(state, version=4), same).state
    assert clean.clean_from == 5

    slot, place = slot_of("a.1"), Difference(position=0, in_pass=Pass.WEIGHT)
    since = []
    for verdict in (Verdict.DETERMINISTIC, Verdict.TRANSIENT):
        deviation = Deviation(slot=slot, difference=place, verdict=verdict)
        finding = finding_of(replace(clean, version=9), TellDeviation(9, 0, deviation, "why"))
        since.append(finding.since)
        assert ("its steps from 5 on are tainted" in finding.describe()) == bool(finding.since)
    assert since == [5, None]


def test_what_a_chain_computed_from_wrong_inputs_nobody_has_compared() -> None:
    slots = [Slot(pod=PodUid(pod), index=0) for pod in "ab"]

    def chain(replica: int, attempt: int, *words: str) -> Told:
        telling = tuple(Account(forward=(word,)) for word in words)
        cells = (
            (slots[0], slots[1])
            if replica == 0
            else tuple(Slot(pod=PodUid(f"{replica}-{stage}"), index=0) for stage in range(2))
        )
        return Told(quorum=1, attempt=attempt, replica=replica, cells=cells, telling=telling)

    wrong = [chain(0, attempt, "bad", "follows") for attempt in (0, 1)]
    known = [*wrong, chain(1, 0, "x", "y"), chain(1, 1, "x", "y"), chain(2, 1, "x", "y")]
    ruling = rule(known)
    assert [d.slot for d in ruling.deviations] == [slots[0]]
    assert not is_agreed_with(slots[1], known, ruling, 1), "it computed on from wrong inputs"
    assert is_agreed_with(known[-1].cells[1], known, ruling, 1)
    later = [*known, chain(0, 2, "x", "y")]
    assert is_agreed_with(slots[1], later, rule(later), 1)


def test_votes_tell_since_when_each_device_is_clean_and_the_ledger_what_is_new() -> None:
    tokens = vote().stats
    same = [replace(told("x"), stats=tokens, clean_from=since) for since in (0, 4, 2)]

    state = machine.step(voting("a.1", RUNS[0]), VotesGathered(tuple(same))).state

    assert state.all_clean_at == 0, "to which version the job may have to go back"
    clean = [
        CleanDevice(slot=slot_of(life), clean_from=since)
        for life, since in (("a.1", 0), ("b.1", 4), ("c.1", 2))
    ]
    assert list(state.clean) == clean
    again = replace(state, phase=machine.Phase.VOTING)
    same[0] = replace(same[0], clean_from=7)
    state = machine.step(again, VotesGathered(tuple(same))).state
    assert state.all_clean_at == 2
    assert [d for d in state.clean if d not in state.clean_before] == [
        CleanDevice(slot=slot_of("a.1"), clean_from=7)
    ]


def test_a_trainer_takes_over_what_is_known_of_its_device_and_follows_the_checks_of_a_plan() -> (
    None
):
    members = tuple(replace(m, clean_from=3) for m in PLAN.members)
    rules = CheckRules(mode=Mode.PIGGYBACK, witness_every_steps=5)
    state = adopting(replace(PLAN, members=members, checks=rules), shards_per_lane=2)
    assert state.clean_from == 3
    assert (state.witness_every_steps, state.compares_last, state.tells_makers) == (5, True, True)
    off = replace(PLAN, quorum=replace(PLAN.quorum, id=2), unplanned_id=2, checks=CheckRules())
    state = machine.step(
        machine.saw_plan(replace(state, phase=machine.Phase.PARKED), off), PlanSeen()
    ).state
    assert (state.witness_every_steps, state.compares_last, state.tells_makers) == (0, False, False)
    assert state.clean_from == 3


def test_a_type_in_doubt_of_which_a_chain_tells_nothing_does_not_count() -> None:
    single = Partial(lane=0, first=1, last=1)
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    silent = VotesGathered(
        tuple(replace(v, stats=vote().stats) for v in (told("x"), told("y"), vote()))
    )
    outcome = follow(voting("a.1", RUNS[0]), differ, TodoDone((COPY, single)), Reduced(), silent)
    assert isinstance(outcome.actions[-1], Compute)


def test_a_third_chain_that_differs_too_leaves_its_place_to_one_that_most_agree_with() -> None:
    single = Partial(lane=0, first=1, last=1)
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    alone = VotesGathered((told("y"), told("y"), told("z")))

    outcome = follow(voting("a.1", RUNS[0]), differ, TodoDone((COPY, single)), Reduced(), alone)

    step = outcome.state.step_plan
    assert step is not None
    assert step.compared == Compared(type=0, replicas=(0, 2, 1))
    assert outcome.actions[-1] == Compute((0,))


# A disagreement and a lost member ---------------------------------------------


def doubted(
    life: str, asked: tuple[int, int], replica: int, weights: str, shard_type: int = 0
) -> DoubtedAccount:
    """What a device has told, as a report says it."""
    return DoubtedAccount(
        quorum=asked[0],
        attempt=asked[1],
        replica=replica,
        slot=slot_of(life),
        account=WitnessAccount(type=shard_type, weights=(weights,)),
    )


X_OF_A, Y_OF_B = doubted("a.1", (1, 0), 0, "x"), doubted("b.1", (1, 0), 1, "y")


def settled(plan: Plan, *reports: SettleReport) -> Settlement:
    return settle(plan, 2, reports)


def test_a_rank_reports_what_chains_have_told_until_the_step_is_over() -> None:
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    state = machine.step(voting("a.1", RUNS[0]), differ).state
    found = report_of(replace(state, valid=True))
    assert found.doubted == (X_OF_A, Y_OF_B)
    assert report_of(replace(state, valid=False)).doubted == ()


def test_what_a_device_ran_on_is_reported_with_what_it_told() -> None:
    """So the words of a lost pod and of the one made in its place are of one device, perhaps."""
    own = Hardware(node="node-1", accelerator="gpu-1")
    before = voting("a.1", RUNS[0])
    assert before.plan is not None
    first, *rest = before.plan.members
    plan = replace(before.plan, members=(replace(first, hardware=own), *rest))
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    state = machine.step(replace(before, plan=plan), differ).state
    found = report_of(replace(state, valid=True))
    assert [one.hardware for one in found.doubted] == [own, None]
    doubt = open_doubt(plan, [found])
    assert doubt is not None
    assert [one.hardware for one in doubt.told] == [(own,), (None,)]


def test_pods_of_one_node_that_serve_at_a_time_have_a_voice_each_when_they_are_asked() -> None:
    """A single node gives a device to each of them: else no pod of it could ever judge."""
    node = Hardware(node="node-0")
    told = (
        *(doubted("a.1", (1, n), 0, "x") for n in (0, 1)),
        *(doubted("b.1", (1, n), 1, "y") for n in (0, 1)),
        *(doubted("a.1", (2, 0), 0, "x"), doubted("c.1", (2, 0), 2, "y")),
    )
    heard = tuple(replace(one, hardware=node) for one in told)
    doubt = open_doubt(PLAN, [report(0, doubted=heard)])
    assert doubt is not None
    assert compared_of(PLAN, doubt).replicas == (1, 2, 0), "one that told what most told counts"
    assert rule(doubt.told, members=slots_of(PLAN)).doubted == ()
    assert rule(doubt.told).doubted, "of pods that came one after the other that is not known"


def test_a_lost_witness_keeps_its_word_and_a_third_chain_is_asked() -> None:
    """b is gone: a and c compute the type, and what b has told is the third voice."""
    plan = make_plan({0: ["a.1"], 2: ["c.1"]}, lanes=3, shards_per_lane=2, quorum=2)
    heard = (X_OF_A, Y_OF_B)
    outcome = settled(
        plan, report(0, held=(RUNS[0],), bad=(0,), doubted=heard), report(1, doubted=heard)
    )
    assert outcome.doubt is not None
    assert [one.telling[0].weights for one in outcome.doubt.told] == [("x",), ("y",)]
    assert outcome.step.compared == Compared(type=0, replicas=(2, 0))
    assert outcome.step.kept.get(0, ()) == (), "the run has the doubted type in it"
    assert outcome.step.todo[0][-1] == 0
    assert 0 in outcome.step.todo[2]

    again = replace(Y_OF_B, quorum=2, replica=2, slot=slot_of("c.1"))
    ruling = rule((*outcome.doubt.told, *open_told(plan, (2, 0), {0: X_OF_A, 2: again})))
    assert [(d.slot, d.verdict) for d in ruling.deviations] == [
        (slot_of("a.1"), Verdict.DETERMINISTIC)
    ]


def open_told(
    plan: Plan, asked: tuple[int, int], by: dict[int, DoubtedAccount]
) -> tuple[Told, ...]:
    """What chains of one cell tell."""
    return tuple(
        Told(
            quorum=asked[0],
            attempt=asked[1],
            replica=chain.replica,
            cells=cells_of(plan, chain),
            telling=(Account(weights=by[chain.replica].account.weights),),
        )
        for chain in plan.chains
    )


def test_a_chain_that_is_alone_tells_as_well_and_its_word_counts_beside_those_of_the_dead() -> None:
    plan = make_plan({0: ["a.1"]}, lanes=3, shards_per_lane=2, quorum=2)
    outcome = settled(plan, report(0, bad=(0,), doubted=(X_OF_A, Y_OF_B)))
    assert outcome.step.compared == Compared(type=0, replicas=(0,))


def test_of_what_one_chain_alone_has_told_another_one_is_asked_though_it_is_held() -> None:
    plan = make_plan({0: ["a.1"], 2: ["c.1"]}, lanes=3, shards_per_lane=2, quorum=2)
    outcome = settled(plan, report(0, held=(RUNS[0],), doubted=(X_OF_A,)), report(1))
    assert outcome.step.compared == Compared(type=0, replicas=(2, 0))


def test_what_two_chains_have_told_alike_is_no_doubt() -> None:
    same = replace(Y_OF_B, account=X_OF_A.account)
    outcome = settled(PLAN, report(0, doubted=(X_OF_A,)), report(1, doubted=(same,)), report(2))
    assert (outcome.doubt, outcome.step.compared) == (None, None)


def test_what_most_agree_on_by_now_is_computed_again_as_the_copy_held_may_be_wrong() -> None:
    """b, a fresh chain, was to supply; all three told, and the quorum broke before the vote."""
    plan = make_plan({r: [f"{'abc'[r]}.1"] for r in range(3)}, shards_per_lane=2, quorum=3)
    first = doubted("a.1", (1, 0), 0, "v")
    a, b, c = (
        doubted(f"{life}.1", (2, 0), replica, word)
        for replica, (life, word) in enumerate((("a", "v"), ("b", "wrong"), ("c", "v")))
    )
    outcome = settled(
        plan,
        report(0, held=(Partial(lane=0, first=1, last=1),), doubted=(first, a)),
        report(1, held=(COPY, RUNS[1]), doubted=(first, b)),
        report(2, held=(RUNS[2],), doubted=(first, c)),
    )
    assert outcome.step.compared == Compared(type=0, replicas=(0, 2, 1))
    assert outcome.step.kept[1] == (RUNS[1],), "the wrong copy does not count"
    assert Supply(partial=COPY, index=0) in outcome.step.table[0]


def test_who_was_wrong_before_and_is_asked_first_does_not_supply_what_most_agree_on() -> None:
    """a and b differed in a vote; then all three told twice, and no vote heard them."""
    plan = make_plan({r: [f"{'abc'[r]}.1"] for r in range(3)}, shards_per_lane=2, quorum=3)
    words = ("wrong", "v", "v")
    heard = [doubted(f"{'ab'[r]}.1", (1, 0), r, words[r]) for r in (0, 1)]
    own = [
        [doubted(f"{'abc'[r]}.1", asked, r, words[r]) for asked in ((1, 1), (2, 0))]
        for r in range(3)
    ]
    held = ((COPY, Partial(lane=0, first=1, last=1)), (RUNS[1],), (RUNS[2],))
    reports = [report(r, held=held[r], doubted=(*heard, *own[r])) for r in range(3)]

    outcome = settled(plan, *reports)

    assert outcome.step.compared == Compared(type=0, replicas=(1, 2, 0))
    assert outcome.step.kept[0] == (Partial(lane=0, first=1, last=1),)
    assert Supply(partial=COPY, index=1) in outcome.step.table[0]


def test_who_rolls_forward_to_the_version_knows_of_a_disagreement_in_it_as_all_do() -> None:
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    state = machine.step(voting("a.1", RUNS[0]), differ).state
    assert state.told_of == 0
    doubt = Doubt(type=0, told=state.told)
    rolling = replace(
        state,
        phase=machine.Phase.APPLYING,
        settled=-1,
        settlement=replace(settled(PLAN, *map(report, range(3))), doubt=doubt),
        told=(),
        told_of=None,
    )
    commit = Commit(step=0, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)
    assert machine.step(rolling, Applied("digest", commit)).state.told == doubt.told


def test_two_that_insist_park_and_name_both_devices() -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"]}, shards_per_lane=2)
    state = computing(plan, shards_per_lane=2, witness_every_steps=1)
    differ = VotesGathered((told("x"), told("y")))
    again = machine.step(follow(state, TodoDone((RUNS[0],)), Reduced()).state, differ)
    assert again.actions[-1] == Compute((0, 1)), "both are asked once more"

    held = (COPY, Partial(lane=0, first=1, last=1))
    outcome = follow(again.state, TodoDone(held), Reduced(), differ)

    (fact,) = [a.fact for a in outcome.actions if isinstance(a, SendFact)]
    assert isinstance(fact, Parked)
    assert fact.doubted == (slot_of("a.1"), slot_of("b.1"))
    assert outcome.state.held != (), "what else it holds is kept"
    assert outcome.state.bad == (0,)


def test_a_device_in_the_place_of_a_doubted_one_is_asked_though_it_heals_first() -> None:
    """c takes the place of b, which follows: its chain computes the type and nothing else."""
    plan = make_plan(
        {0: ["a.1"], 1: ["c.1"]},
        followers=[("b.1", 0)],
        shards_per_lane=2,
        quorum=2,
        since={"a.1": 1, "b.1": 1},
        joining=["c.1"],
    )
    heard = (X_OF_A, Y_OF_B)
    joiner = SettleReport(index=1, valid=False)
    outcome = settled(
        plan,
        report(0, bad=(0,), doubted=heard, settled=1),
        joiner,
        report(2, bad=(0,), doubted=heard, settled=1),
    )
    assert outcome.step.compared == Compared(type=0, replicas=(0, 1))
    assert outcome.step.todo == {0: (0, 1, 2, 3), 1: (0,)}
