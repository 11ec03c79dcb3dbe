"""What a policy sees of a node, and what a policy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """One node that may serve the request.

    `speed` > 0 is already resolved (see `store.snapshot.effective_speeds`); `mean_latency_s` is the
    mean of the latency window, None without history; `explored` counts the explorations since the
    last success. `learned` > 0 is its learned speed, None where it has none.
    """

    speed: float
    unfinished: int
    mean_latency_s: float | None = None
    explored: int = 0
    learned: float | None = None


class Weighing(NamedTuple):
    """What the next choice goes by, candidate by candidate.

    `scores`: what the policy compares, less is better, None where it compares nothing; `chances`: the exact
    probability of being chosen; `rule`: the policy in words.
    """

    scores: list[float | None]
    chances: list[float]
    rule: str


Policy = Callable[[Sequence[Candidate], tuple[float, float]], tuple[int, bool]]
"""(candidates, two draws in [0, 1)) -> (index of the chosen one from 0, whether it explores)."""
Weigh = Callable[[Sequence[Candidate]], Weighing]
"""What the policy would make of these candidates, at least one, for people: the draws are chances there."""
