"""The sockets that this process holds, by file descriptor: listed, and shut from any thread."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from typing import NamedTuple

socket_lock = threading.Lock()
"""Held while a socket is opened and registered, and while sockets are listed."""


class OpenSocket(NamedTuple):
    """A socket of this process; the inode tells it from a later one with the same number."""

    fd: int
    inode: int


def open_sockets() -> frozenset[OpenSocket]:
    """Return the sockets that are open now."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(OpenSocket(int(name), status.st_ino))
    return frozenset(found)


def shut(opened: OpenSocket, how: int = socket.SHUT_RDWR, *, listeners: bool = False) -> None:
    """Shut an established connection.

    Args:
        opened: the socket.
        how: which sides of it.
        listeners: whether one that listens is shut, too: gloo dies of that.
    """
    try:
        duplicate = socket.socket(fileno=os.dup(opened.fd))
    except OSError:
        return
    with duplicate, contextlib.suppress(OSError):
        # gloo closes a failed connection's socket, and its number is soon somebody else's.
        same = os.fstat(duplicate.fileno()).st_ino == opened.inode
        if same and duplicate.family in (socket.AF_INET, socket.AF_INET6):
            if not listeners:
                duplicate.getpeername()
            duplicate.shutdown(how)


def stands(opened: OpenSocket) -> bool:
    """Whether a connection is open at both ends; what never was one is no connection to lose."""
    try:
        duplicate = socket.socket(fileno=os.dup(opened.fd))
    except OSError:
        return False
    with duplicate:
        if os.fstat(duplicate.fileno()).st_ino != opened.inode:
            return False
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return True
        try:
            return duplicate.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False
