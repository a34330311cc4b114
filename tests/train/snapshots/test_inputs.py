"""What neighbours sent is read ahead, in the order in which a replay asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from mainstay_core.wire.segments import SegmentKey, SegmentKind, boundary_key
from mainstay_train.snapshots.good_copies import Unusable
from mainstay_train.snapshots.inputs import AHEAD, Inputs, Wanted

NUM = 3 * AHEAD


def key_of(number: int) -> SegmentKey:
    return boundary_key(0, 0, SegmentKind.ACTIVATION, 0, number, 0)


class Source:
    """Tensors that are read one after the other; one of them may be damaged."""

    def __init__(self, damaged: int = NUM) -> None:
        self.damaged = damaged
        self.num_read = 0
        self.there = threading.Condition()

    def wanted(self) -> Iterator[Wanted]:
        for number in range(NUM):
            yield Wanted(key_of(number), lambda tensor, number=number: self.read(number, tensor))

    def read(self, number: int, tensor: torch.Tensor) -> None:
        if number == self.damaged:
            raise Unusable("no good copy is left")
        tensor.fill_(number)
        with self.there:
            self.num_read += 1
            self.there.notify_all()

    def wait_read(self, number: int) -> None:
        with self.there:
            self.there.wait_for(lambda: self.num_read >= number)


def inputs_of(source: Source) -> Inputs:
    inputs = Inputs(source.wanted(), lambda: torch.empty(2), lambda: None)
    inputs.start()
    return inputs


def test_tensors_come_in_order_and_a_few_of_them_early() -> None:
    source, into = Source(), torch.empty(2)
    inputs = inputs_of(source)
    source.wait_read(AHEAD)
    for number in range(NUM):
        inputs.take(key_of(number), into)
        assert into.tolist() == [number, number]
        assert source.num_read <= number + 2 + AHEAD
    inputs.close()


def test_a_damaged_one_is_said_when_its_turn_comes() -> None:
    source, into = Source(damaged=2), torch.empty(2)
    inputs = inputs_of(source)
    for number in range(2):
        inputs.take(key_of(number), into)
    with pytest.raises(Unusable, match="no good copy"):
        inputs.take(key_of(2), into)
    inputs.close()


def test_nothing_is_read_any_more_once_nobody_wants_it() -> None:
    source = Source()
    inputs = inputs_of(source)
    source.wait_read(AHEAD)
    inputs.close()
    assert source.num_read <= AHEAD + 1


def test_a_read_that_waits_for_a_lost_pod_holds_up_nobody() -> None:
    begun, answers = threading.Event(), threading.Event()

    def read(tensor: torch.Tensor) -> None:
        begun.set()
        answers.wait()
        tensor.zero_()

    inputs = Inputs(
        (Wanted(key_of(number), read) for number in range(2)),
        lambda: torch.empty(2),
        lambda: None,
    )
    inputs.start()
    begun.wait()

    inputs.close()

    assert not answers.is_set()
    answers.set()
    inputs.thread.join()
