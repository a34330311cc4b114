import os
import stat
import tempfile
from pathlib import Path

import pytest

from mainstay_cli.base.exits import MachineError, UsageError
from mainstay_cli.base.state_dir import RunRecord, StateDir, find_record, is_running


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAINSTAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def record(state: StateDir, name: str, started_at_s: float) -> RunRecord:
    return RunRecord(
        name=name,
        job=f"uid-{name}",
        url="http://127.0.0.1:1",
        state_dir=str(state.path),
        pid=1,
        started_at_s=started_at_s,
    )


def test_the_token_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    with StateDir(tmp_path / "run") as state:
        token = state.new_token()
        path = tmp_path / "run" / "token"
        assert path.read_text() == token
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(state.path.stat().st_mode) == 0o700


def test_a_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        StateDir(tmp_path / "run"),
        pytest.raises(MachineError, match="in use by a run that lives"),
        StateDir(tmp_path / "run"),
    ):
        pass


def test_a_home_that_can_keep_no_record_is_refused_before_anything_is_made(
    tmp_path: Path, home: Path
) -> None:
    home.write_text("a file")
    with pytest.raises(MachineError, match=r"home.*; name another place .* MAINSTAY_HOME"):
        StateDir(tmp_path / "run").__enter__()
    assert not (tmp_path / "run").exists()


def test_an_earlier_run_moves_aside(tmp_path: Path) -> None:
    for number in range(3):
        with StateDir(tmp_path / "run") as state:
            (state.path / "number").write_text(str(number))
    assert [(tmp_path / name / "number").read_text() for name in ("run.1", "run.2", "run")] == [
        "0",
        "1",
        "2",
    ]


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    with pytest.raises(UsageError, match="holds something else"), StateDir(tmp_path / "other"):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a directory"), StateDir(tmp_path / "file"):
        pass


def test_a_pod_directory_is_short_enough_for_a_socket_however_deep_the_run_is(
    tmp_path: Path,
) -> None:
    deep = tmp_path / ("d" * 90) / "run"
    with StateDir(deep) as state:
        directory = state.pod_dir("demo-1-abcdef")
        assert len(str(directory / "supervisor.sock")) < 100
        (directory / "file").write_text("x")
        assert (deep / "pods" / "demo-1-abcdef" / "file").read_text() == "x"
        short = state.short
    assert not short.exists()


def test_the_short_name_of_a_run_that_was_killed_is_removed_by_a_later_one(tmp_path: Path) -> None:
    dead = Path(tempfile.mkdtemp(prefix="mainstay-", dir="/tmp"))
    (dead / "s").symlink_to(tmp_path / "gone")
    os.utime(dead, (1.0, 1.0))
    with StateDir(tmp_path / ("d" * 90) / "one") as living:
        os.utime(living.short.parent, (1.0, 1.0))
        with StateDir(tmp_path / ("d" * 90) / "other"):
            assert not dead.exists()
            assert living.short.exists()


def test_the_newest_run_is_found_and_known_to_live(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="start one with"):
        find_record(None)
    with StateDir(tmp_path / "a") as one, StateDir(tmp_path / "b") as other:
        one.write_record(record(one, "first", 1.0))
        other.write_record(record(other, "second", 2.0))
        assert find_record(None).name == "second"
        assert find_record("first").job == "uid-first"
        assert is_running(find_record("first"))
    assert not is_running(find_record("first"))
    with pytest.raises(UsageError, match=r"no job third in .*; known: first, second"):
        find_record("third")


def test_a_record_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, home: Path) -> None:
    runs = home / "runs"
    (runs / "demo.json").mkdir(parents=True)
    with StateDir(tmp_path / "a") as state, pytest.raises(OSError, match="demo"):
        state.write_record(record(state, "demo", 1.0))
    assert [path.name for path in runs.iterdir()] == ["demo.json"]
