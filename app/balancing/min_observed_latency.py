"""min_observed_latency: the node with the least mean of its last 15 latencies.

Source: lmdeploy/serve/proxy/proxy.py, `get_node_url`: the mean of the latency window, infinite
without history. Exploration is ours: LMDeploy's nodes without history starve.

Trade-offs: needs no speeds; but it looks backwards, ignores what is running, and keeps to one node
until that node's mean rises above another's frozen one. Requests of unlike length mislead it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.balancing.candidate import Candidate

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
