"""Prefill nodes whose caches decode nodes have still to fetch: what a drain waits for beside running requests.

A prefill node's own count is given back at the end of its answer, and its cache is needed until decode's first
bytes. Owns HASH handing:<worker> (prefill url -> hand-overs of this worker that go on). Written absolutely, on the
ordered hot connection, behind nothing that waits: the note of a hand-over is there before the count is given back.
What a dead worker wrote counts no more, since its lease has ended, and expires. It must not know HTTP.
"""

from __future__ import annotations

from collections import Counter

from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.registry import Registry, as_unavailable, number

EXPIRES_S = 86_400
"""After the last hand-over that began: longer than any drain that waits for one is likely to be."""


class Handing:
    """One per worker."""

    def __init__(self, *, ledger: Ledger, keys: Keys, worker: str) -> None:
        self._ledger = ledger
        self._key = keys.handing(worker)
        self._counts: Counter[str] = Counter()
        ledger.on_told_again.append(self._note_again)

    def __repr__(self) -> str:
        return f"<Handing {self._counts.total()} at {len(self._counts)} nodes>"

    def begin(self, prefill: str) -> None:
        self._counts[prefill] += 1
        self._note(prefill)

    def end(self, prefill: str) -> None:
        self._counts[prefill] -= 1
        self._note(prefill)

    def _note(self, prefill: str) -> None:
        if count := self._counts[prefill]:
            self._ledger.note("HSET", self._key, prefill, count)
            self._ledger.note("EXPIRE", self._key, EXPIRES_S)
        else:
            del self._counts[prefill]
            self._ledger.note("HDEL", self._key, prefill)

    def _note_again(self) -> None:
        self._ledger.note("DEL", self._key)
        for prefill in list(self._counts):
            self._note(prefill)


async def fetched(registry: Registry, keys: Keys, prefill: str) -> bool:
    """Whether nobody uses a draining node: no request runs there, and no decode node has still to fetch from it.

    One look at both, since a request goes from the one to the other. Raises StoreUnavailable.
    """
    with as_unavailable():
        workers = await registry.redis.zrange(keys.workers, 0, -1)
        async with registry.redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.unfinished, prefill)
            for worker in workers:
                pipe.hget(keys.handing(str(worker)), prefill)
            counts = await pipe.execute()
    return not any(map(number, counts))
