"""Pairs between which a cache is still to be moved: what a drain waits for beside running requests, and the undoing
of a link.

A prefill node's own count is given back at the end of its answer, and its cache is needed until decode's first
bytes. Owns HASH handing:<worker> (`<prefill>|<decode>` -> hand-overs of this worker that go on). Written absolutely,
on the ordered hot connection, behind nothing that waits: the note of a hand-over is there before the count is given
back. What a dead worker wrote goes with its counts. It must not know HTTP.
"""

from __future__ import annotations

from collections import Counter

from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.links import ends_of, pair_of
from app.store.registry import Registry, as_unavailable, number

EXPIRES_S = 86_400
"""After the last hand-over that began, where no worker is left to clear away what a dead one wrote."""


class Handing:
    """One per worker."""

    def __init__(self, *, ledger: Ledger, keys: Keys, worker: str) -> None:
        self._ledger = ledger
        self._key = keys.handing(worker)
        self._counts: Counter[str] = Counter()
        ledger.on_told_again.append(self._note_again)

    def __repr__(self) -> str:
        return f"<Handing {self._counts.total()} between {len(self._counts)} pairs>"

    def begin(self, prefill: str, decode: str) -> None:
        self._counts[pair_of(prefill, decode)] += 1
        self._note(pair_of(prefill, decode))

    def end(self, prefill: str, decode: str) -> None:
        self._counts[pair_of(prefill, decode)] -= 1
        self._note(pair_of(prefill, decode))

    def _note(self, pair: str) -> None:
        if count := self._counts[pair]:
            self._ledger.note("HSET", self._key, pair, count)
            self._ledger.note("EXPIRE", self._key, EXPIRES_S)
        else:
            del self._counts[pair]
            self._ledger.note("HDEL", self._key, pair)

    def _note_again(self) -> None:
        self._ledger.note("DEL", self._key)
        for pair in list(self._counts):
            self._note(pair)


async def pairs_in_use(registry: Registry, keys: Keys) -> set[str]:
    """The pairs of all workers that have a hand-over going on. Raises StoreUnavailable."""
    _, pairs = await _look(registry, keys)
    return pairs


async def fetched(registry: Registry, keys: Keys, prefill: str) -> bool:
    """Whether nobody uses a draining node: no request runs there, and no decode node has still to fetch from it.

    One look at both, since a request goes from the one to the other. Raises StoreUnavailable.
    """
    unfinished, pairs = await _look(registry, keys, prefill)
    return not unfinished and not any(ends_of(pair)[0] == prefill for pair in pairs)


async def _look(registry: Registry, keys: Keys, url: str = "") -> tuple[int, set[str]]:
    with as_unavailable():
        workers = await registry.redis.zrange(keys.workers, 0, -1)
        async with registry.redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.unfinished, url)
            for worker in workers:
                pipe.hgetall(keys.handing(str(worker)))
            unfinished, *handing = await pipe.execute()
    return number(unfinished), {pair for found in handing for pair, count in found.items() if number(count)}
