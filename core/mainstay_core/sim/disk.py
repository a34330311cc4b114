"""The directory of durable checkpoints that all ranks share.

As ``mainstay_train.state.directory``: parts beside the final name, a rename once all
are safe, damaged versions put aside by whoever finds them, old ones removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mainstay_core.rank.saving.disk_room import Stored, find_clean, find_way_back
from mainstay_core.rank.saving.saves import ends_attempt, find_outdated
from mainstay_core.sim.engine import Violation
from mainstay_core.wire.plan import Voided, is_void
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.votes import Commit


@dataclass(frozen=True, slots=True)
class Part:
    """One position's part of a version."""

    params: str
    commit: Commit
    commit_chain: str
    history: History = ()


class DamagedError(Exception):
    """A version cannot be read."""


class AbandonedError(Exception):
    """An attempt was removed, as a newer one began."""


@dataclass(slots=True)
class Disk:
    """All versions, complete and unfinished."""

    positions: int
    keep: int = 2
    complete: dict[int, dict[int, Part]] = field(default_factory=dict)
    unfinished: dict[tuple[int, str], dict[int, Part]] = field(default_factory=dict)
    abandoned: set[tuple[int, str]] = field(default_factory=set)
    """Attempts that were removed, as one that ends them began."""
    torn: set[int] = field(default_factory=set)
    """A look at the sizes tells."""
    lineages: dict[int, int] = field(default_factory=dict)
    """In which each complete version was computed."""
    aside: set[tuple[int, int]] = field(default_factory=set)
    """Versions of steps that count no more, each with its lineage: they were put aside."""
    flipped: set[int] = field(default_factory=set)
    """Only reading tells."""

    @property
    def is_damaged(self) -> bool:
        """Whether any version was ever damaged."""
        return bool(self.torn or self.flipped)

    def newest_complete(self, voided: Sequence[Voided] = ()) -> int:
        """Newest version that looks complete and counts; 0 when there is none."""
        counting = (v for v in self.complete if not is_void(voided, v, self.lineages.get(v, 0)))
        return max((v for v in counting if v not in self.torn), default=0)

    def put_aside(self, voided: Sequence[Voided]) -> None:
        """Put versions aside of steps that count no more."""
        for version in list(self.complete):
            lineage = self.lineages.get(version, 0)
            if version not in self.torn and is_void(voided, version, lineage):
                del self.complete[version]
                self.aside.add((version, lineage))

    def abandon_others(self, version: int, nonce: str) -> None:
        """Remove every other attempt that this one, which begins, ends."""
        for key in [key for key in self.unfinished if ends_attempt(nonce, key[1])]:
            if key != (version, nonce):
                del self.unfinished[key]
                self.abandoned.add(key)

    def write_part(self, version: int, nonce: str, position: int, part: Part) -> None:
        """Write a part; it replaces an abandoned one."""
        self.unfinished.setdefault((version, nonce), {})[position] = part

    def finish(
        self, version: int, nonce: str, lineage: int = 0, clean_at: int | None = None
    ) -> bool:
        """Rename the version; False if it is there already, with the same history of commits.

        What else has its name is put aside.

        Raises:
            AbandonedError: its parts are gone.
            Violation: a part is missing, though the votes said that all are safe.
        """
        there, ours = self.complete.get(version), self.unfinished.get((version, nonce))
        if there is not None and (ours is None or _chains(there) == _chains(ours)):
            return False
        if ours is None:
            raise AbandonedError(f"no part of checkpoint {version} is there")
        parts = self.unfinished.pop((version, nonce))
        whole = set(parts) == set(range(self.positions))
        if not whole and (version, nonce) in self.abandoned:
            # Written on by a rank that the others have given up.
            raise AbandonedError(f"parts of checkpoint {version} are gone")
        if not whole:
            raise Violation(f"checkpoint {version} is renamed with parts {sorted(parts)} only")
        self.complete[version] = parts
        self.lineages[version] = lineage
        self.torn.discard(version)
        self.flipped.discard(version)
        self._retain(clean_at)
        return True

    def load(self, version: int) -> dict[int, Part]:
        """Return all parts.

        Raises:
            DamagedError: it is gone or does not have its digest; then it is put aside.
        """
        if version not in self.complete:
            raise DamagedError(f"checkpoint {version} is not there")
        if version in self.flipped or version in self.torn:
            del self.complete[version]
            raise DamagedError(f"checkpoint {version} does not have its digest")
        return self.complete[version]

    def _retain(self, clean_at: int | None) -> None:
        outdated = find_outdated((v for v in self.complete if v not in self.torn), self.keep)
        stored = [self._stored(v) for v in self.complete]
        stay = {find_way_back(stored), find_clean(stored, clean_at)}
        for version in [v for v in self.complete if v <= outdated.complete and v not in stay]:
            del self.complete[version]
        for key in [key for key in self.unfinished if key[0] <= outdated.unfinished]:
            del self.unfinished[key]
            self.abandoned.add(key)  # perhaps of a quorum that is behind this one, and writes on

    def _stored(self, version: int) -> Stored:
        """Return what is seen of a version at first sight."""
        is_exact = not any(part.history for part in self.complete[version].values())
        whole = version not in self.torn
        return Stored(
            name=str(version), version=version, size_bytes=1, complete=whole, exact=is_exact
        )


def _chains(parts: dict[int, Part]) -> set[str]:
    return {part.commit_chain for part in parts.values()}
