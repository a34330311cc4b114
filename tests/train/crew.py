"""Forked worker processes that talk to their test over pipes, and the store where they meet."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

from mainstay_train.comm.group import Group

ADDRESS = "127.0.0.1"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker raised."""

    text: str


class Worker:
    """One forked process, at the other end of ``pipe``."""

    def __init__(self, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_guard, args=(run, theirs, args), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The worker's next message."""
        message = self.pipe.recv()
        assert not isinstance(message, Failure), message.text
        return message

    def say(self, message: Any = None) -> None:
        self.pipe.send(message)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join()


def _guard(run: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    # Stores and groups of former tests have threads that no fork has: never collected here.
    gc.freeze()
    try:
        run(pipe, *args)
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))


class Crew:
    """The workers of one test."""

    def __init__(self) -> None:
        self._store = TCPStore(
            ADDRESS, 0, None, True, timedelta(seconds=100), wait_for_workers=False
        )
        self.workers: list[Worker] = []

    @property
    def store(self) -> str:
        return f"{ADDRESS}:{self._store.port}"

    def fork(self, run: Callable[..., None], *args: Any) -> Worker:
        """Run ``run(pipe, *args)`` in a new process."""
        worker = Worker(run, args)
        self.workers.append(worker)
        return worker

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.pipe.close()


def make_group(
    store: str,
    rank: int,
    size: int,
    name: str = "test",
    connect_s: float = 30.0,
    former: Sequence[tuple[str, int]] = (),
) -> Group:
    """A gloo group that is not connected yet."""
    return Group(
        name=name,
        store=store,
        rank=rank,
        size=size,
        address=ADDRESS,
        backend="gloo",
        timeout_s=200,
        connect_s=connect_s,
        former=former,
    )
