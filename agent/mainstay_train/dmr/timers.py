"""Measures how long operators take on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Clock = Callable[[], float]
"""Returns seconds that only grow."""


class Timer(Protocol):
    """Takes the times of calls, one after another."""

    def begin(self) -> None:
        """A call begins."""

    def end(self) -> None:
        """It has been given to the device."""

    def seconds(self) -> list[float]:
        """Return how long each call took, in order; waits for the device."""


class ClockTimer:
    """Times calls that are done when they return, as on a CPU.

    Args:
        clock: is asked before and after each call.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._taken_s: list[float] = []

    def begin(self) -> None:
        """A call begins."""
        self._began_s = self._clock()

    def end(self) -> None:
        """It is done."""
        self._taken_s.append(max(0.0, self._clock() - self._began_s))

    def seconds(self) -> list[float]:
        """Return how long each call took."""
        return self._taken_s


class EventTimer:
    """Times calls on a CUDA device, by events in its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """A call begins."""
        self._events.append((self._event(), None))

    def end(self) -> None:
        """It has been given to the device."""
        first, _ = self._events.pop()
        self._events.append((first, self._event()))

    def seconds(self) -> list[float]:
        """Return how long the device took for each call."""
        torch.cuda.synchronize(self._device)
        return [first.elapsed_time(last) / 1e3 for first, last in self._events]

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def timer_of(device: torch.device, clock: Clock) -> Timer:
    """Return what times calls on a device.

    Args:
        device: where the calls compute.
        clock: of the host; a CUDA device has its own.
    """
    return EventTimer(device) if device.type == "cuda" else ClockTimer(clock)
