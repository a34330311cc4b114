"""A service of a run that ends again and again: what is done and said. Its process is played."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from mainstay_cli.base.exits import CliError, ExitCode, MachineError
from mainstay_cli.local import shortage
from mainstay_cli.local.keeper import Keeper
from mainstay_cli.local.processes import Child
from mainstay_cli.local.restarts import RestartPolicy


class PlayedChild:
    """A process that has ended: with a code, after it has written a line to its log."""

    def __init__(self, code: int) -> None:
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.ended.set_result(code)


class PlayedService:
    """Starts that each end as the play says; the last one stays.

    Args:
        log: that they write to.
        ends: exit code and last words of each, or why it cannot be started.
        answers: whether they answer before they end.
    """

    def __init__(
        self, log: Path, ends: Sequence[tuple[int, str] | OSError], *, answers: bool = True
    ) -> None:
        self.log, self.ends, self.num_starts = log, list(ends), 0
        self.answers = answers
        self.pauses: list[float] = []
        self.stays = asyncio.Event()

    def keeper(self, policy: RestartPolicy | None = None) -> Keeper:
        return Keeper(
            title="the api",
            log=self.log,
            places=(self.log.parent,),
            spawn=cast(Callable[[], Child], self.spawn),
            serves=cast(Callable[[], Awaitable[bool]], self.serves),
            policy=policy,
            clock=lambda: float(self.num_starts),
            sleep=self.sleep,
        )

    def spawn(self) -> PlayedChild:
        self.num_starts += 1
        if not self.ends:
            self.stays.set()
            child = PlayedChild(0)
            child.ended = asyncio.get_running_loop().create_future()
            return child
        end = self.ends.pop(0)
        if isinstance(end, OSError):
            raise end
        code, words = end
        with self.log.open("a") as file:
            file.write(words)
        return PlayedChild(code)

    async def serves(self) -> bool:
        return self.answers

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


async def keep_until_it_stays(service: PlayedService) -> None:
    keeper = service.keeper()
    await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    staying = asyncio.create_task(service.stays.wait())
    await asyncio.wait([keeping, staying], return_when=asyncio.FIRST_COMPLETED)
    if keeping.done():
        keeping.result()
    keeping.cancel()
    await asyncio.wait([keeping])


def test_ten_ends_are_ten_restarts_with_longer_and_longer_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> PlayedService:
        service = PlayedService(tmp_path / "log", [(-signal.SIGKILL, "busy\n")] * 10)
        await keep_until_it_stays(service)
        return service

    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        service = asyncio.run(story())
    assert service.pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]
    assert caplog.messages[0] == (
        "the api ended (signal 9); training goes on; it is started again at once "
        "(1 end within 300 s); it said last: busy"
    )
    assert "it is started again in 0.5 s (2 ends within 300 s)" in caplog.messages[1]


def test_beyond_the_bound_the_run_ends_with_a_name_a_number_and_the_last_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    policy = RestartPolicy(max_restarts=2, window_s=60.0)

    async def story() -> None:
        keeper = PlayedService(log, [(1, "first\nsecond\nno such key\n")] * 3).keeper(policy)
        await keeper.start()
        await keeper.keep()

    with (
        caplog.at_level(logging.WARNING, "mainstay_cli"),
        pytest.raises(CliError) as caught,
    ):
        asyncio.run(story())
    assert caught.value.code is ExitCode.FAILED
    assert str(caught.value) == (
        f"the api ended (code 1); it said last: no such key (see {log}); 3 ends within 60 s, so it "
        "is not started again; mend that and run the job again, with --resume if it wrote "
        "checkpoints"
    )
    assert caplog.messages[-1] == f"{log} ends with:\n  first\n  second\n  no such key"


def test_a_start_that_fails_in_mid_run_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> PlayedService:
        many = OSError(errno.EMFILE, "Too many open files")
        service = PlayedService(tmp_path / "log", [(1, "oops\n"), many])
        await keep_until_it_stays(service)
        return service

    with caplog.at_level(logging.WARNING, "mainstay_cli"):
        assert asyncio.run(story()).num_starts == 3
    assert "the api could not be started: too few descriptors" in caplog.messages[1]
    assert "ulimit -n" in caplog.messages[1]


def test_what_never_serves_is_given_up_and_the_first_time_at_once(tmp_path: Path) -> None:
    async def first() -> None:
        await PlayedService(tmp_path / "log", [(1, "bad\n")], answers=False).keeper().start()

    with pytest.raises(MachineError, match=r"the api ended \(code 1\); it said last: bad \(see "):
        asyncio.run(first())

    async def later() -> PlayedService:
        service = PlayedService(tmp_path / "log", [(1, "bad\n")] * 20)
        keeper = service.keeper()
        await keeper.start()
        service.answers = False
        with pytest.raises(CliError, match="10 starts in a row failed"):
            await keeper.keep()
        return service

    assert asyncio.run(later()).num_starts == 11


def test_whoever_asks_for_the_process_gets_one_that_serves(tmp_path: Path) -> None:
    async def story() -> None:
        service = PlayedService(tmp_path / "log", [(1, "")])
        keeper = service.keeper()
        await keeper.start()
        first = await keeper.wait_up()
        service.answers = False
        keeping = asyncio.create_task(keeper.keep())
        await service.stays.wait()
        asking = asyncio.create_task(keeper.wait_up())
        await asyncio.sleep(0)
        assert not asking.done()
        service.answers = True
        assert await asking is not first
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(story())


def test_a_full_disk_is_named_by_the_log_or_where_nothing_could_be_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "# Short write while writing to the AOF file: (nwritten=1, expected=2)\n"

    def warning_of(code: int, words: str) -> str:
        async def story() -> None:
            await keep_until_it_stays(PlayedService(tmp_path / "log", [(code, words)]))

        caplog.clear()
        with caplog.at_level(logging.WARNING, "mainstay_cli"):
            asyncio.run(story())
        return caplog.messages[0]

    named = f"no space left on the disk: {tmp_path} has"
    assert "no space was left on the disk or of a quota" in warning_of(1, short)
    # Only its own words count: the life before may have ended for something else.
    assert "space" not in warning_of(1, "bad\n")
    monkeypatch.setattr(shortage, "LOW_DISK_MIB", 1 << 60)
    assert named in warning_of(1, "")
    assert named not in warning_of(-signal.SIGKILL, "")
