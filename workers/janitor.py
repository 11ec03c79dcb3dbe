"""The janitor: clears away what DistServe leaves behind, on one worker of the deployment at a time.

Owns when to look: at every change of the registry, and every second. What there is to clear is known by
`app.dispatch.distserve`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from app.dispatch.distserve import DistServe
from app.errors import StoreUnavailable
from app.store.registry import Registry

LOOK_EVERY_S = 1.0


class Janitor:
    """One per worker.

    Args:
        leads: whether this worker has the turn: the one that probes.
    """

    def __init__(self, *, distserve: DistServe, registry: Registry, leads: Callable[[], bool]) -> None:
        self._distserve = distserve
        self._leads = leads
        self._awake = asyncio.Event()
        registry.on_change.append(self._awake.set)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        task = asyncio.current_task()
        assert task is not None
        # Not `while True`: under the client library's calls Python 3.11 can lose a cancellation.
        while not task.cancelling():
            self._awake.clear()
            self._distserve.tidy_own()
            if self._leads():
                with contextlib.suppress(StoreUnavailable):
                    await self._distserve.tidy()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._awake.wait()
