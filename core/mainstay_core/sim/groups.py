"""Process groups: a rendezvous in a launcher's store, then a mesh of connections.

As in ``mainstay_train.comm.group``: reaching the store and connecting the mesh cannot
be ended from outside, waiting for the others in the store and every later
operation can. A send is finished once its receiver has taken the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from mainstay_core.rank.connections import GroupEnded
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.network import End, Listener, Network


class RendezvousStore:
    """Keys of all groups that meet at a pod; lives in its launcher."""

    def __init__(self, process: Process, network: Network, address: str) -> None:
        self._ready: dict[str, dict[int, str]] = {}
        self._waiting: dict[str, list[tuple[End, int]]] = {}
        network.listen(address, Listener(process, accept=self._accept))

    def _accept(self, end: End) -> None:
        def on_message(message: tuple[str, int, int, str]) -> None:
            name, rank, size, address = message
            ready = self._ready.setdefault(name, {})
            ready[rank] = address
            waiting = self._waiting.setdefault(name, [])
            waiting.append((end, size))
            for other, wanted in waiting:
                if len(ready) >= wanted:
                    other.send(tuple(ready[r] for r in range(wanted)))

        end.on_message = on_message


class Group:
    """One rank's side of a group.

    Args:
        process: the trainer.
        network: how it reaches the others.
        name: key prefix, unique to this membership.
        store: address of the rendezvous store.
        rank: number in the group.
        size: ranks.
        changed: fired with everything that may end a wait.
        connect_s: how long reaching the store, and then the ranks, may take.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        *,
        name: str,
        store: str,
        rank: int,
        size: int,
        changed: Signal,
        connect_s: float,
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._process, self._network, self._changed = process, network, changed
        self._store_address, self._connect_s = store, connect_s
        self._store: End | None = None
        self._store_error = ""
        self._addresses: tuple[str, ...] = ()
        self._pairs: dict[int, End] = {}
        self._lost: set[int] = set()
        self._inbox: dict[tuple[int, Any], deque[Any]] = {}
        self._taken: dict[tuple[int, Any], int] = {}
        self._operations = 0
        self._met = False
        self.ended: str | None = None

    @property
    def connected(self) -> bool:
        """Whether the others have met this rank here."""
        return self._met and self.ended is None

    def shutdown(self, why: str) -> None:
        """End every operation that waits here, and all later ones."""
        if self.ended is None:
            self.ended = why
        self._close()
        self._changed.fire()

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store_error = self._store_error or "shut"
        for end in self._pairs.values():
            end.close()

    def connect(self) -> Steps[None]:
        """Meet the other ranks.

        Raises:
            GroupEnded: shut meanwhile, or somebody is gone.
        """
        self._alive()
        address = f"{self.name}/{self.rank}@{self._process.name}"
        self._network.listen(address, Listener(self._process, accept=self._accept))
        self._network.connect(
            self._process, self._store_address, self._opened, self._refused, self._connect_s
        )
        while self._store is None and not self._store_error:
            yield self._changed
        if self.ended is not None:
            self._close()
        self._alive()
        if self._store is not None:
            self._store.send((self.name, self.rank, self.size, address))
        while not self._addresses and not self._store_error:
            yield self._changed
        if not self._addresses:
            raise GroupEnded(self.ended or f"{self.name}: store: {self._store_error}")
        yield from self._mesh()

    def _mesh(self) -> Steps[None]:
        """Connect to every rank; nobody can end this from outside, but it is short."""
        deadline_s = self._process.engine.now_s + self._connect_s
        self._process.after(self._connect_s, self._changed.fire)
        for peer in range(self.rank + 1, self.size):
            self._network.connect(
                self._process,
                self._addresses[peer],
                lambda end, peer=peer: self._paired(peer, end, first=True),  # type: ignore[misc]
                _nothing,
                self._connect_s,
            )
        hasty = self._process.engine.rng.random() < 0.5
        while len(self._pairs) < self.size - 1:
            if self._process.engine.now_s >= deadline_s:
                raise GroupEnded(self.ended or f"{self.name}: not all ranks came")
            if hasty and self._pairs and (self.ended is not None or self._lost):
                raise GroupEnded(self.ended or f"{self.name}: a rank is gone")
            yield self._changed
        if self.ended is not None:
            self._close()
        self._alive()
        self._met = True

    def _opened(self, end: End) -> None:
        end.on_message, end.on_end = self._all_ready, self._refused
        self._store = end
        self._changed.fire()

    def _all_ready(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses
        self._changed.fire()

    def _refused(self, why: str) -> None:
        self._store_error = why
        self._changed.fire()

    def _accept(self, end: End) -> None:
        if self.ended is not None:
            end.close()
            return

        def hello(rank: int) -> None:
            self._paired(rank, end, first=False)

        end.on_message = hello

    def _paired(self, peer: int, end: End, *, first: bool) -> None:
        if self.ended is not None:
            end.close()
            return
        self._pairs[peer] = end
        end.on_message = lambda message: self._on_message(peer, message)
        end.on_end = lambda _: self._on_lost(peer)
        if first:
            end.send(self.rank)
        self._changed.fire()

    def _on_lost(self, peer: int) -> None:
        self._lost.add(peer)
        if self._process.engine.rng.random() < 0.5:
            # What no receive was posted for stays with the sender.
            for key in [key for key in self._inbox if key[0] == peer]:
                del self._inbox[key]
        self._changed.fire()

    def _on_message(self, peer: int, message: tuple[str, Any, Any]) -> None:
        kind, tag, body = message
        if kind == "data":
            self._inbox.setdefault((peer, tag), deque()).append(body)
        else:
            self._taken[peer, tag] = self._taken.get((peer, tag), 0) + 1
        self._changed.fire()

    def _alive(self) -> None:
        if self.ended is not None:
            raise GroupEnded(self.ended)

    # Operations -------------------------------------------------------------

    def exchange(self, bodies: Sequence[Any]) -> Steps[list[Any]]:
        """All-to-all: ``bodies`` by destination; returns what came, by source.

        Raises:
            GroupEnded: the group ended before it completed.
        """
        self._operations += 1
        tag = ("exchange", self._operations)
        for peer in range(self.size):
            if peer != self.rank:
                self.send(bodies[peer], peer, tag)
        received = []
        for peer in range(self.size):
            own = peer == self.rank
            received.append(bodies[peer] if own else (yield from self.receive(peer, tag)))
        for peer in range(self.size):
            if peer != self.rank:
                yield from self.finish(peer, tag)
        return received

    def send(self, body: object, peer: int, tag: object) -> None:
        """Start sending.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        self._alive()
        if not self._pairs[peer].send(("data", tag, body)):
            raise GroupEnded(f"{self.name}: send to {peer}")

    def receive(self, peer: int, tag: object) -> Steps[Any]:
        """Receive what ``peer`` sent with ``tag``.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        while True:
            self._alive()
            queue = self._inbox.get((peer, tag))
            if queue:
                self._pairs[peer].send(("taken", tag, None))
                return queue.popleft()
            if peer in self._lost:
                raise GroupEnded(f"{self.name}: rank {peer} has closed its connection")
            yield self._changed

    def finish(self, peer: int, tag: object) -> Steps[None]:
        """Wait until ``peer`` has taken what was sent with ``tag``.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        while True:
            self._alive()
            if self._taken.get((peer, tag), 0) > 0:
                self._taken[peer, tag] -= 1
                return
            if peer in self._lost:
                raise GroupEnded(f"{self.name}: rank {peer} has closed its connection")
            yield self._changed


def _nothing(why: str) -> None:
    """A peer that does not answer may still call."""
    del why
