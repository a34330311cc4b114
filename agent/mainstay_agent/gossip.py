"""Plans from supervisor to supervisor: a plan that one has reaches all, whatever the api does.

The api's stream is the fast way. But a plan may be durable and known to one
supervisor only when the api dies, and then the recovery must complete without
it (protocol section 9). So a supervisor offers its newest plan to a few member
pods at ring distances 1, 2, 4, ... and takes a newer one that it is offered in
return: after log2(pods) rounds all have it. An offer is one small frame; the
plan itself travels only to whoever lacks it. While the api's stream stands, the
offer waits a little, as it is hardly ever needed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from mainstay_agent.network_cut import NetworkCut
from mainstay_core.base import codec, proofs
from mainstay_core.base.errors import ProtocolError, RemoteProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.wire.plan import Plan

logger = logging.getLogger(__name__)

OFFER_AFTER_S = 0.25
"""While the api's stream stands: it brings a plan to everybody within milliseconds."""
OFFER_TIMEOUT_S = 2.0
"""Of one conversation; a pod that does not answer is offered the plan by others as well."""
READ_BYTES = 1 << 16


class PlanPassing:
    """One supervisor's part in handing plans round.

    Args:
        pod: whose supervisor this is.
        network: of the pod; while it is cut nobody is talked to.
        on_plan: called with every plan that another supervisor gives.
        spawn: runs a coroutine in the background.
        api_stands: whether the api's stream is open.
        secret: the job's; what is not proved to come from one who knows it is refused.
    """

    def __init__(
        self,
        pod: PodUid,
        network: NetworkCut,
        on_plan: Callable[[Plan], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        api_stands: Callable[[], bool],
        secret: str = "",
    ) -> None:
        self._secret = secret
        self._pod = pod
        self._network = network
        self._on_plan = on_plan
        self._spawn = spawn
        self._api_stands = api_stands
        self._plan: Plan | None = None

    def hold(self, plan: Plan) -> None:
        """A newer plan is held from now on: see that others get it."""
        self._plan = plan
        self._spawn(self._pass_on(plan))

    def offer(self) -> None:
        """Compare with the neighbours: for a supervisor that the api does not answer."""
        if self._plan is not None and not self._network.is_cut:
            for address in self._plan.neighbours(self._pod):
                self._spawn(self._talk(address, self._plan))

    def answer(self, frame: Frame) -> dict[str, Any]:
        """Return the answer to another supervisor's ``holds`` or ``plan``.

        Raises:
            RemoteProtocolError: the frame cannot be read, or is no proof of the job's secret.
        """
        asked = (frame.kind, *_told(frame.head))
        if not proofs.is_proved(self._secret, frame.head.get("proof", ""), *asked):
            raise RemoteProtocolError("no proof of the job's secret")
        if frame.kind == "plan":
            self._on_plan(codec.decode(Plan, frame.head["plan"]))
            return {"kind": "thanks"}
        theirs = codec.decode(QuorumId, frame.head["quorum"])
        if self._plan is None or theirs.id > self._plan.quorum.id:
            return {"kind": "want"}
        if theirs.id < self._plan.quorum.id:
            return {"kind": "plan", "plan": codec.encode(self._plan)}
        return {"kind": "thanks"}

    async def _pass_on(self, plan: Plan) -> None:
        if self._api_stands():
            await asyncio.sleep(OFFER_AFTER_S)
        if plan is self._plan:
            self.offer()

    async def _talk(self, address: str, plan: Plan) -> None:
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                await self._exchange(address, plan)
        except (OSError, EOFError, ProtocolError, KeyError, ValueError) as error:
            logger.debug("%s was not offered %s: %r", address, plan.quorum, error)

    async def _exchange(self, address: str, plan: Plan) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self._pack("holds", quorum=codec.encode(plan.quorum)))
            answer = await _read_frame(reader)
            if answer.kind == "want":
                writer.write(self._pack("plan", plan=codec.encode(plan)))
                await _read_frame(reader)
            elif answer.kind == "plan":
                self._on_plan(codec.decode(Plan, answer.head["plan"]))
        finally:
            writer.close()

    def _pack(self, kind: str, **told: Any) -> bytes:
        proof = proofs.prove(self._secret, kind, *_told(told))
        return pack({"kind": kind, **told, "proof": proof})


def _told(head: dict[str, Any]) -> list[str]:
    """What a frame tells, as one text for equal content."""
    told = {key: head[key] for key in ("quorum", "plan") if key in head}
    return [json.dumps(told, sort_keys=True)]


async def _read_frame(reader: asyncio.StreamReader) -> Frame:
    parser = FrameParser()
    while data := await reader.read(READ_BYTES):
        for frame in parser.feed(data):
            return frame
    raise EOFError("the connection ended before the answer")
