"""random: a node with a chance proportional to its speed (LMDeploy's `random`).

Trade-offs: needs no counts, so it is right with stale state too; but the spread of the counts grows
with the square root of the load, and a node that is stuck keeps its full share.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.balancing.candidate import Candidate


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
