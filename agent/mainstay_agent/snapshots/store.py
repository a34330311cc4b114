"""The store of segments of a pod: one thread that waits for trainers, callers and holders.

It is not the supervisor's event loop, which must not wait for bytes: while segments travel, facts
and plans go on. Whatever blocks in the kernel (a send, a receive) lets the other thread run.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from mainstay_agent.local_socket import own_mode
from mainstay_agent.snapshots.arena import Arena
from mainstay_agent.snapshots.callers import Awaited, Caller
from mainstay_agent.snapshots.channel import TURN_BYTES, Channel
from mainstay_agent.snapshots.check import SegmentCheck
from mainstay_agent.snapshots.holders import HolderLine, Parcel, call
from mainstay_agent.snapshots.trainers import TrainerLine
from mainstay_core.base.admission import Bounds
from mainstay_core.base.bounds import MAX_SLOTS_PER_POD
from mainstay_core.base.errors import ProtocolError, brief
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.base.proofs import Purpose
from mainstay_core.segments.deliveries import Delivery, note_digests
from mainstay_core.segments.frames import MAX_PEER_HEAD_BYTES
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.segments.report_sizes import record_bytes
from mainstay_core.segments.status import Checksums, status_of
from mainstay_core.snapshots.recopies import Held, Recopies, Recopy
from mainstay_core.snapshots.stores import plan_record_line
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import MAX_HOLDERS, Holder, SegmentKey, StoreReport
from mainstay_core.wire.stores import Doubts, StoreCheck, StoreStatus
from mainstay_core.wire.unit_digests import UnitDigests
from mainstay_core.wire.votes import CommitRecord
from mainstay_net.acceptor import listen
from mainstay_net.entrance import Entrance

logger = logging.getLogger(__name__)

BOUNDS = Bounds(total=128)
"""On connections that have proved nothing: pods that call are few."""
MAX_CALLERS = 512
"""Pods and readers at a time that have proved themselves: a descriptor, what is received ahead
(``channel.AHEAD_BYTES``) and the room of one segment each. Whoever is turned away sees its
connection end."""
MAX_TRAINERS = 2 * MAX_SLOTS_PER_POD
"""Connections of trainers at a time: one that ends may still be there when the next one comes."""
MAX_LINES = 4 * MAX_HOLDERS
"""Connections to holders at a time: of several quorums' in a row."""
AT_ONCE = struct.pack("ii", 1, 0)
"""Linger (socket(7)) of a connection that is reset when it is closed."""
SWEEP_S = 1.0
"""How often it is looked for connections on which nothing moves."""


class SegmentStore:
    """Keeps the segments of a pod.

    Made in the thread that makes the pod's other sockets; :meth:`serve` runs in a thread of its
    own, in which everything else here happens but for :meth:`close` and :meth:`ask`.

    Args:
        job: of the pod.
        pod: its uid.
        address: local address to listen on, and to call from.
        path: Unix socket for the pod's trainers.
        memory_bytes: for segments; allocated at once, which takes a second for several GiB.
        secret: the job's.
        is_cut: whether the pod's network is cut: then it calls nobody and nobody gets in.

    Raises:
        InvalidSpecError: the memory is not there.
        OSError: the address or the path cannot be used.
    """

    def __init__(
        self,
        *,
        job: JobUid,
        pod: PodUid,
        address: str,
        path: Path,
        memory_bytes: int,
        secret: str = "",
        is_cut: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pod, self._local, self._secret, self._is_cut = pod, address, secret, is_cut
        self._arena = Arena(memory_bytes)
        self._index = SegmentIndex(job, self._arena.size_bytes)
        self._awaited = Awaited(self._came)
        self._entrance = Entrance(listen(address), secret, (Purpose.SNAPSHOT,), BOUNDS)
        self._trainers = _listen_here(path)
        self._wakes, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._channels: set[Channel] = set()
        self._lines: dict[tuple[str, bool], HolderLine] = {}
        """By address, and whether they carry what is sent again: no step waits for that."""
        self._plans: deque[tuple[Plan, int, int]] = deque(maxlen=1)
        """The newest plan that was not looked at yet, with peers and domains of copies."""
        self._recopies = Recopies(pod)
        self._passed_to: tuple[Holder, ...] = ()
        """Stores of pods without a member that hear of commits from this one."""
        self._sweeps_at_s = time.monotonic()
        self._is_closed = self._is_paused = False
        self._doubts: deque[Doubts] = deque(maxlen=1)
        """What the newest check has found damaged here, if that was not looked at yet."""
        self._asked: deque[tuple[Future[StoreStatus], int]] = deque()
        """Who waits for a status, and the check that is wanted."""
        self._sums = Checksums()
        self._check: SegmentCheck | None = None
        self._checked: StoreCheck | None = None
        """The newest check that is done."""

    @property
    def address(self) -> str:
        """Where it listens for other pods, as ``host:port``."""
        return self._entrance.address

    def close(self) -> None:
        """Have :meth:`serve` return; from any thread, also before it was called."""
        self._is_closed = True
        self._wake.close()

    def adopt(self, plan: Plan, *, peers: int, domains: int) -> None:
        """Send again what a plan leaves with too few holders; from any thread, returns at once.

        Args:
            plan: newer than those before; it names the stores of living pods.
            peers: other pods that are to keep each segment.
            domains: failure domains that they are to span.
        """
        self._plans.append((plan, peers, domains))
        self._wake_up()

    def doubt(self, doubts: Doubts) -> None:
        """Have copies cover nothing that a check found damaged; from any thread, returns at once.

        What has come in their place since counts.
        """
        self._doubts.append(doubts)
        self._wake_up()

    def _wake_up(self) -> None:
        # One that is full wakes the thread as well; one that is closed has none.
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def ask(self, check: int = 0) -> Future[StoreStatus]:
        """Return what will be the store's status; from any thread, before :meth:`close`.

        Args:
            check: number of the newest check that is wanted. The store begins it, unless it has
                done so, and goes on meanwhile. Its outcome is in each status from then on.
        """
        future: Future[StoreStatus] = Future()
        self._asked.append((future, check))
        # One that is full wakes the thread as well.
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"?")
        return future

    def serve(self) -> None:
        """Serve until the store is closed; then all connections end."""
        register, read = self._selector.register, selectors.EVENT_READ
        register(self._entrance, read, self._let_pods_in)
        register(self._trainers, read, self._let_trainers_in)
        register(self._wakes, read, self._woken)
        try:
            while not self._is_closed:
                for key, events in self._selector.select(self._wait_s()):
                    if isinstance(key.data, Channel):
                        self._turn(key.data, events)
                    else:
                        key.data()
                self._look_after()
        finally:
            for channel in tuple(self._channels):
                self._end(channel, "the store has ended")
            for future, _ in self._asked:
                future.cancel()
            self._entrance.close()
            self._trainers.close()
            self._wakes.close()
            self._selector.close()
            self._arena.close()

    # Connections -----------------------------------------------------------------

    def _wait_s(self) -> float | None:
        """Return after how many seconds there is something to do in any case; None: never."""
        if self._check is not None or self._recopies.due(self._index.from_version) is not None:
            return 0.0
        waits = [self._entrance.wait_s()]
        if self._is_paused or any(channel.due_s() is not None for channel in self._channels):
            waits.append(max(0.0, self._sweeps_at_s - time.monotonic()))
        return min((wait for wait in waits if wait is not None), default=None)

    def _turn(self, channel: Channel, events: int) -> None:
        if channel not in self._channels:
            return  # it has ended in this very round
        try:
            channel.turn(events)
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                logger.error("%s does not keep to the protocol: %s", _name_of(channel), error)
            self._end(channel, brief(error))

    def _look_after(self) -> None:
        """Send what lacks holders, end what does not move, and see what each connection wants."""
        self._recopy()
        now_s = time.monotonic()
        if self._check is not None:
            self._checked = self._check.advance() or self._checked
            if self._checked is not None and self._checked.number == self._check.number:
                self._check = None
        if self._entrance.wait_s() == 0.0:
            self._let_pods_in()
        if now_s >= self._sweeps_at_s:
            self._sweeps_at_s = now_s + SWEEP_S
            if self._is_paused:
                self._is_paused = False
                self._selector.register(self._trainers, selectors.EVENT_READ, self._let_trainers_in)
            for channel in tuple(self._channels):
                due_s = channel.due_s()
                if due_s is not None and due_s <= now_s:
                    self._end(channel, "nothing moves any more")
        self._send_new()
        for channel in self._channels:
            wanted = channel.interest
            if wanted != channel.registered:
                self._selector.modify(channel.socket, wanted, channel)
                channel.registered = wanted

    def _send_new(self) -> None:
        """Send what has been queued: most often the kernel takes it at once.

        So nobody has to wait for a socket that is writable. What one connection sends, or its end,
        may give another one something to send.
        """
        tried: set[Channel] = set()
        while due := [c for c in self._channels if c not in tried and _begins_to_send(c)]:
            for channel in due:
                tried.add(channel)
                self._turn(channel, selectors.EVENT_WRITE)

    def _add(self, channel: Channel) -> None:
        channel.registered = channel.interest
        self._selector.register(channel.socket, channel.registered, channel)
        self._channels.add(channel)

    def _end(self, channel: Channel, why: str) -> None:
        self._channels.discard(channel)
        self._lines = {at: line for at, line in self._lines.items() if line is not channel}
        self._selector.unregister(channel.socket)
        # What the kernel has not sent yet is never sent: its pages are given to others now.
        channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        channel.socket.close()
        channel.ended(why)

    def _let_pods_in(self) -> None:
        for proved in self._entrance.turn():
            callers = sum(isinstance(channel, Caller) for channel in self._channels)
            if self._is_cut() or callers >= MAX_CALLERS:
                proved.socket.close()
                continue
            self._add(Caller(proved.socket, self._arena, self._index, self._awaited, self._report))

    def _let_trainers_in(self) -> None:
        try:
            connection, _ = self._trainers.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it was gone before its turn
        except OSError as error:
            # There is no descriptor. Others may be given back until the next sweep.
            logger.warning("a trainer has to wait: %s", brief(error))
            self._selector.unregister(self._trainers)
            self._is_paused = True
            return
        connection.setblocking(False)
        if sum(isinstance(channel, TrainerLine) for channel in self._channels) >= MAX_TRAINERS:
            connection.close()
            return
        line = TrainerLine(
            connection,
            self._arena,
            self._index,
            self._awaited,
            self._deliver,
            self._report,
            self._record,
            self._keep_digests,
            Holder(pod=self._pod, address=self.address),
        )
        self._add(line)

    # What the supervisor asks for ------------------------------------------------

    def _answer(self) -> None:
        """Tell whoever has asked what is held, and begin the check that is wanted."""
        while self._asked:
            future, wanted = self._asked.popleft()
            begun = self._check or self._checked
            if wanted > (begun.number if begun is not None else 0):
                lost: Sequence[SegmentKey] = ()
                if self._check is not None:
                    self._check.give_up()
                    lost = self._check.lost
                self._check = SegmentCheck(wanted, self._index, self._arena, self._sums, lost)
            status = status_of(self._index, self._pod, self.address)
            status = replace(status, checked=self._checked)
            if future.set_running_or_notify_cancel():
                future.set_result(status)

    # What trainers ask for -------------------------------------------------------

    def _report(self, lineage: int) -> StoreReport:
        return self._index.report(self._pod, self.address, lineage)

    def _record(self, record: CommitRecord) -> None:
        """Keep a commit that a trainer tells, and pass it on to pods without a member."""
        why = self._index.record(record)
        if why:
            logger.warning("a trainer's commit is not kept: %s", why)
            return
        for holder in self._passed_to:
            self._pass_on(holder, (record,))

    def _pass_on(self, holder: Holder, records: Sequence[CommitRecord]) -> None:
        """Pass commits on: all that are kept if it is the first time over this connection."""
        line = self._line_again(holder)
        if line is None:
            return
        due = records if line.has_passed_on else self._index.records
        short = [record for record in due if record_bytes(record) <= MAX_PEER_HEAD_BYTES]
        if len(short) < len(due):
            logger.warning("commits of more than %d bytes are not passed on", MAX_PEER_HEAD_BYTES)
        line.pass_on(short)

    def _keep_digests(self, told: UnitDigests, holders: Sequence[Holder]) -> None:
        """Keep the digests of a step's units, and pass them on to the pods that keep copies."""
        is_kept = note_digests(self._index, told)
        others = [holder for holder in holders if holder.pod != self._pod]
        for holder in (others or self._passed_to) if is_kept else ():
            line = self._line_again(holder)
            if line is not None:
                line.pass_digests(told)

    def _line_again(self, holder: Holder) -> HolderLine | None:
        """Return a connection for what no step waits for; None if it cannot be opened."""
        try:
            line = self._lines.get((holder.address, True))
            return line or self._call(holder.address, is_again=True)
        except (OSError, ValueError, OverflowError) as error:
            logger.info("nothing is passed on to %s: %s", holder.pod, brief(error))
            return None

    def _deliver(
        self,
        key: SegmentKey,
        holders: Sequence[Holder],
        keep_from: int,
        done: Callable[[str], None],
    ) -> None:
        """Send a segment to holders; the pod itself has it."""
        others = {holder.pod: holder.address for holder in holders if holder.pod != self._pod}
        delivery = Delivery(others)

        def answered(pod: PodUid, why_not: str) -> None:
            delivery.answered(pod, why_not)
            if delivery.is_over:
                done(delivery.why_not)

        if delivery.is_over:
            done("")
        for pod, address in others.items():
            self._send(address, Parcel(key, keep_from, partial(answered, pod)))

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(TURN_BYTES)
        while self._plans:
            plan, peers, domains = self._plans.popleft()
            self._recopies.adopt(plan, peers=peers, domains=domains)
            self._passed_to = plan_record_line(plan, self._pod)
            for holder in self._passed_to:
                self._pass_on(holder, self._index.records)
        while self._doubts:
            for header in self._sums.take_headers(self._doubts.popleft()):
                self._index.doubt(header.key, header.nonce, header.digest)
        self._answer()

    def _came(self, key: SegmentKey) -> None:
        """Note that a segment is here, whose holders the newest plan may not name."""
        segment = self._index.find(key)
        assert segment is not None
        self._recopies.came(Held(key, segment.holders))

    def _recopy(self) -> None:
        """Send again what has too few holders, if there is a reason to look at it."""
        index = self._index
        plan = self._recopies.due(index.from_version)
        if plan is None:
            return
        wanted = self._recopies.wanted(index.from_version)
        segments = {s.header.key: s for s in index.needed(plan.lineage, wanted)}
        kept = [Held(key, segment.holders) for key, segment in segments.items()]
        recopies = self._recopies.look(index.from_version, kept)
        if recopies:
            logger.info("%d segments have too few holders and are sent again", len(recopies))
        for recopy in recopies:
            segment = segments[recopy.key]
            for holder in recopy.to:
                done = partial(self._recopied, segment, recopy, holder)
                parcel = Parcel(recopy.key, self._index.from_version, done, recopy.holders)
                self._send(holder.address, parcel)

    def _recopied(self, segment: Segment, recopy: Recopy, holder: Holder, why_not: str) -> None:
        """Note that one more pod keeps a segment, or has not taken it."""
        self._recopies.answered(recopy, holder, is_kept=not why_not)
        if why_not:
            logger.info("%s is not at one more pod, %s: %s", recopy.key, holder.pod, why_not)
            return
        segment.holders = self._recopies.holders_after(segment.holders, holder)

    def _send(self, address: str, parcel: Parcel) -> None:
        line = self._lines.get((address, bool(parcel.again)))
        if line is None:
            try:
                line = self._call(address, is_again=bool(parcel.again))
            except (OSError, ValueError, OverflowError) as error:
                parcel.done(f"{address}: {brief(error)}")
                return
        line.put(parcel)

    def _call(self, address: str, *, is_again: bool) -> HolderLine:
        if self._is_cut():
            raise OSError("the network is cut")
        if len(self._lines) >= MAX_LINES:
            raise OSError(f"there are {MAX_LINES} connections to holders already")
        connection = call(address, self._local)
        line = HolderLine(connection, address, self._secret, self._arena, self._index)
        self._lines[address, is_again] = line
        self._add(line)
        return line


def _begins_to_send(channel: Channel) -> bool:
    """Return whether a connection has something to send, and waits for no event to do so."""
    return bool(channel.interest & ~channel.registered & selectors.EVENT_WRITE)


def _name_of(channel: Channel) -> str:
    if isinstance(channel, TrainerLine):
        return str(channel)
    try:
        host, port = channel.socket.getpeername()[:2]
    except OSError:
        return "another pod"
    return f"{host}:{port}"


def _listen_here(path: Path) -> socket.socket:
    """Return a Unix socket that listens, in place of one that a former supervisor left."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    with own_mode(path.parent):
        listener.bind(str(path))
    listener.listen(MAX_SLOTS_PER_POD)
    return listener
