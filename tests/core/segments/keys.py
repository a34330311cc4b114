"""Keys, headers and records of segments for tests."""

from __future__ import annotations

from typing import Any

from mainstay_core.base.ids import JobUid
from mainstay_core.wire.segments import SegmentHeader, SegmentKey, SegmentKind
from mainstay_core.wire.votes import Commit, CommitRecord, seal_record

JOB = JobUid("job-1")


def key_of(
    version: int, unit: int = 0, kind: str = "state", lineage: int = 0, position: int = 0
) -> SegmentKey:
    return SegmentKey(
        lineage=lineage, position=position, unit=unit, kind=SegmentKind(kind), version=version
    )


def header_of(key: SegmentKey, size: int = 10, **more: Any) -> SegmentHeader:
    fields: dict[str, Any] = {
        "key": key,
        "job": JOB,
        "fingerprint": "f1",
        "unit_name": f"layer.{key.unit}",
        "num_units": 4,
        "nonce": "abc",
        "window": 0,
        "num_instalments": 2,
        "size_bytes": size,
        "digest": "d",
    }
    return SegmentHeader(**(fields | more))


def record_of(step: int, lineage: int = 0, chain: str = "c", **more: Any) -> CommitRecord:
    commit = Commit(step=step, norm=1.0, scale=1.0, tokens=8, loss=2.0, data="d")
    fields: dict[str, Any] = {"certified_in": "q1-abc", "gradients": ("g",), "states": ("s",)}
    record = CommitRecord(lineage=lineage, commit=commit, chain=chain, **(fields | more))
    return seal_record(record)
