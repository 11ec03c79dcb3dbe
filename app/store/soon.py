"""When what is only a figure goes to Redis: that of a quarter of a second together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

NOTE_AFTER_S = 0.25
"""What an operator sees of a figure may be so old; the prober's grace for a busy node is counted in seconds."""


class Soon:
    """Calls `note` once, NOTE_AFTER_S after `start`. `timer`: None while there is nothing to note."""

    __slots__ = ("_note", "timer")

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note
        self.timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Where `timer` is None."""
        self.timer = asyncio.get_running_loop().call_later(NOTE_AFTER_S, self._note)

    def stop(self) -> None:
        """It is noted now."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
