"""Waits for messages of the pipeline, and has checks executed meanwhile.

gloo does not say that a message has come before somebody waits for it. So where checks wait, a
thread of its own waits for the message, which takes no processor, and the main thread executes one
check after the other until it has come. Nothing else runs at the same time. Whoever ends the group
ends the thread's wait, and with it this one.
"""

from __future__ import annotations

import threading

from mainstay_train.checks.planned import Window
from mainstay_train.checks.waiting import WaitingChecks
from mainstay_train.comm.group import Group, Pending


def finish(
    group: Group, pending: Pending, waiting: WaitingChecks, window: Window | None = None
) -> None:
    """Wait for a message as :meth:`Group.finish` does.

    Args:
        group: of the message.
        pending: the message.
        waiting: checks that are executed until it has come, and those that a plan has executed here
            even if it comes before.
        window: for the plan; None: there is none.

    Raises:
        GroupEnded: the peer is gone or the group was shut.
        UnreliableDeviceError: a check says so.
    """
    if not waiting:
        group.finish(pending)
        return
    has_come = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            group.finish(pending)
        except BaseException as error:
            errors.append(error)  # raised where the message is waited for
        finally:
            has_come.set()

    threading.Thread(target=wait, name="arrival", daemon=True).start()
    waiting.use(lambda: not has_come.is_set(), window, lambda: not errors)
    has_come.wait()
    if errors:
        raise errors[0]
