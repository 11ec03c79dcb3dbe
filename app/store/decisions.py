"""Decisions that somebody watches: the last ones of all workers together.

Owns STREAM decisions (entries of one field, a JSON document) and STRING watched, which is there while somebody looks.
A document is written when its request is over. They are figures: lost while Redis is away. It must not know HTTP.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from app.journey import Journey, Try
from app.metrics.figures import Served, text_of
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.registry import Registry

KEPT = 200
GONE_AFTER_S = 60
WHOLE_TRIES, KEPT_STEPS = 8, 32
"""Of one request: so many nodes that it was given have their candidates, so many and so many legs are told of at all.
One with hundreds of media items has as many."""
WATCHED_S = 5
"""Whoever looks says so once a second; one who is late by a few is still looking."""


class Decisions:
    """One per worker: writes down those of its requests that were decided in sight."""

    def __init__(self, *, ledger: Ledger, keys: Keys) -> None:
        self._ledger = ledger
        self._key = keys.decisions

    def __repr__(self) -> str:
        return f"<Decisions watched={self._ledger.watched}>"

    def note(self, ended: list[Served]) -> None:
        """Of requests that are over, those that are watched and were to be given to a node."""
        for served in ended:
            journey = served.journey
            if journey is None or not journey.watched:
                continue
            if journey.tries or served.outcome == "no_node":
                journey.settle(served.ended_s)
                text = msgspec.json.encode(document(served, journey, self._ledger.worker))
                self._ledger.note("XADD", self._key, "MAXLEN", KEPT, "*", "decision", text)
                self._ledger.note("EXPIRE", self._key, GONE_AFTER_S)


def document(served: Served, journey: Journey, worker: str) -> dict[str, Any]:
    """A decision without `id` and `time`, which the stream gives to it. What clients choose is cut to a length."""
    return {
        "request": text_of(served.request.decode("latin-1")),
        "worker": worker,
        "model": text_of(served.model),
        "path": text_of(served.path),
        "outcome": served.outcome,
        "status": served.status,
        "seconds": round(served.ended_s - served.began_s, 6),
        "first_byte_s": round(served.first_s - served.began_s, 6) if served.chunks else None,
        "node": served.node,
        "tries": [_try(one, whole=number < WHOLE_TRIES) for number, one in enumerate(journey.tries[:KEPT_STEPS])],
        "legs": [
            {
                "node": leg.node,
                "stage": leg.stage,
                "status": leg.status,
                "seconds": round(leg.seconds, 6),
                "error": None if leg.error is None else text_of(leg.error),
            }
            for leg in journey.legs[-KEPT_STEPS:]
        ],
    }


def _try(one: Try, *, whole: bool) -> dict[str, Any]:
    shown = one.candidates if whole else []
    return {
        "node": one.node,
        "stage": one.stage,
        "score": next((seen.score for seen in one.candidates if seen.node == one.node), None),
        "candidates": [
            {
                "node": seen.node,
                "score": seen.score,
                "unfinished": seen.unfinished,
                "speed": seen.speed,
                "mean_latency_s": seen.mean_latency_s,
            }
            for seen in shown
        ],
        "left_off": one.left_off + len(one.candidates) - len(shown),
    }


async def watch(registry: Registry, keys: Keys) -> None:
    """Say that somebody looks, for some seconds. Raises StoreUnavailable."""
    await registry.guarded(lambda: registry.redis.set(keys.watched, f"{time.time():.0f}", ex=WATCHED_S))


async def since(registry: Registry, keys: Keys, after: str) -> list[dict[str, Any]]:
    """The decisions behind the entry `after` ("": all), the oldest first. Raises StoreUnavailable."""
    begin = f"({after}" if after else "-"
    entries: Any = await registry.guarded(lambda: registry.redis.xrange(keys.decisions, begin, "+", count=KEPT))
    return [found for name, fields in entries if (found := _read(name, fields)) is not None]


def _read(name: str, fields: dict[str, str]) -> dict[str, Any] | None:
    """None for what somebody else put there."""
    try:
        found = msgspec.json.decode(fields["decision"], type=dict[str, Any])
    except (KeyError, msgspec.DecodeError, UnicodeError):
        return None
    return {**found, "id": name, "time": int(name.partition("-")[0]) / 1000}
