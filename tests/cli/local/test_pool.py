"""The pool of local mode: core's repair, carried out on processes that are played."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from mainstay_cli.base.client import ApiClient
from mainstay_cli.base.exits import CliError
from mainstay_cli.local.forge import Forge
from mainstay_cli.local.pods import Kubelet, StartSupervisor
from mainstay_cli.local.pool import MAX_QUICK_ENDS, QUIET_LOOKS, LocalPool, LookPace
from mainstay_cli.local.processes import ChildProcesses
from mainstay_core.base import codec
from mainstay_core.wire.api import ApiError, Failure
from mainstay_core.wire.facts import Fact
from mainstay_core.wire.page import PodsPage


class PlayedProcess:
    """A process that does nothing but end when the test says so, or when it is killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.signals: list[int] = []
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def signal_group(self, number: int) -> None:
        if self.ended.done():
            return
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.end(-number)

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


class PlayedMachine:
    """The api, the forge and all processes of a run."""

    def __init__(self, directory: Path) -> None:
        self.supervisors: dict[str, PlayedProcess] = {}
        self.launchers: dict[str, list[PlayedProcess]] = {}
        self.uids: dict[str, str] = {}
        self.wishes: dict[str, Any] = {
            "state": "running",
            "num_pods": 0,
            "leaving": [],
            "ending": [],
        }
        self.gone: set[str] = set()
        self.told: list[str] = []
        self.told_at_s: list[float] = []
        """When the facts were observed, by those who told them."""
        self.running: asyncio.Task[None] | None = None
        self.outage = 0
        """How many requests of the api are in vain."""
        self._directory = directory
        self._moved = asyncio.Condition()

    # The api -----------------------------------------------------------------------------------

    async def fetch_pods(self, _job: str) -> PodsPage:
        await self._note_request()
        living = [
            {"uid": uid, "name": name, "serving": True}
            for name, uid in self.uids.items()
            if uid not in self.gone
        ]
        return codec.decode(PodsPage, {**self.wishes, "pods": living})

    async def post_facts(self, _job: str, facts: Sequence[Fact]) -> None:
        await self._note_request()
        for fact in facts:
            name = next(n for n, uid in self.uids.items() if uid == fact.pod)
            self.told.append(f"{name} {fact.kind}: {fact.evidence}")
            self.told_at_s.append(fact.observed_at_s)
            self.gone.add(fact.pod)

    async def _note_request(self) -> None:
        async with self._moved:
            self._moved.notify_all()
        if self.outage:
            self.outage -= 1
            raise ApiError("the api is not reached", Failure.UNREACHED)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; the pool's requests are the moments to look."""
        async with self._moved:
            await self._moved.wait_for(holds)

    async def looks(self, number: int = 2) -> None:
        """Wait until the pool has asked the api so many times more."""
        async with self._moved:
            for _ in range(number):
                await self._moved.wait()

    # Processes -----------------------------------------------------------------------------------

    async def start_supervisor(self, uid: str, name: str, _address: str) -> PlayedProcess:
        self.uids[name] = uid
        self.supervisors[name] = PlayedProcess(len(self.uids))
        return self.supervisors[name]

    async def launch(self, uid: str, **_: str) -> PlayedProcess:
        name = next(n for n, known in self.uids.items() if known == uid)
        launcher = PlayedProcess(100 + len(self.uids))
        self.launchers.setdefault(name, []).append(launcher)
        return launcher

    def reap_orphans(self) -> None:
        """Nothing is left of a played process."""

    def make_pod_dir(self, uid: str) -> Path:
        path = self._directory / uid
        path.mkdir()
        return path

    def leave(self, name: str) -> None:
        """Both halves of a pod exit with code 0."""
        self.launchers[name][-1].end(0)
        self.supervisors[name].end(0)


@contextlib.asynccontextmanager
async def running(machine: PlayedMachine, max_repairs: int = 10) -> AsyncIterator[LocalPool]:
    kubelet = Kubelet(
        forge=cast(Forge, machine),
        name="demo",
        network="127.5.5",
        make_pod_dir=machine.make_pod_dir,
        start_supervisor=cast(StartSupervisor, machine.start_supervisor),
    )
    pool = LocalPool(
        kubelet=kubelet,
        children=cast(ChildProcesses, machine),
        client=cast(ApiClient, machine),
        job="uid",
        handover_s=30.0,
        max_repairs=max_repairs,
        look_s=0.01,
    )
    machine.running = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        machine.running.cancel()
        await asyncio.wait([machine.running])


def play(directory: Path, story: Callable[[PlayedMachine], Any]) -> None:
    """Run a story in a loop of its own; it ends with the pool, whatever is left of it."""

    async def run() -> None:
        await story(PlayedMachine(directory))

    asyncio.run(run())


def test_a_quiet_pool_looks_half_as_often_until_something_happens() -> None:
    pace = LookPace(0.5)
    waits = [pace.next_wait_s() for _ in range(QUIET_LOOKS + 2)]
    pace.stir()

    assert waits == [0.5] * QUIET_LOOKS + [1.0] * 2
    assert pace.next_wait_s() == 0.5


def test_as_many_pods_are_made_as_the_api_wants_and_their_numbers_are_never_used_again(
    tmp_path: Path,
) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 3
        async with running(machine):
            await machine.until(lambda: len(machine.supervisors) == 3)
            machine.supervisors["demo-2"].end(-signal.SIGKILL)
            await machine.until(lambda: len(machine.supervisors) == 4)
            await machine.looks()

        assert list(machine.supervisors) == ["demo-1", "demo-2", "demo-3", "demo-4"]
        assert machine.told == ["demo-2 pod-gone: its supervisor (pid 2) ended by signal 9"]

    play(tmp_path, story)


def test_what_is_left_of_a_pod_is_killed_when_its_supervisor_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine):
            await machine.until(lambda: "demo-1" in machine.launchers)
            machine.supervisors["demo-1"].end(3)
            await machine.until(lambda: "demo-2" in machine.launchers)

        assert machine.launchers["demo-1"][0].signals == [signal.SIGKILL]

    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        play(tmp_path, story)
    assert caplog.messages == ["pod demo-1 is gone: its supervisor (pid 1) ended with code 3"]


def test_a_launcher_that_ends_with_an_error_is_started_again_in_its_pod(tmp_path: Path) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine):
            await machine.until(lambda: "demo-1" in machine.launchers)
            machine.launchers["demo-1"][0].end(1)
            await machine.until(lambda: len(machine.launchers["demo-1"]) == 2)

        assert machine.told == []
        assert list(machine.supervisors) == ["demo-1"]

    play(tmp_path, story)


def test_a_pod_that_is_not_needed_is_told_to_end_once_and_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 2
        async with running(machine):
            await machine.until(lambda: len(machine.launchers) == 2)
            machine.wishes |= {"num_pods": 1, "ending": [machine.uids["demo-2"]]}
            await machine.until(lambda: bool(machine.supervisors["demo-2"].signals))
            machine.wishes["leaving"] = [machine.uids["demo-2"]]  # so said its supervisor
            await machine.looks(3)
            machine.leave("demo-2")
            await machine.until(lambda: bool(machine.told))
            machine.wishes |= {"leaving": [], "ending": []}
            await machine.looks()

        assert machine.supervisors["demo-2"].signals == [signal.SIGTERM]
        assert machine.told == ["demo-2 pod-gone: its work was handed over"]
        assert list(machine.supervisors) == ["demo-1", "demo-2"]

    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        play(tmp_path, story)
    assert caplog.messages == []


def test_another_pod_is_made_for_one_that_is_drained(tmp_path: Path) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine):
            await machine.until(lambda: "demo-1" in machine.launchers)
            machine.wishes["leaving"] = [machine.uids["demo-1"]]
            await machine.until(lambda: "demo-2" in machine.launchers)

            assert machine.supervisors["demo-1"].signals == []
            machine.wishes["ending"] = [machine.uids["demo-1"]]
            await machine.until(lambda: bool(machine.supervisors["demo-1"].signals))

    play(tmp_path, story)


def test_a_suspended_job_keeps_no_pod_and_gets_others_when_it_goes_on(tmp_path: Path) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 2
        async with running(machine):
            await machine.until(lambda: len(machine.launchers) == 2)
            machine.wishes |= {"state": "suspended", "num_pods": 0}
            await machine.until(lambda: all(s.signals for s in machine.supervisors.values()))
            for name in ("demo-1", "demo-2"):
                machine.leave(name)
            await machine.until(lambda: len(machine.told) == 2)
            machine.wishes |= {"state": "forming", "num_pods": 2}
            await machine.until(lambda: len(machine.launchers) == 4)

        assert list(machine.supervisors) == ["demo-1", "demo-2", "demo-3", "demo-4"]

    play(tmp_path, story)


def test_the_pods_of_a_job_that_is_over_leave_by_themselves(tmp_path: Path) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 2
        async with running(machine) as pool:
            await machine.until(lambda: len(machine.launchers) == 2)
            machine.wishes |= {"state": "complete", "num_pods": 0}
            await machine.looks()
            for name in ("demo-1", "demo-2"):
                machine.leave(name)
            await machine.looks(3)
            pool.stop()
            await pool.wait_ended()

        assert [s.signals for s in machine.supervisors.values()] == [[], []]
        assert machine.told == []

    play(tmp_path, story)


def test_places_stay_empty_once_the_budget_of_repairs_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 2
        async with running(machine, max_repairs=1):
            await machine.until(lambda: len(machine.launchers) == 2)
            for name in ("demo-1", "demo-2"):
                machine.supervisors[name].end(-signal.SIGKILL)
                await machine.until(lambda name=name: name in " ".join(machine.told))
                await machine.looks()

        assert list(machine.supervisors) == ["demo-1", "demo-2", "demo-3"]

    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        play(tmp_path, story)
    assert caplog.messages[-1] == "no more pods are made: the budget of repairs is used up"


def test_a_loss_is_told_when_the_api_is_back(tmp_path: Path) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine):
            await machine.until(lambda: "demo-1" in machine.launchers)
            machine.outage = 7
            machine.supervisors["demo-1"].end(-signal.SIGKILL)
            await machine.until(lambda: "demo-2" in machine.launchers)

        assert machine.outage == 0
        assert machine.told == ["demo-1 pod-gone: its supervisor (pid 1) ended by signal 9"]

    play(tmp_path, story)


def test_a_loss_is_said_while_the_api_is_away_and_told_with_the_time_of_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine):
            await machine.until(lambda: "demo-1" in machine.launchers)
            await machine.looks()
            machine.outage = 1_000_000
            machine.supervisors["demo-1"].end(3)
            await machine.until(lambda: bool(caplog.messages))
            said_at_s = time.time()
            assert caplog.messages == [
                "pod demo-1 is gone: its supervisor (pid 1) ended with code 3"
            ]
            await machine.looks(3)
            machine.outage = 0
            await machine.until(lambda: "demo-2" in machine.launchers)

        assert machine.told == ["demo-1 pod-gone: its supervisor (pid 1) ended with code 3"]
        assert machine.told_at_s[0] <= said_at_s

    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        play(tmp_path, story)
    assert len(caplog.messages) == 1


def test_a_pod_that_leaves_and_fails_on_the_way_burns_no_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine, max_repairs=1):
            await machine.until(lambda: "demo-1" in machine.launchers)
            machine.wishes["leaving"] = [machine.uids["demo-1"]]
            await machine.until(lambda: "demo-2" in machine.launchers)
            machine.wishes["leaving"] = []  # the api names no pod that it takes for gone
            machine.supervisors["demo-1"].end(1)
            await machine.until(lambda: bool(machine.told))
            machine.supervisors["demo-2"].end(1)
            await machine.until(lambda: "demo-3" in machine.launchers)

    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        play(tmp_path, story)
    assert caplog.messages == ["pod demo-2 is gone: its supervisor (pid 2) ended with code 1"]


def test_pods_that_end_as_soon_as_they_start_end_the_run_with_what_they_said(
    tmp_path: Path,
) -> None:
    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine):
            for number in range(1, MAX_QUICK_ENDS + 1):
                name = f"demo-{number}"
                await machine.until(lambda name=name: name in machine.launchers)
                log = tmp_path / machine.uids[name] / "supervisor.log"
                log.write_text("no such file\n")
                machine.supervisors[name].end(1)
            assert machine.running is not None
            with pytest.raises(ExceptionGroup) as raised:
                await machine.running
        (error,) = raised.value.exceptions
        assert isinstance(error, CliError)
        assert "the last one said: no such file" in str(error)

    play(tmp_path, story)


def test_a_pool_that_is_told_to_stop_and_cancelled_at_once_is_cancelled(tmp_path: Path) -> None:
    """As at Ctrl-C, when there is no api to ask for an end of the job first."""

    async def story(machine: PlayedMachine) -> None:
        machine.wishes["num_pods"] = 1
        async with running(machine) as pool:
            await machine.until(lambda: "demo-1" in machine.launchers)
            await machine.looks()
            assert machine.running is not None
            await asyncio.sleep(0)  # it has asked, and now waits for something to happen
            pool.stop()
            machine.running.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert machine.running.cancelled()

    play(tmp_path, story)
