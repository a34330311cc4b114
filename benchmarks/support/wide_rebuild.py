"""Measures the floor of a wide job's recovery: the groups of all stages made anew by plain torch.

As many processes as the job has ranks stand in one gloo group for each stage. One of them is
killed. The parent, which waits for the dead process, tells all others at once, and each makes the
group of its stage anew and reduces once. So there is neither a membership to agree on, nor a state
to settle, nor a step: what is left is torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from support.groups import ADDRESS
from torch import distributed
from torch.distributed import PrefixStore, TCPStore

BOUND = timedelta(seconds=60)
"""Longest time of one operation, and of connecting."""
REST_S = 0.5
"""From the first groups to the kill."""
Place = tuple[int, int]
"""Stage and lane."""


def measure(rounds: int, lanes: int, stages: int, elements: int) -> list[float]:
    """Return the seconds from kill -9 to the last survivor's all_reduce, one for each round.

    Args:
        rounds: how many.
        lanes: processes of a group.
        stages: groups.
        elements: that are reduced.
    """
    return [_round(number, lanes, stages, elements) for number in range(rounds)]


def _round(number: int, lanes: int, stages: int, elements: int) -> float:
    # Not from here: the store has a thread. The server has torch imported, and one thread.
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["support.wide_rebuild"])
    store = TCPStore(ADDRESS, 0, None, True, BOUND, wait_for_workers=False)
    pipes: dict[Place, Connection] = {}
    processes: dict[Place, ForkServerProcess] = {}
    try:
        for place in ((stage, lane) for stage in range(stages) for lane in range(lanes)):
            ours, theirs = fork.Pipe()
            arguments = (theirs, store.port, place, lanes, elements)
            process = fork.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes[place], processes[place] = ours, process
        for pipe in pipes.values():
            pipe.recv()
        time.sleep(REST_S)
        lost = (number % stages, lanes // 2)
        at_s = time.time()
        os.kill(processes[lost].pid or 0, signal.SIGKILL)
        processes[lost].join()
        del pipes[lost]
        for (stage, lane), pipe in pipes.items():
            shrinks = stage == lost[0]
            pipe.send((lane - (shrinks and lane > lost[1]), lanes - shrinks))
        return float(max(pipe.recv() for pipe in pipes.values()) - at_s)
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()


def _rank(pipe: Connection, port: int, place: Place, lanes: int, elements: int) -> None:
    torch.set_num_threads(1)
    stage, lane = place
    store = TCPStore(ADDRESS, port, None, False, BOUND, wait_for_workers=False)
    tensor = torch.ones(elements)
    before = _make(PrefixStore(f"before{stage}", store), lane, lanes)
    before.allreduce([tensor]).wait()
    pipe.send("ready")
    after = _make(PrefixStore(f"after{stage}", store), *pipe.recv())
    after.allreduce([tensor]).wait()
    pipe.send(time.time())
    pipe.recv()  # it stays until all have what it sends, and is killed


def _make(store: PrefixStore, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=ADDRESS)]
    options._timeout = BOUND
    return distributed.ProcessGroupGloo(store, rank, size, options)
