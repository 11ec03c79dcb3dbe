"""Encoder policies: which encoder gets which item of a request. The twins of `lua/policies/encoders/`.

A worker uses them while Redis is away, on its own state; a property test holds each to its Lua file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from app.balancing.candidate import Weighing


@dataclass(slots=True)
class Encoder:
    """One ready encoder. `credit` is what smooth weighted round robin owes it."""

    speed: float
    unfinished: int = 0
    credit: float = 0.0


EncoderPolicy = Callable[[Sequence[Encoder], int, int], list[int]]
"""(encoders in registration order, cursor, items) -> the index of each item's encoder; moves counts and credits."""


def assign_round_robin(urls: Sequence[str], start: int, count: int) -> tuple[list[str], int]:
    """`count` items from position `start` on, one after the other round the encoders.

    Source: vLLM's encoder-disaggregation example, where the position lived in one process.

    Args:
        urls: the ready encoders in registration order, at least one.
        start: a position of any size; it counts modulo the number of encoders.

    Returns:
        The encoder of each item, and the position of the next one.
    """
    size = len(urls)
    return [urls[(start + i) % size] for i in range(count)], (start + count) % size


def round_robin(encoders: Sequence[Encoder], start: int, items: int) -> list[int]:
    """Trade-offs: exactly even by number, whatever the encoders' speeds and the items' sizes."""
    return [(start + item) % len(encoders) for item in range(items)]


def weighted(encoders: Sequence[Encoder], start: int, items: int) -> list[int]:
    """Smooth weighted round robin by speed (source: nginx, ngx_http_upstream_round_robin.c).

    Nobody owes or is owed more than two rounds (by itself it comes to 1.5, with 64 encoders): else a credit in
    old speeds would starve or flood an encoder in new ones.

    Trade-offs: shares follow the operator's speeds, without bursts; blind to what is running.
    """
    indices = []
    for _ in range(items):
        total = _credit(encoders)
        best = max(range(len(encoders)), key=lambda i: encoders[i].credit)
        encoders[best].credit -= total
        indices.append(best)
    return indices


def _credit(encoders: Sequence[Encoder]) -> float:
    """Each is owed its speed more; all speeds together."""
    total = 0.0
    for encoder in encoders:
        total += encoder.speed
    most = 2 * total
    for encoder in encoders:
        credit = 0.0 if math.isnan(encoder.credit) else max(-most, min(most, encoder.credit))
        encoder.credit = credit + encoder.speed
    return total


def least_unfinished(encoders: Sequence[Encoder], start: int, items: int) -> list[int]:
    """The least unfinished / speed, item by item; ties go round from the cursor.

    Trade-offs: follows slow items and slow encoders; not even by number.
    """
    indices, size = [], len(encoders)
    for item in range(items):
        order = [(start + item + step) % size for step in range(size)]
        best = min(order, key=lambda i: encoders[i].unfinished / encoders[i].speed)
        encoders[best].unfinished += 1
        indices.append(best)
    return indices


ENCODER_POLICIES: dict[str, EncoderPolicy] = {
    "round_robin": round_robin,
    "weighted": weighted,
    "least_unfinished": least_unfinished,
}


def weigh_encoders(policy: str, encoders: Sequence[Encoder], start: int) -> Weighing:
    """What the policy would make of the next item; nothing of it is by chance. One encoder at least."""
    (chosen,) = ENCODER_POLICIES[policy]([replace(encoder) for encoder in encoders], start, 1)
    scores: list[float | None] = [None] * len(encoders)
    if policy == "weighted":
        owed = [replace(encoder) for encoder in encoders]
        _credit(owed)
        scores = [-encoder.credit for encoder in owed]
    elif policy == "least_unfinished":
        scores = [encoder.unfinished / encoder.speed for encoder in encoders]
    return Weighing(scores, [float(index == chosen) for index in range(len(encoders))], ENCODER_RULES[policy])


ENCODER_RULES = {
    "round_robin": "one encoder after the other, from the shared cursor on",
    "weighted": "the encoder that is owed most: smooth weighted round robin by speed",
    "least_unfinished": "the encoder with the least unfinished / speed; equals in turn, from the shared cursor on",
}
