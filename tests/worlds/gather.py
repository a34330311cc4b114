"""A played gather: the product's server and members, and queues between them.

Nothing arrives by itself. Whoever plays lets the next message of a line arrive at the server or
at the member, and breaks lines.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mainstay_core.gather.client import ClientProtocol, QuorumAborted
from mainstay_core.gather.frames import Join, Newer
from mainstay_core.gather.server import Send, ServerProtocol

END: Any = object()
"""Travels last on a line."""


class Line:
    """A member's connection to the server: its side of the gather, and what is under way."""

    def __init__(self, join: Join) -> None:
        self.join = join
        self.client: ClientProtocol[Any] = ClientProtocol(join)
        self.to_server: deque[Any] = deque([self.client.opened()])
        self.to_member: deque[Any] = deque()
        self.is_open = True

    def post(self, key: str, body: object, of: int | None = None) -> None:
        """Post a body; raises QuorumAborted once the quorum has ended."""
        self._say(self.client.post(key, body, of))

    def leave(self) -> None:
        self._say(self.client.leave())
        self.close()

    def abort(self, why: str, suspects: tuple[int, ...] = ()) -> None:
        self._say(self.client.abort(why, suspects))
        self.close()

    def close(self) -> None:
        """Close this side after what was said."""
        self._say(END)
        self.is_open = False

    def reset(self, *, lost: bool = True) -> None:
        """Break under both ends, with whatever is under way; unless ``lost``, that arrives yet."""
        if lost:
            self.to_server.clear()
            self.to_member.clear()
        self.to_server.append(END)
        self.to_member.append(END)
        self.is_open = False

    def _say(self, message: object) -> None:
        if self.is_open and message is not None:
            self.to_server.append(message)


class PlayedGather:
    """A server of all quorums, and the lines to it."""

    def __init__(self) -> None:
        self.server: ServerProtocol[Line, Any] = ServerProtocol()
        self.lines: list[Line] = []

    def enter(self, join: Join) -> Line:
        """Open a line; the member has said who it is."""
        line = Line(join)
        self.server.opened(line)
        self.lines.append(line)
        return line

    def serve(self, line: Line) -> list[tuple[Line, object]]:
        """Let the next message arrive at the server; returns what it answers to whom."""
        message = line.to_server.popleft()
        if message is END:
            actions = self.server.ended(line)
            self.lines.remove(line)
        else:
            actions = self.server.received(line, message)
        answers: list[tuple[Line, object]] = []
        for action in actions:
            if isinstance(action, Send):
                answers += [(to, action.message) for to in action.to]
            else:
                answers.append((action.connection, END))
        for to, answer in answers:
            to.to_member.append(answer)
        return answers

    @staticmethod
    def hear(line: Line) -> QuorumAborted | Newer | None:
        """Let the next message arrive at the member; returns what it is told at once."""
        message = line.to_member.popleft()
        if message is END:
            told = line.client.lost("the gather server's connection ended")
        else:
            told = line.client.received(message)
        if isinstance(told, QuorumAborted):
            line.close()
        return told
