"""The retry budget: how many requests of the whole deployment an engine may get a second time.

Owns HASH retries and reads HASH requests, which workers that left by now have noted too (lua/take_retry.lua).
Without it, engines that fail under load get more of it from every retry. While Redis is away each worker keeps to
its own share.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from redis.exceptions import RedisError

from app.store.keys import Keys
from app.store.ledger import WINDOW_S, Ledger
from app.store.registry import Registry
from app.store.scripts import Code

log = logging.getLogger("evenhand.store")

RATIO = 0.2
FLOOR = 20
"""Retries within the window that are always affordable: a deployment with little traffic has them too."""


class RetryBudget:
    """One per worker."""

    def __init__(self, *, registry: Registry, ledger: Ledger, keys: Keys) -> None:
        self._registry = registry
        self._ledger = ledger
        self._keys = keys
        self._own: deque[float] = deque()

    async def take(self) -> bool:
        """Whether one more request may be sent again; counts it if so. Never fails, waits for Redis once."""
        now_s = time.monotonic()
        while self._own and self._own[0] <= now_s - WINDOW_S:
            self._own.popleft()
        affordable = await self._ask()
        if affordable is None:
            affordable = len(self._own) + 1 <= FLOOR / self._ledger.workers + RATIO * self._ledger.requests_in_window
        if affordable:
            self._own.append(now_s)
        else:
            log.warning("a request is not sent again: too many were within the last %d s", WINDOW_S)
        return affordable

    async def _ask(self) -> bool | None:
        if self._ledger.trouble is not None:
            return None
        try:
            names = (self._keys.retries, self._keys.requests)
            (code,) = await self._registry.run("take_retry", names, [WINDOW_S, str(RATIO), FLOOR])
        except (RedisError, OSError, TimeoutError):
            return None
        return bool(code == Code.DONE)
