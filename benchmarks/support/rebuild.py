"""Measures the floor of any recovery: kill one of three processes, make a new group, all-reduce.

No membership is agreed and no state settled: who lives is known, and the parent, which waits for
the dead process, tells the others at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from support.groups import ADDRESS, make_group
from torch.distributed import TCPStore

from mainstay_train.comm.group import GroupEnded

RANKS = 3
OPERATION_S = 30.0
"""Longest time of one operation of a group."""


def measure(rounds: int, elements: int) -> list[float]:
    """Seconds from kill -9 to the survivors' next all_reduce, one per round."""
    return [_round(elements) for _ in range(rounds)]


def _round(elements: int) -> float:
    # Not from here: the store has a thread. The server has torch imported, and one thread.
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["mainstay_train.comm.group"])
    store = TCPStore(ADDRESS, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = fork.Pipe()
        process = fork.Process(
            target=_rank, args=(theirs, f"{ADDRESS}:{store.port}", rank, elements), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        time.sleep(0.1)
        at_s = time.time()
        os.kill(processes[-1].pid or 0, signal.SIGKILL)
        processes[-1].join()
        for pipe in pipes[:-1]:
            pipe.send("one is dead")
        return max(pipe.recv() for pipe in pipes[:-1]) - at_s
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(pipe: Connection, store: str, rank: int, elements: int) -> None:
    torch.set_num_threads(1)
    group = make_group("before", store, rank, RANKS, OPERATION_S)
    group.connect()
    pipe.send("ready")

    def listen() -> None:
        pipe.recv()
        group.shutdown("one is dead")

    threading.Thread(target=listen, daemon=True).start()
    tensor = torch.ones(elements)
    told = False
    with contextlib.suppress(GroupEnded, RuntimeError):
        while not told:
            group._group.allreduce([tensor]).wait()
            told = group.ended is not None
    while group.ended is None:
        time.sleep(0.0005)
    after = make_group("after", store, rank, RANKS - 1, OPERATION_S)
    after.connect()
    after._group.allreduce([tensor]).wait()
    pipe.send(time.time())
