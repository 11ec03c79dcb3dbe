"""Pairs between which a cache is still to be moved: what a drain waits for beside running requests, and the undoing
of a link.

A prefill node's own count is given back at the end of its answer, and its cache is needed until decode's first
bytes. Owns HASH handing:<worker> (`<prefill>|<decode>` -> hand-overs of this worker that go on). Written absolutely,
on the ordered hot connection, behind nothing that waits: that a pair hands over is there before the count is given
back. How often it does, and that it no longer does, is noted four times a second: who reads it only wants to know
whether anybody still needs the pair. What a dead worker wrote goes with its counts. It must not know HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.links import ends_of, pair_of
from app.store.registry import Registry, as_unavailable, number
from app.store.soon import Soon

EXPIRES_S = 86_400
"""After the last hand-over that began, where no worker is left to clear away what a dead one wrote."""


class Handing:
    """One per worker."""

    def __init__(self, *, ledger: Ledger, keys: Keys, worker: str) -> None:
        self._ledger = ledger
        self._key = keys.handing(worker)
        self._counts: Counter[str] = Counter()
        self._noted: dict[str, int] = {}  # what the hash holds
        self._soon = Soon(self._note_changes)
        ledger.on_told_again.append(self._note_again)

    def __repr__(self) -> str:
        return f"<Handing {self._counts.total()} between {len(self._counts)} pairs>"

    def begin(self, prefill: str, decode: str) -> None:
        pair = pair_of(prefill, decode)
        self._counts[pair] += 1
        if pair not in self._noted:
            self._note([pair])
        elif self._soon.timer is None:
            self._soon.start()

    def end(self, prefill: str, decode: str) -> None:
        self._counts[pair_of(prefill, decode)] -= 1
        if self._soon.timer is None:
            self._soon.start()

    def _note_changes(self) -> None:
        self._soon.stop()
        over = [pair for pair in self._noted if not self._counts[pair]]
        if over:
            self._ledger.note("HDEL", self._key, *over)
        for pair in over:
            del self._noted[pair], self._counts[pair]
        self._note(self._noted)

    def _note(self, pairs: Iterable[str]) -> None:
        counts = {pair: self._counts[pair] for pair in pairs}
        if counts:
            self._noted |= counts
            self._ledger.note("HSET", self._key, *(word for entry in counts.items() for word in entry))
            self._ledger.note("EXPIRE", self._key, EXPIRES_S)

    def _note_again(self) -> None:
        self._ledger.note("DEL", self._key)
        self._noted.clear()
        self._counts = +self._counts
        self._note(self._counts)


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
