"""Discrete events: a clock that jumps, processes that die and stop, tasks that wait.

Everything that happens is an entry of one heap, ordered by time and then by the
order in which it was scheduled, and everything random is drawn from one
generator: a run is a function of its seed.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

WAKE_S = 2e-4
"""A thread that may go on does so after up to so long: others may come first."""


class Violation(Exception):  # noqa: N818 - what was violated, not an error of the simulation
    """An invariant does not hold; the message says which."""


class ProcessKilled(BaseException):
    """Raised in the code of a process that has just been killed: it does nothing more."""


class Signal:
    """Something changed: wakes every task that waits for it.

    Where threads would need a lock around it, none is needed: events come one at a time.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Task] = []

    def __await__(self) -> Generator[Any, None, None]:
        yield self

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        """Wake everybody who waits."""
        self.fire()

    def add(self, task: Task) -> None:
        """Have ``task`` woken by the next :meth:`fire`."""
        self._waiting.append(task)

    def fire(self) -> None:
        """Wake everybody who waits."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()


Steps = Generator[float | Signal, None, T]
"""A thread's code: it yields seconds to sleep, or a signal to wait for."""


class Awaited(Generic[T]):
    """Lets a procedure of core await simulated steps."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps

    def __await__(self) -> Generator[Any, None, T]:
        return self._steps


class Sleep:
    """Lets a procedure of core await a time, in seconds."""

    __slots__ = ("_delay_s",)

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def __await__(self) -> Generator[Any, None, None]:
        yield self._delay_s


class Flag:
    """Something that one thread sets and another waits for, as asyncio's Event."""

    __slots__ = ("_changed", "_is_set")

    def __init__(self) -> None:
        self._changed, self._is_set = Signal(), False

    def set(self) -> None:
        """Let everybody go on who waits."""
        self._is_set = True
        self._changed.fire()

    def is_set(self) -> bool:
        """Return whether nobody waits."""
        return self._is_set

    def clear(self) -> None:
        """Have those wait who come from now on."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until it is set."""
        while not self._is_set:
            await self._changed


class Turn:
    """Held by one thread at a time; the others follow in the order in which they came."""

    __slots__ = ("_busy", "_waiting")

    def __init__(self) -> None:
        self._busy = False
        self._waiting: deque[Signal] = deque()

    async def __aenter__(self) -> None:
        while self._busy:
            turn = Signal()
            self._waiting.append(turn)
            await turn
        self._busy = True

    async def __aexit__(self, *_: object) -> None:
        self._busy = False
        if self._waiting:
            self._waiting.popleft().fire()


class Process:
    """Something that can be killed, or stopped and continued.

    What arrives for a stopped process waits in its buffers and is handled, in order,
    once it continues. A dead one handles nothing.
    """

    def __init__(self, engine: Engine, name: str, node: str) -> None:
        self.engine, self.name, self.node = engine, name, node
        self.alive = True
        self.stopped = False
        self.vanished = False
        """Its node is gone without a word: nobody answers in its name."""
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.at_end: list[Callable[[bool], None]] = []
        """Called with whether the end is silent (its whole node vanished)."""

    def spawn(self, steps: Steps[None] | Coroutine[Any, Any, None]) -> Task:
        """Run a thread of this process."""
        task = Task(self, steps)
        task.wake()
        return task

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call later, if the process lives then."""
        self.engine.schedule(delay_s, self, call, args)

    def kill(self, *, silent: bool = False) -> None:
        """End at once, whatever it is doing."""
        if not self.alive:
            return
        self.alive, self.vanished = False, silent
        self.engine.say(self.name, "is killed" if not silent else "vanishes with its node")
        self.backlog.clear()
        self.engine.close_unbegun(self)
        ends, self.at_end = self.at_end, []
        for end in ends:
            end(silent)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.stopped = True
            self.engine.say(self.name, "is stopped")

    def resume(self) -> None:
        """SIGCONT."""
        if not self.stopped:
            return
        self.stopped = False
        self.engine.say(self.name, "continues")
        while self.backlog:
            call, args = self.backlog.popleft()
            self.engine.schedule(0.0, self, call, args)

    @property
    def running(self) -> bool:
        """Whether it lives and is not stopped."""
        return self.alive and not self.stopped


class Task:
    """One thread of a process."""

    __slots__ = ("_steps", "_woken", "done", "process")

    def __init__(self, process: Process, steps: Steps[None] | Coroutine[Any, Any, None]) -> None:
        self.process, self._steps = process, steps
        self._woken = False
        self.done = False
        process.engine.unbegun.add(self)

    def close(self) -> None:
        """Never begin: Python takes a coroutine that is only dropped for one that is forgotten."""
        self.done = True
        self._steps.close()

    def wake(self) -> None:
        """Go on soon."""
        if not self._woken:
            self._woken = True
            engine = self.process.engine
            engine.schedule(engine.rng.random() * WAKE_S, self.process, self._resume)

    def _resume(self) -> None:
        self._woken = False
        if self.done:
            return
        self.process.engine.unbegun.discard(self)
        try:
            wait = self._steps.send(None)
        except StopIteration:
            self.done = True
            return
        except ProcessKilled:
            self.done = True
            return
        if isinstance(wait, Signal):
            wait.add(self)
        else:
            self._woken = True
            self.process.engine.schedule(wait, self.process, self._resume)


class Engine:
    """The clock and what is due.

    Args:
        seed: draws everything.
        tracing: whether :meth:`say` keeps what it is told.
    """

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.num_events = 0
        self.tracing = tracing
        self.trace: list[str] = []
        self.unbegun: set[Task] = set()
        """Threads that have not taken their first step."""
        self._heap: list[
            tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]
        ] = []
        self._sequence = 0

    def schedule(
        self,
        delay_s: float,
        process: Process | None,
        call: Callable[..., None],
        args: tuple[Any, ...] = (),
    ) -> None:
        """Call later; of a process only while it lives, and not while it is stopped."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._sequence, process, call, args))

    def step(self) -> bool:
        """Carry out what is due next; False when nothing is."""
        if not self._heap:
            return False
        self.now_s, _, process, call, args = heapq.heappop(self._heap)
        if process is not None:
            if not process.alive:
                return True
            if process.stopped:
                process.backlog.append((call, args))
                return True
        self.num_events += 1
        call(*args)
        return True

    def close_unbegun(self, process: Process | None = None) -> None:
        """Close the threads of a process that have not begun; None: those of all processes."""
        for task in [t for t in self.unbegun if process is None or t.process is process]:
            self.unbegun.remove(task)
            task.close()

    def say(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        if self.tracing:
            self.trace.append(f"{self.now_s:10.4f}  {who:<14} {what}")
