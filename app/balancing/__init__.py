"""Policies: pure choices between candidates, the Python twins of `lua/policies/`.

A worker uses a twin while Redis is away; a property test holds each twin to its Lua file. Nothing
here may import redis or asyncio.
"""

from __future__ import annotations

from app.balancing import min_expected_latency, min_observed_latency, random
from app.balancing.candidate import Candidate, Policy, Weigh, Weighing
from app.balancing.encoders import ENCODER_POLICIES, Encoder, weigh_encoders

POLICIES: dict[str, Policy] = {
    "min_expected_latency": min_expected_latency.choose,
    "random": random.choose,
    "min_observed_latency": min_observed_latency.choose,
}
WEIGHS: dict[str, Weigh] = {
    "min_expected_latency": min_expected_latency.weigh,
    "random": random.weigh,
    "min_observed_latency": min_observed_latency.weigh,
}
DECIDE_BY_LATENCY = frozenset({"min_observed_latency"})
"""Those to which a latency must be known at once; to the others it is a figure for people."""

__all__ = [
    "DECIDE_BY_LATENCY",
    "ENCODER_POLICIES",
    "POLICIES",
    "WEIGHS",
    "Candidate",
    "Encoder",
    "Policy",
    "Weigh",
    "Weighing",
    "weigh_encoders",
]
