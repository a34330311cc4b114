"""The conversation with the forge; its end of the socket is the test's."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import cast

import pytest

from mainstay_cli.local.forge import READ_BYTES, Forge
from mainstay_cli.local.processes import Child, ChildProcesses
from mainstay_core.base.frames import pack


class NoDescriptors:
    """A run that cannot watch one process more."""

    def adopt(self, _pid: int, code: asyncio.Future[int]) -> Child:
        self.code = code
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_launcher_that_cannot_be_watched_is_no_end_of_the_forge() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        with ours, theirs:
            run = NoDescriptors()
            forge = Forge(cast(ChildProcesses, run), cast(Child, None), ours)
            launching = asyncio.create_task(forge.launch("pod", pod_dir="/pod"))
            await loop.sock_recv(theirs, READ_BYTES)
            await loop.sock_sendall(theirs, pack({"kind": "launched", "pod": "pod", "pid": 1}))
            with pytest.raises(OSError, match="Too many open files"):
                await launching
            theirs.shutdown(socket.SHUT_RDWR)  # the conversation goes on until then
            assert await run.code == -9

    asyncio.run(story())
