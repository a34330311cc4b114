"""An injected loss of this process's network, which needs no rights and no network of its own.

While it lasts every established TCP connection of the process is shut as soon as
it is seen, whoever opened it, and what we open ourselves is refused before it
starts. Unix sockets stay: the uplink is inside the pod. Peers see their
connections end at once, as with a reset; a real cut may keep them waiting longer.
"""

from __future__ import annotations

import logging
import threading
import time

from mainstay_train.base.sockets import open_sockets, shut, socket_lock

logger = logging.getLogger(__name__)

SWEEP_S = 0.005
"""A connection that others open to us lives at most about this long."""

_changed = threading.Lock()
_until_s = 0.0
"""On the monotonic clock."""


def begin(for_s: float) -> None:
    """Cut the network of this process; returns when its connections are shut."""
    global _until_s
    with _changed:
        running = is_cut()
        _until_s = max(_until_s, time.monotonic() + for_s)
    logger.warning("the network is cut for %g s", for_s)
    _sweep()
    if not running:
        threading.Thread(target=_keep, name="network-cut", daemon=True).start()


def is_cut() -> bool:
    """Return whether the network is cut now."""
    return time.monotonic() < _until_s


def refuse() -> None:
    """Stand before every connection that is opened here.

    Raises:
        OSError: the network is cut.
    """
    if is_cut():
        raise OSError("the network is cut")


def _keep() -> None:
    while is_cut():
        _sweep()
        time.sleep(SWEEP_S)
    logger.warning("the network is back")


def _sweep() -> None:
    with socket_lock:
        for opened in open_sockets():
            shut(opened)
