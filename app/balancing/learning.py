"""How fast a node is, learned from its answers. The twin of `lua/learn_speeds.lua`.

A sample of a node's speed is `sqrt(n) * work / latency`, with n requests on the node, this one too. Why the root: with
continuous batching a step takes a + b * n, so an answer takes work * (a + b * n) / speed: between not at all (b = 0)
and in full (a = 0, or a full batch with a queue) as n. Nobody tells us a and b. Halfway between is n to the power of
1/2, right at n = a / b and never wrong by more than the root of what the counts of two nodes differ by. It has no unit
and no constant that would fit one engine. Errors do not build up: what a node gets more of by too high a figure lowers
its next samples by more than the root of it raises them.

Source: the law of a batch is what vLLM's and SGLang's schedulers do in a decode step; that the root of n suffices is
measured (docs/balancing.md), against exponents from 0.3 to 0.7, against (a / b + n) with a / b given and learned.

Trade-offs: only the ratio of two figures means anything. It takes the load for the same on all nodes while it learns:
where one gets other requests (longer prompts with the same work, another model), it counts as slower. An engine whose
answers take no longer with more of them gets more than its share (about the square of its speed), a full one less. A
client that reads slowly makes its node look slow, and media in a request count by their bytes, which is too much: both
meet all nodes alike, and the clipping bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

HALF_LIFE_S = 8.0
"""Of a sample's weight: after 30 s of traffic what was before counts for less than a tenth."""
KEPT = 8.0
"""Samples whose weight stays however long ago they were: an idle node keeps its speed, and the first sample after a
night changes it by no more than any other after few."""
CLIP = math.log(4)
"""A sample counts as at most four times as fast or as slow as what is known: an outlier moves little."""
SHOWN = 4
"""Answers after which a node that came, or came back, counts in full; until then one fifth, two, ..."""


class Learned(NamedTuple):
    """Of one node. `weight`: in samples; `shown`: answers since it came or came back, at most SHOWN."""

    speed: float
    weight: float
    shown: int
    at_s: float

    @property
    def counted(self) -> float:
        """The speed to go by: slow at the start."""
        return self.speed * (1 + self.shown) / (1 + SHOWN)


def learn(before: Learned | None, rates: Sequence[float], unfinished: int, now_s: float) -> Learned:
    """What is known of a node after answers with these rates, oldest first: at least one, each work / latency."""
    root = math.sqrt(max(unfinished, 0) + 1)
    speed, weight, shown, at_s = before or Learned(root * rates[0], 0.0, 0, now_s)
    weight = max(weight * 0.5 ** (max(now_s - at_s, 0.0) / HALF_LIFE_S), min(weight, KEPT))
    for rate in rates:
        off = math.log(root * rate / speed)
        speed *= math.exp(max(-CLIP, min(CLIP, off)) / (weight + 1))
        weight += 1
    return Learned(speed, weight, min(shown + len(rates), SHOWN), now_s)
