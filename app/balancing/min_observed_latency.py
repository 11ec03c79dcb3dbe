"""min_observed_latency: the node with the least mean of its last 15 latencies.

Source: lmdeploy/serve/proxy/proxy.py, `get_node_url`: the mean of the latency window, infinite
without history. Exploration is ours: LMDeploy's nodes without history starve.

Trade-offs: needs no speeds; but it looks backwards, ignores what is running, and keeps to one node
until that node's mean rises above another's frozen one. Requests of unlike length mislead it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.balancing.candidate import Candidate, Weighing

EXPLORE_RATIO = 0.1
"""Chance of trying a node again whose last exploration brought no latency: its share of the traffic
while it fails. One in ten finds a recovered node within about ten requests."""


def choose(candidates: Sequence[Candidate], draws: tuple[float, float]) -> tuple[int, bool]:
    """An idle node without history first (bounded), else the least mean; without any history the
    least unfinished / speed. Twin: lua/policies/min_observed_latency.lua."""
    fresh, best, idle = [], [], []
    least = load = math.inf
    for index, (speed, unfinished, mean_latency_s, explored, _) in enumerate(candidates):
        if mean_latency_s is not None:
            if mean_latency_s < least:
                least, best = mean_latency_s, [index]
            elif mean_latency_s == least:
                best.append(index)
            continue
        if unfinished == 0 and (explored == 0 or draws[1] < EXPLORE_RATIO):
            fresh.append(index)
        score = unfinished / speed
        if score < load:
            load, idle = score, [index]
        elif score == load:
            idle.append(index)
    for group, explores in ((fresh, True), (best, False), (idle, True)):
        if group:
            return group[int(draws[0] * len(group))], explores
    raise ValueError("a policy needs at least one candidate")


def weigh(candidates: Sequence[Candidate]) -> Weighing:
    indices = range(len(candidates))
    means = [candidate.mean_latency_s for candidate in candidates]
    least = min((mean for mean in means if mean is not None), default=None)
    unseen = [index for index in indices if means[index] is None]
    load = min((candidates[index].unfinished / candidates[index].speed for index in unseen), default=None)
    settled = (
        [index for index in indices if means[index] == least]
        if least is not None
        else [index for index in unseen if candidates[index].unfinished / candidates[index].speed == load]
    )
    again = [index for index in unseen if candidates[index].unfinished == 0]
    fresh = [index for index in again if candidates[index].explored == 0]
    chances = [0.0] * len(candidates)
    for group, chance in ((again or settled, EXPLORE_RATIO), (fresh or settled, 1 - EXPLORE_RATIO)):
        for index in group:
            chances[index] += chance / len(group)
    return Weighing(
        [*means],
        chances,
        "the node with the least mean of its last 15 latencies; an idle node without any is tried first, "
        f"and with a chance of {EXPLORE_RATIO:g} where that brought none; where no node has any, the least "
        "unfinished / speed; among equals by chance",
    )
