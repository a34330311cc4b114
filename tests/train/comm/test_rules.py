"""NCCL's rules for groups, on the strict backend; and that breaking one of them is found.

Each rule is a scenario that fails where the rule is broken. Each mutant removes one rule from the
product, as in :mod:`tests.core.sim.mutants`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.strict.group import Strict, StrictGroup
from tests.train.crew import ADDRESS

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm import group as comm_group
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.group import BACKENDS, Group
from mainstay_train.comm.meeting import RANK
from mainstay_train.comm.nccl import Nccl
from mainstay_train.comm.operations import Message

SIZE = 4
LONG_S = 60.0
"""More than any wait that is to be ended."""
SHUT = "a peer is lost"
COMPUTED = 1.0
"""What lay in memory before a receive."""


class RuleBrokenError(AssertionError):
    """What the strict backend has found."""


class Room:
    """A meeting of the threads of this process.

    Args:
        absent: ranks that have told how they are reached, and never call.
    """

    def __init__(self, absent: Sequence[int] = ()) -> None:
        self._changed = threading.Condition()
        self._bodies: dict[str, list[bytes]] = {}
        self._absent = [RANK.pack(rank) + b"127.0.0.1:1" for rank in absent]

    def meet(
        self, key: str, body: bytes, size: int, ended: Callable[[], str | None]
    ) -> list[bytes]:
        """Give a rank's bytes and return those of all."""
        with self._changed:
            bodies = self._bodies.setdefault(key, [*self._absent])
            bodies.append(body)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(bodies) == size or ended())
            why = ended()
            if why:
                raise GroupEnded(why)
            return bodies

    def wake(self) -> None:
        """Have whoever meets here ask ``ended`` again."""
        with self._changed:
            self._changed.notify_all()


def make(room: Room, rank: int, connect_s: float = LONG_S, size: int = 2) -> Group:
    """One of two ranks, or the only one, not connected yet."""
    BACKENDS.setdefault("strict", Strict())
    return Group(
        name="rules",
        meeting=room,
        rank=rank,
        size=size,
        address=ADDRESS,
        backend="strict",
        timeout_s=LONG_S,
        connect_s=connect_s,
    )


@contextlib.contextmanager
def both() -> Iterator[tuple[Group, Group]]:
    """Two ranks that have met; the second one never takes part in anything."""
    room = Room()
    groups = make(room, 0), make(room, 1)
    peer = threading.Thread(target=groups[1].connect)
    peer.start()
    groups[0].connect()
    peer.join()
    try:
        yield groups
    finally:
        for group in groups:
            group.shutdown("the test is over")


@contextlib.contextmanager
def pair() -> Iterator[Group]:
    """Rank 0 of two that have met."""
    with both() as (group, _):
        yield group


def receive(group: Group) -> torch.Tensor:
    """Return what the peer sends."""
    tensor = torch.full((SIZE,), COMPUTED)
    group.finish(group.receive(Message(tensor, 1, 0)))
    return tensor


def exchange(group: Group) -> torch.Tensor:
    """Return what an all-to-all brings."""
    tensor = torch.full((SIZE,), COMPUTED)
    sizes = [SIZE // 2] * 2
    group.finish_exchange(group.start_exchange(tensor, torch.zeros(SIZE), sizes, sizes))
    return tensor


def must_end(result: Callable[[], object]) -> None:
    """Check that an operation of an ended group has no result."""
    try:
        got = result()
    except GroupEnded:
        return
    raise RuleBrokenError(f"a result of an operation that was aborted: {got}")


def ended_while_it_waits(operation: Callable[[Group], torch.Tensor]) -> None:
    """Another thread ends the group of an operation; the backend says nothing of that."""
    with pair() as group:
        wait = group._backend.wait

        def told(work: Any, timeout: Any) -> None:
            teller.start()  # there is an operation under way
            wait(work, timeout)

        group._backend = Strict()
        group._backend.wait = told  # type: ignore[method-assign]
        teller = threading.Thread(target=group.shutdown, args=(SHUT,))
        must_end(lambda: operation(group))
        teller.join()


def ended_first(operation: Callable[[Group], torch.Tensor]) -> None:
    """Whoever aborts is held up until the operation has come back with its garbage."""
    with pair() as group:
        backend, back = Strict(), threading.Event()
        abort, wait = backend.abort, backend.wait

        def held_up(process_group: Any) -> None:
            abort(process_group)
            back.wait()

        def told(work: Any, timeout: Any) -> None:
            teller.start()
            wait(work, timeout)

        backend.abort, backend.wait = held_up, told  # type: ignore[method-assign]
        group._backend = backend
        teller = threading.Thread(target=group.shutdown, args=(SHUT,))
        try:
            must_end(lambda: operation(group))
        finally:
            back.set()
            teller.join()


class Reached:
    """A moment of a device that is over once the group's operations have been aborted."""

    def __init__(self, group: Group) -> None:
        self._group, self._over = group, False

    def is_over(self) -> bool:
        return self._over

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s
        self._group.shutdown(SHUT)
        self._over = True


def a_device_reaches_a_moment_because_its_group_was_aborted() -> None:
    with pair() as group:
        must_end(lambda: group.wait_for(Reached(group)))


class Aborted:
    """A group of a chain whose abort lets the device reach a moment."""

    def __init__(self) -> None:
        self.over = False

    def is_over(self) -> bool:
        return self.over

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s

    def check(self) -> None:
        pass

    @property
    def problem(self) -> str:
        return ""

    def shutdown(self, why: str) -> None:
        del why
        self.over = True


def a_chain_is_ended_before_its_device_is_done() -> None:
    played = Aborted()
    chain = ChainGroups("chain", played, None)  # type: ignore[arg-type]
    mark = chain.mark(played)
    chain.shutdown(SHUT)
    if mark.counts is not False:
        raise RuleBrokenError("what was aborted on the device counts")


def a_peer_never_calls() -> None:
    """Its address is known; it may have been told to leave just then."""
    group = make(Room(absent=[1]), 0, connect_s=0.2)
    try:
        group.connect()
    except GroupEnded:
        return
    finally:
        connected = group.connected
        group.shutdown("the test is over")
    raise RuleBrokenError(f"without the peer; connected: {connected}")


class InTurn(Strict):
    """NCCL, where the first of two groups is aborted on the device once the second one is."""

    def __init__(self, caller: int) -> None:
        super().__init__()
        self._caller, self._second, self._is_first = caller, threading.Event(), True

    def abort(self, group: Any) -> None:
        is_first, self._is_first = self._is_first, False
        if not is_first:
            self._second.set()
        super().abort(group)

    def _abort(self, group: Any) -> None:
        if not self._second.is_set() and threading.get_ident() == self._caller:
            raise RuleBrokenError("the end of a group waits for that of another, which comes next")
        self._second.wait()
        super()._abort(group)


def groups_of_one_device_end() -> None:
    groups = [make(Room(), 0, size=1) for _ in range(2)]
    backend = InTurn(threading.get_ident())
    for group in groups:
        group._backend = backend
        group.connect()
    ChainGroups("chain", *groups).shutdown(SHUT)


class Late(Strict):
    """NCCL on a device that comes to what was aborted when it is waited for, or later."""

    def __init__(self) -> None:
        super().__init__()
        self.comes_to_it = threading.Event()

    def _abort(self, group: Any) -> None:
        self.comes_to_it.wait()
        super()._abort(group)

    def finish_aborts(self, timeout: timedelta) -> bool:
        self.comes_to_it.set()
        return super().finish_aborts(timeout)


def memory_of_an_aborted_receive_is_used_again() -> None:
    late = Late()
    with pair() as group:
        group._backend = late
        tensor = torch.empty(SIZE)
        pending = group.receive(Message(tensor, 1, 0))
        group.shutdown(SHUT)
        following = make(Room(), 0, size=1)
        following._backend = late
        following.connect()
        tensor.fill_(COMPUTED)
        late.comes_to_it.set()
        pending.work.wait()
        following.shutdown("the test is over")
    if not bool((tensor == COMPUTED).all()):
        raise RuleBrokenError("what was aborted has written to memory that is in use")


class AfterALoss:
    """A moment behind a receive whose peer is gone; the device never gets there."""

    def __init__(self, group: Group) -> None:
        self._group, self._has_waited = group, False

    def is_over(self) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s
        if self._has_waited:
            raise RuleBrokenError("nobody asks for errors that no operation tells")
        self._group.process_group.transport.has_problem.wait()
        self._has_waited = True
        raise TimeoutError("it is not there yet")


def a_connection_is_lost_behind_the_host() -> None:
    with both() as (group, peer):
        group.receive(Message(torch.empty(SIZE), 1, 0))
        peer.shutdown(SHUT)
        must_end(lambda: group.wait_for(AfterALoss(group)))


class Settable:
    """A moment of a device that is over when somebody says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def is_over(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.over.wait(timeout_s):
            raise TimeoutError("it is not there yet")


class SelfAborting:
    """torch's operation of a communicator that has met an error, once it was asked for its end."""

    def __init__(self, moment: Settable) -> None:
        self._moment, self._error = moment, ""

    def is_completed(self) -> bool:
        self._error = "a remote process has exited"
        return True

    def synchronize(self) -> None:
        """Nothing: the device waits, not the host."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Abort the communicator, which lets the device get to the moment, and raise."""
        del timeout
        if self._error:
            self._moment.over.set()
            raise torch.distributed.DistBackendError(self._error)
        return True


def torch_meets_an_error_before_the_chain_looks() -> None:
    with pair() as group:
        chain, moment = ChainGroups("chain", group, None), Settable()
        mark = chain.mark(moment)
        begun = group.receive(Message(torch.empty(SIZE), 1, 0))
        pending = begun._replace(work=SelfAborting(moment))
        try:
            if pending.is_over:
                group.finish(pending)
        except GroupEnded as end:
            chain.shutdown(end.why)
        chain.shutdown(SHUT)
    if mark.counts is not False:
        raise RuleBrokenError("what torch has aborted on the device counts")


def a_connection_is_lost_before_the_chain_looks() -> None:
    """The device gets to a moment behind a receive, whatever that has got."""
    with both() as (group, peer):
        chain, moment = ChainGroups("chain", group, None), Settable()
        mark = chain.mark(moment)
        group.receive(Message(torch.empty(SIZE), 1, 0))
        peer.shutdown(SHUT)
        group.process_group.transport.has_problem.wait()
        moment.over.set()
        chain.judge()
        counts = mark.counts
    if counts is not False:
        raise RuleBrokenError("what came over a connection that has failed counts")


SCENARIOS: dict[str, Callable[[], None]] = {
    "receive-ended": lambda: ended_while_it_waits(receive),
    "exchange-ended": lambda: ended_while_it_waits(exchange),
    "receive-aborted-first": lambda: ended_first(receive),
    "exchange-aborted-first": lambda: ended_first(exchange),
    "device-ended": a_device_reaches_a_moment_because_its_group_was_aborted,
    "chain-ended": a_chain_is_ended_before_its_device_is_done,
    "peer-absent": a_peer_never_calls,
    "connection-lost": a_connection_is_lost_behind_the_host,
    "connection-lost-first": a_connection_is_lost_before_the_chain_looks,
    "torch-aborts": torch_meets_an_error_before_the_chain_looks,
    "device-in-turn": groups_of_one_device_end,
    "device-late": memory_of_an_aborted_receive_is_used_again,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rules_hold(name: str) -> None:
    SCENARIOS[name]()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule removed.

    ``patches`` are (owner, attribute, replacement); ``found_in`` are the scenarios that fail.
    """

    why: str
    patches: Sequence[tuple[Any, str, Callable[..., Any]]]
    found_in: Sequence[str]


def _run_without_a_look_after(own: Any, start: Any, *, looks: bool = False) -> None:
    del looks
    own.check()
    own._backend.wait(start(), own._timeout)


def _wait_without_a_look_after(own: Any, moment: Any) -> None:
    own.check()
    moment.wait(own._timeout.total_seconds())


def _abort_and_then_note_it(own: Any, why: str) -> None:
    with own._lock:
        own._shut_all()
        own._ended = own._ended or why
    own._meeting.wake()


def _end_groups_and_then_look(own: Any, why: str) -> None:
    for group in own.groups:
        group.shutdown(why)
    with own._lock:
        own._look()
        own._ended = own._ended or why


def _look_at_moments_alone(own: Any) -> str:
    for mark in own._marks:
        mark.counts = mark.moment.is_over() or None
    own._marks = [mark for mark in own._marks if mark.counts is None]
    return ""


def _connect_nothing(own: Any, group: Any, connect: Any) -> None:
    del own
    group._lazy_s = connect.total_seconds()


_BEGIN = vars(StrictGroup)["_begin"]


def _connect_and_begin(own: Any, *args: Any, **kwargs: Any) -> Any:
    lazy_s = vars(own).pop("_lazy_s", None)
    if lazy_s is not None:
        own.connect(lazy_s)
    return _BEGIN(own, *args, **kwargs)


MUTANTS = {
    "no-look-after-the-wait": Mutant(
        "an operation that came back counts, whatever became of its group meanwhile",
        [(Group, "_run", _run_without_a_look_after)],
        ("receive-ended", "exchange-ended", "receive-aborted-first", "exchange-aborted-first"),
    ),
    "no-look-after-the-device": Mutant(
        "what the device has done counts, whatever became of the group meanwhile",
        [(Group, "wait_for", _wait_without_a_look_after)],
        ("device-ended",),
    ),
    "flag-after-the-abort": Mutant(
        "a group ends what waits and then notes that it has ended",
        [(Group, "shutdown", _abort_and_then_note_it)],
        ("receive-aborted-first", "exchange-aborted-first"),
    ),
    "chain-flag-after-the-abort": Mutant(
        "a chain ends its groups and then looks what counts",
        [(ChainGroups, "shutdown", _end_groups_and_then_look)],
        ("chain-ended",),
    ),
    "lazy-init": Mutant(
        "a communicator is initialised by its first operation",
        [(Strict, "connect", _connect_nothing), (StrictGroup, "_begin", _connect_and_begin)],
        ("peer-absent",),
    ),
    "no-look-at-connections": Mutant(
        "an error counts when an operation tells it, and NCCL's tell none",
        [(Strict, "problem", lambda *_: "")],
        ("connection-lost", "connection-lost-first"),
    ),
    "no-look-of-the-chain-at-connections": Mutant(
        "what the device has done counts, whatever became of the connections meanwhile",
        [(ChainGroups, "_look", _look_at_moments_alone)],
        ("connection-lost-first",),
    ),
    "waits-as-torch-does": Mutant(
        "whoever waits for an operation lets torch end the communicator of one that has failed",
        [(Nccl, "wait", lambda _, work, __: work.wait())],
        ("torch-aborts",),
    ),
    "abort-at-once": Mutant(
        "whoever ends a group waits until the device has ended its operations",
        [(Nccl, "abort", lambda own, group: own._abort(group))],
        ("device-in-turn",),
    ),
    "no-wait-for-aborts": Mutant(
        "a group is connected while the device still has operations of another one",
        [(comm_group, "wait_for_aborts", lambda *_: None)],
        ("device-late",),
    ),
}


@pytest.mark.parametrize(
    ("mutant", "scenario"), [(m, s) for m in MUTANTS for s in MUTANTS[m].found_in]
)
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: str, scenario: str
) -> None:
    for owner, attribute, replacement in MUTANTS[mutant].patches:
        monkeypatch.setattr(owner, attribute, replacement)
    with pytest.raises(RuleBrokenError):
        SCENARIOS[scenario]()
