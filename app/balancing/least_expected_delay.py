"""least_expected_delay: the node where this request will be done first, by learned speeds.

The least (unfinished + 1) / speed. Source: shortest expected delay (Linux, net/netfilter/ipvs/ip_vs_sed.c, after
Weinrib and Shenker); its flaws where speeds are known: W. Whitt, "Deciding which queue to join" (1986). The speeds are
learned (`learning`); the operator's are where it starts from. What stands for a node that has shown nothing yet, and
the chances of exploring, are ours.

Trade-offs: needs no speeds, and follows an engine that becomes slower or faster within seconds of traffic. But it
takes every request for the same amount of work: weighing them by estimates measured worse (docs/balancing.md). A node
that has become faster while it was too slow to be chosen shows it only where it is explored, once in 200 requests while
it is idle. A newcomer gets few requests until its first answers have ended, which with answers of minutes is minutes.
In a fleet of equal nodes the first seconds cost about 2 % against join-the-shortest-queue, what it learns later 0.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.balancing.candidate import Candidate, Weighing

EXPLORE_NEW = 0.1
"""Chance that a request is given to an idle node without a learned speed: what a node can draw that never answers."""
EXPLORE_IDLE = 0.005
"""The same of any idle node: of eight times the fastest one's latency this costs 4 % on the mean where all else idles,
and nothing where all are busy."""
CAUTION = 0.9
"""How much less than the average a node without a learned speed counts among nodes that all have one."""


def choose(candidates: Sequence[Candidate], draws: tuple[float, float]) -> tuple[int, bool]:
    """An idle node by chance, within the bounds above, else the least (unfinished + 1) / speed; ties by the first draw.
    Twin: lua/policies/least_expected_delay.lua."""
    draw, chance = draws
    if chance < EXPLORE_NEW:
        anyone = chance < EXPLORE_IDLE
        idle = [
            index
            for index, candidate in enumerate(candidates)
            if candidate.unfinished == 0 and (anyone or not candidate.learned)
        ]
        if idle:
            return idle[int(draw * len(idle))], False
    scores = delays(candidates)
    least = min(scores)
    ties = [index for index, score in enumerate(scores) if score == least]
    return ties[int(draw * len(ties))], False


def delays(candidates: Sequence[Candidate]) -> list[float]:
    """Of each (unfinished + 1) / speed."""
    speeds = counted_speeds(candidates)
    return [
        (candidate.unfinished + 1) / speed if speed else math.inf
        for candidate, speed in zip(candidates, speeds, strict=True)
    ]


def weigh(candidates: Sequence[Candidate]) -> Weighing:
    scores = delays(candidates)
    least = min(scores)
    settled = [index for index, score in enumerate(scores) if score == least]
    idle = [index for index, candidate in enumerate(candidates) if candidate.unfinished == 0]
    fresh = [index for index in idle if not candidates[index].learned]
    chances = [0.0] * len(candidates)
    for group, chance in (
        (idle or settled, EXPLORE_IDLE),
        (fresh or settled, EXPLORE_NEW - EXPLORE_IDLE),
        (settled, 1 - EXPLORE_NEW),
    ):
        for index in group:
            chances[index] += chance / len(group)
    return Weighing(
        [*scores],
        chances,
        "the node with the least (unfinished + 1) / learned speed; an idle node that has shown none is tried with a "
        f"chance of {EXPLORE_NEW:g}, any idle node with {EXPLORE_IDLE:g}; among equals by chance",
    )


def counted_speeds(candidates: Sequence[Candidate]) -> list[float]:
    """Of each the learned speed; without one, the average of the others by the operator's speeds, with caution."""
    known, total = 0, 0.0
    for candidate in candidates:
        if candidate.learned:
            known += 1
            total += candidate.learned / candidate.speed
    unit = total / known * (1 - CAUTION * known / len(candidates)) if known else 1.0
    return [candidate.learned or unit * candidate.speed for candidate in candidates]
