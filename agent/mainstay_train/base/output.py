"""The output of trainers, on its way to that of their launcher: line by line, marked.

In a container nobody looks into files: what trainers print belongs to the container's
output. Each has a pipe of its own, so that lines of two never mix and each one says
whose it is; what a trainer's children print comes the same way.
"""

from __future__ import annotations

import os
import selectors

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16
"""A line that grows beyond this is passed on in pieces."""


class Relay:
    """Pipes whose lines are passed on.

    Invariant: every open pipe is registered with the selector by its read end.

    Args:
        selector: of the loop that calls :meth:`pass_on`.
        target: descriptor to write to.
    """

    def __init__(self, selector: selectors.BaseSelector, target: int = 1) -> None:
        self._selector = selector
        self._target = target
        self._marks: dict[int, bytes] = {}
        self._rest: dict[int, bytes] = {}

    def open(self, mark: str) -> int:
        """Return the end to write to of a new pipe; the caller closes it once the child has it."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._marks[read] = f"[{mark}] ".encode()
        self._rest[read] = b""
        self._selector.register(read, selectors.EVENT_READ)
        return write

    def has(self, descriptor: int) -> bool:
        """Whether a descriptor is one of the pipes."""
        return descriptor in self._marks

    def pass_on(self, descriptor: int) -> bool:
        """Pass on what a pipe holds, if anything: then return True. Forget it at its end."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        lines = (self._rest[descriptor] + data).split(b"\n")
        self._rest[descriptor] = lines.pop()
        if not data or len(self._rest[descriptor]) > MAX_LINE_BYTES:
            lines += [self._rest[descriptor]] if self._rest[descriptor] else []
            self._rest[descriptor] = b""
        if lines:
            mark = self._marks[descriptor]
            self._write(b"".join(mark + line + b"\n" for line in lines))
        if not data:
            self._selector.unregister(descriptor)
            del self._marks[descriptor], self._rest[descriptor]
            os.close(descriptor)
        return bool(data)

    def drain(self) -> None:
        """Pass on what is there now: the last words before the launcher ends."""
        for descriptor in tuple(self._marks):
            while self.pass_on(descriptor):
                pass

    def close(self) -> None:
        """Close all read ends, in a child that inherited them."""
        for descriptor in self._marks:
            os.close(descriptor)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._target, data) :]
