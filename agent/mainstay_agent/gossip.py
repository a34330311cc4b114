"""Conversations between supervisors about plans, as frames over TCP.

What is said, and what follows, is decided in :mod:`mainstay_core.supervisor.gossip`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.errors import ProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.proofs import ANSWER_BYTES, NONCE_BYTES, CallerProof, Purpose
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
        secret: the job's, which this supervisor and the one that it calls prove to each other.
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
            RemoteProtocolError: the frame cannot be read.
        """
        message: Holds | Given
        if frame.kind == "plan":
            message = codec.decode(Given, frame.head)
            self._on_plan(message.plan)
        else:
            message = codec.decode(Holds, frame.head)
        return _head(answer(self._held(), message))

    async def offer(self, address: str, plan: Plan) -> None:
        """Offer a plan to the supervisor at ``host:port``, and learn a newer one of it."""
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                await self._exchange(address, plan)
        except (OSError, EOFError, ProtocolError, ValueError) as error:
            logger.debug("%s was not offered %s: %r", address, plan.quorum, error)

    async def _exchange(self, address: str, plan: Plan) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            mine = CallerProof(
                self._secret, secrets.token_bytes(NONCE_BYTES), address, Purpose.GOSSIP
            )
            writer.write(mine.hello)
            writer.write(mine.answered(await reader.readexactly(ANSWER_BYTES)))
            writer.write(pack(_head(Holds(plan.quorum))))
            after = follow_up(plan, _answered(await _read_frame(reader)))
            if after.give is not None:
                writer.write(pack(_head(after.give)))
                await _read_frame(reader)
            elif after.learn is not None:
                self._on_plan(after.learn)
        finally:
            writer.close()


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
        return codec.decode(Given, frame.head)
    return Wanted() if frame.kind == "want" else Thanks()


async def _read_frame(reader: asyncio.StreamReader) -> Frame:
    parser = FrameParser()
    while data := await reader.read(READ_BYTES):
        for frame in parser.feed(data):
            return frame
    raise EOFError("the connection ended before the answer")
