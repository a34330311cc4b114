"""What this machine has run out of, as programs, errors and disks tell it."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainstay_cli.local import shortage
from mainstay_cli.local.shortage import Shortage, explain, find_in, free_mib, of_error
from mainstay_cli.local.watch import TELL_EVERY_S, MachineWatch


@pytest.mark.parametrize(
    ("line", "lacks"),
    [
        ("OSError: [Errno 28] No space left on device: '/x'", Shortage.DISK),
        ("MISCONF Errors writing to the AOF file: No space left on device", Shortage.DISK),
        ("# Short write while writing to the AOF file: (nwritten=1)", Shortage.DISK),
        ("OSError: [Errno 122] Disk quota exceeded", Shortage.DISK),
        ("the process has no descriptor left (Too many open files)", Shortage.DESCRIPTORS),
        ("Ready to accept connections", None),
        ("", None),
    ],
)
def test_a_line_of_a_log_tells_what_lacks(line: str, lacks: Shortage | None) -> None:
    assert find_in(f"first\n{line}\nlast\n") is lacks


def test_the_newest_of_two_shortages_counts() -> None:
    assert find_in("No space left on device\nToo many open files\n") is Shortage.DESCRIPTORS


def test_an_error_tells_what_lacks_even_as_the_cause_of_another() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    group = ExceptionGroup("two", [ValueError("other"), full])
    outer = RuntimeError("not reached")
    outer.__cause__ = group
    full.__context__ = outer  # a ring is no trap
    assert of_error(full) is of_error(outer) is Shortage.DISK
    assert of_error(OSError(errno.EMFILE, "Too many open files")) is Shortage.DESCRIPTORS
    assert of_error(OSError(errno.ENOENT, "No such file")) is None
    assert of_error(ValueError("No space left on device")) is None


def test_the_room_for_a_directory_that_is_not_there_yet_is_that_above_it(tmp_path: Path) -> None:
    assert abs(free_mib(tmp_path / "a" / "b") - free_mib(tmp_path)) < 1024


def test_the_sentence_says_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path / "full": 0, tmp_path / "empty": 1000}
    monkeypatch.setattr(shortage, "free_mib", free.__getitem__)
    assert explain(Shortage.DISK, free) == (
        f"no space left on the disk: {tmp_path / 'full'} has 0 MiB free; free some"
    )
    free[tmp_path / "full"] = 500
    assert explain(Shortage.DISK, free) == (
        f"no space was left on the disk or of a quota: {tmp_path / 'full'} has 500 MiB free and "
        f"{tmp_path / 'empty'} has 1000 MiB free now"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 512))
    assert explain(Shortage.DESCRIPTORS, free) == (
        "too few descriptors: 64 are allowed (hard limit 512); start it again after ulimit -n 512"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert "-1" not in explain(Shortage.DESCRIPTORS, free)


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """No descriptor is left to this process for as long as the fixture is used."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.dup(0)
    os.close(next_free)
    yield resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_this_command_without_descriptors_says_so_and_goes_on(
    tmp_path: Path, no_descriptors: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        MachineWatch([tmp_path], [tmp_path / "log"]).look()
    (message,) = caplog.messages
    assert message.startswith("too few descriptors: ")
    assert message.endswith("this command itself has none left")


def test_a_shortage_is_told_once_a_minute_and_each_line_of_a_log_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, now = tmp_path / "api.log", [0.0]
    watch = MachineWatch([tmp_path], [log, tmp_path / "absent.log"], clock=lambda: now[0])

    def look() -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mainstay_cli"):
            watch.look()
        return len(caplog.messages)

    def say(words: str) -> None:
        with log.open("a") as file:
            file.write(words + "\n")

    assert look() == 0
    say("Too many open files")
    assert look() == 1
    say("Too many open files")
    assert look() == 0, "a moment ago"
    now[0] += TELL_EVERY_S
    assert look() == 0, "it is over"
    say("Too many open files")
    assert look() == 1


def test_a_disk_that_is_all_but_full_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage, "LOW_DISK_MIB", 1 << 60)
    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        MachineWatch([tmp_path], []).look()
    assert f"no space left on the disk: {tmp_path} has" in caplog.text


def test_a_disk_that_cannot_be_asked_is_told_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    log.mkdir()  # nothing that can be read
    watch = MachineWatch([tmp_path], [log])
    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        watch.look()
        watch.look()
    (message,) = caplog.messages
    assert message.startswith("what is left on this machine is not known: [Errno 21]")
