"""What a trainer serves waits for the device to have written it, and for nothing given later."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.core.plans import make_plan

from mainstay_core.rank.serving import Wanted
from mainstay_train.base import device as devices
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model import workload
from mainstay_train.state.serving import ServedState

PLAN = make_plan({0: ["a.1"]})


@dataclass
class PlayedMoment:
    """A moment of a device that does not come to it until it is told to."""

    comes: threading.Event = field(default_factory=threading.Event)
    waits: int = 0

    def is_over(self) -> bool:
        return self.comes.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        self.waits += 1
        assert self.comes.wait(timeout_s or 10)


@dataclass
class PlayedConnections:
    """Connections of a trainer that has adopted a plan."""

    adopted: Any = PLAN
    changed: threading.Condition = field(default_factory=threading.Condition)


def test_what_is_served_waits_for_the_moment_at_which_it_was_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments: list[PlayedMoment] = []

    def moment(device: torch.device) -> PlayedMoment:
        assert device.type == "cpu"
        moments.append(PlayedMoment())
        return moments[-1]

    monkeypatch.setattr(devices, "moment", moment)
    small = {"dim": 16, "layers": 1, "heads": 2, "kvHeads": 1, "hidden": 16, "sequence": 8}
    model = workload.load("", small)
    state = StageState(model.build(model.stages(1)[0]), model.optimizer)
    parts: list[int] = []

    def part_of(end: int, own: StageState) -> None:
        assert own is state
        parts.append(end)

    served = ServedState(PlayedConnections(), part_of)  # type: ignore[arg-type]
    wanted = (str(PLAN.quorum), 0, 7)
    served.serve(Wanted(*wanted), state)
    (complete,) = moments
    moment(torch.device("cpu"))  # what the device is given later never ends

    told: list[object] = []
    asks = threading.Thread(target=lambda: told.append(served.state_at(*wanted)), daemon=True)
    asks.start()
    asks.join(0.05)
    assert told == []
    complete.comes.set()
    asks.join(10)
    assert told == [state]
    assert served.state_at(*wanted, 0) is None
    assert parts == [0]
    assert complete.waits == 2
    assert moments[1].waits == 0
    served.serve(None, None)
    assert len(moments) == 2
