"""Finds damaged copies by the checksums that stores have told.

Good segments of one key hold the same bytes, whoever wrote them. So a copy that differs from most
others is damaged. Of two copies that differ, nobody can tell which is; both are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mainstay_core.wire.segments import SegmentKey
from mainstay_core.wire.stores import SUM_DIGITS, DamagedCopy, StoreCheck

_LOST = (
    "the key by which the store finds it has changed, so that nobody can read it; it was dropped"
)
_DOUBTED = "it was found damaged or void before, and was not written again"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerdict:
    """The outcome of one check of all stores."""

    damaged: tuple[DamagedCopy, ...]
    """By segment and pod."""
    lost: tuple[DamagedCopy, ...]
    """Copies that no key found any more, as which their stores had them: one that is good may have
    that key. The stores have dropped them."""
    num_compared: int
    """Segments with two copies or more."""
    num_alone: int
    """Segments with one copy: it can be compared only with an earlier check."""


def judge(checks: Mapping[str, StoreCheck]) -> CheckVerdict:
    """Return which copies are damaged.

    Complexity: linear in the copies, but for their order.

    Args:
        checks: of one check, by name of the pod; those of older lineages are left out.
    """
    lineage = max((check.lineage for check in checks.values()), default=0)
    copies: dict[SegmentKey, dict[str, str]] = {}
    names: dict[SegmentKey, str] = {}
    """Of units, by key without the version."""
    found: dict[tuple[SegmentKey, str], str] = {}
    lost: list[tuple[SegmentKey, str]] = []
    for pod, check in checks.items():
        if check.lineage != lineage:
            continue
        for key, name, checksum in _sums_of(check):
            copies.setdefault(key, {})[pod] = checksum
            names[replace(key, version=0)] = name
        for key in check.changed:
            found[key, pod] = "its bytes are not those that an earlier check has read"
        for key in check.doubted:
            # It need not differ from others: what was written may have been wrong.
            found.setdefault((key, pod), _DOUBTED)
        lost += [(key, pod) for key in check.lost]

    def named(key: SegmentKey, pod: str, why: str) -> DamagedCopy:
        name = names.get(replace(key, version=0), "")
        return DamagedCopy(pod=pod, key=key, unit_name=name, why=why)

    for key, sums in copies.items():
        unchanged = {pod: s for pod, s in sums.items() if (key, pod) not in found}
        found |= {(key, pod): why for pod, why in _odd_ones(unchanged).items()}
    return CheckVerdict(
        damaged=tuple(named(key, pod, found[key, pod]) for key, pod in sorted(found)),
        lost=tuple(named(key, pod, _LOST) for key, pod in sorted(lost)),
        num_compared=sum(len(sums) > 1 for sums in copies.values()),
        num_alone=sum(len(sums) == 1 for sums in copies.values()),
    )


def _odd_ones(sums: Mapping[str, str]) -> dict[str, str]:
    """Return which pods' copies differ from most others, and why they are named."""
    if len(set(sums.values())) < 2:
        return {}
    (most, votes), *others = Counter(sums.values()).most_common()
    if votes == others[0][1]:
        return dict.fromkeys(sorted(sums), "the copies differ, and no majority says which is right")
    return {
        pod: f"it differs from {votes} other copies" for pod, s in sorted(sums.items()) if s != most
    }


def _sums_of(check: StoreCheck) -> Iterator[tuple[SegmentKey, str, str]]:
    """Yield key, name of the unit and checksum of each segment."""
    for line in check.segments:
        versions = [v for run in line.versions for v in range(run.first, run.last + 1)]
        for at, version in enumerate(versions):
            checksum = line.sums[SUM_DIGITS * at : SUM_DIGITS * (at + 1)]
            yield replace(line.key, version=version), line.unit_name, checksum
