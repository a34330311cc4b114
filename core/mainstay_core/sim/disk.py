"""The directory of durable checkpoints that all ranks share.

As ``mainstay_train.state.directory``: parts beside the final name, a rename once all
are safe, damaged versions put aside by whoever finds them, old ones removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mainstay_core.rank.saves import ends_attempt, find_outdated
from mainstay_core.sim.engine import Violation
from mainstay_core.wire.votes import Commit


@dataclass(frozen=True, slots=True)
class Part:
    """One position's part of a version."""

    params: str
    commit: Commit
    commit_chain: str


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
    flipped: set[int] = field(default_factory=set)
    """Only reading tells."""

    @property
    def is_damaged(self) -> bool:
        """Whether any version was ever damaged."""
        return bool(self.torn or self.flipped)

    def newest_complete(self) -> int:
        """Newest version that looks complete; 0 when there is none."""
        return max((v for v in self.complete if v not in self.torn), default=0)

    def abandon_others(self, version: int, nonce: str) -> None:
        """Remove every other attempt that this one, which begins, ends."""
        for key in [key for key in self.unfinished if ends_attempt(nonce, key[1])]:
            if key != (version, nonce):
                del self.unfinished[key]
                self.abandoned.add(key)

    def write_part(self, version: int, nonce: str, position: int, part: Part) -> None:
        """Write a part; it replaces an abandoned one."""
        self.unfinished.setdefault((version, nonce), {})[position] = part

    def finish(self, version: int, nonce: str) -> bool:
        """Rename the version; False if it is there already.

        Raises:
            AbandonedError: its parts are gone.
            Violation: a part is missing, though the votes said that all are safe.
        """
        if version in self.complete:
            return False
        if (version, nonce) not in self.unfinished:
            raise AbandonedError(f"no part of checkpoint {version} is there")
        parts = self.unfinished.pop((version, nonce))
        whole = set(parts) == set(range(self.positions))
        if not whole and (version, nonce) in self.abandoned:
            # Written on by a rank that the others have given up.
            raise AbandonedError(f"parts of checkpoint {version} are gone")
        if not whole:
            raise Violation(f"checkpoint {version} is renamed with parts {sorted(parts)} only")
        self.complete[version] = parts
        self._retain()
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

    def _retain(self) -> None:
        outdated = find_outdated((v for v in self.complete if v not in self.torn), self.keep)
        for version in [v for v in self.complete if v <= outdated.complete]:
            del self.complete[version]
        for key in [key for key in self.unfinished if key[0] <= outdated.unfinished]:
            del self.unfinished[key]
            self.abandoned.add(key)  # perhaps of a quorum that is behind this one, and writes on
