"""Bounds how much one asks of a server in a time, so that it is there for the others as well.

Each has a bucket that fills evenly and holds a bounded amount (a token bucket: RFC 2697 calls its
two numbers the committed rate and the committed burst). Who asks for more than is in it waits.

No clock: time is an argument, in seconds of a clock that never jumps.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
"""Whose a bucket is."""

MAX_BUCKETS = 65_536
"""Kept at a time, about 300 bytes each. One that was not used for longest is dropped: it would be
the first to be full again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The two numbers of a bucket."""

    per_s: float
    """The amount that comes in each second; above 0."""
    burst: float
    """The amount that it holds, which may be asked for at once; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The amount in a bucket at a time. Below 0: more was taken than there was."""

    level: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The answer to who asks for an amount."""

    bucket: Bucket
    """The bucket after it."""
    wait_s: float
    """0: the amount was taken. Else nothing was, and to ask earlier than this is in vain."""


def fill(bucket: Bucket | None, rate: Rate, now_s: float) -> Bucket:
    """Return a bucket as it is now; a new one is full."""
    if bucket is None:
        return Bucket(level=rate.burst, at_s=now_s)
    gained = max(0.0, now_s - bucket.at_s) * rate.per_s
    return Bucket(level=min(rate.burst, bucket.level + gained), at_s=max(now_s, bucket.at_s))


def draw(bucket: Bucket | None, rate: Rate, amount: float, now_s: float) -> Draw:
    """Take an amount out of a bucket, if at least 1 of it is there.

    What is missing stays owed. So an amount above the burst is possible, once in a while.

    Args:
        bucket: as it was left; None: nothing was ever taken.
        rate: of the bucket; it may have changed since.
        amount: 1 for a request, the number of bytes for a body.
        now_s: the time.
    """
    filled = fill(bucket, rate, now_s)
    missing = min(1.0, amount) - filled.level
    if missing > 0:
        return Draw(bucket=filled, wait_s=missing / rate.per_s)
    return Draw(bucket=Bucket(level=filled.level - amount, at_s=filled.at_s), wait_s=0.0)


class Allowances(Generic[Key]):
    """The buckets of many: a machine without a clock."""

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self._buckets: collections.OrderedDict[Key, Bucket] = collections.OrderedDict()

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._buckets)

    def level(self, key: Key, rate: Rate, now_s: float) -> float:
        """Return the amount that is in a bucket now."""
        return fill(self._buckets.get(key), rate, now_s).level

    def take(self, wanted: dict[Key, tuple[Rate, float]], now_s: float) -> tuple[float, Key | None]:
        """Take an amount out of each of some buckets, or nothing out of any.

        Args:
            wanted: rate and amount by whose bucket it is.
            now_s: the time.

        Returns:
            (seconds to wait, whose bucket lacks most); (0, None): everything was taken.
        """
        drawn = {
            key: draw(self._buckets.get(key), rate, amount, now_s)
            for key, (rate, amount) in wanted.items()
        }
        longest = max(drawn, key=lambda key: drawn[key].wait_s, default=None)
        if longest is not None and drawn[longest].wait_s > 0:
            return drawn[longest].wait_s, longest
        for key, each in drawn.items():
            self._buckets[key] = each.bucket
            self._buckets.move_to_end(key)
        while len(self._buckets) > self._max_buckets:
            self._buckets.popitem(last=False)
        return 0.0, None
