"""What supervisors tell the api, as tests that play them put it."""

from __future__ import annotations

import time
from typing import Any

from mainstay_core.wire.facts import FACT_FORMAT


def fact(kind: str, pod: str, life: str, **fields: Any) -> dict[str, Any]:
    """A fact of a pod's first slot."""
    return {
        "kind": kind,
        "format": FACT_FORMAT,
        "pod": pod,
        "slot": 0,
        "incarnation": life,
        "observed_at_s": time.time(),
        **fields,
    }


def settle_facts(plan: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """That all members of a plan go on in it."""
    return [
        fact(kind, m["slot"]["pod"], m["incarnation"], quorum=plan["quorum"], step=step)
        for kind in ("adopted", "settled")
        for m in plan["members"]
    ]


def ledger_entry(step: int, stage: int, quorum: Any, **fields: Any) -> dict[str, Any]:
    """One stage's entry of a committed step."""
    return {
        "step": step,
        "stage": stage,
        "quorum": quorum,
        "gradient": "0" * 32,
        "masters": f"{step * 16 + stage:032x}",
        "data": "0" * 32,
        "loss": 3.0,
        "norm": 1.0,
        "tokens": 128,
        "step_s": 0.1,
        "replicas": 2,
        "committed_at_s": time.time(),
        **fields,
    }
