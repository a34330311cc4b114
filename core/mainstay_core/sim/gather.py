"""The gather over the played network: messages travel as values, the rules are the product's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainstay_core.gather.client import ClientProtocol, QuorumAborted
from mainstay_core.gather.frames import Abort, Join, Leave, Newer, Post
from mainstay_core.gather.server import Actions, Send, ServerProtocol
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.invariants.checks import Checks
from mainstay_core.sim.network import End, Listener, Network
from mainstay_core.supervisor import gossip
from mainstay_core.supervisor.gossip import Given, Holds
from mainstay_core.wire.plan import Plan


class GatherServer:
    """The gather server of a pod; lives in its supervisor.

    Args:
        process: the supervisor.
        network: of the job.
        address: where members meet.
        checks: what must hold when a member is let in.
        on_plan: called with a plan that another supervisor gives.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        address: str,
        checks: Checks,
        on_plan: Callable[[Plan], None],
    ) -> None:
        self._protocol: ServerProtocol[End, Any] = ServerProtocol()
        self._checks, self._on_plan = checks, on_plan
        self._plan: Plan | None = None
        self._present: dict[End, Join] = {}
        """Members that have neither left nor ended their quorum."""
        self.quiet = Signal()
        """Fired when nobody is connected any more."""
        network.listen(address, Listener(process, accept=self._accept))

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is connected."""
        return self._protocol.is_quiet

    def hold(self, plan: Plan) -> None:
        """Give this plan to whoever joins an older quorum from now on."""
        self._plan = plan
        self._protocol.hold(plan.quorum.id, plan)

    def _accept(self, end: End) -> None:
        self._protocol.opened(end)
        end.on_message = lambda message: self._on_message(end, message)
        end.on_end = lambda _: self._on_end(end)

    def _on_message(self, end: End, message: Any) -> None:
        if isinstance(message, Holds | Given):
            if isinstance(message, Given):
                self._on_plan(message.plan)
            end.send(gossip.answer(self._plan, message))
            return
        actions = self._protocol.received(end, message)
        self._perform(actions)
        if isinstance(message, Join) and self._protocol.is_member(end):
            self._checks.ends.joined(message.quorum, message.index, message.incarnation)
            self._present[end] = message
        elif isinstance(message, Post) and end in self._present:
            refused = any(isinstance(a, Send) and isinstance(a.message, Abort) for a in actions)
            self._checks.ends.posted(self._present[end].quorum, message.key, refused=refused)
        elif isinstance(message, Abort):
            self._check_told(end)
        elif isinstance(message, Leave):
            self._present.pop(end, None)

    def _on_end(self, end: End) -> None:
        self._perform(self._protocol.ended(end))
        self._check_told(end)
        if self._protocol.is_quiet:
            self.quiet.fire()

    def _perform(self, actions: Actions[End, Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                for end in action.to:
                    end.send(action.message)
                    if isinstance(action.message, Abort) and end in self._present:
                        self._checks.ends.told(self._present[end].quorum, self._present[end].index)
            else:
                # A closed end is told nothing by the played network; a socket's end is reported.
                action.connection.close()
                self._on_end(action.connection)

    def _check_told(self, end: End) -> None:
        """A member has ended its quorum, or its connection has."""
        ended = self._present.pop(end, None)
        if ended is not None:
            others = [j.index for j in self._present.values() if j.quorum == ended.quorum]
            self._checks.ends.ended(ended.quorum, others)


class GatherClient:
    """One member of one quorum's gather.

    Args:
        process: the trainer.
        network: how it reaches the server.
        address: of the gather server.
        join: who it is.
        changed: fired with everything that may end a wait.
        on_abort: called with the reason when the quorum ends by others' doing.
        on_plan: called with a newer plan that the server's supervisor holds.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        address: str,
        join: Join,
        changed: Signal,
        on_abort: Callable[[str], None],
        on_plan: Callable[[Plan], None],
    ) -> None:
        self._protocol: ClientProtocol[Any] = ClientProtocol(join)
        self._changed, self._on_abort, self._on_plan = changed, on_abort, on_plan
        self._end: End | None = None
        network.connect(process, address, self._opened, self._failed)

    @property
    def ended(self) -> QuorumAborted | None:
        """Why the quorum has ended, if it has."""
        return self._protocol.ended

    def post(self, key: str, body: object) -> Steps[None]:
        """Give this member's body for ``key``.

        Raises:
            QuorumAborted: the quorum has ended.
        """
        while not self._protocol.may_post:
            yield self._changed
        message = self._protocol.post(key, body)
        assert self._end is not None
        self._end.send(message)

    def wait(self, key: str) -> Steps[tuple[Any, ...]]:
        """Return all bodies by index.

        Raises:
            QuorumAborted: the quorum ended before all had posted.
        """
        while not self._protocol.may_take(key):
            yield self._changed
        return self._protocol.take(key)

    def meet(
        self, key: str, body: object, size: int, ended: Callable[[], str | None]
    ) -> Steps[list[Any]]:
        """Give this member's body and return those of all ``size`` who post the key.

        Raises:
            GroupEnded: ``ended`` gave a reason, or the quorum has ended.
        """
        try:
            while not (self._protocol.may_post or ended()):
                yield self._changed
            _raise_if(ended())
            message = self._protocol.post(key, body, size)
            assert self._end is not None
            self._end.send(message)
            while not (self._protocol.may_take(key) or ended()):
                yield self._changed
            _raise_if(ended())
            return list(self._protocol.take(key))
        except QuorumAborted as end:
            raise GroupEnded(end.why) from end

    def abort(self, why: str) -> None:
        """End the quorum for everybody."""
        self._close(self._protocol.abort(why))

    def leave(self) -> None:
        """Shut this side without disturbing the others."""
        self._close(self._protocol.leave())

    def _close(self, last: Abort | Leave | None) -> None:
        if self._end is not None:
            if last is not None:
                self._end.send(last)
            self._end.close()
        self._changed.fire()

    def _opened(self, end: End) -> None:
        join = self._protocol.opened()
        if join is None:
            end.close()
            return
        self._end = end
        end.on_message, end.on_end = self._on_message, self._on_end
        end.send(join)
        self._changed.fire()

    def _failed(self, why: str) -> None:
        self._tell(self._protocol.lost(f"gather server: {why}"))

    def _on_end(self, why: str) -> None:
        del why
        self._tell(self._protocol.lost("the gather server's connection ended"))

    def _on_message(self, message: Any) -> None:
        told = self._protocol.received(message)
        if isinstance(told, Newer):
            self._on_plan(told.plan)
            return
        if self._protocol.ended is not None and self._end is not None:
            self._end.close()
        self._tell(told)

    def _tell(self, told: QuorumAborted | None) -> None:
        self._changed.fire()
        if told is not None:
            self._on_abort(told.why)


def _raise_if(ended: str | None) -> None:
    if ended:
        raise GroupEnded(ended)
