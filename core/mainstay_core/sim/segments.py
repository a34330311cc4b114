"""A pod's store of segments, on a network that is played.

As ``mainstay_agent.snapshots``. What a store keeps, refuses and drops is decided by the product's
index. Frames travel as values, and the bytes of a segment are
a term beside them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.deliveries import Delivery, is_here, note_needless, note_passed
from mainstay_core.segments.evictions import needed_in
from mainstay_core.segments.frames import (
    AskReport,
    Discard,
    Doubt,
    Fetch,
    KeepFrom,
    KeepRecord,
    Missing,
    Noted,
    PassRecord,
    Refused,
    Reported,
    Segment,
    Stored,
    VotedLogs,
    Written,
)
from mainstay_core.segments.frames import Held as HeldEverywhere
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment as Kept
from mainstay_core.segments.spans import Span
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Process, Violation
from mainstay_core.sim.invariants.units import is_whole
from mainstay_core.sim.network import End, Listener
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.snapshots.recopies import Held, Recopies, Recopy
from mainstay_core.snapshots.stores import plan_record_line, store_addresses
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder, SegmentHeader, SegmentKey, SegmentKind
from mainstay_core.wire.votes import CommitRecord

RECOPIED_S = 0.2
"""When it is looked whether what was to be sent again is at its new holders."""
ANSWER_S = 3.0
"""A store that does not answer for so long is given up."""

Frame: TypeAlias = tuple[Any, terms.UnitTerm | None]
"""A message, and the bytes behind it."""


class SegmentStore:
    """The store of one pod; lives in its supervisor.

    Args:
        world: everything around it.
        process: the supervisor.
        pod: whose store it is.
        address: where it is asked.
    """

    def __init__(self, world: Surroundings, process: Process, pod: PodUid, address: str) -> None:
        config = world.config.snapshots
        assert config is not None
        self._world, self._process, self._pod, self.address = world, process, pod, address
        self._config = config
        self._index = SegmentIndex(world.config.job, config.memory_bytes)
        self._bytes: dict[SegmentKey, terms.UnitTerm] = {}
        self._lines: dict[tuple[str, bool], _HolderLine] = {}
        """By address, and whether they carry what is sent again."""
        self._waiting: dict[SegmentKey, list[tuple[End, str]]] = {}
        """Who waits for a segment, and the nonce of the quorum in which it is to be written."""
        self._num_open = 0
        """Copies that are sent again, and not answered yet."""
        self._on_their_way: set[tuple[Kept, Holder]] = set()
        """Those to stores that all plans have named since."""
        self.is_mute = False
        """Whether it does not answer the next question of another pod."""
        self.has_been_full = False
        self._plan: Plan | None = None
        """The newest that was adopted."""
        self._recopies = Recopies(pod)
        self._passed_to: tuple[Holder, ...] = ()
        """Stores of pods without a member that hear of commits from this one."""
        self._given_up: set[SegmentKey] = set()
        world.network.listen(address, Listener(process, accept=self._accept))
        world.checks.kept.stores[address] = self

    def keys(self) -> list[SegmentKey]:
        """Return which segments are kept, in order."""
        self._bytes = {k: b for k, b in self._bytes.items() if self._index.find(k) is not None}
        return sorted(self._bytes)

    def spoil(self, key: SegmentKey) -> None:
        """Damage the bytes of a segment where they lie."""
        unit, whole = self._bytes[key]
        self._bytes[key] = unit, terms.term("damaged", whole)
        self._world.checks.kept.damaged(self.address, key)

    def spoil_record(self, rng: random.Random) -> None:
        """Damage a commit where it lies; nothing happens in a store that keeps none."""
        if not self._index.records:
            return
        record = rng.choice(self._index.records)
        damaged = rng.choice(
            (
                replace(record, commit=replace(record.commit, scale=2 * record.commit.scale)),
                replace(record, certified_in=f"{record.certified_in}x"),
                replace(record, chain=f"{record.chain}x"),
                replace(record, gradients=tuple(f"{digest}x" for digest in record.gradients)),
                replace(record, states=tuple(f"{digest}x" for digest in record.states)),
            )
        )
        commits = self._index.commits  # the store itself takes no damaged one
        commits.put(damaged)
        self._world.checks.seen["damaged a record"] += 1

    def _accept(self, end: End) -> None:
        end.on_message = lambda frame: self._on_frame(end, *frame)

    def _on_frame(self, end: End, message: Any, content: terms.UnitTerm | None) -> None:
        index = self._index
        match message:
            case Written():
                assert content is not None
                self._keep(end, message, content)
            case Segment():
                assert content is not None
                end.send((self._take(message, content), None))
            case Fetch():
                self._answer(end, message)
            case VotedLogs():
                why = index.note_voted(message)
                if not why:
                    self._world.checks.kept.voted(self.address, message)
                end.send((HeldEverywhere(request=message.request, why_not=why), None))
            case KeepRecord():
                index.record(message.record)
                for holder in self._passed_to:
                    self._pass_on(holder, (message.record,))
            case PassRecord():
                note_passed(index, message.record)
            case KeepFrom():
                index.keep_from(
                    message.lineage,
                    message.version,
                    may_go_back=message.may_go_back,
                    drops_later=message.drops_later,
                )
            case Discard(is_outdated=True):
                index.discard_outdated(message.key)
                self._world.checks.kept.withdrawn(self.address, message.key)
            case Discard():
                index.discard_damaged(message.key)
            case Doubt():
                index.doubt(message.key, message.nonce, message.digest)
                end.send((Noted(), None))
            case AskReport() if self.is_mute and end.peer.process.node != self._process.node:
                self.is_mute = False
                self._world.checks.seen["did not answer"] += 1
            case AskReport():
                report = index.report(self._pod, self.address, message.lineage)
                end.send((Reported(request=message.request, report=report), None))
            case _:
                raise AssertionError(f"a store is told {message}")
        self._recopy()

    def _answer(self, end: End, message: Fetch) -> None:
        segment = self._index.find(message.key)
        is_there = segment is not None and segment.header.nonce == message.nonce
        if message.nonce and not is_there:
            self._waiting.setdefault(message.key, []).append((end, message.nonce))
            return
        end.send(self._found(message.key))

    def _found(self, key: SegmentKey) -> Frame:
        segment = self._index.find(key)
        if segment is None:
            return Missing(), None
        return Segment(header=segment.header), self._bytes[key]

    def keeps(self, key: SegmentKey) -> bool:
        """Whether a segment is here."""
        return self._index.find(key) is not None

    def gave_up(self, key: SegmentKey) -> bool:
        """Whether a segment went as one of a window that was given up."""
        return key in self._given_up

    def _put(
        self,
        header: SegmentHeader,
        content: terms.UnitTerm,
        holders: tuple[Holder, ...],
        *,
        is_again: bool = False,
    ) -> str:
        """Keep a segment; return why not, empty if it is kept."""
        why = self._index.refusal_of(header)
        if why:
            return why
        room = self._index.take_room(header.size_bytes)
        if room is None and not is_again:
            room = self._take_room_of_others(header)
        self.has_been_full |= room is None or bool(self._index.num_evicted)
        if room is None:
            return self._index.why_full(header.size_bytes)
        place = header.key.position, header.key.unit
        before = {k for k in self._bytes if (k.position, k.unit) == place and self.keeps(k)}
        self._index.put(header, room, holders)
        self._given_up |= {key for key in before if not self.keeps(key)}
        self._given_up.discard(header.key)
        self._bytes[header.key] = content
        self._recopies.came(Held(header.key, holders))
        if self._plan is not None:  # of which whoever wrote it may not have heard
            named = set(store_addresses(self._plan).values())
            living = named.intersection(holder.address for holder in holders)
            if holders and len(living) < 1 + min(self._config.peers, len(named) - 1):
                keys = frozenset({header.key})
                self._process.after(RECOPIED_S, self._check_recopied, self._plan, keys, 0)
        whole = is_whole(header, content)
        self._world.checks.kept.written(self.address, header.key, is_whole=whole)
        waiting = self._waiting.pop(header.key, [])
        for end, nonce in waiting:
            if nonce == header.nonce:
                end.send(self._found(header.key))
        left = [(end, nonce) for end, nonce in waiting if nonce != header.nonce]
        if left:
            self._waiting[header.key] = left
        return ""

    def _take_room_of_others(self, header: SegmentHeader) -> Span | None:
        """Take room for what the window in flight needs; what is older may go for it."""
        there, index = self.keys(), self._index
        room = index.take_room(header.size_bytes, needed_in(header.key, header.window))
        gone = [key for key in there if not self.keeps(key)]
        self._world.checks.seen["evicted"] += len(gone)
        self._world.checks.kept.evicted(self.address, gone)
        return room

    def _take(self, message: Segment, content: terms.UnitTerm) -> Stored | Refused:
        """Take a segment of another pod, which also says what is needed no more."""
        if not self._index.refusal_of(message.header, is_again=message.is_again):
            note_needless(self._index, message)
        if message.is_again and is_here(self._index, message.header):
            return Stored()
        why = self._put(message.header, content, message.holders, is_again=message.is_again)
        return Refused(why=why) if why else Stored()

    def _keep(self, end: End, message: Written, content: terms.UnitTerm) -> None:
        """Keep a segment of an own trainer, and send it to its holders."""
        others = {h.pod: h.address for h in message.holders if h.pod != self._pod}
        header, own_place = message.header, Holder(pod=self._pod, address=self.address)
        holders = own_place, *(h for h in message.holders if h.pod != self._pod)
        self._world.checks.kept.resends.replaced(header.key)
        own = self._put(header, content, holders)
        delivery = Delivery(others)

        def over() -> None:
            why = own or delivery.why_not
            if not why:
                places = frozenset({self.address, *others.values()})
                self._world.checks.kept.held(header.key, content, places)
            end.send((HeldEverywhere(request=message.request, why_not=why), None))

        def answered(pod: PodUid, why: str) -> None:
            delivery.answered(pod, why)
            if delivery.is_over:
                over()

        if own or delivery.is_over:
            over()
            return
        sent = Segment(header=header, keep_from=message.keep_from, holders=holders)
        frame = sent, content
        for pod, address in others.items():
            self._line(address).send(frame, lambda why, pod=pod: answered(pod, why))  # type: ignore[misc]

    def _line(self, address: str, *, is_again: bool = False) -> _HolderLine:
        line = self._lines.get((address, is_again))
        if line is None or line.ended:
            line = _HolderLine(self._world, self._process, address)
            self._lines[address, is_again] = line
        return line

    # What is sent again -----------------------------------------------------------

    def adopt(self, plan: Plan) -> None:
        """Send again what a plan leaves with too few holders."""
        self._plan, self._passed_to = plan, plan_record_line(plan, self._pod)
        for holder in self._passed_to:
            self._pass_on(holder, self._index.records)
        self._recopies.adopt(plan, peers=self._config.peers, domains=self._config.domains)
        named = set(store_addresses(plan).values())
        self._on_their_way = {way for way in self._on_their_way if way[1].address in named}
        self._recopy()
        keys = frozenset(s.header.key for s in self._index.needed(plan.lineage))
        self._process.after(RECOPIED_S, self._check_recopied, plan, keys, 0)

    def _pass_on(self, holder: Holder, records: Sequence[CommitRecord]) -> None:
        line = self._line(holder.address, is_again=True)
        for record in records if line.has_passed_on else self._index.records:
            line.tell((PassRecord(record=record), None))
        line.has_passed_on = True

    def _recopy(self) -> None:
        index = self._index
        plan = self._recopies.due(index.from_version)
        if plan is None:
            return
        wanted = self._recopies.wanted(index.from_version)
        needed = {s.header.key: s for s in index.needed(plan.lineage, wanted)}
        kept = [Held(key, segment.holders) for key, segment in needed.items()]
        for recopy in self._recopies.look(index.from_version, kept):
            self._send_again(needed[recopy.key], recopy)

    def _send_again(self, segment: Kept, recopy: Recopy) -> None:
        message = Segment(
            header=segment.header,
            keep_from=self._index.from_version,
            holders=recopy.holders,
            is_again=True,
        )
        for holder in recopy.to:
            if (segment, holder) in self._on_their_way:
                raise Violation(f"I7: {self.address} sends {recopy.key} to {holder.pod} twice")

            def answered(why: str, holder: Holder = holder) -> None:
                self._num_open -= 1
                self._on_their_way.discard((segment, holder))
                if not why:
                    segment.holders = self._recopies.holders_after(segment.holders, holder)
                self._recopies.answered(recopy, holder, is_kept=not why)
                self._recopy()

            self._num_open += 1
            self._on_their_way.add((segment, holder))
            self._world.checks.kept.resends.sent(self.address, recopy.key, holder.address)
            frame = message, self._bytes[recopy.key]
            self._line(holder.address, is_again=True).send(frame, answered)

    def _check_recopied(self, plan: Plan, keys: frozenset[SegmentKey], times: int) -> None:
        """Check that nothing is left with too few holders, once all of them have answered.

        Not all stores hear at once what is needed no more: so it is looked twice.
        """
        addresses, network = store_addresses(plan), self._world.network
        cut = any(network.is_cut(a, b) for a in addresses for b in addresses if a != b)
        is_named = addresses.get(self._pod) == self.address
        if self._world.newest_plan is not plan or cut or not is_named:
            return
        kept = self._world.checks.kept
        complete_from = kept.complete_from(plan.lineage)
        needed = keys.intersection(
            s.header.key
            for s in self._index.needed(plan.lineage)
            # Where all have loaded a checkpoint, its version looks like a complete window's. What a
            # window before the complete one has left at its versions was given up.
            if s.header.key.kind is SegmentKind.GRADIENT or s.header.window == complete_from
        )
        lacking = kept.lacking(needed, [*addresses.values()], self._config.peers)
        # What this store keeps another one may have to send, once it has heard of the plan.
        stores = [kept.stores[address] for address in addresses.values()]
        is_open = any(store.is_sending or not store.has_adopted(plan) for store in stores)
        # One whose trainer has still to settle hears then that the newest window is complete.
        members = {addresses[m.slot.pod] for m in plan.members if m.slot.pod in addresses}
        is_open |= any(
            kept.stores[at].keeps(key) and kept.stores[at].from_version < key.version
            for at in members
            for key in lacking
            if key.kind is SegmentKind.STATE
        )
        if lacking and not is_open and times:
            raise Violation(f"I7: {self.address} leaves {lacking[0]} with too few holders")
        if lacking:
            times = 0 if is_open else times + 1
            self._process.after(RECOPIED_S, self._check_recopied, plan, frozenset(lacking), times)

    @property
    def is_open(self) -> bool:
        """Whether it lives, and never lacked room for what came."""
        return self._process.alive and not self.has_been_full

    @property
    def is_sending(self) -> bool:
        """Whether something that it sends again is not answered, or finds nobody to take it."""
        return self._num_open > 0 or self._recopies.is_waiting

    def has_adopted(self, plan: Plan) -> bool:
        """Whether a plan is the newest that it has sent again for."""
        return self._plan is not None and self._plan.quorum == plan.quorum

    @property
    def from_version(self) -> int:
        """The version from which on it keeps all."""
        return self._index.from_version

    def lists(self, key: SegmentKey, address: str) -> bool:
        """Whether a segment is here, and another store is on the list of its holders."""
        segment = self._index.find(key)
        return segment is not None and address in {h.address for h in segment.holders}


class _HolderLine:
    """A connection to a holder. It answers in the order of what it is sent."""

    def __init__(self, world: Surroundings, process: Process, address: str) -> None:
        self._process = process
        self._end: End | None = None
        self._queue: list[Frame] = []
        self._unanswered: deque[Callable[[str], None]] = deque()
        self.ended = self.has_passed_on = False
        """Whether it is over, and whether commits were sent."""
        world.network.connect(process, address, self._opened, self._over, ANSWER_S)

    def send(self, frame: Frame, answered: Callable[[str], None]) -> None:
        """Send a segment; ``answered`` is called once with why it is not kept."""
        self._unanswered.append(answered)
        self.tell(frame)
        self._process.after(ANSWER_S, self._late, answered)

    def tell(self, frame: Frame) -> None:
        """Send what has no answer."""
        if self._end is None:
            self._queue.append(frame)
        else:
            self._end.send(frame)

    def _opened(self, end: End) -> None:
        if self.ended:
            end.close()
            return
        self._end = end
        end.on_message, end.on_end = self._came, self._over
        for frame in self._queue:
            end.send(frame)

    def _came(self, frame: Frame) -> None:
        message, _ = frame
        self._unanswered.popleft()(message.why if isinstance(message, Refused) else "")

    def _late(self, answered: Callable[[str], None]) -> None:
        if answered in self._unanswered:
            self._over("does not answer")

    def _over(self, why: str) -> None:
        if self.ended:
            return
        self.ended = True
        if self._end is not None:
            self._end.close()
        for answered in [*self._unanswered]:
            answered(why)
        self._unanswered.clear()
