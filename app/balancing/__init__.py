"""Policies: pure choices between candidates, the Python twins of `lua/policies/`.

A worker uses a twin while Redis is away; a property test holds each twin to its Lua file. Nothing
here may import redis or asyncio.
"""

from __future__ import annotations

from app.balancing import least_expected_delay, min_expected_latency, min_observed_latency, random
from app.balancing.candidate import Candidate, Policy, Weigh, Weighing
from app.balancing.encoders import ENCODER_POLICIES, Encoder, weigh_encoders

POLICIES: dict[str, Policy] = {
    "min_expected_latency": min_expected_latency.choose,
    "random": random.choose,
    "min_observed_latency": min_observed_latency.choose,
    "least_expected_delay": least_expected_delay.choose,
}
WEIGHS: dict[str, Weigh] = {
    "min_expected_latency": min_expected_latency.weigh,
    "random": random.weigh,
    "min_observed_latency": min_observed_latency.weigh,
    "least_expected_delay": least_expected_delay.weigh,
}
DECIDE_BY_LATENCY = frozenset({"min_observed_latency"})
"""Those to which a latency must be known at once; to the others it is a figure for people."""
DECIDE_BY_LEARNED = frozenset({"least_expected_delay"})
"""Those that go by learned speeds; for the others nothing is learned."""

__all__ = [
    "DECIDE_BY_LATENCY",
    "DECIDE_BY_LEARNED",
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
