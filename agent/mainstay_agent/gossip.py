"""Conversations between supervisors about plans, as frames over TCP.

What is said, and what follows, is decided in :mod:`mainstay_core.supervisor.gossip`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from mainstay_core.base import codec, proofs
from mainstay_core.base.errors import ProtocolError, RemoteProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.ids import QuorumId
from mainstay_core.supervisor.gossip import (
    OFFER_TIMEOUT_S,
    Given,
    Holds,
    Thanks,
    Wanted,
    answer,
    follow_up,
)
from mainstay_core.wire.plan import Plan

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16


class PlanGossip:
    """One supervisor's conversations with others.

    Args:
        held: returns the newest plan that is held here.
        on_plan: called with every plan that another supervisor gives.
        secret: the job's; what is not proved to come from one who knows it is refused.
    """

    def __init__(
        self,
        held: Callable[[], Plan | None],
        on_plan: Callable[[Plan], None],
        secret: str = "",
    ) -> None:
        self._held, self._on_plan, self._secret = held, on_plan, secret

    def answer(self, frame: Frame) -> dict[str, Any]:
        """Return the answer to another supervisor's ``holds`` or ``plan``.

        Raises:
            RemoteProtocolError: the frame cannot be read, or is no proof of the job's secret.
        """
        asked = (frame.kind, *_told(frame.head))
        if not proofs.is_proved(self._secret, frame.head.get("proof", ""), *asked):
            raise RemoteProtocolError("no proof of the job's secret")
        message: Holds | Given
        if frame.kind == "plan":
            message = Given(codec.decode(Plan, frame.head["plan"]))
            self._on_plan(message.plan)
        else:
            message = Holds(codec.decode(QuorumId, frame.head["quorum"]))
        return _head(answer(self._held(), message))

    async def offer(self, address: str, plan: Plan) -> None:
        """Offer a plan to the supervisor at ``host:port``, and learn a newer one of it."""
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                await self._exchange(address, plan)
        except (OSError, EOFError, ProtocolError, KeyError, ValueError) as error:
            logger.debug("%s was not offered %s: %r", address, plan.quorum, error)

    async def _exchange(self, address: str, plan: Plan) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self.pack(Holds(plan.quorum)))
            after = follow_up(plan, _answered(await _read_frame(reader)))
            if after.give is not None:
                writer.write(self.pack(after.give))
                await _read_frame(reader)
            elif after.learn is not None:
                self._on_plan(after.learn)
        finally:
            writer.close()

    def pack(self, message: Holds | Given) -> bytes:
        """Return the frame of what is said first, with its proof."""
        head = _head(message)
        proof = proofs.prove(self._secret, head["kind"], *_told(head))
        return pack({**head, "proof": proof})


def _head(message: Holds | Given | Wanted | Thanks) -> dict[str, Any]:
    match message:
        case Holds(quorum=quorum):
            return {"kind": "holds", "quorum": codec.encode(quorum)}
        case Given(plan=plan):
            return {"kind": "plan", "plan": codec.encode(plan)}
        case Wanted():
            return {"kind": "want"}
        case Thanks():
            return {"kind": "thanks"}


def _answered(frame: Frame) -> Wanted | Given | Thanks:
    if frame.kind == "plan":
        return Given(codec.decode(Plan, frame.head["plan"]))
    return Wanted() if frame.kind == "want" else Thanks()


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
