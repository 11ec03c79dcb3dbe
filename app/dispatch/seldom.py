"""Warnings about faults that every request may meet: one line a minute for each node and reason, with the count.

Owns what has been said when. It must not know what the faults are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0
REMEMBERED = 1024
"""Nodes and reasons; nodes come and go, and reasons are an engine's words."""


class Seldom:
    """One for each who warns. `clock`: monotonic seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._told: dict[tuple[str, str], tuple[float, int]] = {}  # (node, reason) -> when, and how often since

    def __repr__(self) -> str:
        return f"<Seldom {len(self._told)}>"

    def warn(self, node: str, reason: str) -> None:
        """`reason` is the line; it names the node."""
        now_s = self._clock()
        at_s, since = self._told.pop((node, reason), (-EVERY_S, 0))
        if now_s - at_s < EVERY_S:
            self._told[node, reason] = at_s, since + 1
            return
        self._log.warning("%s%s", reason, f" ({since} times more since the last such line)" if since else "")
        self._told[node, reason] = now_s, 0
        if len(self._told) > REMEMBERED:  # the first is the one that happened longest ago
            del self._told[next(iter(self._told))]
