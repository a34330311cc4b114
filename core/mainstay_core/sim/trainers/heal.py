"""Healing: a living cell's state, copied while the others compute.

As ``mainstay_train.state.heal`` and ``mainstay_train.state.serving``: a source answers once its
state is complete at the quorum's version, and refuses once it has moved past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mainstay_core.rank.serving import HealFailed, Source, Wanted, copy_problem, may_copy
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.network import End, Listener, Network
from mainstay_core.wire.plan import Plan


class HealServer:
    """Serves a trainer's state to joiners of its quorum.

    Args:
        process: the trainer.
        network: of the job.
        address: where joiners ask.
        changed: fired when what is served, or what is adopted, changes.
        adopted: returns the plan that the trainer has adopted.
        state: returns the state as it is now, or what is guarded of an end.
        copy_s: draws how long a copy takes.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        address: str,
        changed: Signal,
        adopted: Callable[[], Plan | None],
        state: Callable[[int | None], str],
        copy_s: Callable[[], float],
    ) -> None:
        self._process, self._changed = process, changed
        self._adopted, self._state, self._copy_s = adopted, state, copy_s
        self.serves: Wanted | None = None
        self.spoils = False
        """Whether what it sends to other nodes arrives damaged, for good."""
        network.listen(address, Listener(process, accept=self._accept))

    def _accept(self, end: End) -> None:
        def asked(wanted: Wanted) -> None:
            self._process.spawn(self._serve(end, wanted))

        end.on_message = asked

    def _serve(self, end: End, wanted: Wanted) -> Steps[None]:
        while (serves := may_copy(wanted, self.serves, self._adopted())) is None:
            yield self._changed
        if not serves:
            end.send(("refused", f"{wanted.quorum} is over here", ""))
            end.close()
            return
        before = self._state(wanted.guarded)
        yield self._copy_s()
        if not may_copy(wanted, self.serves, self._adopted()):
            end.send(("refused", f"{wanted.quorum} is over here", ""))
            end.close()
            return
        # Chunks that were sent before a change, and chunks that were sent after it.
        named = sent = (
            before if before == self._state(wanted.guarded) else terms.term("torn", before)
        )
        if self.spoils and end.peer.process.node != self._process.node:
            sent = terms.term("spoilt", sent)
        end.send(("state", named, sent))
        end.close()


class HealClient:
    """Copies the state of sources; :meth:`shutdown` ends it from outside."""

    def __init__(self, process: Process, network: Network, changed: Signal) -> None:
        self._process, self._network, self._changed = process, network, changed
        self._ends: dict[str, End] = {}
        self._good: list[str] = []
        self._lost: dict[str, str] = {}
        self.ended = ""

    def shutdown(self, why: str) -> None:
        """End a running copy."""
        self.ended = why
        for end in self._ends.values():
            end.close()
        self._changed.fire()

    def copy(self, sources: Sequence[Source], wanted: Wanted, expected: str) -> Steps[str]:
        """Copy and verify; returns the state.

        Whatever sources have given by the time that one has given enough is in the copy.

        Raises:
            HealFailed: every source is gone, refuses, or sent other bits; or the copy is another.
        """
        self._ends, self._good, self._lost = {}, [], {}
        for source in sources:
            self._ask(source.address, wanted)
        while not self.ended and not self._good and len(self._lost) < len(sources):
            yield self._changed
        for end in self._ends.values():
            end.close()
        if not self._good:
            raise HealFailed(self.ended or [*self._lost.values()][-1])
        found = self._good[0]
        if len(set(self._good)) > 1:
            found = terms.term("mixed", *self._good)
        problem = copy_problem(found, expected)
        if problem:
            raise HealFailed(f"the copy {problem}")
        return found

    def _ask(self, address: str, wanted: Wanted) -> None:
        # What comes after the copy is over belongs to no later one.
        good, lost = self._good, self._lost

        def opened(end: End) -> None:
            if self._lost is not lost or self.ended:
                end.close()
                return
            self._ends[address] = end
            end.on_message, end.on_end = came, failed
            end.send(wanted)

        def came(message: tuple[str, str, str]) -> None:
            kind, named, sent = message
            if kind == "state" and named == sent:
                good.append(sent)
            else:
                failed(f"other bits than {named}" if kind == "state" else named)
            self._changed.fire()

        def failed(why: str) -> None:
            lost.setdefault(address, f"copy from {address}: {why}")
            self._changed.fire()

        self._network.connect(self._process, address, opened, failed)
