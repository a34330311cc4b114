"""A network that delays, stalls, cuts and resets; TCP as its users see it.

A connection carries messages in order, each way by itself; between connections
nothing is ordered. What is in flight when a peer dies may be lost. A cut between
two nodes, one way or both, either stalls what crosses it until it is mended (the
kernel repeats it) or resets the connections. A node that vanishes says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.sim.engine import Engine, Process, Signal, Steps

LOCAL_S = 5e-5
RETRANSMIT_S = 0.8
"""After a cut is mended, the kernel's next attempt comes within so long."""
CONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The time that a message takes between nodes, in s."""

    base_s: float = 5e-4
    tail_s: float = 0.0
    """Some take up to so much longer."""
    tail_probability: float = 0.0


class Unreachable(Exception):  # noqa: N818 - a state of the network
    """No answer that counts."""


class End:
    """One end of a connection. ``on_message`` and ``on_end`` are set by whoever owns it."""

    __slots__ = (
        "_last_s",
        "_lost",
        "_network",
        "_queue",
        "label",
        "on_end",
        "on_message",
        "open",
        "peer",
        "process",
    )

    def __init__(self, network: Network, process: Process, label: str) -> None:
        self._network, self.process, self.label = network, process, label
        self.peer: End = self
        self.open = True
        self.on_message: Callable[[Any], None] = _ignore
        self.on_end: Callable[[str], None] = _ignore
        self._last_s = 0.0
        self._lost = False
        self._queue: list[tuple[bool, Any]] = []
        process.at_end.append(self._process_ended)

    def send(self, message: object) -> bool:
        """Send a message; False if this end is closed."""
        if not self.open or not self.process.alive:
            return False
        self.peer._take(False, message)
        return True

    def close(self) -> None:
        """Close after what was sent; ``on_end`` of this side is not called."""
        if self.open and self.process.alive:
            self.open = False
            self.peer._take(True, "the connection ended")

    def reset(self, why: str) -> None:
        """Break the connection under both, with whatever is in flight."""
        for end in (self, self.peer):
            end._lost = True
            end._queue.clear()
            end._arrive_after(self._network.delay("", "-"), True, why)

    def _process_ended(self, silent: bool) -> None:
        if not self.open:
            return
        self.open = False
        if not silent:
            if self._network.engine.rng.random() < 0.5:
                self.peer._lost = True
                self.peer._queue.clear()
            self.peer._take(True, "the connection ended")

    def _take(self, is_end: bool, body: object) -> None:
        """Carry something towards this end."""
        network, source = self._network, self.peer.process.node
        if self._queue or network.is_cut(source, self.process.node):
            if not self._queue:
                network.when_mended(source, self.process.node, self._flush)
            self._queue.append((is_end, body))
            return
        self._arrive_after(network.delay(source, self.process.node), is_end, body)

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        for is_end, body in queue:
            self._arrive_after(self._network.delay("", "-"), is_end, body)

    def _arrive_after(self, delay_s: float, is_end: bool, body: object) -> None:
        engine = self._network.engine
        now_s = engine.now_s
        self._last_s = max(self._last_s + 1e-9, now_s + delay_s)
        engine.schedule(self._last_s - now_s, self.process, self._arrive, (is_end, body))

    def _arrive(self, is_end: bool, body: Any) -> None:
        if not self.open:
            return
        if is_end:
            self.open = False
            self.on_end(body)
        elif not self._lost:
            self.on_message(body)


def _ignore(_: object) -> None:
    return None


class Exchange:
    """One request and its answer."""

    __slots__ = ("_changed", "_client", "_network", "_server", "answer", "error")

    def __init__(self, network: Network, client: Process, server: Listener) -> None:
        self._network, self._client, self._server = network, client, server
        self._changed = Signal()
        self.answer: Any = None
        self.error = ""

    def reply(self, answer: object) -> None:
        """Answer, from the server's side; a cut on the way back loses it."""
        self._server.running.remove(self)
        source, target = self._server.process.node, self._client.node
        if self._network.is_cut(source, target):
            return
        self._client.after(self._network.delay(source, target), self._end, answer, "")

    def fail(self, why: str) -> None:
        """The client learns that there is no answer."""
        self._end(None, why)

    def fail_soon(self, why: str) -> None:
        """The connection breaks: the client learns of it."""
        self._client.after(self._network.delay("", "-"), self.fail, why)

    def _end(self, answer: object, why: str) -> None:
        if self.answer is None and not self.error:
            self.answer, self.error = answer, why
            self._changed.fire()

    def wait(self) -> Steps[Any]:
        """Wait for the end; returns the answer.

        Raises:
            Unreachable: there is none.
        """
        while self.answer is None and not self.error:
            yield self._changed
        if self.error:
            raise Unreachable(self.error)
        return self.answer


@dataclass(slots=True)
class Listener:
    """A listener at an address."""

    process: Process
    accept: Callable[[End], None] | None = None
    serve: Callable[[Exchange, Any], None] | None = None
    running: list[Exchange] = field(default_factory=list)
    """Requests without an answer yet."""


class Network:
    """All nodes and what connects them."""

    def __init__(self, engine: Engine, latency: Latency) -> None:
        self.engine, self._latency = engine, latency
        self._listeners: dict[str, Listener] = {}
        self._cut: dict[tuple[str, str], bool] = {}
        """By direction: whether what crosses is refused instead of stalled."""
        self._mended: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self.ends: list[End] = []
        """First ends of all connections."""

    def delay(self, source: str, target: str) -> float:
        """Draw how long a message takes."""
        if source == target:
            return LOCAL_S * (0.5 + self.engine.rng.random())
        delay_s = self._latency.base_s * (0.5 + self.engine.rng.random())
        if self.engine.rng.random() < self._latency.tail_probability:
            delay_s += self._latency.tail_s * self.engine.rng.random()
        return delay_s

    # Cuts -------------------------------------------------------------------

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from one node to the other now."""
        return bool(self._cut) and (source, target) in self._cut

    def cut(self, pairs: Iterable[tuple[str, str]], *, reset: bool) -> None:
        """Cut directions; with ``reset`` connections across break, else they stall."""
        added = [pair for pair in pairs if pair[0] != pair[1]]
        self._cut.update(dict.fromkeys(added, reset))
        if not reset:
            return
        for end in self.ends:
            nodes = (end.process.node, end.peer.process.node)
            if end.open and (nodes in self._cut or nodes[::-1] in self._cut):
                end.reset("connection reset by the network")

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Undo cuts."""
        for pair in pairs:
            self._cut.pop(pair, None)
            for again in self._mended.pop(pair, ()):
                delay_s = self.engine.rng.random() * RETRANSMIT_S
                self.engine.schedule(delay_s, None, again)

    def when_mended(self, source: str, target: str, again: Callable[[], None]) -> None:
        """Call once this direction is open again."""
        self._mended.setdefault((source, target), []).append(again)

    # Connections ------------------------------------------------------------

    def listen(self, address: str, listener: Listener) -> None:
        """Answer at ``address`` from now on; nobody else ever does."""
        self._listeners[address] = listener

        def broken(silent: bool) -> None:
            for exchange in () if silent else listener.running:
                exchange.fail_soon("connection reset")
            listener.running.clear()

        listener.process.at_end.append(broken)

    def connect(
        self,
        process: Process,
        address: str,
        opened: Callable[[End], None],
        failed: Callable[[str], None],
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Open a connection: ``opened`` or ``failed`` is called once."""
        attempt = _Attempt(self, process, address, opened, failed)
        process.after(timeout_s, attempt.give_up, f"{address} does not answer")
        attempt.call()

    def pair(self, client: Process, server: Process, label: str) -> tuple[End, End]:
        """Return both ends of a connection that stands."""
        ours, theirs = End(self, client, label), End(self, server, label)
        ours.peer, theirs.peer = theirs, ours
        self.ends.append(ours)
        if len(self.ends) > 200:
            self.ends = [end for end in self.ends if end.open or end.peer.open]
        return ours, theirs

    def listener(self, address: str) -> Listener | None:
        """Who listens there, alive or not."""
        return self._listeners.get(address)

    # Requests ---------------------------------------------------------------

    def request(self, process: Process, address: str, body: object, timeout_s: float) -> Steps[Any]:
        """Send a request and wait for its answer.

        Raises:
            Unreachable: refused, reset, or no answer in time; it may have been carried out.
        """
        target = self._listeners[address]
        exchange = Exchange(self, process, target)
        process.after(timeout_s, exchange.fail, "no answer in time")

        def arrive() -> None:
            if target.process.alive:
                target.running.append(exchange)
                assert target.serve is not None
                target.process.after(0.0, target.serve, exchange, body)
            elif not target.process.vanished:
                exchange.fail_soon("connection refused")

        self.carry(process.node, target.process.node, arrive)
        return (yield from exchange.wait())

    def carry(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Have something arrive at another node, after a cut between them if there is one."""
        if not self.is_cut(source, target):
            self.engine.schedule(self.delay(source, target), None, arrive)
        elif not self._cut[source, target]:
            self.when_mended(source, target, arrive)


@dataclass(slots=True)
class _Attempt:
    """One call of connect()."""

    network: Network
    process: Process
    address: str
    opened: Callable[[End], None]
    failed: Callable[[str], None]
    over: bool = False

    def call(self) -> None:
        listener = self.network.listener(self.address)
        if listener is None:
            self.process.after(self.network.delay("", "-"), self.give_up, "connection refused")
            return
        source, target = self.process.node, listener.process.node
        network = self.network
        if network.is_cut(source, target) and network._cut[source, target]:
            self.process.after(network.delay("", "-"), self.give_up, "network unreachable")
            return
        network.carry(source, target, lambda: self._arrive(listener))

    def _arrive(self, listener: Listener) -> None:
        if self.over or not self.process.alive:
            return
        if not listener.process.alive:
            if not listener.process.vanished:
                self.process.after(self.network.delay("", "-"), self.give_up, "refused")
            return
        ours, theirs = self.network.pair(self.process, listener.process, self.address)
        # The kernel accepts, also for a stopped process; what it says later comes after this.
        ours.on_message, ours.on_end = lambda _: self._open(ours), self.give_up
        theirs.send("accepted")
        assert listener.accept is not None
        listener.process.after(0.0, listener.accept, theirs)

    def _open(self, end: End) -> None:
        if self.over:
            end.close()
            return
        self.over = True
        self.opened(end)

    def give_up(self, why: str) -> None:
        if not self.over:
            self.over = True
            self.failed(why)
