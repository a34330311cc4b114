"""Measures the floor of a wide job's recovery: the groups of all stages made anew by plain torch.

As many processes as the job has ranks stand in one gloo group for each stage. One of them is
killed. The parent, which waits for the dead process, tells all others at once, and each makes the
group of its stage anew and reduces once. So there is neither a membership to agree on, nor a state
to settle, nor a step: what is left is torch.

The parent is a program of its own (``python -m support.wide_rebuild``), from which all others are
forked as a job's trainers are: it has torch imported, and one thread. Each of 64 processes that
imported torch itself would take seconds of two cores.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from datetime import timedelta  # noqa: E402
from functools import partial  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from support.groups import ADDRESS  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed import PrefixStore, TCPStore  # noqa: E402

from mainstay_fork import children  # noqa: E402
from mainstay_train.launcher import warming  # noqa: E402

BENCHMARKS = Path(__file__).parents[1]
BOUND = timedelta(seconds=60)
"""Longest time of one operation, and of connecting."""
WITHIN_S = 2 * BOUND.total_seconds()
"""Within this all processes of a round stand in their groups, and then in the new ones."""
REST_S = 0.5
"""From the first groups to the kill."""


class Place(NamedTuple):
    """The stage and lane of a process."""

    stage: int
    lane: int


@dataclass(frozen=True, slots=True)
class Rank:
    """One forked process, as its parent sees it."""

    place: Place
    pid: int
    pipe: Connection

    def hear(self, deadline_s: float, what: str) -> Any:
        """Return its next message.

        Raises:
            RuntimeError: there is none before the deadline, or the process has ended.
        """
        who = f"lane {self.place.lane} of stage {self.place.stage}"
        if not self.pipe.poll(max(0.0, deadline_s - time.monotonic())):
            raise RuntimeError(f"{who} is not {what} within {WITHIN_S:g} s: is the machine busy?")
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{who} ended before it was {what}") from None


def measure(rounds: int, lanes: int, stages: int, elements: int) -> list[float]:
    """Return the seconds from kill -9 to the last survivor's all_reduce, one for each round.

    Args:
        rounds: how many.
        lanes: processes of a group.
        stages: groups.
        elements: that are reduced.

    Raises:
        RuntimeError: a process came too late, or failed; what is wrong is on standard error.
    """
    store = TCPStore(ADDRESS, 0, None, True, BOUND, wait_for_workers=False)
    numbers = map(str, (store.port, rounds, lanes, stages, elements))
    limit_s = (rounds + 1) * 2 * WITHIN_S
    try:
        done = subprocess.run(
            [sys.executable, "-m", "support.wide_rebuild", *numbers],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=limit_s,
            cwd=BENCHMARKS,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the bare rebuild did not end within {limit_s:g} s") from None
    if done.returncode:
        raise RuntimeError(f"the bare rebuild ended with code {done.returncode}")
    return [float(seconds) for seconds in json.loads(done.stdout)]


def _round(port: int, number: int, lanes: int, stages: int, elements: int) -> float:
    ranks: list[Rank] = []
    try:
        for place in (Place(stage, lane) for stage in range(stages) for lane in range(lanes)):
            ours, theirs = multiprocessing.Pipe()
            run = partial(_rank, theirs, port, number, place, lanes, elements)
            pid = children.fork(run, None, [ours, *(rank.pipe for rank in ranks)])
            theirs.close()
            ranks.append(Rank(place, pid, ours))
        deadline_s = time.monotonic() + WITHIN_S
        for rank in ranks:
            rank.hear(deadline_s, "in its first group")
        time.sleep(REST_S)
        lost = next(r for r in ranks if r.place == (number % stages, lanes // 2))
        at_s = time.time()
        os.kill(lost.pid, signal.SIGKILL)
        os.waitpid(lost.pid, 0)
        lost.pipe.close()
        ranks.remove(lost)
        for rank in ranks:
            shrinks = rank.place.stage == lost.place.stage
            after = shrinks and rank.place.lane > lost.place.lane
            rank.pipe.send((rank.place.lane - after, lanes - shrinks))
        deadline_s = time.monotonic() + WITHIN_S
        return float(max(rank.hear(deadline_s, "in its new group") for rank in ranks) - at_s)
    finally:
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks:
            os.waitpid(rank.pid, 0)
            rank.pipe.close()


def _rank(pipe: Connection, port: int, number: int, place: Place, lanes: int, elements: int) -> int:
    torch.set_num_threads(1)
    store = TCPStore(ADDRESS, port, None, False, BOUND, wait_for_workers=False)
    tensor = torch.ones(elements)
    of_stage = PrefixStore(f"round{number}/stage{place.stage}", store)
    before = _make(PrefixStore("before", of_stage), place.lane, lanes)
    before.allreduce([tensor]).wait()
    pipe.send("ready")
    after = _make(PrefixStore("after", of_stage), *pipe.recv())
    after.allreduce([tensor]).wait()
    pipe.send(time.time())
    pipe.recv()  # it stays until all have what it sends, and is killed
    return 0


def _make(store: PrefixStore, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=ADDRESS)]
    options._timeout = BOUND
    return distributed.ProcessGroupGloo(store, rank, size, options)


def main() -> None:
    """Fork the processes of each round, and print the seconds of all rounds."""
    port, rounds, lanes, stages, elements = map(int, sys.argv[1:])
    warming.warm_up(())
    found = [_round(port, number, lanes, stages, elements) for number in range(rounds)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
