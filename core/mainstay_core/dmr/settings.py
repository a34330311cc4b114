"""Names what a job wants of checks by re-execution: which operators are executed twice."""

from __future__ import annotations

import enum


class Mode(enum.StrEnum):
    """The operators that are executed a second time."""

    OFF = "Off"
    """None."""
    FULL = "Full"
    """All whose results can reach a gradient or the state, each at once (the plan Naive)."""


def describe_coverage(mode: Mode) -> str:
    """Return the share of operator time that is executed twice, by method; empty: none is."""
    return "naive 100 %" if mode is Mode.FULL else ""
