"""Waits in a thread of its own, while the main thread executes checks that wait.

Neither gloo's messages nor torch's functional collectives say that they have come before somebody
waits for them. A thread that waits for them takes no processor, so nothing else runs at the same
time as a check. Whoever ends the group ends the thread's wait, and with it this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mainstay_core.dmr.profiles import WindowKind
from mainstay_train.checks.planned import Window
from mainstay_train.checks.waiting import WaitingChecks


def wait_beside(
    wait: Callable[[], object],
    waiting: WaitingChecks,
    window: Window | None = None,
    kind: WindowKind = WindowKind.INTER,
) -> None:
    """Wait for something; until it has come checks are executed.

    Args:
        wait: blocks until it has come; what it raises is raised here.
        waiting: checks that are executed meanwhile, and those that a plan has executed here even if
            it comes before.
        window: for the plan; None: there is none.
        kind: of the wait.

    Raises:
        UnreliableDeviceError: a check says so.
    """
    has_come = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)  # raised where it is waited for
        finally:
            has_come.set()

    threading.Thread(target=run, name="arrival", daemon=True).start()
    waiting.use(lambda: not has_come.is_set(), window, lambda: not errors, kind)
    has_come.wait()
    if errors:
        raise errors[0]
