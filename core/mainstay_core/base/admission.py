"""Bounds the connections that have proved nothing yet: how many, how long, and how fast they come.

A listener tells what happens to its connections and closes those that are named to it. Whoever is
new always gets in: when there are too many, the one goes that had its chance, the oldest of the
address that has the most. So who holds many idle connections loses them, and a pod that calls in
the midst of that needs no luck, only one answer in the time in which a whole table is filled anew.

No IO and no clock: time is an argument, in seconds of a clock that never jumps.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
"""A connection as its listener names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one listener on connections that have proved nothing."""

    total: int = 256
    """At a time. A descriptor and about 5 KiB each, the kernel's part included; a pod needs one
    for as long as an answer travels."""
    per_address: int = 64
    """At a time and from one address: more than the trainers of a pod, which may call at once."""
    prove_s: float = 5.0
    """From the first packet to the proof, or to the whole head of a request. A pod takes two round
    trips; seconds are for a machine that is so busy that it does not run the process."""
    asked: int = 1024
    """At a time that have sent a whole request about which somebody else is asked. Then nobody is
    accepted: whoever calls waits in the kernel's queue."""
    answer_s: float = 30.0
    """From the whole head of a request to its admission. The API server is asked twice at most, for
    10 s each."""
    accepts_per_s: float = 1000.0
    """Accepted without a proof, in the long run. About 50 microseconds each: 5 % of a core."""
    burst: int = 256
    """Accepted without a proof, at once; those that prove themselves do not count."""


FULL_PAUSE_S = 0.05
"""Between two looks whether one of too many requests was answered."""


class Admission(Generic[Key]):
    """The connections of one listener that have proved nothing yet: a machine without sockets.

    Args:
        bounds: of the listener.
        now_s: the time of the start.
    """

    def __init__(self, bounds: Bounds, now_s: float) -> None:
        self._bounds = bounds
        self._tokens, self._filled_at_s = float(bounds.burst), now_s
        self._silent: _Table[Key] = _Table()
        """Those that have sent no whole request; connections of pods never send one."""
        self._asked: _Table[Key] = _Table()

    def __len__(self) -> int:
        """Return the number of connections that have proved nothing."""
        return len(self._silent) + len(self._asked)

    def pause_s(self, now_s: float) -> float:
        """Return for how long nobody is to be accepted; 0 if somebody may be now."""
        if len(self._asked) >= self._bounds.asked:
            return FULL_PAUSE_S
        self._fill(now_s)
        return max(0.0, (1.0 - self._tokens) / self._bounds.accepts_per_s)

    def opened(self, key: Key, address: str, now_s: float) -> list[Key]:
        """Take note of a new connection; return those that are to be closed for it."""
        self._fill(now_s)
        self._tokens -= 1.0
        self._silent.add(key, address, now_s + self._bounds.prove_s)
        if self._silent.count_of(address) > self._bounds.per_address:
            return [self._silent.pop_oldest_of(address)]
        if len(self._silent) > self._bounds.total:
            return [self._silent.pop_oldest_of(self._silent.most_present())]
        return []

    def proved(self, key: Key) -> None:
        """Take note that a connection has proved itself: it is no concern of this any more."""
        if self._silent.discard(key) or self._asked.discard(key):
            self._tokens = min(self._tokens + 1.0, float(self._bounds.burst))

    def asked(self, key: Key, now_s: float) -> list[Key]:
        """Take note of a connection's first whole request, about which somebody else is asked.

        Returns:
            The connection itself if it is to be closed: its address asks too much at a time.
        """
        address = self._silent.discard(key)
        if not address:
            return []
        if self._asked.count_of(address) >= self._bounds.per_address:
            return [key]
        self._asked.add(key, address, now_s + self._bounds.answer_s)
        return []

    def ended(self, key: Key) -> None:
        """Take note that a connection has ended, whoever has closed it."""
        if not self._silent.discard(key):
            self._asked.discard(key)

    def expired(self, now_s: float) -> list[Key]:
        """Return the connections whose time is over; they are to be closed."""
        return self._silent.pop_late(now_s) + self._asked.pop_late(now_s)

    def make_room(self) -> list[Key]:
        """Return the older half of the connections; they are to be closed, as nothing else fits."""
        return self._silent.pop_older_half() or self._asked.pop_older_half()

    def next_deadline_s(self) -> float | None:
        """Return when the next connection's time is over; None without connections."""
        firsts = [t.first_deadline_s for t in (self._silent, self._asked) if len(t)]
        return min(firsts, default=None)

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._filled_at_s) * self._bounds.accepts_per_s
        self._tokens = min(self._tokens + gained, float(self._bounds.burst))
        self._filled_at_s = now_s


class _Table(Generic[Key]):
    """Connections with address and deadline. All get equally long, so the oldest is due first."""

    def __init__(self) -> None:
        self._rows: dict[Key, tuple[str, float]] = {}
        """In the order in which they came."""
        self._by_address: dict[str, dict[Key, None]] = {}

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._rows)

    @property
    def first_deadline_s(self) -> float:
        """Deadline of the oldest connection; there must be one."""
        return next(iter(self._rows.values()))[1]

    def add(self, key: Key, address: str, deadline_s: float) -> None:
        self._rows[key] = (address, deadline_s)
        self._by_address.setdefault(address, {})[key] = None

    def discard(self, key: Key) -> str:
        """Forget a connection; return its address, empty if it is not here."""
        if key not in self._rows:
            return ""
        address, _ = self._rows.pop(key)
        siblings = self._by_address[address]
        del siblings[key]
        if not siblings:
            del self._by_address[address]
        return address

    def count_of(self, address: str) -> int:
        """Return the number of connections of an address."""
        return len(self._by_address.get(address, ()))

    def most_present(self) -> str:
        """Return the address with the most connections; of several the one with the oldest."""
        most = max(map(len, self._by_address.values()))
        return next(a for a, _ in self._rows.values() if len(self._by_address[a]) == most)

    def pop_oldest_of(self, address: str) -> Key:
        key = next(iter(self._by_address[address]))
        self.discard(key)
        return key

    def pop_late(self, now_s: float) -> list[Key]:
        """Forget the connections whose deadline has come, and return them."""
        late: list[Key] = []
        while self._rows and self.first_deadline_s <= now_s:
            late.append(next(iter(self._rows)))
            self.discard(late[-1])
        return late

    def pop_older_half(self) -> list[Key]:
        """Forget half of the connections, rounded up, and return them."""
        older = list(self._rows)[: (len(self) + 1) // 2]
        for key in older:
            self.discard(key)
        return older
