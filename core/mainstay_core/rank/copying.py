"""Decides which source a joiner asks for which chunk of a state (protocol section 7).

A state is cut into chunks of a fixed size. Every source that is there is asked for the next chunk
that nobody was asked for, so a fast source gives more of them. What a lost source still owed goes
to the others. Near the end a source with nothing to do is asked for what a slower one owes.

Invariants:
    - a chunk is written by one source at a time, and never again once it is right;
    - a chunk is owed by at most ``MAX_OWING`` sources;
    - while a source is there, every chunk that is not right is owed or will be asked for.
"""

from __future__ import annotations

import heapq

MAX_OWING = 2
"""Sources that are asked for one chunk: one that is slow, and another one instead of it. So the
chunks that travel twice are at most those that the sources owe when the last one is asked for."""


class ChunkTurns:
    """The chunks of one copy: which are right, and who owes the others.

    Args:
        num_chunks: chunks of the state.
    """

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._fresh = 0
        """The first chunk that nobody was ever asked for."""
        self._returned: list[int] = []
        """Chunks that somebody was asked for and that nobody owes; a heap."""
        self._owing: dict[int, set[str]] = {}
        """Sources that owe a chunk, of all chunks that were asked for and are not right."""
        self._written: set[int] = set()
        """Chunks that are being written."""
        self._num_right = 0

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are right."""
        return self._num_right == self._num_chunks

    def ask(self, source: str) -> int | None:
        """Return the chunk that a source is asked for now; None if there is none for it."""
        if self._returned:
            chunk = heapq.heappop(self._returned)
        elif self._fresh < self._num_chunks:
            chunk, self._fresh = self._fresh, self._fresh + 1
        else:
            late = [
                chunk
                for chunk, owing in self._owing.items()
                if chunk not in self._written and source not in owing and len(owing) < MAX_OWING
            ]
            if not late:
                return None
            chunk = min(late)
        self._owing.setdefault(chunk, set()).add(source)
        return chunk

    def came(self, source: str, chunk: int) -> bool:
        """Return whether a chunk that a source has sent is to be written: nobody was faster."""
        if chunk not in self._owing:
            return False
        self._owing[chunk].discard(source)
        if chunk in self._written:
            return False
        self._written.add(chunk)
        return True

    def right(self, chunk: int) -> None:
        """Take note that a chunk was written and has the digest that its source named."""
        self._written.remove(chunk)
        del self._owing[chunk]
        self._num_right += 1

    def wrong(self, chunk: int) -> None:
        """Take note that a chunk was written and has another digest: somebody else must send it."""
        self._written.remove(chunk)
        self._give_back(chunk)

    def lost(self, source: str) -> None:
        """Take note that a source sends nothing any more."""
        for chunk, owing in [*self._owing.items()]:
            if source in owing:
                owing.discard(source)
                self._give_back(chunk)

    def _give_back(self, chunk: int) -> None:
        if not self._owing[chunk] and chunk not in self._written:
            del self._owing[chunk]
            heapq.heappush(self._returned, chunk)
