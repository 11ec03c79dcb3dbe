"""How long a connection waits for its client.

Owns the clock of one connection: what its client owes at the moment, and since when. It must not know HTTP; the
protocol says what is owed and what follows when it does not come.

A client may be slow as long as it gets on: `ENOUGH_BYTES` within the limit, of a body it sends or an answer it reads.
A request's head is owed as a whole, or a byte a minute would hold a connection for good. One timer a connection looks
at it a few times within the limit, because a timer that every read moves would cost more than the read.

Source: CVE-2007-6750 (slowloris); Apache's mod_reqtimeout has the same two kinds of limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

ENOUGH_BYTES = 64 * 1024
LOOKS = 8  # within the limit: what is owed is missed at most an eighth later


class Kind(Enum):
    HEAD = "the head of its request"
    BODY = "the body of its request"
    ANSWER = "reading its answer"


@dataclass(frozen=True)
class Owed:
    """What a client owes: `number` tells one head, body or stop from the next, `moved_bytes` how far it has got."""

    kind: Kind
    number: int
    moved_bytes: int = 0


class Patience:
    """Looks from now on until `end`.

    Args:
        limit_s: 0 waits for ever.
        owed: what the client owes now; None: nothing, or it is not its fault.
        give_up: called once it was owed for `limit_s`; may be called again later.
    """

    __slots__ = ("_give_up", "_limit_s", "_loop", "_owed", "_seen", "_since_s", "_timer")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        owed: Callable[[], Owed | None],
        give_up: Callable[[Owed], None],
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._owed = owed
        self._give_up = give_up
        self._seen: Owed | None = None
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        if limit_s:
            self._look()

    def __repr__(self) -> str:
        return f"<Patience {self._seen} since {self._since_s:.1f} of {self._limit_s:g} s>"

    def end(self) -> None:
        """Look no more, and let go of whom it asked."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owed, self._give_up = _nothing, _nothing

    def _look(self) -> None:
        now_s, owed, seen = self._loop.time(), self._owed(), self._seen
        self._timer = self._loop.call_later(self._limit_s / LOOKS, self._look)
        if owed is None or seen is None or _gets_on(owed, seen):
            self._seen, self._since_s = owed, now_s
        elif now_s - self._since_s >= self._limit_s:
            self._seen = None
            self._give_up(owed)


def _nothing(*_: Owed) -> None:
    pass


def _gets_on(owed: Owed, seen: Owed) -> bool:
    same = (owed.kind, owed.number) == (seen.kind, seen.number)
    return not same or owed.moved_bytes - seen.moved_bytes >= ENOUGH_BYTES
