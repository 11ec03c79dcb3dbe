"""How fast this worker's answers were: what its local decisions go by, and what it tells Redis to learn from.

Owns the samples that are not told yet, and what this worker has learned from its own. It must not know connections or
the rule (`app.balancing.learning`). Keys: nodes, unfinished, learned, learned_since, learning:*, load_index, load_sums,
load:<group> (through lua/learn_speeds.lua).

As latencies they are figures: lost while Redis is away, told of a quarter of a second together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from app.balancing.learning import Learned, learn
from app.store.keys import Keys
from app.store.latencies import NODES_A_NOTE
from app.store.load_index import LoadIndex
from app.store.scripts import Argument, Script
from app.store.soon import Soon

SAMPLES = 100
"""Of one node in one note: more than a node answers in a quarter of a second, and a bound for what Redis reads."""
SHORTEST_S = 1e-6


class Speeds:
    """See the module. `counts`: this worker's unfinished ones, read; `index` tells where nodes stand in the order of
    loads; `send` gets commands, and may lose them."""

    def __init__(
        self,
        *,
        keys: Keys,
        script: Script,
        counts: Mapping[str, int],
        index: Callable[[], LoadIndex],
        send: Callable[[Sequence[Argument]], None],
    ) -> None:
        self._keys = keys
        self._script = script
        self._counts = counts
        self._index = index
        self._send = send
        self._learned: dict[str, Learned] = {}
        self._rates: dict[str, list[float]] = {}  # url -> work per second, oldest first, not told yet
        self._soon = Soon(self.note)

    def __repr__(self) -> str:
        return f"<Speeds of {len(self._learned)} nodes, not told={sum(map(len, self._rates.values()))}>"

    def counted(self, url: str) -> float | None:
        """By this worker's own answers; None without any."""
        learned = self._learned.get(url)
        return learned.counted if learned else None

    def add(self, url: str, work: float, latency_s: float, nodes: Collection[str]) -> None:
        """An answer of `url` ended well. `nodes`: those that there are; others are forgotten.

        Args:
            work: > 0, in tokens, see `app.dispatch.work`.
        """
        if len(self._learned) > 2 * len(nodes) + 16:  # nodes come and go
            self._learned = {other: learned for other, learned in self._learned.items() if other in nodes}
        rates = self._rates.setdefault(url, [])
        if len(rates) < SAMPLES:
            rates.append(work / max(latency_s, SHORTEST_S))
        if self._soon.timer is None:
            self._soon.start()

    def note(self) -> None:
        """Learn from what has come, and send it."""
        self._soon.stop()
        fresh, self._rates = self._rates, {}
        now_s = time.monotonic()
        for url, rates in fresh.items():
            self._learned[url] = learn(self._learned.get(url), rates, self._counts.get(url, 0), now_s)
        keys, urls, index = self._keys, list(fresh), self._index()
        for first in range(0, len(urls), NODES_A_NOTE):
            some = urls[first : first + NODES_A_NOTE]
            names = [keys.nodes, keys.unfinished, keys.learned, keys.learned_since, keys.load_index, keys.load_sums]
            arguments: list[Argument] = ["", index.name if len(index) else ""]
            for url in some:
                place = index.place(url)
                names += [keys.learning(url), keys.load(place.group if place else 0)]
                arguments += [url, repr(place.speed) if place else "", len(fresh[url])]
                arguments += [f"{rate:.6g}" for rate in fresh[url]]
            self._send(self._script.evalsha(names, arguments))
