"""What a decision saw: the counts with which a node was taken, of that very moment.

Owns which counts are read beside an acquire, and the candidates that are made of them for people. It must not know
connections. Reads unfinished, latency_mean, encoder_credit, learned.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from app.balancing import WEIGHS, Candidate, Encoder, weigh_encoders
from app.journey import Weighed
from app.store.keys import Keys
from app.store.scripts import packed_command
from app.store.snapshot import Pool

KEPT = 16
"""Candidates that are shown of one decision."""

Score = Callable[
    [Pool, Sequence[int], Sequence[float | None], Sequence[float], Sequence[float | None]], list[float | None]
]
"""(pool, unfinished, mean latencies, credits, learned speeds) -> the scores of its candidates."""


def of_nodes(strategy: str) -> Score:
    weigh = WEIGHS[strategy]
    return lambda pool, counts, means, _, learned: (
        weigh([*map(Candidate, pool.speeds, counts, means, [0] * len(counts), learned)]).scores
    )


def of_encoders(policy: str) -> Score:
    return lambda pool, counts, _, credits, __: (
        weigh_encoders(policy, [*map(Encoder, pool.speeds, counts, credits)], 0).scores
    )


class Sight:
    """Of one acquire. `commands` go before it in one MULTI; `take` gets their replies."""

    def __init__(self, keys: Keys, pools: Sequence[Pool], score: Score) -> None:
        self.pools = pools
        self._score = score
        self._urls = [url for pool in pools for url in pool.urls]
        names = (keys.unfinished, keys.latency_mean, keys.encoder_credit, keys.learned)
        self.commands = [packed_command(("HMGET", name, *self._urls)) for name in names]
        self._found: list[list[float | None]] | None = None

    def __repr__(self) -> str:
        return f"<Sight of {len(self._urls)} candidates, taken={self._found is not None}>"

    def take(self, replies: Sequence[Any]) -> None:
        self._found = [self._numbers(reply) for reply in replies]

    def _numbers(self, reply: Any) -> list[float | None]:
        # An error where somebody wrote over the key, which the strategy perhaps does not read.
        return [*map(_number, reply)] if isinstance(reply, list) else [None] * len(self._urls)

    def candidates(self, number: int, chosen: str) -> tuple[list[Weighed], int]:
        """Those of pool `number`, the best first and at most 16, the chosen one among them; how many are left off."""
        if self._found is None:
            return [], 0
        pool = self.pools[number]
        first = sum(len(before.urls) for before in self.pools[:number])
        counts, means, credits, learned = (found[first : first + len(pool.urls)] for found in self._found)
        unfinished = [int(count or 0) for count in counts]
        scores = self._score(pool, unfinished, means, [credit or 0.0 for credit in credits], learned)
        seen = [
            Weighed(url, score if score is None or math.isfinite(score) else None, count, speed, mean)
            for url, score, count, speed, mean in zip(pool.urls, scores, unfinished, pool.speeds, means, strict=True)
        ]
        seen.sort(key=lambda one: (one.score is None, one.score or 0.0))
        kept = seen[:KEPT]
        if all(one.node != chosen for one in kept):
            kept[-1] = next(one for one in seen if one.node == chosen)
        return kept, len(seen) - len(kept)


def _number(text: bytes | None) -> float | None:
    with contextlib.suppress(ValueError):
        if text is not None and math.isfinite(number := float(text)):
            return number
    return None
