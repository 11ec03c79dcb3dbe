"""The connections to engines: which exist, which are idle, and for how long an idle one may be kept.

Owns the counts and the keep-alive rule. It must not know requests or answers; a connection puts itself
here when its answer has wholly arrived.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.upstream.connection import Connection

_MARGIN_S = 1.0  # an engine's clock for an idle connection starts before ours: give up this much earlier
_SWEEP_S = 1.0  # how long an expired connection may keep its socket; taking one checks the exact time
_TIMEOUT = re.compile(rb"\btimeout\s*=\s*\"?(\d{1,9})", re.IGNORECASE)


class Pool:
    """All connections of one transport. There is no limit on their number: an engine queues, not the distributor.

    Args:
        keep_alive_s: longest idle time of a connection. Below uvicorn's 5 s, which is what most engines run on.
    """

    __slots__ = ("_idle", "_sweeper", "idle", "keep_alive_s", "loop", "members")

    def __init__(self, keep_alive_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.keep_alive_s = keep_alive_s
        self.idle = 0
        self.members: set[Connection] = set()
        self._idle: dict[str, dict[Connection, bool]] = {}  # origin -> connections, the latest used last
        self.loop = loop
        self._sweeper: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Pool open={self.open} idle={self.idle} in_use={self.in_use}>"

    @property
    def open(self) -> int:
        return len(self.members)

    @property
    def in_use(self) -> int:
        return len(self.members) - self.idle

    def take(self, origin: str, now_s: float) -> Connection | None:
        """The most lately used idle connection to `origin`: the least likely to have been closed over there."""
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            self.idle -= 1
            if now_s < connection.idle_until_s:
                return connection
            connection.drop()
        return None

    def put(self, connection: Connection) -> None:
        connection.idle_until_s = self.loop.time() + connection.keep_alive_s
        idle = self._idle.get(connection.target.origin)
        if idle is None:
            idle = self._idle[connection.target.origin] = {}
        idle[connection] = True
        self.idle += 1
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(min(_SWEEP_S, self.keep_alive_s), self._sweep)

    def forget(self, connection: Connection) -> None:
        """The connection is closed; does nothing the second time."""
        self.members.discard(connection)
        idle = self._idle.get(connection.target.origin)
        if idle is not None and idle.pop(connection, False):
            self.idle -= 1

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self.members):
            connection.drop()

    def learn_keep_alive_s(self, value: bytes) -> float:
        """How long to keep a connection whose engine said `Keep-Alive: <value>`."""
        said = _TIMEOUT.search(value)
        return self.keep_alive_s if said is None else min(self.keep_alive_s, int(said[1]) - _MARGIN_S)

    def _sweep(self) -> None:
        self._sweeper = None
        now_s = self.loop.time()
        for origin, idle in list(self._idle.items()):
            for connection in [c for c in idle if now_s >= c.idle_until_s]:
                connection.drop()
            if not idle:
                del self._idle[origin]
        if self.idle:
            self._sweeper = self.loop.call_later(min(_SWEEP_S, self.keep_alive_s), self._sweep)
