"""Healing: a living cell's state, copied while the others compute.

As ``mainstay_train.state.heal`` and ``mainstay_train.state.serving``: a source answers once its
state is complete at the quorum's version, and refuses once it has moved past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainstay_core.rank.serving import HealFailed, Wanted, copy_problem, may_copy
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
        state: the state as it is now.
        copy_s: draws how long a copy takes.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        address: str,
        changed: Signal,
        adopted: Callable[[], Plan | None],
        state: Callable[[], str],
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
        announced = self._state()
        yield self._copy_s()
        # What changed meanwhile is in the copy, but not in the digest that was announced.
        sent = self._state()
        if self.spoils and end.peer.process.node != self._process.node:
            sent = terms.term("spoilt", sent)
        end.send(("state", announced, sent))
        end.close()


class HealClient:
    """Copies a source's state; :meth:`shutdown` ends it from outside."""

    def __init__(self, process: Process, network: Network, changed: Signal) -> None:
        self._process, self._network, self._changed = process, network, changed
        self._end: End | None = None
        self._answer: tuple[str, str, str] | None = None
        self._error = ""
        self.ended = ""

    def shutdown(self, why: str) -> None:
        """End a running copy."""
        self.ended = why
        if self._end is not None:
            self._end.close()
        self._changed.fire()

    def copy(self, address: str, wanted: Wanted, expected: str) -> Steps[str]:
        """Copy and verify; returns the state.

        Raises:
            HealFailed: the source is gone, refuses, or sent other bits.
        """
        self._end, self._answer, self._error = None, None, ""
        self._network.connect(self._process, address, self._opened, self._failed)
        while not self._is_open() and not self._error:
            yield self._changed  # a plain connect(): nothing ends it from outside
        self._ask(wanted)
        while not self._has_answer() and not self._error and not self.ended:
            yield self._changed
        return self._verify(address, expected)

    def _is_open(self) -> bool:
        return self._end is not None

    def _has_answer(self) -> bool:
        return self._answer is not None

    def _ask(self, wanted: Wanted) -> None:
        if self._end is not None and self.ended:
            self._end.close()
        elif self._end is not None:
            self._end.send(wanted)

    def _verify(self, address: str, expected: str) -> str:
        if self._answer is None:
            raise HealFailed(self.ended or f"copy from {address}: {self._error}")
        kind, announced, found = self._answer
        if kind != "state":
            raise HealFailed(announced)
        problem = copy_problem(announced, found, found, expected)
        if problem:
            raise HealFailed(f"the copy from {address} {problem}")
        return found

    def _opened(self, end: End) -> None:
        end.on_message, end.on_end = self._on_message, self._failed
        self._end = end
        self._changed.fire()

    def _on_message(self, message: Any) -> None:
        self._answer = message
        self._changed.fire()

    def _failed(self, why: str) -> None:
        self._error = why
        self._changed.fire()
