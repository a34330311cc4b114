"""Forks a warm parent safely, and has processes end together.

A forked child inherits everything, wanted or not. Children made here give up
inherited sockets, die with their parent whatever kills it, and are only made
while the parent has a single thread: a lock held by another thread at the
moment of a fork would stay locked in the child for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, Protocol

from mainstay_core.base.errors import MainstayError

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Closable(Protocol):
    """A socket, selector or file of the parent that a child must not keep."""

    def close(self) -> object: ...


def share_imports() -> None:
    """Make this process ready for its forks: what it has imported is theirs as well.

    Raises:
        MainstayError: this process has more than one thread.
    """
    require_single_thread()
    # Keep what all children share out of the collector: it would copy the pages.
    gc.collect()
    gc.freeze()


def require_single_thread() -> None:
    """Check that forking is safe now.

    Raises:
        MainstayError: this process has more than one thread; their names are given.
    """
    tasks = os.listdir("/proc/self/task")
    if len(tasks) == 1:
        return
    names = []
    for task in tasks:
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    raise MainstayError(f"cannot fork a process with {len(tasks)} threads: {', '.join(names)}")


def fork(
    run: Callable[[], int],
    log: Path | int | None,
    give_up: Iterable[Closable],
    *,
    new_group: bool = False,
    new_session: bool = False,
) -> int:
    """Fork a child that executes ``run`` and ends with its result as exit code; return its pid.

    The child is killed when this process ends. Its output goes to ``log``
    (a file is appended to), its input is empty. An exception is logged and gives code 1.

    Args:
        run: what the child does.
        log: file, or open descriptor, for stdout and stderr; None keeps the parent's.
        give_up: the parent's open things, closed in the child.
        new_group: make the child the leader of a process group of its own, in this process's
            session.
        new_session: make it the leader of a session of its own, and of a group in it.

    Raises:
        MainstayError: this process has more than one thread.
    """
    require_single_thread()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become_child(parent, log, give_up)
        if new_session:
            os.setsid()
        elif new_group:
            os.setpgid(0, 0)
        code = run()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _become_child(parent: int, log: Path | int | None, give_up: Iterable[Closable]) -> None:
    die_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for closable in give_up:
        closable.close()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if isinstance(log, int):
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    elif log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent process ends, however it ends (prctl(2), PR_SET_PDEATHSIG)."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we asked


def reap(pid: int) -> tuple[int | None, int | None]:
    """Wait for an ended child; return (exit code, None) or (None, signal)."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None
