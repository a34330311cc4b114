import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainstay_cli.base import guard
from mainstay_cli.local import processes as families

GUARD = [sys.executable, "-I", "-S", guard.__file__]
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
GRANDPARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def first_line(log: Path) -> str:
    while not (lines := log.read_text().splitlines()):
        await asyncio.sleep(0.01)
    return lines[0]


def test_everything_a_run_started_ends_with_it_even_what_left_its_group(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, int]:
        async with families.ChildProcesses() as children:
            child = children.spawn(
                [sys.executable, "-c", GRANDPARENT],
                log=tmp_path / "log",
                environment=os.environ,
            )
            return child.pid, int(await first_line(tmp_path / "log"))

    child, grandchild = asyncio.run(scenario())
    assert is_gone(child)
    assert is_gone(grandchild)


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_run_without_descriptors_starts_nothing_that_it_cannot_watch_and_ends_as_any(
    tmp_path: Path,
) -> None:
    async def scenario(limited: contextlib.ExitStack) -> tuple[int, int]:
        async with families.ChildProcesses() as children:
            child = children.spawn(
                [sys.executable, "-c", GRANDPARENT],
                log=tmp_path / "log",
                environment=os.environ,
            )
            grandchild = int(await first_line(tmp_path / "log"))
            limited.enter_context(no_more_descriptors())
            with pytest.raises(OSError, match="Too many open files"):
                children.spawn(SLEEPER, log=tmp_path / "log", environment=os.environ)
            return child.pid, grandchild

    # The limit ends before the loop does, which needs descriptors of its own for that.
    with asyncio.Runner() as runner, contextlib.ExitStack() as limited:
        child, grandchild = runner.run(scenario(limited))
        gone = is_gone(child), is_gone(grandchild)
    assert gone == (True, True)


def test_processes_that_are_not_of_the_run_are_left_alone(tmp_path: Path) -> None:
    # A process of ours that another process started is not our child.
    script = f"import subprocess, sys; p = subprocess.Popen({SLEEPER!r}); print(p.pid, flush=True)"

    with subprocess.Popen(
        [sys.executable, "-c", f"{script}; p.wait()"], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        pid = int(other.stdout.readline())
        code = (
            "import asyncio\nfrom mainstay_cli.local.processes import ChildProcesses\n"
            "async def f():\n    async with ChildProcesses():\n        pass\nasyncio.run(f())"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env=_env())
        assert not is_gone(pid)
        os.kill(pid, signal.SIGKILL)


def test_the_end_of_a_child_is_noticed_with_its_code(tmp_path: Path) -> None:
    async def scenario() -> int | None:
        async with families.ChildProcesses() as children:
            child = children.spawn(
                [sys.executable, "-c", "raise SystemExit(7)"],
                log=tmp_path / "log",
                environment=os.environ,
            )
            return await child.ended

    assert asyncio.run(scenario()) == 7


def test_the_rest_of_a_group_ends_with_its_leader(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(p.pid, flush=True)\n"
    )

    async def scenario() -> int:
        async with families.ChildProcesses() as children:
            child = children.spawn(
                [sys.executable, "-c", code], log=tmp_path / "log", environment=os.environ
            )
            await child.ended
            pid = int((tmp_path / "log").read_text())
            while not is_gone(pid):
                children.reap_orphans()
                await asyncio.sleep(0.01)
            return pid

    assert is_gone(asyncio.run(scenario()))


def test_a_guarded_command_ends_with_the_pipe_to_its_parent() -> None:
    guarded = subprocess.Popen(
        [*GUARD, *SLEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert guarded.stdin is not None
    assert guarded.stdout is not None
    assert guarded.stdout.readline() == b"up\n"
    guarded.stdin.close()
    assert guarded.stdout.read() == b""  # the last holder of the pipe, the command, is gone
    assert guarded.wait() == -signal.SIGKILL
    guarded.stdout.close()


@pytest.mark.parametrize("code", [0, 5])
def test_a_guard_ends_with_the_code_of_its_command(code: int) -> None:
    command = [*GUARD, sys.executable, "-c", f"raise SystemExit({code})"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guarded:
        assert guarded.wait() == code


def test_a_guard_hands_on_a_request_to_end() -> None:
    guarded = subprocess.Popen(
        [*GUARD, *SLEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert guarded.stdout is not None
    guarded.stdout.readline()
    guarded.terminate()
    # As the command's code, like a shell's: 128 and the signal, or its negative.
    assert guarded.wait() != 0
    assert guarded.stdout.read() == b""
    guarded.communicate()


def _env() -> dict[str, str]:
    return dict(os.environ)
