"""Says which formats of a message are understood, and translates format 1.

A format is raised when a message changes so that an older reader would misread it. Every reader
accepts fields that are merely added. A message that names no format has format 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mainstay_core.base.bounds import cut
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.words import quote

_SLOT = re.compile(r"[0-9]{1,9}")
_DIFFERING = re.compile(r"parameters of (.+?) differ from the rest of the stage")


class UnknownFormatError(RemoteProtocolError):
    """A message has a format that is newer than this program."""


def format_of(data: Any, newest: int, what: str) -> int:
    """Return the format of a message.

    Args:
        data: the message as JSON.
        newest: format that this program writes; it reads this one and all older ones.
        what: what the message is, for people.

    Raises:
        UnknownFormatError: the message is newer; the error names both formats.
        RemoteProtocolError: the format is no positive whole number.
    """
    told = data.get("format", 1) if isinstance(data, Mapping) else 1
    if isinstance(told, bool) or not isinstance(told, int) or told < 1:
        raise RemoteProtocolError(f"{what}.format: {quote(told)} is no format")
    if told > newest:
        raise UnknownFormatError(
            f"{what} comes in format {told}, known here are 1 to {newest}: "
            "bring this program to the version of the one that tells"
        )
    return told


def fact_of_format_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fact of format 1 as format 2 writes it.

    Format 1 had one shape for all kinds: a field that a kind does not have was null. Only the
    sentence of a parked fact said whose state differed. A checkpoint was complete if it had no
    sentence.
    """
    told = {name: value for name, value in data.items() if value is not None}
    evidence = told.get("evidence", "")
    return {
        **told,
        "differing": _differing_slots(evidence),
        "complete": not evidence,
        "fingerprint": told.get("fingerprint", {}),
    }


def recovery_of_format_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recovery's record of format 1 as format 2 writes it, with differing slots."""
    return {**data, "differing": _differing_slots(data.get("fault"), data.get("reason"))}


def suspicion_of_format_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a suspicion of a job's stored state with the differing slots.

    Only its sentence named them when facts had format 1.
    """
    return {**data, "differing": _differing_slots(data.get("evidence"))}


def _differing_slots(*sentences: object) -> list[dict[str, Any]]:
    """Return the slots (as JSON) whose state differed, if sentences of format 1 name them.

    The sentences are a peer's: a search takes the square of their length.
    """
    sentence = "; ".join(cut(told) for told in sentences if isinstance(told, str))
    found = _DIFFERING.search(sentence)
    if found is None:
        return []
    slots = (member.rpartition(" on ")[2] for member in found[1].split(", "))
    pairs = (slot.rpartition("/") for slot in slots)
    return [{"pod": pod, "index": int(index)} for pod, _, index in pairs if _SLOT.fullmatch(index)]
