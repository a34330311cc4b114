"""Has the C library keep memory that was freed, since a step asks for the same again and again.

The tensors of a micro-batch are freed as its backward goes, and glibc gives the top of its heap
back to the kernel when 128 KiB or twice its largest block there are free. The next micro-batch gets
fresh pages, each of which the kernel clears first.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 256 << 20
"""Free memory at the top of a heap that is kept. More than that is given back."""
APART_BYTES = 32 << 20
"""Blocks of so many bytes are not in the heap: each is given back when it is freed. It is the most
that glibc takes."""

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed() -> bool:
    """Set the C library of this process so; return whether it has these settings: glibc has."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Both, since to set one ends that glibc adapts the other.
    kept = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    apart = mallopt(_M_MMAP_THRESHOLD, APART_BYTES)
    return bool(kept == apart == 1)
