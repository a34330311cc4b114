"""One member's side of its quorum's gather, without sockets.

A member that is only late is not gone (protocol section 5): a wait ends because all
have posted, because the server said :class:`~.frames.Abort`, because the connection
ended, or because this side ends the gather itself. A gather ends once; who ended it
first is what counts.
"""

from __future__ import annotations

from typing import Generic

from mainstay_core.base.errors import LocalProtocolError, MainstayError
from mainstay_core.gather.frames import Abort, Body, Gathered, Join, Leave, Newer, Post


class QuorumAborted(MainstayError):  # noqa: N818 - a state, not a failure
    """The quorum cannot complete anything any more.

    No failure of the process that sees it: it keeps its state, its partials and its
    mark, parks, and waits for the next plan (protocol section 5).

    Args:
        why: the reason in one sentence.
        suspects: indices (in the plan's members) of the ranks that seem gone.
            A hint, never a decision: peers that abort reset their sockets too.
        was_told: whether others ended it, and this member saw nothing itself.
    """

    def __init__(self, why: str, suspects: tuple[int, ...] = (), *, was_told: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.suspects = suspects
        self.was_told = was_told


class ClientProtocol(Generic[Body]):
    """One member's side of the gather: a machine without sockets.

    Whoever drives it sends what :meth:`opened`, :meth:`post`, :meth:`abort` and
    :meth:`leave` return, and closes the connection once :attr:`ended` is set.

    Args:
        join: who this member is.
    """

    def __init__(self, join: Join) -> None:
        self._join = join
        self._has_joined = self._is_over = False
        self._ended: QuorumAborted | None = None
        self._posted: set[str] = set()
        self._gathered: dict[str, tuple[Body, ...]] = {}

    @property
    def ended(self) -> QuorumAborted | None:
        """Why the quorum has ended for this member; None while it lasts."""
        return self._ended

    @property
    def may_post(self) -> bool:
        """Whether :meth:`post` returns or raises now instead of having to wait."""
        return self._has_joined or self._ended is not None

    def may_take(self, key: str) -> bool:
        """Return whether :meth:`take` returns or raises now instead of having to wait."""
        return key in self._gathered or self._ended is not None

    def opened(self) -> Join | None:
        """Take note that the connection stands.

        Returns:
            What is said first; None if the gather has ended before.
        """
        if self._ended is not None:
            return None
        self._has_joined = True
        return self._join

    def post(self, key: str, body: Body, of: int | None = None) -> Post[Body]:
        """Return what gives this member's body for ``key``.

        Args:
            key: what is gathered.
            body: of this member.
            of: how many members post the key; None: all.

        Raises:
            QuorumAborted: the quorum has ended.
            LocalProtocolError: this member has posted the key before, or has not joined.
        """
        self._raise_if_ended()
        if not self._has_joined:
            raise LocalProtocolError(f"{key} is posted before the connection stands")
        if key in self._posted:
            raise LocalProtocolError(f"{key} was posted before")
        self._posted.add(key)
        return Post(key=key, body=body, of=of)

    def take(self, key: str) -> tuple[Body, ...]:
        """Return all members' bodies for ``key`` in the order of their indices, once.

        What was gathered before the quorum ended is still returned.

        Raises:
            QuorumAborted: the quorum ended before all had posted.
            LocalProtocolError: not all have posted yet.
        """
        if key in self._gathered:
            return self._gathered.pop(key)
        self._raise_if_ended()
        raise LocalProtocolError(f"not all have posted {key}")

    def received(self, message: Gathered[Body] | Abort | Newer) -> QuorumAborted | Newer | None:
        """Take what the server says.

        Returns:
            What this member is told at once: a newer plan, or that others ended the quorum.
        """
        if self._is_over:
            return None
        if isinstance(message, Gathered):
            self._gathered[message.key] = message.bodies
            return None
        if isinstance(message, Newer):
            return message
        self._is_over = True
        return self._end(message.why, message.suspects, was_told=True)

    def lost(self, why: str, suspects: tuple[int, ...] = ()) -> QuorumAborted | None:
        """Take note that the connection has ended, or could not be opened.

        Returns:
            What this member is told at once; None if the gather has ended before.
        """
        self._is_over = True
        return self._end(why, suspects)

    def abort(self, why: str, suspects: tuple[int, ...] = ()) -> Abort | None:
        """End the quorum for everybody.

        Returns:
            What is said last; None if the gather has ended before or never began.
        """
        first = self._end(why, suspects)
        return Abort(why=why, suspects=suspects) if first and self._has_joined else None

    def leave(self) -> Leave | None:
        """End this side without disturbing the others, as all move on together.

        Returns:
            What is said last; None if the gather has ended before or never began.
        """
        first = self._end("this member has moved on")
        return Leave() if first and self._has_joined else None

    def shutdown(self, why: str) -> None:
        """End this side without a word: the others see the connection end."""
        self._end(why)

    def _end(
        self, why: str, suspects: tuple[int, ...] = (), *, was_told: bool = False
    ) -> QuorumAborted | None:
        if self._ended is not None:
            return None
        self._ended = QuorumAborted(why, suspects, was_told=was_told)
        return self._ended

    def _raise_if_ended(self) -> None:
        # A new exception per raise: one object raised in two threads mixes their tracebacks.
        ended = self._ended
        if ended is not None:
            raise QuorumAborted(ended.why, ended.suspects, was_told=ended.was_told)
