"""Decides which windows are complete, and what stores keep.

A job keeps one complete window and makes one other. A window is complete once every author of every
position has said in a committed vote that all its instalments are at all their holders. Only then
are the window before it and its logs dropped, so at every instant some complete window and all
logs since its first version exist (MoEvement, arXiv 2412.15411, sections 3.2 and 3.4).

The vote of a step judges the state from which that step started, which is the state that was copied
at that version. So a window counts only from the commit of the step at its last version on. Whoever
holds a state that votes find bad says that its window has failed: it never becomes complete.

What is known of windows follows from the votes of committed steps alone. It belongs to the commit:
a rank that joins, or that rolls forward without having seen the votes, knows it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from mainstay_core.base.bounds import MAX_MEMBERS, Count, CountOrNone, Longest, Name
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.snapshots.duties import Author
from mainstay_core.snapshots.measures import MAX_PEERS
from mainstay_core.snapshots.windows import MAX_LENGTH, InstalmentNumber, Window

MAX_COVERED = 3
"""Windows that a vote names: the newest ones that its rank has covered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatus:
    """A rank's status of its windows, as its votes carry it."""

    covered: Annotated[tuple[Count, ...], Longest(MAX_COVERED)] = ()
    """First versions of the newest windows whose instalments are at all their holders, ascending;
    there may be several, as the newest one of all is not yet covered by others."""
    failed: CountOrNone = -1
    """First version of the newest window that this rank will never cover; -1 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWindow:
    """A window that was begun and is not complete."""

    window: Window
    authors: Annotated[tuple[Author, ...], Longest(MAX_MEMBERS)]
    """Of all positions, as of its first version, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The windows of a job, as they are known after a commit.

    After a restart from a checkpoint nothing is known: copies of a lineage that was left are void.

    Invariant: the open window begins after the complete one ends.
    """

    complete: Window | None = None
    """The newest complete window."""
    open: OpenWindow | None = None
    """The window that is being copied. The next one begins when this one is complete or given up,
    so that stores need room for two."""

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows that stores keep, ascending."""
        opened = None if self.open is None else self.open.window
        return tuple(window for window in (self.complete, opened) if window is not None)

    @property
    def first_log(self) -> int | None:
        """The first step whose logs stores keep; None while there is no window to replay from."""
        return min((window.first for window in self.windows), default=None)


def begin_window(retention: Retention, window: Window, authors: Iterable[Author]) -> Retention:
    """Return the retention after a window was begun at its first version.

    Args:
        retention: after the last commit.
        window: the new one.
        authors: of all positions.

    Raises:
        LocalProtocolError: another window is open, or reaches beyond the new one's beginning.
    """
    if retention.open is not None:
        raise LocalProtocolError(f"the window from version {retention.open.window.first} is open")
    if retention.complete is not None and window.first <= retention.complete.last:
        raise LocalProtocolError(
            f"a window from version {window.first} must begin after {retention.complete.last}"
        )
    return replace(retention, open=OpenWindow(window=window, authors=tuple(sorted(set(authors)))))


def after_commit(
    retention: Retention, step: int, votes: Mapping[Author, WindowStatus]
) -> tuple[Retention, str]:
    """Return the retention after a commit, and what happened to the open window in one sentence.

    The sentence is empty if nothing happened to it.

    Args:
        retention: after the commit before.
        step: that was committed: all votes on it were good.
        votes: the statuses in these votes, by voter.
    """
    if retention.open is None:
        return retention, ""
    window, authors = retention.open.window, retention.open.authors
    missing = [author for author in authors if author not in votes]
    if missing:
        reason = f"its author {missing[0]} is no member any more"
        return _given_up(retention, window, reason)
    failed = [author for author in authors if votes[author].failed >= window.first]
    if failed:
        return _given_up(retention, window, f"its author {failed[0]} cannot cover it")
    if step < window.last or any(window.first not in votes[a].covered for a in authors):
        return retention, ""
    reason = (
        f"the window of versions {window.first} to {window.last} is complete, of "
        f"{count(len(authors), 'author')}"
    )
    return Retention(complete=window), reason


def _given_up(retention: Retention, window: Window, reason: str) -> tuple[Retention, str]:
    return (
        replace(retention, open=None),
        f"the window from version {window.first} is given up: {reason}",
    )


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Placing:
    """An instalment on its way to one of its holders."""

    number: InstalmentNumber
    holder: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWindow:
    """A window as one of its authors sees it."""

    window: Window
    own: Name
    """The author's own pod."""
    peers: Annotated[tuple[PodUid, ...], Longest(MAX_PEERS)]
    """Other pods that hold its copies."""
    awaited: Annotated[tuple[Placing, ...], Longest(MAX_LENGTH * (MAX_PEERS + 1))]
    """What is not yet at its holder, instalments of later versions included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The progress of one author with its copies.

    Invariant: ``windows`` ascend, and none of them has failed.
    """

    windows: Annotated[tuple[OwnWindow, ...], Longest(MAX_COVERED)] = ()
    failed: CountOrNone = -1

    def begin(
        self, window: Window, numbers: Iterable[int], own: PodUid, peers: Iterable[PodUid]
    ) -> Coverage:
        """Return the progress with a new window.

        Args:
            window: that begins.
            numbers: of the instalments in which this author copies something.
            own: pod of the author.
            peers: other pods that hold its copies.
        """
        peers = tuple(sorted(peers))
        holders = (own, *peers)
        awaited = tuple(Placing(number=n, holder=h) for n in sorted(set(numbers)) for h in holders)
        new = OwnWindow(window=window, own=own, peers=peers, awaited=awaited)
        return replace(self, windows=(*self.windows, new)[-MAX_COVERED:])

    def placed(self, first: int, number: int, holder: PodUid) -> Coverage:
        """Return the progress after a holder has confirmed an instalment, with its digest.

        A confirmation of a window that has failed, or a second one, changes nothing.

        Args:
            first: version of the window.
            number: of the instalment.
            holder: pod that has it.
        """
        done = Placing(number=number, holder=holder)
        return replace(
            self,
            windows=tuple(
                replace(own, awaited=tuple(p for p in own.awaited if p != done))
                if own.window.first == first
                else own
                for own in self.windows
            ),
        )

    def lost(self, holder: PodUid) -> Coverage:
        """Return the progress after a holder is gone.

        A window goes on with the peers that are left. One that is left without a peer fails.
        """
        kept = []
        failed = self.failed
        for own in self.windows:
            peers = tuple(peer for peer in own.peers if peer != holder)
            if own.peers and not peers:
                failed = max(failed, own.window.first)
                continue
            awaited = tuple(placing for placing in own.awaited if placing.holder != holder)
            kept.append(replace(own, peers=peers, awaited=awaited))
        return Coverage(windows=tuple(kept), failed=failed)

    def fail(self) -> Coverage:
        """Return the progress after this rank's state was found bad, or was copied from another.

        Nobody has judged what it copied last. Windows that are complete already stay so.
        """
        firsts = [own.window.first for own in self.windows]
        return Coverage(failed=max([self.failed, *firsts]))

    @property
    def status(self) -> WindowStatus:
        """What the rank's next vote says."""
        covered = tuple(own.window.first for own in self.windows if not own.awaited)
        return WindowStatus(covered=covered[-MAX_COVERED:], failed=self.failed)
