"""The directory of a run: its files, and the record by which other commands find it.

::

    ~/.mainstay/jobs/NAME/        or $MAINSTAY_HOME/jobs/NAME, or --state-dir
        job.yaml  faults.json     what was asked for
        local.json                job uid, url of the api, pid of the run
        token                     the admin token, readable by its owner only
        report.json               written at the end
        lock                      held while the run lives
        redis/  checkpoints/  logs/  pods/POD/

``$MAINSTAY_HOME/runs/NAME.json`` points to the newest run of each name, wherever its
directory is. Nothing of an earlier run is deleted: it moves aside to ``NAME.1`` and so on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mainstay_cli.base.exits import MachineError, UsageError
from mainstay_cli.base.files import write_whole

MAX_POD_DIR_LENGTH = 70
"""Leaves room for a file name within the 107 bytes of a Unix socket's path."""

SWEEP_AGE_S = 60.0
"""A short name younger than this may belong to a run that is just taking its lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The record that another command needs to talk to a run."""

    name: str
    job: str
    url: str
    state_dir: str
    pid: int
    started_at_s: float


def home() -> Path:
    """Return the directory of everything that is kept between commands."""
    return Path(os.environ.get("MAINSTAY_HOME") or Path.home() / ".mainstay")


class StateDir:
    """The directory of one run, locked while it is open. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        self._short: Path | None = None

    def __enter__(self) -> StateDir:
        _check_records()
        _set_aside(self.path)
        try:
            for directory in (self.path, self.logs, self.redis, self.path / "pods"):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(self.path) from error
        except OSError as error:
            raise MachineError(
                f"{error.filename or self.path}: {error.strerror}; choose another place with "
                "--state-dir"
            ) from error
        # A Unix socket's path is short by law; the state directory's may be long.
        if len(str(self.path / "pods")) > MAX_POD_DIR_LENGTH - 12:
            _sweep_short_names()
            self._short = Path(tempfile.mkdtemp(prefix="mainstay-", dir="/tmp"))
            (self._short / "s").symlink_to(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._short is not None:
            shutil.rmtree(self._short, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    @property
    def logs(self) -> Path:
        """Directory of the logs of Redis, the api and the two forges."""
        return self.path / "logs"

    @property
    def redis(self) -> Path:
        """Directory of Redis's append-only file."""
        return self.path / "redis"

    @property
    def checkpoints(self) -> Path:
        """Directory of durable checkpoints, unless the job names one."""
        return self.path / "checkpoints"

    @property
    def short(self) -> Path:
        """This directory by a path that is short enough for Unix sockets in it."""
        return self._short / "s" if self._short else self.path

    def pod_dir(self, pod: str) -> Path:
        """Make and return a pod's directory, by a path short enough for sockets."""
        directory = self.short / "pods" / pod
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    def new_token(self) -> str:
        """Make the admin token and store it, readable by its owner only."""
        return self._draw(self.path / "token")

    def new_secret(self) -> Path:
        """Make the secret that the job's pods share; return its file."""
        path = self.path / "secret"
        self._draw(path)
        return path

    @staticmethod
    def _draw(path: Path) -> str:
        drawn = secrets.token_urlsafe(24)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(drawn)
        return drawn

    def write_record(self, record: RunRecord) -> None:
        """Let other commands find the run."""
        text = json.dumps(asdict(record), indent=1)
        write_whole(self.path / "local.json", text)
        write_whole(home() / "runs" / f"{record.name}.json", text)


def find_record(name: str | None) -> RunRecord:
    """Return the newest run of a name, or the newest of all.

    Raises:
        UsageError: there is none.
    """
    runs = home() / "runs"
    paths = [runs / f"{name}.json"] if name is not None else sorted(runs.glob("*.json"))
    records = []
    for path in paths:
        # A record that cannot be read is one that is just being replaced, or not ours.
        with contextlib.suppress(OSError, ValueError, TypeError):
            records.append(RunRecord(**json.loads(path.read_text())))
    if not records:
        what = f"job {name}" if name is not None else "job"
        known = ", ".join(sorted(path.stem for path in runs.glob("*.json")))
        hint = f"; known: {known}" if known else "; start one with: mainstay local run FILE"
        raise UsageError(f"no {what} in {home()}{hint}")
    return max(records, key=lambda record: record.started_at_s)


def is_running(record: RunRecord) -> bool:
    """Return whether the run's process still holds its directory."""
    return _is_locked(Path(record.state_dir))


def _is_locked(directory: Path) -> bool:
    try:
        lock = os.open(directory / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _sweep_short_names() -> None:
    """Remove the short names of runs that were killed with -9: only ours, only of dead runs."""
    for directory in Path("/tmp").glob("mainstay-*"):
        link = directory / "s"  # globbed for, it would not be found once its run is deleted
        with contextlib.suppress(OSError):
            parent = directory.lstat()
            mine = parent.st_uid == os.getuid() and time.time() - parent.st_mtime > SWEEP_AGE_S
            if mine and link.is_symlink() and not _is_locked(link):
                shutil.rmtree(directory)


def aside_name(path: Path) -> Path:
    """Return where an earlier run's directory moves to when a new run takes its place."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def _set_aside(path: Path) -> None:
    """Move an earlier run's directory out of the way; refuse one that is not a run's."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"--state-dir: {path} is not a directory")
    if not any(path.iterdir()):
        return
    lock_path = path / "lock"
    if not lock_path.exists():
        raise UsageError(f"--state-dir: {path} holds something else than a run; name another one")
    lock = os.open(lock_path, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.rename(aside_name(path))
    except BlockingIOError as error:
        raise _in_use(path) from error
    finally:
        os.close(lock)


def _check_records() -> None:
    """Refuse a home in which no record of a run could be kept, before anything is started."""
    runs = home() / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(runs, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(runs))
    except OSError as error:
        raise MachineError(
            f"{error.filename or runs}: {error.strerror}; name another place with the environment "
            "variable MAINSTAY_HOME: other commands find the run by a file there"
        ) from error


def _in_use(path: Path) -> MachineError:
    return MachineError(
        f"{path} is in use by a run that lives; choose another --name or --state-dir, or stop it"
    )
