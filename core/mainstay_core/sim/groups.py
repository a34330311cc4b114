"""Process groups: the ranks meet by the quorum's gather, then connect a mesh.

As in ``mainstay_train.comm.group``: connecting the mesh cannot be ended from outside, the
meeting and every later operation can. A send is finished once its receiver has taken the
message.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mainstay_core.rank.connections import GroupEnded
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.gather import GatherClient
from mainstay_core.sim.network import End, Listener, Network


class Group:
    """One rank's side of a group.

    Args:
        process: the trainer.
        network: how it reaches the others.
        name: key prefix, unique to this membership.
        meeting: where its ranks learn each other's addresses.
        rank: number in the group.
        size: ranks.
        changed: fired with everything that may end a wait.
        connect_s: how long connecting may take once all ranks have met.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        *,
        name: str,
        meeting: GatherClient,
        rank: int,
        size: int,
        changed: Signal,
        connect_s: float,
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._process, self._network, self._changed = process, network, changed
        self._meeting, self._connect_s = meeting, connect_s
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

    def break_links(self) -> None:
        """Have this rank's sockets in the group break: nobody has wanted that."""
        for end in self._pairs.values():
            if end.open:
                end.reset("connection reset")

    def _close(self) -> None:
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
        told = yield from self._meeting.meet(
            self.name, (self.rank, address), self.size, lambda: self.ended
        )
        self._addresses = tuple(address for _, address in sorted(told))
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

    def start_exchange(self, body: object) -> Any:
        """Start to give everybody ``body``; return what :meth:`finish_exchange` needs.

        Raises:
            GroupEnded: a peer is gone or the group was shut.
        """
        self._operations += 1
        tag = ("exchange", self._operations)
        for peer in range(self.size):
            if peer != self.rank:
                self.send(body, peer, tag)
        return tag, body

    def finish_exchange(self, started: Any) -> Steps[list[Any]]:
        """Return what came from everybody, by rank.

        Raises:
            GroupEnded: the group ended before it completed.
        """
        tag, body = started
        received = [body] * self.size
        for peer in range(self.size):
            if peer != self.rank:
                received[peer] = yield from self.receive(peer, tag)
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


class ChainGroup(Group):
    """The group of a chain, and that of a cell in which a replay computes without the chain.

    Arguments are those of :class:`Group`, and:

    Args:
        width: inner ranks of a stage; by stage they follow each other in the chain.
    """

    def __init__(self, *args: Any, width: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self.cell: Group | None = None
        """That of the cell, once a replay has connected it; numbered by inner rank."""
        self._width = width

    def shutdown(self, why: str) -> None:
        super().shutdown(why)
        if self.cell is not None:
            self.cell.shutdown(why)

    def connect_cell(self) -> Steps[None]:
        """Meet the other ranks of the cell.

        Raises:
            GroupEnded: shut meanwhile, or somebody is gone.
        """
        self._alive()
        stage, inner = divmod(self.rank, self._width)
        self.cell = Group(
            self._process,
            self._network,
            name=f"{self.name}/s{stage}",
            meeting=self._meeting,
            rank=inner,
            size=self._width,
            changed=self._changed,
            connect_s=self._connect_s,
        )
        yield from self.cell.connect()


def _nothing(why: str) -> None:
    """A peer that does not answer may still call."""
    del why
