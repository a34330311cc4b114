"""Memory for segments is there from the start, or the pod says at the start that it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mainstay_agent.snapshots import arena
from mainstay_agent.snapshots.arena import RESERVE_BYTES, Arena, memory_left
from mainstay_core.base.errors import InvalidSpecError

GIB = 1 << 30


def test_the_memory_is_there_and_neither_grows_nor_shrinks() -> None:
    made = Arena(3 * 4096 + 17)

    assert made.size_bytes == made.view.nbytes == 3 * 4096
    assert os.fstat(made.fd).st_blocks * 512 >= 3 * 4096
    for size in (0, 4096 * 4):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    made.close()


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec.snapshots.memory: is 17 bytes, must be at"):
        Arena(17)


def test_memory_that_is_not_there_is_refused_before_the_kernel_ends_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "memory_left", lambda: 2 * GIB + RESERVE_BYTES)

    with pytest.raises(InvalidSpecError) as refused:
        Arena(5 * GIB)

    assert refused.value.field == "spec.snapshots.memory"
    assert "is 5.0 GiB" in str(refused.value)
    assert "must be at most 2.0 GiB" in str(refused.value)
    assert "needs 3.0 GiB more" in str(refused.value)


def test_what_is_left_is_the_least_of_the_machines_and_of_every_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    9000 kB\n")
    (tmp_path / "own").write_text("0::/pods/one\n")
    cgroup = tmp_path / "cgroup/pods/one"
    cgroup.mkdir(parents=True)
    monkeypatch.setattr(arena, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(arena, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(arena, "CGROUPS", tmp_path / "cgroup")
    assert memory_left() == 9_216_000

    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("100\n")
    (cgroup.parent / "memory.max").write_text("5000\n")
    (cgroup.parent / "memory.current").write_text("1500\n")
    (cgroup.parent / "memory.stat").write_text("anon 7\ninactive_file 300\n")

    assert memory_left() == 3800


def test_a_system_that_says_nothing_bounds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEMINFO", "OWN_CGROUP", "CGROUPS"):
        monkeypatch.setattr(arena, name, tmp_path / "nothing")

    assert memory_left() > 1 << 60
