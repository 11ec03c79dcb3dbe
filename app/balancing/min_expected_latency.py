"""min_expected_latency: the node with the least unfinished / speed (LMDeploy's default strategy).

Source: lmdeploy/serve/proxy/proxy.py, `get_node_url`: unfinished over speed, ties at random.

Trade-offs: exact with exact counts, and simple; but it takes every request for the same amount of
work, believes the operator's speeds, and looks at the load before this request, so that an idle slow
node ties with an idle fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.balancing.candidate import Candidate, Weighing


def choose(candidates: Sequence[Candidate], draws: tuple[float, float]) -> tuple[int, bool]:
    """The least unfinished / speed; ties by the first draw. Twin: lua/policies/min_expected_latency.lua."""
    scores = [candidate.unfinished / candidate.speed for candidate in candidates]
    least = min(scores)
    ties = [index for index, score in enumerate(scores) if score == least]
    return ties[int(draws[0] * len(ties))], False


def weigh(candidates: Sequence[Candidate]) -> Weighing:
    scores = [candidate.unfinished / candidate.speed for candidate in candidates]
    least = min(scores)
    ties = scores.count(least)
    return Weighing(
        [*scores],
        [1 / ties if score == least else 0.0 for score in scores],
        "the node with the least unfinished / speed; among equals by chance",
    )
