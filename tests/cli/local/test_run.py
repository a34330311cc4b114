"""Ends of a run: by Ctrl-C when its job has ended, and by what this machine lacks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mainstay_cli.base.exits import CliError, ExitCode, MachineError
from mainstay_cli.base.state_dir import StateDir
from mainstay_cli.local import preflight
from mainstay_cli.local.manifests import load_job
from mainstay_cli.local.run import RunOptions, _Interrupts, _LocalRun, _watch_forge, run_job
from mainstay_cli.views.progress import PlainProgress
from mainstay_core.wire.api import ApiError, Failure
from mainstay_core.wire.routes import JobApi, Request

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
GIVE_UP_S = 60.0
"""It took all this time only if it would never have ended."""


class Api(JobApi):
    """The api of a job that has ended, which goes away before it is asked for the report."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def send(self, request: Request) -> Any:
        if request.path.endswith("/report"):
            self.asked.set()
            raise ApiError("nobody answers", Failure.UNREACHED)
        if request.path.endswith("/u"):
            page = {"state": "complete", "reason": "", "step": 0}
            return page | {"quorum": None, "recovering": []}
        return []


class Pool:
    """Pods that have ended."""

    def stop(self) -> None:
        pass

    async def wait_ended(self) -> None:
        pass


def test_one_ctrl_c_ends_a_run_that_waits_for_its_report(tmp_path: Path) -> None:
    async def run(local: _LocalRun) -> None:
        api, interrupts = Api(), _Interrupts()
        keeping = asyncio.create_task(asyncio.Event().wait())
        following = asyncio.create_task(
            local._follow(api, "u", Pool(), interrupts, [keeping])  # type: ignore[arg-type, list-item]
        )
        await api.asked.wait()
        interrupts.first.set()
        async with asyncio.timeout(GIVE_UP_S):
            with pytest.raises(CliError, match="its report is not written") as caught:
                await following
        assert caught.value.code is ExitCode.INTERRUPTED
        keeping.cancel()

    file = load_job(Path(shutil.copy(EXAMPLE, tmp_path)), None)
    options = RunOptions(state_dir=tmp_path / "state")
    with StateDir(options.state_dir) as state:
        redis, progress = Path("redis-server"), PlainProgress(quiet=True)
        asyncio.run(run(_LocalRun(file, (), state, 1, redis, progress, options)))


class StoppedApi(JobApi):
    """The api of a job that runs until it is told to stop; its report tells who was asked when."""

    def __init__(self, pool: LeavingPool) -> None:
        self.pool = pool
        self.watched = asyncio.Event()
        self.state = "running"

    async def send(self, request: Request) -> Any:
        if request.path.endswith("/report"):
            return {"state": self.state, "whole": self.pool.has_left}
        if request.path.endswith("/stop"):
            self.state = "stopped"
            return {}
        if request.path.endswith("/u"):
            self.watched.set()
            page = {"state": self.state, "reason": "", "step": 0}
            return page | {"quorum": None, "recovering": []}
        await asyncio.sleep(0)
        return []


class LeavingPool:
    """Pods that leave once they are waited for."""

    has_left = False

    def stop(self) -> None:
        pass

    async def wait_ended(self) -> None:
        self.has_left = True


@pytest.mark.parametrize("is_full", [False, True])
def test_a_run_that_ctrl_c_stops_leaves_its_whole_report_where_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_full: bool
) -> None:
    async def run(local: _LocalRun) -> None:
        pool, interrupts = LeavingPool(), _Interrupts()
        api = StoppedApi(pool)
        following = asyncio.create_task(
            local._follow(api, "u", pool, interrupts, [])  # type: ignore[arg-type]
        )
        await api.watched.wait()
        interrupts.first.set()
        async with asyncio.timeout(GIVE_UP_S):
            with pytest.raises(CliError, match="everything has ended") as caught:
                await following
        assert caught.value.code is ExitCode.INTERRUPTED

    file = load_job(Path(shutil.copy(EXAMPLE, tmp_path)), None)
    asked = tmp_path / "asked" / "report.json"
    options = RunOptions(state_dir=tmp_path / "state", report=asked)
    if is_full:
        asked.parent.write_text("a file, beneath which nothing can be written")
    with StateDir(options.state_dir) as state:
        redis, progress = Path("redis-server"), PlainProgress()
        asyncio.run(run(_LocalRun(file, (), state, 1, redis, progress, options)))
    written = {"state": "stopped", "whole": True}
    assert json.loads((tmp_path / "state" / "report.json").read_text()) == written
    told = "the report is not written: " in "".join(capsys.readouterr())
    assert told is is_full
    assert is_full or json.loads(asked.read_text()) == written


def test_a_run_that_cannot_even_begin_for_want_of_descriptors_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(preflight, "choose_port", refuse)
    file = load_job(EXAMPLE, None)
    options = RunOptions(state_dir=tmp_path / "state")
    with pytest.raises(MachineError, match=r"too few descriptors: .* ulimit"):
        run_job(file, (), options, PlainProgress(quiet=True))


def test_the_end_of_the_forge_is_told_with_what_this_machine_lacks(tmp_path: Path) -> None:
    async def watch(state: StateDir) -> None:
        (state.logs / "trainers.log").write_text("OSError: [Errno 24] Too many open files\n")
        ended = asyncio.get_running_loop().create_future()
        ended.set_result(1)
        forge = SimpleNamespace(child=SimpleNamespace(ended=ended))
        with pytest.raises(CliError, match=r"Too many open files \(see .*; too few descriptors"):
            await _watch_forge("trainers", forge, state)  # type: ignore[arg-type]

    with StateDir(tmp_path / "state") as state:
        asyncio.run(watch(state))
