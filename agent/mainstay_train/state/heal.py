"""Healing: the state of living cells, copied to a joiner while the others compute.

Parameters are only written by apply, apply needs the joiner's vote, and the
joiner votes after its copy is complete and its digest matches. So the sources
need no pause and no snapshot: a thread of each reads the state as it stands
(protocol section 7).

The state travels in chunks of a fixed size. The joiner asks all its sources at the same time, each
for the next chunk (:mod:`mainstay_core.rank.copying`), and has asked for one more before one is
there. A source sends a chunk and then its digest, which it computes while the chunk travels. The
joiner takes a chunk for right once what it wrote has that digest.

Neither side needs more host memory than a chunk for each connection, whatever the peer says: a
source has at most ``MAX_SERVED``, a joiner ``MAX_TOGETHER`` for each of the states that it copies
at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from mainstay_core.base import codec
from mainstay_core.base.admission import Bounds
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import pack, pack_head
from mainstay_core.base.proofs import Purpose
from mainstay_core.rank.copying import ChunkTurns
from mainstay_core.rank.serving import (
    MAX_TOGETHER,
    HealFailed,
    Source,
    Wanted,
    copy_problem,
)
from mainstay_net.acceptor import listen
from mainstay_net.caller import prove
from mainstay_net.entrance import Entrance
from mainstay_train.base import job_secret
from mainstay_train.comm.registered import (
    Registered,
    close_registered,
    open_registered,
    read_exactly,
    read_frame,
)
from mainstay_train.exact.optimizer import StageState
from mainstay_train.exact.portions import Portion
from mainstay_train.state.chunks import CHUNK_BYTES, Chunk, Staging, cut, flats_of, shape_of
from mainstay_train.state.comparing import COMPARES, MAX_WHY, Comparison, hear, heard

logger = logging.getLogger(__name__)

BOUNDS = Bounds(total=128)
"""On connections that have proved nothing: joiners are few, and descriptors are the trainer's."""
MAX_SERVED = 64
"""Requests served at a time, a thread and the memory of a chunk each: on a GPU 256 MiB, pinned. A
source with more joiners would serve each of them too slowly; whoever is turned away asks another
source, or this one again under the next plan."""
IDLE_S = 60.0
"""How long a source waits for a joiner to ask or to read. One whose node is lost says no farewell,
and would keep its thread. A joiner asks again within the time of a chunk, or when all others have
sent what they owe; one that comes later finds this source gone."""
ASKED_AHEAD = 2
"""Chunks that a joiner asks a source for at a time. While it writes one, the next is on its way."""

StateAt = Callable[..., StageState | Portion | None]
"""(quorum, position, version) -> the state once it is there, and its device has written it; None if
it never will be. With an end of the pipeline behind these, what is there of its guarded blocks."""


def masters_digest(state: StageState) -> str:
    """Digest of all masters that a rank holds, by model-wide parameter name."""
    return state.masters_digest().whole.hex()


class HealServer:
    """Serves this trainer's state to joiners of its quorum.

    One thread waits for all who call, and has them prove the job's secret. Each request of a
    joiner that has gets a thread, at most ``MAX_SERVED`` at a time.

    Args:
        address: local address to listen on.
        state_at: waits for the requested version of the requested quorum.
        on_serve: called when a part of the state is on its way.
        idle_s: how long a joiner may neither ask nor read.
    """

    def __init__(
        self,
        address: str,
        state_at: StateAt,
        on_serve: Callable[[], None] = lambda: None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._entrance = Entrance(
            listen(address), job_secret.read(), (Purpose.HEAL,), BOUNDS, Registered()
        )
        self.address = self._entrance.address
        self._state_at = state_at
        self._on_serve, self._idle_s = on_serve, idle_s
        self._free = threading.BoundedSemaphore(MAX_SERVED)
        self._closing = os.eventfd(0)
        self._thread = threading.Thread(target=self._accept, name="heal-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more; requests that are answered go on. To be called once."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        os.close(self._closing)
        self._entrance.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._entrance.fileno(), select.POLLIN)
        poll.register(self._closing, select.POLLIN)
        while True:
            wait_s = self._entrance.wait_s()
            ready = poll.poll(None if wait_s is None else math.ceil(1000 * wait_s))
            if any(number == self._closing for number, _ in ready):
                return
            for proved in self._entrance.turn():
                proved.socket.setblocking(True)
                if not self._free.acquire(blocking=False):
                    # Told by the end alone; the joiner asks the next source.
                    close_registered(proved.socket)
                    continue
                threading.Thread(
                    target=self._serve, args=(proved.socket,), name="heal-source", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        except ConnectionError as error:
            # As a rule the joiner has all it needs: near the end of a copy it asks two sources for
            # one chunk, and leaves once the faster one has sent it. It tells what went wrong.
            logger.debug("a joiner left before it had all that it asked for: %s", error)
        except (OSError, RemoteProtocolError) as error:
            logger.warning("a heal request ended early: %s", error)
        finally:
            close_registered(connection)
            self._free.release()

    def _answer(self, connection: socket.socket) -> None:
        asked, _ = read_frame(connection, max_body=0)
        wanted, compares = codec.decode(Wanted, asked), asked.get(COMPARES) is True
        refused = pack({"kind": "refused", "why": f"{wanted.quorum} is over here"})
        end = () if wanted.guarded is None else (wanted.guarded,)
        asked_for = (wanted.quorum, wanted.position, wanted.version, *end)
        state = self._state_at(*asked_for)
        if state is None:
            connection.sendall(refused)
            return
        connection.settimeout(self._idle_s)
        chunks = cut(flats_of(state, masters_only=wanted.masters_only, everything=compares))
        connection.sendall(pack({"kind": "state", "shape": shape_of(chunks)}))
        number = _asked(connection, chunks)
        if number is None:
            return
        # It waits for nothing else: where the joiner is a guard, this device may wait for it.
        staging, served = Staging(chunks[0].tensor.device, CHUNK_BYTES, is_written=True), 0
        with staging.beside():
            while number is not None:
                chunk, served = chunks[number], served + 1
                if not compares:
                    head = {"kind": "chunk", "number": number}
                    connection.sendall(pack_head(head, chunk.size_bytes))
                    connection.sendall(staging.read(chunk))
                if served == 1:
                    self._on_serve()
                digest = chunk.digest()
                # It was read at the version that was asked for, as it is still there.
                if self._state_at(*asked_for) is not state:
                    connection.sendall(refused)
                    return
                connection.sendall(pack({"kind": "digest", "digest": digest}))
                number = _asked(connection, chunks)


def _asked(connection: socket.socket, chunks: Sequence[Chunk]) -> int | None:
    """Return the number of the chunk that the joiner asks for next; None once it has left.

    Raises:
        OSError: the connection broke.
        RemoteProtocolError: the joiner asks for no chunk.
    """
    if not connection.recv(1, socket.MSG_PEEK):
        return None
    head, _ = read_frame(connection, max_body=0)
    number = head.get("number")
    if type(number) is not int or not 0 <= number < len(chunks):
        raise RemoteProtocolError("the joiner asks for no chunk of the state")
    return number


class HealClient:
    """Copies sources' states into this rank's memory; :meth:`shutdown` ends it from any thread."""

    def __init__(self, local: str) -> None:
        self._local = local
        self._changed = threading.Condition()
        """Guards the copies; notified with everything that may end a wait."""
        self._copies: set[_Copy] = set()
        self._ended: str | None = None
        self._comparison = Comparison(local, self._changed, self._raise_if_ended)

    def shutdown(self, why: str) -> None:
        """End all running copies, and all later ones."""
        with self._changed:
            self._ended = why
            for copy in self._copies:
                copy.end()
            self._comparison.end()

    def copy(
        self,
        state: StageState,
        *,
        sources: Sequence[Source],
        wanted: Wanted,
        expected: str,
        holders: Sequence[Source] = (),
    ) -> str:
        """Copy and verify; returns the digest of the masters. Threads may copy at the same time.

        Args:
            state: receives the bytes; void until this returns.
            sources: who has the state, at most ``MAX_TOGETHER``. Some may fail.
            wanted: the quorum in which the copy counts, the position, and the settled version.
            expected: the masters' digest that the quorum's reports name; "" if none does.
            holders: whose whole states are compared with the copy; empty: nobody's.

        Raises:
            HealFailed: every source is gone, refuses, or sent other bits than it named; or all
                have another digest than expected; or no majority of holders has the same.
        """
        assert len(sources) <= MAX_TOGETHER
        self._fetch(state, sources, wanted)
        state.refresh()
        masters = masters_digest(state)
        problem = copy_problem(masters, expected)
        if problem:
            who = ", ".join(source.slot for source in sources)
            raise HealFailed(f"the copy from {who} {problem}")
        if holders:
            self._comparison.compare(cut(state.everything()), holders[:MAX_TOGETHER], wanted)
        return masters

    def _fetch(self, state: StageState, sources: Sequence[Source], wanted: Wanted) -> None:
        """Have every chunk of the state written by some source, and found right.

        Raises:
            HealFailed: no source is left.
        """
        chunks = cut(flats_of(state, masters_only=wanted.masters_only))
        copy = _Copy(chunks, wanted, self._local, self._changed)
        with self._changed:
            self._raise_if_ended()
            self._copies.add(copy)
        try:
            for source in sources:
                copy.begin(source)
            with self._changed:
                self._changed.wait_for(lambda: self._ended is not None or copy.is_over)
                copy.end()
                # A thread that still connects writes nothing any more; nobody waits for it.
                self._changed.wait_for(lambda: copy.is_quiet)
                if not copy.is_complete:
                    self._raise_if_ended()
                    raise HealFailed(copy.why)
        finally:
            with self._changed:
                self._copies.discard(copy)
                copy.end()

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise HealFailed(self._ended)


class _Copy:
    """One copy of a state from several sources, with a thread each.

    Args:
        chunks: of the state that is written.
        wanted: what the sources are asked for.
        local: address to call from.
        changed: guards everything here but the chunks' memory.
    """

    def __init__(
        self, chunks: Sequence[Chunk], wanted: Wanted, local: str, changed: threading.Condition
    ) -> None:
        self._chunks, self._wanted, self._local = chunks, wanted, local
        self._changed = changed
        self._turns = ChunkTurns(len(chunks))
        self._left: set[str] = set()
        """Sources that may still send something."""
        self._connections: set[socket.socket] = set()
        self._has_ended = False
        self.why = "there is no source"
        """What became of the source that was lost last."""

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are there and right."""
        return self._turns.is_complete

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: all is there, or no source is left."""
        return self.is_complete or not self._left

    @property
    def is_quiet(self) -> bool:
        """Whether no thread writes, or will."""
        return not self._connections

    def begin(self, source: Source) -> None:
        """Have a thread copy from a source."""
        with self._changed:
            self._left.add(source.address)
        threading.Thread(
            target=self._run, args=(source,), name=f"heal-{source.slot}", daemon=True
        ).start()

    def end(self) -> None:
        """Have all threads come back."""
        with self._changed:
            self._has_ended = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    # What follows runs in the threads of the sources.

    def _run(self, source: Source) -> None:
        try:
            connection = open_registered(source.address, self._local)
            try:
                with self._entered(connection):
                    self._take(connection, source)
            finally:
                close_registered(connection)
        except (OSError, RemoteProtocolError, HealFailed) as error:
            self._lose(source, f"copy from {source.slot} ({source.address}): {error}")
        except BaseException as error:
            self._lose(source, f"copy from {source.slot} ({source.address}): {error!r}")
            raise

    @contextlib.contextmanager
    def _entered(self, connection: socket.socket) -> Iterator[None]:
        with self._changed:
            if self._has_ended:
                raise HealFailed("the copy is over")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._connections.remove(connection)
                self._changed.notify_all()

    def _lose(self, source: Source, why: str) -> None:
        with self._changed:
            self._turns.lost(source.address)
            self._left.discard(source.address)
            if not self._has_ended:
                self.why = why
                logger.warning("%s", why)
            self._changed.notify_all()

    def _take(self, connection: socket.socket, source: Source) -> None:
        """Copy chunks from a source until all are there.

        Raises:
            OSError: the connection broke, or was shut at the end.
            RemoteProtocolError: the source says what it may not.
            HealFailed: the source refuses, or what came has another digest than it named.
        """
        prove(connection, job_secret.read(), source.address, Purpose.HEAL)
        connection.sendall(pack({"kind": "heal", **codec.encode(self._wanted)}))
        if hear(connection, "state").get("shape") != shape_of(self._chunks):
            raise HealFailed("its state has another shape")
        if not self._chunks:
            return
        staging = Staging(self._chunks[0].tensor.device, CHUNK_BYTES)
        owed: deque[int] = deque()
        while self._ask(connection, source, owed):
            number = owed.popleft()
            self._receive(connection, staging, number)
            digest = str(hear(connection, "digest").get("digest"))
            self._keep(source, staging, number, digest)

    def _ask(self, connection: socket.socket, source: Source, owed: deque[int]) -> bool:
        """Ask a source for what it may send; return whether it owes something, once it does."""
        with self._changed:
            while not (self._has_ended or self.is_complete):
                before = len(owed)
                while len(owed) < ASKED_AHEAD:
                    number = self._turns.ask(source.address)
                    if number is None:
                        break
                    owed.append(number)
                if owed:
                    break
                self._changed.wait()  # until another one is lost, or all is there
            else:
                return False
        for number in list(owed)[before:]:
            connection.sendall(pack({"kind": "chunk", "number": number}))
        return True

    def _receive(self, connection: socket.socket, staging: Staging, number: int) -> None:
        chunk = self._chunks[number]
        head, size = heard(connection, "chunk")
        if (head.get("number"), size) != (number, chunk.size_bytes):
            raise RemoteProtocolError(f"not chunk {number} with {chunk.size_bytes} bytes")
        read_exactly(connection, staging.memory(size))

    def _keep(self, source: Source, staging: Staging, number: int, digest: str) -> None:
        """Write a chunk that came, unless another source was faster.

        Raises:
            HealFailed: it has another digest than its source named.
        """
        with self._changed:
            if self._has_ended or not self._turns.came(source.address, number):
                return
        chunk, found = self._chunks[number], None
        try:
            staging.write(chunk)
            found = chunk.digest()
        finally:
            with self._changed:
                if found == digest:
                    self._turns.right(number)
                else:
                    self._turns.wrong(number)
                self._changed.notify_all()
        if found != digest:
            raise HealFailed(f"chunk {number} has digest {found}, not {digest[:MAX_WHY]}")
