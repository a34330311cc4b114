"""Cancels asyncio tasks and waits until they have ended.

``asyncio.wait_for`` of Python 3.11, which the Redis client uses, loses a
cancellation that arrives just when the awaited thing completes: the task lives
on, and whoever awaits its end hangs. So a task is cancelled until it has ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.05


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and return when all have ended; what they raise is dropped."""
    remaining = {task for task in tasks if not task.done()}
    while remaining:
        for task in remaining:
            task.cancel()
        _, remaining = await asyncio.wait(remaining, timeout=AGAIN_S)
