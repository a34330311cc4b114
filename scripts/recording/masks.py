"""Replaces by words what no two runs share: times, random names, ports, pids."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

PATTERNS = (
    (re.compile(r"\bq(\d+)-[0-9a-f]{8,12}\b"), r"q\1-NONCE"),
    (re.compile(r"\b127\.\d+\.\d+\.\d+(:\d+)?\b"), "HOST"),
    (re.compile(r"\bpids? \d+"), "pid N"),
    (re.compile(r"\b\d{13}-\d+\b"), "EVENT"),
    (re.compile(r"\b\d+(\.\d+)?(?= (s|ms)\b)"), "N"),
    # The pods of a local run: job, number, three random bytes.
    (re.compile(r"(-\d+)-[0-9a-f]{6}\b"), r"\1-UID"),
)
TIMES = re.compile(r"_s$|^(ettr|p50|p99|step_seconds)$")
RANDOM = frozenset({"nonce", "pid", "progress", "cursor", "supervisor"})
EXACT = "config"
"""The job's settings have seconds that are not measured."""


def mask(value: Any, known: Mapping[str, str] | None = None, also: Collection[str] = ()) -> Any:
    """Return JSON with words in the place of what differs from run to run.

    Args:
        value: what ``json.loads`` returned.
        known: texts of this run, and the word for each.
        also: names of more fields that are random.
    """
    names = RANDOM | frozenset(also)

    def text(value: str) -> str:
        for found, word in (known or {}).items():
            value = value.replace(found, word)
        for pattern, word in PATTERNS:
            value = pattern.sub(word, value)
        return value

    def walk(value: Any, name: str, *, exact: bool) -> Any:
        if isinstance(value, dict):
            within = exact or name == EXACT
            return {text(k): walk(v, k, exact=within) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(item, name, exact=exact) for item in value]
        if name in names and value:
            return name.upper()
        if isinstance(value, str):
            return text(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "SECONDS" if is_number and value and not exact and TIMES.search(name) else value

    return walk(value, "", exact=False)


def mask_metrics(text: str) -> list[str]:
    """Return the series of a Prometheus exposition: names, and the names of labels."""
    series = set()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            series.add(" ".join([name, *re.findall(r"(\w+)=", labels)]))
    return sorted(series)


def find_fields(value: Any, path: str = "") -> set[str]:
    """Return the paths of all fields of JSON, without values; items of a list count as one."""
    if isinstance(value, dict):
        return {path}.union(*(find_fields(v, f"{path}.{k}") for k, v in value.items()))
    if isinstance(value, list):
        return {path}.union(*(find_fields(item, f"{path}[]") for item in value))
    return {path}
