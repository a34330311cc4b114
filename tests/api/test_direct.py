"""What is read without the framework is what the framework would have read, or is left to it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from tests.worlds import played

from mainstay_api.direct import direct_body_of
from mainstay_api.routes import agents
from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import Incarnation, PodUid, QuorumId
from mainstay_core.wire.facts import Cause, Heartbeat, Parked, Settled, SlotStatus, TrainerUp
from mainstay_core.wire.formats import UnknownFormatError

QUORUM = QuorumId(id=3, nonce="n")
OF = {"pod": PodUid("a"), "slot": 0, "incarnation": Incarnation("l-0"), "observed_at_s": 1.5}
FACTS = (
    TrainerUp(**OF, fingerprint={"torch": "2"}, evidence="pid 1 said hello"),
    Parked(**OF, quorum=QUORUM, step=2, cause=Cause.CHAIN, evidence="a peer is gone"),
    Settled(**OF, quorum=QUORUM, step=2),
)
STATUS = SlotStatus(index=0, incarnation=Incarnation("l-0"), pid=1, phase="voting", quorum=QUORUM)
ENTRY = played.ledger_entry(2, 0, codec.encode(QUORUM))
FORMER = {"kind": "leaving", "pod": "a", "evidence": "told to end"}
"""A fact of format 1."""
BODIES: list[tuple[Callable[..., Any], type, Any]] = [
    (agents.take_heartbeat, Heartbeat, Heartbeat(pod=PodUid("a"), slots=(STATUS,), quorum=QUORUM)),
    (agents.note_facts, agents.Facts, {"facts": [*FACTS, FORMER], "supervisor": "s"}),
    (agents.add_to_ledger, agents.Entries, {"entries": [ENTRY, {**ENTRY, "stage": 1}]}),
]
OTHER_VALUES = (
    None, True, -1, 0.5, 2**70, float("inf"), float("nan"), "", "1", "x" * 600, "\ud800",
    [], [None], {}, {"id": 1}, "adopted", 2,
)  # fmt: skip


def changed(value: Any) -> Iterator[Any]:
    """Yield the value with each of its parts replaced, left out or added to."""
    if isinstance(value, dict):
        yield {**value, "unknown": 1}
        for key, part in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield from ({**value, key: new} for new in changed(part))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from ([*value[:at], new, *value[at + 1 :]] for new in changed(part))
    yield from OTHER_VALUES


def framework(adapter: TypeAdapter[Any], data: Any) -> Any:
    """Return what the framework reads; None if it refuses."""
    try:
        return adapter.validate_python(data)
    except (ValidationError, UnknownFormatError):
        return None


@pytest.mark.parametrize(("endpoint", "kind", "good"), BODIES)
def test_a_body_is_read_as_the_framework_reads_it_or_left_to_it(
    endpoint: Callable[..., Any], kind: type, good: Any
) -> None:
    body, adapter = direct_body_of(endpoint), TypeAdapter(kind)
    assert body is not None
    data = json.loads(json.dumps(codec.encode(good)))
    assert body.read(copy.deepcopy(data)) == framework(adapter, data)
    num_read = 0
    for other in changed(data):
        try:
            read = body.read(copy.deepcopy(other))
        except (RemoteProtocolError, ValueError):
            continue
        num_read += 1
        assert repr(read) == repr(framework(adapter, other)), other
    assert num_read > 10


def test_the_routes_that_recoveries_ask_are_read_directly() -> None:
    for endpoint in (agents.take_heartbeat, agents.note_facts, agents.add_to_ledger):
        assert direct_body_of(endpoint) is not None
    assert direct_body_of(agents.register_pod) is None
