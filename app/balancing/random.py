"""random: a node with a chance proportional to its speed (LMDeploy's `random`).

Trade-offs: needs no counts, so it is right with stale state too; but the spread of the counts grows
with the square root of the load, and a node that is stuck keeps its full share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.balancing.candidate import Candidate, Weighing


def choose(candidates: Sequence[Candidate], draws: tuple[float, float]) -> tuple[int, bool]:
    """Walk along the speeds to the point that the first draw names. Twin: lua/policies/random.lua."""
    total = 0.0
    for candidate in candidates:
        total += candidate.speed
    point = draws[0] * total
    for index, candidate in enumerate(candidates):
        point -= candidate.speed
        if point < 0:
            return index, False
    return len(candidates) - 1, False


def weigh(candidates: Sequence[Candidate]) -> Weighing:
    total = sum(candidate.speed for candidate in candidates)
    chances = [candidate.speed / total for candidate in candidates]
    if total == math.inf:  # no point of it is within anybody's speed: the walk ends at the last one
        chances = [0.0] * (len(candidates) - 1) + [1.0]
    return Weighing([None] * len(candidates), chances, "by chance, in proportion to speed")
