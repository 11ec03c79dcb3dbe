"""Giving back what dead workers had counted, and forgetting the registry where that is asked for.

In each worker: once a second, whoever sees an expired lease subtracts that ledger. In the master of
a host: at once, when a child has died. Keys: workers, unfinished, unfinished:<worker>, sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import redis

from app.errors import StoreUnavailable
from app.settings import Settings
from app.store.clock import redis_ms
from app.store.keys import Keys, of_node_removed, of_worker_given_up
from app.store.locator import Locator
from app.store.registry import Registry
from app.store.scripts import Code, load_scripts

log = logging.getLogger("evenhand.workers")

LOOK_EVERY_S = 1.0
AT_ONCE = 100
"""Expired leases looked at in one turn."""
MASTER_TIMEOUT_S = 1.0
"""The master must not hang on Redis: then the lease does the same work a few seconds later."""


class Reaper:
    """The loop in each worker."""

    def __init__(self, registry: Registry, keys: Keys) -> None:
        self._registry = registry
        self._keys = keys

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        task = asyncio.current_task()
        assert task is not None
        # Not `while True`: under the client library's calls Python 3.11 can lose a cancellation.
        while not task.cancelling():
            with contextlib.suppress(StoreUnavailable, redis.RedisError, OSError):
                await self.reap()
            await asyncio.sleep(LOOK_EVERY_S)

    async def reap(self) -> int:
        """Give up every worker whose lease is over; returns how many requests came back."""
        client, keys = self._registry.redis, self._keys
        now_ms = redis_ms(await client.time())
        expired = await client.zrangebyscore(keys.workers, "-inf", now_ms, start=0, num=AT_ONCE)
        # A session without a lease: somebody deleted `workers`. The living are back within a second,
        # and the script looks again before it gives anybody up.
        unleased = set(await client.hkeys(keys.sessions)) - set(await client.zrange(keys.workers, 0, -1))
        total = 0
        for worker in [*expired, *unleased]:
            names = of_worker_given_up(keys, worker)
            code, returned = await self._registry.run("give_up_worker", names, [worker, "0"])
            if code == Code.DONE:
                total += returned
                # Names that somebody made up may be no text that a log can hold.
                name = str(worker).encode(errors="backslashreplace").decode()
                level = logging.WARNING if returned else logging.INFO  # else another worker was faster, or it was idle
                log.log(level, "worker %s is gone: %d of its requests are given back", name, returned)
        return total


def _master_client(settings: Settings) -> redis.Redis:
    locator = Locator.of(settings.redis_url or "", keys=Keys(settings.namespace), timeout_s=MASTER_TIMEOUT_S)
    return locator.client_now(
        socket_timeout=MASTER_TIMEOUT_S, socket_connect_timeout=MASTER_TIMEOUT_S, decode_responses=True
    )


def give_back(settings: Settings, worker: str) -> None:
    """Give up a worker whose process is known to have ended. Synchronous; raises RedisError, StoreUnavailable."""
    keys, script = Keys(settings.namespace), load_scripts()["give_up_worker"]
    names = of_worker_given_up(keys, worker)
    with _master_client(settings) as client:
        client.execute_command("EVAL", script.text, *script.evalsha(names, (worker, "1"))[2:])


def forget_registry(settings: Settings) -> int:
    """Remove every node unless another worker is alive (`--disable-cache-status`); returns how many."""
    keys, script = Keys(settings.namespace), load_scripts()["remove_node"]
    removed = 0
    with _master_client(settings) as client:
        if client.zcount(keys.workers, redis_ms(client.time()), "+inf"):
            return 0
        for url in client.smembers(keys.nodes):
            names = of_node_removed(keys, url)
            client.execute_command("EVAL", script.text, *script.evalsha(names, (url, "now"))[2:])
            removed += 1
    return removed
