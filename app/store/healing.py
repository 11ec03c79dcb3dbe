"""Healing keys: what somebody wrote over them is taken away, so that their owners can write them anew.

Owns the one look at all keys of a deployment and the log line for what it found. It must not know what
belongs into a key: after it the ledgers are restated, the totals recounted and the registry restored, as
after any loss. Touches every key of `keys.py`. Values are never logged: some of them are secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import redis.asyncio as aioredis

from app.store.keys import LEASE, Keys, Shape, shapes, shapes_of
from app.store.scripts import Argument, Script

log = logging.getLogger("evenhand.store")

AHEAD_MS = 86_400_000
"""An instant may be this far ahead of Redis's clock, which wrote it: no lease is longer."""
KEYS_AT_ONCE = 100
"""In one script, about a millisecond: requests must not wait for a look at a whole fleet."""


async def heal(
    client: aioredis.Redis,
    execute: Callable[..., Awaitable[Any]],
    script: Script,
    keys: Keys,
    urls: Iterable[str],
    leases: Iterable[str],
) -> bool:
    """Take away whatever is not as `keys.py` says. `urls`: nodes whose keys are looked at, with those in Redis;
    `leases`: keys that are.

    Returns:
        Whether anything was taken away. Raises RedisError.
    """
    # First the keys that say which others there are.
    found = await _heal(execute, script, keys, shapes(keys))
    async with client.pipeline(transaction=False) as pipe:
        pipe.smembers(keys.nodes)
        pipe.zrange(keys.workers, 0, -1)
        pipe.hkeys(keys.sessions)
        there, leased, connected = await pipe.execute()
    wanted = shapes_of(keys, {*there, *urls}, {*leased, *connected}) | dict.fromkeys(leases, LEASE)
    found |= await _heal(execute, script, keys, wanted)
    return found


async def _heal(
    execute: Callable[..., Awaitable[Any]], script: Script, keys: Keys, wanted: Mapping[str, Shape]
) -> bool:
    found = False
    items = list(wanted.items())
    for first in range(0, len(items), KEYS_AT_ONCE):
        part = items[first : first + KEYS_AT_ONCE]
        names = [keys.version, *(name for name, _ in part)]
        arguments: list[Argument] = [AHEAD_MS, *(word for _, shape in part for word in shape)]
        _, healed = await execute(script, names, arguments)
        for name, was, dropped in zip(*[iter(healed)] * 3, strict=True):
            found = True
            if dropped:
                log.warning("%r held %d values that are no %s; they are replaced", name, dropped, wanted[name].values)
            else:
                log.warning("%r was a %s and no %s; it is replaced", name, was, wanted[name].type)
    return found
