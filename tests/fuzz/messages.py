"""Fuzzes messages: the codec, and everything that is decoded by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.core.wire.test_bounds import messages
from tests.core.wire.test_messages import EXAMPLES
from tests.fuzz.specs import CONFIG, MANIFEST
from tests.fuzz.texts import NamedTexts, check_error, split

from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.wire import facts, recoveries, routes
from mainstay_core.wire.api import HeartbeatReply, HeldJob, Registration

QUORUM, PLAN = EXAMPLES["heartbeat"].quorum, EXAMPLES["plan"]
ANSWERS = {
    "Registration": Registration(config=CONFIG, plan=PLAN, cursor="1-0", manifest=MANIFEST),
    "HeartbeatReply": HeartbeatReply(quorum=QUORUM),
    "HeldJob": HeldJob(
        pod=EXAMPLES["heartbeat"].pod,
        config=CONFIG,
        manifest=MANIFEST,
        plan=PLAN,
        step=3,
        fingerprint={"torch": "2"},
        fired=("f1",),
    ),
}
REFUSAL = {"error": "stale", "detail": "q1 is over", "what_to_do": "", "plan": codec.encode(PLAN)}

Reader = Callable[[bytes], Any]


def _reader(read: Callable[[Any], Any]) -> Reader:
    return lambda text: read(codec.parse_json(text, "text"))


READERS: dict[str, Reader] = {
    **{kind.__name__: functools.partial(codec.loads, kind) for kind in messages()},
    "Fact": _reader(facts.read_fact),
    "RankFact": _reader(facts.read_rank_fact),
    "RecoveryList": _reader(routes.read_recoveries),
    "an answer": routes.read_object,
    "a refusal": functools.partial(routes.read_failure, 409),
    "an explanation": routes.explain,
}
AGAIN = {"Fact": facts.read_fact, "RankFact": facts.read_rank_fact}
"""Readers of several types, which read again what a value of theirs is written as."""
NOT_WRITTEN = ("RecoveryList", "an answer", "a refusal", "an explanation")


class Messages:
    """Messages of all types, each read by its own reader."""

    name = "messages"

    def __init__(self) -> None:
        valid: dict[str, list[Any]] = {}
        for example in (*EXAMPLES.values(), *ANSWERS.values()):
            kind, data = type(example).__name__, codec.encode(example)
            told = kind
            if isinstance(example, facts.Fact):
                told = "RankFact" if isinstance(example, facts.RankFact) else "Fact"
            valid.setdefault(told, []).append(data)
            for part in vars_of(example):
                valid.setdefault(type(part).__name__, []).append(codec.encode(part))
        recovery = recoveries.show_recovery(EXAMPLES["recovery"])
        valid["RecoveryList"] = [[recovery, {**recovery, "format": 1}]]
        valid |= {"an answer": [REFUSAL], "a refusal": [REFUSAL], "an explanation": [REFUSAL]}
        self._texts = NamedTexts(valid)
        self.examples, self.make = self._texts.examples, self._texts.make
        self.smaller = self._texts.smaller

    def judge(self, data: bytes) -> bool:
        name, text = split(data)
        read = READERS.get(name)
        if read is None:
            return False
        try:
            value = read(text)
        except RemoteProtocolError as error:
            check_error(error)
            return False
        if name not in NOT_WRITTEN:
            written = codec.dumps(value)
            again = AGAIN.get(name, functools.partial(codec.decode, type(value)))
            same = codec.dumps(again(codec.parse_json(written.encode(), "text")))
            assert same == written, "what is written is read as something else"
        return True


def vars_of(example: Any) -> list[Any]:
    """Return the messages inside of a message, at the first level."""
    values = [getattr(example, name) for name in example.__dataclass_fields__]
    return [v for v in values if type(v).__name__ in READERS]


TARGET = Messages
