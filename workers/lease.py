"""A lease: what one worker of the whole deployment does, turn after turn, and another goes on with when it ends.

Owns who has the turn, and the loop of the turns. It must not know what is done in them. Keys: the one it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from app.errors import StoreUnavailable
from app.store.registry import Registry
from app.store.scripts import Code

log = logging.getLogger("evenhand.workers")

AWAY = (StoreUnavailable, RedisError, OSError)


class Lease:
    """One per worker and key.

    `held`: whether this worker has the turn; `renewed_s`: when Redis last said whose it is, by the loop's clock.
    """

    def __init__(self, *, registry: Registry, key: str, worker: str, lease_ms: int) -> None:
        self.held = False
        self.renewed_s = 0.0
        self._registry = registry
        self._key = key
        self._worker = worker
        self._lease_ms = lease_ms
        registry.leases.append(key)

    def __repr__(self) -> str:
        return f"<Lease {self._key} held={self.held}>"

    async def hold(self) -> bool:
        """Take it if it is free, renew it if it is held. Raises RedisError, StoreUnavailable, OSError."""
        self.held = await self._say(self._lease_ms)
        return self.held

    async def give_back(self) -> None:
        """Whoever stops in good order leaves no gap of a whole lease."""
        self.held = False
        with contextlib.suppress(*AWAY):
            await self._say(0)

    async def take_turns(
        self, turn: Callable[[], Awaitable[None]], rest: Callable[[], None], pause: Callable[[], Awaitable[None]]
    ) -> None:
        """Until cancelled. It is not given back: something may have to end before.

        Args:
            turn: what the holder does; rest: what a worker does that has not the turn, or no longer; pause: between
                two turns.
        """
        task = asyncio.current_task()
        assert task is not None
        # Not `while True`: under the client library's calls Python 3.11 can lose a cancellation.
        while not task.cancelling():
            try:
                if await self.hold():
                    await turn()
                else:
                    rest()
            except AWAY as e:
                log.debug("no turn: %s", e)
            await pause()

    async def _say(self, lease_ms: int) -> bool:
        (code,) = await self._registry.run("hold_lease", [self._key], [self._worker, lease_ms])
        self.renewed_s = asyncio.get_running_loop().time()
        return bool(code == Code.DONE)
