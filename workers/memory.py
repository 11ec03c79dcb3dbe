"""What the C library does with memory that is free again.

As it is set up it hands what lies free at the end of the heap back at once, so that each body of some hundred kilobytes
takes its pages from the system anew and has them filled with zeros: a third of our own path of such a request
(docs/decisions/0032). Owns that setting; knows no Redis, no gunicorn and no settings.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import sys

KEPT_BYTES = 8 * 2**20
"""Free memory that a process keeps for what comes next."""
LARGE_BYTES = 2**20
"""From here on a block is not of the heap: it comes from the system, and goes back when it is free."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def keep_freed() -> None:
    """Elsewhere than with glibc this does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
