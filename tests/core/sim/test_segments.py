"""What a run holds stores of segments to, where a copy that is sent again was damaged unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.replays.test_authors import with_stores
from tests.core.segments.keys import key_of
from tests.core.sim.memory_mutants import draw_snapshots

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.frames import Discard, Segment
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Process, Violation
from mainstay_core.sim.network import End
from mainstay_core.sim.segments import SegmentStore
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.snapshots.recopies import Recopies
from mainstay_core.wire.segments import Holder, SegmentHeader

PLAN = with_stores(make_plan({0: ["a.1", "b.1", "c.1"]}))
PEERS = 2
KEY = key_of(1, kind="gradient")
STORES = {pod: Holder(pod=PodUid(pod), address=f"store-{pod}") for pod in "abc"}
GONE = Holder(pod=PodUid("gone"), address="store-gone")


class Run:
    """Stores of three pods; a and b keep a gradient, of which a sends c a copy."""

    def __init__(self) -> None:
        scenario = draw_snapshots(0, ("damage-segment",))
        snapshots = scenario.config.snapshots
        assert snapshots is not None
        config = replace(scenario.config, snapshots=replace(snapshots, peers=PEERS))
        self.world = Surroundings(replace(scenario, config=config), 1, tracing=False)
        self.stores = {
            pod: SegmentStore(
                self.world, Process(self.world.engine, pod, pod), holder.pod, holder.address
            )
            for pod, holder in STORES.items()
        }
        self.kept = self.world.checks.kept
        self.content = terms.unit_of(KEY.unit, terms.term("reduced", "x"))
        self.header = SegmentHeader(
            key=KEY,
            job=config.job,
            fingerprint="f1",
            unit_name="0",
            num_units=1,
            nonce="n",
            window=0,
            num_instalments=1,
            size_bytes=1,
            digest=terms.term("bytes", self.content),
        )
        holders = (STORES["a"], STORES["b"], GONE)
        for pod in "ab":
            self.tell(pod, Segment(header=self.header, holders=holders), self.content)
        self.kept.held(KEY, self.content, frozenset(h.address for h in holders))

    def tell(self, pod: str, message: object, content: terms.UnitTerm | None = None) -> None:
        def opened(end: End) -> None:
            end.send((message, content))

        teller = Process(self.world.engine, "teller", pod)
        self.world.network.connect(teller, STORES[pod].address, opened, pytest.fail)
        while self.world.engine.step():
            pass

    def adopt(self) -> None:
        for store in self.stores.values():
            store.adopt(PLAN)
        while self.world.engine.step():
            pass

    def lacking(self, pods: str) -> bool:
        addresses = [STORES[pod].address for pod in pods]
        return self.kept.lacking([KEY], addresses, PEERS) == [KEY]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_copy_of_a_damaged_copy_promises_nothing(is_damaged: bool) -> None:
    run = Run()
    if is_damaged:
        run.stores["a"].spoil(KEY)
    run.adopt()
    assert all(store.keeps(KEY) for store in run.stores.values())
    assert not run.lacking("abc")

    run.tell("c", Discard(key=KEY))
    assert not run.stores["c"].keeps(KEY)
    assert run.lacking("bc") is not is_damaged, "what a reader drops for nothing is lacking"


def test_a_whole_copy_mends_a_damaged_one() -> None:
    run = Run()
    run.stores["a"].spoil(KEY)
    run.adopt()
    run.tell("c", Segment(header=run.header), run.content)
    run.tell("c", Discard(key=KEY))
    assert run.lacking("bc")


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_what_comes_under_the_plan_before_is_held_to_have_all_holders(
    monkeypatch: pytest.MonkeyPatch, is_looked_at: bool
) -> None:
    """The quorum before goes on, and writes to a store that the newest plan does not name."""
    run = Run()
    run.world.checks.plans.append(PLAN)
    header = replace(run.header, key=replace(KEY, version=KEY.version + 1))
    message = Segment(header=header, holders=(STORES["a"], STORES["b"], GONE))
    run.tell("b", message, run.content)
    run.adopt()
    places = frozenset(holder.address for holder in message.holders)
    run.kept.held(header.key, run.content, places)
    if is_looked_at:
        run.tell("a", message, run.content)
        assert run.stores["c"].keeps(header.key)
        return
    monkeypatch.setattr(Recopies, "came", lambda *_: None)
    with pytest.raises(Violation, match="with too few holders"):
        run.tell("a", message, run.content)


@pytest.mark.parametrize(
    ("sender", "is_excused"), [(GONE.address, True), (STORES["b"].address, False), ("", False)]
)
def test_what_had_not_come_when_its_sender_was_lost_is_not_held_to_be_there(
    sender: str, is_excused: bool
) -> None:
    """B got a copy from a store that is lost, with a list of holders on which c is, too."""
    run = Run()
    run.tell("b", Discard(key=KEY))
    assert run.lacking("bc")
    if sender:
        run.kept.resends.sent(sender, KEY, STORES["c"].address)
    assert run.lacking("bc"), "nobody counts on c"

    holders = (GONE, STORES["b"], STORES["c"])
    run.tell("b", Segment(header=run.header, holders=holders, is_again=True), run.content)
    assert run.lacking("bc") is not is_excused

    run.tell("c", Segment(header=run.header, holders=holders, is_again=True), run.content)
    assert not run.lacking("bc")
    run.tell("c", Discard(key=KEY))
    assert run.lacking("bc"), "it had come"


@pytest.mark.parametrize("window", [1, 2])
def test_a_state_that_a_given_up_window_left_beside_a_complete_one_needs_no_holders(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """The first of its holders keeps it no more, so that nobody sends it again."""
    run = Run()
    run.world.checks.plans.append(PLAN)
    monkeypatch.setattr(run.kept, "complete_from", lambda _: 2)
    header = replace(run.header, key=key_of(2), window=window)
    message = Segment(header=header, holders=(STORES["a"], STORES["b"], GONE), keep_from=2)
    run.tell("b", message, run.content)
    run.kept.held(header.key, run.content, frozenset(h.address for h in message.holders))
    if window == 1:
        run.adopt()
        return
    with pytest.raises(Violation, match="with too few holders"):
        run.adopt()
