"""Says which slots may be one device, so that it has one voice about what was computed.

A slot is a pod and an index. A pod that is made in place of a lost one often gets the accelerator
of that one, and pods may share an accelerator. A device that is always wrong would so confirm
itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from mainstay_core.base.ids import Hardware, Slot

UNKNOWN = Hardware()
Devices = Sequence[Mapping[Slot, Slot | None]]
"""By position: for each slot one that stands for its device; None for one that has no voice."""


def may_be_same(one: Slot, its: Hardware, other: Slot, others: Hardware) -> bool:
    """Return whether two slots may be the same device.

    Accelerators that tell their UUIDs decide. Else slots of one pod have one accelerator each, and
    those of two pods of one node may have the same.

    Args:
        one: a slot.
        its: what it runs on.
        other: another slot.
        others: what that runs on.
    """
    if one == other:
        return True
    if its.accelerator and others.accelerator:
        return its.accelerator == others.accelerator
    return one.pod != other.pod and its.node != "" and its.node == others.node


@dataclass(frozen=True, slots=True)
class Joined:
    """Slots, by what is known of their devices."""

    stands: Mapping[Slot, Slot]
    """For each slot one that stands for its device: the first of those that may be the same."""
    apart: frozenset[tuple[Slot, Slot]]
    """Slots of one node that surely have a device each."""

    def are_apart(self, slots: Collection[Slot]) -> bool:
        """Return whether two of some slots surely have a device each."""
        return any(one in slots and other in slots for one, other in self.apart)


def join_slots(
    seen: Iterable[tuple[int, Slot, Hardware]], members: Collection[Slot] = ()
) -> Joined:
    """Return which slots may be one device.

    Slots without a UUID that were members of one quorum had a device each, as a node gives no
    device to two pods at a time.

    Args:
        seen: in which quorum a slot has computed, and on what.
        members: slots of the quorum at hand, also those that compute nothing in it.
    """
    members = frozenset(members)
    hardware: dict[Slot, Hardware] = {}
    quorums: dict[Slot, set[int]] = {}
    for quorum, slot, told in seen:
        quorums.setdefault(slot, set()).add(quorum)
        if told != UNKNOWN or slot not in hardware:
            hardware[slot] = told
    places: dict[str, list[Slot]] = {}
    for slot, told in hardware.items():
        for name in {told.node, told.accelerator} - {""}:
            places.setdefault(name, []).append(slot)
    joined, apart = {slot: slot for slot in hardware}, set[tuple[Slot, Slot]]()
    for beside in places.values():
        for one, other in combinations(beside, 2):
            is_known = hardware[one].accelerator and hardware[other].accelerator
            serve_both = one in members and other in members
            served_both = not is_known and (serve_both or quorums[one] & quorums[other])
            if served_both or not may_be_same(one, hardware[one], other, hardware[other]):
                apart.add((one, other))
                continue
            old, new = sorted((joined[one], joined[other]), reverse=True)
            joined = {slot: new if known == old else known for slot, known in joined.items()}
    return Joined(joined, frozenset(apart))


def devices_of(
    chains: Sequence[tuple[int, Sequence[Slot], Sequence[Hardware | None]]],
    members: Collection[Slot] = (),
) -> Devices:
    """Return which slots are one device.

    Where all that computed a position may be one device, each slot is its own: no other can judge.
    A slot that is gone may have had the device of the one or the other member. Then it has no
    voice: else it would join the two, or a device that is wrong would have one for each pod that
    had it.

    Args:
        chains: in which quorum each has computed, its slots by position, and what these run on;
            nothing, or None, where nobody knows.
        members: slots of the quorum at hand.
    """
    seen = [
        (quorum, slot, (hardware[position] if hardware else None) or UNKNOWN)
        for quorum, slots, hardware in chains
        for position, slot in enumerate(slots)
    ]
    all_joined, serving = join_slots(seen, members), frozenset(members)
    of_members = join_slots([one for one in seen if one[1] in serving], members)
    found: list[dict[Slot, Slot | None]] = []
    for beside in zip(*(slots for _, slots, _ in chains), strict=True):
        stands = all_joined.stands
        is_one = len({stands[slot] for slot in beside}) == 1 and not all_joined.are_apart(beside)
        devices: dict[Slot, Slot | None] = {}
        for slot in beside:
            same = [s for s in beside if stands[s] == stands[slot] and s in serving]
            if is_one:
                devices[slot] = slot
            elif not all_joined.are_apart(same):
                devices[slot] = stands[slot]
            else:
                devices[slot] = of_members.stands[slot] if slot in serving else None
        found.append(devices)
    return found
