"""The durable checkpoints that one rank has written, as its votes say it (protocol section 10).

Parts are written and versions renamed in the background. Here is only what follows from that
for the rank's next status: which attempt's part is safe, and which version is durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mainstay_core.base.values import replace
from mainstay_core.wire.votes import SaveStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSaves:
    """The checkpoints of one rank."""

    status: SaveStatus = field(default_factory=SaveStatus)
    begun: tuple[int, str] = (0, "")
    """Version and nonce of the newest part that was begun here."""
    void_nonce: str = ""
    """Nonce of the attempt whose part here was copied from a bad state."""

    def told(self, *, busy: bool) -> SaveStatus:
        """Return what to say in a vote.

        Args:
            busy: whether this rank still writes.
        """
        return replace(self.status, checkpoint_busy=busy)

    def found(self, newest: int) -> OwnSaves:
        """Return the saves after a look at the disk, where ``newest`` is durable."""
        return replace(self, status=replace(self.status, durable=newest))

    def begin(self, version: int, nonce: str) -> OwnSaves:
        """Return the saves with the part of an attempt begun."""
        return replace(self, begun=(version, nonce))

    def written(self, version: int, nonce: str) -> OwnSaves:
        """Return the saves with a part safely written: it is safe unless its state was bad."""
        if nonce == self.void_nonce:
            return self
        status = replace(self.status, checkpoint_safe=version, checkpoint_nonce=nonce)
        return replace(self, status=status)

    def void(self, version: int) -> OwnSaves:
        """Return the saves that never call the part of a version safe, written or not."""
        saves = replace(self, void_nonce=self.begun[1]) if self.begun[0] == version else self
        if self.status.checkpoint_safe != version:
            return saves
        status = replace(self.status, checkpoint_safe=None, checkpoint_nonce="")
        return replace(saves, status=status)

    def void_after(self, version: int) -> OwnSaves:
        """Return the saves that never call the part of a later version than this one safe."""
        saves, (begun, nonce), safe = self, self.begun, self.status.checkpoint_safe
        if begun > version:
            saves = replace(saves, void_nonce=nonce)
        if safe is not None and safe > version:
            status = replace(self.status, checkpoint_safe=None, checkpoint_nonce="")
            saves = replace(saves, status=status)
        return saves

    def renamed(self, version: int) -> OwnSaves:
        """Return the saves with a version durable."""
        return self.found(max(self.status.durable, version))
