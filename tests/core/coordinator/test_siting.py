"""Ranks are given to slots by where the nodes are: chains together, copies of a stage apart."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.coordinator.siting import count_copies, order_slots
from mainstay_core.coordinator.state import SlotState
from mainstay_core.wire.facts import Location


def slots(num: int) -> list[SlotState]:
    return [SlotState(slot=Slot(pod=PodUid(f"p{i:02}"), index=0)) for i in range(num)]


def location(slot: SlotState, locations: dict[PodUid, Location]) -> Location:
    return locations[slot.slot.pod]


def test_without_any_knowledge_the_order_is_kept() -> None:
    given = slots(5)

    assert order_slots(given, {}, 2, 2) == given


def test_chains_stay_in_a_rack_and_replicas_go_to_several_zones() -> None:
    given = slots(8)
    # Pods in turn on the racks a1, a2 of zone a and b1, b2 of zone b.
    racks = ("a1", "b1", "a2", "b2")
    locations = {
        s.slot.pod: Location(near=racks[i % 4], apart=racks[i % 4][0]) for i, s in enumerate(given)
    }

    ordered = order_slots(given, locations, 2, 4)

    chains = [ordered[i : i + 2] for i in range(0, 8, 2)]
    assert all(len({location(s, locations).near for s in chain}) == 1 for chain in chains)
    assert [location(chain[0], locations).apart for chain in chains] == ["a", "b", "a", "b"]


def test_a_chain_that_fits_nowhere_takes_the_largest_groups() -> None:
    given = slots(5)
    locations = {s.slot.pod: Location(near="x" if i < 3 else "y") for i, s in enumerate(given)}

    ordered = order_slots(given, locations, 4, 1)

    assert [location(s, locations).near for s in ordered[:4]] == ["x", "x", "x", "y"]
    assert {s.slot for s in ordered} == {s.slot for s in given}


def test_copies_of_a_stage_are_counted_by_domain() -> None:
    locations = {PodUid("a"): Location(apart="z1"), PodUid("b"): Location(apart="z1")}
    copies = [(Slot(pod=PodUid(p), index=0), 1) for p in ("a", "b", "c")]

    assert count_copies(locations, copies) == Counter({("z1", 1): 2})


@given(
    st.lists(st.tuples(st.sampled_from("rst"), st.sampled_from("xyz")), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_slot_is_there_once_and_roomy_groups_are_never_split(
    where: list[tuple[str, str]], chain: int, num_chains: int
) -> None:
    given = slots(len(where))
    locations = {
        s.slot.pod: Location(near=f"{apart}{near}", apart=apart)
        for s, (near, apart) in zip(given, where, strict=True)
    }

    ordered = order_slots(given, locations, chain, num_chains)

    assert sorted(s.slot for s in ordered) == sorted(s.slot for s in given)
    room: dict[str, int] = defaultdict(int)
    for slot in given:
        room[location(slot, locations).near] += 1
    for number in range(min(num_chains, len(given) // chain)):
        taken = ordered[number * chain : (number + 1) * chain]
        domains = Counter(location(s, locations).near for s in taken)
        if max(room.values()) >= chain:
            assert len(domains) == 1
        for domain, count in domains.items():
            room[domain] -= count
