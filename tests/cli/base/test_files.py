"""Files that are written as a whole."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainstay_cli.base.exits import UsageError
from mainstay_cli.base.files import check_place, write_whole


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file grows beyond 10 bytes, as on a disk that is full."""
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handled)


def test_what_a_file_held_outlives_a_full_disk(tmp_path: Path, full_disk: None) -> None:
    path = tmp_path / "report.json"
    write_whole(path, "first")
    with pytest.raises(OSError, match="too large"):
        write_whole(path, "more than ten bytes")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_named_as_the_user_named_it(
    tmp_path: Path, full_disk: None
) -> None:
    path = tmp_path / "made" / "report.json"
    with pytest.raises(OSError, match="too large") as caught:
        write_whole(path, "more than ten bytes")
    assert caught.value.filename == str(path)
    beneath = tmp_path / "file" / "report.json"
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OSError, match=r"file/report\.json") as caught:
        write_whole(beneath, "text")
    assert caught.value.filename == str(beneath)


def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UsageError, match=r"--report: .* is a directory; name a file"):
        check_place(tmp_path, "--report")
    with pytest.raises(UsageError, match=r"--report: .*x cannot be written: .* is no directory"):
        check_place(tmp_path / "file" / "x", "--report")
    check_place(tmp_path / "to" / "be" / "made", "--report")
    check_place(tmp_path / "file", "--report")
    check_place(Path(os.devnull), "--report")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
