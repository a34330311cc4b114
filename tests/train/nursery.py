"""The process from which the workers of tests are forked: torch imported, one thread, little open.

A test's own process has threads (of stores, servers, libraries) and the sockets of whatever ran
before. In a fork of it, a lock that another thread held would stay locked for ever, and connections
would stay open that everybody else has closed. So nothing is forked there. This process is asked
instead, over a Unix socket (``python -m tests.train.nursery FD``), and forks as launchers do.

A request is the name of the worker's module, with a descriptor: the worker's end of the pipe to its
test. The worker says its pid there, then hears what it shall run: ``(function, arguments)``. If
there can be no worker, this process says why in its place.

Modules are imported here, once for all their workers. A function ``warm_up`` of the module is
called then: it does once what every worker would do first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import traceback
from functools import partial
from multiprocessing.connection import Connection

from mainstay_train.base import environment

environment.prepare()  # before anything imports torch: workers compute as trainers do

import torch  # noqa: E402
from tests.train.crew import Failure  # noqa: E402

from mainstay_fork import children  # noqa: E402
from mainstay_train.launcher import warming  # noqa: E402

ALWAYS = ("mainstay_train.launcher.main", "mainstay_train.models.llama", "torch._dynamo")
"""All of a trainer; the usual model, as launchers do, with its corpus, which each worker would
read anew; and torch's compiler: the first step of torch's own optimizers imports it, and each
worker would do so anew, for seconds."""
NAME_BYTES = 1 << 10
"""More than the name of any module."""


def serve(line: socket.socket) -> None:
    """Fork workers until the line ends; they end with this process."""
    warm = set(ALWAYS)
    warming.warm_up(ALWAYS)
    while True:
        name, descriptors, _, _ = socket.recv_fds(line, NAME_BYTES, 1)
        if not name:
            return
        _reap()
        module = name.decode()
        with Connection(descriptors[0]) as pipe:
            try:
                if module not in warm:
                    warming.warm_up([module])
                    warm.add(module)
                children.fork(partial(_work, pipe), None, [line])
            except Exception:
                pipe.send(Failure(traceback.format_exc()))


def _reap() -> None:
    """Collect the workers that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _work(pipe: Connection) -> int:
    torch.set_num_threads(1)
    try:
        pipe.send(os.getpid())
        run, args = pipe.recv()
        run(pipe, *args)
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))
    return 0


if __name__ == "__main__":
    # Of the workers too: a crash in native code says where it was. Python's stacks come first:
    # those of native code take memory, which may be what is broken.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    faulthandler.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
