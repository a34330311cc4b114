"""The health file says in one line how the supervisor is; without room for it there is none."""

from __future__ import annotations

import os
from pathlib import Path

from mainstay_agent.health_file import HealthFile
from mainstay_core.supervisor.health import HEALTH_FILE


def test_the_file_is_written_when_it_changes_and_touched_else(tmp_path: Path) -> None:
    why_not = "no launcher\nis connected"
    shown = HealthFile(tmp_path, lambda: why_not)
    path = tmp_path / HEALTH_FILE
    shown.show()
    assert path.read_text() == "no launcher is connected\n"
    os.utime(path, (1, 1))
    before = path.stat()
    shown.show()
    assert path.stat().st_mtime > before.st_mtime
    assert path.stat().st_ino == before.st_ino
    why_not = ""
    shown.show()
    assert path.read_text() == "ok\n"


def test_a_file_that_cannot_be_written_is_taken_away(tmp_path: Path) -> None:
    """Else a probe would go by what it said before."""
    why_not = ""
    shown = HealthFile(tmp_path, lambda: why_not)
    shown.show()
    # Its new text goes to this name first.
    (tmp_path / f"{HEALTH_FILE}.new").mkdir()
    why_not = "it leaves"
    shown.show()
    assert not (tmp_path / HEALTH_FILE).exists()
    (tmp_path / f"{HEALTH_FILE}.new").rmdir()
    shown.show()
    assert (tmp_path / HEALTH_FILE).read_text() == "it leaves\n"


def test_a_file_that_is_gone_is_written_again(tmp_path: Path) -> None:
    shown = HealthFile(tmp_path, lambda: "")
    shown.show()
    (tmp_path / HEALTH_FILE).unlink()
    shown.show()
    shown.show()
    assert (tmp_path / HEALTH_FILE).read_text() == "ok\n"
