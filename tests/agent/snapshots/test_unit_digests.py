"""Stores keep digests of units in committed steps, and pass them on to those who keep copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.agent.snapshots.conftest import Pod
from tests.agent.snapshots.test_store import flush, write
from tests.core.segments.keys import key_of, record_of
from tests.core.segments.test_records import told

from mainstay_agent.snapshots import callers, holders, store
from mainstay_core.segments.deliveries import note_digests
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.wire.segments import Holder
from mainstay_core.wire.unit_digests import DIGEST_CHARS, MAX_DIGESTED_UNITS, UnitDigests
from mainstay_train.state.segments import SegmentClient

Make = Callable[..., Pod]
MakeClient = Callable[..., SegmentClient]
TIMEOUT_S = 30.0


def there(reader: SegmentClient, holder: Holder, step: int) -> UnitDigests | None:
    return reader.digests.find_at(holder.address, 0, 0, step, TIMEOUT_S)


@pytest.mark.parametrize("units", [0, 2, MAX_DIGESTED_UNITS])
def test_digests_are_told_here_and_at_holders(
    make_store: Make, make_client: MakeClient, units: int
) -> None:
    a, b = make_store("a"), make_store("b")
    trainer, reader = make_client(a), make_client(make_store("c"))
    trainer.record(record_of(3))
    digests = told(3, units=units)

    trainer.digests.keep(digests, [a.holder, b.holder])

    assert trainer.digests.find(0, 0, 3) == digests
    assert trainer.digests.find(0, 0, 4) is None
    assert trainer.digests.find(0, 1, 3) is None
    assert there(reader, a.holder, 3) == digests
    found = None
    while found is None:  # nobody confirms it, so it is asked for until it has come
        found = there(reader, b.holder, 3)
    assert found == digests
    assert len(digests.masters) == DIGEST_CHARS * units


def test_a_holder_that_is_new_hears_of_all_steps_before(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    trainer, reader = make_client(a), make_client(make_store("c"))
    for step in (3, 4):
        trainer.record(record_of(step))
        trainer.digests.keep(told(step), [])

    trainer.digests.keep(told(5), [b.holder])

    while there(reader, b.holder, 5) is None:
        pass
    assert [there(reader, b.holder, step) for step in (3, 4)] == [told(3), told(4)]


def test_a_holder_whose_connection_had_ended_hears_of_the_new_step_alone(
    make_store: Make, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []

    def note(index: SegmentIndex, told: UnitDigests) -> bool:
        passed.append(told.step)
        return note_digests(index, told)

    monkeypatch.setattr(callers, "note_digests", note)
    a, b = make_store("a"), make_store("b")
    trainer, reader = make_client(a), make_client(make_store("c"))
    for step in (3, 4):
        trainer.digests.keep(told(step), [b.holder])
    while there(reader, b.holder, 4) is None:
        pass
    with monkeypatch.context() as short:
        short.setattr(holders, "LINGER_S", 0.0)
        short.setattr(store, "SWEEP_S", 0.0)
        while a.store._lines:
            a.store.ask().result()  # it has its turn

    trainer.digests.keep(told(5), [b.holder])

    while there(reader, b.holder, 5) is None:
        pass
    assert passed == [3, 4, 5]


def test_they_go_once_their_window_is_needed_no_more(
    make_store: Make, make_client: MakeClient
) -> None:
    a, b = make_store("a"), make_store("b")
    trainer, reader = make_client(a), make_client(make_store("c"))
    trainer.digests.keep(told(3), [b.holder])
    trainer.digests.keep(told(5), [b.holder])
    while there(reader, b.holder, 5) is None:
        pass

    trainer.keep_from(0, 5)
    write(trainer, key_of(5), b"bytes", [b.holder], keep_from=5)

    assert trainer.wait_held([key_of(5)]) == ""
    flush(trainer)
    assert trainer.digests.find(0, 0, 3) is None
    assert there(reader, b.holder, 3) is None
    assert there(reader, b.holder, 5) == told(5)


def test_a_holder_that_is_gone_stops_nothing(make_store: Make, make_client: MakeClient) -> None:
    trainer = make_client(make_store("a"))
    gone = Holder(pod=make_store("b").holder.pod, address="127.0.0.1:1")
    trainer.digests.keep(told(3), [gone])
    assert trainer.digests.find(0, 0, 3) == told(3)
    with pytest.raises(OSError, match="refused"):
        there(trainer, gone, 3)
