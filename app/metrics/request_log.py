"""One line for each request that has ended, or for those that failed: what it was, and what became of it.

Owns the fields of that line and how many there may be. It is told many at once, ten times a second, so it costs a
request nothing. It must not know where lines go. Keys, query strings and bodies never come here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from app.journey import Leg
from app.lines import structured
from app.metrics.figures import Served

LINES_AT_ONCE = 100
"""Of the requests that ended in one tenth of a second; of more than that only the number is told."""
LONGEST = 200
"""Characters of a model, a path, a node."""
REASON_LONGEST = 400
LEGS = 8

Fields = dict[str, Any]


class RequestLog:
    """Told of requests that have ended, by `Figures.on_ended`.

    Args:
        successes: the share of those that ended well that have a line, 0..1; all others have one.
        style: text or json; in text a request's legs are words.
    """

    def __init__(self, successes: float, style: str, draw: Callable[[], float] = random.random) -> None:
        self._successes = successes
        self._legs = legs_as_text if style == "text" else legs_as_objects
        self._draw = draw
        self._log = structured(logging.getLogger("evenhand.request"))

    def __repr__(self) -> str:
        return f"<RequestLog successes={self._successes}>"

    def __call__(self, ended: list[Served]) -> None:
        told = [served for served in ended if served.outcome != "ok"]
        failures = len(told)
        if self._successes:
            told += [served for served in ended if served.outcome == "ok" and self._draw() < self._successes]
        kept = told[:LINES_AT_ONCE]  # failures first
        for served in sorted(kept, key=_ended_s):
            say = self._log.info if served.outcome == "ok" else self._log.warning
            say("request ended", **self.fields(served))
        if left := len(told) - len(kept):
            failed = max(failures - len(kept), 0)
            self._log.warning(f"{left} more requests ended at the same time, {failed} of them not well")

    def fields(self, served: Served) -> Fields:
        if served.journey is not None:
            served.journey.settle(served.ended_s)
        return {
            "request": printable(served.request.decode("latin-1")),
            "model": printable(served.model) or None,
            "path": printable(served.path),
            "node": printable(served.node) or None,
            "outcome": str(served.outcome),
            "status": served.status,
            "reason": printable(served.reason, REASON_LONGEST) or None,
            "seconds": round(served.ended_s - served.began_s, 6),
            "first_byte_s": round(served.first_s - served.began_s, 6) if served.chunks else None,
            "chunks": served.chunks,
            "bytes_in": served.bytes_in,
            "bytes_out": served.bytes_out,
            "client": printable(served.client[0]) if served.client else None,
            "key": served.key or None,
            "legs": self._legs(served.journey.legs) if served.journey is not None and served.journey.legs else None,
        }


def legs_as_objects(legs: list[Leg]) -> list[Fields]:
    return [
        {
            "node": printable(leg.node),
            "stage": leg.stage,
            "status": leg.status,
            "seconds": round(leg.seconds, 6),
            "error": leg.error,
        }
        for leg in legs[-LEGS:]
    ]


def legs_as_text(legs: list[Leg]) -> str:
    """`prefill=http://a:1:0.120s decode=http://b:1:1.034s:engine_broke_off`; the last ones, of many."""
    words = []
    for leg in legs[-LEGS:]:
        fault = leg.error or (leg.status if leg.status is not None and leg.status >= 400 else None)
        words.append(f"{leg.stage}={printable(leg.node)}:{leg.seconds:.3f}s{f':{fault}' if fault else ''}")
    return " ".join(words)


def printable(text: str, longest: int = LONGEST) -> str:
    """On one line, without anything that a terminal obeys or UTF-8 lacks, and not too long."""
    text = text[:longest]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text


def _ended_s(served: Served) -> float:
    return served.ended_s
