"""Short texts for an injected fault: whom it hits, when it fires, and where it has fired."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def target_text(fault: dict[str, Any]) -> str:
    """Return whom a fault hits, in few characters."""
    if fault.get("process"):
        return str(fault["process"])
    if fault.get("spare") is not None:
        return f"spare {fault['spare']}"
    return f"r{fault['replica']}.s{fault['stage']}.i{fault.get('inner', 0)}"


def fired_text(fired: Mapping[str, Any]) -> str:
    """Return where a fault has fired: a pod, or a slot of it."""
    slot = "" if fired["slot"] is None else f"/{fired['slot']}"
    return f"{fired['pod']}{slot}"


def state_text(fault: Mapping[str, Any]) -> str:
    """Return what became of a fault."""
    if fault.get("problem"):
        return f"{fault['state']}: {fault['problem']}"
    fired = fault.get("fired")
    return f"fired on {fired_text(fired)}" if fired else str(fault["state"])


def describe_missed(faults: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each fault of a run that changed nothing, with the reason."""
    return [f"fault {f['id']} changed nothing: {f['problem']}" for f in faults if f.get("problem")]


def at_text(fault: dict[str, Any]) -> str:
    """Return when a fault fires, in few words."""
    parts = []
    if fault.get("during"):
        parts.append(f"during {fault['during']} of {fault['of']}")
    elif fault.get("beside"):
        parts.append(f"with {fault['beside']}")
    elif fault.get("after"):
        parts.append(f"after {fault['after']}, step {fault['step']} or later")
    else:
        parts.append(f"step {fault['step']}" + (" or later" if fault.get("soon") else ""))
    if fault.get("phase"):
        parts.append(str(fault["phase"]))
    if fault.get("delay_ms"):
        parts.append(f"+{fault['delay_ms']:g} ms")
    if fault.get("flip"):
        parts.append(_flip_text(fault["flip"]))
    return " ".join(parts)


def _flip_text(flip: Mapping[str, Any]) -> str:
    """Return which bit is wrong, in few words."""
    bit = f"element {flip['element']}, bit {flip['bit']}"
    where = flip.get("where", "compute")
    if where != "compute":
        execution = f", {flip['execution']}" if where == "batch" else ""
        return f"{flip.get('part') or where}, {bit}{execution}"
    operator = flip["operator"]
    if operator is None:
        operator = "the first operator"
    elif isinstance(operator, int):
        operator = f"operator {operator}"
    return f"{operator}, {bit}, {'sticky' if flip.get('sticky') else flip['execution']}"
