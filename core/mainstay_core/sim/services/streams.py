"""The stream of the job at one simulated api replica: connections that listen."""

from __future__ import annotations

from mainstay_core.control_plane.job_store import StoreUnavailableError
from mainstay_core.control_plane.stream import JobStream, StreamItem
from mainstay_core.sim.engine import Process, Signal, Sleep
from mainstay_core.sim.network import End
from mainstay_core.sim.store import Reached


class Stream(JobStream["_Queue"]):
    """The job's stream at one replica.

    Args:
        process: the replica.
        store: as it reaches it.
    """

    def __init__(self, process: Process, store: Reached) -> None:
        super().__init__(store)
        self._process = process
        self._reads = False

    def start_reader(self, cursor: str) -> bool:
        if self._reads:
            return False
        self._reads = True
        self._process.spawn(self.read(cursor))
        return True

    def tell_end(self, phase: str) -> None:
        """Return nothing: that it is over is all."""

    async def pause(self, delay_s: float, why: str) -> None:
        self._process.engine.say(self._process.name, why)
        await Sleep(delay_s)

    def accept(self, end: End) -> None:
        """Somebody has connected; what it says first is the last entry that it has seen."""
        listener = _Queue()

        def ended(why: str) -> None:
            del why
            self.listeners.pop(listener, None)
            listener.cut()

        def asked(last: str) -> None:
            self._process.spawn(self._send(end, listener, last))

        end.on_message, end.on_end = asked, ended

    async def _send(self, end: End, listener: _Queue, last: str) -> None:
        try:
            async for item in self.follow(listener, last):
                end.send(item)
        except StoreUnavailableError:
            self.listeners.pop(listener, None)
            end.close()


class _Queue:
    """The entries that one listener has not got yet."""

    def __init__(self) -> None:
        self._items: list[StreamItem] = []
        self._changed = Signal()
        self._is_cut = False

    def put(self, item: StreamItem) -> None:
        self._items.append(item)
        self._changed.fire()

    async def take(self) -> StreamItem | None:
        while not self._items and not self._is_cut:
            await self._changed
        return None if self._is_cut else self._items.pop(0)

    def cut(self) -> None:
        self._is_cut = True
        self._changed.fire()
